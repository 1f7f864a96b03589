//! Owns the Python faces of `Runs`, `Plan`, `Capabilities` and `lower`. It does
//! not own the arithmetic, which runs without the GIL over owned data.

use kv_planner::describe::bytes as bytes_of;
use kv_planner::{Batch, Capabilities, Describe, ItemKind, LoweredPlan, Plan, Runs};
use numpy::{PyArray1, PyArrayMethods};
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::agree::{PyRoute, slice_of};
use crate::arrays::{array, count, optional_count, over_two};
use crate::errors::{OrRaise, detached, guarded};
use crate::recycle;
use crate::regions::PyRegions;

type Columns<'py> = (Bound<'py, PyArray1<i64>>, Bound<'py, PyArray1<i64>>, Bound<'py, PyArray1<i64>>);

/// Page pairs of one request or chunk, joined to runs.
///
/// Args:
///     source_pages: Shape: [n]; dtype int32 or int64, any stride, or a list. Each 1 or more: page 0 is for padding.
///     destination_pages: The same shape; no page twice.
///     item_kind: What the indices count.
///
/// Raises:
///     UnequalPages: The two are not equally long.
///     ReservedPage: A page is 0.
///     PageOutOfRange: A page is negative.
///     DuplicateDestination: A destination stands twice.
///     ArgumentError: Not a 1-D int32 or int64 array; the text names argument, dtype and shape.
#[pyclass(frozen, eq, hash, module = "kv_planner", name = "Runs")]
#[derive(PartialEq, Eq, Hash)]
pub struct PyRuns(pub Runs);

#[pymethods]
impl PyRuns {
    #[new]
    #[pyo3(signature = (source_pages, destination_pages, *, item_kind="page"))]
    fn new(
        py: Python<'_>,
        source_pages: &Bound<'_, PyAny>,
        destination_pages: &Bound<'_, PyAny>,
        item_kind: &str,
    ) -> PyResult<Self> {
        let kind = ItemKind::parse(item_kind).or_raise()?;
        let (source, destination) = (("source_pages", source_pages), ("destination_pages", destination_pages));
        Ok(PyRuns(over_two(py, source, destination, |source, destination| Runs::of_kind(source, destination, kind))?))
    }

    #[getter]
    fn item_kind(&self) -> &'static str {
        self.0.item_kind().as_str()
    }

    /// Rank and size of the context-parallel group whose share this is; None for a whole request.
    #[getter]
    fn context(&self) -> Option<(u64, u64)> {
        self.0.context().map(|own| (own.rank, own.size))
    }

    #[getter]
    fn page_count(&self) -> u64 {
        self.0.page_count()
    }

    #[getter]
    fn run_count(&self) -> u64 {
        self.0.run_count()
    }

    /// Returns source start, destination start and count of every run.
    ///
    /// Returns:
    ///     Three read-only arrays. Shape: [run_count]; dtype int64.
    fn arrays<'py>(&self, py: Python<'py>) -> PyResult<Columns<'py>> {
        let runs = self.0.runs();
        let column = |pick: fn(&kv_planner::Run) -> u64| -> PyResult<Bound<'py, PyArray1<i64>>> {
            Ok(array(py, runs.iter().map(|run| pick(run) as i64).collect())?.into_bound(py))
        };
        Ok((column(|run| run.source)?, column(|run| run.destination)?, column(|run| run.count)?))
    }

    /// Returns the pairs start..stop, counted in the order given.
    ///
    /// Raises:
    ///     SliceError: The slice reaches beyond the pairs.
    fn slice(&self, start: &Bound<'_, PyAny>, stop: &Bound<'_, PyAny>) -> PyResult<PyRuns> {
        let (start, stop) = (count("start", start)?, count("stop", stop)?);
        Ok(PyRuns(guarded(|| self.0.slice(start, stop))?))
    }

    fn __len__(&self) -> usize {
        self.0.page_count() as usize
    }

    /// Says in plain words what this is: a line, and more lines where it has parts.
    fn describe(&self) -> String {
        self.0.describe()
    }

    fn __repr__(&self) -> String {
        format!("Runs({} pages in {} runs)", self.0.page_count(), self.0.run_count())
    }
}

