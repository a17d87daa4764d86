"""KV caches that leave an engine: stored by one, loaded by the next."""

import logging
from collections import Counter
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers.engine import engine, generate, greedy, make_model, runner_of
from tests.helpers.huggingface import greedy_tokens, reference
from tests.helpers.latent import V32
from tests.helpers.prompts import prompts_of
from tests.helpers.quantized import QUANTIZE, rounded_model
from tests.helpers.ranks import serve_on_ranks
from tests.helpers.v2 import RUNNERS, asked_for, engine_of
from tests.helpers.watch import count_batched, count_preemptions, count_states, on_prepared
from vllm_npu_prep.attention.kv_transfer import (
    ExampleConnector,
    LayersOfRank,
    read_slots,
    write_slots,
)
from vllm_npu_prep.errors import PrepError

BLOCK_SIZE = 4
LENGTHS = [30, 28, 25, 41, 22, 3, 29]  # 25 less one token is whole blocks


def connected(folder, **settings) -> dict:
    """Settings of an engine that stores and loads in a folder."""
    return {
        "block_size": BLOCK_SIZE,
        "max_model_len": 96,
        "max_num_batched_tokens": 96,
        "enable_chunked_prefill": False,
        "kv_transfer_config": {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": str(folder)},
        },
        **settings,
    }


def count_tokens(llm) -> Counter:
    """Count scheduled tokens of all later steps."""
    count = Counter()
    on_prepared(llm, lambda step: count.update(scheduled=step.total_num_scheduled_tokens))
    return count


def whole_blocks(length: int) -> int:
    """Tokens of a prompt that can be loaded: at least one is left to compute."""
    return (length - 1) // BLOCK_SIZE * BLOCK_SIZE


@pytest.mark.parametrize("runner", RUNNERS)
def test_keys_of_indexers_are_stored_and_loaded(tmp_path, seed, runner):
    """Changed keys change what is chosen, and so the tokens."""
    model = make_model(tmp_path / "model", "DeepseekV32", **V32)
    prompts = prompts_of(seed, [60, 50])
    expected = reference(model, prompts, 12)
    settings = connected(tmp_path / "files", async_scheduling=False)
    with engine_of(runner, model, **settings) as llm:
        assert generate(llm, prompts, greedy(12)) == expected
    with engine_of(runner, model, **settings) as llm:
        computed = count_tokens(llm)
        assert generate(llm, prompts, greedy(12)) == expected
    assert computed["scheduled"] == sum(len(p) - whole_blocks(len(p)) + 11 for p in prompts)
    files = sorted((tmp_path / "files").rglob("*indexer*"))
    assert len(files) == 2 * len(prompts)
    for file in files:
        save_file({"kv_cache": -load_file(file)["kv_cache"]}, file)
    with engine_of(runner, model, **settings) as llm:
        assert generate(llm, prompts, greedy(12)) != expected


