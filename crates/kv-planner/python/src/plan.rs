//! Owns the Python faces of `Runs` and `Plan`. It does not own their arithmetic, nor
//! the step to addresses.

use kv_planner::{Describe, ItemKind, Plan, Runs};
use numpy::PyArray1;
use pyo3::prelude::*;

use crate::agree::{PyRoute, slice_of};
use crate::arrays::{array, count, over_two};
use crate::errors::{OrRaise, guarded};
use crate::views;

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
        Ok(PyRuns(over_two(py, source, destination, |source, destination| views::runs(source, destination, kind))?))
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
pub struct PyPlan(pub Plan);

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
