"""vLLM's K/V tensors as a manifest: each layer's tensors by name and layer id, in every arrangement that it uses.

Reads shapes, strides and addresses of tensors; it touches no bytes and imports neither torch nor vLLM.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import kv_planner

from kv_transfer.arguments import check_kind, check_whole
from kv_transfer.errors import UnsupportedLayout
from kv_transfer.integrations.vllm.settings import Settings, place_of

__all__ = ["Caches", "layer_of", "read_caches"]

_INDEXER = "indexer"


@dataclasses.dataclass(frozen=True)
class Caches:
    """What a worker registered.

    Attributes:
        manifest: Its buffers.
        layers: Part and layer id of each layer whose name the engine may pass to `save_kv_layer`.
        kernel_blocks: Pages of the manifest in one block of vLLM's block manager, one after the other.
    """

    manifest: kv_planner.RankManifest
    layers: Mapping[str, tuple[kv_planner.Part, int]]
    kernel_blocks: int


@dataclasses.dataclass(frozen=True)
class _Buffer:
    """One component of one layer. Blocks lie `stride` bytes apart and hold `nbytes` bytes each."""

    component: kv_planner.Component
    address: int
    blocks: int
    stride: int
    nbytes: int
    tokens: int
    heads: int
    dims: int
    dtype: kv_planner.DType
    head_first: bool
    device: str


def layer_of(name: str) -> int:
    """The global layer id in a layer's name.

    Raises:
        ArgumentError: It is no text.
        UnsupportedLayout: It has none, or several numbers.
    """
    numbers = [int(word) for word in check_kind("layer name", name, str).split(".") if word.isdecimal()]
    if len(numbers) != 1:
        raise _refuse(name, "its name should hold one number, the layer's", repr(name))
    return numbers[0]


def read_caches(vllm_config: Any, kv_cache_config: Any, kv_caches: Mapping[str, Any], settings: Settings) -> Caches:
    """Describes the tensors that vLLM passes to `register_kv_caches`.

    Args:
        vllm_config: Of the worker.
        kv_cache_config: Its groups of layers.
        kv_caches: By layer name: one tensor with K and V, [2, blocks, …] or [blocks, 2, …]; a tuple (k, v); latent
            rows, alone or as a tuple (latent, rope, index keys, index scales); index keys under a name of their own.
        settings: Fingerprint, draft layers and group.

    Raises:
        ArgumentError: Caches that are no mapping, or numbers of layers or heads that are none.
        UnsupportedLayout: An arrangement that is not moved; the layer and what was found are named.
    """
    block_size = _block_size(kv_cache_config)
    total = check_whole("get_total_num_hidden_layers()", vllm_config.model_config.get_total_num_hidden_layers())
    check_kind("kv_caches", kv_caches, Mapping)  # type: ignore[type-abstract]
    place = place_of(vllm_config, settings)
    found: dict[tuple[kv_planner.Part, int], list[_Buffer]] = {}
    layers: dict[str, tuple[kv_planner.Part, int]] = {}
    seen: set[tuple[int, ...]] = set()
    for name, tensors in kv_caches.items():
        own = tuple(tensors) if isinstance(tensors, list | tuple) else (tensors,)
        if not all(hasattr(tensor, "data_ptr") for tensor in own):
            raise _refuse(name, "expected tensors", ", ".join(type(tensor).__name__ for tensor in own))
        addresses = tuple(tensor.data_ptr() for tensor in own)
        if addresses in seen:
            continue  # a layer that shares another one's cache: its bytes go with that one
        seen.add(addresses)
        layer_id = layer_of(name)
        part: kv_planner.Part = "draft" if layer_id >= total else "target"
        found.setdefault((part, layer_id), []).extend(_buffers(name, own, vllm_config))
        if _INDEXER not in name:
            layers[name] = (part, layer_id)
    kernel_block = _same("tokens of a kernel block", {own.tokens for each in found.values() for own in each})
    if block_size % kernel_block:
        raise _refuse("kv_caches", f"kernel blocks of {kernel_block} tokens do not divide blocks", str(block_size))
    layout = _layout(found, total, kernel_block, vllm_config, settings, place)
    entries = [
        kv_planner.BufferEntry(
            own.component,
            part,
            layer_id,
            device=own.device,
            address=own.address,
            nbytes=(own.blocks - 1) * own.stride + own.nbytes,
            item_stride=own.stride,
            item_bytes=own.nbytes,
            head_range=kv_planner.split_heads(
                layout.spec(own.component, part).total_heads, tp_rank=place.tp_rank, tp_size=place.tp_size
            ),
        )
        for (part, layer_id), buffers in found.items()
        for own in buffers
    ]
    return Caches(kv_planner.RankManifest(layout, place, entries), layers, block_size // kernel_block)


def _block_size(kv_cache_config: Any) -> int:
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        raise _refuse(
            "kv_cache_groups",
            "layers of several groups have several block tables, only one group is moved",
            f"{len(groups)} groups; start vLLM with --disable-hybrid-kv-cache-manager",
        )
    spec = groups[0].kv_cache_spec
    if getattr(spec, "compress_ratio", 1) != 1:
        raise _refuse("kv_cache_groups", "compressed blocks are not moved", f"ratio {spec.compress_ratio}")
    size = spec.block_size
    if not isinstance(size, int) or size < 1:
        raise _refuse("block_size", "expected tokens, 1 or more", repr(size))
    return size


def _buffers(name: str, tensors: Sequence[Any], vllm_config: Any) -> Iterator[_Buffer]:
    """The components of one layer's tensors."""
    text = vllm_config.model_config.hf_text_config
    shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
    latent, rope = getattr(text, "kv_lora_rank", None), getattr(text, "qk_rope_head_dim", None)
    if len(tensors) == 1 and tensors[0].dim() == 5:
        (own,) = tensors
        axis = [index for index in (0, 1) if own.shape[index] == 2]
        if len(axis) != 1:
            raise _refuse(name, "expected K and V at the first or the second axis", shapes)
        yield _read(name, "key", own.select(axis[0], 0))
        yield _read(name, "value", own.select(axis[0], 1))
    elif len(tensors) == 1 and tensors[0].dim() == 3:
        yield _read(name, "index_key" if _INDEXER in name else "latent", tensors[0].unsqueeze(2))
    elif latent and len(tensors) in (2, 3, 4):
        if (tensors[0].shape[-1], tensors[1].shape[-1]) != (latent, rope):
            raise _refuse(name, f"expected latent rows of {latent} and rope rows of {rope} numbers first", shapes)
        kinds: tuple[kv_planner.Component, ...] = ("latent", "rope", "index_key", "index_scale")
        for kind, own in zip(kinds, tensors, strict=False):
            yield _read(name, kind, own)
    elif len(tensors) == 2 and all(tensor.dim() == 4 for tensor in tensors):
        yield _read(name, "key", tensors[0])
        yield _read(name, "value", tensors[1])
    else:
        raise _refuse(name, "an arrangement that is not moved", shapes)


