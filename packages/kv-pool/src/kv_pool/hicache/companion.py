"""Owns the concept of a companion: a pool that keeps more of what a page of the cache's own pool holds.

A draft model with layers of other widths, layers that attend to a window, recurrent states: each is a pool of its own,
with pages, an allocator and host memory of its own. They differ in one thing, which pages a hit needs of them:

| companion | a hit of n pages needs | `trailing` |
| --- | --- | --- |
| `every_page` | all n of them | `None` |
| `last_pages` | those that the window of the next token reaches | pages of the window |
| `snapshots` | the state that was saved at its very end | 1 |

It declares; `_member` keeps the pages and moves the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias, get_args

from kv_pool._arguments import check_all, check_kind, check_word
from kv_pool.errors import HostPoolError
from kv_pool.hicache.host_pool import HostPool, MirroredPool
from kv_pool.page_map import PageMap
from kv_pool.state import StatePool
from kv_pool.tables import shown, whole_number

__all__ = ["Companion", "Coverage"]

Coverage: TypeAlias = Literal["every_page", "last_pages", "snapshots"]


class Companion:
    """One pool beside that of the cache. Made by `every_page`, `last_pages` or `snapshots`.

    Attributes:
        name: What it is called in `Acquired` and `accounting`, and in the keys of stored pages.
        coverage: Which pages a hit needs.
        trailing: How many pages at the end of a hit it needs; `None` for all.
        pages: Which page (or row) of its own each device page of the cache has; its own allocator is this one's.
        hosts: Its host memory: one host pool, or one a kind of state; all have the same pages.

    Raises:
        HostPoolError: Pools, allocator and host pools do not belong together.
    """

    def __init__(
        self, name: str, coverage: Coverage, trailing: int | None, pages: PageMap, hosts: Sequence[HostPool]
    ) -> None:
        if not isinstance(name, str) or not name.isprintable() or not name:
            raise HostPoolError(
                "name",
                given=shown(name),
                expected="a text of printable characters, at least one",
                consequence="its stored pages would have no keys",
                remedy="give each companion a name of its own",
            )
        check_word("coverage", coverage, get_args(Coverage), HostPoolError)
        if trailing is not None:
            consequence = "no page would be needed of a hit"
            trailing = whole_number("trailing", trailing, least=1, error=HostPoolError, consequence=consequence)
        check_kind("pages", pages, PageMap, HostPoolError)
        pools = [host.pool for host in check_all("hosts", hosts, HostPool, HostPoolError)]
        rows = coverage == "snapshots"
        rules: list[tuple[str, object, object]] = [
            ("trailing", trailing, {"every_page": None, "snapshots": 1}.get(coverage, trailing or 1)),
            ("hosts", bool(hosts), True),
            ("pages.own.num_pages", {pages.own.num_pages}, {pool.num_pages for pool in pools}),
            ("page size", {pages.own.page_size}, {1 if rows else pages.lead.page_size}),
            ("page size of the pools", {pool.page_size for pool in pools}, {1 if rows else pages.lead.page_size}),
            ("pages of the host pools", len({host.num_pages for host in hosts}), 1),
            ("pages.own.held", pages.own.held, 0),
        ]
        for argument, given, expected in rules:
            if given != expected:
                raise HostPoolError(
                    argument,
                    given=f"{given} of the companion {name!r}",
                    expected=expected,
                    consequence="its pages would be those of somebody else, or of no pool",
                    remedy="make pool, allocator, map and host pools for one another, and use each for one cache",
                )
        self.name = name
        self.coverage = coverage
        self.trailing = trailing
        self.pages = pages
        self.hosts = tuple(hosts)

    @classmethod
    def every_page(cls, name: str, pages: PageMap, host: HostPool) -> Companion:
        """A pool that has something of every page: draft layers that cannot lie in the pool of the target.

        Args:
            name: Its name.
            pages: From the cache's allocator to this pool's, of the same page size.
            host: The host pool that mirrors it.
        """
        return cls(name, "every_page", None, pages, [host])

    @classmethod
    def last_pages(cls, name: str, pages: PageMap, host: HostPool, *, window: int) -> Companion:
        """A pool of layers that attend to a window: the window group of a `HybridPool`, whose `pages` are the map.

        Args:
            name: Its name.
            pages: From the cache's allocator to this pool's, of the same page size.
            host: The host pool that mirrors it.
            window: Tokens before the next one that it attends to.

        Raises:
            HostPoolError: Also for a window below 1.
        """
        consequence = "no token would be attended to"
        tokens = whole_number("window", window, least=1, error=HostPoolError, consequence=consequence)
        size = check_kind("pages", pages, PageMap, HostPoolError).lead.page_size
        return cls(name, "last_pages", -(-tokens // size), pages, [host])

    @classmethod
    def snapshots(
        cls, name: str, pages: PageMap, states: StatePool | Sequence[MirroredPool], hosts: Sequence[HostPool]
    ) -> Companion:
        """States of requests: a running row for each, and rows that were saved at the ends of pages.

        Args:
            name: Its name.
            pages: From the cache's allocator to one of page size 1 over the rows of `states`.
            states: The pool, or one pool of rows a kind (adopted ones).
            hosts: One host pool a kind, in the same order, each with the same pages (rows).

        Raises:
            HostPoolError: Also if a kind has no host pool.
        """
        kinds = [states.kind(kind) for kind in states.kinds] if isinstance(states, StatePool) else states
        kinds = check_all("states", kinds, MirroredPool, HostPoolError)  # type: ignore[type-abstract]
        hosts = check_all("hosts", hosts, HostPool, HostPoolError)
        if [id(host.pool) for host in hosts] != [id(kind) for kind in kinds]:
            raise HostPoolError(
                "hosts",
                given=f"{len(hosts)} host pools",
                expected=f"one for each of {len(kinds)} kinds of the states, in their order",
                consequence="a state that comes back from the host would lack a kind",
                remedy="make a HostPool for every kind",
            )
        return cls(name, "snapshots", 1, pages, hosts)

    @property
    def host(self) -> HostPool:
        """The host pool whose allocator says which host pages are free: the first."""
        return self.hosts[0]

    def __repr__(self) -> str:
        return f"Companion({self.name!r}, {self.coverage}, trailing={self.trailing})"
