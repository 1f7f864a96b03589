"""Owns what the kernel tests share: the plain-loop reference, the case builder, and the check of every backend."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import spec_kernels as sk
import torch
from spec_kernels import tiling
from spec_kernels.dispatch import load

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported, which happens when its backend is loaded
PLACES = [("cpu", "native"), ("cpu", "triton")]
if torch.cuda.is_available():
    PLACES = [("cpu", "native"), ("cuda:0", "native"), ("cuda:0", "triton")]

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}


def attention_loop(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    pages: Sequence[Sequence[int]],
    kv_lens: Sequence[int],
    *,
    scale: float,
    causal: bool,
) -> torch.Tensor:
    """The meaning of paged attention, said once more: one query, one head, one position at a time, in float64."""
    rows, width, heads, _ = query.shape
    _, page_size, kv_heads, value_dims = value_cache.shape
    out = torch.zeros(rows, width, heads, value_dims, dtype=torch.float64)
    for row in range(rows):
        for token in range(width if kv_lens[row] else 0):
            last = kv_lens[row] - width + token if causal else kv_lens[row] - 1
            places = [(pages[row][p // page_size], p % page_size) for p in range(last + 1)]
            for head in range(heads):
                kv_head = head // (heads // kv_heads)
                vector = query[row, token, head].double()
                scores = [float(vector @ key_cache[page, slot, kv_head].double()) * scale for page, slot in places]
                top = max(scores)
                weights = [math.exp(score - top) for score in scores]
                for weight, (page, slot) in zip(weights, places, strict=True):
                    share = weight / sum(weights)
                    out[row, token, head] += share * value_cache[page, slot, kv_head].double()
    return out


@dataclass(frozen=True)
class Place:
    """Where a test runs an op: a device, and the backend that it insists on."""

    device: str
    backend: sk.BackendName

    def case(self, seed: int) -> random.Random:
        """Random numbers of a case; half of the cases cross the edges of small tiles and of a small grid."""
        numbers = random.Random(seed)
        small = numbers.random() < 0.5
        tiling.MAX_TILE_BYTES = numbers.choice((512, 2048)) if small else 192 * 1024
        tiling.MAX_PROGRAMS = 3 if small else 65_535
        return numbers

    def put(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """Copies on the device, half of them with strides of their own."""
        placed = []
        for index, tensor in enumerate(tensors):
            copy = tensor.to(self.device, copy=True)
            if index % 2 and copy.ndim > 1:
                copy = copy.transpose(0, 1).contiguous().transpose(0, 1)
            elif index % 2 and copy.ndim == 1 and copy.numel():
                copy = torch.stack((copy, copy), 1)[:, 0]
            placed.append(copy)
        return placed

    def ints(self, numbers: random.Random, count: int, low: int, high: int) -> torch.Tensor:
        """Integers of either width in `low..high - 1`, on the host."""
        values = [numbers.randrange(low, high) for _ in range(count)]
        return torch.tensor(values, dtype=numbers.choice((torch.int32, torch.int64)))

    def poison(self, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """An output that holds what an earlier step left."""
        return torch.full(shape, -7777 if dtype != torch.bool else 1, dtype=dtype, device=self.device)


@pytest.fixture(autouse=True)
def limits_end_with_the_test() -> Iterator[None]:
    """The limits that a place's cases set are those of no other test, whatever its order."""
    limits = tiling.MAX_TILE_BYTES, tiling.MAX_PROGRAMS
    assert limits == (192 * 1024, 65_535), "another test left its limits behind"
    yield
    tiling.MAX_TILE_BYTES, tiling.MAX_PROGRAMS = limits


@pytest.fixture
def place_on() -> type[Place]:
    """Make a place."""
    return Place


@pytest.fixture(params=PLACES, ids=lambda place: f"{place[1]}-{place[0]}")
def place(request: pytest.FixtureRequest, place_on: type[Place]) -> Place:
    """Every backend that this machine has."""
    return place_on(*request.param)


@dataclass(frozen=True)
class AttentionPlace(Place):
    """A place and the sizes that attention takes there."""

    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float64)
    page: int = 4

    @property
    def dtype(self) -> torch.dtype:
        """One dtype that every size takes."""
        return self.dtypes[0]

    def sizes(self, numbers: random.Random) -> tuple[tuple[int, int, int], tuple[int, int], torch.dtype, int]:
        """Dims of K, V and rope; heads and KV heads; dtype; page size. What the device's operator documents, there."""
        dtype = numbers.choice(self.dtypes)
        if self.device.startswith("npu"):
            if numbers.random() < 0.25:
                return (512, 512, 64), (numbers.choice((1, 3, 8)), 1), dtype, 128
            wide = [(128, 128, 0), (192, 128, 0)] if dtype == torch.bfloat16 else []
            sizes = numbers.choice([(64, 64, 0), (128, 128, 0), *wide])
        else:
            sizes = (numbers.choice((8, 5, 16)), numbers.choice((8, 3, 32)), numbers.choice((0, 0, 4)))
            sizes = numbers.choice((sizes, (16, 32, 0), (32, 16, 16)))
        kv_heads = numbers.choice((1, 2))
        return sizes, (kv_heads * numbers.choice((1, 3)), kv_heads), dtype, numbers.choice((self.page, self.page * 2))


