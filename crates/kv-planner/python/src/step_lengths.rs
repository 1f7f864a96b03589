//! Owns the Python faces of a step's lengths, positions, capacities and moves. It does
//! not own their arithmetic, nor the arena, which is `steps`.

use numpy::PyArray1;
use pyo3::prelude::*;

use crate::arrays::{SHORT, array, count, count_or, over_indices, over_two, range};
use crate::errors::guarded;

type Given<'a, 'py> = &'a Bound<'py, PyAny>;
type Int64 = Py<PyArray1<i64>>;

/// Returns the KV lengths that attention reads in one draft step: the prefix and one token a step. Mutates nothing.
///
/// Args:
///     prefix_lens: Shape: [rows]; dtype int32 or int64; 0 is a padded row and stays 0.
///     step: Draft step, from 0. Every step has its own result; nothing is added to an earlier one's.
///
/// Returns:
///     Shape: [rows]; dtype int64; read-only.
///
/// Raises:
///     LengthError: A negative length, or a sum that leaves int64.
#[pyfunction]
#[pyo3(signature = (prefix_lens, *, step))]
pub fn draft_lengths(py: Python<'_>, prefix_lens: Given<'_, '_>, step: Given<'_, '_>) -> PyResult<Int64> {
    let step = count("step", step)?;
    array(py, over_indices(py, "prefix_lens", prefix_lens, SHORT, |lens| kv_planner::draft_lengths(lens, step))?)
}

/// Returns the lengths that a rank's own tokens see when a step's token rows are divided over ranks.
///
/// Request r has the token rows r * width..(r + 1) * width. The last of them that the rank owns sees the request's length less
/// the tokens behind it; a request without tokens of the rank, and a padded one, has length 0. Never negative.
///
/// Args:
///     kv_lens: Shape: [rows]; dtype int32 or int64; lengths with the step's own tokens.
///     width: Tokens of a request in the step.
///     own: Token rows (start, stop) of the rank.
///
/// Returns:
///     Shape: [rows]; dtype int64; read-only.
///
/// Raises:
///     LengthError: A negative length, a width of 0, or a start behind its stop.
#[pyfunction]
#[pyo3(signature = (kv_lens, *, width, own))]
pub fn local_lengths(
    py: Python<'_>,
    kv_lens: Given<'_, '_>,
    width: Given<'_, '_>,
    own: Given<'_, '_>,
) -> PyResult<Int64> {
    let (width, own) = (count("width", width)?, range("own", own)?);
    array(py, over_indices(py, "kv_lens", kv_lens, SHORT, |lens| kv_planner::local_lengths(lens, width, own))?)
}

/// Returns the lengths of a draft-extend step whose window has context tokens before it.
///
/// Args:
///     seq_lens: Lengths before the verify step. Shape: [rows]; dtype int32 or int64.
///     width: Tokens of the window, without the front.
///     front: Context tokens before it.
///
/// Returns:
///     max(length - front, 0), width + front, and length + width of every row. Shape: [rows] each; dtype int64; read-only.
///
/// Raises:
///     LengthError: A negative length, or a sum that leaves int64.
#[pyfunction]
#[pyo3(signature = (seq_lens, *, width, front))]
pub fn widened_lengths(
    py: Python<'_>,
    seq_lens: Given<'_, '_>,
    width: Given<'_, '_>,
    front: Given<'_, '_>,
) -> PyResult<(Int64, Int64, Int64)> {
    let (width, front) = (count("width", width)?, count("front", front)?);
    let work = |lens: &[i64]| kv_planner::widened_lengths(lens, width, front);
    let widened = over_indices(py, "seq_lens", seq_lens, SHORT, work)?;
    Ok((array(py, widened.prefix)?, array(py, widened.extend)?, array(py, widened.after)?))
}

/// Returns the first position of every row's front that holds a real token: max(front - kept, front - length, 0).
///
/// Args:
///     seq_lens: Lengths before the verify step. Shape: [rows]; dtype int32 or int64.
///     kept: Boundary tokens kept for every row; the same shape.
///     front: Context tokens before the window.
///
/// Returns:
///     Shape: [rows]; dtype int64; read-only; `front` where a row has no real token there.
///
/// Raises:
///     LengthError: A negative number, or unlike shapes.
#[pyfunction]
#[pyo3(signature = (seq_lens, kept, *, front))]
pub fn first_valid(
    py: Python<'_>,
    seq_lens: Given<'_, '_>,
    kept: Given<'_, '_>,
    front: Given<'_, '_>,
) -> PyResult<Int64> {
    let front = count("front", front)?;
    let work = |lens: &[i64], kept: &[i64]| kv_planner::first_valid(lens, kept, front);
    array(py, over_two(py, ("seq_lens", seq_lens), ("kept", kept), work)?)
}

