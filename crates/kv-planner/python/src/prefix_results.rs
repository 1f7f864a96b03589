//! Owns the Python faces of what the prefix index returns. It does not own the
//! index.

use kv_planner::{
    Describe, Eviction, Inserted, LockId, NodeId, PrefixCounts, PrefixMatch, PrefixStatistics, TierCounts,
};
use numpy::PyArray1;
use pyo3::prelude::*;

use crate::arrays::{array, count};
use crate::errors::guarded;

type Pages = Py<PyArray1<i64>>;

fn ids(py: Python<'_>, nodes: &[NodeId]) -> PyResult<Pages> {
    array(py, nodes.iter().map(|node| node.0).collect())
}

fn copy(py: Python<'_>, pages: &[i64]) -> PyResult<Pages> {
    array(py, pages.to_vec())
}

/// The longest prefix of whole pages that an index holds. Arrays are read-only int64, one element a page.
///
/// Each tier holds whole prefixes: -1 stands only at the end of a list. Without a lock it may be out of date at once.
#[pyclass(frozen, eq, hash, module = "kv_planner", name = "PrefixMatch")]
#[derive(PartialEq, Eq, Hash)]
pub struct PyPrefixMatch(pub PrefixMatch);

#[pymethods]
impl PyPrefixMatch {
    /// Tokens held in either tier; a multiple of the page size.
    #[getter]
    fn tokens(&self) -> u64 {
        self.0.tokens()
    }

    /// Leading tokens on the device.
    #[getter]
    fn device_tokens(&self) -> u64 {
        self.0.device_tokens()
    }

    /// Leading tokens on the host.
    #[getter]
    fn host_tokens(&self) -> u64 {
        self.0.host_tokens()
    }

    #[getter]
    fn page_size(&self) -> u64 {
        self.0.page_size
    }

    /// Device page of each node, or -1.
    #[getter]
    fn device_pages(&self, py: Python<'_>) -> PyResult<Pages> {
        copy(py, &self.0.device_pages)
    }

    /// Host page of each node, or -1.
    #[getter]
    fn host_pages(&self, py: Python<'_>) -> PyResult<Pages> {
        copy(py, &self.0.host_pages)
    }

    /// Node of each page, from the first page on.
    #[getter]
    fn nodes(&self, py: Python<'_>) -> PyResult<Pages> {
        ids(py, &self.0.nodes)
    }

    fn __len__(&self) -> usize {
        self.0.nodes.len()
    }

    /// Says in plain words what this is: a line, and more lines where it has parts.
    fn describe(&self) -> String {
        self.0.describe()
    }

    fn __repr__(&self) -> String {
        let found = &self.0;
        let (tokens, device, host) = (found.tokens(), found.device_tokens(), found.host_tokens());
        format!("PrefixMatch({tokens} tokens, {device} on device, {host} on host)")
    }
}

/// A protection that `PrefixIndex.unlock` ends, once.
#[pyclass(frozen, eq, hash, module = "kv_planner", name = "PrefixLock")]
#[derive(PartialEq, Eq, Hash)]
pub struct PyPrefixLock(pub LockId);

#[pymethods]
impl PyPrefixLock {
    /// Says in plain words what this is: a line, and more lines where it has parts.
    fn describe(&self) -> String {
        format!("lock {} of a prefix index, which protects pages until it is released", self.0.number())
    }

    fn __repr__(&self) -> String {
        format!("PrefixLock({})", self.0.number())
    }
}

/// What became of inserted pages; every given page is taken, duplicate or shared. Arrays are read-only int64.
#[pyclass(frozen, eq, hash, module = "kv_planner", name = "InsertResult")]
#[derive(PartialEq, Eq, Hash)]
pub struct PyInsertResult {
    pub inserted: Inserted,
    pub page_size: u64,
}

#[pymethods]
impl PyInsertResult {
    /// Tokens of whole pages that the index holds now.
    #[getter]
    fn tokens(&self) -> u64 {
        self.inserted.nodes.len() as u64 * self.page_size
    }

