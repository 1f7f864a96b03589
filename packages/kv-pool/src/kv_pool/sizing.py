"""Owns how many tokens fit: one budget over all pools, draft parts, ranks and host pools, the same on every rank.

Pure arithmetic over layouts and placements; every rank that is given the same arguments gets the same answer. It does
not allocate, and it does not measure what is free (see `host_memory`).
"""

from __future__ import annotations

import json
import numbers
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from kv_planner import ModelLayout, Placement, PlanError

from kv_pool._arguments import check_kind, check_list, check_numbers
from kv_pool._geometry import derive_geometry
from kv_pool._storage import TORCH_DTYPES
from kv_pool.errors import BudgetError, KvPoolError
from kv_pool.tables import INT32_MAX, shown, whole_number

if TYPE_CHECKING:
    from kv_planner import Component
    from kv_planner import Part as PartName

__all__ = ["MemoryPlan", "PoolBudget", "PoolShare", "plan_memory", "request_from_json"]

_HOLDS: tuple[Component, ...] = ("key", "value", "latent", "rope", "index_key", "index_scale", "state")
_PIECE = 65536  # host memory is registered in pieces of this size
_DRAFT = "draft"
_MOST_SHARE = 1 << 32  # beside 2**63 bytes, and still exact enough as a float


@dataclass(frozen=True)
class PoolShare:
    """One pool of the budget.

    Attributes:
        name: Its name in the answer.
        layout: What it holds over all ranks; target and draft parts.
        share: Tokens of this pool for one token of the plan: 1 for full attention, less for a window. A pool of pages.
        requests: Rows of this pool, for one of request rows; such a pool does not grow with the tokens.
        layer_ids: Layers of each pipeline stage, by rank; all layers when there is one stage. A stage without any (a
            draft apart lies on the last one) has no such pool.
        on_host: Whether a host pool mirrors it.
    """

    name: str
    layout: ModelLayout
    share: float = 1.0
    requests: int | None = None
    layer_ids: Sequence[Mapping[PartName, Sequence[int]] | Sequence[int]] | None = None
    on_host: bool = True

    def __post_init__(self) -> None:
        """Refuse what is of another kind.

        Raises:
            BudgetError: As said.
        """
        check_kind("PoolShare.name", self.name, str, BudgetError)
        check_kind("PoolShare.layout", self.layout, ModelLayout, BudgetError)
        check_kind("PoolShare.on_host", self.on_host, bool, BudgetError)
        if self.requests is not None:
            consequence = "no request would have a row"
            whole_number(
                "PoolShare.requests", self.requests, least=1, most=INT32_MAX - 1, error=BudgetError,
                consequence=consequence,
            )  # fmt: skip
        if self.layer_ids is not None:
            object.__setattr__(self, "layer_ids", check_list("PoolShare.layer_ids", self.layer_ids, BudgetError))
        share: Any = self.share
        is_number = isinstance(share, numbers.Real) and not isinstance(share, bool)
        if not is_number or not 0 < share <= _MOST_SHARE:
            raise BudgetError(
                "PoolShare.share",
                given=shown(share),
                expected=f"a number above 0, at most {_MOST_SHARE}",
                consequence="it would be unknown how many tokens the pool holds",
                remedy="give the tokens of this pool for one token of the plan",
            )


@dataclass(frozen=True)
class PoolBudget:
    """What one pool gets on one rank.

    Attributes:
        name: The pool.
        placement: The rank.
        items: Pages or rows, item 0 included; 0 where the stage has no layer of the pool.
        item_bytes: Bytes of an item over all components and layers of the rank.
        host_items: Items of its host pool, item 0 included; 0 without one.
    """

    name: str
    placement: Placement
    items: int
    item_bytes: int
    host_items: int

    @property
    def nbytes(self) -> int:
        """Device bytes."""
        return self.items * self.item_bytes

    @property
    def host_nbytes(self) -> int:
        """Host bytes, less the rounding up to 64 KiB of each component."""
        return self.host_items * self.item_bytes


@dataclass(frozen=True)
class MemoryPlan:
    """The same on every rank.

    Attributes:
        tokens: Tokens of the device pools with share 1, page 0 not counted.
        host_tokens: Tokens of the host pools with share 1; 0 if none of them grows with the tokens.
        pools: What each pool gets on each rank.
        tightest: The rank that decided, as an index into the placements.
    """

    tokens: int
    host_tokens: int
    pools: tuple[PoolBudget, ...]
    tightest: int


