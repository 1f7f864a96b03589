"""One side of a race, for the error and for who catches it. It finds no races."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["AccessInfo"]


@dataclass(frozen=True)
class AccessInfo:
    """One side of a race.

    Attributes:
        operator: what touched the memory, for example "aten::add.Tensor" or "aten::add.Tensor (node 0 of graph 3)".
        argument: which of its tensors.
        dtype: of that tensor, or "bytes".
        shape: of that tensor, or of the rows of it that were touched.
        writes: whether it was written.
        device: the stream's.
        stream: number of the stream in this process.
        stream_address: what `torch_npu.npu.Stream.npu_stream` says.
        address: first element of the tensor.
    """

    operator: str
    argument: str
    dtype: str
    shape: tuple[int, ...]
    writes: bool
    device: str
    stream: int
    stream_address: int
    address: int

    def __str__(self) -> str:
        verb = "writes" if self.writes else "reads"
        tensor = f"{self.dtype} {list(self.shape)} at {self.address:#x}"
        return f"{self.operator} {verb} {self.argument} ({tensor}) on stream {self.stream} of {self.device}"
