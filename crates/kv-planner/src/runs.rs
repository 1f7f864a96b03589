//! Owns page pairs of one request or chunk, coalesced to runs. It does not own
//! buffers: whether a page exists in one is the plan's check.

use std::sync::Arc;

use crate::error::{ErrorKind, PlanError, Result};
use crate::interleave::Context;
use crate::words::ItemKind;

/// Consecutive items on both sides.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Run {
    /// First source item.
    pub source: u64,
    /// First destination item.
    pub destination: u64,
    /// Number of items.
    pub count: u64,
}

/// Pairs of items in the order given, neighbours joined.
///
/// Invariants: 1. as many sources as destinations; 2. every item is 1 or more,
/// 0 being reserved; 3. no destination twice.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Runs {
    item_kind: ItemKind,
    runs: Arc<[Run]>,
    page_count: u64,
    last_items: Option<(u64, u64)>,
    context: Option<Context>,
}

impl Runs {
    /// Joins pairs of pages to runs.
    pub fn new(source: &[i64], destination: &[i64]) -> Result<Runs> {
        Runs::of_kind(source, destination, ItemKind::Page)
    }

    /// Joins pairs of items of any kind to runs. Inlined, so that a caller's target features reach its loops.
    #[inline(always)]
    pub fn of_kind(source: &[i64], destination: &[i64], item_kind: ItemKind) -> Result<Runs> {
        if source.len() != destination.len() {
            return Err(unequal(source.len(), destination.len()));
        }
        if let (Some(from), Some(to)) = (consecutive(source), consecutive(destination)) {
            let run = Run { source: from, destination: to, count: source.len() as u64 };
            let last_items = Some((from + run.count - 1, to + run.count - 1));
            return Ok(Runs { item_kind, runs: Arc::new([run]), page_count: run.count, last_items, context: None });
        }
        Runs::apart(source, destination, item_kind)
    }

    /// The same for pairs that are more than one run.
    fn apart(source: &[i64], destination: &[i64], item_kind: ItemKind) -> Result<Runs> {
        let mut runs: Vec<Run> = Vec::with_capacity(source.len());
        let mut ascending = true;
        for (position, (from, to)) in source.iter().zip(destination).enumerate() {
            let from = usable("source_pages", position, *from)?;
            let to = usable("destination_pages", position, *to)?;
            match runs.last_mut() {
                Some(run) if from == run.source + run.count && to == run.destination + run.count => run.count += 1,
                last => {
                    ascending &= last.is_none_or(|run| run.destination + run.count <= to);
                    runs.push(Run { source: from, destination: to, count: 1 });
                }
            }
        }
        if !ascending {
            refuse_duplicates(&runs, source.len() as u64)?;
        }
        Ok(Runs::joined(item_kind, runs, source.len() as u64))
    }

    /// The same pairs, for the share of one context-parallel rank.
    pub(crate) fn within(self, context: Context) -> Runs {
        Runs { context: Some(context), ..self }
    }

    /// The context-parallel rank whose share this is; `None` for a whole request.
    pub fn context(&self) -> Option<Context> {
        self.context
    }

    /// The runs, in the order of the pairs.
    pub fn runs(&self) -> &[Run] {
        &self.runs
    }

    /// What an item is.
    pub fn item_kind(&self) -> ItemKind {
        self.item_kind
    }

    /// Number of pairs.
    pub fn page_count(&self) -> u64 {
        self.page_count
    }

    /// Number of runs.
    pub fn run_count(&self) -> u64 {
        self.runs.len() as u64
    }

    /// Largest source and destination item; `None` without pairs.
    pub(crate) fn last_items(&self) -> Option<(u64, u64)> {
        self.last_items
    }

    fn joined(item_kind: ItemKind, runs: Vec<Run>, page_count: u64) -> Runs {
        let source = runs.iter().map(|run| run.source + run.count - 1).max();
        let destination = runs.iter().map(|run| run.destination + run.count - 1).max();
        Runs { item_kind, runs: runs.into(), page_count, last_items: source.zip(destination), context: None }
    }

    /// The pairs `start..stop`, counted in the order given.
    pub fn slice(&self, start: u64, stop: u64) -> Result<Runs> {
        if start > stop || stop > self.page_count {
            return Err(PlanError::new(
                ErrorKind::SliceError,
                "pages",
                format!("{start}..{stop}"),
                format!("0..{}", self.page_count),
                "the slice reaches beyond the pairs",
                "give positions within the pairs, start not after stop",
            ));
        }
        let mut kept = Vec::new();
        let mut passed = 0;
        for run in self.runs.iter() {
            let (first, last) = (start.max(passed), stop.min(passed + run.count));
            if first < last {
                let skip = first - passed;
                kept.push(Run { source: run.source + skip, destination: run.destination + skip, count: last - first });
            }
            passed += run.count;
        }
        Ok(Runs { context: self.context, ..Runs::joined(self.item_kind, kept, stop - start) })
    }
}

fn unequal(source: usize, destination: usize) -> PlanError {
    PlanError::new(
        ErrorKind::UnequalPages,
        "source_pages and destination_pages",
        source,
        destination,
        "the surplus would be dropped or sent to pages of another request",
        "give equally many; trim both to the same number of tokens",
    )
}

