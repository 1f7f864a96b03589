"""The tensors of one layer as buffers: which component each is, and where its items lie, in every arrangement.

Reads shapes, strides and addresses; it touches no bytes and imports neither torch nor vLLM.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any, cast

import kv_planner

from kv_transfer.arguments import check_kind
from kv_transfer.integrations.vllm.groups import refuse

__all__ = ["Buffer", "is_indexer", "layer_of", "page_buffers", "state_buffers", "tensors_of"]

_INDEXER = "indexer"


@dataclasses.dataclass(frozen=True)
class Buffer:
    """One component of one layer, or one tensor of its states. Items lie `stride` bytes apart, `nbytes` bytes each."""

    component: kv_planner.Component
    address: int
    blocks: int
    stride: int
    nbytes: int
    tokens: int
    heads: int
    dims: int
    dtype: kv_planner.DType
    head_first: bool
    device: str


def layer_of(name: str) -> int:
    """The global layer id in a layer's name.

    Raises:
        ArgumentError: It is no text.
        UnsupportedLayout: It has none, or several numbers.
    """
    numbers = [int(word) for word in check_kind("layer name", name, str).split(".") if word.isdecimal()]
    if len(numbers) != 1:
        raise refuse(name, "its name should hold one number, the layer's", repr(name))
    return numbers[0]


def is_indexer(name: str) -> bool:
    """Whether a name is that of an indexer's cache, of whose layer attention says when it is computed."""
    return _INDEXER in name


def tensors_of(name: str, value: Any) -> tuple[Any, ...]:
    """What vLLM registered for a layer, as tensors.

    Raises:
        UnsupportedLayout: It is something else.
    """
    own = tuple(value) if isinstance(value, list | tuple) else (value,)
    if not own or not all(hasattr(tensor, "data_ptr") for tensor in own):
        raise refuse(name, "expected tensors", ", ".join(type(tensor).__name__ for tensor in own) or "none")
    return own


def page_buffers(name: str, tensors: Sequence[Any], vllm_config: Any) -> Iterator[Buffer]:
    """The components of one layer's pages.

    Raises:
        UnsupportedLayout: An arrangement that is not moved.
    """
    text = vllm_config.model_config.hf_text_config
    shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
    latent, rope = getattr(text, "kv_lora_rank", None), getattr(text, "qk_rope_head_dim", None)
    if len(tensors) == 1 and tensors[0].dim() == 5:
        (own,) = tensors
        axis = [index for index in (0, 1) if own.shape[index] == 2]
        if len(axis) != 1:
            raise refuse(name, "expected K and V at the first or the second axis", shapes)
        yield _read(name, "key", own.select(axis[0], 0))
        yield _read(name, "value", own.select(axis[0], 1))
    elif len(tensors) == 1 and tensors[0].dim() == 3:
        yield _read(name, "index_key" if _INDEXER in name else "latent", tensors[0].unsqueeze(2))
    elif latent and len(tensors) in (2, 3, 4):
        if (tensors[0].shape[-1], tensors[1].shape[-1]) != (latent, rope):
            raise refuse(name, f"expected latent rows of {latent} and rope rows of {rope} numbers first", shapes)
        kinds: tuple[kv_planner.Component, ...] = ("latent", "rope", "index_key", "index_scale")
        for kind, own in zip(kinds, tensors, strict=False):
            yield _read(name, kind, own)
    elif len(tensors) == 2 and all(tensor.dim() == 4 for tensor in tensors):
        yield _read(name, "key", tensors[0])
        yield _read(name, "value", tensors[1])
    else:
        raise refuse(name, "an arrangement that is not moved", shapes)


def _read(name: str, component: kv_planner.Component, own: Any) -> Buffer:
    """A component from a tensor. Shape: [blocks, tokens, heads, dim], in any order of bytes that keeps blocks whole."""
    blocks, tokens, heads, dims = own.shape
    if 0 in own.shape:
        raise refuse(name, f"{component}: it holds nothing", str(tuple(own.shape)))
    by_block, by_token, by_head, by_dim = own.stride()
    head_first = heads > 1 and by_head > by_token
    inner = (tokens * dims, dims) if head_first else (dims, heads * dims)  # strides of a head and of a token
    strides = ((by_head, inner[0], heads), (by_token, inner[1], tokens), (by_dim, 1, dims))
    if any(stride != wanted for stride, wanted, count in strides if count > 1) or by_block < tokens * heads * dims:
        raise refuse(name, f"{component}: a block's bytes do not lie together", f"strides {tuple(own.stride())}")
    size = own.element_size()
    return Buffer(
        component=component,
        address=own.data_ptr(),
        blocks=blocks,
        stride=by_block * size,
        nbytes=tokens * heads * dims * size,
        tokens=tokens,
        heads=heads,
        dims=dims,
        dtype=_dtype(name, own.dtype),
        head_first=head_first,
        device=str(own.device),
    )


def _dtype(name: str, dtype: object) -> kv_planner.DType:
    text = re.sub(r"^torch\.", "", str(dtype))
    known = ("float32", "float16", "bfloat16", "int8", "uint8", "int32", "int64", "float8_e4m3fn", "float8_e5m2")
    if text not in known:
        raise refuse(name, "a dtype that is not moved", text)
    return cast(kv_planner.DType, text)


def state_buffers(name: str, tensors: Sequence[Any]) -> Iterator[Buffer]:
    """The states of one layer, one buffer a tensor. Shape of each: [blocks, ...].

    What a state's numbers are is the model's; a rank's share of one is moved whole.

    Raises:
        UnsupportedLayout: A state whose bytes do not lie together.
    """
    for number, own in enumerate(tensors):
        where, shape = f"{name}, state {number}", tuple(own.shape)
        if len(shape) < 2 or 0 in shape:
            raise refuse(where, "expected blocks that hold something", shape)
        count = math.prod(shape[1:])
        if not own[0].is_contiguous() or own.stride(0) < count:
            raise refuse(where, "a block's bytes do not lie together", f"strides {tuple(own.stride())}")
        size = own.element_size()
        yield Buffer(
            component="state",
            address=own.data_ptr(),
            blocks=shape[0],
            stride=own.stride(0) * size,
            nbytes=count * size,
            tokens=1,
            heads=1,
            dims=count,
            dtype=_dtype(where, own.dtype),
            head_first=False,
            device=str(own.device),
        )
