//! Owns the Python faces of `Capabilities`, `Batch` and `lower`. It does not own the
//! arithmetic, which runs without the GIL where it takes long.

use kv_planner::describe::bytes as bytes_of;
use kv_planner::{Batch, Capabilities, Describe, LoweredPlan};
use numpy::{PyArray1, PyArrayMethods};
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::arrays::optional_count;
use crate::errors::{detached, guarded};
use crate::plan::PyPlan;
use crate::recycle;
use crate::regions::PyRegions;

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
