"""Owns the explanation of two deployments described in files: who sends what to whom, or all reasons why not.

Needs pydantic (extra `explain`). It does not own the comparison or the routes, which are the planner's; addresses are
made up, because a description has none.
"""

from __future__ import annotations

from kv_planner.explain.geometry import Component, Deployment, Model, Parallelism
from kv_planner.explain.report import Difference, Rank, Report, Transfer, explain

__all__ = ["Component", "Deployment", "Difference", "Model", "Parallelism", "Rank", "Report", "Transfer", "explain"]
