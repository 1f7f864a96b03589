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
