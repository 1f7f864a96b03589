//! Owns the Python faces of `Placement`, `BufferEntry`, `RankManifest` and
//! `Deployment`. It does not own their invariants.

use std::sync::Arc;

use kv_planner::{BufferEntry, Component, Deployment, Describe, Part, Placement, RankManifest};
use pyo3::prelude::*;
use pyo3::types::{PyTuple, PyType};

use crate::arrays::{count, count_or, instances, range};
use crate::errors::{OrRaise, detached, guarded};
use crate::layout::PyModelLayout;

/// Where a rank stands in its deployment: pipeline, tensor, decode-context and data parallel.
///
/// Raises:
///     PlacementError: A rank is not below its size.
#[pyclass(frozen, eq, hash, module = "kv_planner", name = "Placement")]
#[derive(PartialEq, Eq, Hash)]
pub struct PyPlacement(pub Placement);

#[pymethods]
impl PyPlacement {
    #[new]
    #[pyo3(
        signature = (*, pp_rank=None, pp_size=None, tp_rank=None, tp_size=None, dcp_rank=None, dcp_size=None, dp_rank=None, dp_size=None),
        text_signature = "(*, pp_rank=0, pp_size=1, tp_rank=0, tp_size=1, dcp_rank=0, dcp_size=1, dp_rank=0, dp_size=1)"
    )]
    #[allow(clippy::too_many_arguments)]
    fn new(
        pp_rank: Option<&Bound<'_, PyAny>>,
        pp_size: Option<&Bound<'_, PyAny>>,
        tp_rank: Option<&Bound<'_, PyAny>>,
        tp_size: Option<&Bound<'_, PyAny>>,
        dcp_rank: Option<&Bound<'_, PyAny>>,
        dcp_size: Option<&Bound<'_, PyAny>>,
        dp_rank: Option<&Bound<'_, PyAny>>,
        dp_size: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let placement = Placement {
            pp_rank: count_or("pp_rank", pp_rank, 0)?,
            pp_size: count_or("pp_size", pp_size, 1)?,
            tp_rank: count_or("tp_rank", tp_rank, 0)?,
            tp_size: count_or("tp_size", tp_size, 1)?,
            dcp_rank: count_or("dcp_rank", dcp_rank, 0)?,
            dcp_size: count_or("dcp_size", dcp_size, 1)?,
            dp_rank: count_or("dp_rank", dp_rank, 0)?,
            dp_size: count_or("dp_size", dp_size, 1)?,
        };
        Ok(PyPlacement(guarded(|| placement.validated())?))
    }

    #[getter]
    fn pp_rank(&self) -> u64 {
        self.0.pp_rank
    }

    #[getter]
    fn pp_size(&self) -> u64 {
        self.0.pp_size
    }

    #[getter]
    fn tp_rank(&self) -> u64 {
        self.0.tp_rank
    }

    #[getter]
    fn tp_size(&self) -> u64 {
        self.0.tp_size
    }

    #[getter]
    fn dcp_rank(&self) -> u64 {
        self.0.dcp_rank
    }

    #[getter]
    fn dcp_size(&self) -> u64 {
        self.0.dcp_size
    }

    #[getter]
    fn dp_rank(&self) -> u64 {
        self.0.dp_rank
    }

    #[getter]
    fn dp_size(&self) -> u64 {
        self.0.dp_size
    }

    /// Says in plain words what this is: a line, and more lines where it has parts.
    fn describe(&self) -> String {
        self.0.describe()
    }

    fn __repr__(&self) -> String {
        let p = &self.0;
        format!(
            "Placement(pp_rank={}, pp_size={}, tp_rank={}, tp_size={}, dcp_rank={}, dcp_size={}, dp_rank={}, dp_size={})",
            p.pp_rank, p.pp_size, p.tp_rank, p.tp_size, p.dcp_rank, p.dcp_size, p.dp_rank, p.dp_size
        )
    }
}

