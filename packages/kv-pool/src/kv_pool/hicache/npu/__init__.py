"""Owns what HiCache needs of torch_npu beside its movers; importing one of its modules imports torch_npu."""

from __future__ import annotations

__all__: list[str] = []
