//! Owns matching and inserting: the two walks from a root along the pages of a
//! token sequence. It does not own what happens to a page later.

use super::hash::{Namespace, check_tokens};
use super::node::{ABSENT, NodeId, Tier};
use super::tree::Tree;
use crate::error::{ErrorKind, PlanError, Result};

/// The longest prefix of whole pages that is held on the device or on the host.
///
/// Each tier holds whole prefixes, so `-1` stands only at the end of a list.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct PrefixMatch {
    /// Nodes from the first page on.
    pub nodes: Vec<NodeId>,
    /// Device page of each node, or -1.
    pub device_pages: Vec<i64>,
    /// Host page of each node, or -1.
    pub host_pages: Vec<i64>,
    /// Tokens of a page.
    pub page_size: u64,
    pub(super) index: u64,
}

impl PrefixMatch {
    /// Tokens that are held in either tier.
    pub fn tokens(&self) -> u64 {
        self.nodes.len() as u64 * self.page_size
    }

    /// Leading tokens that are on the device.
    pub fn device_tokens(&self) -> u64 {
        self.device_pages.partition_point(|page| *page >= 0) as u64 * self.page_size
    }

    /// Leading tokens that are on the host.
    pub fn host_tokens(&self) -> u64 {
        self.host_pages.partition_point(|page| *page >= 0) as u64 * self.page_size
    }

    pub(super) fn pages(&self, tier: Tier) -> &[i64] {
        match tier {
            Tier::Device => &self.device_pages,
            Tier::Host => &self.host_pages,
        }
    }
}

/// What became of inserted pages. Every page is in exactly one of three lists.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Inserted {
    /// Node of each page.
    pub nodes: Vec<NodeId>,
    /// Page that the index holds at each position.
    pub pages: Vec<i64>,
    /// Positions whose page the index took over; it holds them until they are evicted.
    pub taken: Vec<i64>,
    /// Given pages that hold what the index has in another page already: the caller releases them.
    pub duplicate: Vec<i64>,
    /// Given pages that are the index's own: nothing changes.
    pub shared: Vec<i64>,
}

impl Tree {
    /// Slots of the longest prefix of whole pages.
    fn walk(&self, tokens: &[i64], namespace: &Namespace) -> Vec<u32> {
        let mut slots = Vec::new();
        let Some(mut parent) = self.root(namespace) else { return slots };
        for page in tokens.chunks_exact(self.page_size) {
            let Some(slot) = self.child(parent, page) else { break };
            slots.push(slot);
            parent = slot;
        }
        slots
    }

    /// Refuses negative tokens behind the pages that a walk found: those equal tokens that were checked once.
    fn check_behind(&self, tokens: &[i64], known: &[u32]) -> Result<()> {
        check_tokens(&tokens[known.len() * self.page_size..]).or_else(|_| check_tokens(tokens))
    }

    /// Page of each slot in a tier, or -1.
    pub fn pages(&self, slots: &[u32], tier: Tier) -> Vec<i64> {
        let page = |slot: &u32| match self.node(*slot).page(tier) {
            ABSENT => -1,
            page => i64::from(page),
        };
        slots.iter().map(page).collect()
    }

    pub fn find(
        &mut self,
        tokens: &[i64],
        namespace: &Namespace,
        max_tokens: Option<u64>,
        index: u64,
    ) -> Result<PrefixMatch> {
        let limit = max_tokens.map_or(tokens.len(), |limit| limit.min(tokens.len() as u64) as usize);
        let slots = self.walk(&tokens[..limit], namespace);
        self.check_behind(tokens, &slots)?;
        let now = self.tick();
        slots.iter().for_each(|slot| self.touch(*slot, now));
        self.statistics.matches += 1;
        self.statistics.asked_tokens += limit as u64;
        self.statistics.matched_tokens += (slots.len() * self.page_size) as u64;
        Ok(PrefixMatch {
            nodes: slots.iter().map(|slot| self.id(*slot)).collect(),
            device_pages: self.pages(&slots, Tier::Device),
            host_pages: self.pages(&slots, Tier::Host),
            page_size: self.page_size as u64,
            index,
        })
    }

