"""Settles graph mode and capture sizes in an engine's config, once, before any process starts."""

from dataclasses import fields
from typing import TYPE_CHECKING

from vllm_npu_prep.attention.fused_calls import limits_batches
from vllm_npu_prep.attention.fused_releases import MAX_LENGTHS, version_of
from vllm_npu_prep.config import decisions_of, graphs_need_masks
from vllm_npu_prep.device import (
    BLOCKING_ENV_VAR,
    DeviceKind,
    cann_version,
    device_name,
    driver_version,
    waits_for_launches,
)
from vllm_npu_prep.driver import QUEUES, TASK_UPDATES, driver_key, is_older
from vllm_npu_prep.errors import PrepError
from vllm_npu_prep.prep.capture_sizes import fitting_sizes, largest_decode, thin_sizes
from vllm_npu_prep.prep.mask import MaskForm
from vllm_npu_prep.wording import counted

if TYPE_CHECKING:
    from vllm.config import CompilationConfig, CUDAGraphMode, VllmConfig

COMPILE_BACKEND = "eager"
"""Traced parts of a model run operator by operator: no compiler makes kernels for NPUs here."""


STREAMS_PER_GROUP = 2
"""How many streams HCCL adds to each captured graph, per communication group of several ranks."""

STREAMS_KEPT_PER_GROUP = 40
"""How many streams HCCL holds beside graphs, per group. Both numbers are those with which
vllm-project/vllm-ascend sizes its graphs (9596, 3869, 9691)."""


A3, A3_GRAPH_STREAMS, A3_RELEASE = "Ascend910_93", 30_000, (8, 5)
"""On these chips, captured graphs have their own queues, with a driver from `QUEUES` on and a CANN
from this release on: about 32K graphs were captured there, and vllm-project/vllm-ascend no longer
thins capture sizes (9572, 9962). Nothing is known of A2. If streams run out anyway, sizes are
dropped during captures."""


def set_defaults(vllm_config: "VllmConfig") -> None:
    """Turn off fusion passes, and turn on layers that are not traced into.

    vLLM has no kernels for its fusion passes here; `settle_mode` reports those that the user asked
    for. Layers that are not traced into cost fewer launches without Inductor, which fuses what it
    traces.
    """
    if not {"all", "none"} & set(vllm_config.compilation_config.custom_ops):
        vllm_config.compilation_config.custom_ops.append("all")
    passes = vllm_config.compilation_config.pass_config
    for name in _fusions(vllm_config.compilation_config):
        if getattr(passes, name) is None:
            setattr(passes, name, False)


def settle_mode(vllm_config: "VllmConfig") -> list[str]:
    """Decide the graph mode, and whether torch.compile is needed for it.

    Unsupported modes have been refused before (`vllm_npu_prep.startup.subjects.graphs`). Return
    what the user asked for and is off, and why.
    """
    from vllm.config import CompilationMode, CUDAGraphMode

    compilation, off = vllm_config.compilation_config, []
    fusions = [name for name in _fusions(compilation) if getattr(compilation.pass_config, name)]
    for name in fusions:
        setattr(compilation.pass_config, name, False)
    if fusions:
        off.append(f"{', '.join(fusions)}: vLLM has no kernels for these on this device")
    if compilation.backend != COMPILE_BACKEND or compilation.use_inductor_graph_partition:
        off.append("Inductor: the parts of a traced model run operator by operator")
        compilation.backend, compilation.use_inductor_graph_partition = COMPILE_BACKEND, False
    if compilation.mode not in (CompilationMode.NONE, CompilationMode.VLLM_COMPILE):
        off.append(f"torch.compile mode {compilation.mode.name}: nothing here compiles")
        compilation.mode = CompilationMode.NONE
    off += _settle_full_graphs(vllm_config)
    if not compilation.cudagraph_mode.has_piecewise_cudagraphs():
        # Only piecewise graphs need a traced model; for others, tracing wastes seconds.
        compilation.mode = CompilationMode.NONE
    # Implementations of IR operators look at memory, which tracing can't.
    compilation.ir_enable_torch_wrap = compilation.mode != CompilationMode.NONE
    if compilation.cudagraph_mode == CUDAGraphMode.NONE:
        compilation.cudagraph_capture_sizes = []
        compilation.max_cudagraph_capture_size = 0
    return off


def _settle_full_graphs(vllm_config: "VllmConfig") -> list[str]:
    """Turn full graphs off where attention can't be in them, and return why."""
    compilation = vllm_config.compilation_config
    mode = compilation.cudagraph_mode
    if not mode.has_full_cudagraphs():
        return []
    instead, why = _instead_of_full_graphs(vllm_config, mode)
    if instead == mode:
        return []
    compilation.cudagraph_mode = instead
    mixed = " of mixed batches" if instead.has_full_cudagraphs() else ""
    return [f"{mode} graphs{mixed}: {why}; {instead} instead"]


