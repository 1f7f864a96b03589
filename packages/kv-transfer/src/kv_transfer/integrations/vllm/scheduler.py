"""The scheduler's half of the connector: which blocks of which request go where, and when blocks may be freed.

Bookkeeping only, no transfers: it runs in vLLM's scheduler process and tells the workers through `StepWords`. On the
prefill side a request carries `do_remote_decode` in its `kv_transfer_params`, on the decode side `do_remote_prefill`.
Both carry the number of the room, given by the router when both sides start at once; or the prefill side chooses one
and returns the decode side's parameters with its answer, as routers that ask the sides one after the other expect.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import pydantic
from pydantic import BaseModel, ConfigDict, Field

from kv_transfer.arguments import check_whole
from kv_transfer.directory import Place
from kv_transfer.errors import ArgumentError
from kv_transfer.integrations.vllm.groups import BlockGroup, brought
from kv_transfer.integrations.vllm.words import Chunk, Failures, Handshake, Load, StepWords, Stretch

__all__ = ["SchedulerSide", "Wish"]

_LOG = logging.getLogger(__name__)
_TOP = 2**63 - 1


class Wish(BaseModel):
    """What a request says of its transfer in `kv_transfer_params`, which come from whoever sent it.

    Attributes:
        do_remote_prefill: Its K/V come from the prefill side.
        do_remote_decode: Its K/V go to the decode side.
        room: The number that both sides know the transfer by.
        prefill_group: Data-parallel group of the prefill side.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    do_remote_prefill: bool | None = None
    do_remote_decode: bool | None = None
    room: Annotated[int, Field(ge=0, le=_TOP)] | None = None
    prefill_group: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0

    @classmethod
    def of(cls, params: object) -> Wish:
        """The wish in parameters; an empty one where there are none.

        Raises:
            ArgumentError: They are no mapping, a value is of another kind, or no room is named that decode could ask
                for; all of it is in the text.
        """
        try:
            wish = cls.model_validate({} if params is None else params)
            wrong = ["room: needed where K/V come from the prefill side"] if wish.lacks_room else []
        except pydantic.ValidationError as error:
            wrong = [f"{'.'.join(map(str, item['loc'])) or 'all'}: {item['msg']}" for item in error.errors()]
        if wrong:
            raise ArgumentError(
                f"kv_transfer_params: {'; '.join(wrong)}, got {params!r:.200}",
                local=type(params).__name__,
                consequence="nobody would know which transfer the request belongs to",
                remedy="pass on what the prefill side returned, or give both sides the same room",
            )
        return wish

    @property
    def lacks_room(self) -> bool:
        """Whether decode is to ask for K/V and does not know for which."""
        return bool(self.do_remote_prefill) and self.room is None


@dataclasses.dataclass
class _Sending:
    """A request on the prefill side."""

    room: int
    tokens: int
    tables: list[list[int]]
    sent: list[int]
    handed: bool = False
    last: bool = False
    lost: bool = False

    @property
    def is_complete(self) -> bool:
        return self.last and not self.lost


