"""The draft decode runner: several draft steps in one graph, each with lengths of its own.

It owns the lengths of each step. The forward runs the steps; device lengths must be a tensor a step, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .device import HostLengths
from .keys import DerivedUpdate, step_list
from .ledger import int_list
from .runner import DecodeRunner
from .update import UpdateSpec

__all__ = ["DraftDecodeRunner"]


class DraftDecodeRunner(DecodeRunner):
    """Runs `steps` draft steps in one graph.

    A run brings one list `kv` of committed lengths; step k of the forward finds ``kv + k + 1`` in
    ``step.host[step_list(kv, k)]``, and the update has one mapping an op, counted against the capture.

    Args:
        steps: Draft steps in the graph (an engine that drafts the first token elsewhere has one fewer).
        ops_per_step: Updatable ops of a step; 0 for a draft whose ops all take device lengths, such as sparse latent
            attention: a run then brings no list, and a captured op that wants one is refused.
        kv: The host list.
        longest: Tokens that a block table can address. A request at its end gets this length in steps beyond it, whose
            drafts mean nothing; the forward must write them to the padding slot.
        **options: As for `DecodeRunner`, without `update`.
    """

    def __init__(
        self, *, steps: int, ops_per_step: int = 1, kv: str = "kv_lens", longest: int | None = None, **options: Any
    ) -> None:
        derived = DerivedUpdate(kv, steps=steps, ops_per_step=ops_per_step) if ops_per_step else UpdateSpec()
        super().__init__(update=derived, **options)
        self._steps = steps
        self._kv = kv
        self._longest = longest

    @property
    def steps(self) -> int:
        """Draft steps of a run."""
        return self._steps

    def _host_lists(self, host_lists: Mapping[str, HostLengths]) -> Mapping[str, HostLengths]:
        if self._kv not in host_lists:
            return host_lists
        lists = dict(host_lists)
        lengths = int_list(self._kv, lists.pop(self._kv))
        for step in range(self._steps):
            grown = [length + step + 1 for length in lengths]
            if self._longest is not None:
                grown = [min(length, self._longest) for length in grown]
            lists[step_list(self._kv, step)] = grown
        return lists
