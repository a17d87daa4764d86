"""LoRA through vLLM's engine: tokens are those of transformers with merged weights."""

import shutil
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from vllm.lora.request import LoRARequest

from tests.conftest import SEED
from tests.helpers.drafters import make_eagle_head
from tests.helpers.engine import REPLAYED, graphs, greedy, make_model, runner_of
from tests.helpers.huggingface import is_varied, logits_of, reference
from tests.helpers.lora import ATTENTION, HEAD, MLP, make_adapter, merge
from tests.helpers.prompts import prompts_of
from tests.helpers.v2 import RUNNERS, engine_of
from tests.helpers.watch import count_verified

ADAPTERS = {
    "all": {"modules": ATTENTION + MLP + HEAD, "rank": 8},
    "queries": {"modules": ("self_attn.q_proj", "self_attn.v_proj"), "rank": 2, "spread": 0.3},
    "mlp": {"modules": (*MLP, "self_attn.o_proj"), "rank": 5, "alpha": 3},
}
LORA = {"enable_lora": True, "max_lora_rank": 8}
FEW_BLOCKS = {
    "max_num_seqs": 5,
    "max_num_batched_tokens": 40,
    "block_size": 4,
    "num_gpu_blocks_override": 42,
    "max_model_len": 160,
}


class Case:
    """A model, adapters for it, and requests whose tokens are known."""

    def __init__(self, root, seed: int, family: str = "Qwen3", adapters=ADAPTERS, **config):
        self.model = make_model(root / "model", family, **config)
        self.folders, self.merged = {}, {"": self.model}
        for index, (name, settings) in enumerate(adapters.items()):
            folder = make_adapter(root / name, self.model, seed=seed + index, **settings)
            self.folders[name] = folder
            self.merged[name] = merge(self.model, folder, root / f"merged-{name}")
        self.expected: dict = {}

    def request(self, name: str) -> LoRARequest | None:
        ids = {each: index for index, each in enumerate(self.folders, 1)}
        return LoRARequest(name, ids[name], str(self.folders[name])) if name else None

    def tokens(self, name: str, prompt: list[int], count: int) -> list[int]:
        """What transformers makes of the merged model."""
        key = name, tuple(prompt), count
        if key not in self.expected:
            (self.expected[key],) = reference(self.merged[name], [prompt], count)
        return self.expected[key]

    def prompt_logprobs(self, name: str, prompt: list[int]) -> np.ndarray:
        """Of each token but the first."""
        logprobs = torch.from_numpy(logits_of(self.merged[name])(prompt)[:-1]).log_softmax(-1)
        return logprobs.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0].numpy()


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    return Case(tmp_path_factory.mktemp("lora"), SEED)


def generate(llm, case, requests, params):
    return llm.generate(
        [{"prompt_token_ids": prompt} for _, prompt in requests],
        params,
        lora_request=[case.request(name) for name, _ in requests],
        use_tqdm=False,
    )


def tokens_of(llm, case, requests, count: int) -> list[list[int]]:
    outputs = generate(llm, case, requests, greedy(count))
    return [list(output.outputs[0].token_ids) for output in outputs]


def requests_of(seed: int, names: list[str]) -> list[tuple[str, list[int]]]:
    lengths = [3, 90, 40, 1, 17, 2, 64, 33, 5, 9]
    return list(zip(names, prompts_of(seed, lengths)))


MIXED = ["all", "", "queries", "mlp", "all", "", "queries", "", "mlp", "all"]


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize(
    ("mode", "sharded"),
    [
        ("eager", False),
        ("PIECEWISE", False),
        ("FULL_DECODE_ONLY", False),
        ("FULL_AND_PIECEWISE", True),
    ],
)
def test_adapters_and_plain_rows_in_one_batch_are_merged_weights(case, seed, mode, sharded, runner):
    settings = {} if mode == "eager" else graphs(mode, 1, 2, 4, 8, 16)
    with engine_of(
        runner,
        case.model,
        max_num_seqs=7,
        max_num_batched_tokens=48,
        block_size=16,
        max_loras=3,
        async_scheduling=mode != "PIECEWISE",
        fully_sharded_loras=sharded,
        **LORA,
        **settings,
    ) as llm:
        mixed = requests_of(seed, MIXED)
        later = [[(name, prompt) for _, prompt in mixed[:3]] for name in ("", "queries")]
        for requests in (mixed, *later):
            expected = [case.tokens(*request, 12) for request in requests]
            assert tokens_of(llm, case, requests, 12) == expected
        counts = runner_of(llm).padding.counts.by_kind
    expected = [case.tokens(*request, 12) for request in mixed]
    assert is_varied(expected)
    plain = [case.tokens("", prompt, 12) for _, prompt in mixed]
    same = [name for (name, _), a, b in zip(mixed, expected, plain) if a == b]
    assert set(same) == {""}, "an adapter that changes nothing shows nothing"
    if mode != "eager":
        assert set(counts) >= REPLAYED[mode]


