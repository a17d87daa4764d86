"""vllm-ascend, unmodified, serves on the emulated card what transformers would have said.

Each test starts an engine in the environment of `make peer`; without it, all are skipped.
"""

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.helpers.emulator import ROOT
from tests.helpers.engine import make_model
from tests.helpers.huggingface import load
from tests.helpers.judge import bound_of, judge_of, margins_of
from tests.helpers.latent import GLM_DSA
from tests.helpers.models import (
    ROUTED,
    adapter_of,
    drafts_by,
    folder_of,
    int8_of,
    is_a,
    prompts,
)
from tests.helpers.prompts import prompts_of
from tests.helpers.real_model import chat_prompt
from tests.npu.models import CLEAR, CLEARER, INDEXED
from tests.peer import facts

ENVIRONMENT = ROOT / ".cache" / "vllm-ascend"
CACHE = ENVIRONMENT / "vllm-cache"
"""What vLLM found out about models; in the shared folder, releases of vLLM drop each other's."""
SERVE = ROOT / "tests" / "peer" / "serve.py"
LIMIT = 1800
NUM_TOKENS = 8
EAGER: dict[str, Any] = {"enforce_eager": True}
GRAPHS: dict[str, Any] = {"compilation_config": {"cudagraph_capture_sizes": [2, 4]}}
GRAPHS_OF_DRAFTS: dict[str, Any] = {"compilation_config": {"cudagraph_capture_sizes": [6, 12]}}
"""Of two and of four requests with two drafts each."""
SIZES: dict[str, Any] = {
    "dtype": "bfloat16",
    "max_model_len": 256,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 128,
    "kv_cache_memory_bytes": 64 << 20,
}
OUTPUT_OF_A_RANK = "write after read * after device-to-host copy on stream * of npu:1,"
"""The hazard of tensor parallelism, whose reading is on the page."""

DRAFTING_ON_V1 = (
    "pinned source of * bytes, copied on stream 0 of npu:0, was rewritten",
    "write after read * after device-to-host copy on stream * of npu:0,",
)
"""The hazards of drafts by layers on V1, whose reading is on the page, too."""

pytestmark = pytest.mark.skipif(
    not (ENVIRONMENT / ".installed").exists(),
    reason=f"{ENVIRONMENT.relative_to(ROOT)} is not there: make peer",
)


class Said(NamedTuple):
    """What an engine of vllm-ascend said."""

    runner: str
    tokens: list[list[int]]
    counts: dict[str, dict[str, int]]  # of counted modules


def serve(name: str, v2: bool, **how: Any) -> Said:
    """Answers of an engine to the prompts of a model of `tests.helpers.models`."""
    return answers(asked(name), v2, **{"model": str(folder_of(name)), **how})


def answers(
    asked: list[list[int]],
    v2: bool,
    *,
    adapter: str | None = None,
    counted: tuple[str, ...] = (),
    options: tuple[str, ...] = (),
    **engine: Any,
) -> Said:
    """Answers of an engine; hazards are errors."""
    job = {
        "engine": {**SIZES, **engine},
        "prompts": asked,
        "tokens": NUM_TOKENS,
        "adapter": adapter,
        "counted": counted,
    }
    command = "python", str(SERVE)
    out = run_in_environment(*command, given=json.dumps(job), v2=v2, options=options)
    said = dict(line.split(" ", 1) for line in out.splitlines() if line[:6] in LINES)
    counts = json.loads(said.get("COUNTS", "{}"))
    return Said(said["RUNNER"], json.loads(said["TOKENS"]), counts)


LINES = ("RUNNER", "TOKENS", "COUNTS")


def asked(model: str) -> list[list[int]]:
    """Prompts of which one exceeds half a step's tokens; interpreted kernels take time for each."""
    return prompts(model)[:4]


