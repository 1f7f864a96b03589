//! Owns the record of finished copies between tiers, and what is to be copied
//! next. It does not own the copies.

use std::collections::HashSet;

use super::node::{ABSENT, NodeId, Tier};
use super::tree::Tree;
use super::walk::held;
use crate::error::{ErrorKind, PlanError, Result};

impl Tree {
    /// Records pages that nodes got in a tier: all of them, or none and an error.
    pub fn attach(&mut self, nodes: &[NodeId], pages: &[i64], tier: Tier) -> Result<()> {
        let argument = format!("{}_pages", tier.as_str());
        if nodes.len() != pages.len() {
            return Err(PlanError::new(
                ErrorKind::UnequalPages,
                format!("nodes and {argument}"),
                nodes.len(),
                pages.len(),
                "pages and nodes would be paired wrongly",
                "give one page for each node",
            ));
        }
        let slots = self.slots(nodes)?;
        let books = &self.books[tier as usize];
        let mut arriving = HashSet::with_capacity(slots.len());
        let mut seen = HashSet::with_capacity(slots.len());
        let mut usable = Vec::with_capacity(slots.len());
        for (position, (slot, page)) in slots.iter().zip(pages).enumerate() {
            let node = self.node(*slot);
            if node.page(tier) != ABSENT || arriving.contains(slot) {
                return Err(PlanError::new(
                    ErrorKind::TierConflict,
                    format!("nodes[{position}]"),
                    nodes[position].0,
                    format!("{} page {}", tier.as_str(), node.page(tier)),
                    "the node has a page in this tier, and one of the two would never be released",
                    "release the second copy; copy each node once at a time",
                ));
            }
            if !self.node(node.parent).present(tier) && !arriving.contains(&node.parent) {
                return Err(PlanError::new(
                    ErrorKind::TierOrder,
                    format!("nodes[{position}]"),
                    nodes[position].0,
                    format!("parent {} without a {} page", self.id(node.parent).0, tier.as_str()),
                    "the child would outlive its parent in this tier and never be matched",
                    "record parents first, as `pending_backup` and a match list them",
                ));
            }
            let number = books.usable(&argument, position, *page)?;
            let owner = books.owner(number);
            if owner.is_some() || books.lingers(number) || !seen.insert(number) {
                return Err(held(&argument, position, *page, owner.map(|slot| self.id(slot))));
            }
            arriving.insert(*slot);
            usable.push(number);
        }
        self.statistics.attached(tier, slots.len() as u64);
        slots.iter().zip(usable).for_each(|(slot, page)| self.add_page(*slot, tier, page));
        Ok(())
    }

    /// Nodes to copy to the host next: parents first, then older first.
    pub fn pending(&self, limit: usize, min_uses: u64, in_flight: &[NodeId]) -> Vec<NodeId> {
        let in_flight: HashSet<NodeId> = in_flight.iter().copied().collect();
        let wanted = self.unbacked.iter().map(|(_, slot)| *slot);
        let wanted = wanted.filter(|slot| self.node(*slot).uses >= min_uses).map(|slot| self.id(slot));
        wanted.filter(|id| !in_flight.contains(id)).take(limit).collect()
    }
}
