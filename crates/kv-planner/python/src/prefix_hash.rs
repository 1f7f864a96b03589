//! Owns the Python face of `page_hashes`, and the reading of namespaces. It does
//! not own the chain's rule.

use kv_planner::{ErrorKind, Namespace, PlanError};
use numpy::PyArray1;
use pyo3::prelude::*;
use pyo3::types::{PyString, PyTuple};

use crate::arrays::{array, count, over_indices, refuse_value};
use crate::errors::to_python;

/// Extra key and salt.
pub type Names = (Option<String>, Option<String>);

/// None, an extra key, or a pair of extra key and salt.
pub fn namespace(value: Option<&Bound<'_, PyAny>>) -> PyResult<Namespace> {
    const EXPECTED: &str = "None, a text, or a pair (extra key, salt) of texts or None";
    let Some(value) = value else { return Ok(Namespace::default()) };
    if let Ok(extra_key) = value.extract::<String>() {
        return Ok(Namespace { extra_key: Some(extra_key), cache_salt: None });
    }
    let pair: Option<Names> = value.cast::<PyTuple>().ok().and_then(|pair| pair.extract().ok());
    let (extra_key, cache_salt) = pair.ok_or_else(|| refuse_value("namespace", EXPECTED, value))?;
    Ok(Namespace { extra_key, cache_salt })
}

fn digest(text: &str) -> Option<[u8; 32]> {
    let mut bytes = [0u8; 32];
    if text.len() != 64 || !text.is_ascii() {
        return None;
    }
    for (byte, pair) in bytes.iter_mut().zip(text.as_bytes().chunks(2)) {
        let digit = |letter: u8| (letter as char).to_digit(16);
        *byte = (digit(pair[0])? * 16 + digit(pair[1])?) as u8;
    }
    Some(bytes)
}

/// Returns the hash of every whole page: sha256 over the parent's digest and the page's tokens, in every process the same.
///
/// A page's tokens are little-endian 32-bit words; a page that holds a token above 2**32 - 1 is a byte 0xff and 64-bit
/// words. The first page's parent is the seed of the namespace, or nothing in the unnamed one.
///
/// Args:
///     tokens: Shape: [tokens]; dtype int32 or int64, or a list; each 0 or more.
///     page_size: Tokens of a page.
///     namespace: None, an extra key, or a pair (extra key, salt); None and "" are different.
///     prior: Hash of the page before the first token, to continue a chain; it carries the namespace.
///     partial: Hash a last page that is not full too, as SGLang's own chain does. The prefix index holds whole pages only.
///
/// Returns:
///     64 hexadecimal digits a page.
///
/// Raises:
///     TokenOutOfRange: A negative token.
///     LengthError: A page size of 0.
///     ArgumentError: Both a namespace and a prior hash, or a prior that is no hash.
#[pyfunction]
#[pyo3(
    signature = (tokens, page_size, *, namespace=None, prior=None, partial=false),
    text_signature = "(tokens, page_size, *, namespace=None, prior=None, partial=False)"
)]
pub fn page_hashes<'py>(
    py: Python<'py>,
    tokens: &Bound<'py, PyAny>,
    page_size: &Bound<'py, PyAny>,
    namespace: Option<&Bound<'py, PyAny>>,
    prior: Option<&Bound<'py, PyAny>>,
    partial: bool,
) -> PyResult<Bound<'py, PyTuple>> {
    let digests = chain(py, tokens, page_size, namespace, prior, partial)?;
    let mut text = [0; 64];
    let texts: Vec<_> = digests.iter().map(|digest| PyString::new(py, hex(digest, &mut text))).collect();
    PyTuple::new(py, texts)
}

/// Returns what `page_hashes` returns, as bytes; takes the same arguments and raises the same.
///
/// Returns:
///     Shape: [pages, 32]; dtype uint8; read-only. A row in hexadecimal is the text of `page_hashes`.
#[pyfunction]
#[pyo3(
    signature = (tokens, page_size, *, namespace=None, prior=None, partial=false),
    text_signature = "(tokens, page_size, *, namespace=None, prior=None, partial=False)"
)]
pub fn page_digests<'py>(
    py: Python<'py>,
    tokens: &Bound<'py, PyAny>,
    page_size: &Bound<'py, PyAny>,
    namespace: Option<&Bound<'py, PyAny>>,
    prior: Option<&Bound<'py, PyAny>>,
    partial: bool,
) -> PyResult<Bound<'py, PyAny>> {
    let digests = chain(py, tokens, page_size, namespace, prior, partial)?;
    let flat: Py<PyArray1<u8>> = array(py, digests.into_flattened())?;
    flat.bind(py).call_method1("reshape", ((-1isize, 32),))
}

fn chain(
    py: Python<'_>,
    tokens: &Bound<'_, PyAny>,
    page_size: &Bound<'_, PyAny>,
    namespace: Option<&Bound<'_, PyAny>>,
    prior: Option<&Bound<'_, PyAny>>,
    partial: bool,
) -> PyResult<Vec<[u8; 32]>> {
    let page_size = count("page_size", page_size)?;
    let seed = self::namespace(namespace)?.seed();
    let prior = match prior {
        None => seed,
        Some(given) => {
            let text: Option<String> = given.extract().ok();
            let parsed = text.as_deref().and_then(digest);
            if seed.is_some() {
                return Err(to_python(PlanError::new(
                    ErrorKind::ArgumentError,
                    "namespace",
                    "a namespace and a prior hash",
                    "one of the two",
                    "the namespace would enter the chain a second time",
                    "leave the namespace out: the prior hash carries it",
                )));
            }
            Some(parsed.ok_or_else(|| refuse_value("prior", "64 hexadecimal digits", given))?)
        }
    };
    let work = |tokens: &[i64]| kv_planner::page_hashes(tokens, page_size, prior, partial);
    over_indices(py, "tokens", tokens, 1 << 18, work)
}

fn hex<'a>(digest: &[u8; 32], text: &'a mut [u8; 64]) -> &'a str {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    for (two, byte) in text.chunks_exact_mut(2).zip(digest) {
        two.copy_from_slice(&[DIGITS[usize::from(byte >> 4)], DIGITS[usize::from(byte & 15)]]);
    }
    std::str::from_utf8(text).unwrap_or_default()
}
