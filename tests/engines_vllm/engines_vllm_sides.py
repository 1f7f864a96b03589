"""Both sides between vLLM instances: a prefill process that takes commands, and steps of the decode side."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engines_vllm_instance import Instance  # type: ignore[import-not-found]  # beside the tests

FOLDER = Path(__file__).parent
WAIT = 60.0


class Prefill:
    """The prefill process, which runs `script`."""

    def __init__(self, script: str = "engines_vllm_instance.py") -> None:
        start = f"import conftest, runpy; runpy.run_path({script!r}, run_name='__main__')"
        self.popen = subprocess.Popen(
            [sys.executable, "-c", start],
            cwd=FOLDER,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(FOLDER), os.environ.get("PYTHONPATH", "")])},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def read(self) -> dict[str, Any]:
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            if line.startswith("{"):  # vLLM logs to the same place
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise AssertionError(f"the prefill process ended with {self.popen.wait()}")

    def call(self, do: str, **arguments: Any) -> dict[str, Any]:
        assert self.popen.stdin is not None
        self.popen.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self.popen.stdin.flush()
        return self.read()

    def end(self) -> None:
        self.popen.kill()
        self.popen.wait()
        for pipe in (self.popen.stdin, self.popen.stdout):
            assert pipe is not None
            pipe.close()

    def until(self, what: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        deadline = time.monotonic() + WAIT
        while not what(answer := self.call("run", steps=1)):
            assert time.monotonic() < deadline, answer
        return answer


def until(decode: Instance, what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT
    while not what():
        decode.step()
        assert time.monotonic() < deadline, (decode.ended, decode.loaded)
        time.sleep(0.001)