    /// Node of each page.
    #[getter]
    fn nodes(&self, py: Python<'_>) -> PyResult<Pages> {
        ids(py, &self.inserted.nodes)
    }

    /// Page that the index holds at each position: the given one, or its own where the given one is a duplicate.
    #[getter]
    fn pages(&self, py: Python<'_>) -> PyResult<Pages> {
        copy(py, &self.inserted.pages)
    }

    /// Positions whose page the index took over; the caller must not release it.
    #[getter]
    fn taken(&self, py: Python<'_>) -> PyResult<Pages> {
        copy(py, &self.inserted.taken)
    }

    /// Given pages whose content the index has in a page of its own; the caller releases them after its last use.
    #[getter]
    fn duplicate(&self, py: Python<'_>) -> PyResult<Pages> {
        copy(py, &self.inserted.duplicate)
    }

    /// Given pages that were the index's already; nothing changes for them.
    #[getter]
    fn shared(&self, py: Python<'_>) -> PyResult<Pages> {
        copy(py, &self.inserted.shared)
    }

    /// Says in plain words what this is: a line, and more lines where it has parts.
    fn describe(&self) -> String {
        self.inserted.describe()
    }

    fn __repr__(&self) -> String {
        let done = &self.inserted;
        let (taken, duplicate, shared) = (done.taken.len(), done.duplicate.len(), done.shared.len());
        format!("InsertResult({taken} taken, {duplicate} duplicate, {shared} shared)")
    }
}

/// What left a tier; every page is the caller's again. Arrays are read-only int64.
#[pyclass(frozen, eq, hash, module = "kv_planner", name = "Eviction")]
#[derive(PartialEq, Eq, Hash)]
pub struct PyEviction(pub Eviction);

#[pymethods]
impl PyEviction {
    /// Freed pages, in order of eviction; those that `drop_host` left behind under locks come first, and have no node.
    #[getter]
    fn pages(&self, py: Python<'_>) -> PyResult<Pages> {
        copy(py, &self.0.pages)
    }

    /// Nodes that left the index: no other tier had them.
    #[getter]
    fn removed(&self, py: Python<'_>) -> PyResult<Pages> {
        ids(py, &self.0.removed)
    }

    /// Nodes that are still held in the other tier.
    #[getter]
    fn kept(&self, py: Python<'_>) -> PyResult<Pages> {
        ids(py, &self.0.kept)
    }

    /// With `keep_unbacked`: nodes to back up before the rest can leave, parents first.
    #[getter]
    fn needs_backup(&self, py: Python<'_>) -> PyResult<Pages> {
        ids(py, &self.0.needs_backup)
    }

    /// Pages wanted and not freed; after `drop_host`, pages that a lock keeps.
    #[getter]
    fn shortfall(&self) -> u64 {
        self.0.shortfall
    }

    /// Says in plain words what this is: a line, and more lines where it has parts.
    fn describe(&self) -> String {
        self.0.describe()
    }

    fn __repr__(&self) -> String {
        let done = &self.0;
        let (pages, needs) = (done.pages.len(), done.needs_backup.len());
        format!("Eviction({pages} pages, {} short, {needs} to back up)", done.shortfall)
    }
}

/// Pages of one tier, as the index sees them: evictable + protected = held, at most the capacity.
///
/// Args:
///     capacity: Pages of the pool without page 0.
///     held: Pages that the index holds.
///     evictable: Held pages that eviction can free now.
///     protected: Held pages under a lock.
///
/// Raises:
///     AccountingError: The counts do not add up.
#[pyclass(frozen, eq, hash, module = "kv_planner", name = "TierCounts")]
#[derive(PartialEq, Eq, Hash)]
pub struct PyTierCounts(TierCounts);

#[pymethods]
impl PyTierCounts {
    #[new]
    #[pyo3(signature = (*, capacity, held, evictable, protected))]
    fn new(
        capacity: &Bound<'_, PyAny>,
        held: &Bound<'_, PyAny>,
        evictable: &Bound<'_, PyAny>,
        protected: &Bound<'_, PyAny>,
    ) -> PyResult<Self> {
        let (capacity, held) = (count("capacity", capacity)?, count("held", held)?);
        let (evictable, protected) = (count("evictable", evictable)?, count("protected", protected)?);
        Ok(PyTierCounts(guarded(|| TierCounts::new(capacity, held, evictable, protected))?))
    }

