"""The one rule that decides between `input_ids` and `inputs_embeds`, both ways."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.batches import step_batch
from vllm_npu_prep.prep.embeds import NO_PLACEHOLDERS, Placeholders, takes_embeds
from vllm_npu_prep.prep.oracle import OracleRequest


def batch_of(*requests: tuple[int, int], prompt: int = 20):
    """Requests as ``(num_computed_tokens, num_scheduled_tokens)``."""
    return step_batch(
        [
            OracleRequest(computed, scheduled, prompt, list(range(60)), list(range(1, 9)))
            for computed, scheduled in requests
        ],
        block_size=8,
        max_model_len=64,
    )


def decides(*requests, prompts=(), runs=(), prompt=20) -> bool:
    batch = batch_of(*requests, prompt=prompt)
    placeholders = Placeholders.of_rows([*runs, *[[]] * (len(requests) - len(runs))])
    return takes_embeds(batch.tables, batch.num_scheduled_tokens, prompts, placeholders)


@pytest.mark.parametrize(
    ("computed", "scheduled", "expected"),
    [
        (0, 4, False),  # text in front of the image
        (0, 5, True),  # its first token
        (8, 1, True),  # its last one
        (5, 2, True),
        (0, 20, True),
        (9, 3, False),  # text behind it
        (12, 1, False),
        (25, 1, False),  # decodes
    ],
)
def test_steps_with_tokens_of_an_image_take_embeddings(computed, scheduled, expected):
    image = [(4, 9)]
    assert decides((computed, scheduled), runs=[image]) is expected
    text = (30, 1)
    assert decides((computed, scheduled), text, runs=[image]) is expected
    assert decides(text, (computed, scheduled), runs=[[], image]) is expected


@pytest.mark.parametrize(
    ("computed", "expected"), [(0, True), (19, True), (20, False), (33, False)]
)
def test_steps_that_read_a_prompt_of_embeddings_take_them(computed, expected):
    assert decides((30, 1), (computed, 1), prompts=[1]) is expected
    assert decides((30, 1), (computed, 1), prompts=[]) is False


def test_a_step_of_text_and_one_without_requests_take_token_ids():
    assert decides((0, 20), (25, 1)) is False
    batch = batch_of((0, 4))
    nothing = np.empty(0, np.int32)
    assert takes_embeds(batch.tables, nothing, [0], Placeholders.of_rows([[(0, 9)]])) is False
    assert len(NO_PLACEHOLDERS.rows) == 0


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(1, 6), min_size=0, max_size=6),  # lengths of text and runs in turn
            st.integers(0, 20),
            st.integers(1, 20),
        ),
        min_size=1,
        max_size=5,
    ),
    st.integers(0, 1),
)
def test_touched_runs_are_found_token_by_token_too(requests, shift):
    runs, computed, scheduled = [], [], []
    for lengths, num_computed, num_scheduled in requests:
        edges = np.cumsum([0, *lengths]).tolist()
        runs.append([(a, b) for a, b in zip(edges[1::2], edges[2::2])])
        computed.append(num_computed)
        scheduled.append(num_scheduled)
    placeholders = Placeholders.of_rows(runs)
    found = placeholders.touched(np.array(computed), np.array(scheduled), shift)
    expected, index = [], 0
    for row, of_row in enumerate(runs):
        for start, end in of_row:
            inside = [
                position
                for position in range(computed[row] + shift, computed[row] + shift + scheduled[row])
                if start <= position < end
            ]
            if inside:
                expected.append((index, inside[0], inside[-1] + 1))
            index += 1
    assert list(zip(*(each.tolist() for each in found))) == expected
