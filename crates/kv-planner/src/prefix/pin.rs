//! Owns locks: which nodes are protected, by whom, until when. It does not own
//! what a lock is for.

use std::collections::{BTreeSet, HashMap, HashSet};

use super::node::{NodeId, Tier};
use super::tree::Tree;
use super::walk::PrefixMatch;
use crate::error::{ErrorKind, PlanError, Result};

/// Name of a lock, unique in the process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct LockId {
    pub(super) index: u64,
    pub(super) number: u64,
}

impl LockId {
    /// Number within its index.
    pub fn number(self) -> u64 {
        self.number
    }
}

/// Locks that are held.
#[derive(Debug, Default)]
pub(super) struct Pins {
    held: HashMap<u64, Vec<u32>>,
    last: u64,
}

impl Pins {
    pub fn len(&self) -> usize {
        self.held.len()
    }

    /// Numbers of the locks over a node.
    pub fn over(&self, slot: u32) -> BTreeSet<u64> {
        self.held.iter().filter(|(_, slots)| slots.contains(&slot)).map(|(number, _)| *number).collect()
    }

    /// A node has left the index: no lock is over it any more.
    pub fn forget(&mut self, slot: u32) {
        self.held.values_mut().for_each(|slots| slots.retain(|held| *held != slot));
    }
}

impl Tree {
    /// Protects the nodes and all that is above them.
    pub fn lock(&mut self, nodes: &[NodeId], index: u64) -> Result<LockId> {
        let mut slots = Vec::with_capacity(nodes.len());
        let mut seen = HashSet::with_capacity(nodes.len());
        for slot in self.slots(nodes)?.into_iter().rev() {
            let mut next = slot;
            while !self.node(next).is_root() && seen.insert(next) {
                slots.push(next);
                next = self.node(next).parent;
            }
        }
        slots.iter().for_each(|slot| self.change(*slot, |node| node.locks += 1));
        self.pins.last += 1;
        self.pins.held.insert(self.pins.last, slots);
        Ok(LockId { index, number: self.pins.last })
    }

    /// Protects a match, if every page of it is still where the match saw it.
    pub fn lock_match(&mut self, found: &PrefixMatch, index: u64) -> Result<LockId> {
        if found.index != index {
            return Err(foreign("match", found.index, index));
        }
        let slots = self.slots(&found.nodes)?;
        for tier in Tier::ALL {
            for (position, (slot, page)) in slots.iter().zip(found.pages(tier)).enumerate() {
                let now = i64::from(self.node(*slot).page(tier));
                if *page >= 0 && *page != now {
                    return Err(PlanError::new(
                        ErrorKind::StaleNode,
                        format!("match.{}_pages[{position}]", tier.as_str()),
                        *page,
                        format!("{} page {now} of the node", tier.as_str()),
                        "the page left the tier after the match and may hold something else",
                        "match again, or match and lock in one call",
                    ));
                }
            }
        }
        self.lock(&found.nodes, index)
    }

    pub fn unlock(&mut self, lock: LockId, index: u64) -> Result<()> {
        if lock.index != index {
            return Err(foreign("lock", lock.index, index));
        }
        let slots = self.pins.held.remove(&lock.number).ok_or_else(|| {
            PlanError::new(
                ErrorKind::LockError,
                "lock",
                lock.number,
                "locks that are held",
                "releasing it twice would drop the protection of another request",
                "release each lock once",
            )
        })?;
        slots.iter().for_each(|slot| self.change(*slot, |node| node.locks -= 1));
        self.books.iter_mut().for_each(|books| books.unlocked(lock.number));
        Ok(())
    }
}

fn foreign(argument: &str, given: u64, own: u64) -> PlanError {
    PlanError::new(
        ErrorKind::LockError,
        argument,
        format!("of index {given}"),
        format!("index {own}"),
        "pages of an unlike index would be protected or released",
        "give what this index returned",
    )
}
