"""The demo model's drafters: accepted mostly, not always, by a plain reading of drafting."""

import functools
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm import SamplingParams

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import demo
import tiny_drafters
import tiny_model
from tiny_drafters import METHODS

from tests.helpers.engine import engine, generate, graphs
from tests.helpers.huggingface import reference
from tests.helpers.prompts import chat_prompt

K = 3
MAX_TOKENS = 32
END = tiny_model.SPECIAL_TOKENS.index("<|im_end|>")
KNOWN = [question for question, _ in tiny_model.exchanges()[::4]]
UNKNOWN = [
    "What is a cache writer?",
    "Who decides where a key is written?",
    "Tell me about block tables and slots.",
    "Count to seven.",
]


@pytest.fixture(scope="module")
def target(demo_model):
    return AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32).requires_grad_(
        False
    )


@pytest.fixture(scope="module")
def tokenizer(demo_model):
    return AutoTokenizer.from_pretrained(demo_model)


@pytest.fixture(scope="module")
def answers(demo_model, tokenizer):
    """Function of questions: for each the prompt and the greedy tokens behind it.

    Answers go on behind their end, for drafts which reach beyond it.
    """

    @functools.cache
    def run(*questions: str) -> list[tuple[list[int], list[int]]]:
        prompts = [chat_prompt(tokenizer, question) for question in questions]
        return list(zip(prompts, reference(demo_model, prompts, MAX_TOKENS + K)))

    return run


def load(folder: Path, target) -> torch.nn.Module:
    """A drafter from its saved weights, of which none may be missing or unknown."""
    if folder.name == "draft_model":
        return AutoModelForCausalLM.from_pretrained(folder).eval()
    weights = load_file(folder / "model.safetensors")
    if folder.name == "eagle":
        head = tiny_drafters.EagleHead(target)
    else:
        head = tiny_drafters.Eagle3Head(target, weights["t2d"].nonzero()[:, 0])
    head.load_state_dict(weights)
    return head


@torch.no_grad()
def draft(drafter, target, token_ids: torch.Tensor, states: list[torch.Tensor]) -> list[int]:
    """K draft tokens behind a sequence, one by one, each step over the whole sequence.

    ``token_ids`` (len,) ends with a token of which the target hasn't seen the next one yet;
    ``states`` hold what the target computed of all tokens before it.
    """
    drafts: list[int] = []
    if not isinstance(drafter, tiny_drafters.Head):
        for _ in range(K):
            ids = torch.cat([token_ids, torch.tensor(drafts, dtype=torch.long)])
            drafts.append(int(drafter(ids[None]).logits[0, -1].argmax()))
        return drafts
    fed = drafter.combine([state[None, : len(token_ids) - 1] for state in states])
    for _ in range(K):
        ids = torch.cat([token_ids[1:], torch.tensor(drafts, dtype=torch.long)])
        width = len(ids)
        hidden_states = drafter(
            target.model.embed_tokens(ids[None]),
            fed,
            attention_mask=torch.ones(width, width, dtype=torch.bool).tril()[None, None],
            position_embeddings=drafter.rotary_emb(fed, torch.arange(width)[None]),
        )[:, -1:]
        drafts.append(int(drafter.logits(target, hidden_states).argmax()))
        fed = torch.cat([fed, hidden_states], dim=1)
    return drafts


def accepted_counts(drafter, target, answers: list[tuple[list[int], list[int]]]) -> list[int]:
    """For each step of speculative decoding, how many of its K drafts are the target's tokens."""
    counts = []
    for prompt, answer in answers:
        ids = torch.tensor(prompt + answer)
        end = answer.index(END) + 1 if END in answer[:MAX_TOKENS] else MAX_TOKENS
        with torch.no_grad():
            states = target(ids[None], output_hidden_states=True).hidden_states
        known = 1  # the target's own first token
        while known < end:
            behind = len(prompt) + known
            drafts = draft(drafter, target, ids[:behind], [state[0] for state in states])
            wrong = (torch.tensor(drafts) != ids[behind : behind + K]).nonzero()
            counts.append(int(wrong[0]) if len(wrong) else K)
            known += counts[-1] + 1
    return counts


@pytest.fixture(scope="module")
def accepted(demo_drafters, target, answers):
    """Function of a method: for known and unknown questions, how many drafts steps accept."""

    @functools.cache
    def count(method: str) -> tuple[list[int], list[int]]:
        drafter = load(demo_drafters / method, target)
        return tuple(accepted_counts(drafter, target, answers(*q)) for q in (KNOWN, UNKNOWN))

    return count


@pytest.mark.parametrize("method", METHODS)
def test_most_drafts_are_accepted_some_in_part_some_not(method, accepted):
    known, unknown = accepted(method)
    assert sum(known) / len(known) / K > 0.7
    assert {0, K} < set(known + unknown)  # rejected, accepted, and something between


@pytest.mark.parametrize(
    ("method", "asynchronous"), [("draft_model", True), ("eagle", False), ("eagle3", True)]
)
def test_an_engine_accepts_exactly_the_same_drafts(
    method, asynchronous, accepted, demo_model, demo_drafters, answers
):
    """In chunks, batches and graphs: the drafter is fed what the plain reading feeds it."""
    asked, (known, unknown) = answers(*KNOWN, *UNKNOWN), accepted(method)
    expected = known + unknown
    drafts = {"method": method, "model": str(demo_drafters / method), "num_speculative_tokens": K}
    with engine(
        demo_model,
        skip_tokenizer_init=False,  # answers stop at their end
        max_num_seqs=6,
        max_num_batched_tokens=40,
        async_scheduling=asynchronous,
        speculative_config=drafts,
        disable_log_stats=False,
        **graphs("FULL_AND_PIECEWISE", 8, 24),
    ) as llm:
        params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
        got = generate(llm, [prompt for prompt, _ in asked], params)
        metrics = {metric.name: metric for metric in llm.get_metrics()}
    assert got == [answer[: len(tokens)] for tokens, (_, answer) in zip(got, asked)]
    assert metrics["vllm:spec_decode_num_drafts"].value == len(expected)
    of_engine = metrics["vllm:spec_decode_num_accepted_tokens_per_pos"].values
    assert of_engine == [sum(count > position for count in expected) for position in range(K)]


def test_drafters_are_made_again_when_a_recipe_changes(
    demo_model, demo_drafters, tmp_path, monkeypatch
):
    def no_training(*args):
        raise AssertionError("trained")

    monkeypatch.setattr(tiny_drafters, "train", no_training)
    assert tiny_drafters.make(demo_drafters, demo_model) == demo_drafters
    text = tmp_path / "text"
    text.write_text("Another question?\nAnother answer.\n")
    monkeypatch.setattr(tiny_model, "TEXT", text)
    assert tiny_drafters.recipe_hash() != (demo_drafters / tiny_model.STAMP).read_text()


def test_a_speculative_config_names_the_drafter_that_was_made(demo_drafters):
    folder = str(demo_drafters / "eagle")
    expected = {"method": "eagle", "model": folder, "num_speculative_tokens": 3}
    assert demo.speculation("eagle") == expected
    assert demo.speculation("ngram") == {"method": "ngram", "num_speculative_tokens": 3}
