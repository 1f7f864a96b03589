"""Owns operators for speculative decoding and paged attention: one contract an op, several backends.

It does not own pools, graphs or models. Importing it imports torch and registers `torch.ops.spec_kernels`; it never
imports torch_npu or Triton.
"""

from __future__ import annotations

from spec_kernels import native
from spec_kernels.attention import FiaVersion, paged_attention, paged_attention_update_keys
from spec_kernels.capabilities import Capabilities
from spec_kernels.chain import ChainAccept, accept_chain
from spec_kernels.dispatch import BackendName, BackendStatus, backends, choose, ops
from spec_kernels.draft_extend import DraftExtendBatch, DraftExtendBuffers, fill_draft_extend_buffers
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
from spec_kernels.paged_metadata import (
    PagedAttentionMetadata,
    build_paged_metadata,
    check_kv_lens,
    exact_length_mask,
)

__all__ = [
    "AliasError",
    "BackendError",
    "BackendName",
    "BackendStatus",
    "BucketError",
    "Capabilities",
    "CaptureError",
    "ChainAccept",
    "DeviceError",
    "DraftExtendBatch",
    "DraftExtendBuffers",
    "DtypeError",
    "FiaVersion",
    "IndexWidthError",
    "LengthError",
    "MetadataError",
    "PagedAttentionMetadata",
    "ShapeError",
    "SpecKernelsError",
    "TableCapacityError",
    "TokenCountError",
    "UnknownOp",
    "UnsupportedByOp",
    "accept_chain",
    "backends",
    "build_paged_metadata",
    "check_kv_lens",
    "choose",
    "exact_length_mask",
    "fill_draft_extend_buffers",
    "native",
    "ops",
    "paged_attention",
    "paged_attention_update_keys",
]
__version__ = "0.1.0"
