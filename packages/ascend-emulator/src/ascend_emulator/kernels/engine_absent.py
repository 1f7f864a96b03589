"""Ops of the engines' own libraries that have no kernel here: they exist, and a call says how to register one.

This module owns their definitions (torch_npu has none), as the libraries write them, and the reason of each. Those of
which no source is at hand are not defined: `engine_operators.tsv` says so.
"""

from __future__ import annotations

from .definitions import define
from .rules import note

_VLLM = (
    "chunk_fwd_o(Tensor q, Tensor k, Tensor v, Tensor h, float scale, *, Tensor? g=None, Tensor? g_gamma=None, "
    "int[]? cu_seqlens=None, int[]? chunk_indices=None, int? chunk_size=None, bool? transpose_state_layout=False) "
    "-> Tensor",
    "chunk_gated_delta_rule_fwd_h(Tensor k, Tensor w, Tensor u, Tensor? g=None, *, Tensor? gk=None, Tensor? "
    "initial_state=None, bool? output_final_state=False, int? chunk_size=None, bool? save_new_value=True, int[]? "
    "cu_seqlens=None, int[]? chunk_indices=None, bool? use_exp2=False, bool? transpose_state_layout=False) -> "
    "(Tensor h_out, Tensor v_new_out, Tensor final_state_out)",
    "compressor(Tensor x, Tensor wkv, Tensor wgate, Tensor(a!) state_cache, Tensor ape, Tensor norm_weight, "
    "Tensor rope_sin, Tensor rope_cos, Tensor? state_block_table, Tensor? cu_seqlens, Tensor? seqused, Tensor? "
    "start_pos, int rope_head_dim, int cmp_ratio, int coff, float norm_eps, int rotary_mode, int cache_mode) -> "
    "Tensor",
    "compressor_metadata(Tensor rope_cos, Tensor rope_sin, Tensor cu_seqlens, Tensor start_pos, Tensor "
    "kv_block_table, int kv_block_size, int slot_mapping_format, int compress_ratio, int num_compressed_tokens, "
    "int num_reqs_actual) -> (Tensor, Tensor, Tensor)",
    "device_print(str msg) -> ()",
    "device_print_tensor(Tensor tensor) -> ()",
    "indexer_compress_epilog_v2(Tensor(a!) indexer_compress_cache, Tensor x, Tensor slot_mapping, int layout=2) -> ()",
    "inplace_partial_rotary_mul(Tensor(a!) x, Tensor r1, Tensor r2, str rotary_mode, int[] partial_slice) -> ()",
    "kv_compress_epilog(Tensor(a!) kv_compress_cache, Tensor x, Tensor slot_mapping, int quant_group_size, int "
    "quant_mode, bool round_scale_flag, int layout) -> ()",
    "moe_gating_top_k_hash(Tensor x, int k, Tensor? bias=None, Tensor? input_ids=None, Tensor? tid2eid=None, int "
    "k_group=1, int group_count=1, float routed_scaling_factor=1.0, float eps=1e-20, int group_select_mode=0, int "
    "renorm=0, int norm_type=0, bool out_flag=False) -> (Tensor y, Tensor expert_idx, Tensor out)",
    "npu_causal_conv1d_310(Tensor x, Tensor weight, Tensor? bias, Tensor conv_states, Tensor? query_start_loc, "
    "Tensor? cache_indices, Tensor? initial_state_mode, Tensor? num_accepted_tokens, int activation_mode, int "
    "pad_slot_id, int run_mode) -> (Tensor output)",
    "npu_hamming_dist_top_k(Tensor q, Tensor k_comp, Tensor k_comp_rope, Tensor k, Tensor seq_len, Tensor? "
    "chunk_size=None, int? max_seq_len=None, int? sink=None, int? recent=None, int? support_offload=None, Tensor? "
    "key_block_table=None, Tensor? mask=None, Tensor? indices=None) -> Tensor",
    "npu_hc_post(Tensor x, Tensor residual, Tensor post, Tensor comb) -> (Tensor out)",
    "npu_hc_pre_v2(Tensor x, Tensor hc_fn, Tensor hc_scale, Tensor hc_base, int hc_mult, int hc_sinkhorn_iters, "
    "float norm_eps, float hc_eps) -> (Tensor out0, Tensor out1, Tensor out2)",
    "npu_kv_quant_sparse_attn_sharedkv(Tensor q, int kv_quant_mode, Tensor? ori_kv=None, Tensor? cmp_kv=None, "
    "Tensor? ori_sparse_indices=None, Tensor? cmp_sparse_indices=None, Tensor? ori_block_table=None, Tensor? "
    "cmp_block_table=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_ori_kv=None, Tensor? "
    "cu_seqlens_cmp_kv=None, Tensor? seqused_q=None, Tensor? seqused_kv=None, Tensor? sinks=None, Tensor? "
    "metadata=None, int tile_size=0, int rope_head_dim=0, float softmax_scale=0.0, int cmp_ratio=0, int "
    "ori_mask_mode=4, int cmp_mask_mode=3, int ori_win_left=127, int ori_win_right=0, str layout_q='BSND', str "
    "layout_kv='PA_ND', bool return_softmax_lse=False) -> (Tensor out, Tensor softmax_lse)",
    "npu_kv_quant_sparse_attn_sharedkv_metadata(int num_heads_q, int num_heads_kv, int head_dim, int "
    "kv_quant_mode, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_ori_kv=None, Tensor? cu_seqlens_cmp_kv=None, "
    "Tensor? seqused_q=None, Tensor? seqused_kv=None, int batch_size=0, int max_seqlen_q=0, int max_seqlen_kv=0, "
    "int ori_topk=0, int cmp_topk=0, int tile_size=0, int rope_head_dim=0, int cmp_ratio=-1, int ori_mask_mode=4, "
    "int cmp_mask_mode=3, int ori_win_left=127, int ori_win_right=0, str layout_q='BSND', str layout_kv='PA_ND', "
    "bool has_ori_kv=True, bool has_cmp_kv=True, str device='npu') -> Tensor",
    "npu_recurrent_gated_delta_rule_310(Tensor query, Tensor key, Tensor value, Tensor beta, Tensor state, Tensor "
    "actual_seq_lengths, Tensor ssm_state_indices, Tensor? g, Tensor? gk, Tensor? num_accepted_tokens, float "
    "scale_value=1.0) -> (Tensor output)",
    "npu_reshape_and_cache_bnsd(Tensor q, Tensor k_comp, Tensor slot_mapping, Tensor seq_len, Tensor k_out) -> Tensor",
    "npu_scatter_nd_update_v2(Tensor(a!) var, Tensor indices, Tensor update) -> ()",
    "npu_sign_bits_pack(Tensor input, int size) -> Tensor",
    "npu_sparse_attn_sharedkv(Tensor q, *, Tensor? ori_kv=None, Tensor? cmp_kv=None, Tensor? "
    "ori_sparse_indices=None, Tensor? cmp_sparse_indices=None, Tensor? ori_block_table=None, Tensor? "
    "cmp_block_table=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_ori_kv=None, Tensor? "
    "cu_seqlens_cmp_kv=None, Tensor? seqused_q=None, Tensor? seqused_kv=None, Tensor? sinks=None, Tensor? "
    "metadata=None, float softmax_scale=0, int cmp_ratio=0, int ori_mask_mode=4, int cmp_mask_mode=3, int "
    'ori_win_left=128, int ori_win_right=0, str layout_q="BSND", str layout_kv="PA_ND", bool '
    "return_softmax_lse=False) -> (Tensor out, Tensor softmax_lse)",
    "npu_sparse_attn_sharedkv_metadata(int num_heads_q, int num_heads_kv, int head_dim, Tensor? "
    "cu_seqlens_q=None, Tensor? cu_seqlens_ori_kv=None, Tensor? cu_seqlens_cmp_kv=None, Tensor? seqused_q=None, "
    "Tensor? seqused_kv=None, int batch_size=0, int max_seqlen_q=0, int max_seqlen_kv=0, int ori_topk=0, int "
    "cmp_topk=0, int cmp_ratio=4, int ori_mask_mode=4, int cmp_mask_mode=3, int ori_win_left=128, int "
    'ori_win_right=0, str layout_q="BSND", str layout_kv="PA_ND", bool has_ori_kv=True, bool has_cmp_kv=True, str '
    'device="npu") -> (Tensor metadata)',
    "npu_swiglu_group_quant(Tensor x, Tensor? topk_weight, Tensor? group_index, ScalarType dst_type=39, int "
    "quant_mode=1, int group_size=128, bool round_scale=False, bool ue8m0_scale=False, bool output_origin=False, "
    "int group_list_type=0, float clamp_value=0.0) -> (Tensor y, Tensor scale, Tensor y_origin)",
    "npu_vllm_quant_lightning_indexer(Tensor query, Tensor key, Tensor weights, Tensor query_dequant_scale, "
    "Tensor key_dequant_scale, int query_quant_mode=0, int key_quant_mode=0, Tensor? "
    "actual_seq_lengths_query=None, Tensor? actual_seq_lengths_key=None, Tensor? block_table=None, Tensor? "
    'metadata=None, str layout_query="BSND", str layout_key="BSND", int sparse_count=2048, int sparse_mode=3, int '
    "pre_tokens=9223372036854775807, int next_tokens=9223372036854775807, int cmp_ratio=1, bool "
    "return_value=False) -> (Tensor sparse_indices, Tensor sparse_values)",
    "npu_vllm_quant_lightning_indexer_metadata(int num_heads_q, int num_heads_k, int head_dim, int "
    "query_quant_mode, int key_quant_mode, Tensor? actual_seq_lengths_query=None, Tensor? "
    "actual_seq_lengths_key=None, int batch_size=0, int max_seqlen_q=0, int max_seqlen_k=0, str "
    'layout_query="BSND", str layout_key="BSND", int sparse_count=2048, int sparse_mode=3, int '
    'pre_tokens=9223372036854775807, int next_tokens=9223372036854775807, int cmp_ratio=1, str device="npu") -> '
    "(Tensor metadata)",
)
_SGL = (
    "compressor(Tensor x, Tensor wkv, Tensor wgate, Tensor! state_cache, Tensor ape, Tensor norm_weight, Tensor "
    "rope_sin, Tensor rope_cos, Tensor? state_block_table=None, Tensor? cu_seqlens=None, Tensor? seqused=None, "
    "Tensor? start_pos=None, int rope_head_dim=64, int cmp_ratio=4, int coff=1, float norm_eps=1e-6, int "
    "rotary_mode=1, int cache_mode=1, int state_cache_stride_dim0=0) -> Tensor",
    "sparse_attn_sharedkv(Tensor q, *, Tensor? ori_kv=None, Tensor? cmp_kv=None, Tensor? ori_sparse_indices=None, "
    "Tensor? cmp_sparse_indices=None, Tensor? ori_block_table=None, Tensor? cmp_block_table=None, Tensor? "
    "cu_seqlens_q=None, Tensor? cu_seqlens_ori_kv=None, Tensor? cu_seqlens_cmp_kv=None, Tensor? seqused_q=None, "
    "Tensor? seqused_kv=None, Tensor? sinks=None, Tensor? metadata=None, float softmax_scale=0, int cmp_ratio=0, "
    "int ori_mask_mode=4, int cmp_mask_mode=3, int ori_win_left=128, int ori_win_right=0, str layout_q='BSND', "
    "str layout_kv='PA_ND', bool return_softmax_lse=False) -> (Tensor, Tensor)",
    "sparse_attn_sharedkv_metadata_host(int num_heads_q, int num_heads_kv, int head_dim, str layout_q, str "
    "layout_kv, Tensor? cu_seqlens_q=None, Tensor? seqused_kv=None, int batch_size=0, int cmp_topk=0, int "
    "cmp_ratio=-1, int ori_mask_mode=4, int cmp_mask_mode=3, int ori_win_left=127, int ori_win_right=0, bool "
    "has_ori_kv=True, bool has_cmp_kv=True) -> Tensor",
    "npu_sparse_attention_score(Tensor query, Tensor key, Tensor value, Tensor select_idx, Tensor block_table, "
    "Tensor? select_num_idx=None, Tensor? q_dequant_scale=None, Tensor? k_dequant_scale=None, Tensor? "
    "v_dequant_scale=None, Tensor? actual_seq_lengths=None, Tensor? actual_seq_lengths_kv=None, int "
    "num_key_value_heads=1, float scale_value=1.0, int block_size=128, int top_k=16, int inner_precise=0) -> "
    "Tensor",
    "mega_chunk_gdn(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor mask_lower, Tensor mask_full, "
    "Tensor minus_identity, Tensor cu_seqlens, Tensor(a!) out, Tensor(b!) g_sum, Tensor(c!) g_t, Tensor(d!) "
    "beta_t, Tensor(e!) A, Tensor(f!) A_inv_f32, Tensor(g!) A_inv, Tensor(h!) w, Tensor(i!) u, Tensor(j!) s, "
    "Tensor(k!) v_new, Tensor(l!) final_state, Tensor initial_state, bool has_initial_state, Tensor(m!) "
    "kkt_workspace, Tensor(n!) wy_workspace_a1, Tensor(o!) wy_workspace_a2, Tensor(p!) h_workspace, Tensor(q!) "
    "o_workspace_qk, Tensor(r!) o_workspace_qs, Tensor(s!) o_workspace_gated, int block_dim, int batch_size, int "
    "seq_len, int total_tokens, int num_matrices) -> ()",
    "triangular_inverse(Tensor x) -> Tensor",
    "causal_conv1d_update(Tensor x, Tensor weight, Tensor(a!) conv_state, Tensor conv_state_indices, Tensor? "
    "bias=None, Tensor? num_accepted_tokens=None, Tensor? query_start_loc=None, bool activation_mode=False, int "
    "pad_slot_id=-1) -> Tensor",
)

