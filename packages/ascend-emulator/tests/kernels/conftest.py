"""What the tests of every family of kernels use: a call that must be refused, and random numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ascend_emulator.kernels import REGISTRY, RULES, OpRefused

Refuses = Callable[..., None]


@pytest.fixture
def refuses() -> Refuses:
    """Checks that a call breaks one rule, says so, and leaves its arguments alone."""

    def check(rule: str, op: str, *args: Any, **kwargs: Any) -> None:
        given = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
        before = [x.clone() for x in given]
        with pytest.raises(OpRefused) as caught:
            REGISTRY[op](*args, **kwargs)
        assert caught.value.rule is RULES[rule], caught.value
        assert caught.value.op == op
        assert all(torch.equal(x, y) for x, y in zip(given, before, strict=True))

    return check
