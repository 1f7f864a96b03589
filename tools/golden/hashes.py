"""SGLang's page hashes: the chain from its compiled code, and the seeds of namespaces."""

from __future__ import annotations

import random
from array import array
from typing import Any

from sglang.srt.mem_cache.rust_tree_core.extension import bindings
from sglang.srt.mem_cache.utils import storage_namespace_seed

__all__ = ["record"]

NAMESPACES: tuple[tuple[str | None, str | None], ...] = (
    (None, None), ("", None), (None, ""), ("adapter", None), (None, "salt"), ("adapter", "salt"), ("ad", "aptersalt"),
    ("größe", "盐"),
)  # fmt: skip


def record() -> dict[str, Any]:
    """Chains over random tokens, narrow and wide, with and without a prior digest; the last page may be partial."""
    draw = random.Random(11)
    chains = []
    for page_size in (1, 4, 16, 128):
        for length in (0, 1, page_size, page_size + 1, 3 * page_size, 3 * page_size + page_size // 2):
            for limit in (1 << 17, 1 << 32, 1 << 40):
                tokens = [draw.randrange(limit) for _ in range(length)]
                prior = draw.choice([None, f"{draw.getrandbits(256):064x}"])
                hashes = bindings.get_hash_str(array("q", tokens), prior, page_size)
                chains.append({"page_size": page_size, "tokens": tokens, "prior": prior, "hashes": list(hashes)})
    edge = [(1 << 32) - 1, 0, 1 << 32, 5]
    chains.append(
        {
            "page_size": 2,
            "tokens": edge,
            "prior": None,
            "hashes": list(bindings.get_hash_str(array("q", edge), None, 2)),
        }
    )
    seeds = [
        {"extra_key": key, "cache_salt": salt, "seed": storage_namespace_seed(key, salt)} for key, salt in NAMESPACES
    ]
    return {"chains": chains, "seeds": seeds}
