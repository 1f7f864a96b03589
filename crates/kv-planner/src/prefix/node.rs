//! Owns what a page node is: its names and pages. It does not own its tokens, nor
//! the links between nodes, which the tree keeps.

/// Where a page can be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Tier {
    /// Memory that attention reads.
    Device,
    /// Host memory.
    Host,
}

impl Tier {
    /// Both tiers.
    pub const ALL: [Tier; 2] = [Tier::Device, Tier::Host];

    /// Word for errors.
    pub fn as_str(self) -> &'static str {
        match self {
            Tier::Device => "device",
            Tier::Host => "host",
        }
    }

    /// The other tier.
    pub fn other(self) -> Tier {
        match self {
            Tier::Device => Tier::Host,
            Tier::Host => Tier::Device,
        }
    }
}

/// Name of a node; never given to another node, even when its place is reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NodeId(pub i64);

impl NodeId {
    pub(super) fn new(slot: u32, generation: u32) -> NodeId {
        NodeId((i64::from(generation) << 32) | i64::from(slot))
    }

    /// Slot and generation; `None` for a number that no node ever has.
    pub(super) fn parts(self) -> Option<(u32, u32)> {
        let number = u64::try_from(self.0).ok()?;
        Some(((number & 0xffff_ffff) as u32, (number >> 32) as u32))
    }
}

/// No page in the tier; page 0 is reserved, so no page is ever 0.
pub(super) const ABSENT: u32 = 0;
/// No node.
pub(super) const NONE: u32 = u32::MAX;

/// One page of tokens below its parent. A root has depth 0, no tokens and no
/// pages, and counts as present in every tier.
#[derive(Debug)]
pub(super) struct Node {
    pub generation: u32,
    pub parent: u32,
    /// Pages from the root, this one included.
    pub depth: u32,
    /// Order of creation: a parent's is smaller than its children's.
    pub serial: u64,
    /// Key of the page and all above it, and the next node with the same key.
    pub key: u64,
    pub twin: u32,
    pub pages: [u32; 2],
    /// The child that was matched or made last.
    pub recent: u32,
    /// Children in any tier.
    pub children: u32,
    /// Children present in each tier.
    pub present_children: [u32; 2],
    pub locks: u32,
    /// Sequences inserted through this node.
    pub uses: u64,
    pub last_used: u64,
}

impl Node {
    pub fn page(&self, tier: Tier) -> u32 {
        self.pages[tier as usize]
    }

    pub fn is_root(&self) -> bool {
        self.depth == 0
    }

    pub fn present(&self, tier: Tier) -> bool {
        self.is_root() || self.page(tier) != ABSENT
    }

    /// On the device, without a copy on the host.
    pub fn lacks_backup(&self) -> bool {
        self.page(Tier::Device) != ABSENT && self.page(Tier::Host) == ABSENT
    }

    /// Page and nobody below it in the tier, and nobody protects it.
    pub fn is_evictable_leaf(&self, tier: Tier) -> bool {
        self.page(tier) != ABSENT && self.present_children[tier as usize] == 0 && self.locks == 0
    }

    /// Order of eviction: least recently used, then the deeper one, so that a
    /// parent always comes after its children.
    pub fn age(&self, slot: u32) -> Age {
        (self.last_used, u32::MAX - self.depth, slot)
    }
}

/// See [`Node::age`].
pub(super) type Age = (u64, u32, u32);
