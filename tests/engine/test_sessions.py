"""Sessions, whose input comes in parts: each part is answered as transformers answers it.

An answer that ends at a stop token leaves things behind that the next part must not find: drafts
accepted beyond that token, and states which a later step has changed already.
"""

from itertools import zip_longest

import pytest

from tests.conftest import SEED
from tests.helpers.mtp import make_mtp_model
from tests.helpers.sessions import MOST, converse, sessions_of
from tests.helpers.v2 import engine_of, on_both
from tests.helpers.watch import count_verified, record_cached

LENGTHS = [[5, 9, 3, 20], [100, 1, 7], [17, 17, 2, 6], [3, 30, 11]]
WAITS = [-1, 0, 3, -1]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Function of a family: its model, and sessions with the answers of transformers.

    Answers end early and late.
    """
    kept = {}

    def make(family):
        if family not in kept:
            folder = make_mtp_model(tmp_path_factory.mktemp(family), family)[0]
            sessions = sessions_of(folder, SEED, LENGTHS)
            lengths = [len(answer) for session in sessions for answer in session.answers]
            assert min(lengths) < MOST / 2 < max(lengths) and len(set(lengths)) > 3
            kept[family] = folder, sessions
        return kept[family]

    return make


@pytest.mark.parametrize(
    ("family", "asynchronous", "drafts", "runner"),
    on_both(
        {
            "attention, drafts, synchronous": ("MiMo", False, 3),
            "attention, drafts, asynchronous": ("MiMo", True, 3),
            "states, asynchronous": ("Qwen3_5", True, 0),
            "states, drafts, synchronous": ("Qwen3_5", False, 3),
            "states, drafts, asynchronous": ("Qwen3_5", True, 3),
        }
    ),
)
def test_each_part_of_a_session_is_answered(made, family, asynchronous, drafts, runner):
    folder, sessions = made(family)
    settings = {"speculative_config": {"method": "mtp", "num_speculative_tokens": drafts}}
    with engine_of(
        runner,
        folder,
        block_size=16,
        async_scheduling=asynchronous,
        enable_prefix_caching=True,
        additional_config={"npu_prep": {"check": "full"}},
        **(settings if drafts else {}),
    ) as llm:
        cached, verified = record_cached(llm), count_verified(llm)
        answers = converse(llm, sessions, WAITS)
    for number, (session, got) in enumerate(zip(sessions, answers, strict=True)):
        for turn, (expected, tokens) in enumerate(zip_longest(session.answers, got)):
            assert tokens == expected, f"session {number}, part {turn}"
    if drafts:
        assert verified["accepted"]
        assert verified["rejected"] or verified["partly"]
    if family == "Qwen3_5":  # a part that begins anew finds the whole blocks of those before
        assert max(cached[len(sessions) :]) > 0
