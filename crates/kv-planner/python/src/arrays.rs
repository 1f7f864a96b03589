//! Owns every conversion between Python numbers or arrays and owned Rust data,
//! and the refusal of what does not convert. It does not own any computation.

use kv_planner::{ErrorKind, PlanError, Value};
use numpy::{IntoPyArray, PyArray1, PyReadonlyArray1, PyUntypedArray, PyUntypedArrayMethods};
use pyo3::PyClass;
use pyo3::prelude::*;
use pyo3::pyclass::boolean_struct::True;
use pyo3::types::{PyBool, PyFloat, PyIterator, PyList, PyTuple};

use crate::errors::{detached, guarded, to_python};
use crate::views;

fn refuse(name: &str, expected: &str, got: String) -> PyErr {
    to_python(PlanError::new(
        ErrorKind::ArgumentError,
        name,
        got,
        expected,
        "the argument cannot be read as that",
        "convert it before the call",
    ))
}

fn describe(value: &Bound<'_, PyAny>) -> String {
    let kind = value.get_type().name().map(|name| name.to_string()).unwrap_or_default();
    match value.repr() {
        Ok(text) if text.to_string().len() <= 60 => format!("{kind} {text}"),
        _ => kind,
    }
}

/// The refusal of a value that is not what an argument takes.
pub fn refuse_value(name: &str, expected: &str, value: &Bound<'_, PyAny>) -> PyErr {
    refuse(name, expected, describe(value))
}

/// A count, size, id or address: a Python or numpy integer, 0 or more.
pub fn count(name: &str, value: &Bound<'_, PyAny>) -> PyResult<u64> {
    if value.is_instance_of::<PyBool>() {
        return Err(refuse(name, "an integer", describe(value)));
    }
    value.extract().map_err(|_| refuse(name, "an integer in 0..2**64", describe(value)))
}

/// A count with a default for an argument that was left out.
pub fn count_or(name: &str, value: Option<&Bound<'_, PyAny>>, default: u64) -> PyResult<u64> {
    value.map_or(Ok(default), |value| count(name, value))
}

/// A count that may be `None`.
pub fn optional_count(name: &str, value: Option<&Bound<'_, PyAny>>) -> PyResult<Option<u64>> {
    value.map(|value| count(name, value)).transpose()
}

/// A sequence of counts.
pub fn counts(name: &str, value: &Bound<'_, PyAny>) -> PyResult<Vec<u64>> {
    sequence(name, "integers", value)?.map(|item| count(name, &item?)).collect()
}

/// Parts of the objects in a sequence, all of one class.
pub fn instances<T, R>(name: &str, class: &str, value: &Bound<'_, PyAny>, take: impl Fn(&T) -> R) -> PyResult<Vec<R>>
where
    T: PyClass<Frozen = True> + Sync,
{
    let items = sequence(name, class, value)?;
    let one = |(position, item): (usize, PyResult<Bound<'_, PyAny>>)| {
        let item = item?;
        let own = item.cast::<T>().map_err(|_| refuse_value(&format!("{name}[{position}]"), class, &item))?;
        Ok(take(own.get()))
    };
    items.enumerate().map(one).collect()
}

/// The items of a sequence of `what`.
pub fn sequence<'py>(name: &str, what: &str, value: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyIterator>> {
    value.try_iter().map_err(|_| refuse(name, &format!("a sequence of {what}"), describe(value)))
}

/// A half-open range `(start, stop)`.
pub fn range(name: &str, value: &Bound<'_, PyAny>) -> PyResult<(u64, u64)> {
    match counts(name, value)?[..] {
        [start, stop] => Ok((start, stop)),
        _ => Err(refuse(name, "a pair (start, stop)", describe(value))),
    }
}

/// Words of a vocabulary, from a sequence of texts.
pub fn words<T>(
    name: &str,
    value: &Bound<'_, PyAny>,
    parse: impl Fn(&str) -> kv_planner::Result<T>,
) -> PyResult<Vec<T>> {
    let as_list = !value.is_instance_of::<pyo3::types::PyString>();
    let texts: Vec<String> = match value.extract() {
        Ok(texts) if as_list => texts,
        _ => return Err(refuse(name, "a sequence of words", describe(value))),
    };
    texts.iter().map(|text| parse(text).map_err(to_python)).collect()
}

