"""The benchmark of real traffic: what it sends, and that it prints nothing when answers differ."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import tiny_model
import traffic

STATE = '{"state": "decode", "tokens": 7, "slots": [1, 2], "why": "it was asked"}'
ANSWERS = {
    "chats": traffic.Answer([5, 6, 7], "a b c", []),
    "structured": traffic.Answer([5, 6], STATE, []),
    "tools": traffic.Answer([5, 6], "", ['free_blocks({"group": 3})']),
}
REQUESTS = [traffic.Request("first", 3), traffic.Request("second", 3)]


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_model.make_tokenizer()


@pytest.mark.parametrize("kind", traffic.KINDS)
def test_prompts_have_these_lengths_behind_what_they_share(kind, tokenizer):
    how = traffic.KINDS[kind]
    requests = traffic.requests_of(how, 128, tokenizer)
    sizes = [len(tokenizer(request.prompt).input_ids) for request in requests]
    shared = traffic.PREFIX_TOKENS if how.prefixes else 0
    for size, (prompt, _) in zip(sizes, traffic.lengths(128), strict=True):
        assert size <= traffic.LONGEST_PROMPT, "or the client would leave it out"
        is_whole = 0 <= size - shared - prompt < 24  # a word more, at most, of both texts
        assert is_whole or size > traffic.LONGEST_PROMPT - 24
    for size, request in zip(sizes, requests, strict=True):
        assert size + request.answer < 2048, "or the context would end before the answer"
    begins = {request.prompt[:100] for request in requests if len(request.prompt) > 100}
    assert len(begins) == (how.prefixes or len([s for s in requests if len(s.prompt) > 100]))


@pytest.mark.parametrize("kind", ANSWERS)
def test_servers_that_answer_the_same_do_not_differ(kind):
    answers = [ANSWERS[kind]] * 2
    assert traffic.difference(kind, REQUESTS, {"ours": answers, "vllm_cpu": answers}) == ""


WRONG = {
    "a token": ("chats", ANSWERS["chats"]._replace(tokens=[5, 8, 7])),
    "a text": ("chats", ANSWERS["chats"]._replace(text="a b d")),
    "a call": ("tools", ANSWERS["tools"]._replace(calls=['free_blocks({"group": 4})'])),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_difference_is_told(what):
    kind, wrong = WRONG[what]
    by_side = {"ours": [ANSWERS[kind]] * 2, "vllm_cpu": [ANSWERS[kind], wrong]}
    assert f"{kind}, request 1 of ours" in traffic.difference(kind, REQUESTS, by_side)


NO_ANSWERS = {
    "too short": ("chats", ANSWERS["chats"]._replace(tokens=[5, 6])),
    "not by the schema": ("structured", ANSWERS["structured"]._replace(text=STATE[:-2])),
    "another schema": ("structured", ANSWERS["structured"]._replace(text='{"state": "decode"}')),
    "no call": ("tools", ANSWERS["tools"]._replace(calls=[])),
    "words beside a call": ("tools", ANSWERS["tools"]._replace(text="</tool_call>")),
}


@pytest.mark.parametrize("what", NO_ANSWERS)
def test_answers_of_another_kind_are_told_though_both_give_them(what):
    kind, wrong = NO_ANSWERS[what]
    by_side = {"ours": [wrong] * 2, "vllm_cpu": [wrong] * 2}
    assert f"{kind}, request 0 of ours" in traffic.difference(kind, REQUESTS, by_side)


@pytest.mark.parametrize(
    "wrong",
    [{}, {"completed": 1}, {"output_lens": [3, 2]}, {"generated_texts": ["a b c", "a b d"]}],
)
def test_numbers_of_other_answers_are_not_printed(wrong):
    told = {"completed": 2, "output_lens": [3, 3], "generated_texts": ["a b c"] * 2, **wrong}
    answers = [ANSWERS["chats"]] * 2
    if not wrong:
        traffic.check_told("ours", "chats", told, answers)
        return
    with pytest.raises(SystemExit, match="no numbers"):
        traffic.check_told("ours", "chats", told, answers)
