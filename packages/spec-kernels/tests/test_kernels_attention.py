"""Owns the proof that native paged attention equals the plain loop, and that it refuses what the contract refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import spec_kernels as sk
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from spec_kernels.native import attention as native_attention
from spec_kernels.native.attention import paged_attention as native_op
from torch.utils._python_dispatch import TorchDispatchMode

SMALL: dict[str, Any] = {"heads": 4, "kv_heads": 2, "dims": 8, "value_dims": 6, "page_size": 4}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 3])
def test_equals_the_loop(
    attention_case: Callable[..., Any],
    check_attention: Callable[..., None],
    host_backend: sk.BackendName,
    dtype: torch.dtype,
    width: int,
) -> None:
    case = attention_case(kv_lens=[9, 0, 5, 4], width=width, dtype=dtype, **SMALL)
    check_attention(case, "cpu", backend=host_backend)


def test_grouped_heads_of_a_real_model(
    attention_case: Callable[..., Any], check_attention: Callable[..., None]
) -> None:
    sizes = {"heads": 9, "kv_heads": 3, "dims": 64, "value_dims": 64, "page_size": 16}
    check_attention(attention_case(kv_lens=[35, 17], width=2, dtype=torch.float16, **sizes), "cpu")


@pytest.mark.parametrize("kv_len", [6, 7, 16, 17])
def test_chunks_of_a_prompt(
    attention_case: Callable[..., Any], check_attention: Callable[..., None], kv_len: int
) -> None:
    check_attention(attention_case(kv_lens=[kv_len], width=6, dtype=torch.float32, **SMALL), "cpu")


@pytest.mark.parametrize("elements", [1, 40, 100])
def test_long_queries_go_in_blocks(
    attention_case: Callable[..., Any],
    check_attention: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    elements: int,
) -> None:
    monkeypatch.setattr(native_attention, "_SCORE_ELEMENTS", elements)
    check_attention(attention_case(kv_lens=[13, 7, 0], width=7, dtype=torch.float32, **SMALL), "cpu")


def test_without_causality(attention_case: Callable[..., Any], check_attention: Callable[..., None]) -> None:
    check_attention(attention_case(kv_lens=[9, 5], width=3, dtype=torch.float32, **SMALL), "cpu", causal=False)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_random_sizes(
    attention_case: Callable[..., Any],
    check_attention: Callable[..., None],
    host_backend: sk.BackendName,
    data: st.DataObject,
) -> None:
    width, kv_heads = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    lengths = data.draw(st.lists(st.one_of(st.just(0), st.integers(width, 14)), max_size=4))
    case = attention_case(
        kv_lens=lengths,
        width=width,
        heads=kv_heads * data.draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        dims=data.draw(st.integers(1, 5)),
        value_dims=data.draw(st.integers(1, 5)),
        page_size=data.draw(st.integers(1, 5)),
        dtype=torch.float64,
        seed=data.draw(st.integers(0, 99)),
    )
    check_attention(case, "cpu", causal=data.draw(st.booleans()), backend=host_backend)


def test_padded_rows_are_zero_whatever_page_zero_holds(attention_case: Callable[..., Any]) -> None:
    case = attention_case(kv_lens=[5], width=1, dtype=torch.float32, **SMALL)
    case.key[0], case.value[0] = float("nan"), float("inf")
    metadata = sk.build_paged_metadata(case.pages, [1], [5], page_size=4, rows=3)
    query = torch.cat([case.query, torch.full((2, *case.query.shape[1:]), float("nan"))])
    out = sk.paged_attention(query, case.key, case.value, metadata, scale=1.0, page_size=4)
    assert out[0].isfinite().all() and not out[1:].any()


def test_bytes_beyond_the_length_never_leak(attention_case: Callable[..., Any], close: Callable[..., None]) -> None:
    case = attention_case(kv_lens=[5], width=2, dtype=torch.float32, **SMALL)
    expected = case.expected()
    case.key[case.pages[0][1], 1:], case.value[case.pages[0][1], 1:] = float("nan"), float("nan")
    close(
        sk.paged_attention(case.query, case.key, case.value, case.metadata("cpu"), scale=case.scale, page_size=4),
        expected,
    )


def test_an_empty_batch_is_empty() -> None:
    metadata = sk.build_paged_metadata([], [], [], page_size=4, columns=2)
    out = sk.paged_attention(
        torch.zeros(0, 1, 4, 8), torch.zeros(3, 4, 2, 8), torch.zeros(3, 4, 2, 6), metadata, scale=1.0, page_size=4
    )
    assert out.shape == (0, 1, 4, 6)


def test_the_custom_op_is_sound(attention_case: Callable[..., Any]) -> None:
    case = attention_case(kv_lens=[9, 0], width=2, dtype=torch.float32, **SMALL)
    metadata = case.metadata("cpu")
    torch.library.opcheck(
        native_op,
        (case.query, case.key, case.value, metadata.block_table),
        {"q_lens": metadata.q_lens, "kv_lens": metadata.kv_lens, "scale": 0.5, "causal": True},
    )


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the calls that pass, as a graph device does."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def test_a_recorded_call_is_replayed_with_other_lengths(
    attention_case: Callable[..., Any], close: Callable[..., None]
) -> None:
    case = attention_case(kv_lens=[9, 7], width=1, dtype=torch.float32, **SMALL)
    metadata = case.metadata("cpu")
    with Recorder() as recorder:
        sk.paged_attention(case.query, case.key, case.value, metadata, scale=case.scale, page_size=4)
    (call,) = recorder.calls
    func, args, kwargs = call
    (key,) = sk.paged_attention_update_keys("native")
    assert key in kwargs and kwargs[key] == [9, 7]
    close(func(*args, **{**kwargs, key: [3, 0]}), case.expected(kv_lens=[3, 0]))
    with pytest.raises(sk.TableCapacityError):
        func(*args, **{**kwargs, key: [13, 0]})


def test_update_keys_per_backend() -> None:
    assert sk.paged_attention_update_keys("native") == {"kv_lens": "kv_lens"}
    assert sk.paged_attention_update_keys("triton") == {"kv_lens": "kv_lens"}
    assert sk.paged_attention_update_keys("npu") == {"actual_seq_kvlen": "kv_lens"}
    assert sk.paged_attention_update_keys("npu", fia="v1") == {"actual_seq_lengths_kv": "kv_lens"}
    with pytest.raises(sk.BackendError):
        sk.paged_attention_update_keys("native", fia="v1")
    with pytest.raises(sk.BackendError):
        sk.paged_attention_update_keys("triton", fia="v1")


def _call(**changes: Any) -> torch.Tensor:
    table = torch.tensor([[1, 2], [2, 0]], dtype=torch.int32)
    values: dict[str, Any] = {
        "query": torch.zeros(2, 1, 4, 8),
        "key_cache": torch.zeros(3, 4, 2, 8),
        "value_cache": torch.zeros(3, 4, 2, 6),
        "metadata": sk.PagedAttentionMetadata(table, [1, 1], [5, 2]),
        "scale": 1.0,
        "page_size": 4,
        **changes,
    }
    return sk.paged_attention(**values)


def _metadata(table: torch.Tensor | None = None, q: Any = (1, 1), kv: Any = (5, 2)) -> sk.PagedAttentionMetadata:
    default = torch.tensor([[1, 2], [2, 0]], dtype=torch.int32)
    return sk.PagedAttentionMetadata(default if table is None else table, list(q), list(kv))


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"query": torch.zeros(2, 4, 8)}, sk.ShapeError),
        ({"query": torch.zeros(2, 1, 3, 8)}, sk.ShapeError),
        ({"query": torch.zeros(2, 1, 4, 6)}, sk.ShapeError),
        ({"query": torch.zeros(3, 1, 4, 8)}, sk.ShapeError),
        ({"value_cache": torch.zeros(4, 4, 2, 6)}, sk.ShapeError),
        ({"value_cache": torch.zeros(3, 4, 1, 6)}, sk.ShapeError),
        ({"page_size": 8}, sk.ShapeError),
        ({"query": torch.zeros(2, 1, 4, 8, dtype=torch.float16)}, sk.DtypeError),
        ({"key_cache": torch.zeros(3, 4, 2, 8, dtype=torch.int8)}, sk.DtypeError),
        ({"metadata": _metadata(torch.zeros(2, 2, dtype=torch.int64))}, sk.DtypeError),
        ({"metadata": _metadata(torch.zeros(4, dtype=torch.int32))}, sk.DtypeError),
        ({"value_cache": torch.zeros(3, 4, 2, 6, device="meta")}, sk.DeviceError),
        ({"metadata": _metadata(q=(1, 2))}, sk.LengthError),
        ({"metadata": _metadata(q=(1, 1, 1))}, sk.ShapeError),
        ({"metadata": _metadata(kv=(5, -1))}, sk.LengthError),
        ({"metadata": _metadata(kv=(9, 1))}, sk.TableCapacityError),
        ({"backend": "npu"}, sk.BackendError),
        ({"fia": "v1"}, sk.BackendError),
    ],
)
def test_refusals(changes: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        _call(**changes)


def test_a_live_row_shorter_than_the_query_is_refused() -> None:
    with pytest.raises(sk.LengthError, match="before the request's start"):
        _call(query=torch.zeros(2, 3, 4, 8), metadata=_metadata(q=(3, 3), kv=(5, 2)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("where", ["query", "one key", "all keys", "one value", "scale"])
def test_nan_stays_nan(
    attention_case: Callable[..., Any],
    close: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    host_backend: sk.BackendName,
    dtype: torch.dtype,
    width: int,
    causal: bool,
    where: str,
) -> None:
    """Queries that read a NaN give NaN, whatever their number; requests that read none are as ever."""
    case = attention_case(kv_lens=[9, 5, 0], width=width, dtype=dtype, **SMALL)
    expected = case.expected(causal=causal)
    first, scale = case.pages[0][0], case.scale
    if where == "query":
        case.query[0] = float("nan")
    elif where == "one key":
        case.key[first, 0] = float("nan")
    elif where == "all keys":
        case.key[case.pages[0]] = float("nan")
    elif where == "one value":
        case.value[first, 0] = float("nan")
    else:
        scale = float("nan")
    for elements in (1, 1 << 22) if host_backend == "native" else (1 << 22,):  # the blocks of the native backend
        monkeypatch.setattr(native_attention, "_SCORE_ELEMENTS", elements)
        out = sk.paged_attention(
            case.query, case.key, case.value, case.metadata("cpu"), scale=scale, page_size=4, causal=causal,
            backend=host_backend,
        )  # fmt: skip
        assert out[0].isnan().all() and not out[2].any()
        if where == "scale":
            assert out[1].isnan().all()
        else:
            close(out[1], expected[1])


@pytest.mark.parametrize("elements", [1, 1 << 22])
def test_a_nan_key_reaches_only_the_queries_that_see_it(
    attention_case: Callable[..., Any],
    close: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    host_backend: sk.BackendName,
    elements: int,
) -> None:
    monkeypatch.setattr(native_attention, "_SCORE_ELEMENTS", elements)
    case = attention_case(kv_lens=[9], width=3, dtype=torch.float32, **SMALL)
    expected = case.expected()
    case.key[case.pages[0][1], 3] = float("nan")  # position 7 of 9: hidden from the first of the three queries
    options: dict[str, Any] = {"scale": case.scale, "page_size": 4, "backend": host_backend}
    out = sk.paged_attention(case.query, case.key, case.value, case.metadata("cpu"), **options)
    close(out[:, :1], expected[:, :1])
    assert out[:, 1:].isnan().all()
