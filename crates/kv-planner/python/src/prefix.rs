//! Owns the Python face of `PrefixIndex`. It does not own a rule; every call runs without the GIL over owned data.

use kv_planner::{Describe, EvictOptions, Namespace, NodeId, PrefixIndex, Tier};
use numpy::PyArray1;
use pyo3::prelude::*;

use crate::arrays::{array, count, count_or, indices, optional_count, over_indices};
use crate::errors::{detached, guarded};
use crate::prefix_hash::{Names, namespace as read_namespace};
use crate::prefix_results::{
    PyEviction, PyInsertResult, PyPrefixCounts, PyPrefixLock, PyPrefixMatch, PyPrefixStatistics,
};

type Pages = Py<PyArray1<i64>>;

fn nodes(name: &str, value: &Bound<'_, PyAny>) -> PyResult<Vec<NodeId>> {
    Ok(indices(name, value)?.into_iter().map(NodeId).collect())
}

/// Which whole pages of which token sequences are held, on the device and on the host. It owns no bytes.
///
/// Every method is atomic, done or refused as a whole, and may be called from any thread. A page that `insert` or `backed_up`
/// or `loaded` took over is the index's until `evict_device`, `evict_host`, `drop_host`, `unloaded` or `clear`
/// returns it.
///
/// Invariants: 1. each tier holds whole prefixes: a page is in a tier only with all pages before it; 2. no page is held by
/// two nodes; 3. evictable + protected = held, in each tier; 4. namespaces share nothing.
///
/// Args:
///     page_size: Tokens of a page.
///     device_pages: Pages of the device pool, the reserved page 0 included.
///     host_pages: Pages of the host pool, page 0 included; 0 is an index without a host tier.
///
/// Raises:
///     LengthError: An impossible page size.
///     PageOutOfRange: No device page, or more than 2**30.
#[pyclass(frozen, module = "kv_planner", name = "PrefixIndex")]
pub struct PyPrefixIndex(PrefixIndex);

