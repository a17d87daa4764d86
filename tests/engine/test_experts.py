"""Mixtures of experts through vLLM's engine: how many tokens each expert got."""

import json

import pytest

from tests.helpers.engine import generate, graphs, greedy, make_model, runner_of
from tests.helpers.mixtures import MIXTURES
from tests.helpers.prompts import prompts_of
from tests.helpers.v2 import ALSO_V2, engine_of
from vllm_npu_prep.cli import main
from vllm_npu_prep.ops import moe_method
from vllm_npu_prep.records.record_file import record_files


@pytest.mark.parametrize("runner_name", ALSO_V2)
@pytest.mark.parametrize("steps", ["0:40", "last 40"])
def test_explain_tells_how_many_tokens_each_expert_got(
    tmp_path, seed, steps, capsys, monkeypatch, runner_name
):
    """As counted where experts get their tokens: in graphs, too, whose padding is sent to none."""
    computed, of_steps, apply_experts = [], [], moe_method.apply_experts

    def counted(x, *args):
        ids = args[3].flatten().tolist()
        computed.append([ids.count(expert) for expert in range(6)])
        return apply_experts(x, *args)

    monkeypatch.setattr(moe_method, "apply_experts", counted)
    folder = make_model(tmp_path / "model", "Qwen3Moe", **MIXTURES["Qwen3Moe"])
    record = {"dir": str(tmp_path / "records"), "steps": steps, "expert_tokens": True}
    options = {"additional_config": {"npu_prep": {"record": record}}}
    options |= graphs("FULL_DECODE_ONLY", 1, 4, 8, 16)
    sizes = {"max_num_batched_tokens": 48, "max_num_seqs": 7}
    with engine_of(runner_name, folder, **sizes, **options) as llm:
        model_runner = runner_of(llm)
        execute_model = model_runner.execute_model

        def followed(scheduled, *args, **kwargs):
            result = execute_model(scheduled, *args, **kwargs)
            if scheduled.total_num_scheduled_tokens:
                of_steps.append(computed[-1])
            return result

        model_runner.execute_model = followed
        generate(llm, prompts_of(seed, [3, 1, 90, 17]), greedy(5))
        model_runner.recorder.dump("the test")
    capsys.readouterr()
    shown = []
    (run,) = (tmp_path / "records").iterdir()
    for path in record_files(run):
        assert main(["explain", str(path), "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        (tokens,) = told["tokens_per_expert"].values()
        assert sum(tokens) == 2 * told["total_num_scheduled_tokens"], "each token has two experts"
        shown.append(tokens)
    assert shown == of_steps
    assert len(shown) >= 6 and len({tuple(tokens) for tokens in shown}) > 3
    assert main(["explain", str(path)]) == 0
    text = capsys.readouterr().out
    assert "tokens of each expert" in text
    assert "model.layers.1.mlp.experts" in text
