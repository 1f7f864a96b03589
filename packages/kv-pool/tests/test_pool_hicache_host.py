"""Owns the proof that a host pool mirrors everything its device pool holds, aligned, in the layout that was named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kv_planner import BufferEntry, ModelLayout, RankManifest
from kv_pool import DoubleFree, HostPoolError, MhaPool, UnmirroredComponent
from kv_pool.hicache import ALIGNMENT, HOST_LAYOUTS, HostLayout, HostPool


@pytest.mark.parametrize("layout", HOST_LAYOUTS)
def test_every_component_is_mirrored_at_its_own_width(
    make_layout: Callable[..., ModelLayout], layout: HostLayout
) -> None:
    pool = MhaPool(
        make_layout(layers=(3, 5), draft=(9,)), size=16, device="cpu", layer_ids={"target": (3, 5), "draft": (9,)}
    )
    host = HostPool(pool, pages=6, layout=layout)
    assert [(mirror.component, mirror.part, mirror.layer_ids) for mirror in host.mirrors] == [
        ("key", "target", (3, 5)),
        ("key", "draft", (9,)),
        ("value", "target", (3, 5)),
        ("value", "draft", (9,)),
    ]
    widths = {"layer_first": (2, 28, 2, 8), "page_first": (28, 2, 2, 8), "page_first_direct": (7, 2, 4, 2, 8)}
    assert host.mirror("key").storage.shape == widths[layout]
    assert host.mirror("value", "draft").host.shape == (7, 1, 4, 1, 3)
    for mirror in host.mirrors:
        assert mirror.storage.is_contiguous() and mirror.storage.data_ptr() % ALIGNMENT == 0
        assert mirror.host.data_ptr() == mirror.storage.data_ptr() and mirror.host.dtype == mirror.device.dtype
        room = mirror.storage.untyped_storage()
        assert (
            room.data_ptr() + room.nbytes()
            >= mirror.storage.data_ptr() + -(-mirror.storage.nbytes // ALIGNMENT) * ALIGNMENT
        )
    assert host.page_bytes == 2 * 4 * 2 * (8 + 6) * 2 + 4 * (4 + 3) * 4
    assert host.nbytes == 4 * ALIGNMENT and not host.pinned
    assert (host.layout, host.num_pages, host.page_size, host.pool) == (layout, 7, 4, pool)


def test_the_axes_are_those_that_the_layout_spells(make_layout: Callable[..., ModelLayout]) -> None:
    pool = MhaPool(make_layout(), size=16, device="cpu")
    hosts = {layout: HostPool(pool, pages=3, layout=layout).mirror("key") for layout in HOST_LAYOUTS}
    for mirror in hosts.values():
        mirror.host[2, 1, 3, 0, 5] = 7
    assert hosts["layer_first"].storage[1, 2 * 4 + 3, 0, 5] == 7
    assert hosts["page_first"].storage[2 * 4 + 3, 1, 0, 5] == 7
    assert hosts["page_first_direct"].storage[2, 1, 3, 0, 5] == 7


def test_pages_of_its_own(make_layout: Callable[..., ModelLayout]) -> None:
    host = HostPool(MhaPool(make_layout(), size=16, device="cpu"), pages=3)
    assert host.allocator.alloc(3).tolist() == [1, 2, 3]
    host.allocator.release([2])
    with pytest.raises(DoubleFree):
        host.allocator.release([2])


class Overdeclared(MhaPool):
    """A pool whose manifest has a buffer that its storage does not: index keys of layer 1."""

    def manifest(self) -> RankManifest:
        spare = torch.zeros_like(self.key(1))
        self.spare = spare
        return RankManifest(
            self.layout, self.placement, [self._moved(entry, spare) for entry in super().manifest().entries]
        )

    @staticmethod
    def _moved(entry: BufferEntry, spare: torch.Tensor) -> BufferEntry:
        if (entry.component, entry.layer_id) != ("key", 1):
            return entry
        return BufferEntry(
            entry.component,
            entry.part,
            entry.layer_id,
            device=entry.device,
            address=spare.data_ptr(),
            nbytes=entry.nbytes,
            item_stride=entry.item_stride,
            item_bytes=entry.item_bytes,
            head_range=entry.head_range,
        )


class Withholding(MhaPool):
    """A pool that declares its draft and does not hand its storage out."""

    def layer_ids(self, part: str = "target", component: Any = None) -> tuple[int, ...]:
        return super().layer_ids("target", component) if part == "target" else ()


class Undeclared(MhaPool):
    """A pool with values that its manifest does not tell of: nobody would transfer them."""

    def manifest(self) -> RankManifest:
        keys = [entry for entry in super().manifest().entries if (entry.component, entry.layer_id) != ("value", 1)]
        return RankManifest(self.layout, self.placement, keys)


def test_a_buffer_without_a_mirror_is_a_construction_error(make_layout: Callable[..., ModelLayout]) -> None:
    with pytest.raises(UnmirroredComponent, match="key of part target, layer 1"):
        HostPool(Overdeclared(make_layout(), size=16, device="cpu"), pages=3)
    with pytest.raises(UnmirroredComponent, match="key of part draft"):
        HostPool(Withholding(make_layout(draft=(2,)), size=16, device="cpu"), pages=3)
    with pytest.raises(UnmirroredComponent, match=r"value of part target.*storage without a manifest entry"):
        HostPool(Undeclared(make_layout(), size=16, device="cpu"), pages=3)
    host = HostPool(MhaPool(make_layout(), size=16, device="cpu"), pages=3)
    with pytest.raises(UnmirroredComponent):
        host.mirror("key", "draft")


def test_what_cannot_be_built(make_layout: Callable[..., ModelLayout]) -> None:
    pool = MhaPool(make_layout(), size=16, device="cpu")
    with pytest.raises(HostPoolError, match="pages"):
        HostPool(pool, pages=0)
    with pytest.raises(HostPoolError, match="page_last"):
        HostPool(pool, pages=3, layout="page_last")  # type: ignore[arg-type]
    with pytest.raises(HostPoolError, match="pin"):
        HostPool(pool, pages=3, pin=True)


def flags_of(address: int) -> list[str]:
    """What the kernel knows of the memory at an address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = line.partition(" ")
        if "-" in first and not first.endswith(":"):
            start, stop = (int(number, 16) for number in first.split("-"))
            inside = start <= address < stop
        elif inside and first == "VmFlags:":
            return rest.split()
    raise AssertionError("no such memory")


def test_large_host_memory_asks_for_huge_pages_and_is_zeroed(make_layout: Callable[..., ModelLayout]) -> None:
    """hg: advised; 4 MiB and more, at a multiple of 2 MiB. A small pool has none of it."""
    pool = MhaPool(make_layout(dims=512, value_dims=64), size=16, device="cpu")
    host = HostPool(pool, pages=300)
    large, small = (host.mirror(component) for component in ("key", "value"))
    assert large.storage.nbytes > 4 << 20 > small.storage.nbytes
    asked = Path("/sys/kernel/mm/transparent_hugepage").exists()
    assert ("hg" in flags_of(large.storage.data_ptr())) == asked and large.storage.data_ptr() % (2 << 20) == 0
    assert "hg" not in flags_of(small.storage.data_ptr())
    for mirror in (large, small):
        assert not mirror.host.view(torch.int16).any()
        mirror.host.fill_(1)
        assert bool((mirror.host == 1).all())
