//! Owns the Python face of `StateRoute`. It does not own the sharding of groups.

use kv_planner::{Describe, StateBuffer, StateGroup, StateRoute};
use numpy::PyArray1;
use pyo3::prelude::*;

use crate::arrays::{array, count_or, counts, range, refuse_value, sequence};
use crate::errors::{detached, guarded};
use crate::lower::{PyBatch, wrap_batch};
use crate::plan::PyRuns;

/// Columns of source offsets, destination offsets and lengths.
type Pieces = (Py<PyArray1<u64>>, Py<PyArray1<u64>>, Py<PyArray1<u64>>);

/// What one rank sends to another of a request's recurrent state, whose groups are sharded independently.
///
/// A state is `rows` rows; a row has every group side by side, of each the rank's own heads. `split_heads` says which those
/// are; where heads are replicated, the replicas take turns as on routes.
///
/// Args:
///     groups: (heads over all ranks, bytes of one head in a row) of every group.
///     rows: Rows of a request's state, for example the window of a convolution.
///     source: (tp_rank, tp_size) of the sending rank.
///     destination: (tp_rank, tp_size) of the receiving rank.
///
/// Raises:
///     LayoutError: No rows, no groups, or a group without bytes.
///     HeadsDoNotSplit: A group neither divides over a side's ranks nor replicates evenly.
///     PlacementError: A rank is not below its size.
#[pyclass(frozen, eq, hash, module = "kv_planner", name = "StateRoute")]
#[derive(PartialEq, Eq, Hash)]
pub struct PyStateRoute(StateRoute);

fn buffer(name: &str, value: &Bound<'_, PyAny>) -> PyResult<StateBuffer> {
    match counts(name, value)?[..] {
        [address, stride, items] => Ok(StateBuffer { address, stride, items }),
        _ => Err(refuse_value(name, "a triple (address, stride, items)", value)),
    }
}

#[pymethods]
impl PyStateRoute {
    #[new]
    #[pyo3(
        signature = (groups, *, rows=None, source, destination),
        text_signature = "(groups, *, rows=1, source, destination)"
    )]
    fn new(
        groups: &Bound<'_, PyAny>,
        rows: Option<&Bound<'_, PyAny>>,
        source: &Bound<'_, PyAny>,
        destination: &Bound<'_, PyAny>,
    ) -> PyResult<Self> {
        let group = |item: PyResult<Bound<'_, PyAny>>| -> PyResult<StateGroup> {
            let (heads, bytes) = range("groups", &item?)?;
            Ok(StateGroup { heads, bytes })
        };
        let groups: PyResult<Vec<StateGroup>> =
            sequence("groups", "pairs (heads, bytes)", groups)?.map(group).collect();
        let (groups, rows) = (groups?, count_or("rows", rows, 1)?);
        let (source, destination) = (range("source", source)?, range("destination", destination)?);
        Ok(PyStateRoute(guarded(|| StateRoute::new(&groups, rows, source, destination))?))
    }

    #[getter]
    fn source_bytes(&self) -> u64 {
        self.0.source_bytes()
    }

    #[getter]
    fn destination_bytes(&self) -> u64 {
        self.0.destination_bytes()
    }

    #[getter]
    fn blocks_per_request(&self) -> u64 {
        self.0.blocks_per_request()
    }

    /// Returns the pieces of one row: source offset, destination offset and length in bytes.
    ///
    /// Returns:
    ///     Three read-only arrays. Shape: [pieces]; dtype uint64.
    fn arrays(&self, py: Python<'_>) -> PyResult<Pieces> {
        let column = |pick: fn(&kv_planner::StatePiece) -> u64| array(py, self.0.pieces().iter().map(pick).collect());
        Ok((column(|piece| piece.source)?, column(|piece| piece.destination)?, column(|piece| piece.bytes)?))
    }

    /// Returns the blocks that move the states of some requests between two buffers.
    ///
    /// Args:
    ///     requests: Row pairs of item kind "request_row": exact, never trimmed to the shorter list.
    ///     source: (address, bytes from one request's state to the next, items) of the sending buffer.
    ///     destination: The same of the receiving buffer.
    ///
    /// Raises:
    ///     ItemKindMismatch: The runs count something else than request rows.
    ///     ManifestError: A stride is shorter than a state, as when one side has another window.
    ///     PageOutOfRange: A row lies beyond its buffer.
    #[pyo3(signature = (requests, *, source, destination))]
    fn lower(
        &self,
        py: Python<'_>,
        requests: &PyRuns,
        source: &Bound<'_, PyAny>,
        destination: &Bound<'_, PyAny>,
    ) -> PyResult<PyBatch> {
        let (source, destination) = (buffer("source", source)?, buffer("destination", destination)?);
        let batch = detached(py, || self.0.lower(source, destination, &requests.0))?;
        wrap_batch(py, batch)
    }

    fn __len__(&self) -> usize {
        self.0.pieces().len()
    }

    /// Says in plain words what this is: a line, and a line a piece.
    fn describe(&self) -> String {
        self.0.describe()
    }

    fn __repr__(&self) -> String {
        let (from, to) = (self.0.source_bytes(), self.0.destination_bytes());
        format!("StateRoute({} pieces a row, {from} -> {to} bytes a request)", self.0.pieces().len())
    }
}