@pytest.fixture(params=PLACES, ids=lambda place: f"{place[1]}-{place[0]}")
def attention_place(request: pytest.FixtureRequest) -> AttentionPlace:
    """Attention on every backend that this machine has."""
    device, backend = request.param
    if device == "cpu":
        return AttentionPlace(device, backend)
    return AttentionPlace(device, backend, dtypes=(torch.float32, torch.float16, torch.bfloat16))


@pytest.fixture
def opcheck() -> Callable[[Any, tuple[Any, ...]], None]:
    """torch's check of a custom operator, and of its Triton twin where that serves host memory."""

    def check(op: Any, arguments: tuple[Any, ...]) -> None:
        torch.library.opcheck(op, arguments)
        name = str(op).split(".")[1]
        if ("cpu", "triton") in PLACES:
            load(name, "triton")  # registers it
            torch.library.opcheck(getattr(torch.ops.spec_kernels, f"{name}_triton"), arguments)

    return check


@pytest.fixture(params=[backend for device, backend in PLACES if device == "cpu"])
def host_backend(request: pytest.FixtureRequest) -> str:
    """Every backend that serves host memory here."""
    return str(request.param)


@pytest.fixture
def attention_place_on() -> type[AttentionPlace]:
    """For folders that have a device of their own."""
    return AttentionPlace


class AttentionCase:
    """A batch over permuted pages; unused pages and slots hold large numbers, so that reading one shows."""

    def __init__(
        self,
        *,
        kv_lens: Sequence[int],
        width: int,
        heads: int,
        kv_heads: int,
        dims: int,
        value_dims: int,
        page_size: int,
        dtype: torch.dtype,
        seed: int = 0,
    ) -> None:
        random = torch.Generator().manual_seed(seed)
        counts = [-(-length // page_size) for length in kv_lens]
        total = sum(counts) + 3
        order = (torch.randperm(total - 1, generator=random) + 1).tolist()
        self.kv_lens, self.width, self.page_size, self.scale = list(kv_lens), width, page_size, dims**-0.5
        self.pages: list[list[int]] = []
        for count in counts:
            self.pages.append(order[:count])
            order = order[count:]
        self.query = torch.randn(len(kv_lens), width, heads, dims, generator=random).to(dtype)
        self.key = torch.full((total, page_size, kv_heads, dims), 300.0).to(dtype)
        self.value = torch.full((total, page_size, kv_heads, value_dims), -300.0).to(dtype)
        for row, length in enumerate(kv_lens):
            for position in range(length):
                page, slot = self.pages[row][position // page_size], position % page_size
                self.key[page, slot] = torch.randn(kv_heads, dims, generator=random).to(dtype)
                self.value[page, slot] = torch.randn(kv_heads, value_dims, generator=random).to(dtype)

    def metadata(self, device: str, *, columns: int | None = None) -> sk.PagedAttentionMetadata:
        widths = [self.width] * len(self.kv_lens)
        return sk.build_paged_metadata(
            self.pages, [min(w, n) if n else w for w, n in zip(widths, self.kv_lens, strict=True)], self.kv_lens,
            page_size=self.page_size, columns=columns, device=device,
        )  # fmt: skip

    def expected(self, *, causal: bool = True, kv_lens: Sequence[int] | None = None) -> torch.Tensor:
        lengths = self.kv_lens if kv_lens is None else kv_lens
        return attention_loop(self.query, self.key, self.value, self.pages, lengths, scale=self.scale, causal=causal)


@pytest.fixture
def attention_case() -> type[AttentionCase]:
    """The builder of attention batches."""
    return AttentionCase


@pytest.fixture
def check_attention() -> Callable[..., None]:
    """A backend, on a device, equals the plain loop, and leaves its inputs alone."""

    def check(case: AttentionCase, device: str, *, causal: bool = True, **options: Any) -> None:
        inputs = [tensor.to(device) for tensor in (case.query, case.key, case.value)]
        metadata = case.metadata(device)
        lists = (list(metadata.q_lens), list(metadata.kv_lens))
        options.update(scale=case.scale, page_size=case.page_size, causal=causal)
        out = sk.paged_attention(inputs[0], inputs[1], inputs[2], metadata, **options)
        assert out.dtype == case.query.dtype and str(out.device) == str(inputs[0].device)
        assert_close(out, case.expected(causal=causal))
        for row, length in enumerate(case.kv_lens):
            assert length or not out[row].any()
        for tensor, original in zip(inputs, (case.query, case.key, case.value), strict=True):
            assert torch.equal(tensor.cpu(), original)
        assert lists == (metadata.q_lens, metadata.kv_lens)

    return check


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare with the tolerance of the dtype that was computed in."""
    limit = TOLERANCE[found.dtype]
    error = (found.detach().cpu().double() - expected).abs().max() if expected.numel() else torch.tensor(0.0)
    assert found.shape == expected.shape and float(error) <= limit, f"error {float(error)} above {limit}"


@pytest.fixture
def close() -> Callable[[torch.Tensor, torch.Tensor], None]:
    """Compare with the tolerance of the dtype that was computed in."""
    return assert_close
