"""The kernels under the real torch_npu: schemas, shapes of its Meta kernels, and results and faults on a device."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ascend_emulator.kernels import REGISTRY, DeviceFault, OpRefused, fia_v1, fia_v2
from hypothesis import given, settings
from hypothesis import strategies as st

FIA: dict[str, Callable[..., Any]] = {fia_v1.OP: fia_v1._call, fia_v2.OP: fia_v2._call}
TRIANGLE = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
PAGES, SIZE, HEADS, DIM = 8, 128, 3, 64
LENS = [300, 129, 0]
TABLE = torch.tensor([[7, 2, 5], [1, 3, 0], [0, 0, 0]], dtype=torch.int32)

LATER = {
    "npu::npu_sparse_flash_attention": {"sinks"},
    "npu::npu_moe_gating_top_k": {"input_ids", "tid2eid"},
    "npu::npu_moe_finalize_routing": {"k"},
    "npu::npu_dynamic_mx_quant": {"max_low_bound"},
}
"""Parameters that ops have from torch_npu 2.13 on: a kernel has them, whichever release is installed."""

NEWER: dict[tuple[str, str], Any] = {
    ("npu::npu_add_rms_norm_dynamic_quant", "output_mask"): None,
    ("npu::npu_grouped_matmul_swiglu_quant_v2", "dequant_dtype"): 6,
}
"""Defaults from torch_npu 2.13 on that are written otherwise than before; a kernel takes both alike."""
IS_NEWER = int(torch.__version__.split(".")[1]) >= 13


def overload(name: str) -> Any:
    qualified, _, variant = name.partition(".")
    space, op = qualified.split("::")
    return getattr(getattr(getattr(torch.ops, space), op), variant or "default")


@pytest.mark.parametrize("name", REGISTRY)
def test_kernels_have_the_parameters_of_the_schema(name: str) -> None:
    parameters = dict(inspect.signature(REGISTRY[name]).parameters)
    if parameters.pop("options", None) is not None:
        op = name.removesuffix(".out").replace("::_", "::").removesuffix("_get_max_workspace")
        parameters = dict(inspect.signature(FIA[op]).parameters) | parameters
    arguments = overload(name)._schema.arguments
    absent = set() if IS_NEWER else LATER.get(name, set())
    assert {argument.name for argument in arguments} == set(parameters) - absent
    for added in LATER.get(name, set()):
        assert parameters[added].default is not inspect.Parameter.empty
    for argument in arguments:
        parameter = parameters[argument.name]
        if argument.has_default_value():
            default = parameter.default
            default = list(default) if isinstance(default, tuple) else default
            if IS_NEWER and (name, argument.name) in NEWER:
                assert argument.default_value == NEWER[name, argument.name] != default, argument.name
            else:
                assert default == argument.default_value, argument.name
        else:
            assert parameter.default is inspect.Parameter.empty, argument.name


LAYOUTS = ["BSH", "BSND", "BNSD", "TND", "NTD", "NSD", "BNSD_BSND", "BSH_BNSD", "BSND_BNSD", "NTD_TND", "TND_NTD"]


@settings(max_examples=150, deadline=None)
@given(
    layout=st.sampled_from([*LAYOUTS, "BSH_NBSD", "BSND_NBSD", "BNSD_NBSD"]),
    version=st.sampled_from([1, 2]),
    sizes=st.tuples(*[st.integers(1, 4)] * 5),
    paged=st.sampled_from([0, 3, 4, 5]),
    lse=st.booleans(),
)
def test_inferred_shapes_are_those_of_the_meta_kernels(
    layout: str, version: int, sizes: tuple[int, ...], paged: int, lse: bool
) -> None:
    b, s, kv_heads, group, width = sizes
    heads, dim, value_dim = kv_heads * group, 16 * width, 8 * (width + 1)
    axes = layout.split("_")[0]

    def shape(n: int, d: int) -> list[int]:
        length = {"B": b, "N": n, "S": s, "D": d, "H": n * d, "T": b * s}
        return [length[axis] for axis in axes]

    def cache(d: int) -> list[int]:
        return {
            0: shape(kv_heads, d),
            3: [9, 16, kv_heads * d],
            4: [9, kv_heads, 16, d],
            5: [9, kv_heads, d // 8, 16, 8],
        }[paged]

    tensors = [
        torch.empty(shape(heads, dim)).half(),
        torch.empty(cache(dim)).half(),
        torch.empty(cache(value_dim)).half(),
    ]
    table = torch.zeros(b, 2, dtype=torch.int32) if paged else None
    names = ("num_query_heads", "return_softmax_lse") if version == 2 else ("num_heads", "softmax_lse_flag")
    options: dict[str, Any] = dict(zip(names, (heads, lse), strict=True))
    options |= {"num_key_value_heads": kv_heads, "input_layout": layout}
    suffix = "_v2" if version == 2 else ""
    op = overload(f"npu::npu_fused_infer_attention_score{suffix}")
    wanted = op(*(t.to("meta") for t in tensors), **options, block_table=None if table is None else table.to("meta"))
    infer = f"npu::_npu_fused_infer_attention_score{suffix}_infer_output"
    got = REGISTRY[infer](tensors[0], tensors[2], **options, block_table=table)
    assert [(t.shape, t.dtype) for t in got] == [(t.shape, t.dtype) for t in wanted]


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("npu::npu_rms_norm", [torch.ones(2, 3, 4, 5), torch.ones(4, 5)]),
        ("npu::npu_add_rms_norm", [torch.ones(2, 3, 4).half(), torch.ones(2, 3, 4).half(), torch.ones(4).half()]),
        ("npu::npu_swiglu", [torch.ones(2, 6, 4).bfloat16(), 1]),
        ("npu::npu_rotary_mul", [torch.ones(2, 3, 4, 8), torch.ones(1, 1, 4, 8), torch.ones(1, 1, 4, 8)]),
        ("npu::npu_scatter_nd_update", [torch.ones(4, 3), torch.zeros(2, 1).long(), torch.ones(2, 3)]),
        ("npu::npu_scatter_nd_update_", [torch.ones(4, 3), torch.zeros(2, 1).long(), torch.ones(2, 3)]),
        ("npu::npu_dtype_cast", [torch.ones(2, 3), 5]),
        ("npu::npu_add_rms_norm_dynamic_quant", [torch.ones(2, 64).half()] * 2 + [torch.ones(64).half()]),
    ],
)
def test_results_have_the_shapes_of_the_meta_kernels(name: str, arguments: list[Any]) -> None:
    meta = [x.to("meta") if isinstance(x, torch.Tensor) else x for x in arguments]
    wanted, got = overload(name)(*meta), REGISTRY[name](*arguments)
    pairs = zip(got, wanted, strict=True) if isinstance(got, tuple) else [(got, wanted)]
    for one, other in pairs:
        assert (one.shape, one.dtype) == (other.shape, other.dtype)


PAIRS = torch.full((1, 1, 2), 127, dtype=torch.uint8)
WORDS = torch.zeros(8, 1, dtype=torch.int32)
HALF, BYTES = torch.ones(2, 8).half(), torch.ones(1, 2, 3, 8, dtype=torch.int8)
FORMS: list[tuple[str, list[Any], dict[str, Any]]] = [
    ("quant_matmul", [WORDS[:3], WORDS, torch.ones(8)], {"output_dtype": 5}),
    ("quant_matmul", [WORDS[:3], WORDS.T, torch.ones(8)], {"output_dtype": 5}),
    ("quant_matmul", [BYTES[0, 0], BYTES[0, 0].T, torch.ones(3).long()], {"output_dtype": 5}),
    (
        "quant_matmul",
        [torch.ones(3, 64).to(torch.float8_e4m3fn), torch.ones(64, 5).to(torch.float8_e4m3fn), PAIRS.expand(1, 5, 2)],
        {"pertoken_scale": PAIRS.expand(3, 1, 2), "output_dtype": 15, "group_sizes": [1, 1, 32]}
        | {"scale_dtype": 293, "pertoken_scale_dtype": 293},
    ),
    ("weight_quant_batchmatmul", [HALF, WORDS, torch.ones(8).half()], {}),
    ("grouped_matmul", [[HALF], [WORDS]], {"antiquant_scale": [torch.ones(8).half()], "group_type": -1}),
    ("dynamic_quant", [HALF], {"dst_type": 16}),
    ("dynamic_block_quant", [torch.ones(2, 3, 200).half()], {}),
    (
        "fused_infer_attention_score",
        [torch.ones(1, 2, 3, 16).half(), *[torch.ones(1, 2, 3, 16, dtype=torch.int8)] * 2],
        dict.fromkeys(("key_antiquant_scale", "value_antiquant_scale"), torch.ones(1).half())
        | {"num_heads": 2, "input_layout": "BNSD"},
    ),
]


@pytest.mark.parametrize(("name", "arguments", "options"), FORMS)
def test_quantised_forms_have_the_shapes_of_the_meta_kernels(
    name: str, arguments: list[Any], options: dict[str, Any]
) -> None:
    def meta(x: Any) -> Any:
        return [meta(item) for item in x] if isinstance(x, list) else x.to("meta") if hasattr(x, "to") else x

    wanted = overload(f"npu::npu_{name}")(*meta(arguments), **{key: meta(x) for key, x in options.items()})
    got = REGISTRY[f"npu::npu_{name}"](*arguments, **options)
    pairs = zip(got, wanted, strict=True) if isinstance(got, (tuple, list)) else [(got, wanted)]
    assert all((one.shape, one.dtype) == (other.shape, other.dtype) for one, other in pairs)


class Problem:
    """Paged attention of the main job's form, on the CPU and on the device."""

    def __init__(self, q: int) -> None:
        self.key, self.value = (torch.randn(2, PAGES, SIZE, HEADS, DIM).half() for _ in range(2))
        self.query = torch.randn(3, q, 9, DIM).half()
        self.options: dict[str, Any] = {
            "num_query_heads": 9,
            "num_key_value_heads": HEADS,
            "softmax_scale": DIM**-0.5,
            "input_layout": "BSND",
            "actual_seq_kvlen": LENS,
            "block_size": SIZE,
            "return_softmax_lse": True,
            "sparse_mode": 3 if q > 1 else 0,
        }
        self.mask = TRIANGLE if q > 1 else None

    def on(self, device: str, layer: int = 1) -> tuple[list[torch.Tensor], dict[str, Any]]:
        key, value = (part.to(device)[layer].flatten(2) for part in (self.key, self.value))
        mask = None if self.mask is None else self.mask.to(device)
        options = self.options | {"block_table": TABLE.to(device), "atten_mask": mask}
        return [self.query.to(device), key, value], options