def _instead_of_full_graphs(
    vllm_config: "VllmConfig", mode: "CUDAGraphMode"
) -> tuple["CUDAGraphMode", str]:
    """Return the graph mode that an engine can have, and why; the given mode if it can have that.

    Masks of full graphs have to have the same shape in all steps, and the host can run nothing
    between their layers.
    """
    from vllm.config import CUDAGraphMode

    transfer = vllm_config.kv_transfer_config
    whole = ("OffloadingConnector", "MooncakeConnector", "MooncakeStoreConnector")  # requests
    if transfer is not None and transfer.kv_connector not in (None, *whole):
        return CUDAGraphMode.PIECEWISE, (
            f"KV connector {transfer.kv_connector} saves each layer on the host, between piecewise "
            "graphs"
        )
    without_full = {
        CUDAGraphMode.FULL: CUDAGraphMode.PIECEWISE,
        CUDAGraphMode.FULL_AND_PIECEWISE: CUDAGraphMode.PIECEWISE,
        CUDAGraphMode.FULL_DECODE_ONLY: CUDAGraphMode.NONE,
    }[mode]
    device_type = vllm_config.device_config.device_type
    if waits_for_launches(device_type):
        return without_full, (
            f"with {BLOCKING_ENV_VAR} the host would wait for a replay whose attention waits for "
            "lengths from the host"
        )
    driver = driver_version(device_type)
    if is_older(driver, TASK_UPDATES):
        return without_full, (
            f"driver {driver} can't update captured attention, {TASK_UPDATES} and newer can"
        )
    if limits_batches(vllm_config):
        # A step that breaks them runs eagerly, which ranks would have to agree on in every step.
        limits = "fused attention here limits the blocks of a batch"
        for why, applies in {
            "with attention chunks": vllm_config.model_config.attention_chunk_size is not None,
            "with data parallelism": vllm_config.parallel_config.data_parallel_size > 1,
            f"for more than {MAX_LENGTHS} requests": (
                vllm_config.scheduler_config.max_num_seqs > MAX_LENGTHS
            ),
        }.items():
            if applies:
                return without_full, f"{limits}, which full graphs don't keep {why}"
        return CUDAGraphMode.FULL_AND_PIECEWISE if mode == CUDAGraphMode.FULL else mode, limits
    ranks = vllm_config.parallel_config.prefill_context_parallel_size
    if ranks > 1 and mode == CUDAGraphMode.FULL:
        return CUDAGraphMode.FULL_AND_PIECEWISE, "ranks that share prompts share decodes in turn"
    if decisions_of(vllm_config).mask_form != MaskForm.DENSE or not graphs_need_masks(vllm_config):
        return mode, ""
    why = "dense masks of windows and of drafted tokens have another shape in every step"
    return without_full, why