/// One named buffer of a rank. The manifest that holds it checks it against the layout.
///
/// Args:
///     component: What the buffer holds.
///     part: The model that it belongs to.
///     layer_id: Global layer id.
///     device: Device that owns the address, for example "npu:0".
///     address: Address of item 0.
///     nbytes: Bytes from the first to the last item; 0 for a buffer of no heads.
///     item_stride: Bytes from one item to the next.
///     item_bytes: Bytes of one item.
///     head_range: Global heads held, (start, stop).
///     occurrence: Which buffer of several with this name and layer id.
#[pyclass(frozen, eq, hash, module = "kv_planner", name = "BufferEntry")]
#[derive(PartialEq, Eq, Hash)]
pub struct PyBufferEntry(pub BufferEntry);

#[pymethods]
impl PyBufferEntry {
    #[new]
    #[pyo3(
        signature = (component, part, layer_id, *, device, address, nbytes, item_stride, item_bytes, head_range, occurrence=None),
        text_signature = "(component, part, layer_id, *, device, address, nbytes, item_stride, item_bytes, head_range, occurrence=0)"
    )]
    #[allow(clippy::too_many_arguments)]
    fn new(
        component: &str,
        part: &str,
        layer_id: &Bound<'_, PyAny>,
        device: String,
        address: &Bound<'_, PyAny>,
        nbytes: &Bound<'_, PyAny>,
        item_stride: &Bound<'_, PyAny>,
        item_bytes: &Bound<'_, PyAny>,
        head_range: &Bound<'_, PyAny>,
        occurrence: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        Ok(PyBufferEntry(BufferEntry {
            component: Component::parse(component).or_raise()?,
            part: Part::parse(part).or_raise()?,
            layer_id: count("layer_id", layer_id)?,
            device,
            address: count("address", address)?,
            nbytes: count("nbytes", nbytes)?,
            item_stride: count("item_stride", item_stride)?,
            item_bytes: count("item_bytes", item_bytes)?,
            head_range: range("head_range", head_range)?,
            occurrence: count_or("occurrence", occurrence, 0)?,
        }))
    }

    #[getter]
    fn component(&self) -> &'static str {
        self.0.component.as_str()
    }

    #[getter]
    fn part(&self) -> &'static str {
        self.0.part.as_str()
    }

    #[getter]
    fn layer_id(&self) -> u64 {
        self.0.layer_id
    }

    #[getter]
    fn device(&self) -> &str {
        &self.0.device
    }

    #[getter]
    fn address(&self) -> u64 {
        self.0.address
    }

    #[getter]
    fn nbytes(&self) -> u64 {
        self.0.nbytes
    }

    #[getter]
    fn item_stride(&self) -> u64 {
        self.0.item_stride
    }

    #[getter]
    fn item_bytes(&self) -> u64 {
        self.0.item_bytes
    }

    #[getter]
    fn head_range(&self) -> (u64, u64) {
        self.0.head_range
    }

    #[getter]
    fn occurrence(&self) -> u64 {
        self.0.occurrence
    }

    #[getter]
    fn items(&self) -> u64 {
        self.0.items()
    }

    /// Says in plain words what this is: a line, and more lines where it has parts.
    fn describe(&self) -> String {
        self.0.describe()
    }

    fn __repr__(&self) -> String {
        let e = &self.0;
        format!(
            "BufferEntry('{}', '{}', {}, device={:?}, address={:#x}, nbytes={}, item_stride={}, item_bytes={}, head_range=({}, {}), occurrence={})",
            e.component,
            e.part,
            e.layer_id,
            e.device,
            e.address,
            e.nbytes,
            e.item_stride,
            e.item_bytes,
            e.head_range.0,
            e.head_range.1,
            e.occurrence
        )
    }
}

/// Everything that one rank publishes.
///
/// Args:
///     layout: Geometry shared by all ranks.
///     placement: Where the rank stands.
///     entries: Named buffers. Routes refer to them by their index here.
///
/// Raises:
///     ManifestError: An invariant fails: a name that the layout does not have or that stands twice; a head range beyond
///         the total; item bytes that do not follow from dtype, heads, dims and page size; a stride below an item; an end
///         inside an item; no address or device; two entries that share bytes.
///     AddressOverflow: A buffer ends beyond 64 bits.
#[pyclass(frozen, eq, hash, module = "kv_planner", name = "RankManifest")]
#[derive(PartialEq, Eq, Hash)]
pub struct PyRankManifest(pub Arc<RankManifest>);

