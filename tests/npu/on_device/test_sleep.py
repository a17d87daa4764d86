"""Sleep mode on a device: graphs find new weights, and memory comes back in whole pages.

What engines give back, and find again: `tests/npu/on_device/test_ranks.py`.
"""

from typing import Any

import pytest
import torch
from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear

from tests.conftest import SEED
from tests.helpers.engine import generate, graphs, greedy, make_model, runner_of
from tests.helpers.fused import forget_layers
from tests.helpers.hybrids import ON_NPUS
from tests.helpers.latent import LATENT_ON_NPUS, V3_EXPERTS_ON_NPUS
from tests.helpers.mtp import make_mtp_model, record_verified
from tests.helpers.prompts import prompts_of
from tests.helpers.quantized import QUANTIZE
from tests.helpers.v2 import RUNNERS, engine_of
from tests.npu.models import INDEXED
from vllm_npu_prep.device import host_bytes, make_device
from vllm_npu_prep.errors import PrepError
from vllm_npu_prep.sleep import SleepingMemory

LENGTHS = [30, 5, 41]
PAGE = 2 << 20
MIXTURE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
WIDE = {**MIXTURE, "hidden_size": 256, "moe_intermediate_size": 64}
"""Of layers and experts whose int4 weights are packed beside int8 inputs."""


def free():
    torch.npu.synchronize()
    torch.npu.empty_cache()
    return torch.npu.mem_get_info()[0]


LOW_RANK = {**LATENT_ON_NPUS, "q_lora_rank": 96}
STATES = {**ON_NPUS, "head_dim": 256}
COMPRESSED = {"form": "compressed-tensors"}
W4A8 = {"form": "modelslim", "scheme": "W4A8", "group": 0}
AWQ = {"form": "awq", "scheme": "W4A16_ASYM", "group": 32}
LAYERS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "latent": ("DeepseekV3", LOW_RANK, {}),
    "routers in float32": ("DeepseekV3", {**LOW_RANK, **V3_EXPERTS_ON_NPUS}, {}),
    "sparse": ("DeepseekV32", INDEXED, {}),
    "states": ("Qwen3_5", STATES, {}),
    "int8, static norms": ("Qwen3", {}, {"form": "modelslim", "static": True}),
    "int8, dynamic norms, experts": ("Qwen3Moe", MIXTURE, {"form": "modelslim"}),
    "int8, parts of latent projections": ("DeepseekV3", LOW_RANK, COMPRESSED),
    "int8, sparse": ("GlmMoeDsa", INDEXED, COMPRESSED),
    "int4, groups with zero points": ("Qwen3", {"hidden_size": 128}, AWQ),
    "int4, experts": ("Qwen3Moe", MIXTURE, {**AWQ, **COMPRESSED}),
    "int4, rounded inputs, experts": ("Qwen3Moe", WIDE, W4A8),
}
"""Family, config, and how it is quantised, of layers that keep what they derived of weights."""


@pytest.mark.parametrize("runner_name", RUNNERS)
@pytest.mark.parametrize("name", LAYERS)
def test_new_weights_are_read_in_graphs(tmp_path, name, runner_name):
    """What was derived of the old ones is made anew at the addresses that graphs read: what latent
    attention absorbed, routers of which files have 16 bits, decays and taps, scales.
    """
    family, config, how = LAYERS[name]
    prompts, folders = prompts_of(SEED, LENGTHS), []
    for seed in (0, 1):
        sizes = {"spread": 0.1, "embedding_scale": 20, **config}
        folders.append(make_model(tmp_path / f"float {seed}", family, seed=seed, **sizes))
        if how:
            QUANTIZE(folders[-1], tmp_path / f"int8 {seed}", **how)
            folders[-1] = tmp_path / f"int8 {seed}"
    old, new = folders
    settings = {"dtype": "float16" if how else "bfloat16", "block_size": 128}
    settings |= graphs("FULL_DECODE_ONLY", 4)
    forget_layers()
    with engine_of(runner_name, new, **settings) as llm:
        expected = generate(llm, prompts, greedy(8))
    forget_layers()
    with engine_of(runner_name, old, enable_sleep_mode=True, **settings) as llm:
        before = generate(llm, prompts, greedy(8))
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(new)})
        assert llm.reset_prefix_cache()
        assert generate(llm, prompts, greedy(8)) == expected != before
        llm.sleep(level=2)
        llm.wake_up(tags=["weights"])
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(old)})
        llm.wake_up(tags=["kv_cache"])
        assert generate(llm, prompts, greedy(8)) == before
        gates = [m for m in runner_of(llm).get_model().modules() if isinstance(m, GateLinear)]
        assert all(gate.weight.dtype == torch.float32 for gate in gates) or how


