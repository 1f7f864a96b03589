"""Owns operators for speculative decoding and paged attention: one contract an op, several backends.

It does not own pools, graphs or models. Importing it imports torch and registers `torch.ops.spec_kernels`; it never
imports torch_npu or Triton.
"""

from __future__ import annotations

from spec_kernels import native
from spec_kernels.accepted import SlotMoves, accepted_moves, compact_accepted_locs, move_kv
from spec_kernels.attention import FiaVersion, paged_attention, paged_attention_update_keys, ragged_paged_attention
from spec_kernels.attention_groups import AttentionStorage, fill_block_table
from spec_kernels.cache_locs import (
    LocsAndPositions,
    compact_window_rows,
    draft_cache_locs,
    extend_cache_locs,
    front_cache_locs,
    translate_locs,
    uniform_cache_locs,
)
from spec_kernels.capabilities import Capabilities
from spec_kernels.chain import ChainAccept, accept_chain
from spec_kernels.dflash import DFLASH, DSPARK, BlockAccept, BlockMethod, DraftBlock, accept_block, prepare_block
from spec_kernels.dispatch import BackendName, BackendStatus, BackendTable, backends, choose, ops
from spec_kernels.draft_extend import DraftExtendBatch, DraftExtendBuffers, fill_draft_extend_buffers
from spec_kernels.draft_extend_plan import ArenaField, ArenaLayout, DraftExtendPlan, draft_extend_fields
from spec_kernels.errors import (
    AliasError,
    BackendError,
    BucketError,
    CaptureError,
    DeviceError,
    DtypeError,
    IndexWidthError,
    LengthError,
    MetadataError,
    ShapeError,
    SpecKernelsError,
    TableCapacityError,
    TokenCountError,
    UnknownOp,
    UnsupportedByOp,
)
from spec_kernels.exact_mask import exact_length_mask
from spec_kernels.kv_writes import write_kv
from spec_kernels.moe import ExpertLayout, MoeResult, expert_parallel_moe, fused_moe_reason
from spec_kernels.paged_metadata import (
    PagedAttentionMetadata,
    build_paged_metadata,
    check_kv_lens,
    draft_step_metadata,
    lengths_from_ends,
)
from spec_kernels.rolling import causal_conv1d_update, keep_states
from spec_kernels.sampling import ChainSample, sample_chain, sample_tree
from spec_kernels.softmax import wide_row_softmax
from spec_kernels.steps import (
    DraftExtendInputs,
    DraftExtendLayout,
    VerifyCommit,
    bonus_tokens,
    draft_extend_inputs,
    draft_extend_layout,
    verify_commit_outputs,
)
from spec_kernels.trees import (
    TreeAccept,
    TreeLayout,
    build_chain_tree,
    build_tree,
    full_tree_mask,
    tree_attention_mask,
    verify_tree_greedy,
)
from spec_kernels.widened import (
    BoundaryStash,
    WidenedInputs,
    append_to_stash,
    rotate_input_ids,
    widened_inputs,
    widened_locs,
)

__all__ = [
    "DFLASH",
    "DSPARK",
    "AliasError",
    "ArenaField",
    "ArenaLayout",
    "AttentionStorage",
    "BackendError",
    "BackendName",
    "BackendStatus",
    "BackendTable",
    "BlockAccept",
    "BlockMethod",
    "BoundaryStash",
    "BucketError",
    "Capabilities",
    "CaptureError",
    "ChainAccept",
    "ChainSample",
    "DeviceError",
    "DraftBlock",
    "DraftExtendBatch",
    "DraftExtendBuffers",
    "DraftExtendInputs",
    "DraftExtendLayout",
    "DraftExtendPlan",
    "DtypeError",
    "ExpertLayout",
    "FiaVersion",
    "IndexWidthError",
    "LengthError",
    "LocsAndPositions",
    "MetadataError",
    "MoeResult",
    "PagedAttentionMetadata",
    "ShapeError",
    "SlotMoves",
    "SpecKernelsError",
    "TableCapacityError",
    "TokenCountError",
    "TreeAccept",
    "TreeLayout",
    "UnknownOp",
    "UnsupportedByOp",
    "VerifyCommit",
    "WidenedInputs",
    "accept_block",
    "accept_chain",
    "accepted_moves",
    "append_to_stash",
    "backends",
    "bonus_tokens",
    "build_chain_tree",
    "build_paged_metadata",
    "build_tree",
    "causal_conv1d_update",
    "check_kv_lens",
    "choose",
    "compact_accepted_locs",
    "compact_window_rows",
    "draft_cache_locs",
    "draft_extend_fields",
    "draft_extend_inputs",
    "draft_extend_layout",
    "draft_step_metadata",
    "exact_length_mask",
    "expert_parallel_moe",
    "extend_cache_locs",
    "fill_block_table",
    "fill_draft_extend_buffers",
    "front_cache_locs",
    "full_tree_mask",
    "fused_moe_reason",
    "keep_states",
    "lengths_from_ends",
    "move_kv",
    "native",
    "ops",
    "paged_attention",
    "paged_attention_update_keys",
    "prepare_block",
    "ragged_paged_attention",
    "rotate_input_ids",
    "sample_chain",
    "sample_tree",
    "translate_locs",
    "tree_attention_mask",
    "uniform_cache_locs",
    "verify_commit_outputs",
    "verify_tree_greedy",
    "wide_row_softmax",
    "widened_inputs",
    "widened_locs",
    "write_kv",
]
__version__ = "0.1.0"
