"""Requests that end while their step runs, in a KV cache that is too small for all of them."""

from collections import Counter

import numpy as np
import pytest
from vllm.lora.request import LoRARequest

from tests.conftest import SEED
from tests.helpers.engine import generate, greedy, make_model, runner_of
from tests.helpers.lora import make_adapter
from tests.helpers.prompts import prompts_of
from tests.helpers.v2 import RUNNERS, engine_of
from tests.helpers.watch import count_preemptions

LENGTHS = [30, 28, 5, 41, 22, 29, 17, 33, 9, 38]
TOKENS = 24


NUMBER = 300


@pytest.mark.parametrize("runner_name", RUNNERS)
def test_nothing_is_kept_of_requests_that_abort(tmp_path, runner_name):
    """A third of many, adapters among them, under memory for some; others get their tokens.

    Afterwards all blocks are free, and no adapter is in use.
    """
    rng, count = np.random.default_rng(SEED), Counter()
    model = make_model(tmp_path / "model", num_hidden_layers=1)
    adapters = [None] + [
        LoRARequest(f"adapter {n}", n, str(make_adapter(tmp_path / f"{n}", model, seed=n)))
        for n in (1, 2, 3)
    ]
    prompts = prompts_of(SEED, LENGTHS)
    kinds = [(prompt, adapter) for prompt in range(len(prompts)) for adapter in range(4)]
    with engine_of(
        runner_name,
        model,
        block_size=8,
        num_gpu_blocks_override=70,
        max_model_len=64,
        max_num_seqs=32,
        max_num_batched_tokens=256,
        enable_lora=True,
        max_loras=2,
        max_cpu_loras=3,
        max_lora_rank=8,
    ) as llm:
        core, runner = llm.llm_engine, runner_of(llm)
        scheduler = core.engine_core.engine_core.scheduler
        pool, preempted = scheduler.kv_cache_manager.block_pool, count_preemptions(llm)
        free = pool.get_num_free_blocks()
        expected = generate(
            llm, [prompts[p] for p, _ in kinds], greedy(8), [adapters[a] for _, a in kinds]
        )
        assert len(set(map(tuple, expected))) > len(kinds) / 2, "adapters change tokens"
        alive: dict[str, int] = {}
        while count["added"] < NUMBER or core.has_unfinished_requests():
            while count["added"] < NUMBER and len(alive) < 60:
                name, kind = f"r{count['added']}", int(rng.integers(len(kinds)))
                prompt, adapter = kinds[kind]
                params = greedy(int(rng.integers(1, 9)))
                given = {"prompt_token_ids": prompts[prompt]}
                core.add_request(name, given, params, lora_request=adapters[adapter])
                alive[name] = kind
                count["added"] += 1
            # Each of those that are there is as likely, in whatever state it is
            goal = count["added"] // 3
            while alive and count["aborted"] < goal and rng.random() < 0.8:
                name = list(alive)[int(rng.integers(len(alive)))]
                core.abort_request([name])
                del alive[name]
                count["aborted"] += 1
            for output in core.step():
                if output.request_id in alive:
                    kind, got = alive[output.request_id], list(output.outputs[0].token_ids)
                    assert got == expected[kind][: len(got)], (output.request_id, kinds[kind])
                    if output.finished:
                        del alive[output.request_id]
                        count["finished"] += 1
        assert count["finished"] + count["aborted"] == NUMBER
        assert count["aborted"] > 0.3 * NUMBER
        assert preempted["preempted"] > 0
        assert pool.get_num_free_blocks() == free
        assert not scheduler.requests and not scheduler.running and not scheduler.waiting
        assert not core.output_processor.request_states
        assert not core.output_processor.lora_states.requests
        generate(llm, [prompts[0]], greedy(2))  # a step tells the runner who has finished
        assert len(runner.lora_manager.list_adapters()) <= 3