/// A fill: an integer, a float or a bool.
pub fn fill(name: &str, value: &Bound<'_, PyAny>) -> PyResult<kv_planner::Fill> {
    if let Ok(number) = value.cast::<PyFloat>() {
        return Ok(kv_planner::Fill::Float(number.value()));
    }
    let number: i64 = value.extract().map_err(|_| refuse(name, "an integer, a float or a bool", describe(value)))?;
    Ok(kv_planner::Fill::Int(number))
}

/// A value that an error or a difference reports: an integer, a text or `None`.
pub fn reported(name: &str, value: &Bound<'_, PyAny>) -> PyResult<Value> {
    if value.is_none() {
        return Ok(Value::Absent);
    }
    if let Ok(number) = value.extract::<i128>() {
        return Ok(Value::Int(number));
    }
    let text: Option<String> = value.extract().ok();
    text.map(Value::Text).ok_or_else(|| refuse(name, "an integer, a text or None", describe(value)))
}

/// Work over fewer items keeps the GIL and reads the array where it lies; giving the GIL
/// up and a copy would take longer than the work.
pub const SHORT: usize = 4096;

/// Runs `work` over the indices, tokens or lengths in a 1-D int32 or int64 array of any stride, or a list: in place and
/// with the GIL where they are fewer than `short`, else over a copy and without it.
pub fn over_indices<T: Send>(
    py: Python<'_>,
    name: &str,
    value: &Bound<'_, PyAny>,
    short: usize,
    work: impl FnOnce(&[i64]) -> kv_planner::Result<T> + Send,
) -> PyResult<T> {
    if let Some(items) = views::in_place(value)
        && items.len() < short
    {
        return guarded(|| work(items));
    }
    let items = indices(name, value)?;
    if items.len() < short { guarded(|| work(&items)) } else { detached(py, || work(&items)) }
}

/// The same over two arrays.
pub fn over_two<T: Send>(
    py: Python<'_>,
    first: (&str, &Bound<'_, PyAny>),
    second: (&str, &Bound<'_, PyAny>),
    work: impl FnOnce(&[i64], &[i64]) -> kv_planner::Result<T> + Send,
) -> PyResult<T> {
    if let (Some(a), Some(b)) = (views::in_place(first.1), views::in_place(second.1))
        && a.len() + b.len() < SHORT
    {
        return guarded(|| work(a, b));
    }
    let (a, b) = (indices(first.0, first.1)?, indices(second.0, second.1)?);
    if a.len() + b.len() < SHORT { guarded(|| work(&a, &b)) } else { detached(py, || work(&a, &b)) }
}

/// Indices or lengths: a 1-D int32 or int64 array of any stride, or a list.
pub fn indices(name: &str, value: &Bound<'_, PyAny>) -> PyResult<Vec<i64>> {
    const EXPECTED: &str = "a 1-D int32 or int64 array";
    if let Ok(array) = value.cast::<PyUntypedArray>() {
        let aligned: bool = array.getattr("flags")?.getattr("aligned")?.extract()?;
        let array = if aligned { array.as_any().clone() } else { array.call_method0("copy")? };
        if let Ok(wide) = array.extract::<PyReadonlyArray1<'_, i64>>() {
            return Ok(wide.as_array().to_vec());
        }
        if let Ok(narrow) = array.extract::<PyReadonlyArray1<'_, i32>>() {
            return Ok(narrow.as_array().iter().map(|number| i64::from(*number)).collect());
        }
        let array = array.cast::<PyUntypedArray>()?;
        let shape = PyTuple::new(array.py(), array.shape())?.repr()?;
        return Err(refuse(name, EXPECTED, format!("{} of shape {shape}", array.dtype().str()?)));
    }
    if value.is_instance_of::<PyList>() || value.is_instance_of::<PyTuple>() {
        return value.extract().map_err(|_| refuse(name, &format!("{EXPECTED} or a list"), describe(value)));
    }
    Err(refuse(name, &format!("{EXPECTED} or a list"), describe(value)))
}

/// A read-only numpy array that takes the vector over without a copy.
pub fn array<T: numpy::Element>(py: Python<'_>, values: Vec<T>) -> PyResult<Py<PyArray1<T>>> {
    Ok(views::read_only(values.into_pyarray(py)).unbind())
}
