"""The platform class: it answers in one place what vLLM asks about a device.

`NPUPlatform.check_and_update_config` is where start-up refuses what the plugin can't run, settles
options that vLLM left open, and logs one block about the engine.
"""

import argparse
import multiprocessing
import os
import secrets
from typing import TYPE_CHECKING, Any

import psutil
import torch
from vllm.logger import init_logger
from vllm.platforms.interface import Platform, PlatformEnum

from vllm_npu_prep.attention.families import KERNEL_FAMILIES, REFERENCE
from vllm_npu_prep.attention.fused_calls import rules_of
from vllm_npu_prep.compat.kernels import register_ir_operators
from vllm_npu_prep.compat.models import split_models_at
from vllm_npu_prep.compat.releases import note_on_torch
from vllm_npu_prep.compat.v2 import RUNNER_ENV_VAR
from vllm_npu_prep.config import (
    FUSED_OPERATORS,
    Decisions,
    decisions_of,
    fused_operators,
    parse_config,
    parse_flag,
)
from vllm_npu_prep.device import (
    CPU_KIND,
    NPU_KIND,
    cann_version,
    choose_device,
    device_name,
    graph_pool,
    set_device,
    total_memory,
)
from vllm_npu_prep.graph import modes
from vllm_npu_prep.quantization.formats import describe, find_description
from vllm_npu_prep.scheduling.choice import choose_scheduler
from vllm_npu_prep.server import one_line
from vllm_npu_prep.startup import ray_cluster
from vllm_npu_prep.startup.asked import RequestedEngine, multimodal_inputs
from vllm_npu_prep.startup.refusals import refuse_unsupported
from vllm_npu_prep.startup.subjects.cache import (
    CONNECTOR_MODULE,
    CONNECTOR_MODULES,
    LOOKUP_PORT,
    MOONCAKE,
    MOONCAKE_PROTOCOLS,
    MOONCAKE_STORE,
    OFFLOADING,
    PLANE_SPEC,
    PROTOCOL,
    UPSTREAM_SPEC,
    connector_module,
)
from vllm_npu_prep.startup.subjects.v2 import reason_for_v1
from vllm_npu_prep.startup.subjects.vllm_ascend import unread_variables
from vllm_npu_prep.verify.calls.start_up import check_table
from vllm_npu_prep.wording import counted

if TYPE_CHECKING:
    from vllm.config import ParallelConfig, VllmConfig
    from vllm.config.kernel import IrOpPriorityConfig

    from vllm_npu_prep.attention.state_pages import RecurrentStatePage

logger = init_logger(f"vllm.{__name__}")  # vLLM configures loggers below its own only

KIND = choose_device()

SHUTDOWN_SECONDS = 10
"""The seconds that running requests get to finish when the server is told to stop, unless the user
gives a time.
"""


