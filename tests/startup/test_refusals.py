"""What start-up refuses: everything that applies, by name, before a process starts."""

import functools
import json
import sys

import pytest

from tests.helpers.engine import engine_config, make_model
from tests.server.hostile import REFUSED_AT_STARTUP
from tests.startup.cases import CASES, DRAFTER, EDITED, HALF, NPUS, SEEING, Case
from vllm_npu_prep import device, platform
from vllm_npu_prep.attention.families import KERNEL_FAMILIES
from vllm_npu_prep.compat.releases import is_since
from vllm_npu_prep.errors import PrepError
from vllm_npu_prep.startup.refusals import (
    REFUSALS,
    SUBJECTS,
    refusals_that_apply,
    refuse_unsupported,
)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folder of a model, made once for each family and config."""
    folder = tmp_path_factory.mktemp("models")

    @functools.cache
    def make(family: str, config: str):
        settings = {"num_hidden_layers": 1, **eval(config)}
        edited = settings.pop(EDITED, {})
        made = make_model(folder / f"{family}-{make.cache_info().misses}", family, **settings)
        written = json.loads((made / "config.json").read_text())
        (made / "config.json").write_text(json.dumps({**written, **edited}))
        return made

    return lambda family, config: make(family, repr(config))


@pytest.fixture
def refuse(models, monkeypatch):
    """Ask for an engine: ids of what is refused, and the message."""

    def refuse(case: Case, folder=None) -> tuple[tuple[str, ...], str]:
        def patch() -> None:
            for target, value in case.patches.items():
                monkeypatch.setattr(target, value)

        for name, value in case.environment.items():
            monkeypatch.setenv(name, value)
        settings = dict(case.settings)
        speculative = settings.get("speculative_config")
        if speculative and speculative.get("model") == DRAFTER:
            drafter = str(models(*case.drafter))
            settings["speculative_config"] = {**speculative, "model": drafter}
        folder, asked = folder or models(*case.model), []
        if case.family is None:
            patch()
            monkeypatch.setattr(
                platform,
                "refuse_unsupported",
                lambda *of: (asked.append(of), refuse_unsupported(*of)),
            )
            with pytest.raises(PrepError) as error:
                engine_config(folder, **settings)
        else:
            config = engine_config(folder, **settings)  # the CPU fallback runs it
            patch()
            kind = device.NPU_KIND if case.on_npu else device.CPU_KIND
            asked.append((config, KERNEL_FAMILIES[case.family], kind))
            with pytest.raises(PrepError) as error:
                refuse_unsupported(*asked[0])
        return tuple(refusals_that_apply(*asked[0])), str(error.value)

    # Packages that vLLM wants for a method are beside the point.
    monkeypatch.setitem(sys.modules, "arctic_inference", sys)
    monkeypatch.setattr("vllm.config.speculative.has_arctic_inference", lambda: True)
    return refuse


def check(case: Case, ids: tuple[str, ...], message: str) -> None:
    assert ids == case.ids
    for part in case.parts:
        assert part in message
    assert message.count("\n") == (len(ids) if len(ids) > 1 else 0)


OF_0_32 = {
    "cache of another dtype than the model's",
    "asynchronous stages",
    "graphs that Ray compiles",
}
"""What vLLM 0.33.0 refuses before the plugin is asked, or no longer has."""


@pytest.mark.parametrize("name", CASES)
def test_what_is_not_supported_is_refused_by_name(name, refuse):
    if name in OF_0_32 and is_since("0.33.0"):
        pytest.skip("this release of vLLM refuses it itself, or has it no longer")
    check(CASES[name], *refuse(CASES[name]))


@pytest.mark.parametrize("name", SEEING)
def test_what_models_that_see_are_refused(name, refuse, vision_models):
    case = SEEING[name]
    settings = {"skip_tokenizer_init": False, **case.settings}
    ids, message = refuse(
        Case(**{**vars(case), "settings": settings}), vision_models / "qwen2_5_vl"
    )
    check(case, ids, message)


def test_every_refusal_is_shown_by_a_case():
    shown = {id for case in (CASES | SEEING).values() for id in case.ids}
    assert shown == set(REFUSALS)


def test_advisories_on_what_is_not_served_name_its_refusal():
    shown = {name for case in (*CASES.values(), *SEEING.values()) for name in case.ids}
    assert set(REFUSED_AT_STARTUP.values()) <= shown


def test_refusals_have_ids_of_their_own():
    ids = [refusal.id for subject in SUBJECTS for refusal in subject.refusals]
    assert len(set(ids)) == len(ids)


def test_all_that_applies_is_reported_a_line_each(refuse):
    ids, message = refuse(CASES["several at once"])
    first, *lines = message.splitlines()
    assert first == "4 things have to be changed:"
    told = ("--kv-cache-dtype fp8", "--quantization fp8", "--enable-nccl-comm", "KV connector")
    assert len(lines) == len(ids)
    for line, feature in zip(lines, told):
        assert line.startswith(f"  {feature}")


def test_what_is_supported_is_not_refused(models, monkeypatch, vision_models):
    """Each beside what is refused of it."""
    for target, value in NPUS.items():
        monkeypatch.setattr(target, value)
    fia, atb = KERNEL_FAMILIES["fia"], KERNEL_FAMILIES["atb"]
    window = models("Mistral", {"sliding_window": 13})
    qwen = models("Qwen3", {})
    for family in (fia, atb):
        assert not refusals_that_apply(engine_config(window, **HALF), family, device.CPU_KIND)
    config = engine_config(qwen, **HALF, tensor_parallel_size=2)
    assert not refusals_that_apply(config, fia, device.NPU_KIND)
    monkeypatch.setattr("vllm_npu_prep.startup.subjects.ranks.has_collectives", {"cpu": 1}.get)
    config = engine_config(qwen, **HALF, data_parallel_size=2)
    assert not refusals_that_apply(config, fia, device.NPU_KIND)
    config = engine_config(qwen, **HALF)
    config.additional_config = {"npu_prep": {"triton_kernels": "keep"}}
    monkeypatch.setattr("vllm.triton_utils.HAS_TRITON", True)
    assert not refusals_that_apply(config, fia, device.NPU_KIND)
    monkeypatch.setattr("vllm_npu_prep.startup.subjects.inputs.MODALITIES", ("image",))
    seeing = {"skip_tokenizer_init": False, "limit_mm_per_prompt": {"video": 0}}
    engine_config(vision_models / "qwen2_5_vl", **seeing)


def test_layers_that_share_k_and_v_run_where_prompts_are_read_from_the_cache(models):
    case = next(case for case in CASES.values() if case.ids == ("kv-sharing",))
    config = engine_config(models(*case.model), **case.settings)
    assert not refusals_that_apply(config, KERNEL_FAMILIES["fia"], device.CPU_KIND)


def test_ngram_drafts_run_beside_a_kv_connector(models):
    settings = CASES["a drafter beside a KV connector"].settings
    ngram = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
    config = engine_config(models("Qwen3", {}), **{**settings, "speculative_config": ngram})
    assert config.speculative_config.method == "ngram"
    assert config.kv_transfer_config.kv_connector == "ExampleConnector"
