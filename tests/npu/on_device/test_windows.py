"""Windows on npu:0: the operators against the formula, and an engine with three KV-cache groups.

The reference of fused attention reads what its mask hides, as kernels do inside of a tile; so what
nobody may see is spoiled with large numbers, not with NaN.
"""

import pytest
import torch

from tests.helpers.attention import BATCHES, TOLERANCE, Step
from tests.helpers.counting import PreparationCounts
from tests.helpers.engine import engine, generate, greedy, make_model, runner_of
from tests.helpers.huggingface import is_varied
from tests.helpers.prompts import prompts_of
from tests.helpers.watch import record_states
from tests.helpers.windows import THREE_GROUPS, Poison
from tests.npu.only_some import HEAD_SIZE
from vllm_npu_prep.attention.families import KERNEL_FAMILIES
from vllm_npu_prep.attention.kernels import make_kernels
from vllm_npu_prep.prep.state import AttentionState

LARGE, SMALL = 2.0**12, 1.0
"""What nobody may see. Bfloat16 masks of atb add -10000 to a score, which large keys outweigh."""


@pytest.mark.parametrize("state", BATCHES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["fia", "atb"])
def test_every_state_with_a_window_equals_the_formula(name, dtype, state, seed):
    """Rows begin with null blocks where the window has left a block behind."""
    for window, causal in [(3, True), (130, True), (3, False), (20, False)]:
        if causal or state == AttentionState.PrefillNoCache:
            check(name, dtype, state, window, causal, seed)


def check(name, dtype, state, window, causal, seed):
    family = KERNEL_FAMILIES[name]
    step = Step(
        state,
        seed,
        form=family.mask_forms[0],
        window=window,
        causal=causal,
        dtype=dtype,
        block_size=128,
        head_size=HEAD_SIZE,
        lengths=[(8 * computed, scheduled) for computed, scheduled in BATCHES[state]],
        unseen=SMALL if (name, dtype) == ("atb", torch.bfloat16) else LARGE,
        mask_values=family.mask_values[dtype] if family.mask_values else None,
    )
    got = step.run(kernels=make_kernels(name), device="npu").double()
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(got, step.formula(), atol=tolerance, rtol=tolerance)


def test_nothing_is_seen_outside_of_three_groups_windows(tmp_path, seed):
    model = make_model(tmp_path / "model", "Gemma3", head_dim=HEAD_SIZE, **THREE_GROUPS)
    first, *others = prompts_of(seed, [290, 5, 33])
    prompts = [first, *others, first[:256] + others[0]]
    with engine(model, dtype="bfloat16", max_model_len=384) as llm:
        runner = runner_of(llm)
        counts, states = PreparationCounts(runner), record_states(llm)
        got = generate(llm, prompts, greedy(8))
        assert len(counts.steps) == len(states) > 10
        steps = list(zip(states, counts.steps))
        llm.reset_prefix_cache()
        poison = Poison(llm, LARGE)
        assert generate(llm, prompts, greedy(8)) == got
        assert generate(llm, prompts[-1:], greedy(8)) == got[-1:]
        assert len(runner.kv_cache_config.kv_cache_groups) == 3
    assert poison.left_behind > poison.null_blocks > 0
    assert is_varied(got)
    assert set(states) >= {"DecodeOnly", "ChunkedPrefill"}
    for index, (state, step) in enumerate(steps):
        assert step.pop("h2d_copies") == 1, (state, step)
        assert step.pop("launches", 0) <= (2 if index else 4), (state, step)
        assert not set(step) - {"h2d_bytes", "peak_memory_bytes"}, (state, step)
