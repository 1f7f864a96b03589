"""Records what SGLang 0.5.23's Triton kernels give in Triton's interpreter: `record_sglang.py FOLDER OUT.json`.

FOLDER holds the unpacked wheel. Only the kernels' files are loaded; what they import of the engine is replaced by
modules that answer "CUDA". Cases stay where our contract and SGLang's agree: no overruns, live rows only, no NaN; what
differs is in contracts.md, appendix A.
"""

# mypy: disable-error-code="no-untyped-call,no-untyped-def,attr-defined,method-assign"

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import json
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

Case = dict[str, Any]
random = torch.Generator().manual_seed(23)


def load(folder: Path, name: str) -> Any:
    """One file of kernels, without its package."""
    answers = {f"is_{kind}": (lambda: False) for kind in ("cpu", "npu", "hip", "musa", "xpu")}
    utils, platforms, interface = (ModuleType(f"sglang.srt.{part}") for part in ("utils", "platforms", "x"))
    utils.__dict__.update(answers, is_cuda=lambda: True, next_power_of_2=lambda n: 1 << max(n - 1, 0).bit_length())
    platforms.current_platform = ModuleType("platform")
    platforms.current_platform.is_out_of_tree = lambda: False
    interface.reject_out_of_tree_path = lambda *a, **k: None
    stubs = {"sglang": ModuleType("sglang"), "sglang.srt": ModuleType("sglang.srt"), "sglang.srt.utils": utils}
    stubs |= {"sglang.srt.platforms": platforms, "sglang.srt.platforms.interface": interface}
    tree, kernel = ModuleType("sglang.kernels.ops.speculative.tree"), ModuleType("sgl_kernel")
    for module in (tree, kernel):
        module.__getattr__ = lambda name: None
    stubs |= {tree.__name__: tree, "sgl_kernel": kernel}
    for part in ("kernels", "kernels.ops", "kernels.ops.speculative"):
        stubs[f"sglang.{part}"] = ModuleType(f"sglang.{part}")
    sys.modules.update(stubs)
    spec = spec_from_file_location(name, folder / f"sglang/kernels/ops/speculative/{name}.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def ints(*shape: int, high: int = 900, low: int = 0) -> torch.Tensor:
    """Random integers."""
    return torch.randint(low, high, shape, generator=random)


def distinct(count: int, below: int) -> torch.Tensor:
    """Random distinct integers."""
    return torch.randperm(below, generator=random)[:count]


def laws(*shape: int) -> torch.Tensor:
    """Probabilities that are multiples of 1/64, so that sums are exact in any order."""
    rows = torch.multinomial(torch.ones(shape[-1]), 64 * shape[0] * shape[1], replacement=True, generator=random)
    counts = torch.zeros(shape[0] * shape[1], shape[-1])
    counts.scatter_add_(1, rows.view(-1, 64), torch.ones(counts.shape[0], 64))
    return (counts / 64).view(shape)


def multi_layer(folder: Path) -> Case:
    """Rotation, stash, widened windows."""
    module = load(folder, "multi_layer_eagle")
    bs, width, front, hidden, rows = 3, 4, 3, 5, 6
    lens, starts = torch.tensor([4, 0, 9]), torch.tensor([0, 4, 4])
    ids, fresh, select = ints(13), ints(bs), torch.tensor([2, 4, 10])
    case: Case = {"ids": ids.clone(), "starts": starts, "lens": lens, "fresh": fresh, "select": select}
    case["rotated"] = module.rotate_input_ids(ids.clone(), starts, lens, fresh)
    case["rotated_select"] = module.rotate_input_ids(ids.clone(), starts, lens, fresh, select)
    stash = [ints(rows, front), torch.randn(rows, front, hidden, generator=random), ints(rows, high=front + 1).int()]
    requests, lengths, table = distinct(bs, rows), ints(bs, high=7, low=1), ints(rows, 20).int()
    predict, states = ints(bs * width), torch.randn(bs * width, hidden, generator=random)
    case |= {"stash": [part.clone() for part in stash], "requests": requests, "lengths": lengths, "table": table}
    case |= {"predict": predict, "states": states}
    window = ints(bs * (width + front)), torch.zeros(bs * (width + front), hidden)
    module.fill_widened_draft_extend_inputs_triton(*window, predict, states, *stash, lengths, requests, width)
    case["window"] = list(window)
    case["locs"] = list(
        module.compute_widened_draft_extend_locs_positions_triton(lengths, requests, table, stash[2], width, front, 2)
    )
    available = torch.tensor([1, 4, 2])
    ends = torch.arange(bs) * width + available
    case |= {"ends": ends, "available": available}
    for fresh_row in (True, False):
        held = [part.clone() for part in stash]
        module.stash_append_boundary_state_triton(predict, states, ends, available, requests, *held, fresh_row)
        case[f"appended_{fresh_row}"] = held
    return case


def bookkeeping(folder: Path) -> Case:
    """Commits, layouts, accepted slots, extend slots, blocks."""
    eagle, locs, dflash = (load(folder, name) for name in ("eagle", "cache_locs", "dflash"))
    bs, width, depth = 5, 6, 4
    lens = ints(bs, high=depth + 1, low=1)
    index = torch.full((bs, depth), -1)
    for row in range(bs):
        path = distinct(int(lens[row]) - 1, width - 1).sort().values + 1
        index[row, : int(lens[row])] = torch.cat((torch.zeros(1, dtype=torch.int64), path)) + row * width
    predict, lengths = ints(bs * width), ints(bs, high=99)
    case: Case = {"predict": predict, "index": index, "lens": lens, "lengths": lengths}
    new, bonus, steps, inputs = eagle.prepare_verify_commit_outputs(predict, index, lens, lengths, width, 8)
    case["commit"] = [new, bonus, *steps, *inputs[:2]]
    case["layout"] = list(eagle.prepare_draft_extend_lengths(lengths, width, 2))
    slots, packed = ints(bs * width), torch.zeros(bs * depth, dtype=torch.int64)
    eagle.fill_accept_out_cache_loc_func(index.view(-1), slots, packed, bs * depth)
    case |= {"slots": slots, "packed": packed}
    table, requests, starts = ints(7, 40).int(), distinct(bs, 7), ints(bs, high=20)
    ends = starts + ints(bs, high=9)
    ragged = torch.zeros(int((ends - starts).sum()), dtype=torch.int64)
    locs.assign_extend_cache_locs[(bs,)](requests, table, starts, ends, ragged, 40, 8)
    uniform = torch.zeros(bs * width, dtype=torch.int64)
    locs.assign_extend_cache_locs_uniform[(bs,)](requests, table, starts, uniform, 40, width)
    case |= {"table": table, "requests": requests, "starts": starts, "ends": ends, "ragged": ragged, "uniform": uniform}
    candidates, target = ints(bs, width, high=2), ints(bs, width, high=2)
    outputs = [torch.zeros(bs, dtype=torch.int32) for _ in range(2)]
    bonuses, tokens, after = (torch.zeros(*s, dtype=torch.int64) for s in ((bs,), (bs, width), (bs,)))
    dflash._compute_dflash_accept_bonus_triton_unchecked(candidates, target, *outputs, bonuses, tokens, lengths, after)
    case |= {"candidates": candidates, "target": target, "block": [*outputs, bonuses, after, tokens]}
    return case


def trees(folder: Path) -> Case:
    """Trees, their greedy verification, and chain sampling."""
    module, reject = load(folder, "spec_tree"), load(folder, "reject_sampling")
    bs, topk, depth, width = 2, 2, 3, 6
    parents = torch.tensor([[-1, 0, 1, 2, 5], [-1, 0, 1, 3, 4]])
    selected, lens = torch.tensor([[0, 1, 2, 5, 7], [0, 1, 3, 4, 8]]), torch.tensor([4, 9])
    mask = torch.zeros(int((width * (lens + width)).sum()), dtype=torch.bool)
    positions = torch.zeros(bs * width, dtype=torch.int64)
    links = [torch.full((bs, width), -1) for _ in range(3)]
    mask.fill_(True)
    module.sgl_build_tree_kernel_triton(parents, selected, lens, mask, positions, *links, topk, depth, width)
    case: Case = {"parents": parents, "selected": selected, "lens": lens, "mask": mask, "positions": positions}
    case |= {"next_token": links[1], "next_sibling": links[2]}
    candidates, target = ints(bs, width, high=2), ints(bs, width, high=2)
    index, count = torch.full((bs, depth + 1), -1, dtype=torch.int32), torch.zeros(bs, dtype=torch.int32)
    predicts = torch.zeros(bs * width, dtype=torch.int32)
    module.verify_tree_greedy_triton(predicts, index, count, candidates, *links, target)
    case |= {"candidates": candidates, "target": target, "index": index, "count": count, "predict": predicts}
    bs, steps, vocabulary = 12, 3, 11
    p, q = laws(bs, steps + 1, vocabulary), laws(bs, steps, vocabulary)
    drafts = torch.multinomial(q.view(-1, vocabulary), 1, generator=random).view(bs, steps)
    tokens = torch.cat((ints(bs, 1, high=vocabulary), drafts), 1)
    coins, last = torch.rand(bs, steps + 1, generator=random), torch.rand(bs, generator=random)
    index, count = torch.full((bs, steps + 1), -1, dtype=torch.int32), torch.zeros(bs, dtype=torch.int32)
    predicts = torch.zeros(bs * (steps + 1), dtype=torch.int32)
    rows = torch.arange(bs * (steps + 1)).view(bs, steps + 1)
    reject.chain_speculative_sampling_triton(
        predicts, index, count, tokens, rows, rows, rows, coins, last, p, q, 1.0, 1.0, True
    )
    bonus = predicts.view(bs, -1)[torch.arange(bs), count.long()]
    case |= {"drafts": drafts, "p": p, "q": q, "coins": coins, "last": last, "accepted": count, "bonus": bonus}
    return case


def plain(value: Any) -> Any:
    """Tensors as dtype and lists."""
    if isinstance(value, torch.Tensor):
        return {
            "dtype": str(value.dtype).removeprefix("torch."),
            "shape": list(value.shape),
            "data": value.flatten().tolist(),
        }
    if isinstance(value, dict):
        return {name: plain(part) for name, part in value.items()}
    return [plain(part) for part in value]


def main() -> None:
    """Record all."""
    folder = Path(sys.argv[1])
    cases = {"multi_layer": multi_layer(folder), "bookkeeping": bookkeeping(folder), "trees": trees(folder)}
    Path(sys.argv[2]).write_text(json.dumps(plain(cases)) + "\n")


if __name__ == "__main__":
    main()
