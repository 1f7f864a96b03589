"""Owns the canary: a checksum a token over everything that a host page holds of it, taken after backup, asked at load.

It shows that host memory, or a store that does not verify bytes, has changed a page, and which tokens of it. It costs a
pass over the bytes both times, so it is for hunting a fault rather than for every day. It does not own what happens
then: the load is refused, see `HiCacheController.load`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from kv_pool._arguments import check_kind
from kv_pool.errors import CanaryMismatch, HostPoolError, PageError
from kv_pool.hicache._weights import odd_weights
from kv_pool.hicache.host_pool import HostPool
from kv_pool.tables import as_index_array

if TYPE_CHECKING:
    import numpy.typing as npt

    from kv_pool.hicache.host_pool import Mirror
    from kv_pool.tables import IndexLike

__all__ = ["Canary"]

_SEED = 0x9E3779B97F4A7C15  # a token of zeros has a checksum too: 0 means that none was taken


class Canary:
    """Checksums of the tokens of a host pool's pages.

    A checksum is the sum of all words of a token times fixed odd weights, modulo 2**64: every change of one word shows,
    and so does every exchange of unlike ones, but it is no protection against somebody who forges pages.

    Args:
        host: The host pool.

    Attributes:
        host: The same.
        sums: Checksums, 0 where none was taken. Shape: [host pages, page_size]; dtype uint64.
    """

    def __init__(self, host: HostPool) -> None:
        self.host = check_kind("host", host, HostPool, HostPoolError)
        self.sums = np.zeros((host.num_pages, host.page_size), dtype=np.uint64)
        self._weights = odd_weights(max(_token_words(mirror)[0] for mirror in host.mirrors))

    @property
    def rows(self) -> npt.NDArray[np.uint8]:
        """The same memory as bytes, so that checksums travel with their page. Shape: [host pages, 8 * page_size]."""
        return self.sums.view(np.uint8)

    def record(self, host_pages: IndexLike) -> None:
        """Take the checksums of pages whose bytes are on the host.

        Raises:
            PageError: No page of the host pool.
        """
        for page in self._pages(host_pages):
            self.sums[page] = self._take(page)

    def check(self, host_pages: IndexLike) -> None:
        """Compare pages with the checksums that were taken.

        Raises:
            CanaryMismatch: A token is other than it was, or no checksum was taken of it. Its attributes `position`
                and `tokens` say which page of the list, and which tokens of that page.
            PageError: As `record`.
        """
        for position, page in enumerate(self._pages(host_pages)):
            wrong = np.flatnonzero(self._take(page) != self.sums[page])
            if wrong.size:
                tokens = wrong.tolist()
                error = CanaryMismatch(
                    "host_pages",
                    given=f"page {page} (number {position} of the list) with other bytes in its tokens {tokens}",
                    expected="the bytes that were backed up",
                    consequence="attention would read foreign bytes; nothing was loaded",
                    remedy="limit the hit to the pages before it, compute the rest, and look for who writes there",
                )
                error.position, error.tokens = position, tuple(tokens)
                raise error

    def _pages(self, host_pages: IndexLike) -> list[int]:
        pages = as_index_array("host_pages", host_pages, PageError)
        if pages.size and (int(pages.min()) < 0 or int(pages.max()) >= self.host.num_pages):
            raise PageError(
                "host_pages",
                given=pages.tolist(),
                expected=f"pages in 0..{self.host.num_pages - 1}",
                consequence="the checksums of another page would be taken",
                remedy="pass pages that the host pool's allocator handed out",
            )
        found: list[int] = pages.tolist()
        return found

    def _take(self, page: int) -> npt.NDArray[np.uint64]:
        """Checksums of the tokens of a page. Shape: [page_size]."""
        total = np.full(self.host.page_size, _SEED, dtype=np.uint64)
        for number, mirror in enumerate(self.host.mirrors):
            count, word = _token_words(mirror)
            rows = mirror.host[page].transpose(0, 1).contiguous().view(torch.uint8).numpy()
            words = rows.reshape(self.host.page_size, -1).view(word)
            weighted = np.einsum("tw,w->t", words.astype(np.uint64, copy=False), self._weights[:count])
            total += weighted * np.uint64(2 * number + 1)
        return total


def _token_words(mirror: Mirror) -> tuple[int, str]:
    """Words that a token has over all layers of a component, and their type: the widest that divides them."""
    layers, _, heads, dims = mirror.host.shape[1:]
    nbytes = layers * heads * dims * mirror.host.element_size()
    size = next(size for size in (8, 4, 2, 1) if nbytes % size == 0)
    return nbytes // size, f"<u{size}"