DRAFTED = [("ngram", "V1"), ("eagle", "V1"), ("eagle", "V2")]
"""What drafts, and for which runner."""


def with_drafts(case, runner, method, requests, folder: Path):
    """The tokens of requests, and what became of their drafts; `folder` is for an EAGLE head."""
    drafts = {"method": method, "num_speculative_tokens": 3}
    if method == "ngram":
        drafts["prompt_lookup_max"] = 1
    else:
        drafts["model"] = str(make_eagle_head(folder, case.model))
    with engine_of(runner, case.model, speculative_config=drafts, max_loras=2, **LORA) as llm:
        verified = count_verified(llm)
        return tokens_of(llm, case, requests, 24), verified


@pytest.mark.parametrize(("method", "runner"), DRAFTED)
def test_each_adapter_verifies_its_drafts(case, tmp_path, seed, method, runner):
    """Drafts of the plain model, or of what a request has: they are only ever guesses."""
    loops = [prompt * 8 for prompt in prompts_of(seed, [4, 3, 5])]
    requests = list(zip(["all", "", "queries"], loops))
    got, verified = with_drafts(case, runner, method, requests, tmp_path)
    assert got == [case.tokens(*request, 24) for request in requests]
    assert verified["rejected"] > 0
    assert method == "eagle" or verified["accepted"] + verified["partly"] > 0


@pytest.fixture(scope="module", params=RUNNERS)
def serving(case, request):
    """An engine with room for two of the three adapters, and few blocks."""
    with engine_of(
        request.param,
        case.model,
        max_loras=2,
        max_cpu_loras=2,
        **FEW_BLOCKS,
        **LORA,
        **graphs("FULL_DECODE_ONLY", 1, 2, 4, 8),
    ) as llm:
        yield llm


def test_a_prompt_is_cached_for_one_adapter_only(serving, case, seed):
    (prompt,) = prompts_of(seed + 3, [33])
    cached = []
    for name in ("all", "", "queries", "all", "", "queries"):
        (output,) = generate(serving, case, [(name, prompt)], greedy(6))
        assert list(output.outputs[0].token_ids) == case.tokens(name, prompt, 6), name
        cached.append(output.num_cached_tokens)
    assert cached == [0, 0, 0, 32, 32, 32]


def test_prompts_are_scored_by_their_own_adapter(serving, case, seed):
    """Log-probabilities of prompt tokens, in chunks, with an adapter on the head; V2 takes tokens
    by name, too, here the same ones."""
    requests = list(zip(["all", "", "queries", ""], prompts_of(seed + 4, [30, 50, 9, 7])))
    params = [greedy(2, prompt_logprobs=0) for _ in requests]
    names_tokens = type(runner_of(serving)).__name__ == "NPUModelRunnerV2"
    for each, (_, prompt) in zip(params, requests):
        if names_tokens:
            each.prompt_logprob_token_ids = [[token] for token in prompt[1:]]
    outputs = generate(serving, case, requests, params)
    for (name, prompt), output in zip(requests, outputs):
        expected = case.prompt_logprobs(name, prompt)
        got = [entry[token].logprob for entry, token in zip(output.prompt_logprobs[1:], prompt[1:])]
        np.testing.assert_allclose(got, expected, rtol=2e-3, atol=2e-3)
        if names_tokens:
            np.testing.assert_allclose(
                output.prompt_token_id_logprobs[:, 0], expected, rtol=2e-3, atol=2e-3
            )


def test_an_adapter_that_replaces_itself_is_read_once(serving, case, monkeypatch):
    manager = runner_of(serving).lora_manager
    load, loads = manager._load_adapter, []

    def counted(request):
        loads.append(request.lora_name)
        return load(request)

    monkeypatch.setattr(manager, "_load_adapter", counted)
    replaced = msgspec.structs.replace(case.request("mlp"), load_inplace=True)
    for times in (1, 2):
        prompts = [{"prompt_token_ids": [5, 6, 7]}]
        serving.generate(prompts, greedy(6), use_tqdm=False, lora_request=replaced)
        assert loads == ["mlp"] * times


class Changing:
    """An adapter whose folder is overwritten, each file in its place, by another one."""

    def __init__(self, llm, case, folder: Path) -> None:
        self.llm, self.core, self.case, self.folder = llm, llm.llm_engine, case, folder
        for number in self.core.list_loras():
            self.core.remove_lora(number)

    def overwrite(self, name: str) -> None:
        shutil.copytree(self.case.folders[name], self.folder, dirs_exist_ok=True)

    def request(self, number: int = 7, **settings) -> LoRARequest:
        return LoRARequest("changing", number, str(self.folder), **settings)

    def look(self, prompt: list[int], adapter: LoRARequest, name: str) -> int:
        """Whether tokens are those of `name`; the number of those that were cached."""
        (output,) = self.llm.generate(
            [{"prompt_token_ids": prompt}], greedy(6), lora_request=adapter, use_tqdm=False
        )
        assert list(output.outputs[0].token_ids) == self.case.tokens(name, prompt, 6), name
        return output.num_cached_tokens


