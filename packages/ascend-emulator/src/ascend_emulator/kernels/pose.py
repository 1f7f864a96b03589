"""Which CANN release and which chip the emulator stands for, and which rules that switches off.

This module owns the setting. Without one, every rule holds, whatever release or chip it is documented for.
"""

from __future__ import annotations

from dataclasses import dataclass

CANN_RELEASES = ("8.0", "8.1", "8.2", "8.3", "8.5", "9.0", "9.1", "9.2")
CHIPS = ("910B", "910C", "950")
CHIP_NAMES = {"A2": "910B", "A3": "910C", "A5": "950"}
"""Names of product series and the chip that each is built on."""


@dataclass(frozen=True)
class Pose:
    """What the emulator stands for.

    Attributes:
        cann: release as (major, minor), or None for the strictest of all.
        chip: one of ``CHIPS``, or None for the strictest of all.
    """

    cann: tuple[int, int] | None = None
    chip: str | None = None


@dataclass(frozen=True)
class Scope:
    """Where a rule holds.

    Attributes:
        before: releases below this one only; None for all.
        since: this release and later ones only; None for all.
        chips: these chips only; empty for all.
    """

    before: tuple[int, int] | None = None
    since: tuple[int, int] | None = None
    chips: tuple[str, ...] = ()

    def holds(self, pose: Pose) -> bool:
        """Whether the rule holds for a pose. What the pose leaves open counts as inside."""
        if self.chips and pose.chip is not None and pose.chip not in self.chips:
            return False
        if pose.cann is None:
            return True
        return not (self.before is not None and pose.cann >= self.before) and not (
            self.since is not None and pose.cann < self.since
        )

    def __str__(self) -> str:
        parts = []
        if self.since is not None:
            parts.append("CANN {}.{} and later".format(*self.since))
        if self.before is not None:
            parts.append("CANN before {}.{}".format(*self.before))
        if self.chips:
            parts.append("chips " + ", ".join(self.chips))
        return "; ".join(parts) or "all"


EVERYWHERE = Scope()
_current = Pose()


def current() -> Pose:
    """The pose in force."""
    return _current


def set_pose(*, cann: str | None = None, chip: str | None = None) -> Pose:
    """Stand for a CANN release and a chip; rules that are documented for others are off from now on.

    Args:
        cann: one of ``CANN_RELEASES``, or a patch release of one, such as "8.5.0"; None: every rule of every release.
        chip: one of ``CHIPS``, or the name of its series: A2, A3, A5; None: every rule of every chip.

    Returns:
        The pose.

    Raises:
        ValueError: an unknown release or chip.
    """
    global _current
    release = None
    if cann is not None:
        name = ".".join(cann.split(".")[:2])
        if name not in CANN_RELEASES:
            raise ValueError(f"cann: expected one of {', '.join(CANN_RELEASES)}, got {cann!r}")
        major, minor = name.split(".")
        release = int(major), int(minor)
    if chip is not None:
        chip = CHIP_NAMES.get(chip, chip)
        if chip not in CHIPS:
            raise ValueError(f"chip: expected one of {', '.join((*CHIPS, *CHIP_NAMES))}, got {chip!r}")
    _current = Pose(release, chip)
    return _current
