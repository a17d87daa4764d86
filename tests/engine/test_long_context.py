"""Prompts of up to 128k tokens in chunks: memory follows no square, no dense mask is made."""

import re
import resource

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.long_context import held_bytes, model_for, prompt_of, settings_for
from tests.helpers.engine import generate, greedy, make_model, runner_of
from tests.helpers.long_context import check_bound, expected_tokens
from tests.helpers.prompts import prompts_of
from tests.helpers.v2 import ALSO_V2, engine_of
from tests.helpers.watch import count_states
from vllm_npu_prep import worker
from vllm_npu_prep.attention.mask_cache import MaskCache

BUDGET, TOKENS = 2048, 6


class LargestTensors(TorchDispatchMode):
    """Notes the bytes of the largest tensors that operators make: of any kind, and of masks."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = self.mask_nbytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not result._is_view():
            self.nbytes = max(self.nbytes, result.nbytes)
            if result.dtype in (torch.bool, torch.int8):
                self.mask_nbytes = max(self.mask_nbytes, result.nbytes)
        return result


@pytest.mark.parametrize("runner_name", ALSO_V2)
@pytest.mark.parametrize("longest", [24576, 32768])
def test_long_prompts_take_no_dense_mask_and_little_memory(
    tmp_path, seed, monkeypatch, longest, runner_name
):
    from transformers import AutoModelForCausalLM

    model = make_model(
        tmp_path / "model",
        num_hidden_layers=1,
        hidden_size=32,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=longest,
    )
    (prompt,) = prompts_of(seed, [longest - TOKENS])
    monkeypatch.setattr(MaskCache, "_matrix", None)  # whoever makes a dense mask fails
    sizes = {"max_model_len": longest, "max_num_batched_tokens": BUDGET, "max_num_seqs": 2}
    with engine_of(runner_name, model, **sizes) as llm:
        states, largest = count_states(llm), LargestTensors()
        execute_model = runner_of(llm).execute_model

        def watched(*args, **kwargs):
            with largest:
                return execute_model(*args, **kwargs)

        monkeypatch.setattr(runner_of(llm), "execute_model", watched)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        (got,) = generate(llm, [prompt], greedy(TOKENS))
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    print("largest", largest.nbytes, "mask", largest.mask_nbytes, "process", grown)
    assert states["ChunkedPrefill"] == longest // BUDGET - 1
    assert states["DecodeOnly"] >= TOKENS - 1
    # With 32k the rows of one step would take 64 MiB, the matrix they come from 1 GiB.
    assert 0 < largest.mask_nbytes <= 4 << 20
    assert largest.nbytes <= 16 << 20
    assert grown < 256 << 20

    hf = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="sdpa"
    )
    expected = hf.generate(
        torch.tensor([prompt]),
        max_new_tokens=TOKENS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    assert got == expected[0, len(prompt) :].tolist()
    assert len(set(got)) > 3


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
