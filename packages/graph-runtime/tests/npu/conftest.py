"""The emulated NPU, installed before anything imports torch_npu, and a small decoder that runs on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import ascend_emulator
import numpy as np
import pytest
import torch
from graph_runtime import Buckets, DecodeRunner, StaticBuffers, StepInputs, UpdateSpec, get_device
from kv_planner import RowField, RowLayout

ascend_emulator.install(devices=2)

import torch_npu  # noqa: E402

HEADS, KV_HEADS, DIM, PAGE, PAGES, LAYERS = 2, 1, 64, 128, 13, 2
WIDTH = HEADS * DIM


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Every test ends with idle streams: what one left running would race with the next one's tensors."""
    yield
    torch_npu.npu.synchronize()


class Decoder:
    """Two layers; each writes this step's K and V into its cache and attends over the request's pages."""

    def __init__(self, device: str = "npu:0", seed: int = 5) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.device = device
        self.plain_weights = [
            [torch.randn(WIDTH, n, generator=generator) * 0.1 for n in (WIDTH, KV_HEADS * DIM, KV_HEADS * DIM, WIDTH)]
            for _ in range(LAYERS)
        ]
        self.weights = [[weight.to(device) for weight in layer] for layer in self.plain_weights]
        self.keys = [
            torch.zeros(PAGES, PAGE, KV_HEADS * DIM, dtype=torch.float16, device=device) for _ in range(LAYERS)
        ]
        self.values = [torch.zeros_like(cache) for cache in self.keys]
        self.extra: dict[str, Any] = {}

    def attend(self, query: torch.Tensor, layer: int, step: StepInputs) -> torch.Tensor:
        """One query a row, BSND; a row of length 0 gives zeros."""
        output: torch.Tensor = torch_npu.npu_fused_infer_attention_score_v2(
            query.view(step.bs, 1, HEADS, DIM),
            self.keys[layer],
            self.values[layer],
            actual_seq_kvlen=step.host["kv_lens"],
            block_table=step.tensors["table"],
            num_query_heads=HEADS,
            num_key_value_heads=KV_HEADS,
            softmax_scale=DIM**-0.5,
            block_size=PAGE,
            input_layout="BSND",
            sparse_mode=0,
            **self.extra,
        )[0]
        return output.view(step.bs, WIDTH)

    def forward(self, step: StepInputs) -> torch.Tensor:
        """Hidden states. Shape: [bs, WIDTH]; dtype float32."""
        x = step.tensors["x"]
        slots = step.tensors["slots"].view(-1, 1)
        for layer, (wq, wk, wv, wo) in enumerate(self.weights):
            for cache, weight in ((self.keys[layer], wk), (self.values[layer], wv)):
                torch_npu.npu_scatter_nd_update_(cache.view(PAGES * PAGE, -1), slots, (x @ weight).half())
            x = torch.tanh(x + self.attend((x @ wq).half(), layer, step).float() @ wo)
        return x

    def plain(self, xs: list[torch.Tensor]) -> torch.Tensor:
        """The last hidden state of a sequence of inputs, from the whole sequence, on the CPU, in float32."""
        x = torch.stack(xs)
        for wq, wk, wv, wo in self.plain_weights:
            q, k, v = (x @ wq).half().float(), (x @ wk).half().float(), (x @ wv).half().float()
            heads = []
            for head in range(HEADS):
                scores = q[:, head * DIM : (head + 1) * DIM] @ k.t() * DIM**-0.5
                scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), float("-inf"))
                heads.append(scores.softmax(-1) @ v)
            x = torch.tanh(x + torch.cat(heads, -1).half().float() @ wo)
        return x[-1]


class Request:
    """Inputs so far, and the three pages of a request, not in order."""

    def __init__(self, index: int) -> None:
        self.generator = torch.Generator().manual_seed(100 + index)
        self.xs: list[torch.Tensor] = []
        self.pages = [1 + (index + 20 * part) % 12 for part in range(3)]

    def advance(self) -> None:
        self.xs.append(torch.randn(WIDTH, generator=self.generator))

    def slot(self) -> int:
        position = len(self.xs) - 1
        return self.pages[position // PAGE] * PAGE + position % PAGE


def _layout() -> RowLayout:
    return RowLayout(
        [
            RowField("x", "float32", rows=4, width=WIDTH),
            RowField("slots", "int64", rows=4),
            RowField("table", "int32", rows=4, width=3),
        ]
    )


def _step(runner: DecodeRunner, requests: list[Request], **keywords: Any) -> Any:
    for request in requests:
        request.advance()
    values = {
        "x": torch.stack([request.xs[-1] for request in requests]) if requests else torch.zeros(0, WIDTH),
        "slots": [request.slot() for request in requests],
        "table": np.array([request.pages for request in requests], dtype=np.int32).reshape(-1, 3),
    }
    lens = {"kv_lens": [len(request.xs) for request in requests]}
    return runner.run(values, lens, len(requests), **keywords)


def _check(result: Any, decoder: Decoder, requests: list[Request]) -> None:
    output = result.output.cpu()
    assert output.shape == (len(requests), WIDTH)
    for row, request in enumerate(requests):
        torch.testing.assert_close(output[row], decoder.plain(request.xs), rtol=3e-3, atol=3e-3)


@pytest.fixture
def make() -> Iterator[Callable[..., tuple[DecodeRunner, Decoder]]]:
    made: list[DecodeRunner] = []

    def build(**changes: Any) -> tuple[DecodeRunner, Decoder]:
        device = changes.pop("device", None) or get_device("npu:0")
        decoder = changes.pop("decoder", None) or Decoder(device.name)
        arguments: dict[str, Any] = {
            "device": device,
            "forward": decoder.forward,
            "buckets": Buckets([1, 2, 4]),
            "update": UpdateSpec({"actual_seq_kvlen": "kv_lens"}),
        }
        arguments.update(changes)
        arguments.setdefault("buffers", StaticBuffers(_layout(), device))
        runner = DecodeRunner(**arguments)
        made.append(runner)
        return runner, decoder

    yield build
    for runner in made:
        runner.close()


@pytest.fixture(scope="session")
def toy() -> SimpleNamespace:
    """The decoder, its requests, and how a step is run and compared."""
    return SimpleNamespace(
        Decoder=Decoder, Request=Request, layout=_layout, step=_step, check=_check, PAGE=PAGE, WIDTH=WIDTH
    )
