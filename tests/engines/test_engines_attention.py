"""AscendAttnBackend on the emulated NPU against our metadata and our attention: decode, verify and prefill, eager."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from ascend_emulator.kernels import OpRefused
from engines_attention import KV_HEADS, NPU, PAGE, Q_HEADS, World, verify_input
from kv_planner import kv_lengths
from sglang.srt.hardware_backend.npu.attention import ascend_backend
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative.spec_info import SpecInputType
from spec_kernels import build_paged_metadata

WIDTH = 4


@pytest.fixture(autouse=True)
def speculation(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the engine's published configuration says of speculation."""
    monkeypatch.setattr(ascend_backend, "get_spec", lambda: SimpleNamespace(speculative_num_draft_tokens=WIDTH))


def compare(found: torch.Tensor, expected: torch.Tensor) -> None:
    bound = TOLERANCE[expected.dtype]
    torch.testing.assert_close(found.cpu().view(expected.shape), expected, atol=bound, rtol=bound)


TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("fia", ["0", "1"])
def test_decode(monkeypatch: pytest.MonkeyPatch, fia: str, dtype: torch.dtype) -> None:
    """Paged attention (atb) without FIA, FIA v1 with it; lengths around page edges."""
    monkeypatch.setenv("ASCEND_USE_FIA", fia)
    world = World([1, PAGE - 1, PAGE, 2 * PAGE + 5], dtype=dtype)
    news = [1] * 4
    batch = world.batch(ForwardMode.DECODE, news)
    query, (key, value) = world.rows(4, Q_HEADS)[0], world.rows(4, KV_HEADS, count=2)
    world.backend.init_forward_metadata(batch)
    found = world.backend.forward_decode(query.to(NPU), key.to(NPU), value.to(NPU), world.layer, batch)
    world.mirror(batch.out_cache_loc.cpu(), key, value)
    compare(found, world.expected(query, news))


@pytest.mark.parametrize("fia", ["0", "1"])
def test_verify(monkeypatch: pytest.MonkeyPatch, fia: str) -> None:
    """WIDTH draft tokens a request over their prefixes: FIA v1, TND, paged; rows of the batch padded by DP are cut."""
    monkeypatch.setenv("ASCEND_USE_FIA", fia)
    world = World([3, PAGE - 2, PAGE, 200])
    news = [WIDTH] * 4
    batch = world.batch(
        ForwardMode.TARGET_VERIFY, news, spec_info=verify_input(WIDTH), global_num_token_non_padded_cpu=4 * WIDTH
    )
    query, (key, value) = world.rows(4 * WIDTH, Q_HEADS)[0], world.rows(4 * WIDTH, KV_HEADS, count=2)
    world.backend.init_forward_metadata(batch)
    found = world.backend.forward_extend(query.to(NPU), key.to(NPU), value.to(NPU), world.layer, batch)
    world.mirror(batch.out_cache_loc.cpu(), key, value)
    compare(found, world.expected(query, news))


def test_verify_in_float16_is_refused() -> None:
    """The document allows packed queries in bfloat16 only; SGLang takes TND for every dtype of the model."""
    world = World([3, 5], dtype=torch.float16)
    batch = world.batch(
        ForwardMode.TARGET_VERIFY, [WIDTH] * 2, spec_info=verify_input(WIDTH), global_num_token_non_padded_cpu=2 * WIDTH
    )
    query, (key, value) = world.rows(2 * WIDTH, Q_HEADS)[0], world.rows(2 * WIDTH, KV_HEADS, count=2)
    world.backend.init_forward_metadata(batch)
    with pytest.raises(OpRefused, match="tnd-dtype"):
        world.backend.forward_extend(query.to(NPU), key.to(NPU), value.to(NPU), world.layer, batch)


@pytest.mark.parametrize("lengths", [[0, 0, 0], [0, 64, 200]])
def test_prefill(monkeypatch: pytest.MonkeyPatch, lengths: list[int]) -> None:
    """New tokens over cached prefixes of none and of more than a page: FIA v1, TND, paged."""
    monkeypatch.setenv("ASCEND_USE_FIA", "1")
    world = World(lengths)
    news = [5, 70, 1]
    batch = world.batch(ForwardMode.EXTEND, news, global_num_token_non_padded_cpu=sum(news))
    query, (key, value) = world.rows(sum(news), Q_HEADS)[0], world.rows(sum(news), KV_HEADS, count=2)
    world.backend.init_forward_metadata(batch)
    found = world.backend.forward_extend(query.to(NPU), key.to(NPU), value.to(NPU), world.layer, batch)
    world.mirror(batch.out_cache_loc.cpu(), key, value)
    compare(found, world.expected(query, news))


