"""What start-up refuses, switches off and says; which platform is active."""

import importlib.metadata
import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

import vllm_npu_prep
from tests.helpers.deploy import PODS, command_of, serve_flags, services
from tests.helpers.drafters import disturb_model
from tests.helpers.engine import engine_config, make_model
from tests.helpers.latent import GLM_DSA
from tests.helpers.own_connector import PullingConnector
from tests.helpers.releases import serve_parser
from tests.helpers.v2 import asked_for
from vllm_npu_prep import chosen_platform, device
from vllm_npu_prep.compat import activation
from vllm_npu_prep.compat.releases import SUPPORTED_VLLM, TORCH, is_since
from vllm_npu_prep.compat.v2 import RUNNER_ENV_VAR, read_choice
from vllm_npu_prep.device.probe import NPUProbe
from vllm_npu_prep.errors import PrepError
from vllm_npu_prep.server.stat_logger import StepStatLogger
from vllm_npu_prep.startup.subjects import vllm_ascend


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("qwen3"), num_hidden_layers=1)


@pytest.fixture
def configure(model):
    engine_config(model)  # vLLM sets its loggers up with its first config
    return lambda folder=model, **settings: engine_config(folder, **settings)


@pytest.fixture
def block(configure, caplog):
    """The block that start-up logs for an engine.

    vLLM says once what it said before, so each test has sizes of its own.
    """

    def block(*folder, **settings) -> str:
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="vllm"):
            configure(*folder, **settings)
        return next(row for row in reversed(caplog.messages) if "vllm_npu_prep:\n" in row)

    return block


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"maks": 1}, ['"maks"', '"mask"']),
        ({"attention": "fia"}, ['"fia"', "reference"]),
        ({"mask": "dense", "mask_budget_bytes": 1 << 14}, ["mask_budget_bytes", "compressed"]),
    ],
    ids=["unknown key", "family of another device", "dense mask beyond the budget"],
)
def test_options_that_cannot_be_had_are_refused_in_one_line(configure, options, parts):
    with pytest.raises(PrepError) as error:
        configure(additional_config={"npu_prep": options})
    assert "\n" not in str(error.value)
    for part in parts:
        assert part in str(error.value)


@pytest.mark.parametrize(("package", "label"), [("vllm", "vLLM"), ("torch", "torch")])
def test_other_versions_are_refused_unless_they_are_to_be_tried(
    package, label, monkeypatch, caplog
):
    installed = {"vllm": f"{SUPPORTED_VLLM[-1]}+empty", "torch": TORCH, package: "0.99.1+cpu"}
    monkeypatch.setattr(importlib.metadata, "version", installed.get)
    with pytest.raises(PrepError, match=rf"{label} 0\.99\.1 is installed.*vllm_npu_prep\[serve\]"):
        activation.check_versions()
    monkeypatch.setenv("NPU_PREP_ANY_VLLM", "1")
    activation.check_versions()
    assert f"{label} 0.99.1 was not tested with vllm_npu_prep" in caplog.text


def test_defaults_that_start_up_decides(configure):
    config = configure()
    assert config.parallel_config.worker_cls == "vllm_npu_prep.worker.NPUWorker"
    assert config.compilation_config.cudagraph_mode.name == "FULL_AND_PIECEWISE"
    assert config.use_v2_model_runner
    assert config.shutdown_timeout > 0
    assert config.scheduler_config.async_scheduling


def test_a_model_that_sees_says_so_or_serves_text_only(block, vision_models):
    sees = {"skip_tokenizer_init": False, "compilation_config": {"cudagraph_mm_encoder": True}}
    seeing = block(vision_models / "qwen2_5_vl", max_num_seqs=3, **sees)
    assert "multimodal    image, video, M-RoPE; all steps read embeddings" in seeing
    assert "off           cudagraph_mm_encoder" in seeing
    both_ways = {"language_model_only": True, "hf_overrides": {"is_mm_prefix_lm": True}}
    assert "multimodal" not in block(
        vision_models / "qwen2_5_vl", max_num_seqs=4, skip_tokenizer_init=False, **both_ways
    )


