"""Lets the integration tests import the example, in this process and in the ones that it starts."""

from __future__ import annotations

import os
import sys
from pathlib import Path

EXAMPLES = str(Path(__file__).resolve().parents[2] / "examples")
sys.path.insert(0, EXAMPLES)
os.environ["PYTHONPATH"] = os.pathsep.join([EXAMPLES, *filter(None, [os.environ.get("PYTHONPATH")])])
