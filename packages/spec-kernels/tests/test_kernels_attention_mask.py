"""Owns the proof that a mask says alone what a query token sees, and that exact device lengths hide the slack of host
bounds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import spec_kernels as sk
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from spec_kernels.native.attention import paged_attention as native_op

SMALL: dict[str, Any] = {"heads": 4, "kv_heads": 2, "dims": 8, "value_dims": 6, "page_size": 4}
Case = Callable[..., Any]


def call(case: Any, metadata: sk.PagedAttentionMetadata, **options: Any) -> torch.Tensor:
    options = {"causal": False, "scale": case.scale, "page_size": case.page_size, **options}
    return sk.paged_attention(case.query, case.key, case.value, metadata, **options)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_slack_of_host_bounds_is_hidden(
    attention_case: Case, close: Callable[..., None], host_backend: str, data: st.DataObject
) -> None:
    """The caches hold +-300 past the exact lengths: a key too many would show."""
    width, page_size = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5))
    exact = data.draw(st.lists(st.one_of(st.just(0), st.integers(width, 12)), min_size=1, max_size=4))
    sizes = {**SMALL, "page_size": page_size}
    case = attention_case(kv_lens=exact, width=width, dtype=torch.float64, **sizes)
    columns = max(1, *(len(pages) for pages in case.pages)) + 1
    table = torch.zeros(len(exact), columns, dtype=torch.int32)
    for row, pages in enumerate(case.pages):
        table[row, : len(pages)] = torch.tensor(pages)
    bounds = [data.draw(st.integers(length, columns * page_size)) if length else 0 for length in exact]
    mask = sk.exact_length_mask(torch.tensor(exact), q_len=width, columns=columns, page_size=page_size)
    metadata = sk.PagedAttentionMetadata(table, [width] * len(exact), bounds, mask)
    close(call(case, metadata, backend=host_backend), case.expected())


def test_a_tree_sees_its_own_branch(attention_case: Case, host_backend: str) -> None:
    """Two siblings after one root: each sees the context, the root and itself, so it equals a chain of two."""
    case = attention_case(kv_lens=[9], width=3, dtype=torch.float64, **SMALL)
    metadata = case.metadata("cpu")
    visible = torch.ones(3, 9, dtype=torch.bool)
    visible[0, 7:] = False
    visible[1, 8:] = False
    visible[2, 7] = False
    mask = torch.ones(1, 3, metadata.block_table.shape[1] * 4, dtype=torch.bool)
    mask[0, :, :9] = ~visible
    out = call(case, replace(metadata, mask=mask), backend=host_backend)
    for token in range(3):
        kept = visible[token].nonzero().flatten()
        page = torch.tensor(case.pages[0])
        keys = case.key[page].flatten(0, 1)[kept].repeat_interleave(2, 1)
        values = case.value[page].flatten(0, 1)[kept].repeat_interleave(2, 1)
        scores = torch.einsum("hd,khd->hk", case.query[0, token], keys) * case.scale
        expected = torch.einsum("hk,khd->hd", scores.softmax(-1), values)
        torch.testing.assert_close(out[0, token], expected)


def test_a_query_that_sees_nothing_gives_zeros(attention_case: Case) -> None:
    case = attention_case(kv_lens=[5, 0], width=2, dtype=torch.float32, **SMALL)
    metadata = case.metadata("cpu")
    mask = torch.zeros(2, 2, metadata.block_table.shape[1] * 4, dtype=torch.bool)
    mask[0, 0] = True
    out = call(case, replace(metadata, mask=mask))
    assert not out[0, 0].any() and out[0, 1].any() and not out[1].any()


def test_the_custom_op_is_sound_with_a_mask(attention_case: Case) -> None:
    case = attention_case(kv_lens=[9, 0], width=2, dtype=torch.float32, **SMALL)
    metadata = case.metadata("cpu")
    mask = sk.exact_length_mask(torch.tensor([8, 0]), q_len=2, columns=metadata.block_table.shape[1], page_size=4)
    torch.library.opcheck(
        native_op,
        (case.query, case.key, case.value, metadata.block_table, mask),
        {"q_lens": metadata.q_lens, "kv_lens": metadata.kv_lens, "scale": 0.5, "causal": False},
    )


def test_refusals(attention_case: Case) -> None:
    case = attention_case(kv_lens=[9], width=2, dtype=torch.float32, **SMALL)
    metadata = case.metadata("cpu")
    mask = torch.zeros(1, 2, 12, dtype=torch.bool)
    with pytest.raises(sk.MetadataError, match="causal=False"):
        call(case, replace(metadata, mask=mask), causal=True)
    for wrong in (mask[:, :1], mask[..., :9], mask.int(), mask[0]):
        with pytest.raises(sk.ShapeError, match=r"metadata\.mask"):
            call(case, replace(metadata, mask=wrong))
    with pytest.raises(sk.DtypeError, match="kv_lens"):
        sk.exact_length_mask(torch.tensor([1.0]), q_len=1, columns=1, page_size=4)
    with pytest.raises(sk.MetadataError, match="q_len"):
        sk.exact_length_mask(torch.tensor([1]), q_len=0, columns=1, page_size=4)