def _read(name: str, component: kv_planner.Component, own: Any) -> _Buffer:
    """A component from a tensor. Shape: [blocks, tokens, heads, dim], in any order of bytes that keeps blocks whole."""
    blocks, tokens, heads, dims = own.shape
    if 0 in own.shape:
        raise _refuse(name, f"{component}: it holds nothing", str(tuple(own.shape)))
    by_block, by_token, by_head, by_dim = own.stride()
    head_first = heads > 1 and by_head > by_token
    inner = (tokens * dims, dims) if head_first else (dims, heads * dims)  # strides of a head and of a token
    strides = ((by_head, inner[0], heads), (by_token, inner[1], tokens), (by_dim, 1, dims))
    if any(stride != wanted for stride, wanted, count in strides if count > 1) or by_block < tokens * heads * dims:
        raise _refuse(name, f"{component}: a block's bytes do not lie together", f"strides {tuple(own.stride())}")
    size = own.element_size()
    return _Buffer(
        component=component,
        address=own.data_ptr(),
        blocks=blocks,
        stride=by_block * size,
        nbytes=tokens * heads * dims * size,
        tokens=tokens,
        heads=heads,
        dims=dims,
        dtype=_dtype(name, own.dtype),
        head_first=head_first,
        device=str(own.device),
    )


