"""Compiles every Triton kernel without a device: `lower_kernels.py cuda`, or `ascend` where triton-ascend is installed.

Each op runs once on host memory; instead of a launch, its kernel is compiled for the arguments: for `cuda` down to a
cubin of compute capability 9.0, for `ascend` to linalg, which is what triton-ascend hands to its device compiler. It
prints the kernels, and leaves with 1 when one fails.
"""

# Triton has no types, and its two versions differ in their compiler's classes.
# mypy: disable-error-code="import-untyped,import-not-found,no-untyped-call,attr-defined"

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)  # kernels are to be compiled ones

import spec_kernels as sk
import spec_kernels.triton
import torch
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

NAMES = {
    torch.bool: "i1", torch.uint8: "u8", torch.int8: "i8", torch.int32: "i32", torch.int64: "i64",
    torch.float16: "fp16", torch.float32: "fp32",
}  # fmt: skip
Signature = tuple[dict[str, str], dict[str, Any]]


def signature(kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Signature:
    """Types of the arguments, and values of those that are fixed: as Triton specialises a launch."""
    given = dict(zip(kernel.arg_names, args, strict=False)) | options
    types: dict[str, str] = {}
    fixed: dict[str, Any] = {}
    for parameter in kernel.params:
        value = given[parameter.name]
        if parameter.is_constexpr or (type(value) is int and value == 1):
            fixed[parameter.name] = value
        elif isinstance(value, torch.Tensor):
            types[parameter.name] = "*" + NAMES[value.dtype]
        else:
            types[parameter.name] = "i1" if type(value) is bool else "i32" if type(value) is int else "fp32"
    return types, fixed


def to_cuda(kernel: Any, types: dict[str, str], fixed: dict[str, Any]) -> None:
    """Down to a cubin."""
    import triton
    from triton.backends.compiler import GPUTarget

    every = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    triton.compile(ASTSource(kernel, every, fixed), target=GPUTarget("cuda", 90, 32))


def to_ascend(kernel: Any, types: dict[str, str], fixed: dict[str, Any]) -> None:
    """To linalg, by triton-ascend's own passes."""
    from triton._C.libtriton import ir
    from triton.backends.ascend import compiler

    options = compiler.NPUOptions()
    context = ir.context()
    ir.load_dialects(context)
    functions = {"min_dot_size": compiler.min_dot_size(None)}
    module = ASTSource(kernel, types, fixed).make_ir(options, functions, {}, context)
    metadata = {**vars(options), "hash": kernel.__name__}
    lowered = compiler.ttir_to_linalg(compiler.make_ttir(module, metadata, options), metadata, options)
    assert "func.func" in lowered


def watch(lower: Callable[..., None]) -> tuple[set[str], list[str]]:
    """Compile instead of launching. Returns the kernels that were compiled, and what failed; both fill up later."""
    done: set[str] = set()
    failed: list[str] = []
    seen: list[tuple[str, Signature]] = []

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        types, fixed = signature(kernel, args, options)
        if (kernel.__name__, (types, fixed)) in seen:
            return
        seen.append((kernel.__name__, (types, fixed)))
        done.add(f"{kernel.fn.__module__}.{kernel.fn.__name__}")
        try:
            lower(kernel, types, fixed)
        except Exception as error:
            failed.append(f"{kernel.__name__}: {error} {getattr(error, 'stderr', b'')!r}")
            raise

    JITFunction.run = run
    return done, failed


def kernels() -> set[str]:
    """Every kernel that is launched from the host."""
    found = set()
    for entry in iter_modules(spec_kernels.triton.__path__):
        module = import_module(f"spec_kernels.triton.{entry.name}")
        found |= {f"{module.__name__}.{name}" for name in vars(module) if name.endswith("_kernel")}
    return found


def call_all() -> None:
    """Every op once, with every fixed option."""
    on: dict[str, Any] = {"backend": "triton"}

    def i64(*shape: int) -> torch.Tensor:
        return torch.ones(shape, dtype=torch.int64)

    def i32(*shape: int) -> torch.Tensor:
        return torch.ones(shape, dtype=torch.int32)

    def half(*shape: int) -> torch.Tensor:
        return torch.ones(shape, dtype=torch.float16)

    one = torch.ones
    table, row = i32(8, 40), i64(5)
    sk.uniform_cache_locs(table, row, row, width=7, **on)
    sk.draft_cache_locs(table, row, row, topk=2, steps=3, **on)
    sk.extend_cache_locs(table, row, row, row + 3, total=20, **on)
    sk.translate_locs(row, row, page_size=16, **on)
    for slot_map in (None, i64(9)):
        sk.fill_block_table(i32(6, 7), table, row, row, page_size=4, slot_map=slot_map, **on)
    sk.compact_window_rows(i64(8, 12), table, row, row, row, i64(5, 3), **on)
    sk.compact_accepted_locs(i64(12), i64(3, 3), **on)
    sk.accepted_moves(i64(12), i64(3, 3), width=4, **on)
    moves = sk.SlotMoves(row, row)
    sk.move_kv([one(3, 4, 6), torch.zeros(3, 4, 3, dtype=torch.int8)], moves, **on)
    sk.bonus_tokens(i64(15), row, stride=3, **on)
    sk.verify_commit_outputs(i64(15), i64(5, 3), row, row, width=3, track_interval=4, **on)
    sk.draft_extend_inputs(i64(15), row, width=3, **on)
    sk.draft_extend_layout(row, width=3, num_front_tokens=2, **on)
    tree = sk.build_chain_tree(row, width=6, **on)
    sk.build_tree(i64(5, 7), i64(5, 5), row, topk=2, **on)
    sk.full_tree_mask(tree.visible, row, total=100, **on)
    sk.verify_tree_greedy(i64(5, 6), i64(5, 6), tree.next_token, tree.next_sibling, depth=4, **on)
    sk.sample_chain(i64(5, 3), one(5, 3, 50), one(5, 4, 50), one(5, 3), one(5), **on)
    links = tree.next_token, tree.next_sibling
    sk.sample_tree(i64(5, 6), one(5, 6, 50), *links, one(5, 4), one(5), depth=4, **on)
    sk.rotate_input_ids(i64(40), row, row, i64(5), **on)
    sk.rotate_input_ids(i64(40), row, row, i64(5, 2), select_index=row + 1, **on)
    stash = sk.BoundaryStash(i64(8, 3), half(8, 3, 16), i32(8))
    for fresh in (True, False):
        sk.append_to_stash(stash, i64(10), half(10, 16), row, row, row, fresh=fresh, **on)
    sk.widened_inputs(stash, i64(10), half(10, 16), row, row, width=2, **on)
    sk.widened_locs(table, row, row, stash.valid_lens, width=2, num_front_tokens=3, num_warmup_tokens=2, **on)
    sk.wide_row_softmax(one(3, 9000), **on)
    sk.wide_row_softmax(half(3, 9000), temperatures=one(3), **on)
    sk.prepare_block(table, row, row, row, block=4, mask_token=7, **on)
    sk.accept_chain(i64(5, 4), i64(5, 4), **on)
    sk.accept_block(i64(5, 4), i64(5, 4), row, **on)
    for bias, silu in ((None, False), (half(6), True)):
        sk.causal_conv1d_update(half(5, 6, 2), half(8, 6, 4), half(6, 3), row, bias=bias, silu=silu, **on)
    sk.keep_states(one(8, 6), one(5, 3, 6), row, row, **on)
    key, value = half(5, 1, 32), half(5, 1, 16)
    sk.write_kv(key, value, half(3, 4, 1, 32), half(3, 4, 1, 16), row, **on)
    sk.write_kv(key, value, half(3, 2, 4, 16), half(3, 1, 4, 16), row, tiled=True, num_valid=i64(1), **on)
    buffers = sk.DraftExtendBuffers(
        i64(16), i64(16), i64(16), i32(4), i64(4), i32(4), i32(4), i64(4), one(4, 1), half(16, 8), i32(2), i32(2)
    )
    batch = sk.DraftExtendBatch(i64(8), i64(8), i64(8), i64(2), i64(2), i64(2), i64(2), one(2, 1), half(8, 8))
    for given in (batch, replace(batch, temperatures=None, hidden_states=None)):
        sk.fill_draft_extend_buffers(buffers, given, bs=3, width=4, seq_len_fill=0, **on)


def call_attention() -> None:
    """Attention with each of its fixed options."""

    def run(q_lens: list[int], dims: tuple[int, int, int], dtype: torch.dtype, tiled: bool, **options: Any) -> None:
        def cache(width: int) -> torch.Tensor:
            return torch.zeros((9, 1, width // 16, 16, 16) if tiled else (9, 16, 1, width), dtype=dtype)

        metadata = sk.build_paged_metadata([[1, 2], [3, 4]], q_lens, [31, 20], page_size=16, columns=3)
        uniform = q_lens[0] == q_lens[1]
        shape = (2, q_lens[0], 3) if uniform else (sum(q_lens), 3)
        if options.pop("masked", False):
            hidden = torch.zeros(2, q_lens[0], 48, dtype=torch.bool)
            metadata = replace(metadata, mask=hidden)
        if dims[2]:
            options |= {"query_rope": torch.zeros(*shape, dims[2], dtype=dtype), "key_rope_cache": cache(dims[2])}
        attend = sk.paged_attention if uniform else sk.ragged_paged_attention
        query = torch.zeros(*shape, dims[0], dtype=dtype)
        attend(query, cache(dims[0]), cache(dims[1]), metadata, scale=0.5, page_size=16, backend="triton", **options)

    run([1, 1], (64, 64, 0), torch.float16, False, window=4, sinks=torch.zeros(3))
    run([4, 4], (192, 128, 0), torch.float32, False, causal=False, masked=True)
    run([5, 2], (128, 128, 0), torch.float16, False)
    run([3, 3], (512, 512, 64), torch.float16, True)


def main() -> None:
    """Compile all, and say which."""
    wanted = kernels()
    done, failed = watch({"cuda": to_cuda, "ascend": to_ascend}[sys.argv[1]])
    os.environ["TRITON_INTERPRET"] = "1"  # makes the backend eligible for host memory
    call_all()
    call_attention()
    print(*sorted(done), sep="\n")
    missing = sorted(wanted - done)
    sys.exit(f"failed: {failed}, not reached: {missing}" if failed or missing else 0)


if __name__ == "__main__":
    main()
