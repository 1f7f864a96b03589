"""The documented constraints that the operator kernels enforce, one record each.

This module owns the list of what is allowed, by whom it is said, and the remedy. The checks are in ``fia_checks*.py``
and beside the smaller ops; ``docs/refusals.md`` adds what is documented and not enforced, and why.
"""

from __future__ import annotations

from typing import NoReturn

from .errors import OpRefused, Rule

FIA = "npu_fused_infer_attention_score[_v2]"
_DOC = "torch_npu 2.12.0, _op_plugin_docs.py, npu_fused_infer_attention_score_v2"
_DOC_V1 = "torch_npu 2.12.0, _op_plugin_docs.py, npu_fused_infer_attention_score"
_META = "torch_npu 2.12.0, op_plugin/meta/_meta_registrations.py"
_SCATTER_DOC = "torch_npu 2.12.0, _op_plugin_docs.py, npu_scatter_nd_update_"
_CACHE_DOC = "operator list of akg, yaml/doc/reshape_and_cache.md; vllm-ascend#706"

RULES: dict[str, Rule] = {}


def refuse(op: str, rule_id: str, argument: str, value: object) -> NoReturn:
    """Refuses a call.

    Args:
        op: full op name.
        rule_id: key of ``RULES``.
        argument: name of the refused argument.
        value: what was given.

    Raises:
        OpRefused: always.
    """
    raise OpRefused(op, argument, value, RULES[rule_id])


def _rule(op: str, source: str, rule_id: str, allowed: str, remedy: str) -> None:
    if rule_id in RULES:
        raise ValueError(f"rule id {rule_id!r} is used twice")
    RULES[rule_id] = Rule(rule_id, op, allowed, source, remedy)


def _fia(rule_id: str, allowed: str, remedy: str, source: str = _DOC) -> None:
    _rule(FIA, source, rule_id, allowed, remedy)


