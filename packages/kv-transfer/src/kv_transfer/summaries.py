"""What one rank has to deliver for a page, and for a request, of each group: both ends compare and count by it.

Adds up routes of the planner; it does not make them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TypeAlias

import kv_planner

from kv_transfer.coverage import Layer
from kv_transfer.messages import GroupSummary
from kv_transfer.spans import Interleave, Span

__all__ = ["RouteSummary", "Summaries", "is_empty", "kept_by_all", "summarise"]


def kept_by_all(component: kv_planner.Component, part: kv_planner.Part) -> bool:
    """Whether every context-parallel rank keeps all pages of a component, under the group's page numbers."""
    return part == "draft" or component in ("index_key", "index_scale")


@dataclasses.dataclass(frozen=True, slots=True)
class RouteSummary:
    """What one rank has to deliver for one page, and for one request.

    Attributes:
        layers: Layers with pages, in the order of the route, each once.
        bytes_per_page: Over all layers and components.
        states: Layers with a row a request.
        bytes_per_request: Bytes of those rows.
        bytes_kept_by_all: The part of `bytes_per_page` that each of several context-parallel ranks gets of every page.
        page_size: Tokens of a page.
    """

    layers: tuple[Layer, ...]
    bytes_per_page: int
    states: tuple[Layer, ...] = ()
    bytes_per_request: int = 0
    bytes_kept_by_all: int = 0
    page_size: int = 1

    @classmethod
    def of(cls, route: kv_planner.Route) -> RouteSummary:
        """Adds up the pairs of a route."""
        found = []
        for kind in ("page", "request_row"):
            pairs = [pair for pair in route.pairs if pair.item_kind == kind]
            layers = tuple(dict.fromkeys((pair.part, pair.layer_id) for pair in pairs))
            found.append((layers, sum(pair.rows * pair.row_bytes for pair in pairs)))
        shared = route.destination.placement.dcp_size > 1
        pages = [pair for pair in route.pairs if pair.item_kind == "page"]
        whole = sum(pair.rows * pair.row_bytes for pair in pages if shared and kept_by_all(pair.component, pair.part))
        return cls(*found[0], *found[1], whole, route.source.layout.page_size)

    @classmethod
    def from_message(cls, message: GroupSummary) -> RouteSummary:
        """From the wire."""
        return cls(message.layers, message.bytes_per_page, message.states, message.bytes_per_request)

    def message(self) -> GroupSummary:
        """For the wire."""
        return GroupSummary(
            layers=self.layers,
            bytes_per_page=self.bytes_per_page,
            states=self.states,
            bytes_per_request=self.bytes_per_request,
        )

    def nbytes(self, span: Span, interleave: Interleave) -> int:
        """Bytes of a request's pages and rows for one decode rank."""
        shared = self.bytes_per_page - self.bytes_kept_by_all
        by_token = interleave == "token"
        own = shared // self.page_size * span.own_tokens if by_token else shared * span.own_pages
        return own + self.bytes_kept_by_all * span.pages + self.bytes_per_request

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to send."""
        return not (self.layers or self.states)


Summaries: TypeAlias = Mapping[str, RouteSummary]
"""Of each group, by name."""


def summarise(routes: Mapping[str, kv_planner.Route]) -> dict[str, RouteSummary]:
    """The summaries of a rank's routes."""
    return {name: RouteSummary.of(route) for name, route in routes.items()}


def is_empty(summaries: Summaries) -> bool:
    """Whether a rank has nothing to send in any group."""
    return all(summary.is_empty for summary in summaries.values())
