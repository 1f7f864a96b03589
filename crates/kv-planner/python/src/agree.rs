//! Owns the Python faces of `agree`, `Agreement`, `Route` and `RoutePair`. It does
//! not own the comparison or the head map.

use std::sync::Arc;

use kv_planner::{Agreement, Component, Describe, ErrorKind, ItemKind, Part, PlanError, Route, RoutePair, Side, Slice};
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::arrays::{counts, range, words};
use crate::errors::{detached, guarded, to_python};
use crate::layout::{PyModelLayout, word_tuple};
use crate::manifest::{PyDeployment, PyRankManifest, manifest_tuple};

fn side(name: &str, value: &Bound<'_, PyAny>) -> PyResult<Side> {
    if let Ok(deployment) = value.cast::<PyDeployment>() {
        return Ok(Side::Deployment(deployment.get().0.clone()));
    }
    if let Ok(manifest) = value.cast::<PyRankManifest>() {
        return Ok(Side::Rank(manifest.get().0.clone()));
    }
    Err(to_python(PlanError::new(
        ErrorKind::ArgumentError,
        name,
        value.get_type().name()?.to_string(),
        "Deployment | RankManifest",
        "there is no layout to compare",
        "give one of the two types",
    )))
}

/// Compares two sides; the local one sends, the remote one receives.
///
/// Compared are page size, kernel block size, fingerprint, format version, and per component: dtype, axis order, dims,
/// total heads, item kind and layer ids. Ranks, local heads and which stage owns a layer may differ.
///
/// A side that is one rank must hold what its placement says: the only stage every buffer of the layout, a stage of
/// several each of its layers whole, the only tensor-parallel rank all heads. What it lacks is a difference.
///
/// Args:
///     local: A deployment, or one rank of it.
///     remote: A deployment, or one rank of it.
///     parts: Parts to compare and to route. Leaving "draft" out is how a side without a draft serves one that has it.
///
/// Returns:
///     The agreement; its routes are asked for by the indices of two ranks.
///
/// Raises:
///     LayoutMismatch: With all differences at once in `.differences`.
///     UnsupportedPlacement: Decode context parallelism on the sending side.
#[pyfunction]
#[pyo3(
    signature = (local, remote, *, parts=None),
    text_signature = "(local, remote, *, parts=('target', 'draft'))"
)]
pub fn agree(
    py: Python<'_>,
    local: &Bound<'_, PyAny>,
    remote: &Bound<'_, PyAny>,
    parts: Option<&Bound<'_, PyAny>>,
) -> PyResult<PyAgreement> {
    let (local, remote) = (side("local", local)?, side("remote", remote)?);
    let parts = parts.map(|given| words("parts", given, Part::parse)).transpose()?;
    let agreement = detached(py, || match parts {
        None => kv_planner::agree(local, remote),
        Some(parts) => kv_planner::agree_on(local, remote, &parts),
    });
    Ok(PyAgreement(Arc::new(agreement?)))
}

/// Two sides that may transfer: `local` sends, `remote` receives. `agree` makes it.
#[pyclass(frozen, eq, hash, module = "kv_planner", name = "Agreement")]
#[derive(PartialEq, Eq, Hash)]
pub struct PyAgreement(Arc<Agreement>);

#[pymethods]
impl PyAgreement {
    #[getter]
    fn layout(&self) -> PyModelLayout {
        PyModelLayout(self.0.layout().clone())
    }

    #[getter]
    fn local<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        manifest_tuple(py, self.0.local.manifests())
    }

    #[getter]
    fn remote<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        manifest_tuple(py, self.0.remote.manifests())
    }

    #[getter]
    fn parts<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        word_tuple(py, self.0.parts.iter().map(|part| part.as_str()))
    }

    /// Returns what one local rank sends to one remote rank; it may be empty.
    ///
    /// Where heads are replicated, the replicas of a data-parallel group are dealt out in turn over the receivers, so that
    /// each destination head is written once over all local ranks of the group.
    ///
    /// Args:
    ///     local_index: Index in `local`.
    ///     remote_index: Index in `remote`.
    ///
    /// Raises:
    ///     ArgumentError: A side has no such rank.
    #[pyo3(signature = (local_index=0, remote_index=0))]
    fn route(&self, local_index: usize, remote_index: usize) -> PyResult<PyRoute> {
        Ok(PyRoute(guarded(|| self.0.route(local_index, remote_index))?))
    }

    /// Returns the agreement of the opposite direction.
    fn reversed(&self) -> PyAgreement {
        PyAgreement(Arc::new(self.0.reversed()))
    }

    /// Says in plain words what this is: a line, and more lines where it has parts.
    fn describe(&self) -> String {
        self.0.describe()
    }

    fn __repr__(&self) -> String {
        let (local, remote) = (self.0.local.manifests().len(), self.0.remote.manifests().len());
        format!("Agreement({local} local ranks -> {remote} remote ranks)")
    }
}

