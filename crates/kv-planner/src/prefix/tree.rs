//! Owns the nodes, their links and the lookup by tokens. It does not own the
//! rules of inserting, evicting and locking, which are built from these steps.

use std::collections::hash_map::Entry;
use std::collections::{BTreeSet, HashMap};
use std::hash::{BuildHasher, BuildHasherDefault, Hasher, RandomState};

use super::account::Books;
use super::hash::{Namespace, usable_page_size};
use super::node::{ABSENT, NONE, Node, NodeId, Tier};
use super::statistics::PrefixStatistics;
use super::texts::Texts;
use crate::error::{ErrorKind, PlanError, Result};

/// The key is a hash already.
#[derive(Default)]
pub(super) struct Identity(u64);

impl Hasher for Identity {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.0 = self.0.rotate_left(8) ^ u64::from(*byte));
    }

    fn write_u64(&mut self, number: u64) {
        self.0 = number;
    }
}

/// Hash of a page and of the key above it: fast, seeded per index, and never trusted
/// without a comparison of the tokens.
pub(super) type PageKey = fn(seed: u64, above: u64, tokens: &[i64]) -> u64;

const ODD: u64 = 0x9e37_79b9_7f4a_7c15;
const SECOND: u64 = 0xd6e8_feb8_6659_fd93;

fn fold(a: u64, b: u64) -> u64 {
    let product = u128::from(a) * u128::from(b);
    (product as u64) ^ ((product >> 64) as u64)
}

/// Four lanes, so that four products are under way at once.
fn page_key(seed: u64, above: u64, tokens: &[i64]) -> u64 {
    let mix = |state: u64, first: i64, second: i64| {
        fold(state ^ (first as u64).rotate_left(32), (second as u64) ^ SECOND) ^ state.rotate_left(23)
    };
    let mut lanes = [seed, seed ^ ODD, seed ^ SECOND, seed.rotate_left(32)];
    let mut eights = tokens.chunks_exact(8);
    for eight in &mut eights {
        for (lane, state) in lanes.iter_mut().enumerate() {
            *state = mix(*state, eight[2 * lane], eight[2 * lane + 1]);
        }
    }
    for (position, token) in eights.remainder().iter().enumerate() {
        lanes[position % 4] = mix(lanes[position % 4], *token, 0);
    }
    let page = fold(lanes[0] ^ ODD, lanes[1] | 1) ^ fold(lanes[2] ^ SECOND, lanes[3] | 1);
    fold(page ^ above.rotate_left(17), (above ^ seed) | 1) ^ page.rotate_left(29)
}

/// Page nodes below one root a namespace.
///
/// Invariants: 1. a node is present in a tier or it is not in the tree; 2. a node
/// present in a tier has a parent present in that tier, so each tier holds whole
/// prefixes; 3. no page is held by two nodes; 4. a parent was used at least as
/// lately and as often as its children, and created before them.
pub(super) struct Tree {
    pub page_size: usize,
    pub books: [Books; 2],
    /// Nodes on the device without a host page, in order of creation; none where there is no host tier.
    pub unbacked: BTreeSet<(u64, u32)>,
    pub pins: super::pin::Pins,
    pub live: u64,
    pub statistics: PrefixStatistics,
    roots: HashMap<Namespace, u32>,
    root_names: HashMap<u32, Namespace>,
    nodes: Vec<Node>,
    texts: Texts,
    free: Vec<u32>,
    by_key: HashMap<u64, u32, BuildHasherDefault<Identity>>,
    key: PageKey,
    seed: u64,
    clock: u64,
    serials: u64,
}

impl Tree {
    pub fn new(page_size: u64, device_pages: u64, host_pages: u64) -> Result<Tree> {
        let page_size = usable_page_size(page_size)?;
        Ok(Tree {
            page_size,
            books: [Books::new(Tier::Device, device_pages)?, Books::new(Tier::Host, host_pages)?],
            unbacked: BTreeSet::new(),
            pins: super::pin::Pins::default(),
            live: 0,
            statistics: PrefixStatistics::default(),
            roots: HashMap::new(),
            root_names: HashMap::new(),
            nodes: Vec::new(),
            texts: Texts::new(page_size),
            free: Vec::new(),
            by_key: HashMap::default(),
            key: page_key,
            seed: RandomState::new().hash_one(0u64),
            clock: 0,
            serials: 0,
        })
    }

