"""SGLang's multi-layer draft-extend runners for an NPU, over `GraphBackend`.

They differ from SGLang's own in three things: the update's key comes from the captured ops, not from a table of
architectures; lengths that the batch did not publish are an error, not those of an earlier batch; padded rows write to
the reserved slot 0, whatever the batch before them did. Buffers, capture loop and rotation stay SGLang's.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.model_executor.cuda_graph_config import cuda_graph_fully_disabled
from sglang.srt.runtime_context import get_exec
from sglang.srt.speculative.multi_layer_eagle_draft_extend_cuda_graph_runner import (
    MultiLayerEagleDraftExtendCudaGraphRunner,
    MultiLayerEagleMultiStepDraftExtendCudaGraphRunner,
)

from graph_runtime.errors import HostListError

from .backend import GraphBackend

__all__ = ["MultiLayerDraftExtendRunner", "MultiStepDraftExtendRunner"]


class MultiLayerDraftExtendRunner(MultiLayerEagleDraftExtendCudaGraphRunner):  # type: ignore[misc]
    """One draft layer's graphs; in place of `MultiLayerEagleDraftExtendNpuGraphRunner`."""

    backend: Any

    def capture(self) -> None:
        """Captures with `GraphBackend` in place of the backend that SGLang chose for the device."""
        self.backend.cleanup()
        self.backend = GraphBackend(self, enable_memory_saver=get_exec().features.enable_memory_saver)
        super().capture()

    def _replay_graph(self, shape_key: Any, forward_batch: Any) -> Any:
        if forward_batch.seq_lens_cpu is None:
            raise HostListError(
                "seq_lens_cpu",
                expected="host lengths of this batch",
                got=None,
                consequence="The graph would run with those of an earlier batch.",
                remedy="Publish host lengths, or upper bounds under a mask of the exact ones.",
            )
        lens = [*forward_batch.seq_lens_cpu[: self.raw_bs].tolist(), *[0] * (self.bs - self.raw_bs)]
        with self.model_context():
            return self.backend.replay_with_input_update(shape_key, lens)


class MultiStepDraftExtendRunner(MultiLayerEagleMultiStepDraftExtendCudaGraphRunner):  # type: ignore[misc]
    """All draft layers over one window; in place of `MultiLayerEagleMultiStepDraftExtendNpuGraphRunner`."""

    def _create_runner(self, step: int) -> MultiLayerDraftExtendRunner:
        return MultiLayerDraftExtendRunner(self.eagle_worker, step)

    def _cuda_graph_disabled(self) -> bool:
        return bool(cuda_graph_fully_disabled())

    def _prepare_extra(self, forward_batch: Any) -> None:
        """SGLang's native fill leaves the tails of an earlier, larger batch: ids, positions, slots and requests."""
        super()._prepare_extra(forward_batch)
        live, padded = self.raw_bs, self.bs
        tokens = slice(live * self.captured_req_width, padded * self.captured_req_width)
        for buffer in (self.buffers.input_ids, self.buffers.positions, self.buffers.out_cache_loc):
            buffer[tokens].zero_()
        self.buffers.req_pool_indices[live:padded].zero_()
        self.buffers.seq_lens[live:padded].fill_(self.seq_len_fill_value)
