"""Writes routes.json by enumerating single bytes. It does not import kv_planner: the answers are found by labels only.

Every byte of a buffer gets the label (component, part, layer, occurrence, token, head, dim, byte of the element). A
byte moves from the source byte to the destination byte of the same label, on paired pages. Where several source ranks
hold a label, the k-th receiving rank (by tp rank) is served by the (k modulo replicas)-th of them. Single bytes are
then joined to the longest blocks that stay within one pair of entries.

Usage: python generate.py  (writes next to this file)
"""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

SIZES = {"uint8": 1, "float16": 2, "float32": 4}


def component(name: str, layer_ids: list[int], **changes: Any) -> dict[str, Any]:
    """Returns one component of a layout in its JSON form."""
    spec: dict[str, Any] = {
        "component": name,
        "part": "target",
        "layer_ids": layer_ids,
        "dtype": "uint8",
        "total_heads": 1,
        "dims": 2,
        "axes": ["token", "head", "dim"],
        "item_kind": "page",
    }
    return {**spec, **changes}


def layout(components: list[dict[str, Any]], page_size: int = 2) -> dict[str, Any]:
    """Returns a layout in its JSON form."""
    return {
        "components": components,
        "page_size": page_size,
        "fingerprint": "golden",
        "kernel_block_size": None,
        "format_version": 1,
    }


