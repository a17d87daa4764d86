"""Outputs forced by a JSON schema, a regex or a grammar, beside plain ones in a batch."""

import pytest

from tests.conftest import SEED
from tests.helpers.drafters import disturb_model, make_eagle_head
from tests.helpers.grammars import KINDS, forced, has_form, make_text_model
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
def test_forced_and_plain_requests_share_batches(model, drafts, asynchronous, runner, speculates):
    """Plain ones get the tokens of transformers, whatever steps the prompts were cut into, and
    whatever drafts were verified. That forced ones get the best tokens of those that are allowed is
    seen in `tests.matrix.combined`."""
    prompts = prompts_of(SEED, LENGTHS)
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
            [{"prompt_token_ids": prompt} for prompt in prompts],
            [forced(kind, LONGEST if kind else PLAIN) for kind in ASKED],
            use_tqdm=False,
        )
    assert {"ChunkedPrefill", "SpecDecoding" if speculates else "DecodeOnly"} <= set(states)
    assert bool(verified) == speculates
    plain = []
    for kind, prompt, output in zip(ASKED, prompts, outputs, strict=True):
        (completion,) = output.outputs
        if kind is None:
            plain += [(prompt, list(completion.token_ids))]
        else:
            assert completion.finish_reason == "stop"
            # The text itself would start with what random prompts leave of a character.
            assert has_form(kind, tokenizer.decode(completion.token_ids, skip_special_tokens=True))
    assert [got for _, got in plain] == reference(model, [prompt for prompt, _ in plain], PLAIN)
    assert set(KINDS) < set(ASKED)
