"""What a receiver may offer for a room: pages, first pages and rows of each group, checked before anything is said.

Pure; who holds a page is in `page_holds`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import kv_planner

from kv_transfer.arguments import check_whole, told
from kv_transfer.errors import ArgumentError
from kv_transfer.groups import Group, Groups
from kv_transfer.messages import GroupOffer
from kv_transfer.room_planner import PageLists, by_group, page_array
from kv_transfer.spans import Span, request_span

__all__ = ["Rows", "make_offers", "request_spans"]

Rows = int | Mapping[str, int] | None
"""Row of all groups that have states, or of each by name."""


def request_spans(groups: Groups, tokens: int, first_page: int | Mapping[str, int]) -> dict[str, Span]:
    """Which pages of a request each group with pages is sent.

    Args:
        groups: Of the decode rank.
        tokens: Of the whole prompt.
        first_page: Pages of the request before this one are here already; one number where all groups have one page
            size.

    Raises:
        ArgumentError: A first page that is none, or one number for groups of several page sizes.
    """
    paged = [groups[name] for name in groups.paged]
    sizes = {own.manifest.layout.page_size for own in paged}
    if isinstance(first_page, Mapping):
        groups.check_names("first_page", first_page)
        firsts = {own.name: first_page.get(own.name, 0) for own in paged}
    else:
        if len(sizes) > 1 and first_page:
            raise ArgumentError(
                f"first_page: the groups have pages of {sorted(sizes)} tokens, got one number",
                local=first_page,
                consequence="it would be another token in each group",
                remedy="give the first page of each group, by name",
            )
        firsts = {own.name: first_page for own in paged}
    return {
        own.name: request_span(
            tokens,
            check_whole("first_page", firsts[own.name], 2**31 - 1),
            own.manifest.layout.page_size,
            own.window,
            groups.placement,
        )
        for own in paged
    }


def make_offers(
    groups: Groups,
    parts: Sequence[kv_planner.Part],
    pages: PageLists,
    tokens: int | None,
    first_page: int | Mapping[str, int],
    row: Rows,
) -> tuple[int, dict[str, GroupOffer]]:
    """The tokens of a request, and what each group offers for it.

    Raises:
        ArgumentError: A number that is none, out of range, or missing; pages outside the pool, or not as many as the
            tokens need.
        kv_planner.PlanError: Reserved, negative or doubled pages.
    """
    lists = {}
    for name, given in by_group("destination_pages", pages, groups).items():
        array = page_array("destination_pages", given)
        kv_planner.Runs(array, array)
        lists[name] = array.tolist()
    rows = _rows(groups, parts, row)
    size = groups.placement.dcp_size
    begins = list(first_page.values()) if isinstance(first_page, Mapping) else [first_page]
    for begin in begins:
        check_whole("first_page", begin, 2**31 - 1)
    if size > 1 and (tokens is None or any(begin % size for begin in begins)):
        raise ArgumentError(
            f"tokens, first_page: {size} context-parallel ranks share a request; got tokens {tokens}, "
            f"first_page {first_page}",
            local=first_page,
            consequence="nobody would know which pages are this rank's",
            remedy=f"give the tokens of the whole prompt, and a first_page that is a multiple of {size}",
        )
    if tokens is None:
        if len(groups.paged) > 1 or any(own.window is not None for own in groups):
            raise ArgumentError(
                "tokens: needed where groups of pages or windows are to be told apart, got None",
                consequence="nobody would know which pages of the request are whose",
                remedy="give the tokens of the whole prompt",
            )
        name = groups.paged[0] if groups.paged else groups.names[0]
        lists.setdefault(name, [])
        begin = first_page.get(name, 0) if isinstance(first_page, Mapping) else first_page
        tokens = (begin + len(lists[name])) * groups[name].manifest.layout.page_size
    spans = request_spans(groups, tokens, first_page)
    offers = {}
    for group in groups:
        own, span = lists.get(group.name, []), spans.get(group.name)
        if span is not None:
            _check_pages(groups, group, parts, own, tokens, span)
        offers[group.name] = GroupOffer(
            pages=tuple(own), first_page=span.first if span is not None else 0, row=rows.get(group.name)
        )
    return tokens, offers


def _rows(groups: Groups, parts: Sequence[kv_planner.Part], row: Rows) -> dict[str, int]:
    wanted = {own.name for own in groups if "request_row" in own.kinds(parts)}
    if isinstance(row, Mapping):
        groups.check_names("row", row)
        given = dict(row)
    else:
        given = dict.fromkeys(sorted(wanted) or groups.names[:1], row) if row is not None else {}
    if given.keys() != wanted:
        raise ArgumentError(
            f"row: the layout has {'components' if wanted else 'no component'} with a row a request, got {told(row)}",
            local=row,
            consequence="the states of the request would be missing" if wanted else "nothing was offered",
            remedy="give the row of the request in this rank's pool, where the layout has states and only there",
        )
    for name, number in given.items():
        given[name] = check_whole("row", number, groups[name].items("request_row", parts) - 1)
        kv_planner.Runs([given[name]], [given[name]], item_kind="request_row")
    return given


def _check_pages(
    groups: Groups, group: Group, parts: Sequence[kv_planner.Part], pages: Sequence[int], tokens: int, span: Span
) -> None:
    page_size, size = group.manifest.layout.page_size, groups.placement.dcp_size
    name = f"destination_pages: {groups.label(group.name)}"
    needed = kv_planner.page_count(tokens, page_size)
    if size > 1 and span.places != len(pages):
        raise ArgumentError(
            f"{name}{tokens} tokens from page {span.first} on need {span.places} pages on each of {size} "
            f"context-parallel ranks, got {len(pages)}",
            local=len(pages),
            consequence="pages would be missing or left undefined",
            remedy=f"give one page for every {size} pages of the request, rounded up",
        )
    if size == 1 and needed != span.first + len(pages):
        window = f", of which {span.places} hold the last {group.window} tokens" if group.window is not None else ""
        raise ArgumentError(
            f"{name}{tokens} tokens need {needed} pages of {page_size}{window}, got {len(pages)} from "
            f"page {span.first} on",
            local=len(pages),
            consequence="pages would be missing or left undefined",
            remedy="give as many as Receiver.spans says",
        )
    items = group.items("page", parts)
    if pages and max(pages) >= items and "page" in group.kinds(parts):
        raise ArgumentError(
            f"{name}page {max(pages)} is outside the pool of {items} pages",
            local=max(pages),
            consequence="nothing was offered",
            remedy="use pages of this rank's allocator",
        )
