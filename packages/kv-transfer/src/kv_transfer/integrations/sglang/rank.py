"""Owns what the parts of the manager share: this rank, as planning sees it. `manager_class` adds SGLang's own part."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from kv_transfer.integrations.sglang.names import own_names, stated
from kv_transfer.integrations.sglang.peer import Local
from kv_transfer.integrations.sglang.words import word

if TYPE_CHECKING:
    from typing import TypeAlias

    _Base: TypeAlias = Any
else:
    _Base = object

__all__ = ["RELEASE", "Rank", "endpoint_of"]

RELEASE: Final = "SGLang 0.5.23"


def endpoint_of(address: tuple[str, int]) -> str:
    """What SGLang keeps its socket to a rank under; an IPv6 host has brackets."""
    host, port = address
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


class Rank(_Base):  # type: ignore[misc]  # Any: SGLang's manager
    """A rank with SGLang's attributes: `kv_args`, `attn_tp_size`, `pp_size` and the rest."""

    def _begin(self) -> None:
        """The state of our parts; the managers' constructors call `init_engine` first."""

    def _local(self) -> Local:
        args = self.kv_args
        size = getattr(self, "attn_tp_size", 1)
        return Local(
            args,
            bool(getattr(self, "is_mla_backend", False) or getattr(self, "is_hybrid_mla_backend", False)),
            (stated(args, "engine_rank") or 0) % size,
            size,
            getattr(self, "state_tp_size", size),
            stated(args, "pp_rank") or 0,
            getattr(self, "pp_size", 1),
        )

    def _shared(self) -> list[bool]:
        """Whether each own buffer carries the slots of all sharing ranks at decode: index keys, and drafts."""
        args: Any = self.kv_args
        entries = len(args.kv_data_ptrs)
        if self._is_npu_dsa_layout():
            given = getattr(self, "_dcp_remote_decode_layout", None)
            if given is not None and len(given) == entries:
                return [bool(one) for one in given]
            return [name[0] == "index_key" or name[1] == "draft" for name in own_names(args, **self._local().stage)]
        drafts = stated(args, "num_draft_entries") or 0
        return [entry >= entries - drafts for entry in range(entries)]

    def _is_prefill(self) -> bool:
        return word(self.disaggregation_mode) == "prefill"
