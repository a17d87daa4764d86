"""Experts that move among ranks while an engine serves: its tokens stay those of transformers."""

import asyncio
from functools import partial

import pytest
from vllm.v1.engine.exceptions import EngineDeadError

from tests.helpers.engine import graphs, make_model
from tests.helpers.eplb import assert_weights_follow_the_map, exchanged, moving
from tests.helpers.huggingface import greedy_tokens, is_varied, reference
from tests.helpers.latent import LATENT, V3_EXPERTS
from tests.helpers.prompts import prompts_of
from tests.helpers.quantized import QUANTIZE, quantize_to_bytes, rounded_model
from tests.helpers.ranks import Ranks, serve_on_ranks
from tests.helpers.v2 import asked_for
from vllm_npu_prep.inspect.explain import expert_table, explain_json, summary
from vllm_npu_prep.inspect.view import view_of_record

NUM_TOKENS = 12
INTERVAL = 6
MIXTRAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
DEEPSEEK = {"q_lora_rank": 20, **LATENT, **V3_EXPERTS}
TP2, DP2 = {"tensor_parallel_size": 2}, {"data_parallel_size": 2}
GRAPHS = graphs("FULL_AND_PIECEWISE", 1, 4, 8, 16)
AT_ONCE = {"use_async": False}
CASES = {  # settings, settings of the exchange, a model's family, its config, the runner
    "ranks": (TP2 | GRAPHS, {}, "Mixtral", MIXTRAL, "V2"),
    "ranks, V1": (TP2 | GRAPHS, {}, "Mixtral", MIXTRAL, "V1"),
    "ranks, at once": (TP2, AT_ONCE, "Mixtral", MIXTRAL, "V2"),
    "ranks, at once, V1": (TP2, AT_ONCE, "Mixtral", MIXTRAL, "V1"),
    "ranks, in batches": (TP2, {"enable_migration_batching": True}, "Mixtral", MIXTRAL, "V2"),
    "ranks, latent": (TP2 | GRAPHS, {}, "DeepseekV3", DEEPSEEK, "V2"),
    "engines": (DP2 | GRAPHS, {}, "Mixtral", MIXTRAL, "V2"),
    "engines, V1": (DP2, {}, "Mixtral", MIXTRAL, "V1"),
    "engines, at once": (DP2, AT_ONCE, "Mixtral", MIXTRAL, "V2"),
    "engines of ranks": (DP2 | TP2, {"num_redundant_experts": 4}, "Mixtral", MIXTRAL, "V2"),
}


@pytest.mark.parametrize("name", CASES)
def test_no_token_is_wrong_before_and_after_exchanges(tmp_path, seed, name):
    """Experts move every few steps, all at once or a layer at a time in a thread."""
    settings, exchange, family, config, runner = CASES[name]
    prompts = prompts_of(seed, [3, 1, 90, 40, 17])
    model = make_model(tmp_path, family, **config)
    with asked_for(runner):
        traffic = partial(exchanged, prompts=prompts, num_tokens=NUM_TOKENS)
        got = serve_on_ranks(model, settings | moving(INTERVAL, **exchange), traffic)
    expected = reference(model, prompts, NUM_TOKENS)
    assert is_varied(expected)
    assert got["tokens"] == [expected] * 3
    assert_weights_follow_the_map(got["experts"])


QUANTISED = {
    "W8A8": partial(QUANTIZE, form="compressed-tensors"),
    "W8A8, ModelSlim": partial(QUANTIZE, form="modelslim"),
    "W4A8": partial(quantize_to_bytes, group=32),
    "W4A16": partial(QUANTIZE, form="compressed-tensors", scheme="W4A16", group=32),
}


@pytest.mark.parametrize("name", QUANTISED)
def test_scales_move_with_their_weights(tmp_path, seed, name):
    """Whatever the form of quantised experts, tokens are those of their weights in transformers."""
    prompts = prompts_of(seed, [3, 1, 90, 40, 17])
    sizes = {"hidden_size": 64, "intermediate_size": 64}
    model = make_model(tmp_path / "model", "Mixtral", **MIXTRAL, **sizes)
    QUANTISED[name](model, tmp_path / "quantised")
    with asked_for("V2"):
        traffic = partial(exchanged, prompts=prompts, num_tokens=NUM_TOKENS)
        got = serve_on_ranks(tmp_path / "quantised", TP2 | moving(INTERVAL), traffic)
    judge = rounded_model(model, tmp_path / "quantised", 2)
    assert got["tokens"] == [greedy_tokens(judge, prompts, NUM_TOKENS)] * 3
    assert_weights_follow_the_map(got["experts"])


