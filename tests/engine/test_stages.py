"""Pipeline stages beside adapters and forced outputs: V2's tokens are V1's, in one batch."""

import asyncio
from functools import partial
from typing import Any

import pytest
from vllm.lora.request import LoRARequest
from vllm.sampling_params import StructuredOutputsParams

from tests.conftest import SEED
from tests.engine.test_ranks import check_that_ranks_agree
from tests.helpers.engine import REPLAYED, graphs
from tests.helpers.grammars import GRAMMAR, REGEX, SCHEMA, check_form, make_text_model
from tests.helpers.huggingface import check_varied, reference
from tests.helpers.lora import ATTENTION, MLP, make_adapter, merge
from tests.helpers.prompts import prompts_of
from tests.helpers.ranks import Ranks, serve_on_ranks
from tests.helpers.v2 import RUNNERS, asked_for

LENGTHS = [20, 90, 7, 61, 40, 33, 3, 75]
ADAPTERS = [None, "a", "b", "a", None, "b", None, "a"]
FORMS = [None, None, None, None, "json", "regex", "grammar", "regex"]
"""Of each prompt: the last one has an adapter and a form."""
PLAIN, LONGEST = 16, 60
GIVEN = {"json": SCHEMA, "regex": REGEX, "grammar": GRAMMAR}
LAYOUTS = {
    "stages": graphs("FULL_AND_PIECEWISE", 1, 4, 8, 16, 48),
    "stages of two": {"tensor_parallel_size": 2},
}


class Case:
    """A model that can spell, and two adapters for it."""

    def __init__(self, root: Any) -> None:
        self.model = make_text_model(root / "model", num_hidden_layers=3)
        self.loras: dict[str | None, LoRARequest | None] = {None: None}
        self.merged = {None: self.model}
        for number, name in enumerate("ab", 1):
            modules = ATTENTION + MLP if name == "a" else MLP
            folder = make_adapter(root / name, self.model, seed=number, modules=modules)
            self.loras[name] = LoRARequest(name, number, str(folder))
            self.merged[name] = merge(self.model, folder, root / f"merged-{name}")
        self.prompts = prompts_of(SEED, LENGTHS)


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    return Case(tmp_path_factory.mktemp("stages"))


async def together(
    ranks: Ranks, prompts: list[list[int]], loras: list[LoRARequest | None]
) -> dict[str, Any]:
    """Tokens of all requests, twice; what every stage tells of its steps."""
    await ranks.ask("probe_watch")

    async def one(index: int) -> list[int]:
        form = FORMS[index]
        params: dict[str, Any] = {}
        if form is not None:
            forced = StructuredOutputsParams(**{form: GIVEN[form]})
            params = {"structured_outputs": forced, "ignore_eos": False}
        given = [prompts[index]], LONGEST if form else PLAIN
        return (await ranks.generate(*given, loras=[loras[index]], **params))[0]

    tokens = [await asyncio.gather(*map(one, range(len(prompts)))) for _ in range(2)]
    told = {name: await ranks.ask(f"probe_{name}") for name in ("noted", "counts")}
    return {"tokens": tokens, **told}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_adapters_and_forced_outputs_in_stages(case, layout):
    """Prompts in chunks, mixed with decodes; plain requests are also those of merged weights."""
    settings = {
        "pipeline_parallel_size": 2,
        "async_scheduling": False,
        "skip_tokenizer_init": False,
        "block_size": 16,
        "enable_lora": True,
        "max_loras": 2,
        "max_lora_rank": 8,
        "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
        **LAYOUTS[layout],
    }
    loras = [case.loras[name] for name in ADAPTERS]
    talk, got = partial(together, prompts=case.prompts, loras=loras), {}
    for runner in RUNNERS:
        with asked_for(runner):
            got[runner] = serve_on_ranks(case.model, settings, talk)
    expected = got["V1"]["tokens"]
    assert got["V2"]["tokens"] == expected
    assert expected[0] == expected[1]
    for runner, told in got.items():
        print(runner, told["counts"])
        check_that_ranks_agree(told["noted"], PLAIN)
        if layout == "stages":
            kinds = REPLAYED["FULL_AND_PIECEWISE"]
            assert all(kinds <= set(counts) for counts in told["counts"])
    plain = [index for index, form in enumerate(FORMS) if form is None]
    for index in plain:
        merged = case.merged[ADAPTERS[index]]
        assert expected[0][index] == reference(merged, [case.prompts[index]], PLAIN)[0], index
    check_varied([expected[0][index] for index in plain])
    tokenizer = tokenizer_of(case.model)
    for form, tokens in zip(FORMS, expected[0]):
        if form is not None:
            check_form(form, tokenizer.decode(tokens, skip_special_tokens=True))


def tokenizer_of(model: Any) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)
