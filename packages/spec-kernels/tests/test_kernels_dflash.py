"""Owns the proof of block drafting: prepared blocks, accepted prefixes, and one answer a fact."""

from __future__ import annotations

from typing import Any

import pytest
import spec_kernels as sk
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

cases = settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
seeds = st.integers(0, 2**32)


@cases
@given(seed=seeds)
def test_prepared_blocks(place: Any, seed: int) -> None:
    numbers = place.case(seed)
    height, columns, bs, block = (numbers.randrange(low, 6 + 12 * low) for low in (1, 1, 0, 1))
    table = place.ints(numbers, height * columns, -1, 900).view(height, columns)
    rows, prefixes = place.ints(numbers, bs, -1, height + 1), place.ints(numbers, bs, 0, columns + 2)
    bonus = place.ints(numbers, bs, -1, 900)
    placed = place.put(rows, table, bonus, prefixes)
    found = sk.prepare_block(
        placed[1], placed[0], placed[3], placed[2], block=block, mask_token=77, backend=place.backend
    )
    ids, positions, locs = [], [], []
    for i in range(bs):
        for k in range(block):
            ids.append(max(int(bonus[i]), 0) if k == 0 else 77)
            position = int(prefixes[i]) + k
            positions.append(position)
            inside = 0 <= int(rows[i]) < height and position < columns
            locs.append(max(int(table[int(rows[i]), position]), 0) if inside else 0)
    assert found.input_ids.tolist() == ids and found.positions.tolist() == positions
    assert found.locs.tolist() == locs and found.locs.dtype == table.dtype


@cases
@given(seed=seeds)
def test_accepted_prefixes(place: Any, seed: int) -> None:
    numbers = place.case(seed)
    bs, block = numbers.randrange(0, 5), numbers.randrange(1, 18)
    candidates, target = (place.ints(numbers, bs * block, -1, 2).view(bs, block) for _ in range(2))
    prefixes = place.ints(numbers, bs, 0, 900)
    placed = place.put(prefixes, candidates, torch.zeros(0), target)
    found = sk.accept_block(placed[1], placed[3], placed[0], backend=place.backend)
    for i in range(bs):
        tokens, wanted = candidates[i].tolist(), target[i].tolist()
        correct = 0
        while correct < block - 1 and tokens[correct + 1] == wanted[correct] >= 0:
            correct += 1
        out = [*tokens[1:], 0]
        out[correct] = wanted[correct]
        assert int(found.num_correct_drafts[i]) == correct and int(found.commit_lens[i]) == correct + 1
        assert int(found.bonus[i]) == wanted[correct]
        assert int(found.seq_lens[i]) == int(prefixes[i]) + correct + 1
        assert found.out_tokens[i].tolist() == out


def test_one_answer_a_fact() -> None:
    for method in (sk.DFLASH, sk.DSPARK):
        assert all(method.serves(device) for device in ("npu", "npu:0", "cuda:1", torch.device("cuda", 1)))
        assert not method.serves("npux") and not method.serves("cpu")
        assert method.verify_kv_len(116, 16) == 116
        with pytest.raises(sk.DeviceError, match=method.name):
            method.check_device("cpu")
        with pytest.raises(sk.ShapeError, match="host_len"):
            method.verify_kv_len(15, 16)
    eagle = sk.BlockMethod("EAGLE", host_lengths_include_block=False)
    assert [eagle.verify_kv_len(length, 16) for length in (100, 7)] == [116, 23]


def test_refusals(place: Any) -> None:
    tokens = torch.zeros(2, 3, dtype=torch.int64, device=place.device)
    with pytest.raises(sk.ShapeError, match="target_predict"):
        sk.accept_block(tokens, tokens[:, :2], tokens[:, 0], backend=place.backend)
    with pytest.raises(sk.ShapeError, match="bonus"):
        sk.prepare_block(tokens, tokens[:, 0], tokens[:, 0], tokens[:1, 0], block=2, mask_token=0)
    with pytest.raises(sk.ShapeError, match="mask_token"):
        sk.prepare_block(tokens, tokens[:, 0], tokens[:, 0], tokens[:, 0], block=2, mask_token=-1)


def test_custom_ops_are_sound(opcheck: Any) -> None:
    ops = torch.ops.spec_kernels
    two, six = torch.tensor([0, 1]), torch.zeros(6, dtype=torch.int64)
    table = torch.arange(20).view(2, 10)
    opcheck(ops.prepare_block, (table, two, two + 3, two + 5, six, six.clone(), six.clone(), 9))
    rows = torch.zeros(4, 2, dtype=torch.int64)
    opcheck(ops.accept_block, (table, table + 1, two, rows, torch.zeros(2, 10, dtype=torch.int64)))