_fia("layout", "one of the layouts of torch_npu's shape rule", "spell a supported layout", _META)
_fia("query-rank", "a query of the rank that the layout spells", "reshape the query", _META)
_fia("value-rank", "dense: key and value of the query's rank; paged: 3 or 4 (NZ: 5)", "reshape key and value", _META)
_fia("heads", "at least 1 query head and no negative key/value heads", "pass the number of heads", _META)
_fia("query-dtype", "float16, bfloat16 (int8 in the quantised forms)", "cast the query to float16 or bfloat16")
_fia("kv-dtype", "key and value of the query's dtype (int8, int4 in the quantised forms)", "cast key and value")
_fia("contiguous", "contiguous tensors", "call .contiguous() on it")
_fia("head-axis", "an N axis equal to the number of heads passed", "pass the number of heads of the tensor")
_fia("width", "H a multiple of the number of heads", "pass the right number of heads")
_fia("heads-multiple", "query heads a multiple of key/value heads", "pass matching numbers of heads")
_fia("heads-ratio", "at most 64 query heads per key/value head, without query_rope", "split the query heads")
_fia("heads-limit", "at most 256 heads", "split the heads over ranks")
_fia("head-dim", "a head dim of at most 512", "use a smaller head dim")
_fia("head-dim-align", "Q_S > 1: a head dim that is a multiple of 16", "pad the head dim to a multiple of 16")
_fia("head-dim-equal", "key heads of the query's head dim", "make query and key heads equally wide")
_fia("batch-limit", "a batch of at most 65536", "split the batch")
_fia("q-limit", "Q_S of at most 20971520", "split the sequence")
_fia("kv-limit", "Q_S = 1: KV_S of at most 262144", "split the sequence")
_fia("hidden-limit", "BSH, BSND with Q_S > 1, without query_rope: N * D below 65535", "use BNSD")
_fia("kv-shape", "key and value alike in every axis but the width of a head", "pass key and value of one cache")
_fia("kv-batch", "dense: key and value of the query's batch", "pass one key/value sequence a request")
_fia("q-lens-count", "1 length, or at least one a request", "pass one length a request")
_fia("q-lens-value", "query lengths between 0 and Q_S", "pass the true query lengths")
_fia("kv-lens-count", "1 length, or at least one a request (packed layouts: exactly one)", "pass one length a request")
_fia("kv-lens-value", "key/value lengths between 0 and KV_S", "pass the true key/value lengths")
_fia("bnsd-bsnd", "BNSD_BSND with Q_S > 1 only", "use BNSD for one token a request")
_fia("nbsd", "*_NBSD with Q_S of 1 to 16 only", "use the layout without NBSD")
_fia("inner-precise", "0 to 3; with Q_S = 1 only 0 and 1", "pass 0")
_fia("sparse-mode", "0, 1, 2, 3 or 4", "use a supported mode")
_fia("mask-dtype", "bool, int8 or uint8", "cast the mask to bool")
_fia("mask-missing", "sparse_mode 1 to 4 with a mask", "pass atten_mask (2048 x 2048 for modes 2 to 4)")
_fia(
    "mask-compressed",
    "sparse_mode 2 to 4: a mask of shape (2048, 2048), (1, 2048, 2048) or (1, 1, 2048, 2048)",
    "pass the 2048 x 2048 mask whatever the lengths are",
)
_fia(
    "mask-triangle",
    "sparse_mode 2 to 4: a mask with ones strictly above the diagonal and zeros elsewhere (the caller must see to it)",
    "build it with torch.ones(2048, 2048, dtype=torch.bool).triu(1)",
)
_fia(
    "mask-full",
    "sparse_mode 0, 1: a mask of shape (1, Q_S, KV_S), (B, 1, Q_S, KV_S) or (1, 1, Q_S, KV_S); of shape (B, KV_S) for "
    "Q_S = 1, (Q_S, KV_S) otherwise, in BSH, BSND, BNSD, BNSD_BSND with equal head dims and without rope",
    "pass the full mask; paged, KV_S is at least the width of the block table times the block size",
)
_fia("table-dtype", "a block table of dtype int32", "call .to(torch.int32) on the block table")
_fia("table-rank", "a block table of rank 2", "pass the table [requests, blocks]")
_fia("table-batch", "a block table with one row a request", "slice the block table to the batch")
_fia("table-width", "a block table wide enough for the longest request", "widen the block table")
_fia("paged-kv-lens", "paged: key/value lengths passed", "pass the list of key/value lengths")
_fia("block-size", "Q_S > 1: 128 to 512 in multiples of 128", "use blocks of 128 tokens")
_fia("block-size-decode", "Q_S = 1: 16 to 512 in multiples of 16", "use blocks of 128 tokens", _DOC_V1)
_fia("block-size-mla", "with query_rope: 16 or 128", "use blocks of 128 tokens")
_fia("block-size-band", "with query_rope and sparse_mode 4: 64 or 128", "use blocks of 128 tokens", _DOC_V1)
_fia("block-size-axis", "block_size equal to the cache's block axis", "pass the cache's block size")
_fia(
    "cache-layout",
    "BSH, BSND: caches (blocks, block_size, H); BNSD, TND: that or (blocks, KV_N, block_size, D)",
    "view the cache as (blocks, block_size, KV_N * D)",
)
_fia("cache-row", "(blocks, block_size, H): KV_N * D of at most 65535", "use (blocks, KV_N, block_size, D)")
_fia("cache-int32", "Q_S = 1: caches of at most 2147483647 elements", "split the cache")
_fia("blocks-enough", "at least as many blocks as the lengths of all requests need", "pass the whole cache")
_fia("tnd-q-lens", "packed layouts: query lengths passed, cumulative", "pass the running sum of the query lengths")
_fia("tnd-kv-lens", "packed layouts: key/value lengths passed", "pass the key/value lengths")
_fia(
    "tnd-monotonic",
    "packed layouts: cumulative lengths that never fall nor are negative (paged key/value lengths are not cumulative)",
    "pass the running sum of the lengths",
)
_fia("tnd-total", "packed layouts: cumulative lengths of at most T", "pass lengths that end within the tensor")
_fia("tnd-entries", "packed layouts: at most 4096 lengths", "split the batch")
_fia("tnd-tokens", "packed layouts: T of at most 1048576", "split the batch")
_fia("tnd-empty", "packed layouts: no empty query, key or value", "skip the call")
_fia("tnd-dtype", "packed layouts with a head dim other than 512: bfloat16", "cast to bfloat16, or use BSND")
_fia(
    "tnd-dims",
    "TND: query/key/value head dims 128/128/128, 192/192/128 or 192/192/192; NTD*: 128/128/128 or 192/192/128; "
    "with query_rope 128/128/128; or 512 with query_rope",
    "use BSND or BNSD for other head dims",
)
_fia("tnd-layout", "TND_NTD with head dim 512 only; NTD* with other head dims only", "use TND")
_fia("tnd-paged", "NTD* and query_rope with head dim 128: not paged", "use TND without query_rope, or a dense cache")
_fia(
    "tnd-sparse",
    "packed layouts: sparse_mode 0 without mask, 3 with mask or (head dim other than 512) 4 with mask",
    "use mode 3 with its mask",
)
_fia(
    "tnd-longer",
    "packed layouts, sparse_mode 3: no query longer than its key/value",
    "count the new tokens as key/value too",
)
_fia(
    "tnd-band",
    "packed layouts, sparse_mode 4: pre_tokens >= -q_len, next_tokens >= -kv_len, pre_tokens + next_tokens >= 0",
    "pass a band that is not empty",
)
_fia("rope-pair", "query_rope and key_rope both or neither", "pass both")
_fia("rope-dtype", "query_rope of the query's dtype, key_rope of the key's", "cast it")
_fia("rope-shape", "query_rope, key_rope shaped as query, key with heads of width 64", "reshape it")
_fia(
    "rope-head-dim", "with query_rope: head dim 512, or 128 in packed layouts", "pass the latent part as query and key"
)
_fia(
    "mla-layout",
    "with query_rope, head dim 512: BSH, BSND, BNSD, *_NBSD, TND, TND_NTD (sparse_mode 4: BSND)",
    "use BSND, BNSD or TND",
)
_fia(
    "mla-heads", "with query_rope, head dim 512: 1, 2, 4, … 128 query heads (sparse_mode 4: 128)", "pad the query heads"
)
_fia("mla-kv-heads", "with query_rope, head dim 512: one key/value head of width 512", "pass the latent cache")
_fia("mla-q", "with query_rope, head dim 512: 1 to 16 query tokens a request", "split the query")
_fia("mla-paged", "with query_rope, head dim 512: paged (sparse_mode 4: may be dense)", "pass a block table")
_fia(
    "mla-sparse",
    "with query_rope, head dim 512: sparse_mode 0 without mask for one query token, 3 with mask for more (packed: "
    "either; v1: or 4 with mask, not packed)",
    "use mode 0 for one token, mode 3 for more",
)
_fia(
    "mla-band",
    "with query_rope and sparse_mode 4: no query longer than its key/value, KV_S of at most 131088",
    "use mode 3",
    _DOC_V1,
)
_fia("sink-layout", "learnable_sink in TND and NTD_TND only", "use TND")
_fia("sink-dtype", "learnable_sink of dtype bfloat16", "cast the sink to bfloat16")
_fia("sink-shape", "learnable_sink of shape (query heads,)", "pass one number a query head")
_fia("sink-dim", "learnable_sink with value heads of at most 128", "use value heads of 128")
_fia(
    "quant-scales",
    "float16, bfloat16 query: an output offset only with an output scale; v1: no dequant_scale1, quant_scale1, "
    "dequant_scale2",
    "leave them None",
)
_fia(
    "out-list", "out: attention output and log-sum-exp as the op infers them", "allocate them with the _infer_output op"
)
_fia("workspace", "a workspace of rank 1 and the query's dtype", "allocate it with the _get_max_workspace op")

