"""Owns the closed vocabularies of layouts as Literals. It does not own their meaning, which is the Rust core's.

The longer ones are unions of Literals, which is what ``mypy.stubtest`` takes them for at run time too.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

__all__ = ["Axis", "Component", "DType", "ItemKind", "Part", "SpeculativeKind"]

Component: TypeAlias = (
    Literal["key", "value"]
    | Literal["latent", "latent_c4", "latent_c128", "rope"]
    | Literal["index_key", "index_scale"]
    | Literal["state"]
)
Part: TypeAlias = Literal["target"] | Literal["draft"]
ItemKind: TypeAlias = Literal["page"] | Literal["request_row"] | Literal["token"]
Axis: TypeAlias = Literal["token"] | Literal["head"] | Literal["dim"]
DType: TypeAlias = (
    Literal["float32", "float16", "bfloat16"]
    | Literal["int8", "uint8", "int32", "int64"]
    | Literal["float8_e4m3fn", "float8_e5m2"]
    | Literal["bool"]
)
SpeculativeKind: TypeAlias = Literal["none"] | Literal["eagle", "mtp"] | Literal["dflash", "dspark"]