_DEEPSEEK_V4 = "DeepSeek-V4: compressed caches, hyper-connections and their plans"
_REASONS = {
    "_310": "for the chip 310P",
    "chunk_": "prefill of the gated delta rule in chunks",
    "mega_chunk": "prefill of the gated delta rule in chunks",
    "triangular": "prefill of the gated delta rule in chunks",
    "device_print": "debugging: prints from a stream",
    "hamming": "sparse attention over sign bits",
    "bnsd": "sparse attention over sign bits",
    "sign_bits": "sparse attention over sign bits",
    "npu_sparse_attention_score": "block-sparse attention of MiniMax-M3",
    "causal_conv1d_update": "no released engine calls it: they call causal_conv1d",
}
_SOURCES = {
    "_C_ascend": "vllm-ascend v0.23.0, csrc/torch_binding.cpp",
    "npu": "sgl-kernel-npu f425bdf, csrc/pytorch_extensions.cpp",
}
ABSENT: dict[str, str] = {}
"""Why an op has no kernel, by full name."""

for _namespace, _schemas in (("_C_ascend", _VLLM), ("npu", _SGL)):
    for _schema in _schemas:
        _name = _schema.partition("(")[0]
        _reason = next((reason for part, reason in _REASONS.items() if part in _name), _DEEPSEEK_V4)
        define(_schema, _namespace)
        ABSENT[f"{_namespace}::{_name}"] = _reason
        note(
            f"{_namespace}::{_name}",
            "all of it",
            _SOURCES[_namespace],
            f"not computed ({_reason}): an `OperatorNotEmulatedError` with the schema: test_kernels_engine_absent.py",
        )