@pytest.mark.parametrize(
    ("mode", "news", "kind"),
    [
        (ForwardMode.DECODE, 1, "none"),
        (ForwardMode.TARGET_VERIFY, WIDTH, "eagle"),
        (ForwardMode.EXTEND, 9, "none"),
    ],
)
def test_metadata(mode: ForwardMode, news: int, kind: str) -> None:
    """Block tables, KV lengths and query lengths as ours; theirs are cumulative for queries, ours never."""
    world = World([1, PAGE - 1, PAGE, 300])
    more = {"spec_info": verify_input(WIDTH)} if mode == ForwardMode.TARGET_VERIFY else {}
    batch = world.batch(mode, [news] * 4, **more)
    world.backend.init_forward_metadata(batch)
    theirs = world.backend.forward_metadata
    window = news if mode == ForwardMode.TARGET_VERIFY else 0
    prefix = [length + news - window for length in world.lengths]
    lens = kv_lengths("eagle" if window else "none", prefix, window=window or 1).tolist()
    ours = build_paged_metadata(world.pages, [news] * 4, lens, page_size=PAGE)
    assert theirs.seq_lens_cpu_int.tolist() == ours.kv_lens
    width = theirs.block_tables.shape[1]
    assert width == -(-max(lens) // PAGE)
    for row, length in enumerate(lens):
        pages = -(-length // PAGE)
        assert torch.equal(theirs.block_tables[row, :pages].cpu(), ours.block_table[row, :pages])
    if mode != ForwardMode.EXTEND:
        ends = theirs.actual_seq_lengths_q.tolist()
        assert [end - start for start, end in zip([0, *ends], ends, strict=False)] == ours.q_lens


def test_the_callers_lengths_are_edited() -> None:
    """A-07: an int32 host mirror is the metadata's own tensor, so a second plan of one batch adds the window again."""
    world = World([8, 5])
    batch = world.batch(ForwardMode.TARGET_VERIFY, [3, 3], spec_info=verify_input(3))
    batch.seq_lens_cpu = batch.seq_lens_cpu.int()
    seen = []
    for _ in range(2):
        world.backend.init_forward_metadata(batch)
        seen.append(world.backend.forward_metadata.seq_lens_cpu_int.tolist())
    assert seen == [[11, 8], [14, 11]] and batch.seq_lens_cpu.tolist() == [14, 11]
    prefix = torch.tensor([8, 5], dtype=torch.int32).numpy()
    for _ in range(2):
        assert kv_lengths("eagle", prefix, window=3).tolist() == [11, 8]
    assert prefix.tolist() == [8, 5]


def test_dflash_lengths_have_one_owner() -> None:
    """DFlash publishes prefix + block; the eager plan must not add the block again."""
    world = World([8, 5])
    dflash = SimpleNamespace(is_dflash=lambda: True, is_dflash_family=lambda: True)
    batch = world.batch(
        ForwardMode.TARGET_VERIFY, [WIDTH, WIDTH],
        spec_info=verify_input(WIDTH, SpecInputType.DFLASH_VERIFY), spec_algorithm=dflash,
    )  # fmt: skip
    batch.seq_lens_cpu = batch.seq_lens_cpu + WIDTH
    world.backend.init_forward_metadata(batch)
    assert world.backend.forward_metadata.seq_lens_cpu_int.tolist() == [12, 9]
    assert kv_lengths("dflash", [12, 9], window=WIDTH).tolist() == [12, 9]


def test_multi_step_drafts_share_one_length_buffer() -> None:
    """A-08: three draft steps in a graph all end with the last step's device lengths."""
    buffer = torch.tensor([8, 5], device=NPU)
    backends = []
    world = World([8, 5])
    for step in range(3):
        world.backend = world._backend(step)
        world.backend.init_cuda_graph_state(2, 2)
        batch = world.batch(ForwardMode.DECODE, [0, 0], spec_info=SimpleNamespace(spec_input_type=None))
        batch.seq_lens = buffer
        world.backend.init_forward_metadata_out_graph(batch, in_capture=True)
        backends.append(world.backend)
    assert [backend.forward_metadata.seq_lens.tolist() for backend in backends] == [[14, 11]] * 3
    assert [kv_lengths("eagle", [8, 5], window=step + 1).tolist() for step in range(3)] == [[9, 6], [10, 7], [11, 8]]
