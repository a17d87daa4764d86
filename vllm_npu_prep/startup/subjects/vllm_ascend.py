"""Refusals of vllm-ascend's settings: nothing here reads them, and who switches should know it."""

from collections.abc import Mapping

from vllm_npu_prep.startup.asked import RequestedEngine
from vllm_npu_prep.startup.refusal import Refusal, Subject

PAGE = "docs/guides/vllm-ascend.md"

KEYS = frozenset(
    [
        "ascend_compilation_config",
        "ascend_fusion_config",
        "ascend_log_path",
        "ascend_scheduler_config",
        "ascend_warmup_config",
        "batch_job_sched_config",
        "c8_enable_reshape_optim",
        "combine_quant_mode",
        "dp_allreduce_on_npu",
        "draft_window_size",
        "dump_config",
        "dump_config_path",
        "dynamic_spec_config",
        "enable_async_exponential",
        "enable_balance_scheduling",
        "enable_context_parallel",
        "enable_cpu_binding",
        "enable_dsa_cp",
        "enable_flashcomm1",
        "enable_flashcomm2_parallel_size",
        "enable_force_eplb",
        "enable_fused_mc2",
        "enable_hamming_sparse",
        "enable_kv_nz",
        "enable_kvpp",
        "enable_matmul_allreduce",
        "enable_mc2_hierarchy_comm",
        "enable_mlapo",
        "enable_npugraph_ex",
        "enable_pcp_embedding_lmhead_weight_sharding",
        "enable_pcp_o_proj_weight_sharding",
        "enable_prefill_mc2",
        "enable_reduce_sample",
        "enable_shared_expert_dp",
        "enable_sleep_mode_extra_cleanup",
        "enable_sparse_c8",
        "enable_sparse_li_c4",
        "enable_sparse_li_c8",
        "enable_sparse_sfa_c8",
        "enable_transpose_kv_cache_by_block",
        "eplb_config",
        "expert_map_path",
        "finegrained_tp_config",
        "flashcomm2_parallel_size",
        "hamming_sparse",
        "kvpp_config",
        "layer_sharding",
        "mc2_comm_alg",
        "mega_moe_max_tokens",
        "mix_placement",
        "mlapo_keep_prefill_weights",
        "msmonitor_use_daemon",
        "multistream_dsv4_dsa_overlap",
        "multistream_engram_overlap",
        "multistream_overlap_gate",
        "multistream_overlap_shared_expert",
        "pa_shape_list",
        "profiling_chunk_config",
        "quest_decode_config",
        "recompute_scheduler_enable",
        "refresh",
        "rejection_sampler_config",
        "rl_config",
        "scheduler_config",
        "sfa_dcp_force_tmajor_restore",
        "short_request_first_config",
        "SLO_limits_for_dynamic_batch",
        "sparse_kv_offload_config",
        "torchair_graph_config",
        "weight_nz_mode",
        "weight_prefetch_config",
        "xlite_graph_config",
    ]
)
"""Keys of ``--additional-config`` that ``vllm_ascend/ascend_config.py`` and the page "Additional
Configuration" have in its release 0.30.0rc2 (October 2026), those of earlier releases that
guides still show, and one that no release has. Our page says which is in which release.
"""

VARIABLES = ("VLLM_ASCEND_", "DYNAMIC_EPLB", "EXPERT_MAP_RECORD", "MSMONITOR_USE_DAEMON")
"""The beginnings of its environment variables, by its ``vllm_ascend/envs.py``."""


def _keys_of(asked: RequestedEngine) -> list[str]:
    given = asked.config.additional_config
    return sorted(KEYS & set(given)) if isinstance(given, Mapping) else []


def unread_variables(environment: Mapping[str, str]) -> list[str]:
    """Return no or one line for the start-up block about variables of vllm-ascend that are set.

    A container's image may set some of them.
    """
    found = sorted(name for name in environment if name.startswith(VARIABLES))
    if not found:
        return []
    return [f"{', '.join(found)}: variables of vllm-ascend, not read here; see {PAGE}"]


SUBJECTS = (
    Subject(
        "vllm-ascend",
        (
            Refusal(
                "vllm-ascend-keys",
                _keys_of,
                "{keys} in --additional-config",
                "vllm-ascend reads it, and this plugin does not",
                f"leave it out; {PAGE} says what takes its place",
                lambda asked: {"keys": ", ".join(_keys_of(asked))},
            ),
        ),
    ),
)
