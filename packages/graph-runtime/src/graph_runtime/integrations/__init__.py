"""Classes for engines, over the engines' own base classes; each submodule needs its engine when it is used."""

from __future__ import annotations

__all__: list[str] = []
