"""How the plugin becomes active: version check, choice of the platform, environment variables.

Every process of an engine runs this, and gets the patches that it needs.
"""

import contextlib
import gc
import logging
import multiprocessing
import os
import sys

from vllm_npu_prep import torchvision_import
from vllm_npu_prep.chosen_platform import PLATFORM_CLASS
from vllm_npu_prep.compat import (
    entrypoints,
    eplb,
    executor,
    kv_connector,
    lora,
    models,
    multimodal,
    processes,
    scheduler,
    v2,
)
from vllm_npu_prep.compat.releases import SUPPORTED_VLLM, TORCH, installed
from vllm_npu_prep.compat.torch import silence_accelerator_calls
from vllm_npu_prep.device import (
    ALLOCATOR_ENV_VAR,
    NPU_KIND,
    PINNED_THRESHOLD,
    choose_device,
    requested_device,
)
from vllm_npu_prep.errors import PrepError
from vllm_npu_prep.server import one_line
from vllm_npu_prep.server.processes import look_after_processes

ANY_VLLM_ENV_VAR = "NPU_PREP_ANY_VLLM"
PINNED_THRESHOLD_MB = 64


def check_versions() -> None:
    """Refuse a vLLM that isn't among `SUPPORTED_VLLM`, or a torch that isn't `TORCH`.

    The extra ``serve`` pins them; what else the package does needs neither.
    ``NPU_PREP_ANY_VLLM=1`` turns the refusal into a warning.
    """
    for package, label, known in (("vllm", "vLLM", SUPPORTED_VLLM), ("torch", "torch", (TORCH,))):
        version = installed(package)
        if version in known:
            continue
        if os.environ.get(ANY_VLLM_ENV_VAR) != "1":
            raise PrepError(
                f"{label} {version} is installed, vllm_npu_prep serves with {', '.join(known)}: "
                "pip install 'vllm_npu_prep[serve]' in an environment of its own"
            )
        logging.getLogger("vllm").warning(
            "%s=1: %s %s was not tested with vllm_npu_prep.", ANY_VLLM_ENV_VAR, label, version
        )


def activate_platform() -> str | None:
    """Decide whether vLLM should use the plugin's platform, and prepare for it.

    The result is None if another platform of vLLM works and nobody asked for this one.
    """
    _freeze_modules()
    try:
        if requested_device() == "auto" and _other_platform_works():
            return None
        processes.report_errors_in_one_line()
        check_versions()
        look_after_processes()
        if choose_device() == NPU_KIND:
            # A forked process can't use a device that its parent has asked about.
            os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
            _let_segments_expand()
        else:
            silence_accelerator_calls()
            _let_threads_sleep()
            _let_memory_have_huge_pages()
        v2.read_choice()
        _switch_off_aot_compile()
        _leave_graphs_unbroken()
        torchvision_import.install()
    except PrepError as error:
        # vLLM would swallow the error, then fail because it has no platform.
        one_line.end_with(error)
    return PLATFORM_CLASS


def prepare_process() -> None:
    """Apply the patches that every process of an engine with this platform needs."""
    from vllm.platforms import current_platform

    _freeze_modules()
    v2.let_it_run_without_triton()
    v2.let_platform_choose(type(current_platform))
    models.refuse_vision_without_torchvision()
    models.take_no_mtp_layers_for_none()
    eplb.let_experts_move()
    scheduler.get_our_schedulers_quietly()
    scheduler.begin_parts_of_sessions_with_what_was_computed()
    lora.identify_loads()
    lora.apply_adapters_under_all_names()
    multimodal.send_items_that_were_left_out()
    multimodal.believe_only_what_was_sent()
    multimodal.tell_masks_of_embeddings_apart()
    kv_connector.refuse_sessions_beside_offloading()
    kv_connector.let_preempted_requests_load_at_once()
    processes.tell_of_waits_for_engines()
    processes.tell_refusals_to_the_main_process()
    processes.let_engines_end_by_themselves()
    executor.keep_answers_with_their_calls()
    if "vllm.entrypoints.launchers.api_server.entry" in sys.modules:  # a server
        entrypoints.let_servers_drain_and_stop_quietly()
        entrypoints.let_servers_drain_and_fail_with_their_engine()
        entrypoints.read_adapters_once_they_are_loaded()
    executor.refuse_ray_where_it_is_missing()
    executor.keep_addresses_on_their_host()
    executor.wake_who_reads_from_another_host()


def _freeze_modules() -> None:
    """Speed up start-up: exempt the million imported objects from garbage collection.

    Imports trigger full collections, loading and profiling request more, and each visits all
    objects: a quarter of an engine's start. We do this only in vLLM's own processes, as a user's
    objects aren't ours to freeze; for an engine in the user's process, `NPUWorker` does it.
    """
    if multiprocessing.parent_process() or "vllm.entrypoints.cli.main" in sys.modules:
        gc.freeze()


def _other_platform_works() -> bool:
    from vllm.platforms import builtin_platform_plugins

    for detect in builtin_platform_plugins.values():
        with contextlib.suppress(Exception):
            if detect() is not None:
                return True
    return False


def _let_segments_expand() -> None:
    """Let torch_npu's allocator extend its segments, which keeps memory from fragmenting.

    The allocator reads the variable when it first allocates, in each process. A user's value stays.
    Sleep mode and pluggable allocators don't work with it; both are refused or absent here. Graph
    pools do: vllm-project/vllm-ascend captures with this default (``platform.py``).

    Pinned host memory is rounded up to a power of two (torch, ``CachingHostAllocator.h``), which
    would be up to twice what sleep mode and offloading ask for; above a threshold it is not.
    """
    settings = f"expandable_segments:True,{PINNED_THRESHOLD}:{PINNED_THRESHOLD_MB}"
    os.environ.setdefault(ALLOCATOR_ENV_VAR, settings)


def _let_threads_sleep() -> None:
    """Let the host's threads sleep while they wait for one another; a user's value stays.

    OpenMP's spin, for milliseconds, on cores that other programs need. It reads the variable when
    torch is imported: in processes that are spawned from here, as a server's engine is.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def _let_memory_have_huge_pages() -> None:
    """Let the C library ask Linux for huge pages; a user's value stays.

    A step of few tokens reads every weight once. With pages of 4 KB, a third of this time goes to
    finding pages. The library (glibc 2.35 or later, ``malloc/hugepages``) reads the variable when a
    process begins: in processes that are spawned from here.
    """
    os.environ.setdefault("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")


def _switch_off_aot_compile() -> None:
    """Switch off compiling ahead of time, which needs Inductor; this platform doesn't have it.

    vLLM would notice when it compiles, and go on to hash its whole config in every step to look for
    what was never saved (``support_torch_compile``): 10 ms a step.
    """
    os.environ["VLLM_USE_AOT_COMPILE"] = "0"


def _leave_graphs_unbroken() -> None:
    """Keep vLLM from choosing graphs that break at attention for some architectures by itself.

    Start-up refuses them where a user asks for them.
    """
    os.environ.setdefault("VLLM_USE_BREAKABLE_CUDAGRAPH", "0")
