"""Lists of requests that have no room in upstream's V2 (test_sampling.py: in an engine)."""

import pytest
from vllm import PoolingParams, SamplingParams
from vllm.exceptions import VLLMValidationError

from vllm_npu_prep.runner.v2.limits import refuse_long_lists


@pytest.mark.parametrize("length", [1024, 1025])
def test_biases_may_be_as_many_as_have_room(length):
    params = SamplingParams(logit_bias=dict.fromkeys(range(length), 1.0))
    if length == 1024:
        refuse_long_lists(params)
        return
    with pytest.raises(VLLMValidationError, match=r"`logit_bias` may have 1024 tokens.*has 1025"):
        refuse_long_lists(params)


def test_stop_tokens_take_room_beside_min_tokens_alone():
    refuse_long_lists(SamplingParams(stop_token_ids=list(range(500))))
    refuse_long_lists(SamplingParams(stop_token_ids=[5] * 500, min_tokens=3))
    refuse_long_lists(PoolingParams())
    with pytest.raises(VLLMValidationError, match=r"beside `min_tokens`.*120 tokens.*has 121"):
        refuse_long_lists(SamplingParams(stop_token_ids=list(range(121)), min_tokens=3))
