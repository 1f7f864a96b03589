"""Where the memory comes from that a captured op writes: from before the capture, or from its ops or Python code.

It owns telling these apart. It does not record ops; `_recorder.py` does.
"""

from __future__ import annotations

import gc

import torch

__all__ = ["Origins", "storage_key"]


def storage_key(tensor: torch.Tensor) -> int:
    """What identifies a storage while it lives."""
    return int(tensor.untyped_storage()._cdata)


class Origins:
    """The storages of one capture.

    `torch.from_numpy`, `torch.frombuffer` and DLPack give tensors over foreign memory, some without passing the
    dispatcher. Such memory does not belong to a torch allocator, so its storage cannot be resized: by that it is known,
    and those that existed before are listed at the start. Storages are kept, so that a key is not used twice.
    """

    def __init__(self) -> None:
        self._before = dict(_foreign_storages())
        self._produced: dict[int, torch.UntypedStorage] = {}

    def produced(self, tensor: torch.Tensor) -> None:
        """Notes that an op of the capture gave this memory."""
        self._produced[storage_key(tensor)] = tensor.untyped_storage()

    def is_produced(self, tensor: torch.Tensor) -> bool:
        """Whether an op of the capture gave this memory."""
        return storage_key(tensor) in self._produced

    @property
    def nbytes(self) -> int:
        """Bytes of all memory that ops of the capture gave; all of it is kept while the capture is."""
        return sum(storage.nbytes() for storage in self._produced.values())

    def is_foreign(self, tensor: torch.Tensor) -> bool:
        """Whether it is foreign memory that the captured code itself wrapped."""
        if tensor.untyped_storage().resizable():
            return False
        key = storage_key(tensor)
        return key not in self._before and key not in self._produced


def _foreign_storages() -> list[tuple[int, torch.UntypedStorage]]:
    """Storages over foreign memory that live tensors hold."""
    objects = gc.get_objects()
    kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, torch.Tensor)}
    found = []
    for tensor in [candidate for candidate in objects if type(candidate) in kinds]:
        try:
            storage = tensor.untyped_storage()
            if not storage.resizable():
                found.append((int(storage._cdata), storage))
        except (RuntimeError, NotImplementedError):  # no storage: sparse, or a wrapper
            continue
    return found
