"""Owns the names of the entries in SGLang's bare pointer lists: (component, part, layer id, occurrence) for each.

SGLang 0.5.23 publishes addresses in a customary order (every group over the target's layers, then every group over the
draft's) and pairs them by list lengths. Here a list is named from what its owner says of itself, and names are paired;
a list whose statements contradict each other, or that can be read in two ways, is refused before an address is used.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import kv_planner

from kv_transfer.arguments import check_items, check_whole, is_whole, told
from kv_transfer.errors import ArgumentError, UnsupportedLayout

if TYPE_CHECKING:
    from kv_planner import Component, Part

__all__ = [
    "LATENTS",
    "PAIRS",
    "Name",
    "Stage",
    "check_list",
    "compressed_names",
    "entry_list",
    "given_names",
    "optional_list",
    "own_names",
    "pair_entries",
    "pair_with_peer",
    "peer_stage",
    "refusal",
    "stage_of",
    "stated",
    "total_layers",
]

Name: TypeAlias = "tuple[Component, Part, int, int]"
"""Component, part, global layer id, occurrence."""

PAIRS: tuple[Component, ...] = ("key", "value")
LATENTS: tuple[Component, ...] = ("latent", "rope", "index_key", "index_scale")


def refusal(field: str, local: object, remote: object, why: str, remedy: str) -> UnsupportedLayout:
    """The error for a field of `KVArgs`, or of a call, that says nothing or contradicts another."""
    return UnsupportedLayout(
        f"{field}: {why}",
        local=local,
        remote=remote,
        consequence="buffers would be paired by chance, so no address was used",
        remedy=remedy,
    )


def entry_list(kv_args: Any, field: str) -> list[Any]:
    """A list of `KVArgs` that has an item for every buffer.

    Raises:
        UnsupportedLayout: It is None, or no list.
    """
    values: Any = getattr(kv_args, field, None)
    try:
        return list(check_items(field, values))
    except ArgumentError:
        words = ("a list", "every buffer has an item in it", "fill it before the manager is made")
        raise refusal(field, None if values is None else told(values), *words) from None


def check_list(field: str, values: object) -> None:
    """Refuses an argument of a call that is no list.

    Raises:
        UnsupportedLayout: It is none.
    """
    if not isinstance(values, list | tuple):
        raise refusal(field, None, told(values), "no list", "pass what was registered")


def optional_list(kv_args: Any, field: str) -> list[Any]:
    """A list of `KVArgs`, empty where it says nothing.

    Raises:
        UnsupportedLayout: It is no list.
    """
    return [] if getattr(kv_args, field, None) is None else entry_list(kv_args, field)


def stated(kv_args: Any, field: str) -> int | None:
    """A number of `KVArgs`; None where it says nothing.

    Raises:
        UnsupportedLayout: It is no whole number from 0 on.
    """
    value = getattr(kv_args, field, None)
    try:
        return None if value is None else check_whole(field, value)
    except ArgumentError:
        what = type(value).__name__
        raise refusal(field, told(value), "a whole number", f"no number, a {what}", "give an int or None") from None


@dataclasses.dataclass(frozen=True)
class Stage:
    """What one side's list holds.

    Attributes:
        components: One a group, in the list's order.
        hidden: Target layers of the whole model.
        start: First target layer of the stage.
        target: Target layers of the stage.
        drafts: Draft layers in the list.
    """

    components: tuple[Component, ...]
    hidden: int
    start: int
    target: int
    drafts: int

    @property
    def entries(self) -> int:
        """Length of the list."""
        return len(self.components) * (self.target + self.drafts)

    def names(self) -> tuple[Name, ...]:
        """Every entry of the list, in its order; draft layers are numbered behind the model's."""
        first = kv_planner.first_draft_id(self.hidden)
        sides: list[tuple[Part, range]] = [
            ("target", range(self.start, self.start + self.target)),
            ("draft", range(first, first + self.drafts)),
        ]
        return tuple((name, part, layer, 0) for part, layers in sides for name in self.components for layer in layers)


