"""Entry point of a worker process: `python -m disaggregated_serving.worker ROLE ADDRESS FRONT CONFIG`.

It ties the process's life to its front before anything slow is imported, and reports whatever ends it. The work is in
`prefill.py` and `decode.py`.
"""

from __future__ import annotations

import sys
import traceback
from typing import cast

from .config import Failed, Role, ServeConfig
from .lifeline import die_with


def main(role: Role, address: str, config_text: str) -> int:
    """Run one worker until the front says Shutdown."""
    import torch

    from .setup import Link, prepare

    link = Link(address)
    torch.set_num_threads(1)  # three processes share the machine: threads that spin at barriers cost ten times more
    try:
        with torch.inference_mode():
            setup = prepare(ServeConfig.model_validate_json(config_text))
            if role == "decode":
                from .decode import run_decode

                run_decode(link, setup)
            else:
                from .prefill import run_prefill

                run_prefill(link, setup, stage=int(role[-1]))
    except (SystemExit, KeyboardInterrupt):
        return 0
    except BaseException as error:
        traceback.print_exc()
        lost = type(error).__name__ in {"PeerLost", "TransferAborted"}
        link.send(Failed(message=f"{type(error).__name__}: {error}", peer_lost=lost))
        return 1
    finally:
        link.close()
    return 0


if __name__ == "__main__":
    _, role_name, front_address, front, config_json = sys.argv
    die_with(int(front))
    raise SystemExit(main(cast("Role", role_name), front_address, config_json))
