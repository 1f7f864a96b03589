//! Owns the index of the last accepted token of each row of a draft-extend batch.
//! It does not own the buffers that the index points into.

use crate::address;
use crate::error::{ErrorKind, PlanError, Result};

/// `row * width + front + num_correct_drafts[row]` for `rows` rows; rows beyond
/// the given counts have no drafts. `width` includes `front`.
pub fn select_index(num_correct_drafts: &[i64], rows: u64, width: u64, front: u64) -> Result<Vec<i64>> {
    let fail = |subject: String, local: i128, remote: i128, consequence: &str, remedy: &str| {
        Err(PlanError::new(ErrorKind::LengthError, subject, local, remote, consequence, remedy))
    };
    let live = num_correct_drafts.len() as u64;
    if live > rows {
        return fail(
            "num_correct_drafts".into(),
            live.into(),
            rows.into(),
            "live rows would be cut off",
            "give at least as many rows as there are requests",
        );
    }
    if front >= width {
        return fail(
            "front".into(),
            front.into(),
            width.into(),
            "no token of the row would remain",
            "give the widened width, which includes the front",
        );
    }
    let last = address::product(&[rows, width])?;
    if i64::try_from(last).is_err() {
        return fail(
            "rows * width".into(),
            last.into(),
            i64::MAX.into(),
            "the index would not fit in int64",
            "give the rows of one bucket",
        );
    }
    let mut index = Vec::new();
    if index.try_reserve_exact(usize::try_from(rows).unwrap_or(usize::MAX)).is_err() {
        return fail(
            "rows".into(),
            rows.into(),
            live.into(),
            "there is no memory for so many rows",
            "give the rows of one bucket",
        );
    }
    for row in 0..rows {
        let drafts = num_correct_drafts.get(row as usize).copied().unwrap_or(0);
        match u64::try_from(drafts) {
            Ok(drafts) if drafts < width - front => index.push((row * width + front + drafts) as i64),
            _ => {
                return fail(
                    format!("num_correct_drafts[{row}]"),
                    drafts.into(),
                    (width - front - 1).into(),
                    "the index would point into another request's row",
                    "give accepted drafts without the bonus token, at most width - front - 1",
                );
            }
        }
    }
    Ok(index)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn padded_rows_count_no_draft() {
        assert_eq!(select_index(&[2, 0], 4, 4, 0).unwrap(), [2, 4, 8, 12]);
        assert_eq!(select_index(&[2, 0], 3, 6, 2).unwrap(), [4, 8, 14]);
        assert!(select_index(&[], 0, 4, 0).unwrap().is_empty());
    }

    #[test]
    fn impossible_counts_are_refused() {
        for (drafts, rows, width, front) in [(&[4][..], 1, 4, 0), (&[-1], 1, 4, 0), (&[0, 0], 1, 4, 0), (&[0], 1, 2, 2)]
        {
            assert_eq!(select_index(drafts, rows, width, front).unwrap_err().kind, ErrorKind::LengthError);
        }
    }
}
