"""An engine with our scheduler and one with vLLM's: the same outputs in the same steps."""

import pytest
from vllm import SamplingParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from tests.conftest import SEED
from tests.helpers.drafters import make_eagle_head
from tests.helpers.engine import make_model
from tests.helpers.prompts import prompts_of
from tests.helpers.v2 import ALSO_V2, engine_of
from tests.helpers.watch import count_preemptions
from vllm_npu_prep.scheduling.outputs import Rows
from vllm_npu_prep.scheduling.scheduler import BatchedAsyncScheduler

LENGTHS = [30, 28, 5, 41, 22, 29, 17, 33, 9, 38]
SCHEDULERS = {"batched": BatchedAsyncScheduler, "upstream": AsyncScheduler}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("qwen3"), spread=0.1, embedding_scale=20)


@pytest.fixture(scope="module")
def speculation(model, tmp_path_factory):
    drafter = make_eagle_head(tmp_path_factory.mktemp("eagle"), model, "eagle")
    return {"method": "eagle", "num_speculative_tokens": 3, "model": str(drafter)}


def sampling(number: int) -> SamplingParams:
    """Of a request: some end by a token, some have log-probabilities, some are seeded."""
    return SamplingParams(
        temperature=0.8 if number % 4 == 1 else 0.0,
        seed=number,
        detokenize=False,
        max_tokens=12 + 3 * number,
        ignore_eos=number % 3 == 0,
        stop_token_ids=list(range(100 * (number % 5), 100 * (number % 5) + 12)),
        logprobs=2 if number % 5 == 2 else None,
    )


def serve(llm) -> tuple[list, int]:
    """Everything that clients are told after each step, and the number of steps."""
    told, steps, core = [], 0, llm.llm_engine
    prompts = prompts_of(SEED, LENGTHS)
    left = list(enumerate(prompts + prompts[:4]))
    while left or core.has_unfinished_requests():
        for number, prompt in [left.pop(0) for _ in range(min(len(left), 2))]:
            core.add_request(str(number), {"prompt_token_ids": prompt}, sampling(number))
        if steps == 9:
            core.abort_request(["3"])
        for output in core.step():
            (each,) = output.outputs
            values = [
                {token: value.logprob for token, value in at.items()} for at in each.logprobs or ()
            ]
            told.append(
                (
                    *(steps, output.request_id, list(each.token_ids), each.finish_reason),
                    *(each.stop_reason, values, output.num_cached_tokens),
                )
            )
        steps += 1
    return told, steps


@pytest.mark.parametrize("runner_name", ALSO_V2)
def test_outputs_of_each_step_equal_those_of_vllm_s_scheduler(
    model, speculation, monkeypatch, runner_name
):
    rows, items = {}, Rows.items

    def counted(self):
        yield from items(self)
        rows["in the loop"] = rows.get("in the loop", 0) + sum(map(len, self.outputs.values()))

    monkeypatch.setattr(Rows, "items", counted)
    told, preempted = {}, {}
    for name, kind in SCHEDULERS.items():
        with engine_of(
            runner_name,
            model,
            block_size=4,
            num_gpu_blocks_override=60,
            max_model_len=96,
            speculative_config=speculation,
            async_scheduling=True,
            additional_config={"npu_prep": {"scheduler": name}},
        ) as llm:
            assert type(llm.llm_engine.engine_core.engine_core.scheduler) is kind
            counts = count_preemptions(llm)
            told[name] = serve(llm)
            preempted[name] = counts["preempted"]
    assert told["batched"] == told["upstream"]
    assert preempted["batched"] == preempted["upstream"] > 0
    assert {reason for _, _, _, reason, *_ in told["upstream"][0]} >= {None, "stop", "length"}
    assert rows["in the loop"] > len(told["batched"][0]) / 2
