//! Owns registered memory: spans rounded to an engine's alignment, joined where they
//! touch, cut to its largest region, and the check that blocks stay inside. It does
//! not own the act of registering.

use crate::error::{ErrorKind, PlanError, Result};

/// What an engine says about regions; `None` is no limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RegionLimits {
    /// Bytes to which starts and ends are rounded; a power of two.
    pub alignment: u64,
    /// Bytes of one region; a multiple of the alignment.
    pub max_bytes: Option<u64>,
    /// Regions of one side; more are refused.
    pub max_regions: Option<u64>,
}

/// Disjoint registered spans, ascending.
///
/// Invariants: 1. every start and end is aligned; 2. no two overlap, and two that touch
/// are pieces of one that was too long; 3. there are at most as many as the limit.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Regions {
    spans: Vec<(u64, u64)>,
    limits: RegionLimits,
}

fn refuse(subject: &str, local: u64, remote: u64, why: &str, remedy: &str) -> PlanError {
    PlanError::new(ErrorKind::ArgumentError, subject, local, remote, why, remedy)
}

impl Regions {
    /// Regions over buffers given as (address, bytes), all of one device; empty ones need none.
    pub fn new(buffers: &[(u64, u64)], limits: RegionLimits) -> Result<Regions> {
        let RegionLimits { alignment, max_bytes, max_regions } = limits;
        if !alignment.is_power_of_two() {
            return Err(refuse("alignment", alignment, 1, "ends could not be rounded", "give a power of two"));
        }
        if let Some(most) = max_bytes
            && (most == 0 || !most.is_multiple_of(alignment))
        {
            let remedy = "give a multiple of the alignment";
            return Err(refuse("max_bytes", most, alignment, "a cut region would not be aligned", remedy));
        }
        let mut rounded = Vec::with_capacity(buffers.len());
        for (address, nbytes) in buffers.iter().filter(|(_, nbytes)| *nbytes > 0) {
            let end = address.checked_add(*nbytes).and_then(|end| end.checked_next_multiple_of(alignment));
            let end = end.ok_or_else(|| {
                PlanError::new(
                    ErrorKind::AddressOverflow,
                    format!("buffer at {address:#x}"),
                    *nbytes,
                    alignment,
                    "its rounded end leaves the 64-bit range",
                    "check the buffer's address and length",
                )
            })?;
            rounded.push((address / alignment * alignment, end));
        }
        rounded.sort_unstable();
        let mut joined: Vec<(u64, u64)> = Vec::new();
        for (start, end) in rounded {
            match joined.last_mut() {
                Some(last) if start <= last.1 => last.1 = last.1.max(end),
                _ => joined.push((start, end)),
            }
        }
        let most = max_bytes.unwrap_or(u64::MAX);
        let count = joined.iter().map(|(start, end)| (end - start).div_ceil(most)).sum::<u64>();
        if let Some(limit) = max_regions
            && count > limit
        {
            return Err(PlanError::new(
                ErrorKind::RegionLimitExceeded,
                "regions",
                count,
                limit,
                "the engine would refuse some of them, after others were registered",
                "put buffers next to each other, or use fewer and larger ones",
            ));
        }
        let mut spans = Vec::new();
        for (start, end) in joined {
            let mut next = start;
            while next < end {
                let stop = end.min(next.saturating_add(most));
                spans.push((next, stop));
                next = stop;
            }
        }
        Ok(Regions { spans, limits })
    }

    /// Start and end of every region, ascending.
    pub fn spans(&self) -> &[(u64, u64)] {
        &self.spans
    }

    /// The limits that they keep.
    pub fn limits(&self) -> &RegionLimits {
        &self.limits
    }

    /// Registered bytes.
    pub fn nbytes(&self) -> u64 {
        self.spans.iter().map(|(start, end)| end - start).sum()
    }

    /// Bytes from `address` to the end of its region, or the refusal of memory that is
    /// not registered.
    pub(crate) fn left(&self, side: &str, address: u64) -> Result<u64> {
        let after = self.spans.partition_point(|(start, _)| *start <= address);
        let span = self.spans[..after].last().filter(|(_, end)| address < *end);
        span.map(|(_, end)| end - address).ok_or_else(|| {
            PlanError::new(
                ErrorKind::UnregisteredMemory,
                format!("{side} address"),
                format!("{address:#x}"),
                format!("{} regions", self.spans.len()),
                "the engine would refuse the block, or move foreign bytes",
                "register every buffer of the manifest before plans are lowered",
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn limits(max_bytes: Option<u64>, max_regions: Option<u64>) -> RegionLimits {
        RegionLimits { alignment: 2 * MIB, max_bytes, max_regions }
    }

    #[test]
    fn rounded_neighbours_are_one_region() {
        let buffers = [(5 * MIB, 10), (MIB, 10), (3 * MIB, 0), (2 * MIB, MIB), (9 * MIB, 3 * MIB)];
        let regions = Regions::new(&buffers, limits(None, Some(2))).unwrap();
        assert_eq!(regions.spans(), [(0, 6 * MIB), (8 * MIB, 12 * MIB)]);
        assert_eq!(regions.nbytes(), 10 * MIB);
        let error = Regions::new(&buffers, limits(None, Some(1))).unwrap_err();
        assert_eq!((error.kind, error.detail.local), (ErrorKind::RegionLimitExceeded, 2u64.into()));
    }

    #[test]
    fn long_regions_are_cut_and_their_pieces_touch() {
        let cut = Regions::new(&[(1, 5 * MIB)], limits(Some(4 * MIB), None)).unwrap();
        assert_eq!(cut.spans(), [(0, 4 * MIB), (4 * MIB, 6 * MIB)]);
        assert_eq!(cut.left("source", 4 * MIB - 1).unwrap(), 1);
        assert_eq!(cut.left("source", 4 * MIB).unwrap(), 2 * MIB);
        assert_eq!(cut.left("source", 6 * MIB).unwrap_err().kind, ErrorKind::UnregisteredMemory);
        assert!(Regions::new(&[], limits(None, None)).unwrap().spans().is_empty());
        let beyond = Regions::new(&[(u64::MAX - 5, 4)], limits(None, None));
        assert_eq!(beyond.unwrap_err().kind, ErrorKind::AddressOverflow);
    }

    #[test]
    fn impossible_limits_are_refused() {
        for (alignment, max_bytes) in [(0, None), (3, None), (4, Some(6)), (4, Some(0))] {
            let limits = RegionLimits { alignment, max_bytes, max_regions: None };
            assert_eq!(Regions::new(&[(4, 4)], limits).unwrap_err().kind, ErrorKind::ArgumentError);
        }
    }
}