def plan_memory(
    pools: Sequence[PoolShare],
    *,
    placements: Sequence[Placement],
    device_bytes: int | Sequence[int],
    host_bytes: int = 0,
) -> MemoryPlan:
    """Divide one budget.

    Args:
        pools: Every pool that will live on a rank.
        placements: All ranks. Ranks that share a host share `host_bytes`: give the placements of one host, or of a
            deployment whose hosts are alike.
        device_bytes: Bytes for pools on each rank's device; one number for all, or one a rank.
        host_bytes: Bytes for all host pools of all ranks together; 0 for none. See `available_host_bytes`.

    Returns:
        The most tokens that fit on the tightest rank, and what that makes of every pool.

    Raises:
        BudgetError: Nothing fits, a share that is not above 0, a draft pool that would hold fewer tokens than the
            target's, names given twice, or a pool that mixes pages and request rows.
        LayoutError, HeadRangeError: See `MhaPool`.
    """
    pools = [check_kind("pools", pool, PoolShare, BudgetError) for pool in check_list("pools", pools, BudgetError)]
    placements = [
        check_kind("placements", place, Placement, BudgetError)
        for place in check_list("placements", placements, BudgetError)
    ]
    several = isinstance(device_bytes, Iterable) and not isinstance(device_bytes, str | Mapping)
    budgets = list(
        check_numbers("device_bytes", device_bytes if several else [device_bytes] * len(placements), BudgetError)
    )
    consequence = "no host pool could be planned"
    host_bytes = whole_number("host_bytes", host_bytes, error=BudgetError, consequence=consequence)
    _check(pools, placements, budgets)
    sizes = [[_item_bytes(pool, placement) for pool in pools] for placement in placements]
    if not _grows(pools, sizes):
        raise BudgetError(
            "placements",
            given="ranks whose stages have no layer of a pool of pages",
            expected="at least one rank with a pool that grows with the tokens",
            consequence="there would be no end of tokens",
            remedy="pass all ranks, or those of one host with layers",
        )
    rooms = [_most_pages(pools, row, budget) for row, budget in zip(sizes, budgets, strict=True)]
    tightest = min(range(len(rooms)), key=lambda rank: rooms[rank])
    pages = rooms[tightest]
    if pages < 1:
        raise BudgetError(
            f"device_bytes[{tightest}]",
            given=budgets[tightest],
            expected=f"at least {_needed(pools, sizes[tightest], 1)}",
            consequence="not one page would fit",
            remedy="give more memory, fewer request rows, or smaller pages",
        )
    host = _most_host_pages(pools, sizes, host_bytes) if host_bytes and any(pool.on_host for pool in pools) else 0
    page_size = next(pool.layout.page_size for pool in pools if pool.requests is None)
    planned = []
    for placement, row in zip(placements, sizes, strict=True):
        for pool, size in zip(pools, row, strict=True):
            on_host = bool(size and host and pool.on_host)
            items, host_items = _items(pool, pages) if size else 0, _items(pool, host) if on_host else 0
            planned.append(PoolBudget(pool.name, placement, items, size, host_items))
    mirrored = [pool if pool.on_host else None for pool in pools]
    host_tokens = host * page_size if _grows(mirrored, sizes) else 0
    return MemoryPlan(pages * page_size, host_tokens, tuple(planned), tightest)


def _grows(pools: Sequence[PoolShare | None], sizes: Sequence[Sequence[int]]) -> bool:
    """Whether any rank has a pool that grows with the tokens."""
    return any(
        pool is not None and pool.requests is None and size > 0
        for row in sizes
        for pool, size in zip(pools, row, strict=True)
    )


