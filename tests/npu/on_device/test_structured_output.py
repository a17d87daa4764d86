"""Grammars on npu:0: their bitmask is applied on the device, with torch operators."""

import numpy as np

from tests.helpers.engine import engine, runner_of
from tests.helpers.grammars import KINDS, forced, has_form, make_text_model


def test_forced_and_plain_requests_share_batches(tmp_path, seed):
    """Forced outputs have their form; plain ones beside them are what they are alone."""
    model = make_text_model(tmp_path / "model", num_hidden_layers=1)
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(2, 512, length).tolist() for length in (20, 90, 7, 60, 33)]
    asked = ["json", None, "regex", "grammar", None]
    with engine(
        model,
        dtype="float16",
        skip_tokenizer_init=False,
        max_num_batched_tokens=48,
        structured_outputs_config={"backend": "xgrammar", "disable_any_whitespace": True},
    ) as llm:
        runner = runner_of(llm)
        assert str(runner.device) == "npu:0"

        def generate(kinds):
            return [
                output.outputs[0]
                for output in llm.generate(
                    [{"prompt_token_ids": prompt} for prompt in prompts],
                    [forced(kind, 60 if kind else 16) for kind in kinds],
                    use_tqdm=False,
                )
            ]

        mixed, plain = generate(asked), generate([None] * len(prompts))
        all_forced = generate(["json", *KINDS, "regex"])  # every row: no indices
        tokenizer = llm.get_tokenizer()
    for kind, output, alone in zip(asked, mixed, plain):
        if kind is None:
            assert output.token_ids == alone.token_ids
        else:
            assert has_form(kind, tokenizer.decode(output.token_ids, skip_special_tokens=True))
    for kind, output in zip(["json", *KINDS, "regex"], all_forced):
        assert has_form(kind, tokenizer.decode(output.token_ids, skip_special_tokens=True))