_SCATTER = "npu_scatter_nd_update[_]"
_rule(
    _SCATTER, _SCATTER_DOC, "scatter-dtype", "float32, float16, bfloat16, bool, int64, int8", "view the bytes as int8"
)
_rule(_SCATTER, _SCATTER_DOC, "scatter-same-dtype", "updates of the input's dtype", "cast the updates")
_rule(_SCATTER, _SCATTER_DOC, "scatter-rank", "an input of 1 to 8 axes", "reshape the input")
_rule(_SCATTER, _SCATTER_DOC, "scatter-index-dtype", "indices of dtype int32 or int64", "cast the indices")
_rule(_SCATTER, _SCATTER_DOC, "scatter-index-rank", "indices of rank 2 or more", "view the indices as (n, 1)")
_rule(
    _SCATTER,
    _SCATTER_DOC,
    "scatter-index-width",
    "a last axis of indices of 1 to input.dim()",
    "shorten the index tuples",
)
_rule(
    _SCATTER,
    _SCATTER_DOC,
    "scatter-updates",
    "updates of shape indices.shape[:-1] + input.shape[a:], a the last axis of indices",
    "reshape the updates",
)

_CACHE = "atb::_npu_reshape_and_cache"
_rule(
    _CACHE,
    _CACHE_DOC,
    "cache-dtype",
    "float16, bfloat16 or int8 throughout",
    "cast keys, values and caches to one dtype",
)
_rule(_CACHE, _CACHE_DOC, "cache-slots-dtype", "slots of dtype int32", "call .to(torch.int32) on the slots")
_rule(_CACHE, _CACHE_DOC, "cache-slots-shape", "slots of shape (tokens,)", "pass one slot a token")
_rule(
    _CACHE,
    _CACHE_DOC,
    "cache-shapes",
    "keys and values (tokens, heads, dim), caches (blocks, block_size, heads, dim) with the same heads and dim",
    "reshape keys, values or caches",
)
_rule(
    _CACHE, _CACHE_DOC, "cache-contiguous", "contiguous caches", "pass the cache itself, one layer's view of it at most"
)

