"""Offloading on the device: streams of copies beside the one that computes."""

import pytest
import torch

import ascend_emulator
from tests.conftest import SEED
from tests.engine.test_offloading import computed_again, left_to_compute, offloading
from tests.helpers.engine import engine, generate, graphs, greedy, make_model, runner_of
from tests.helpers.hybrids import ON_NPUS
from tests.helpers.latent import LATENT_ON_NPUS, V3_EXPERTS_ON_NPUS
from tests.helpers.prompts import prompts_of
from tests.npu.models import INDEXED
from vllm_npu_prep.device import copy_stream, host_memory

BLOCK_SIZE = 16
LENGTHS, OTHERS = [61, 90, 33], [150, 140]
DECODES = graphs("FULL_DECODE_ONLY", 4, async_scheduling=True)
CASES = {
    "fia": ("Qwen3", {}, DECODES, "float16"),
    "atb": ("Qwen3", {}, {"async_scheduling": False}, "float16"),
    "latent": (
        "DeepseekV3",
        {**LATENT_ON_NPUS, **V3_EXPERTS_ON_NPUS, "spread": 0.1},
        {"async_scheduling": True},
        "bfloat16",
    ),
    "sparse": ("DeepseekV32", {**INDEXED, "spread": 0.1}, DECODES, "float16"),
    # A state fills the K of 128 tokens
    "states": (
        "Qwen3_5",
        {**ON_NPUS, "head_dim": 256, "spread": 0.1, "embedding_scale": 20},
        graphs("FULL_AND_PIECEWISE", 1, 4, 16, async_scheduling=True)
        | {"block_size": 128, "enable_prefix_caching": True, "max_model_len": 512},
        "bfloat16",
    ),
}
SIZES = {"states": ([300, 140], [400, 390], 24)}
"""Lengths of prompts and of others that take their blocks, and the device's blocks."""


@pytest.mark.parametrize("name", CASES)
def test_prompts_that_were_evicted_come_back_from_the_host(name, tmp_path):
    """Tokens are those of an engine that keeps everything, which waits as often; no hazards."""
    family, config, mode, dtype = CASES[name]
    model = make_model(tmp_path / "model", family, **config)
    lengths, of_others, num_blocks = SIZES.get(name, (LENGTHS, OTHERS, 16))
    prompts, others = prompts_of(SEED, lengths), prompts_of(SEED + 1, of_others)
    attention = "atb" if name == "atb" else "fia"
    options = {"attention": attention, "check": "full"}
    settings = {"dtype": dtype, "block_size": BLOCK_SIZE, "max_model_len": 192}
    settings |= {"additional_config": {"npu_prep": options}, **mode}
    with engine(model, **settings) as llm:
        assert str(runner_of(llm).device) == "npu:0"
        with ascend_emulator.count() as alone:
            expected = generate(llm, prompts, greedy(6))
        expected = [generate(llm, [prompt], greedy(6))[0] for prompt in prompts]
    small = offloading(**settings) | {"num_gpu_blocks_override": num_blocks}
    with engine(model, **small) as llm:
        with ascend_emulator.count() as beside:
            generate(llm, prompts, greedy(6))
        again = computed_again(llm, prompts, others, expected)
        generate(llm, prompts + others, greedy(6))  # beside other requests' steps
    size = settings["block_size"]
    assert again == sum(left_to_compute(length, size) + 5 for length in lengths)
    assert beside.syncs == alone.syncs and beside.d2h_bytes > alone.d2h_bytes
    assert ascend_emulator.counters().hazards == 0


def test_copies_begin_after_what_was_issued_before_them():
    """The host waits for nothing in between, as it may in steps of an engine."""
    written = torch.zeros(1 << 16, dtype=torch.int8, device="npu")
    on_host = host_memory("npu", written.nbytes)
    torch.npu.synchronize()
    written.fill_(7)
    copy_stream(written.device).copy([(on_host, written)])
    torch.npu.synchronize()
    assert (on_host == 7).all()
    assert ascend_emulator.counters().hazards == 0
