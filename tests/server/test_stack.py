"""The stack as Ascend users run it: `vllm serve` on two emulated cards, under `vllm bench serve`.

W8A8 weights, tensor parallelism with experts shared out, drafts, FULL_AND_PIECEWISE, asynchronous
scheduling, prefix caching; every check on, and hazards are errors. Texts are those of the CPU
fallback, which computes alone, eagerly and without drafts.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from prometheus_client.parser import text_string_to_metric_families

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import demo
import quantize
import tiny_deepseek
import tiny_model

from tests.conftest import SEED
from tests.helpers.demo import CACHE, make_demo
from tests.helpers.drafters import make_eagle_head
from tests.helpers.emulator import import_path, why_no_emulator
from tests.helpers.engine import engine, generate, make_model, save_tokenizer
from tests.helpers.huggingface import logits_by
from tests.helpers.mixtures import MIXTURES
from tests.helpers.prompts import chat_prompt, prompts_of
from tests.helpers.quantized import rounded_model
from tests.helpers.step_logits import close_calls
from tests.npu.close_calls import CLOSE_IN_INT8
from tests.npu.only_some import HEAD_SIZE
from tests.server.test_server import Server

pytestmark = pytest.mark.skipif(bool(why_no_emulator()), reason=why_no_emulator())

MAX_TOKENS = 24
BEGUN = "How is a slot computed?"  # the longest exchange
REPORT = "report.json"


class Stack(NamedTuple):
    """What is served."""

    model: Path
    flags: list[str]
    prompts: list[str]
    shared: str  # a prompt of several blocks, which is sent twice
    ignore_eos: bool
    learned: list[tuple[str, str]]  # questions of the first prompts, and answers
    emulated: bool = True
    float_model: Path | None = None  # where nothing was learned: tokens may part in close calls


def asked_of(model: Path, learned: list[tuple[str, str]]) -> tuple[list[str], str]:
    """Prompts that ask a model what it learned, and one whose answer has begun.

    What the cache has of the last one are a prompt, accepted drafts and samples. It has to have
    three blocks: a drafter takes one full block less.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = {asked: tokenizer.decode(chat_prompt(tokenizer, asked)) for asked, _ in learned}
    return list(prompts.values()), prompts[BEGUN] + dict(learned)[BEGUN].rsplit(" ", 3)[0]


def deepseek(folder: Path) -> Stack:
    """In DeepSeek V3's shape; its MTP layer drafts. What it says it knows by heart."""
    del folder
    model = make_demo("tiny_deepseek.py", demo.DEEPSEEK.name)
    int8 = tiny_deepseek.make_int8(CACHE / demo.DEEPSEEK_INT8.name, model)
    learned = tiny_deepseek.exchanges()
    prompts, begun = asked_of(int8, learned)
    return Stack(int8, demo.STACK, [*prompts, begun], begun, False, learned)


def qwen3_moe(folder: Path) -> Stack:
    """A Qwen3-MoE with random weights; an EAGLE-3 head drafts."""
    config = {"head_dim": HEAD_SIZE, "spread": 0.1, "embedding_scale": 20}
    model = make_model(folder / "model", "Qwen3Moe", **{**MIXTURES["Qwen3Moe"], **config})
    save_tokenizer(model)
    head = make_eagle_head(folder / "head", model, "eagle3", head_dim=HEAD_SIZE)
    quantize.quantize(model, folder / "int8", "modelslim")
    drafts = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 2}
    flags = [*demo.STACK, "--dtype", "float16", "--speculative-config", json.dumps(drafts)]
    prompts = [
        " ".join(f"t{token}" for token in each)
        for each in prompts_of(SEED + 1, [5, 40, 17, 90, 30, 9, 60, 21])
    ]
    return Stack(folder / "int8", flags, prompts, prompts[3], True, [], float_model=model)


def demo_on_the_fallback(folder: Path) -> Stack:
    """The demo model and its EAGLE-3 head on one rank of the CPU fallback, in float32."""
    model = make_demo("tiny_model.py", demo.MODEL.name)
    head = make_demo("tiny_drafters.py", demo.DRAFTERS.name) / "eagle3"
    quantize.quantize(model, folder / "int8", "modelslim")
    drafts = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 3}
    flags = [
        *(*demo.STACK, "--dtype", "float32", "--tensor-parallel-size", "1"),
        *("--speculative-config", json.dumps(drafts)),
    ]
    flags.remove("--enable-expert-parallel")
    learned = tiny_model.exchanges()
    prompts, begun = asked_of(model, learned)
    return Stack(folder / "int8", flags, [*prompts, begun], begun, False, learned, emulated=False)


STACKS: dict[str, Callable[[Path], Stack]] = {
    "DeepSeek V3": deepseek,
    "Qwen3-MoE": qwen3_moe,
    "demo model on the fallback": demo_on_the_fallback,
}


