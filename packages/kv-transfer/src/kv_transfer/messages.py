"""The control messages between a sender and a receiver, and their only encoding: one JSON object a message.

Frozen pydantic models, extra fields forbidden, told apart by `type`. Whatever bytes arrive, `decode` returns a message
or raises a `ProtocolError`. What a message means is decided in the cores, not here.
"""

from __future__ import annotations

import enum
from typing import Annotated, Final, Literal, TypeAlias, TypeVar

import kv_planner
import pydantic
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, TypeAdapter

from kv_transfer.config import LEAST_MESSAGE, Limits
from kv_transfer.errors import MessageTooLarge, ProtocolError, ProtocolVersionError
from kv_transfer.json_words import Metadata, Text

__all__ = [
    "PROTOCOL_VERSION",
    "Abort",
    "Aborted",
    "Accepted",
    "Agreed",
    "Bye",
    "DifferenceRecord",
    "Done",
    "GroupDone",
    "GroupManifest",
    "GroupOffer",
    "GroupSummary",
    "Heartbeat",
    "Hello",
    "Message",
    "Offer",
    "Policy",
    "Ready",
    "Refusal",
    "RefusalCode",
    "Welcome",
    "decode",
    "encode",
]

PROTOCOL_VERSION: Final = 1
SESSION_CHARACTERS: Final = 1 << 20
"""Longest session of an engine: one that describes its registered memory in it grows with the layers."""

_Name = Annotated[str, StringConstraints(min_length=1, max_length=256)]
_Session = Annotated[str, StringConstraints(min_length=1, max_length=SESSION_CHARACTERS)]
_Count = Annotated[int, Field(ge=0, le=2**63 - 1)]
_Generation = Annotated[int, Field(ge=1, le=2**63 - 1)]
_MessageBytes = Annotated[int, Field(ge=LEAST_MESSAGE, le=2**63 - 1)]
_Width = Annotated[int, Field(ge=1, le=2**31 - 1)]
_Process = Annotated[str, StringConstraints(max_length=256)]
_Layers = Annotated[tuple[tuple[Literal["target", "draft"], _Count], ...], Field(strict=False)]
_Aux = Annotated[tuple[tuple[_Name, kv_planner.DType, _Width], ...], Field(strict=False, max_length=1024)]
_Parts = Annotated[tuple[Literal["target", "draft"], ...], Field(strict=False, min_length=1, max_length=2)]
_Group = TypeVar("_Group")
_Groups = Annotated[dict[_Name, _Group], Field(max_length=64)]

Policy: TypeAlias = Literal["fail", "retry", "recompute"]
"""What follows from pages that an engine could not move: the end of the room, another try, or a report of them."""


class RefusalCode(str, enum.Enum):
    """Why a handshake was refused."""

    MALFORMED = "malformed"
    VERSION = "version"
    ENGINE = "engine"
    LAYOUT = "layout"
    UNSUPPORTED = "unsupported"
    RANK_TAKEN = "rank-taken"
    DEPLOYMENT = "deployment"
    UNEXPECTED = "unexpected"


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    v: Literal[1] = PROTOCOL_VERSION


