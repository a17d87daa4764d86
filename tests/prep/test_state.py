"""The rule that decides the attention state, case by case."""

import numpy as np
import pytest

from vllm_npu_prep.prep.state import AttentionState, attention_state, batch_flags

# computed, scheduled, drafts, prompt, chunked prefill, state
CASES = {
    "whole prompts": ([0, 0], [3, 2], [0, 0], [3, 2], True, "PrefillNoCache"),
    "first chunks": ([0], [8], [0], [100], True, "PrefillNoCache"),
    "one-token prompts": ([0, 0], [1, 1], [0, 0], [1, 1], True, "PrefillNoCache"),
    "one-token prompt among decodes": ([0, 9], [1, 1], [0, 0], [1, 4], True, "DecodeOnly"),
    "last prompt token alone": ([7], [1], [0], [8], True, "DecodeOnly"),
    "all verify drafts": ([9, 5], [3, 3], [2, 2], [4, 4], True, "SpecDecoding"),
    "ragged drafts": ([9, 5], [4, 2], [3, 1], [4, 4], True, "SpecDecoding"),
    "one without drafts": ([9, 5], [4, 1], [3, 0], [4, 4], True, "SpecDecoding"),
    "drafts beside a prompt": ([9, 0], [3, 6], [2, 0], [4, 6], True, "ChunkedPrefill"),
    "chunks": ([4, 0], [3, 5], [0, 0], [8, 5], True, "ChunkedPrefill"),
    "cache hits, no chunks": ([4, 0], [4, 5], [0, 0], [8, 5], False, "PrefillCacheHit"),
    "decode beside, no chunks": ([9, 0], [1, 5], [0, 0], [4, 5], False, "ChunkedPrefill"),
    "full hit, no chunks": ([7, 3], [1, 4], [0, 0], [8, 7], False, "PrefillCacheHit"),
}


@pytest.mark.parametrize("case", CASES)
def test_first_matching_rule_decides(case):
    *counts, chunked_prefill, state = CASES[case]
    columns = [np.array(column, np.int32) for column in counts]
    assert attention_state(batch_flags(*columns), chunked_prefill) == AttentionState[state]