def total_layers(kv_args: Any) -> int | None:
    """Target layers of the whole model, from either field set; None: neither field says it.

    Raises:
        UnsupportedLayout: `hidden_kv_layers` and `total_kv_layers` differ.
    """
    newer, older = (stated(kv_args, name) or None for name in ("hidden_kv_layers", "total_kv_layers"))
    if newer and older and newer != older:
        raise refusal(
            "hidden_kv_layers", newer, older, "total_kv_layers says otherwise", "set one, or both to the same number"
        )
    return newer or older


def components_of(kv_args: Any, *, mla: bool) -> tuple[Component, ...]:
    """The groups of a list: K and V, or as many latents as `kv_buf_groups` says.

    Raises:
        UnsupportedLayout: Latents without `kv_buf_groups`, or with a number of groups that none has.
    """
    if not mla:
        return PAIRS
    groups = stated(kv_args, "kv_buf_groups")
    if groups is None or groups not in (1, 2, 3, 4):
        raise refusal(
            "kv_buf_groups", groups, "1 to 4", "the number of groups is given, never measured on a list",
            "fill KVArgs with kv_transfer.integrations.sglang.setup_state_kv_args",
        )  # fmt: skip
    return LATENTS[:groups]


def stage_of(kv_args: Any, entries: int, *, mla: bool, pp_size: int | None, last: bool | None = None) -> Stage:
    """Reads this rank's own list of `entries` buffers.

    Args:
        kv_args: SGLang's `KVArgs`; of either field set.
        entries: Length of the list.
        mla: Latents, not K and V.
        pp_size: Pipeline stages of this side; None: unknown.
        last: Whether this is the last of them; None: unknown.

    Raises:
        UnsupportedLayout: A field is missing, or the list is not as long as the fields say.
    """
    components = components_of(kv_args, mla=mla)
    groups = len(components)
    if entries % groups:
        raise refusal(
            "kv_data_ptrs", entries, groups, f"{entries} entries are no whole number of {groups} groups",
            "give every entry a layer id, or a name by setup_state_kv_args",
        )  # fmt: skip
    layers, said = entries // groups, stated(kv_args, "num_draft_entries")
    if said is not None and (said % groups or said > entries):
        raise refusal("num_draft_entries", said, entries, f"no whole number of {groups} groups", "count every buffer")
    start, hidden = stated(kv_args, "prefill_start_layer") or 0, total_layers(kv_args)
    if hidden is None:
        if pp_size != 1 or start:
            raise refusal(
                "hidden_kv_layers", None, None, "a stage does not know where its layers are in the model's list",
                "set hidden_kv_layers (or total_kv_layers) to the target layers of the whole model",
            )  # fmt: skip
        hidden = layers - (said or 0) // groups
    # The older field set does not count the draft: what is behind the model's last layer is the draft's.
    drafts = max(0, start + layers - hidden) if said is None else said // groups
    configured = stated(kv_args, "draft_kv_layers")
    stage = Stage(components, hidden, start, layers - drafts, drafts)
    if stage.target < 0 or start + stage.target > hidden or (last and start + stage.target != hidden):
        raise refusal(
            "kv_data_ptrs", entries, stage.entries,
            f"layers {start} to {start + stage.target} and {drafts} draft layers do not fit a model of {hidden}",
            "register every layer of the stage once, drafts on the last stage only",
        )  # fmt: skip
    if configured is not None and (drafts not in (0, configured) or (last and drafts != configured)):
        raise refusal(
            "draft_kv_layers", drafts, configured, "the list holds another number of draft layers than the draft has",
            "register every draft layer on the last stage, in every group",
        )  # fmt: skip
    return stage