class NPUPlatform(Platform):
    """Ascend NPUs, and the CPU fallback that runs the same code without one."""

    _enum = PlatformEnum.OOT
    device_type = KIND.device_type
    device_name = KIND.device_type  # vLLM makes torch device strings from it
    dispatch_key = KIND.dispatch_key
    dist_backend = KIND.dist_backend
    ray_device_key = "NPU"
    # Workers see all NPUs of their host and take the one that Ray assigned them, as under mp.
    ray_noset_device_env_vars = ["RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES"]  # noqa: RUF012
    device_control_env_var = KIND.visible_env_var
    simple_compile_backend = modes.COMPILE_BACKEND

    @property
    def supported_dtypes(self) -> list[torch.dtype]:
        """The dtypes of the device; ``--dtype auto`` falls back to the first."""
        return list(KIND.dtypes)

    @classmethod
    def import_kernels(cls) -> None:
        """Do nothing: upstream would warn about a missing ``vllm._C``."""

    @classmethod
    def import_ir_kernels(cls) -> None:
        super().import_ir_kernels()
        if KIND == NPU_KIND:
            from vllm_npu_prep.ops.npu.norms import IMPLEMENTATIONS, PROVIDER
        else:
            from vllm_npu_prep.ops.cpu.norms import IMPLEMENTATIONS, PROVIDER
        register_ir_operators(PROVIDER, IMPLEMENTATIONS)

    @classmethod
    def get_default_ir_op_priority(cls, vllm_config: "VllmConfig") -> "IrOpPriorityConfig":
        """Put our implementations of IR operators before vLLM's, where options leave them on."""
        priorities = super().get_default_ir_op_priority(vllm_config)
        if KIND == NPU_KIND:
            from vllm_npu_prep.ops.npu.norms import IR_OPERATORS, PROVIDER

            names = parse_config(vllm_config.additional_config).fused.names
            for name in names & IR_OPERATORS.keys():
                getattr(priorities, IR_OPERATORS[name]).insert(0, PROVIDER)
        else:
            from vllm_npu_prep.ops.cpu import norms

            for operator in norms.IMPLEMENTATIONS:
                getattr(priorities, operator).insert(0, norms.PROVIDER)
        return priorities

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return device_name(KIND.device_type, device_id)

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        """Return the memory in bytes.

        Asking in the parent process does no harm, because workers are spawned.
        """
        return total_memory(KIND.device_type, device_id)

    @classmethod
    def get_device_capability(cls, device_id: int = 0) -> None:
        return None

    @classmethod
    def set_device(cls, device: torch.device | int) -> None:
        """Make a device, or the one with this number, the calling thread's.

        vLLM calls this in threads that it starts, such as the one that reads outputs. Calls of
        CANN in a thread without a device fail, or reach device 0.
        """
        set_device(torch.device(cls.device_type, device) if isinstance(device, int) else device)

    @classmethod
    def manual_seed_all(cls, seed: int) -> None:
        """Do nothing: vLLM also calls `torch.manual_seed`, which seeds every device."""

    def is_sleep_mode_available(self) -> bool:
        """Return True: `vllm_npu_prep.sleep` provides it."""
        return True

    @classmethod
    def inference_mode(cls) -> Any:
        return torch.inference_mode()

    @classmethod
    def is_pin_memory_available(cls) -> bool:
        return KIND.pin_memory

    @classmethod
    def check_if_supports_dtype(cls, dtype: torch.dtype) -> None:
        """Do nothing: dtypes are checked against the kernel family at start-up."""

    @classmethod
    def get_current_memory_usage(cls, device: Any = None) -> float:
        """Return the resident memory of this process in bytes, not the device's."""
        return psutil.Process().memory_info().rss

    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        """Return the backend for K and V, or the one for latent rows.

        Which kernels a backend calls is decided by the chosen kernel family.
        """
        from vllm_npu_prep.attention.layers import refuse_what_is_asked

        refuse_what_is_asked(attn_selector_config)
        if attn_selector_config.use_sparse:
            return "vllm_npu_prep.attention.sparse.AscendSparseMLABackend"
        if attn_selector_config.use_mla:
            return "vllm_npu_prep.attention.mla.AscendMLABackend"
        return "vllm_npu_prep.attention.backend.AscendAttentionBackend"

    @classmethod
    def get_mla_prefill_backend_cls(cls, mla_selector_config: Any) -> Any:
        """Return a class that every MLA layer creates, and that `AscendMLABackend` never calls."""
        from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum

        return MLAPrefillBackendEnum.CPU.get_class()

    @classmethod
    def support_static_graph_mode(cls) -> bool:
        """Return True: graphs are captured on NPUs, and checked on the CPU fallback."""
        return True

    @classmethod
    def get_static_graph_wrapper_cls(cls) -> str:
        return "vllm_npu_prep.graph.wrapper.GraphWrapper"

    @classmethod
    def graph_pool_handle(cls) -> Any:
        return graph_pool(KIND.device_type)

    @classmethod
    def opaque_attention_op(cls) -> bool:
        """Tell whether attention is one operator, at which torch.compile splits the model."""
        return modes.splits_at_attention()

    @classmethod
    def apply_config_platform_defaults(cls, vllm_config: "VllmConfig") -> None:
        model = vllm_config.model_config
        if model is not None and hasattr(model.hf_text_config, "index_topk"):
            split_models_at("vllm::npu_prep_choose_positions")
        modes.set_defaults(vllm_config)

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        return "vllm_npu_prep.device.communicator.NPUCommunicator"

    @classmethod
    def get_punica_wrapper(cls) -> str:
        return "vllm_npu_prep.ops.triton.lora.PunicaWrapperNPU"

    @classmethod
    def support_hybrid_kv_cache(cls) -> bool:
        """Return True: block tables, slots and metadata are made for each KV-cache group."""
        return True

    @classmethod
    def _align_hybrid_block_size(cls, vllm_config: "VllmConfig", backend_cls: Any) -> None:
        """Choose blocks so large that K and V and recurrent states can share them.

        The K of a block holds the larger part of a recurrent state.
        """
        page, cache = _state_page(vllm_config), vllm_config.cache_config
        if page is None:
            return
        cache.block_size, cache.mamba_page_size_padded = page.block_size, page.page_bytes
        if cache.mamba_cache_mode == "align":
            cache.mamba_block_size = page.block_size

    @classmethod
    def check_runner_kv_caches_multi_layer(cls) -> None:
        """Allow it by raising nothing: layers find their cache by name, not by index."""

    @classmethod
    def pre_register_and_update(cls, parser: argparse.ArgumentParser | None = None) -> None:
        """Check the plugin's options with a command's other flags, before it logs anything.

        vLLM would accept invalid JSON as a string, and fail much later.
        """
        for action in parser._actions if parser is not None else ():
            if action.dest == "additional_config":
                action.type = parse_flag

    @classmethod
    def validate_request(cls, processed_inputs: Any, params: Any) -> None:
        if processed_inputs["type"] == "embeds":
            from vllm_npu_prep.runner.prompt_embeds import refuse_non_finite

            refuse_non_finite(processed_inputs["prompt_embeds"])

    @classmethod
    def reason_for_v1(cls, vllm_config: "VllmConfig") -> str:
        """Return why an engine has Model Runner V1 if the environment leaves the choice; empty if
        it has V2.

        The config need not be complete: vLLM asks while it resolves one.
        """
        if vllm_config.model_config is None:
            return ""
        # The kernel family is not known yet, and no reason depends on it
        return reason_for_v1(RequestedEngine(vllm_config, REFERENCE, KIND))

    @classmethod
    def check_and_update_config(cls, vllm_config: "VllmConfig") -> None:
        """Check all that can be checked before a process starts, and turn off what isn't needed.

        vLLM calls this again in its engine process; only the first process logs and makes folders.

        Raises
        ------
        PrepError
            For unsupported features: the message says what was given, what is allowed and what to
            do.
        """
        if vllm_config.model_config is None:  # tests of vLLM's own
            return
        family = KERNEL_FAMILIES[decisions_of(vllm_config).attention]
        states_note = _settle_states(vllm_config)
        notes = _settle_connector(vllm_config) + _settle_indexers(vllm_config)
        find_description(vllm_config)
        refuse_unsupported(vllm_config, family, KIND)
        switched_off = modes.settle_mode(vllm_config) + _switch_off(vllm_config)
        decisions = decisions_of(vllm_config)  # with the graph mode that was settled
        notes += modes.settle_sizes(vllm_config, KIND) + _known_faults(vllm_config)
        notes += _rules_of_attention(vllm_config, decisions) + states_note
        if vllm_config.shutdown_timeout == 0:
            # With 0, vLLM kills the engine process at once and then reports a dead engine.
            vllm_config.shutdown_timeout = SHUTDOWN_SECONDS
        notes += _agree_on_the_host(vllm_config.parallel_config)
        notes += unread_variables(os.environ)
        if vllm_config.parallel_config.worker_cls == "auto":
            vllm_config.parallel_config.worker_cls = "vllm_npu_prep.worker.NPUWorker"
        wanted = parse_config(vllm_config.additional_config).scheduler
        scheduling = choose_scheduler(vllm_config, wanted)
        if multiprocessing.parent_process() is None:  # vLLM checks again in its engine process
            from vllm_npu_prep.observe.metrics import share_folder

            record = parse_config(vllm_config.additional_config).record
            if record is not None and not vllm_config.parallel_config.use_ray:
                record.make_folder()  # with Ray, ranks make it on their hosts
            share_folder()
            one_line.share_file()
            if vllm_config.parallel_config.use_ray:
                ray_cluster.prepare_for_workers(vllm_config.parallel_config, KIND)
            _log_start_up(vllm_config, decisions, scheduling, notes, switched_off)