/// `Route` x `Runs`: which bytes of which pages go where. Symbolic; bytes and blocks are known without making any.
///
/// Args:
///     route: What moves within one item.
///     runs: Which items move.
///
/// Raises:
///     PageOutOfRange: A page lies beyond an entry of the route.
///     ItemKindMismatch: The runs count another kind of item than a pair.
///     ContextMismatch: The runs are not the share of the destination's context-parallel rank.
#[pyclass(frozen, eq, hash, module = "kv_planner", name = "Plan")]
#[derive(PartialEq, Eq, Hash)]
pub struct PyPlan(Plan);

#[pymethods]
impl PyPlan {
    #[new]
    fn new(route: &PyRoute, runs: &PyRuns) -> PyResult<Self> {
        Ok(PyPlan(guarded(|| Plan::new(route.0.clone(), runs.0.clone()))?))
    }

    #[getter]
    fn route(&self) -> PyRoute {
        PyRoute(self.0.route().clone())
    }

    #[getter]
    fn runs(&self) -> PyRuns {
        PyRuns(self.0.runs().clone())
    }

    #[getter]
    fn nbytes(&self) -> u64 {
        self.0.nbytes()
    }

    #[getter]
    fn block_count(&self) -> u64 {
        self.0.block_count()
    }

    /// Returns the part of the plan that is named; None keeps all.
    ///
    /// Args:
    ///     layer_ids: Global layer ids.
    ///     parts: Target or draft.
    ///     components: Components.
    ///     pages: Positions (start, stop) of page pairs in the order given to `Runs`.
    ///
    /// Raises:
    ///     SliceError: A name that the layout does not have, or positions beyond the pairs.
    #[pyo3(signature = (*, layer_ids=None, parts=None, components=None, pages=None))]
    fn slice(
        &self,
        layer_ids: Option<&Bound<'_, PyAny>>,
        parts: Option<&Bound<'_, PyAny>>,
        components: Option<&Bound<'_, PyAny>>,
        pages: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<PyPlan> {
        let slice = slice_of(layer_ids, parts, components, None, pages)?;
        Ok(PyPlan(guarded(|| self.0.slice(&slice))?))
    }

    fn __str__(&self) -> String {
        self.0.to_string()
    }

    /// Says in plain words what this is: a line, and more lines where it has parts.
    fn describe(&self) -> String {
        self.0.describe()
    }

    fn __repr__(&self) -> String {
        format!("Plan({} bytes in {} blocks)", self.0.nbytes(), self.0.block_count())
    }
}

/// What an engine takes; None is no limit.
///
/// Args:
///     max_entries_per_batch: Blocks of one batch.
///     max_block_bytes: Bytes of one block; longer ones are split.
///     max_blocks: Blocks of one plan; more are refused before any is made.
///
/// Raises:
///     ArgumentError: A limit of 0 under which nothing could move.
#[pyclass(frozen, eq, hash, module = "kv_planner", name = "Capabilities")]
#[derive(PartialEq, Eq, Hash)]
pub struct PyCapabilities(Capabilities);

#[pymethods]
impl PyCapabilities {
    #[new]
    #[pyo3(signature = (*, max_entries_per_batch=None, max_block_bytes=None, max_blocks=None))]
    fn new(
        max_entries_per_batch: Option<&Bound<'_, PyAny>>,
        max_block_bytes: Option<&Bound<'_, PyAny>>,
        max_blocks: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let capabilities = Capabilities {
            max_entries_per_batch: optional_count("max_entries_per_batch", max_entries_per_batch)?,
            max_block_bytes: optional_count("max_block_bytes", max_block_bytes)?,
            max_blocks: optional_count("max_blocks", max_blocks)?,
        };
        Ok(PyCapabilities(guarded(|| capabilities.validated())?))
    }