class SchedulerSide:
    """For one instance.

    Args:
        groups: vLLM's groups of blocks.
        group: Data-parallel group of this instance.
        engine_id: vLLM's name of the instance.
    """

    def __init__(self, groups: Sequence[BlockGroup], group: int, engine_id: str) -> None:
        """Nothing is under way.

        Raises:
            ArgumentError: A group that is none.
        """
        self._groups = tuple(groups)
        self._group = check_whole("group", group, 2**31 - 1)
        self._engine_id = engine_id
        self._sending: dict[str, _Sending] = {}
        self._loading: dict[str, tuple[Any, Any]] = {}
        self._failed: set[str] = set()
        self._loads: list[Load] = []
        self._aborts: list[tuple[str, str]] = []
        self._rejects: list[tuple[int, int, str]] = []
        self._preempted: list[str] = []
        self._malformed: set[str] = set()
        self._pool: Any = None
        self.workers: dict[tuple[int, ...], Handshake] = {}

    def bind(self, pool: Any) -> None:
        """Takes the pool that all blocks come from, to give back those of a prompt that is to be computed anew."""
        self._pool = pool

    def arrived(self, request: Any) -> None:
        """A request is new.

        At prefill it loses its prompt's last token where decode needs the prompt without it: states would hold it, and
        vLLM would free blocks that a window still needs for it. What is sampled after the rest is nobody's answer.
        """
        wish = self._wish(request)
        if not wish.do_remote_decode or brought(self._groups, request.num_prompt_tokens) == request.num_prompt_tokens:
            return
        if request.num_prompt_tokens > 1:
            _shorten(request)
            return
        request.kv_transfer_params["do_remote_decode"] = False  # nothing is left of it that could be sent
        if wish.room is not None:
            self._rejects.append((wish.room, self._group, "the prompt has one token, which decode computes"))

    def matched(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Tokens that will come from the prefill side, and whether they come between steps."""
        if not self._wish(request).do_remote_prefill:
            return 0, False
        count = brought(self._groups, request.num_prompt_tokens) - num_computed_tokens
        return (count, True) if count > 0 else (0, False)

    def allocated(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Takes the blocks of a request: to be filled on the decode side, to be sent on the prefill side."""
        wish = self._wish(request)
        if wish.do_remote_prefill and wish.room is not None:
            request.kv_transfer_params["do_remote_prefill"] = False  # once: what fails is computed here
            self._load(request, wish.room, wish.prefill_group, blocks, num_external_tokens)
        elif wish.do_remote_decode and request.request_id not in self._sending:
            room = self._new_room(request.request_id) if wish.room is None else wish.room
            tables: list[list[int]] = [[] for _ in self._groups]
            self._sending[request.request_id] = _Sending(room, request.num_prompt_tokens, tables, [0] * len(tables))

    def _load(self, request: Any, room: int, prefill_group: int, blocks: Any, num_external_tokens: int) -> None:
        tokens = brought(self._groups, request.num_prompt_tokens)
        if num_external_tokens:
            here, tables = tokens - num_external_tokens, blocks.get_block_ids()
            stretches = tuple(own.needed(table, here, tokens) for own, table in zip(self._groups, tables, strict=True))
            self._loading[request.request_id] = (request, blocks)
        elif any(own.kind == "states" for own in self._groups):  # of which an offer cannot want nothing
            self._rejects.append((room, prefill_group, "decode has the prompt already"))
            return
        else:
            stretches = tuple(Stretch(own.count(tokens), ()) for own in self._groups)
        self._loads.append(Load(request.request_id, room, prefill_group, tokens, stretches))

    def step(self, output: Any) -> StepWords:
        """What the workers have to know for a step.

        Args:
            output: vLLM's `SchedulerOutput`; it is not changed.
        """
        for name in output.preempted_req_ids or ():
            self._preempt(name)
        chunks = []
        for new in output.scheduled_new_reqs:
            own = self._sending.get(new.req_id)
            if own is not None and not own.lost:
                own.tables = [list(table) for table in new.block_ids]
                chunks.extend(self._chunk(new.req_id, own, new.num_computed_tokens, output))
        cached = output.scheduled_cached_reqs
        for name, fresh, computed in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True):
            if name in cached.resumed_req_ids:
                self._preempt(name)
            own = self._sending.get(name)
            if own is not None and not own.lost and not own.last:
                for table, more in zip(own.tables, fresh if fresh is not None else (), strict=fresh is not None):
                    table.extend(more)
                chunks.extend(self._chunk(name, own, computed, output))
        words = StepWords(
            tuple(chunks), tuple(self._loads), tuple(self._aborts), tuple(self._rejects), tuple(self._preempted)
        )
        self._loads, self._aborts, self._rejects, self._preempted = [], [], [], []
        return words

    def finished(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
        """The end of a request.

        Returns:
            Whether its blocks stay until a worker says so, and the parameters for the other side.
        """
        wish = self._wish(request)
        self._malformed.discard(request.request_id)
        if wish.do_remote_prefill and wish.room is not None:  # it ends before it had blocks: prefill need not wait
            request.kv_transfer_params["do_remote_prefill"] = False
            self._rejects.append((wish.room, wish.prefill_group, _reason(request)))
        if self._loading.pop(request.request_id, None) is not None:
            self._aborts.append((request.request_id, _reason(request)))
        own = self._sending.pop(request.request_id, None)
        if own is None:
            return False, None
        if own.is_complete and request.status.name in ("FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED"):
            return True, {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "room": own.room,
                "prefill_group": self._group,
                "remote_engine_id": self._engine_id,
            }
        if own.lost:
            return False, None
        if own.handed:
            self._aborts.append((request.request_id, _reason(request)))
            return True, None
        self._rejects.append((own.room, self._group, _reason(request)))
        return False, None

    def heard(self, output: Any) -> None:
        """Takes what the workers finished, and what of it failed."""
        told = output.kv_connector_worker_meta
        if isinstance(told, Failures):
            self._failed |= told.requests
        for name in output.finished_recving or ():
            held = self._loading.pop(name, None)
            if name in self._failed and held is not None:
                self._restart(*held)
            self._failed.discard(name)

    def met(self, workers: Mapping[tuple[int, ...], Handshake]) -> None:
        """Takes what the workers registered.

        Raises:
            ArgumentError: They differ in engine, model or pages, or two of them are one rank.
        """
        terms = {(own.engine, own.fingerprint, own.block_tokens) for own in workers.values()}
        places: set[Place] = {own.place for own in workers.values()}
        if len(terms) > 1 or len(places) < len(workers):
            raise ArgumentError(
                f"workers: {len(workers)} of them are {len(places)} ranks with {sorted(terms)}",
                local=len(workers),
                consequence="the other side would wait for ranks that never come",
                remedy="give all workers of an instance the same configuration, and each its rank",
            )
        self.workers = dict(workers)

    def _wish(self, request: Any) -> Wish:
        """What a request wants; one whose parameters are malformed is computed here, and the log says why, once.

        An error would end vLLM's scheduler, and with it every other request.
        """
        try:
            return Wish.of(request.kv_transfer_params)
        except ArgumentError as error:
            if request.request_id not in self._malformed:
                self._malformed.add(request.request_id)
                _LOG.error("request %s is served without a transfer: %s", request.request_id, error)
            return Wish()

    def _preempt(self, name: str) -> None:
        """Its blocks are gone: the transfer ends, and what it computes again is not sent."""
        own = self._sending.get(name)
        if own is not None and not own.lost:
            own.lost = True
            if own.handed:
                self._preempted.append(name)
            else:
                self._rejects.append((own.room, self._group, "the request was preempted at prefill"))

    def _restart(self, request: Any, blocks: Any) -> None:
        """Has a prompt computed from its start, in new blocks.

        vLLM 0.23 takes failed blocks back from requests with one block table only, and its scheduler ends by an error
        where there are several. Blocks that windows and states do not need at the prompt's end were never given to the
        request, either, so that it cannot go on in its blocks. It is put back to where it was before it had any; a
        prefix hit would be refused by the block managers that know it already, and is not looked for.
        """
        _LOG.warning("request %s: its prompt is computed here, from the start", request.request_id)
        for table in blocks.blocks:
            self._pool.free_blocks(list(reversed(table)))
            table.clear()
        request.num_computed_tokens = 0
        request.skip_reading_prefix_cache = True

    def _chunk(self, name: str, own: _Sending, computed: int, output: Any) -> list[Chunk]:
        """Blocks that are full after the step; with its last one the rest of the prompt, and the states after it."""
        done = min(computed + output.num_scheduled_tokens[name], own.tokens)
        last = done == own.tokens
        stretches = []
        for number, (group, table) in enumerate(zip(self._groups, own.tables, strict=True)):
            if group.kind == "states":
                stretches.append(group.needed(table, 0, done) if last else Stretch(0, ()))
                continue
            first, stop = own.sent[number], group.count(done) if last else done // group.block_size
            own.sent[number] = max(first, stop)
            stretches.append(Stretch(first, tuple(table[first:stop])))
        if not any(each.blocks for each in stretches):
            return []
        own.handed, own.last = True, last
        return [Chunk(name, own.room, own.tokens, tuple(stretches), last)]

    def _new_room(self, name: str) -> int:
        digest = hashlib.blake2b(f"{self._engine_id}\0{name}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") & _TOP


def _reason(request: Any) -> str:
    return f"the request ended as {request.status.name}"


def _shorten(request: Any) -> None:
    """Takes the last token from a prompt of token ids, embeddings or both, and has one token sampled after it."""
    for own in (request.prompt_token_ids, request.prompt_is_token_ids, request._all_token_ids):
        if own is not None:
            own.pop()
    if request.prompt_embeds is not None:
        request.prompt_embeds = request.prompt_embeds[:-1]
    request.num_prompt_tokens -= 1
    request.max_tokens = 1
