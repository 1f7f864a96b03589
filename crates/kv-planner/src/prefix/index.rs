//! Owns the public face of the prefix index and its lock. It does not own a rule:
//! those are the tree's, one file each.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};

use super::account::PrefixCounts;
use super::evict::{EvictOptions, Eviction};
use super::hash::Namespace;
use super::node::{NodeId, Tier};
use super::pin::LockId;
use super::statistics::PrefixStatistics;
use super::tree::Tree;
use super::walk::{Inserted, PrefixMatch};
use crate::error::{ErrorKind, PlanError, Result};

static INDICES: AtomicU64 = AtomicU64::new(1);

/// Whole pages of token sequences, in two tiers; every method is atomic and may
/// be called from any thread.
///
/// Each operation costs a step a page that it names; an evicted or touched leaf
/// costs a logarithm of the number of leaves besides.
pub struct PrefixIndex {
    serial: u64,
    page_size: u64,
    pages: [u64; 2],
    tree: Mutex<Tree>,
}

impl fmt::Debug for PrefixIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [device, host] = self.pages;
        write!(f, "PrefixIndex(page_size={}, device_pages={device}, host_pages={host})", self.page_size)
    }
}

impl PrefixIndex {
    /// An empty index over pools of `device_pages` and `host_pages` pages, the
    /// reserved page 0 included; `host_pages` 0 is an index without a host tier.
    pub fn new(page_size: u64, device_pages: u64, host_pages: u64) -> Result<PrefixIndex> {
        let tree = Mutex::new(Tree::new(page_size, device_pages, host_pages)?);
        let serial = INDICES.fetch_add(1, Ordering::Relaxed);
        Ok(PrefixIndex { serial, page_size, pages: [device_pages, host_pages], tree })
    }

    /// Every method checks before it changes anything, so a refusal never poisons
    /// the lock; `counts` tells whether a defect in between left the books uneven.
    fn tree(&self) -> MutexGuard<'_, Tree> {
        self.tree.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a call is under way in another thread, so that the next one waits.
    pub fn is_busy(&self) -> bool {
        matches!(self.tree.try_lock(), Err(TryLockError::WouldBlock))
    }

    /// Tokens of a page.
    pub fn page_size(&self) -> u64 {
        self.page_size
    }

    /// Pages of a tier's pool, page 0 included.
    pub fn pages(&self, tier: Tier) -> u64 {
        self.pages[tier as usize]
    }

    /// The longest prefix of whole pages within `max_tokens`; notes its use.
    pub fn find(&self, tokens: &[i64], namespace: &Namespace, max_tokens: Option<u64>) -> Result<PrefixMatch> {
        self.tree().find(tokens, namespace, max_tokens, self.serial)
    }

    /// Matches and locks in one step.
    pub fn find_locked(
        &self,
        tokens: &[i64],
        namespace: &Namespace,
        max_tokens: Option<u64>,
    ) -> Result<(PrefixMatch, LockId)> {
        let mut tree = self.tree();
        let found = tree.find(tokens, namespace, max_tokens, self.serial)?;
        let lock = tree.lock(&found.nodes, self.serial)?;
        Ok((found, lock))
    }

    /// Takes computed or fetched pages over, one for each whole page of tokens.
    pub fn insert(&self, tokens: &[i64], pages: &[i64], namespace: &Namespace, tier: Tier) -> Result<Inserted> {
        self.tree().insert(tokens, pages, namespace, tier)
    }

    /// Protects a match in both tiers.
    pub fn lock_match(&self, found: &PrefixMatch) -> Result<LockId> {
        self.tree().lock_match(found, self.serial)
    }

    /// Protects nodes and all that is above them in both tiers.
    pub fn lock_nodes(&self, nodes: &[NodeId]) -> Result<LockId> {
        self.tree().lock(nodes, self.serial)
    }

    /// Ends a protection.
    pub fn unlock(&self, lock: LockId) -> Result<()> {
        self.tree().unlock(lock, self.serial)
    }

    /// Frees up to `wanted` pages of a tier.
    pub fn evict(&self, tier: Tier, wanted: u64, options: EvictOptions) -> Eviction {
        self.tree().evict(tier, wanted, options)
    }

    /// Takes host copies of nodes, and of all below them, out of the index: they are not what was written.
    ///
    /// What the index gives back is not locked. Pages under a lock are found by nobody any more, and
    /// come back from the first eviction after their locks have ended. A node that was on the host
    /// alone is gone, and so are the locks over it; they are released as any other.
    pub fn drop_host(&self, nodes: &[NodeId]) -> Result<Eviction> {
        self.tree().drop_host(nodes)
    }

    /// Takes back what `attach` recorded in the device tier, because the copies were given up.
    ///
    /// The pages are the caller's at once, locked or not, in the order of the nodes. Refused as a whole
    /// where a node that is not named has a device page below one that is.
    pub fn unload(&self, nodes: &[NodeId]) -> Result<Vec<i64>> {
        self.tree().unload(nodes)
    }

    /// Records finished copies into a tier.
    pub fn attach(&self, nodes: &[NodeId], pages: &[i64], tier: Tier) -> Result<()> {
        self.tree().attach(nodes, pages, tier)
    }

    /// Nodes to copy to the host next, parents first; those in flight are left out.
    pub fn pending_backup(&self, limit: u64, min_uses: u64, in_flight: &[NodeId]) -> Vec<NodeId> {
        if self.pages[Tier::Host as usize] == 0 {
            return Vec::new();
        }
        self.tree().pending(usize::try_from(limit).unwrap_or(usize::MAX), min_uses, in_flight)
    }

    /// Tokens from the first page to the node's own, and the namespace.
    pub fn path(&self, node: NodeId) -> Result<(Vec<i64>, Namespace)> {
        let tree = self.tree();
        let slot = tree.slot(node)?;
        Ok(tree.path(slot))
    }

    /// Device and host page of each node at this moment, or -1.
    pub fn residency(&self, nodes: &[NodeId]) -> Result<(Vec<i64>, Vec<i64>)> {
        let tree = self.tree();
        let slots = tree.slots(nodes)?;
        Ok((tree.pages(&slots, Tier::Device), tree.pages(&slots, Tier::Host)))
    }

    /// Totals since the index was made.
    pub fn statistics(&self) -> PrefixStatistics {
        self.tree().statistics
    }

    /// Counts of this moment, checked.
    pub fn counts(&self) -> Result<PrefixCounts> {
        let tree = self.tree();
        Ok(PrefixCounts {
            device: tree.books[Tier::Device as usize].counts()?,
            host: tree.books[Tier::Host as usize].counts()?,
            nodes: tree.live,
            locks: tree.pins.len() as u64,
            namespaces: tree.namespaces(),
        })
    }

    /// Empties the index; the device and host pages that it held are the caller's again.
    pub fn clear(&self) -> Result<(Vec<i64>, Vec<i64>)> {
        let mut tree = self.tree();
        if tree.pins.len() > 0 {
            return Err(PlanError::new(
                ErrorKind::LockError,
                "clear",
                tree.pins.len(),
                "no lock held",
                "pages in use by a request or a copy would be given out again",
                "release every lock first",
            ));
        }
        let host = tree.evict(Tier::Host, u64::from(u32::MAX), EvictOptions::default());
        let device = tree.evict(Tier::Device, u64::from(u32::MAX), EvictOptions::default());
        Ok((device.pages, host.pages))
    }
}
