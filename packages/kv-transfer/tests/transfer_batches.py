"""What the scripts that check an engine by itself share: batches, their end, and refusals."""

from __future__ import annotations

import dataclasses
import logging

import numpy as np
import numpy.typing as npt

from kv_transfer import TransferEngine, TransferHandle, TransferState, isolation, wait_batch


@dataclasses.dataclass
class Batch:
    source: npt.NDArray[np.uint64]
    destination: npt.NDArray[np.uint64]
    nbytes: npt.NDArray[np.uint64]


class Warnings(logging.Handler):
    """What is said to a process that counts as one which other machines reach."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        isolation.current_isolation = lambda: isolation.Isolation(False, "interfaces eth9 are up")
        logging.getLogger(isolation.__name__).addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())

    def check(self, engine: str) -> None:
        """One text, however many engines there are."""
        (text,) = self.texts
        assert text.startswith(f"engine {engine} listens on every interface") and "eth9" in text, text


def batch(*blocks: tuple[int, int, int]) -> Batch:
    return Batch(*(np.array(column, np.uint64) for column in zip(*blocks, strict=True)))


def end(engine: TransferEngine, handle: TransferHandle) -> str | None:
    """The error of a batch, or None when it was done; polling is idempotent after the end."""
    status = wait_batch(engine, handle, 60)
    assert status.is_terminal, "the batch did not end"
    assert engine.poll(handle) == status
    return None if status.state is TransferState.DONE else status.error


def refused(kind: type[Exception], text: str, call: object, *arguments: object, **options: object) -> None:
    assert callable(call)
    try:
        call(*arguments, **options)
    except kind as error:
        assert text in str(error), error
    else:
        raise AssertionError(f"{kind.__name__} was expected")
