"""Owns the proof of KV writes: every byte lands in its slot, and padding writes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import spec_kernels as sk
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from spec_kernels.kv_writes import npu_writer

cases = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.int8, torch.float8_e4m3fn)


def marked(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Bytes that tell where they belong; finite in every dtype."""
    random = torch.Generator().manual_seed(seed)
    size = torch.empty(0, dtype=dtype).element_size()
    return torch.randint(0, 100, (*shape[:-1], shape[-1] * size), dtype=torch.uint8, generator=random).view(dtype)


@cases
@given(seed=st.integers(0, 2**32))
def test_rows_land_in_their_slots(place: Any, seed: int) -> None:
    numbers = place.case(seed)
    dtype = numbers.choice(DTYPES)
    pages, page_size, tokens = numbers.randrange(1, 5), numbers.choice((1, 4, 16)), numbers.randrange(0, 7)
    tiled = numbers.random() < 0.3
    if tiled and place.backend == "npu":  # the device's tiles hold 32 bytes
        dtype = numbers.choice(DTYPES[:2])
    dims, value_dims = (32, 16) if tiled else (numbers.choice((3, 8)) for _ in "kv")
    heads = (1, 1) if tiled else (numbers.randrange(1, 4),) * 2
    if not tiled and numbers.random() < 0.3:  # K and V of unlike heads
        heads = (2, 1)
    total = pages * page_size
    slots = numbers.sample(range(total), min(tokens, total))
    slots = [numbers.choice((slot, slot, slot, -1, total, total + 7)) for slot in slots]
    limit = numbers.choice((None, 0, 1, len(slots)))
    valid = None if limit is None else torch.tensor([limit], dtype=torch.int32).to(place.device)
    rows, caches, expected = [], [], []
    for part, width in enumerate((dims, value_dims)):
        given_rows = marked((len(slots), heads[part], width), dtype, seed % 1000 + part)
        shape = (pages, width // 16, page_size, 16) if tiled else (pages, page_size, heads[part], width)
        cache = marked(shape, dtype, seed % 1000 + 10 + part)
        wanted = cache.clone().view(torch.uint8)
        for token, slot in enumerate(slots):
            if 0 <= slot < total and (limit is None or token < limit):
                page, offset = divmod(slot, page_size)
                flat = given_rows[token].reshape(-1).view(torch.uint8)
                if tiled:
                    wanted[page, :, offset] = flat.view(wanted.shape[1], -1)
                else:
                    wanted[page, offset] = flat.view(heads[part], -1)
        rows.append(given_rows.to(place.device))
        caches.append(cache.to(place.device))
        expected.append(wanted)
    strided = [part.transpose(0, 1).contiguous().transpose(0, 1) for part in rows]
    index = torch.tensor(slots, dtype=numbers.choice((torch.int32, torch.int64))).to(place.device)
    key, value = strided
    sk.write_kv(key, value, caches[0], caches[1], index, num_valid=valid, tiled=tiled, backend=place.backend)
    for cache, wanted in zip(caches, expected, strict=True):
        assert torch.equal(cache.cpu().view(torch.uint8), wanted)


def test_which_operator_of_the_device_writes() -> None:
    def rows(heads: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(2, heads, 16).to(dtype)

    half, single, eighth = torch.float16, torch.float32, torch.float8_e4m3fn
    assert npu_writer(rows(2, half), rows(2, half), tiled=False) == "reshape_and_cache"
    assert npu_writer(rows(2, single), rows(2, single), tiled=False) == "scatter_pa"
    assert npu_writer(rows(2, eighth), rows(2, eighth), tiled=False) == "scatter_pa"
    assert npu_writer(rows(2, half), rows(1, half), tiled=False) == "scatter_nd"
    assert npu_writer(rows(2, half), rows(2, eighth), tiled=False) == "scatter_nd"
    assert npu_writer(rows(2, half), rows(2, half), tiled=True) == "scatter_pa"
    assert npu_writer(rows(2, eighth), rows(2, eighth), tiled=True) is None


def test_refusals(place: Any) -> None:
    key, value = (torch.zeros(2, 1, width, dtype=torch.float16, device=place.device) for width in (8, 4))
    caches = [torch.zeros(3, 4, 1, width, dtype=torch.float16, device=place.device) for width in (8, 4)]
    slots = torch.tensor([4, 5], device=place.device)
    with pytest.raises(sk.ShapeError, match="value_cache"):
        sk.write_kv(key, key, caches[0], caches[1], slots, backend=place.backend)
    with pytest.raises(sk.DtypeError, match="key"):
        sk.write_kv(key.float(), value, caches[0], caches[1], slots, backend=place.backend)
    with pytest.raises(sk.ShapeError, match="multiple of 16"):
        sk.write_kv(key, value, caches[0], caches[1], slots, tiled=True, backend=place.backend)
    with pytest.raises(sk.ShapeError, match="pages"):
        sk.write_kv(key, value, caches[0], caches[1][:2], slots, backend=place.backend)
    with pytest.raises(sk.AliasError, match="key_cache, key"):
        sk.write_kv(caches[0].view(12, 1, 8)[:2], value, caches[0], caches[1], slots, backend=place.backend)


def test_the_custom_op_is_sound(opcheck: Any) -> None:
    key, caches = torch.randn(2, 1, 8), [torch.zeros(3, 4, 1, 8) for _ in range(2)]
    arguments = (key, key.clone(), *caches, torch.tensor([4, -1]), None, False)
    opcheck(torch.ops.spec_kernels.write_kv, arguments)
