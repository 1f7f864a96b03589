//! Owns the arithmetic of a decode, verify or draft step: its arena, lengths, indices,
//! windows, capacities and moves, as pure functions. It does not own any array of the
//! caller: inputs are never changed.

mod capacity;
mod lengths;
mod moves;
mod queries;
mod rows;
mod select;
mod windows;

pub use capacity::{addressable, page_capacity, placeholders_fit, token_capacity};
pub use lengths::{SpeculativeKind, draft_lengths, first_draft_id, kv_lengths, local_lengths, page_count};
pub use moves::{Moves, accepted_moves};
pub use queries::{last_accepted, query_ends, token_offsets};
pub use rows::{Fill, RowField, RowLayout};
pub use select::select_index;
pub use windows::{WidenedLengths, first_valid, widened_lengths, window_pages};

use crate::error::{ErrorKind, PlanError, Result, Value};

fn refuse(
    subject: impl Into<String>,
    local: impl Into<Value>,
    remote: impl Into<Value>,
    why: &str,
    remedy: &str,
) -> PlanError {
    PlanError::new(ErrorKind::LengthError, subject, local, remote, why, remedy)
}

/// A length of a row as a number, 0 or more.
fn length(argument: &str, row: usize, given: i64) -> Result<u64> {
    u64::try_from(given).map_err(|_| {
        refuse(
            format!("{argument}[{row}]"),
            given,
            0u64,
            "a length is negative",
            "give token counts, 0 for padded rows",
        )
    })
}

/// A sum of lengths that stays within int64.
fn sum(argument: &str, row: usize, parts: &[u64]) -> Result<i64> {
    let total = parts.iter().try_fold(0u64, |total, part| total.checked_add(*part));
    total.and_then(|total| i64::try_from(total).ok()).ok_or_else(|| {
        let given = parts.iter().map(u64::to_string).collect::<Vec<_>>().join(" + ");
        refuse(format!("{argument}[{row}]"), given, i64::MAX, "the sum leaves int64", "give lengths of one batch")
    })
}

/// Refuses two columns of unlike lengths.
fn same_rows(first: (&str, usize), second: (&str, usize)) -> Result<()> {
    if first.1 == second.1 {
        return Ok(());
    }
    let subject = format!("{} and {}", first.0, second.0);
    Err(refuse(subject, first.1, second.1, "rows would be paired wrongly", "give one value for each row in both"))
}
