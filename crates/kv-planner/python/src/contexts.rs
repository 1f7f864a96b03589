//! Owns the Python faces of `page_interleaved` and `token_interleaved`. It does not own
//! the rule of who has which tokens.

use kv_planner::{Context, Slots, Span};
use pyo3::prelude::*;

use crate::arrays::{count, count_or, over_two, refuse_value};
use crate::plan::PyRuns;

type Given<'a, 'py> = &'a Bound<'py, PyAny>;

fn span(
    page_size: Given<'_, '_>,
    prefix_tokens: Option<Given<'_, '_>>,
    page_offset: Option<Given<'_, '_>>,
    tokens: Given<'_, '_>,
) -> PyResult<Span> {
    Ok(Span {
        page_size: count("page_size", page_size)?,
        prefix_tokens: count_or("prefix_tokens", prefix_tokens, 0)?,
        page_offset: count_or("page_offset", page_offset, 0)?,
        tokens: count("tokens", tokens)?,
    })
}

fn context(rank: Given<'_, '_>, size: Given<'_, '_>) -> PyResult<Context> {
    Ok(Context { rank: count("dcp_rank", rank)?, size: count("dcp_size", size)? })
}

/// Returns the page pairs of one rank of a side with decode context parallelism, where whole pages go to the ranks in turn.
///
/// Page k of the request, counted behind the prefix, goes to rank k % dcp_size. Its place is the rank's page
/// destination_pages[k // dcp_size] ("local"), or, in buffers that hold all tokens on every rank, such as index keys and
/// draft pages, page destination_pages[k // dcp_size] * dcp_size + k % dcp_size ("global").
///
/// Args:
///     source_pages: Pages of the sending side, from page `page_offset` of the request on. Shape: [n]; dtype int32 or int64.
///     destination_pages: Pages of the receiving side, one for every page_size * dcp_size tokens behind the prefix.
///     page_size: Tokens of a page, on either side.
///     dcp_rank: The receiving rank.
///     dcp_size: Ranks that share the tokens.
///     tokens: Tokens of the request behind the prefix, over all its chunks.
///     prefix_tokens: Tokens that the receiving side has already.
///     page_offset: Pages of the request before this chunk.
///     slots: What the route's buffers hold: "local" or "global". Slice the route by component where it has both.
///
/// Raises:
///     LengthError: A prefix that is not whole virtual pages, or more pages than the tokens fill.
///     UnequalPages: Too few destination pages.
///     PlacementError: The rank is not below the size.
///     RunsError: A page is 0, negative or doubly written.
#[pyfunction]
#[pyo3(
    signature = (source_pages, destination_pages, *, page_size, dcp_rank, dcp_size, tokens, prefix_tokens=None, page_offset=None, slots="local"),
    text_signature = "(source_pages, destination_pages, *, page_size, dcp_rank, dcp_size, tokens, prefix_tokens=0, page_offset=0, slots='local')"
)]
#[allow(clippy::too_many_arguments)]
pub fn page_interleaved(
    py: Python<'_>,
    source_pages: Given<'_, '_>,
    destination_pages: Given<'_, '_>,
    page_size: Given<'_, '_>,
    dcp_rank: Given<'_, '_>,
    dcp_size: Given<'_, '_>,
    tokens: Given<'_, '_>,
    prefix_tokens: Option<Given<'_, '_>>,
    page_offset: Option<Given<'_, '_>>,
    slots: &str,
) -> PyResult<PyRuns> {
    let slots = match slots {
        "local" => Slots::Local,
        "global" => Slots::Global,
        other => return Err(refuse_value("slots", "local | global", pyo3::types::PyString::new(py, other).as_any())),
    };
    let (span, context) = (span(page_size, prefix_tokens, page_offset, tokens)?, context(dcp_rank, dcp_size)?);
    let (source, destination) = (("source_pages", source_pages), ("destination_pages", destination_pages));
    let work =
        |source: &[i64], destination: &[i64]| kv_planner::page_interleaved(source, destination, span, context, slots);
    Ok(PyRuns(over_two(py, source, destination, work)?))
}

/// Returns the token pairs of one rank of a side with decode context parallelism, where tokens go to the ranks in turn.
///
/// Token t of the request, counted behind the prefix, goes to rank t % dcp_size, as its token t // dcp_size. Items are token
/// slots; join them with `route.by_token()`.
///
/// Args:
///     source_pages: As in `page_interleaved`.
///     destination_pages: As in `page_interleaved`.
///     page_size: Tokens of a page, on either side.
///     dcp_rank: The receiving rank.
///     dcp_size: Ranks that share the tokens.
///     tokens: Tokens of the request behind the prefix, over all its chunks.
///     prefix_tokens: Tokens that the receiving side has already.
///     page_offset: Pages of the request before this chunk.
///
/// Raises:
///     LengthError: A prefix that is not whole virtual pages, or more pages than the tokens fill.
///     UnequalPages: Too few destination pages.
///     PlacementError: The rank is not below the size.
///     RunsError: A page is 0, negative or doubly written.
#[pyfunction]
#[pyo3(
    signature = (source_pages, destination_pages, *, page_size, dcp_rank, dcp_size, tokens, prefix_tokens=None, page_offset=None),
    text_signature = "(source_pages, destination_pages, *, page_size, dcp_rank, dcp_size, tokens, prefix_tokens=0, page_offset=0)"
)]
#[allow(clippy::too_many_arguments)]
pub fn token_interleaved(
    py: Python<'_>,
    source_pages: Given<'_, '_>,
    destination_pages: Given<'_, '_>,
    page_size: Given<'_, '_>,
    dcp_rank: Given<'_, '_>,
    dcp_size: Given<'_, '_>,
    tokens: Given<'_, '_>,
    prefix_tokens: Option<Given<'_, '_>>,
    page_offset: Option<Given<'_, '_>>,
) -> PyResult<PyRuns> {
    let (span, context) = (span(page_size, prefix_tokens, page_offset, tokens)?, context(dcp_rank, dcp_size)?);
    let (source, destination) = (("source_pages", source_pages), ("destination_pages", destination_pages));
    let work = |source: &[i64], destination: &[i64]| kv_planner::token_interleaved(source, destination, span, context);
    Ok(PyRuns(over_two(py, source, destination, work)?))
}
