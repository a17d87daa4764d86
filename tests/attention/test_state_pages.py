"""How large blocks are in an engine with states, by hand; and what start-up says of them."""

from pathlib import Path

import pytest
from vllm.platforms import current_platform

from tests.helpers.engine import engine_config, make_model
from tests.helpers.hybrids import FULL, GATED_DELTA, LINEAR
from vllm_npu_prep import platform
from vllm_npu_prep.attention.state_pages import RecurrentStatePage, find_state_page

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "models.md"
TWO_LAYERS = {**GATED_DELTA, "num_hidden_layers": 2, "layer_types": [LINEAR, FULL]}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
PUBLISHED = {  # heads as published models have them; K and V of a token: two heads of 256
    **TWO_LAYERS,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "head_dim": 256,
    "num_key_value_heads": 2,
}
BF16 = {"dtype": "bfloat16", "mamba_ssm_cache_dtype": "bfloat16"}
NEXT = {**PUBLISHED, "linear_num_value_heads": 32}
NEWER = {**PUBLISHED, "linear_num_value_heads": 48, "num_key_value_heads": 4}
ONE_HEAD = {"num_key_value_heads": 1}
SMALL = {"block_size": 16}
DRAFTS, TWO_RANKS = {**SMALL, "speculative_config": NGRAM}, {**SMALL, "tensor_parallel_size": 2}

# In float32, the rule's state of GATED_DELTA has 4 heads x 16 x 8 x 4 = 2,048 bytes, the
# convolution's 3 tokens x 96 channels x 4 = 1,152; K and V of a token 2 x 2 heads x 16 x 4 = 256.
CASES = {  # the model's config, settings; tokens of a block, parts, bytes of a token, exact
    "as asked for": ({}, SMALL, 16, [1152, 2048], 256, True),
    "by default": ({}, {}, 128, [1152, 2048], 256, False),
    "grown": ({"linear_value_head_dim": 16}, SMALL, 32, [1536, 4096], 256, True),
    "not filled": ({"linear_value_head_dim": 12}, SMALL, 32, [1344, 3072], 256, False),
    "drafts": ({}, DRAFTS, 32, [2304, 2048], 256, False),
    "two ranks": ({}, TWO_RANKS, 16, [576, 1024], 128, True),
    "one head of K and V": (ONE_HEAD, SMALL, 32, [1152, 2048], 128, True),
    "a head that two ranks have twice": (ONE_HEAD, TWO_RANKS, 16, [576, 1024], 128, True),
    "Qwen3-Next": (NEXT, BF16, 1024, [49152, 1048576], 2048, True),
    "Qwen3.5": (NEWER, BF16, 768, [61440, 1572864], 4096, True),
}


@pytest.mark.parametrize("case", CASES)
def test_a_block_has_room_for_a_state_in_its_halves(tmp_path, case):
    config, settings, tokens, parts, of_token, exact = CASES[case]
    family = "Qwen3Next" if case == "Qwen3-Next" else "Qwen3_5"
    model = make_model(tmp_path, family, **{**TWO_LAYERS, **config})
    engine = engine_config(model, **settings)
    page = find_state_page(engine)
    asked = settings.get("block_size", 128)
    assert page == RecurrentStatePage(asked, tokens, of_token, parts)
    assert page.page_bytes == tokens * of_token
    assert page.is_exact == exact
    assert max(parts) * 2 <= page.page_bytes
    assert tokens == asked or (tokens - asked) * of_token < max(parts) * 2, "the smallest multiple"
    current_platform._align_hybrid_block_size(engine, None)
    cache = engine.cache_config
    assert (cache.block_size, cache.mamba_page_size_padded) == (tokens, page.page_bytes)


def test_a_model_without_states_has_no_such_blocks(tmp_path):
    assert find_state_page(engine_config(make_model(tmp_path))) is None


WORDS = {
    (16, 16): "a recurrent state of 3,200 bytes in a block of 16 tokens (4,096 bytes; half a block "
    "holds the rule's 2,048 bytes)",
    (5, 20): "a recurrent state of 3,200 bytes in a block of 20 tokens (5,120 bytes; asked for: 5; "
    "half a block holds the rule's 2,048 bytes)",
}


@pytest.mark.parametrize(("asked", "tokens"), WORDS)
def test_the_line_says_what_blocks_hold_and_why(asked, tokens):
    assert RecurrentStatePage(asked, tokens, 256, [1152, 2048]).describe() == WORDS[asked, tokens]


def test_the_line_names_the_larger_part():
    """With drafts the convolution keeps more tokens."""
    said = RecurrentStatePage(16, 32, 256, [2304, 2048]).describe()
    assert said.endswith("half a block holds the convolution's 2,304 bytes)")


def test_start_up_says_what_the_guide_shows(tmp_path, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(platform.logger, "info_once", lambda text, *args: said.append(text % args))
    engine_config(make_model(tmp_path, "Qwen3_5", **TWO_LAYERS), block_size=16)
    (line,) = [line for line in said[-1].splitlines() if line.startswith("  states ")]
    assert line.strip() in GUIDE.read_text().splitlines()
    assert line.endswith(WORDS[16, 16])
