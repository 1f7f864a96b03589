"""A decode rank in a process of its own, driven by its arguments: for `test_engines_transfer_processes.py`.

`python engines_transfer_node.py '[["mooncake", {}, 18998], …]'` serves one request after another, one an engine, in
that order, and prints a line a request. It imports SGLang as the tests do.
"""

from __future__ import annotations

import json
import sys

import conftest  # noqa: F401  # the emulated NPU and SGLang, before anything else
import pytest
from engines_transfer import Request, configured, decode_rank
from sglang.srt.disaggregation.base.conn import KVPoll
from transfer_sglang import MLA, SENTINEL, Side

__all__ = ["FROM", "LAYERS", "TO"]

LAYERS = 3
FROM, TO = [3, 7, 8, 2, 9], [4, 5, 10, 1, 6]


def main() -> None:
    """Serve what the arguments say."""
    for engine, options, port in json.loads(sys.argv[1]):
        with pytest.MonkeyPatch.context() as patch, configured(patch, port, engine, json.dumps(options)) as arguments:
            side = Side(MLA, range(LAYERS), drafts=1)
            cluster = decode_rank(arguments, port, side, mla=True)
            for room in (11, 12):
                request = Request(cluster, room)
                request.offer(TO, aux=room - 10)
                assert request.end()[1] == [KVPoll.Success], cluster.decode[0].failure_records
                side.check(TO)
                assert (side.aux[0][room - 10] == room).all(), side.aux[0]
                for memory in side.memory:
                    memory[:] = SENTINEL
            cluster.close()
        print(f"served {engine}", flush=True)


if __name__ == "__main__":
    main()
