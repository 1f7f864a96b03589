//! Owns the Python faces of step inputs: `RowField`, `RowLayout`, `select_index`
//! and lengths. It does not own buffers.

use kv_planner::{DType, Describe, Fill, RowField, RowLayout, SpeculativeKind};
use numpy::PyArray1;
use pyo3::IntoPyObjectExt;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::arrays::{SHORT, array, count, count_or, fill as read_fill, instances, over_indices};
use crate::errors::{OrRaise, guarded};

/// One input of a step: rows of equal width.
///
/// Args:
///     name: Unique within a layout.
///     dtype: Element type.
///     rows: Rows, live and padded.
///     width: Elements of a row.
///     fill: Value of padded rows.
///
/// Raises:
///     RowLayoutError: An empty field, or a fill that the dtype does not represent: beyond an integer's range, beyond a
///         float's largest number, an infinity where the dtype has none. Reading `offset` of a field that is in no layout
///         raises it too.
#[pyclass(frozen, eq, hash, module = "kv_planner", name = "RowField")]
#[derive(PartialEq, Eq, Hash)]
pub struct PyRowField(RowField);

#[pymethods]
impl PyRowField {
    #[new]
    #[pyo3(
        signature = (name, dtype, *, rows, width=None, fill=None),
        text_signature = "(name, dtype, *, rows, width=1, fill=0)"
    )]
    fn new(
        name: &str,
        dtype: &str,
        rows: &Bound<'_, PyAny>,
        width: Option<&Bound<'_, PyAny>>,
        fill: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let fill = fill.map_or(Ok(Fill::Int(0)), |given| read_fill("fill", given))?;
        let (rows, width) = (count("rows", rows)?, count_or("width", width, 1)?);
        let dtype = DType::parse(dtype).or_raise()?;
        Ok(PyRowField(guarded(|| RowField::new(name, dtype, rows, width, fill))?))
    }

    #[getter]
    fn name(&self) -> &str {
        &self.0.name
    }

    #[getter]
    fn dtype(&self) -> &'static str {
        self.0.dtype.as_str()
    }

    #[getter]
    fn rows(&self) -> u64 {
        self.0.rows
    }

    #[getter]
    fn width(&self) -> u64 {
        self.0.width
    }

    #[getter]
    fn fill(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        match self.0.fill {
            Fill::Int(number) => number.into_py_any(py),
            Fill::Float(number) => number.into_py_any(py),
        }
    }

    #[getter]
    fn offset(&self) -> PyResult<u64> {
        self.0.placed_offset().or_raise()
    }

    #[getter]
    fn nbytes(&self) -> u64 {
        self.0.nbytes
    }

    /// Says in plain words what this is: a line, and more lines where it has parts.
    fn describe(&self) -> String {
        self.0.describe()
    }

    fn __repr__(&self) -> String {
        let field = &self.0;
        let offset = field.offset.map_or(String::new(), |offset| format!(" at {offset}"));
        format!(
            "RowField('{}', '{}', rows={}, width={}, fill={}){offset}",
            field.name, field.dtype, field.rows, field.width, field.fill
        )
    }
}

/// Fields in one arena, one after another, each aligned.
///
/// Args:
///     fields: Fields of unlike names.
///     alignment: Bytes; a power of two, at least the widest element.
///
/// Raises:
///     RowLayoutError: No field, a name twice, or an unusable alignment.
#[pyclass(frozen, eq, hash, module = "kv_planner", name = "RowLayout")]
#[derive(PartialEq, Eq, Hash)]
pub struct PyRowLayout(RowLayout);

#[pymethods]
impl PyRowLayout {
    #[new]
    #[pyo3(signature = (fields, *, alignment=None), text_signature = "(fields, *, alignment=64)")]
    fn new(fields: &Bound<'_, PyAny>, alignment: Option<&Bound<'_, PyAny>>) -> PyResult<Self> {
        let fields: PyResult<Vec<RowField>> = instances("fields", "RowField", fields, |own: &PyRowField| own.0.clone());
        let (fields, alignment) = (fields?, count_or("alignment", alignment, 64)?);
        Ok(PyRowLayout(guarded(|| RowLayout::new(fields, alignment))?))
    }

    #[getter]
    fn nbytes(&self) -> u64 {
        self.0.nbytes()
    }

    #[getter]
    fn alignment(&self) -> u64 {
        self.0.alignment()
    }

