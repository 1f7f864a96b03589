"""Owns what one request has of one companion: pages that it keeps from leaving, pages kept ready, its running row.

Every method is done as a whole or refused as a whole. It does not choose the hit (see `_group`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from kv_pool.errors import CanaryMismatch, OutOfPages

if TYPE_CHECKING:
    import numpy.typing as npt

    from kv_pool.hicache._inflight import Load
    from kv_pool.hicache._member import Member
    from kv_pool.tables import IntArray

__all__ = ["Share"]


_NOTHING: Mapping[int, int] = MappingProxyType({})


def _none() -> IntArray:
    return np.zeros(0, dtype=np.int64)


@dataclass
class Share:
    """A request's share of a companion. Positions count pages of the prompt; `lead` are the cache's device pages.

    Attributes:
        member: The companion at work.
        have: Which pages of the prefix that was found it has, on the device or on the host. Shape: [pages].
        device: Own device pages of which the request is a holder.
        host: Own host page of each position, 0 for none; the request is a holder until they are loaded. Shape: [pages].
        ready: Own device pages that `load` will fill, by position.
        reached: Positions below this one have been given a page of their own.
        row: The running row of states; 0 for none.
        loads: Loads that were under way of what it reads.
        loaded: Pages that `load` has asked for from the host.
    """

    member: Member
    have: npt.NDArray[np.bool_]
    device: IntArray = field(default_factory=_none)
    host: IntArray = field(default_factory=_none)
    ready: dict[int, int] = field(default_factory=dict)
    reached: int = 0
    row: int = 0
    loads: list[Load] = field(default_factory=list)
    loaded: int = 0

    @property
    def failure(self) -> BaseException | None:
        """What the device has said of a load of what it reads, if that has failed."""
        return next((load.failure for load in self.loads if load.failure is not None), None)

    @property
    def must_load(self) -> bool:
        """Whether `load` has something to do."""
        return bool(self.ready or self.row)

    @property
    def private(self) -> IntArray:
        """Own device pages that no page of the cache names."""
        return np.array([*self.ready.values(), *([self.row] if self.row else [])], dtype=np.int64)

    def needed(self, hit: int) -> IntArray:
        """Positions that a hit of so many pages reads."""
        trailing = self.member.companion.trailing
        return np.arange(0 if trailing is None else max(0, hit - trailing), hit)

    def keep(self, device: IntArray, host: IntArray) -> None:
        """Keep pages that were found from leaving, those on the host until they are loaded.

        Args:
            device: Own device page of each position, 0 for none. Shape: [pages].
            host: Own host page of each, 0 for none. Shape: [pages].
        """
        self.device, self.host = device[device > 0], host
        self.loads = self._arriving(self.device)
        self.member.device.own.retain(self.device)
        self.member.host.own.retain(host[host > 0])

    def open(self, lead: IntArray, hit: int, reach: int) -> None:
        """Take a page for each position from the hit to `reach`, and for each that `load` will fill; or a row.

        Also makes a lower hit good; what the deeper one needs stays until `load`.

        Raises:
            OutOfPages: Not enough. Nothing is taken.
        """
        if self.member.companion.coverage == "snapshots":
            if not self.row:
                self.row = int(self.member.take(1)[0])
            return
        wanted = self.needed(hit)
        found = self.member.device.find(lead[wanted])  # some may have come from others since the prompt was looked up
        came = found[(found > 0) & ~np.isin(found, self.device)]
        self._keep_also(came)
        self.loads += [load for load in self._arriving(came) if load not in self.loads]
        fill = [position for position in wanted[self._bare(lead, wanted)].tolist() if position not in self.ready]
        own = np.arange(hit, max(reach, self.reached))
        own = own[self._bare(lead, own)]
        kept = np.isin(own, list(self.ready))  # a deeper hit would have filled these; now they are computed
        taken = self._take(len(fill) + np.count_nonzero(~kept), lead, hit)
        self.ready.update(zip(fill, taken.tolist(), strict=False))
        pages = np.zeros(own.size, dtype=np.int64)
        pages[kept] = [self.ready.pop(position) for position in own[kept].tolist()]
        pages[~kept] = taken[len(fill) :]
        self._give(lead[own], pages)
        self.reached = max(reach, self.reached, hit)

    def extend(self, lead: IntArray, reach: int) -> None:
        """Take a page for each position from the last one that has been reached to `reach`; none for those before.

        Raises:
            OutOfPages: Not enough. Nothing is taken.
        """
        if self.member.companion.coverage != "snapshots" and reach > self.reached:
            self._give(lead[self.reached : reach], self.member.take(reach - self.reached))
            self.reached = reach

    def give_back(self, lead: IntArray, ready: Mapping[int, int] = _NOTHING) -> None:
        """Let go of the pages that were just given to leading pages, which name none then; but keep those `ready`."""
        again = {position: page for position, page in ready.items() if position not in self.ready}
        self.member.device.own.retain(list(again.values()))
        self.ready.update(again)
        self._let_go(self.member.device.find(lead))
        self.member.device.leave(lead)

    def advance(self, lead: IntArray, computed: int, reach: int) -> None:
        """Let go of what no later token reads, and take pages up to `reach`; what is computed without one gets none.

        Raises:
            OutOfPages: Not enough; what was let go stays so.
        """
        if computed:
            self._let_go(self.member.device.find(lead[: int(self.needed(computed)[0])]))
        self.reached = max(self.reached, computed)
        self.extend(lead, reach)

    def check(self, lead: IntArray, hit: int, lead_host: IntArray, refused: Callable[[str, int], object]) -> None:
        """Compare what `load` would bring from the host with its checksums.

        Args:
            lead: The cache's device pages of the request.
            hit: Pages of the hit.
            lead_host: The cache's host pages of what was found.
            refused: Called with the companion's name and the position of a page that is refused.

        Raises:
            CanaryMismatch: A page is not what was backed up. It has left the host, and hits that need it with it.
        """
        if not self.member.canaries:
            return
        places = self.needed(hit)
        places = places[self._bare(lead, places)]
        pages = self.member.on_host(lead_host[places])
        for canary in self.member.canaries:
            try:
                canary.check(pages)
            except CanaryMismatch as error:
                place = places[error.position]
                self.have[place] = False
                if self.member.refuse(lead_host[place]):  # otherwise another request has found it before
                    refused(self.member.companion.name, int(place))
                raise

    def load(self, lead: IntArray, hit: int, nodes: IntArray, lead_host: IntArray) -> None:
        """Start to fill what the hit needs and the device lacks; then keep no more than the hit needs.

        Raises:
            Exception: What a mover or the device raised. The request can only be aborted then.
        """
        if self.row:
            self._load_row(lead, hit, nodes, lead_host)
        else:
            places = self.needed(hit)
            places = places[self._bare(lead, places)]
            pages = np.array([self.ready.pop(place) for place in places.tolist()], dtype=np.int64)
            self.member.device.own.release(self.private)  # loaded by another request meanwhile, or of a deeper hit
            self.ready = {}
            self._give(lead[places], pages)
            if places.size:
                try:
                    self._bring(pages, lead_host[places], nodes[places])
                except BaseException:
                    self.member.device.leave(lead[places])
                    raise
            reading = self.member.device.find(lead[self.needed(hit)])
            self._keep_also(reading[~np.isin(reading, self.device)])
            kept = np.concatenate([reading, self.member.device.find(lead[hit : self.reached])])
            self._let_go(self.device[~np.isin(self.device, kept)])
        failed = [load for load in self.loads if load.failure is not None]
        self.loads = failed + self._arriving([*self.member.device.find(lead[self.needed(hit)]).tolist(), self.row])
        self._leave_host()

    def snapshot(self, lead_page: IntArray) -> bool:
        """Save the running row under a page of the cache; whether there was room."""
        if self.member.device.find(lead_page)[0]:
            return True
        try:
            row = self.member.take(1)
        except OutOfPages:
            return False
        self.member.copy_row(self.row, int(row[0]))
        self.member.device.give(lead_page, row)
        self.member.device.touch(lead_page)
        return True

    def settle(self, given: IntArray, kept: IntArray, hit: int) -> None:
        """Name the pages of a finished text by the pages that the index has kept, and count what its hit has read."""
        self.member.count_hit(self.needed(hit).size - self.loaded, self.loaded)
        other = given != kept
        self.member.device.pass_on(given[other], kept[other])
        self.member.device.touch(kept[::-1] if self.member.companion.trailing is None else kept)

    def close(self) -> None:
        """Let go of everything."""
        own = self.member.device.own
        own.release(np.concatenate([self.device, self.private]))
        self._leave_host()
        self.device, self.ready, self.row = _none(), {}, 0

    def _load_row(self, lead: IntArray, hit: int, nodes: IntArray, lead_host: IntArray) -> None:
        """Bring the running row to the state at the end of the hit."""
        if not hit:
            self.member.clear_row(self.row)
            return
        saved = int(self.member.device.find(lead[hit - 1 : hit])[0])
        if saved:
            self.member.copy_row(saved, self.row)
        else:
            self._bring(np.array([self.row]), lead_host[hit - 1 : hit], nodes[hit - 1 : hit])
        self._let_go(self.device)

    def _bring(self, pages: IntArray, lead_host: IntArray, nodes: IntArray) -> None:
        self.member.load(pages, self.member.on_host(lead_host), nodes)
        self.loaded = pages.size

    def _take(self, count: int, lead: IntArray, hit: int) -> IntArray:
        """Take pages; if there are too few, what only a lower hit would read may leave, and such hits with it."""
        try:
            return self.member.take(count)
        except OutOfPages:
            if not self.host.size:  # nothing was found, or it is loaded
                raise
            outside = np.setdiff1d(np.arange(hit), self.needed(hit))
            self.have[outside] &= self.host[outside] > 0
            self._let_go(self.member.device.find(lead[outside]))
            return self.member.take(count)

    def _leave_host(self) -> None:
        self.member.host.own.release(self.host[self.host > 0])
        self.host = _none()

    def _arriving(self, reading: IntArray | list[int]) -> list[Load]:
        """Loads under way of own pages."""
        return [load for load in self.member.loads if np.isin(load.device_pages, reading).any()]

    def _bare(self, lead: IntArray, positions: IntArray) -> npt.NDArray[np.bool_]:
        bare: npt.NDArray[np.bool_] = self.member.device.find(lead[positions]) == 0
        return bare

    def _give(self, lead: IntArray, own: IntArray) -> None:
        self.member.device.give(lead, own)
        self._keep_also(own)

    def _keep_also(self, own: IntArray) -> None:
        self.member.device.own.retain(own)
        self.device = np.concatenate([self.device, own])

    def _let_go(self, own: IntArray) -> None:
        gone = np.isin(self.device, own)
        self.member.device.own.release(self.device[gone])
        self.device = self.device[~gone]
