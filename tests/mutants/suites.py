"""Which tests run for a change of a module, and in which order."""

from collections import defaultdict
from pathlib import Path

from tests.mutants.planted import MUTANTS

ROOT = Path(__file__).parents[2]

SLOW = ("benchmarks", "examples", "engine", "differential", "server", "npu")
"""Folders of tests that take long, the longest last."""
ON_CARD = "tests/npu/test_suites_on_device.py::test_on_the_device"
LAYERS_ON_CARD = "tests/npu/test_layer_suites_on_device.py::test_on_the_device"
EPISODES = "tests/differential/test_differential.py"
FOLDER_TESTS = {
    "prep": ("tests/prep", "tests/attention", "tests/test_explain_command.py", "tests/runner"),
    "attention": ("tests/attention", "tests/runner"),
    "runner": ("tests/runner", "tests/graph", "tests/engine/test_speculation.py"),
    "scheduling": ("tests/scheduling",),
    "v2": (
        *("tests/v2", "tests/engine/test_v2.py", "tests/engine/test_speculation.py", EPISODES),
        *("tests/engine/test_mtp.py", "tests/engine/test_graphs.py", "tests/engine/test_ranks.py"),
    ),
    "ops": ("tests/ops", "tests/runner/test_lora.py", "tests/engine/test_experts.py"),
}
"""Tests of any module of a folder."""
LAST = {
    **dict.fromkeys(("prep", "attention", "runner", "ops"), ("tests/differential",)),
    "v2": (f"{ON_CARD}[features]",),
}
"""What runs when no other test of a folder has failed."""
BY_NAME: dict[str, tuple[str, ...]] = {
    "prep/batch.py": ("tests/prep/test_against_oracle.py", "tests/prep/test_graph_padding.py"),
    "prep/bookkeeping.py": ("tests/runner/test_books.py", "tests/runner/test_bookkeeping.py"),
    "prep/capture_sizes.py": ("tests/prep/test_graph_padding.py", "tests/graph/test_config.py"),
    "prep/checks.py": (
        *("tests/prep/test_context_shards.py", "tests/inspect/test_cheap_check.py"),
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
    "attention/backend.py": (
        *("tests/attention/test_context_parallel.py", "tests/engine/test_windows.py"),
        *("tests/engine/test_pooling.py", "tests/engine/test_hybrids.py"),
    ),
    "attention/families.py": ("tests/startup",),
    "attention/fused_calls.py": ("tests/attention/test_fused_limits.py",),
    "attention/fused_releases.py": (
        *("tests/attention/test_fused_limits.py", "tests/npu/test_fused_releases.py"),
    ),
    "attention/kernel_blocks.py": ("tests/attention/test_kv_cache.py", "tests/engine/test_mla.py"),
    "attention/latent.py": ("tests/attention/test_latent.py", "tests/attention/test_mla.py"),
    "attention/latent_ranks.py": ("tests/attention/test_context_parallel.py",),
    "attention/latent_releases.py": ("tests/attention/test_fused_limits.py",),
    "attention/metadata.py": ("tests/engine/test_graphs.py",),
    "attention/mla.py": ("tests/attention/test_mla.py", "tests/engine/test_mla.py"),
    "attention/states.py": (
        *("tests/attention/test_state_groups.py", "tests/engine/test_hybrids.py"),
        f"{LAYERS_ON_CARD}[hybrids]",
    ),
    "attention/step_memory.py": ("tests/engine/test_start.py", f"{ON_CARD}[memory]"),
    "attention/kernels/fia.py": ("tests/attention/test_fused_limits.py", f"{ON_CARD}[steps]"),
    "attention/kernels/fused_delta.py": (
        *(f"{LAYERS_ON_CARD}[hybrids]", f"{LAYERS_ON_CARD}[more hybrids]"),
    ),
    "attention/kernels/gated_delta.py": ("tests/attention/test_gated_delta.py",),
    "attention/kernels/latent.py": ("tests/attention/test_latent.py", f"{ON_CARD}[steps]"),
    "attention/kernels/latent_fia.py": (f"{ON_CARD}[steps]", f"{LAYERS_ON_CARD}[latent]"),
    "attention/kernels/latent_reference.py": ("tests/attention/test_latent.py",),
    "attention/kernels/reference.py": (
        *("tests/attention/test_reference_kernels.py", "tests/engine/test_pooling.py"),
    ),
    "runner/drafters.py": ("tests/engine/test_speculation.py", "tests/engine/test_mtp.py"),
    "runner/graphs.py": ("tests/runner/test_graphs.py", "tests/engine/test_graphs.py"),
    "runner/inputs.py": ("tests/runner/test_inputs.py", "tests/engine/test_multimodal.py"),
    "runner/model_runner.py": ("tests/runner", "tests/engine/test_pooling.py"),
    "runner/mtp_layers.py": ("tests/engine/test_mtp.py",),
    "runner/new_weights.py": (
        *("tests/engine/test_weights_and_resets.py", "tests/engine/test_sleep.py"),
    ),
    "runner/sampling.py": ("tests/engine/test_sampling.py", f"{ON_CARD}[features]"),
    "v2/engines.py": ("tests/engine/test_ranks.py",),
    "v2/rope.py": ("tests/v2/test_rope.py", "tests/engine/test_multimodal.py"),
    "v2/stages.py": ("tests/engine/test_stages.py",),
    "ops/__init__.py": ("tests/ops/test_overrides.py", f"{LAYERS_ON_CARD}[fused]"),
    "ops/drafting.py": ("tests/ops/test_drafting.py", "tests/engine/test_speculation.py"),
    "ops/fused.py": ("tests/ops/test_fused.py", f"{LAYERS_ON_CARD}[fused]"),
    "ops/fused_experts.py": (*(f"{LAYERS_ON_CARD}[experts]", f"{LAYERS_ON_CARD}[expert budgets]"),),
    "ops/fused_latent.py": ("tests/ops/test_fused.py", f"{LAYERS_ON_CARD}[latent]"),
    "ops/fused_norms.py": ("tests/ops/test_fused.py", f"{LAYERS_ON_CARD}[fused]"),
    "ops/fused_projection.py": (
        *("tests/ops/test_fused.py", f"{LAYERS_ON_CARD}[latent]", f"{LAYERS_ON_CARD}[experts]"),
    ),
    "ops/fused_rotary.py": (
        *("tests/ops/test_fused.py", f"{LAYERS_ON_CARD}[fused]"),
        f"{LAYERS_ON_CARD}[fused families]",
    ),
    "ops/fused_routing.py": ("tests/ops/test_fused.py", f"{LAYERS_ON_CARD}[experts]"),
    "ops/fused_sampling.py": (f"{LAYERS_ON_CARD}[fused]", f"{ON_CARD}[features]"),
    "ops/fused_vision.py": (f"{LAYERS_ON_CARD}[fused]", f"{ON_CARD}[features]"),
    "ops/gated_shared.py": ("tests/npu/test_experts_on_npus.py", f"{LAYERS_ON_CARD}[experts]"),
    "ops/gumbel.py": ("tests/ops/test_slot_sampling.py", "tests/v2/test_drawn_drafts.py"),
    "ops/thinking.py": ("tests/ops/test_thinking.py", "tests/engine/test_thinking.py"),
}
"""Tests of a module whose own test file has another name, or that other tests meet best."""
PLANTED = defaultdict(list)
"""Tests that planted bugs of a module name."""
for mutant in MUTANTS:
    PLANTED[mutant.path] += mutant.tests


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


def slowness(test: str) -> int:
    folder = test.split("/")[1]
    return SLOW.index(folder) + 1 if folder in SLOW else 0


def suite_for(path: str) -> tuple[str, ...]:
    """Tests of a module, in the order in which they run: its own, then the quick ones."""
    folder = path.partition("/")[0]
    planted = [test for test in PLANTED[path] if test.count("/") > 1]  # no whole folder
    others = sorted((*planted, *FOLDER_TESTS[folder], *LAST.get(folder, ())), key=slowness)
    return tuple(dict.fromkeys((*own_tests(path), *others)))
