//! Owns the test whether two strided buffers, or any two of many, share a byte. It
//! does not own what to do about it: the manifest refuses.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

/// Items of a buffer as arithmetic: `count` items of `bytes`, `stride` apart.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Strided {
    pub(crate) address: u64,
    pub(crate) stride: u64,
    pub(crate) bytes: u64,
    pub(crate) count: u64,
}

impl Strided {
    /// One past the last byte; the caller has checked that it fits.
    fn end(&self) -> u128 {
        u128::from(self.address)
            + u128::from(self.stride) * u128::from(self.count.saturating_sub(1))
            + u128::from(self.bytes)
    }

    fn dense(&self) -> bool {
        self.stride == self.bytes || self.count == 1
    }
}

/// Whether an item of `a` and an item of `b` may share a byte. Exact when the
/// strides are equal or one buffer is dense; otherwise interleaving is refused.
pub(crate) fn share_bytes(a: &Strided, b: &Strided) -> bool {
    if a.count == 0 || b.count == 0 || a.bytes == 0 || b.bytes == 0 {
        return false;
    }
    let (low, high) = if a.address <= b.address { (a, b) } else { (b, a) };
    if low.end() <= u128::from(high.address) {
        return false;
    }
    if low.stride == high.stride && !(low.dense() && high.dense()) {
        let shift = (high.address - low.address) % low.stride;
        let full = shift >= low.bytes && u128::from(shift) + u128::from(high.bytes) <= u128::from(low.stride);
        return !full;
    }
    true
}

/// Positions of two buffers that [`share_bytes`], the lower address first, among
/// buffers sorted by address; some pair where one exists, in `O(n log n)`.
///
/// A sweep over the addresses keeps the buffers that are open where the next begins.
/// No two open ones share, so all have one stride, at most one is dense, and their
/// items lie apart on the circle of residues: four of them speak for all.
pub(crate) fn first_shared(sorted: &[Strided]) -> Option<(usize, usize)> {
    let mut open: BTreeMap<u64, usize> = BTreeMap::new();
    let mut ends: BinaryHeap<Reverse<(u128, usize)>> = BinaryHeap::new();
    let mut dense: Option<usize> = None;
    let residue = |buffer: &Strided| buffer.address % buffer.stride;
    for (position, buffer) in sorted.iter().enumerate() {
        if buffer.count == 0 || buffer.bytes == 0 {
            continue;
        }
        while let Some(Reverse((end, done))) = ends.peek().copied() {
            if end > u128::from(buffer.address) {
                break;
            }
            ends.pop();
            open.remove(&residue(&sorted[done]));
            dense = dense.filter(|other| *other != done);
        }
        let own = residue(buffer);
        let before = open.range(..=own).next_back().or_else(|| open.last_key_value());
        let after = open.range(own..).next().or_else(|| open.first_key_value());
        let rivals = [before, after].into_iter().flatten().map(|(_, other)| *other).chain(dense);
        if let Some(other) = rivals.into_iter().find(|other| share_bytes(&sorted[*other], buffer)) {
            return Some((other, position));
        }
        open.insert(own, position);
        ends.push(Reverse((buffer.end(), position)));
        dense = dense.or(buffer.dense().then_some(position));
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn strided(address: u64, stride: u64, bytes: u64, count: u64) -> Strided {
        Strided { address, stride, bytes, count }
    }

    #[test]
    fn neighbours_are_apart_and_one_byte_more_is_not() {
        assert!(!share_bytes(&strided(100, 8, 8, 4), &strided(132, 8, 8, 4)));
        assert!(share_bytes(&strided(100, 8, 8, 4), &strided(131, 8, 8, 4)));
    }

    #[test]
    fn interleaved_items_are_apart_when_they_fit_in_the_stride() {
        assert!(!share_bytes(&strided(100, 16, 8, 4), &strided(108, 16, 8, 4)));
        assert!(share_bytes(&strided(100, 16, 8, 4), &strided(107, 16, 8, 4)));
        assert!(share_bytes(&strided(100, 16, 8, 4), &strided(109, 16, 8, 4)));
    }

    fn any_buffer() -> impl Strategy<Value = Strided> {
        let stride = prop::sample::select(vec![4u64, 4, 4, 6, 16]);
        (1u64..60, stride, 0u64..5, 0u64..5).prop_map(|(address, stride, bytes, count)| {
            let bytes = if bytes == 4 { stride } else { bytes };
            strided(address, stride, bytes, count)
        })
    }

    fn any_pair(buffers: &[Strided]) -> bool {
        let later = |position: usize| buffers[position + 1..].iter();
        (0..buffers.len()).any(|low| later(low).any(|high| share_bytes(&buffers[low], high)))
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 4096, ..ProptestConfig::default() })]

        #[test]
        fn the_sweep_says_what_all_pairs_say(mut buffers in prop::collection::vec(any_buffer(), 0..7)) {
            buffers.sort_by_key(|buffer| buffer.address);
            let found = first_shared(&buffers);
            prop_assert_eq!(found.is_some(), any_pair(&buffers));
            if let Some((low, high)) = found {
                prop_assert!(low < high && share_bytes(&buffers[low], &buffers[high]));
            }
        }
    }

    #[test]
    fn many_interleaved_buffers_and_one_too_many() {
        let count = 50_000u64;
        let at = |position: u64| strided(4096 + position * 8, count * 8, 8, 3);
        let mut buffers: Vec<Strided> = (0..count).map(at).collect();
        assert_eq!(first_shared(&buffers), None);
        buffers.push(strided(4096 + count * 8 + 4, count * 8, 8, 3));
        assert_eq!(first_shared(&buffers), Some((0, count as usize)));
    }

    #[test]
    fn residues_are_free_again_behind_a_buffer_that_ended() {
        let buffers = [strided(100, 16, 8, 4), strided(108, 16, 8, 9), strided(164, 16, 8, 4)];
        assert_eq!(first_shared(&buffers), None);
    }
}
