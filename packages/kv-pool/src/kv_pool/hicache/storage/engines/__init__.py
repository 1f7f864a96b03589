"""Owns the stores that stand on a library of their own; each module imports it when a store is made, not before."""

from __future__ import annotations
