"""Owns the description of SGLang's NPU pools of pages: `adopt_pool` wraps one, with its drafts, as one of our pools.

It knows the classes of SGLang 0.5.23 by their attributes; the memory stays SGLang's. Pools that are groups of pools
(sliding windows, sparse attention, states, compressed latents) are described in `groups`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from kv_planner import ComponentSpec, ModelLayout, Placement

from kv_pool._arguments import check_kind, check_list, check_numbers, check_optional
from kv_pool._storage import TORCH_DTYPES
from kv_pool.adopted import adopt
from kv_pool.errors import LayoutError
from kv_pool.integrations._engine import engine_module
from kv_pool.tables import shown, whole_number

if TYPE_CHECKING:
    from kv_planner import Component
    from kv_planner import Part as PartName
    from kv_planner.words import DType

    from kv_pool._paged import Pool

__all__ = [
    "MODULE",
    "RELEASE",
    "Held",
    "adopt_pool",
    "adopted",
    "check_fingerprint",
    "check_heads",
    "check_layers",
    "components_of",
    "foreign",
]

MODULE, RELEASE = "sglang.srt.hardware_backend.npu.memory_pool_npu", "SGLang 0.5.23"
_NAMES: dict[torch.dtype, Any] = {torch_dtype: name for name, torch_dtype in TORCH_DTYPES.items()}


def adopt_pool(
    pool: Any,
    *,
    fingerprint: str,
    drafts: Sequence[Any] = (),
    placement: Placement | None = None,
    total_heads: int | None = None,
    model_layers: Sequence[int] | None = None,
    model_indexer_layers: Sequence[int] | None = None,
) -> Pool:
    """Wrap SGLang's NPU pool, so that host pools, controllers and transfer serve it.

    Args:
        pool: An `NPUMHATokenToKVPool` or `NPUMLATokenToKVPool`; for groups of pools see `adopt_groups`.
        fingerprint: Identity of the model.
        drafts: Pools of draft models, in order; their layers are numbered behind those of the model.
        placement: This rank.
        total_heads: KV heads over all ranks; `None`: this rank has all. Latents have one.
        model_layers: Layer ids of the whole model; `None`: this stage has all.
        model_indexer_layers: Those of them that own index keys; `None`: those of this stage are all.

    Returns:
        An adopted pool; its layers are SGLang's memory.

    Raises:
        LibraryUnavailable: SGLang 0.5.23 is not installed.
        LayoutError: Another class of pool, pools that are not of one kind and page size, or memory that does not fit.
    """
    kinds = engine_module(MODULE, RELEASE)
    held_drafts: tuple[Any, ...] = check_list("drafts", drafts, LayoutError)
    check_fingerprint(fingerprint)
    check_optional("placement", placement, Placement, LayoutError)
    given = check_layers("model_layers", model_layers)
    model_indexer_layers = check_layers("model_indexer_layers", model_indexer_layers)
    total_heads = None if total_heads is None else check_heads("total_heads", total_heads)
    page_size = getattr(pool, "page_size", 0)
    found = [components_of(pool, kinds, page_size)]
    found += [components_of(one, kinds, page_size, argument="drafts") for one in held_drafts]
    layers = list(range(pool.start_layer, pool.start_layer + pool.layer_num))
    model = layers if given is None else given
    behind = max(model, default=-1) + 1
    counts = [one.layer_num for one in held_drafts]
    starts = [behind + sum(counts[:number]) for number in range(len(counts))]
    return adopted(
        found[0],
        layers,
        page_size=page_size,
        fingerprint=fingerprint,
        drafts=[
            (held, list(range(start, start + count)))
            for held, start, count in zip(found[1:], starts, counts, strict=True)
        ],
        placement=placement,
        total_heads=total_heads,
        model_layers=model,
        model_indexer_layers=model_indexer_layers,
    )


@dataclass(frozen=True)
class Held:
    """One component of one pool: its memory, geometry, and the places in the pool of the layers that own it.

    Attributes:
        memory: All layers in one tensor, or a tensor a layer.
        dims: Elements of a head.
        heads: Heads on this rank.
        places: Of the layers of the pool that own it, in the order of `memory`.
        indexer: Whether only some layers of the model own it.
        item_kind: What one item is.
    """

    memory: torch.Tensor | Sequence[torch.Tensor]
    dims: int
    heads: int
    places: Sequence[int]
    indexer: bool = False
    item_kind: str = "page"

    @property
    def dtype(self) -> DType:
        """Element type, by its name in layouts."""
        dtype: DType = _NAMES[self.memory[0].dtype]
        return dtype


def adopted(
    target: Mapping[Component, Held],
    layers: Sequence[int],
    *,
    page_size: int,
    fingerprint: str,
    drafts: Sequence[tuple[Mapping[Component, Held], Sequence[int]]] = (),
    placement: Placement | None = None,
    total_heads: int | None = None,
    model_layers: Sequence[int] | None = None,
    model_indexer_layers: Sequence[int] | None = None,
) -> Pool:
    """Wrap components whose layers are known by their global ids; see `adopt_pool`.

    Args:
        target: Components of the model's own pool.
        layers: Global layer ids of the pool's places.
        page_size: Tokens in a page.
        fingerprint: Identity of the model.
        drafts: Components of draft pools with the global ids of their places.
        placement: This rank.
        total_heads: Of key, value and state over all ranks.
        model_layers: Layer ids of the whole model that this kind of pool holds; `None`: `layers`.
        model_indexer_layers: Those of them that own what only some layers own; `None`: those held here.
    """
    sides: list[tuple[PartName, list[tuple[Mapping[Component, Held], Sequence[int]]]]] = [
        ("target", [(target, layers)])
    ]
    if drafts:
        sides.append(("draft", list(drafts)))
    specs: list[ComponentSpec] = []
    tensors: dict[Component | tuple[Component, PartName], torch.Tensor | Sequence[torch.Tensor]] = {}
    for part, pools in sides:
        held = [one for one, _ in pools]
        if any(other.keys() != held[0].keys() for other in held):
            raise foreign("drafts", [sorted(other) for other in held], "drafts of equal components")
        for name, first in held[0].items():
            owners = [ids[place] for one, ids in pools for place in one[name].places]
            if part == "target" and first.indexer:
                owners = owners if model_indexer_layers is None else list(model_indexer_layers)
            elif part == "target":
                owners = owners if model_layers is None else list(model_layers)
            split = total_heads is not None and name in ("key", "value", "state")
            specs.append(
                ComponentSpec(
                    name, part, layer_ids=owners, dtype=first.dtype, dims=first.dims,
                    total_heads=total_heads if split else first.heads,  # type: ignore[arg-type]
                    item_kind=first.item_kind,  # type: ignore[arg-type]
                )
            )  # fmt: skip
            tensors[name, part] = first.memory if len(held) == 1 else [row for one in held for row in one[name].memory]
    layout = ModelLayout(specs, page_size=page_size, fingerprint=fingerprint)
    drafted = [layer for _, ids in drafts for layer in ids]
    ids: dict[PartName, Sequence[int]] = {"target": list(layers), **({"draft": drafted} if drafts else {})}
    return adopt(tensors, layout, layer_ids=ids, placement=placement)


def components_of(pool: Any, kinds: Any, page_size: int, *, argument: str = "pool") -> Mapping[Component, Held]:
    """What one pool of pages holds.

    Args:
        pool: SGLang's pool.
        kinds: SGLang's module of NPU pools.
        page_size: Tokens in a page.
        argument: What the error names.

    Raises:
        LayoutError: Another class of pool, or another page size.
    """
    known = type(pool) in (kinds.NPUMHATokenToKVPool, kinds.NPUMLATokenToKVPool, kinds.NPUMHATokenToKOnlyPool)
    if not known or pool.page_size != page_size:
        given = f"{type(pool).__name__}{f' with pages of {pool.page_size} tokens' if known else ''}"
        kind = "NPUMHATokenToKVPool or NPUMLATokenToKVPool"
        raise foreign(argument, given, f"{kind} with pages of {page_size} tokens")
    every = range(pool.layer_num)
    if type(pool) is kinds.NPUMHATokenToKOnlyPool:
        return {"index_key": Held(pool.k_buffer_tensor, pool.head_dim, pool.head_num, every, indexer=True)}
    if type(pool) is kinds.NPUMHATokenToKVPool:
        key, value = pool.get_hicache_transfer_buffers()
        return {
            "key": Held(key, pool.head_dim, pool.head_num, every),
            "value": Held(value, pool.v_head_dim, pool.head_num, every),
        }
    if pool.k_buffer is None or pool.index_page_size != page_size:
        raise foreign("pool", "latents off the device, or other pages for index keys", "one page size, on the device")
    latent = pool.k_buffer.view(torch.uint8) if pool.dsa_kv_cache_store_fp8 else pool.k_buffer
    held: dict[Component, Held] = {"latent": Held(latent, pool.kv_cache_dim, 1, every)}
    if pool.kr_cache_dim:
        held["rope"] = Held(pool.v_buffer, pool.kr_cache_dim, 1, every)
    if pool.index_k_buffer is not None and pool.num_indexer_layers:
        owners = [layer - pool.start_layer for layer in pool.indexer_layer_ids]
        held["index_key"] = Held(pool.index_k_buffer, pool.index_head_dim, 1, owners, indexer=True)
        if pool.index_k_scale_buffer is not None:
            held["index_scale"] = Held(pool.index_k_scale_buffer, 1, 1, owners, indexer=True)
    return held


def check_fingerprint(fingerprint: str) -> None:
    """Refuse what is no identity of a model.

    Raises:
        LayoutError: No text, or one that no other process can be told.
    """
    if not check_kind("fingerprint", fingerprint, str, LayoutError).isprintable():
        raise foreign("fingerprint", shown(fingerprint), "a text of printable characters")


def check_layers(name: str, layers: Sequence[int] | None) -> list[int] | None:
    """Layer ids that a caller gives, if any.

    Raises:
        LayoutError: They are none.
    """
    return None if layers is None else list(check_numbers(name, layers, LayoutError))


def check_heads(name: str, heads: int) -> int:
    """A number of heads.

    Raises:
        LayoutError: It is none.
    """
    return whole_number(name, heads, least=1, error=LayoutError, consequence="no head would be described")


def foreign(argument: str, given: object, expected: str) -> LayoutError:
    """A pool that cannot be described whole."""
    return LayoutError(
        argument,
        given=given,
        expected=expected,
        consequence="backup and transfer would leave some of its memory out",
        remedy="describe the pool by a layout of your own and pass its memory to kv_pool.adopt",
    )
