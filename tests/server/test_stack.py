"""The stack as Ascend users run it: `vllm serve` on two emulated cards, under `vllm bench serve`.

DeepSeek V3's shape with W8A8 weights, tensor parallelism with experts shared out, drafts of its MTP
layer, FULL_AND_PIECEWISE, asynchronous scheduling, prefix caching; every check on, and hazards are
errors. What it answers it knows by heart.
"""

import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from transformers import AutoTokenizer

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import demo
import tiny_deepseek

from tests.helpers.demo import CACHE, make_demo
from tests.helpers.emulator import import_path, why_no_emulator
from tests.helpers.prompts import chat_prompt
from tests.server.process import COMPLETIONS, Server

MAX_TOKENS = 24
BEGUN = "How is a slot computed?"  # the longest exchange


class EmulatedServer(Server):
    """`vllm serve` on two emulated cards."""

    start_seconds = 1200

    def __init__(self, model: Path, folder: Path) -> None:
        flags = ("--report", str(folder / "report.json"), "--hang-seconds", "300")
        self.prefix = (sys.executable, "-m", "vllm_npu_prep.cli", *demo.EMULATED, "2", *flags, "--")
        environment = {"PYTHONPATH": import_path(), "NPU_PREP_DEVICE": "npu"}
        super().__init__(model, folder / "log", *demo.STACK, **environment)


def bench(server: Server, prompts: list[str], folder: Path) -> dict:
    """What ``vllm bench serve`` found, each prompt sent once, four at a time."""
    data = [{"conversations": [{"value": prompt}, {"value": prompt}]} for prompt in prompts]
    (folder / "prompts.json").write_text(json.dumps(data))
    command = [
        *(str(Path(sys.executable).with_name("vllm")), "bench", "serve"),
        *("--backend", "openai", "--endpoint", COMPLETIONS, "--port", str(server.port)),
        *("--model", server.model, "--temperature", "0", "--disable-tqdm"),
        *("--dataset-name", "sharegpt", "--dataset-path", str(folder / "prompts.json")),
        *("--sharegpt-output-len", str(MAX_TOKENS), "--num-prompts", str(len(prompts))),
        *("--max-concurrency", "4", "--save-result", "--save-detailed", "--disable-shuffle"),
        *("--result-dir", str(folder), "--result-filename", "bench.json"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return json.loads((folder / "bench.json").read_text())


@pytest.mark.skipif(bool(why_no_emulator()), reason=why_no_emulator())
def test_it_answers_what_it_learned(tmp_path):
    """The last prompt is one whose answer has begun, and it is sent again.

    What the cache has of it are a prompt, accepted drafts and samples. It has to have three blocks:
    a drafter takes one full block less.
    """
    float_model = make_demo("tiny_deepseek.py", demo.DEEPSEEK.name)
    model = tiny_deepseek.make_int8(CACHE / demo.DEEPSEEK_INT8.name, float_model)
    learned, tokenizer = dict(tiny_deepseek.exchanges()), AutoTokenizer.from_pretrained(model)
    prompts = {asked: tokenizer.decode(chat_prompt(tokenizer, asked)) for asked in learned}
    begun, *rest = learned[BEGUN].rsplit(" ", 3)
    prompts["begun"] = prompts[BEGUN] + begun
    server = EmulatedServer(model, tmp_path)
    try:
        assert "check         full" in server.log()
        assert "asynchronous, batched" in server.log()
        found = bench(server, [*prompts.values()], tmp_path)
        again = server.complete(prompts["begun"], max_tokens=MAX_TOKENS)["text"].strip()
        counted: dict[str, float] = defaultdict(float)
        for sample in server.samples():
            counted[sample.name] += sample.value
        server.process.terminate()
        code = server.process.wait(900)
    finally:
        server.kill()
    assert (code, server.forced()) == (0, [])
    assert (found["completed"], found["failed"]) == (len(prompts), 0)
    texts = [text.strip() for text in found["generated_texts"]]
    assert [*texts, again] == [*learned.values(), *[" ".join(rest)] * 2]
    drafted, accepted = (
        counted[f"vllm:spec_decode_num_{what}_tokens_total"] for what in ("draft", "accepted")
    )
    assert 0.7 * drafted < accepted < drafted, "the drafter has learned the answers, too"
    assert counted["vllm:prefix_cache_hits_total"] > 0
    ran = json.loads((tmp_path / "report.json").read_text())
    assert ran["hazards"] == []
    assert any(name.startswith("HcclAllReduce") for name in ran["kernels"])
