"""One rank of an expert-parallel step over gloo: `moe_rank.py RANK RANKS STORE CASE OUT`."""

from __future__ import annotations

import sys

import spec_kernels as sk
import torch
import torch.distributed as dist


def main() -> None:
    """Load the case, run this rank's share, save what came out."""
    rank, ranks = int(sys.argv[1]), int(sys.argv[2])
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[3]}", rank=rank, world_size=ranks)
    case = torch.load(sys.argv[4])
    layout = sk.ExpertLayout(case["w13"].shape[0], ranks, rank)
    mine = slice(rank * layout.local, (rank + 1) * layout.local)
    begin, end = case["bounds"][rank], case["bounds"][rank + 1]
    result = sk.expert_parallel_moe(
        case["hidden"][begin:end], case["ids"][begin:end], case["weights"][begin:end], case["w13"][mine],
        case["w2"][mine], layout, group=dist.group.WORLD,
    )  # fmt: skip
    torch.save({"out": result.hidden_states, "counts": result.expert_counts}, sys.argv[5])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
