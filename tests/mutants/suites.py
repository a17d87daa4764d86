"""Which tests run for a change of a module, and in which order."""

from pathlib import Path

ROOT = Path(__file__).parents[2]

EXPLAIN = "tests/test_explain_command.py"
FULL_CHECK = "tests/engine/test_full_check.py"
ON_NPU = "tests/npu/on_device/test_tokens.py::test_tokens_are_the_best_by_transformers"
ON_FIA, ON_ATB = f"{ON_NPU}[fia]", f"{ON_NPU}[atb]"
ROWS_ON_NPU = "tests/npu/on_device/test_verify_device.py"
HYBRIDS_ON_NPU = "tests/npu/on_device/test_hybrids.py"
FOLDER_TESTS = {
    "prep": ("tests/prep", "tests/attention", EXPLAIN, "tests/runner"),
    "attention": ("tests/attention", "tests/runner"),
    "attention/kernels": ("tests/attention", "tests/graph"),
    "runner": ("tests/runner",),
    "scheduling": ("tests/scheduling",),
}
"""Tests of any module of a folder; those of the module itself, which `BY_NAME` adds, come first."""
LAST = ("tests/differential",)
"""What runs when no other test has failed, for folders that it passes through."""
BY_NAME: dict[str, tuple[str, ...]] = {
    "prep/batch.py": ("tests/prep/test_against_oracle.py", "tests/prep/test_graph_padding.py"),
    "prep/bookkeeping.py": ("tests/runner/test_books.py", "tests/runner/test_bookkeeping.py"),
    "prep/capture_sizes.py": ("tests/prep/test_graph_padding.py", "tests/graph/test_config.py"),
    "prep/checks.py": (
        "tests/prep/test_context_shards.py",
        "tests/inspect/test_cheap_check.py",
        "tests/prep/test_states.py",
    ),
    "prep/compiled.py": ("tests/prep/test_arrays.py",),
    "prep/embeds.py": ("tests/prep/test_embeds.py", "tests/engine/test_prompt_embeds.py"),
    "prep/fused_pass.py": ("tests/prep/test_against_oracle.py", "tests/prep/test_graph_padding.py"),
    "prep/layout.py": ("tests/prep/test_padding_and_layout.py",),
    "prep/mask.py": ("tests/attention/test_mask_cache.py",),
    "prep/oracle.py": ("tests/prep/test_against_oracle.py", "tests/prep/test_worked_examples.py"),
    "prep/padding.py": ("tests/prep/test_padding_and_layout.py", "tests/prep/test_dispatch.py"),
    "prep/tables.py": ("tests/prep/test_against_oracle.py", "tests/prep/test_slots.py"),
    "attention/latent_ranks.py": ("tests/attention/test_context_parallel.py",),
    "attention/backend.py": (
        "tests/attention/test_context_parallel.py",
        "tests/engine/test_windows.py",
        "tests/engine/test_pooling.py",
    ),
    "attention/families.py": ("tests/startup",),
    "attention/fused_calls.py": ("tests/attention/test_fused_limits.py",),
    "attention/fused_releases.py": (
        "tests/attention/test_fused_limits.py",
        "tests/npu/test_fused_releases.py",
    ),
    "attention/kv_transfer.py": ("tests/engine/test_kv_transfer.py",),
    "attention/latent_releases.py": ("tests/attention/test_fused_limits.py",),
    "attention/metadata.py": ("tests/engine/test_graphs.py",),
    "attention/offloading.py": ("tests/engine/test_offloading.py",),
    "attention/state_pages.py": ("tests/attention/test_state_pages.py",),
    "attention/states.py": ("tests/attention/test_state_groups.py", "tests/engine/test_hybrids.py"),
    "attention/kernels/atb.py": (ON_ATB,),
    "attention/kernels/fia.py": ("tests/attention/test_fused_limits.py", ON_FIA),
    "attention/kernels/fused_delta.py": (HYBRIDS_ON_NPU,),
    "attention/kernels/gated_delta.py": ("tests/attention/test_gated_delta.py",),
    "attention/kernels/latent.py": ("tests/attention/test_latent.py", ROWS_ON_NPU),
    "attention/kernels/latent_fia.py": (ROWS_ON_NPU,),
    "attention/kernels/latent_reference.py": ("tests/attention/test_latent.py",),
    "attention/kernels/reference.py": ("tests/attention/test_reference_kernels.py",),
    "runner/drafters.py": ("tests/engine/test_speculation.py", "tests/engine/test_mtp.py"),
    "runner/graphs.py": ("tests/runner/test_graphs.py", "tests/engine/test_graphs.py"),
    "runner/inputs.py": ("tests/runner/test_inputs.py", "tests/engine/test_multimodal.py"),
    "runner/lora.py": ("tests/runner/test_lora.py", "tests/engine/test_lora.py"),
    "runner/new_weights.py": ("tests/engine/test_weights_and_resets.py",),
    "runner/prompt_embeds.py": ("tests/engine/test_prompt_embeds.py",),
    "runner/sampling.py": ("tests/engine/test_sampling.py",),
    "runner/speculation.py": (
        "tests/runner/test_speculation.py",
        "tests/engine/test_speculation.py",
    ),
}
"""Tests of a module whose own test file has another name, or that other tests meet best."""


def own_tests(path: str) -> tuple[str, ...]:
    """Tests of this module before others; none if there are none."""
    folder, _, name = path.rpartition("/")
    own = f"tests/{folder.split('/')[0]}/test_{name}"
    return BY_NAME.get(path, ()) or ((own,) if (ROOT / own).exists() else ())


def in_order(path: str, tests: tuple[str, ...]) -> tuple[str, ...]:
    """The same tests; where they are a folder, those of the module come first."""
    inside = [
        each
        for each in own_tests(path)
        if any(f"{each}/".startswith(f"{folder}/") for folder in tests) and each not in tests
    ]
    return (*inside, *tests)


def suite_for(path: str) -> tuple[str, ...]:
    """Tests of a module, in the order in which they run."""
    folder = path.rpartition("/")[0]
    last = () if folder == "scheduling" else LAST
    return tuple(dict.fromkeys((*own_tests(path), *FOLDER_TESTS[folder], *last)))