def _settle_indexers(vllm_config: "VllmConfig") -> list[str]:
    """Name the layers that share an indexer as vLLM reads it, and let every draft pass choose.

    transformers lists them in ``indexer_types``; vLLM knows ``index_topk_pattern`` and its
    frequency only. The result is a line for the log if the model's draft passes share a choice.
    """
    text: Any = vllm_config.model_config.hf_text_config
    named = getattr(text, "index_topk_pattern", None) or getattr(text, "index_topk_freq", None)
    if (types := getattr(text, "indexer_types", None)) and not named:
        text.index_topk_pattern = "".join("S" if each == "shared" else "F" for each in types)
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.method != "mtp":
        return []
    if speculative.index_share_for_mtp_iteration:  # start-up refuses the flag
        return []
    drafter: Any = speculative.draft_model_config and speculative.draft_model_config.hf_config
    if not getattr(drafter, "index_share_for_mtp_iteration", False):
        return []
    drafter.index_share_for_mtp_iteration = False
    return ["each draft pass chooses its positions, where the model would share one choice"]


def _settle_states(vllm_config: "VllmConfig") -> list[str]:
    """Keep recurrent states in bfloat16 on NPUs, whose operators take nothing else.

    The result is a line for the log if the user asked for another dtype.
    """
    cache, model = vllm_config.cache_config, vllm_config.model_config
    if not model.is_hybrid or KIND != NPU_KIND or cache.mamba_ssm_cache_dtype == "bfloat16":
        return []
    asked, cache.mamba_ssm_cache_dtype = cache.mamba_ssm_cache_dtype, "bfloat16"
    if asked == "auto":
        return []
    return [
        "recurrent states are kept in bfloat16, which the NPU's operators take, in place of "
        f"{asked}"
    ]