    #[getter]
    fn max_entries_per_batch(&self) -> Option<u64> {
        self.0.max_entries_per_batch
    }

    #[getter]
    fn max_block_bytes(&self) -> Option<u64> {
        self.0.max_block_bytes
    }

    #[getter]
    fn max_blocks(&self) -> Option<u64> {
        self.0.max_blocks
    }

    /// Says in plain words what this is: a line, and more lines where it has parts.
    fn describe(&self) -> String {
        self.0.describe()
    }

    fn __repr__(&self) -> String {
        let spell = |limit: Option<u64>| limit.map_or("None".into(), |limit| limit.to_string());
        format!(
            "Capabilities(max_entries_per_batch={}, max_block_bytes={}, max_blocks={})",
            spell(self.0.max_entries_per_batch),
            spell(self.0.max_block_bytes),
            spell(self.0.max_blocks)
        )
    }
}

/// Blocks or batches that a description shows.
const SHOWN: usize = 16;

/// Blocks for one call of an engine: three read-only columns. Shape: [len]; dtype uint64; addresses and bytes.
#[pyclass(frozen, module = "kv_planner", name = "Batch")]
pub struct PyBatch {
    source: Py<PyArray1<u64>>,
    destination: Py<PyArray1<u64>>,
    nbytes: Py<PyArray1<u64>>,
}

impl PyBatch {
    fn columns<'py>(&self, py: Python<'py>) -> [Bound<'py, PyArray1<u64>>; 3] {
        [&self.source, &self.destination, &self.nbytes].map(|column| column.bind(py).clone())
    }

    fn equals(&self, other: &PyBatch, py: Python<'_>) -> bool {
        self.columns(py).iter().zip(other.columns(py)).all(|(a, b)| a.readonly().as_array() == b.readonly().as_array())
    }
}

#[pymethods]
impl PyBatch {
    #[getter]
    fn source(&self, py: Python<'_>) -> Py<PyArray1<u64>> {
        self.source.clone_ref(py)
    }

    #[getter]
    fn destination(&self, py: Python<'_>) -> Py<PyArray1<u64>> {
        self.destination.clone_ref(py)
    }

    #[getter]
    fn nbytes(&self, py: Python<'_>) -> Py<PyArray1<u64>> {
        self.nbytes.clone_ref(py)
    }

    fn __len__(&self, py: Python<'_>) -> PyResult<usize> {
        self.source.bind(py).len()
    }

    fn __eq__(&self, other: &Bound<'_, PyAny>) -> bool {
        other.cast::<PyBatch>().is_ok_and(|other| self.equals(other.get(), other.py()))
    }

    /// Says in plain words what this is: a line, and the first blocks.
    fn describe(&self, py: Python<'_>) -> PyResult<String> {
        let columns = self.columns(py).map(|column| column.readonly());
        let [from, to, bytes] = columns.each_ref().map(|column| column.as_array());
        let blocks = from.len();
        let mut text = format!("batch of {blocks} block{}", if blocks == 1 { "" } else { "s" });
        for row in 0..blocks.min(SHOWN) {
            text += &format!("\n  {} from {:#x} to {:#x}", bytes_of(bytes[row]), from[row], to[row]);
        }
        Ok(text + if blocks > SHOWN { "\n  …" } else { "" })
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        Ok(format!("Batch({} blocks)", self.__len__(py)?))
    }
}

/// A plan as batches of blocks.
#[pyclass(frozen, module = "kv_planner", name = "LoweredPlan")]
pub struct PyLoweredPlan {
    batches: Py<PyTuple>,
    block_count: u64,
    total_bytes: u64,
}

#[pymethods]
impl PyLoweredPlan {
    #[getter]
    fn batches(&self, py: Python<'_>) -> Py<PyTuple> {
        self.batches.clone_ref(py)
    }

    #[getter]
    fn block_count(&self) -> u64 {
        self.block_count
    }

