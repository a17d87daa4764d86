"""Which tests run for a change of a module, and in which order."""

from collections import defaultdict
from pathlib import Path

from tests.mutants.planted import MUTANTS

ROOT = Path(__file__).parents[2]

SLOW = ("benchmarks", "examples", "engine", "differential", "server", "npu")
"""Folders of tests that take long, the longest last."""
FOLDER_TESTS = {
    "prep": "prep attention test_explain_command.py runner",
    "attention": "attention runner",
    "runner": "runner graph engine/test_speculation.py",
    "scheduling": "scheduling",
    "runner/v2": (
        "v2 engine/test_v2.py engine/test_speculation.py differential/test_differential.py "
        "engine/test_mtp.py engine/test_graphs.py engine/test_ranks.py"
    ),
    "ops": "ops runner/test_lora.py engine/test_experts.py",
}
"""Tests of any module of a folder, in the folder of tests."""
LAST = {
    "prep": "differential",
    "attention": "differential",
    "runner": "differential",
    "ops": "differential",
    "runner/v2": "npu/on_device/test_sampling.py npu/on_device/test_speculation.py",
}
"""What runs when no other test of a folder has failed."""
BY_NAME = {
    "prep/batch.py": "prep/test_against_oracle.py prep/test_graph_padding.py",
    "prep/bookkeeping.py": (
        "runner/test_request_updates.py runner/test_books.py runner/test_bookkeeping.py"
    ),
    "prep/capture_sizes.py": "prep/test_graph_padding.py graph/test_config.py",
    "prep/checks.py": "prep/test_context_shards.py inspect/test_cheap_check.py prep/test_states.py",
    "prep/compiled.py": "prep/test_arrays.py",
    "prep/embeds.py": "prep/test_embeds.py engine/test_prompt_embeds.py",
    "prep/fused_pass.py": "prep/test_against_oracle.py prep/test_graph_padding.py",
    "prep/layout.py": "prep/test_padding_and_layout.py",
    "prep/mask.py": "attention/test_mask_cache.py",
    "prep/oracle.py": "prep/test_against_oracle.py prep/test_worked_examples.py",
    "prep/padding.py": "prep/test_padding_and_layout.py prep/test_dispatch.py",
    "prep/tables.py": "prep/test_against_oracle.py prep/test_slots.py",
    "attention/backend.py": (
        "attention/test_context_parallel.py engine/test_windows.py engine/test_pooling.py "
        "engine/test_hybrids.py"
    ),
    "attention/families.py": "startup",
    "attention/fused_calls.py": "attention/test_fused_limits.py",
    "attention/fused_releases.py": "attention/test_fused_limits.py npu/test_fused_releases.py",
    "attention/kernel_blocks.py": "attention/test_kv_cache.py engine/test_mla.py",
    "attention/latent.py": "attention/test_latent.py attention/test_mla.py",
    "attention/latent_ranks.py": "attention/test_context_parallel.py",
    "attention/latent_releases.py": "attention/test_fused_limits.py",
    "attention/metadata.py": "engine/test_graphs.py",
    "attention/mla.py": "attention/test_mla.py engine/test_mla.py",
    "attention/states.py": (
        "prep/test_states.py engine/test_hybrids.py npu/on_device/test_hybrids.py"
    ),
    "attention/step_memory.py": "engine/test_start.py npu/on_device/test_memory.py",
    "attention/kernels/fia.py": "attention/test_fused_limits.py npu/on_device/test_kernels.py",
    "attention/kernels/fused_delta.py": ("npu/on_device/test_hybrids.py"),
    "attention/kernels/gated_delta.py": "attention/test_gated_delta.py",
    "attention/kernels/latent.py": "attention/test_latent.py npu/on_device/test_latent.py",
    "attention/kernels/latent_fia.py": "npu/on_device/test_latent.py npu/on_device/test_counts.py",
    "attention/kernels/latent_reference.py": "attention/test_latent.py",
    "attention/kernels/reference.py": "attention/test_reference_kernels.py engine/test_pooling.py",
    "runner/v1/drafters.py": "engine/test_speculation.py engine/test_mtp.py",
    "runner/graphs.py": "runner/test_graphs.py engine/test_graphs.py",
    "runner/v1/inputs.py": "runner/test_inputs.py engine/test_multimodal.py",
    "runner/v1/runner.py": "runner engine/test_pooling.py",
    "runner/mtp_layers.py": "engine/test_mtp.py",
    "runner/new_weights.py": "engine/test_weights_and_resets.py engine/test_sleep.py",
    "runner/v1/sampling.py": "engine/test_sampling.py npu/on_device/test_sampling.py",
    "runner/v2/engines.py": "engine/test_ranks.py",
    "runner/v2/rope.py": "v2/test_rope.py engine/test_multimodal.py",
    "runner/v2/stages.py": "engine/test_stages.py",
    "ops/__init__.py": "ops/test_overrides.py npu/on_device/test_fused.py",
    "ops/drafting.py": "ops/test_drafting.py engine/test_speculation.py",
    "ops/fused.py": "ops/test_fused.py npu/on_device/test_fused.py",
    "ops/fused_experts.py": "npu/on_device/test_experts.py npu/on_device/test_expert_budgets.py",
    "ops/fused_latent.py": "ops/test_fused.py npu/on_device/test_latent.py",
    "ops/fused_norms.py": "ops/test_fused.py npu/on_device/test_fused.py",
    "ops/fused_projection.py": (
        "ops/test_fused.py npu/on_device/test_latent.py npu/on_device/test_experts.py"
    ),
    "ops/fused_rotary.py": (
        "ops/test_fused.py npu/on_device/test_fused.py npu/on_device/test_fused_families.py"
    ),
    "ops/fused_routing.py": "ops/test_fused.py npu/on_device/test_experts.py",
    "ops/fused_sampling.py": "npu/on_device/test_fused.py npu/on_device/test_sampling.py",
    "ops/fused_vision.py": "npu/on_device/test_fused.py npu/on_device/test_multimodal.py",
    "ops/gated_shared.py": "npu/on_device/test_experts.py",
    "ops/gumbel.py": "ops/test_slot_sampling.py v2/test_drawn_drafts.py",
    "ops/thinking.py": "ops/test_thinking.py engine/test_thinking.py",
}
"""Tests of a module whose own test file has another name, or that other tests meet best."""
PLANTED = defaultdict(list)
"""Tests that planted bugs of a module name."""
for mutant in MUTANTS:
    PLANTED[mutant.path] += mutant.tests


