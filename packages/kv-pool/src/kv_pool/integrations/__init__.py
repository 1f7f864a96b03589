"""Owns what engines ask of a K/V store or pool, in their own words. Importing it imports no engine."""

from __future__ import annotations