def _settle_connector(vllm_config: "VllmConfig") -> list[str]:
    """Choose the module that moves K and V off the device; return lines for the log.

    vLLM turns ``--kv-offloading-size`` into a connector after the platform's check. It is asked to
    do so here already, unless another connector was given, which it would replace.
    """
    transfer, size = vllm_config.kv_transfer_config, vllm_config.cache_config.kv_offloading_size
    if size is not None and (transfer is None or transfer.kv_connector in (None, OFFLOADING)):
        vllm_config._post_init_kv_transfer_config()
        transfer = vllm_config.kv_transfer_config
    if transfer is None or transfer.kv_connector is None:
        return []
    if not transfer.kv_connector_module_path:
        transfer.kv_connector_module_path = CONNECTOR_MODULES.get(transfer.kv_connector)
    module = connector_module(transfer)
    if module not in CONNECTOR_MODULES.values():
        form = "K and V of a layer as two planes: [2, blocks, tokens of a block, heads, head size]"
        if vllm_config.model_config.use_mla:
            form = "latent rows and rotated keys as a pair: [blocks, tokens of a block, 1, width]"
        return [f"KV connector {transfer.kv_connector} of {module} is given {form}"]
    extra = transfer.kv_connector_extra_config
    if transfer.kv_connector == MOONCAKE:
        protocol = extra.setdefault(PROTOCOL, MOONCAKE_PROTOCOLS[KIND.device_type][0])
        return [f"K and V move between engines by Mooncake, over {protocol}"]
    if transfer.kv_connector == MOONCAKE_STORE:
        # vLLM's own default is one for all engines of a host, which would answer for each other
        extra.setdefault(LOOKUP_PORT, secrets.token_hex(4))
        return ["blocks of prompts are shared in Mooncake's store, as MOONCAKE_CONFIG_PATH says"]
    if transfer.kv_connector != OFFLOADING:
        return []
    if extra.get("spec_name", UPSTREAM_SPEC) == UPSTREAM_SPEC:
        extra.update(spec_name=PLANE_SPEC, spec_module_path=CONNECTOR_MODULE)
    nbytes, ranks = int(extra.get("cpu_bytes_to_use", 0)), vllm_config.parallel_config.world_size
    return [
        f"blocks of K and V that leave the device stay in {nbytes:,} bytes of host memory"
        + (f", divided among {counted(ranks, 'rank')}" if ranks > 1 else "")
    ]


