//! Owns page counts and KV lengths by speculative kind, as pure functions. It does
//! not own any array of the caller: inputs are never changed.

use super::{length, refuse, sum};
use crate::error::{ErrorKind, PlanError, Result, Value};

/// Who has counted the window of a verify step into the prefix lengths already.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SpeculativeKind {
    /// No window: lengths stand as they are.
    None,
    /// The window is still to be added.
    Eagle,
    /// The window is still to be added.
    Mtp,
    /// The published lengths include the block.
    DFlash,
    /// The published lengths include the block.
    DSpark,
}

impl SpeculativeKind {
    /// Every kind.
    pub const ALL: &'static [SpeculativeKind] = &[
        SpeculativeKind::None,
        SpeculativeKind::Eagle,
        SpeculativeKind::Mtp,
        SpeculativeKind::DFlash,
        SpeculativeKind::DSpark,
    ];

    /// The word as Python spells it.
    pub fn as_str(self) -> &'static str {
        match self {
            SpeculativeKind::None => "none",
            SpeculativeKind::Eagle => "eagle",
            SpeculativeKind::Mtp => "mtp",
            SpeculativeKind::DFlash => "dflash",
            SpeculativeKind::DSpark => "dspark",
        }
    }

    /// Reads a word.
    pub fn parse(text: &str) -> Result<Self> {
        SpeculativeKind::ALL.iter().copied().find(|kind| kind.as_str() == text).ok_or_else(|| {
            PlanError::new(
                ErrorKind::ArgumentError,
                "kind",
                text,
                "none | eagle | mtp | dflash | dspark",
                "it is unknown whether the lengths include the window",
                "use one of the listed words",
            )
        })
    }

    fn adds_window(self) -> bool {
        matches!(self, SpeculativeKind::Eagle | SpeculativeKind::Mtp)
    }

    fn includes_window(self) -> bool {
        matches!(self, SpeculativeKind::DFlash | SpeculativeKind::DSpark)
    }
}

/// KV lengths that attention reads in a verify step of `window` tokens. A live row
/// has at least one committed token, so 0 is a padded row and stays 0.
pub fn kv_lengths(kind: SpeculativeKind, prefix_lens: &[i64], window: u64) -> Result<Vec<i64>> {
    let added = i64::try_from(if kind.adds_window() { window } else { 0 }).unwrap_or(i64::MAX);
    let least = if kind.includes_window() { window } else { 0 };
    let sum = |(row, length): (usize, &i64)| {
        let fail = |against: Value, consequence: &str, remedy: &str| {
            let subject = format!("prefix_lens[{row}]");
            Err(PlanError::new(ErrorKind::LengthError, subject, *length, against, consequence, remedy))
        };
        match (length.checked_add(added), u64::try_from(*length)) {
            (Some(_), Ok(0)) => Ok(0),
            (Some(_), Ok(own)) if own < least => fail(
                least.into(),
                "lengths of this kind include the block, and this one is shorter than the block alone",
                "give the published lengths, 0 for padded rows",
            ),
            (Some(sum), Ok(_)) => Ok(sum),
            _ => fail(
                added.into(),
                "a length is negative or leaves int64",
                "give token counts of the prefixes, 0 for padded rows",
            ),
        }
    };
    prefix_lens.iter().enumerate().map(sum).collect()
}

/// KV lengths that attention reads in draft step `step`, counted from 0: the prefix and
/// one token a step. Padded rows stay 0. Each step has its own result; none adds to
/// the last one's.
pub fn draft_lengths(prefix_lens: &[i64], step: u64) -> Result<Vec<i64>> {
    let row = |(row, given): (usize, &i64)| match length("prefix_lens", row, *given)? {
        0 => Ok(0),
        own => sum("prefix_lens", row, &[own, step, 1]),
    };
    prefix_lens.iter().enumerate().map(row).collect()
}

/// KV lengths that a rank's own tokens see when the step's token rows are divided over
/// ranks: row `r` has the tokens `r * width..(r + 1) * width`, the rank those of `own`.
///
/// The last of a row's tokens that the rank has sees the row's length less the tokens
/// behind it. A row without tokens of the rank, and a padded row, has length 0.
pub fn local_lengths(kv_lens: &[i64], width: u64, own: (u64, u64)) -> Result<Vec<i64>> {
    if own.0 > own.1 || width == 0 {
        let (subject, local, remote) = if width == 0 { ("width", 0, 1) } else { ("own", own.0, own.1) };
        return Err(refuse(
            subject,
            local,
            remote,
            "the rank's rows are no range",
            "give start and stop in token rows",
        ));
    }
    let row = |(row, given): (usize, &i64)| {
        let start = crate::address::product(&[row as u64, width])?;
        let stop = crate::address::at(start, 1, width, 0)?;
        let last = stop.min(own.1);
        let all = length("kv_lens", row, *given)?;
        Ok(if start.max(own.0) < last { all.saturating_sub(stop - last) as i64 } else { 0 })
    };
    kv_lens.iter().enumerate().map(row).collect()
}

