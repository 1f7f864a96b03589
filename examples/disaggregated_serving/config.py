"""What one serving run is made of, and the messages between the front and its workers.

Everything here is plain data that crosses process borders as JSON. KV bytes never do: they go through kv_transfer.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

Role = Literal["prefill-0", "prefill-1", "decode"]
ROLES: tuple[Role, ...] = ("prefill-0", "prefill-1", "decode")


class _Data(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class RandomModel(_Data):
    """A random decoder for tests: see `weights.random_weights`."""

    seed: int = 0
    layers: int = 2
    hidden: int = 64
    ffn: int = 128
    query_heads: int = 4
    kv_heads: int = 2
    key_dim: int = 128
    value_dim: int = 64
    vocabulary: int = 512


class ServeConfig(_Data):
    """One run.

    Attributes:
        model: None for SmolLM2, else a random model.
        device: "npu" (emulated) or "cpu".
        engine: name of the kv_transfer engine.
        page_size: tokens a page.
        chunk: prompt tokens that prefill computes, and sends, at a time; a multiple of the page size.
        buckets: batch sizes captured as graphs.
        new_tokens: tokens generated for every request.
        prefill_pool / decode_pool: pool sizes in tokens.
        peer_lost_after: seconds of silence after which a peer counts as dead.
    """

    model: RandomModel | None = None
    device: Literal["npu", "cpu"] = "npu"
    engine: str = "mooncake"
    page_size: int = 128
    chunk: int = 256
    buckets: tuple[int, ...] = (1, 2, 4)
    new_tokens: int = 40
    prefill_pool: int = 4096
    decode_pool: int = 8192
    peer_lost_after: float = 10.0


class Connect(_Data):
    """Front to a worker: where its peers listen."""

    kind: Literal["connect"] = "connect"
    receiver: str
    next_stage: str | None = None


class Request(_Data):
    """Front to prefill stage 0 and to decode: one request."""

    kind: Literal["request"] = "request"
    room: int
    prompt: tuple[int, ...]
    new_tokens: int


class Shutdown(_Data):
    """Front to a worker: finish and leave."""

    kind: Literal["shutdown"] = "shutdown"


class Ready(_Data):
    """Worker to front: loaded, and listening at `endpoint` (if it listens at all)."""

    kind: Literal["ready"] = "ready"
    endpoint: str | None
    device: str


class Connected(_Data):
    """Worker to front: the handshake with its peers is done (decode: graphs are captured, too)."""

    kind: Literal["connected"] = "connected"


class Prefilled(_Data):
    """Prefill worker to front: so many more prompt tokens of a room are computed and sent."""

    kind: Literal["prefilled"] = "prefilled"
    room: int
    tokens: int


class Emitted(_Data):
    """Decode to front: one new token; `clock` is the monotonic clock of this machine in seconds."""

    kind: Literal["emitted"] = "emitted"
    room: int
    token: int
    clock: float


class Arrived(_Data):
    """Decode to front: the KV of a room is complete."""

    kind: Literal["arrived"] = "arrived"
    room: int
    nbytes: int
    blocks: int
    pages: int


class Counters(_Data):
    """Decode to front, at the end."""

    kind: Literal["counters"] = "counters"
    graph_replays: int
    eager_steps: dict[str, int]
    steps_by_bucket: dict[int, int]
    most_in_flight: int


class Failed(_Data):
    """Worker to front: it cannot go on."""

    kind: Literal["failed"] = "failed"
    message: str


ToWorker = Annotated[Connect | Request | Shutdown, Field(discriminator="kind")]
ToFront = Annotated[Ready | Connected | Prefilled | Emitted | Arrived | Counters | Failed, Field(discriminator="kind")]
TO_WORKER: TypeAdapter[Connect | Request | Shutdown] = TypeAdapter(ToWorker)
TO_FRONT: TypeAdapter[Ready | Connected | Prefilled | Emitted | Arrived | Counters | Failed] = TypeAdapter(ToFront)
