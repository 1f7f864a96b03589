//! Owns the Python faces of `ComponentSpec` and `ModelLayout`. It does not own
//! their invariants, which the core checks.

use std::sync::Arc;

use kv_planner::{Axis, Component, ComponentSpec, DType, Describe, ItemKind, ModelLayout, Part};
use pyo3::prelude::*;
use pyo3::types::{PyString, PyTuple, PyType};

use crate::arrays::{count, count_or, counts, instances, optional_count, words};
use crate::errors::{OrRaise, detached, guarded};

/// A tuple of words.
pub fn word_tuple<'py>(py: Python<'py>, words: impl Iterator<Item = &'static str>) -> PyResult<Bound<'py, PyTuple>> {
    PyTuple::new(py, words.map(|word| PyString::new(py, word)).collect::<Vec<_>>())
}

/// Geometry of one component of one part.
///
/// Args:
///     component: What the buffers hold.
///     part: The model they belong to.
///     layer_ids: Global layer ids that have the component, over all stages; an id that stands k times means k buffers,
///         told apart by their occurrence.
///     dtype: Element type.
///     total_heads: Heads over all tensor-parallel ranks.
///     dims: Elements of one head; K and V are two components and may differ.
///     axes: Order of the axes inside an item, outermost first.
///     item_kind: What an index of the buffers counts.
///     compression: Tokens that one entry of a page stands for; "latent_c4" has 4 and "latent_c128" 128.
///     rows: Entries along the token axis of a request's row, such as the window of a convolution; 1 for other items.
///     groups: Dims of groups that lie side by side, each with all heads of the rank, and are sharded one by one: an axis
///         just outside the head axis. They add up to `dims`; request rows only.
///
/// Raises:
///     LayoutError: An invariant fails: no layer, no head, no dim, an axis named twice, an impossible compression, or rows or
///         groups that do not fit.
///     ArgumentError: A word is not of its vocabulary, or a number is none.
#[pyclass(frozen, eq, hash, module = "kv_planner", name = "ComponentSpec")]
#[derive(PartialEq, Eq, Hash)]
pub struct PyComponentSpec(pub ComponentSpec);

#[pymethods]
impl PyComponentSpec {
    #[new]
    #[pyo3(
        signature = (component, part="target", *, layer_ids, dtype, total_heads, dims, axes=None, item_kind="page", compression=None, rows=None, groups=None),
        text_signature = "(component, part='target', *, layer_ids, dtype, total_heads, dims, axes=('token', 'head', 'dim'), item_kind='page', compression=1, rows=1, groups=())"
    )]
    #[allow(clippy::too_many_arguments)]
    fn new(
        component: &str,
        part: &str,
        layer_ids: &Bound<'_, PyAny>,
        dtype: &str,
        total_heads: &Bound<'_, PyAny>,
        dims: &Bound<'_, PyAny>,
        axes: Option<&Bound<'_, PyAny>>,
        item_kind: &str,
        compression: Option<&Bound<'_, PyAny>>,
        rows: Option<&Bound<'_, PyAny>>,
        groups: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let axes = match axes {
            None => [Axis::Token, Axis::Head, Axis::Dim],
            Some(given) => {
                let given = words("axes", given, Axis::parse)?;
                given.try_into().unwrap_or([Axis::Token; 3])
            }
        };
        let spec = ComponentSpec {
            component: Component::parse(component).or_raise()?,
            part: Part::parse(part).or_raise()?,
            layer_ids: counts("layer_ids", layer_ids)?,
            dtype: DType::parse(dtype).or_raise()?,
            total_heads: count("total_heads", total_heads)?,
            dims: count("dims", dims)?,
            axes,
            item_kind: ItemKind::parse(item_kind).or_raise()?,
            compression: count_or("compression", compression, 1)?,
            rows: count_or("rows", rows, 1)?,
            groups: groups.map_or(Ok(Vec::new()), |given| counts("groups", given))?,
        };
        guarded(|| spec.validate())?;
        Ok(PyComponentSpec(spec))
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
    fn layer_ids<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.0.layer_ids)
    }

    #[getter]
    fn dtype(&self) -> &'static str {
        self.0.dtype.as_str()
    }

    #[getter]
    fn total_heads(&self) -> u64 {
        self.0.total_heads
    }

    #[getter]
    fn dims(&self) -> u64 {
        self.0.dims
    }

    #[getter]
    fn axes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        word_tuple(py, self.0.axes.iter().map(|axis| axis.as_str()))
    }

    #[getter]
    fn item_kind(&self) -> &'static str {
        self.0.item_kind.as_str()
    }

    #[getter]
    fn compression(&self) -> u64 {
        self.0.compression
    }

    #[getter]
    fn rows(&self) -> u64 {
        self.0.rows
    }

    #[getter]
    fn groups<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.0.groups)
    }

    /// Says in plain words what this is: a line, and more lines where it has parts.
    fn describe(&self) -> String {
        self.0.describe()
    }

    fn __repr__(&self) -> String {
        let spec = &self.0;
        format!(
            "ComponentSpec('{}', '{}', layer_ids={:?}, dtype='{}', total_heads={}, dims={}, axes=('{}', '{}', '{}'), item_kind='{}', compression={}, rows={}, groups={:?})",
            spec.component,
            spec.part,
            spec.layer_ids,
            spec.dtype,
            spec.total_heads,
            spec.dims,
            spec.axes[0],
            spec.axes[1],
            spec.axes[2],
            spec.item_kind,
            spec.compression,
            spec.rows,
            spec.groups
        )
    }
}

