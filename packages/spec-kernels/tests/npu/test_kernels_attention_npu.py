"""Owns the proof that paged attention over torch_npu equals the plain loop, eagerly and through capture and replay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import spec_kernels as sk
import torch
import torch_npu
from ascend_emulator.kernels.pose import set_pose
from spec_kernels.npu import attention as npu_attention

NPU = "npu:0"
MODEL: dict[str, Any] = {"heads": 9, "kv_heads": 3, "dims": 64, "value_dims": 64, "page_size": 128}
SMALL: dict[str, Any] = {"heads": 4, "kv_heads": 2, "dims": 32, "value_dims": 32, "page_size": 128}
MIXED: dict[str, Any] = {"heads": 2, "kv_heads": 1, "dims": 192, "value_dims": 128, "page_size": 128}

Case = Callable[..., Any]
Check = Callable[..., None]


@pytest.fixture(params=["native", "npu"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_the_device_chooses_its_own_backend() -> None:
    assert sk.choose("paged_attention", NPU) == "npu"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("width", "lengths"), [(1, [140, 0, 128, 1]), (3, [130, 0, 3])])
def test_equals_the_loop(
    attention_case: Case, check_attention: Check, backend: str, dtype: torch.dtype, width: int, lengths: list[int]
) -> None:
    check_attention(attention_case(kv_lens=lengths, width=width, dtype=dtype, **MODEL), NPU, backend=backend)


@pytest.mark.parametrize("kv_len", [6, 129, 140])
def test_chunks_of_a_prompt(attention_case: Case, check_attention: Check, backend: str, kv_len: int) -> None:
    case = attention_case(kv_lens=[kv_len], width=6, dtype=torch.float16, **SMALL)
    check_attention(case, NPU, backend=backend)
    check_attention(case, NPU, backend=backend, causal=False)


@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize(("sizes", "dtype"), [(MIXED, torch.bfloat16), ({**SMALL, "value_dims": 16}, torch.float16)])
def test_values_of_another_width(
    attention_case: Case, check_attention: Check, backend: str, sizes: dict[str, Any], dtype: torch.dtype, width: int
) -> None:
    case = attention_case(kv_lens=[131, 0, width], width=width, dtype=dtype, **sizes)
    check_attention(case, NPU, backend=backend)


@pytest.mark.parametrize("width", [1, 3])
def test_the_first_version_of_the_operator(attention_case: Case, check_attention: Check, width: int) -> None:
    check_attention(attention_case(kv_lens=[131, 0, 7], width=width, dtype=torch.float16, **SMALL), NPU, fia="v1")


def test_small_pages_for_one_query_token(attention_case: Case, check_attention: Check) -> None:
    check_attention(attention_case(kv_lens=[40, 17], width=1, dtype=torch.float16, **{**SMALL, "page_size": 16}), NPU)


def test_what_the_operator_documents_as_refused_is_a_typed_error(attention_case: Case) -> None:
    def call(case: Any, **options: Any) -> None:
        inputs = [tensor.to(NPU) for tensor in (case.query, case.key, case.value)]
        options = {"scale": case.scale, "page_size": case.page_size, **options}
        sk.paged_attention(inputs[0], inputs[1], inputs[2], case.metadata(NPU), **options)

    with pytest.raises(sk.DtypeError, match="float32"):
        call(attention_case(kv_lens=[7], width=1, dtype=torch.float32, **SMALL))
    with pytest.raises(sk.UnsupportedByOp, match="128, 256"):
        call(attention_case(kv_lens=[7], width=2, dtype=torch.float16, **{**SMALL, "page_size": 64}))
    with pytest.raises(sk.UnsupportedByOp, match="multiples of 16"):
        call(attention_case(kv_lens=[7], width=1, dtype=torch.float16, **{**SMALL, "dims": 24}))
    strided = attention_case(kv_lens=[7], width=1, dtype=torch.float16, **SMALL)
    strided.key = strided.key.transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(sk.ShapeError, match="contiguous"):
        call(strided)
    with pytest.raises(sk.DeviceError, match="block_table"):
        case = attention_case(kv_lens=[7], width=1, dtype=torch.float16, **SMALL)
        inputs = [tensor.to(NPU) for tensor in (case.query, case.key, case.value)]
        options = {"scale": case.scale, "page_size": case.page_size}
        sk.paged_attention(inputs[0], inputs[1], inputs[2], case.metadata("cpu"), **options)


def test_a_later_cann_takes_more(attention_case: Case, close: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads of 64 in float16, a window, small pages: TND from CANN 9.1 on, and what the emulator then takes."""
    case = attention_case(
        kv_lens=[70, 33], width=1, dtype=torch.float16, heads=2, kv_heads=2, dims=64, value_dims=64, page_size=16
    )
    query, key, value = (tensor.to(NPU) for tensor in (case.query, case.key, case.value))
    options: dict[str, Any] = {"scale": case.scale, "page_size": 16, "window": 20}
    native = sk.paged_attention(query, key, value, case.metadata(NPU), backend="native", **options)
    monkeypatch.setattr(npu_attention, "detect", lambda: sk.Capabilities(torch_npu="2.12.0", cann="9.1.0"))
    calls: list[str] = []
    operator = torch_npu.npu_fused_infer_attention_score_v2

    def watched(*args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs["input_layout"])
        return operator(*args, **kwargs)

    monkeypatch.setattr(torch_npu, "npu_fused_infer_attention_score_v2", watched)
    set_pose(cann="9.1")
    try:
        found = sk.paged_attention(query, key, value, case.metadata(NPU), **options)
    finally:
        set_pose()
    assert calls == ["TND"]
    close(found, native.cpu().double())


