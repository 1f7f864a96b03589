"""Recurrent states of SGLang's own NPU pools over its disaggregation, between equal and unequal numbers of TP ranks.

On an NPU a conv state has its window first, and SGLang cuts it along that axis when TP sizes differ; our
`setup_state_kv_args` names the axis of the channels.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch_npu
from engines_transfer import Cluster, Request, configured, free_port
from kv_transfer.integrations import sglang as ours
from sglang.srt.configs.mamba_utils import (
    KimiLinearCacheParams,
    KimiLinearStateShape,
    Mamba2CacheParams,
    Mamba2StateDType,
    Mamba2StateShape,
)
from sglang.srt.disaggregation.base.conn import KVArgs, KVPoll
from sglang.srt.disaggregation.utils import get_kv_transfer_buf_infos
from sglang.srt.hardware_backend.npu.memory_pool_npu import NPUMHATokenToKVPool
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, MambaPool

PAGE, PAGES, ROWS = 16, 4, 6
LAYERS, WINDOW, FROM, TO = [1, 2], 3, 2, 5
GROUPS = {"gated": [12, 12, 32], "kimi": [12, 12, 12]}  # channels of query, key, value (in Kimi's order) of all ranks
HEADS = {"gated": (4, 8, 6), "kimi": (2, 6, 6)}


def states(model: str, size: int) -> Any:
    dtype = Mamba2StateDType(conv=torch.bfloat16, temporal=torch.float32)
    params: Any
    if model == "kimi":
        shape = KimiLinearStateShape.create(tp_world_size=size, num_heads=2, head_dim=6, conv_kernel_size=WINDOW + 1)
        params = KimiLinearCacheParams(dtype=dtype, layers=LAYERS, shape=shape)
    else:
        shape = Mamba2StateShape.create(
            tp_world_size=size, intermediate_size=32, n_groups=2, num_heads=4, head_dim=8, state_size=6,
            conv_kernel=WINDOW + 1, conv_shard_groups=GROUPS[model],
        )  # fmt: skip
        params = Mamba2CacheParams(dtype=dtype, layers=LAYERS, shape=shape)
    return MambaPool(size=ROWS, spec_state_size=2, mamba_layer_ids=LAYERS, device="npu", cache_params=params)


class Rank:
    """One rank's pools, its `KVArgs` as SGLang's scheduler fills them, and its share of a labelled state."""

    def __init__(self, model: str, rank: int, size: int) -> None:
        self.model, self.tp, self.pp = model, (rank, size), (0, 1)
        self.states = states(model, size)
        self.pool = pool = HybridLinearKVPool(
            size=PAGES * PAGE, dtype=torch.float16, page_size=PAGE, head_num=2 // size, head_dim=16,
            full_attention_layer_ids=[0, 3], device="npu", mamba_pool=self.states,
            full_kv_pool_class=NPUMHATokenToKVPool,
        )  # fmt: skip
        self.row = torch.zeros(4, 16, dtype=torch.uint8)
        args = KVArgs()
        args.engine_rank, args.gpu_id, args.pp_rank, args.page_size = rank, 0, 0, PAGE
        args.kv_cache_dtype_str, args.num_draft_entries = "auto", 0
        args.prefill_start_layer, args.prefill_end_layer = 0, 4
        args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens = get_kv_transfer_buf_infos(pool)
        args.kv_layer_ids = [0, 3, 0, 3]
        args.kv_head_num, args.total_kv_head_num = 2 // size, 2
        args.aux_data_ptrs, args.aux_data_lens, args.aux_item_lens = [self.row.data_ptr()], [self.row.nbytes], [16]
        ours.setup_state_kv_args(args, pool, None, 4)
        self.args = args

    def share(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What this rank holds of a state: its channels of every group, and its heads."""
        (rank, size), groups, heads = self.tp, GROUPS[self.model], HEADS[self.model]
        cuts = list(itertools.accumulate(groups[:-1]))
        conv = torch.arange(WINDOW * sum(groups)).view(WINDOW, -1).remainder(251) + 2 * layer
        blocks = [block.chunk(size, 1)[rank] for block in conv.tensor_split(cuts, 1)]
        temporal = torch.arange(torch.Size(heads).numel()).view(heads) + 7 * layer
        return torch.cat(blocks, 1).bfloat16(), temporal.chunk(size, 0)[rank].float()

    def fill(self) -> None:
        for place, layer in enumerate(LAYERS):
            held = self.states.mamba2_layer_cache(place)
            held.conv[0][FROM], held.temporal[FROM] = (part.to("npu") for part in self.share(layer))
        torch_npu.npu.synchronize()

    def check(self) -> None:
        for place, layer in enumerate(LAYERS):
            held = self.states.mamba2_layer_cache(place)
            for tensor, expected in zip((held.conv[0], held.temporal), self.share(layer), strict=True):
                found = tensor.cpu()
                assert torch.equal(found[TO], expected), (layer, tuple(tensor.shape))
                assert not found[[row for row in range(ROWS + 1) if row != TO]].any()


@pytest.fixture
def clusters() -> Iterator[Any]:
    made: list[Cluster] = []
    port = free_port()
    with pytest.MonkeyPatch.context() as patch, configured(patch, port, "loopback") as arguments:

        def make(prefill: Sequence[Any], decode: Sequence[Any]) -> Cluster:
            made.append(Cluster(arguments, port, prefill, decode, mla=False))
            return made[-1]

        yield make
        for cluster in made:
            cluster.close()


@pytest.mark.parametrize(("prefill", "decode"), [(1, 1), (2, 2), (2, 1), (1, 2)])
@pytest.mark.parametrize("model", ["gated", "kimi"])
def test_states_arrive_in_their_row_and_no_other(clusters: Any, model: str, prefill: int, decode: int) -> None:
    sources = [Rank(model, rank, prefill) for rank in range(prefill)]
    targets = [Rank(model, rank, decode) for rank in range(decode)]
    for side in sources:
        side.fill()
    cluster = clusters(sources, targets)
    request = Request(cluster, 11)
    request.offer([1, 2], states=[[TO]])
    request.send([3, 1], states=[[FROM]])
    senders, receivers = request.end()
    assert {*senders, *receivers} == {KVPoll.Success}, cluster.prefill[0].failure_records
    for side in targets:
        side.check()


def test_the_axis_of_the_channels_is_named() -> None:
    """SGLang names the window, but for Kimi's states."""
    for model, theirs in (("gated", WINDOW), ("kimi", sum(GROUPS["kimi"]))):
        side = Rank(model, 0, 1)
        assert side.states.get_state_dim_per_tensor()[: len(LAYERS)] == [theirs] * len(LAYERS)
        assert side.args.state_dim_per_tensor == [[sum(GROUPS[model])] * 2 + [HEADS[model][0]] * 2]
        assert side.args.state_slice_outer_counts == [[WINDOW] * 2 + [1] * 2]
