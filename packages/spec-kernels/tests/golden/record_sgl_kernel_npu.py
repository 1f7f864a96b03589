"""Records what sgl-kernel-npu's own Python gives on a CPU: `record_sgl_kernel_npu.py FOLDER OUT.json`.

FOLDER holds the package `sgl_kernel_npu` (f425bdf). Its Triton kernels run in Triton's interpreter, its torch functions
as they are; only single files are loaded, and the device's number of cores is answered here. Cases stay where our
contract and theirs agree: q above 0, no NaN, coins below 1, no masks of trees; the rest is in contracts.md,
appendix A.
"""

# mypy: disable-error-code="no-untyped-call,no-untyped-def,attr-defined"

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
random = torch.Generator().manual_seed(31)
WIDTH, DEPTH, TOPK = 6, 4, 2


def load(folder: Path, name: str) -> Any:
    """One file, without its package."""
    stubs = {part: ModuleType(part) for part in ("sgl_kernel_npu", "sgl_kernel_npu.utils")}
    cores = ModuleType("sgl_kernel_npu.utils.triton_utils")
    cores.__dict__["get_device_properties"] = lambda: (24, 48)
    sys.modules.update(stubs | {cores.__name__: cores})
    spec = spec_from_file_location(name.replace("/", "_"), folder / f"sgl_kernel_npu/{name}.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def laws(*shape: int) -> torch.Tensor:
    """Probabilities that are multiples of 1/64 and above 0, so that sums are exact in any order."""
    free = 64 - shape[-1]
    drawn = torch.multinomial(torch.ones(shape[-1]), free * shape[0] * shape[1], replacement=True, generator=random)
    counts = torch.ones(shape[0] * shape[1], shape[-1])
    counts.scatter_add_(1, drawn.view(-1, free), torch.ones(counts.shape[0], free))
    return (counts / 64).view(shape)


def chains(folder: Path) -> Case:
    """Chain rejection sampling."""
    module = load(folder, "sample/chain_speculative_sampling")
    bs, steps, vocabulary = 12, 3, 11
    p, q = laws(bs, steps + 1, vocabulary), laws(bs, steps, vocabulary)
    drafts = torch.multinomial(q.view(-1, vocabulary), 1, generator=random).view(bs, steps)
    tokens = torch.cat((torch.zeros(bs, 1, dtype=torch.int64), drafts), 1)
    coins, last = torch.rand(bs, steps + 1, generator=random), torch.rand(bs, generator=random)
    index, count = torch.full((bs, steps + 1), -1, dtype=torch.int32), torch.zeros(bs, dtype=torch.int32)
    predicts = torch.zeros(bs * (steps + 1), dtype=torch.int32)
    rows = torch.arange(bs * (steps + 1)).view(bs, steps + 1)
    module.chain_speculative_sampling_triton(predicts, index, count, tokens, rows, rows, rows, coins, last, p, q)
    bonus = predicts.view(bs, -1)[torch.arange(bs), count.long()]
    return {"drafts": drafts, "p": p, "q": q, "coins": coins, "last": last, "accepted": count, "bonus": bonus}


def trees(folder: Path) -> Case:
    """Links, greedy verification along siblings, and sampling from the target alone."""
    module, sampler = load(folder, "speculative"), load(folder, "sample/tree_speculative_sampling_target_only")
    bs, vocabulary = 8, 5
    parents = torch.tensor([[-1, 0, 1, 2, 5], [-1, 0, 1, 3, 4]]).repeat(bs // 2, 1)
    selected = torch.tensor([[0, 1, 2, 5, 7], [0, 1, 3, 4, 8]]).repeat(bs // 2, 1)
    lens = torch.randint(1, 9, (bs,), generator=random)
    mask = torch.zeros(int((WIDTH * (lens + WIDTH)).sum()), dtype=torch.bool)
    index, following, sibling = (torch.full((bs, WIDTH), -1) for _ in range(3))
    positions, index, following, sibling, _ = module.build_tree_efficient_native(
        parents, selected, lens, mask, index, following, sibling, TOPK, WIDTH, 0, bs
    )
    case: Case = {"parents": parents, "selected": selected, "lens": lens, "positions": positions}
    case |= {"next_token": following, "next_sibling": sibling}
    candidates, target = (torch.randint(0, 2, (bs, WIDTH), generator=random) for _ in range(2))
    accepted, count = torch.full((bs, DEPTH), -1, dtype=torch.int32), torch.zeros(bs, dtype=torch.int32)
    predicts = torch.zeros(bs * WIDTH, dtype=torch.int32)
    module.verify_tree_greedy_native(
        predicts, accepted, count, candidates, index, following, sibling, target, topk=TOPK
    )
    case |= {"candidates": candidates, "target": target, "index": accepted, "count": count, "predict": predicts}
    drafted, p = torch.randint(0, vocabulary, (bs, WIDTH), generator=random), laws(bs, WIDTH, vocabulary)
    drafted[:, 1], drafted[:, 2] = 1, 2  # brothers propose different tokens
    drafted[:, 3:] = torch.tensor([3, 4, 0])
    by_level, last = torch.rand(bs, DEPTH, generator=random), torch.rand(bs, generator=random)
    level = (positions.view(bs, WIDTH) - lens.unsqueeze(1)).clamp(max=DEPTH - 1)
    accepted, count = torch.full((bs, DEPTH), -1, dtype=torch.int32), torch.zeros(bs, dtype=torch.int32)
    predicts = torch.zeros(bs * WIDTH, dtype=torch.int32)
    sampler.tree_speculative_sampling_target_only(
        predicts, accepted, count, drafted, index, following, sibling, by_level.gather(1, level), last, p,
        torch.zeros_like(p),
    )  # fmt: skip
    case |= {"drafted": drafted, "p": p, "coins": by_level, "last": last}
    return case | {"sampled_index": accepted, "sampled_count": count, "sampled": predicts}


def states(folder: Path) -> Case:
    """The state that a verify step keeps."""
    module = load(folder, "mamba/speculative_state_scatter")
    bs, rows, steps = 5, 8, 4
    held, after = torch.randn(1, rows, 3, 5, generator=random), torch.randn(1, bs, steps, 3, 5, generator=random)
    slots, kept = torch.randperm(rows, generator=random)[:bs], torch.tensor([0, 3, -1, 2, 1])
    case: Case = {"states": held[0].clone(), "step_states": after[0], "slots": slots, "kept": kept}
    module.speculative_state_scatter_npu(held, after, slots, torch.arange(bs), kept)
    return case | {"after": held[0]}


def plain(value: Any) -> Any:
    """Tensors as dtype, shape and numbers."""
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return {"dtype": dtype, "shape": list(value.shape), "data": value.flatten().tolist()}
    return {name: plain(part) for name, part in value.items()}


def main() -> None:
    """Record all."""
    folder = Path(sys.argv[1])
    cases = {"chains": chains(folder), "trees": trees(folder), "states": states(folder)}
    Path(sys.argv[2]).write_text(json.dumps(plain(cases)) + "\n")


if __name__ == "__main__":
    main()
