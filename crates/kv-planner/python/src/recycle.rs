//! Owns the memory of large columns between two lowerings: what Python has dropped is
//! written again, because fresh pages of the system cost more than the addresses in
//! them. It does not own what is in a column.

use std::sync::{Mutex, PoisonError};

use numpy::PyArray1;
use pyo3::prelude::*;

use crate::views;

/// Columns that wait to be written again.
static KEPT: Mutex<Vec<Vec<u64>>> = Mutex::new(Vec::new());
/// Shorter columns are the allocator's business.
const LEAST: usize = 4096;
/// Bytes that are kept at most: three columns of 2.8 million blocks.
const MOST: usize = 64 << 20;

/// A column with room for `blocks`, one that was dropped if it fits.
pub fn column(blocks: usize) -> Vec<u64> {
    if blocks < LEAST {
        return Vec::new();
    }
    let mut kept = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
    let fits = |column: &Vec<u64>| column.capacity() >= blocks && column.capacity() / 4 <= blocks;
    kept.iter().position(fits).map(|position| kept.swap_remove(position)).unwrap_or_default()
}

fn keep(mut column: Vec<u64>) {
    if column.capacity() < LEAST || column.capacity() * 8 > MOST {
        return;
    }
    column.clear();
    let mut kept = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
    kept.push(column);
    let mut total: usize = kept.iter().map(|column| column.capacity() * 8).sum();
    while total > MOST {
        total -= kept.remove(0).capacity() * 8;
    }
}

/// Keeps a column alive for the array that shows it.
#[pyclass(frozen, module = "kv_planner", name = "_Column")]
pub struct Owner(Vec<u64>);

impl Owner {
    /// What the column holds, for as long as the owner lives.
    pub fn column(&self) -> &[u64] {
        &self.0
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        keep(std::mem::take(&mut self.0));
    }
}

/// A read-only array over a column, whose memory is used again once the array is gone.
pub fn array(py: Python<'_>, column: Vec<u64>) -> PyResult<Py<PyArray1<u64>>> {
    if column.capacity() < LEAST {
        return Ok(views::read_only(PyArray1::from_slice(py, &column)).unbind());
    }
    Ok(views::read_only(views::shown(Bound::new(py, Owner(column))?)).unbind())
}
