"""Owns the refusals that all movers share: page lists that do not pair, and slots that are not whole pages."""

from __future__ import annotations

import numpy as np

from kv_pool.errors import MoveRefused
from kv_pool.tables import IndexLike, IntArray, as_index_array, is_whole, shown, whole_number

__all__ = ["check_layer", "check_pages", "whole_pages"]


def check_pages(
    device_pages: IndexLike, host_pages: IndexLike, *, num_device: int, num_host: int
) -> tuple[IntArray, IntArray]:
    """Return both lists as int64, or refuse them; see `Mover.backup`."""
    device = _pages("device_pages", device_pages, num_device)
    host = _pages("host_pages", host_pages, num_host)
    if device.size != host.size:
        raise MoveRefused(
            "device_pages, host_pages",
            given=f"{device.size} and {host.size} pages",
            expected="one host page a device page",
            consequence="pages would be paired by chance",
            remedy="pass lists of one length",
        )
    return device, host


def _pages(name: str, values: IndexLike, count: int) -> IntArray:
    pages = as_index_array(name, values, MoveRefused)
    if pages.size and (int(pages.min()) < 1 or int(pages.max()) >= count):
        raise MoveRefused(
            name,
            given=pages[(pages < 1) | (pages >= count)].tolist(),
            expected=f"page ids in 1..{count - 1}",
            consequence="page 0 is reserved, and other ids belong to no page of the pool",
            remedy="pass pages that the pool's allocator handed out",
        )
    ordered = np.sort(pages)
    twice = ordered[1:][ordered[1:] == ordered[:-1]]
    if twice.size:
        raise MoveRefused(
            name,
            given=f"page {int(twice[0])} more than once",
            expected="every page once",
            consequence="which of two copies wins would be left to chance",
            remedy="name each page once",
        )
    return pages


def check_layer(layer_id: int, known: frozenset[int]) -> None:
    """Refuse a layer that no part has."""
    if not is_whole(layer_id) or layer_id not in known:
        raise MoveRefused(
            "layer_id",
            given=shown(layer_id),
            expected=f"one of {sorted(known)}",
            consequence="nothing would be moved, silently",
            remedy="pass the global layer id of a layer held here",
        )


def whole_pages(slots: IndexLike, page_size: int) -> IntArray:
    """Return the pages of token slots, refusing slots that do not spell whole pages.

    Args:
        slots: One slot a token, in token order. Shape: [tokens]; any integer dtype.
        page_size: Tokens in a page.

    Returns:
        Shape: [tokens / page_size]; dtype int64.

    Raises:
        MoveRefused: A number of slots that is no multiple of the page size, a page that does not start at a page
            boundary, or slots within a page that do not follow one another.
    """
    tokens = as_index_array("slots", slots, MoveRefused)
    consequence = "pages could not be told apart"
    page_size = whole_number("page_size", page_size, least=1, error=MoveRefused, consequence=consequence)
    if tokens.size % page_size:
        raise MoveRefused(
            "slots",
            given=f"{tokens.size} slots with page size {page_size}",
            expected="a multiple of the page size",
            consequence="the last page would be moved whole although only a part was asked for",
            remedy="pass whole pages; the tokens beyond them stay on the device",
        )
    table = tokens.reshape(-1, page_size)
    starts = table[:, 0] if table.size else np.zeros(0, dtype=np.int64)
    crooked = np.flatnonzero((starts % page_size != 0) | (starts < 0))
    if crooked.size:
        raise MoveRefused(
            "slots",
            given=f"page {int(crooked[0])} of the list starting at slot {int(starts[crooked[0]])}",
            expected=f"starts at multiples of {page_size}",
            consequence="another page than the one asked for would be moved",
            remedy="pass page-aligned slots",
        )
    broken = np.flatnonzero((table != starts[:, None] + np.arange(page_size)).any(axis=1)) if table.size else starts
    if broken.size:
        raise MoveRefused(
            "slots",
            given=f"slots {table[broken[0]].tolist()}",
            expected="consecutive slots within a page",
            consequence="tokens of other slots would be moved in their place",
            remedy="pass the slots of a page in order",
        )
    pages: IntArray = starts // page_size
    return pages