_NORM_DOC = "torch_npu 2.12.0, _op_plugin_docs.py, npu_rms_norm"
_NORM = "npu_rms_norm, npu_add_rms_norm"
_rule(_NORM, _NORM_DOC, "norm-dtype", "float16, bfloat16, float32", "cast the input")
_rule(_NORM, _NORM_DOC, "norm-gamma-dtype", "gamma and the second summand of the input's dtype", "cast it")
_rule(_NORM, _NORM_DOC, "norm-rank", "an input of 2 to 8 axes", "reshape the input")
_rule(_NORM, _NORM_DOC, "norm-gamma", "gamma shaped as the input's last axes", "pass the weight of the normalised axes")
_rule("npu_add_rms_norm", _META, "norm-summands", "two summands of one shape", "reshape the summands")

_SWIGLU_DOC = "torch_npu 2.12.0, _op_plugin_docs.py, npu_swiglu"
_rule("npu_swiglu", _SWIGLU_DOC, "swiglu-dtype", "float16, bfloat16, float32", "cast the input")
_rule("npu_swiglu", _SWIGLU_DOC, "swiglu-rank", "an input of 1 to 8 axes", "reshape the input")
_rule("npu_swiglu", _SWIGLU_DOC, "swiglu-even", "an existing axis of even length to split", "split along another axis")

_ROTARY_DOC = "torch_npu 2.12.0, _op_plugin_docs.py, npu_rotary_mul"
_rule("npu_rotary_mul", _ROTARY_DOC, "rotary-dtype", "float16, bfloat16, float32", "cast it")
_rule("npu_rotary_mul", _ROTARY_DOC, "rotary-rank", "input, r1, r2 of rank 4", "reshape to BNSD, BSND or SBND")
_rule("npu_rotary_mul", _ROTARY_DOC, "rotary-mode", "half or interleave", "pass 'half'")
_rule("npu_rotary_mul", _ROTARY_DOC, "rotary-dim", "an even head dim below 896", "use a smaller head dim")
_rule(
    "npu_rotary_mul",
    _ROTARY_DOC,
    "rotary-shape",
    "r1 and r2 of one shape: half: 11SD, B1SD, BNSD for BNSD; 1S1D, BS1D, BSND for BSND; S11D, SB1D, SBND for SBND, "
    "with B and N below 1000; interleave: 11SD, 1S1D, S11D, with B * N below 1000",
    "expand or reshape r1 and r2",
)
_rule("npu_rotary_mul", _ROTARY_DOC, "rotary-rotate", "a rotate matrix of shape (D, D)", "pass a square matrix")