def _rules_of_attention(vllm_config: "VllmConfig", decisions: Decisions) -> list[str]:
    if decisions.attention != "fia":
        return []
    rules, version = rules_of(vllm_config), cann_version(KIND.device_type)
    by = f"CANN {version}" if version else f"CANN {rules.release.name}, the newest that is known"
    unknown = "" if version else "; CANN does not tell its version"
    documented = ", and by all that the documentation demands" * rules.documented
    return [f"fused attention: checked by the rules of {by}{documented}{unknown}"]


def _describe_runner(vllm_config: "VllmConfig") -> str:
    if vllm_config.use_v2_model_runner:
        return (
            "Model Runner V2; a request with a seed gets other random tokens than on V1, which "
            f"{RUNNER_ENV_VAR}=0 chooses"
        )
    if os.environ.get(RUNNER_ENV_VAR) is not None:
        return f"Model Runner V1, which {RUNNER_ENV_VAR} chooses"
    return f"Model Runner V1: {NPUPlatform.reason_for_v1(vllm_config)}"


def _known_faults(vllm_config: "VllmConfig") -> list[str]:
    """Return one line for each bug of upstream that these settings meet and we can't fix."""
    caches = vllm_config.cache_config.enable_prefix_caching
    if caches and vllm_config.scheduler_config.policy == "priority":
        return [
            "priority scheduling may leave blocks in the prefix cache that nobody wrote, and "
            "answers go wrong (vLLM issue 57580); --no-enable-prefix-caching avoids it"
        ]
    return []


def _agree_on_the_host(parallel_config: "ParallelConfig") -> list[str]:
    """Let data-parallel ranks agree on sizes on the host; return a line if the device was chosen.

    On the device, each step would take a copy there and a read-back. vLLM's default with
    asynchronous scheduling is the host, too.
    """
    if parallel_config.disable_nccl_for_dp_synchronization:
        return []
    parallel_config.disable_nccl_for_dp_synchronization = True
    if parallel_config.data_parallel_size == 1:
        return []
    return [
        "data-parallel ranks agree on the size of each step on the host; "
        "--no-disable-nccl-for-dp-synchronization has no effect"
    ]


def _switch_off(vllm_config: "VllmConfig") -> list[str]:
    """Turn off what is unsupported but not needed; return what and why, one line each."""
    from vllm.config import CacheConfig

    off = []
    share = vllm_config.cache_config.gpu_memory_utilization
    if KIND == CPU_KIND and share != CacheConfig.gpu_memory_utilization:
        off.append("--gpu-memory-utilization: on the CPU fallback use --kv-cache-memory-bytes")
    lora = vllm_config.lora_config
    if lora is not None and lora.specialize_active_lora:
        lora.specialize_active_lora = False
        off.append("--specialize-active-lora: one graph serves any number of adapters")
    if vllm_config.profiler_config.capture_torch_profiler:
        vllm_config.profiler_config.capture_torch_profiler = False
        off.append("capture_torch_profiler: captures of graphs are not profiled")
    compilation = vllm_config.compilation_config
    if compilation.cudagraph_mm_encoder:
        compilation.cudagraph_mm_encoder = False
        off.append("cudagraph_mm_encoder: encoders run eagerly")
    return off


def _describe_probe(wanted: bool) -> str:
    if KIND == CPU_KIND:
        return "none: kernels of the CPU fallback are torch's or numba's"
    return "attention and cache writes against formulas" if wanted else "off"


