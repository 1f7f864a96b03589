"""The decode worker's half of the connector: offers blocks for requests, and says which arrived and which failed.

A request is reported only when no prefill rank can write into its blocks any more, also after a failure: vLLM computes
the failed ones again in the same place, or, where it cannot, uses them for others.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from kv_transfer.decode_end import DecodeEnd
from kv_transfer.errors import SessionStateError, TransferError
from kv_transfer.groups import MAIN
from kv_transfer.integrations.vllm.caches import PageGroup
from kv_transfer.integrations.vllm.words import Load, StepWords
from kv_transfer.receiver import Receiver
from kv_transfer.receiver_session import ReceiverSession

__all__ = ["DecodeWorker"]

_LOG = logging.getLogger(__name__)


@dataclasses.dataclass(eq=False)
class _Pull:
    """One request that is awaited. Without a session it could not be offered yet."""

    load: Load
    deadline: float
    session: ReceiverSession | None = None
    failed: bool = False
    aborted: str = ""


class DecodeWorker:
    """For one rank.

    Args:
        end: Finds the prefill ranks.
        groups: How blocks become pages.
        patience: Seconds that a request waits for prefill ranks that were never there.
        restarts: Whether a prompt that did not come whole is computed from its start, and told as a request; otherwise
            from the first block that did not come on, and told by its blocks.
    """

    def __init__(self, end: DecodeEnd, groups: Sequence[PageGroup], patience: float, *, restarts: bool = False) -> None:
        """Nothing is awaited."""
        self._end = end
        self._groups = tuple(groups)
        self._patience = patience
        self._restarts = restarts
        self._pulls: dict[str, _Pull] = {}
        self._told: list[ReceiverSession] = []
        self._failed_blocks: set[int] = set()
        self._failed_requests: set[str] = set()

    def take(self, words: StepWords) -> None:
        """Offers the blocks of new requests, and gives up those that are over."""
        for load in words.loads:
            pull = _Pull(load, time.monotonic() + self._patience)
            if not load.is_empty:
                self._pulls[load.request] = pull
            self._offer(pull)
        for name, reason in words.aborts:
            found = self._pulls.get(name)
            if found is not None:
                found.aborted = reason
                if found.session is not None:
                    found.session.abort(reason)
        for room, group, reason in words.rejects:
            receiver = self._end.receivers.get(group)
            with contextlib.suppress(TransferError):  # prefill ranks that are not there wait for nothing
                if receiver is not None:
                    receiver.reject(room, reason)

    def finished(self) -> set[str]:
        """Requests whose blocks are nobody's but the engine's now, with their bytes or with an error."""
        self._told = [session for session in self._told if not session.pages_released]
        return {name for name, pull in list(self._pulls.items()) if self._is_over(name, pull)}

    def failed_blocks(self) -> set[int]:
        """Blocks whose bytes did not arrive, of requests that were reported since the last call."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def failed_requests(self) -> frozenset[str]:
        """Requests whose prompt did not come whole, that were reported since the last call, where they start anew."""
        failed, self._failed_requests = frozenset(self._failed_requests), set()
        return failed

    def _is_over(self, name: str, pull: _Pull) -> bool:
        if pull.session is None and not pull.failed and not pull.aborted:
            self._offer(pull)
        if pull.session is not None and not pull.session.pages_released:
            return False
        if pull.session is None and not pull.failed and not pull.aborted:
            return False
        failed = set() if pull.aborted else self._failures(name, pull)
        if failed and self._restarts:
            self._failed_requests.add(name)
        else:
            self._failed_blocks |= failed
        del self._pulls[name]
        return True

    def _failures(self, name: str, pull: _Pull) -> set[int]:
        """Blocks of an ended request that did not come: all of them, or those that the engine could not move."""
        everything = {block for own in pull.load.stretches for block in own.blocks}
        if pull.session is None:
            return everything
        try:
            result = pull.session.poll()
        except TransferError as error:
            _LOG.warning("request %s: its K/V did not arrive: %s", name, error)
            return everything
        failed = {} if result is None else result.failed_pages
        pages = sum(map(len, failed.values()))
        if pages:
            _LOG.warning("request %s: %d of its pages did not arrive", name, pages)
        if self._restarts:
            return everything if pages else set()
        return {page // self._groups[0].kernel_blocks for page in failed.get(MAIN, ())}

    def _offer(self, pull: _Pull) -> None:
        load = pull.load
        try:
            receiver = self._end.receivers.get(load.group)
            if receiver is None:
                raise SessionStateError(f"no prefill rank of group {load.group} is in the directory")
            pages, firsts, rows = self._items(load, receiver)
            session = receiver.open(load.room, pages, tokens=load.tokens, first_page=firsts, row=rows or None)
        except SessionStateError as error:  # not ready yet; a room or page that is held is let go in time
            if time.monotonic() > pull.deadline:
                self._fail(pull, error)
        except (TransferError, ValueError) as error:
            self._fail(pull, error)
        else:
            if load.is_empty:
                self._told.append(session)
            else:
                pull.session = session

    def _fail(self, pull: _Pull, error: Exception) -> None:
        pull.failed = True
        _LOG.warning("request %s: its K/V cannot be asked for: %s", pull.load.request, error)

    def _items(
        self, load: Load, receiver: Receiver
    ) -> tuple[Mapping[str, npt.NDArray[np.int64]], Mapping[str, int], Mapping[str, int]]:
        """The pages and first pages of each group with pages, and the rows of each with states."""
        pages, firsts, rows = dict[str, npt.NDArray[np.int64]](), dict[str, int](), dict[str, int]()
        for group, own in zip(self._groups, load.stretches, strict=True):
            if group.kind == "states":
                rows |= dict.fromkeys(group.names, own.blocks[0])
                continue
            (name,) = group.names
            needed = group.page_count(load.tokens)
            firsts[name] = min(own.first * group.kernel_blocks, needed)
            pages[name] = group.pages(own.blocks)[: needed - firsts[name]]
        for name, span in receiver.spans(load.tokens, firsts).items():
            pages[name] = pages[name][span.first - firsts[name] :]  # a window may begin within a block
        return pages, firsts, rows