def _items(pool: PoolShare, pages: int) -> int:
    """Items of a pool when a pool of share 1 has `pages`, item 0 included."""
    if pool.requests is not None:
        return pool.requests + 1
    return max(1, -int(-pages * pool.share // 1)) + 1


def _item_bytes(pool: PoolShare, placement: Placement) -> int:
    stage = None if pool.layer_ids is None else pool.layer_ids[placement.pp_rank]
    kind = "page" if pool.requests is None else "request_row"
    geometries = derive_geometry(
        pool.layout, holds=_HOLDS, item_kind=kind, layer_ids=stage, placement=placement, may_be_absent=True
    )
    return sum(
        len(item.layer_ids) * item.tokens * item.heads * item.dims * TORCH_DTYPES[item.dtype].itemsize
        for item in geometries
    )


def _needed(pools: Sequence[PoolShare], sizes: Sequence[int], pages: int) -> int:
    return sum(_items(pool, pages) * size for pool, size in zip(pools, sizes, strict=True))


def _most_pages(pools: Sequence[PoolShare], sizes: Sequence[int], budget: int) -> int:
    """The most pages of share 1 whose pools fit together; as many as a page id can name where nothing grows."""
    held = [(pool, size) for pool, size in zip(pools, sizes, strict=True) if size]
    low, high = 0, INT32_MAX
    while high - low > 1:
        middle = (low + high) // 2
        named = all(_items(pool, middle) <= INT32_MAX for pool, _ in held)
        fits = named and sum(_items(pool, middle) * size for pool, size in held) <= budget
        low, high = (middle, high) if fits else (low, middle)
    return low


def _most_host_pages(pools: Sequence[PoolShare], sizes: Sequence[Sequence[int]], host_bytes: int) -> int:
    """The most pages of share 1 whose host pools fit, over all ranks, with the pieces that each component may waste."""
    mirrored = [number for number, pool in enumerate(pools) if pool.on_host]
    waste = sum(2 * _PIECE * len(pools[number].layout.components) for number in mirrored) * len(sizes)
    total = [sum(row[number] for row in sizes) for number in mirrored]
    return _most_pages([pools[number] for number in mirrored], total, host_bytes - waste)


def _check(pools: Sequence[PoolShare], placements: Sequence[Placement], budgets: Sequence[int]) -> None:
    growing = [pool for pool in pools if pool.requests is None]
    target = max((pool.share for pool in growing if "target" in _parts(pool)), default=0.0)
    ranks = (len(placements), len(budgets))
    page_sizes = {pool.layout.page_size for pool in growing}
    stages = {placement.pp_size for placement in placements}
    rules: list[tuple[str, object, object, bool]] = [
        ("placements, device_bytes", ranks, "one budget a rank", 0 < ranks[0] == ranks[1]),
        ("pools", [pool.name for pool in pools], "distinct names", len({pool.name for pool in pools}) == len(pools)),
        ("pools", "no pool of pages", "at least one that grows with the tokens", bool(growing)),
        ("page sizes", sorted(page_sizes), "one", len(page_sizes) <= 1),
    ]  # fmt: skip
    for pool in pools:
        rules += [
            (
                f"{pool.name}.layer_ids",
                None if pool.layer_ids is None else len(pool.layer_ids),
                f"the layers of each of {sorted(stages)} stages",
                stages == {1 if pool.layer_ids is None else len(pool.layer_ids)},
            ),
        ]
        if pool.requests is None and _parts(pool) == {_DRAFT}:
            rules.append((f"{pool.name}.share", pool.share, f"at least the target's {target}", pool.share >= target))
    for argument, given, expected, kept in rules:
        if not kept:
            raise BudgetError(
                argument,
                given=given,
                expected=expected,
                consequence="a pool would be smaller than what is written into it, or ranks would differ",
                remedy="declare every pool of the rank once, draft pools as large as the target's",
            )


def _parts(pool: PoolShare) -> set[str]:
    return {spec.part for spec in pool.layout.components}


def request_from_json(text: str) -> dict[str, Any]:
    """Read the arguments of `plan_memory` from JSON.

    Args:
        text: An object with `pools` (each with the fields of `PoolShare`, its layout as `ModelLayout.to_json` spells
            it), `placements` (each with the fields of `Placement`), `device_bytes` and, if wanted, `host_bytes`.

    Returns:
        Keyword arguments for `plan_memory`.

    Raises:
        BudgetError: Not such an object; the first field that does not fit is named.
    """
    where = "the file"
    try:
        data = json.loads(text)
        where = "its fields"
        unknown = set(data) - {"pools", "placements", "device_bytes", "host_bytes"}
        if unknown:
            raise ValueError(f"unknown {sorted(unknown)}")
        pools = []
        for number, item in enumerate(data["pools"]):
            where = f"pools[{number}]"
            strange = set(item) - {field.name for field in fields(PoolShare)}
            if strange:
                raise ValueError(f"unknown {sorted(strange)}")
            pools.append(PoolShare(**{**item, "layout": ModelLayout.from_json(json.dumps(item["layout"]))}))
        where = "placements"
        placements = [Placement(**item) for item in data["placements"]]
        where = "device_bytes, host_bytes"
        budget = data["device_bytes"]
        sizes = budget if isinstance(budget, list) else [budget]
        if not all(type(size) is int and size >= 0 for size in (*sizes, data.get("host_bytes", 0))):
            raise ValueError("bytes are whole numbers")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, PlanError) as error:
        if isinstance(error, KvPoolError):
            raise
        raise BudgetError(
            where,
            given=f"{type(error).__name__}: {error}",
            expected="pools, placements, device_bytes and perhaps host_bytes",
            consequence="no plan can be made",
            remedy="see kv_pool.sizing.request_from_json for the fields",
        ) from error
    return {"pools": pools, "placements": placements, "device_bytes": budget, "host_bytes": data.get("host_bytes", 0)}
