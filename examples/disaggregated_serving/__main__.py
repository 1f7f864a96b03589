"""`python -m disaggregated_serving`: ties this process to the one that started it, then runs `demo.py`.

Nothing slow is imported before the tie is made, so that no kill can leave a process behind.
"""

from __future__ import annotations

import os
import signal
import sys

from .lifeline import die_with

PARENT = "DISAGGREGATED_SERVING_PARENT"
"""Environment variable: process id of the starter, where it is not certain to be alive when this line is reached."""


def _stop(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def main() -> int:
    """Run the demo; an interrupt at any moment ends everything with one line."""
    signal.signal(signal.SIGTERM, _stop)
    signal.signal(signal.SIGINT, _stop)
    die_with(int(os.environ.get(PARENT, os.getppid())), signal.SIGTERM)
    try:
        from .demo import app

        app()
    except KeyboardInterrupt:
        print("interrupted: all processes were ended", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
