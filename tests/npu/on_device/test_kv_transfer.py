"""KV connectors on the device: one engine computes prompts, another one decodes them afterwards."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save, save_file

from tests.conftest import SEED
from tests.engine.test_kv_transfer import LENGTHS, connected, count_tokens
from tests.helpers.engine import engine, generate, graphs, greedy, make_model, runner_of
from tests.helpers.latent import LATENT_ON_NPUS, V3_EXPERTS_ON_NPUS
from tests.helpers.prompts import prompts_of
from tests.npu.models import INDEXED

BLOCK_SIZE = 16
CASES = {
    "atb": ("Qwen3", {}, "float16"),
    "latent": (
        "DeepseekV3",
        {**LATENT_ON_NPUS, **V3_EXPERTS_ON_NPUS, "spread": 0.1, "embedding_scale": 20},
        "bfloat16",
    ),
    "sparse": ("DeepseekV32", {**INDEXED, "spread": 0.1, "embedding_scale": 20}, "bfloat16"),
}


@pytest.mark.parametrize("name", CASES)
def test_one_engine_computes_prompts_and_another_decodes_them(tmp_path, name, monkeypatch):
    """Its tokens are those of the first engine, from the prefix cache where blocks were loaded.

    No file is seen before it is whole. Negated files change tokens of prompts with whole blocks.
    """
    family, config, dtype = CASES[name]
    model, prompts = make_model(tmp_path / "model", family, **config), prompts_of(SEED, LENGTHS)
    attention = "atb" if name == "atb" else "fia"
    folder, blocks = tmp_path / "kv", [(length - 1) // BLOCK_SIZE for length in LENGTHS]
    settings = {"dtype": dtype, "additional_config": {"npu_prep": {"attention": attention}}}
    settings |= {"max_model_len": 96, "max_num_batched_tokens": 96, "block_size": BLOCK_SIZE}

    def role(name):
        given = connected(folder, **settings)
        given["kv_transfer_config"]["kv_role"] = name
        return given

    def half_first(tensors, path):
        Path(path).write_bytes(save(tensors)[:99])
        seen.append([load_file(file) for file in folder.glob("*/*.safetensors")])
        save_file(tensors, path)

    seen = []
    monkeypatch.setattr("vllm_npu_prep.attention.kv_transfer.save_file", half_first)
    with engine(model, **role("kv_producer")) as llm:
        assert str(runner_of(llm).device) == "npu:0"
        _, expected = (generate(llm, prompts, greedy(20)) for _ in range(2))
    files = sorted(folder.glob("*/*.safetensors"))
    of_layer = 2 if name == "sparse" else 1  # an indexer's keys have files of their own
    assert len(files) == 2 * of_layer * len(LENGTHS) == len(seen)
    assert all(torch.isfinite(load_file(file)["kv_cache"]).all() for file in files)
    pieces = graphs("PIECEWISE", 1, 4, 8)
    with engine(model, **role("kv_consumer"), **pieces, async_scheduling=True) as llm:
        computed = count_tokens(llm)
        assert generate(llm, prompts, greedy(1)) == [row[:1] for row in expected]
        loaded = BLOCK_SIZE * sum(blocks)
        assert computed["scheduled"] == sum(LENGTHS) - loaded
        assert llm.reset_prefix_cache()
        assert generate(llm, prompts, greedy(20)) == expected
        for file in files:
            save_file({"kv_cache": -load_file(file)["kv_cache"]}, file)
        assert llm.reset_prefix_cache()
        changed = generate(llm, prompts, greedy(20))
    assert [row == old for row, old in zip(changed, expected)] == [not each for each in blocks]
