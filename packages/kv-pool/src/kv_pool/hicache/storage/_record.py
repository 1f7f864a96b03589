"""Owns how a stored page lies in a file: a header that names it, its pieces, and a checksum over them.

The checksum is BLAKE2b over two kinds of sums: of each row of 4 KiB, its words times fixed odd weights modulo 2**64,
and of each column, its words exclusive-or. It runs at a good part of the speed of memory and finds every change of one
or two words and every exchange of unlike rows; it is no protection against somebody who forges pages.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from typing import TYPE_CHECKING

import numpy as np

from kv_pool.hicache._weights import odd_weights

if TYPE_CHECKING:
    from kv_pool.hicache.storage.protocols import Pieces

__all__ = ["HEADER_BYTES", "checksum", "pack_header", "unpack_header"]

_MAGIC = b"KVPAGE\x00\x01"
_HEADER = struct.Struct("<8s32sQ8sI4x")  # magic, key, payload bytes, checksum, CRC-32 of what stands before it
HEADER_BYTES = _HEADER.size
_ROW = 512  # words under one sum
_ROW_BYTES = 8 * _ROW


_WEIGHTS = odd_weights(_ROW)


def checksum(pieces: Pieces) -> bytes:
    """Return 8 bytes over all pieces, their order and their lengths."""
    digest = hashlib.blake2b(digest_size=8)
    for piece in pieces:
        count = piece.size // _ROW_BYTES
        rows = piece[: count * _ROW_BYTES].view(np.uint64).reshape(count, _ROW)
        digest.update(piece.size.to_bytes(8, "little"))
        digest.update(np.einsum("ij,j->i", rows, _WEIGHTS).tobytes())
        digest.update(np.bitwise_xor.reduce(rows, axis=0).tobytes())
        digest.update(piece[count * _ROW_BYTES :].tobytes())
    return digest.digest()


def pack_header(key: str, nbytes: int, digest: bytes) -> bytes:
    """Return the header of a page."""
    known = struct.pack("<8s32sQ8s", _MAGIC, bytes.fromhex(key), nbytes, digest)
    return _HEADER.pack(_MAGIC, bytes.fromhex(key), nbytes, digest, zlib.crc32(known))


def unpack_header(header: bytes, key: str, nbytes: int) -> bytes | str:
    """Return the checksum that a header of this key and length names, or in words what is wrong with it."""
    if len(header) != HEADER_BYTES:
        return f"a header of {len(header)} bytes"
    magic, stored, length, digest, crc = _HEADER.unpack(header)
    known = struct.calcsize("<8s32sQ8s")
    if magic != _MAGIC or zlib.crc32(header[:known]) != crc or any(header[known + 4 :]):
        return "a header that is none, or is damaged"
    if stored.hex() != key:
        return f"the page of another key, {stored.hex()}"
    if length != nbytes:
        return f"a page of {length} bytes"
    return bytes(digest)
