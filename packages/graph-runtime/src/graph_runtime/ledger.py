"""Which updates a captured graph takes, and whether the next replay has one.

It owns the checks that hold on every device: keys, counts, lengths, and *one update, one replay*. It does not touch
a device.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np
import torch

from .device import HostLengths, OpRecord, UpdateValues
from .errors import (
    GraphBroken,
    GraphClosed,
    HostListError,
    KeyNotPassed,
    MissingUpdate,
    TensorValuedKey,
    UncoveredKey,
    UnknownUpdateKey,
    UpdateCountMismatch,
    UpdateLengthMismatch,
    UpdatePending,
)

__all__ = ["UpdateLedger", "check_key", "int_list"]


def int_list(name: str, values: object) -> list[int]:
    """A new list of plain ints.

    Raises:
        HostListError: Something in it is not an int, or is negative.
    """
    if isinstance(values, torch.Tensor):
        if values.device.type != "cpu":
            raise _not_a_list(name, f"a tensor on {values.device}")
        values = values.tolist()
    elif isinstance(values, np.ndarray):
        values = values.tolist()
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise _not_a_list(name, type(values).__name__)
    result: list[int] = []
    for row, value in enumerate(values):
        try:
            number = operator.index(value)
        except TypeError:
            raise _not_a_list(name, f"{type(value).__name__} in row {row}") from None
        if isinstance(value, bool) or number < 0:
            raise HostListError(
                f"host list {name!r}, row {row}",
                expected="a length of 0 or more",
                got=value,
                consequence="A kernel would read before its cache or treat the row as very long.",
                remedy="Clamp local lengths at 0; rows without work have length 0.",
            )
        result.append(number)
    return result


def _not_a_list(name: str, got: str) -> HostListError:
    return HostListError(
        f"host list {name!r}",
        expected="a host sequence of ints",
        got=got,
        consequence="It cannot be bound to a captured op without a copy from the device.",
        remedy="Keep lengths on the host as a list, a numpy array or a CPU tensor.",
    )


def check_key(key: str, index: int, record: OpRecord) -> bool:
    """Whether the record takes the key.

    Raises:
        TensorValuedKey: The op has the key as a device tensor.
        KeyNotPassed: The op knows the key and was captured without it.
    """
    if key in record.tensor_valued:
        raise TensorValuedKey(
            f"update key {key!r} of captured op {index} ({record.name})",
            expected="a host list at capture",
            got="a device tensor",
            consequence="The address is baked in: an update would be ignored and old lengths used.",
            remedy="Pass a list of ints in the forward, or drop the key and rewrite the tensor in place.",
        )
    if key in record.absent:
        raise KeyNotPassed(
            f"update key {key!r} of captured op {index} ({record.name})",
            expected="a host list passed by keyword at capture",
            got="nothing",
            consequence="The device would ignore the update silently and use its default.",
            remedy=f"Pass {key}= in the forward, always as a list.",
        )
    return key in record.updatable


class UpdateLedger:
    """The records of one graph and its state: idle, updated, broken or closed.

    Args:
        records: The updatable ops in capture order.
    """

    def __init__(self, records: Sequence[OpRecord]) -> None:
        self.records = tuple(records)
        self.broken: str | None = None
        self._pending = False
        self._closed = False

    def check(self, values: UpdateValues, constant: Collection[str] = ()) -> list[dict[str, list[int]]]:
        """Compares an update with the records; changes nothing.

        Returns:
            One dict an op, new lists in each.

        Raises:
            UpdateSpecError: A key, the number of dicts or a length does not fit.
            UpdatePending: The last update was not consumed.
        """
        self._check_open("update")
        if self._pending:
            raise UpdatePending(
                "update",
                expected="one update for one replay",
                got="a second update before a replay",
                consequence="The flags of the first would be set twice and a later replay would wait for ever.",
                remedy="Replay first, or recapture the graph.",
            )
        plan = [self._one(index, record, mapping) for index, record, mapping in self._pairs(values)]
        for index, (record, chosen) in enumerate(zip(self.records, plan, strict=True)):
            for key in record.updatable:
                if key not in chosen and key not in constant:
                    raise UncoveredKey(
                        f"captured op {index} ({record.name})",
                        expected=f"a new value for every updatable argument {list(record.updatable)}",
                        got=sorted(chosen),
                        consequence=f"{key} would keep the value of an earlier step or of the capture.",
                        remedy="Update it too, or name it as constant.",
                    )
        return plan

    def armed(self) -> None:
        """Notes that an update took effect."""
        self._pending = bool(self.records)

    def consume(self) -> None:
        """Notes that a replay is about to be enqueued.

        Raises:
            MissingUpdate: There are updatable ops and no update.
        """
        self._check_open("replay")
        if self.records and not self._pending:
            raise MissingUpdate(
                "replay",
                expected=f"an update of {len(self.records)} captured ops since the last replay",
                got="none",
                consequence=f"The graph would wait for ever at {self.records[0].name}, or use old lengths.",
                remedy="Call update() with the lengths of this step first.",
            )
        self._pending = False

    def mark_broken(self, reason: str) -> None:
        """Takes the graph out of use; the first reason stays."""
        if self.broken is None:
            self.broken = reason

    def close(self) -> None:
        """Refuses everything from now on."""
        self._closed = True

    def _check_open(self, what: str) -> None:
        if self._closed:
            raise GraphClosed(
                what,
                expected="an open graph",
                got="a closed one",
                consequence="Its memory has been released.",
                remedy="Capture again.",
            )
        if self.broken is not None:
            raise GraphBroken(
                what,
                expected="a graph whose every update and replay succeeded",
                got=self.broken,
                consequence="Its host arguments or flags are in an unknown state.",
                remedy="Capture it again.",
            )

    def _pairs(self, values: UpdateValues) -> list[tuple[int, OpRecord, Mapping[str, HostLengths]]]:
        if isinstance(values, Mapping):
            for key in values:
                if not any(check_key(key, index, record) for index, record in enumerate(self.records)):
                    raise self._unknown(key)
            return [
                (index, record, {key: values[key] for key in values if key in record.updatable})
                for index, record in enumerate(self.records)
            ]
        if len(values) != len(self.records):
            raise UpdateCountMismatch(
                "update",
                expected=f"{len(self.records)} mappings, one a captured op",
                got=len(values),
                consequence="Lengths of one step or layer would go to another.",
                remedy="Give one mapping an op in capture order, or a single mapping for all.",
            )
        for index, (record, mapping) in enumerate(zip(self.records, values, strict=True)):
            for key in mapping:
                if not check_key(key, index, record):
                    raise self._unknown(key)
        return [
            (index, record, mapping) for index, (record, mapping) in enumerate(zip(self.records, values, strict=True))
        ]

    def _one(self, index: int, record: OpRecord, mapping: Mapping[str, HostLengths]) -> dict[str, list[int]]:
        chosen = {key: int_list(key, value) for key, value in mapping.items()}
        for key, value in chosen.items():
            if len(value) != record.lengths.get(key, len(value)):
                raise UpdateLengthMismatch(
                    f"update key {key!r} of captured op {index} ({record.name})",
                    expected=f"{record.lengths[key]} values, as at capture",
                    got=len(value),
                    consequence="The op would read lengths of rows that it does not have, or miss some.",
                    remedy="Pad host lists to the bucket with 0.",
                )
        return chosen

    def _unknown(self, key: str) -> UnknownUpdateKey:
        known = sorted({name for record in self.records for name in record.updatable})
        return UnknownUpdateKey(
            f"update key {key!r}",
            expected=f"one of {known}" if known else "no key: no updatable op was captured",
            got=key,
            consequence="The update would be ignored and lengths of capture time used.",
            remedy="Use the key of the op version that was captured (FIA v1 and v2 name theirs differently).",
        )
