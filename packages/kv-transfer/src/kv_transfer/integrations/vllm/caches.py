"""vLLM's caches as manifests: one for each KV cache group, or for each tensor of a group's states.

Layers are named by their ids; what a layer's tensors are is read in `tensors`, what a group holds in `groups`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import kv_planner
import numpy as np
import numpy.typing as npt

from kv_transfer.arguments import check_kind, check_whole
from kv_transfer.integrations.vllm.groups import BlockGroup, Kind, block_groups, refuse
from kv_transfer.integrations.vllm.settings import Settings, place_of
from kv_transfer.integrations.vllm.tensors import (
    Buffer,
    is_indexer,
    layer_of,
    page_buffers,
    state_buffers,
    tensors_of,
)

__all__ = ["Caches", "PageGroup", "read_caches"]

_Key = tuple[kv_planner.Part, int]


@dataclasses.dataclass(frozen=True)
class PageGroup:
    """How blocks of one of vLLM's groups become pages, or rows of states.

    Attributes:
        names: Of its manifests: one with pages, or one for each tensor of its states.
        kind: As of the `BlockGroup`.
        kernel_blocks: Pages in one block of vLLM's block manager, one after the other.
        page_tokens: Tokens of a page.
    """

    names: tuple[str, ...]
    kind: Kind
    kernel_blocks: int = 1
    page_tokens: int = 1

    def pages(self, blocks: Sequence[int]) -> npt.NDArray[np.int64]:
        """Page ids of blocks. Shape: [blocks * kernel_blocks]."""
        count = self.kernel_blocks
        return (np.array(blocks, np.int64)[:, None] * count + np.arange(count)).reshape(-1)

    def page_count(self, tokens: int) -> int:
        """Pages that hold so many tokens."""
        return -(-tokens // self.page_tokens)


@dataclasses.dataclass(frozen=True)
class Caches:
    """What a worker registered.

    Attributes:
        manifests: Its buffers, by name of the group of the transfer.
        windows: Tokens of the window of those that have one.
        groups: How blocks of each of vLLM's groups become items of these.
        layers: Part and layer id of each layer whose name the engine may pass to `save_kv_layer`.
    """

    manifests: Mapping[str, kv_planner.RankManifest]
    windows: Mapping[str, int]
    groups: tuple[PageGroup, ...]
    layers: Mapping[str, _Key]

    @property
    def has_states(self) -> bool:
        """Whether one of the groups has states."""
        return any(group.kind == "states" for group in self.groups)


def read_caches(vllm_config: Any, kv_cache_config: Any, kv_caches: Mapping[str, Any], settings: Settings) -> Caches:
    """Describes the tensors that vLLM passes to `register_kv_caches`.

    Args:
        vllm_config: Of the worker.
        kv_cache_config: Its groups of layers.
        kv_caches: By layer name: one tensor with K and V, [2, blocks, …] or [blocks, 2, …]; a tuple (k, v); latent
            rows, alone or as a tuple (latent, rope, index keys, index scales); index keys under a name of their own;
            states, [blocks, …] each. Layers of several groups may lie in the same memory, whose blocks vLLM gives to
            one of the groups each.
        settings: Fingerprint, draft layers and group.

    Raises:
        ArgumentError: Caches that are no mapping, or numbers of layers or heads that are none.
        UnsupportedLayout: An arrangement that is not moved; the layer and what was found are named.
    """
    groups = block_groups(kv_cache_config)
    total = check_whole("get_total_num_hidden_layers()", vllm_config.model_config.get_total_num_hidden_layers())
    check_kind("kv_caches", kv_caches, Mapping)  # type: ignore[type-abstract]
    reader = _Reader(vllm_config, settings, total, groups)
    manifests: dict[str, kv_planner.RankManifest] = {}
    windows: dict[str, int] = {}
    pages: list[PageGroup] = []
    layers: dict[str, _Key] = {}
    for group, own in zip(groups, _by_group(groups, kv_caches), strict=True):
        layers |= {name: reader.key(name) for name in own if not is_indexer(name)}
        found, view = reader.states(group, own) if group.kind == "states" else reader.pages(group, own)
        manifests |= found
        pages.append(view)
        if group.window is not None:
            windows[group.name] = group.window
    return Caches(manifests, windows, tuple(pages), layers)


def _by_group(groups: Sequence[BlockGroup], kv_caches: Mapping[str, Any]) -> list[dict[str, tuple[Any, ...]]]:
    """The tensors of each group's layers; of layers that share a cache within one group, those of the first."""
    found: list[dict[str, tuple[Any, ...]]] = [{} for _ in groups]
    seen: list[set[tuple[int, ...]]] = [set() for _ in groups]
    for name, value in kv_caches.items():
        own = tensors_of(name, value)
        addresses = tuple(tensor.data_ptr() for tensor in own)
        numbers = [number for number, group in enumerate(groups) if len(groups) == 1 or name in group.layers]
        if not numbers and not any(addresses in known for known in seen):
            raise refuse(name, "it is a layer of no group and shares no other layer's cache", "a cache of its own")
        for number in numbers:
            if addresses not in seen[number]:
                found[number][name] = own
            seen[number].add(addresses)
    for group, layers in zip(groups, found, strict=True):
        if not layers and len(groups) > 1:
            raise refuse(f"group {group.name!r}", "expected layers of it on every pipeline stage", "none")
    return found


