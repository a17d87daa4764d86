"""Refusals of what several ranks can't do, context parallelism included."""

from typing import TYPE_CHECKING

from vllm_npu_prep.attention.fused_releases import version_of
from vllm_npu_prep.compat.releases import ray_compiles_graphs
from vllm_npu_prep.device import NPU_KIND, device_name, has_collectives, visible_devices
from vllm_npu_prep.device.mc2 import OPERATORS, Limits, limits_of
from vllm_npu_prep.ranks import ranks_on_host
from vllm_npu_prep.startup.asked import RequestedEngine, indexers_of
from vllm_npu_prep.startup.refusal import Refusal, Subject, words_of_functions

if TYPE_CHECKING:
    from vllm.config import ParallelConfig


def _parallel(asked: RequestedEngine) -> "ParallelConfig":
    return asked.config.parallel_config


def _lack_devices(asked: RequestedEngine) -> bool:
    """Tell whether ranks would have to share a device, which only those on the CPU can.

    Ray counts the devices of its nodes itself.
    """
    visible = visible_devices(asked.kind.device_type)
    too_many = visible is not None and ranks_on_host(_parallel(asked)) > visible
    return too_many and not _parallel(asked).use_ray


def _ray_compiles_graphs(asked: RequestedEngine) -> bool:
    return _parallel(asked).use_ray and ray_compiles_graphs()


def _sees_parts_of_contexts(asked: RequestedEngine) -> bool:
    text, kinds = asked.text, asked.layer_types
    return bool(
        (kinds - {"full_attention"} and not asked.is_sparse)  # GLM-5 has a name for its layers
        or asked.model.is_hybrid
        or asked.model.get_sliding_window()
        or getattr(text, "attention_chunk_size", None)
        or getattr(text, "num_kv_shared_layers", None)
    )


def _begins_with_follower(asked: RequestedEngine) -> bool:
    """Tell whether a pipeline stage begins with a layer that reads what an earlier stage chose."""
    stages = _parallel(asked).pipeline_parallel_size
    if not asked.is_sparse or stages == 1:
        return False
    from vllm.distributed.utils import get_pp_indices

    indexers = indexers_of(asked.text)
    firsts = (get_pp_indices(len(indexers), stage, stages)[0] for stage in range(1, stages))
    return any(indexers[first] == "S" for first in firsts)


MAX_REDUNDANT = 1023
"""``MAX_EXPERT_REDUNDANCY`` of `EplbState.add_model` in vLLM."""


def _expert_ranks(asked: RequestedEngine) -> int:
    return _parallel(asked).tensor_parallel_size * _parallel(asked).data_parallel_size


def _physical_experts(asked: RequestedEngine) -> int:
    return asked.model.get_num_experts() + _parallel(asked).eplb_config.num_redundant_experts


def _has_adapters_or_images(asked: RequestedEngine) -> bool:
    sees = asked.model.supports_multimodal_inputs or asked.model.uses_mrope
    return sees or asked.config.lora_config is not None


def _words_of_ranks(asked: RequestedEngine) -> dict[str, object]:
    limits = mc2_limits(asked)
    assert limits is not None
    taken = list(limits.ranks)
    few = ", ".join(map(str, taken)) if len(taken) < 20 else f"{taken[0]} to {taken[-1]}"
    every = isinstance(limits.ranks, range) and limits.ranks.step > 1
    return {
        "num_ranks": _expert_ranks(asked),
        "chip": limits.chip,
        "cann": asked.cann,
        "ranks": f"multiples of {taken[0]} up to {taken[-1]}" if every else few,
    }


ON = '"npu_prep.mc2" = "on" with '
"""The beginning of refusals of what MC2 can't do."""

AUTO = "leave the option out: tokens are gathered then"


DEVICES = (
    Refusal(
        "ranks-beyond-devices",
        _lack_devices,
        "{num_ranks} ranks on this host",
        "{visible} NPUs are visible, and each rank needs its own",
        "lower the tensor, pipeline or data parallel size, or check {variable}",
        lambda c: {
            "num_ranks": ranks_on_host(_parallel(c)),
            "visible": visible_devices(c.kind.device_type),
            "variable": c.kind.visible_env_var,
        },
    ),
    Refusal(
        "no-collectives",
        lambda c: _parallel(c).world_size > 1 and not has_collectives(c.kind.device_type),
        "{num_ranks} ranks of one engine",
        "libhccl.so has no HcclGetRootInfo, so NPUs can't exchange data",
        "install CANN's HCCL, set tensor and pipeline parallel size to 1, or use the CPU fallback",
        lambda c: {"num_ranks": _parallel(c).world_size},
    ),
)


