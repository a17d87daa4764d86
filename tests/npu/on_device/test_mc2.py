"""Experts that exchange tokens by MC2, on engines of several cards: tokens, and which steps do it.

Its operators alone: `tests/emulator/test_exchanges.py`.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.helpers.engine import graphs
from tests.helpers.huggingface import logits_by
from tests.helpers.quantized import QUANTIZE, rounded_model
from tests.helpers.ranks import RankProbe, Ranks, serve_on_ranks
from tests.helpers.v2 import asked_for
from tests.helpers.waiting import LIMIT, until
from tests.npu.inputs import prompts
from tests.npu.models import PARTED, bound_of, judges_of, lacks, make

TP, DP = "tensor_parallel_size", "data_parallel_size"
SHORTEST = 3  # its steps are small, the prompt's, too
GRAPHS = graphs("FULL_AND_PIECEWISE", 4, 16)
SENT = {
    2: {
        "two experts": [9216, 4048],
        "one": [9216, 1936],
        "eight": [9216, 14344],
        "int8": [9216, 11164],
    },
    4: {
        "two experts": [55296, 19536],
        "one": [55296, 10560],
        "eight": [55296, 65208],
        "int8": [55296, 50868],
    },
}
"""Bytes that all ranks send, if tokens are gathered and if they are exchanged."""
LAUNCHES = {"two experts": [9, 7], "one": [10, 9], "eight": [9, 7], "int8": [9, 7]}
"""Launches of a rank: one makes weights of bfloat16 float32 before tokens are exchanged."""
SETTINGS = {
    "block_size": 128,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 4,
    "kv_cache_memory_bytes": 32 << 20,
    "enable_expert_parallel": True,
}


class Case(NamedTuple):
    model: str
    settings: dict[str, Any]
    dtype: str = "bfloat16"
    runner: str = "V2"
    how: dict[str, Any] = {}  # noqa: RUF012
    option: str = "on"


W4A8 = {"form": "compressed-tensors", "scheme": "W4A8", "group": 0}
CASES = {
    "engines": Case("Qwen3Moe", {DP: 2} | GRAPHS, "float16"),
    "engines, V1, eager": Case("Qwen3Moe", {DP: 2}, "float16", "V1"),
    "W8A8": Case("Qwen3Moe", {DP: 2} | GRAPHS, "float16", how={"form": "modelslim"}),
    "W4A8": Case("Qwen3Moe", {DP: 2}, "float16", how=W4A8),
    "latent": Case("DeepSeek V3", {DP: 2} | GRAPHS),
    "engines of ranks": Case("DeepSeek V3", {DP: 2, TP: 2} | GRAPHS),
    "four engines": Case("DeepSeek V3", {DP: 4} | GRAPHS),
    "A3": Case("Qwen3Moe of 1024", {DP: 2} | GRAPHS, "float16", option="auto"),
}


@pytest.mark.parametrize("count", [2, 4])
def test_a_layer_takes_fewer_launches_and_bytes(count):
    """With K experts of a token on N ranks, a gather sends it to N - 1 ranks, an exchange to K.

    Gathers also send logits. Rank 1 has no token, which gathers send all the same. With one expert
    for each token, whose weight is applied to its input, the rows are the same, too. A rank that
    waits for another one to join the group does its work meanwhile.
    """
    command = [sys.executable, "-m", "tests.npu.layer_on_ranks", str(count)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    ranks = json.loads(done.stdout.splitlines()[-1])
    sent = {}
    for kind, launches in LAUNCHES.items():
        for rank, told in enumerate(ranks):
            gathered, exchanged = (np.array(way["rows"]) for way in told[kind])
            assert len(gathered) == (0 if rank == 1 else 13)
            np.testing.assert_allclose(exchanged, gathered, rtol=0.02, atol=0.02)
            assert [way["launches"] for way in told[kind]] == launches
        sent[kind] = [sum(told[kind][way]["bytes"] for told in ranks) for way in range(2)]
    assert sent == SENT[count]


class ExchangeProbe(RankProbe):
    """Counts layers of experts that exchange tokens, and those that get gathered ones."""

    def probe_experts(self) -> None:
        from vllm_npu_prep.ops import moe_method

        self.probe_computed = {"exchanged": 0, "gathered": 0}
        for name, kind in (("compute_on_ranks", "exchanged"), ("compute_experts", "gathered")):
            compute = getattr(moe_method, name)

            def counted(*args: Any, compute: Any = compute, kind: str = kind, **how: Any) -> Any:
                self.probe_computed[kind] += 1
                return compute(*args, **how)

            setattr(moe_method, name, counted)

    def probe_exchange(self) -> dict[str, Any]:
        from vllm.distributed.parallel_state import get_ep_group

        mc2 = get_ep_group().device_communicator.mc2
        return {"max_tokens": mc2 and mc2.max_tokens, **getattr(self, "probe_computed", {})}

    def probe_write_to(self, folder: str) -> int:
        """Log to a file in the folder from now on, and return the id of the rank's process."""
        path = Path(folder) / f"rank-{self.parallel_config.data_parallel_rank}.log"
        with path.open("w") as file:
            for stream in (1, 2):
                os.dup2(file.fileno(), stream)
        return os.getpid()

    def probe_gather(self) -> None:
        """From now on, tokens are gathered in all steps, as with the option "off"."""
        from vllm.distributed.parallel_state import get_ep_group

        get_ep_group().device_communicator.mc2 = None


