"""Owns the proof that the parts of a cache were made for one another, and the names of its policies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

import numpy as np
from kv_planner import PrefixIndex

from kv_pool._arguments import check_all, check_kind, check_optional, check_word
from kv_pool.allocator import PageAllocator
from kv_pool.errors import CacheError, HostPoolError, UnsupportedMover
from kv_pool.hicache._inflight import CopyLimits
from kv_pool.hicache.canary import Canary
from kv_pool.hicache.companion import Companion
from kv_pool.hicache.host_pool import HostPool, MirroredPool
from kv_pool.hicache.movers import Mover
from kv_pool.hicache.storage import StorageTier
from kv_pool.hicache.streams import Streams
from kv_pool.tables import as_index_array, whole_number

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kv_pool.hicache.acquired import Acquired
    from kv_pool.tables import IndexLike, IntArray

__all__ = ["WritePolicy", "check_options", "check_parts", "check_progress", "check_prompt", "check_text", "no_storage"]

WritePolicy: TypeAlias = Literal["write_through", "write_through_selective", "write_back"]


def check_parts(
    pool: MirroredPool,
    allocator: PageAllocator,
    host: HostPool,
    index: PrefixIndex,
    policy: WritePolicy,
    storage: StorageTier | None,
    canary: Canary | None,
) -> None:
    """Refuse parts that do not belong together.

    Raises:
        HostPoolError: They do not, one of them is in use already, or the policy does not exist.
    """
    check_kind("pool", pool, MirroredPool, HostPoolError)  # type: ignore[type-abstract]
    check_kind("allocator", allocator, PageAllocator, HostPoolError)
    check_kind("host", host, HostPool, HostPoolError)
    check_kind("index", index, PrefixIndex, HostPoolError)
    check_word("policy", policy, get_args(WritePolicy), HostPoolError)
    check_optional("storage", storage, StorageTier, HostPoolError)
    check_optional("canary", canary, Canary, HostPoolError)
    rules: list[tuple[str, object, object]] = [
        ("host.pool", host.pool is pool, True),
        ("allocator.num_pages", allocator.num_pages, pool.num_pages),
        ("allocator.page_size", allocator.page_size, pool.page_size),
        ("allocator.held", allocator.held, 0),
        ("index.page_size", index.page_size, pool.page_size),
        ("index.device_pages", index.device_pages, pool.num_pages),
        ("index.host_pages", index.host_pages, host.num_pages),
        ("index.counts().nodes", index.counts().nodes, 0),
    ]
    if storage is not None:
        rules += [("storage.host", storage.host is host, True), ("storage.index", storage.index is index, True)]
        rules.append(("storage.canary", storage.canary is canary, True))
    if canary is not None:
        rules.append(("canary.host", canary.host is host, True))
    for argument, given, expected in rules:
        if given != expected:
            raise HostPoolError(
                argument,
                given=given,
                expected=expected,
                consequence="pages of the cache would be those of somebody else, or of no pool",
                remedy="make pool, allocator, host pool and index for one another, and use each for one cache",
            )


def check_options(
    mover: Mover | str | None,
    streams: Streams | None,
    poison: bool,
    limits: CopyLimits | None,
    companions: Sequence[Companion],
) -> tuple[Companion, ...]:
    """Refuse options of another kind; returns the companions.

    Raises:
        HostPoolError: As said.
        UnsupportedMover: Neither a mover nor the name of one.
    """
    if not isinstance(mover, str):
        check_optional("mover", mover, Mover, UnsupportedMover)  # type: ignore[type-abstract]
    check_optional("streams", streams, Streams, HostPoolError)  # type: ignore[type-abstract]
    check_kind("poison", poison, bool, HostPoolError)
    check_optional("limits", limits, CopyLimits, HostPoolError)
    return check_all("companions", companions, Companion, HostPoolError)


def no_storage() -> CacheError:
    """The error of a call that needs a third level."""
    return CacheError(
        "prefetch",
        given="a cache of two levels",
        expected="a cache with storage",
        consequence="there is nothing to fetch from",
        remedy="pass storage= at construction",
    )


def check_prompt(tokens: IndexLike, reach: int | None) -> IntArray:
    """Return a prompt as int64, a copy, or refuse it.

    Raises:
        CacheError: No token, or a `reach` that is no whole number.
    """
    prompt: IntArray = as_index_array("tokens", tokens, CacheError).copy()
    if not prompt.size:
        raise CacheError(
            "tokens",
            given="none",
            expected="at least one token",
            consequence="there is nothing to compute",
            remedy="do not acquire an empty prompt",
        )
    check_progress(0, reach)
    return prompt


def check_progress(computed: int, reach: int | None) -> None:
    """Refuse what is no number of tokens.

    Raises:
        CacheError: Negative, or no whole number.
    """
    for name, tokens in (("computed", computed), ("reach", 0 if reach is None else reach)):
        consequence = "companions would get other pages than are computed"
        whole_number(name, tokens, most=None, error=CacheError, consequence=consequence)


def check_text(acquired: Acquired, tokens: IndexLike, page_size: int) -> IntArray:
    """Return a text as int64, or refuse it, if it is not what a request's pages hold.

    Raises:
        CacheError: As said.
    """
    done = as_index_array("tokens", tokens, CacheError)
    common, room = min(done.size, acquired.tokens.size), acquired.pages.size * page_size
    if not np.array_equal(done[:common], acquired.tokens[:common]) or done.size < acquired.hit_tokens:
        raise _bad_tokens(f"{done.size} other tokens", "the prompt, a longer text that begins with it, or less")
    if done.size > room:
        raise _bad_tokens(f"{done.size} tokens", f"at most {room}")
    return done


def _bad_tokens(given: str, expected: str) -> CacheError:
    return CacheError(
        "tokens",
        given=given,
        expected=expected,
        consequence="the pages would be found under a text that they do not hold",
        remedy="pass the tokens whose K and V the pages hold",
    )