    #[cfg(test)]
    pub fn with_key(mut self, key: PageKey) -> Tree {
        self.key = key;
        self
    }

    pub fn node(&self, slot: u32) -> &Node {
        &self.nodes[slot as usize]
    }

    pub fn id(&self, slot: u32) -> NodeId {
        NodeId::new(slot, self.node(slot).generation)
    }

    pub fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    pub fn namespaces(&self) -> u64 {
        self.roots.len() as u64
    }

    /// The slot of a node that is still in the tree.
    pub fn slot(&self, id: NodeId) -> Result<u32> {
        let found = id.parts().filter(|(slot, generation)| {
            let node = self.nodes.get(*slot as usize);
            node.is_some_and(|node| node.generation == *generation && !node.is_root() && node.parent != NONE)
        });
        found.map(|(slot, _)| slot).ok_or_else(|| {
            PlanError::new(
                ErrorKind::StaleNode,
                "nodes",
                id.0,
                "a node of this index",
                "the node was evicted, or is of another index, and its pages may hold something else",
                "match again; lock what must stay",
            )
        })
    }

    pub fn slots(&self, ids: &[NodeId]) -> Result<Vec<u32>> {
        ids.iter().map(|id| self.slot(*id)).collect()
    }

    pub fn root(&self, namespace: &Namespace) -> Option<u32> {
        self.roots.get(namespace).copied()
    }

    /// Tokens from the root to the node, and the namespace.
    pub fn path(&self, slot: u32) -> (Vec<i64>, Namespace) {
        let mut slots = vec![slot];
        while !self.node(self.node(slots[slots.len() - 1]).parent).is_root() {
            slots.push(self.node(slots[slots.len() - 1]).parent);
        }
        let mut tokens = Vec::with_capacity(slots.len() * self.page_size);
        slots.iter().rev().for_each(|slot| self.texts.append_to(*slot, &mut tokens));
        let root = self.node(slots[slots.len() - 1]).parent;
        (tokens, self.root_names[&root].clone())
    }

    /// Key of a page below the page of key `above`.
    pub fn key(&self, above: u64, tokens: &[i64]) -> u64 {
        (self.key)(self.seed, above, tokens)
    }

    /// The node of a page below its parent. Most texts go on as they did the last time, so
    /// that child is compared first; the key finds the others.
    pub fn child(&self, parent: u32, tokens: &[i64]) -> Option<u32> {
        let above = self.node(parent);
        if above.recent != NONE && self.texts.equal(above.recent, tokens) {
            return Some(above.recent);
        }
        if above.children == u32::from(above.recent != NONE) {
            return None;
        }
        let mut next = self.by_key.get(&self.key(above.key, tokens)).copied();
        while let Some(slot) = next {
            let node = self.node(slot);
            if node.parent == parent && self.texts.equal(slot, tokens) {
                return Some(slot);
            }
            next = Some(node.twin).filter(|twin| *twin != NONE);
        }
        None
    }

    pub fn root_or_new(&mut self, namespace: &Namespace) -> u32 {
        if let Some(slot) = self.root(namespace) {
            return slot;
        }
        let key = fold(self.seed ^ SECOND, self.serials ^ ODD);
        let slot = self.place(NONE, 0, key, &[]);
        self.roots.insert(namespace.clone(), slot);
        self.root_names.insert(slot, namespace.clone());
        slot
    }

    /// A new node of a page that its parent does not have yet.
    pub fn new_child(&mut self, parent: u32, tokens: &[i64]) -> u32 {
        let key = self.key(self.node(parent).key, tokens);
        let slot = self.place(parent, self.node(parent).depth + 1, key, tokens);
        let twin = self.by_key.insert(key, slot).unwrap_or(NONE);
        self.nodes[slot as usize].twin = twin;
        self.nodes[parent as usize].children += 1;
        self.nodes[parent as usize].recent = slot;
        self.live += 1;
        slot
    }

