//! Owns every sum and product of addresses and byte counts: one checked function
//! for an address, one for a product. It does not own any address.

use crate::error::{ErrorKind, PlanError, Result};

/// Address of byte `offset` of item `index`: `base + index * stride + offset`.
#[inline]
pub(crate) fn at(base: u64, index: u64, stride: u64, offset: u64) -> Result<u64> {
    index
        .checked_mul(stride)
        .and_then(|bytes| bytes.checked_add(offset))
        .and_then(|bytes| bytes.checked_add(base))
        .ok_or_else(|| overflow(base, index, stride))
}

/// Addresses of one byte in every item of a buffer, checked up to the last item.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Lane {
    start: u64,
    stride: u64,
}

impl Lane {
    /// Checks `base + last * stride + offset`, the largest address of the lane.
    pub(crate) fn new(base: u64, stride: u64, offset: u64, last: u64) -> Result<Lane> {
        at(base, last, stride, offset)?;
        Ok(Lane { start: base + offset, stride })
    }

    /// The lane that begins at `start`, which is not above the checked one's.
    #[inline]
    pub(crate) fn moved(&self, start: u64) -> Lane {
        Lane { start, stride: self.stride }
    }

    /// Address in an item up to the last; smaller than the one that was checked.
    #[inline]
    pub(crate) fn get(&self, index: u64) -> u64 {
        self.start + index * self.stride
    }
}

/// Product of byte counts and multiplicities.
#[inline]
pub(crate) fn product(factors: &[u64]) -> Result<u64> {
    factors
        .iter()
        .try_fold(1u64, |total, factor| total.checked_mul(*factor))
        .ok_or_else(|| overflow(0, factors[0], factors.get(1).copied().unwrap_or(1)))
}

#[cold]
fn overflow(base: u64, index: u64, stride: u64) -> PlanError {
    PlanError::new(
        ErrorKind::AddressOverflow,
        format!("address {base:#x} + {index} * {stride}"),
        index,
        stride,
        "the sum leaves the 64-bit range and would wrap to another buffer",
        "check the item stride and the address that the manifest publishes",
    )
}
