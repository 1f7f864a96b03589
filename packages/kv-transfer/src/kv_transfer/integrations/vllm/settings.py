"""What a deployment may say in `kv_connector_extra_config`, and what follows from vLLM's own configuration.

Reads vLLM's configuration objects by their attributes; it imports nothing of vLLM.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import kv_planner
import pydantic
from pydantic import BaseModel, ConfigDict, Field

from kv_transfer.arguments import check_kind, check_whole
from kv_transfer.config import Timeouts
from kv_transfer.errors import ArgumentError, UnsupportedLayout

__all__ = ["Settings", "engine_options", "place_of", "side_of"]

Side = Literal["prefill", "decode"]


class Settings(BaseModel):
    """The extra config of the connector.

    Attributes:
        directory: Address of the deployment's directory (`python -m kv_transfer directory`).
        engine: As for `create_engine`; the same on both sides.
        engine_options: Its options. Those that follow from the instance need not be given: `hostname` of mooncake and
            memfabric, `role` and `device_id` of memfabric.
        host: Address of this machine that the other side reaches; vLLM's `kv_ip` by default.
        port: First control port of the decode side; 0: free ones.
        secret_file: File with the secret that all ends and the directory share.
        group: Data-parallel rank of this instance among those of its side, where instances are started one by one
            instead of by vLLM's data parallelism.
        groups: How many such instances there are.
        draft: Whether draft layers are moved too; the same on both sides.
        draft_layers: How many draft layers the model has; needed only where a pipeline stage has none of them.
        layerwise: Send each layer as soon as it is computed, instead of all of them after the step.
        fingerprint: Name of the model that both sides compare; vLLM's name of it by default.
        timeouts: Fields of `Timeouts`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    directory: str
    engine: str = "mooncake"
    engine_options: dict[str, Any] = Field(default_factory=dict)
    host: str | None = None
    port: int = Field(default=0, ge=0, le=65_535)
    secret_file: Path | None = None
    group: int | None = Field(default=None, ge=0)
    groups: int | None = Field(default=None, ge=1)
    draft: bool = True
    draft_layers: int = Field(default=0, ge=0)
    layerwise: bool = True
    fingerprint: str | None = None
    timeouts: dict[str, float] = Field(default_factory=dict)

    @classmethod
    def of(cls, vllm_config: Any) -> Settings:
        """The extra config of a vLLM configuration.

        Raises:
            ArgumentError: A name that is none, or a value of another kind; all of them are listed.
        """
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        check_kind("kv_connector_extra_config", extra, dict)
        try:
            return cls.model_validate(extra)
        except pydantic.ValidationError as error:
            wrong = [f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors()]
            raise ArgumentError(
                f"kv_connector_extra_config: {'; '.join(wrong)}",
                local=sorted(extra),
                consequence="the connector was not made",
                remedy=f"use the names {', '.join(cls.model_fields)}",
            ) from None

    @property
    def parts(self) -> tuple[kv_planner.Part, ...]:
        """Parts of the model that are moved."""
        return ("target", "draft") if self.draft else ("target",)

    def secret(self) -> str | None:
        """The text of the secret file.

        Raises:
            ArgumentError: It cannot be read.
        """
        try:
            return None if self.secret_file is None else self.secret_file.read_text(encoding="utf-8").strip()
        except (OSError, ValueError) as error:  # a name that no file can have, or bytes that are no text
            raise ArgumentError(
                f"kv_connector_extra_config: secret_file: {error}",
                local=str(self.secret_file),
                consequence="nothing was registered",
                remedy="give a text file that this process may read",
            ) from error

    def limits_in_time(self) -> Timeouts:
        """The time-outs, with defaults for those that are not given."""
        try:
            return Timeouts(**self.timeouts)
        except TypeError as error:
            raise ArgumentError(
                f"kv_connector_extra_config: timeouts: {error}",
                local=sorted(self.timeouts),
                remedy=f"use the names {', '.join(Timeouts.__dataclass_fields__)}",
            ) from None


def engine_options(settings: Settings, side: Side, host: str, device: Any) -> dict[str, Any]:
    """Options of the engine: what is given, and what follows from the instance.

    Args:
        settings: Of the connector.
        side: Which one this instance is.
        host: Address under which the other side reaches this machine.
        device: `torch.device` of the caches.
    """
    known: dict[str, Any] = {}
    if settings.engine in ("mooncake", "memfabric"):
        known["hostname"] = host  # by default they would tell other machines that this one is 127.0.0.1
    if settings.engine == "memfabric":
        known |= {"role": side.capitalize(), "device_id": device.index or 0}
    return {**known, **settings.engine_options}


def side_of(vllm_config: Any) -> Side:
    """Which side an instance is.

    Raises:
        ArgumentError: It is to be both: a request would be looked for on the wrong side.
    """
    role = str(vllm_config.kv_transfer_config.kv_role)
    if role == "kv_producer":
        return "prefill"
    if role == "kv_consumer":
        return "decode"
    raise ArgumentError(
        f"kv_role: {role!r} is not served",
        local=role,
        consequence="nobody would know whether this instance sends or receives",
        remedy="use 'kv_producer' for prefill instances and 'kv_consumer' for decode instances",
    )


def place_of(vllm_config: Any, settings: Settings) -> kv_planner.Placement:
    """The rank of a worker among those of its side.

    Raises:
        ArgumentError: A size or rank of vLLM's configuration is no number of its kind.
        UnsupportedLayout: Context parallelism, or a rank that its sizes do not hold.
    """
    parallel = vllm_config.parallel_config

    def stated(name: str, least: int = 1) -> int:
        return check_whole(f"parallel_config.{name}", getattr(parallel, name), 2**31 - 1, least=least)

    for name in ("prefill_context_parallel_size", "decode_context_parallel_size"):
        size = stated(name)
        if size > 1:
            raise UnsupportedLayout(
                f"{name}: this connector serves instances whose ranks hold whole requests, got {size}",
                local=size,
                consequence="tokens of a page would be missing",
                remedy=f"set {name} to 1",
            )
    tp_size, pp_size = stated("tensor_parallel_size"), stated("pipeline_parallel_size")
    rank = stated("rank", 0) % (tp_size * pp_size)
    group = stated("data_parallel_rank", 0) if settings.group is None else settings.group
    groups = stated("data_parallel_size") if settings.groups is None else settings.groups
    if group >= groups:
        raise UnsupportedLayout(
            f"group: {group} is not below the number of groups, {groups}",
            local=group,
            remedy="set group and groups together",
        )
    return kv_planner.Placement(
        dp_rank=group,
        dp_size=groups,
        pp_rank=rank // tp_size,
        pp_size=pp_size,
        tp_rank=rank % tp_size,
        tp_size=tp_size,
    )
