//! Owns how heads are spread over tensor-parallel ranks and which replica sends
//! a head. It does not own manifests: it sees counts, ranks and ranges only.

use crate::error::{ErrorKind, PlanError, Result};

/// A half-open range of global head numbers.
pub type HeadRange = (u64, u64);

/// The customary head range of a rank: an equal share, or, with more ranks than
/// heads, groups of neighbouring ranks that hold the same head (`0,0,1,1`).
pub fn split_heads(total_heads: u64, tp_rank: u64, tp_size: u64) -> Result<HeadRange> {
    if tp_rank >= tp_size {
        return Err(PlanError::new(
            ErrorKind::PlacementError,
            "tp_rank",
            tp_rank,
            tp_size,
            "the rank lies outside the group",
            "give a rank below tp_size",
        ));
    }
    if total_heads > 0 && total_heads.is_multiple_of(tp_size) {
        let share = total_heads / tp_size;
        return Ok((tp_rank * share, (tp_rank + 1) * share));
    }
    if tp_size.is_multiple_of(total_heads) {
        let head = tp_rank / (tp_size / total_heads);
        return Ok((head, head + 1));
    }
    Err(PlanError::new(
        ErrorKind::HeadsDoNotSplit,
        "total_heads",
        total_heads,
        tp_size,
        "the heads neither divide over the ranks nor replicate evenly",
        "choose a tp_size that divides the number of heads or is a multiple of it",
    ))
}

/// Common part of two ranges; empty ranges have none.
pub(crate) fn intersect(a: HeadRange, b: HeadRange) -> Option<HeadRange> {
    let (start, stop) = (a.0.max(b.0), a.1.min(b.1));
    (start < stop).then_some((start, stop))
}

/// Tensor-parallel ranks that hold one head, ascending.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Owners {
    /// Ranks by name.
    Listed(Vec<u64>),
    /// Neighbours: first rank and number of ranks.
    Span(u64, u64),
}

impl Owners {
    fn len(&self) -> u64 {
        match self {
            Owners::Listed(ranks) => ranks.len() as u64,
            Owners::Span(_, count) => *count,
        }
    }

    fn position(&self, rank: u64) -> Option<u64> {
        match self {
            Owners::Listed(ranks) => ranks.iter().position(|own| *own == rank).map(|index| index as u64),
            Owners::Span(first, count) => rank.checked_sub(*first).filter(|index| index < count),
        }
    }
}

/// Ranks that hold the head of `own` when heads are spread in the customary way and
/// the rank's own range says so; otherwise the rank alone.
pub(crate) fn customary_owners(total: u64, tp_rank: u64, tp_size: u64, own: HeadRange) -> Owners {
    if tp_size <= total || split_heads(total, tp_rank, tp_size) != Ok(own) {
        return Owners::Span(tp_rank, 1);
    }
    let replicas = tp_size / total;
    Owners::Span(tp_rank / replicas * replicas, replicas)
}

/// Whether `from` is the rank that sends to `to`: replicas are dealt out in turn
/// over the receivers, so every receiver has one sender and surplus replicas idle.
pub(crate) fn sends(sources: &Owners, receivers: &Owners, from: u64, to: u64) -> bool {
    let turn = receivers.position(to).and_then(|turn| turn.checked_rem(sources.len()));
    turn.is_some() && sources.position(from) == turn
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_divide() {
        let ranges: Vec<_> = (0..4).map(|rank| split_heads(8, rank, 4).unwrap()).collect();
        assert_eq!(ranges, [(0, 2), (2, 4), (4, 6), (6, 8)]);
    }

    #[test]
    fn a_rank_behind_the_owners_is_none_of_them() {
        let positions = |owners: Owners| (3..7).map(|rank| owners.position(rank)).collect::<Vec<_>>();
        assert_eq!(positions(Owners::Span(4, 2)), [None, Some(0), Some(1), None]);
        assert_eq!(positions(Owners::Listed(vec![4, 6])), [None, Some(0), None, Some(1)]);
    }

    #[test]
    fn replicas_are_grouped_and_not_cycled() {
        let heads: Vec<_> = (0..4).map(|rank| split_heads(2, rank, 4).unwrap().0).collect();
        assert_eq!(heads, [0, 0, 1, 1]);
    }

    #[test]
    fn uneven_counts_are_refused() {
        assert_eq!(split_heads(3, 0, 2).unwrap_err().kind, ErrorKind::HeadsDoNotSplit);
        assert_eq!(split_heads(0, 0, 2).unwrap_err().kind, ErrorKind::HeadsDoNotSplit);
        assert_eq!(split_heads(2, 2, 2).unwrap_err().kind, ErrorKind::PlacementError);
    }

    #[test]
    fn replicas_take_turns() {
        let (two, four) = (Owners::Span(0, 2), Owners::Listed(vec![4, 5, 6, 7]));
        assert!(sends(&two, &four, 1, 7) && !sends(&two, &four, 0, 7));
        assert!(sends(&four, &two, 4, 0) && sends(&four, &two, 5, 1));
        assert!(!sends(&four, &two, 6, 0) && !sends(&four, &two, 6, 1), "a surplus replica idles");
        assert!(!sends(&Owners::Listed(vec![]), &two, 0, 0) && !sends(&two, &four, 0, 3));
    }

    #[test]
    fn owners_follow_the_placement_only_when_the_range_agrees() {
        assert_eq!(customary_owners(2, 3, 4, (1, 2)), Owners::Span(2, 2));
        assert_eq!(customary_owners(2, 3, 4, (0, 2)), Owners::Span(3, 1));
        assert_eq!(customary_owners(8, 1, 2, (4, 8)), Owners::Span(1, 1));
        assert_eq!(customary_owners(1, 5, u64::MAX, (0, 1)), Owners::Span(0, u64::MAX));
    }
}
