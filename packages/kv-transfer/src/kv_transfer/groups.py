"""The page groups of one end: named manifests whose pages and rows are counted apart, and the window of each.

Full attention, a sliding window and each compressed pool have page ids of their own: each is a group. A plain manifest
is one group, `MAIN`. Which pages of a request a group sends is in `spans`; two ends are compared in `handshake`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, TypeAlias

import kv_planner

from kv_transfer.arguments import check_kind, check_whole
from kv_transfer.errors import ArgumentError

__all__ = ["MAIN", "Group", "Groups", "Manifests"]

MAIN: Final = "main"
"""Name of the only group of an end that was given a plain manifest."""
MOST_GROUPS: Final = 64

Manifests: TypeAlias = kv_planner.RankManifest | Mapping[str, kv_planner.RankManifest]
"""What one rank owns: a manifest, or one for each of its groups, by name."""


@dataclasses.dataclass(frozen=True, slots=True)
class Group:
    """One set of page ids, or of rows.

    Attributes:
        name: Unique on its end; both ends use the same names.
        manifest: What the rank owns of it; without entries on a stage that has none of its layers.
        window: Tokens before the end of the prompt that decode reads; None: all.
    """

    name: str
    manifest: kv_planner.RankManifest
    window: int | None = None
    _known: dict[frozenset[kv_planner.Part], Mapping[kv_planner.ItemKind, int]] = dataclasses.field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def kinds(self, parts: Iterable[kv_planner.Part]) -> set[kv_planner.ItemKind]:
        """What the items of the rank's entries of `parts` are."""
        return set(self._counted(parts))

    def items(self, kind: kv_planner.ItemKind, parts: Iterable[kv_planner.Part]) -> int:
        """Items that every buffer of a kind has; 0 without one."""
        return self._counted(parts).get(kind, 0)

    def _counted(self, parts: Iterable[kv_planner.Part]) -> Mapping[kv_planner.ItemKind, int]:
        """Least number of items by kind; counted once, as every room asks."""
        wanted = frozenset(parts)
        if wanted not in self._known:
            layout, found = self.manifest.layout, dict[kv_planner.ItemKind, int]()
            for entry in self.manifest.entries:
                if entry.part in wanted and entry.item_bytes:
                    kind = layout.spec(entry.component, entry.part).item_kind
                    found[kind] = min(entry.items, found.get(kind, entry.items))
            self._known[wanted] = found
        return self._known[wanted]


class Groups:
    """All groups of one rank.

    Invariants: 1. there is at least one; 2. names are unique and not empty; 3. all have one placement.
    """

    def __init__(self, groups: Iterable[Group]) -> None:
        """Takes the groups.

        Raises:
            ArgumentError: An invariant fails.
        """
        self._groups = {group.name: group for group in groups}
        if not 1 <= len(self._groups) <= MOST_GROUPS or not all(
            isinstance(name, str) and 1 <= len(name) <= 256 for name in self._groups
        ):
            raise ArgumentError(
                f"manifest: expected 1 to {MOST_GROUPS} groups with names of 1 to 256 letters, "
                f"got {sorted(map(repr, self._groups))[:MOST_GROUPS]}",
                remedy="give a RankManifest, or one for each group by name",
            )
        places = {str(group.manifest.placement) for group in self}
        if len(places) > 1:
            raise ArgumentError(
                f"manifest: groups of several placements: {sorted(places)}",
                consequence="it would be unknown which rank this is",
                remedy="make the manifests of all groups with the placement of this rank",
            )

    @classmethod
    def of(cls, manifest: Manifests, windows: Mapping[str, int] | None = None) -> Groups:
        """The groups that a user gives.

        Args:
            manifest: What the rank owns.
            windows: Tokens of the window of those groups that have one.

        Raises:
            ArgumentError: No groups, no manifests, a window of no group, or one that is no number of tokens.
        """
        given: dict[str, kv_planner.RankManifest] = {}
        if isinstance(manifest, Mapping):
            for name, own in manifest.items():
                given[name] = check_kind(f"manifest[{name!r}]", own, kv_planner.RankManifest)
        else:
            given[MAIN] = check_kind("manifest", manifest, kv_planner.RankManifest)
        windows = {} if windows is None else dict(check_kind("windows", windows, Mapping))  # type: ignore[type-abstract]
        for name, window in windows.items():
            if check_whole(f"windows[{name!r}]", window, 2**63 - 1) == 0:
                raise ArgumentError(f"windows[{name!r}]: 0 tokens", remedy="leave the group out, or give its window")
        groups = cls(Group(name, own, windows.get(name)) for name, own in given.items())
        groups.check_names("windows", windows)
        return groups

    @property
    def placement(self) -> kv_planner.Placement:
        """Where the rank stands."""
        return next(iter(self)).manifest.placement

    @property
    def names(self) -> tuple[str, ...]:
        """In the order in which they were given."""
        return tuple(self._groups)

    @property
    def paged(self) -> tuple[str, ...]:
        """Groups whose layout has pages, on whatever stage."""
        return tuple(
            group.name for group in self if any(spec.item_kind == "page" for spec in group.manifest.layout.components)
        )

    def check_names(self, argument: str, given: Iterable[str]) -> None:
        """Refuses names of no group.

        Raises:
            ArgumentError: There is one.
        """
        unknown = sorted(set(given) - set(self._groups))
        if unknown:
            raise ArgumentError(
                f"{argument}: {unknown} are none of the groups {sorted(self._groups)}",
                local=str(unknown),
                consequence="nothing was done",
                remedy="name groups of the manifests",
            )

    def get(self, name: str) -> Group | None:
        """The group of a name, where there is one."""
        return self._groups.get(name)

    def __getitem__(self, name: str) -> Group:
        """The group of a name."""
        return self._groups[name]

    def __iter__(self) -> Iterator[Group]:
        """In the order in which they were given."""
        return iter(self._groups.values())

    def __len__(self) -> int:
        """How many there are."""
        return len(self._groups)

    def label(self, name: str) -> str:
        """How texts name a group; empty where there is only one."""
        return f"group {name!r}: " if len(self) > 1 else ""
