"""Settings of vllm-ascend, which nothing here reads: who switches should hear of each."""

from collections.abc import Mapping

from vllm_npu_prep.startup.asked import Asked
from vllm_npu_prep.startup.refusal import Refusal, Subject

PAGE = "docs/start/from-vllm-ascend.md"

KEYS = frozenset(
    [
        "SLO_limits_for_dynamic_batch",
        "ascend_compilation_config",
        "c8_enable_reshape_optim",
        "dump_config",
        "dump_config_path",
        "enable_async_exponential",
        "enable_balance_scheduling",
        "enable_context_parallel",
        "enable_cpu_binding",
        "enable_dsa_cp",
        "enable_flashcomm1",
        "enable_fused_mc2",
        "enable_kv_nz",
        "enable_matmul_allreduce",
        "enable_mc2_hierarchy_comm",
        "enable_mlapo",
        "enable_npugraph_ex",
        "enable_shared_expert_dp",
        "enable_sleep_mode_extra_cleanup",
        "enable_sparse_c8",
        "enable_transpose_kv_cache_by_block",
        "eplb_config",
        "expert_map_path",
        "finegrained_tp_config",
        "flashcomm2_parallel_size",
        "layer_sharding",
        "msmonitor_use_daemon",
        "multistream_dsv4_dsa_overlap",
        "multistream_overlap_gate",
        "multistream_overlap_shared_expert",
        "pa_shape_list",
        "profiling_chunk_config",
        "quest_decode_config",
        "recompute_scheduler_enable",
        "refresh",
        "rejection_sampler_config",
        "torchair_graph_config",
        "ascend_scheduler_config",
        "weight_nz_mode",
        "weight_prefetch_config",
        "xlite_graph_config",
    ]
)
"""Keys of ``--additional-config``, as its page "Additional Configuration" lists them at commit
039d343 (2026), and those of earlier releases that guides still show."""

VARIABLES = ("VLLM_ASCEND_", "DYNAMIC_EPLB", "MSMONITOR_USE_DAEMON")
"""Beginnings of its environment variables, by its ``vllm_ascend/envs.py``."""


def _keys_of(asked: Asked) -> list[str]:
    given = asked.config.additional_config
    return sorted(KEYS & set(given)) if isinstance(given, Mapping) else []


def unread_variables(environment: Mapping[str, str]) -> list[str]:
    """Variables of vllm-ascend that are set, of which a container's image may have some.

    Parameters
    ----------
    environment
        Name to value.

    Returns
    -------
    list of str
        None or one line for the start-up block.
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
                "vllm-ascend reads that, and nothing here does",
                f"{PAGE} says what takes its place; leave it out",
                lambda asked: {"keys": ", ".join(_keys_of(asked))},
            ),
        ),
    ),
)