def heads_of(total: int, rank: int, size: int) -> tuple[int, int]:
    """Returns the heads of the equal slots, one or more a head, that belong to this rank."""
    count = max(total, size)
    held = [slot * total // count for slot in range(count) if slot * size // count == rank]
    return held[0], held[-1] + 1


def side(geometry: dict[str, Any], stages: list[list[int]], tp_size: int, items: int, base: int, gap: int) -> list[Any]:
    """Returns the ranks of one side; stage s owns the layer ids stages[s]."""
    ranks: list[dict[str, Any]] = []
    stage_ranks = itertools.product(range(len(stages)), range(tp_size))
    for pp_rank, tp_rank in stage_ranks:
        entries = []
        address = base + 1_000_000 * (pp_rank * tp_size + tp_rank)
        for spec in geometry["components"]:
            seen: dict[int, int] = defaultdict(int)
            for layer in spec["layer_ids"]:
                occurrence = seen[layer]
                seen[layer] += 1
                if layer not in stages[pp_rank]:
                    continue
                start, stop = heads_of(spec["total_heads"], tp_rank, tp_size)
                item = geometry["page_size"] * (stop - start) * spec["dims"] * SIZES[spec["dtype"]]
                nbytes = (items - 1) * (item + gap) + item
                name = [spec["component"], spec["part"], layer, occurrence]
                entries.append([*name, address, nbytes, item + gap, item, start, stop])
                address += nbytes + 8
        place = {"pp_rank": pp_rank, "pp_size": len(stages), "tp_rank": tp_rank, "tp_size": tp_size}
        ranks.append(
            {"placement": {**place, "dcp_rank": 0, "dcp_size": 1, "dp_rank": 0, "dp_size": 1}, "entries": entries}
        )
    return ranks


def labels(geometry: dict[str, Any], entry: list[Any]) -> dict[tuple[Any, ...], int]:
    """Returns the offset within an item of every label that the entry holds."""
    name, start, stop = tuple(entry[:4]), entry[8], entry[9]
    spec = next(s for s in geometry["components"] if (s["component"], s["part"]) == name[:2])
    extents: dict[Any, int] = {"token": geometry["page_size"], "head": stop - start, "dim": spec["dims"]}
    found: dict[tuple[Any, ...], int] = {}
    offset = 0
    for index in itertools.product(*(range(extents[axis]) for axis in spec["axes"])):
        at: dict[Any, int] = dict(zip(spec["axes"], index, strict=True))
        for byte in range(SIZES[spec["dtype"]]):
            label = (*name, at["token"], at["head"] + start, at["dim"], byte)
            found[label] = offset
            offset += 1
    return found


def answer(case: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns pairs and blocks of every pair of ranks that have something to send."""
    geometry, parts = case["layout"], case["parts"]
    holders: dict[str, Any] = {}
    for name in ("source", "destination"):
        held = defaultdict(list)
        for rank, manifest in enumerate(case[name]):
            for index, entry in enumerate(manifest["entries"]):
                if entry[1] in parts:
                    for label, offset in labels(geometry, entry).items():
                        held[label].append((manifest["placement"]["tp_rank"], rank, index, offset))
        holders[name] = {label: sorted(places) for label, places in held.items()}
    moved: dict[tuple[int, int], dict[tuple[int, int], list[tuple[int, int]]]] = defaultdict(lambda: defaultdict(list))
    for label, receivers in holders["destination"].items():
        senders = holders["source"].get(label)
        if senders is None:
            continue
        for turn, (_, receiver, to_entry, to_offset) in enumerate(receivers):
            _, sender, from_entry, from_offset = senders[turn % len(senders)]
            from_ = case["source"][sender]["entries"][from_entry]
            to = case["destination"][receiver]["entries"][to_entry]
            for from_page, to_page in zip(case["source_pages"], case["destination_pages"], strict=True):
                byte = (from_[4] + from_page * from_[6] + from_offset, to[4] + to_page * to[6] + to_offset)
                moved[sender, receiver][from_entry, to_entry].append(byte)
    routes = []
    for (sender, receiver), by_pair in sorted(moved.items()):
        blocks = []
        for bytes_ in by_pair.values():
            block: list[int] = []
            for source, destination in sorted(bytes_):
                if block and source == block[0] + block[2] and destination == block[1] + block[2]:
                    block[2] += 1
                else:
                    block = [source, destination, 1]
                    blocks.append(block)
        pairs = sorted([list(pair) for pair in by_pair])
        routes.append({"source": sender, "destination": receiver, "pairs": pairs, "blocks": sorted(blocks)})
    return routes


def case(
    name: str,
    components: list[dict[str, Any]],
    stages: tuple[list[list[int]], list[list[int]]],
    tp: tuple[int, int] = (1, 1),
    *,
    pages: tuple[list[int], list[int]] = ([2, 3, 1], [1, 2, 4]),
    parts: tuple[str, ...] = ("target", "draft"),
    gaps: tuple[int, int] = (0, 0),
    destination_components: list[dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """Returns one case with its answer."""
    source = layout(components)
    target = layout(destination_components or components)
    built: dict[str, Any] = {
        "name": name,
        "layout": source,
        "destination_layout": target,
        "parts": list(parts),
        "source": side(source, stages[0], tp[0], 5, 10_000, gaps[0]),
        "destination": side(target, stages[1], tp[1], 6, 900_000_000, gaps[1]),
        "source_pages": pages[0],
        "destination_pages": pages[1],
    }
    return {**built, "routes": answer(built)}


def split(*bounds: int) -> list[list[int]]:
    """Returns consecutive layers as stages; bounds 0, 4, 7 give layers 0 to 3 and 4 to 6."""
    return [list(range(a, b)) for a, b in itertools.pairwise(bounds)]


def cases() -> list[dict[str, Any]]:
    """Returns all cases."""
    groups = ("latent", "rope", "index_key")
    mla = [component(name, list(range(61)), dims=1) for name in groups]
    draft = [component(name, [61], dims=1, part="draft") for name in groups]
    few = [component(n, list(range(78)), dims=1) for n in groups[:2]] + [
        component("index_key", list(range(0, 78, 4)), dims=1)
    ]
    full = list(range(3, 60, 4))
    hybrid = [component("key", full), component("value", full, dims=1)]
    mha = [component("key", list(range(10)), dims=3, dtype="float16"), component("value", list(range(10)))]
    two = [component("key", [0], total_heads=2), component("value", [0], total_heads=2, dims=1)]
    eight = [
        component("key", [0, 1], total_heads=8, dims=1),
        component("value", [0, 1], total_heads=8, dtype="float16"),
    ]
    head_first = [component("key", [0, 1], total_heads=4, axes=["head", "token", "dim"])]
    dims_first = [component("key", [0], total_heads=4, axes=["token", "dim", "head"])]
    mixed = [
        component("key", [0, 1, 2, 3, 4], total_heads=4),
        component("value", [0, 1, 2, 3, 4], total_heads=4, dims=3),
        component("index_key", [1, 3]),
        component("key", [5, 6], part="draft", total_heads=2),
        component("value", [5, 6], part="draft", total_heads=2),
    ]
    one_by_one = ([2], [3])
    return [
        case(
            "A02 draft on decode only",
            mla,
            (split(0, 31, 61), [[*range(62)]]),
            pages=one_by_one,
            parts=("target",),
            destination_components=mla + draft,
        ),
        case(
            "A02 draft on the last stage",
            mla + draft,
            ([[*range(31)], [*range(31, 62)]], [[*range(62)]]),
            pages=one_by_one,
        ),
        case("A02 index keys on a fourth of the layers", few, (split(0, 39, 78), [[*range(78)]]), pages=one_by_one),
        case("A03 full attention on every fourth layer", hybrid, (split(0, 30, 60), [[*range(60)]])),
        case("A04 repeated ids", [component("key", [3, 7, 11, 3, 7, 11])], ([[3], [7, 11]], [[3, 7, 11]])),
        case("A-01 uneven stages of keys and values", mha, (split(0, 4, 7, 10), [[*range(10)]])),
        case("A-01 uneven stages on both sides", mha, (split(0, 4, 7, 10), split(0, 9, 10))),
        case("B01 two heads to four ranks", two, ([[0]], [[0]]), (1, 4)),
        case("B01 four ranks of two heads to one", two, ([[0]], [[0]]), (4, 1)),
        case("B01 four ranks of two heads to two", two, ([[0]], [[0]]), (4, 2)),
        case("B01 four ranks of two heads to four", two, ([[0]], [[0]]), (4, 4)),
        case("B01 four ranks of two heads to eight", two, ([[0]], [[0]]), (4, 8)),
        case("B03 eight heads, two ranks to eight", eight, ([[0, 1]], [[0, 1]]), (2, 8)),
        case("B03 eight heads, eight ranks to sixteen", eight, ([[0, 1]], [[0, 1]]), (8, 16)),
        case("B12 equal ranks copy whole pages", eight, ([[0], [1]], [[0, 1]]), (4, 4)),
        case("B11 heads outermost need no rows", head_first, ([[0], [1]], [[0, 1]]), (4, 2)),
        case("heads innermost", dims_first, ([[0]], [[0]]), (2, 4)),
        case("padded strides", eight, ([[0, 1]], [[0], [1]]), (4, 4), gaps=(3, 5)),
        case(
            "stages, ranks, draft and index keys at once",
            mixed,
            ([[0, 1], [2, 3], [4, 5, 6]], [[0, 1, 2], [3, 4, 5, 6]]),
            (2, 4),
        ),
    ]


if __name__ == "__main__":
    about = __doc__.split("\n")[0] if __doc__ else ""
    text = json.dumps({"about": about, "cases": cases()}, separators=(",", ":"))
    Path(__file__).with_name("routes.json").write_text(text.replace('{"name"', '\n{"name"') + "\n", encoding="utf-8")
