"""Owns the movers that call an NPU library; importing one of its modules imports torch_npu. Nothing else does."""

from __future__ import annotations

__all__: list[str] = []
