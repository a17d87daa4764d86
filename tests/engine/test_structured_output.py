"""Outputs forced by a JSON schema, a regex or a grammar, beside plain ones in a batch."""

import pytest
import torch

from tests.conftest import SEED
from tests.helpers.drafters import disturb_model, make_eagle_head
from tests.helpers.grammars import (
    GRAMMAR,
    KINDS,
    REGEX,
    SCHEMA,
    check_form,
    forced,
    make_text_model,
)
from tests.helpers.huggingface import reference
from tests.helpers.prompts import prompts_of
from tests.helpers.v2 import engine_of
from tests.helpers.watch import count_states, count_verified

LENGTHS = [20, 90, 7, 130, 40, 64, 3, 75]  # most of them longer than a step
ASKED = ["json", None, "regex", "grammar", None, "json", "regex", None]
LONGEST, PLAIN = 60, 24


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_text_model(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def expected(model) -> list[list[int]]:
    """Greedy tokens of transformers; of forced requests among those that xgrammar allows, with the
    end."""
    import xgrammar
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from xgrammar.contrib.hf import LogitsProcessor

    tokenizer = AutoTokenizer.from_pretrained(model)
    hf = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=len(tokenizer))
    compiler = xgrammar.GrammarCompiler(info)
    compiled = {
        "json": compiler.compile_json_schema(SCHEMA, any_whitespace=False, separators=(",", ":")),
        "regex": compiler.compile_regex(REGEX),
        "grammar": compiler.compile_grammar(GRAMMAR),
    }
    prompts = prompts_of(SEED, LENGTHS)
    plain = [prompt for prompt, kind in zip(prompts, ASKED) if kind is None]
    plain_tokens = iter(reference(model, plain, PLAIN))
    rows = []
    for prompt, kind in zip(prompts, ASKED):
        if kind is None:
            rows.append(next(plain_tokens))
            continue
        ids = torch.tensor([prompt])
        generated = hf.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=LONGEST,
            do_sample=False,
            logits_processor=[LogitsProcessor(compiled[kind])],
            pad_token_id=0,
        )
        rows.append(generated[0, len(prompt) :].tolist())
    return rows


@pytest.fixture(scope="module")
def drafts(model, tmp_path_factory):
    """Settings of a drafter that knows no grammar, by runner."""
    drafter = disturb_model(tmp_path_factory.mktemp("drafter"), model, share=0.05)
    head = make_eagle_head(tmp_path_factory.mktemp("head"), model)
    return {
        "V1": {"method": "draft_model", "model": str(drafter), "num_speculative_tokens": 3},
        "V2": {"method": "eagle", "model": str(head), "num_speculative_tokens": 3},
    }


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize(
    ("runner", "speculates"),
    [("V1", False), ("V1", True), ("V2", False), ("V2", True)],
    ids=["plain", "drafts", "v2", "v2-drafts"],
)
def test_forced_and_plain_requests_share_batches(
    model, expected, drafts, asynchronous, runner, speculates
):
    """Tokens of both are those of transformers, whatever steps the prompts were cut into, and
    whatever drafts were verified."""
    with engine_of(
        runner,
        model,
        skip_tokenizer_init=False,
        max_num_batched_tokens=48,
        block_size=16,
        async_scheduling=asynchronous,
        speculative_config=drafts[runner] if speculates else None,
        structured_outputs_config={"backend": "xgrammar", "disable_any_whitespace": True},
    ) as llm:
        states, tokenizer = count_states(llm), llm.get_tokenizer()
        verified = count_verified(llm)
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts_of(SEED, LENGTHS)],
            [forced(kind, LONGEST if kind else PLAIN) for kind in ASKED],
            use_tqdm=False,
        )
    assert {"ChunkedPrefill", "SpecDecoding" if speculates else "DecodeOnly"} <= set(states)
    assert bool(verified) == speculates
    for kind, output, tokens in zip(ASKED, outputs, expected):
        (completion,) = output.outputs
        assert list(completion.token_ids) == tokens
        if kind is not None:
            assert completion.finish_reason == "stop"
            # The text itself would start with what random prompts leave of a character.
            check_form(kind, tokenizer.decode(tokens, skip_special_tokens=True))
    assert set(KINDS) < set(ASKED)
