"""Owns the proof of faults of the field that no other module holds: one test a case, named after it.

Others stand beside their ops: C10, C14, D17, D18, E12, F01, F03 and F13 are named in those tests.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import spec_kernels as sk
import torch

ROWS, WIDTH = 4, 4


def buffers(place: Any) -> sk.DraftExtendBuffers:
    def garbage(count: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.full((count,), 7777, dtype=dtype, device=place.device)

    tokens = ROWS * WIDTH
    return sk.DraftExtendBuffers(
        garbage(tokens), garbage(tokens), garbage(tokens), garbage(ROWS, torch.int32), garbage(ROWS),
        garbage(ROWS, torch.int32), garbage(ROWS, torch.int32), garbage(ROWS),
    )  # fmt: skip


def fill(place: Any, into: sk.DraftExtendBuffers, raw_bs: int, **options: Any) -> None:
    tokens = torch.arange(1, raw_bs * WIDTH + 1, device=place.device)
    rows = torch.arange(raw_bs, device=place.device)
    batch = sk.DraftExtendBatch(tokens, tokens, tokens, rows + 9, rows + 1, rows % WIDTH, rows % WIDTH + 1)
    options = {"bs": ROWS, "width": WIDTH, "seq_len_fill": 1, "backend": place.backend, **options}
    sk.fill_draft_extend_buffers(into, batch, **options)


def storage(place: Any, **sizes: int) -> sk.AttentionStorage:
    given = {"rows": ROWS, "tokens": ROWS, "columns": 3, "page_size": 4, **sizes}
    return sk.AttentionStorage({"full": None}, device=place.device, **given)


def test_writer_and_reader_have_one_capacity_c09(place: Any) -> None:
    """80 tokens and four drafts over for each of 12 requests: 128 slots, and 129 are refused, not cut."""
    held = storage(place, rows=12, tokens=80 + 4 * 12)
    table = torch.ones(12, 12, dtype=torch.int32, device=place.device)
    requests = torch.arange(12, device=place.device)
    options: dict[str, Any] = {"q_lens": [1] * 12, "kv_lens": [1] * 12, "pad_q_len": 1, "backend": place.backend}
    for tokens in (104, 110, 128):
        locs = torch.arange(1, tokens + 1, device=place.device)
        held.fill(table, requests, locs, **options)
        assert held.write_locs["full"].tolist() == [*range(1, tokens + 1), *[0] * (128 - tokens)]
    with pytest.raises(sk.TokenCountError, match="129 tokens"):
        held.fill(table, requests, torch.ones(129, dtype=torch.int64, device=place.device), **options)


def test_placeholders_end_with_the_context_c11() -> None:
    """4,096 tokens at most and three drafts: 4,093 leave room for them, 4,094 do not."""
    pages = [list(range(1, 33))]
    assert sk.build_paged_metadata(pages, [4], [4093 + 3], page_size=128).kv_lens == [4096]
    with pytest.raises(sk.TableCapacityError, match="4097"):
        sk.build_paged_metadata(pages, [4], [4094 + 3], page_size=128)


def test_segments_without_tokens_c12(place: Any, host_backend: sk.BackendName) -> None:
    """Ends [0, 5, 5, 9]: the empty one writes nothing and shifts nobody; none at all touch nothing."""
    noise = torch.Generator().manual_seed(1)
    query, cache = torch.randn(9, 2, 8, generator=noise), torch.randn(5, 4, 1, 8, generator=noise)
    options: dict[str, Any] = {"scale": 0.3, "page_size": 4, "backend": host_backend}
    three = sk.build_paged_metadata([[1, 2], [3], [4]], [5, 0, 4], [7, 2, 4], page_size=4)
    two = sk.build_paged_metadata([[1, 2], [4]], [5, 4], [7, 4], page_size=4)
    attend = sk.ragged_paged_attention
    assert torch.equal(attend(query, cache, cache, three, **options), attend(query, cache, cache, two, **options))
    none = sk.build_paged_metadata([[1], [2]], [0, 0], [2, 2], page_size=4)
    assert not attend(query, cache, cache, none, **options).any()
    table = torch.arange(1, 41, device=place.device).view(4, 10)
    rows, starts = torch.arange(3, device=place.device), torch.tensor([0, 5, 5], device=place.device)
    ends = torch.tensor([5, 5, 9], device=place.device)
    found = sk.extend_cache_locs(table, rows, starts, ends, total=9, backend=place.backend)
    assert found.tolist() == [1, 2, 3, 4, 5, 26, 27, 28, 29]
    assert sk.extend_cache_locs(table, rows, ends, ends, total=0, backend=place.backend).shape == (0,)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_products_past_two_to_the_31_d01(host_backend: sk.BackendName, dtype: torch.dtype) -> None:
    """149,760 bytes a page: page 14,340 starts at byte 2,147,558,400 (also D04, D05: int32 slots, widened first)."""
    page_bytes, page = 149_760, 14_340
    assert page * page_bytes == 2_147_558_400 > 2**31
    cache = torch.empty(page + 2, 1, 1, page_bytes, dtype=torch.int8)  # memory is taken when it is used
    small = torch.zeros(page + 2, 1, 1, 1, dtype=torch.int8)
    cache[0] = cache[page - 1] = cache[page + 1] = 3
    key = torch.full((1, 1, page_bytes), 7, dtype=torch.int8)
    sk.write_kv(key, key[..., :1], cache, small, torch.tensor([page], dtype=dtype), backend=host_backend)
    assert (cache[page] == 7).all() and int(small.sum()) == 7
    assert all((cache[index] == 3).all() for index in (0, page - 1, page + 1))


def test_dtypes_of_indices_d16(place: Any) -> None:
    """int32 and int64 are taken, others refused by name, and no id is narrowed unseen."""
    cache, row = torch.zeros(3, 4, 1, 8, device=place.device), torch.zeros(1, 1, 8, device=place.device)
    for dtype in (torch.int8, torch.int16, torch.float32, torch.bool):
        with pytest.raises(sk.DtypeError, match=rf"slots: .*int32 or torch\.int64, got {dtype}"):
            sk.write_kv(
                row, row, cache, cache.clone(), torch.ones(1, device=place.device).to(dtype), backend=place.backend
            )
    with pytest.raises(sk.IndexWidthError, match="out"):
        table = torch.ones(2, 4, dtype=torch.int64, device=place.device)
        index, out = torch.zeros(1, dtype=torch.int64, device=place.device), torch.zeros(2, device=place.device).int()
        sk.uniform_cache_locs(table, index, index, width=2, out=out, backend=place.backend)
    with pytest.raises(sk.IndexWidthError, match="2147483647"):
        sk.build_paged_metadata([[2**31]], [1], [1], page_size=4)


def test_history_leaves_no_trace_e01(place: Any) -> None:
    """Four requests, then two, then none, in a bucket of four: padded rows are those of a first call (A01, E18)."""
    used = buffers(place)
    for raw_bs in (4, 2, 0):
        fresh = buffers(place)
        fill(place, used, raw_bs, num_front_tokens=0)
        fill(place, fresh, raw_bs, num_front_tokens=0)
        for item in fields(used):
            one, two = getattr(used, item.name), getattr(fresh, item.name)
            assert one is two is None or torch.equal(one, two), item.name
        assert used.req_pool_indices.tolist()[raw_bs:] == [0] * (ROWS - raw_bs)
        assert used.out_cache_loc.tolist()[raw_bs * WIDTH :] == [0] * ((ROWS - raw_bs) * WIDTH)
        assert used.seq_lens.tolist()[raw_bs:] == [1] * (ROWS - raw_bs)
        assert used.num_accept_tokens.tolist()[raw_bs:] == [-1] * (ROWS - raw_bs)
        assert used.select_index.tolist()[raw_bs:] == [row * WIDTH for row in range(raw_bs, ROWS)]


def test_rows_start_at_multiples_of_their_width_e03(place: Any) -> None:
    """Steps 3, topk 4, eight draft tokens, three requests: rows start at 0, 8, 16; 24 rows in all."""
    lens = torch.tensor([5, 9, 2], device=place.device)
    layout = sk.draft_extend_layout(lens, width=8, num_front_tokens=0, backend=place.backend)
    assert layout.start_locs.tolist() == [0, 8, 16] and layout.positions.shape == (24,)


def test_local_lengths_below_zero_e04() -> None:
    """0 tokens less 2 are no length: refused; 8 of 10 are."""
    with pytest.raises(sk.LengthError, match="-2"):
        sk.build_paged_metadata([[1]], [1], [0 - 2], page_size=8)
    assert sk.build_paged_metadata([[1], []], [1, 1], [8, 0], page_size=8).kv_lens == [8, 0]


def test_dummy_runs_write_the_reserved_page_e08(place: Any) -> None:
    """After a batch, an idle step has slot 0 and page 0 everywhere; writes without slots, or of -1, write nothing."""
    held, table = storage(place), torch.arange(1, 49, device=place.device).view(4, 12)
    rows, none = torch.arange(4, device=place.device), torch.zeros(0, dtype=torch.int64, device=place.device)
    options: dict[str, Any] = {"pad_q_len": 1, "backend": place.backend}
    held.fill(table, rows, rows + 5, q_lens=[1] * 4, kv_lens=[12] * 4, **options)
    assert held.block_tables["full"].any()
    held.fill(table, none, none, q_lens=[], kv_lens=[], **options)
    assert not held.block_tables["full"].any() and not held.write_locs["full"].any()
    caches = [torch.full((3, 4, 1, 8), 5.0, device=place.device) for _ in "kv"]
    for slots in (none, none.new_full((2,), -1)):
        row = torch.ones(slots.shape[0], 1, 8, device=place.device)
        sk.write_kv(row, row, caches[0], caches[1], slots, backend=place.backend)
        assert all((cache == 5.0).all() for cache in caches)


def test_minus_one_is_no_address_e09(place: Any) -> None:
    """-1 as a stored slot, a pool index, a page of a map or a child leads to slot 0 or nowhere."""
    table, minus = torch.full((2, 6), -1, device=place.device), torch.tensor([-1, 0], device=place.device)
    found = sk.uniform_cache_locs(table, minus, minus + 1, width=3, backend=place.backend)
    assert not found.locs.any()
    page_map = torch.full((4,), -1, device=place.device)
    assert not sk.translate_locs(minus, page_map, page_size=1, backend=place.backend).any()
    out = place.poison(2, 2, dtype=torch.int32)
    sk.fill_block_table(out, table, minus, minus + 4, page_size=2, slot_map=page_map, backend=place.backend)
    assert not out.any()
    with pytest.raises(sk.MetadataError, match="at least 1"):
        sk.build_paged_metadata([[-1]], [1], [1], page_size=4)


def test_sample_rows_of_a_dummy_run_e10(place: Any) -> None:
    """Every row to sample from lies within the step's token rows, front tokens counted, whatever was there before."""
    used = buffers(place)
    for raw_bs in (4, 0):
        fill(place, used, raw_bs, num_front_tokens=0)
        assert int(used.select_index.min()) >= 0 and int(used.select_index.max()) < ROWS * WIDTH


