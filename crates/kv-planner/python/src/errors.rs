//! Owns the one map from Rust error kinds to Python exceptions. It does not own
//! the exceptions, which are plain Python in `kv_planner/errors.py`.

use kv_planner::{Describe, Difference, PlanError, Value};
use pyo3::IntoPyObjectExt;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use crate::arrays::reported;

/// One field on which two layouts differ. It can be built from what a peer reported.
///
/// Args:
///     field: Name of the field, for example "page_size" or "key/target.dtype".
///     local: Value on the local side, a number where it is one.
///     remote: Value on the remote side.
///     consequence: What would happen if the transfer went on.
///     remedy: What to change.
#[pyclass(frozen, eq, hash, module = "kv_planner", name = "Difference")]
#[derive(PartialEq, Eq, Hash)]
pub struct PyDifference(Difference);

/// Arguments of `Difference`, for pickle.
type Arguments = (String, Py<PyAny>, Py<PyAny>, String, String);

#[pymethods]
impl PyDifference {
    #[new]
    fn new(
        field: String,
        local: &Bound<'_, PyAny>,
        remote: &Bound<'_, PyAny>,
        consequence: String,
        remedy: String,
    ) -> PyResult<Self> {
        let (local, remote) = (reported("local", local)?, reported("remote", remote)?);
        Ok(PyDifference(Difference { field, local, remote, consequence, remedy }))
    }

    fn __getnewargs__(&self, py: Python<'_>) -> PyResult<Arguments> {
        let d = &self.0;
        let (local, remote) = (value(py, &d.local)?, value(py, &d.remote)?);
        Ok((d.field.clone(), local, remote, d.consequence.clone(), d.remedy.clone()))
    }

    #[getter]
    fn field(&self) -> &str {
        &self.0.field
    }

    #[getter]
    fn local(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        value(py, &self.0.local)
    }

    #[getter]
    fn remote(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        value(py, &self.0.remote)
    }

    #[getter]
    fn consequence(&self) -> &str {
        &self.0.consequence
    }

    #[getter]
    fn remedy(&self) -> &str {
        &self.0.remedy
    }

    fn __str__(&self) -> String {
        self.0.to_string()
    }

    /// Says in plain words what this is: a line, and more lines where it has parts.
    fn describe(&self) -> String {
        self.0.describe()
    }

    fn __repr__(&self) -> String {
        format!("Difference({:?}, local={}, remote={})", self.0.field, self.0.local, self.0.remote)
    }
}

fn value(py: Python<'_>, value: &Value) -> PyResult<Py<PyAny>> {
    match value {
        Value::Absent => Ok(py.None()),
        Value::Int(number) => number.into_py_any(py),
        Value::Text(text) => text.into_py_any(py),
    }
}

/// The Python exception of an error; its class has the kind's name.
pub fn to_python(error: PlanError) -> PyErr {
    Python::attach(|py| build(py, &error).unwrap_or_else(|failure| failure))
}

fn build(py: Python<'_>, error: &PlanError) -> PyResult<PyErr> {
    let class = py.import("kv_planner.errors")?.getattr(error.kind.name())?;
    let detail = &error.detail;
    let values = PyDict::new(py);
    values.set_item("local", value(py, &detail.local)?)?;
    values.set_item("remote", value(py, &detail.remote)?)?;
    values.set_item("consequence", &detail.consequence)?;
    values.set_item("remedy", &detail.remedy)?;
    if !detail.differences.is_empty() {
        let differences: Vec<PyDifference> = detail.differences.iter().cloned().map(PyDifference).collect();
        values.set_item("differences", PyTuple::new(py, differences)?)?;
    }
    Ok(PyErr::from_value(class.call((error.to_string(),), Some(&values))?))
}

/// Calls the core; a panic in there is an `InternalError` and never unwinds into Python.
pub fn guarded<T>(call: impl FnOnce() -> kv_planner::Result<T>) -> PyResult<T> {
    kv_planner::guarded(call).or_raise()
}

/// Calls the core as `guarded` does, without the GIL.
pub fn detached<T: Send>(py: Python<'_>, call: impl FnOnce() -> kv_planner::Result<T> + Send) -> PyResult<T> {
    py.detach(|| kv_planner::guarded(call)).or_raise()
}

/// `?` on results of the core that need no guard: words, look-ups.
pub trait OrRaise<T> {
    /// The value, or the Python exception.
    fn or_raise(self) -> PyResult<T>;
}

impl<T> OrRaise<T> for kv_planner::Result<T> {
    fn or_raise(self) -> PyResult<T> {
        self.map_err(to_python)
    }
}