async def counted(ranks: Ranks, prompts: list[list[int]]) -> dict[str, list]:
    await ranks.ask("probe_watch")
    await ranks.generate(prompts[:3], NUM_TOKENS, engine=0)
    await ranks.generate(prompts[3:], NUM_TOKENS, engine=1)
    return {name: await ranks.ask(f"probe_{name}") for name in ("noted", "experts")}


@pytest.mark.parametrize("runner", ["V1", "V2"])
def test_load_is_each_token_of_all_ranks_once(tmp_path, seed, runner):
    """Two engines of unequal work; a rank counts in its own steps what it sees of the other's."""
    prompts = prompts_of(seed, [140, 3, 60, 17, 25])
    model = make_model(tmp_path, "Mixtral", **MIXTRAL)
    with asked_for(runner):
        traffic = partial(counted, prompts=prompts)
        got = serve_on_ranks(model, DP2 | moving(400), traffic)
    for noted, experts in zip(got["noted"], got["experts"], strict=True):
        pairs = sum(step["num_pairs"] for step in noted if not step["is_dummy"])
        assert [sum(of_layer) for of_layer in experts["load"]] == [pairs] * len(experts["load"])
        assert pairs > 100


def test_a_record_shows_where_experts_are_and_their_load(tmp_path, seed):
    """Its steps stand before and after exchanges; `explain` tells the busiest rank, and a map."""
    model = make_model(tmp_path / "model", "Mixtral", **MIXTRAL)
    record = {"dir": str(tmp_path / "steps"), "steps": "0:40"}
    settings = TP2 | moving(INTERVAL) | {"additional_config": {"npu_prep": {"record": record}}}
    with asked_for("V2"):
        traffic = partial(exchanged, prompts=prompts_of(seed, [30, 17]), num_tokens=NUM_TOKENS)
        got = serve_on_ranks(model, settings, traffic)
    looks = [[rank["map"] for rank in look] for look in got["experts"]]
    for rank in range(2):
        (folder,) = (tmp_path / "steps").glob(f"*-rank{rank}")
        views = [view_of_record(path) for path in sorted(folder.glob("step-*.npz"))]
        shown = [explain_json(view)["experts"] for view in views]
        assert {(each["rank"], each["num_ranks"]) for each in shown} == {(rank, 2)}
        assert shown[0]["placed"] == looks[0][rank] != shown[-1]["placed"]
        assert all(look[rank] in [each["placed"] for each in shown] for look in looks[:-1])
        table = expert_table(views[-1], None)
        assert [row[1] for row in table.rows] == [
            " ".join(map(str, row[3 * rank :][:3])) for row in shown[-1]["placed"]
        ]
        assert "4 in 6 places on 2 ranks" in dict(summary(views[-1]))["experts"]


async def ended(ranks: Ranks, how: str) -> str:
    await ranks.ask("probe_end_in_exchange", how)
    with pytest.raises(EngineDeadError) as error:
        await asyncio.wait_for(ranks.generate([[1, 2, 3]] * 3, 200), 60)
    return type(error.value).__name__


ENDS = {
    "dies": ("dies", {}),
    "dies, at once": ("dies", AT_ONCE),
    "fails": ("fails", {}),
}


@pytest.mark.parametrize("name", ENDS)
def test_a_rank_that_ends_in_an_exchange_ends_the_engine(tmp_path, name):
    """The other rank, which waits for its experts, ends too, and requests get an error."""
    how, exchange = ENDS[name]
    model = make_model(tmp_path, "Mixtral", **MIXTRAL)
    with asked_for("V2"):
        said = serve_on_ranks(model, TP2 | moving(6, **exchange), partial(ended, how=how))
    assert said == "EngineDeadError"
