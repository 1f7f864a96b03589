"""Peers that do not fit, noise, a taken port and a directory that is down, while a pair serves; the soak tries more."""

from __future__ import annotations

import random

import transfer_strangers as strangers


def test_whatever_comes_the_pair_serves_on() -> None:
    with strangers.serving(random.Random(3)) as pair:
        assert strangers.misfits(pair) == len(strangers.MISFITS) + 1
        assert strangers.noise(pair, 2000, 4) == 2000
        strangers.taken_port(pair)
        assert pair.receiver.is_ready


def test_each_difference_is_named_on_both_sides() -> None:
    assert strangers.other_layouts() == len(strangers.LAYOUTS)


def test_a_directory_that_is_down_is_named_in_time() -> None:
    strangers.directory_down()