def run_in_environment(
    *command: str, given: str = "", v2: bool = False, options: tuple[str, ...] = ()
) -> str:
    """Standard output of a command on emulated cards, where hazards are errors."""
    options = *options, "--calls", str(calls_of_test())
    done = subprocess.run(
        [ENVIRONMENT / "bin" / "ascend-emulator", *options, "--", *command],
        cwd=ROOT,
        env={
            **{k: v for k, v in os.environ.items() if k != "TORCH_DEVICE_BACKEND_AUTOLOAD"},
            "PYTHONPATH": str(ROOT / "emulator"),  # without the plugin, which vLLM would find
            "OMP_NUM_THREADS": "1",
            "VLLM_CACHE_ROOT": str(CACHE),
            "VLLM_USE_V2_MODEL_RUNNER": str(int(v2)),
        },
        input=given,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stdout[-2000:] + error_of(done.stderr)
    return done.stdout


def error_of(text: str) -> str:
    """What an engine that ended said: the first line of an error, and the end of all."""
    first = next((line for line in text.splitlines() if re.search("FAULT: |Error: ", line)), "")
    return f"{first}\n...\n{text[-4000:]}"


def calls_of_test() -> Path:
    """File for the calls that the running test's engine makes."""
    test = os.environ["PYTEST_CURRENT_TEST"].split("::")[-1].split(" ")[0]
    facts.RECORDED.mkdir(parents=True, exist_ok=True)
    return facts.RECORDED / f"{re.sub(r'[^A-Za-z0-9]+', '-', test).strip('-')}.jsonl"


@pytest.fixture(autouse=True)
def _calls_are_known() -> Iterator[None]:
    calls = calls_of_test()
    calls.unlink(missing_ok=True)
    yield
    unknown = facts.unknown([calls]) if calls.exists() else []
    assert unknown == [], "new calls; add them by: python -m tests.peer.facts"


def assert_judged(model: str, said: Said, int8: str = "", **judged: Any) -> None:
    """Each token is the best one of transformers, as far as 16 bits let it be."""
    judge = judge_of(model, int8=int8, **judged)
    margins = [judge.margins(*each) for each in zip(asked(model), said.tokens, strict=True)]
    assert all(len(each) == NUM_TOKENS for each in margins)
    assert max(map(max, margins)) <= bound_of("bfloat16", is_a(ROUTED, model), int8=bool(int8))


@pytest.mark.parametrize("mode", [EAGER, GRAPHS], ids=["eager", "graphs"])
@pytest.mark.parametrize("v2", [False, True], ids=["V1", "V2"])
def test_a_dense_model_on_both_runners(v2, mode):
    said = serve("Qwen3ForCausalLM", v2, **mode)
    assert ("v2" in said.runner) == v2
    assert_judged("Qwen3ForCausalLM", said)


@pytest.mark.parametrize(("v2", "mode"), [(False, GRAPHS), (True, EAGER)], ids=["V1", "V2"])
def test_experts(v2, mode):
    said = serve("Qwen3MoeForCausalLM", v2, **mode)
    assert_judged("Qwen3MoeForCausalLM", said)


def test_two_ranks():
    """The one hazard is vLLM's: it drops what the other rank returns while a stream may read it."""
    options = ("--devices", "2", "--allow-hazard", OUTPUT_OF_A_RANK)
    said = serve("Qwen3ForCausalLM", v2=False, options=options, tensor_parallel_size=2, **EAGER)
    assert_judged("Qwen3ForCausalLM", said)


@pytest.mark.parametrize(
    ("name", "v2", "mode"),
    [
        ("Qwen3ForCausalLM", False, EAGER),
        ("Qwen3ForCausalLM", True, GRAPHS),
        ("Qwen3MoeForCausalLM", False, EAGER),
    ],
    ids=["V1", "V2", "experts"],
)
def test_int8_weights(name, v2, mode):
    folder = str(int8_of(name, "modelslim"))
    said = serve(name, v2, model=folder, quantization="ascend", **mode)
    assert_judged(name, said, int8="modelslim")


def test_int8_weights_of_latent_attention():
    """Of all projections, this is the one that vllm-ascend takes in floats only."""
    name, keep = "DeepseekV3ForCausalLM", ("kv_b_proj",)
    folder = str(int8_of(name, "modelslim", keep))
    said = serve(name, v2=False, model=folder, quantization="ascend", **EAGER)
    assert_judged(name, said, int8="modelslim", keep=keep)


DRAFTED = [
    ("eagle", "Qwen3ForCausalLM", False, EAGER),
    ("eagle", "Qwen3ForCausalLM", False, GRAPHS_OF_DRAFTS),
    ("eagle", "Qwen3ForCausalLM", True, EAGER),
    ("eagle", "Qwen3ForCausalLM", True, GRAPHS_OF_DRAFTS),
    ("mtp", "DeepseekV3ForCausalLM", False, EAGER),
    ("mtp", "DeepseekV3ForCausalLM", False, GRAPHS_OF_DRAFTS),
    ("mtp", "DeepseekV3ForCausalLM", True, EAGER),
    ("ngram", "Qwen3ForCausalLM", False, EAGER),
]


@pytest.mark.parametrize(
    ("method", "name", "v2", "mode"),
    DRAFTED,
    ids=[f"{m}-V{1 + v2}-{'eager' if mode is EAGER else 'graphs'}" for m, _, v2, mode in DRAFTED],
)
def test_drafts(method, name, v2, mode):
    known = () if v2 or method == "ngram" else DRAFTING_ON_V1
    options = tuple(option for each in known for option in ("--allow-hazard", each))
    drafts = drafts_by(name, method)
    said = serve(name, v2, options=options, speculative_config=drafts, **mode)
    assert ("v2" in said.runner) == v2
    assert_judged(name, said)


def test_an_adapter():
    adapter, lora = str(adapter_of("Qwen3ForCausalLM")), {"enable_lora": True, "max_lora_rank": 8}
    said = serve("Qwen3ForCausalLM", v2=False, adapter=adapter, **lora, **EAGER)
    assert_judged("Qwen3ForCausalLM", said, adapter=1)


@pytest.mark.parametrize("name", ["DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"])
def test_latent_attention(name):
    assert_judged(name, serve(name, v2=False, **EAGER))


CHOSEN = 2048
SPARSE = {**INDEXED, "index_topk": CHOSEN, "max_position_embeddings": 2 * CHOSEN}
SPARSE_SEED = 3
WITHOUT_TOKENIZER: dict[str, Any] = {"skip_tokenizer_init": True}


def sparse_model(folder: Path, family: str = "DeepseekV32", **config: Any) -> Path:
    """A model whose indexer chooses as many positions as vllm-ascend asks for in any model."""
    make_model(folder, family, **{**SPARSE, **config})
    file = folder / "config.json"
    kept = json.loads(file.read_text())
    del kept["layer_types"]  # newer transformers' name for them, unknown to that of vllm-ascend
    file.write_text(json.dumps(kept))
    return folder


def margins_by(model: Path, prompts: list[list[int]], said: Said, **how: Any) -> list[list[float]]:
    """As those of `assert_judged`, of any folder of a model."""
    network, margins = load(model, **how), []
    for prompt, got in zip(prompts, said.tokens, strict=True):
        with torch.no_grad():
            logits = network(torch.tensor([prompt + got])).logits[0, len(prompt) - 1 : -1].double()
        margins.append(margins_of(logits, got, logits.std(1)))
    return margins


def test_sparse_attention_in_graphs(tmp_path):
    model, prompts = sparse_model(tmp_path / "model", **CLEAR), asked("DeepseekV3ForCausalLM")
    said = answers(prompts, v2=False, model=str(model), **WITHOUT_TOKENIZER, **GRAPHS)
    margins = margins_by(model, prompts, said)
    assert max(map(max, margins)) <= bound_of("bfloat16", routed=True, int8=False)


@pytest.mark.parametrize(
    ("family", "config", "launches"),
    [
        ("DeepseekV32", {}, {"model.layers.1": 29}),
        ("GlmMoeDsa", {**GLM_DSA, **SPARSE}, {"model.layers.1": 18, "model.layers.2": 30}),
    ],
    ids=["V3.2", "GLM-5"],
)
def test_launches_of_sparse_attention(tmp_path, family, config, launches):
    """Of a decode in a layer beside its experts, with copies of strided inputs.

    GLM-5's first counted layer attends to what another one chose. All prompts fit into one step,
    so the last one decodes three tokens: slices of a single row need no copy.
    """
    model = sparse_model(tmp_path / "model", family, **{**config, **CLEAR})
    prompts = asked("DeepseekV3ForCausalLM")[:3]
    names = [(layer, f"{layer}.mlp") for layer in launches]
    said = answers(
        prompts,
        v2=False,
        model=str(model),
        counted=tuple(name for pair in names for name in pair),
        **WITHOUT_TOKENIZER,
        **EAGER,
    )
    margins = margins_by(model, prompts, said)
    assert max(map(max, margins)) <= bound_of("bfloat16", routed=True, int8=False)
    found = {
        layer: sum(
            said.counts[layer].get(kind, 0) - said.counts[experts].get(kind, 0)
            for kind in ("launches", "hidden_copies")
        )
        for layer, experts in names
    }
    assert found == launches


def test_more_positions_than_are_chosen(tmp_path):
    """One dense layer: each of the prompt's tokens takes time."""
    sizes = {"num_hidden_layers": 1, "first_k_dense_replace": 1, "n_routed_experts": 0, **CLEARER}
    model = sparse_model(tmp_path / "model", **sizes)
    prompts = prompts_of(SPARSE_SEED, [CHOSEN + 352])
    few = {"max_model_len": 2560, "max_num_batched_tokens": 1024, "max_num_seqs": 2}
    said = answers(prompts, v2=False, model=str(model), **few, **WITHOUT_TOKENIZER, **EAGER)
    [margins] = margins_by(model, prompts, said)
    [to_all] = margins_by(model, prompts, said, index_topk=2 * CHOSEN)
    print(margins, to_all)
    limit = bound_of("bfloat16", routed=False, int8=False)
    assert max(margins) <= limit < max(to_all), "a choice, and one that matters"


def test_sparse_attention_is_refused_by_v2(tmp_path):
    """Its runner gives the indexer no cache."""
    model = sparse_model(tmp_path / "model", **CLEAR)
    with pytest.raises(AssertionError, match=r"SFA indexer cache expects 1 tensor\(s\), got 0"):
        answers([[5, 6]], v2=True, model=str(model), **WITHOUT_TOKENIZER, **EAGER)


def test_a_window_before_cann_91():
    """From 9.1 on, K and V have to be contiguous, and theirs are not in layers with a window."""
    said = serve("MistralForCausalLM", v2=False, options=("--profile", "8.5"), **EAGER)
    assert_judged("MistralForCausalLM", said)


def test_a_window_is_refused_from_cann_91_on():
    with pytest.raises(AssertionError, match=r"argument value: given strides .* contiguous"):
        serve("MistralForCausalLM", v2=False, **EAGER)


def test_a_real_model(real_model):
    """SmolLM2, of 30 layers: few tokens in a step, as each is interpreted in each layer."""
    prompt = chat_prompt(real_model, "What is the capital of France?")
    few: dict[str, Any] = {"max_num_batched_tokens": 64, "max_num_seqs": 2, "max_model_len": 64}
    said = answers([prompt], v2=False, model=str(real_model), **few, **EAGER)
    [got], network = said.tokens, load(real_model)
    with torch.no_grad():
        logits = network(torch.tensor([prompt + got])).logits[0, len(prompt) - 1 : -1].double()
    limit = bound_of("bfloat16", routed=False, int8=False)
    assert max(margins_of(logits, got, logits.std(1))) <= limit


def test_triton_kernels_are_tasks_of_streams():
    run_in_environment(
        *("pytest", "-q", "--noconftest", "-p", "no:cacheprovider", "-c", os.devnull),
        *("--rootdir", str(ROOT), str(ROOT / "tests" / "peer" / "kernels.py")),
    )
