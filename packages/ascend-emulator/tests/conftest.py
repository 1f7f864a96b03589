"""The emulator for every test below this folder, and the graph case that several files use."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import ascend_emulator
import pytest

sys.path.insert(0, str(Path(__file__).parent))  # helpers beside the tests
ascend_emulator.install()

import torch  # noqa: E402
import torch_npu  # noqa: E402
from ascend_emulator._queue import scheduler  # noqa: E402


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Every test starts and ends with idle streams; what a test leaves queued would be the next one's surprise."""
    yield
    assert not scheduler.captures and not scheduler.updates
    for _ in range(3):
        try:
            for device in scheduler.devices():
                torch_npu.npu.synchronize(device)
        except ascend_emulator.EmulatorError:
            continue
        return
    raise AssertionError("streams could not be drained")


@pytest.fixture
def short_wait() -> Iterator[float]:
    """Waits give up after a tenth of a second, so that deadlocks are reported soon."""
    before = scheduler.wait_seconds
    ascend_emulator.install(wait_seconds=0.1)
    yield 0.1
    ascend_emulator.install(wait_seconds=before)


@pytest.fixture
def side() -> torch_npu.npu.Stream:
    """A stream that is not the one on which graphs are captured: torch_npu has 32 and hands them out in turn."""
    torch_npu.npu.graph(torch_npu.npu.NPUGraph())  # makes the capture stream
    stream = torch_npu.npu.Stream()
    while stream == torch_npu.npu.graph.default_capture_stream:
        stream = torch_npu.npu.Stream()
    return stream


class AttentionCase:
    """A captured attention over a paged cache whose length is the updated host argument, and what it must return."""

    page, heads, dim, pages = 128, 1, 64, 4

    def __init__(self, calls: int = 1) -> None:
        generator = torch.Generator().manual_seed(7)
        tokens = (self.pages - 1) * self.page
        self.keys = torch.randn(tokens, self.heads, self.dim, generator=generator).half()
        self.values = torch.randn(tokens, self.heads, self.dim, generator=generator).half()
        self.query = torch.randn(1, 1, self.heads, self.dim, generator=generator).half()
        shape = (self.pages, self.page, self.heads * self.dim)
        self.key_cache = torch.zeros(shape, dtype=torch.float16, device="npu")
        self.value_cache = torch.zeros(shape, dtype=torch.float16, device="npu")
        self.key_cache[1:] = self.keys.view(-1, self.page, self.heads * self.dim).to("npu")
        self.value_cache[1:] = self.values.view(-1, self.page, self.heads * self.dim).to("npu")
        self.table = torch.arange(1, self.pages, dtype=torch.int32).view(1, -1).to("npu")
        self.static_query = self.query.to("npu")
        self.graph = torch_npu.npu.NPUGraph()
        with torch_npu.npu.graph(self.graph, auto_dispatch_capture=True):
            outputs = [self.attend([3]) for _ in range(calls)]
            self.out = torch.stack(outputs) + 0

    def attend(self, lengths: list[int]) -> torch.Tensor:
        """One attention with the given lengths."""
        out: torch.Tensor = torch_npu.npu_fused_infer_attention_score_v2(
            self.static_query,
            self.key_cache,
            self.value_cache,
            actual_seq_kvlen=lengths,
            block_table=self.table,
            num_query_heads=self.heads,
            num_key_value_heads=self.heads,
            softmax_scale=0.125,
            block_size=self.page,
            sparse_mode=0,
            input_layout="BSND",
        )[0]
        return out

    def update(self, *lengths: int) -> None:
        """One update; several lengths go to the records in order."""
        self.graph.update(cpu_update_input=[{"actual_seq_kvlen": [n]} for n in lengths])

    def expected(self, length: int) -> torch.Tensor:
        """Shape: [heads, dim]; the attention of the query over the first `length` tokens, in float32."""
        weights = torch.einsum("hd,khd->hk", self.query[0, 0].float(), self.keys[:length].float()) * 0.125
        return torch.einsum("hk,khd->hd", weights.softmax(-1), self.values[:length].float())

    def check(self, *lengths: int) -> None:
        """The captured outputs are those of the lengths, and of no other length."""
        got = self.out.cpu()[:, 0, 0].float()
        for i, length in enumerate(lengths):
            torch.testing.assert_close(got[i], self.expected(length), atol=1e-3, rtol=1e-3)
            assert (got[i] - self.expected(length + 1)).abs().max() > 2e-3


@pytest.fixture
def attention() -> AttentionCase:
    """A captured graph with one record."""
    return AttentionCase()


@pytest.fixture
def attention_of() -> Callable[[int], AttentionCase]:
    """Builds a captured graph with several records."""
    return AttentionCase
