"""Pipeline stages beside adapters and forced outputs, of models that pool and of some that see."""

import asyncio
from functools import partial
from operator import methodcaller
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer
from vllm.lora.request import LoRARequest

from tests.engine.test_ranks import without_pairs
from tests.helpers.engine import REPLAYED, graphs, greedy, make_model, save_tokenizer
from tests.helpers.grammars import forced, has_form, make_text_model
from tests.helpers.huggingface import is_varied, reference
from tests.helpers.lora import ATTENTION, MLP, make_adapter, merge
from tests.helpers.pooling import check_close, hidden_states, normalized
from tests.helpers.prompts import prompts_of
from tests.helpers.ranks import Ranks, serve_on_ranks
from tests.helpers.v2 import RUNNERS, asked_for
from tests.helpers.vision import Reference, chat, make_image, make_video

ADAPTERS = {"a": ATTENTION + MLP, "b": MLP}
ASKED = [  # length of a prompt, its adapter and its form
    (20, None, None),
    (90, "a", None),
    (7, "b", None),
    (61, "a", None),
    (40, None, "json"),
    (33, "b", "regex"),
    (3, None, "grammar"),
    (75, "a", "regex"),
]
PLAIN, LONGEST = 16, 60
SETTINGS = {
    "pipeline_parallel_size": 2,  # scheduled asynchronously on V2, synchronously on V1
    "skip_tokenizer_init": False,
    "block_size": 16,
    "enable_lora": True,
    "max_loras": 2,
    "max_lora_rank": 8,
    "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
    **graphs("FULL_AND_PIECEWISE", 1, 4, 8, 16, 48),
}


async def together(
    ranks: Ranks, prompts: list[list[int]], loras: list[LoRARequest | None]
) -> dict[str, Any]:
    """Tokens of all requests, twice; what every stage tells of its steps."""
    await ranks.ask("probe_watch")

    async def one(prompt: list[int], lora: LoRARequest | None, form: str | None) -> list[int]:
        longest, asked = (LONGEST, forced(form, LONGEST)) if form else (PLAIN, greedy(PLAIN))
        params = {"structured_outputs": asked.structured_outputs, "ignore_eos": form is None}
        return (await ranks.generate([prompt], longest, loras=[lora], **params))[0]

    forms = [form for *_, form in ASKED]
    tokens = [await asyncio.gather(*map(one, prompts, loras, forms)) for _ in range(2)]
    told = {name: await ranks.ask(f"probe_{name}") for name in ("noted", "counts")}
    return {"tokens": tokens, **told}


def test_adapters_and_forced_outputs_in_stages(tmp_path, seed):
    """Prompts in chunks, mixed with decodes; plain requests are also those of merged weights."""
    model = make_text_model(tmp_path / "model", num_hidden_layers=3)
    loras, merged = {None: None}, {None: model}
    for number, (name, modules) in enumerate(ADAPTERS.items(), 1):
        folder = make_adapter(tmp_path / name, model, seed=number, modules=modules)
        loras[name] = LoRARequest(name, number, str(folder))
        merged[name] = merge(model, folder, tmp_path / f"merged-{name}")
    prompts, got = prompts_of(seed, [length for length, *_ in ASKED]), {}
    talk = partial(together, prompts=prompts, loras=[loras[name] for _, name, _ in ASKED])
    for runner in RUNNERS:
        with asked_for(runner):
            got[runner] = serve_on_ranks(model, SETTINGS, talk)
    expected = got["V1"]["tokens"]
    assert got["V2"]["tokens"] == expected
    assert expected[0] == expected[1]
    for told in got.values():
        first, second = without_pairs(told["noted"])
        assert second == first and len(first) >= PLAIN
        assert all(REPLAYED["FULL_AND_PIECEWISE"] <= set(counts) for counts in told["counts"])
    tokenizer = AutoTokenizer.from_pretrained(model)
    plain = []
    for (_, name, form), prompt, tokens in zip(ASKED, prompts, expected[0], strict=True):
        if form is None:
            assert tokens == reference(merged[name], [prompt], PLAIN)[0]
            plain.append(tokens)
        else:
            assert has_form(form, tokenizer.decode(tokens, skip_special_tokens=True))
    assert is_varied(plain)


@pytest.mark.parametrize("runner", RUNNERS)
def test_embeddings_of_stages(tmp_path, seed, runner):
    """Prompts in chunks; the last stage pools."""
    model = make_model(tmp_path / "model", num_hidden_layers=3)
    save_tokenizer(model)
    prompts = prompts_of(seed, [3, 90, 40, 17])
    settings = {"pipeline_parallel_size": 2, "runner": "pooling", "skip_tokenizer_init": False}
    with asked_for(runner):
        got = serve_on_ranks(model, settings, methodcaller("embed", prompts))
    got = [torch.tensor(row) for row in got]
    check_close(got, [normalized(rows[-1]) for rows in hidden_states(model, prompts)])


@pytest.mark.parametrize("runner", RUNNERS)
def test_images_and_videos_in_stages(vision_models, seed, runner):
    """The first stage embeds, each one rotates; chunks end within images."""
    model, image = vision_models / "qwen2_5_vl", make_image(seed, 64, 32)
    requests = [
        chat(image, "What is a slot mapping?"),
        chat("Without an image."),
        chat(make_video(seed + 1), "What happens here?", image),
    ]
    settings = SETTINGS | {"max_num_batched_tokens": 32, "enable_lora": False}
    prompts = [request.prompt() for request in requests]
    with asked_for(runner):
        got = serve_on_ranks(model, settings, methodcaller("generate", prompts, PLAIN))
    known = Reference(model)
    assert got == [known.answer(request, PLAIN).tokens for request in requests]
