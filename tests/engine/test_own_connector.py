"""What a connector of one's own is told, such as MooncakeConnector, which is not tested itself."""

from typing import Any

import pytest

from tests.engine.test_kv_transfer import count_tokens
from tests.helpers import own_connector
from tests.helpers.engine import generate, greedy, make_model, runner_of
from tests.helpers.huggingface import is_varied, reference
from tests.helpers.latent import LATENT, V3_EXPERTS
from tests.helpers.prompts import prompts_of
from tests.helpers.v2 import RUNNERS, engine_of
from tests.helpers.watch import count_batched

BLOCK_SIZE, LENGTHS = 4, [90, 33, 3, 71]


MODELS = {
    "K and V": {},
    "latent": {"family": "DeepseekV3", "q_lora_rank": 20, **LATENT, **V3_EXPERTS},
}


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("name", MODELS)
def test_a_connector_is_told_of_planes_layers_blocks_and_ends(tmp_path, seed, name, runner):
    """Prompts in chunks are sent, then pulled beside other requests; tokens are transformers'."""
    model, prompts = make_model(tmp_path / "model", **MODELS[name]), prompts_of(seed, LENGTHS)
    expected = reference(model, prompts, 8)
    assert is_varied(expected)
    with engine_of(runner, model, **pulling(BLOCK_SIZE)) as llm:
        check_calls(llm, prompts, expected, BLOCK_SIZE)


def pulling(block_size: int, **options: Any) -> dict[str, Any]:
    """Settings of an engine whose connector notes every call."""
    own_connector.CALLS.clear()
    own_connector.SENT.clear()
    return {
        "block_size": block_size,
        "additional_config": {"npu_prep": {"check": "full", **options}},
        "kv_transfer_config": {
            "kv_connector": "PullingConnector",
            "kv_connector_module_path": "tests.helpers.own_connector",
            "kv_role": "kv_both",
        },
    }


def check_calls(
    llm: Any, prompts: list[list[int]], expected: list[list[int]] | None, block_size: int
) -> None:
    """Let an engine compute prompts, which are sent, and pull them; look at every call.

    Of each prompt 8 tokens are known. Without these, what is pulled has to do as the engine's own
    prefix cache does: 16 bits may round otherwise than in a whole prompt.
    """
    layers = runner_of(llm).compilation_config.static_forward_context
    planes = {
        name: layer.kv_cache.data_ptr()
        for name, layer in layers.items()
        if hasattr(layer, "kv_cache")
    }
    batched = count_batched(llm)
    whole = generate(llm, prompts, greedy(8))
    assert batched["taken"] > len(prompts)
    again = generate(llm, prompts, greedy(8)) if expected is None else expected
    assert whole == (expected or whole)
    assert generate(llm, [prompts[2]], greedy(1)) == [whole[2][:1]]  # the last is sent, too
    assert len(own_connector.SENT) == len(prompts) - 1, "3 tokens are no block"
    assert llm.reset_prefix_cache()
    computed, before = count_tokens(llm), len(own_connector.CALLS)
    assert generate(llm, prompts, greedy(8)) == again
    left = [length - (length - 1) // block_size * block_size for length in LENGTHS]
    assert computed["scheduled"] == sum(left) + 7 * len(LENGTHS)
    (first, *calls) = own_connector.CALLS
    assert first == ("register", planes)

    # Of each step with a forward pass: a wait before each layer and a save after it, in order.
    by_layer = [call for call in calls if call[0] in ("wait", "save")]
    turn = [each for name in planes for each in (("wait", name), ("save", name, planes[name]))]
    steps, rest = divmod(len(by_layer), len(turn))
    assert steps > 8 and not rest and by_layer == turn * steps

    # A step ends with its saves and with who is done; loads come after the forward pass then,
    # since nobody in it waits for them.
    ends = [call for call in calls if call[0] in ("load", "saved", "done")]
    assert [call[0] for call in ends] == ["load", "saved", "done"] * (len(ends) // 3)

    # Blocks are pulled once they are allocated, and the request is done receiving after that.
    pulled = own_connector.CALLS[before:]
    for index, call in enumerate(pulled):
        if call[0] == "allocated":
            later = pulled[index:]
            load = next(i for i, c in enumerate(later) if c[0] == "load" and call[1] in c[1])
            done = next(i for i, c in enumerate(later) if c[0] == "done" and call[1] in c[2])
            assert load < done
    assert sum(call[0] == "allocated" for call in pulled) == len(prompts) - 1
    sent = [req_id for call in calls if call[0] == "done" for req_id in call[1]]
    assert sent == [call[1] for call in calls if call[0] == "finished"]
    blocks = [call[2] for call in calls if call[0] == "finished"]
    counts = sorted((length - 1) // block_size for length in LENGTHS if length > block_size)
    assert sorted(map(len, blocks)) == counts
