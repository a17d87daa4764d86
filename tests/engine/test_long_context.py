"""Prompts of up to 128k tokens in chunks: memory follows no square, no dense mask is made."""

import re

import pytest

from benchmarks.long_context import held_bytes, model_for, prompt_of, settings_for
from tests.helpers.engine import generate, greedy, runner_of
from tests.helpers.long_context import check_bound, expected_tokens
from tests.helpers.v2 import ALSO_V2, engine_of
from vllm_npu_prep import worker
from vllm_npu_prep.attention.mask_cache import MaskCache

BUDGET, TOKENS = 2048, 6


@pytest.mark.parametrize("runner_name", ALSO_V2)
@pytest.mark.parametrize(
    ("longest", "others"),
    [(16384, ()), (131072, ()), (16384, (8192, 16384, 4096, 12288))],
    ids=["16384", "131072", "16384-after-others"],
)
def test_memory_keeps_the_bound_that_start_up_states(
    tmp_path, monkeypatch, longest, others, runner_name
):
    """Resident pages, with those of the KV cache that are taken on their first use.

    What other prompts leave behind is returned: objects of Python stay, and no holes of the heap.
    """
    model = model_for(tmp_path / "model", longest, head_size=16)
    monkeypatch.setattr(MaskCache, "_matrix", None)  # whoever makes a dense mask fails
    said: list[str] = []  # vLLM's first engine configures loggers anew, without those of pytest
    monkeypatch.setattr(worker.logger, "info", lambda text, *args: said.append(text % args))
    with engine_of(runner_name, model, **settings_for(longest, BUDGET, "float32")) as llm:
        (stated,) = re.findall(r"a step takes at most ([\d,]+) MiB", "\n".join(said))
        step_bytes = llm.llm_engine.model_executor.driver_worker.worker.step_bytes
        assert int(stated.replace(",", "")) == -(-step_bytes // (1 << 20))
        generate(llm, [prompt_of(BUDGET)], greedy(2))
        in_use = llm.llm_engine.model_executor.driver_worker.worker.prep_device.memory_in_use
        before = in_use()
        for other in others:
            generate(llm, [prompt_of(other)], greedy(2))
        generate(llm, [prompt_of(BUDGET)], greedy(2))  # ends of requests are told by a step
        if others:
            assert in_use() - before - held_bytes(runner_of(llm)) < 32 << 20
        row = check_bound(llm, longest)
    assert row["got"] == expected_tokens(model, longest)


def test_a_prompt_of_sparse_attention_keeps_the_bound(tmp_path):
    """Scores of all positions are computed piece by piece."""
    longest = 65536
    model = model_for(tmp_path / "model", longest, is_sparse=True)
    with engine_of("V2", model, **settings_for(longest, BUDGET, "float32")) as llm:
        generate(llm, [prompt_of(BUDGET)], greedy(2))
        check_bound(llm, longest)
