//! Owns the withdrawal of copies that hold something else: host copies that are not what was
//! written, device copies that never arrived. It does not own the proof of that, nor freeing.

use std::collections::{BTreeSet, HashMap, HashSet};

use super::evict::Eviction;
use super::node::{ABSENT, NodeId, Tier};
use super::tree::Tree;
use crate::error::{ErrorKind, PlanError, Result};

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

    /// Takes device pages back that `attach` gave to nodes; whoever fills them says that they will not be filled.
    pub fn unload(&mut self, nodes: &[NodeId]) -> Result<Vec<i64>> {
        let slots = self.slots(nodes)?;
        let refuse = |kind, position: usize, remote: String, consequence, remedy| {
            Err(PlanError::new(kind, format!("nodes[{position}]"), nodes[position].0, remote, consequence, remedy))
        };
        let mut seen = HashSet::with_capacity(slots.len());
        let mut below: HashMap<u32, u32> = HashMap::new();
        for (position, slot) in slots.iter().enumerate() {
            if self.node(*slot).page(Tier::Device) == ABSENT || !seen.insert(*slot) {
                return refuse(
                    ErrorKind::TierConflict,
                    position,
                    "a node with a device page, named once".to_owned(),
                    "a page would be released twice",
                    "name what `loaded` recorded, once",
                );
            }
            *below.entry(self.node(*slot).parent).or_default() += 1;
        }
        for (position, slot) in slots.iter().enumerate() {
            let (held, mine) = (self.node(*slot).present_children[Tier::Device as usize], below.get(slot).copied());
            if held != mine.unwrap_or(0) {
                return refuse(
                    ErrorKind::TierOrder,
                    position,
                    format!("{held} children with device pages"),
                    "they would outlive their parent in this tier and never be matched",
                    "let the load end: somebody has built on it",
                );
            }
        }
        let mut order: Vec<usize> = (0..slots.len()).collect();
        order.sort_unstable_by_key(|position| u32::MAX - self.node(slots[*position]).depth);
        let mut pages = vec![0; slots.len()];
        for position in order {
            let (page, stays) = self.drop_page(slots[position], Tier::Device);
            pages[position] = i64::from(page);
            if !stays {
                self.pins.forget(slots[position]);
            }
        }
        self.statistics.loaded_pages -= (pages.len() as u64).min(self.statistics.loaded_pages);
        Ok(pages)
    }
}