    #[getter]
    fn fields<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.0.fields().iter().cloned().map(PyRowField).collect::<Vec<_>>())
    }

    fn field(&self, name: &str) -> PyResult<PyRowField> {
        self.0.field(name).cloned().map(PyRowField).or_raise()
    }

    /// Says in plain words what this is: a line, and more lines where it has parts.
    fn describe(&self) -> String {
        self.0.describe()
    }

    fn __repr__(&self) -> String {
        let names: Vec<&str> = self.0.fields().iter().map(|field| field.name.as_str()).collect();
        format!("RowLayout([{}], {} bytes)", names.join(", "), self.0.nbytes())
    }
}

/// Returns the index of the last accepted token of each row: row * width + front + drafts of the row.
///
/// Args:
///     num_correct_drafts: Accepted drafts without the bonus token. Shape: [live rows]; dtype int32 or int64.
///     rows: Rows of the bucket; rows beyond the live ones count 0 drafts.
///     width: Tokens of a row, the front included.
///     front: Leading context tokens of a widened window.
///
/// Returns:
///     Shape: [rows]; dtype int64; read-only.
///
/// Raises:
///     LengthError: More live rows than rows, or a count that leaves its row.
#[pyfunction]
#[pyo3(
    signature = (num_correct_drafts, *, rows, width, front=None),
    text_signature = "(num_correct_drafts, *, rows, width, front=0)"
)]
pub fn select_index(
    py: Python<'_>,
    num_correct_drafts: &Bound<'_, PyAny>,
    rows: &Bound<'_, PyAny>,
    width: &Bound<'_, PyAny>,
    front: Option<&Bound<'_, PyAny>>,
) -> PyResult<Py<PyArray1<i64>>> {
    let (rows, width, front) = (count("rows", rows)?, count("width", width)?, count_or("front", front, 0)?);
    let work = |drafts: &[i64]| kv_planner::select_index(drafts, rows, width, front);
    array(py, over_indices(py, "num_correct_drafts", num_correct_drafts, SHORT, work)?)
}

/// Returns the pages that tokens fill, the last perhaps in part.
///
/// Raises:
///     LengthError: A page size of 0.
#[pyfunction]
pub fn page_count(tokens: &Bound<'_, PyAny>, page_size: &Bound<'_, PyAny>) -> PyResult<u64> {
    let (tokens, page_size) = (count("tokens", tokens)?, count("page_size", page_size)?);
    guarded(|| kv_planner::page_count(tokens, page_size))
}

/// Returns the KV lengths that attention reads in a verify step. Mutates nothing.
///
/// Args:
///     kind: Who counts the window: "eagle" and "mtp" lengths still lack it, "dflash" and "dspark" lengths include it,
///         "none" has no window.
///     prefix_lens: Published lengths. Shape: [rows]; dtype int32 or int64. A live row has at least one committed token;
///         0 is a padded row.
///     window: Tokens of a request in the step.
///
/// Returns:
///     Shape: [rows]; dtype int64; read-only. Padded rows stay 0.
///
/// Raises:
///     LengthError: A negative length, one that leaves int64, or, where lengths include the window, one that is not 0 and
///         below it.
#[pyfunction]
#[pyo3(signature = (kind, prefix_lens, *, window))]
pub fn kv_lengths(
    py: Python<'_>,
    kind: &str,
    prefix_lens: &Bound<'_, PyAny>,
    window: &Bound<'_, PyAny>,
) -> PyResult<Py<PyArray1<i64>>> {
    let kind = SpeculativeKind::parse(kind).or_raise()?;
    let window = count("window", window)?;
    let work = |lengths: &[i64]| kv_planner::kv_lengths(kind, lengths, window);
    array(py, over_indices(py, "prefix_lens", prefix_lens, SHORT, work)?)
}

/// Returns the first global id of draft layers: after the whole model's layers, the same on every stage.
#[pyfunction]
pub fn first_draft_id(total_layers: &Bound<'_, PyAny>) -> PyResult<u64> {
    Ok(kv_planner::first_draft_id(count("total_layers", total_layers)?))
}

/// Returns the customary head range of a rank: an equal share, or grouped replicas (0, 0, 1, 1).
///
/// Raises:
///     HeadsDoNotSplit: The heads neither divide over the ranks nor replicate evenly.
///     PlacementError: The rank is not below the size.
#[pyfunction]
#[pyo3(signature = (total_heads, *, tp_rank, tp_size))]
pub fn split_heads(
    total_heads: &Bound<'_, PyAny>,
    tp_rank: &Bound<'_, PyAny>,
    tp_size: &Bound<'_, PyAny>,
) -> PyResult<(u64, u64)> {
    let (total, rank) = (count("total_heads", total_heads)?, count("tp_rank", tp_rank)?);
    let size = count("tp_size", tp_size)?;
    guarded(|| kv_planner::split_heads(total, rank, size))
}