@pytest.mark.parametrize("q", [1, 5])
def test_attention_on_the_device_is_the_kernel(q: int) -> None:
    op = torch.ops.npu.npu_fused_infer_attention_score_v2
    problem = Problem(q)
    tensors, options = problem.on("cpu")
    wanted = REGISTRY[fia_v2.OP](*tensors, **options)
    tensors, options = problem.on("npu")
    got = op(*tensors, **options)
    assert got[0].device.type == "npu" and not got[0][2].any()
    assert all(torch.equal(one.cpu(), other) for one, other in zip(got, wanted, strict=True))
    names = (
        "query",
        "value",
        "input_layout",
        "block_table",
        "num_query_heads",
        "num_key_value_heads",
        "return_softmax_lse",
    )
    arguments = {"query": tensors[0], "value": tensors[2], **options}
    out = torch.ops.npu._npu_fused_infer_attention_score_v2_infer_output(**{name: arguments[name] for name in names})
    workspace = torch.ops.npu._npu_fused_infer_attention_score_v2_get_max_workspace(*tensors, **options)
    op.out(*tensors, **options, workspace=workspace, out=list(out))
    assert all(torch.equal(one.cpu(), other) for one, other in zip(out, wanted, strict=True))


def test_version_1_on_the_device_is_version_2() -> None:
    problem = Problem(1)
    tensors, options = problem.on("npu")
    options["return_softmax_lse"] = False
    wanted, _ = torch.ops.npu.npu_fused_infer_attention_score_v2(*tensors, **options)
    got, _ = torch.ops.npu.npu_fused_infer_attention_score(
        *tensors,
        num_heads=9,
        num_key_value_heads=HEADS,
        scale=DIM**-0.5,
        input_layout="BSND",
        actual_seq_lengths_kv=LENS,
        block_table=options["block_table"],
        block_size=SIZE,
    )
    assert torch.equal(got.cpu(), wanted.cpu())