/// The first item of a list of consecutive usable ones.
#[inline(always)]
fn consecutive(items: &[i64]) -> Option<u64> {
    let first = *items.first().filter(|item| **item > 0)?;
    first.checked_add(items.len() as i64 - 1)?;
    // Without branches, so that several items are compared at once.
    let wanted = |position: usize| first.wrapping_add(position as i64);
    let apart = items.iter().enumerate().fold(0, |apart, (position, item)| apart | (item ^ wanted(position)));
    (apart == 0).then_some(first as u64)
}

/// A page as a number, 1 or more.
pub(crate) fn usable(argument: &str, position: usize, page: i64) -> Result<u64> {
    match u64::try_from(page) {
        Ok(0) => Err(PlanError::new(
            ErrorKind::ReservedPage,
            format!("{argument}[{position}]"),
            0u64,
            1u64,
            "page 0 is the padding page: padded rows write it and nobody may read it",
            "give pages that the allocator handed out, from 1",
        )),
        Ok(page) => Ok(page),
        Err(_) => Err(PlanError::new(
            ErrorKind::PageOutOfRange,
            format!("{argument}[{position}]"),
            page,
            1u64,
            "a negative page would address memory before the buffer",
            "remove unset pages before planning",
        )),
    }
}

fn refuse_duplicates(runs: &[Run], items: u64) -> Result<()> {
    let end = runs.iter().map(|run| run.destination + run.count).max().unwrap_or(0);
    let twice = if end / 64 <= items + 1024 { marked_twice(runs, end) } else { sorted_twice(runs) };
    match twice {
        None => Ok(()),
        Some(item) => Err(PlanError::new(
            ErrorKind::DuplicateDestination,
            "destination_pages",
            item,
            "each page once",
            "two source pages would be written over each other",
            "give each destination page once",
        )),
    }
}

/// A destination that stands twice, found with a bit an item; for items near 0.
fn marked_twice(runs: &[Run], end: u64) -> Option<u64> {
    let mut seen = vec![0u64; end as usize / 64 + 1];
    for run in runs {
        for item in run.destination..run.destination + run.count {
            let (word, bit) = (&mut seen[item as usize / 64], 1 << (item % 64));
            if *word & bit != 0 {
                return Some(item);
            }
            *word |= bit;
        }
    }
    None
}

/// The same by sorting, for items of any size.
fn sorted_twice(runs: &[Run]) -> Option<u64> {
    let mut order: Vec<(u64, u64)> = runs.iter().map(|run| (run.destination, run.destination + run.count)).collect();
    order.sort_unstable();
    order.windows(2).find(|pair| pair[1].0 < pair[0].1).map(|pair| pair[1].0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(source: u64, destination: u64, count: u64) -> Run {
        Run { source, destination, count }
    }

    #[test]
    fn neighbours_join_only_when_both_sides_step_by_one() {
        let runs = Runs::new(&[3, 4, 5, 9, 10], &[7, 8, 9, 10, 2]).unwrap();
        assert_eq!(runs.runs(), [run(3, 7, 3), run(9, 10, 1), run(10, 2, 1)]);
        assert_eq!((runs.page_count(), runs.run_count()), (5, 3));
    }

    #[test]
    fn refusals_are_named() {
        let kind = |source: &[i64], destination: &[i64]| Runs::new(source, destination).unwrap_err().kind;
        assert_eq!(kind(&[1], &[]), ErrorKind::UnequalPages);
        assert_eq!(kind(&[0], &[1]), ErrorKind::ReservedPage);
        assert_eq!(kind(&[1], &[0]), ErrorKind::ReservedPage);
        assert_eq!(kind(&[-1], &[1]), ErrorKind::PageOutOfRange);
        assert_eq!(kind(&[1, 2, 3], &[5, 6, 5]), ErrorKind::DuplicateDestination);
        assert_eq!(kind(&[1, 2, 9], &[5, 6, 6]), ErrorKind::DuplicateDestination);
        let far = i64::MAX - 9;
        assert_eq!(kind(&[1, 2, 3], &[far, 7, far]), ErrorKind::DuplicateDestination);
        assert_eq!(kind(&[i64::MAX, 2], &[i64::MAX, i64::MAX]), ErrorKind::DuplicateDestination);
        assert!(Runs::new(&[1, 2], &[far, 7]).is_ok());
    }

    #[test]
    fn nothing_is_a_plan_too() {
        let runs = Runs::new(&[], &[]).unwrap();
        assert_eq!((runs.page_count(), runs.run_count(), runs.last_items()), (0, 0, None));
    }

    #[test]
    fn slices_cut_inside_a_run() {
        let runs = Runs::new(&[3, 4, 5, 9], &[7, 8, 9, 1]).unwrap();
        assert_eq!(runs.slice(1, 4).unwrap().runs(), [run(4, 8, 2), run(9, 1, 1)]);
        assert_eq!(runs.slice(2, 2).unwrap().runs(), []);
        assert_eq!(runs.slice(3, 5).unwrap_err().kind, ErrorKind::SliceError);
    }
}
