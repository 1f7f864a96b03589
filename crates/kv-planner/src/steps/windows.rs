//! Owns windows: the widened window of a draft-extend step, and the pages that a
//! sliding window keeps. It does not own what the front's tokens are.

use super::{length, refuse, same_rows, sum};
use crate::error::Result;

/// Lengths of a draft-extend step whose window has `front` context tokens before it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WidenedLengths {
    /// Tokens in the cache before the window.
    pub prefix: Vec<i64>,
    /// Tokens of the window.
    pub extend: Vec<i64>,
    /// Tokens in the cache after the step.
    pub after: Vec<i64>,
}

/// Lengths by row: `max(length - front, 0)`, `width + front`, `length + width`.
pub fn widened_lengths(seq_lens: &[i64], width: u64, front: u64) -> Result<WidenedLengths> {
    let mut widened = WidenedLengths { prefix: Vec::new(), extend: Vec::new(), after: Vec::new() };
    for (row, given) in seq_lens.iter().enumerate() {
        let own = length("seq_lens", row, *given)?;
        widened.prefix.push(own.saturating_sub(front) as i64);
        widened.extend.push(sum("width + front", row, &[width, front])?);
        widened.after.push(sum("seq_lens", row, &[own, width])?);
    }
    Ok(widened)
}

/// First position of each row's front that holds a real token: the front is filled from
/// its end, by at most the tokens that were kept and at most those there are.
pub fn first_valid(seq_lens: &[i64], kept: &[i64], front: u64) -> Result<Vec<i64>> {
    same_rows(("seq_lens", seq_lens.len()), ("kept", kept.len()))?;
    let position = |(row, (given, kept)): (usize, (&i64, &i64))| {
        let real = length("seq_lens", row, *given)?.min(length("kept", row, *kept)?);
        sum("front", row, &[front.saturating_sub(real)])
    };
    seq_lens.iter().zip(kept).enumerate().map(position).collect()
}

/// Pages of a sliding window: first trimmed to the prompt, then clipped to the window's
/// last pages. The other order would keep pages behind the prompt, which nobody filled.
pub fn window_pages(pages: &[i64], tokens: u64, page_size: u64, window: u64) -> Result<Vec<i64>> {
    let filled = super::page_count(tokens, page_size)?;
    let Some(trimmed) = usize::try_from(filled).ok().and_then(|filled| pages.get(..filled)) else {
        return Err(refuse(
            "pages",
            pages.len(),
            filled,
            "the prompt's last tokens would have no page",
            "give a page for every page_size tokens of the prompt",
        ));
    };
    let skip = trimmed.len().saturating_sub(usize::try_from(window).unwrap_or(usize::MAX));
    Ok(trimmed[skip..].to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    #[test]
    fn the_front_is_taken_from_the_prefix() {
        let widened = widened_lengths(&[10, 1, 0], 4, 2).unwrap();
        assert_eq!((widened.prefix, widened.extend, widened.after), (vec![8, 0, 0], vec![6; 3], vec![14, 5, 4]));
        assert_eq!(widened_lengths(&[i64::MAX], 1, 0).unwrap_err().kind, ErrorKind::LengthError);
        assert_eq!(widened_lengths(&[-1], 1, 0).unwrap_err().kind, ErrorKind::LengthError);
        assert_eq!(widened_lengths(&[1], u64::MAX, 1).unwrap_err().kind, ErrorKind::LengthError);
    }

    #[test]
    fn a_front_is_filled_from_its_end() {
        assert_eq!(first_valid(&[9, 9, 1, 0], &[3, 1, 3, 3], 3).unwrap(), [0, 2, 2, 3]);
        assert_eq!(first_valid(&[9], &[9], 3).unwrap(), [0]);
        assert_eq!(first_valid(&[9], &[], 3).unwrap_err().kind, ErrorKind::LengthError);
        assert_eq!(first_valid(&[9], &[-1], 3).unwrap_err().kind, ErrorKind::LengthError);
    }

    #[test]
    fn a_window_is_trimmed_before_it_is_clipped() {
        let pages = [100, 101, 102, 103];
        assert_eq!(window_pages(&pages, 129, 128, 2).unwrap(), [100, 101]);
        assert_eq!(window_pages(&pages, 385, 128, 2).unwrap(), [102, 103]);
        assert_eq!(window_pages(&pages, 384, 128, 9).unwrap(), [100, 101, 102]);
        assert!(window_pages(&pages, 0, 128, 2).unwrap().is_empty());
        assert!(window_pages(&pages, 129, 128, 0).unwrap().is_empty());
        assert_eq!(window_pages(&pages, 513, 128, 2).unwrap_err().kind, ErrorKind::LengthError);
        assert_eq!(window_pages(&pages, 1, 0, 2).unwrap_err().kind, ErrorKind::LengthError);
    }
}
