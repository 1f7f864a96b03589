"""A fake engine on kv-pool alone: prompts written in chunks, pages reused, and K and V moved to a second pool."""

import ctypes

import kv_planner as kp
import torch
from kv_pool import MhaPool, OutOfPages, PageAllocator, slots_for

LAYERS, PAGE = 3, 4
LAYOUT = kp.ModelLayout(
    [
        kp.ComponentSpec("key", layer_ids=range(LAYERS), dtype="float16", total_heads=2, dims=8),
        kp.ComponentSpec("value", layer_ids=range(LAYERS), dtype="float16", total_heads=2, dims=4),
    ],
    page_size=PAGE,
    fingerprint="toy",
)
prefill, decode = (MhaPool(LAYOUT, size=32, device="cpu") for _ in range(2))
sender, receiver = (PageAllocator(prefill.num_pages, PAGE) for _ in range(2))
torch.manual_seed(0)
receiver.alloc(3)  # so that the two sides number pages differently
for length in (10, 13, 9):  # each request's pages are given back, and serve the next
    key, value = (torch.randn(LAYERS, length, 2, dim).half() for dim in (8, 4))
    pages, places = sender.alloc(-(-length // PAGE)), receiver.alloc(-(-length // PAGE))
    for start in range(0, length, 5):  # chunks that do not fit pages
        stop = min(start + 5, length)
        slots = torch.from_numpy(slots_for(pages, start, stop, PAGE))
        for layer in range(LAYERS):
            prefill.write(layer, slots, key[layer, start:stop], value[layer, start:stop])
    plan = kp.Plan(kp.agree(prefill.manifest(), decode.manifest()).route(), kp.Runs(pages, places))
    for batch in kp.lower(plan).batches:
        for source, destination, nbytes in zip(batch.source, batch.destination, batch.nbytes, strict=True):
            ctypes.memmove(int(destination), int(source), int(nbytes))
    for layer in range(LAYERS):
        assert torch.equal(decode.key(layer)[places].flatten(0, 1)[:length], key[layer])
        assert torch.equal(decode.value(layer)[places].flatten(0, 1)[:length], value[layer])
    sender.release(pages)
    receiver.release(places)
assert (sender.held, receiver.held) == (0, 3)
try:
    sender.alloc(99)
except OutOfPages as error:
    print("refused:", error)
print("kv-pool on cpu: every request's K and V arrived")
