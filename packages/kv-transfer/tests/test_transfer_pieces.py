"""State tables, coverage, silence and records, each against its law."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping

import kv_planner as kp
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kv_transfer as kt
from kv_transfer.coverage import Coverage
from kv_transfer.silence import Silence
from kv_transfer.states import (
    PEER_STEPS,
    RECEIVER_STEPS,
    SENDER_PHASE_STEPS,
    SENDER_STEPS,
    ReceiverState,
    SenderState,
    StateMachine,
)

TABLES: list[Mapping[enum.Enum, frozenset[enum.Enum]]] = [
    PEER_STEPS,  # type: ignore[list-item]
    RECEIVER_STEPS,  # type: ignore[list-item]
    SENDER_PHASE_STEPS,  # type: ignore[list-item]
    SENDER_STEPS,  # type: ignore[list-item]
]


@pytest.mark.parametrize("table", TABLES, ids=lambda table: type(next(iter(table))).__name__)
def test_tables_name_every_state_end_somewhere_and_have_no_cycle(
    table: Mapping[enum.Enum, frozenset[enum.Enum]],
) -> None:
    kind = type(next(iter(table)))
    assert set(table) == set(kind)
    order = {state: index for index, state in enumerate(kind)}
    for state, steps in table.items():
        assert all(order[step] > order[state] for step in steps)
    assert any(not steps for steps in table.values())


def test_an_illegal_step_is_named() -> None:
    machine = StateMachine("room 3", SENDER_STEPS, SenderState.SENDING)
    with pytest.raises(kt.SessionStateError, match="room 3: no step from 'sending' to 'finished'"):
        machine.to(SenderState.FINISHED)
    assert machine.state is SenderState.SENDING
    assert not machine.is_terminal
    assert StateMachine("x", RECEIVER_STEPS, ReceiverState.COMPLETE).is_terminal


@given(
    st.lists(
        st.tuples(st.sets(st.integers(0, 2)), st.integers(0, 4), st.integers(0, 4)).filter(lambda c: c[1] + c[2] <= 4),
        max_size=12,
    )
)
def test_coverage_takes_each_cell_once(claims: list[tuple[set[int], int, int]]) -> None:
    layers: list[tuple[kp.Part, int]] = [("target", 0), ("target", 1), ("draft", 1)]
    coverage = Coverage(layers, 4)
    seen: set[tuple[int, int]] = set()
    for rows, start, count in claims:
        cells = {(row, page) for row in rows for page in range(start, start + count)}
        wanted = [layers[row] for row in rows]
        if cells & seen:
            with pytest.raises(kt.CoverageError, match="was sent already"):
                coverage.claim(wanted, start, count)
        else:
            coverage.claim(wanted, start, count)
            seen |= cells
    if len(seen) == 12:
        coverage.check_complete()
    else:
        with pytest.raises(kt.CoverageError, match=f"never sent \\({12 - len(seen)} such pairs of 12\\)"):
            coverage.check_complete()


def test_a_pause_of_our_own_is_not_the_silence_of_the_peer() -> None:
    silence = Silence(kt.Timeouts(heartbeat_interval=1, peer_lost_after=4), 0.0)
    assert silence.silent_for(1.0) == 1.0
    assert silence.silent_for(61.0) == 1.0
    assert silence.silent_for(62.0) == 2.0
    silence.heard(63.0)
    assert silence.silent_for(63.5) == 0.5
    assert silence.beat_due(63.5)
    assert not silence.beat_due(64.0)
    assert silence.beat_due(64.5)


def test_time_limits_are_checked() -> None:
    with pytest.raises(ValueError, match=r"Timeouts\.offer: expected seconds above 0, got 0"):
        kt.Timeouts(offer=0)
    with pytest.raises(ValueError, match=r"Timeouts\.transfer"):
        kt.Timeouts(transfer=math.inf)
    with pytest.raises(ValueError, match="less than two heartbeats"):
        kt.Timeouts(heartbeat_interval=1, peer_lost_after=1.5)
    with pytest.raises(ValueError, match=r"Limits\.message_bytes"):
        kt.Limits(message_bytes=65_535)


def test_errors_are_also_builtins() -> None:
    assert issubclass(kt.TransferTimeout, TimeoutError)
    assert issubclass(kt.PeerLost, ConnectionError)
    assert issubclass(kt.ProtocolError, ValueError)
    assert issubclass(kt.EngineUnavailable, ImportError)
    for name in kt.__all__:
        value = getattr(kt, name)
        if isinstance(value, type) and issubclass(value, Exception):
            assert issubclass(value, kt.TransferError)
