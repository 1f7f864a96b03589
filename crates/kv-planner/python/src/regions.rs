//! Owns the Python face of `Regions`. It does not own the rounding, joining and cutting.

use kv_planner::{Describe, RegionLimits, Regions};
use numpy::PyArray1;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::arrays::{array, count, count_or, optional_count, refuse_value, sequence};
use crate::errors::guarded;

/// Columns of starts and lengths.
type Spans = (Py<PyArray1<u64>>, Py<PyArray1<u64>>);

/// Registered memory: buffers rounded to an alignment, joined where they touch, cut to the longest region.
///
/// Args:
///     buffers: (address, bytes) of every buffer of one device; empty ones need no region.
///     alignment: Bytes to which starts and ends are rounded; a power of two.
///     max_bytes: Longest region, a multiple of the alignment; None is no limit.
///     max_regions: Most regions; None is no limit.
///
/// Raises:
///     ArgumentError: An alignment or a longest region with which no region could begin or end.
///     RegionLimitExceeded: More regions than `max_regions`; nothing has been registered then.
///     AddressOverflow: A rounded end leaves 64 bits.
#[pyclass(frozen, eq, hash, module = "kv_planner", name = "Regions")]
#[derive(PartialEq, Eq, Hash)]
pub struct PyRegions(pub Regions);

#[pymethods]
impl PyRegions {
    #[new]
    #[pyo3(
        signature = (buffers, *, alignment=None, max_bytes=None, max_regions=None),
        text_signature = "(buffers, *, alignment=2097152, max_bytes=None, max_regions=None)"
    )]
    fn new(
        buffers: &Bound<'_, PyAny>,
        alignment: Option<&Bound<'_, PyAny>>,
        max_bytes: Option<&Bound<'_, PyAny>>,
        max_regions: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let mut spans = Vec::new();
        for item in sequence("buffers", "pairs (address, bytes)", buffers)? {
            let item = item?;
            let pair: Bound<'_, PyTuple> =
                item.extract().map_err(|_| refuse_value("buffers", "pairs (address, bytes)", &item))?;
            if pair.len() != 2 {
                return Err(refuse_value("buffers", "pairs (address, bytes)", &item));
            }
            spans.push((count("address", &pair.get_item(0)?)?, count("bytes", &pair.get_item(1)?)?));
        }
        let limits = RegionLimits {
            alignment: count_or("alignment", alignment, 2 << 20)?,
            max_bytes: optional_count("max_bytes", max_bytes)?,
            max_regions: optional_count("max_regions", max_regions)?,
        };
        Ok(PyRegions(guarded(|| Regions::new(&spans, limits))?))
    }

    #[getter]
    fn alignment(&self) -> u64 {
        self.0.limits().alignment
    }

    #[getter]
    fn max_bytes(&self) -> Option<u64> {
        self.0.limits().max_bytes
    }

    #[getter]
    fn max_regions(&self) -> Option<u64> {
        self.0.limits().max_regions
    }

    #[getter]
    fn nbytes(&self) -> u64 {
        self.0.nbytes()
    }

    /// Returns start and length of every region, ascending.
    ///
    /// Returns:
    ///     Two read-only arrays. Shape: [len]; dtype uint64; addresses and bytes.
    fn arrays(&self, py: Python<'_>) -> PyResult<Spans> {
        let spans = self.0.spans();
        let starts = spans.iter().map(|(start, _)| *start).collect();
        Ok((array(py, starts)?, array(py, spans.iter().map(|(start, end)| end - start).collect())?))
    }

    fn __len__(&self) -> usize {
        self.0.spans().len()
    }

    /// Says in plain words what this is: a line, and a line a region.
    fn describe(&self) -> String {
        self.0.describe()
    }

    fn __repr__(&self) -> String {
        format!("Regions({} regions, {} bytes)", self.0.spans().len(), self.0.nbytes())
    }
}
