//! Owns the withdrawal of host copies that are not what was written. It does not own
//! the proof of that, nor freeing, which the caller's allocator does.

use std::collections::{BTreeSet, HashSet};

use super::evict::Eviction;
use super::node::{ABSENT, NodeId, Tier};
use super::tree::Tree;
use crate::error::Result;

impl Tree {
    /// Takes the host copies of nodes and of all below them out of the index, locked or not.
    ///
    /// A page whose node is locked may be read at this moment: it lingers until those locks have
    /// ended, and is the first to leave then.
    pub fn drop_host(&mut self, nodes: &[NodeId]) -> Result<Eviction> {
        let mut leaving: HashSet<u32> =
            self.slots(nodes)?.into_iter().filter(|slot| self.node(*slot).page(Tier::Host) != ABSENT).collect();
        let mut done = Eviction::default();
        if leaving.is_empty() {
            return Ok(done);
        }
        let mut slots: Vec<u32> = self.books[Tier::Host as usize].holders().collect();
        slots.sort_unstable_by_key(|slot| (self.node(*slot).depth, self.node(*slot).serial));
        slots.retain(|slot| {
            leaving.contains(slot) || leaving.contains(&self.node(*slot).parent) && leaving.insert(*slot)
        });
        for slot in slots.into_iter().rev() {
            let id = self.id(slot);
            let locks: BTreeSet<u64> = match self.node(slot).locks {
                0 => BTreeSet::new(),
                _ => self.pins.over(slot),
            };
            let (page, stays) = self.drop_page(slot, Tier::Host);
            if stays { &mut done.kept } else { &mut done.removed }.push(id);
            if locks.is_empty() {
                done.pages.push(i64::from(page));
            } else {
                self.books[Tier::Host as usize].linger(page, locks);
                done.shortfall += 1;
            }
            if !stays {
                self.pins.forget(slot);
            }
        }
        self.statistics.evicted(Tier::Host, done.pages.len() as u64);
        Ok(done)
    }
}
