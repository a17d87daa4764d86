"""Schemas of the operators, as torch's dispatcher holds them once torch_npu is loaded.

They were read by ``torch._C._jit_get_schemas_for_operator`` after ``import torch_npu`` (2.13.0) and
loading its ``lib/libop_plugin_atb.so``. They are facts about an interface; a test compares them
with the real ones wherever torch_npu can be imported. A schema is recorded once and its siblings
(``.out``, workspace) are built from it, because they differ in their last arguments alone.
"""

import inspect
from functools import cache
from typing import Any

import torch

FUSED_ATTENTION = (
    "Tensor query, Tensor key, Tensor value, *, Tensor? pse_shift=None, Tensor? atten_mask=None, "
    "SymInt[]? actual_seq_lengths=None, SymInt[]? actual_seq_lengths_kv=None, "
    "Tensor? dequant_scale1=None, Tensor? quant_scale1=None, Tensor? dequant_scale2=None, "
    "Tensor? quant_scale2=None, Tensor? quant_offset2=None, Tensor? antiquant_scale=None, "
    "Tensor? antiquant_offset=None, Tensor? key_antiquant_scale=None, "
    "Tensor? key_antiquant_offset=None, Tensor? value_antiquant_scale=None, "
    "Tensor? value_antiquant_offset=None, Tensor? block_table=None, "
    "Tensor? query_padding_size=None, Tensor? kv_padding_size=None, "
    "Tensor? key_shared_prefix=None, Tensor? value_shared_prefix=None, "
    "SymInt[]? actual_shared_prefix_len=None, Tensor? query_rope=None, Tensor? key_rope=None, "
    "Tensor? key_rope_antiquant_scale=None, int num_heads=1, float scale=1., "
    'int pre_tokens=2147483647, int next_tokens=2147483647, str input_layout="BSH", '
    "int num_key_value_heads=0, int sparse_mode=0, int inner_precise=0, int block_size=0, "
    "int antiquant_mode=0, int key_antiquant_mode=0, int value_antiquant_mode=0, "
    "bool softmax_lse_flag=False"
)
FUSED_ATTENTION_V2 = (
    "Tensor query, Tensor key, Tensor value, *, Tensor? query_rope=None, Tensor? key_rope=None, "
    "Tensor? pse_shift=None, Tensor? atten_mask=None, SymInt[]? actual_seq_qlen=None, "
    "SymInt[]? actual_seq_kvlen=None, Tensor? block_table=None, Tensor? dequant_scale_query=None, "
    "Tensor? dequant_scale_key=None, Tensor? dequant_offset_key=None, "
    "Tensor? dequant_scale_value=None, Tensor? dequant_offset_value=None, "
    "Tensor? dequant_scale_key_rope=None, Tensor? quant_scale_out=None, "
    "Tensor? quant_offset_out=None, Tensor? quant_scale_p=None, Tensor? learnable_sink=None, "
    "int num_query_heads=1, int num_key_value_heads=0, float softmax_scale=1., "
    'int pre_tokens=2147483647, int next_tokens=2147483647, str input_layout="BSH", '
    "int sparse_mode=0, int block_size=0, int query_quant_mode=0, int key_quant_mode=0, "
    "int value_quant_mode=0, int inner_precise=0, bool return_softmax_lse=False, "
    "int? query_dtype=None, int? key_dtype=None, int? value_dtype=None, "
    "int? query_rope_dtype=None, int? key_rope_dtype=None, int? key_shared_prefix_dtype=None, "
    "int? value_shared_prefix_dtype=None, int? dequant_scale_query_dtype=None, "
    "int? dequant_scale_key_dtype=None, int? dequant_scale_value_dtype=None, "
    "int? dequant_scale_key_rope_dtype=None, int? out_dtype=None"
)
PAGED_ATTENTION = (
    "Tensor query, Tensor key_cache, Tensor value_cache, int num_kv_heads, int num_heads, "
    "float scale_value, Tensor block_table, Tensor context_lens, Tensor(a!) out"
)
GROUPED_MATMUL = (
    "Tensor[] x, Tensor[] weight, *, Tensor[]? bias=None, Tensor[]? scale=None, "
    "Tensor[]? offset=None, Tensor[]? antiquant_scale=None, Tensor[]? antiquant_offset=None, "
    "Tensor[]? per_token_scale=None, Tensor? group_list=None, Tensor[]? activation_input=None, "
    "Tensor[]? activation_quant_scale=None, Tensor[]? activation_quant_offset=None, "
    "int? split_item=0, int? group_type=None, int? group_list_type=0, int? act_type=0, "
    "int[]? tuning_config=None, int? output_dtype=None, int? x_dtype=None, "
    "int? weight_dtype=None, int? scale_dtype=None, int? per_token_scale_dtype=None"
)
OUT = ", Tensor? workspace=None, Tensor[] out) -> (Tensor, Tensor)"