@pytest.fixture
def changing(serving, case, tmp_path):
    return Changing(serving, case, tmp_path / "changing")


def test_blocks_belong_to_what_was_loaded_of_an_adapter(changing, seed):
    """Each way of loading: a call, a request, a new number, an adapter that had to go meanwhile."""
    (prompt,) = prompts_of(seed + 5, [33])
    changing.overwrite("all")
    assert [changing.look(prompt, changing.request(), "all") for _ in range(2)] == [0, 32]
    changing.overwrite("queries")
    changing.look(prompt, changing.request(), "all")
    changing.core.add_lora(changing.request(load_inplace=True))
    assert [changing.look(prompt, changing.request(), "queries") for _ in range(2)] == [0, 32]
    changing.overwrite("mlp")
    assert changing.look(prompt, changing.request(load_inplace=True), "mlp") == 0
    changing.overwrite("queries")
    changing.core.remove_lora(7)
    assert changing.look(prompt, changing.request(), "queries") == 32, "what was loaded before"
    changing.overwrite("all")
    changing.core.remove_lora(7)
    changing.look(prompt, changing.request(8), "all")
    changing.overwrite("mlp")
    for name in ("queries", "mlp"):  # there is room for two
        generate(changing.llm, changing.case, [(name, prompt)], greedy(1))
    changing.look(prompt, changing.request(8), "mlp")


@pytest.mark.parametrize("how", ["in place", "removed", "while preempted", "had to go"])
def test_a_request_goes_on_with_what_was_loaded_last(changing, case, seed, how):
    """It begins anew: keys and values of the old weights are none of the new ones."""
    core, name = changing.core, f"goes on, {how}"
    (prompt,) = prompts_of(seed + 6, [30])
    changing.overwrite("all")
    params = {"prompt_token_ids": prompt}, greedy(20)
    core.add_request(name, *params, lora_request=changing.request())
    core.add_request(f"other {how}", *params, lora_request=case.request("queries"))
    said, done = [], {}

    def step() -> None:
        for output in core.step():
            tokens = list(output.outputs[0].token_ids)
            if output.request_id == name:
                said[:] = tokens
            if output.finished:
                done[output.request_id] = tokens

    while len(said) < 6:
        step()
    changing.overwrite("mlp")
    if how == "while preempted":
        assert changing.llm.reset_prefix_cache(reset_running_requests=True)
    if how == "removed":
        core.remove_lora(7)
    elif how == "had to go":  # two are in use, and there is room for two
        core.add_lora(case.request("mlp"))
        core.add_lora(changing.request(load_inplace=True))
    else:
        core.add_lora(changing.request(load_inplace=True))
    least = len(said)
    while len(done) < 2:
        step()
    # Steps in flight had the old weights, and their tokens count
    ends = [
        case.tokens("all", prompt, 20)[:number]
        + case.tokens("mlp", prompt + said[:number], 20 - number)
        for number in range(least, least + 3)
    ]
    assert said in ends
    assert done[f"other {how}"] == case.tokens("queries", prompt, 20)


def test_an_adapter_that_can_not_be_read_ends_its_request_alone(changing, case, seed):
    (prompt,) = prompts_of(seed + 8, [9])
    nowhere = LoRARequest("nowhere", 13, str(changing.folder / "nowhere"))
    asked = [nowhere, msgspec.structs.replace(nowhere, lora_int_id=14, load_inplace=True), None]
    outputs = changing.llm.generate(
        [{"prompt_token_ids": prompt}] * 3, greedy(4), lora_request=asked, use_tqdm=False
    )
    assert [each.outputs[0].finish_reason for each in outputs] == ["error", "error", "length"]
    assert list(outputs[2].outputs[0].token_ids) == case.tokens("", prompt, 4)


def test_what_is_held_of_an_adapter_is_no_part_of_its_files(changing):
    """vLLM maps them, so that a folder that is overwritten would change what is held."""
    changing.overwrite("all")
    held = runner_of(changing.llm).lora_manager._load_adapter(changing.request())
    before = {name: layer.lora_a.clone() for name, layer in held.loras.items()}
    weights = changing.folder / "adapter_model.safetensors"
    size = weights.stat().st_size
    with weights.open("r+b") as file:  # the same file, not one that takes its name
        file.seek(size // 4)
        file.write(b"\1" * (size - size // 4))
    for name, layer in held.loras.items():
        assert torch.equal(layer.lora_a, before[name]), name