def test_an_empty_batch_launches_nothing() -> None:
    metadata = sk.build_paged_metadata([], [], [], page_size=128, columns=2, device=NPU)
    cache = torch.zeros(3, 128, 2, 32, dtype=torch.float16, device=NPU)
    query = torch.zeros(0, 1, 4, 32, dtype=torch.float16, device=NPU)
    assert sk.paged_attention(query, cache, cache, metadata, scale=1.0, page_size=128).shape == (0, 1, 4, 32)


@pytest.mark.parametrize(("sizes", "dtype"), [(MODEL, torch.float16), (MIXED, torch.bfloat16)])
@pytest.mark.parametrize(("width", "fia"), [(1, "v2"), (1, "v1"), (3, "v2"), (3, "v1")])
def test_capture_update_replay(
    attention_case: Case,
    close: Check,
    sizes: dict[str, Any],
    dtype: torch.dtype,
    width: int,
    fia: sk.FiaVersion,
) -> None:
    """A bucket of three rows with one padded row; lengths and tables change from step to step."""
    case = attention_case(kv_lens=[140, 131, 0], width=width, dtype=dtype, **sizes)
    query, key, value = (tensor.to(NPU) for tensor in (case.query, case.key, case.value))
    table = torch.zeros(3, 4, dtype=torch.int32, device=NPU)
    captured = sk.PagedAttentionMetadata(table, [width] * 3, [0] * 3)

    def step() -> torch.Tensor:
        options: dict[str, Any] = {"scale": case.scale, "page_size": 128, "fia": fia}
        return sk.paged_attention(query, key, value, captured, **options)

    for _ in range(2):
        step()
    torch_npu.npu.synchronize()
    graph = torch_npu.npu.NPUGraph()
    with torch_npu.npu.graph(graph, auto_dispatch_capture=True):
        out = step()
    (update_key,) = sk.paged_attention_update_keys("npu", fia=fia)
    for lengths in ([140, 131, 0], [width, 64, 0], [0, 130, 0], [129, 0, 0]):
        pages = [row if length else [] for row, length in zip(case.pages, lengths, strict=True)]
        queries = [width if length else 0 for length in lengths]
        built = sk.build_paged_metadata(pages, queries, lengths, page_size=128, columns=4)
        sk.check_kv_lens(built.kv_lens, columns=4, page_size=128, q_len=width)
        table.copy_(built.block_table)
        graph.update(cpu_update_input=[{update_key: built.kv_lens}])
        graph.replay()
        torch_npu.npu.synchronize()
        close(out, case.expected(kv_lens=lengths))
        assert not out[2].any()
        eager = sk.PagedAttentionMetadata(table, [width] * 3, built.kv_lens)
        assert torch.equal(out, sk.paged_attention(query, key, value, eager, scale=case.scale, page_size=128, fia=fia))


@pytest.mark.parametrize(("sizes", "dtype"), [(MODEL, torch.float16), (MIXED, torch.bfloat16)])
@pytest.mark.parametrize("width", [1, 3])
def test_host_bounds_and_exact_device_lengths(
    attention_case: Case, close: Check, sizes: dict[str, Any], dtype: torch.dtype, width: int
) -> None:
    """Captured once; each replay brings bounds on the host and exact lengths on the device."""
    case = attention_case(kv_lens=[140, 131, 0], width=width, dtype=dtype, **sizes)
    query, key, value = (tensor.to(NPU) for tensor in (case.query, case.key, case.value))
    table = case.metadata(NPU, columns=4).block_table
    exact = torch.zeros(3, dtype=torch.int64, device=NPU)

    def step() -> torch.Tensor:
        mask = sk.exact_length_mask(exact, q_len=width, columns=4, page_size=128)
        metadata = sk.PagedAttentionMetadata(table, [width] * 3, [0] * 3, mask)
        return sk.paged_attention(query, key, value, metadata, scale=case.scale, page_size=128, causal=False)

    step()
    torch_npu.npu.synchronize()
    graph = torch_npu.npu.NPUGraph()
    with torch_npu.npu.graph(graph, auto_dispatch_capture=True):
        out = step()
    for lengths, bounds in (([140, 131, 0], [145, 136, 0]), ([width, 64, 0], [width + 1, 129, 0])):
        exact.copy_(torch.tensor(lengths))
        graph.update(cpu_update_input=[{"actual_seq_kvlen": bounds}])
        graph.replay()
        torch_npu.npu.synchronize()
        close(out, case.expected(kv_lens=lengths))


def test_a_first_chunk_inside_capture_is_an_error(
    attention_case: Case, monkeypatch: pytest.MonkeyPatch, check_attention: Check
) -> None:
    monkeypatch.setattr(npu_attention, "_masks", {})
    case = attention_case(kv_lens=[7], width=2, dtype=torch.float16, **SMALL)
    query, key, value = (tensor.to(NPU) for tensor in (case.query, case.key, case.value))
    metadata = case.metadata(NPU)
    torch_npu.npu.synchronize()
    with (
        pytest.raises(sk.CaptureError, match="warm-up"),
        torch_npu.npu.graph(torch_npu.npu.NPUGraph(), auto_dispatch_capture=True),
    ):
        sk.paged_attention(query, key, value, metadata, scale=1.0, page_size=128)
    check_attention(case, NPU)
