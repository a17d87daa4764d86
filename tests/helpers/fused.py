"""One model with fused operators and without, on a device."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import ascend_emulator
from ascend_emulator.operators import REFERENCES
from tests.helpers.engine import engine, graphs
from tests.helpers.huggingface import logits_of
from tests.helpers.prompts import prompts_of
from tests.helpers.step_logits import Steps, difference, greedy_steps

BOUND = {"float16": 0.012, "bfloat16": 0.096}
"""Logits of the fused and the unfused path, in standard deviations of a step's logits.

The two round at different places, so a bound follows the dtype: bfloat16 has three bits fewer than
float16, and eight times its bound. Which sample comes near depends on prompts and weights.
"""

MODEL = {"hidden_size": 128, "head_dim": 32, "spread": 0.1}
"""Of a model whose heads suit the operators."""

LENGTHS = [5, 33, 17, 1]
"""Of prompts, in tokens."""


def settings(dtype: str = "float16", **options: Any) -> dict[str, Any]:
    """Settings of an engine."""
    return {
        "dtype": dtype,
        "block_size": 128,
        "max_num_batched_tokens": 128,
        "additional_config": {"npu_prep": options},
    }


def forget_layers() -> None:
    """vLLM keeps rotary embeddings and activations for the next engine, with other switches."""
    from vllm.model_executor.layers import activation, rotary_embedding

    rotary_embedding._ROPE_DICT.clear()
    activation._ACTIVATION_REGISTRY._dict.clear()
    activation._ACTIVATION_AND_MUL_REGISTRY._dict.clear()


def steps_of(model: Path, dtype: str, mode: str, seed: int, fused: bool = True) -> Steps:
    """Greedy steps of four prompts by an engine, eagerly or in graphs."""
    forget_layers()
    given = settings(dtype, fused=fused) | ({} if mode == "eager" else graphs(mode, 4, 16))
    with engine(model, **given) as llm:
        return greedy_steps(llm, prompts_of(seed, LENGTHS), 8)


def compare_paths(model: Path, family: str, dtype: str, mode: str, seed: int) -> Steps:
    """Logits within a bound, equal tokens where it is clear, float32 as near as before.

    Returns the fused path's steps.
    """
    # vLLM's backend of transformers, which OLMo 2 runs by, leaves the model unusable by itself.
    reference = None if family == "Olmo2" else logits_of(model)
    prompts = prompts_of(seed, LENGTHS)
    runs = {fused: steps_of(model, dtype, mode, seed, fused) for fused in (False, True)}
    found = difference(runs[True], runs[False], BOUND[dtype])
    print(f"{family} {dtype} {mode}: {found}")
    assert not found.wrong
    assert found.largest < BOUND[dtype]
    assert 3 * found.compared > found.excluded
    if reference is not None:
        far = {fused: _distance(steps, reference, prompts) for fused, steps in runs.items()}
        print(f"{family}: {far[False]:.4f} to float32, then {far[True]:.4f}")
        assert far[True] < 1.5 * far[False] + BOUND[dtype] / 2
    return runs[True]


def _distance(steps: Steps, reference: Any, prompts: list[list[int]]) -> float:
    """Largest difference to transformers in float32, in standard deviations of its logits."""
    worst = 0.0
    for prompt, tokens, logits in zip(prompts, steps.tokens, steps.logits, strict=True):
        expected = torch.from_numpy(reference(prompt + tokens)[len(prompt) - 1 : -1])
        worst = max(worst, float((logits - expected).abs().max() / expected.std()))
    return worst


@contextmanager
def wrong_operator(name: str, wrong: Callable[[Any], Any]) -> Iterator[None]:
    """An operator of the card that gets one thing wrong: what is made of the right one."""
    (right,) = [each for each in REFERENCES if each.name == f"npu::{name}"]
    how = {"contiguous": right.contiguous}
    ascend_emulator.register_reference(right.name, wrong(right.function), **how)
    try:
        yield
    finally:
        ascend_emulator.register_reference(right.name, right.function, **how)