/// Geometry that all ranks of a deployment share.
///
/// Args:
///     components: Specs, each (component, part) once. Target and draft layer ids are disjoint, because ids are global.
///     page_size: Token slots of a page.
///     fingerprint: Identity of the model's weights and configuration.
///     kernel_block_size: Block size that the attention kernel sees, a divisor of the page size; None is the page size.
///     format_version: Version of the layout's meaning.
///
/// Raises:
///     LayoutError: An invariant fails; the text names it with the value.
#[pyclass(frozen, eq, hash, module = "kv_planner", name = "ModelLayout")]
#[derive(PartialEq, Eq, Hash)]
pub struct PyModelLayout(pub Arc<ModelLayout>);

#[pymethods]
impl PyModelLayout {
    #[new]
    #[pyo3(
        signature = (components, *, page_size, fingerprint, kernel_block_size=None, format_version=None),
        text_signature = "(components, *, page_size, fingerprint, kernel_block_size=None, format_version=1)"
    )]
    fn new(
        py: Python<'_>,
        components: &Bound<'_, PyAny>,
        page_size: &Bound<'_, PyAny>,
        fingerprint: String,
        kernel_block_size: Option<&Bound<'_, PyAny>>,
        format_version: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let specs: PyResult<Vec<ComponentSpec>> =
            instances("components", "ComponentSpec", components, |own: &PyComponentSpec| own.0.clone());
        let layout = ModelLayout {
            components: specs?,
            page_size: count("page_size", page_size)?,
            fingerprint,
            kernel_block_size: optional_count("kernel_block_size", kernel_block_size)?,
            format_version: count_or("format_version", format_version, 1)?,
        };
        Ok(PyModelLayout(Arc::new(detached(py, || layout.validated())?)))
    }

    #[getter]
    fn components<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.0.components.iter().cloned().map(PyComponentSpec).collect::<Vec<_>>())
    }

    #[getter]
    fn page_size(&self) -> u64 {
        self.0.page_size
    }

    #[getter]
    fn kernel_block_size(&self) -> Option<u64> {
        self.0.kernel_block_size
    }

    #[getter]
    fn fingerprint(&self) -> &str {
        &self.0.fingerprint
    }

    #[getter]
    fn format_version(&self) -> u64 {
        self.0.format_version
    }

    /// Returns the spec of a component.
    ///
    /// Raises:
    ///     LayoutError: The layout does not declare it; the text lists what it declares.
    #[pyo3(signature = (component, part="target"))]
    fn spec(&self, component: &str, part: &str) -> PyResult<PyComponentSpec> {
        let (component, part) = (Component::parse(component).or_raise()?, Part::parse(part).or_raise()?);
        self.0.spec(component, part).cloned().map(PyComponentSpec).or_raise()
    }

    /// Returns the bytes of one item: tokens x heads x dims x bytes of an element.
    ///
    /// Args:
    ///     component: What the item holds.
    ///     part: The model it belongs to.
    ///     heads: Heads held; all of them when left out.
    ///
    /// Raises:
    ///     LayoutError: No such component, or more heads than the model has.
    #[pyo3(signature = (component, part="target", *, heads=None))]
    fn item_bytes(&self, component: &str, part: &str, heads: Option<&Bound<'_, PyAny>>) -> PyResult<u64> {
        let (component, part) = (Component::parse(component).or_raise()?, Part::parse(part).or_raise()?);
        let heads = optional_count("heads", heads)?;
        guarded(|| self.0.item_bytes(component, part, heads))
    }

    /// Returns the layout as JSON; `from_json` reads it back.
    fn to_json(&self) -> String {
        self.0.to_json()
    }

    /// Reads and checks a layout.
    ///
    /// Raises:
    ///     FormatError: The text is not the JSON of a layout.
    ///     LayoutError: An invariant fails.
    #[classmethod]
    fn from_json(class: &Bound<'_, PyType>, text: &str) -> PyResult<Self> {
        Ok(PyModelLayout(Arc::new(detached(class.py(), || ModelLayout::from_json(text))?)))
    }

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<(Bound<'py, PyAny>, (String,))> {
        Ok((slf.get_type().getattr("from_json")?, (slf.get().0.to_json(),)))
    }

    /// Says in plain words what this is: a line, and more lines where it has parts.
    fn describe(&self) -> String {
        self.0.describe()
    }

    fn __repr__(&self) -> String {
        let names: Vec<String> = self.0.components.iter().map(ComponentSpec::name).collect();
        format!(
            "ModelLayout([{}], page_size={}, fingerprint={:?}, kernel_block_size={}, format_version={})",
            names.join(", "),
            self.0.page_size,
            self.0.fingerprint,
            self.0.kernel_block_size.map_or("None".into(), |size| size.to_string()),
            self.0.format_version
        )
    }
}
