"""int4 models with adapters and with heads that draft, and int8 experts with adapters: tokens are
those of rounded weights."""

import pytest
from vllm.lora.request import LoRARequest

from tests.helpers.drafters import make_eagle_head
from tests.helpers.engine import generate, graphs, greedy, make_model
from tests.helpers.huggingface import greedy_tokens, is_varied
from tests.helpers.lora import ATTENTION, MLP, add_to_products, make_adapter
from tests.helpers.mixtures import MIXTURES
from tests.helpers.prompts import prompts_of
from tests.helpers.quantized import QUANTIZE, rounded_model
from tests.helpers.v2 import engine_of
from tests.helpers.watch import count_verified

GROUPS = {"form": "compressed-tensors", "scheme": "W4A16", "group": 32}
W4A8 = {"form": "modelslim", "scheme": "W4A8", "group": 32}
W8A8 = {"form": "modelslim"}
AWQ = {"form": "awq", "scheme": "W4A16_ASYM", "group": 32}
SETTINGS = {"max_num_batched_tokens": 48, "block_size": 16, **graphs("FULL_DECODE_ONLY", 1, 4, 8)}


@pytest.mark.parametrize(
    ("how", "family", "runner"),
    [
        pytest.param(W4A8, "Qwen3", "V2", id="W4A8-V2"),
        pytest.param(GROUPS, "Qwen3", "V2", id="W4A16-V2"),
        pytest.param(AWQ, "Qwen3", "V1", id="AWQ-V1"),
        pytest.param(W8A8, "Qwen3Moe", "V2", id="experts-W8A8-V2"),
        pytest.param(GROUPS, "Qwen3Moe", "V1", id="experts-W4A16-V1"),
        pytest.param(W4A8, "Qwen3Moe", "V2", id="experts-W4A8-V2"),
    ],
)
def test_adapters_multiply_inputs_that_are_not_rounded(tmp_path, seed, how, family, runner):
    """Beside rows without an adapter, in graphs; of experts, too."""
    model = make_model(tmp_path / "float", family, **MIXTURES.get(family, {}))
    QUANTIZE(model, tmp_path / "int4", **how)
    folder = make_adapter(tmp_path / "adapter", model, seed=seed, modules=ATTENTION + MLP)
    adapter, prompts = LoRARequest("adapter", 1, str(folder)), prompts_of(seed, [3, 60, 17, 5])
    network = rounded_model(model, tmp_path / "int4")
    plain = greedy_tokens(network, prompts, 12)
    add_to_products(network, folder)
    expected = [*plain[:2], *greedy_tokens(network, prompts[2:], 12)]
    with engine_of(runner, tmp_path / "int4", enable_lora=True, max_lora_rank=8, **SETTINGS) as llm:
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            greedy(12),
            lora_request=[None, None, adapter, adapter],
            use_tqdm=False,
        )
    assert [[*output.outputs[0].token_ids] for output in outputs] == expected
    assert plain[2] != expected[2] and plain[3] != expected[3]
    assert is_varied(expected)


@pytest.mark.parametrize(
    ("how", "method", "runner"),
    [
        pytest.param(GROUPS, "eagle3", "V2", id="W4A16-eagle3-V2"),
        pytest.param(W4A8, "eagle3", "V1", id="W4A8-eagle3-V1"),
        pytest.param(AWQ, "eagle", "V2", id="AWQ-eagle-V2"),
    ],
)
def test_float_heads_draft_for_int4_models(tmp_path, seed, how, method, runner):
    model = make_model(tmp_path / "float", "Qwen3", embedding_scale=20)
    QUANTIZE(model, tmp_path / "int4", **how)
    head = make_eagle_head(tmp_path / "head", model, method)
    drafts = {"method": method, "model": str(head), "num_speculative_tokens": 3}
    prompts = prompts_of(seed, [3, 60, 17, 5])
    expected = greedy_tokens(rounded_model(model, tmp_path / "int4"), prompts, 12)
    with engine_of(runner, tmp_path / "int4", speculative_config=drafts, **SETTINGS) as llm:
        verified = count_verified(llm)
        assert generate(llm, prompts, greedy(12)) == expected
    assert verified.keys() >= {"rejected", "partly"}
    assert is_varied(expected)