def test_memory_that_comes_back_is_zero():
    """What other programs left there may be NaN, which masks don't stop."""
    memory = SleepingMemory(make_device("npu"))
    cache = memory.zeros(3 * PAGE + 5)
    cache.fill_(-1)
    memory.suspend()
    others = torch.full((64 << 20,), 255, dtype=torch.uint8, device="npu")
    del others
    memory.resume()
    assert not cache.any()


@pytest.mark.parametrize("runner", RUNNERS)
def test_drafts_are_accepted_after_weights_were_lost(tmp_path, runner):
    """A head's weights stay, and an MTP layer's come with the model's, where pieces read them."""
    sizes = {**LATENT_ON_NPUS, **V3_EXPERTS_ON_NPUS, "q_lora_rank": 96}
    models = [make_mtp_model(tmp_path / str(s), "DeepseekV3", seed=s, **sizes)[0] for s in (0, 1)]
    prompts, config = prompts_of(SEED, LENGTHS), {"method": "mtp", "num_speculative_tokens": 3}
    settings = {"dtype": "bfloat16", "speculative_config": config, "enable_sleep_mode": True}
    rounds = []
    with engine_of(runner, models[0], **settings, **graphs("FULL_AND_PIECEWISE", 4, 16)) as llm:
        records = record_verified(llm)

        def verified():
            records.clear()
            tokens = generate(llm, prompts, greedy(8))
            return tokens, sorted((step.token_ids, step.num_accepted) for step in records)

        before = verified()
        for model in (models[0], models[1], models[0]):
            llm.sleep(level=2)
            llm.wake_up(tags=["weights"])
            llm.collective_rpc("reload_weights", kwargs={"weights_path": str(model)})
            llm.wake_up(tags=["kv_cache"])
            rounds.append(verified())
    assert rounds[0] == rounds[2] == before
    assert rounds[1][0] != before[0]
    for _, steps in (before, rounds[1]):
        assert any(count for _, count in steps)


def test_a_region_is_one_range_of_several_pieces(monkeypatch):
    monkeypatch.setattr("vllm_npu_prep.device.npu_regions.PIECE", 2 * PAGE)
    region, before = make_device("npu").region(5 * PAGE - 3), free()
    assert len(region._pieces) == 3
    values = torch.arange(region.data.numel(), dtype=torch.int32).to(torch.uint8)
    region.data.copy_(values)
    torch.npu.synchronize()
    region.release(keep=True)
    assert free() == before + 5 * PAGE and not region._pieces
    # torch's allocator takes 20 MiB at once, and would leave more or less than this
    others = make_device("npu").region((free() // PAGE - 3) * PAGE)
    left = free()
    assert 2 * PAGE <= left < 5 * PAGE, "room for a piece, not for all"
    with pytest.raises(PrepError, match="no memory"):
        region.map()
    assert not region._pieces and free() == left
    others.release(keep=False)
    region.map()
    assert torch.equal(region.data.cpu(), values)


def test_pinned_memory_above_the_threshold_is_not_rounded():
    """What the plugin sets in the environment reaches torch_npu's allocator."""
    before = torch.npu.host_memory_stats()["allocated_bytes.current"]
    held = torch.empty(65 << 20, dtype=torch.uint8, pin_memory=True)
    taken = torch.npu.host_memory_stats()["allocated_bytes.current"] - before
    assert taken == host_bytes("npu", held.numel()) == held.numel()
