//! Owns positions in a flat list of query tokens when rows have unequal counts. It does
//! not own rows of one width, which `select_index` counts.

use super::{length, refuse, same_rows, sum};
use crate::error::Result;

/// First token of every row, and the number of all: 0, c0, c0 + c1, …; `rows` + 1 long.
/// Rows beyond the given counts are empty.
pub fn token_offsets(counts: &[i64], rows: u64) -> Result<Vec<i64>> {
    let mut offsets = ends(counts, rows, 0)?;
    offsets.insert(0, 0);
    Ok(offsets)
}

/// End of every row's tokens, as attention over packed rows takes them. Padded rows have
/// `padded_width` tokens each, so that the last end is the number of token rows.
pub fn query_ends(counts: &[i64], rows: u64, padded_width: u64) -> Result<Vec<i64>> {
    ends(counts, rows, padded_width)
}

fn ends(counts: &[i64], rows: u64, padded_width: u64) -> Result<Vec<i64>> {
    let live = counts.len() as u64;
    if live > rows {
        return Err(refuse(
            "counts",
            live,
            rows,
            "live rows would be cut off",
            "give at least as many rows as there are requests",
        ));
    }
    let mut ends = Vec::new();
    let room = usize::try_from(rows).ok().and_then(|rows| rows.checked_add(1)).unwrap_or(usize::MAX);
    if ends.try_reserve_exact(room).is_err() {
        return Err(refuse("rows", rows, live, "there is no memory for so many rows", "give the rows of one bucket"));
    }
    let mut end = 0;
    for row in 0..rows as usize {
        let own = counts.get(row).map_or(Ok(padded_width), |count| length("counts", row, *count))?;
        end = sum("counts", row, &[end as u64, own])?;
        ends.push(end);
    }
    Ok(ends)
}

/// Index of the last accepted token of each row: the row's first token + front + drafts.
/// Padded rows, which have no token, point at the last token of the batch, or at 0.
pub fn last_accepted(num_correct_drafts: &[i64], counts: &[i64], rows: u64, front: u64) -> Result<Vec<i64>> {
    same_rows(("num_correct_drafts", num_correct_drafts.len()), ("counts", counts.len()))?;
    let offsets = token_offsets(counts, rows)?;
    let mut index = Vec::with_capacity(offsets.len());
    for (row, (drafts, count)) in num_correct_drafts.iter().zip(counts).enumerate() {
        let own = sum("num_correct_drafts", row, &[length("num_correct_drafts", row, *drafts)?, front])?;
        if own >= *count {
            return Err(refuse(
                format!("num_correct_drafts[{row}] + front"),
                own,
                count - 1,
                "the index would point into another request's row",
                "give accepted drafts without the bonus token, and counts that include the front",
            ));
        }
        index.push(offsets[row] + own);
    }
    let last = (offsets[offsets.len() - 1] - 1).max(0);
    index.resize(rows as usize, last);
    Ok(index)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    #[test]
    fn rows_of_unequal_counts_follow_each_other() {
        assert_eq!(token_offsets(&[4, 1, 4], 3).unwrap(), [0, 4, 5, 9]);
        assert_eq!(token_offsets(&[4], 3).unwrap(), [0, 4, 4, 4]);
        assert_eq!(token_offsets(&[], 0).unwrap(), [0]);
    }

    #[test]
    fn padded_rows_fill_the_bucket() {
        assert_eq!(query_ends(&[4, 4], 4, 4).unwrap(), [4, 8, 12, 16]);
        assert_eq!(query_ends(&[4, 1], 4, 0).unwrap(), [4, 5, 5, 5]);
        assert_eq!(query_ends(&[], 2, 3).unwrap(), [3, 6]);
        for (counts, rows, width) in
            [(&[1, 1][..], 1, 0), (&[-1], 1, 0), (&[i64::MAX, 1], 2, 0), (&[], u64::MAX, 0), (&[1], 2, u64::MAX)]
        {
            assert_eq!(query_ends(counts, rows, width).unwrap_err().kind, ErrorKind::LengthError);
        }
    }

    #[test]
    fn an_index_stays_in_its_row() {
        assert_eq!(last_accepted(&[3, 0, 1], &[4, 1, 4], 4, 0).unwrap(), [3, 4, 6, 8]);
        assert_eq!(last_accepted(&[1, 0], &[4, 3], 2, 2).unwrap(), [3, 6]);
        assert!(last_accepted(&[], &[], 0, 0).unwrap().is_empty());
        assert_eq!(last_accepted(&[], &[], 2, 0).unwrap(), [0, 0]);
        for (drafts, counts, front) in [(&[4][..], &[4][..], 0), (&[2], &[4], 2), (&[-1], &[4], 0), (&[0, 0], &[4], 0)]
        {
            assert_eq!(last_accepted(drafts, counts, 2, front).unwrap_err().kind, ErrorKind::LengthError);
        }
    }
}
