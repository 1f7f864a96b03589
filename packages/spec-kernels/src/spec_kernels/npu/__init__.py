"""Owns the implementations that call torch_npu; importing one of its modules imports torch_npu. Nothing else does."""

from __future__ import annotations

__all__: list[str] = []
