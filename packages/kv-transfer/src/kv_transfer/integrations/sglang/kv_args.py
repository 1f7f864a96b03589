"""Owns the way between SGLang's `KVArgs` and a `kv_planner.RankManifest`, both ways.

A manifest names every buffer; `KVArgs` lists addresses in the customary order. Byte arrangement, dtypes and heads come
from `KVArgs`' own fields; states and auxiliary rows have no place in a manifest and stay in `KVArgs`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import kv_planner

from kv_transfer.arguments import check_items, check_kind, check_text, check_whole, told
from kv_transfer.integrations.sglang.fields import dtype_word, number_list
from kv_transfer.integrations.sglang.names import LATENTS, Name, own_names, refusal, stated, total_layers

if TYPE_CHECKING:
    from kv_planner import Component, DType, Part

__all__ = ["fill_kv_args", "manifest_of"]

_DTYPES: Mapping[str, tuple[DType, int]] = {
    "bfloat16": ("bfloat16", 2), "bf16": ("bfloat16", 2), "float16": ("float16", 2), "half": ("float16", 2),
    "float32": ("float32", 4), "fp8_e4m3": ("float8_e4m3fn", 1), "float8_e4m3fn": ("float8_e4m3fn", 1),
    "fp8_e5m2": ("float8_e5m2", 1), "float8_e5m2": ("float8_e5m2", 1), "int8": ("int8", 1),
}  # fmt: skip
_MOST_DRAFTS = 1 << 16
_Args = TypeVar("_Args")


def manifest_of(
    kv_args: Any,
    *,
    mla: bool,
    fingerprint: str = "",
    placement: kv_planner.Placement | None = None,
    layers: Mapping[tuple[Component, Part], Sequence[int]] | None = None,
    drafts: int | None = None,
    device: str = "npu:0",
) -> kv_planner.RankManifest:
    """Names and measures the KV buffers of a rank.

    Args:
        kv_args: SGLang's `KVArgs`, of today's field set or the one before.
        mla: Latents, not K and V.
        fingerprint: Identity of the model.
        placement: This rank; None: it is alone.
        layers: Layer ids of the whole model by component and part; None: all target layers and drafts own each.
        drafts: Draft layers of the model, for stages that hold none of them; None: those of this rank.
        device: Where the buffers are.

    Returns:
        The manifest; entries in the order of `kv_data_ptrs`.

    Raises:
        ArgumentError: An argument of another kind.
        UnsupportedLayout: A field says too little or contradicts another, an item length is None or no page.
        PlanError: What kv-planner refuses.
    """
    check_kind("mla", mla, bool)
    check_text("device", device)
    drafts = None if drafts is None else check_whole("drafts", drafts, _MOST_DRAFTS)
    layers = None if layers is None else _checked(layers)
    if check_kind("fingerprint", fingerprint, str):
        check_text("fingerprint", fingerprint)
    place = kv_planner.Placement() if placement is None else check_kind("placement", placement, kv_planner.Placement)
    last = place.pp_rank == place.pp_size - 1
    names = own_names(kv_args, mla=mla, pp_size=place.pp_size, last=last)
    pointers, lengths, items = (number_list(kv_args, f"kv_{name}") for name in ("data_ptrs", "data_lens", "item_lens"))
    if not len(lengths) == len(items) == len(names):
        raise refusal(
            "kv_data_lens, kv_item_lens", f"{len(lengths)}, {len(items)}", len(names),
            "the lists are parallel to kv_data_ptrs", "publish a length for every buffer",
        )  # fmt: skip
    page = stated(kv_args, "page_size")
    if not page:
        raise refusal("page_size", page, "1 or more", "without it no page can be found", "set the tokens of a page")
    heads, (first, stop) = _heads(kv_args, place, mla=mla)
    specs: dict[tuple[Component, Part], kv_planner.ComponentSpec] = {}
    model = _layers(kv_args, names, drafts) if layers is None else layers
    for name, item in zip(names, items, strict=True):
        component, part = name[:2]
        if (component, part) not in specs:
            specs[component, part] = _spec(kv_args, component, part, model[component, part], item, heads, stop - first)
    for absent in [kind for kind in model if kind not in specs]:  # the draft, on a stage without it
        specs[absent] = _like(specs[absent[0], "target"], absent, model[absent])
    ordered = sorted(specs.items(), key=lambda held: held[0][1] != "target")
    layout = kv_planner.ModelLayout([spec for _, spec in ordered], page_size=kv_args.page_size, fingerprint=fingerprint)
    entries = [
        kv_planner.BufferEntry(
            *name[:3], occurrence=name[3], device=device, address=address, nbytes=nbytes, item_stride=item,
            item_bytes=item, head_range=(first, stop),
        )
        for name, address, nbytes, item in zip(names, pointers, lengths, items, strict=True)
    ]  # fmt: skip
    return kv_planner.RankManifest(layout, place, entries)


def fill_kv_args(kv_args: _Args, manifest: kv_planner.RankManifest) -> _Args:
    """Write a manifest's buffers into SGLang's `KVArgs`, in the customary order, with names.

    Args:
        kv_args: A `KVArgs`; its states and auxiliary buffers are left alone.
        manifest: Of an engine's own pool, or of one of ours.

    Returns:
        `kv_args`.

    Raises:
        ArgumentError: No manifest.
        UnsupportedLayout: Items that lie apart in their buffers, which `KVArgs` has no field for; or a `KVArgs` that
            takes no fields.
    """
    check_kind("manifest", manifest, kv_planner.RankManifest)
    if not hasattr(kv_args, "__dict__") or isinstance(kv_args, type):
        raise refusal("kv_args", None, told(kv_args), "it takes no fields", "pass SGLang's KVArgs")
    layout, place = manifest.layout, manifest.placement
    parts: tuple[Part, ...] = ("target", "draft")
    order = {(spec.component, spec.part): (parts.index(spec.part), i) for i, spec in enumerate(layout.components)}
    entries = sorted(manifest.entries, key=lambda e: (*order[e.component, e.part], e.layer_id, e.occurrence))
    apart = next((entry for entry in entries if entry.item_stride != entry.item_bytes), None)
    if apart is not None:
        raise refusal(
            "item_stride", apart.item_stride, apart.item_bytes, "SGLang takes items for neighbours",
            "hand over buffers of whole pages",
        )  # fmt: skip
    fields: Any = kv_args
    fields.kv_data_ptrs = [entry.address for entry in entries]
    fields.kv_data_lens = [entry.nbytes for entry in entries]
    fields.kv_item_lens = [entry.item_bytes for entry in entries]
    fields.kv_layer_ids = [entry.layer_id for entry in entries]
    fields.kv_entry_names = [(e.component, e.part, e.layer_id, e.occurrence) for e in entries]
    fields.page_size = layout.page_size
    fields.pp_rank = place.pp_rank
    fields.engine_rank = place.tp_rank
    own = {part: sorted({e.layer_id for e in entries if e.part == part}) for part in parts}
    model = {part: {i for spec in layout.components if spec.part == part for i in spec.layer_ids} for part in parts}
    fields.prefill_start_layer = own["target"][0] if own["target"] else 0
    fields.prefill_end_layer = own["target"][-1] + 1 if own["target"] else 0
    fields.num_draft_entries = sum(entry.part == "draft" for entry in entries)
    fields.hidden_kv_layers, fields.draft_kv_layers = len(model["target"]), len(model["draft"])
    kinds = [spec.component for spec in layout.components if spec.part == "target"]
    fields.kv_buf_groups = len(kinds)
    if "key" in kinds:
        first, stop = next(e.head_range for e in entries if e.component == "key")
        fields.kv_head_num, fields.total_kv_head_num = stop - first, layout.spec("key").total_heads
    return kv_args


def _checked(layers: Mapping[tuple[Component, Part], Sequence[int]]) -> dict[tuple[Component, Part], Sequence[int]]:
    """Layers that a caller gives."""
    found: dict[tuple[Component, Part], Sequence[int]] = {}
    for kind, ids in check_kind("layers", layers, Mapping).items():  # type: ignore[type-abstract]
        name = f"layers[{told(kind)}]"
        if not (isinstance(kind, tuple) and len(kind) == 2 and all(isinstance(word, str) for word in kind)):
            raise refusal(
                name, None, "a component and a part", "no name of layers", "name layers by component and part"
            )
        found[kind] = [check_whole(name, layer) for layer in check_items(name, ids)]
    return found


def _heads(kv_args: Any, place: kv_planner.Placement, *, mla: bool) -> tuple[int, tuple[int, int]]:
    """Heads over all ranks, and this rank's."""
    total, own = (stated(kv_args, name) or 0 for name in ("total_kv_head_num", "kv_head_num"))
    if mla:
        return 1, (0, 1)
    total = total or own * place.tp_size
    if not total:
        if place.tp_size > 1:
            raise refusal(
                "total_kv_head_num", None, None, "without it nobody knows which heads a rank holds",
                "set total_kv_head_num, the KV heads of the whole model",
            )  # fmt: skip
        total = 1
    return total, kv_planner.split_heads(total, tp_rank=place.tp_rank, tp_size=place.tp_size)