    #[getter]
    fn capacity(&self) -> u64 {
        self.0.capacity
    }

    #[getter]
    fn held(&self) -> u64 {
        self.0.held
    }

    #[getter]
    fn evictable(&self) -> u64 {
        self.0.evictable
    }

    #[getter]
    fn protected(&self) -> u64 {
        self.0.protected
    }

    /// Pages that the index does not hold: free ones and those of running requests.
    #[getter]
    fn outside(&self) -> u64 {
        self.0.outside()
    }

    /// Says in plain words what this is: a line, and more lines where it has parts.
    fn describe(&self) -> String {
        self.0.describe()
    }

    fn __repr__(&self) -> String {
        let TierCounts { capacity, held, evictable, protected } = self.0;
        format!("TierCounts(capacity={capacity}, held={held}, evictable={evictable}, protected={protected})")
    }
}

/// Counts of one moment.
#[pyclass(frozen, eq, hash, module = "kv_planner", name = "PrefixCounts")]
#[derive(PartialEq, Eq, Hash)]
pub struct PyPrefixCounts(pub PrefixCounts);

#[pymethods]
impl PyPrefixCounts {
    #[getter]
    fn device(&self) -> PyTierCounts {
        PyTierCounts(self.0.device)
    }

    #[getter]
    fn host(&self) -> PyTierCounts {
        PyTierCounts(self.0.host)
    }

    /// Page nodes.
    #[getter]
    fn nodes(&self) -> u64 {
        self.0.nodes
    }

    /// Locks that are not released.
    #[getter]
    fn locks(&self) -> u64 {
        self.0.locks
    }

    /// Namespaces that have a page.
    #[getter]
    fn namespaces(&self) -> u64 {
        self.0.namespaces
    }

    /// Says in plain words what this is: a line, and more lines where it has parts.
    fn describe(&self) -> String {
        self.0.describe()
    }

    fn __repr__(&self) -> String {
        let PrefixCounts { device, host, nodes, locks, .. } = self.0;
        format!(
            "PrefixCounts(device {}/{}, host {}/{}, {nodes} nodes, {locks} locks)",
            device.held, device.capacity, host.held, host.capacity
        )
    }
}

/// Totals since an index was made; refused calls count nothing. `PrefixIndex.statistics` makes it.
#[pyclass(frozen, eq, hash, module = "kv_planner", name = "PrefixStatistics")]
#[derive(PartialEq, Eq, Hash)]
pub struct PyPrefixStatistics(pub PrefixStatistics);

#[pymethods]
impl PyPrefixStatistics {
    #[getter]
    fn matches(&self) -> u64 {
        self.0.matches
    }

    #[getter]
    fn asked_tokens(&self) -> u64 {
        self.0.asked_tokens
    }

    #[getter]
    fn matched_tokens(&self) -> u64 {
        self.0.matched_tokens
    }

    #[getter]
    fn inserted_pages(&self) -> u64 {
        self.0.inserted_pages
    }

    #[getter]
    fn duplicate_pages(&self) -> u64 {
        self.0.duplicate_pages
    }

    #[getter]
    fn backed_up_pages(&self) -> u64 {
        self.0.backed_up_pages
    }

    #[getter]
    fn loaded_pages(&self) -> u64 {
        self.0.loaded_pages
    }

    #[getter]
    fn evicted_device_pages(&self) -> u64 {
        self.0.evicted_device_pages
    }

    #[getter]
    fn evicted_host_pages(&self) -> u64 {
        self.0.evicted_host_pages
    }

    /// Says in plain words what this is.
    fn describe(&self) -> String {
        self.0.describe()
    }

    fn __repr__(&self) -> String {
        let s = &self.0;
        format!("PrefixStatistics({} matches, {} of {} tokens found)", s.matches, s.matched_tokens, s.asked_tokens)
    }
}
