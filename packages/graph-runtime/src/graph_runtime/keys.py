"""The update keys that devices know, and the derivation of an update from what was captured.

It owns which argument of which op version holds which lengths. It does not perform updates.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from .device import OpRecord
from .errors import UncoveredKey, UnknownUpdateKey, UpdateCountMismatch, UpdateSpecError
from .ledger import check_key
from .update import BoundUpdate, UpdateSpec

__all__ = ["DerivedUpdate", "UpdateKey", "UpdateRole", "step_list"]


class UpdateRole(Enum):
    """What an updatable argument counts."""

    QUERY = "query"
    KV = "kv"


class UpdateKey(str, Enum):
    """Arguments that hold lengths, by op version.

    Source: torch_npu's graph handlers; `spec_kernels::paged_attention` for the native names.
    """

    FIA_V1_QUERY = "actual_seq_lengths"
    FIA_V1_KV = "actual_seq_lengths_kv"
    FIA_V2_QUERY = "actual_seq_qlen"
    FIA_V2_KV = "actual_seq_kvlen"
    PAGED_KV = "context_lens"
    NATIVE_QUERY = "q_lens"
    NATIVE_KV = "kv_lens"

    @property
    def role(self) -> UpdateRole:
        """Whether it counts query or KV tokens."""
        query = (UpdateKey.FIA_V1_QUERY, UpdateKey.FIA_V2_QUERY, UpdateKey.NATIVE_QUERY)
        return UpdateRole.QUERY if self in query else UpdateRole.KV


def step_list(name: str, step: int) -> str:
    """Name of a host list that belongs to one draft step, such as ``kv_lens[1]``."""
    return f"{name}[{step}]"


class DerivedUpdate(UpdateSpec):
    """An update whose keys are read from the captured ops, so that no model or op version is named beforehand.

    Args:
        kv: Host list of KV lengths; it must reach every captured op.
        query: Host list of query lengths; None where they follow from the bucket, so that what was captured stays true.
        steps: Draft steps that one graph runs; every step has lists of its own, named by `step_list`.
        ops_per_step: Updatable ops of one step, usually its attention layers. Checked where `steps` is given.

    Raises:
        UpdateSpecError: A name is empty, or a number is below 1.
    """

    def __init__(
        self, kv: str = "kv_lens", *, query: str | None = None, steps: int | None = None, ops_per_step: int = 1
    ) -> None:
        super().__init__()
        if not kv or query == "" or (steps is not None and steps < 1) or ops_per_step < 1:
            raise UpdateSpecError(
                "kv, query, steps, ops_per_step",
                expected="names that are not empty, and numbers of 1 or more",
                got=(kv, query, steps, ops_per_step),
                consequence="No op would get its lengths.",
                remedy="Name the host lists, and count the steps and ops of a graph.",
            )
        self._names = {UpdateRole.KV: kv} if query is None else {UpdateRole.KV: kv, UpdateRole.QUERY: query}
        self._steps = steps
        self._ops_per_step = ops_per_step

    @property
    def host_names(self) -> tuple[str, ...]:
        """See `UpdateSpec.host_names`."""
        names = self._names.values()
        if self._steps is None:
            return tuple(sorted(names))
        return tuple(sorted(step_list(name, step) for name in names for step in range(self._steps)))

    def bind(self, records: Sequence[OpRecord]) -> BoundUpdate:
        """Finds the keys of every record.

        Raises:
            TensorValuedKey: KV lengths were captured as a device tensor.
            KeyNotPassed: An op was captured without its KV lengths.
            UnknownUpdateKey: An updatable argument is not in `UpdateKey`, or no op with updatable lengths was captured.
            UncoveredKey: An op has no KV lengths at all.
            UpdateCountMismatch: Another number of ops than `steps` times `ops_per_step`.
        """
        if not records:
            raise UnknownUpdateKey(
                "update",
                expected="at least one captured op with lengths to update",
                got="none",
                consequence="Every replay would use the lengths of capture time.",
                remedy="Pass lengths as host lists by keyword, and register the op as updatable on a CPU device.",
            )
        if self._steps is not None and len(records) != self._steps * self._ops_per_step:
            raise UpdateCountMismatch(
                "captured ops",
                expected=f"{self._steps} steps of {self._ops_per_step} updatable ops",
                got=len(records),
                consequence="Lengths of one draft step would go to another.",
                remedy="State ops_per_step as captured; every step must run the same ops.",
            )
        constant: set[str] = set()
        plan = [self._one(index, record, constant) for index, record in enumerate(records)]
        return BoundUpdate(tuple(plan), frozenset(constant))

    def _one(self, index: int, record: OpRecord, constant: set[str]) -> dict[str, str]:
        own: dict[str, str] = {}
        for key in record.updatable:
            try:
                role = UpdateKey(key).role
            except ValueError:
                raise UnknownUpdateKey(
                    f"updatable argument {key!r} of captured op {index} ({record.name})",
                    expected=f"one of {[known.value for known in UpdateKey]}",
                    got=key,
                    consequence="It is not known which lengths it holds.",
                    remedy="State the keys with UpdateSpec.",
                ) from None
            name = self._names.get(role)
            if name is None:
                constant.add(key)
            else:
                own[key] = name if self._steps is None else step_list(name, index // self._ops_per_step)
        if not any(UpdateKey(key).role is UpdateRole.KV for key in own):
            for key in (*record.tensor_valued, *record.absent):
                if key in set(UpdateKey) and UpdateKey(key).role is UpdateRole.KV:
                    check_key(key, index, record)
            raise UncoveredKey(
                f"captured op {index} ({record.name})",
                expected="KV lengths among its updatable arguments",
                got=list(record.updatable),
                consequence="It would keep the KV lengths of capture time.",
                remedy="Pass them as a host list by keyword, or state the keys with UpdateSpec.",
            )
        return own

    def __repr__(self) -> str:
        names = {role.value: name for role, name in self._names.items()}
        return f"DerivedUpdate({names}, steps={self._steps}, ops_per_step={self._ops_per_step})"
