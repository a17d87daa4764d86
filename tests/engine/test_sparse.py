"""Sparse attention through vLLM's engine: tokens and choices are those of transformers."""

import re

import pytest
import torch

from tests.helpers.cache import CacheWatch
from tests.helpers.engine import generate, graphs, greedy, make_model, runner_of
from tests.helpers.huggingface import is_varied, load, reference
from tests.helpers.latent import GLM_DSA, V32, YARN
from tests.helpers.mtp import make_mtp_model
from tests.helpers.prompts import prompts_of
from tests.helpers.v2 import ALSO_V2, engine_of, on_both
from tests.helpers.watch import count_preemptions, count_states
from vllm_npu_prep.attention.kernels import sparse
from vllm_npu_prep.cli import main
from vllm_npu_prep.observe.violation import StepCheckError
from vllm_npu_prep.records.record_file import read_record, record_files
from vllm_npu_prep.records.step_choices import SUFFIX, choices_to_bytes, read_choices

MODELS = {
    "DeepSeek V3.2": ("DeepseekV32", {**V32, "rope_parameters": YARN}),  # as its checkpoints have
    "GLM-5": ("GlmMoeDsa", GLM_DSA),
}
TOPK = V32["index_topk"]
CLOSE = 1e-5
"""Rounding in float32 moves scores by less than this part of the largest one."""


@pytest.mark.parametrize(("name", "runner"), on_both({name: name for name in MODELS}))
def test_tokens_are_those_of_transformers(tmp_path, seed, name, runner):
    """Chunks of prompts, then the same prompts from the prefix cache, in graphs."""
    family, config = MODELS[name]
    folder = make_model(tmp_path / "model", family, **config)
    prompts = prompts_of(seed, [3, 1, 90, 40, 17])
    expected = reference(folder, prompts, 16)
    with engine_of(
        runner,
        folder,
        block_size=16,
        max_num_batched_tokens=48,
        max_num_seqs=7,
        enable_prefix_caching=True,
        additional_config={"npu_prep": {"check": "full"}},
        **graphs("FULL_AND_PIECEWISE", 1, 4, 8, 16),
    ) as llm:
        watch = CacheWatch(runner_of(llm))
        got = [generate(llm, prompts, greedy(16)) for _ in range(2)]
        counts = runner_of(llm).padding.counts.by_kind
    assert got == [expected] * 2
    assert is_varied(expected)
    assert {"full graph", "piecewise graphs"} <= set(counts)
    assert watch.padding_seen - {0}


def choices_of(folder, sequence):
    """What transformers' indexers choose for each token of a sequence, by layer, as sets."""
    model, found = load(folder), {}
    for number, layer in enumerate(model.model.layers):
        if layer.self_attn.indexer is not None:
            name = f"model.layers.{number}.self_attn.indexer.k_cache"
            layer.self_attn.indexer.register_forward_hook(
                lambda module, args, output, name=name: found.update({name: output[0]})
            )
    with torch.no_grad():
        model(torch.tensor([sequence]))
    return {
        name: [{p for p in row.tolist() if p <= at} for at, row in enumerate(chosen)]
        for name, chosen in found.items()
    }


class Margins:
    """How far the score of the last chosen position lies from that of the best that was not."""

    def __init__(self, monkeypatch):
        self.seen: list[float] = []
        choose = sparse.best_positions

        def measured(scores, topk):
            best = scores.topk(min(topk + 1, scores.shape[1])).values
            margins = (best[:, topk - 1] - best[:, -1]) / best[:, :topk].abs().amax(1)
            self.seen += margins[torch.isfinite(margins)].tolist()
            return choose(scores, topk)

        monkeypatch.setattr(sparse, "best_positions", measured)


