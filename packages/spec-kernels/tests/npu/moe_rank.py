"""One rank of `test_kernels_moe_npu.py`: `moe_rank.py RANK RANKS STORE OUT`. Not a test."""

from __future__ import annotations

import sys
from typing import Any

import ascend_emulator

ascend_emulator.install()

import spec_kernels as sk  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from spec_kernels.native import moe as native_moe  # noqa: E402
from spec_kernels.npu import moe as npu_moe  # noqa: E402

HIDDEN, INNER, EXPERTS, CHOICES, MOST = 1024, 32, 4, 3, 6
TOKENS = (5, 0)


def main() -> None:
    """Dispatch and run the step on both backends; save what came out."""
    rank, ranks = int(sys.argv[1]), int(sys.argv[2])
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[3]}", rank=rank, world_size=ranks)
    group = dist.group.WORLD
    assert group is not None
    noise = torch.Generator().manual_seed(7)
    w13 = (torch.randn(EXPERTS, 2 * INNER, HIDDEN, generator=noise) / 32).bfloat16()
    w2 = (torch.randn(EXPERTS, HIDDEN, INNER, generator=noise) / 6).bfloat16()
    layout = sk.ExpertLayout(EXPERTS, ranks, rank, max_tokens=MOST, comm_name=group.group_name)
    mine = slice(rank * layout.local, (rank + 1) * layout.local)
    found = {}
    for step, tokens in enumerate((TOKENS[rank], 4, 6)):
        hidden = torch.randn(tokens, HIDDEN, generator=noise.manual_seed(step * 9 + rank)).bfloat16()
        ids = torch.stack(
            [torch.randperm(EXPERTS, generator=noise)[:CHOICES] for _ in range(tokens)] or [torch.zeros(CHOICES)]
        )[:tokens].long()
        ids.view(-1)[1::4] = -1  # padded choices
        weights = torch.rand(tokens, CHOICES, generator=noise)
        given: Any = [part.to("npu") for part in (hidden, ids, weights, w13[mine], w2[mine])] + [layout]
        rows, counts, *_ = npu_moe.dispatch(given[0], given[1], layout)
        host = native_moe.dispatch(hidden, ids, layout, group)
        npu = sk.expert_parallel_moe(*given, group=group, backend="npu")
        unasked = sk.expert_parallel_moe(*given, group=group)
        native = sk.expert_parallel_moe(hidden, ids, weights, w13[mine], w2[mine], layout, group=group)
        found[step] = {
            "rows": (rows.cpu()[: int(counts.sum())], host.rows), "counts": (counts.cpu(), host.counts),
            "step_counts": (npu.expert_counts.cpu(), native.expert_counts),
            "out": (npu.hidden_states.cpu(), native.hidden_states),
            "unasked": (unasked.hidden_states.cpu(), npu.hidden_states.cpu()),
        }  # fmt: skip
    torch.save(found, sys.argv[4])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