impl PyPrefixIndex {
    fn insert_into(
        &self,
        py: Python<'_>,
        tier: Tier,
        tokens: &Bound<'_, PyAny>,
        pages: &Bound<'_, PyAny>,
        namespace: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<PyInsertResult> {
        let pages = indices(if tier == Tier::Device { "device_pages" } else { "host_pages" }, pages)?;
        let namespace = read_namespace(namespace)?;
        let work = |tokens: &[i64]| self.0.insert(tokens, &pages, &namespace, tier);
        let inserted = over_indices(py, "tokens", tokens, self.short() / 4, work)?;
        Ok(PyInsertResult { inserted, page_size: self.0.page_size() })
    }

    /// Matches of fewer tokens, and inserts of a quarter of them, are read in place: a page costs 0.2 µs,
    /// or four times as much. Not while another thread is in the index, which would make this one wait with the GIL.
    fn short(&self) -> usize {
        if self.0.is_busy() { 0 } else { 1 << 18 }
    }

    fn attach(&self, py: Python<'_>, tier: Tier, nodes: &Bound<'_, PyAny>, pages: &Bound<'_, PyAny>) -> PyResult<()> {
        let nodes = self::nodes("nodes", nodes)?;
        let pages = indices(if tier == Tier::Device { "device_pages" } else { "host_pages" }, pages)?;
        detached(py, || self.0.attach(&nodes, &pages, tier))
    }

    fn evict(
        &self,
        py: Python<'_>,
        tier: Tier,
        wanted: &Bound<'_, PyAny>,
        keep_unbacked: bool,
    ) -> PyResult<PyEviction> {
        let wanted = count("pages_wanted", wanted)?;
        Ok(PyEviction(detached(py, || Ok(self.0.evict(tier, wanted, EvictOptions { keep_unbacked })))?))
    }
}

#[pymethods]
impl PyPrefixIndex {
    #[new]
    #[pyo3(
        signature = (page_size, *, device_pages, host_pages=None),
        text_signature = "(page_size, *, device_pages, host_pages=0)"
    )]
    fn new(
        page_size: &Bound<'_, PyAny>,
        device_pages: &Bound<'_, PyAny>,
        host_pages: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let (page_size, device) = (count("page_size", page_size)?, count("device_pages", device_pages)?);
        let host = count_or("host_pages", host_pages, 0)?;
        Ok(PyPrefixIndex(guarded(|| PrefixIndex::new(page_size, device, host))?))
    }

    #[getter]
    fn page_size(&self) -> u64 {
        self.0.page_size()
    }

    #[getter]
    fn device_pages(&self) -> u64 {
        self.0.pages(Tier::Device)
    }

    #[getter]
    fn host_pages(&self) -> u64 {
        self.0.pages(Tier::Host)
    }

    /// Returns the longest prefix of whole pages that is held in either tier, and notes its use.
    ///
    /// Args:
    ///     tokens: Shape: [tokens]; dtype int32 or int64, or a list.
    ///     namespace: None, an extra key, or a pair (extra key, salt).
    ///     max_tokens: Look no further; a limit inside a page floors at the page's start.
    ///
    /// Raises:
    ///     TokenOutOfRange: A negative token.
    #[pyo3(name = "match", signature = (tokens, *, namespace=None, max_tokens=None))]
    fn find(
        &self,
        py: Python<'_>,
        tokens: &Bound<'_, PyAny>,
        namespace: Option<&Bound<'_, PyAny>>,
        max_tokens: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<PyPrefixMatch> {
        let (limit, namespace) = (optional_count("max_tokens", max_tokens)?, read_namespace(namespace)?);
        let work = |tokens: &[i64]| self.0.find(tokens, &namespace, limit);
        Ok(PyPrefixMatch(over_indices(py, "tokens", tokens, self.short(), work)?))
    }

    /// Matches and locks in one step, so that no other thread evicts in between.
    ///
    /// Args:
    ///     tokens: As in `match`.
    ///     namespace: As in `match`.
    ///     max_tokens: As in `match`.
    ///
    /// Raises:
    ///     TokenOutOfRange: A negative token.
    #[pyo3(signature = (tokens, *, namespace=None, max_tokens=None))]
    fn match_locked(
        &self,
        py: Python<'_>,
        tokens: &Bound<'_, PyAny>,
        namespace: Option<&Bound<'_, PyAny>>,
        max_tokens: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<(PyPrefixMatch, PyPrefixLock)> {
        let (limit, namespace) = (optional_count("max_tokens", max_tokens)?, read_namespace(namespace)?);
        let work = |tokens: &[i64]| self.0.find_locked(tokens, &namespace, limit);
        let (found, lock) = over_indices(py, "tokens", tokens, self.short(), work)?;
        Ok((PyPrefixMatch(found), PyPrefixLock(lock)))
    }

    /// Takes computed device pages over. Pages that the index has already are handed back as duplicates.
    ///
    /// Args:
    ///     tokens: Shape: [tokens]; dtype int32 or int64, or a list. A partial last page is left out.
    ///     device_pages: Shape: [tokens // page_size]; dtype int32 or int64. Pages that the caller alone holds, or the
    ///         index's own pages in their positions, as a match returned them.
    ///     namespace: None, an extra key, or a pair (extra key, salt).
    ///
    /// Raises:
    ///     UnequalPages: Not one page for each whole page of tokens.
    ///     PageAlreadyHeld: A page stands twice, or another node holds it.
    ///     ReservedPage: A page is 0.
    ///     PageOutOfRange: A page is not of the device pool.
    ///     TokenOutOfRange: A negative token.
    #[pyo3(signature = (tokens, device_pages, *, namespace=None))]
    fn insert(
        &self,
        py: Python<'_>,
        tokens: &Bound<'_, PyAny>,
        device_pages: &Bound<'_, PyAny>,
        namespace: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<PyInsertResult> {
        self.insert_into(py, Tier::Device, tokens, device_pages, namespace)
    }

    /// Takes host pages over that storage filled; the same rules as `insert`.
    ///
    /// Args:
    ///     tokens: Shape: [tokens]; dtype int32 or int64, or a list.
    ///     host_pages: Shape: [tokens // page_size]; dtype int32 or int64.
    ///     namespace: None, an extra key, or a pair (extra key, salt).
    ///
    /// Raises:
    ///     PlanError: As `insert`, for the host pool.
    #[pyo3(signature = (tokens, host_pages, *, namespace=None))]
    fn insert_host(
        &self,
        py: Python<'_>,
        tokens: &Bound<'_, PyAny>,
        host_pages: &Bound<'_, PyAny>,
        namespace: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<PyInsertResult> {
        self.insert_into(py, Tier::Host, tokens, host_pages, namespace)
    }

    /// Protects nodes and all that is above them, in both tiers, until `unlock`.
    ///
    /// Pages that a locked node gets later are protected too. Locks add up.
    ///
    /// Args:
    ///     held: A match of this index, or nodes. Shape: [nodes]; dtype int64.
    ///
    /// Raises:
    ///     StaleNode: A node or one of the match's pages is gone.
    ///     LockError: A match of another index.
    fn lock(&self, py: Python<'_>, held: &Bound<'_, PyAny>) -> PyResult<PyPrefixLock> {
        let lock = match held.cast::<PyPrefixMatch>() {
            Ok(found) => {
                let found = &found.get().0;
                detached(py, || self.0.lock_match(found))
            }
            Err(_) => {
                let nodes = nodes("held", held)?;
                detached(py, || self.0.lock_nodes(&nodes))
            }
        };
        Ok(PyPrefixLock(lock?))
    }

    /// Ends a protection.
    ///
    /// Raises:
    ///     LockError: The lock was released before, or is of another index.
    fn unlock(&self, py: Python<'_>, lock: PyRef<'_, PyPrefixLock>) -> PyResult<()> {
        let lock = lock.0;
        detached(py, || self.0.unlock(lock))
    }

    /// Frees device pages: least recently used first, children before parents, never locked ones.
    ///
    /// Pages that have a host copy stay matchable from the host; the others leave the index.
    ///
    /// Args:
    ///     pages_wanted: Free as many if that many are evictable; `shortfall` says how many were not.
    ///     keep_unbacked: Leave pages without a host copy and name their nodes in `needs_backup`, in as far as the order of
    ///         eviction needs them to reach the number wanted.
    #[pyo3(
        signature = (pages_wanted, *, keep_unbacked=false),
        text_signature = "($self, pages_wanted, *, keep_unbacked=False)"
    )]
    fn evict_device(
        &self,
        py: Python<'_>,
        pages_wanted: &Bound<'_, PyAny>,
        keep_unbacked: bool,
    ) -> PyResult<PyEviction> {
        self.evict(py, Tier::Device, pages_wanted, keep_unbacked)
    }

    /// Frees host pages in the same order; a node that is on the device stays and counts as not backed up.
    fn evict_host(&self, py: Python<'_>, pages_wanted: &Bound<'_, PyAny>) -> PyResult<PyEviction> {
        self.evict(py, Tier::Host, pages_wanted, false)
    }

    /// Takes the host copies of nodes and of all below them out of the index, because they are not what was written.
    ///
    /// No match finds them from now on, locked or not. Unlocked pages are the caller's at once; pages under a lock, which
    /// somebody may be reading, come back from the first `evict_host` after those locks have ended. A node that was on the
    /// host alone is gone; a lock over it stays valid. One that is on the device stays, and counts as not backed up.
    ///
    /// Args:
    ///     nodes: Shape: [nodes]; dtype int64. Those without a host page are passed over.
    ///
    /// Returns:
    ///     The pages that are free now, children first; `shortfall` is the number that a lock keeps.
    ///
    /// Raises:
    ///     StaleNode: A node is gone; nothing was changed.
    fn drop_host(&self, py: Python<'_>, nodes: &Bound<'_, PyAny>) -> PyResult<PyEviction> {
        let nodes = self::nodes("nodes", nodes)?;
        Ok(PyEviction(detached(py, || self.0.drop_host(&nodes))?))
    }

    /// Returns nodes on the device without a host copy: parents first, older first.
    ///
    /// Args:
    ///     limit: Nodes at most.
    ///     min_uses: Only nodes that as many inserts went through; 1 is write-through, 2 is write-through-selective.
    ///     in_flight: Nodes whose copy has begun; they are left out. Lock them until `backed_up`.
    ///
    /// Returns:
    ///     Shape: [nodes]; dtype int64; read-only. Each one's parent has a host copy, is in flight, or stands before it.
    #[pyo3(
        signature = (limit, *, min_uses=None, in_flight=None),
        text_signature = "($self, limit, *, min_uses=1, in_flight=())"
    )]
    fn pending_backup(
        &self,
        py: Python<'_>,
        limit: &Bound<'_, PyAny>,
        min_uses: Option<&Bound<'_, PyAny>>,
        in_flight: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Pages> {
        let (limit, min_uses) = (count("limit", limit)?, count_or("min_uses", min_uses, 1)?);
        let in_flight = in_flight.map_or(Ok(Vec::new()), |given| nodes("in_flight", given))?;
        let pending = detached(py, || Ok(self.0.pending_backup(limit, min_uses, &in_flight)))?;
        array(py, pending.into_iter().map(|node| node.0).collect())
    }

    /// Records finished backups: the nodes now have these host pages.
    ///
    /// Raises:
    ///     TierOrder: A parent has no host page and does not stand before its child.
    ///     TierConflict: A node has a host page already.
    ///     StaleNode: A node is gone; it was not locked during the copy.
    ///     PageAlreadyHeld: A page stands twice, or a node holds it.
    ///     UnequalPages: Not one page for each node.
    ///     ReservedPage: A page is 0.
    ///     PageOutOfRange: A page is not of the host pool.
    fn backed_up(&self, py: Python<'_>, nodes: &Bound<'_, PyAny>, host_pages: &Bound<'_, PyAny>) -> PyResult<()> {
        self.attach(py, Tier::Host, nodes, host_pages)
    }

    /// Records finished loads: the nodes now have these device pages.
    ///
    /// Raises:
    ///     PlanError: As `backed_up`, for the device pool.
    fn loaded(&self, py: Python<'_>, nodes: &Bound<'_, PyAny>, device_pages: &Bound<'_, PyAny>) -> PyResult<()> {
        self.attach(py, Tier::Device, nodes, device_pages)
    }

    /// Takes `loaded` back, because the load was given up: nodes that were on the host alone before are so again.
    ///
    /// Args:
    ///     nodes: Shape: [nodes]; dtype int64; each with a device page that nobody else reads.
    ///
    /// Returns:
    ///     Their device pages, the caller's again at once, locked or not. Shape: [nodes]; dtype int64; read-only.
    ///
    /// Raises:
    ///     TierOrder: A node that is not named has a device page below one that is: somebody has built on the load.
    ///     TierConflict: A node has no device page, or is named twice.
    ///     StaleNode: A node is gone.
    fn unloaded(&self, py: Python<'_>, nodes: &Bound<'_, PyAny>) -> PyResult<Pages> {
        let nodes = self::nodes("nodes", nodes)?;
        array(py, detached(py, || self.0.unload(&nodes))?)
    }

    /// Returns the tokens from the first page to the node's own, and the namespace, which is what its page hash covers.
    ///
    /// Raises:
    ///     StaleNode: The node is gone.
    fn path(&self, py: Python<'_>, node: &Bound<'_, PyAny>) -> PyResult<(Pages, Option<Names>)> {
        let node = NodeId(i64::try_from(count("node", node)?).unwrap_or(-1));
        let (tokens, space) = detached(py, || self.0.path(node))?;
        let names = (space != Namespace::default()).then_some((space.extra_key, space.cache_salt));
        Ok((array(py, tokens)?, names))
    }

    /// Returns the device page and the host page of nodes at this moment, -1 where they have none.
    ///
    /// Returns:
    ///     Two read-only arrays. Shape: [nodes]; dtype int64.
    ///
    /// Raises:
    ///     StaleNode: A node left the index.
    fn residency(&self, py: Python<'_>, nodes: &Bound<'_, PyAny>) -> PyResult<(Pages, Pages)> {
        let nodes = self::nodes("nodes", nodes)?;
        let (device, host) = detached(py, || self.0.residency(&nodes))?;
        Ok((array(py, device)?, array(py, host)?))
    }

    /// Returns totals since the index was made.
    fn statistics(&self, py: Python<'_>) -> PyResult<PyPrefixStatistics> {
        Ok(PyPrefixStatistics(detached(py, || Ok(self.0.statistics()))?))
    }

    /// Says in plain words what this is: page size, tiers, nodes, locks.
    fn describe(&self, py: Python<'_>) -> PyResult<String> {
        detached(py, || Ok(self.0.describe()))
    }

    /// Returns the counts of this moment, checked.
    fn counts(&self, py: Python<'_>) -> PyResult<PyPrefixCounts> {
        Ok(PyPrefixCounts(detached(py, || self.0.counts())?))
    }

    /// Empties the index.
    ///
    /// Returns:
    ///     The device pages and the host pages that it held, for the caller to release.
    ///
    /// Raises:
    ///     LockError: A lock is held.
    fn clear(&self, py: Python<'_>) -> PyResult<(Pages, Pages)> {
        let (device, host) = detached(py, || self.0.clear())?;
        Ok((array(py, device)?, array(py, host)?))
    }

    fn __repr__(&self) -> String {
        format!("{:?}", self.0)
    }
}
