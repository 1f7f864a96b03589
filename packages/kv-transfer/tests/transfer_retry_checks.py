"""A batch that Mooncake really gave up is given to it again.

The decode process is stopped while bytes are on their way, longer than the engine waits, and goes on afterwards. NIXL
waits for a stopped peer without end, so that there is nothing to try again.
"""

from __future__ import annotations

import contextlib
import signal
import threading

from transfer_memory import stages
from transfer_node import PAGES, TIMEOUTS, _layout
from transfer_scenarios import BIG, Process

import kv_transfer as kt
from kv_transfer.engine import TransferHandle, TransferState, TransferStatus


def main() -> None:
    engine = kt.create_engine("mooncake", transfer_timeout=2.0)
    failed, poll = threading.Event(), engine.poll

    def watched(handle: TransferHandle) -> TransferStatus:
        status = poll(handle)
        if status.state is TransferState.FAILED:
            print(f"the engine gave up: {status.error}", flush=True)
            failed.set()
        return status

    engine.poll = watched  # type: ignore[method-assign]
    memory = stages(_layout(), 1, pages=PAGES)[0]
    with contextlib.ExitStack() as keep:
        decode = Process(role="decode", engine="mooncake", bind="tcp://127.0.0.1:0", stages=1, policy="retry")
        keep.callback(decode.kill)
        endpoint = decode.up().ok("endpoint")["endpoint"]
        with kt.Sender(memory.manifest, engine, endpoint=endpoint, timeouts=TIMEOUTS) as sender:
            sender.connect()
            decode.ok("ready")
            for room, pages in ((1, [1]), (0, BIG)):
                decode.ok("open", room=room, pages=pages)
                sending = sender.open(room)
                if room == 1:  # a first contact has time-outs of its own
                    sending.send(pages, start=0)
                    sending.finish()
                    decode.ok("wait", room=room)
                    decode.ok("wipe", pages=pages)
            decode.signal(signal.SIGSTOP)
            sending.send(BIG[::-1], start=0)
            assert failed.wait(60), "the engine did not give up"
            assert not sending.pages_released
            decode.signal(signal.SIGCONT)
            sending.finish({"stage": 0}, timeout=60)
            decode.ok("wait", room=0)
            moved = list(zip(BIG, BIG[::-1], strict=True))
            assert decode.ok("faults", moved=moved, stages=[0, 1])["faults"] == []
        assert decode.leave() == 0
    engine.close()
    print("as it should be", flush=True)


if __name__ == "__main__":
    main()