class DifferenceRecord(BaseModel):
    """One difference of two layouts; on the wire `local` is the side that sends the refusal.

    Attributes:
        field: What differs.
        local: Value on this side, as text.
        remote: Value on the other side, as text.
        consequence: What would happen.
        remedy: What to do.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    field: Text
    local: Text
    remote: Text
    consequence: Text
    remedy: Text

    def swapped(self) -> DifferenceRecord:
        """The same difference, seen from the other side."""
        return self.model_copy(update={"local": self.remote, "remote": self.local})


class _Data(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class GroupManifest(_Data):
    """What a rank owns of one group.

    Attributes:
        manifest: A `kv_planner.RankManifest` as JSON.
        window: Tokens before the end of the prompt that are sent; None: all.
    """

    manifest: str
    window: Annotated[int, Field(ge=1, le=2**63 - 1)] | None = None


class GroupSummary(_Data):
    """What a receiver waits for from one rank in one group.

    Attributes:
        layers: Layers with pages: (part, layer id).
        bytes_per_page: Bytes of them for one page, over all layers and components.
        states: Layers of which it waits for a row a request.
        bytes_per_request: Bytes of those rows.
    """

    layers: _Layers = ()
    bytes_per_page: _Count = 0
    states: _Layers = ()
    bytes_per_request: _Count = 0


class GroupOffer(_Data):
    """Pages of one group for a room: page first_page + i of the request belongs into pages[i].

    Where context-parallel ranks share a request, page first_page + i belongs into pages[i // size] of rank i % size, or
    token t behind the first page's first one into rank t % size, as its token t // size.

    Attributes:
        row: Where its states belong; None where the group has none.
    """

    pages: tuple[_Count, ...] = Field(strict=False)
    first_page: _Count = 0
    row: _Count | None = None


class GroupDone(_Data):
    """What a rank sent of one group.

    Attributes:
        pages: Pages of the request from the first offered one on.
        failed: Of them, those whose bytes are undefined: (first, behind the last), counted within the request.
        states_failed: Whether the bytes of the states are.
    """

    pages: _Count
    layers: tuple[tuple[_Name, _Count], ...] = Field(strict=False)
    states: tuple[tuple[_Name, _Count], ...] = Field(default=(), strict=False)
    failed: tuple[tuple[_Count, _Count], ...] = Field(default=(), strict=False)
    states_failed: bool = False


class Hello(_Message):
    """Sender's first word: who it is and what it owns.

    Attributes:
        engine: Name of its engine.
        session: Session of its engine.
        groups: What it owns, by group.
        process: The process that its engine cannot leave; empty when it reaches others.
        parts: Parts of the model that it sends.
        aux: Auxiliary rows of a request: (name, dtype, width).
        message_bytes: Longest message that it takes.
    """

    type: Literal["hello"] = "hello"
    engine: _Name
    session: _Session
    groups: _Groups[GroupManifest]
    process: _Process = ""
    parts: _Parts = ("target", "draft")
    aux: _Aux = ()
    message_bytes: _MessageBytes = Limits().message_bytes


class Welcome(_Message):
    """Receiver's answer to a hello that it agrees with; what it says of itself is as in `Hello`.

    Attributes:
        interleave: How context-parallel ranks of its side share a request.
    """

    type: Literal["welcome"] = "welcome"
    engine: _Name
    session: _Session
    groups: _Groups[GroupManifest]
    incarnation: _Generation
    process: _Process = ""
    parts: _Parts = ("target", "draft")
    aux: _Aux = ()
    message_bytes: _MessageBytes = Limits().message_bytes
    interleave: Literal["page", "token"] = "page"


class Agreed(_Message):
    """Sender agrees with the welcome too; only now does its rank count."""

    type: Literal["agreed"] = "agreed"


class Refusal(_Message):
    """Either side refuses the other; with every difference where the layouts are the reason."""

    type: Literal["refusal"] = "refusal"
    code: RefusalCode = Field(strict=False)
    reason: Text
    differences: tuple[DifferenceRecord, ...] = Field(default=(), strict=False)


class Ready(_Message):
    """All prefill ranks are there and fit together.

    Attributes:
        ranks: How many there are.
        sends: Whether this one has anything to send.
        groups: What the receiver waits for from this one, by group.
    """

    type: Literal["ready"] = "ready"
    ranks: _Count
    sends: bool
    groups: _Groups[GroupSummary]


class Offer(_Message):
    """Receiver's pages of a room.

    Attributes:
        tokens: Of the whole prompt.
        groups: Its pages and rows, by group.
        on_failed_pages: What the sender does about pages that its engine could not move.
    """

    type: Literal["offer"] = "offer"
    room: _Count
    generation: _Generation
    tokens: _Count
    groups: _Groups[GroupOffer]
    on_failed_pages: Policy = "fail"


class Done(_Message):
    """Sender's good end of a room: nothing more is written, and everything was, but for failed pages that it names.

    Attributes:
        nbytes: Bytes of pages and states that arrived.
        groups: What was sent, by group.
        rows: Auxiliary rows in base64; empty on a rank that has none.
    """

    type: Literal["done"] = "done"
    room: _Count
    generation: _Generation
    nbytes: _Count
    blocks: _Count
    groups: _Groups[GroupDone]
    metadata: Metadata
    rows: dict[_Name, str] = {}


class Aborted(_Message):
    """Sender's bad end of a room: nothing more is written, and not everything was."""

    type: Literal["aborted"] = "aborted"
    room: _Count
    generation: _Generation
    reason: Text


class Accepted(_Message):
    """Receiver's good end towards one rank: its `Done` was checked."""

    type: Literal["accepted"] = "accepted"
    room: _Count
    generation: _Generation


class Abort(_Message):
    """Receiver's bad end towards one rank: stop writing, then say `Aborted`."""

    type: Literal["abort"] = "abort"
    room: _Count
    generation: _Generation
    reason: Text


class Heartbeat(_Message):
    """I live."""

    type: Literal["heartbeat"] = "heartbeat"


class Bye(_Message):
    """I take this conversation for ended."""

    type: Literal["bye"] = "bye"
    reason: Text


Message = Annotated[
    Hello | Welcome | Agreed | Refusal | Ready | Offer | Done | Aborted | Accepted | Abort | Heartbeat | Bye,
    Field(discriminator="type"),
]
"""Any control message."""

_ADAPTER: TypeAdapter[Message] = TypeAdapter(Message)


class _Envelope(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)

    v: int


def encode(message: Message, limits: Limits | None = None) -> bytes:
    """The bytes of a message.

    Raises:
        MessageTooLarge: The message is longer than the limit that the other side accepts.
    """
    data = message.model_dump_json().encode()
    limit = (limits or Limits()).message_bytes
    if len(data) > limit:
        raise MessageTooLarge(
            f"message {message.type!r}: {len(data)} bytes, the limit is {limit}",
            local=len(data),
            consequence="the peer would drop it unread",
            remedy="send less metadata, or raise Limits.message_bytes on both sides",
        )
    return data


def decode(data: bytes, limits: Limits | None = None) -> Message:
    """The message in `data`.

    Raises:
        MessageTooLarge: `data` is over the limit; it is not parsed.
        ProtocolVersionError: The message says another protocol version.
        ProtocolError: Anything else that is not a message.
    """
    limit = (limits or Limits()).message_bytes
    if len(data) > limit:
        raise MessageTooLarge(
            f"control message of {len(data)} bytes, the limit is {limit}",
            local=limit,
            remote=len(data),
            consequence="it was not read",
        )
    try:
        return _ADAPTER.validate_json(data)
    except pydantic.ValidationError as error:
        version = _version(data)
        if version is not None and version != PROTOCOL_VERSION:
            raise ProtocolVersionError(
                "control message of another protocol version",
                local=PROTOCOL_VERSION,
                remote=version,
                consequence="nothing was done",
                remedy="install the same kv-transfer minor version on both sides",
            ) from None
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "message"
        raise ProtocolError(f"malformed control message: {where}: {first['msg']}") from None


def _version(data: bytes) -> int | None:
    try:
        return _Envelope.model_validate_json(data).v
    except pydantic.ValidationError:
        return None