RANKS = (
    Refusal(
        "external-launcher",
        lambda c: _parallel(c).distributed_executor_backend == "external_launcher",
        "--distributed-executor-backend external_launcher",
        "only mp and Ray can start ranks",
        "use mp or ray",
    ),
    Refusal(
        "elastic-ep",
        lambda c: _parallel(c).enable_elastic_ep,
        "--enable-elastic-ep",
        "experts stay on the ranks that loaded them",
    ),
    Refusal(
        "all2all-backend",
        lambda c: (
            _parallel(c).use_all2all and _parallel(c).all2all_backend != "allgather_reducescatter"
        ),
        "--all2all-backend {name}",
        "its kernels run on CUDA devices only",
        "leave the flag out",
        lambda c: {"name": _parallel(c).all2all_backend},
    ),
    Refusal(
        "batch-sharded-sampling",
        lambda c: _parallel(c).enable_batch_sharded_sampling,
        "--enable-batch-sharded-sampling",
        "every rank samples all requests of a step",
    ),
    Refusal(
        "fault-tolerance",
        lambda c: _parallel(c).enable_fault_tolerance,
        "--enable-fault-tolerance",
        "an engine that loses a rank stops, and has to be restarted",
    ),
    Refusal(
        "sparse-stages",
        _begins_with_follower,
        "--pipeline-parallel-size {size} with layers that share an indexer ({model})",
        "a stage would begin with a layer that reads what an indexer of another stage chose",
        "use --tensor-parallel-size, or let VLLM_PP_LAYER_PARTITION cut before layers that have an "
        "indexer",
        lambda c: {"size": _parallel(c).pipeline_parallel_size},
    ),
    Refusal(
        "async-stages",
        lambda c: (
            _parallel(c).pipeline_parallel_size > 1
            and c.config.scheduler_config.async_scheduling
            and not c.config.use_v2_model_runner
        ),
        "--async-scheduling over pipeline stages",
        "vLLM's V1 runner does not support it",
        "leave the flag out, or unset VLLM_USE_V2_MODEL_RUNNER: V2 has it",
    ),
    Refusal(
        "ray-data-parallel",
        lambda c: _parallel(c).data_parallel_backend == "ray",
        "--data-parallel-backend ray",
        "only mp can start data-parallel ranks",
        "use --distributed-executor-backend ray to spread the ranks of each engine over hosts",
    ),
    Refusal(
        "ray-compiled-graphs",
        _ray_compiles_graphs,
        "VLLM_USE_RAY_V2_EXECUTOR_BACKEND=0",
        "Ray's compiled graphs have not been tested",
        "unset it",
    ),
)

SHARED = "--decode-context-parallel-size with "
"""The beginning of refusals of what decode context parallelism can't do."""

ALONE = "leave one of the two out"

SHARED_CONTEXTS = (
    Refusal(
        "shared-contexts-family",
        lambda c: not c.family.lse,
        SHARED + "kernel family {family}",
        "its operators don't return the log-sum-exp, by which results are merged",
        'use {{"npu_prep": {{"attention": "fia"}}}}',
    ),
    Refusal(
        "shared-contexts-layers",
        _sees_parts_of_contexts,
        SHARED + "windows, attention chunks, shared K and V or recurrent states ({model})",
        "it is for layers that see whole contexts and have K and V of their own",
        "use --tensor-parallel-size",
    ),
    Refusal(
        "shared-contexts-sparse",
        lambda c: c.is_sparse,
        SHARED + "sparse attention ({model})",
        "over a paged cache, CANN's operators return neither the scores nor the log-sum-exp, by "
        "which ranks would merge what they choose and what they attend to",
        "use --tensor-parallel-size",
    ),
    Refusal(
        "shared-contexts-speculation",
        lambda c: c.config.speculative_config is not None,
        SHARED + "speculation",
        "a step with drafts finds each of them in the cache of one rank only",
        ALONE,
    ),
    Refusal(
        "shared-contexts-connector",
        lambda c: c.transfer is not None,
        SHARED + "a KV connector",
        "connectors store the blocks of one rank",
        ALONE,
    ),
    Refusal(
        "shared-contexts-pooling",
        lambda c: c.pools,
        SHARED + "a pooling model",
        "it was tried with models that generate",
        ALONE,
    ),
    Refusal(
        "shared-contexts-beside",
        lambda c: (
            max(_parallel(c).pipeline_parallel_size, _parallel(c).data_parallel_size) > 1
            or _has_adapters_or_images(c)
            or (c.model.quantization is not None or c.model.enable_prompt_embeds)
        ),
        SHARED + "pipeline stages, data parallelism, images, LoRA or int8",
        "it was tried with tensor parallelism and text alone",
        ALONE,
    ),
    Refusal(
        "shared-contexts-exchange",
        lambda c: (
            _parallel(c).dcp_comm_backend not in (None, "ag_rs") or _parallel(c).dcp_q_replicate
        ),
        "--dcp-comm-backend or --dcp-q-replicate",
        "the ranks gather their queries, and gather and scatter the results",
        "leave them out",
    ),
    Refusal(
        "shared-contexts-older-name",
        lambda c: _parallel(c).dcp_kv_cache_interleave_size > 1,
        "--dcp-kv-cache-interleave-size {size}",
        "it is an older name, which vLLM reads after the cache has been laid out",
        "use --cp-kv-cache-interleave-size",
        lambda c: {"size": _parallel(c).dcp_kv_cache_interleave_size},
    ),
    Refusal(
        "shared-contexts-runs",
        lambda c: c.block_size % _parallel(c).cp_kv_cache_interleave_size,
        "--cp-kv-cache-interleave-size {size}",
        "blocks of {block_size} tokens have to be whole runs of it",
        "use a size that divides --block-size",
        lambda c: {
            "size": _parallel(c).cp_kv_cache_interleave_size,
            "block_size": c.block_size,
        },
    ),
)