    pub fn insert(&mut self, tokens: &[i64], pages: &[i64], namespace: &Namespace, tier: Tier) -> Result<Inserted> {
        let known = self.walk(tokens, namespace);
        self.check_behind(tokens, &known)?;
        let argument = format!("{}_pages", tier.as_str());
        let whole = tokens.len() / self.page_size;
        if pages.len() != whole {
            return Err(PlanError::new(
                ErrorKind::UnequalPages,
                argument.as_str(),
                pages.len(),
                whole,
                "pages and tokens would be paired wrongly",
                "give one page for each whole page of tokens; keep a partial last page",
            ));
        }
        let pages = self.insertable(&argument, pages, &known, tier)?;
        let mut done = Inserted {
            nodes: Vec::with_capacity(whole),
            pages: Vec::with_capacity(whole),
            taken: Vec::new(),
            duplicate: Vec::new(),
            shared: Vec::new(),
        };
        if whole == 0 {
            return Ok(done);
        }
        let now = self.tick();
        let mut parent = self.root_or_new(namespace);
        let mut slots = Vec::with_capacity(whole);
        for (position, (given, text)) in pages.iter().zip(tokens.chunks_exact(self.page_size)).enumerate() {
            let slot = match known.get(position) {
                Some(slot) => *slot,
                None => self.new_child(parent, text),
            };
            self.touch(slot, now);
            self.count_use(slot);
            let own = match self.node(slot).page(tier) {
                ABSENT => {
                    done.taken.push(position as i64);
                    *given
                }
                own if own == *given => {
                    done.shared.push(i64::from(own));
                    own
                }
                own => {
                    done.duplicate.push(i64::from(*given));
                    own
                }
            };
            done.nodes.push(self.id(slot));
            done.pages.push(i64::from(own));
            slots.push(slot);
            parent = slot;
        }
        // From the last page on, so that no page is a leaf for as long as the next one takes.
        for position in done.taken.iter().rev().map(|position| *position as usize) {
            self.add_page(slots[position], tier, pages[position]);
        }
        self.statistics.inserted_pages += done.taken.len() as u64;
        self.statistics.duplicate_pages += done.duplicate.len() as u64;
        Ok(done)
    }

    /// Pages of an insert, checked before anything changes.
    fn insertable(&self, argument: &str, pages: &[i64], known: &[u32], tier: Tier) -> Result<Vec<u32>> {
        let books = &self.books[tier as usize];
        let mut usable = Vec::with_capacity(pages.len());
        for (position, page) in pages.iter().enumerate() {
            let number = books.usable(argument, position, *page)?;
            let owner = books.owner(number);
            if books.lingers(number) || owner.is_some() && owner != known.get(position).copied() {
                return Err(held(argument, position, *page, owner.map(|slot| self.id(slot))));
            }
            usable.push(number);
        }
        let mut sorted = usable.clone();
        sorted.sort_unstable();
        if let Some(twice) = sorted.windows(2).find(|pair| pair[0] == pair[1]) {
            let position = usable.iter().rposition(|page| *page == twice[0]).unwrap_or_default();
            let owner = books.owner(twice[0]);
            return Err(held(argument, position, pages[position], owner.map(|slot| self.id(slot))));
        }
        Ok(usable)
    }
}

pub(super) fn held(argument: &str, position: usize, page: i64, owner: Option<NodeId>) -> PlanError {
    let holder = owner.map_or("the same page earlier in the list, or dropped under a lock".to_owned(), |node| {
        format!("held by node {}", node.0)
    });
    PlanError::new(
        ErrorKind::PageAlreadyHeld,
        format!("{argument}[{position}]"),
        page,
        holder,
        "two prefixes would read one page, and it would be released twice",
        "give pages that the caller alone holds, or the very pages that a match returned, in their positions",
    )
}
