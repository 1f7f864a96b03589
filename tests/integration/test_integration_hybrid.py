"""A hybrid pool and a pool of states as one endpoint: full attention, a sliding window and two kinds of states."""

from __future__ import annotations

import kv_planner
import kv_transfer
import torch
from kv_pool import HybridPool, MhaPool, StatePool

PAGE, WINDOW, TOKENS = 4, 7, 18
SENTINEL = -7.0


def layout(layers: list[int], heads: int, dims: tuple[int, int]) -> kv_planner.ModelLayout:
    specs = [
        kv_planner.ComponentSpec("key", layer_ids=layers, dtype="float32", total_heads=heads, dims=dims[0]),
        kv_planner.ComponentSpec("value", layer_ids=layers, dtype="float32", total_heads=heads, dims=dims[1]),
    ]
    return kv_planner.ModelLayout(specs, page_size=PAGE, fingerprint="hybrid")


def state(dims: int) -> kv_planner.ModelLayout:
    spec = kv_planner.ComponentSpec(
        "state", layer_ids=[4, 5], dtype="float32", total_heads=2, dims=dims, item_kind="request_row"
    )
    return kv_planner.ModelLayout([spec], page_size=1, fingerprint="hybrid")


class Side:
    """Pools of one rank; every element of a filled one is a number of its own."""

    def __init__(self, pages: int, window_pages: int) -> None:
        full = MhaPool(layout([0, 2], 2, (8, 6)), size=pages * PAGE, device="cpu")
        window = MhaPool(layout([1, 3], 4, (4, 4)), size=window_pages * PAGE, device="cpu")
        self.pool = HybridPool(full, window)
        self.states = StatePool({"conv": state(6), "recurrent": state(16)}, requests=3, device="cpu")
        self.storage = {
            "full": [full.key(layer) for layer in (0, 2)] + [full.value(layer) for layer in (0, 2)],
            "window": [window.key(layer) for layer in (1, 3)] + [window.value(layer) for layer in (1, 3)],
            "conv": [self.states.state("conv", layer) for layer in (4, 5)],
            "recurrent": [self.states.state("recurrent", layer) for layer in (4, 5)],
        }
        for tensors in self.storage.values():
            for tensor in tensors:
                tensor.fill_(SENTINEL)

    def fill(self) -> None:
        begin = 0
        for tensors in self.storage.values():
            for tensor in tensors:
                tensor.copy_(torch.arange(begin, begin + tensor.numel()).view(tensor.shape))
                begin += tensor.numel()

    @property
    def manifests(self) -> dict[str, kv_planner.RankManifest]:
        found = {"full": self.pool.full.manifest(), "window": self.pool.window.manifest()}
        return found | {kind: self.states.kind(kind).manifest() for kind in self.states.kinds}


def test_a_hybrid_pool_is_one_endpoint() -> None:
    """5 pages, the last 7 of 18 tokens in the window: 3 window pages travel, from those that prefill still has."""
    prefill, decode = Side(9, 7), Side(12, 5)
    prefill.fill()
    prefill.pool.pages.leave(prefill.pool.pages.alloc(2))  # another request's, so that ids of the groups go apart
    source = prefill.pool.pages.alloc(5)
    assert prefill.pool.pages.window_pages(source).tolist() != source.tolist()
    prefill.pool.pages.leave(source[:2])
    prefill.pool.pages.verify()

    engines = [kv_transfer.create_engine("loopback") for _ in range(2)]
    windows = {"window": WINDOW}
    with (
        kv_transfer.Receiver(decode.manifests, engines[0], prefill_ranks=1, windows=windows) as receiver,
        kv_transfer.Sender(prefill.manifests, engines[1], endpoint=receiver.endpoint, windows=windows) as sender,
    ):
        sender.connect()
        receiver.wait_ready()
        spans = receiver.spans(TOKENS)
        first = spans["window"].first
        places = decode.pool.pages.full.alloc(spans["full"].places)
        window = decode.pool.pages.window.alloc(spans["window"].places)
        assert (first, len(window)) == (2, 3)
        arriving = receiver.open(0, {"full": places, "window": window}, tokens=TOKENS, row=3)
        leaving = sender.open(0)
        for start, stop in ((0, 3), (3, 5)):
            own = source[start:stop]
            leaving.send({"full": own, "window": prefill.pool.pages.window_pages(own)}, start=start)
        leaving.send_states(2)
        leaving.finish()
        arriving.wait(10)
    moved = {
        "full": (places, source),
        "window": (window, prefill.pool.pages.window_pages(source[first:])),
        "conv": ([3], [2]),
        "recurrent": ([3], [2]),
    }
    for name, (to, taken) in moved.items():
        for here, there in zip(decode.storage[name], prefill.storage[name], strict=True):
            expected = torch.full_like(here, SENTINEL)
            expected[torch.as_tensor(to)] = there[torch.as_tensor(taken)]
            assert torch.equal(here, expected), name
    for engine in engines:
        engine.close()