class StackServer(Server):
    """`vllm serve` on two emulated cards, or on the fallback."""

    start_seconds = 1200

    def __init__(self, stack: Stack, folder: Path) -> None:
        environment = {"PYTHONPATH": import_path()}
        if stack.emulated:
            report = ("--report", str(folder / REPORT), "--hang-seconds", "300")
            command = (sys.executable, "-m", "vllm_npu_prep.cli", *demo.EMULATED)
            self.prefix = (*command, *report, "--")
            environment["NPU_PREP_DEVICE"] = "npu"
        super().__init__(stack.model, folder / "log", *stack.flags, **environment)

    def vllm_metrics(self) -> dict[str, float]:
        """vLLM's own counters, summed over their labels."""
        _, text = self.request("GET", "/metrics")
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(text.decode()):
            for sample in family.samples:
                found[sample.name] = found.get(sample.name, 0) + sample.value
        return found

    def complete(self, prompt: str, ignore_eos: bool) -> str:
        """The text after a prompt, without a space before it."""
        body = {"prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0}
        status, answer = self.request("POST", "/v1/completions", body | {"ignore_eos": ignore_eos})
        assert status == 200, answer
        return json.loads(answer)["choices"][0]["text"].strip()


def bench(server: Server, stack: Stack, folder: Path) -> dict[str, Any]:
    """What ``vllm bench serve`` found, each prompt sent once, four at a time."""
    prompts = [{"conversations": [{"value": p}, {"value": p}]} for p in stack.prompts]
    (folder / "prompts.json").write_text(json.dumps(prompts))
    command = [
        *(str(Path(sys.executable).with_name("vllm")), "bench", "serve"),
        *("--backend", "openai", "--endpoint", "/v1/completions", "--port", str(server.port)),
        *("--model", str(stack.model), "--temperature", "0", "--disable-tqdm"),
        *("--dataset-name", "sharegpt", "--dataset-path", str(folder / "prompts.json")),
        *("--sharegpt-output-len", str(MAX_TOKENS), "--num-prompts", str(len(prompts))),
        *("--max-concurrency", "4", "--save-result", "--save-detailed", "--disable-shuffle"),
        *("--result-dir", str(folder), "--result-filename", "bench.json"),
        *(["--ignore-eos"] if stack.ignore_eos else []),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return json.loads((folder / "bench.json").read_text())


def texts_of_the_fallback(stack: Stack) -> list[str]:
    """In this process: one rank, eagerly, without drafts."""
    from transformers import AutoTokenizer
    from vllm import SamplingParams

    tokenizer = AutoTokenizer.from_pretrained(stack.model)
    dtype = stack.flags[len(stack.flags) - stack.flags[::-1].index("--dtype")]
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=stack.ignore_eos)
    with engine(
        stack.model, dtype=dtype, quantization="ascend", block_size=16, skip_tokenizer_init=False
    ) as llm:
        inputs = [tokenizer(prompt).input_ids for prompt in stack.prompts]
        rows = generate(llm, inputs, params)
    return [tokenizer.decode(row, skip_special_tokens=True).strip() for row in rows]


def check_texts(stack: Stack, found: list[str], expected: list[str]) -> None:
    """Texts are equal; of a model that learned nothing, one of four may part at a close call.

    Two ranks round their slices of a row, and fused operators round elsewhere.
    """
    if stack.float_model is None:
        assert found == expected
        return
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(stack.model)
    prompts = [tokenizer(prompt).input_ids for prompt in stack.prompts]
    logits = logits_by(rounded_model(stack.float_model, stack.model, 2))
    ours, theirs = ([[int(word[1:]) for word in t.split()] for t in ts] for ts in (found, expected))
    assert close_calls(logits, prompts, ours, theirs, CLOSE_IN_INT8) <= len(prompts) // 4


@pytest.mark.parametrize("which", STACKS)
def test_texts_are_those_of_the_cpu_fallback(which, tmp_path):
    stack = STACKS[which](tmp_path)
    answers = [answer for _, answer in stack.learned]
    if answers:
        answers.append(" ".join(dict(stack.learned)[BEGUN].split()[-3:]))
    expected = texts_of_the_fallback(stack) if stack.emulated else answers
    assert not answers or expected == answers
    server = StackServer(stack, tmp_path)
    try:
        assert "check         full" in server.log()
        assert "asynchronous, batched" in server.log()
        first = server.complete(stack.prompts[0], stack.ignore_eos)
        found = bench(server, stack, tmp_path)
        assert (found["completed"], found["failed"]) == (len(expected), 0)
        texts = [text.strip() for text in found["generated_texts"]]
        check_texts(stack, texts, expected)
        assert first in (texts[0], expected[0])
        # Again, from the prefix cache
        place = stack.prompts.index(stack.shared)
        again = server.complete(stack.shared, stack.ignore_eos)
        assert again in (texts[place], expected[place])
        counted = server.vllm_metrics()
        code = server.stop(15)
    finally:
        server.kill()
    print({key: value for key, value in counted.items() if "spec_decode" in key})
    drafted, accepted = (
        counted[f"vllm:spec_decode_num_{what}_tokens_total"] for what in ("draft", "accepted")
    )
    assert 0 < accepted < drafted
    assert not answers or accepted > 0.7 * drafted, "the drafter has learned the answers, too"
    assert counted["vllm:prefix_cache_hits_total"] > 0
    assert code == 0, server.log()[-3000:]
    if not stack.emulated:
        return
    report = json.loads((tmp_path / REPORT).read_text())
    assert report["hazards"] == []
    assert any(name.startswith("HcclAllReduce") for name in report["kernels"])
