//! Owns the counts of a tier and the order in which its pages leave. It does not
//! own the rule of what may leave, which is the node's.

use std::collections::{BTreeMap, BTreeSet};

use super::node::{ABSENT, Age, NONE, Node, Tier};
use crate::error::{ErrorKind, PlanError, Result};

/// Pages of one tier, as the index sees them.
///
/// Invariants: 1. evictable + protected = held; 2. held is at most the capacity.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TierCounts {
    /// Pages of the pool without the reserved page 0.
    pub capacity: u64,
    /// Pages that the index holds.
    pub held: u64,
    /// Held pages that `evict` can free now.
    pub evictable: u64,
    /// Held pages under a lock.
    pub protected: u64,
}

impl TierCounts {
    /// Checks the invariants.
    pub fn new(capacity: u64, held: u64, evictable: u64, protected: u64) -> Result<TierCounts> {
        let sum = evictable.checked_add(protected);
        if sum != Some(held) || held > capacity {
            return Err(PlanError::new(
                ErrorKind::AccountingError,
                "held, capacity",
                format!("{held}, {capacity}"),
                format!("{evictable} evictable + {protected} protected"),
                "a page would be lost or given out twice",
                "give counts of one moment; if the index itself reports this, report it with the calls before",
            ));
        }
        Ok(TierCounts { capacity, held, evictable, protected })
    }

    /// Pages that the index does not hold: free ones and those of running requests.
    pub fn outside(&self) -> u64 {
        self.capacity - self.held
    }
}

/// Counts of one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PrefixCounts {
    /// Device pages.
    pub device: TierCounts,
    /// Host pages.
    pub host: TierCounts,
    /// Page nodes.
    pub nodes: u64,
    /// Locks that are not released.
    pub locks: u64,
    /// Namespaces that have a page.
    pub namespaces: u64,
}

/// Books of one tier.
#[derive(Debug)]
pub(super) struct Books {
    pub tier: Tier,
    /// Pages of the pool, page 0 included.
    pub pages: u64,
    /// Node of each page; grows to the largest page seen.
    owners: Vec<u32>,
    /// Nodes that may leave next.
    pub leaves: BTreeSet<Age>,
    /// Pages that left their node under locks, and those of the locks that are still held.
    lingering: BTreeMap<u32, BTreeSet<u64>>,
    evictable: u64,
    protected: u64,
    held: u64,
}

impl Books {
    pub fn new(tier: Tier, pages: u64) -> Result<Books> {
        let argument = format!("{}_pages", tier.as_str());
        let refuse = |remote: &str, consequence: &str| {
            let remedy = "give the pages of the pool, the reserved page 0 included";
            Err(PlanError::new(ErrorKind::PageOutOfRange, argument.as_str(), pages, remote, consequence, remedy))
        };
        match pages {
            0 if tier == Tier::Device => refuse("1 or more", "the index could hold nothing"),
            _ if pages > 1 << 30 => refuse("2**30 at most", "pages are kept as 32-bit numbers"),
            _ => Ok(Books {
                tier,
                pages,
                owners: Vec::new(),
                leaves: BTreeSet::new(),
                lingering: BTreeMap::new(),
                evictable: 0,
                protected: 0,
                held: 0,
            }),
        }
    }

    pub fn owner(&self, page: u32) -> Option<u32> {
        self.owners.get(page as usize).copied().filter(|slot| *slot != NONE)
    }

    /// Nodes that have a page here.
    pub fn holders(&self) -> impl Iterator<Item = u32> + '_ {
        self.owners.iter().copied().filter(|slot| *slot != NONE)
    }

    /// Whether the page left its node under a lock and was not given back yet.
    pub fn lingers(&self, page: u32) -> bool {
        self.lingering.contains_key(&page)
    }

    /// Keeps a page without a node until its locks have ended and `leave` gives it back.
    pub fn linger(&mut self, page: u32, locks: BTreeSet<u64>) {
        self.lingering.insert(page, locks);
    }

    /// A lock has ended.
    pub fn unlocked(&mut self, lock: u64) {
        self.lingering.values_mut().for_each(|locks| {
            locks.remove(&lock);
        });
    }

    /// Gives back up to `wanted` lingering pages whose locks have ended.
    pub fn leave(&mut self, wanted: u64) -> Vec<i64> {
        let ended = self.lingering.iter().filter(|(_, locks)| locks.is_empty()).map(|(page, _)| *page);
        let pages: Vec<u32> = ended.take(usize::try_from(wanted).unwrap_or(usize::MAX)).collect();
        pages.iter().for_each(|page| {
            self.lingering.remove(page);
        });
        pages.into_iter().map(i64::from).collect()
    }

    pub fn own(&mut self, page: u32, slot: u32) {
        let position = page as usize;
        if position >= self.owners.len() {
            self.owners.resize(position + 1, NONE);
        }
        self.owners[position] = slot;
        self.held += 1;
    }

    pub fn disown(&mut self, page: u32) {
        self.owners[page as usize] = NONE;
        self.held -= 1;
    }

    /// Writes a node's present state into the books.
    pub fn enter(&mut self, node: &Node, slot: u32) {
        if node.page(self.tier) == ABSENT {
            return;
        }
        *(if node.locks == 0 { &mut self.evictable } else { &mut self.protected }) += 1;
        if node.is_evictable_leaf(self.tier) {
            self.leaves.insert(node.age(slot));
        }
    }

    /// Takes a node's present state out of the books, before it changes.
    pub fn strike(&mut self, node: &Node, slot: u32) {
        if node.page(self.tier) == ABSENT {
            return;
        }
        *(if node.locks == 0 { &mut self.evictable } else { &mut self.protected }) -= 1;
        if node.is_evictable_leaf(self.tier) {
            self.leaves.remove(&node.age(slot));
        }
    }

    pub fn counts(&self) -> Result<TierCounts> {
        let ended = self.lingering.values().filter(|locks| locks.is_empty()).count() as u64;
        let locked = self.lingering.len() as u64 - ended;
        let (evictable, protected) = (self.evictable + ended, self.protected + locked);
        TierCounts::new(self.pages.saturating_sub(1), self.held + ended + locked, evictable, protected)
    }

    /// A page of the pool as the index keeps it.
    pub fn usable(&self, argument: &str, position: usize, page: i64) -> Result<u32> {
        let refuse = |kind, remote: String, consequence: &str, remedy: &str| {
            Err(PlanError::new(kind, format!("{argument}[{position}]"), page, remote, consequence, remedy))
        };
        match u64::try_from(page) {
            Ok(0) => refuse(
                ErrorKind::ReservedPage,
                format!("1..{}", self.pages),
                "page 0 is the padding page: padded rows write it and nobody may read it",
                "give pages that the allocator handed out, from 1",
            ),
            Ok(number) if number < self.pages => Ok(number as u32),
            _ => refuse(
                ErrorKind::PageOutOfRange,
                format!("1..{}", self.pages),
                "the page is not of the pool that this index was made for",
                "give pages of that pool, or make the index with its number of pages",
            ),
        }
    }
}