def paths_of(names: str) -> tuple[str, ...]:
    return tuple(f"tests/{name}" for name in names.split())


def folder_of(path: str) -> str:
    """The folder of a module, for which `FOLDER_TESTS` has tests."""
    return "runner/v2" if path.startswith("runner/v2/") else path.partition("/")[0]


def own_tests(path: str) -> tuple[str, ...]:
    """Tests of this module before others; none if there are none."""
    folder, name = folder_of(path).rpartition("/")[2], path.rpartition("/")[2]
    own = f"tests/{folder}/test_{name}"
    return paths_of(BY_NAME.get(path, "")) or ((own,) if (ROOT / own).exists() else ())


def in_order(path: str, given: tuple[str, ...]) -> tuple[str, ...]:
    """The same tests; where they are a folder, those of the module come first."""
    inside = [
        each
        for each in own_tests(path)
        if any(f"{each}/".startswith(f"{folder}/") for folder in given) and each not in given
    ]
    return (*inside, *given)


def slowness(test: str) -> int:
    folder = test.split("/")[1]
    return SLOW.index(folder) + 1 if folder in SLOW else 0


def suite_for(path: str) -> tuple[str, ...]:
    """Tests of a module, in the order in which they run: its own, then the quick ones."""
    folder = folder_of(path)
    planted = [test for test in PLANTED[path] if test.count("/") > 1]  # no whole folder
    others = (*planted, *paths_of(FOLDER_TESTS[folder]), *paths_of(LAST.get(folder, "")))
    return tuple(dict.fromkeys((*own_tests(path), *sorted(others, key=slowness))))