@pytest.mark.parametrize("runner", RUNNERS)
def test_an_engine_loads_what_another_one_stored(qwen3, tmp_path, seed, caplog, runner):
    """Tokens are those of transformers before and after; changed files change them."""
    prompts = prompts_of(seed, LENGTHS)
    expected = reference(qwen3, prompts, 40)
    with engine_of(runner, qwen3, **connected(tmp_path), async_scheduling=False) as llm:
        computed, batched = count_tokens(llm), count_batched(llm)
        assert generate(llm, prompts, greedy(40)) == expected
    assert computed["scheduled"] == sum(LENGTHS) + 39 * len(LENGTHS)
    assert batched["taken"] > 30 * len(LENGTHS)
    files = sorted(tmp_path.glob("*/*.safetensors"))
    assert len(files) == 2 * len(LENGTHS)  # a file for each layer of each prompt

    sizes = {"cudagraph_mode": "FULL_AND_PIECEWISE", "cudagraph_capture_sizes": [1, 8]}
    with (
        caplog.at_level(logging.INFO, logger="vllm"),
        engine_of(
            runner,
            qwen3,
            **connected(tmp_path, num_gpu_blocks_override=40),
            async_scheduling=True,
            enforce_eager=False,
            compilation_config=sizes,
        ) as llm,
    ):
        computed, states, count = count_tokens(llm), count_states(llm), count_preemptions(llm)
        assert generate(llm, prompts, greedy(1)) == [row[:1] for row in expected]
        assert computed["scheduled"] == sum(length - whole_blocks(length) for length in LENGTHS)
        assert "PrefillCacheHit" in states
        assert not count
        # Now the prefix cache knows them too, and the cache is too small for all.
        assert generate(llm, prompts, greedy(40)) == expected
        assert count["preempted"] > 0
        assert runner_of(llm).padding.counts.by_kind["piecewise graphs"] > 0
        for file in files:
            save_file({"kv_cache": -load_file(file)["kv_cache"]}, file)
        assert llm.reset_prefix_cache()
        changed = generate(llm, prompts, greedy(10))
    for length, row, tokens in zip(LENGTHS, changed, expected):
        assert (row == tokens[:10]) == (whole_blocks(length) == 0), length
    *_, block = (r.getMessage() for r in caplog.records if "vllm_npu_prep:" in r.getMessage())
    assert "off           FULL_AND_PIECEWISE graphs: KV connector ExampleConnector" in block
    assert "graph mode    PIECEWISE" in block
    assert torch.isfinite(load_file(files[0])["kv_cache"]).all()


def test_prompts_that_are_salted_or_half_stored_are_computed(qwen3, tmp_path, seed):
    """A salt says that a prompt is not to be shared; a file may be missing for good."""
    plain, salted = prompts_of(seed, [30, 25])
    expected = reference(qwen3, [plain, salted], 6)

    def run(llm):
        computed = count_tokens(llm)
        requests = [{"prompt_token_ids": plain}, {"prompt_token_ids": salted, "cache_salt": "mine"}]
        outputs = llm.generate(requests, greedy(6), use_tqdm=False)
        assert [list(output.outputs[0].token_ids) for output in outputs] == expected
        return computed["scheduled"]

    everything = 30 + 25 + 2 * 5
    with engine(qwen3, **connected(tmp_path)) as llm:
        assert run(llm) == everything
    files = sorted(tmp_path.glob("*/*.safetensors"))
    assert len(files) == 2, "a file for each layer of the prompt that is shared"
    with engine(qwen3, **connected(tmp_path)) as llm:
        assert run(llm) == everything - whole_blocks(30)
    files[1].unlink()
    with engine(qwen3, **connected(tmp_path)) as llm:
        assert run(llm) == everything
        with pytest.raises(PrepError, match="ExampleConnector, which has no reset_cache"):
            llm.collective_rpc("reload_weights")
    assert files[1].exists()


def negate_half(folder, num_files) -> list:
    """Change the files of every second prompt that has whole blocks; returns these folders."""
    stored = {file: load_file(file)["kv_cache"] for file in folder.glob("*/*.safetensors")}
    assert len(stored) == num_files * len(LENGTHS)
    folders = sorted({file.parent for file, rows in stored.items() if len(rows)})
    assert len(folders) == sum(whole_blocks(length) > 0 for length in LENGTHS)
    for file, rows in stored.items():
        if file.parent in folders[::2]:
            save_file({"kv_cache": -rows}, file)
    return folders[::2]


async def store_and_load(prompts, change, ranks):
    """Tokens of an engine that stores prompts, then loads what was made of its files."""
    stored = await ranks.generate(prompts, 12)
    changed = change()
    assert await ranks.llm.reset_prefix_cache()
    return stored, changed, await ranks.generate(prompts, 12)


async def with_refusals(talk, ranks):
    """What `talk` does; then what calls that all ranks refuse say, and who answers the next."""
    calls = {"sleep": ranks.llm.sleep, "no_method": partial(ranks.ask, "no_method")}
    said, answered, done = {}, {}, await talk(ranks)
    for name, call in calls.items():
        with pytest.raises(Exception) as error:  # noqa: PT011 (vLLM's client makes its own)
            await call()
        said[name] = str(error.value)
        answered[name] = [facts["rank"] for facts in await ranks.ask("probe_facts")]
    return *done, said, answered


