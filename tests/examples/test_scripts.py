"""Each script of examples/ that starts an engine says what is true of it.

Those that ask a server are in `tests.server`, beside their servers.
"""

import re
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import tiny_model

from tests.helpers.examples import EXAMPLES, run_example
from tests.helpers.huggingface import reference
from tests.helpers.lora import merge
from tests.helpers.pooling import check_close, hidden_states, normalized
from tests.helpers.prompts import chat_prompt
from vllm_npu_prep.records.record_file import read_record, record_files

MAX_TOKENS = 64
LEARNED = dict(tiny_model.exchanges())


@pytest.fixture(scope="module")
def tokenizer(demo_model):
    return AutoTokenizer.from_pretrained(demo_model)


@pytest.fixture(scope="module")
def greedy_answers(tokenizer):
    """Function of a model and questions: greedy tokens of transformers, up to their end."""

    def answer(model: Path, questions: list[str]) -> list[list[int]]:
        prompts = [chat_prompt(tokenizer, question) for question in questions]
        end = tokenizer.eos_token_id
        rows = reference(model, prompts, MAX_TOKENS)
        return [row[: row.index(end) + 1] if end in row else row for row in rows]

    return answer


def test_offline_batch_prints_the_greedy_tokens_of_transformers(
    demo_model, tokenizer, greedy_answers
):
    questions = ["Who are you?", "What is a cache writer?", "Count to seven.", "Say goodbye."]
    expected = greedy_answers(demo_model, questions)
    printed = run_example("offline_batch.py", *questions)
    for question, tokens in zip(questions, expected):
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        reason = "stop" if tokens[-1] == tokenizer.eos_token_id else "length"
        assert (
            f"\nuser:      {question}\nassistant: {text}\n"
            f"           tokens: {len(tokens)}, finished by {reason}\n"
        ) in printed
    assert f"\nrequests: 4, tokens: {sum(map(len, expected))}, " in printed


def test_speculative_decoding_prints_equal_answers(demo_drafters, tokenizer):
    printed = run_example("speculative_decoding.py")
    total = sum(len(tokenizer(answer).input_ids) + 1 for answer in LEARNED.values())
    assert f"\nequal answers: {len(LEARNED)} of {len(LEARNED)}, tokens: {total}\n" in printed
    rates = [
        float(each) / 100 for each in re.findall(r"([\d.]+)%", printed.partition("accepted of")[2])
    ]
    assert len(rates) == 3
    assert 1 > rates[0] > rates[1] > rates[2] > 0.6
    (per_step,) = re.findall(r"tokens of a request's step: ([\d.]+) instead of 1", printed)
    assert abs(float(per_step) - 1 - sum(rates)) < 0.01


def test_lora_prints_the_answers_of_merged_weights(
    demo_model, demo_adapter, tokenizer, greedy_answers, tmp_path
):
    merged = merge(demo_model, demo_adapter, tmp_path / "merged")
    printed = run_example("lora.py")
    questions = re.findall(r"\nuser:   (.*)", printed)
    assert len(questions) == 3
    answers = zip(*(greedy_answers(model, questions) for model in (demo_model, merged)))
    for question, pair in zip(questions, answers):
        base, polite = (tokenizer.decode(tokens, skip_special_tokens=True) for tokens in pair)
        assert base != polite
        assert f"\nuser:   {question}\nbase: {base}\npolite: {polite}\n" in printed


def test_embeddings_prints_those_of_transformers(demo_model, tokenizer):
    texts = ["Say goodbye.", "What is a token?", "What is a draft token?"]
    printed = run_example("embeddings.py", *texts)
    states = hidden_states(demo_model, [tokenizer(text).input_ids for text in texts])
    expected = [normalized(rows[-1]) for rows in states]
    similarities = torch.stack(expected) @ torch.stack(expected).T
    assert f"\n{len(texts)} embeddings of {len(expected[0])} numbers each\n" in printed
    heads, rows = (
        [
            torch.tensor(
                [*map(float, re.findall(pattern.format(re.escape(text)), printed)[0].split())]
            )
            for text in texts
        ]
        for pattern in (r"\n(.*) \.\.\.  {}\n", rf"\n((?:\S+ ?){{{{{len(texts)}}}}})  {{}}\n")
    )
    check_close(heads, [each[:4] for each in expected], 2e-4)
    torch.testing.assert_close(torch.stack(rows), similarities, rtol=0, atol=2e-4)
    nearest = similarities.fill_diagonal_(-1).argmax(dim=1)
    for text, other in zip(texts, nearest):
        assert f"\n{text} is most like: {texts[other]}\n" in printed


def test_record_and_replay_finds_the_planted_bug_alone(tmp_path):
    printed = run_example("record_and_replay.py", "--dir", str(tmp_path))
    answers = re.findall(r"assistant: (.*)\n", printed)
    assert len(answers) == 3 and set(answers) <= set(LEARNED.values())
    (run,) = tmp_path.iterdir()
    files = record_files(run)
    before, after = printed.split("\nA bug, planted in ")
    assert len(files) > 10
    assert f"\n{len(files)} steps: core and oracle prepare what was recorded\n" in before
    record = read_record(files[0])
    slot, request = record.prepared["slot_mapping"][2], record.settings.req_ids[0]
    assert f"1 of {len(files)} steps differs, first in {files[0]}\n" in after
    for by in ("core", "oracle"):
        where = f"step {record.number}: slot_mapping[2] (token 2, request {request}): "
        assert f"{where}recorded {slot}, the {by} says {slot - 1}\n" in after


def test_the_table_of_the_examples_lists_each_script():
    table = (EXAMPLES / "README.md").read_text()
    scripts = {path.name for path in EXAMPLES.glob("*.py")}
    assert set(re.findall(r"^\| `(\w+\.py)`", table, re.M)) == scripts