def test_drafters_leave_scheduling_as_vllm_decides_it(configure, model, tmp_path):
    """vLLM 0.33.0 schedules ngram asynchronously, too, on V2."""
    drafter = disturb_model(tmp_path, model, share=0.1)
    drafts = {"method": "draft_model", "model": str(drafter), "num_speculative_tokens": 2}
    assert configure(speculative_config=drafts).scheduler_config.async_scheduling
    ngram = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
    asynchronous = configure(speculative_config=ngram).scheduler_config.async_scheduling
    assert asynchronous == is_since("0.33.0")


def test_layers_share_an_indexer_and_draft_passes_do_not(block, configure, tmp_path):
    """transformers names the layers in its own way; vLLM shares what the first pass chose."""
    folder = make_model(tmp_path, "GlmMoeDsa", **GLM_DSA, num_nextn_predict_layers=1)
    config = json.loads((folder / "config.json").read_text())
    del config["index_topk_freq"], config["index_skip_topk_offset"]
    config["index_share_for_mtp_iteration"] = True
    (folder / "config.json").write_text(json.dumps(config))
    drafts = {"method": "mtp", "num_speculative_tokens": 2}
    made = configure(folder, speculative_config=drafts)
    assert made.model_config.hf_text_config.index_topk_pattern == "FSFS"
    drafter = made.speculative_config.draft_model_config.hf_config
    assert not drafter.index_share_for_mtp_iteration
    said = block(folder, speculative_config=drafts, max_model_len=127)
    assert "each draft pass chooses its positions" in said


def test_a_connector_that_is_registered_by_name_is_its_owner_s(configure, monkeypatch):
    monkeypatch.setattr(KVConnectorFactory, "_registry", {**KVConnectorFactory._registry})
    KVConnectorFactory.register_connector(
        "Mine", PullingConnector.__module__, PullingConnector.__qualname__
    )
    config = configure(kv_transfer_config={"kv_connector": "Mine", "kv_role": "kv_both"})
    chosen = KVConnectorFactory.get_connector_class(config.kv_transfer_config)
    assert chosen is PullingConnector


def test_each_engine_of_a_process_has_the_runner_it_asks_for(configure):
    """Whichever was asked for when the process began; V2 where none is."""
    found = []
    for asked in ("V1", "V2", "V1", "V2"):
        with asked_for(asked):
            found.append(configure().use_v2_model_runner)
    found.append(configure().use_v2_model_runner)
    assert found == [False, True, False, True, True]


@pytest.mark.parametrize(("given", "read"), [("true", "1"), (" 0", "0"), ("", None), ("v2", None)])
def test_a_choice_of_a_runner_is_1_or_0(monkeypatch, given, read):
    monkeypatch.setenv(RUNNER_ENV_VAR, given)
    if given == "v2":
        with pytest.raises(PrepError, match="'v2' is no choice of a model runner: set it to 1"):
            read_choice()
    else:
        read_choice()
    assert os.environ.get(RUNNER_ENV_VAR) == read


def test_groups_are_cleaned_up_before_an_engine_begins(monkeypatch):
    """As a process does that has imported vLLM, and loaded no general plugin."""
    for name in ("synchronize", "empty_cache", "empty_host_cache"):
        monkeypatch.setattr(torch.accelerator, name, getattr(torch.accelerator.memory, name, None))
    activation.activate_platform()
    cleanup_dist_env_and_memory()


@pytest.mark.parametrize(
    ("name", "given", "used"),
    [
        ("OMP_WAIT_POLICY", None, "passive"),  # threads sleep while they wait
        ("OMP_WAIT_POLICY", "active", "active"),
        ("GLIBC_TUNABLES", None, "glibc.malloc.hugetlb=1"),  # huge pages for weights
        ("GLIBC_TUNABLES", "glibc.malloc.check=1", "glibc.malloc.check=1"),
    ],
)
def test_a_cpu_gets_quick_settings_unless_set(monkeypatch, name, given, used):
    monkeypatch.setenv(name, given or "")
    if not given:
        monkeypatch.delenv(name)
    activation.activate_platform()
    assert os.environ[name] == used


def test_one_graph_serves_any_number_of_adapters(configure):
    config = configure(enable_lora=True, specialize_active_lora=True)
    assert not config.lora_config.specialize_active_lora


