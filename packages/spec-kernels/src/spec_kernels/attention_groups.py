"""Owns block tables and write locations of groups of layers that share a pool: full attention, and windows.

Slots of the full pool come from `req_to_token`; a group with a pool of its own has a map from them (`full_to_swa`). It
owns the storage that a captured graph reads at fixed addresses, one a draft step. It does not allocate slots.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from spec_kernels._checks import check_disjoint, check_number, check_tensor, output
from spec_kernels.cache_locs import check_table, translate_locs
from spec_kernels.dispatch import BackendName, choose, load
from spec_kernels.errors import BucketError, MetadataError, TokenCountError
from spec_kernels.paged_metadata import IntList, PagedAttentionMetadata, check_kv_lens, host_lengths

__all__ = ["AttentionStorage", "fill_block_table"]


def fill_block_table(
    out: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    kv_lens: torch.Tensor,
    *,
    page_size: int,
    slot_map: torch.Tensor | None = None,
    backend: BackendName | None = None,
) -> torch.Tensor:
    """Write the pages of each request into its row of a block table.

    Column `c` of a live row is the page of the slot at position `c * page_size`, as far as the request's KV tokens go.

    Args:
        out: Block table. Shape: [rows, columns], `rows >= bs`; dtype int32; contiguous.
        req_to_token: Slot of each position of each request. Shape: [requests, positions]; dtype int32 or int64; any
            strides.
        req_pool_indices: Table row of each request. Shape: [bs]; dtype int32 or int64.
        kv_lens: KV tokens of each request, this step's included. Shape: [bs]; dtype int32 or int64.
        page_size: Tokens in a page.
        slot_map: Slot of the group's pool for each slot; None: the group uses the slots as they are. Shape: [slots].
        backend: Insist on a backend.

    Returns:
        `out`.

    Padding: rows from `bs` on, columns past a request's tokens, and slots that are negative, unmapped or outside their
        table, have page 0.

    Mutates: `out`, every element.

    Raises:
        ShapeError, DtypeError, DeviceError, AliasError: See `cache_locs.uniform_cache_locs`.
        BucketError: More requests than rows.

    Source: contracts.md §2.2 (`block_tables`, `swa block table`).
    """
    bs = check_table(req_to_token, req_pool_indices, kv_lens=kv_lens)
    check_number("page_size", page_size, least=1)
    device = req_to_token.device
    check_tensor("out", out, ("rows", "columns"), dtypes=(torch.int32,), device=device)
    output("out", out, tuple(out.shape), dtype=torch.int32, device=device)
    if bs > out.shape[0]:
        raise BucketError(
            "req_pool_indices",
            given=f"{bs} requests",
            expected=f"at most {out.shape[0]} rows of the block table",
            consequence="requests would be dropped",
            remedy="pick a larger bucket",
        )
    inputs = {"req_to_token": req_to_token, "req_pool_indices": req_pool_indices, "kv_lens": kv_lens}
    if slot_map is not None:
        check_tensor("slot_map", slot_map, ("slots",), device=device)
        inputs["slot_map"] = slot_map
    check_disjoint({"out": out}, inputs)
    chosen = choose("fill_block_table", device, backend)
    if out.numel():
        load("fill_block_table", chosen)(out, req_to_token, req_pool_indices, kv_lens, slot_map, page_size)
    return out


class AttentionStorage:
    """Block tables and write locations of every group for one step, at fixed addresses.

    Draft steps have one each, so that no step reads another's lengths. A fill rewrites every row, so nothing is left
    over from an earlier batch; host lists are new ones each time.

    Args:
        slot_maps: A map from the full pool's slots for each group, or None for the full pool's own layers.
        rows: Rows of the bucket.
        tokens: Tokens that a step writes at most.
        columns: Columns of the block tables.
        page_size: Tokens in a page, the same in all groups.
        device: Where the step runs.

    Attributes:
        block_tables: By group. Shape: [rows, columns]; dtype int32.
        write_locs: By group; slots that the step's tokens are written to. Shape: [tokens]; dtype int64.
        kv_lens: KV tokens of each row, 0 where there is none. Shape: [rows]; dtype int32.

    Raises:
        MetadataError: There is no group.
    """

    def __init__(
        self,
        slot_maps: Mapping[str, torch.Tensor | None],
        *,
        rows: int,
        tokens: int,
        columns: int,
        page_size: int,
        device: torch.device | str,
    ) -> None:
        if not slot_maps:
            raise MetadataError(
                "slot_maps",
                given="no group",
                expected='at least one, {"full": None} where all layers share a pool',
                consequence="no layer would have a block table",
                remedy="name the groups of layers",
            )
        for name, number in (("rows", rows), ("tokens", tokens), ("columns", columns), ("page_size", page_size)):
            check_number(name, number, least=1)
        self._maps = dict(slot_maps)
        self._page_size = page_size
        self.block_tables = {
            name: torch.zeros((rows, columns), dtype=torch.int32, device=device) for name in self._maps
        }
        self.write_locs = {name: torch.zeros((tokens,), dtype=torch.int64, device=device) for name in self._maps}
        self.kv_lens = torch.zeros((rows,), dtype=torch.int32, device=device)

    def fill(
        self,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
        out_cache_loc: torch.Tensor,
        *,
        q_lens: IntList,
        kv_lens: IntList,
        pad_q_len: int,
        backend: BackendName | None = None,
    ) -> dict[str, PagedAttentionMetadata]:
        """Rewrite the storage for a batch, and describe it for each group.

        Args:
            req_to_token: See `fill_block_table`.
            req_pool_indices: Shape: [bs].
            out_cache_loc: Slots of the full pool that the step's tokens are written to. Shape: [tokens of the batch];
                dtype int32 or int64.
            q_lens: Query tokens of each request, host integers.
            kv_lens: KV tokens of each request, this step's included, host integers. Never mutated.
            pad_q_len: Query tokens of a row without a request.
            backend: Insist on a backend.

        Returns:
            By group; tables are those of `block_tables`, so that an eager step and a captured one read the same.

        Padding: rows without a request have page 0 and KV length 0; write locations past the batch's tokens are 0.

        Mutates: `block_tables`, `write_locs` and `kv_lens`, every element.

        Raises:
            BucketError: More requests than rows.
            TokenCountError: More tokens than there is room for.
            MetadataError: Numbers of requests differ.
            LengthError, TableCapacityError: See `check_kv_lens`.
            ShapeError, DtypeError, DeviceError, AliasError: See `fill_block_table`.
        """
        queries, lengths = host_lengths("q_lens", q_lens), host_lengths("kv_lens", kv_lens)
        rows, columns = next(iter(self.block_tables.values())).shape
        bs, tokens = int(req_pool_indices.shape[0]), int(out_cache_loc.shape[0])
        if not bs == len(queries) == len(lengths):
            raise MetadataError(
                "req_pool_indices, q_lens, kv_lens",
                given=(bs, len(queries), len(lengths)),
                expected="three equal numbers of requests",
                consequence="a request would attend to another's pages",
                remedy="pass one entry a request in each",
            )
        for query, length in zip(queries, lengths, strict=True):
            check_kv_lens([length], columns=columns, page_size=self._page_size, q_len=query)
        room = next(iter(self.write_locs.values())).shape[0]
        if tokens > room or bs > rows:
            raise (TokenCountError if tokens > room else BucketError)(
                "out_cache_loc, req_pool_indices",
                given=f"{tokens} tokens of {bs} requests",
                expected=f"at most {room} tokens and {rows} rows",
                consequence="tokens or requests would be dropped",
                remedy="pick a larger bucket, or run the step eagerly",
            )
        padded = lengths + [0] * (rows - bs)
        self.kv_lens.copy_(torch.tensor(padded, dtype=torch.int32))
        found = {}
        for name, slot_map in self._maps.items():
            table, locs = self.block_tables[name], self.write_locs[name]
            fill_block_table(
                table, req_to_token, req_pool_indices, self.kv_lens[:bs], page_size=self._page_size,
                slot_map=slot_map, backend=backend,
            )  # fmt: skip
            if slot_map is None:
                locs[:tokens].copy_(out_cache_loc)
            else:
                translate_locs(out_cache_loc, slot_map, page_size=1, out=locs[:tokens], backend=backend)
            locs[tokens:].zero_()
            found[name] = PagedAttentionMetadata(table, queries + [pad_q_len] * (rows - bs), list(padded))
        return found