def test_drafts_beyond_their_window_e10(place_on: Any, host_backend: sk.BackendName) -> None:
    """Drafts up to 3 in windows of 3 after a front token would point into the next request (seen in host memory)."""
    place = place_on("cpu", host_backend)
    with pytest.raises(sk.IndexWidthError, match="another request's token"):
        fill(place, buffers(place), 4, num_front_tokens=1)


def test_tokens_move_and_not_pages_f04(place: Any) -> None:
    """Each token's index key holds its slot; 5 to 3 in a page and 6 to 1 across, read back token by token."""
    cache = torch.arange(12, device=place.device).view(3, 4, 1).expand(3, 4, 6).contiguous()
    moves = sk.SlotMoves(*(torch.tensor(slots, device=place.device) for slots in ([5, 7, 9], [4, 1, 6])))
    sk.move_kv([cache], moves, backend=place.backend)
    assert cache[..., 0].flatten().tolist() == [0, 7, 2, 3, 5, 5, 9, 7, 8, 9, 10, 11]
    assert (cache == cache[..., :1]).all()


def test_rows_are_those_of_all_drafts_f07(place: Any) -> None:
    """Rows of 1 + 3 for every request, whatever was scheduled: a row too few or too many is refused."""
    for tokens in (2 * WIDTH - 1, 2 * WIDTH + 1):
        rows = torch.arange(2, device=place.device)
        ids = torch.ones(tokens, dtype=torch.int64, device=place.device)
        batch = sk.DraftExtendBatch(ids, ids, ids, rows + 9, rows, rows, rows)
        with pytest.raises(sk.TokenCountError):
            sk.fill_draft_extend_buffers(
                buffers(place), batch, bs=ROWS, width=WIDTH, seq_len_fill=0, backend=place.backend
            )