SCHEMAS = {
    ("npu::npu_fused_infer_attention_score", ""): f"({FUSED_ATTENTION}) -> (Tensor, Tensor)",
    ("npu::npu_fused_infer_attention_score", "out"): f"({FUSED_ATTENTION}{OUT}",
    ("npu::_npu_fused_infer_attention_score_get_max_workspace", ""): (
        f"({FUSED_ATTENTION}) -> Tensor"
    ),
    ("npu::npu_fused_infer_attention_score_v2", ""): f"({FUSED_ATTENTION_V2}) -> (Tensor, Tensor)",
    ("npu::npu_fused_infer_attention_score_v2", "out"): f"({FUSED_ATTENTION_V2}{OUT}",
    ("npu::_npu_fused_infer_attention_score_v2_get_max_workspace", ""): (
        f"({FUSED_ATTENTION_V2}) -> Tensor"
    ),
    ("npu::npu_fusion_attention", ""): (
        "(Tensor query, Tensor key, Tensor value, int head_num, str input_layout, "
        "Tensor? pse=None, Tensor? padding_mask=None, Tensor? atten_mask=None, float scale=1., "
        "float keep_prob=1., int pre_tockens=2147483647, int next_tockens=2147483647, "
        "int inner_precise=0, int[]? prefix=None, int[]? actual_seq_qlen=None, "
        "int[]? actual_seq_kvlen=None, int sparse_mode=0, bool gen_mask_parallel=True, "
        'bool sync=False, str softmax_layout="", Tensor? sink=None, Tensor? dropout_mask=None, '
        "int seed=0, int offset=0) -> (Tensor, Tensor, Tensor, Tensor, int, int, int)"
    ),
    ("atb::_npu_reshape_and_cache", ""): (
        "(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, "
        "Tensor slot_indices) -> ()"
    ),
    ("npu::npu_scatter_pa_kv_cache", ""): (
        "(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, "
        "Tensor slot_mapping, *, Tensor? compress_lens=None, Tensor? compress_seq_offsets=None, "
        'Tensor? seq_lens=None, str? cache_mode="PA_NZ") -> ()'
    ),
    ("atb::_npu_flash_attention", ""): (
        "(Tensor query, Tensor key, Tensor value, Tensor mask, Tensor seq_len, float scale_value, "
        "int num_heads, int num_kv_heads, Tensor(a!) out) -> ()"
    ),
    ("atb::_npu_paged_attention", ""): f"({PAGED_ATTENTION}, *, Tensor? workspace=None) -> ()",
    ("atb::_npu_paged_attention_get_workspace", ""): f"({PAGED_ATTENTION}) -> Tensor",
    ("atb::_npu_paged_attention_splitfuse", ""): (
        "(Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_table, "
        "Tensor context_lens, Tensor mask, Tensor seq_len, int num_kv_heads, int num_heads, "
        "float scale_value, Tensor(a!) out) -> ()"
    ),
    ("npu::npu_rms_norm", ""): (
        "(Tensor input, Tensor gamma, float epsilon=9.9999999999999995e-07) -> (Tensor, Tensor)"
    ),
    ("npu::npu_add_rms_norm", ""): (
        "(Tensor x1, Tensor x2, Tensor gamma, float epsilon=9.9999999999999995e-07) "
        "-> (Tensor, Tensor, Tensor)"
    ),
    ("npu::npu_add_rms_norm_cast", ""): (
        "(Tensor x1, Tensor x2, Tensor gamma, float epsilon=9.9999999999999995e-07) "
        "-> (Tensor, Tensor, Tensor, Tensor)"
    ),
    ("npu::npu_gemma_rms_norm", ""): (
        "(Tensor input, Tensor gamma, float epsilon=9.9999999999999995e-07) -> (Tensor, Tensor)"
    ),
    ("npu::npu_swiglu", ""): "(Tensor input, int dim=-1) -> Tensor",
    ("npu::npu_gelu", ""): '(Tensor input, *, str approximate="none") -> Tensor',
    ("npu::npu_geglu", ""): (
        "(Tensor input, int dim=-1, int approximate=1, bool activate_left=False) "
        "-> (Tensor, Tensor)"
    ),
    ("npu::npu_mrope", ""): (
        "(Tensor positions, Tensor query, Tensor key, Tensor cos_sin_cache, int head_size, *, "
        'int[]? mrope_section=None, str? rotary_mode="half", str? cache_mode="default") '
        "-> (Tensor, Tensor)"
    ),
    ("npu::npu_grouped_matmul", ""): f"({GROUPED_MATMUL}) -> Tensor[]",
    ("npu::npu_top_k_top_p", ""): ("(Tensor logits, Tensor? p=None, Tensor? k=None) -> Tensor"),
    ("npu::npu_dynamic_quant", ""): (
        "(Tensor input, *, Tensor? smooth_scales=None, Tensor? group_index=None, "
        'int? dst_type=None, str quant_mode="pertoken", float dst_type_max=0.) -> (Tensor, Tensor)'
    ),
    ("npu::npu_quantize", ""): (
        "(Tensor input, Tensor scales, Tensor? zero_points, int dtype, int axis=1, "
        "bool div_mode=True) -> Tensor"
    ),
    ("npu::npu_quant_matmul", ""): (
        "(Tensor x1, Tensor x2, Tensor scale, *, Tensor? offset=None, "
        "Tensor? pertoken_scale=None, Tensor? bias=None, int? output_dtype=None, "
        "int? x1_dtype=None, int? x2_dtype=None, int? pertoken_scale_dtype=None, "
        "int? scale_dtype=None, int[]? group_sizes=None, Tensor? y_scale=None) -> Tensor"
    ),
    ("npu::npu_add_rms_norm_dynamic_quant", ""): (
        "(Tensor x1, Tensor x2, Tensor gamma, *, Tensor? smooth_scale1=None, "
        "Tensor? smooth_scale2=None, Tensor? beta=None, float epsilon=9.9999999999999995e-07, "
        "bool[2]? output_mask=None, int? y_dtype=None) "
        "-> (Tensor, Tensor, Tensor, Tensor, Tensor)"
    ),
    ("npu::npu_add_rms_norm_quant", ""): (
        "(Tensor x1, Tensor x2, Tensor gamma, Tensor scales1, Tensor? zero_points1, "
        "Tensor? beta=None, Tensor? scales2=None, Tensor? zero_points2=None, *, int axis=-1, "
        "float epsilon=9.9999999999999995e-07, bool div_mode=True, int? dst_type=None) "
        "-> (Tensor, Tensor, Tensor)"
    ),
    ("npu::npu_dequant_swiglu_quant", ""): (
        "(Tensor x, *, Tensor? weight_scale=None, Tensor? activation_scale=None, "
        "Tensor? bias=None, Tensor? quant_scale=None, Tensor? quant_offset=None, "
        "Tensor? group_index=None, bool activate_left=False, int quant_mode=0, "
        "int? dst_type=None, int? round_mode=None, int? activate_dim=None, int swiglu_mode=0, "
        "float clamp_limit=7., float glu_alpha=1.702, float glu_bias=1.) -> (Tensor, Tensor)"
    ),
    ("npu::npu_moe_init_routing_v2", ""): (
        "(Tensor x, Tensor expert_idx, *, Tensor? scale=None, Tensor? offset=None, "
        "int active_num=-1, int expert_capacity=-1, int expert_num=-1, int drop_pad_mode=0, "
        "int expert_tokens_num_type=0, bool expert_tokens_num_flag=False, int quant_mode=-1, "
        "int[2] active_expert_range=[], int row_idx_type=0, int? x_dtype=None) "
        "-> (Tensor, Tensor, Tensor, Tensor)"
    ),
    ("npu::_npu_moe_token_unpermute", ""): (
        "(Tensor permuted_tokens, Tensor sorted_indices, Tensor? probs=None, "
        "bool padded_mode=False, int[]? restore_shape=None) "
        "-> (Tensor unpermuted_tokens, Tensor permuted_tokens_for_backward)"
    ),
    ("npu::npu_moe_finalize_routing", ""): (
        "(Tensor expanded_permuted_rows, Tensor? skip1, Tensor? skip2, Tensor? bias, "
        "Tensor? scales, Tensor expanded_src_to_dst_row, Tensor? export_for_source_row, "
        "int? drop_pad_mode=0, int? k=1) -> Tensor"
    ),
    ("npu::npu_moe_distribute_dispatch_v2", ""): (
        "(Tensor x, Tensor expert_ids, str group_ep, int ep_world_size, int ep_rank_id, "
        "int moe_expert_num, *, Tensor? scales=None, Tensor? x_active_mask=None, "
        "Tensor? expert_scales=None, Tensor? elastic_info=None, Tensor? performance_info=None, "
        'str group_tp="", int tp_world_size=0, int tp_rank_id=0, int expert_shard_type=0, '
        "int shared_expert_num=1, int shared_expert_rank_num=0, int quant_mode=0, "
        'int global_bs=0, int expert_token_nums_type=1, str comm_alg="", int zero_expert_num=0, '
        "int copy_expert_num=0, int const_expert_num=0, int? y_dtype=None, int? x_dtype=None, "
        "int? scales_dtype=None) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
    ),
    ("npu::npu_moe_distribute_combine_v2", ""): (
        "(Tensor expand_x, Tensor expert_ids, Tensor assist_info_for_combine, "
        "Tensor ep_send_counts, Tensor expert_scales, str group_ep, int ep_world_size, "
        "int ep_rank_id, int moe_expert_num, *, Tensor? tp_send_counts=None, "
        "Tensor? x_active_mask=None, Tensor? expand_scales=None, Tensor? shared_expert_x=None, "
        "Tensor? elastic_info=None, Tensor? ori_x=None, Tensor? const_expert_alpha_1=None, "
        "Tensor? const_expert_alpha_2=None, Tensor? const_expert_v=None, "
        'Tensor? performance_info=None, str group_tp="", int tp_world_size=0, int tp_rank_id=0, '
        "int expert_shard_type=0, int shared_expert_num=1, int shared_expert_rank_num=0, "
        'int global_bs=0, int comm_quant_mode=0, str comm_alg="", int zero_expert_num=0, '
        "int copy_expert_num=0, int const_expert_num=0) -> Tensor"
    ),
    ("npu::npu_moe_gating_top_k", ""): (
        "(Tensor x, int k, *, Tensor? bias=None, Tensor? input_ids=None, Tensor? tid2eid=None, "
        "int k_group=1, int group_count=1, int group_select_mode=0, int renorm=0, "
        "int norm_type=0, bool out_flag=False, float routed_scaling_factor=1., "
        "float eps=9.9999999999999995e-21) -> (Tensor, Tensor, Tensor)"
    ),
    ("npu::npu_moe_gating_top_k_softmax_v2", ""): (
        "(Tensor x, *, int k=1, Tensor? finished=None, int? renorm=0, "
        "bool? output_softmax=False) -> (Tensor, Tensor, Tensor)"
    ),
    ("npu::npu_rotary_mul", ""): (
        '(Tensor input, Tensor r1, Tensor r2, str rotary_mode="half", Tensor? rotate=None) '
        "-> Tensor"
    ),
    ("npu::npu_transpose_batchmatmul", ""): (
        "(Tensor input, Tensor weight, *, Tensor? bias=None, Tensor? scale=None, "
        "int[]? perm_x1=None, int[]? perm_x2=None, int[]? perm_y=None, "
        "int? batch_split_factor=1) -> Tensor"
    ),
    ("npu::npu_recurrent_gated_delta_rule", ""): (
        "(Tensor query, Tensor key, Tensor value, Tensor(a!) state, *, Tensor? beta=None, "
        "float? scale=None, Tensor? actual_seq_lengths=None, Tensor? ssm_state_indices=None, "
        "Tensor? num_accepted_tokens=None, Tensor? g=None, Tensor? gk=None) -> Tensor"
    ),
    ("npu::npu_chunk_gated_delta_rule", ""): (
        "(Tensor query, Tensor key, Tensor value, *, Tensor? beta=None, "
        "Tensor? initial_state=None, Tensor? actual_seq_lengths=None, float? scale=None, "
        "Tensor? g=None) -> (Tensor, Tensor)"
    ),
    ("npu::npu_gather_pa_kv_cache", ""): (
        "(Tensor key_cache, Tensor value_cache, Tensor block_tables, Tensor seq_lens, "
        "Tensor(a!) key, Tensor(b!) value, *, Tensor? seq_offset=None, "
        "bool is_seq_lens_cumsum=False) -> ()"
    ),
    ("npu::npu_clipped_swiglu", ""): (
        "(Tensor x, *, Tensor? group_index=None, int dim=-1, float alpha=1.702, float "
        "limit=7., float bias=1., bool interleaved=True) -> Tensor"
    ),
    ("npu::npu_fast_gelu", ""): ("(Tensor input) -> Tensor"),
    ("atb::_npu_rotary_embedding", ""): (
        "(Tensor positions, Tensor(a!) query, Tensor(b!) key, int head_size, Tensor "
        "cos_sin_cache, bool is_neox_style) -> ()"
    ),
    ("npu::npu_moe_token_permute", ""): (
        "(Tensor tokens, Tensor indices, int? num_out_tokens=None, bool padded_mode=False) -> "
        "(Tensor, Tensor)"
    ),
    ("npu::npu_interleave_rope", ""): ("(Tensor x, Tensor cos, Tensor sin) -> Tensor"),
    ("npu::npu_kv_rmsnorm_rope_cache", ""): (
        "(Tensor kv, Tensor gamma, Tensor cos, Tensor sin, Tensor index, Tensor k_cache, "
        "Tensor ckv_cache, *, Tensor? k_rope_scale=None, Tensor? c_kv_scale=None, Tensor? "
        "k_rope_offset=None, Tensor? c_kv_offset=None, Tensor? v=None, float "
        'epsilon=1.0000000000000001e-05, str cache_mode="Norm", bool is_output_kv=False) -> '
        "(Tensor, Tensor, Tensor, Tensor)"
    ),
    ("atb::_npu_flash_attention_unpad", ""): (
        "(Tensor query, Tensor key, Tensor value, Tensor seq_len, float scale_value, int "
        "num_heads, int num_kv_heads, Tensor(a!) out) -> ()"
    ),
    ("npu::npu_scatter_nd_update_", ""): (
        "(Tensor(a!) input, Tensor indices, Tensor updates) -> Tensor(a!)"
    ),
    ("npu::npu_lightning_indexer", ""): (
        "(Tensor query, Tensor key, Tensor weights, *, Tensor? actual_seq_lengths_query=None, "
        "Tensor? actual_seq_lengths_key=None, Tensor? block_table=None, "
        'str layout_query="BSND", str layout_key="BSND", int sparse_count=2048, '
        "int sparse_mode=3, int pre_tokens=9223372036854775807, "
        "int next_tokens=9223372036854775807, bool return_value=False) -> (Tensor, Tensor)"
    ),
    ("npu::npu_sparse_flash_attention", ""): (
        "(Tensor query, Tensor key, Tensor? value, Tensor sparse_indices, float scale_value, *, "
        "Tensor? block_table=None, Tensor? actual_seq_lengths_query=None, "
        "Tensor? actual_seq_lengths_kv=None, Tensor? query_rope=None, Tensor? key_rope=None, "
        'int sparse_block_size=1, str layout_query="BSND", str layout_kv="BSND", '
        "int sparse_mode=3, int pre_tokens=9223372036854775807, "
        "int next_tokens=9223372036854775807, int attention_mode=0, "
        "bool return_softmax_lse=False, Tensor? sinks=None) -> (Tensor, Tensor, Tensor)"
    ),
    ("npu::npu_weight_quant_batchmatmul", ""): (
        "(Tensor x, Tensor weight, Tensor antiquant_scale, Tensor? antiquant_offset=None, "
        "Tensor? quant_scale=None, Tensor? quant_offset=None, Tensor? bias=None, int "
        "antiquant_group_size=0, int inner_precise=0, int? weight_dtype=None) -> Tensor"
    ),
    ("npu::npu_format_cast", ""): (
        "(Tensor input, int acl_format, *, int? customize_dtype=None, int? input_dtype=None) "
        "-> Tensor"
    ),
    ("atb::_npu_matmul_add_fp32", ""): ("(Tensor x, Tensor weight, Tensor(a!) C) -> ()"),
    ("npu::npu_attention_update", ""): (
        "(Tensor[] lse, Tensor[] local_out, int update_type) -> (Tensor, Tensor)"
    ),
}
"""Arguments and results by (name, overload)."""


def schema_text(name: str, overload: str = "") -> str:
    """Return the whole schema, as the dispatcher prints it."""
    full_name = f"{name}.{overload}" if overload else name
    return full_name + SCHEMAS[name, overload]


def parse(name: str, overload: str = "") -> Any:
    """Return the parsed schema, with ``arguments`` and ``returns``."""
    return torch._C.parse_schema(schema_text(name, overload))


@cache
def signature(name: str, overload: str = "") -> inspect.Signature:
    """Return an operator's Python signature: names, order, defaults and what is keyword-only."""
    return inspect.Signature(
        [
            inspect.Parameter(
                argument.name,
                inspect.Parameter.KEYWORD_ONLY
                if argument.kwarg_only
                else inspect.Parameter.POSITIONAL_OR_KEYWORD,
                default=argument.default_value
                if argument.has_default_value()
                else inspect.Parameter.empty,
            )
            for argument in parse(name, overload).arguments
        ]
    )