def test_ranks_of_an_int8_model_store_load_and_refuse(qwen3, tmp_path, seed):
    """Each of two stores its own heads; half of the prompts come from files that changed.

    After a call that all refuse, answers belong to their questions: vLLM reads up to the first
    error, and a later rank's would be the next call's. One rank reads none of the files.
    """
    int8, files = tmp_path / "int8", tmp_path / "files"
    QUANTIZE(qwen3, int8, "modelslim", True)
    prompts = prompts_of(seed, LENGTHS)
    expected = greedy_tokens(rounded_model(qwen3, int8), prompts, 12)
    talk = partial(store_and_load, prompts, partial(negate_half, files, 2 * 2))
    settings = connected(files, tensor_parallel_size=2)
    got = serve_on_ranks(int8, settings, partial(with_refusals, talk))
    stored, changed, loaded, said, answered = got
    assert stored == expected
    assert [row == tokens for row, tokens in zip(loaded, expected)].count(False) == len(changed)
    assert answered == {"sleep": [0, 1], "no_method": [0, 1]}
    assert "sleep needs --enable-sleep-mode" in said["sleep"] and "\n" not in said["sleep"]
    assert "has no attribute 'no_method'" in said["no_method"]
    with engine(int8, **connected(files)) as llm:
        assert generate(llm, prompts, greedy(12)) == expected


def negate_and_remove(folder) -> tuple[list, str]:
    """Change files, and remove what the last stage stored of one of these prompts."""
    changed = negate_half(folder, 2)
    last = max(changed[0].glob("*.safetensors"))
    last.unlink()
    return changed, last.name


@pytest.mark.parametrize("runner", RUNNERS)
def test_stages_store_and_load_their_own_layers(qwen3, tmp_path, seed, runner):
    """Each of two; a prompt that only the first one has stored is computed again."""
    prompts = prompts_of(seed, LENGTHS)
    expected = reference(qwen3, prompts, 12)
    talk = partial(store_and_load, prompts, partial(negate_and_remove, tmp_path))
    settings = connected(tmp_path, pipeline_parallel_size=2, async_scheduling=False)
    with asked_for(runner):
        stored, (changed, removed), loaded = serve_on_ranks(qwen3, settings, talk)
    assert stored == expected
    assert "layers.1" in removed
    assert [row == tokens for row, tokens in zip(loaded, expected)].count(False) == len(changed) - 1
    assert (changed[0] / removed).exists(), "and stored again"


def test_a_prompt_is_stored_once_all_stages_have_stored_it(tmp_path, monkeypatch):
    connector = ExampleConnector.__new__(ExampleConnector)
    connector._parts, connector._block_size = 1, BLOCK_SIZE
    monkeypatch.setattr(connector, "_generate_foldername_debug", lambda *_: str(tmp_path))
    names = {(stage, 0): LayersOfRank((f"layers.{stage}",)) for stage in range(2)}
    connector.set_xfer_handshake_metadata_pp_aware(names)
    for stage, is_found in enumerate((False, True)):
        (tmp_path / f"layers.{stage}.safetensors").touch()
        assert connector._found_match_for_prompt([7] * 9, []) == is_found


def test_what_is_stored_has_the_form_of_upstream_s_cache(seed):
    """Upstream's cache is ``[num_blocks, num_kv_heads, block_size, 2 * head_size]``."""
    generator = torch.Generator().manual_seed(seed)
    upstream = torch.randn(6, 3, BLOCK_SIZE, 2 * 8, generator=generator)
    slots = torch.randperm(6 * BLOCK_SIZE, generator=generator)[:9]
    expected = upstream[slots // BLOCK_SIZE, :, slots % BLOCK_SIZE]
    planes = torch.stack(upstream.transpose(1, 2).chunk(2, dim=-1))
    assert torch.equal(read_slots(planes, slots), expected)
    other = torch.full_like(planes, torch.nan)
    write_slots(other, slots, expected)
    assert torch.equal(read_slots(other, slots), expected)
    assert torch.isfinite(other).sum() == expected.numel()