def test_a_slot_of_fresh_device_memory_faults_with_its_layer() -> None:
    problem = Problem(1)
    tensors, options = problem.on("npu")
    fresh = torch.empty(4, PAGES, SIZE, HEADS * DIM, dtype=torch.float16, device="npu")
    fresh[2].copy_(tensors[1])
    torch.ops.npu.npu_fused_infer_attention_score_v2(tensors[0], fresh[2], tensors[2], **options)
    with pytest.raises(DeviceFault, match="507015") as caught:
        torch.ops.npu.npu_fused_infer_attention_score_v2(tensors[0], fresh[3], tensors[2], **options)
    assert (caught.value.layer, caught.value.page, caught.value.slot) == (3, 7, 7 * SIZE)


def test_refusals_reach_the_caller() -> None:
    tensors, options = Problem(1).on("npu")
    with pytest.raises(OpRefused, match="query-dtype"):
        torch.ops.npu.npu_fused_infer_attention_score_v2(*(tensor.float() for tensor in tensors), **options)


def test_writes_on_the_device_reach_the_layer_of_the_storage() -> None:
    storage = torch.zeros(2, 2, PAGES, SIZE, HEADS, DIM, dtype=torch.float16, device="npu")
    rows = torch.randn(3, HEADS, DIM).half()
    slots = torch.tensor([SIZE + 1, -1, 5], dtype=torch.int32)
    doubled = (rows * 2).to("npu")
    torch.ops.atb._npu_reshape_and_cache(rows.to("npu"), doubled, storage[0, 1], storage[1, 1], slots.to("npu"))
    flat = storage[0, 0].view(-1, HEADS, DIM)
    torch.ops.npu.npu_scatter_nd_update_(flat, slots[::2].long().view(-1, 1).to("npu"), rows[::2].to("npu"))
    wanted = torch.zeros(2, 2, PAGES * SIZE, HEADS, DIM).half()
    for token, slot in ((0, SIZE + 1), (2, 5)):
        wanted[0, :, slot], wanted[1, 1, slot] = rows[token], rows[token] * 2
    assert torch.equal(storage.cpu().flatten(2, 3), wanted)


def test_states_move_in_stream_order() -> None:
    states = torch.randn(3, 5, 4).half()
    device, host = states.to("npu"), torch.zeros(4, 3, 1, 4).half().pin_memory()
    slots, places = torch.tensor([4, 1]), torch.tensor([0, 3])
    torch.ops.npu.transfer_state_all_layer_direct_lf_pf([device], [host], slots.to("npu"), places, 2)
    device.zero_()
    assert not device.cpu().any()
    assert torch.equal(host[[0, 3], :, 0], states[:, [4, 1]].transpose(0, 1)) and not host[[1, 2]].any()
    torch.ops.npu.transfer_state_per_layer_direct_pf_lf(host, device[1], places, slots, 1, 2)
    wanted = torch.zeros_like(states)
    wanted[1, [4, 1]] = states[1, [4, 1]]
    assert torch.equal(device.cpu(), wanted)
