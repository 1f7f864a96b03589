"""A fake engine on kv-planner alone: the cache of two prefill stages reaches a decode rank by the plan's blocks."""

import ctypes
from itertools import product

import kv_planner as kp
import numpy as np
import numpy.typing as npt

LAYERS, PAGES = 4, 9
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


random = np.random.default_rng(0)
prefill = [random.integers(0, 256, (LAYERS, PAGES, ITEM), dtype=np.uint8) for _ in range(2)]
decode = np.zeros((2 * LAYERS, PAGES, ITEM), dtype=np.uint8)
local = kp.Deployment([rank(range(2 * stage, 2 * stage + 2), 2, prefill[stage]) for stage in range(2)])
agreement = kp.agree(local, kp.Deployment([rank(range(LAYERS), 1, decode)]))
for stage in range(2):
    plan = kp.Plan(agreement.route(stage), kp.Runs([3, 4, 8], [7, 1, 2]))
    for batch in kp.lower(plan).batches:
        for source, destination, nbytes in zip(batch.source, batch.destination, batch.nbytes, strict=True):
            ctypes.memmove(int(destination), int(source), int(nbytes))
for row, (part, layer) in enumerate(product(range(2), range(LAYERS))):
    assert (decode[row, [7, 1, 2]] == prefill[layer // 2][2 * part + layer % 2, [3, 4, 8]]).all()
assert not decode[:, [0, 3, 4, 5, 6, 8]].any(), "no other page was written"
try:
    kp.Runs([3], [0])
except kp.PlanError as error:
    print("refused:", error)
print(f"kv-planner {kp.__version__} ({kp.BUILD_PROFILE}): every byte arrived")