def peer_stage(own: Stage, entries: int, *, pp_size: int | None) -> Stage:
    """Reads a peer's bare list: the whole model with a draft or without, or the same stage.

    Raises:
        UnsupportedLayout: Neither fits, or both do and mean different buffers.
    """
    groups = len(own.components)
    extra, odd = divmod(entries - groups * own.hidden, groups)
    whole = Stage(own.components, own.hidden, 0, own.hidden, extra) if extra >= 0 and not odd else None
    same = own if entries == own.entries and pp_size != 1 else None
    if whole and same and whole != same:
        raise refusal(
            "dst_kv_ptrs", own.entries, entries, "the peer's list can be read as the whole model and as this stage",
            "publish layer ids or names, as this package's receiver does",
        )  # fmt: skip
    found = whole or same
    if found is None:
        raise refusal(
            "dst_kv_ptrs", own.entries, entries,
            f"{entries} entries hold neither {own.hidden} layers in {groups} groups nor this stage",
            "register one buffer for each group and layer, drafts behind them",
        )  # fmt: skip
    if own.drafts and found.drafts not in (0, own.drafts):
        raise refusal(
            "dst_kv_ptrs", own.drafts, found.drafts, "the two sides have drafts of another depth", "load the same draft"
        )
    return found


def own_names(kv_args: Any, *, mla: bool, pp_size: int | None, last: bool | None = None) -> tuple[Name, ...]:
    """The names of this rank's entries: those that `setup_state_kv_args` wrote, else by layer ids, else by counts.

    Raises:
        UnsupportedLayout: Names or ids do not cover the list, or counts do not say what is in it.
    """
    entries = len(entry_list(kv_args, "kv_data_ptrs"))
    given, ids = given_names(kv_args), optional_list(kv_args, "kv_layer_ids")
    for field, values in (("kv_entry_names", given), ("kv_layer_ids", ids)):
        if values and len(values) != entries:
            raise refusal(
                field, len(values), entries, "not one for every entry of kv_data_ptrs", "publish all of them, or none"
            )
    if given:
        return given
    if ids:
        strange = [layer for layer in ids if not is_whole(layer) or not 0 <= layer < 1 << 64]
        if strange:
            what, remedy = told(strange[0]), "publish the id of each buffer's layer"
            raise refusal("kv_layer_ids", what, "whole numbers", "no layer", remedy)
        return _names_by_id(ids, LATENTS if mla else PAIRS)
    return stage_of(kv_args, entries, mla=mla, pp_size=pp_size, last=last).names()


def given_names(kv_args: Any) -> tuple[Name, ...]:
    """The names that `setup_state_kv_args` wrote; none where it wrote none.

    Raises:
        UnsupportedLayout: One is no name.
    """
    given = optional_list(kv_args, "kv_entry_names")
    wrong = [name for name in given if not _is_name(name)]
    if wrong:
        what = "a component, a part, a layer id and an occurrence"
        raise refusal("kv_entry_names", told(wrong[0]), what, "no name of a buffer", "let name_entries write them")
    return tuple((name[0], name[1], name[2], name[3]) for name in given)


def _is_name(name: object) -> bool:
    """Whether it has two words and two numbers."""
    if not isinstance(name, Sequence) or len(name) != 4:
        return False
    component, part, layer, occurrence = name
    return isinstance(component, str) and isinstance(part, str) and is_whole(layer) and is_whole(occurrence)