@pytest.mark.parametrize("runner", ALSO_V2)
@pytest.mark.parametrize("name", MODELS)
def test_choices_are_those_of_transformers(tmp_path, seed, monkeypatch, capsys, name, runner):
    """Records have them, and replays check them; none is so close that rounding could change it."""
    family, config = MODELS[name]
    folder = make_model(tmp_path / "model", family, **config)
    prompts = prompts_of(seed, [60, 3, 17])
    steps = {"dir": str(tmp_path), "steps": "0:99", "choices": True, "request_ids": "plain"}
    options, margins = {"check": "full", "record": steps}, Margins(monkeypatch)
    settings = {"max_num_batched_tokens": 48, "additional_config": {"npu_prep": options}}
    with engine_of(runner, folder, block_size=16, **settings) as llm:
        tokens = generate(llm, prompts, greedy(12))
    theirs = [choices_of(folder, prompt + row) for prompt, row in zip(prompts, tokens)]
    seen = 0
    for file in record_files(tmp_path):
        record = read_record(file)
        positions, owners = (record.prepared[name] for name in ("positions", "req_indices"))
        chosen = read_choices(file, len(positions), TOPK)
        assert list(chosen) == list(theirs[0])
        for token, (position, owner) in enumerate(zip(positions.tolist(), owners.tolist())):
            request = int(record.settings.req_ids[owner].partition("-")[0])
            for layer, of_tokens in chosen.items():
                own = set(of_tokens[token].tolist()) - {-1}
                assert own == theirs[request][layer][position], (record.number, token, layer)
                seen += position >= TOPK
    assert seen == len(theirs[0]) * sum(len(p) + 11 - TOPK for p in prompts if len(p) > TOPK)
    assert min(margins.seen) > CLOSE
    assert main(["replay", str(tmp_path)]) == 0
    layer = list(chosen)[-1]
    chosen[layer][0, 0] = positions[0] + 1
    file.with_suffix(SUFFIX).write_bytes(choices_to_bytes(chosen))
    assert main(["replay", str(tmp_path)]) == 1
    said = f"choices.{layer}[0] (token 0, request 0-.*): recorded {positions[0] + 1} "
    assert re.search(re.escape(said).replace(r"\.\*", ".*"), capsys.readouterr().out)


@pytest.mark.parametrize("runner", ALSO_V2)
def test_choices_of_the_last_steps_are_kept_beside_drafts(tmp_path, seed, runner):
    """Those of the model's layers: neither captures nor draft passes are among them."""
    folder, _ = make_mtp_model(tmp_path / "model", "DeepseekV32")
    steps = {"dir": str(tmp_path / "steps"), "steps": "last 8", "choices": True}
    with engine_of(
        runner,
        folder,
        block_size=16,
        max_model_len=128,
        max_num_batched_tokens=48,
        additional_config={"npu_prep": {"check": "full", "record": steps}},
        speculative_config={"method": "mtp", "num_speculative_tokens": 2},
        **graphs("FULL_AND_PIECEWISE", 1, 4, 8),
    ) as llm:
        generate(llm, prompts_of(seed, [40, 5]), greedy(16))
        llm.collective_rpc("dump_steps")
    files = record_files(tmp_path / "steps")
    assert len(files) == 8
    for file in files:
        chosen = read_choices(file, len(read_record(file).prepared["positions"]), TOPK)
        assert list(chosen) == [f"model.layers.{n}.self_attn.indexer.k_cache" for n in (0, 1)]
    assert main(["replay", str(tmp_path / "steps")]) == 0


@pytest.mark.parametrize("runner", ALSO_V2)
def test_preempted_requests_choose_again(tmp_path, seed, runner):
    """A cache too small for the batch, and ngram drafts."""
    folder = make_model(tmp_path / "model", "GlmMoeDsa", spread=0.15, **GLM_DSA)
    prompts = prompts_of(seed, [30, 28, 25, 31, 22, 29])
    expected = reference(folder, prompts, 40)
    with engine_of(
        runner,
        folder,
        block_size=4,
        num_gpu_blocks_override=40,
        max_model_len=96,
        max_num_batched_tokens=48,
        additional_config={"npu_prep": {"check": "full"}},
        speculative_config={"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2},
    ) as llm:
        states, count = count_states(llm), count_preemptions(llm)
        assert generate(llm, prompts, greedy(40)) == expected
    assert count["preempted"] > 0
    assert "SpecDecoding" in states


def test_the_full_check_names_a_choice_that_cannot_be_right(tmp_path, seed, monkeypatch):
    folder = make_model(tmp_path / "model", "DeepseekV32", **V32)
    choose = sparse.best_positions

    def choose_the_future(scores, topk):
        chosen = choose(scores, topk)
        chosen[0, 0] = scores.shape[1]
        return chosen

    with engine_of(
        "V2", folder, additional_config={"npu_prep": {"check": "full", "probe": False}}
    ) as llm:
        monkeypatch.setattr(sparse, "best_positions", choose_the_future)
        with pytest.raises(StepCheckError, match=r"last position chosen.*request 0.*given 30"):
            generate(llm, prompts_of(seed, [30]), greedy(2))
