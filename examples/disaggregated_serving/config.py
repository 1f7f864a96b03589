"""What one serving run is made of, and the messages between the front and its workers.

Everything here is plain data that crosses process borders as JSON. KV bytes never do: they go through kv_transfer.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, model_validator

Role = Literal["prefill-0", "prefill-1", "decode"]
LengthRule = Literal["eagle", "dflash"]
ROLES: tuple[Role, ...] = ("prefill-0", "prefill-1", "decode")


class _Data(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class RandomModel(_Data):
    """A random decoder: see `weights.random_weights`.

    Attributes:
        windows: tokens that a query sees on each layer, None for all; empty when no layer has a window. A layer with a
            window has sinks, too.
        draft_layers: multi-token-prediction layers; each has the window of the last layer that has one.
    """

    seed: int = 0
    layers: int = 2
    hidden: int = 64
    ffn: int = 128
    query_heads: int = 4
    kv_heads: int = 2
    key_dim: int = 128
    value_dim: int = 64
    vocabulary: int = 512
    windows: tuple[int | None, ...] = ()
    draft_layers: int = 0


MIMO = RandomModel(
    seed=5, layers=4, hidden=64, ffn=128, query_heads=4, kv_heads=1, key_dim=192, value_dim=128, vocabulary=256,
    windows=(None, 48, 48, None), draft_layers=3,
)  # fmt: skip
"""The shape of MiMo-V2-Flash, small: full and window layers with sinks, K of 192 and V of 128, three draft layers."""


class ServeConfig(_Data):
    """One run.

    Attributes:
        model: None for SmolLM2, else a random model.
        device: "npu" (emulated) or "cpu".
        engine: name of the kv_transfer engine.
        page_size: tokens a page.
        chunk: prompt tokens that prefill computes, and sends, at a time; a multiple of the page size.
        buckets: batch sizes captured as graphs.
        decode_bind: where decode listens for KV; a decode process that is started again takes the place of the old one.
        drafts: most drafts that a step verifies; 0 decodes token by token. Every draft layer of a model drafts one.
        new_tokens: tokens generated for every request.
        prefill_pool / decode_pool: device pool sizes in tokens.
        host_pool: tokens that the host memory of each prefill stage caches.
        peer_lost_after: seconds of silence after which a peer counts as dead.
    """

    model: RandomModel | None = None
    device: Literal["npu", "cpu"] = "npu"
    engine: str = "mooncake"
    page_size: int = 128
    chunk: int = 256
    buckets: tuple[int, ...] = (1, 2, 4, 8)
    decode_bind: str = "tcp://127.0.0.1:0"
    drafts: int = Field(default=4, ge=0)
    new_tokens: int = 40
    prefill_pool: int = 1536
    host_pool: int = 8192
    decode_pool: int = 8192
    peer_lost_after: float = 10.0

    @model_validator(mode="after")
    def _a_draft_a_layer(self) -> ServeConfig:
        layers = self.model.draft_layers if self.model is not None else 0
        if layers and self.drafts != layers:
            raise ValueError(f"drafts={self.drafts}, but the model has {layers} draft layers: give drafts={layers}")
        return self


class Connect(_Data):
    """Front to a worker: where its peers listen. Comes again when the decode process was started again."""

    kind: Literal["connect"] = "connect"
    receiver: str
    next_stage: str | None = None


class Request(_Data):
    """Front to prefill stage 0 and to decode: one request."""

    kind: Literal["request"] = "request"
    room: int
    prompt: tuple[int, ...]
    new_tokens: int
    use_cache: bool = True


class Mode(_Data):
    """Front to decode, between rounds: how the next steps run.

    Attributes:
        drafts: drafts a step; 0 or the number in the run's config.
        length_rule: who adds the verify window to the KV lengths: "eagle" (the metadata) or "dflash" (the scheduler).
        graphs: replay captured graphs; False runs every step eagerly.
        overlap: launch a step before the tokens of the step before it are read.
    """

    kind: Literal["mode"] = "mode"
    drafts: int
    length_rule: LengthRule = "eagle"
    graphs: bool = True
    overlap: bool = False


class Abort(_Data):
    """Front to decode: give a request up, wherever it is."""

    kind: Literal["abort"] = "abort"
    room: int


class Tally(_Data):
    """Front to decode: send the counters of the round, and start them anew."""

    kind: Literal["tally"] = "tally"


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
    """Last prefill stage to front: prompt tokens of a room that were computed, or found in the cache, and sent."""

    kind: Literal["prefilled"] = "prefilled"
    room: int
    computed: int
    hit: int


class Ended(_Data):
    """Decode to front: a request ended without all its tokens, and why."""

    kind: Literal["ended"] = "ended"
    room: int
    reason: str


class Span(_Data):
    """Worker to front: what one lane of the timeline did between two readings of the monotonic clock."""

    kind: Literal["span"] = "span"
    lane: str
    name: str
    begin: float
    end: float


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
    """Decode to front: the answer to Tally.

    Attributes:
        graph_replays: steps replayed from graphs.
        eager_steps: reason to steps that were not.
        steps_by_bucket: bucket (eager: batch size) to steps.
        most_in_flight: largest batch.
        row_steps / row_tokens: live rows over all steps, and the tokens that they committed.
        draft_replays: steps of draft layers replayed from graphs.
    """

    kind: Literal["counters"] = "counters"
    graph_replays: int
    eager_steps: dict[str, int]
    steps_by_bucket: dict[int, int]
    most_in_flight: int
    row_steps: int
    row_tokens: int
    draft_replays: int = 0


class Lost(_Data):
    """Prefill stage to front: decode is gone; the stage drops all requests and waits for Connect."""

    kind: Literal["lost"] = "lost"
    message: str


class Failed(_Data):
    """Worker to front: it cannot go on; `peer_lost` when the reason lies with a peer."""

    kind: Literal["failed"] = "failed"
    message: str
    peer_lost: bool = False


ToWorker = Annotated[Connect | Request | Mode | Abort | Tally | Shutdown, Field(discriminator="kind")]
ToFront = Annotated[
    Ready | Connected | Prefilled | Emitted | Arrived | Ended | Span | Counters | Lost | Failed,
    Field(discriminator="kind"),
]
TO_WORKER: TypeAdapter[Connect | Request | Mode | Abort | Tally | Shutdown] = TypeAdapter(ToWorker)
TO_FRONT: TypeAdapter[Ready | Connected | Prefilled | Emitted | Arrived | Ended | Span | Counters | Lost | Failed] = (
    TypeAdapter(ToFront)
)