def pair_with_peer(
    kv_args: Any,
    entries: int,
    *,
    mla: bool,
    pp_size: int | None,
    last: bool | None = None,
    names: Sequence[Name] | None = None,
    layer_ids: Sequence[int] = (),
) -> tuple[tuple[int, int], ...]:
    """Positions (own, peer's) of the buffers that hold the same.

    Args:
        kv_args: This rank's.
        entries: Length of the peer's list.
        mla: Latents, not K and V.
        pp_size: Pipeline stages of this side; None: unknown.
        last: Whether this is the last of them; None: unknown.
        names: The peer's names, if it published them.
        layer_ids: Its layer ids, if it published them.

    Raises:
        UnsupportedLayout: A list says too little, or contradicts itself.
        PlanError: A buffer is missing at the peer.
    """
    for field, values in (("the peer's names", names), ("dst_layer_ids", layer_ids)):
        if values and len(values) != entries:
            raise refusal(field, entries, len(values), "not one for every entry of dst_kv_ptrs", "publish all, or none")
    own = own_names(kv_args, mla=mla, pp_size=pp_size, last=last)
    if names:
        return pair_entries(own, names)
    if layer_ids:
        groups = LATENTS if mla else PAIRS
        source, destination = ([name[2] for name in own], list(layer_ids))
        for layer in dict.fromkeys(source):
            if layer in destination and source.count(layer) != destination.count(layer):
                raise refusal(
                    "dst_layer_ids", source.count(layer), destination.count(layer),
                    f"layer {layer} has unequally many buffers on the two sides", "load the same model on both sides",
                )  # fmt: skip
        return pair_entries(_names_by_id(source, groups), _names_by_id(destination, groups))
    if entries == len(own) and pp_size == 1 and not getattr(kv_args, "num_draft_entries", None) and _is_own(kv_args):
        return tuple((entry, entry) for entry in range(entries))
    stage = stage_of(kv_args, len(own), mla=mla, pp_size=pp_size, last=last)
    return pair_entries(stage.names(), peer_stage(stage, entries, pp_size=pp_size).names())


def _is_own(kv_args: Any) -> bool:
    """Whether the list is named by its owner alone; a peer of equal length without names then has the same pool."""
    return bool(getattr(kv_args, "kv_entry_names", None) or getattr(kv_args, "kv_layer_ids", None))


def _names_by_id(layer_ids: Sequence[int], components: Sequence[Component]) -> tuple[Name, ...]:
    """Names from published ids: the k-th entry of an id is of the k-th group; more than there are groups are states."""
    seen: dict[int, int] = {}
    names: list[Name] = []
    for layer in layer_ids:
        number = seen[layer] = seen.get(layer, -1) + 1
        known = number < len(components)
        names.append((components[number] if known else "state", "target", layer, 0 if known else number))
    return tuple(names)


def pair_entries(source: Sequence[Name], destination: Sequence[Name]) -> tuple[tuple[int, int], ...]:
    """Positions (source, destination) of each name of the source.

    Raises:
        PlanError: A name is missing at the destination, or twice on a side.
    """
    own, other = kv_planner.pair_names(list(source), list(destination))
    return tuple(zip(own.tolist(), other.tolist(), strict=True))


def compressed_names(ratios: Sequence[int], layers: range, kind: str) -> Iterator[Name]:
    """Entries of a model whose layers compress their latents unequally, for those of `layers` that are in the list.

    Args:
        ratios: Compression of every layer of the model.
        layers: Those of the list's owner.
        kind: "main" (latents, index keys and scales of the layers at 4), "c128", "c4_state" or "window".

    Raises:
        UnsupportedLayout: A layer has no compression.
    """
    lists: dict[str, tuple[int | None, tuple[tuple[Component, int], ...]]] = {
        "main": (4, (("latent_c4", 0), ("index_key", 0), ("index_scale", 0))),
        "c128": (128, (("latent_c128", 0),)),
        "c4_state": (4, (("state", 0), ("state", 1))),
        "window": (None, (("latent", 0),)),
    }
    if len(ratios) < layers.stop:
        raise refusal(
            "mla_compression_ratios", len(ratios), layers.stop, "a layer of this rank has none",
            "give the compression of every layer of the model",
        )  # fmt: skip
    ratio, groups = lists[kind]
    for component, occurrence in groups:
        for layer in layers:
            if ratio is None or ratios[layer] == ratio:
                yield component, "target", layer, occurrence
