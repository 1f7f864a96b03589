"""Owns what the ranks of one model have to agree on: how much of a prompt is a hit, and which rank stores a page.

The reduction is injected; the number and size of its calls depend on nothing that a rank alone knows. It does not own
groups of processes, nor the order in which requests are served.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from kv_pool._arguments import check_kind, check_list, check_numbers
from kv_pool.errors import AgreementError
from kv_pool.tables import INT32_MAX, as_index_array, whole_number

if TYPE_CHECKING:
    from kv_pool.hicache.acquired import Acquired
    from kv_pool.hicache.controller import HiCacheController
    from kv_pool.tables import IntArray

    ReduceMin: TypeAlias = Callable[[IntArray], IntArray]

__all__ = ["HitAgreement", "owner_rank"]

_FREE = np.iinfo(np.int64).max  # a place of the vector that no request takes
_NOT_HERE = -1  # the hit of a request that a rank could not acquire


class HitAgreement:
    """Hits of a tick as the deepest that all tensor-parallel ranks and pipeline stages can serve.

    One reduction a tick, of one length, on every rank: also when nothing was acquired, and whatever was found. Where
    stages have companions (see `companion`), the least hit may be none that another stage can serve: then the ranks
    reduce what they can serve below it, until nobody lowers it, which all of them see in the same reduction. So is a
    request that a rank could not acquire, and a rank that acquired another number of them: no rank goes on alone.

    Args:
        reduce_min: Element-wise minimum over all ranks; called with an int64 vector of `width + 2`, returns one of the
            same length. A collective, e.g. over `torch.distributed`.
        width: The most requests that a tick may acquire.
        companions: Whether any rank or stage of the model has companions; the same on all of them. At least two
            reductions a tick then.

    Raises:
        AgreementError: A width below 1.
    """

    def __init__(self, reduce_min: ReduceMin, *, width: int, companions: bool = False) -> None:
        consequence = "no request could be acquired"
        most = INT32_MAX
        self._width = whole_number("width", width, least=1, most=most, error=AgreementError, consequence=consequence)
        self._reduce: ReduceMin = check_kind("reduce_min", reduce_min, Callable, AgreementError)  # type: ignore[arg-type]
        self._companions = check_kind("companions", companions, bool, AgreementError)

    def minimum(self, hits: Sequence[int]) -> list[int]:
        """Return the least hit of each request over all ranks, in one reduction.

        Args:
            hits: One a request, in the order in which every rank acquires them; -1 for one that this rank could not
                acquire, which makes it the least.

        Raises:
            AgreementError: More requests than the width (nothing was reduced); an answer that is no minimum of what was
                given; or ranks with other numbers of requests, which all of them see.
        """
        hits = check_numbers("hits", hits, AgreementError, least=_NOT_HERE)
        if len(hits) > self._width:
            raise AgreementError(
                "hits",
                given=f"{len(hits)} requests",
                expected=f"at most {self._width}",
                consequence="this rank would reduce a longer vector than the others, and all would wait for ever",
                remedy="acquire fewer requests a tick, or give a larger width on all ranks",
            )
        vector = np.full(self._width + 2, _FREE, dtype=np.int64)
        vector[: len(hits)] = hits
        vector[-2:] = len(hits), -len(hits)  # the least number, and the most
        least = as_index_array("reduce_min", self._reduce(vector.copy()), AgreementError)
        if least.shape != vector.shape or (least > vector).any() or (least[:-2] < _NOT_HERE).any():
            raise AgreementError(
                "reduce_min",
                given=least.tolist(),
                expected=f"the minimum over the ranks, among them {vector.tolist()}",
                consequence="a rank would skip tokens that it has not found",
                remedy="reduce with MIN over the group of all ranks and stages of one model",
            )
        fewest, most = int(least[-2]), -int(least[-1])
        if not fewest == most == len(hits) or (least[len(hits) : -2] != _FREE).any():
            raise AgreementError(
                "hits",
                given=f"{len(hits)} requests",
                expected=f"as many as the other ranks acquired in this tick, which are from {fewest} to {most}",
                consequence="ranks would serve different batches",
                remedy="schedule the same requests in the same order on all ranks, None for those that have no pages",
            )
        return [int(hit) for hit in least[: len(hits)]]

    def limit(self, cache: HiCacheController, acquired: Sequence[Acquired | None]) -> list[bool]:
        """Lower each hit of a tick to what all ranks can serve; call it once a tick, before `load`.

        Args:
            cache: The cache of the handles.
            acquired: Handles in the order in which every rank acquires them; `None` for a request that this rank could
                not acquire (`OutOfPages`).

        Returns:
            Which requests all ranks have acquired; abort the handles of the others.

        Raises:
            AgreementError: See `minimum`.
            HitError: This rank has companions and cannot serve the least hit, and the agreement was made without.
            OutOfPages: See `HiCacheController.limit`; the hits after that request are not lowered, abort them.
        """
        from kv_pool.hicache.acquired import Acquired  # which imports what imports this module
        from kv_pool.hicache.controller import HiCacheController

        check_kind("cache", cache, HiCacheController, AgreementError)
        acquired = [
            None if handle is None else check_kind(f"acquired[{place}]", handle, Acquired, AgreementError)
            for place, handle in enumerate(check_list("acquired", acquired, AgreementError))
        ]
        hits = self.minimum([_NOT_HERE if handle is None else handle.hit_tokens for handle in acquired])
        while self._companions:
            least = self.minimum([_restorable(handle, hit) for handle, hit in zip(acquired, hits, strict=True)])
            if least == hits:
                break
            hits = least
        for handle, hit in zip(acquired, hits, strict=True):
            if handle is not None and _NOT_HERE < hit < handle.hit_tokens:
                cache.limit(handle, hit)
        return [hit > _NOT_HERE for hit in hits]


def _restorable(handle: Acquired | None, hit: int) -> int:
    return _NOT_HERE if handle is None or hit == _NOT_HERE else handle.restorable(hit)


def owner_rank(key: str, ranks: int) -> int:
    """Return which of the ranks that hold the same pages writes the page of a key: a pure function, evenly spread.

    Args:
        key: A key of `page_keys`.
        ranks: How many ranks hold the page.

    Raises:
        AgreementError: Less than one rank, or no key.
    """
    consequence = "nobody would store the page"
    ranks = whole_number("ranks", ranks, least=1, most=INT32_MAX, error=AgreementError, consequence=consequence)
    try:
        return int(check_kind("key", key, str, AgreementError)[:16], 16) % ranks
    except ValueError:
        raise AgreementError(
            "key",
            given=key,
            expected="hexadecimal digits",
            consequence="ranks could name different owners",
            remedy="make keys with page_keys",
        ) from None
