"""What JSON has words for: texts that can be sent, and metadata of a request, as pydantic's fields of messages.

A text is made sendable, since a reason has to arrive whatever it quotes; metadata that are not are refused.
"""

from __future__ import annotations

import json
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, JsonValue, StringConstraints

__all__ = ["Metadata", "Text"]


def _sendable(text: object) -> object:
    """Without halves of surrogate pairs, which names of files may bring into the text of an error."""
    return text.encode("utf-8", "replace").decode() if isinstance(text, str) else text


def _finite(metadata: dict[str, JsonValue]) -> dict[str, JsonValue]:
    """Refuses NaN, infinities and halves of surrogate pairs."""
    json.dumps(metadata, allow_nan=False, ensure_ascii=False).encode()
    return metadata


Text = Annotated[str, BeforeValidator(_sendable), StringConstraints(max_length=65_536)]
Metadata = Annotated[dict[str, JsonValue], AfterValidator(_finite)]