def test_start_up_block_says_what_runs_and_what_is_off(block, tmp_path):
    said = block(
        max_num_seqs=7,
        enable_lora=True,
        max_loras=3,
        specialize_active_lora=True,
        additional_config={"npu_prep": {"mask": "compressed"}},
        compilation_config={"backend": "inductor"},
        profiler_config={
            "profiler": "torch",
            "torch_profiler_dir": str(tmp_path),
            "capture_torch_profiler": True,
        },
    )
    for part in (
        "CPU fallback",
        "compiled kernels",
        "compressed",
        "graph mode    FULL_AND_PIECEWISE",
        "check         cheap",
        "probe         none: kernels of the CPU fallback",
        "7 requests",
        "off           Inductor",
        "LoRA          3",
        "active-lora",
        "capture_",
    ):
        assert part in said


@pytest.mark.parametrize("caches", [True, False])
def test_start_up_warns_of_priorities_beside_a_prefix_cache(block, caches):
    said = block(
        scheduling_policy="priority", enable_prefix_caching=caches, max_num_seqs=11 + caches
    )
    assert ("note          priority scheduling may leave blocks" in said) == caches


UNPADDED = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
UNPADDED["disable_padded_drafter_batch"] = True


UNSUPPORTED = "with disable_padded_drafter_batch is not supported by vllm_npu_prep: its first"


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({}, "V2; a request with a seed gets other random tokens than on V1, which VLLM_USE_V2_"),
        ({"speculative_config": UNPADDED}, f"V1: Model Runner V2 {UNSUPPORTED}"),
        ({"pipeline_parallel_size": 2}, "V2"),
    ],
    ids=["V2", "V1", "stages on V2"],
)
def test_an_engine_has_v2_unless_v1_alone_has_what_it_asks_for(block, configure, asked, said):
    """Which start-up says, with the reason; drafters of V1 and parts of its model stay on V1."""
    row = f"\n  runner        Model Runner {said}"
    told, config = block(max_num_seqs=20 + len(said), **asked), configure(**asked)
    assert row in told
    assert config.use_v2_model_runner == said.startswith("V2")
    assert config.scheduler_config.async_scheduling == ("speculative_config" not in asked)


def test_start_up_says_that_the_environment_chose_v1(block):
    with asked_for("V1"):
        said = block(max_num_seqs=19)
    assert "\n  runner        Model Runner V1, which VLLM_USE_V2_MODEL_RUNNER chooses" in said


@pytest.mark.parametrize("on_host", [True, False])
def test_engines_agree_on_the_host_whatever_is_asked_for(block, configure, on_host):
    """And start-up says so if the device was asked for."""
    flag = {"disable_nccl_for_dp_synchronization": on_host}
    said = block(data_parallel_size=2, max_num_seqs=13 + on_host, **flag)
    parallel = configure(data_parallel_size=2, **flag).parallel_config
    assert parallel.disable_nccl_for_dp_synchronization
    assert (
        "note          data-parallel ranks agree on the size of each step on the host" in said
    ) != on_host


def test_start_up_names_variables_of_vllm_ascend_that_are_set(block, monkeypatch):
    """An image may set them, so they are no error."""
    monkeypatch.setenv("VLLM_ASCEND_ENABLE_NZ", "1")
    said = block(max_num_seqs=15)
    assert "VLLM_ASCEND_ENABLE_NZ: variables of vllm-ascend, not read here" in said
    assert "docs/guides/vllm-ascend.md" in said


def test_bad_environment_gets_one_line_and_no_traceback():
    code = "from vllm.platforms import current_platform"
    environment = {**os.environ, "NPU_PREP_DEVICE": "gpu"}
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 2
    assert "NPU_PREP_DEVICE='gpu' is not a device" in run.stderr
    assert "Traceback" not in run.stderr


def test_vllm_takes_every_flag_of_the_manifests():
    parser = serve_parser()
    commands = [command_of(service) for service in services().values()]
    commands += [command_of(spec["template"]["spec"]["containers"][0]) for _, spec in PODS.values()]
    parsed = [parser.parse_args(flags) for flags in map(serve_flags, commands) if flags]
    assert len(parsed) == 7
    assert {args.shutdown_timeout for args in parsed} == {60}
    assert all((args.model_tag or "").startswith("/models/") for args in parsed)


