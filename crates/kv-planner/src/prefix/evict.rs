//! Owns eviction: which pages leave a tier, and what should be backed up before
//! more can leave. It does not own freeing, which the caller's allocator does.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::ops::Bound;

use super::node::{ABSENT, Age, NodeId, Tier};
use super::tree::Tree;

/// How to evict.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct EvictOptions {
    /// Leave device pages without a host copy and name them instead.
    pub keep_unbacked: bool,
}

/// What left a tier. Every freed page is the caller's again.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct Eviction {
    /// Freed pages, in order of eviction; those that `drop_host` left behind come first, and have no node.
    pub pages: Vec<i64>,
    /// Nodes that left the index with their page: no other tier has them.
    pub removed: Vec<NodeId>,
    /// Nodes that are still held in the other tier.
    pub kept: Vec<NodeId>,
    /// With `keep_unbacked`: nodes to back up before the rest can leave, parents first.
    pub needs_backup: Vec<NodeId>,
    /// Pages wanted and not freed; after `drop_host`, those that a lock keeps.
    pub shortfall: u64,
}

impl Tree {
    pub fn evict(&mut self, tier: Tier, wanted: u64, options: EvictOptions) -> Eviction {
        let mut done = Eviction::default();
        if options.keep_unbacked && tier == Tier::Device {
            self.evict_backed(wanted, &mut done);
        } else {
            done.pages = self.books[tier as usize].leave(wanted);
            while (done.pages.len() as u64) < wanted {
                let Some((_, _, slot)) = self.books[tier as usize].leaves.first().copied() else { break };
                self.evict_leaf(slot, tier, &mut done);
            }
        }
        done.shortfall = wanted - done.pages.len() as u64;
        self.statistics.evicted(tier, done.pages.len() as u64);
        done
    }

    fn evict_leaf(&mut self, slot: u32, tier: Tier, done: &mut Eviction) {
        let id = self.id(slot);
        let (page, stays) = self.drop_page(slot, tier);
        done.pages.push(i64::from(page));
        if stays { &mut done.kept } else { &mut done.removed }.push(id);
    }

    /// Walks in order of eviction. A leaf with a host copy leaves; one without is
    /// counted as if it left, which shows its parent, until enough would be free.
    fn evict_backed(&mut self, wanted: u64, done: &mut Eviction) {
        let mut passed: Option<Age> = None;
        let mut shown: BTreeSet<Age> = BTreeSet::new();
        let mut left_below: HashMap<u32, u32> = HashMap::new();
        let mut unbacked: Vec<u32> = Vec::new();
        let mut promised = 0;
        while done.pages.len() as u64 + promised < wanted {
            let after = passed.map_or(Bound::Unbounded, Bound::Excluded);
            let leaf = self.books[Tier::Device as usize].leaves.range((after, Bound::Unbounded)).next().copied();
            let virtual_leaf = shown.first().copied();
            let Some(age) = [leaf, virtual_leaf].into_iter().flatten().min() else { break };
            let slot = age.2;
            let parent = self.node(slot).parent;
            if virtual_leaf == Some(age) {
                shown.remove(&age);
            } else {
                passed = Some(age);
            }
            if leaf == Some(age) && self.node(slot).page(Tier::Host) != ABSENT {
                self.evict_leaf(slot, Tier::Device, done);
            } else {
                promised += 1;
                *left_below.entry(parent).or_default() += 1;
                if self.node(slot).page(Tier::Host) == ABSENT {
                    unbacked.push(slot);
                }
            }
            let above = self.node(parent);
            let left = left_below.get(&parent).copied().unwrap_or(0);
            let bare = left > 0 && above.present_children[Tier::Device as usize] == left;
            if bare && !above.is_root() && above.locks == 0 {
                shown.insert(above.age(parent));
            }
        }
        done.needs_backup = self.with_unbacked_parents(&unbacked);
    }

    /// Unbacked nodes and their unbacked parents, parents first.
    fn with_unbacked_parents(&self, slots: &[u32]) -> Vec<NodeId> {
        let mut all = BTreeSet::new();
        let mut seen = HashSet::new();
        for slot in slots {
            let mut next = *slot;
            while self.node(next).lacks_backup() && seen.insert(next) {
                all.insert((self.node(next).serial, next));
                next = self.node(next).parent;
            }
        }
        all.into_iter().map(|(_, slot)| self.id(slot)).collect()
    }
}
