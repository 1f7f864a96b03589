"""The documented constraints of fused_infer_attention_score, and those that are not enforced as written.

This module owns the rows; the checks are in ``fia_checks*.py``, ``fia_requests.py`` and ``fia_run.py``.

Long because it is a table: one row a constraint.
"""

from __future__ import annotations

from .pose import Scope
from .rules import META, declare, document, holds, note, online, refuse

__all__ = ["FIA", "holds", "refuse"]

FIA = "npu_fused_infer_attention_score[_v2]"

declare(
    FIA,
    META,
    "test_kernels_fia_refusals.py",
    {
        "layout": ("one of the layouts of torch_npu's shape rule", "spell a supported layout"),
        "query-rank": ("a query of the rank that the layout spells", "reshape the query"),
        "value-rank": ("dense: key and value of the query's rank; paged: 3 or 4 (NZ: 5)", "reshape key and value"),
        "heads": ("at least 1 query head and no negative key/value heads", "pass the number of heads"),
    },
)
declare(
    FIA,
    document("npu_fused_infer_attention_score_v2"),
    "test_kernels_fia_refusals.py",
    {
        "query-dtype": ("float16, bfloat16 (int8 in the quantised forms)", "cast the query to float16 or bfloat16"),
        "kv-dtype": ("key and value of the query's dtype (int8, int4 in the quantised forms)", "cast key and value"),
        "contiguous": ("contiguous key, value, key_rope and atten_mask", "call .contiguous() on it"),
        "head-axis": ("an N axis equal to the number of heads passed", "pass the number of heads of the tensor"),
        "width": ("H a multiple of the number of heads", "pass the right number of heads"),
        "heads-multiple": ("query heads a multiple of key/value heads", "pass matching numbers of heads"),
        "heads-ratio": ("at most 64 query heads per key/value head, without query_rope", "split the query heads"),
        "heads-limit": ("at most 256 heads", "split the heads over ranks"),
        "head-dim": ("a head dim of at most 512", "use a smaller head dim"),
        "head-dim-align": ("Q_S > 1: a head dim that is a multiple of 16", "pad the head dim to a multiple of 16"),
        "head-dim-equal": ("key heads of the query's head dim", "make query and key heads equally wide"),
        "batch-limit": ("a batch of at most 65536", "split the batch"),
        "q-limit": ("Q_S of at most 20971520", "split the sequence"),
        "kv-limit": ("Q_S = 1: KV_S of at most 262144", "split the sequence"),
        "hidden-limit": ("BSH, BSND with Q_S > 1, without query_rope: N * D below 65535", "use BNSD"),
        "kv-shape": ("key and value alike in every axis but the width of a head", "pass key and value of one cache"),
        "kv-batch": ("dense: key and value of the query's batch", "pass one key/value sequence a request"),
        "q-lens-count": ("1 length, or at least one a request", "pass one length a request"),
        "q-lens-value": ("query lengths between 0 and Q_S", "pass the true query lengths"),
        "kv-lens-count": (
            "1 length, or at least one a request (packed layouts: exactly one)",
            "pass one length a request",
        ),
        "kv-lens-value": ("key/value lengths between 0 and KV_S", "pass the true key/value lengths"),
        "bnsd-bsnd": ("BNSD_BSND with Q_S > 1 only", "use BNSD for one token a request"),
        "nbsd": ("*_NBSD with Q_S of 1 to 16 only", "use the layout without NBSD"),
        "inner-precise": ("0 to 3; with Q_S = 1 only 0 and 1", "pass 0"),
        "sparse-mode": ("0, 1, 2, 3 or 4", "use a supported mode"),
        "mask-dtype": ("bool, int8 or uint8", "cast the mask to bool"),
        "mask-missing": ("sparse_mode 1 to 4 with a mask", "pass atten_mask (2048 x 2048 for modes 2 to 4)"),
        "mask-compressed": (
            "sparse_mode 2 to 4: a mask of shape (2048, 2048), (1, 2048, 2048) or (1, 1, 2048, 2048)",
            "pass the 2048 x 2048 mask whatever the lengths are",
        ),
        "mask-triangle": (
            "sparse_mode 2 to 4: a mask with ones strictly above the diagonal and zeros elsewhere (the caller must "
            "see to it)",
            "build it with torch.ones(2048, 2048, dtype=torch.bool).triu(1)",
        ),
        "mask-full": (
            "sparse_mode 0, 1: a mask of shape (1, Q_S, KV_S), (B, 1, Q_S, KV_S) or (1, 1, Q_S, KV_S); of shape (B, "
            "KV_S) for Q_S = 1, (Q_S, KV_S) otherwise, in BSH, BSND, BNSD, BNSD_BSND with equal head dims and "
            "without rope",
            "pass the full mask; paged, KV_S is at least the width of the block table times the block size",
        ),
        "table-dtype": ("a block table of dtype int32", "call .to(torch.int32) on the block table"),
        "table-rank": ("a block table of rank 2", "pass the table [requests, blocks]"),
        "table-batch": ("a block table with one row a request", "slice the block table to the batch"),
        "table-width": ("a block table wide enough for the longest request", "widen the block table"),
        "paged-kv-lens": ("paged: key/value lengths passed", "pass the list of key/value lengths"),
        "block-size": ("Q_S > 1: 128 to 512 in multiples of 128", "use blocks of 128 tokens"),
        "block-size-axis": ("block_size equal to the cache's block axis", "pass the cache's block size"),
        "cache-layout": (
            "BSH, BSND: caches (blocks, block_size, H); BNSD, TND: that or (blocks, KV_N, block_size, D)",
            "view the cache as (blocks, block_size, KV_N * D)",
        ),
        "cache-nz": (
            "NZ caches (blocks, KV_N, D / 16, block_size, 16) with query_rope only",
            "pass (blocks, block_size, KV_N * D), or (blocks, KV_N, D / 16, block_size, 16) with query_rope",
        ),
        "cache-row": ("(blocks, block_size, H): KV_N * D of at most 65535", "use (blocks, KV_N, block_size, D)"),
        "cache-int32": ("Q_S = 1: caches of at most 2147483647 elements", "split the cache"),
        "blocks-enough": ("at least as many blocks as the lengths of all requests need", "pass the whole cache"),
        "tnd-q-lens": ("packed layouts: query lengths passed, cumulative", "pass the running sum of the query lengths"),
        "tnd-kv-lens": ("packed layouts: key/value lengths passed", "pass the key/value lengths"),
        "tnd-monotonic": (
            "packed layouts: cumulative lengths that never fall nor are negative (paged key/value lengths are not "
            "cumulative)",
            "pass the running sum of the lengths",
        ),
        "tnd-total": ("packed layouts: cumulative lengths of at most T", "pass lengths that end within the tensor"),
        "tnd-entries": ("packed layouts: at most 4096 lengths", "split the batch"),
        "tnd-tokens": ("packed layouts: T of at most 1048576", "split the batch"),
        "tnd-empty": ("packed layouts: no empty query, key or value", "skip the call"),
        "tnd-dims": (
            "TND: query/key/value head dims 128/128/128, 192/192/128 or 192/192/192; NTD*: 128/128/128 or "
            "192/192/128; with query_rope 128/128/128; or 512 with query_rope",
            "use BSND or BNSD for other head dims",
        ),
        "tnd-layout": ("TND_NTD with head dim 512 only; NTD* with other head dims only", "use TND"),
        "tnd-paged": (
            "NTD* and query_rope with head dim 128: not paged",
            "use TND without query_rope, or a dense cache",
        ),
        "tnd-sparse": (
            "packed layouts: sparse_mode 0 without mask, 3 with mask or (head dim other than 512) 4 with mask",
            "use mode 3 with its mask",
        ),
        "tnd-longer": (
            "packed layouts, sparse_mode 3: no query longer than its key/value",
            "count the new tokens as key/value too",
        ),
        "tnd-band": (
            "packed layouts, sparse_mode 4: pre_tokens >= -q_len, next_tokens >= -kv_len, pre_tokens + next_tokens "
            ">= 0",
            "pass a band that is not empty",
        ),
        "rope-pair": ("query_rope and key_rope both or neither", "pass both"),
        "rope-dtype": ("query_rope of the query's dtype, key_rope of the key's", "cast it"),
        "rope-shape": ("query_rope, key_rope shaped as query, key with heads of width 64", "reshape it"),
        "rope-head-dim": (
            "with query_rope: head dim 512, or 128 in packed layouts",
            "pass the latent part as query and key",
        ),
        "mla-layout": (
            "with query_rope, head dim 512: BSH, BSND, BNSD, *_NBSD, TND, TND_NTD (sparse_mode 4: BSND)",
            "use BSND, BNSD or TND",
        ),
        "mla-heads": (
            "with query_rope, head dim 512: 1, 2, 4, … 128 query heads (sparse_mode 4: 128)",
            "pad the query heads",
        ),
        "mla-kv-heads": ("with query_rope, head dim 512: one key/value head of width 512", "pass the latent cache"),
        "mla-q": ("with query_rope, head dim 512: 1 to 16 query tokens a request", "split the query"),
        "mla-paged": ("with query_rope, head dim 512: paged (sparse_mode 4: may be dense)", "pass a block table"),
        "mla-sparse": (
            "with query_rope, head dim 512: sparse_mode 0 without mask for one query token, 3 with mask for more "
            "(packed: either; v1: or 4 with mask, not packed)",
            "use mode 0 for one token, mode 3 for more",
        ),
        "sink-layout": ("learnable_sink in TND and NTD_TND only", "use TND"),
        "sink-dtype": ("learnable_sink of dtype bfloat16", "cast the sink to bfloat16"),
        "sink-shape": ("learnable_sink of shape (query heads,)", "pass one number a query head"),
        "sink-dim": ("learnable_sink with value heads of at most 128", "use value heads of 128"),
        "quant-scales": (
            "float16, bfloat16 query: an output offset only with an output scale; v1: no dequant_scale1, "
            "quant_scale1, dequant_scale2",
            "leave them None",
        ),
        "out-list": (
            "out: attention output and log-sum-exp as the op infers them",
            "allocate them with the _infer_output op",
        ),
        "workspace": ("a workspace of rank 1 and the query's dtype", "allocate it with the _get_max_workspace op"),
    },
)
declare(
    FIA,
    document("npu_fused_infer_attention_score"),
    "test_kernels_fia_refusals.py",
    {
        "block-size-decode": ("Q_S = 1: 16 to 512 in multiples of 16", "use blocks of 128 tokens"),
        "block-size-band": ("with query_rope and sparse_mode 4: 64 or 128", "use blocks of 128 tokens"),
        "mla-band": (
            "with query_rope and sparse_mode 4: no query longer than its key/value, KV_S of at most 131088",
            "use mode 3",
        ),
    },
)
declare(
    FIA,
    document("npu_fused_infer_attention_score_v2"),
    "test_kernels_fia_pose.py",
    {
        "block-size-mla": ("with query_rope: 16 or 128", "use blocks of 128 tokens"),
        "block-size-packed": (
            "packed layouts, head dim other than 512: the sizes of `block-size` and `block-size-decode`",
            "use blocks of 128 tokens",
        ),
        "tnd-dims-64": ("TND: no head dims 64/64/64", "use BSND or BNSD"),
        "tnd-dtype": ("packed layouts with a head dim other than 512: bfloat16", "cast to bfloat16, or use BSND"),
    },
    Scope(before=(9, 1)),
)
declare(
    FIA,
    f"{online('npu_fused_infer_attention_score_v2')}, taken as that of CANN 9.1",
    "test_kernels_fia_pose.py",
    {
        "block-size-wide": (
            "with query_rope, or packed layouts: 16 to 1024 in multiples of 16",
            "use blocks of 128 tokens",
        ),
        "tnd-dims-mha": ("TND: head dims 64/64/64 with as many key/value heads as query heads", "use BSND or BNSD"),
    },
    Scope(since=(9, 1)),
)
note(
    FIA,
    "block ids are not checked by the op",
    "FIA documents",
    "not refused: a visible block outside the cache is a `DeviceFault` (507015) with layer, page and slot: "
    "test_kernels_faults.py",
)
note(
    FIA,
    "(not documented) keys and values that attention sees were written",
    "the poison of the emulator's memory",
    "not refused: a row of poison bytes that a query token sees is a `DeviceFault` (507015): test_kernels_faults.py",
)
note(
    FIA,
    "key and value of one shape",
    "FIA documents",
    "widths of heads may differ: the documents themselves list 192/128 and give the output the value's width; every "
    "other axis is `kv-shape`",
)
note(
    FIA,
    "v1, TND: not paged; equal numbers of heads, 8 to 128; head dims 192; T of at most 65536",
    "v1 document",
    "v2's limits hold instead (`tnd-*`); the same document describes paged caches for TND",
)
note(FIA, "v1, with query_rope: 32, 64 or 128 heads", "v1 document", "v2's 1, 2, 4, … 128 hold instead (`mla-heads`)")
note(
    FIA,
    "packed layouts, sparse_mode 3: every query *shorter* than its key/value",
    "FIA documents",
    "equal lengths are taken: the first chunk of every prompt has them. Rows without key/value are taken: padded "
    "rows have them (`tnd-longer` refuses the rest)",
)
note(
    FIA,
    "contiguous query and query_rope",
    "FIA documents",
    "strided ones are taken: the operator's definition has every input made contiguous (AutoContiguous in "
    "fused_infer_attention_score_def.cpp of CANN's ops-transformer), and engines pass the parts of a split query",
)
note(
    FIA,
    "BSH, BSND: paged caches of rank 3 only",
    "FIA documents",
    "with query_rope and one key/value head, rank 4 is taken as well: the bytes are alike, and engines pass it",
)
note(
    FIA, "head dims that are no multiple of 32 bytes up to 128 only", "FIA documents", "cannot occur: `head-dim-align`"
)
note(FIA, "lengths and sizes listed as likely to time out", "FIA documents", "no time limits are emulated")
note(
    FIA,
    "int8 queries, int4 keys, output quantisation, pse_shift, shared prefix, left padding, sparse_mode 9",
    "FIA documents",
    "not computed: `KernelNotCovered`, a NotImplementedError; no released engine asks for them: "
    "test_kernels_fia_refusals.py",
)
note(
    FIA,
    "quantisation modes, `*_dtype` numbers",
    "FIA documents",
    "without effect when no scales are given; not looked at",
)
note(
    FIA,
    "packed layouts: no tiling_schedule_optimize, no reduce-overhead",
    "FIA documents",
    "options of another compiler, not seen by the op",
)
note(
    FIA,
    "empty tensors with query_rope",
    "FIA documents",
    "packed: `tnd-empty`; else an empty cache fails `blocks-enough`",
)
note(
    FIA,
    "inner_precise bit 1: rows hidden as a whole are corrected",
    "FIA documents",
    "such rows are zero whatever the bit says",
)
note(
    FIA,
    "(not documented) query tokens past a request's length; log-sum-exp of rows that see nothing; log-sum-exp with a "
    "sink",
    "—",
    "left as they are in memory, so poison in new outputs; -inf; the sink is not in it: test_kernels_fia_reference.py",
)
note(
    FIA,
    "no log-sum-exp wanted: shape [1], value 0",
    "FIA documents",
    "shape [0], as torch_npu's Meta kernel has it; with `.out` the second tensor is left alone",
)