/// The named arguments of `slice` on routes and plans.
pub fn slice_of(
    layer_ids: Option<&Bound<'_, PyAny>>,
    parts: Option<&Bound<'_, PyAny>>,
    components: Option<&Bound<'_, PyAny>>,
    item_kinds: Option<&Bound<'_, PyAny>>,
    pages: Option<&Bound<'_, PyAny>>,
) -> PyResult<Slice> {
    Ok(Slice {
        layer_ids: layer_ids.map(|ids| counts("layer_ids", ids)).transpose()?,
        parts: parts.map(|given| words("parts", given, Part::parse)).transpose()?,
        components: components.map(|given| words("components", given, Component::parse)).transpose()?,
        item_kinds: item_kinds.map(|given| words("item_kinds", given, ItemKind::parse)).transpose()?,
        pages: pages.map(|given| range("pages", given)).transpose()?,
    })
}

/// What one rank sends to another, within one item. `Agreement.route` makes it.
#[pyclass(frozen, eq, hash, module = "kv_planner", name = "Route")]
#[derive(PartialEq, Eq, Hash)]
pub struct PyRoute(pub Route);

#[pymethods]
impl PyRoute {
    #[getter]
    fn source(&self) -> PyRankManifest {
        PyRankManifest(self.0.source().clone())
    }

    #[getter]
    fn destination(&self) -> PyRankManifest {
        PyRankManifest(self.0.destination().clone())
    }

    #[getter]
    fn pairs<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.0.pairs().iter().copied().map(PyRoutePair).collect::<Vec<_>>())
    }

    #[getter]
    fn item_bytes(&self) -> u64 {
        self.0.item_bytes()
    }

    /// Returns the pairs that are named; None keeps all.
    ///
    /// Raises:
    ///     SliceError: A layer id or a component that the layout does not have.
    #[pyo3(signature = (*, layer_ids=None, parts=None, components=None, item_kinds=None))]
    fn slice(
        &self,
        layer_ids: Option<&Bound<'_, PyAny>>,
        parts: Option<&Bound<'_, PyAny>>,
        components: Option<&Bound<'_, PyAny>>,
        item_kinds: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<PyRoute> {
        let slice = slice_of(layer_ids, parts, components, item_kinds, None)?;
        Ok(PyRoute(guarded(|| self.0.slice(&slice))?))
    }

    /// Returns the same bytes with token slots for items: slot = page * page_size + offset.
    ///
    /// Raises:
    ///     ItemKindMismatch: A pair does not count pages, its token axis is not the outermost, its entries are compressed, or
    ///         there are bytes between two pages.
    fn by_token(&self) -> PyResult<PyRoute> {
        Ok(PyRoute(guarded(|| self.0.by_token())?))
    }

    fn __len__(&self) -> usize {
        self.0.pairs().len()
    }

    fn __bool__(&self) -> bool {
        !self.0.pairs().is_empty()
    }

    /// Says in plain words what this is: a line, and more lines where it has parts.
    fn describe(&self) -> String {
        self.0.describe()
    }

    fn __repr__(&self) -> String {
        format!(
            "Route({} -> {}, {} pairs, {} bytes an item)",
            self.0.source().placement,
            self.0.destination().placement,
            self.0.pairs().len(),
            self.0.item_bytes()
        )
    }
}

/// Bytes that one source entry gives to one destination entry, within one item.
///
/// `rows` pieces of `row_bytes`; offsets and row strides count in bytes from the item's start. `rows` is 1 where a slice
/// is contiguous on both sides. `source_heads` and `destination_heads` count from the first head of their entry.
#[pyclass(frozen, eq, hash, module = "kv_planner", name = "RoutePair")]
#[derive(PartialEq, Eq, Hash)]
pub struct PyRoutePair(RoutePair);

#[pymethods]
impl PyRoutePair {
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
    fn occurrence(&self) -> u64 {
        self.0.occurrence
    }

    #[getter]
    fn item_kind(&self) -> &'static str {
        self.0.item_kind.as_str()
    }

    #[getter]
    fn source_entry(&self) -> usize {
        self.0.source_entry
    }

    #[getter]
    fn destination_entry(&self) -> usize {
        self.0.destination_entry
    }

    #[getter]
    fn source_heads(&self) -> (u64, u64) {
        self.0.source_heads
    }

    #[getter]
    fn destination_heads(&self) -> (u64, u64) {
        self.0.destination_heads
    }

    #[getter]
    fn rows(&self) -> u64 {
        self.0.rows
    }

    #[getter]
    fn row_bytes(&self) -> u64 {
        self.0.row_bytes
    }

    #[getter]
    fn source_offset(&self) -> u64 {
        self.0.source_offset
    }

    #[getter]
    fn source_row_stride(&self) -> u64 {
        self.0.source_row_stride
    }

    #[getter]
    fn destination_offset(&self) -> u64 {
        self.0.destination_offset
    }

    #[getter]
    fn destination_row_stride(&self) -> u64 {
        self.0.destination_row_stride
    }

    /// Says in plain words what this is: a line, and more lines where it has parts.
    fn describe(&self) -> String {
        self.0.describe()
    }

    fn __repr__(&self) -> String {
        let pair = &self.0;
        format!(
            "RoutePair({}, entry {} heads {:?} -> entry {} heads {:?}, {} x {} bytes)",
            pair.name(),
            pair.source_entry,
            pair.source_heads,
            pair.destination_entry,
            pair.destination_heads,
            pair.rows,
            pair.row_bytes
        )
    }
}
