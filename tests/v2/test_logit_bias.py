"""Lists of requests that upstream's V2 has no room for (test_sampling.py: in an engine)."""

import numpy as np
import pytest
import torch
from vllm.sampling_params import SamplingParams, StructuredOutputsParams

from vllm_npu_prep.runner.v2.logit_bias import LongLists, has_long_lists

VOCAB, PROMPT = 60, 4
CPU = torch.device("cpu")


def plain(logits, position, allowed, bias, stops, min_tokens, may_restore):
    """Logits of a row, token by token."""
    logits = [x if not allowed or i in allowed else -np.inf for i, x in enumerate(logits)]
    logits = [x + bias.get(i, 0.0) for i, x in enumerate(logits)]
    if position + 1 >= PROMPT + min_tokens:
        return logits
    without = [-np.inf if i in stops else x for i, x in enumerate(logits)]
    return logits if may_restore and max(without) == -np.inf else without


@pytest.mark.parametrize("may_restore", [False, True])
@pytest.mark.parametrize("allowed", [[], [3, 3, 7, 59], [11, 12]])
def test_rows_of_the_request_are_processed_and_no_others(seed, allowed, may_restore):
    rng = np.random.default_rng(seed)
    bias, stops = {7: 2.5, 11: -1.0, 30: 4.0}, [11, 12, 30, VOCAB + 5]
    params = SamplingParams(
        allowed_token_ids=allowed or None,
        logit_bias=bias,
        stop_token_ids=stops,
        min_tokens=2,
        structured_outputs=StructuredOutputsParams(regex="a") if may_restore else None,
    )
    logits = torch.from_numpy(rng.normal(size=(5, VOCAB)).astype(np.float32))
    is_own, pos = torch.tensor([False, True, True, True, False]), torch.tensor([9, 3, 4, 5, 0])
    given = logits.clone()
    LongLists(params, PROMPT, VOCAB, CPU).apply(logits, is_own, pos)
    for row, own in enumerate(is_own.tolist()):
        expected = given[row].tolist()
        if own:
            how = allowed, bias, stops, 2, may_restore
            expected = plain(expected, int(pos[row]), *how)
        np.testing.assert_allclose(logits[row], expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("given", "least"),
    [
        (lambda n: {"allowed_token_ids": [5] * n}, 1025),
        (lambda n: {"logit_bias": dict.fromkeys(range(n), 1.0)}, 1025),
        (lambda n: {"stop_token_ids": [*range(n)], "min_tokens": 3}, 129),
    ],
)
def test_lists_are_long_beyond_the_rows_of_upstream(given, least):
    assert has_long_lists(SamplingParams(**given(least)))
    assert not has_long_lists(SamplingParams(**given(least - 1)))
    assert not has_long_lists(SamplingParams(stop_token_ids=[*range(500)]))
