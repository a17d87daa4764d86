"""Random requests through a real engine, the same for every engine of the same settings."""

from collections import Counter
from typing import Any

import numpy as np

from tests.helpers.engine import greedy
from tests.helpers.watch import count_preemptions


def traffic(
    llm: Any, seed: int, steps: int, longest_prompt: int = 50
) -> tuple[list[list[int]], Counter]:
    """Tokens of random requests that come while others run; and what happened to them."""
    core = llm.llm_engine
    scheduler = core.engine_core.engine_core.scheduler
    rng, tokens, count = np.random.default_rng(seed), {}, count_preemptions(llm)
    while count["steps"] < steps or core.has_unfinished_requests():
        if count["steps"] < steps and rng.random() < 0.25 and len(scheduler.requests) < 12:
            prompt = rng.integers(2, 512, rng.integers(1, longest_prompt)).tolist()
            params = greedy(int(rng.integers(1, 30)))
            core.add_request(str(count["arrived"]), {"prompt_token_ids": prompt}, params)
            count["arrived"] += 1
        for output in core.step():
            if output.finished:
                tokens[int(output.request_id)] = list(output.outputs[0].token_ids)
        count["steps"] += 1
    return [tokens[key] for key in sorted(tokens)], count
