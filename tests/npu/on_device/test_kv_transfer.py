"""KV connectors on the device: one engine computes prompts, another one decodes them."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.conftest import SEED
from tests.engine.test_kv_transfer import LENGTHS, connected, count_tokens
from tests.helpers.engine import engine, generate, graphs, greedy, make_model, runner_of
from tests.helpers.prompts import prompts_of

BLOCK_SIZE = 16


@pytest.mark.parametrize("family", ["fia", "atb"])
def test_one_engine_computes_prompts_and_another_decodes_them(tmp_path, family):
    """Its tokens are those of an engine alone; negated files change those of whole blocks."""
    model, prompts = make_model(tmp_path / "model"), prompts_of(SEED, LENGTHS)
    folder, blocks = tmp_path / "kv", [(length - 1) // BLOCK_SIZE for length in LENGTHS]
    settings = {"dtype": "float16", "additional_config": {"npu_prep": {"attention": family}}}
    settings |= {"max_model_len": 96, "max_num_batched_tokens": 96, "block_size": BLOCK_SIZE}
    with engine(model, **settings) as llm:
        expected = generate(llm, prompts, greedy(20))

    def role(name):
        given = connected(folder, **settings)
        given["kv_transfer_config"]["kv_role"] = name
        return given

    with engine(model, **role("kv_producer")) as llm:
        assert str(runner_of(llm).device) == "npu:0"
        assert generate(llm, prompts, greedy(1)) == [row[:1] for row in expected]
    files = sorted(folder.glob("*/*.safetensors"))
    assert len(files) == 2 * len(LENGTHS)
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
