"""The directory: distinct ranks, generations, lifetimes; and the same over a socket, with whatever bytes come."""

from __future__ import annotations

import dataclasses
import itertools
import random

import kv_planner as kp
import pytest
import zmq

import kv_transfer as kt
from kv_transfer.errors import ArgumentError, PeerLost

PREFILL = [kt.Place(dp_rank=dp, dp_size=2, pp_rank=pp, pp_size=2) for dp in range(2) for pp in range(2)]


def _member(place: kt.Place) -> kt.Member:
    return kt.Member(side="prefill", place=place)


def test_a_rank_counts_once_however_often_it_comes() -> None:
    directory = kt.Directory()
    first = directory.register(_member(PREFILL[0]))
    again = directory.register(_member(PREFILL[0]))
    assert again > first and len(directory.members("prefill")) == 1
    assert not directory.is_whole("prefill")
    assert not directory.renew(first) and directory.renew(again)
    assert not directory.remove(first)
    directory.register(_member(PREFILL[1]))
    assert directory.is_whole("prefill") and not directory.is_whole("prefill", 1)
    assert [member.place.rank for member in directory.members("prefill")] == [kt.Rank(0), kt.Rank(1)]
    assert directory.members("decode") == ()
    assert directory.remove(again) and not directory.is_whole("prefill")


def test_who_does_not_renew_is_gone() -> None:
    now = 0.0
    directory = kt.Directory(lifetime=10, clock=lambda: now)
    kept, lost = directory.register(_member(PREFILL[0])), directory.register(_member(PREFILL[1]))
    now = 8.0
    assert directory.renew(kept)
    now = 11.0
    assert not directory.renew(lost)
    assert [member.generation for member in directory.members("prefill")] == [kept]


def test_a_number_of_an_earlier_life_of_the_directory_is_nobodys() -> None:
    old = kt.Directory()
    numbers = [old.register(_member(place)) for place in PREFILL]
    new = kt.Directory()
    first = new.register(_member(PREFILL[0]))
    assert first > max(numbers)
    assert not any(new.renew(number) or new.remove(number) for number in numbers)
    assert len(new.members("prefill")) == 1


def test_impossible_and_unlike_ranks_are_refused() -> None:
    directory = kt.Directory()
    with pytest.raises(ArgumentError, match="a rank that its sizes do not hold"):
        directory.register(_member(kt.Place(tp_rank=2, tp_size=2)))
    directory.register(_member(PREFILL[0]))
    with pytest.raises(ArgumentError, match=r"\(1, 1, 1, 1\).* said \(2, 2, 1, 1\)"):
        directory.register(_member(kt.Place()))
    with pytest.raises(ArgumentError, match="lifetime"):
        kt.Directory(lifetime=0)


def test_a_place_is_a_placement() -> None:
    placement = kp.Placement(dp_rank=1, dp_size=2, pp_rank=2, pp_size=3, tp_rank=3, tp_size=4)
    place = kt.Place.of(placement)
    assert (place.rank, place.sizes, place.group_size) == (kt.Rank(2, 3, 0, 1), (2, 3, 1, 4), 12)


def test_other_processes_ask_over_a_socket() -> None:
    with kt.DirectoryServer(secret="a secret of sixteen") as server:
        client = kt.DirectoryClient(server.endpoint, secret="a secret of sixteen")
        receiver = kt.Member(side="decode", place=kt.Place(), endpoint="tcp://127.0.0.1:4000", serves=1)
        number = client.register(receiver)
        assert client.members("decode") == (dataclasses.replace(receiver, generation=number),)
        assert client.members("decode") == server.directory.members("decode")
        assert client.is_whole("decode") and not client.is_whole("decode", 1) and not client.is_whole("prefill")
        assert client.renew(number) and not client.renew(number + 1)
        with pytest.raises(ArgumentError, match=r"refused by the directory.*sizes do not hold"):
            client.register(_member(kt.Place(tp_rank=2, tp_size=2)))
        assert client.remove(number) and not client.remove(number)
        stranger = kt.DirectoryClient(server.endpoint, timeout=0.3)
        with pytest.raises(PeerLost, match=r"did not answer within 0\.3 s"):
            stranger.members("decode")
        with pytest.raises(ValueError, match="cannot be bound"):
            kt.DirectoryServer(bind=server.endpoint)
    with pytest.raises(PeerLost, match="did not answer"):
        kt.DirectoryClient(server.endpoint, timeout=0.2).members("decode")


def test_the_service_answers_whatever_comes() -> None:
    dice = random.Random(5)
    right = b'{"v":1,"type":"register","member":{"side":"prefill","place":{}}}'
    with kt.DirectoryServer() as server, zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(server.endpoint)
        for round_ in range(300):
            data = bytearray(right)
            for _ in range(dice.randint(1, 6)):
                data[dice.randrange(len(data))] = dice.randrange(256)
            socket.send_multipart([bytes(data)] * dice.choice([1, 1, 1, 2]) if round_ % 9 else [b""])
            assert socket.poll(60_000), data
            assert b'"v":1' in socket.recv()
        assert len(kt.DirectoryClient(server.endpoint).members("prefill")) <= 1


def test_every_rank_has_a_port_of_its_own() -> None:
    sizes = [(2, 2, 2, 2), (3, 1, 1, 4), (1, 1, 1, 1), (1, 5, 2, 3)]
    for dp, pp, dcp, tp in sizes:
        ports = [
            kt.rank_port(
                30_000,
                kp.Placement(
                    dp_rank=ranks[0], dp_size=dp, pp_rank=ranks[1], pp_size=pp,
                    dcp_rank=ranks[2], dcp_size=dcp, tp_rank=ranks[3], tp_size=tp,
                ),
            )
            for ranks in itertools.product(range(dp), range(pp), range(dcp), range(tp))
        ]  # fmt: skip
        assert sorted(ports) == list(range(30_000, 30_000 + dp * pp * dcp * tp))
    place = kp.Placement(tp_rank=1, tp_size=4)
    assert kt.rank_port(65_532, place) == 65_533
    for base in (0, 65_533, 70_000):
        with pytest.raises(kt.ArgumentError, match="base"):
            kt.rank_port(base, place)
