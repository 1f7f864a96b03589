"""Page hashes against hashlib, in this process and in others."""

from __future__ import annotations

import hashlib
import itertools
import os
import struct
import subprocess
import sys
from typing import Any

import kv_planner as kp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

WORDS = st.integers(0, 2**32 - 1) | st.integers(2**32 - 2, 2**32 + 2) | st.integers(0, 2**63 - 1)
NAMES = st.none() | st.text(max_size=3)


def seed(names: tuple[str | None, str | None]) -> bytes:
    if names == (None, None):
        return b""
    parts = [b"\0" if name is None else b"\1" + struct.pack("<Q", len(name.encode())) + name.encode() for name in names]
    return hashlib.sha256(b"sglang-cache-namespace-v1" + b"".join(parts)).digest()


def chain(tokens: list[int], page_size: int, parent: bytes, partial: bool) -> list[str]:
    """The documented chain, said again."""
    hashes = []
    for start in range(0, len(tokens), page_size):
        page = tokens[start : start + page_size]
        if len(page) < page_size and not partial:
            break
        wide = any(token >= 2**32 for token in page)
        words = b"\xff" + struct.pack(f"<{len(page)}Q", *page) if wide else struct.pack(f"<{len(page)}I", *page)
        parent = hashlib.sha256(parent + words).digest()
        hashes.append(parent.hex())
    return hashes


@given(st.lists(WORDS, max_size=20), st.integers(1, 6), NAMES, NAMES, st.booleans())
def test_hashes_are_the_documented_chain(
    tokens: list[int], page_size: int, extra_key: str | None, salt: str | None, partial: bool
) -> None:
    expected = tuple(chain(tokens, page_size, seed((extra_key, salt)), partial))
    assert kp.page_hashes(tokens, page_size, namespace=(extra_key, salt), partial=partial) == expected
    assert (
        kp.page_hashes(np.array(tokens, np.int64), page_size, namespace=(extra_key, salt), partial=partial) == expected
    )


@given(st.lists(WORDS, min_size=8, max_size=20))
def test_a_prior_hash_continues_the_chain(tokens: list[int]) -> None:
    whole = kp.page_hashes(tokens, 4, namespace="adapter")
    assert kp.page_hashes(tokens[4:], 4, prior=whole[0]) == whole[1:]


def test_ten_tokens_of_page_four() -> None:
    tokens = list(range(10))
    assert len(kp.page_hashes(tokens, 4)) == 2
    assert len(kp.page_hashes(tokens, 4, partial=True)) == 3
    assert kp.page_hashes(np.arange(10, dtype=np.int32), 4) == kp.page_hashes(tokens, 4)
    assert kp.page_hashes([], 4, partial=True) == ()


def test_parents_are_the_blocks_before_whatever_is_stored() -> None:
    """G29: block 1 is stored already; the parent of block 2 is block 1 and not the last one stored."""
    tokens = list(range(16))
    hashes = kp.page_hashes(tokens, 4)
    assert kp.page_hashes(tokens[8:12], 4, prior=hashes[1]) == (hashes[2],)
    assert kp.page_hashes(tokens[8:12], 4, prior=hashes[0]) != (hashes[2],)


def test_absent_and_empty_names_are_different_and_stable() -> None:
    """G09, G11."""
    names: list[Any] = [None, "", ("", ""), (None, ""), "ab", ("a", "b"), ("", "ab"), (None, "ab"), ("ab", "")]
    hashes = [kp.page_hashes([1, 2], 2, namespace=name)[0] for name in names]
    assert all(one != other for one, other in itertools.combinations(hashes, 2))
    assert kp.page_hashes([1, 2], 2, namespace=(None, None)) == kp.page_hashes([1, 2], 2)
    assert kp.page_hashes([1, 2], 2, namespace=("ab", None)) == kp.page_hashes([1, 2], 2, namespace="ab")


def test_another_process_with_another_hash_seed_agrees() -> None:
    code = "import kv_planner as kp; print(*kp.page_hashes(range_, 4, namespace=('a', None)))".replace(
        "range_", "list(range(12))"
    )
    expected = " ".join(kp.page_hashes(list(range(12)), 4, namespace=("a", None)))
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True, env=environment
        )
        assert done.stdout.strip() == expected


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        ({"tokens": [1, -1]}, kp.TokenOutOfRange),
        ({"page_size": 0}, kp.LengthError),
        ({"page_size": 2**40}, kp.LengthError),
        ({"tokens": [[1, 2]]}, kp.ArgumentError),
        ({"prior": "00"}, kp.ArgumentError),
        ({"prior": "zz" * 32}, kp.ArgumentError),
        ({"prior": "é" * 32}, kp.ArgumentError),
        ({"prior": 3}, kp.ArgumentError),
        ({"prior": "00" * 32, "namespace": "a"}, kp.ArgumentError),
        ({"namespace": 3}, kp.ArgumentError),
        ({"namespace": ("a",)}, kp.ArgumentError),
        ({"namespace": ("a", 1)}, kp.ArgumentError),
        ({"namespace": ["a", "b"]}, kp.ArgumentError),
    ],
)
def test_refusals(arguments: dict[str, Any], kind: type[kp.PlanError]) -> None:
    with pytest.raises(kind):
        kp.page_hashes(**{"tokens": [1, 2], "page_size": 2, **arguments})


@given(st.lists(st.integers(0, 2**40), max_size=12), st.integers(1, 5), st.booleans())
def test_digests_are_the_hashes_as_bytes(tokens: list[int], page_size: int, partial: bool) -> None:
    digests = kp.page_digests(np.array(tokens, np.int64), page_size, partial=partial)
    assert digests.dtype == np.uint8 and digests.shape[1] == 32 and not digests.flags.writeable
    assert tuple(row.tobytes().hex() for row in digests) == kp.page_hashes(tokens, page_size, partial=partial)