PROMPTS = "--prefill-context-parallel-size with "
"""The beginning of refusals of what prefill context parallelism can't do."""

SHARED_PROMPTS = (
    Refusal(
        "shared-prompts-family",
        lambda c: c.family.name == "atb",
        PROMPTS + "kernel family {family}",
        "its masks would have to follow the rows of each rank",
        'use {{"npu_prep": {{"attention": "fia"}}}}',
    ),
    Refusal(
        "shared-prompts-layers",
        _sees_parts_of_contexts,
        PROMPTS + "windows, attention chunks, shared K and V or recurrent states ({model})",
        "it is for layers that see whole contexts and have K and V of their own",
        "use --tensor-parallel-size",
    ),
    Refusal(
        "shared-prompts-choices",
        lambda c: c.is_sparse and c.options.record is not None and c.options.record.choices,
        '"npu_prep.record.choices" with --prefill-context-parallel-size',
        "a rank's indexers choose for its own tokens, and a record is of all tokens",
        'leave "choices" out',
    ),
    Refusal(
        "shared-prompts-decodes",
        lambda c: _parallel(c).decode_context_parallel_size > 1,
        PROMPTS + "--decode-context-parallel-size",
        "vLLM has both together for sparse attention only, and CANN's operators of that return no "
        "log-sum-exp, by which ranks would merge results",
        ALONE,
    ),
    Refusal(
        "shared-prompts-upstream",
        _has_adapters_or_images,
        PROMPTS + "LoRA or images",
        "vLLM itself refuses them beside it",
        ALONE,
    ),
    Refusal(
        "shared-prompts-speculation",
        lambda c: c.config.speculative_config is not None,
        PROMPTS + "speculation",
        "drafters continue from hidden states of all tokens, and ranks exchange only those of "
        "sampled tokens",
        ALONE,
    ),
    Refusal(
        "shared-prompts-connector",
        lambda c: c.transfer is not None,
        PROMPTS + "a KV connector",
        "each rank would store the same blocks",
        ALONE,
    ),
    Refusal(
        "shared-prompts-pooling",
        lambda c: c.pools,
        PROMPTS + "a pooling model",
        "it was tried with models that generate",
        ALONE,
    ),
    Refusal(
        "shared-prompts-beside",
        lambda c: (
            (_parallel(c).data_parallel_size > 1 or _parallel(c).use_ray)
            or (_parallel(c).enable_eplb or c.model.enable_prompt_embeds)
        ),
        PROMPTS + "data parallelism, Ray, --enable-eplb or prompt embeddings",
        "it was tried only with mp, the ranks of one engine, and token ids",
        ALONE,
    ),
)