/// Pages that `tokens` tokens fill, the last one perhaps in part.
pub fn page_count(tokens: u64, page_size: u64) -> Result<u64> {
    if page_size == 0 {
        return Err(PlanError::new(
            ErrorKind::LengthError,
            "page_size",
            page_size,
            1u64,
            "no token fits on an empty page",
            "give the pool's page size",
        ));
    }
    Ok(tokens.div_ceil(page_size))
}

/// First global id of draft layers: after the model's layers, the same on every
/// stage, because a stage's own count would collide with real layers.
pub fn first_draft_id(total_layers: u64) -> u64 {
    total_layers
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_window_is_counted_once() {
        for kind in [SpeculativeKind::Eagle, SpeculativeKind::Mtp] {
            assert_eq!(kv_lengths(kind, &[100, 7], 16).unwrap(), [116, 23]);
        }
        for kind in [SpeculativeKind::DFlash, SpeculativeKind::DSpark, SpeculativeKind::None] {
            assert_eq!(kv_lengths(kind, &[116, 23], 16).unwrap(), [116, 23]);
        }
        assert_eq!(kv_lengths(SpeculativeKind::Mtp, &[i64::MAX], 1).unwrap_err().kind, ErrorKind::LengthError);
        assert_eq!(kv_lengths(SpeculativeKind::None, &[-1], 1).unwrap_err().kind, ErrorKind::LengthError);
    }

    #[test]
    fn a_padded_row_stays_empty() {
        for kind in SpeculativeKind::ALL {
            assert_eq!(kv_lengths(*kind, &[100, 0], 4).unwrap()[1], 0);
            assert_eq!(kv_lengths(*kind, &[0], u64::MAX).unwrap(), [0]);
        }
    }

    #[test]
    fn a_length_that_includes_the_block_is_not_below_it() {
        for kind in [SpeculativeKind::DFlash, SpeculativeKind::DSpark] {
            assert_eq!(kv_lengths(kind, &[16], 16).unwrap(), [16]);
            let error = kv_lengths(kind, &[16, 15], 16).unwrap_err();
            assert_eq!((error.kind, error.detail.subject.as_str()), (ErrorKind::LengthError, "prefix_lens[1]"));
            assert_eq!((error.detail.local, error.detail.remote), (15u64.into(), 16u64.into()));
        }
        assert_eq!(kv_lengths(SpeculativeKind::None, &[7], 16).unwrap(), [7]);
    }

    #[test]
    fn a_draft_step_counts_its_own_tokens() {
        let steps: Vec<Vec<i64>> = (0..3).map(|step| draft_lengths(&[100, 0, 7], step).unwrap()).collect();
        assert_eq!(steps, [[101, 0, 8], [102, 0, 9], [103, 0, 10]]);
        assert_eq!(draft_lengths(&[-1], 0).unwrap_err().kind, ErrorKind::LengthError);
        assert_eq!(draft_lengths(&[i64::MAX], 0).unwrap_err().kind, ErrorKind::LengthError);
        assert_eq!(draft_lengths(&[1], u64::MAX).unwrap_err().kind, ErrorKind::LengthError);
    }

    #[test]
    fn a_local_length_is_never_negative() {
        let lens: Vec<i64> = (0..20).map(|row| if row < 17 { 50 } else { 0 }).collect();
        let local = local_lengths(&lens, 4, (60, 70)).unwrap();
        assert_eq!(local[14..19], [0, 50, 50, 0, 0], "rows 15 and 16 are the rank's; row 17 is padded");
        assert_eq!(local_lengths(&[10; 18], 4, (60, 70)).unwrap()[17], 8);
        assert_eq!(local_lengths(&[1; 18], 4, (60, 70)).unwrap()[17], 0);
        assert_eq!(local_lengths(&[9, 9], 4, (2, 2)).unwrap(), [0, 0]);
        assert_eq!(local_lengths(&[9, 9], 4, (3, 5)).unwrap(), [9, 6]);
        for (lens, width, own) in [(&[-1][..], 4, (0, 4)), (&[1], 0, (0, 4)), (&[1], 4, (4, 3))] {
            assert_eq!(local_lengths(lens, width, own).unwrap_err().kind, ErrorKind::LengthError);
        }
    }

    #[test]
    fn pages_round_up() {
        let counts: Vec<u64> = [0, 1, 128, 129, 192, 193].iter().map(|n| page_count(*n, 64).unwrap()).collect();
        assert_eq!(counts, [0, 1, 2, 3, 3, 4]);
        assert_eq!(page_count(1, 0).unwrap_err().kind, ErrorKind::LengthError);
        assert_eq!(page_count(u64::MAX, 2).unwrap(), 1 << 63);
    }

    #[test]
    fn words_are_read_back() {
        for kind in SpeculativeKind::ALL {
            assert_eq!(SpeculativeKind::parse(kind.as_str()), Ok(*kind));
        }
        assert_eq!(SpeculativeKind::parse("DFLASH").unwrap_err().kind, ErrorKind::ArgumentError);
    }
}
