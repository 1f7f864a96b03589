"""The decode worker's half of the connector: offers blocks for requests, and says which arrived and which failed.

A request is reported only when no prefill rank can write into its blocks any more, also after a failure: vLLM computes
the failed ones again in the same place.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time

import numpy as np
import numpy.typing as npt

from kv_transfer.decode_end import DecodeEnd
from kv_transfer.errors import SessionStateError, TransferError
from kv_transfer.groups import MAIN
from kv_transfer.integrations.vllm.words import Load, StepWords
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
        kernel_blocks: Pages in a block.
        page_tokens: Tokens of a page.
        patience: Seconds that a request waits for prefill ranks that were never there.
    """

    def __init__(self, end: DecodeEnd, kernel_blocks: int, page_tokens: int, patience: float) -> None:
        """Nothing is awaited."""
        self._end = end
        self._kernel_blocks = kernel_blocks
        self._page_tokens = page_tokens
        self._patience = patience
        self._pulls: dict[str, _Pull] = {}
        self._told: list[ReceiverSession] = []
        self._failed_blocks: set[int] = set()

    def take(self, words: StepWords) -> None:
        """Offers the blocks of new requests, and gives up those that are over."""
        for load in words.loads:
            pull = _Pull(load, time.monotonic() + self._patience)
            if load.blocks:
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

    def _is_over(self, name: str, pull: _Pull) -> bool:
        if pull.session is None and not pull.failed and not pull.aborted:
            self._offer(pull)
        if pull.session is not None and not pull.session.pages_released:
            return False
        if pull.session is None and not pull.failed and not pull.aborted:
            return False
        if not pull.aborted:
            self._failed_blocks |= self._failures(name, pull)
        del self._pulls[name]
        return True

    def _failures(self, name: str, pull: _Pull) -> set[int]:
        """Blocks of an ended request that did not come: all of them, or those that the engine could not move."""
        if pull.session is None:
            return set(pull.load.blocks)
        try:
            result = pull.session.poll()
        except TransferError as error:
            _LOG.warning("request %s: its K/V did not arrive: %s", name, error)
            return set(pull.load.blocks)
        pages = () if result is None else result.failed_pages.get(MAIN, ())
        if pages:
            _LOG.warning("request %s: %d of its pages did not arrive", name, len(pages))
        return {page // self._kernel_blocks for page in pages}

    def _offer(self, pull: _Pull) -> None:
        load = pull.load
        try:
            receiver = self._end.receivers.get(load.group)
            if receiver is None:
                raise SessionStateError(f"no prefill rank of group {load.group} is in the directory")
            pages = self._pages(load)
            first = -(-load.tokens // self._page_tokens) - len(pages)
            session = receiver.open(load.room, pages, tokens=load.tokens, first_page=first)
        except SessionStateError as error:  # not ready yet; a room or page that is held is let go in time
            if time.monotonic() > pull.deadline:
                self._fail(pull, error)
        except (TransferError, ValueError) as error:
            self._fail(pull, error)
        else:
            if load.blocks:
                pull.session = session
            else:
                self._told.append(session)

    def _fail(self, pull: _Pull, error: Exception) -> None:
        pull.failed = True
        _LOG.warning("request %s: its K/V cannot be asked for: %s", pull.load.request, error)

    def _pages(self, load: Load) -> npt.NDArray[np.int64]:
        count = self._kernel_blocks
        pages = (np.array(load.blocks, np.int64)[:, None] * count + np.arange(count)).reshape(-1)
        return pages[: max(0, -(-load.tokens // self._page_tokens) - load.first * count)]
