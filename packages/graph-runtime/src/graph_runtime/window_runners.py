"""Runners whose requests bring a window of tokens: target-verify, and draft-extend of one step.

They own who counts the window into the KV lengths: only they do, once. They do not accept or sample.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from kv_planner import SpeculativeKind, kv_lengths

from .device import HostLengths
from .errors import BucketError
from .keys import DerivedUpdate
from .ledger import int_list
from .runner import DecodeRunner

__all__ = ["DraftExtendRunner", "TargetVerifyRunner"]


class TargetVerifyRunner(DecodeRunner):
    """Verifies a window of drafts for every request.

    A step brings one list `kv`: prefix lengths as the speculative kind publishes them. EAGLE and MTP publish them
    without the window, DFlash and DSpark with their block; `kv_planner.kv_lengths` adds it where it is missing.

    Args:
        window: Tokens a request.
        kind: Who has counted the window.
        kv: The host list.
        token_fields: Fields with a row a token; all others have one a request.
        **options: As for `DecodeRunner`. Left out, the update is a `DerivedUpdate` of `kv`, and outputs have a row a
            token.

    Raises:
        BucketError: The window is below 1.
    """

    def __init__(
        self,
        *,
        window: int,
        kind: SpeculativeKind,
        kv: str = "kv_lens",
        token_fields: Collection[str] = (),
        **options: Any,
    ) -> None:
        if window < 1:
            raise BucketError(
                "window",
                expected="1 token or more",
                got=window,
                consequence="A request would have no row.",
                remedy="Give the tokens that a step takes for a request, the last known one included.",
            )
        rows = dict.fromkeys(token_fields, window)
        options["rows_per_request"] = {**rows, **(options.get("rows_per_request") or {})}
        options.setdefault("update", DerivedUpdate(kv))
        options.setdefault("output_rows_per_request", window)
        super().__init__(**options)
        self._window = window
        self._kind: SpeculativeKind = kind
        self._kv = kv

    @property
    def window(self) -> int:
        """Tokens a request."""
        return self._window

    def _host_lists(self, host_lists: Mapping[str, HostLengths]) -> Mapping[str, HostLengths]:
        if self._kv not in host_lists:
            return host_lists
        given = np.array(int_list(self._kv, host_lists[self._kv]), dtype=np.int64)
        return {**host_lists, self._kv: kv_lengths(self._kind, given, window=self._window)}


class DraftExtendRunner(TargetVerifyRunner):
    """Extends a draft layer's KV by a window; KV lengths include it already and stand as they are.

    Args:
        window: Tokens a request, widened front included.
        **options: As for `TargetVerifyRunner` without `kind`.
    """

    def __init__(self, *, window: int, **options: Any) -> None:
        super().__init__(window=window, kind="none", **options)
