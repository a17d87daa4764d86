"""Several KV-cache groups: windows beside full attention, layers that share K and V.

Groups overlay each other in one region of bytes; `Poison` spoils what nobody may read.
"""

import pytest

from tests.conftest import SEED
from tests.helpers.engine import REPLAYED, generate, graphs, greedy, make_model, runner_of
from tests.helpers.huggingface import is_varied, reference
from tests.helpers.prompts import prompts_of
from tests.helpers.v2 import ALSO_V2, engine_of, on_both
from tests.helpers.watch import count_preemptions, count_states
from tests.helpers.windows import SHARED_LAYERS, THREE_GROUPS, WINDOW, Poison


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("gemma3"), "Gemma3", **THREE_GROUPS)


@pytest.fixture(scope="module")
def mixed(model):
    """Prompts, some with a prefix in common, and what transformers makes of them."""
    first, *others = prompts_of(SEED, [70, 5, 30, 12, 14, 40, 1])
    prompts = [first, first[:61], first[:48] + others[0], *others]
    expected = reference(model, prompts, 24)
    assert is_varied(expected)
    return prompts, expected


@pytest.mark.parametrize(
    ("mask", "asynchronous", "mode", "runner_name"),
    on_both(
        {
            "dense-False-None": ("dense", False, None),
            "compressed-True-None": ("compressed", True, None),
            "compressed-False-FULL": ("compressed", False, "FULL"),
            "compressed-True-FULL_AND_PIECEWISE": ("compressed", True, "FULL_AND_PIECEWISE"),
        }
    ),
)
def test_three_groups_never_read_outside_of_their_windows(
    model, mixed, mask, asynchronous, mode, runner_name
):
    """Chunks, a prefix cache, preemption: freed blocks and null blocks hold NaN all the time."""
    prompts, expected = mixed
    with engine_of(
        runner_name,
        model,
        max_num_batched_tokens=32,
        block_size=4,
        num_gpu_blocks_override=76,
        max_model_len=96,
        async_scheduling=asynchronous,
        additional_config={"npu_prep": {"mask": mask}},
        **(graphs(mode, 1, 2, 4, 8, 16) if mode else {}),
    ) as llm:
        runner = runner_of(llm)
        windows = [builder.sliding_window for _, builder, _ in runner.preparer.builders]
        poison, preempted, states = Poison(llm), count_preemptions(llm), count_states(llm)
        got = [generate(llm, prompts[:1], greedy(2)), generate(llm, prompts, greedy(24))]
        counts = runner.padding.counts.by_kind
    assert got == [[expected[0][:2]], expected]
    assert windows == [WINDOW, WINDOW, None]
    assert {"PrefillNoCache", "ChunkedPrefill"} <= set(states)
    assert ("DecodeOnly" in states) == (mode != "FULL")
    assert preempted["preempted"] > 0
    assert poison.left_behind > poison.null_blocks > 0
    assert set(counts) >= REPLAYED.get(mode, set())


@pytest.mark.parametrize("runner_name", ALSO_V2)
def test_windows_in_one_group_with_full_attention(model, mixed, runner_name):
    """Without the hybrid manager, or beside a KV connector, all layers have one block table."""
    prompts, expected = mixed
    with engine_of(
        runner_name,
        model,
        max_num_batched_tokens=32,
        block_size=16,
        disable_hybrid_kv_cache_manager=True,
    ) as llm:
        runner = runner_of(llm)
        assert len(runner.kv_cache_config.kv_cache_groups) == 1
        windows = [builder.sliding_window for _, builder, _ in runner.preparer.builders]
        assert windows == [WINDOW, None]
        Poison(llm)
        assert generate(llm, prompts, greedy(24)) == expected


@pytest.mark.parametrize("runner_name", ALSO_V2)
@pytest.mark.parametrize("mode", [None, "FULL"])
def test_layers_that_share_k_and_v(tmp_path_factory, seed, mode, runner_name):
    """Gemma 3n: the last layers read what the last ones of their kind before them have cached."""
    model = make_model(tmp_path_factory.mktemp("gemma3n"), "Gemma3n", **SHARED_LAYERS)
    prompts = prompts_of(seed, [5, 70, 30, 12, 14, 40])
    with engine_of(
        runner_name,
        model,
        block_size=4,
        max_num_batched_tokens=32,
        additional_config={"npu_prep": {"mask": "compressed" if mode else "dense"}},
        **(graphs(mode, 4, 8) if mode else {}),
    ) as llm:
        runner = runner_of(llm)
        layers = runner.compilation_config.static_forward_context
        places = [layer.kv_cache.data_ptr() for layer in layers.values()]
        targets = [layer.kv_sharing_target_layer_name for layer in layers.values()]
        poison = Poison(llm)
        got = generate(llm, prompts, greedy(24))
    expected = reference(model, prompts, 24)
    assert got == expected
    assert is_varied(expected)
    assert [target is not None for target in targets] == [False, False, True, True]
    assert places[:2] == places[2:]
    assert poison.left_behind > 0
