//! Owns the one map from Rust error kinds to Python exceptions. It does not own
//! the exceptions, which are plain Python in `kv_planner/errors.py`.

use kv_planner::{Difference, PlanError, Value};
use pyo3::IntoPyObjectExt;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

/// One field on which two layouts differ.
#[pyclass(frozen, eq, hash, module = "kv_planner", name = "Difference")]
#[derive(PartialEq, Eq, Hash)]
pub struct PyDifference(Difference);

#[pymethods]
impl PyDifference {
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

/// `?` on results of the core.
pub trait OrRaise<T> {
    /// The value, or the Python exception.
    fn or_raise(self) -> PyResult<T>;
}

impl<T> OrRaise<T> for kv_planner::Result<T> {
    fn or_raise(self) -> PyResult<T> {
        self.map_err(to_python)
    }
}