def _dtype(name: str, dtype: object) -> kv_planner.DType:
    text = re.sub(r"^torch\.", "", str(dtype))
    known = ("float32", "float16", "bfloat16", "int8", "uint8", "int32", "int64", "float8_e4m3fn", "float8_e5m2")
    if text not in known:
        raise _refuse(name, "a dtype that is not moved", text)
    return cast(kv_planner.DType, text)


def _layout(
    found: Mapping[tuple[kv_planner.Part, int], Sequence[_Buffer]],
    total: int,
    page_size: int,
    vllm_config: Any,
    settings: Settings,
    place: kv_planner.Placement,
) -> kv_planner.ModelLayout:
    """The layout of the whole model: what this stage has, continued over the layers of the others."""
    kinds = list(dict.fromkeys((own.component, part) for (part, _), each in found.items() for own in each))
    specs = []
    for component, part in kinds:
        own = [
            (layer_id, buffer)
            for (where, layer_id), each in found.items()
            for buffer in each
            if where == part and buffer.component == component
        ]
        what = f"{part} {component}"
        layer_ids = sorted(layer_id for layer_id, _ in own)
        if place.pp_size > 1 and part == "target":
            first, stop = vllm_config.model_config.get_layers_start_end_indices(vllm_config.parallel_config)
            if layer_ids != list(range(first, stop)):
                raise _refuse(
                    what, f"a pipeline stage should have it on all of layers {first} to {stop - 1}", layer_ids
                )
            layer_ids = list(range(total))
        specs.append(
            kv_planner.ComponentSpec(
                component,
                part,
                layer_ids=layer_ids,
                dtype=_same(f"dtype of {what}", {buffer.dtype for _, buffer in own}),
                total_heads=_total_heads(component, part, vllm_config),
                dims=_same(f"dims of {what}", {buffer.dims for _, buffer in own}),
                axes=("head", "token", "dim") if own[0][1].head_first else ("token", "head", "dim"),
            )
        )
    return kv_planner.ModelLayout(
        specs + _drafts_elsewhere(specs, total, settings, place),
        page_size=page_size,
        fingerprint=settings.fingerprint or str(vllm_config.model_config.model),
    )


def _drafts_elsewhere(
    specs: Sequence[kv_planner.ComponentSpec], total: int, settings: Settings, place: kv_planner.Placement
) -> list[kv_planner.ComponentSpec]:
    """Draft layers of the last stage, on a stage that has none: they have the target's shape."""
    if place.pp_rank == place.pp_size - 1 or not settings.draft_layers:
        return []
    return [
        kv_planner.ComponentSpec(
            own.component,
            "draft",
            layer_ids=list(range(total, total + settings.draft_layers)),
            dtype=own.dtype,
            total_heads=own.total_heads,
            dims=own.dims,
            axes=own.axes,
        )
        for own in specs
    ]


def _total_heads(component: kv_planner.Component, part: kv_planner.Part, vllm_config: Any) -> int:
    if component not in ("key", "value"):
        return 1
    speculative = vllm_config.speculative_config
    model = speculative.draft_model_config if part == "draft" and speculative is not None else vllm_config.model_config
    return check_whole("get_total_num_kv_heads()", model.get_total_num_kv_heads(), 2**31 - 1, least=1)


def _same(what: str, values: set[Any]) -> Any:
    if len(values) != 1:
        raise _refuse("kv_caches", f"{what}: expected one value for all layers", sorted(map(str, values)))
    return values.pop()


def _refuse(where: str, what: str, got: object) -> UnsupportedLayout:
    return UnsupportedLayout(
        f"{where}: {what}, got {got}",
        local=str(got),
        consequence="bytes would land at wrong places, so nothing was registered",
        remedy="see kv_transfer.integrations.vllm.caches for what is moved",
    )
