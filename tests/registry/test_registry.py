"""Some architectures of vLLM's registry; `python -m tests.registry` asks for each of them."""

import json
import subprocess
import sys

import pytest
import transformers

from tests.registry import page, tiny
from vllm_npu_prep.compat.releases import SUPPORTED_VLLM, installed_vllm

CAME = {
    "Qwen3ForCausalLM": ("served", "tokens of transformers"),
    "BertForSequenceClassification": ("served", "pools (classify)"),
    "GptOssForCausalLM": ("refused", "layers with attention sinks are not supported"),
    "HrmTextForCausalLM": ("refused", "PrefillPrefixLMAttention"),
    "LongcatFlashForCausalLM": ("refused", "experts that compute nothing"),
    "LongcatFlashNgramForCausalLM": ("refused", "is refused by vLLM's own code of it"),
    "MiniMaxM3SparseForConditionalGeneration": ("refused", "sparse attention"),
    "MedusaModel": ("refused", "MedusaModel as a model of its own"),
    "OrionForCausalLM": ("not made", "its config is remote code"),
    "no architecture: dies": ("fault", "exit code"),
    "no architecture: hangs": ("fault", "no answer"),
}
"""What comes of them, and what is said of it."""


@pytest.fixture(scope="module")
def came():
    """What came of each, asked in a process of its own: the tests' own has threads and engines."""
    command = [sys.executable, "-m", "tests.registry", *CAME]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return dict(zip(CAME, map(json.loads, ran.stdout.splitlines()), strict=True))


@pytest.mark.parametrize("architecture", CAME)
def test_an_architecture_is_served_or_refused_in_one_line(architecture, came):
    """Or a fault, if its process dies or hangs."""
    what, said = CAME[architecture]
    told = came[architecture]
    assert told["what"] == what, told
    assert said in f"{told['how']} {told['where']}"
    assert what != "refused" or "\n" not in told["where"]


def test_fields_are_small_in_configs_inside_of_configs_too():
    config = tiny.tiny_config("Qwen3VLForConditionalGeneration")
    assert isinstance(config, transformers.Qwen3VLConfig)
    text = config.text_config
    assert (text.hidden_size, text.num_hidden_layers, text.vocab_size) == (64, 2, 512)
    assert config.vision_config.depth == 2


@pytest.mark.skipif(installed_vllm() != SUPPORTED_VLLM[0], reason="of the pinned vLLM's registry")
def test_every_architecture_has_a_result_and_none_is_a_fault():
    latest = page.latest()
    assert set(latest) == set(tiny.registered())
    assert [unit for unit, result in latest.items() if result.failed] == []


def test_the_page_says_what_the_results_say():
    text = page.PAGE.read_text()
    assert text == page.render(text), "run python -m tests.registry --page"
