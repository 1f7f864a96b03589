//! Owns what fits: tokens of a step, slots of a block table, drafts before the end of
//! a context. It does not own the buffers, whose makers and users both ask here.

use super::{length, refuse};
use crate::address;
use crate::error::Result;

/// Token rows of a step's buffers: the token budget, and for every request the drafts
/// beyond the one token that the budget counts for it.
pub fn token_capacity(budget: u64, requests: u64, speculative_tokens: u64) -> Result<u64> {
    let extra = address::product(&[speculative_tokens.saturating_sub(1), requests])?;
    address::at(budget, extra, 1, 0)
}

/// Token slots of the whole pages that the lengths need, each request by itself.
pub fn page_capacity(lengths: &[i64], page_size: u64) -> Result<u64> {
    let mut total = 0;
    for (row, given) in lengths.iter().enumerate() {
        let pages = super::page_count(length("lengths", row, *given)?, page_size)?;
        total = address::at(total, pages, page_size, 0)?;
    }
    Ok(total)
}

/// KV lengths cut to what a block table of `columns` pages addresses, and which of them
/// stood as given. A row that was cut has no slot for its last tokens.
pub fn addressable(kv_lens: &[i64], columns: u64, page_size: u64) -> Result<(Vec<i64>, Vec<bool>)> {
    if page_size == 0 {
        return Err(refuse("page_size", 0u64, 1u64, "no token fits on an empty page", "give the pool's page size"));
    }
    let most = address::product(&[columns, page_size])?;
    let mut cut = Vec::with_capacity(kv_lens.len());
    let mut whole = Vec::with_capacity(kv_lens.len());
    for (row, given) in kv_lens.iter().enumerate() {
        let own = length("kv_lens", row, *given)?;
        whole.push(own <= most);
        cut.push(if own <= most { *given } else { most as i64 });
    }
    Ok((cut, whole))
}

/// Whether `drafts` placeholders after `tokens` tokens stay within a context of `limit`.
pub fn placeholders_fit(tokens: u64, drafts: u64, limit: u64) -> bool {
    tokens.checked_add(drafts).is_some_and(|sum| sum <= limit)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    #[test]
    fn drafts_beyond_the_first_are_added_for_every_request() {
        assert_eq!(token_capacity(80, 12, 5).unwrap(), 128);
        assert_eq!(token_capacity(80, 12, 3).unwrap(), 104);
        assert_eq!([0, 1].map(|drafts| token_capacity(80, 12, drafts).unwrap()), [80, 80]);
        assert_eq!(token_capacity(1, u64::MAX, 3).unwrap_err().kind, ErrorKind::AddressOverflow);
    }

    #[test]
    fn every_request_fills_its_own_pages() {
        assert_eq!(page_capacity(&[1; 10], 64).unwrap(), 640);
        assert_eq!(page_capacity(&[0, 64, 65], 64).unwrap(), 192);
        assert_eq!(page_capacity(&[-1], 64).unwrap_err().kind, ErrorKind::LengthError);
    }

    #[test]
    fn lengths_end_with_the_table() {
        let cut = addressable(&[80_000, 80_001, 0], 625, 128).unwrap();
        assert_eq!(cut, (vec![80_000, 80_000, 0], vec![true, false, true]));
        assert_eq!(addressable(&[1], 0, 128).unwrap(), (vec![0], vec![false]));
        assert_eq!(addressable(&[], 1, 0).unwrap_err().kind, ErrorKind::LengthError);
        assert_eq!(addressable(&[-1], 1, 1).unwrap_err().kind, ErrorKind::LengthError);
    }

    #[test]
    fn placeholders_end_at_the_context() {
        assert!(!placeholders_fit(4094, 3, 4096) && placeholders_fit(4093, 3, 4096));
        assert!(!placeholders_fit(u64::MAX, 1, u64::MAX));
    }
}