    #[getter]
    fn total_bytes(&self) -> u64 {
        self.total_bytes
    }

    fn __len__(&self, py: Python<'_>) -> usize {
        self.batches.bind(py).len()
    }

    fn __eq__(&self, other: &Bound<'_, PyAny>) -> PyResult<bool> {
        match other.cast::<PyLoweredPlan>() {
            Ok(same) => self.batches.bind(other.py()).eq(same.get().batches.bind(other.py())),
            Err(_) => Ok(false),
        }
    }

    /// Says in plain words what this is: a line, and a line a batch.
    fn describe(&self, py: Python<'_>) -> PyResult<String> {
        let head =
            format!("{} in {} blocks, {} batches", bytes_of(self.total_bytes), self.block_count, self.__len__(py));
        let batches = self.batches.bind(py).iter().take(SHOWN);
        let lines: PyResult<Vec<String>> =
            batches.map(|batch| Ok(format!("\n  batch of {} blocks", batch.len()?))).collect();
        Ok(head + &lines?.concat() + if self.__len__(py) > SHOWN { "\n  …" } else { "" })
    }

    fn __repr__(&self, py: Python<'_>) -> String {
        let batches = self.__len__(py);
        format!("LoweredPlan({batches} batches, {} blocks, {} bytes)", self.block_count, self.total_bytes)
    }
}

/// Fewer blocks are made faster than the GIL changes hands.
const KEEPS_GIL: u64 = 2048;

/// Turns a plan into batches of blocks within an engine's limits. The only place that sums addresses.
///
/// Blocks come pair by pair, then run by run. Consecutive pages are one block where they are consecutive bytes on both
/// sides, within one entry. Runs without the GIL.
///
/// Args:
///     plan: A checked plan.
///     capabilities: Limits; none when left out.
///     source_regions: Registered memory of the source; blocks are cut where a region ends. None checks nothing.
///     destination_regions: The same for the destination.
///
/// Raises:
///     BlockLimitExceeded: More blocks than `max_blocks`, before anything is produced.
///     UnregisteredMemory: A block lies outside the regions.
#[pyfunction]
#[pyo3(signature = (plan, capabilities=None, *, source_regions=None, destination_regions=None))]
pub fn lower(
    py: Python<'_>,
    plan: &PyPlan,
    capabilities: Option<&PyCapabilities>,
    source_regions: Option<&PyRegions>,
    destination_regions: Option<&PyRegions>,
) -> PyResult<PyLoweredPlan> {
    let capabilities = capabilities.map_or(Capabilities::default(), |given| given.0);
    if source_regions.is_some() || destination_regions.is_some() {
        let (source, destination) = (source_regions.map(|own| &own.0), destination_regions.map(|own| &own.0));
        return wrap(py, detached(py, || kv_planner::lower_within(&plan.0, &capabilities, source, destination))?);
    }
    let work = || kv_planner::lower_into(&plan.0, &capabilities, recycle::column);
    let few = plan.0.block_count() < KEEPS_GIL
        && kv_planner::lower::count(&plan.0, &capabilities).is_ok_and(|blocks| blocks < KEEPS_GIL);
    wrap(py, if few { guarded(work)? } else { detached(py, work)? })
}

/// A batch as arrays.
pub fn wrap_batch(py: Python<'_>, batch: Batch) -> PyResult<PyBatch> {
    Ok(PyBatch {
        source: recycle::array(py, batch.source)?,
        destination: recycle::array(py, batch.destination)?,
        nbytes: recycle::array(py, batch.nbytes)?,
    })
}

fn wrap(py: Python<'_>, lowered: LoweredPlan) -> PyResult<PyLoweredPlan> {
    let LoweredPlan { batches, block_count, total_bytes } = lowered;
    let batches: PyResult<Vec<PyBatch>> = batches.into_iter().map(|batch| wrap_batch(py, batch)).collect();
    Ok(PyLoweredPlan { batches: PyTuple::new(py, batches?)?.unbind(), block_count, total_bytes })
}
