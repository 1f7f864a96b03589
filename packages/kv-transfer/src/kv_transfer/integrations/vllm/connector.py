"""`KvTransferConnector`: vLLM's KVConnector v1 over both halves, with the names and arguments that vLLM calls.

Each call goes to the half that its role has; what is decided is decided there. vLLM's base class is imported when the
connector is asked for.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from kv_transfer.decode_end import DecodeEnd
from kv_transfer.directory import Place
from kv_transfer.directory_service import DirectoryClient
from kv_transfer.errors import SessionStateError
from kv_transfer.integrations._engine import engine_module
from kv_transfer.integrations.vllm.caches import Caches, read_caches
from kv_transfer.integrations.vllm.decode import DecodeWorker
from kv_transfer.integrations.vllm.groups import block_groups, is_plain
from kv_transfer.integrations.vllm.prefill import PrefillWorker
from kv_transfer.integrations.vllm.ready import StepLayers
from kv_transfer.integrations.vllm.scheduler import SchedulerSide
from kv_transfer.integrations.vllm.settings import Settings, engine_options, place_of, side_of
from kv_transfer.integrations.vllm.words import Failures, Handshake, StepWords
from kv_transfer.prefill_end import PrefillEnd
from kv_transfer.registry import create_engine

if TYPE_CHECKING:
    from kv_transfer.engine import TransferEngine

__all__ = ["Connector", "connector_class", "register"]

_LOG = logging.getLogger(__name__)
_HOST_ENGINES = ("loopback", "mooncake", "nixl")
NAME = "KvTransferConnector"
_RELEASE = "vLLM 0.23"
_BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"


class Connector:
    """The calls of vLLM's `KVConnectorBase_V1` and `SupportsHMA`; `connector_class` joins it with those.

    Args:
        vllm_config: Of the instance; `Settings` describes the connector's own part.
        role: Whether this half runs in the scheduler's process or in a worker's.
        kv_cache_config: Groups of layers: full attention, sliding windows, states.

    Raises:
        ArgumentError: The configuration has a name or value that is none.
        UnsupportedLayout: Context parallelism, or a kind of group that is not moved.
        PeerLost: The directory does not answer (in workers, when the caches are registered).
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        """Makes the half of this process; a worker's begins with `register_kv_caches`."""
        super().__init__(vllm_config, role, kv_cache_config)  # type: ignore[call-arg]
        self._settings = Settings.of(vllm_config)
        self._side = side_of(vllm_config)
        self._config, self._cache_config = vllm_config, kv_cache_config
        self._place = place_of(vllm_config, self._settings)
        self._scheduler: SchedulerSide | None = None
        self._engine: TransferEngine | None = None
        self._caches: Caches | None = None
        self._prefill: PrefillWorker | None = None
        self._decode: DecodeWorker | None = None
        self._ends: list[PrefillEnd | DecodeEnd] = []
        self._step: StepLayers | None = None
        self._device: Any = None
        self._device_module: Any = None
        self._groups = block_groups(kv_cache_config)
        if role.name == "SCHEDULER":
            engine_id = vllm_config.kv_transfer_config.engine_id
            self._scheduler = SchedulerSide(self._groups, self._place.dp_rank, engine_id)

    # The scheduler's half.

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Takes the pool of all blocks."""
        self._scheduling().bind(gpu_block_pool)

    def on_new_request(self, request: Any) -> None:
        """Takes a new request before anything is looked up for it."""
        self._scheduling().arrived(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens of the prompt that the prefill side brings."""
        return self._scheduling().matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Takes the blocks of a request."""
        self._scheduling().allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepWords:
        """What the workers have to know for this step."""
        return self._scheduling().step(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        """Takes what the workers finished."""
        self._scheduling().heard(connector_output)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Whether the blocks stay until the workers have sent them, and the decode side's parameters."""
        return self._scheduling().finished(request)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The same, as vLLM calls it of a connector that serves several groups."""
        return self._scheduling().finished(request)

    def set_xfer_handshake_metadata(self, metadata: Mapping[int, Handshake]) -> None:
        """Takes what the workers of one pipeline stage registered."""
        self._scheduling().met({(rank,): own for rank, own in metadata.items()})

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Mapping[tuple[int, ...], Handshake]) -> None:
        """Takes what the workers registered."""
        self._scheduling().met(metadata)

    # A worker's half.

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        """Opens the caches for transfers, registers the rank, and starts to look for the other side."""
        settings = self._settings
        caches = read_caches(self._config, self._cache_config, kv_caches, settings)
        first = next(iter(kv_caches.values()))
        self._device = (first[0] if isinstance(first, list | tuple) else first).device
        if self._device.type != "cpu":
            if settings.engine in _HOST_ENGINES:
                _LOG.warning(
                    "engine %s reads and writes host memory, the caches are on %s: this works only where device memory "
                    "is host memory, as on an emulated device; use memfabric on NPUs",
                    settings.engine,
                    self._device,
                )
            self._device_module = getattr(importlib.import_module("torch"), self._device.type)
        timeouts, secret = settings.limits_in_time(), settings.secret()
        directory = DirectoryClient(settings.directory, secret=secret)
        host = settings.host or self._config.kv_transfer_config.kv_ip
        engine = create_engine(settings.engine, **engine_options(settings, self._side, host, self._device))
        options: dict[str, Any] = {
            "windows": caches.windows, "parts": settings.parts, "timeouts": timeouts, "secret": secret,
        }  # fmt: skip
        try:
            if self._side == "prefill":
                sending = PrefillEnd(caches.manifests, engine, directory, **options)
                self._ends.append(sending)
                self._prefill = PrefillWorker(sending, caches.groups, timeouts.offer)
            else:
                options |= {"host": host, "port": settings.port, "on_failed_pages": "recompute"}
                receiving = DecodeEnd(caches.manifests, engine, directory, **options)
                self._ends.append(receiving)
                restarts = not is_plain(self._groups)
                self._decode = DecodeWorker(receiving, caches.groups, timeouts.handshake, restarts=restarts)
        except BaseException:
            engine.close()
            raise
        self._engine, self._caches = engine, caches

    def get_handshake_metadata(self) -> Handshake | None:
        """What this worker registered, for its scheduler."""
        if self._caches is None:
            return None
        layouts = [manifest.layout for manifest in self._caches.manifests.values()]
        tokens = max(layout.page_size for layout in layouts)
        return Handshake(Place.of(self._place), self._settings.engine, layouts[0].fingerprint, tokens)

    def handle_preemptions(self, kv_connector_metadata: StepWords) -> None:
        """Gives up the rooms of requests whose blocks are taken away in this step."""
        if self._prefill is not None:
            self._prefill.drop(kv_connector_metadata.preempted)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Offers the blocks of new requests, and takes the chunks of this step before they are computed."""
        words = cast(StepWords, self._get_connector_metadata())  # type: ignore[attr-defined]
        if self._decode is not None:
            if words.loads and self._device_module is not None and self._caches is not None and self._caches.has_states:
                self._device_module.synchronize(self._device)  # vLLM zeroes fresh blocks of such models on the device
            self._decode.take(words)
        elif self._prefill is not None:
            self._step = StepLayers(self._device, self._device_module) if words.chunks else None
            self._prefill.take(words, self._step)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: a request is computed only when all of its blocks have come."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Says that a layer of this step's chunks is computed as soon as the device gets here."""
        if self._step is not None and self._settings.layerwise and self._caches is not None:
            layer = self._caches.layers.get(layer_name)
            if layer is not None:
                self._step.passed(*layer)

    def wait_for_save(self) -> None:
        """Says the same of all layers; does not wait, since the blocks stay until they are sent."""
        if self._step is not None:
            self._step.passed_all()
            self._step = None

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Requests whose blocks are sent, and those whose blocks have come or failed."""
        if self._prefill is not None:
            return self._prefill.finished(finished_req_ids), None
        return None, self._decode.finished() if self._decode is not None else None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that vLLM has to compute itself, of requests that `get_finished` has reported."""
        return self._decode.failed_blocks() if self._decode is not None else set()

    def build_connector_worker_meta(self) -> Failures | None:
        """Requests whose prompt did not come and is computed from its start, where vLLM cannot be told of blocks."""
        failed = self._decode.failed_requests() if self._decode is not None else frozenset()
        return Failures(failed) if failed else None

    def shutdown(self) -> None:
        """Ends all conversations and closes the engine; may be called twice."""
        if self._prefill is not None:
            self._prefill.close()
        for end in self._ends:
            end.close()
        if self._engine is not None:
            self._engine.close()
        self._prefill = self._decode = self._engine = None
        self._ends.clear()

    def _scheduling(self) -> SchedulerSide:
        if self._scheduler is None:
            raise SessionStateError(
                "a call of the scheduler's half came to a worker's",
                consequence="nothing was done",
                remedy="make the connector with KVConnectorRole.SCHEDULER there",
            )
        return self._scheduler


@functools.cache
def connector_class() -> type[Any]:
    """`Connector` as a subclass of vLLM's `KVConnectorBase_V1` and `SupportsHMA`.

    Raises:
        EngineUnavailable: vLLM 0.23 is not installed.
    """
    base = engine_module(_BASE, _RELEASE)
    base.KVConnectorMetadata.register(StepWords)
    base.KVConnectorHandshakeMetadata.register(Handshake)
    base.KVConnectorWorkerMetadata.register(Failures)
    module = __name__.rpartition(".")[0]
    return type(
        NAME,
        (Connector, base.KVConnectorBase_V1, base.SupportsHMA),
        {"__module__": module, "__doc__": Connector.__doc__},
    )


def register() -> None:
    """Make the connector known to vLLM by its name, once a process; `kv_connector_module_path` does without.

    Raises:
        EngineUnavailable: vLLM 0.23 is not installed.
        ValueError: vLLM's own, when the name is taken.
    """
    factory = engine_module("vllm.distributed.kv_transfer.kv_connector.factory", _RELEASE).KVConnectorFactory
    factory.register_connector(NAME, __name__.rpartition(".")[0], NAME)