async def traffic(ranks: Ranks) -> dict[str, Any]:
    """Tokens of all prompts, and of the shortest alone while other engines are idle.

    Where there are no graphs, which exchange tokens for good, also once more by gathers.
    """
    alone = [prompts()[SHORTEST]]
    got = {"tokens": await ranks.generate(prompts(), 12)}
    await ranks.ask("probe_experts")
    got["alone"] = await ranks.generate(alone, 8, engine=0)
    # Engines compute without requests, too, for some steps.
    await until(lambda: not ranks.llm.engine_core.dp_engines_running())
    got["exchange"] = await ranks.ask("probe_exchange")
    if ranks.llm.model_config.enforce_eager:
        await ranks.ask("probe_gather")  # all ranks change between the same two steps
        got["gathered"] = await ranks.generate(alone, 8, engine=0)
        got["computed"] = await ranks.ask("probe_exchange")
    return got


def serve(model, case, traffic=traffic):
    settings = {**SETTINGS, **case.settings, "dtype": case.dtype}
    settings["worker_extension_cls"] = f"{__name__}.ExchangeProbe"
    settings["additional_config"] = {"npu_prep": {"check": "cheap", "mc2": case.option}}
    with asked_for(case.runner):
        return serve_on_ranks(model, settings, traffic)


@pytest.mark.parametrize("name", CASES)
def test_tokens_are_the_best_by_transformers(tmp_path, name):
    """In steps that exchange tokens or gather them, and beside engines without requests."""
    case = CASES[name]
    model = made = make(tmp_path, case.model)
    if case.how:
        made = tmp_path / "quantised"
        QUANTIZE(model, made, **case.how)
    got = serve(made, case)
    asked = 16 if "compilation_config" in case.settings else SETTINGS["max_num_seqs"]
    parts = case.settings.get(TP, 1)
    assert {told["max_tokens"] for told in got["exchange"]} == {asked // parts}
    assert sum(told["gathered"] for told in got["exchange"]) == 0, got["exchange"]
    if case.how:
        judges = [logits_by(rounded_model(model, made, 2))] * len(prompts())
    else:
        judges = judges_of(model, False)
    judged = zip(judges, prompts(), got["tokens"], strict=True)
    lacking = np.stack([lacks(judge, prompt, row) for judge, prompt, row in judged])
    print(f"{name}: {lacking.max():.3f}, {(lacking > 0).mean():.3f} of tokens")
    assert lacking.max() < bound_of(case.model, case.dtype, bool(case.how)), lacking.round(3)
    assert (lacking > 0).mean() < 1 / PARTED
    assert got["alone"] == [got["tokens"][SHORTEST][:8]]
    if "gathered" in got:
        assert got["gathered"] == got["alone"]
        for on, off in zip(got["exchange"], got["computed"], strict=True):
            assert off["exchanged"] == on["exchanged"] and off["gathered"] > 0


async def loses_a_rank(ranks: Ranks, folder: Path) -> list[str]:
    """How requests to both engines ended, after the second one's worker was killed under them."""
    _, victim = await ranks.ask("probe_write_to", str(folder))
    begun = [asyncio.Event(), asyncio.Event()]

    async def request(engine: int) -> None:
        async for _ in ranks.stream([1, 2, 3], 200, engine):
            begun[engine].set()

    requests = [asyncio.create_task(request(engine)) for engine in range(2)]
    for each in begun:
        await each.wait()
    os.kill(victim, signal.SIGKILL)
    ended = await asyncio.wait_for(asyncio.gather(*requests, return_exceptions=True), 60)
    return [type(each).__name__ for each in ended]


def test_a_rank_that_dies_ends_all_engines_in_one_line(tmp_path):
    """In graphs that exchange tokens: nothing hangs, whether the other rank waits for it in an
    exchange, or where both agree on a step."""
    model = make(tmp_path, "Qwen3Moe")
    ended = serve(model, CASES["engines"], partial(loses_a_rank, folder=tmp_path))
    assert ended == ["EngineDeadError"] * 2
    said = (tmp_path / "rank-0.log").read_text()
    print(said)
    assert "died while it was waited for" in said or "another rank was lost in a step" in said
    assert "Traceback" not in said