EPLB = (
    Refusal(
        "eplb-uneven",
        lambda c: _physical_experts(c) % _expert_ranks(c),
        "--enable-eplb with {experts} experts and {redundant} redundant ones on {num_ranks} ranks",
        "each rank has the same number of them",
        "set num_redundant_experts in --eplb-config so that the ranks divide the sum evenly",
        lambda c: {
            "experts": c.model.get_num_experts(),
            "redundant": _parallel(c).eplb_config.num_redundant_experts,
            "num_ranks": _expert_ranks(c),
        },
    ),
    Refusal(
        "eplb-redundant",
        lambda c: _parallel(c).eplb_config.num_redundant_experts > MAX_REDUNDANT,
        "num_redundant_experts {redundant} in --eplb-config",
        f"vLLM's map has room for {MAX_REDUNDANT}",
        "use fewer",
        lambda c: {"redundant": _parallel(c).eplb_config.num_redundant_experts},
    ),
    Refusal(
        "eplb-communicator",
        lambda c: _parallel(c).eplb_config.communicator != "torch_gloo",
        "communicator {name} in --eplb-config",
        "weights are exchanged through the host",
        "use torch_gloo",
        lambda c: {"name": _parallel(c).eplb_config.communicator},
    ),
    Refusal(
        "eplb-stages",
        lambda c: _parallel(c).pipeline_parallel_size > 1,
        "--enable-eplb over pipeline stages",
        "vLLM's V1 runner lets the experts of the last stage move alone",
        "set --pipeline-parallel-size to 1, or leave --enable-eplb out",
    ),
    Refusal(
        "eplb-drafts",
        lambda c: c.config.speculative_config is not None,
        "--enable-eplb with speculation",
        "a drafter's experts were not tried",
        "leave one of them out",
    ),
    Refusal(
        "eplb-sleep",
        lambda c: c.model.enable_sleep_mode,
        "--enable-eplb with --enable-sleep-mode",
        "an exchange holds weights where they were before they could sleep",
        "leave one of them out",
    ),
)


def exchanges_tokens(asked: RequestedEngine) -> bool:
    """Tell whether experts on several ranks see the tokens of data-parallel ranks."""
    return _parallel(asked).enable_expert_parallel and _parallel(asked).data_parallel_size > 1


def mc2_limits(asked: RequestedEngine) -> Limits | None:
    """Return what MC2 takes on the engine's NPUs; None on the CPU fallback."""
    if asked.kind != NPU_KIND:
        return None
    return limits_of(device_name(asked.kind.device_type), version_of(asked.cann))


def beside_mc2(asked: RequestedEngine) -> list[str]:
    """Return what an engine has with which experts don't exchange tokens by MC2."""
    parallel = _parallel(asked)
    found = {
        "LoRA": asked.config.lora_config is not None,
        "--enable-eplb": parallel.enable_eplb,
        "pipeline stages": parallel.pipeline_parallel_size > 1,
        "--expert-placement-strategy round_robin": (parallel.expert_placement_strategy != "linear"),
        "experts that are not fused": "experts" not in asked.options.fused.names,
    }
    return [name for name, has in found.items() if has]


MC2 = (
    Refusal(
        "mc2-device",
        lambda c: mc2_limits(c) is None,
        ON + "{device}",
        "its operators are torch_npu's, and what they take is known of A2 and A3",
        AUTO,
        lambda c: {"device": "this NPU" if c.kind == NPU_KIND else "the CPU fallback"},
    ),
    Refusal(
        "mc2-layout",
        lambda c: not exchanges_tokens(c),
        ON + "this layout of ranks",
        "it exchanges tokens of data-parallel ranks with experts that belong to one rank each",
        "use --data-parallel-size and --enable-expert-parallel, or leave the option out",
    ),
    Refusal(
        "mc2-ranks",
        lambda c: (
            exchanges_tokens(c)
            and (limits := mc2_limits(c)) is not None
            and _expert_ranks(c) not in limits.ranks
        ),
        ON + "{num_ranks} ranks",
        "on {chip} with CANN {cann}, its operators take {ranks}",
        "change --data-parallel-size or --tensor-parallel-size, or leave the option out",
        _words_of_ranks,
    ),
    Refusal(
        "mc2-functions",
        lambda c: c.functions_missing_for(*OPERATORS),
        ON + "CANN {version}",
        "it has no {functions}",
        "install CANN {release}, or leave the option out",
        lambda c: words_of_functions(c, OPERATORS),
    ),
    Refusal(
        "mc2-beside",
        beside_mc2,
        ON + "{names}",
        "they were not tried together",
        "leave one of them out",
        lambda c: {"names": ", ".join(beside_mc2(c))},
    ),
)

SUBJECTS = (
    Subject("devices", DEVICES, verdict=""),
    Subject("ranks", RANKS),
    Subject("mc2", MC2, when=lambda c: c.options.mc2 == "on"),
    Subject("eplb", EPLB, when=lambda c: _parallel(c).enable_eplb),
    Subject(
        "shared-contexts",
        SHARED_CONTEXTS,
        when=lambda c: (
            _parallel(c).decode_context_parallel_size > 1
            and _parallel(c).prefill_context_parallel_size == 1
        ),
    ),
    Subject(
        "shared-prompts",
        SHARED_PROMPTS,
        when=lambda c: _parallel(c).prefill_context_parallel_size > 1,
    ),
)
