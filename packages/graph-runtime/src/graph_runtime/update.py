"""The typed statement of which host list of a step feeds which argument of the captured ops.

It owns the comparison of that statement with what was captured. It does not perform updates.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum

from .device import OpRecord
from .errors import UncoveredKey, UnknownUpdateKey, UpdateCountMismatch, UpdateSpecError
from .ledger import check_key

__all__ = ["BoundUpdate", "UpdateSpec"]


class UpdateSpec:
    """Update key to the name of a host list of the step.

    Args:
        keys: One mapping, used for every captured op that takes its keys; or one mapping an op in capture order, for
            instance one a draft step. Keys are those of the device: an `UpdateKey`, or the schema's argument name for
            an op of your own on a CPU. `DerivedUpdate` finds them itself.
        constant: Keys that were captured as a list and deliberately keep that value, for instance query lengths that
            follow from the bucket.

    Raises:
        UpdateSpecError: A key or a name is empty, or a key is both updated and constant.
    """

    def __init__(
        self, keys: Mapping[str, str] | Sequence[Mapping[str, str]] = (), *, constant: Iterable[str] = ()
    ) -> None:
        self._broadcast = isinstance(keys, Mapping)
        mappings: Sequence[Mapping[str, str]] = [keys] if isinstance(keys, Mapping) else list(keys)
        # An enum's member would not print as its value.
        self._mappings = tuple({_text(key): name for key, name in mapping.items()} for mapping in mappings)
        self._constant = frozenset(_text(key) for key in constant)
        for mapping in self._mappings:
            for key, name in mapping.items():
                if not key or not name or key in self._constant:
                    raise UpdateSpecError(
                        "keys",
                        expected="non-empty keys and host list names, none of them constant",
                        got=(key, name),
                        consequence="It would be unclear whether the argument changes between steps.",
                        remedy="Name every update key and its host list once.",
                    )

    @property
    def constant(self) -> frozenset[str]:
        """Keys that keep the value of capture time."""
        return self._constant

    @property
    def host_names(self) -> tuple[str, ...]:
        """The host lists that a step must bring, sorted."""
        return tuple(sorted({name for mapping in self._mappings for name in mapping.values()}))

    def bind(self, records: Sequence[OpRecord]) -> BoundUpdate:
        """Compares the statement with what was captured.

        Args:
            records: The updatable ops of a graph in capture order.

        Raises:
            UnknownUpdateKey: No captured op takes a key.
            TensorValuedKey: A key was captured as a device tensor.
            KeyNotPassed: A key was not passed at capture.
            UncoveredKey: A captured list is neither updated nor constant.
            UpdateCountMismatch: One mapping an op was stated, for another number of ops.
        """
        if self._broadcast:
            mapping = self._mappings[0]
            for key in mapping:
                if not any([check_key(key, index, record) for index, record in enumerate(records)]):
                    raise self._unknown(key, records)
            plan = [{key: mapping[key] for key in record.updatable if key in mapping} for record in records]
        else:
            if self._mappings and len(self._mappings) != len(records):
                raise UpdateCountMismatch(
                    "keys",
                    expected=f"{len(records)} mappings: so many updatable ops were captured",
                    got=len(self._mappings),
                    consequence="Lengths of one step or layer would go to another.",
                    remedy="State one mapping a captured op, or a single mapping for all of them.",
                )
            plan = [dict(mapping) for mapping in self._mappings] or [{} for _ in records]
            for index, (record, own) in enumerate(zip(records, plan, strict=True)):
                for key in own:
                    if not check_key(key, index, record):
                        raise self._unknown(key, records)
        for index, (record, own) in enumerate(zip(records, plan, strict=True)):
            for key in record.updatable:
                if key not in own and key not in self._constant:
                    raise UncoveredKey(
                        f"captured op {index} ({record.name})",
                        expected=f"a host list for every updatable argument {list(record.updatable)}",
                        got=sorted(own),
                        consequence=f"Every replay would use the {key} of capture time.",
                        remedy=f"Add {key} to the update, or to constant=.",
                    )
        return BoundUpdate(tuple(plan), self._constant)

    def __repr__(self) -> str:
        keys: object = self._mappings[0] if self._broadcast else list(self._mappings)
        return f"UpdateSpec({keys!r}, constant={sorted(self._constant)!r})"

    @staticmethod
    def _unknown(key: str, records: Sequence[OpRecord]) -> UnknownUpdateKey:
        known = sorted({name for record in records for name in record.updatable})
        ops = sorted({record.name for record in records})
        return UnknownUpdateKey(
            f"update key {key!r}",
            expected=f"one of {known}, taken by {ops}" if ops else "no key: no updatable op was captured",
            got=key,
            consequence="The device would ignore it silently and replay with lengths of capture time.",
            remedy="Use the key of the op version that was captured (FIA v1 and v2 name theirs differently).",
        )


def _text(key: str) -> str:
    return str(key.value) if isinstance(key, Enum) else key


class BoundUpdate:
    """A statement that fits the records of one graph.

    Args:
        plan: Per captured op, update key to host list name.
        constant: Keys that keep their value.
    """

    def __init__(self, plan: tuple[dict[str, str], ...], constant: frozenset[str]) -> None:
        self.plan = plan
        self.constant = constant

    def values(self, host: Mapping[str, list[int]]) -> list[dict[str, list[int]]]:
        """The update of one step: one dict a captured op.

        Args:
            host: Host lists of the step, padded to the bucket.
        """
        return [{key: host[name] for key, name in own.items()} for own in self.plan]