def settle_sizes(vllm_config: "VllmConfig", kind: DeviceKind) -> list[str]:
    """Add the largest decode to the capture sizes, and thin them to the device's budget of streams.

    Return what was changed and why.

    Raises
    ------
    PrepError
        If not even one decode fits the token budget.
    """
    compilation, scheduler = vllm_config.compilation_config, vllm_config.scheduler_config
    mode, query_len = compilation.cudagraph_mode, vllm_config.uniform_decode_query_len
    sizes = list(compilation.cudagraph_capture_sizes or ())
    max_model_len = vllm_config.model_config.max_model_len
    if not mode:
        return []
    notes = []
    if query_len > scheduler.max_num_batched_tokens:
        raise PrepError(
            f"--max-num-batched-tokens {scheduler.max_num_batched_tokens}: one decode needs "
            f"{query_len} tokens, drafts included; raise it or lower num_speculative_tokens"
        )
    largest = largest_decode(scheduler.max_num_seqs, query_len, scheduler.max_num_batched_tokens)
    if largest not in sizes:
        sizes.append(largest)
        notes.append(f"capture sizes: {largest} added, the largest decode (max_num_seqs)")
    if mode == mode.FULL_DECODE_ONLY:
        sizes = [size for size in sizes if size <= largest]  # no step uses the others
    if mode == mode.FULL:
        fitting = fitting_sizes(sizes, scheduler.max_num_seqs, max_model_len)
        if len(fitting) < len(sizes):
            left_out = ", ".join(map(str, sorted({*sizes} - {*fitting})))
            notes.append(
                f"capture sizes: {left_out} left out, because one padding request of max_model_len "
                f"{max_model_len} can't hold their padding"
            )
        sizes = fitting
    graph_streams = _graph_streams(vllm_config, kind)
    if graph_streams is not None:
        groups = _communication_groups(vllm_config)
        streams = _streams_for_each_size(vllm_config, mode) * (1 + STREAMS_PER_GROUP * groups)
        budget = graph_streams - STREAMS_KEPT_PER_GROUP * groups
        kept = thin_sizes(sizes, budget // streams, [largest, query_len, *sizes[:1]])
        if mode == mode.FULL:
            kept = fitting_sizes(kept, scheduler.max_num_seqs, max_model_len)
        if len(kept) < len(sizes):
            notes.append(
                f"capture sizes: {len(sizes)} thinned to {len(kept)} "
                f"({counted(streams, 'stream')} for each, {budget} for all)"
            )
        sizes = kept
    else:
        compilation.cudagraph_num_of_warmups = 0  # nothing is compiled or allocated by a first run
    compilation.cudagraph_capture_sizes = sorted(sizes)
    compilation.max_cudagraph_capture_size = max(sizes)
    if mode.has_full_cudagraphs():
        compilation.adjust_cudagraph_sizes_for_spec_decode(query_len)
    return notes


def _graph_streams(vllm_config: "VllmConfig", kind: DeviceKind) -> int | None:
    """Return the streams that captured graphs may hold together, by chip, driver and CANN."""
    device_type = vllm_config.device_config.device_type
    if kind.graph_streams is None or not device_name(device_type).startswith(A3):
        return kind.graph_streams
    driver, release = driver_version(device_type), version_of(cann_version(device_type))
    has_queues = driver_key(driver) is not None and not is_older(driver, QUEUES)
    has_many = has_queues and release is not None and release >= A3_RELEASE
    return A3_GRAPH_STREAMS if has_many else kind.graph_streams


def _streams_for_each_size(vllm_config: "VllmConfig", mode: "CUDAGraphMode") -> int:
    """Return the streams of each capture size: one per graph of the whole model or of a part of it.

    `settle_sizes` adds those of collectives in the graphs. With LoRA there are two of each graph,
    for steps with and without adapters; with `cudagraph_specialize_lora` off, only V2 has two.
    """
    layers = vllm_config.model_config.get_total_num_hidden_layers()
    piecewise = layers + 1 if mode.has_piecewise_cudagraphs() else 0
    specialized = vllm_config.compilation_config.cudagraph_specialize_lora
    specialized |= vllm_config.use_v2_model_runner
    kinds = 2 if vllm_config.lora_config is not None and specialized else 1
    return kinds * (piecewise + mode.has_full_cudagraphs())


def streams_of_a_capture(vllm_config: "VllmConfig") -> int:
    """Return the most streams that a capture may take: its own, and torch_npu's and HCCL's per
    group."""
    return 1 + (1 + STREAMS_PER_GROUP) * _communication_groups(vllm_config)


def _communication_groups(vllm_config: "VllmConfig") -> int:
    """Return the number of groups of several ranks whose collectives may be captured.

    They are those of tensor, data, prefill context and expert parallelism.
    """
    parallel = vllm_config.parallel_config
    tensor, data = parallel.tensor_parallel_size > 1, parallel.data_parallel_size > 1
    context = parallel.prefill_context_parallel_size > 1
    return tensor + data + context + (parallel.enable_expert_parallel and (tensor or data))


def _fusions(compilation: "CompilationConfig") -> list[str]:
    names = [item.name for item in fields(compilation.pass_config)]
    return [name for name in names if name.startswith(("fuse_", "enable_"))]


def describe(vllm_config: "VllmConfig") -> str:
    """Return graph mode and capture sizes for the start-up block."""
    compilation = vllm_config.compilation_config
    mode, sizes = compilation.cudagraph_mode, compilation.cudagraph_capture_sizes
    if not mode:
        return "NONE"
    if len(sizes) == 1:
        return f"{mode}, one size of {counted(sizes[0], 'token')}"
    return f"{mode}, {len(sizes)} sizes from {sizes[0]} to {sizes[-1]} tokens"


def splits_at_attention() -> bool:
    """Return whether the model is traced and split at attention, or a KV connector waits there.

    vLLM's latent layers tell a KV connector that they have ended only in the operator.
    """
    from vllm.config import CompilationMode, get_current_vllm_config

    config = get_current_vllm_config()
    is_compiled = config.compilation_config.mode != CompilationMode.NONE
    return is_compiled or config.kv_transfer_config is not None
