"""Owns the proof that foreign storage is served as one's own, and that copies come back bit for bit (on a CPU)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kv_planner import ComponentSpec, ModelLayout, PrefixIndex
from kv_pool import (
    DeviceUnavailable,
    KvPoolError,
    LayoutError,
    MhaPool,
    MlaPool,
    PageAllocator,
    PageError,
    Pool,
    UnheldComponent,
    UnmirroredComponent,
    UnsupportedMover,
    adopt,
)
from kv_pool.hicache import HOST_LAYOUTS, HiCacheController, HostLayout, HostPool, create_mover

Labels = Callable[..., torch.Tensor]
Bits = Callable[[torch.Tensor], torch.Tensor]


def sparse() -> ModelLayout:
    def spec(component: Any, layers: Any, dims: int, dtype: str) -> ComponentSpec:
        return ComponentSpec(component, layer_ids=layers, dtype=dtype, total_heads=1, dims=dims)  # type: ignore[arg-type]

    return ModelLayout(
        [
            spec("latent", [0, 1, 2], 512, "bfloat16"),
            spec("rope", [0, 1, 2], 64, "bfloat16"),
            spec("index_key", [0, 2], 32, "int8"),
            spec("index_scale", [0, 2], 1, "float32"),
        ],
        page_size=4,
        fingerprint="sparse",
    )


def engine(make_labels: Labels) -> dict[Any, Any]:
    """Buffers as an engine keeps them: parents over layers, a list of flat layers, bytes for integers."""
    return {
        "latent": make_labels([3, 6, 4, 1, 512], torch.bfloat16, 1),
        "rope": [make_labels([24, 1, 1, 64], torch.bfloat16, 2 + number) for number in range(3)],
        "index_key": make_labels([2, 6, 4, 1, 32], torch.int8, 8).view(torch.uint8),
        "index_scale": [make_labels([6, 4, 1, 1], torch.float32, 9 + number) for number in range(2)],
    }


def test_the_views_are_the_engines_memory(make_labels: Labels) -> None:
    held = engine(make_labels)
    pool = adopt(held, sparse())
    assert (pool.num_pages, pool.page_size, pool.device.type) == (6, 4, "cpu")
    assert pool.view("latent", 1).data_ptr() == held["latent"][1].data_ptr()
    assert pool.view("rope", 2).data_ptr() == held["rope"][2].data_ptr() and pool.view("rope", 2).shape == (6, 4, 1, 64)
    assert pool.view("index_key", 2).dtype == torch.int8
    assert pool.storage("latent").data_ptr() == held["latent"].data_ptr()
    with pytest.raises(LayoutError, match="one contiguous tensor"):
        pool.storage("rope")
    entries = {(entry.component, entry.layer_id): entry for entry in pool.manifest().entries}
    assert len(entries) == 10 and entries["rope", 1].address == held["rope"][1].data_ptr()
    assert entries["index_scale", 2].address == held["index_scale"][1].data_ptr()


@pytest.mark.parametrize("layout", HOST_LAYOUTS)
@pytest.mark.parametrize("threads", [1, 3])
def test_the_host_serves_foreign_storage(make_labels: Labels, as_bits: Bits, layout: HostLayout, threads: int) -> None:
    pool = adopt(engine(make_labels), sparse())
    host = HostPool(pool, pages=7, layout=layout)
    mover = create_mover("auto", host, threads=threads)
    for seed, mirror in enumerate(host.mirrors):
        mirror.host.copy_(make_labels(mirror.host.shape, mirror.host.dtype, seed + 20))
    before = [([as_bits(layer).clone() for layer in m.layers], as_bits(m.host).clone()) for m in host.mirrors]
    mover.backup([5, 2, 1, 3], [3, 7, 1, 2])
    mover.load([1, 4], [7, 3])
    for mirror, (near, far) in zip(host.mirrors, before, strict=True):
        for number, layer in enumerate(near):
            far[[3, 7, 1, 2], number] = layer[[5, 2, 1, 3]]
            layer[[1, 4]] = far[[7, 3], number]
            assert torch.equal(as_bits(mirror.layers[number]), layer)
        assert torch.equal(as_bits(mirror.host), far)
    with pytest.raises(UnmirroredComponent, match="tensors of their own"):
        _ = host.mirror("rope").device
    with pytest.raises(UnsupportedMover):
        create_mover("dim_exchange", host)
    for wrong in (0, -1):
        with pytest.raises(UnsupportedMover, match="threads"):
            create_mover("auto", host, threads=wrong)


def test_what_does_not_fit_the_layout_is_refused(make_labels: Labels) -> None:
    def refused(error: type[KvPoolError], text: str, **changes: Any) -> None:
        held = {**engine(make_labels), **changes}
        with pytest.raises(error, match=text):
            adopt({name: value for name, value in held.items() if value is not None}, sparse())

    refused(UnheldComponent, "index_scale", index_scale=None)
    refused(UnheldComponent, "key", key=torch.zeros(3, 6, 4, 1, 8))
    refused(LayoutError, "2 layers", latent=torch.zeros(2, 6, 4, 1, 512, dtype=torch.bfloat16))
    refused(LayoutError, "float16", latent=torch.zeros(3, 6, 4, 1, 512, dtype=torch.float16))
    refused(LayoutError, "strides", latent=torch.zeros(3, 6, 512, 1, 4, dtype=torch.bfloat16).transpose(2, 4))
    refused(LayoutError, "multiple of 2048", latent=torch.zeros(3, 23, 1, 1, 512, dtype=torch.bfloat16))
    refused(LayoutError, "at least two pages", latent=torch.zeros(3, 4, 1, 1, 512, dtype=torch.bfloat16))
    refused(LayoutError, "6, 7", latent=torch.zeros(3, 7, 4, 1, 512, dtype=torch.bfloat16))


def mha(make_layout: Callable[..., ModelLayout]) -> Pool:
    return MhaPool(make_layout(dims=192, value_dims=128, draft=(5,)), size=28, device="cpu")


def mla(make_layout: Callable[..., ModelLayout]) -> Pool:
    return MlaPool(sparse(), size=28, device="cpu")


def latents(make_layout: Callable[..., ModelLayout]) -> Pool:
    held = ModelLayout(sparse().components[:2], page_size=4, fingerprint="latents")
    return MlaPool(held, size=28, device="cpu")


@pytest.mark.parametrize("make", [mha, mla, latents])
def test_copies_come_back_into_other_pages(
    make: Callable[..., Pool], make_layout: Callable[..., ModelLayout], make_labels: Labels, as_bits: Bits
) -> None:
    pool, other = make(make_layout), make(make_layout)
    for seed, name in enumerate(pool.components):
        pool.storage(*name).copy_(make_labels(pool.storage(*name).shape, pool.storage(*name).dtype, seed))
        other.storage(*name).copy_(make_labels(pool.storage(*name).shape, pool.storage(*name).dtype, seed + 50))
    before = {
        name: (as_bits(pool.storage(*name)).clone(), as_bits(other.storage(*name)).clone()) for name in pool.components
    }
    copy = pool.copy_out([6, 1, 3])
    assert copy.pages == 3 and copy.nbytes == 3 * pool.nbytes // pool.num_pages
    other.copy_in([2, 7, 5], copy)
    for name, (source, target) in before.items():
        target[:, [2, 7, 5]] = source[:, [6, 1, 3]]
        assert torch.equal(as_bits(pool.storage(*name)), source)
        assert torch.equal(as_bits(other.storage(*name)), target)
    for pages in ([0, 1, 2], [1, 1, 2], [1, 2, 8], [1, 2]):
        with pytest.raises(PageError):
            other.copy_in(pages, copy)
    with pytest.raises(PageError):
        pool.copy_out([0])
    with pytest.raises(LayoutError):
        MhaPool(make_layout(layers=(0,)), size=28, device="cpu").copy_in([1, 2, 3], copy)


@pytest.mark.parametrize("device", ["npu:0", "bogus", "cuda:77", "npu:99999"])
def test_an_unreachable_device_is_a_typed_error(make_layout: Callable[..., ModelLayout], device: str) -> None:
    with pytest.raises(DeviceUnavailable) as caught:
        MhaPool(make_layout(), size=16, device=device)
    assert isinstance(caught.value, RuntimeError) and caught.value.given == device
    assert ("torch_npu" in caught.value.remedy) == device.startswith("npu")


def test_page_ids_fit_the_allocator_of_adopted_pools(make_labels: Labels) -> None:
    pool = adopt(engine(make_labels), sparse())
    pages = PageAllocator(pool.num_pages, pool.page_size).alloc(5)
    assert pool.copy_out(pages).pages == 5


def test_a_cache_over_foreign_storage(make_labels: Labels, as_bits: Bits) -> None:
    """Pages of a tensor a layer come back from the host as they were, and freed ones are poisoned."""
    pool = adopt(engine(make_labels), sparse())
    host = HostPool(pool, pages=8)
    allocator, index = PageAllocator(6, 4), PrefixIndex(4, device_pages=6, host_pages=9)
    cache = HiCacheController(pool, allocator, host, index)
    prompt = list(range(17))
    acquired = cache.acquire(prompt)
    pages = acquired.pages.copy()
    cache.load(acquired)
    kept = [[as_bits(layer[torch.from_numpy(pages[:4])]).clone() for layer in mirror.layers] for mirror in host.mirrors]
    cache.finish(acquired, prompt)
    cache.drain()
    assert cache.evict(5) == 4
    for mirror in host.mirrors:
        for layer in mirror.layers:
            gone = layer[torch.from_numpy(pages)]
            assert bool((gone.isnan() if gone.is_floating_point() else gone == -1).all())
    again = cache.acquire(prompt)
    assert again.host_hit_tokens == 16
    cache.load(again)
    for layer_id in (0, 1, 2):
        again.wait_layer(layer_id)
    found = torch.from_numpy(again.pages[:4].copy())
    for mirror, layers in zip(host.mirrors, kept, strict=True):
        for layer, bits in zip(mirror.layers, layers, strict=True):
            assert torch.equal(as_bits(layer[found]), bits)
    cache.abort(again)