@pytest.mark.parametrize(
    ("choice", "probe", "expected"),
    [
        ("cpu", NPUProbe(True, True, ""), device.CPU_KIND),
        ("auto", NPUProbe(True, True, ""), device.NPU_KIND),
        ("npu", NPUProbe(True, True, ""), device.NPU_KIND),
        ("auto", NPUProbe(False, False, "torch_npu is not installed"), device.CPU_KIND),
        ("auto", NPUProbe(True, False, "no /dev/davinci* node"), PrepError),
        ("npu", NPUProbe(False, False, "torch_npu is not installed"), PrepError),
        ("npu", NPUProbe(True, False, "no /dev/davinci* node"), PrepError),
    ],
)
def test_device_choice_never_falls_silently_to_the_cpu(choice, probe, expected, monkeypatch):
    monkeypatch.setenv("NPU_PREP_DEVICE", choice)
    monkeypatch.setattr("vllm_npu_prep.device.probe.probe_npu", lambda: probe)
    if expected is PrepError:
        with pytest.raises(PrepError, match=probe.reason.replace("*", r"\*")):
            device.choose_device()
    else:
        assert device.choose_device() == expected


def test_inactive_where_another_platform_works_unless_asked(monkeypatch):
    monkeypatch.setattr(activation, "_other_platform_works", lambda: True)
    monkeypatch.setenv("NPU_PREP_DEVICE", "auto")
    assert activation.activate_platform() is None
    monkeypatch.setenv("NPU_PREP_DEVICE", "cpu")
    assert activation.activate_platform() == activation.PLATFORM_CLASS


@pytest.mark.parametrize(
    ("names", "device", "chosen", "leaves"),
    [
        (["npu_prep"], "", None, False),
        (["npu_prep", "ascend"], "", None, True),
        (["npu_prep", "ascend"], "auto", None, True),
        (["npu_prep", "ascend"], "npu", None, False),  # it was asked for
        (["npu_prep", "ascend"], "", "npu_prep", False),
        (["npu_prep", "ascend"], "", "ascend,npu_prep_watch", True),
    ],
)
def test_inactive_beside_another_package_s_platform(names, device, chosen, leaves, monkeypatch):
    entries = [SimpleNamespace(name=name) for name in names]
    monkeypatch.setattr(chosen_platform, "entry_points", lambda group: entries)
    monkeypatch.setattr(activation, "activate_platform", lambda: "ours")
    monkeypatch.setenv("NPU_PREP_DEVICE", device)
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    if chosen:
        monkeypatch.setenv("VLLM_PLUGINS", chosen)
    assert vllm_npu_prep.register() == (None if leaves else "ours")


def test_nothing_is_done_in_processes_of_another_platform(monkeypatch):
    """Not even an import, which might need another release of vLLM."""
    monkeypatch.setattr(chosen_platform, "is_ours", lambda: False)
    monkeypatch.setitem(sys.modules, "vllm_npu_prep.compat", None)
    monkeypatch.setitem(sys.modules, "vllm_npu_prep.observe.metrics", None)
    vllm_npu_prep.register_general()
    StepStatLogger(None, [0])


def test_the_page_about_vllm_ascend_has_all_refused_keys():
    page = (Path(__file__).parents[2] / vllm_ascend.PAGE).read_text()
    assert [name for name in vllm_ascend.VARIABLES if f"`{name}" not in page] == []
    keys = page.partition("### Keys of")[2].partition("\n### ")[0]
    cells = re.findall(r"^\| (`.*?) \|", keys, re.MULTILINE)
    named = {name for cell in cells for name in re.findall(r"`([a-zA-Z]\w+)`", cell)}
    fused = {"fuse_norm_quant", "fuse_qknorm_rope", "fuse_muls_add", "fuse_allreduce_rms"}
    inside = fused | {"enable_static_kernel", "enable_super_kernel", "dyntra_lb_config"}
    variables = {name for name in named if name.startswith(vllm_ascend.VARIABLES)}
    assert named - inside - variables == vllm_ascend.KEYS