    fn place(&mut self, parent: u32, depth: u32, key: u64, tokens: &[i64]) -> u32 {
        self.serials += 1;
        let mut node = Node {
            generation: 0,
            parent,
            depth,
            serial: self.serials,
            key,
            twin: NONE,
            recent: NONE,
            pages: [ABSENT; 2],
            children: 0,
            present_children: [0; 2],
            locks: 0,
            uses: 0,
            last_used: self.clock,
        };
        let slot = match self.free.pop() {
            Some(slot) => {
                node.generation = self.nodes[slot as usize].generation + 1;
                self.nodes[slot as usize] = node;
                slot
            }
            None => {
                self.nodes.push(node);
                (self.nodes.len() - 1) as u32
            }
        };
        self.texts.set(slot, tokens);
        slot
    }

    /// Changes a node and keeps every book right.
    pub fn change(&mut self, slot: u32, edit: impl FnOnce(&mut Node)) {
        let node = &mut self.nodes[slot as usize];
        let before = node.lacks_backup();
        self.books.iter_mut().for_each(|books| books.strike(node, slot));
        edit(node);
        self.books.iter_mut().for_each(|books| books.enter(node, slot));
        match (before, node.lacks_backup()) {
            _ if self.books[Tier::Host as usize].pages == 0 => false,
            (false, true) => self.unbacked.insert((node.serial, slot)),
            (true, false) => self.unbacked.remove(&(node.serial, slot)),
            _ => false,
        };
    }

    /// Notes a use; only a leaf has a place in the books that depends on it.
    pub fn touch(&mut self, slot: u32, now: u64) {
        let node = self.node(slot);
        if Tier::ALL.iter().any(|tier| node.is_evictable_leaf(*tier)) {
            self.change(slot, |node| node.last_used = now);
        } else {
            self.nodes[slot as usize].last_used = now;
        }
        let parent = self.node(slot).parent;
        self.nodes[parent as usize].recent = slot;
    }

    pub fn count_use(&mut self, slot: u32) {
        self.nodes[slot as usize].uses += 1;
    }

    pub fn add_page(&mut self, slot: u32, tier: Tier, page: u32) {
        self.books[tier as usize].own(page, slot);
        self.change(slot, |node| node.pages[tier as usize] = page);
        let parent = self.node(slot).parent;
        self.change(parent, |node| node.present_children[tier as usize] += 1);
    }

    /// Takes a page out of a tier; says whether the node stays in the tree.
    pub fn drop_page(&mut self, slot: u32, tier: Tier) -> (u32, bool) {
        let page = self.node(slot).page(tier);
        self.books[tier as usize].disown(page);
        self.change(slot, |node| node.pages[tier as usize] = ABSENT);
        let parent = self.node(slot).parent;
        self.change(parent, |node| node.present_children[tier as usize] -= 1);
        let stays = self.node(slot).pages != [ABSENT; 2];
        if !stays {
            self.remove(slot);
        }
        (page, stays)
    }

    fn remove(&mut self, slot: u32) {
        let (key, twin, parent) = (self.node(slot).key, self.node(slot).twin, self.node(slot).parent);
        if let Entry::Occupied(mut head) = self.by_key.entry(key) {
            if *head.get() != slot {
                let mut before = *head.get();
                while self.nodes[before as usize].twin != slot {
                    before = self.nodes[before as usize].twin;
                }
                self.nodes[before as usize].twin = twin;
            } else if twin == NONE {
                head.remove();
            } else {
                head.insert(twin);
            }
        }
        self.live -= 1;
        self.recycle(slot);
        let above = &mut self.nodes[parent as usize];
        above.children -= 1;
        if above.recent == slot {
            above.recent = NONE;
        }
        if self.node(parent).is_root() && self.node(parent).children == 0 {
            if let Some(namespace) = self.root_names.remove(&parent) {
                self.roots.remove(&namespace);
            }
            self.recycle(parent);
        }
    }

    /// Frees a slot, unless its generations are used up.
    fn recycle(&mut self, slot: u32) {
        let node = &mut self.nodes[slot as usize];
        node.parent = NONE;
        if node.generation < i32::MAX as u32 {
            self.free.push(slot);
        }
    }
}