/// Returns the pages that a sliding window keeps: trimmed to the prompt first, then clipped to the window's last pages.
///
/// Args:
///     pages: Pages of a request. Shape: [n]; dtype int32 or int64. There may be more than the prompt fills.
///     tokens: Tokens of the prompt.
///     page_size: Tokens of a page.
///     window: Pages of the window.
///
/// Returns:
///     Shape: [at most window]; dtype int64; read-only.
///
/// Raises:
///     LengthError: Fewer pages than the prompt needs, or a page size of 0.
#[pyfunction]
#[pyo3(signature = (pages, *, tokens, page_size, window))]
pub fn window_pages(
    py: Python<'_>,
    pages: Given<'_, '_>,
    tokens: Given<'_, '_>,
    page_size: Given<'_, '_>,
    window: Given<'_, '_>,
) -> PyResult<Int64> {
    let (tokens, page_size, window) =
        (count("tokens", tokens)?, count("page_size", page_size)?, count("window", window)?);
    let work = |pages: &[i64]| kv_planner::window_pages(pages, tokens, page_size, window);
    array(py, over_indices(py, "pages", pages, SHORT, work)?)
}

/// Returns the first token of every row, and the number of all, when rows have unequal counts: 0, c0, c0 + c1, ...
///
/// Args:
///     counts: Tokens of every live row. Shape: [live rows]; dtype int32 or int64.
///     rows: Rows; those beyond the live ones are empty. None is the live ones.
///
/// Returns:
///     Shape: [rows + 1]; dtype int64; read-only.
///
/// Raises:
///     LengthError: A negative count, or more live rows than rows.
#[pyfunction]
#[pyo3(signature = (counts, *, rows=None))]
pub fn token_offsets(py: Python<'_>, counts: Given<'_, '_>, rows: Option<Given<'_, '_>>) -> PyResult<Int64> {
    let rows = rows.map(|rows| count("rows", rows)).transpose()?;
    let work = |counts: &[i64]| kv_planner::token_offsets(counts, rows.unwrap_or(counts.len() as u64));
    array(py, over_indices(py, "counts", counts, SHORT, work)?)
}

/// Returns the end of every row's query tokens, as attention over packed rows takes them.
///
/// Args:
///     counts: Tokens of every live row. Shape: [live rows]; dtype int32 or int64.
///     rows: Rows of the bucket.
///     padded_width: Tokens of every padded row, so that the last end is the number of token rows.
///
/// Returns:
///     Shape: [rows]; dtype int64; read-only.
///
/// Raises:
///     LengthError: A negative count, more live rows than rows, or a sum that leaves int64.
#[pyfunction]
#[pyo3(signature = (counts, *, rows, padded_width=None), text_signature = "(counts, *, rows, padded_width=0)")]
pub fn query_ends(
    py: Python<'_>,
    counts: Given<'_, '_>,
    rows: Given<'_, '_>,
    padded_width: Option<Given<'_, '_>>,
) -> PyResult<Int64> {
    let (rows, width) = (count("rows", rows)?, count_or("padded_width", padded_width, 0)?);
    array(py, over_indices(py, "counts", counts, SHORT, |counts| kv_planner::query_ends(counts, rows, width))?)
}

/// Returns the index of the last accepted token of each row when rows have unequal counts; `select_index` is for equal ones.
///
/// Args:
///     num_correct_drafts: Accepted drafts without the bonus token. Shape: [live rows]; dtype int32 or int64.
///     counts: Tokens of every live row, the front included; the same shape.
///     rows: Rows of the bucket.
///     front: Leading context tokens of a widened window.
///
/// Returns:
///     Shape: [rows]; dtype int64; read-only. Padded rows point at the batch's last token, or at 0.
///
/// Raises:
///     LengthError: A count or a draft that leaves its row, unlike shapes, or more live rows than rows.
#[pyfunction]
#[pyo3(
    signature = (num_correct_drafts, counts, *, rows, front=None),
    text_signature = "(num_correct_drafts, counts, *, rows, front=0)"
)]
pub fn last_accepted(
    py: Python<'_>,
    num_correct_drafts: Given<'_, '_>,
    counts: Given<'_, '_>,
    rows: Given<'_, '_>,
    front: Option<Given<'_, '_>>,
) -> PyResult<Int64> {
    let (rows, front) = (count("rows", rows)?, count_or("front", front, 0)?);
    let work = |drafts: &[i64], counts: &[i64]| kv_planner::last_accepted(drafts, counts, rows, front);
    array(py, over_two(py, ("num_correct_drafts", num_correct_drafts), ("counts", counts), work)?)
}

