"""A pytest plugin: property tests alone, each with SOAK_FACTOR times the examples that it asks for.

It scales what a test's own `@settings` say, so that every law keeps its share. It chooses no seed and reports nothing.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import HealthCheck, is_hypothesis_test, settings

FACTOR = int(os.environ["SOAK_FACTOR"])


def _scaled(own: settings) -> settings:
    return settings(
        own,
        max_examples=own.max_examples * FACTOR,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        print_blob=True,
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep property tests and state machines, and scale them, each function once."""
    kept, dropped, seen = [], [], set()
    for item in items:
        case: Any = getattr(item, "cls", None)
        function: Any = getattr(item, "obj", None)
        function = getattr(function, "__func__", function)
        if case is not None and isinstance(getattr(case, "settings", None), settings):  # a state machine's TestCase
            kept.append(item)
            if case not in seen:
                seen.add(case)
                case.settings = _scaled(case.settings)
        elif function is not None and is_hypothesis_test(function):
            kept.append(item)
            if function not in seen:
                seen.add(function)
                own: Any = getattr(function, "_hypothesis_internal_use_settings", None) or settings.default
                function._hypothesis_internal_use_settings = _scaled(own)
        else:
            dropped.append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=dropped)
