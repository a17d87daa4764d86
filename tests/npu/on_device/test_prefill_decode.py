"""Prompts computed on one emulated card and decoded on another one, over Mooncake itself."""

import multiprocessing
from collections.abc import Iterator

import pytest

from tests.conftest import SEED
from tests.helpers.engine import make_model
from tests.helpers.latent import LATENT_ON_NPUS, V3_EXPERTS_ON_NPUS
from tests.helpers.prefill_decode import Pair
from tests.helpers.prompts import prompts_of

LENGTHS = [90, 33, 3, 71, 64, 1]
MAX_TOKENS = 8
CASES = {
    "atb": ("Qwen3", {}, "float16", {}),
    "latent": (
        "DeepseekV3",
        {**LATENT_ON_NPUS, **V3_EXPERTS_ON_NPUS, "spread": 0.1, "embedding_scale": 20},
        "bfloat16",
        {},
    ),
}


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    """Two processes, each with a card of its own."""
    cards = tuple({"ASCEND_RT_VISIBLE_DEVICES": str(card)} for card in range(2))
    made = Pair(multiprocessing.get_context("spawn"), cards)
    yield made
    made.end()


@pytest.mark.parametrize("name", CASES)
def test_prompts_of_one_card_are_decoded_on_another(pair, tmp_path, name):
    """Its tokens are those that it computes alone; hazards of either card are errors."""
    family, config, dtype, more = CASES[name]
    model, prompts = make_model(tmp_path / "model", family, **config), prompts_of(SEED, LENGTHS)
    settings = {"dtype": dtype, "max_model_len": 128, "block_size": 16}
    settings |= {"max_num_batched_tokens": 48, "enable_prefix_caching": False, **more}
    attention = "atb" if name == "atb" else "fia"
    settings["additional_config"] = {"npu_prep": {"attention": attention}}
    with pair.engines("V2", model, **settings) as free:
        alone = pair.consumer.ask("generate", prompts, MAX_TOKENS, [{}] * len(prompts))
        assert alone[1] == [0] * len(prompts)
        tokens, fetched = pair.decode(prompts, MAX_TOKENS)
        assert tokens == alone[0] and len({*map(tuple, tokens)}) > 3
        assert all(length - had <= 1 for length, had in zip(LENGTHS, fetched))
        assert [side.ask("free") for side in pair.sides] == free