class _Reader:
    """Manifests of one rank's groups."""

    def __init__(self, vllm_config: Any, settings: Settings, total: int, groups: Sequence[BlockGroup]) -> None:
        self._config, self._settings, self._total, self._groups = vllm_config, settings, total, groups
        self._several = len(groups) > 1
        self._place = place_of(vllm_config, settings)

    def key(self, name: str) -> _Key:
        layer = layer_of(name)
        return "draft" if layer >= self._total else "target", layer

    def pages(
        self, group: BlockGroup, caches: Mapping[str, Sequence[Any]]
    ) -> tuple[dict[str, kv_planner.RankManifest], PageGroup]:
        found: dict[_Key, list[Buffer]] = {}
        for name, tensors in caches.items():
            found.setdefault(self.key(name), []).extend(page_buffers(name, tensors, self._config))
        where = self._where(group)
        tokens = _same(where, "tokens of a kernel block", {own.tokens for each in found.values() for own in each})
        if group.block_size % tokens:
            raise refuse(where, f"kernel blocks of {tokens} tokens do not divide blocks", group.block_size)
        layout = self._layout(group, found, tokens)
        view = PageGroup((group.name,), group.kind, group.block_size // tokens, tokens)
        return {group.name: self._manifest(layout, found)}, view

    def states(
        self, group: BlockGroup, caches: Mapping[str, Sequence[Any]]
    ) -> tuple[dict[str, kv_planner.RankManifest], PageGroup]:
        """A manifest for each tensor of a layer's states: they differ in dtype and size."""
        where = self._where(group)
        found = {layer_of(name): list(state_buffers(name, tensors)) for name, tensors in caches.items()}
        count = _same(where, "states of a layer", {len(own) for own in found.values()})
        ids = self._layer_ids(group, "state", sorted(found))
        manifests = {}
        for number in range(count):
            own: dict[_Key, list[Buffer]] = {("target", layer): [each[number]] for layer, each in found.items()}
            buffers = [each for (each,) in own.values()]
            spec = kv_planner.ComponentSpec(
                "state",
                layer_ids=ids,
                dtype=_same(where, "dtype of a state", {each.dtype for each in buffers}),
                total_heads=self._place.tp_size,  # shares of ranks, which are moved whole
                dims=_same(where, "size of a state", {each.dims for each in buffers}),
                item_kind="request_row",
            )
            layout = kv_planner.ModelLayout([spec], page_size=1, fingerprint=self._fingerprint)
            manifests[f"{group.name}, tensor {number + 1}"] = self._manifest(layout, own)
        return manifests, PageGroup(tuple(manifests), group.kind)

    @property
    def _fingerprint(self) -> str:
        return self._settings.fingerprint or str(self._config.model_config.model)

    def _where(self, group: BlockGroup) -> str:
        return f"group {group.name!r}" if self._several else "kv_caches"

    def _manifest(
        self, layout: kv_planner.ModelLayout, found: Mapping[_Key, Sequence[Buffer]]
    ) -> kv_planner.RankManifest:
        place = self._place
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
        return kv_planner.RankManifest(layout, place, entries)

    def _layout(
        self, group: BlockGroup, found: Mapping[_Key, Sequence[Buffer]], page_size: int
    ) -> kv_planner.ModelLayout:
        """The layout of the whole model: what this stage has, continued over the layers of the others."""
        where = self._where(group)
        kinds = list(dict.fromkeys((own.component, part) for (part, _), each in found.items() for own in each))
        specs = []
        for component, part in kinds:
            own = [
                (layer_id, buffer)
                for (at, layer_id), each in found.items()
                for buffer in each
                if at == part and buffer.component == component
            ]
            what, buffers = f"{part} {component}", [buffer for _, buffer in own]
            layer_ids = sorted(layer_id for layer_id, _ in own)
            specs.append(
                kv_planner.ComponentSpec(
                    component,
                    part,
                    layer_ids=self._layer_ids(group, what, layer_ids) if part == "target" else layer_ids,
                    dtype=_same(where, f"dtype of {what}", {buffer.dtype for buffer in buffers}),
                    total_heads=self._total_heads(where, component, part, buffers),
                    dims=_same(where, f"dims of {what}", {buffer.dims for buffer in buffers}),
                    axes=("head", "token", "dim") if buffers[0].head_first else ("token", "head", "dim"),
                )
            )
        return kv_planner.ModelLayout(
            specs + self._drafts_elsewhere(specs), page_size=page_size, fingerprint=self._fingerprint
        )

    def _layer_ids(self, group: BlockGroup, what: str, own: list[int]) -> list[int]:
        """The layers of a group of the target over all stages."""
        if self._place.pp_size == 1:
            return own
        first, stop = self._config.model_config.get_layers_start_end_indices(self._config.parallel_config)
        if self._several:
            return self._dealt_out(group, own, range(first, stop))
        if own != list(range(first, stop)):
            raise refuse(what, f"a pipeline stage should have it on all of layers {first} to {stop - 1}", own)
        return list(range(self._total))

    def _dealt_out(self, group: BlockGroup, own: list[int], stage: range) -> list[int]:
        """The layers of one of several groups: vLLM deals the layers of a kind out to its groups in turn, over stages.

        The model's `layer_types` tell which layers of other stages are of the kind; what they say of this stage is
        compared with its groups.
        """
        where, types = self._where(group), list(getattr(self._config.model_config.hf_text_config, "layer_types", ()))
        kin = [each for each in self._groups if (each.kind, each.window) == (group.kind, group.window)]
        here = {layer_of(name) for each in kin for name in each.layers}
        words = {types[layer] for layer in here if layer < len(types)}
        ids = [layer for layer, word in enumerate(types) if word in words]
        dealt = ids[kin.index(group) :: len(kin)]
        if self._settings.draft_layers or len(types) != self._total or [each for each in dealt if each in stage] != own:
            raise refuse(
                where,
                "which layers other pipeline stages have in it cannot be told; start vLLM with "
                "--disable-hybrid-kv-cache-manager or pipeline_parallel_size 1, and without draft layers",
                f"layers {own} of {sorted(here)}, layer_types {types}",
            )
        return dealt

    def _drafts_elsewhere(self, specs: Sequence[kv_planner.ComponentSpec]) -> list[kv_planner.ComponentSpec]:
        """Draft layers of the last stage, on a stage that has none: they have the target's shape."""
        if self._place.pp_rank == self._place.pp_size - 1 or not self._settings.draft_layers:
            return []
        return [
            kv_planner.ComponentSpec(
                own.component,
                "draft",
                layer_ids=list(range(self._total, self._total + self._settings.draft_layers)),
                dtype=own.dtype,
                total_heads=own.total_heads,
                dims=own.dims,
                axes=own.axes,
            )
            for own in specs
        ]

    def _total_heads(
        self, where: str, component: kv_planner.Component, part: kv_planner.Part, buffers: Sequence[Buffer]
    ) -> int:
        if component not in ("key", "value"):
            return 1
        config, speculative = self._config, self._config.speculative_config
        model = speculative.draft_model_config if part == "draft" and speculative is not None else config.model_config
        stated = check_whole("get_total_num_kv_heads()", model.get_total_num_kv_heads(), 2**31 - 1, least=1)
        if not self._several:
            return stated
        own, size = _same(where, f"heads of {part} {component}", {each.heads for each in buffers}), self._place.tp_size
        if own == max(1, stated // size):
            return stated
        if own == 1 and size > 1:
            raise refuse(where, f"{part} {component}: whether ranks share its heads is not known", "1 head on a rank")
        return int(own * size)  # layers of this group have heads of their own number


def _same(where: str, what: str, values: set[Any]) -> Any:
    if len(values) != 1:
        raise refuse(where, f"{what}: expected one value for all layers", sorted(map(str, values)))
    return values.pop()