def test_every_draft_has_a_row_of_its_own_f09(place: Any) -> None:
    """Verification reads a prediction for each column: all accepted drafts are distinct rows."""
    tree = sk.build_chain_tree(torch.tensor([5, 9], device=place.device), width=WIDTH, backend=place.backend)
    tokens = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]], device=place.device)
    found = sk.verify_tree_greedy(
        tokens, tokens + 1, tree.next_token, tree.next_sibling, depth=WIDTH, backend=place.backend
    )
    assert found.accept_index.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]] and found.bonus.tolist() == [5, 9]


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("equal", [True, False])
@pytest.mark.parametrize("transposed", [True, False])
def test_batch_sizes_and_strides_f12(place: Any, rows: int, equal: bool, transposed: bool) -> None:
    """One request and three, equal and unlike lengths, contiguous and transposed inputs give row by row the same."""
    table = torch.arange(1, rows * 9 + 1, device=place.device).view(rows, 9)
    starts = torch.arange(rows, device=place.device)
    ends = starts + (3 if equal else 1) + (0 if equal else starts)
    if transposed:
        table = table.t().contiguous().t()
    total = int((ends - starts).sum())
    index, on = torch.arange(rows, device=place.device), {"backend": place.backend}
    found = sk.extend_cache_locs(table, index, starts, ends, total=total, **on)
    alone = [
        sk.extend_cache_locs(
            table[row : row + 1], starts[:1], starts[row : row + 1], ends[row : row + 1],
            total=int(ends[row] - starts[row]), **on,
        )
        for row in range(rows)
    ]  # fmt: skip
    assert torch.equal(found, torch.cat(alone))


@pytest.mark.parametrize("padded", [0, 2])
def test_padding_is_cut_by_size_f15(host_backend: sk.BackendName, padded: int) -> None:
    """Outputs have the rows of their queries: what is live does not depend on how many rows pad it, nor on a method."""
    noise = torch.Generator().manual_seed(2)
    query, cache = torch.randn(2 + padded, 1, 2, 8, generator=noise), torch.randn(4, 4, 1, 8, generator=noise)
    metadata = sk.build_paged_metadata([[1, 2], [3]], [1, 1], [6, 3], page_size=4, rows=2 + padded)
    exact = sk.build_paged_metadata([[1, 2], [3]], [1, 1], [6, 3], page_size=4)
    options: dict[str, Any] = {"scale": 0.3, "page_size": 4, "backend": host_backend}
    found = sk.paged_attention(query, cache, cache, metadata, **options)
    assert found.shape == query.shape and not found[2:].any()
    assert torch.equal(found[:2], sk.paged_attention(query[:2], cache, cache, exact, **options))