/// Returns the token rows that a step's buffers need: the budget, and for every request the drafts beyond the one token that
/// the budget counts for it. Writers and readers of the buffers both ask here.
///
/// Raises:
///     AddressOverflow: The number leaves 64 bits.
#[pyfunction]
#[pyo3(signature = (budget, *, requests, speculative_tokens))]
pub fn token_capacity(
    budget: Given<'_, '_>,
    requests: Given<'_, '_>,
    speculative_tokens: Given<'_, '_>,
) -> PyResult<u64> {
    let (budget, requests) = (count("budget", budget)?, count("requests", requests)?);
    let tokens = count("speculative_tokens", speculative_tokens)?;
    guarded(|| kv_planner::token_capacity(budget, requests, tokens))
}

/// Returns the token slots of the whole pages that the lengths need, each request by itself.
///
/// Raises:
///     LengthError: A negative length, or a page size of 0.
#[pyfunction]
#[pyo3(signature = (lengths, *, page_size))]
pub fn page_capacity(py: Python<'_>, lengths: Given<'_, '_>, page_size: Given<'_, '_>) -> PyResult<u64> {
    let page_size = count("page_size", page_size)?;
    over_indices(py, "lengths", lengths, SHORT, |lengths| kv_planner::page_capacity(lengths, page_size))
}

/// Returns KV lengths cut to what a block table addresses, and which of them stood as given.
///
/// Args:
///     kv_lens: Shape: [rows]; dtype int32 or int64.
///     columns: Pages of the block table.
///     page_size: Tokens of a page.
///
/// Returns:
///     Lengths, dtype int64, and whether each is whole, dtype bool. Shape: [rows] each; read-only. A row that was cut has no
///     slot for its last tokens: skip its draft.
///
/// Raises:
///     LengthError: A negative length, or a page size of 0.
#[pyfunction]
#[pyo3(signature = (kv_lens, *, columns, page_size))]
pub fn addressable(
    py: Python<'_>,
    kv_lens: Given<'_, '_>,
    columns: Given<'_, '_>,
    page_size: Given<'_, '_>,
) -> PyResult<(Int64, Py<PyArray1<bool>>)> {
    let (columns, page_size) = (count("columns", columns)?, count("page_size", page_size)?);
    let work = |lens: &[i64]| kv_planner::addressable(lens, columns, page_size);
    let (cut, whole) = over_indices(py, "kv_lens", kv_lens, SHORT, work)?;
    Ok((array(py, cut)?, array(py, whole)?))
}

/// Returns whether `drafts` placeholders after `tokens` tokens stay within a context of `limit` tokens.
#[pyfunction]
#[pyo3(signature = (tokens, *, drafts, limit))]
pub fn placeholders_fit(tokens: Given<'_, '_>, drafts: Given<'_, '_>, limit: Given<'_, '_>) -> PyResult<bool> {
    Ok(kv_planner::placeholders_fit(count("tokens", tokens)?, count("drafts", drafts)?, count("limit", limit)?))
}

/// Returns the cache slots to copy after a verify step, so that every row's accepted tokens lie one behind the other.
///
/// Args:
///     accept_index: Positions of accepted tokens in the flat list of all rows' tokens, `columns` a row, ascending, then -1.
///         Shape: [rows * columns]; dtype int32 or int64.
///     slots: Cache slots of that list. Shape: [rows * width].
///     columns: Entries of a row in `accept_index`: steps of a path + 1. A tree of many drafts has more tokens than that.
///     width: Tokens of a row.
///
/// Returns:
///     Slots to read and slots to write, in an order in which none is overwritten before it is read; and the position of the
///     last accepted token of each row, -1 where there is none. dtype int64; read-only.
///
/// Raises:
///     LengthError: A position outside its row or not ascending, rows that are cut, or a negative slot.
#[pyfunction]
#[pyo3(signature = (accept_index, slots, *, columns, width))]
pub fn accepted_moves(
    py: Python<'_>,
    accept_index: Given<'_, '_>,
    slots: Given<'_, '_>,
    columns: Given<'_, '_>,
    width: Given<'_, '_>,
) -> PyResult<(Int64, Int64, Int64)> {
    let (columns, width) = (count("columns", columns)?, count("width", width)?);
    let work = |accepted: &[i64], slots: &[i64]| kv_planner::accepted_moves(accepted, columns, slots, width);
    let moves = over_two(py, ("accept_index", accept_index), ("slots", slots), work)?;
    Ok((array(py, moves.source)?, array(py, moves.destination)?, array(py, moves.last)?))
}