def _log_start_up(
    vllm_config: "VllmConfig",
    decisions: Decisions,
    scheduling: str,
    notes: list[str],
    switched_off: list[str],
) -> None:
    model, cache = vllm_config.model_config, vllm_config.cache_config
    scheduler, config = vllm_config.scheduler_config, parse_config(vllm_config.additional_config)
    block_size = cache.block_size if cache.user_specified_block_size else "default (128)"
    lines = [
        f"device        {KIND.label} ({NPUPlatform.get_device_name()})",
        f"runner        {_describe_runner(vllm_config)}",
        f"attention     {decisions.attention} kernels, {model.dtype}, block size {block_size}",
        f"mask          {decisions.mask_form.value} (dense: up to {decisions.dense_bytes:,} of "
        f"{decisions.mask_budget_bytes:,} bytes)",
        f"graph mode    {modes.describe(vllm_config)}",
        f"sizes         {counted(scheduler.max_num_seqs, 'request')}, "
        f"{scheduler.max_num_batched_tokens} tokens a step, max_model_len {model.max_model_len}",
        f"scheduling    {scheduling}",
        f"check         {config.check}",
        f"probe         {_describe_probe(config.probe)}",
        *([f"verified      {check_table(vllm_config)}"] if config.verified else []),
    ]
    if model.quantization is not None:
        lines.append(f"quantised     {describe(vllm_config, KIND == NPU_KIND)}")
    if KIND == NPU_KIND:
        lines.append(f"fused         {_used_operators(vllm_config)}")
    parallel = vllm_config.parallel_config
    if parallel.use_ray or parallel.world_size_across_dp > 1:
        sizes = (
            (parallel.tensor_parallel_size, "tensor parallel"),
            (parallel.pipeline_parallel_size, "pipeline stages"),
            (parallel.data_parallel_size, "data parallel"),
        )
        ranks = " x ".join(f"{size} {name}" for size, name in sizes if size > 1) or "1"
        by = "ray" if parallel.use_ray else parallel.distributed_executor_backend
        lines.append(f"ranks         {ranks}, started by {by}, over {KIND.dist_backend}")
    page = _state_page(vllm_config)
    if page is not None:
        lines.append(f"states        {page.describe()}")
    if config.record is not None:
        lines.append(f"record        {config.record.steps}, in {config.record.dir}")
    if model.supports_multimodal_inputs:
        rope = ", M-RoPE" if model.uses_mrope else ""
        how = "steps that read them run eagerly"
        if vllm_config.use_v2_model_runner:
            how = "all steps read embeddings"
        lines.append(
            f"multimodal    {', '.join(multimodal_inputs(model))}{rope}; {how}; the encoder's last "
            f"{scheduler.encoder_cache_size} tokens are cached"
        )
    lora = vllm_config.lora_config
    if lora is not None:
        lines.append(
            f"LoRA          {counted(lora.max_loras, 'adapter')} in a step, "
            f"rank {lora.max_lora_rank}, {lora.max_cpu_loras} in memory"
        )
    said = (note_on_torch(), decisions.note, *notes)
    lines += [f"note          {line}" for line in said if line]
    lines += [f"off           {line}" for line in switched_off]
    logger.info_once("vllm_npu_prep:\n  %s", "\n  ".join(lines))


def _state_page(vllm_config: "VllmConfig") -> "RecurrentStatePage | None":
    """Return how blocks are sized for a model with recurrent states, else None.

    The code for them is imported only if the model has some.
    """
    if not vllm_config.model_config.is_hybrid:
        return None
    from vllm_npu_prep.attention.state_pages import find_state_page

    return find_state_page(vllm_config)


def _used_operators(vllm_config: "VllmConfig") -> str:
    """Name the fused operators that are on and that torch_npu has, in the order of the options."""
    from vllm_npu_prep.ops.npu.switches import missing_operators

    names = fused_operators(vllm_config)
    missing = missing_operators(names)
    return ", ".join(name for name in FUSED_OPERATORS if name in names - missing.keys()) or "none"
