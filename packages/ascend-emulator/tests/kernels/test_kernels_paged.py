"""Writing into and reading from paged caches, ND and NZ, against plain loops; refusals and faults of these ops."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ascend_emulator.kernels import REGISTRY, RULES, DeviceFault, KernelNotCovered
from hypothesis import given, settings
from hypothesis import strategies as st

SCATTER = "npu::npu_scatter_pa_kv_cache"
KEY_ONLY = "npu::npu_scatter_pa_cache.value"
GATHER = "npu::npu_gather_pa_kv_cache"
LOAD = "atb::npu_paged_cache_load"
INT32 = torch.int32


def labelled(*shape: int, dtype: torch.dtype = torch.float16, seed: int = 0) -> torch.Tensor:
    return torch.randint(-100, 100, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def c0(dtype: torch.dtype) -> int:
    return 32 // torch.empty(0, dtype=dtype).element_size()


def element(nz: bool, page: int, offset: int, head: int, d: int, dim: int, width: int) -> tuple[int, int, int, int]:
    """Where element d of a head of a token is: written from the documents' shapes."""
    flat = head * dim + d
    return (page, flat // width, offset, flat % width) if nz else (page, offset, head, d)


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    nz=st.booleans(),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.int8, torch.float32, torch.float8_e4m3fn]),
    slot_dtype=st.sampled_from([torch.int32, torch.int64]),
)
def test_scatter_pa_writes_what_a_loop_writes(
    data: st.DataObject, nz: bool, dtype: torch.dtype, slot_dtype: torch.dtype
) -> None:
    pages, size, heads = (data.draw(st.integers(1, 3)) for _ in range(3))
    width = c0(dtype)
    dims = [width * data.draw(st.integers(1, 2)) if nz else data.draw(st.integers(1, 5)) for _ in range(2)]
    slots = data.draw(st.lists(st.integers(0, pages * size - 1), unique=True))
    slots = [-1 if data.draw(st.booleans()) else slot for slot in slots]
    rows = [labelled(len(slots), heads, dim, dtype=dtype, seed=dim) for dim in dims]
    caches, wanted = [], []
    for dim, part in zip(dims, rows, strict=True):
        shape = (pages, heads * dim // width, size, width) if nz else (pages, size, heads, dim)
        cache = labelled(*shape, dtype=dtype, seed=9)
        after = cache.clone()
        for token, slot in enumerate(slots):
            for head in range(heads if slot >= 0 else 0):
                for d in range(dim):
                    at = element(nz, slot // size, slot % size, head, d, dim, width)
                    after[at] = part[token, head, d]
        caches.append(cache)
        wanted.append(after)
    mapping = torch.tensor(slots, dtype=slot_dtype)
    mode = "PA_NZ" if nz else data.draw(st.sampled_from(["Norm", None]))
    functional = REGISTRY[f"{SCATTER}_functional"](*rows, *caches, mapping, cache_mode=mode)
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(functional, wanted, strict=True))
    if not nz:
        alone = caches[0].clone()
        assert REGISTRY[KEY_ONLY](rows[0], mapping, key_cache=alone) is alone
        assert torch.equal(alone.float(), wanted[0].float())
    assert REGISTRY[SCATTER](*rows, *caches, mapping, cache_mode=mode) is None
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(caches, wanted, strict=True))


def test_scatter_pa_takes_nz_caches_with_a_head_axis() -> None:
    rows = labelled(3, 2, 32)
    flat, split = torch.zeros(2, 4, 16, 16).half(), torch.zeros(2, 2, 2, 16, 16).half()
    slots = torch.tensor([5, 0, 31], dtype=INT32)
    REGISTRY[SCATTER](rows, rows, flat, flat.clone(), slots)
    REGISTRY[SCATTER](rows, rows, split, split.clone(), slots)
    assert torch.equal(split.flatten(1, 2), flat) and bool(flat.any())


