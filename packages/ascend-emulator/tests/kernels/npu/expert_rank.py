"""One rank of test_kernels_npu_expert_parallel.py: operators that talk to other ranks, in torch_npu. Not a test."""

from __future__ import annotations

import sys

import ascend_emulator
import torch
import torch.distributed as dist

BF16 = torch.bfloat16
HIDDEN, TOKENS, EACH, EXPERTS = 1024, 3, 2, 4


def shapes(outputs: object) -> list[tuple[torch.Size, torch.dtype]]:
    parts = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)  # type: ignore[call-overload]
    return [(part.shape, part.dtype) for part in parts]


def main(rank: int, ranks: int, rendezvous: str) -> None:
    """Runs the calls and compares with the Meta kernels and with the sums over experts.

    Args:
        rank: this rank.
        ranks: number of ranks.
        rendezvous: path of a file that all ranks share.
    """
    ascend_emulator.install()
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)
    group = dist.group.WORLD
    assert group is not None
    place = (group.group_name, ranks, rank, EXPERTS)
    g = torch.Generator().manual_seed(rank)
    x = torch.randn(TOKENS, HIDDEN, generator=g).to(BF16)
    ids = torch.stack([torch.randperm(EXPERTS, generator=g)[:EACH] for _ in range(TOKENS)]).int()
    weights = torch.rand(TOKENS, EACH, generator=g)
    residual, gamma = torch.ones(TOKENS, 1, HIDDEN, dtype=BF16), torch.ones(HIDDEN, dtype=BF16)

    ops = torch.ops.npu
    sent = ops.npu_moe_distribute_dispatch_v2(x.to("npu"), ids.to("npu"), *place)
    meta = ops.npu_moe_distribute_dispatch_v2(x.to("meta"), ids.to("meta"), *place)
    assert shapes(sent) == shapes(meta), (shapes(sent), shapes(meta))
    counts = sent[3].cpu()
    local = EXPERTS // ranks
    factors = torch.zeros(sent[0].size(0))
    factors[: int(counts.sum())] = torch.arange(1.0, local + 1).add(rank * local).repeat_interleave(counts)
    rows = sent[0] * factors.to("npu")[:, None].to(BF16)
    rows[int(counts.sum()) :] = 0
    back = (rows, ids.to("npu"), sent[2], sent[4], weights.to("npu"))
    out = ops.npu_moe_distribute_combine_v2(*back, *place)
    wanted = ((ids + 1) * weights).sum(1, keepdim=True) * x.float()
    assert torch.allclose(out.cpu().float(), wanted, rtol=0.02, atol=0.05)
    normed = ops.npu_moe_distribute_combine_add_rms_norm(*back, residual.to("npu"), gamma.to("npu"), *place)
    assert torch.equal(normed[2].cpu(), out.cpu()[:, None] + 1)
    for name, got, extra in (("v2", out, ()), ("add_rms_norm", normed, (residual.to("meta"), gamma.to("meta")))):
        op = getattr(ops, f"npu_moe_distribute_combine_{name}")
        assert shapes(op(*(part.to("meta") for part in back), *extra, *place)) == shapes(got)
    weight = torch.randn(HIDDEN, 4, generator=torch.Generator().manual_seed(9)).to(BF16)
    both = torch.zeros(2, 2 * ranks, HIDDEN, dtype=BF16)
    both[rank] = torch.randn(2 * ranks, HIDDEN, generator=g).to(BF16)
    dist.all_reduce(both)
    mine, total = both[rank].contiguous(), (both.float() @ weight.float()).sum(0)
    name = group.group_name
    for op, numbers, want in (
        (ops.npu_mm_all_reduce_base, [], total),
        (ops.npu_mm_reduce_scatter_base, [ranks], total[2 * rank : 2 * rank + 2]),
    ):
        summed = op(mine.to("npu"), weight.to("npu"), name, *numbers)
        assert shapes(summed) == shapes(op(mine.to("meta"), weight.to("meta"), name, *numbers))
        assert torch.allclose(summed.cpu().float(), want, rtol=0.02, atol=0.6)
    zeros, ones = torch.zeros(2 * ranks, 4, dtype=BF16).to("npu"), torch.ones(4, dtype=BF16).to("npu")
    library = torch.ops._C_ascend
    _, kept = library.matmul_allreduce_add_rmsnorm(
        mine.to("npu"), weight.to("npu"), zeros, ones, name, ranks, rank, 1e-6, False, True
    )
    assert torch.allclose(kept.cpu().float(), total, rtol=0.02, atol=0.6)
    first, second = torch.ones(local, HIDDEN, 4, dtype=BF16), torch.ones(local, 2, HIDDEN, dtype=BF16)
    sums, counts = torch.full_like(x, 9).to("npu"), torch.zeros(local, dtype=torch.int32).to("npu")
    library.dispatch_ffn_combine(
        x.to("npu"), [first.to("npu")], [second.to("npu")], ids.to("npu"), [], [], [], [], weights.to("npu"), name, 64,
        sums, counts,
    )  # fmt: skip
    row = x.float().sum(1, keepdim=True)
    wanted = weights.sum(1, keepdim=True) * 2 * torch.nn.functional.silu(row) * row
    assert torch.allclose(sums.cpu().float(), wanted.expand_as(x), rtol=0.05, atol=0.05)
    assert shapes((sums, counts)) == shapes((x, torch.zeros(local, dtype=torch.int32)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
