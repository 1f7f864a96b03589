"""Owns what engines ask of a transfer, in their own words: one package an engine, each importable without that engine.

An engine's class is imported when one of ours is asked for that derives from it; what pairs with what stays
kv_planner's, and how bytes move stays the `TransferEngine`'s.
"""

from __future__ import annotations
