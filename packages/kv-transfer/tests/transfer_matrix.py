"""The matrix of transfers: what a model keeps, how both sides share it, and which bytes must be where afterwards.

Pure: cases, their layouts, and covering sets of them. `transfer_ranks.py` runs them between processes.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
from collections.abc import Iterator
from typing import Any, Literal

import kv_planner as kp

LAYERS, PAGES = 6, 3
FEW, MANY = 16, 96  # connections of a case
TARGET: tuple[kp.Part, ...] = ("target",)
KINDS = ("mha1", "mha2", "mha8", "mha3", "mla", "mla+index", "hybrid", "window", "compressed")
PIPELINES = tuple(itertools.product((1, 2, 3), (1, 2)))
TENSORS = tuple(itertools.product((1, 2, 4), (1, 2, 4)))
DRAFTS = tuple(itertools.product((0, 1, 3), (0, 1, 3)))
SIZES = (1, 2, 4)
Share = tuple[int, Literal["page", "token"]]
SHARES: tuple[Share, ...] = ((1, "page"), (2, "page"), (2, "token"), (3, "page"))
GROUPS = ((1, 1), (2, 1), (1, 2), (2, 2))


@dataclasses.dataclass(frozen=True)
class Group:
    """One group of pages of a case."""

    layout: kp.ModelLayout
    window: int | None = None

    @property
    def has_pages(self) -> bool:
        return any(spec.item_kind == "page" for spec in self.layout.components)


@dataclasses.dataclass(frozen=True)
class Case:
    """One cell. Pairs are (prefill, decode).

    Attributes:
        kind: What the model keeps; one of `KINDS`.
        page_size: Tokens of a page; other ones in groups of their own geometry.
        pp: Pipeline stages.
        tp: Tensor-parallel ranks.
        draft: Draft layers.
        share: Context-parallel ranks of decode, and what is dealt out to them.
        dp: Data-parallel groups; each one of the larger side has a request of its own.
    """

    kind: str
    page_size: int
    pp: tuple[int, int]
    tp: tuple[int, int]
    draft: tuple[int, int]
    share: Share = (1, "page")
    dp: tuple[int, int] = (1, 1)

    @classmethod
    def of(cls, fields: dict[str, Any]) -> Case:
        """From JSON."""
        known: dict[str, Any] = {name: tuple(own) if isinstance(own, list) else own for name, own in fields.items()}
        return cls(**known)

    @property
    def heads(self) -> int:
        return int(self.kind[3:]) if self.kind.startswith("mha") else 2

    @property
    def parts(self) -> tuple[kp.Part, ...]:
        """Without a draft on one side, only the target is moved."""
        return TARGET if 0 in self.draft else ("target", "draft")

    @property
    def refused(self) -> str:
        """What the text of the refusal names; empty where there is none."""
        if self.kind.startswith("mha") and any(max(tp, self.heads) % min(tp, self.heads) for tp in self.tp):
            return "heads"
        if 0 not in self.draft and self.draft[0] != self.draft[1]:
            return "draft"
        return "dealt out" if self.kind == "compressed" and self.share[1] == "token" else ""

    @property
    def connections(self) -> int:
        """Senders over all requests: what the case costs."""
        return self.pp[0] * self.tp[0] * self.pp[1] * self.tp[1] * self.share[0] * max(self.dp)

    @property
    def tokens(self) -> int:
        """Of each request; the last page is not full where pages hold several tokens."""
        return 2 * 128 + 5 if self.kind == "compressed" else PAGES * self.page_size - (self.page_size > 1)

    def items(self, here: int) -> int:
        """Items of every buffer: as many as there are page numbers, of all ranks that share a request."""
        return 8 * self.share[0] + 1 if here else 9

    @property
    def padding(self) -> int:
        """Bytes between pages at decode; tokens are dealt out only where there are none."""
        return 0 if self.share[1] == "token" else 3

    def groups(self, here: int) -> dict[str, Group]:
        """The groups of a side: 0 prefill, 1 decode."""
        return _groups(self.kind, self.page_size, self.draft[here], self.heads)


@functools.cache
def _groups(kind: str, page_size: int, drafts: int, heads: int) -> dict[str, Group]:
    layers, draft = list(range(LAYERS)), list(range(LAYERS, LAYERS + drafts))

    def layout(*specs: kp.ComponentSpec | None, size: int = page_size) -> kp.ModelLayout:
        return kp.ModelLayout([own for own in specs if own is not None], page_size=size, fingerprint=kind)

    def spec(
        name: kp.Component, ids: list[int], dims: int, part: kp.Part = "target", **more: Any
    ) -> kp.ComponentSpec | None:
        known: dict[str, Any] = {"total_heads": 1, **more}
        return kp.ComponentSpec(name, part, layer_ids=ids, dtype="uint8", dims=dims, **known) if ids else None

    def mha(ids: list[int], drafts: list[int], heads: int) -> list[kp.ComponentSpec | None]:
        parts: tuple[tuple[kp.Part, list[int]], ...] = (("target", ids), ("draft", drafts))
        return [
            own
            for part, held in parts
            for own in (
                spec("key", held, 3, part, total_heads=heads), spec("value", held, 2, part, total_heads=heads),
            )
        ]  # fmt: skip

    if kind.startswith("mha"):
        return {"main": Group(layout(*mha(layers, draft, heads)))}
    if kind == "hybrid":
        state = spec("state", layers[::2], 4, total_heads=4, rows=3, groups=[1, 1, 2], item_kind="request_row")
        return {"main": Group(layout(*mha(layers[1::2], draft[1::2] or draft, heads), state))}
    if kind == "window":
        window = Group(layout(*mha(layers[1::2], draft, 4)), window=page_size)
        return {"full": Group(layout(*mha(layers[::2], [], heads))), "window": window}
    if kind == "compressed":
        slots = Group(layout(spec("latent", layers, 1), spec("latent", draft, 1, "draft")), window=page_size)
        c4 = layout(spec("latent_c4", layers[::3], 2, compression=4),
                    spec("index_key", layers[::3], 1, compression=4), size=128)  # fmt: skip
        c128 = layout(spec("latent_c128", layers[1::3], 3, compression=128), size=128)
        ring = layout(spec("state", layers[::3], 2, rows=4, item_kind="request_row"))
        return {"window": slots, "c4": Group(c4), "c128": Group(c128), "c4_state": Group(ring)}
    specs: list[kp.ComponentSpec | None] = []
    for part, ids in (("target", layers), ("draft", draft)):
        part_: kp.Part = "target" if part == "target" else "draft"
        specs += [spec("latent", ids, 3, part_), spec("rope", ids, 2, part_)]
    if kind == "mla+index":
        specs += [spec("index_key", layers[1::2], 2), spec("index_scale", layers[1::2], 1)]
    return {"main": Group(layout(*specs))}


def needed(case: Case, group: Group) -> range:
    """Pages of a request that a group sends, token by token: the window's, from a whole turn of the ranks on."""
    size, first = group.layout.page_size, 0
    if group.window is not None:
        first = min(t // size for t in range(case.tokens) if t >= case.tokens - group.window)
        first -= first % case.share[0]
    return range(first, (case.tokens - 1) // size + 1)


def source_pages(case: Case, group: Group, request: int) -> list[int]:
    """Pages of prefill; those that have left the window are 0. Other requests have others."""
    order = ([7, 3, 4, 6, 8, 1], [5, 1, 8, 2, 7, 3])[request]
    span = needed(case, group)
    return [0] * span.start + order[: len(span)]


def destination_pages(case: Case, group: Group, request: int) -> list[int]:
    """Pages of one decode rank. Two requests share nothing, also where all ranks keep a page."""
    order = ([2, 5, 6, 1], [3, 7, 4])[request]
    return order[: -(-len(needed(case, group)) // case.share[0])]


def request_groups(case: Case, request: int) -> tuple[int, int]:
    """The data-parallel groups of a request: of prefill, and of decode."""
    return (request + 1) % case.dp[0], request % case.dp[1]


DIMENSIONS: dict[str, tuple[Any, ...]] = {
    "kind": KINDS, "page_size": SIZES, "pp": PIPELINES, "tp": TENSORS, "draft": DRAFTS, "share": SHARES, "dp": GROUPS,
}  # fmt: skip
_PLAIN: dict[str, Any] = {
    "kind": "mla", "page_size": 2, "pp": (1, 1), "tp": (1, 1), "draft": (0, 0), "share": (1, "page"), "dp": (1, 1),
}  # fmt: skip


def plain(**fields: Any) -> Case:
    """A case without anything particular but what is named."""
    return Case(**{**_PLAIN, **fields})


def product(sizes: bool) -> Iterator[Case]:
    """Every kind, pipeline, tensor parallelism and draft; shares and groups take turns where they are not many.

    Args:
        sizes: Every page size of each; else they take turns too.
    """
    turns, order = itertools.cycle(itertools.product(SHARES, GROUPS)), itertools.cycle(SIZES)
    for kind, pp, tp, draft in itertools.product(KINDS, PIPELINES, TENSORS, DRAFTS):
        for size in SIZES if sizes else (next(order),):
            share, dp = next(turns)
            case = Case(kind, size, pp, tp, draft, share, dp)
            fits = case.connections <= 32 and case.refused != "dealt out"
            yield case if fits else Case(kind, size, pp, tp, draft)


def covering(seed: int, most: int = MANY) -> list[Case]:
    """Cases in which every pair of values of two dimensions is moved once, and a dozen that are refused.

    Args:
        seed: Of the choice.
        most: Connections of a case; pairs that need more are left out.
    """
    dice = random.Random(seed)
    refused: dict[tuple[str, str], Case] = {}
    open_pairs: set[tuple[tuple[str, Any], tuple[str, Any]]] = set()
    for (one, values), (other, others) in itertools.combinations(DIMENSIONS.items(), 2):
        for value, second in itertools.product(values, others):
            case = plain(**{one: value, other: second})
            if case.refused:
                refused.setdefault((case.refused, str((case.kind, case.tp, case.draft, case.share))), case)
            elif case.connections <= most:
                open_pairs.add(((one, value), (other, second)))
    found: list[Case] = []
    while open_pairs:
        seeds = [dice.choice(sorted(open_pairs, key=str)) for _ in range(12)]
        candidates = [own for pair in seeds if (own := _candidate(dict(pair), dice, most)) is not None]
        if candidates:
            best = max(candidates, key=lambda case: (len(_pairs(case) & open_pairs), -case.connections))
            open_pairs -= _pairs(best)
            found.append(best)
    kept = sorted(refused.values(), key=str)
    found += dice.sample(kept, min(len(kept), 12))
    dice.shuffle(found)
    return found


def _candidate(fixed: dict[str, Any], dice: random.Random, most: int) -> Case | None:
    for _ in range(40):
        fields: dict[str, Any] = {name: dice.choice(values) for name, values in DIMENSIONS.items()}
        case = Case(**{**fields, **fixed})
        if not case.refused and case.connections <= most:
            return case
    return None


def _pairs(case: Case) -> set[tuple[tuple[str, Any], tuple[str, Any]]]:
    return set(itertools.combinations([(name, getattr(case, name)) for name in DIMENSIONS], 2))
