"""A fake engine on kv-transfer alone: two prefill stages send chunks to a decode side over the loopback engine."""

from itertools import product

import kv_planner as kp
import kv_transfer as kt
import numpy as np
import numpy.typing as npt

LAYERS, PAGES = 4, 12
NAMES: tuple[kp.Component, ...] = ("key", "value")
LAYOUT = kp.ModelLayout(
    [kp.ComponentSpec(name, layer_ids=range(LAYERS), dtype="float16", total_heads=2, dims=8) for name in NAMES],
    page_size=4,
    fingerprint="toy",
)
ITEM = LAYOUT.item_bytes("key")


def rank(layers: range, stages: int, memory: npt.NDArray[np.uint8]) -> kp.RankManifest:
    """One stage whose buffers are the rows of `memory`."""
    entries = [
        kp.BufferEntry(name, "target", layer, device="cpu", address=memory[row].ctypes.data, nbytes=memory[row].nbytes,
                       item_stride=ITEM, item_bytes=ITEM, head_range=(0, 2))
        for row, (name, layer) in enumerate(product(NAMES, layers))
    ]  # fmt: skip
    return kp.RankManifest(LAYOUT, kp.Placement(pp_rank=layers.start * stages // LAYERS, pp_size=stages), entries)


prefill = [np.random.default_rng(stage).integers(0, 256, (LAYERS, PAGES, ITEM), dtype=np.uint8) for stage in range(2)]
decode = np.zeros((2 * LAYERS, PAGES, ITEM), dtype=np.uint8)
manifests = [rank(range(2 * stage, 2 * stage + 2), 2, prefill[stage]) for stage in range(2)]
with kt.Receiver(rank(range(LAYERS), 1, decode), kt.create_engine("loopback"), prefill_ranks=2) as receiver:
    senders = [kt.Sender(m, kt.create_engine("loopback"), endpoint=receiver.endpoint) for m in manifests]
    for sender in senders:
        sender.connect()
    receiver.wait_ready()
    for room, (source, destination) in enumerate([([1, 5, 3], [7, 2, 4]), ([9, 2, 8], [1, 11, 5])]):
        arriving = receiver.open(room, destination, tokens=11)
        for stage, sender in enumerate(senders):
            leaving = sender.open(room)
            leaving.send(source[:2], start=0)
            leaving.send(source[2:], start=2)
            leaving.finish({"stage": stage})
        print(arriving.wait(20))
        for row, (part, layer) in enumerate(product(range(2), range(LAYERS))):
            assert (decode[row, destination] == prefill[layer // 2][2 * part + layer % 2, source]).all()
    for sender in senders:
        sender.close()
print("kv-transfer over loopback: every byte arrived")
