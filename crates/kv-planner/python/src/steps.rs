//! Owns the Python faces of step inputs: `RowField`, `RowLayout`, `select_index`
//! and lengths. It does not own buffers.

use kv_planner::{DType, Fill, RowField, RowLayout, SpeculativeKind};
use numpy::PyArray1;
use pyo3::IntoPyObjectExt;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::arrays::{array, count, count_or, fill as read_fill, indices};
use crate::errors::OrRaise;

/// One input of a step: rows of equal width.
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
        Ok(PyRowField(RowField::new(name, DType::parse(dtype).or_raise()?, rows, width, fill).or_raise()?))
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

    fn __repr__(&self) -> String {
        let field = &self.0;
        let offset = field.offset.map_or(String::new(), |offset| format!(" at {offset}"));
        format!(
            "RowField('{}', '{}', rows={}, width={}, fill={}){offset}",
            field.name, field.dtype, field.rows, field.width, field.fill
        )
    }
}

/// Fields in one arena, each aligned.
#[pyclass(frozen, eq, hash, module = "kv_planner", name = "RowLayout")]
#[derive(PartialEq, Eq, Hash)]
pub struct PyRowLayout(RowLayout);

#[pymethods]
impl PyRowLayout {
    #[new]
    #[pyo3(signature = (fields, *, alignment=None), text_signature = "(fields, *, alignment=64)")]
    fn new(fields: &Bound<'_, PyAny>, alignment: Option<&Bound<'_, PyAny>>) -> PyResult<Self> {
        let fields: PyResult<Vec<RowField>> =
            fields.try_iter()?.map(|item| Ok(item?.cast::<PyRowField>()?.get().0.clone())).collect();
        Ok(PyRowLayout(RowLayout::new(fields?, count_or("alignment", alignment, 64)?).or_raise()?))
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

    fn __repr__(&self) -> String {
        let names: Vec<&str> = self.0.fields().iter().map(|field| field.name.as_str()).collect();
        format!("RowLayout([{}], {} bytes)", names.join(", "), self.0.nbytes())
    }
}

/// Index of the last accepted token of each row.
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
    let drafts = indices("num_correct_drafts", num_correct_drafts)?;
    let (rows, width, front) = (count("rows", rows)?, count("width", width)?, count_or("front", front, 0)?);
    array(py, kv_planner::select_index(&drafts, rows, width, front).or_raise()?)
}

/// Pages that tokens fill.
#[pyfunction]
pub fn page_count(tokens: &Bound<'_, PyAny>, page_size: &Bound<'_, PyAny>) -> PyResult<u64> {
    kv_planner::page_count(count("tokens", tokens)?, count("page_size", page_size)?).or_raise()
}

/// KV lengths of a verify step; the input is not changed.
#[pyfunction]
#[pyo3(signature = (kind, prefix_lens, *, window))]
pub fn kv_lengths(
    py: Python<'_>,
    kind: &str,
    prefix_lens: &Bound<'_, PyAny>,
    window: &Bound<'_, PyAny>,
) -> PyResult<Py<PyArray1<i64>>> {
    let kind = SpeculativeKind::parse(kind).or_raise()?;
    let lengths = indices("prefix_lens", prefix_lens)?;
    array(py, kv_planner::kv_lengths(kind, &lengths, count("window", window)?).or_raise()?)
}

/// First global id of draft layers.
#[pyfunction]
pub fn first_draft_id(total_layers: &Bound<'_, PyAny>) -> PyResult<u64> {
    Ok(kv_planner::first_draft_id(count("total_layers", total_layers)?))
}

/// The customary head range of a rank.
#[pyfunction]
#[pyo3(signature = (total_heads, *, tp_rank, tp_size))]
pub fn split_heads(
    total_heads: &Bound<'_, PyAny>,
    tp_rank: &Bound<'_, PyAny>,
    tp_size: &Bound<'_, PyAny>,
) -> PyResult<(u64, u64)> {
    let (total, rank) = (count("total_heads", total_heads)?, count("tp_rank", tp_rank)?);
    kv_planner::split_heads(total, rank, count("tp_size", tp_size)?).or_raise()
}
