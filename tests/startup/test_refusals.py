"""What start-up refuses: everything that applies, by name, before a process starts."""

import copy
import json
import shlex
import sys
from pathlib import Path

import pytest
import transformers
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from tests.helpers.engine import inspect_models_here
from tests.server.hostile import REFUSED_AT_STARTUP
from tests.startup import examples
from tests.startup.examples import EXAMPLES, Example, Model
from tests.startup.npus import NPUS, SUBJECTS
from vllm_npu_prep import device, platform
from vllm_npu_prep.attention.families import KERNEL_FAMILIES
from vllm_npu_prep.compat.releases import is_since
from vllm_npu_prep.errors import PrepError
from vllm_npu_prep.startup import refusals
from vllm_npu_prep.startup.refusals import REFUSALS, refusals_that_apply, refuse_unsupported

SIZES = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "dtype": "float32",
}


def save(folder: Path, model: Model) -> str:
    """Save a model's config, which is all that start-up reads of it."""
    known = getattr(transformers, model["architectures"][0], None)
    kind = {} if known is None else {"model_type": known.config_class.model_type}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**SIZES, **kind, **model}))
    return str(folder)


@pytest.fixture(scope="module")
def parser():
    inspect_models_here()
    return EngineArgs.add_cli_args(FlexibleArgumentParser())


@pytest.fixture
def start(parser, tmp_path, vision_models):
    """Ask for an engine: messages of what is refused, by id, and what start-up raises."""

    def start(example: Example) -> tuple[dict[str, str], str]:
        found: dict[str, str] = {}

        def refuse(config, family, kind):
            if example.family:
                family, kind = KERNEL_FAMILIES[example.family], device.NPU_KIND
            found.update(refusals_that_apply(config, family, kind))
            refuse_unsupported(config, family, kind)

        sees = example.model is examples.VISION
        folder = str(vision_models / "qwen2_5_vl") if sees else save(tmp_path / "m", example.model)
        given = ["--model", folder, "--max-model-len", "128"]
        given += ["--dtype", "bfloat16" if example.family else "float32"]
        drafter = save(tmp_path / "drafter", example.drafter)
        words = shlex.split(example.arguments.replace("DRAFTER", drafter))
        with pytest.MonkeyPatch.context() as patch:
            while words and not words[0].startswith("-"):
                patch.setenv(*words.pop(0).split("=", 1))
            given += words if sees else ["--skip-tokenizer-init", *words]
            host = {
                **NPUS,
                f"{SUBJECTS}.kernels.device_name": lambda _: example.chip,
                "vllm_npu_prep.startup.asked.cann_version": lambda _: example.cann,
                "vllm_npu_prep.aclnn.is_missing": lambda function: function in example.lacks,
            }
            for target, value in {**(host if example.family else {}), **example.where}.items():
                patch.setattr(target, value)
            # Packages that vLLM wants for a method are beside the point
            patch.setitem(sys.modules, "arctic_inference", sys)
            patch.setattr("vllm.config.speculative.has_arctic_inference", lambda: True)
            patch.setattr(platform, "refuse_unsupported", refuse)
            arguments = copy.deepcopy(parser.parse_args(given))  # vLLM changes its defaults
            try:
                EngineArgs.from_cli_args(arguments).create_engine_config()
            except PrepError as error:
                return found, str(error)
        return found, ""

    return start


def test_each_refusal_has_an_example():
    assert all(EXAMPLES.values()) and EXAMPLES.keys() == REFUSALS.keys()


@pytest.mark.parametrize("id", REFUSALS)
def test_each_example_is_refused_by_its_rule(id, start):
    """In one line that says what was asked for, and by nothing else unless it says so."""
    for example in EXAMPLES[id]:
        if example.until and is_since(example.until):
            continue
        found, error = start(example)
        assert found.keys() == {id, *example.also}, example.arguments
        assert example.says in found[id]
        assert "\n" not in found[id]
        if not example.also:
            assert error == found[id]


def test_all_that_applies_is_reported_a_line_each(start):
    asked = "--kv-cache-dtype fp8 --quantization fp8 --dtype bfloat16 --enable-sleep-mode"
    connector = f"--enable-nccl-comm-suspend {examples.CONNECTOR} NixlConnector"
    found, error = start(Example(f"{asked} {connector}"))
    assert list(found) == ["kv-cache-dtype", "quantization", "sleep-communicators", "kv-connector"]
    first, *lines = error.splitlines()
    assert first == "4 things have to be changed:"
    assert lines == [f"  {message}" for message in found.values()]


WINDOW = examples.small_model("MistralForCausalLM", sliding_window=13)
ACCEPTED = {
    "a plain engine": Example(),
    "on fia": Example(family="fia"),
    "on atb": Example(family="atb"),
    "windows on fia": Example(model=WINDOW, family="fia"),
    "windows on atb": Example(model=WINDOW, family="atb"),
    "two ranks": Example("--tensor-parallel-size 2", family="fia"),
    "two engines without collectives": Example(
        "--data-parallel-size 2",
        family="fia",
        where={f"{SUBJECTS}.ranks.has_collectives": {"cpu": 1}.get},
    ),
    "Triton that works": Example(
        f"{examples.OPTION}.triton_kernels keep",
        family="fia",
        where={"vllm.triton_utils.HAS_TRITON": True},
    ),
    "input of a kind that is forbidden": Example(
        "--limit-mm-per-prompt.video 0",
        model=examples.VISION,
        where={f"{SUBJECTS}.inputs.MODALITIES": ("image",)},
    ),
    "shared K and V on fia": Example(model=examples.SHARED_LAYERS, family="fia"),
    "ngram beside a connector": Example(f"{examples.STORED} {examples.NGRAM}"),
}


@pytest.mark.parametrize("example", ACCEPTED.values(), ids=ACCEPTED)
def test_what_is_supported_is_not_refused(example, start):
    """Each beside what is refused of it."""
    assert start(example) == ({}, "")


def test_advisories_on_what_is_not_served_name_its_refusal():
    assert set(REFUSED_AT_STARTUP.values()) <= REFUSALS.keys()


def test_refusals_have_ids_of_their_own():
    ids = [refusal.id for subject in refusals.SUBJECTS for refusal in subject.refusals]
    assert len(set(ids)) == len(ids)