/// A tuple of manifests.
pub fn manifest_tuple<'py>(py: Python<'py>, manifests: &[Arc<RankManifest>]) -> PyResult<Bound<'py, PyTuple>> {
    PyTuple::new(py, manifests.iter().cloned().map(PyRankManifest).collect::<Vec<_>>())
}

#[pymethods]
impl PyRankManifest {
    #[new]
    fn new(
        py: Python<'_>,
        layout: &PyModelLayout,
        placement: &PyPlacement,
        entries: &Bound<'_, PyAny>,
    ) -> PyResult<Self> {
        let entries: PyResult<Vec<BufferEntry>> =
            instances("entries", "BufferEntry", entries, |own: &PyBufferEntry| own.0.clone());
        let (layout, placement, entries) = (layout.0.clone(), placement.0, entries?);
        Ok(PyRankManifest(Arc::new(detached(py, || RankManifest::new(layout, placement, entries))?)))
    }

    #[getter]
    fn layout(&self) -> PyModelLayout {
        PyModelLayout(self.0.layout.clone())
    }

    #[getter]
    fn placement(&self) -> PyPlacement {
        PyPlacement(self.0.placement)
    }

    #[getter]
    fn entries<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.0.entries.iter().cloned().map(PyBufferEntry).collect::<Vec<_>>())
    }

    /// Returns the manifest with its layout as JSON; `from_json` reads it back.
    fn to_json(&self) -> String {
        self.0.to_json()
    }

    /// Reads and checks a manifest, for example one that a peer sent.
    ///
    /// Raises:
    ///     FormatError: The text is not the JSON of a manifest.
    ///     PlanError: An invariant of the layout, the placement or the manifest fails.
    #[classmethod]
    fn from_json(class: &Bound<'_, PyType>, text: &str) -> PyResult<Self> {
        Ok(PyRankManifest(Arc::new(detached(class.py(), || RankManifest::from_json(text))?)))
    }

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<(Bound<'py, PyAny>, (String,))> {
        Ok((slf.get_type().getattr("from_json")?, (slf.get().0.to_json(),)))
    }

    /// Says in plain words what this is: a line, and more lines where it has parts.
    fn describe(&self) -> String {
        self.0.describe()
    }

    fn __repr__(&self) -> String {
        format!("RankManifest({}, {} entries)", self.0.placement, self.0.entries.len())
    }
}

/// The ranks of one side, in whole data-parallel groups: complete and disjoint.
///
/// Args:
///     manifests: Every rank once, in any order; of several data-parallel groups, each of which is a whole copy, one or
///         more, each whole. Agreements refer to ranks by their index here.
///
/// Raises:
///     InconsistentDeployment: Unlike layouts or sizes, or two ranks at one place.
///     IncompleteDeployment: A rank, a layer or a head range is missing or doubly owned. Heads held by several ranks are
///         legitimate where there are more tensor-parallel ranks than heads.
#[pyclass(frozen, eq, hash, module = "kv_planner", name = "Deployment")]
#[derive(PartialEq, Eq, Hash)]
pub struct PyDeployment(pub Arc<Deployment>);

#[pymethods]
impl PyDeployment {
    #[new]
    fn new(py: Python<'_>, manifests: &Bound<'_, PyAny>) -> PyResult<Self> {
        let manifests: PyResult<Vec<Arc<RankManifest>>> =
            instances("manifests", "RankManifest", manifests, |own: &PyRankManifest| own.0.clone());
        let manifests = manifests?;
        Ok(PyDeployment(Arc::new(detached(py, || Deployment::new(manifests))?)))
    }

    #[getter]
    fn manifests<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        manifest_tuple(py, self.0.manifests())
    }

    #[getter]
    fn layout(&self) -> PyModelLayout {
        PyModelLayout(self.0.layout().clone())
    }

    fn __len__(&self) -> usize {
        self.0.manifests().len()
    }

    /// Says in plain words what this is: a line, and more lines where it has parts.
    fn describe(&self) -> String {
        self.0.describe()
    }

    fn __repr__(&self) -> String {
        format!("Deployment({} ranks)", self.0.manifests().len())
    }
}
