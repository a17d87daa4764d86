"""Which tests run for a random change of a module, and in which order."""

import functools

from tests.mutants.planted import MUTANTS
from tests.resume.touched import graph_of_tree, nearest

SLOW = ("benchmarks", "examples", "engine", "differential", "server", "npu")
"""Folders of tests that take long, the longest last."""
READERS = ("tests/deploy/", "tests/mutants/")
"""Tests that read every file and run none; some need files that a bench does not copy."""

TESTS = {
    "prep/": "prep attention graph/test_config.py test_explain_command.py runner differential",
    "attention/": (
        "attention runner engine/test_hybrids.py engine/test_mla.py engine/test_pooling.py "
        "engine/test_start.py differential npu/on_device/test_memory.py"
    ),
    "attention/kernels/": (
        "npu/on_device/test_counts.py npu/on_device/test_kernels.py npu/on_device/test_latent.py"
    ),
    "runner/": (
        "runner graph engine/test_speculation.py engine/test_mtp.py engine/test_multimodal.py "
        "engine/test_pooling.py engine/test_sampling.py engine/test_sleep.py "
        "differential npu/on_device/test_sampling.py"
    ),
    "scheduling/": "scheduling",
    "runner/v2/": (
        "v2 engine/test_v2.py engine/test_speculation.py engine/test_graphs.py engine/test_mtp.py "
        "engine/test_multimodal.py engine/test_ranks.py engine/test_stages.py "
        "differential/test_differential.py "
        "npu/on_device/test_sampling.py npu/on_device/test_speculation.py"
    ),
    "ops/": (
        "ops runner/test_lora.py engine/test_speculation.py "
        "engine/test_thinking.py differential npu/on_device/test_experts.py"
    ),
    "ops/npu/": (
        "npu/on_device/test_fused.py npu/on_device/test_fused_families.py "
        "npu/on_device/test_latent.py npu/on_device/test_multimodal.py "
        "npu/on_device/test_quantization.py npu/on_device/test_sampling.py"
    ),
}
"""Tests of any module whose path begins so, in the folder of tests."""

graph = functools.cache(graph_of_tree)


def slowness(test: str) -> int:
    folder = test.split("/")[1]
    return SLOW.index(folder) + 1 if folder in SLOW else 0


def suite_for(path: str) -> tuple[str, ...]:
    """Tests of a module, the quick ones first: those that import it, then what bugs in it name."""
    distances = nearest(graph(), [f"vllm_npu_prep/{path}"])
    tests = [t for t, far in distances.items() if far == 1 and not t.startswith(READERS)]
    for mutant in MUTANTS:
        tests += [t for t in mutant.tests if mutant.path == path and t.count("/") > 1]  # no folder
    for begins, names in TESTS.items():
        tests += [f"tests/{name}" for name in names.split() if path.startswith(begins)]
    return tuple(sorted(dict.fromkeys(tests), key=slowness))
