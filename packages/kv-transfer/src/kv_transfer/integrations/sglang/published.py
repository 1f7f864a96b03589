"""Owns the frame behind SGLang's registration of a decode rank: what its twenty frames leave out.

SGLang's own manager reads the frames that it knows and never looks at this one. Whatever bytes arrive, `decode` returns
a `Published` or raises a `ProtocolError`.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import pydantic
from kv_planner import Component, Part
from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from kv_transfer.errors import MessageTooLarge, ProtocolError, ProtocolVersionError

__all__ = ["MOST_BYTES", "SCHEMA_VERSION", "Published", "decode"]

SCHEMA_VERSION: Final = 1
MOST_BYTES: Final = 4 << 20
"""Longest frame; 4,096 named buffers take a tenth of it."""

_Count = Annotated[int, Field(ge=0, le=2**63 - 1)]
_Text = Annotated[str, StringConstraints(max_length=256)]
_Sizes = Annotated[tuple[_Count, ...], Field(strict=False, max_length=65_536)]
_Name = Annotated[tuple[Component, Part, _Count, _Count], Field(strict=False)]
_Names = Annotated[tuple[_Name, ...], Field(strict=False, max_length=65_536)]


class Published(BaseModel):
    """What a decode rank says of its buffers beside SGLang's registration; lists are parallel to those of `KVArgs`.

    Attributes:
        page_size: Tokens of a page.
        dtype: SGLang's name for the dtype of the cache.
        names: Of the KV buffers; empty: the rank does not know them.
        kv_nbytes: Bytes of each KV buffer.
        aux_item_bytes: Bytes of a row, in each auxiliary buffer.
        aux_nbytes: Bytes of each auxiliary buffer.
        state_types: Kind of each state component.
        state_nbytes: Bytes of each buffer, for each component.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    v: Literal[1] = SCHEMA_VERSION
    page_size: Annotated[int, Field(ge=1, le=2**31 - 1)]
    dtype: _Text = ""
    names: _Names = ()
    kv_nbytes: _Sizes = ()
    aux_item_bytes: _Sizes = ()
    aux_nbytes: _Sizes = ()
    state_types: Annotated[tuple[_Text, ...], Field(strict=False, max_length=256)] = ()
    state_nbytes: Annotated[tuple[_Sizes, ...], Field(strict=False, max_length=256)] = ()

    def encode(self) -> bytes:
        """One JSON object."""
        return self.model_dump_json().encode()


def decode(frame: bytes) -> Published:
    """The words of a peer.

    Raises:
        MessageTooLarge: Over `MOST_BYTES`.
        ProtocolVersionError: Another version of this frame.
        ProtocolError: Not such a frame.
    """
    if len(frame) > MOST_BYTES:
        raise MessageTooLarge(
            f"registration frame of {len(frame)} bytes", local=MOST_BYTES, remote=len(frame),
            consequence="the peer is refused", remedy="register fewer buffers",
        )  # fmt: skip
    try:
        return Published.model_validate_json(frame)
    except (pydantic.ValidationError, RecursionError) as error:
        errors = error.errors() if isinstance(error, pydantic.ValidationError) else []
        if any(found["loc"] == ("v",) for found in errors):
            raise ProtocolVersionError(
                "registration frame of another version", local=SCHEMA_VERSION, remote=str(errors[0]["input"])[:64],
                consequence="the peer is refused", remedy="install the same kv-transfer on both sides",
            ) from error  # fmt: skip
        what = f"{errors[0]['loc']}: {errors[0]['msg']}" if errors else "nested too deeply"
        raise ProtocolError(
            f"registration frame: {what}", consequence="the peer is refused", remedy="see who sends to this port"
        ) from error