def _layers(kv_args: Any, names: Sequence[Name], drafts: int | None) -> dict[tuple[Component, Part], Sequence[int]]:
    """Layer ids of the whole model, for components that every layer of their part has."""
    kinds = dict.fromkeys((name[0], name[1]) for name in names)
    held = {kind: sorted({name[2] for name in names if name[:2] == kind}) for kind in kinds}
    hidden = total_layers(kv_args)
    every = max((len(ids) for (_, part), ids in held.items() if part == "target"), default=0)
    found: dict[tuple[Component, Part], Sequence[int]] = {}
    for (component, part), ids in held.items():
        whole = part == "target" and hidden is not None and len(ids) == every
        found[component, part] = range(hidden or 0) if whole else ids
    if drafts and hidden is not None:
        first = kv_planner.first_draft_id(hidden)
        for component in dict.fromkeys(component for component, _ in kinds):
            found[component, "draft"] = range(first, first + drafts)
    return found


def _spec(
    kv_args: Any, component: Component, part: Part, layers: Sequence[int], item: object, heads: int, own: int
) -> kv_planner.ComponentSpec:
    if not isinstance(item, int) or item <= 0 or item % (kv_args.page_size * own):
        raise refusal(
            f"kv_item_lens of {component}/{part}", item, kv_args.page_size * own,
            f"no page of {kv_args.page_size} tokens with {own} heads", "publish the bytes of a page of every buffer",
        )  # fmt: skip
    width = item // (kv_args.page_size * own)
    word = dtype_word(kv_args).removeprefix("torch.")
    dtype, size = _DTYPES.get(word, ("uint8", 1)) if component not in LATENTS[2:] else ("uint8", 1)
    if width % size:
        dtype, size = "uint8", 1
    return kv_planner.ComponentSpec(
        component, part, layer_ids=list(layers), dtype=dtype, total_heads=heads, dims=width // size
    )


def _like(
    spec: kv_planner.ComponentSpec, kind: tuple[Component, Part], layers: Sequence[int]
) -> kv_planner.ComponentSpec:
    return kv_planner.ComponentSpec(
        *kind, layer_ids=list(layers), dtype=spec.dtype, total_heads=spec.total_heads, dims=spec.dims
    )
