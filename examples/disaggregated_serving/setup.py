"""What every worker brings up: the line to its front, the device, the model's shape and its KV layout.

The work itself is in `prefill.py` and `decode.py`, the process around it in `worker.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import kv_planner
import torch
import zmq

from .config import TO_WORKER, ServeConfig, Shutdown
from .weights import ModelShape, Weights, gguf_shape, load_smollm2, open_gguf, random_weights

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pydantic import BaseModel

M = TypeVar("M")


class Link:
    """This worker's end of the line to the front."""

    def __init__(self, address: str) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self._context.socket(zmq.PAIR)
        self.socket.connect(address)

    def send(self, message: BaseModel) -> None:
        """Send a message to the front."""
        self.socket.send(message.model_dump_json().encode())

    def receive(self, *, wait: float | None = None) -> Any:
        """The next message of the front, or None when none came within `wait` seconds (None: for ever)."""
        if not self.socket.poll(None if wait is None else int(wait * 1000)):
            return None
        return TO_WORKER.validate_json(self.socket.recv())

    def expect(self, kind: type[M]) -> M:
        """Wait for a message of one kind; Shutdown ends the worker."""
        message = self.receive()
        if isinstance(message, Shutdown):
            raise SystemExit(0)
        if not isinstance(message, kind):
            raise RuntimeError(f"expected {kind.__name__}, got {message!r}")
        return message

    def close(self) -> None:
        """Send what is queued and close."""
        self.socket.close(linger=2000)
        self._context.term()


@dataclass(frozen=True)
class Setup:
    """What every role needs: its device and the model."""

    config: ServeConfig
    device: torch.device
    device_text: str
    shape: ModelShape
    layout: kv_planner.ModelLayout

    @property
    def kv_dtype(self) -> torch.dtype:
        """Of K, V and attention."""
        return kv_dtype(self.config)

    def weights(self, layer_ids: Sequence[int]) -> Weights:
        """Weights of `layer_ids`."""
        if self.config.model is None:
            return load_smollm2(layer_ids)
        return random_weights(self.shape, seed=self.config.model.seed, layer_ids=layer_ids)


def model_shape(config: ServeConfig) -> ModelShape:
    """The shape of the model that `config` names."""
    if config.model is None:
        return gguf_shape(open_gguf())
    model = config.model
    return ModelShape(
        fingerprint=f"random:{model.seed}",
        layers=model.layers,
        hidden=model.hidden,
        ffn=model.ffn,
        query_heads=model.query_heads,
        kv_heads=model.kv_heads,
        key_dim=model.key_dim,
        value_dim=model.value_dim,
        vocabulary=model.vocabulary,
        rope_base=10000.0,
        norm_eps=1e-5,
        context=2048,
        windows=model.windows,
        draft_layers=model.draft_layers,
    )


def kv_dtype(config: ServeConfig) -> torch.dtype:
    """Of K, V and attention: the operator takes sinks, which layers with a window have, beside bfloat16 only."""
    return torch.bfloat16 if config.model is not None and config.model.windows else torch.float16


def kv_layout(shape: ModelShape, page_size: int, dtype: torch.dtype) -> kv_planner.ModelLayout:
    """The KV layout that all ranks publish: the target's layers, and the draft's where it has any."""
    parts: list[tuple[kv_planner.Part, list[int]]] = [("target", list(range(shape.layers)))]
    if shape.draft_layers:
        parts.append(("draft", shape.draft_ids))
    name_of_dtype: kv_planner.DType = "bfloat16" if dtype == torch.bfloat16 else "float16"
    halves: tuple[tuple[kv_planner.Component, int], ...] = (("key", shape.key_dim), ("value", shape.value_dim))
    components = [
        kv_planner.ComponentSpec(
            name, layer_ids=ids, dtype=name_of_dtype, total_heads=shape.kv_heads, dims=dims, part=part
        )
        for part, ids in parts
        for name, dims in halves
    ]
    return kv_planner.ModelLayout(components, page_size=page_size, fingerprint=shape.fingerprint)


def prepare(config: ServeConfig) -> Setup:
    """Bring up the device and read the model's shape."""
    text = "cpu"
    if config.device == "npu":
        import ascend_emulator

        ascend_emulator.install(devices=1)
        import torch_npu

        text = f"npu:0 (emulated {torch_npu.npu.get_device_name(0)}, torch_npu {torch_npu.__version__})"
    shape = model_shape(config)
    return Setup(
        config=config,
        device=torch.device("npu:0" if config.device == "npu" else "cpu"),
        device_text=text,
        shape=shape,
        layout=kv_layout(shape, config.page_size, kv_dtype(config)),
    )
