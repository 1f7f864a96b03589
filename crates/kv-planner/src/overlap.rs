//! Owns the test whether two strided buffers share a byte. It does not own what
//! to do about it: the manifest refuses.

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

#[cfg(test)]
mod tests {
    use super::*;

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
}