@settings(max_examples=60, deadline=None)
@given(data=st.data(), nz=st.booleans(), cumulative=st.booleans(), dtype=st.sampled_from([torch.float16, torch.int8]))
def test_gather_pa_reads_what_a_loop_reads(data: st.DataObject, nz: bool, cumulative: bool, dtype: torch.dtype) -> None:
    pages, size, heads, width = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3)), 2, c0(dtype)
    dims = [width, 2 * width]
    lens = data.draw(st.lists(st.integers(0, 2 * size), min_size=1, max_size=3).filter(any))
    offsets = [data.draw(st.integers(0, 2 * size - 1)) for _ in lens]
    table = torch.randint(0, pages, (len(lens), 5), generator=torch.Generator().manual_seed(3)).int()
    spare = data.draw(st.integers(0, 2))
    caches, outs, wanted = [], [], []
    for dim in dims:
        shape = (pages, heads * dim // width, size, width) if nz else (pages, size, heads, dim)
        cache = labelled(*shape, dtype=dtype, seed=dim)
        out = labelled(sum(lens) + spare, heads, dim, dtype=dtype, seed=1)
        after, token = out.clone(), 0
        for row, length in enumerate(lens):
            for position in range(length):
                page = int(table[row, offsets[row] // size + position // size])
                for head in range(heads):
                    for d in range(dim):
                        after[token, head, d] = cache[element(nz, page, position % size, head, d, dim, width)]
                token += 1
        caches.append(cache)
        outs.append(out.flatten(1) if nz else out)
        wanted.append(after.flatten(1) if nz else after)
    given_lens = [sum(lens[:i]) for i in range(len(lens) + 1)] if cumulative else lens
    index = torch.tensor(given_lens, dtype=INT32)
    offset = torch.tensor(offsets, dtype=INT32)
    functional = REGISTRY[f"{GATHER}_functional"](
        *caches, table, index, *outs, seq_offset=offset, is_seq_lens_cumsum=cumulative
    )
    assert all(torch.equal(a, b) for a, b in zip(functional, wanted, strict=True))
    if not nz:
        loaded = REGISTRY[LOAD](*caches, table, index, seq_starts=offset, cumsum=cumulative)
        assert all(torch.equal(a, b[: sum(lens)]) for a, b in zip(loaded, wanted, strict=True))
        again = [out.clone() for out in outs]
        REGISTRY[f"{LOAD}.out"](
            *caches, table, index, seq_starts=offset, cumsum=cumulative, key=again[0], value=again[1]
        )
        assert all(torch.equal(a, b) for a, b in zip(again, wanted, strict=True))
    REGISTRY[GATHER](*caches, table, index, *outs, seq_offset=offset, is_seq_lens_cumsum=cumulative)
    assert all(torch.equal(a, b) for a, b in zip(outs, wanted, strict=True))


def scatter(nz: bool = False, dtype: torch.dtype = torch.float16, **over: Any) -> tuple[str, dict[str, Any]]:
    cache = (3, 4, 16, 16) if nz else (3, 16, 2, 32)
    options: dict[str, Any] = {name: torch.zeros(5, 2, 32, dtype=dtype) for name in ("key", "value")}
    options |= {f"{name}_cache": torch.zeros(cache, dtype=dtype) for name in ("key", "value")}
    options |= {"slot_mapping": torch.arange(5, dtype=INT32), "cache_mode": "PA_NZ" if nz else "Norm"}
    return SCATTER, options | over


def gather(nz: bool = False, dtype: torch.dtype = torch.float16, **over: Any) -> tuple[str, dict[str, Any]]:
    cache = (3, 4, 16, 16) if nz else (3, 16, 2, 32)
    out = (20, 64) if nz else (20, 2, 32)
    options: dict[str, Any] = {f"{name}_cache": torch.zeros(cache, dtype=dtype) for name in ("key", "value")}
    options |= {name: torch.zeros(out, dtype=dtype) for name in ("key", "value")}
    options |= {"block_tables": torch.zeros(2, 2, dtype=INT32), "seq_lens": torch.tensor([17, 3], dtype=INT32)}
    return GATHER, options | over


STRIDED = torch.zeros(5, 32, 2).half().transpose(1, 2)
REFUSED: list[tuple[str, Callable[[], tuple[str, dict[str, Any]]]]] = [
    ("scatter-pa-dtype", lambda: scatter(dtype=torch.int64)),
    ("scatter-pa-same-dtype", lambda: scatter(key=torch.zeros(5, 2, 32).bfloat16())),
    ("scatter-pa-contiguous", lambda: scatter(key=STRIDED)),
    ("scatter-pa-contiguous", lambda: scatter(slot_mapping=torch.arange(10).int()[::2])),
    ("scatter-pa-mode", lambda: scatter(cache_mode="PA_BSND")),
    ("scatter-pa-slots-dtype", lambda: scatter(slot_mapping=torch.arange(5).short())),
    ("scatter-pa-slots-shape", lambda: scatter(slot_mapping=torch.arange(4).int())),
    ("scatter-pa-slots-shape", lambda: scatter(slot_mapping=torch.arange(5).int().view(5, 1))),
    ("scatter-pa-rank", lambda: scatter(value=torch.zeros(4, 2, 32).half())),
    ("scatter-pa-rank", lambda: scatter(key=torch.zeros(5, 64).half())),
    ("scatter-pa-cache", lambda: scatter(key_cache=torch.zeros(3, 16, 64).half())),
    ("scatter-pa-cache", lambda: scatter(value_cache=torch.zeros(3, 16, 32, 2).half())),
    ("scatter-pa-cache", lambda: scatter(nz=True, key_cache=torch.zeros(3, 2, 16, 16).half())),
    ("scatter-pa-nz", lambda: scatter(nz=True, key_cache=torch.zeros(3, 2, 16, 32).half())),
    ("gather-pa-dtype", lambda: gather(dtype=torch.float32)),
    ("gather-pa-dtype", lambda: gather(key=torch.zeros(20, 2, 32).bfloat16())),
    ("gather-pa-contiguous", lambda: gather(key_cache=torch.zeros(3, 2, 16, 32).half().transpose(1, 2))),
    ("gather-pa-empty", lambda: gather(key=torch.zeros(0, 2, 32).half())),
    ("gather-pa-index-dtype", lambda: gather(block_tables=torch.zeros(2, 2).long())),
    ("gather-pa-index-dtype", lambda: gather(seq_lens=torch.tensor([17, 3]))),
    ("gather-pa-index-dtype", lambda: gather(seq_offset=torch.tensor([0, 0]))),
    ("gather-pa-index-shape", lambda: gather(is_seq_lens_cumsum=True)),
    ("gather-pa-index-shape", lambda: gather(seq_offset=torch.tensor([0]).int())),
    ("gather-pa-cache", lambda: gather(key=torch.zeros(20, 4, 16).half())),
    ("gather-pa-cache", lambda: gather(nz=True, key=torch.zeros(20, 32).half())),
    ("gather-pa-cache", lambda: gather(key_cache=torch.zeros(3, 16, 64).half())),
    ("gather-pa-nz", lambda: gather(nz=True, key_cache=torch.zeros(3, 2, 16, 32).half())),
    (
        "gather-pa-token",
        lambda: gather(key_cache=torch.zeros(1, 1, 128, 593).half(), key=torch.zeros(1, 128, 593).half()),
    ),
]


@pytest.mark.parametrize("number", range(len(REFUSED)), ids=lambda n: f"{n}-{REFUSED[n][0]}")
def test_calls_outside_the_documents_are_refused(number: int, refuses: Callable[..., None]) -> None:
    rule, build = REFUSED[number]
    op, options = build()
    refuses(rule, op, **options)


def test_every_rule_has_a_call_that_breaks_it() -> None:
    assert {rule for rule, _ in REFUSED} == {rule.id for rule in RULES.values() if rule.test == Path(__file__).name}


@pytest.mark.parametrize("nz", [False, True])
def test_calls_within_the_documents_are_taken(nz: bool) -> None:
    for op, options in (scatter(nz), gather(nz)):
        REGISTRY[op](**options)


def test_the_compressed_form_says_that_it_is_not_computed() -> None:
    four = torch.zeros(5, 1, 2, 32).half()
    forms: list[dict[str, Any]] = [{"key": four, "value": four}, {"seq_lens": torch.zeros(5, dtype=INT32)}]
    for over in forms:
        op, options = scatter(**over)
        with pytest.raises(KernelNotCovered):
            REGISTRY[op](**options)


@pytest.mark.parametrize("nz", [False, True])
def test_a_slot_past_the_end_faults_and_nothing_is_written(nz: bool) -> None:
    op, options = scatter(nz, key=torch.ones(5, 2, 32).half(), slot_mapping=torch.tensor([1, 2, 48, 3, 4], dtype=INT32))
    with pytest.raises(DeviceFault) as caught:
        REGISTRY[op](**options)
    assert (caught.value.page, caught.value.slot) == (3, 48)
    assert not options["key_cache"].any()


@pytest.mark.parametrize(
    ("over", "page"),
    [
        ({"block_tables": torch.tensor([[0, 3], [1, 1]], dtype=INT32)}, 3),
        ({"block_tables": torch.tensor([[0, -1], [1, 1]], dtype=INT32)}, -1),
        ({"seq_lens": torch.tensor([17, 4], dtype=INT32)}, None),
        ({"seq_offset": torch.tensor([16, 0], dtype=INT32)}, None),
    ],
)
def test_reads_outside_fault(over: dict[str, Any], page: int | None) -> None:
    op, options = gather(**over)
    with pytest.raises(DeviceFault) as caught:
        REGISTRY[op](**options)
    assert caught.value.page == page
