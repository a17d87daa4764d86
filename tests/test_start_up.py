"""What start-up refuses, switches off and says; which platform is active."""

import importlib.metadata
import logging
import os
import subprocess
import sys

import pytest

from tests.helpers.deploy import PODS, command_of, serve_flags, services
from tests.helpers.engine import LLAMA4, engine_config, make_model
from tests.helpers.windows import SHARED_LAYERS
from vllm_npu_prep import compat, device
from vllm_npu_prep.attention.families import KERNEL_FAMILIES
from vllm_npu_prep.device.probe import NPUProbe
from vllm_npu_prep.errors import PrepError
from vllm_npu_prep.limits import refuse_unsupported


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("qwen3"), num_hidden_layers=1)


@pytest.fixture
def configure(model):
    engine_config(model)  # vLLM sets its loggers up with its first config
    return lambda folder=model, **settings: engine_config(folder, **settings)


MEAN_POOLING = {
    "runner": "pooling",
    "pooler_config": {"seq_pooling_type": "MEAN"},
    "max_num_batched_tokens": 128,
}

EXPERTS = {"num_experts": 4, "moe_intermediate_size": 32}
CHUNKS = {**LLAMA4, "no_rope_layers": [1]}
del CHUNKS["family"], CHUNKS["num_hidden_layers"]
MLA = {
    "kv_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "n_routed_experts": 0,
    "first_k_dense_replace": 1,
}
STATES = "state-space or linear-attention model .*: the KV cache holds K and V"
REFUSED = {
    "attention chunks in the default blocks": (
        {"folder": ("Llama4", CHUNKS)},
        ["--block-size 128", "attention chunks of 32 tokens", "whole blocks"],
    ),
    "attention chunks in transformers' code": (
        {"folder": ("Llama4", CHUNKS), "block_size": 16, "model_impl": "transformers"},
        ["--model-impl transformers with attention chunks", "whole contexts"],
    ),
    "attention chunks in blocks that don't divide them": (
        {"folder": ("Llama4", CHUNKS), "block_size": 12},
        ["--block-size 12", "attention chunks of 32 tokens"],
    ),
    "unknown key": ({"additional_config": {"npu_prep": {"maks": 1}}}, ['"maks"', '"mask"']),
    "family of another device": (
        {"additional_config": {"npu_prep": {"attention": "fia"}}},
        ['"fia"', "reference"],
    ),
    "dense mask beyond the budget": (
        {"additional_config": {"npu_prep": {"mask": "dense", "mask_budget_bytes": 1 << 14}}},
        ["mask_budget_bytes", "compressed"],
    ),
    "kernels of Triton": (
        {"additional_config": {"npu_prep": {"triton_kernels": "keep"}}},
        ["npu_prep.triton_kernels", '"keep"', "no working Triton", "triton-ascend", '"replace"'],
    ),
    "cache dtype": ({"kv_cache_dtype": "fp8"}, ["--kv-cache-dtype fp8", "auto"]),
    "cache of another dtype than the model's": (
        {"kv_cache_dtype": "bfloat16"},
        ["--kv-cache-dtype bfloat16", "auto"],
    ),
    "more cache than memory": (
        {"kv_cache_memory_bytes": 1 << 50},
        ["--kv-cache-memory-bytes", "free"],
    ),
    "fast prefill": ({"kv_sharing_fast_prefill": True}, ["--kv-sharing-fast-prefill"]),
    "weights on the host": ({"cpu_offload_gb": 1}, ["weight offloading", "device memory"]),
    "weights fetched ahead": ({"offload_group_size": 2}, ["weight offloading"]),
    "experts of another backend": ({"moe_backend": "triton"}, ["--moe-backend triton"]),
    "a cache over several ranks": (
        {"tensor_parallel_size": 4, "decode_context_parallel_size": 2},
        ["context parallelism", "whole requests"],
    ),
    "ranks of another launcher": (
        {"tensor_parallel_size": 2, "distributed_executor_backend": "external_launcher"},
        ["--distributed-executor-backend external_launcher", "started by mp"],
    ),
    "experts exchanged by CUDA kernels": (
        {
            "folder": ("Qwen3Moe", EXPERTS),
            "data_parallel_size": 2,
            "all2all_backend": "deepep_low_latency",
        },
        ["--all2all-backend deepep_low_latency", "CUDA"],
    ),
    "asynchronous stages": (
        {"pipeline_parallel_size": 2, "async_scheduling": True},
        ["--async-scheduling over pipeline stages", "V1 runner"],
    ),
    "drafts over stages": (
        {
            "pipeline_parallel_size": 2,
            "speculative_config": {"method": "ngram", "num_speculative_tokens": 2},
        },
        ["speculation over pipeline stages", "--tensor-parallel-size"],
    ),
    "KV connector on several ranks": (
        {
            "tensor_parallel_size": 2,
            "kv_transfer_config": {
                "kv_connector": "ExampleConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"shared_storage_path": "kv"},
            },
            "enable_chunked_prefill": False,
        },
        ["KV connector ExampleConnector on several ranks", "each rank has a part"],
    ),
    "more cache than memory, on several ranks": (
        {"kv_cache_memory_bytes": 1 << 50, "tensor_parallel_size": 2},
        ["--kv-cache-memory-bytes", "each of 2 ranks", "free"],
    ),
    "chunks of prompts that are pooled whole": (
        {**MEAN_POOLING, "enable_chunked_prefill": True},
        ["--enable-chunked-prefill", "whole prompts"],
    ),
    "cached prefixes of prompts that are pooled whole": (
        {**MEAN_POOLING, "enable_prefix_caching": True},
        ["--enable-prefix-caching", "whole prompts"],
    ),
    "embeddings of prompts that are pooled": (
        {"runner": "pooling", "enable_prompt_embeds": True},
        ["--enable-prompt-embeds", "token ids"],
    ),
    "embeddings of prompts that drafts are looked up in": (
        {
            "speculative_config": {"method": "ngram", "num_speculative_tokens": 2},
            "enable_prompt_embeds": True,
        },
        ["--enable-prompt-embeds with speculation", "token ids"],
    ),
    "KV connector of another cache": (
        {
            "kv_transfer_config": {"kv_connector": "NixlConnector", "kv_role": "kv_both"},
            "enable_chunked_prefill": False,
        },
        ["KV connector NixlConnector", "planes", "ExampleConnector"],
    ),
    "KV connector of unknown code": (
        {
            "kv_transfer_config": {
                "kv_connector": "ExampleConnector",
                "kv_connector_module_path": "vllm.distributed.kv_transfer.kv_connector.v1."
                "example_connector",
                "kv_role": "kv_both",
            },
            "enable_chunked_prefill": False,
        },
        ["KV connector ExampleConnector", "planes"],
    ),
    "KV connector with chunks": (
        {"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}},
        ["KV connector ExampleConnector", "--no-enable-chunked-prefill"],
    ),
    "KV connector with prompts that are cut all the same": (
        {
            "kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"},
            "enable_chunked_prefill": False,
            "long_prefill_token_threshold": 9,
        },
        ["KV connector ExampleConnector", "--long-prefill-token-threshold"],
    ),
    "KV connector of prompts that are pooled": (
        {
            "kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"},
            "enable_chunked_prefill": False,
            "runner": "pooling",
        },
        ["KV connector ExampleConnector with MLA or pooling"],
    ),
    "KV connector over everybody's folder": (
        {
            "kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"},
            "enable_chunked_prefill": False,
        },
        ["KV connector ExampleConnector without a folder", "shared_storage_path"],
    ),
    "KV connector that knows no adapters": (
        {
            "kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"},
            "enable_chunked_prefill": False,
            "enable_lora": True,
        },
        ["KV connector ExampleConnector with LoRA or prompt embeddings", "token ids"],
    ),
    "KV connector of latent rows": (
        {
            "folder": ("DeepseekV2", MLA),
            "kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"},
            "enable_chunked_prefill": False,
        },
        ["KV connector ExampleConnector with MLA or pooling"],
    ),
    "routing of experts": (
        {"folder": ("Qwen3Moe", EXPERTS), "enable_return_routed_experts": True},
        ["--enable-return-routed-experts", "routing"],
    ),
    "offloaded KV cache": ({"kv_offloading_size": 1}, ["--kv-offloading-size", "planes"]),
    "weights from a trainer": (
        {"weight_transfer_config": {"backend": "nccl"}},
        ["--weight-transfer-config", "reload_weights"],
    ),
    "sleep mode": ({"enable_sleep_mode": True}, ["--enable-sleep-mode"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_supported_is_refused_by_name(case, configure, tmp_path):
    settings, parts = REFUSED[case]
    if "folder" in settings:  # of another model: its family and config
        family, config = settings["folder"]
        folder = make_model(tmp_path, family, num_hidden_layers=1, **config)
        settings = {**settings, "folder": folder}
    with pytest.raises(PrepError) as error:
        configure(**settings)
    assert "\n" not in str(error.value)
    for part in parts:
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("family", "config", "message"),
    [
        ("Bloom", {}, "ALiBi"),
        ("Bert", {"head": "Model", "position_embedding_type": "alibi"}, "ALiBi"),
        ("Qwen3", {"head_dim": 1024}, "head size 1024"),
        ("Mamba2", {"num_heads": 8, "state_size": 16, "n_groups": 1}, STATES),
        ("Jamba", {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 1}, STATES),
        ("Qwen3Next", {"layer_types": ["linear_attention"], "num_experts": 0}, STATES),
        # vLLM knows it no longer, and would run transformers' code
        ("Bamba", {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16}, STATES),
        (
            "DeepseekV2",
            {"q_lora_rank": 20, "index_topk": 8, "n_routed_experts": 0, "first_k_dense_replace": 1},
            "sparse",
        ),
    ],
)
def test_models_that_cannot_run_are_refused(tmp_path, configure, family, config, message):
    folder = make_model(tmp_path, family, num_hidden_layers=1, **config)
    with pytest.raises(PrepError, match=message):
        configure(folder)


@pytest.mark.parametrize(
    ("family", "config", "message"),
    [("Qwen3Moe", EXPERTS, "mixture-of-experts"), ("DeepseekV2", MLA, "MLA")],
)
def test_lora_is_refused_where_adapters_would_be_ignored(
    tmp_path, configure, family, config, message
):
    folder = make_model(tmp_path, family, num_hidden_layers=1, **config)
    with pytest.raises(PrepError, match=f"LoRA on .*{message}"):
        configure(folder, enable_lora=True)


@pytest.mark.parametrize("name", ["fia", "atb"])
@pytest.mark.parametrize(
    ("family", "config", "parts"),
    [
        ("Qwen3Moe", EXPERTS, ("mixture of experts", "npu_grouped_matmul")),
        ("DeepseekV2", MLA, ("MLA attention", "query_rope")),
        ("Gemma2", {}, ("logits soft cap", "no cap")),
    ],
)
def test_models_that_kernels_of_an_npu_cannot_run_are_refused_with_what_is_missing(
    tmp_path, configure, name, family, config, parts
):
    folder = make_model(tmp_path, family, num_hidden_layers=1, **config)
    vllm_config = configure(folder, dtype="bfloat16")  # runs on the CPU fallback
    with pytest.raises(PrepError) as error:
        refuse_unsupported(vllm_config, KERNEL_FAMILIES[name], device.CPU_KIND)
    assert "\n" not in str(error.value)
    for part in (*parts, f"kernel family {name}", "use the CPU fallback"):
        assert part in str(error.value)


@pytest.mark.parametrize("name", ["fia", "atb"])
def test_windows_run_on_the_kernels_of_an_npu(tmp_path, configure, name):
    folder = make_model(tmp_path, "Mistral", num_hidden_layers=1, sliding_window=13)
    vllm_config = configure(folder, dtype="bfloat16")
    refuse_unsupported(vllm_config, KERNEL_FAMILIES[name], device.CPU_KIND)


def test_layers_that_share_k_and_v_are_refused_where_prompts_are_never_read_from_the_cache(
    tmp_path, configure
):
    vllm_config = configure(make_model(tmp_path, "Gemma3n", **SHARED_LAYERS), dtype="bfloat16")
    refuse_unsupported(vllm_config, KERNEL_FAMILIES["fia"], device.CPU_KIND)
    with pytest.raises(PrepError, match=r"sharing of K and V between layers .* family atb"):
        refuse_unsupported(vllm_config, KERNEL_FAMILIES["atb"], device.CPU_KIND)


def test_kernels_of_triton_are_kept_where_it_drives_an_npu(configure, monkeypatch):
    vllm_config = configure(dtype="bfloat16")
    vllm_config.additional_config = {"npu_prep": {"triton_kernels": "keep"}}
    monkeypatch.setattr("vllm.triton_utils.HAS_TRITON", True)
    monkeypatch.setattr("vllm_npu_prep.limits.device_name", lambda device_type: "Ascend910B1")
    monkeypatch.setattr("vllm_npu_prep.ranks.visible_devices", lambda device_type: 1)
    refuse_unsupported(vllm_config, KERNEL_FAMILIES["fia"], device.NPU_KIND)
    with pytest.raises(PrepError, match="the CPU fallback has no Triton"):
        refuse_unsupported(vllm_config, KERNEL_FAMILIES["reference"], device.CPU_KIND)


def test_ranks_beyond_the_npus_of_a_host_are_refused(configure, monkeypatch):
    monkeypatch.setattr("vllm_npu_prep.limits.device_name", lambda device_type: "Ascend910B1")
    monkeypatch.setattr("vllm_npu_prep.ranks.visible_devices", {"npu": 2}.get)
    monkeypatch.setattr("vllm_npu_prep.ranks.has_collectives", lambda device_type: True)
    family = KERNEL_FAMILIES["fia"]
    refuse_unsupported(configure(dtype="bfloat16", tensor_parallel_size=2), family, device.NPU_KIND)
    vllm_config = configure(dtype="bfloat16", tensor_parallel_size=2, data_parallel_size=2)
    with pytest.raises(PrepError, match=r"4 ranks on this host: 2 NPUs .* ASCEND_RT_VISIBLE"):
        refuse_unsupported(vllm_config, family, device.NPU_KIND)


def test_ranks_of_npus_that_nothing_connects_are_refused(configure, monkeypatch):
    """As on the emulated runtime, which has devices and no HCCL."""
    monkeypatch.setattr("vllm_npu_prep.limits.device_name", lambda device_type: "Ascend910B1")
    monkeypatch.setattr("vllm_npu_prep.ranks.visible_devices", {"npu": 4}.get)
    monkeypatch.setattr("vllm_npu_prep.ranks.has_collectives", {"cpu": True, "npu": False}.get)
    family, kind = KERNEL_FAMILIES["fia"], device.NPU_KIND
    refuse_unsupported(configure(dtype="bfloat16", data_parallel_size=2), family, kind)
    with pytest.raises(PrepError, match=r"2 ranks of one engine: libhccl.*CANN.*CPU fallback"):
        refuse_unsupported(configure(dtype="bfloat16", tensor_parallel_size=2), family, kind)


def test_another_vllm_is_refused_unless_it_is_to_be_tried(monkeypatch, caplog):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.99.1+empty")
    with pytest.raises(PrepError, match=r"vLLM 0\.99\.1 is installed.*supports 0\.32\.0"):
        compat.check_vllm_version()
    monkeypatch.setenv("NPU_PREP_ANY_VLLM", "1")
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    compat.check_vllm_version()
    assert "vLLM 0.99.1 was not tested with vllm_npu_prep" in caplog.text


def test_defaults_that_start_up_decides(configure):
    config = configure()
    assert config.parallel_config.worker_cls == "vllm_npu_prep.worker.NPUWorker"
    assert config.compilation_config.cudagraph_mode.name == "FULL_AND_PIECEWISE"
    assert not config.use_v2_model_runner
    assert config.shutdown_timeout > 0
    assert config.scheduler_config.async_scheduling


SEEING_REFUSED = {
    "both ways": (
        {"hf_overrides": {"is_mm_prefix_lm": True}},
        ["image spans that attend both ways", "--language-model-only"],
    ),
    "prompt embeddings": (
        {"enable_prompt_embeds": True},
        ["--enable-prompt-embeds with a multimodal model"],
    ),
    "pruning": ({"video_pruning_rate": 0.5}, ["--video-pruning-rate"]),
    "encoder only": ({"mm_encoder_only": True}, ["--mm-encoder-only"]),
    "encoder's connector": (
        {"ec_transfer_config": {"ec_connector": "ECExampleConnector", "ec_role": "ec_consumer"}},
        ["--ec-transfer-config"],
    ),
    "adapters of the tower": (
        {"enable_lora": True, "enable_tower_connector_lora": True},
        ["--enable-tower-connector-lora"],
    ),
}


@pytest.mark.parametrize(("settings", "parts"), SEEING_REFUSED.values(), ids=SEEING_REFUSED)
def test_what_models_that_see_are_refused(configure, vision_models, settings, parts):
    with pytest.raises(PrepError) as error:
        configure(vision_models / "qwen2_5_vl", skip_tokenizer_init=False, **settings)
    assert "\n" not in str(error.value)
    for part in (*parts, "not supported by vllm_npu_prep"):
        assert part in str(error.value)


def test_input_of_another_kind_is_refused_by_name(configure, vision_models, monkeypatch):
    monkeypatch.setattr("vllm_npu_prep.limits.MODALITIES", ("image",))
    model, settings = vision_models / "qwen2_5_vl", {"skip_tokenizer_init": False}
    with pytest.raises(
        PrepError, match=r"video input .* is not supported.*image input is"
    ) as error:
        configure(model, **settings)
    assert """--limit-mm-per-prompt '{"video": 0}'""" in str(error.value)
    configure(model, limit_mm_per_prompt={"video": 0}, **settings)


def test_a_model_that_sees_says_so_or_serves_text_only(
    configure, vision_models, caplog, monkeypatch
):
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)

    def block(**settings) -> str:
        caplog.clear()
        configure(vision_models / "qwen2_5_vl", skip_tokenizer_init=False, **settings)
        messages = (record.getMessage() for record in caplog.records)
        return next(message for message in messages if "vllm_npu_prep:" in message)

    with caplog.at_level(logging.INFO, logger="vllm"):
        seeing = block(max_num_seqs=3, compilation_config={"cudagraph_mm_encoder": True})
        text = block(
            max_num_seqs=4, language_model_only=True, hf_overrides={"is_mm_prefix_lm": True}
        )
    assert "multimodal    image, video, M-RoPE; steps that read them" in seeing
    assert "off           cudagraph_mm_encoder" in seeing
    assert "multimodal" not in text


def test_one_graph_serves_any_number_of_adapters(configure):
    config = configure(enable_lora=True, specialize_active_lora=True)
    assert not config.lora_config.specialize_active_lora


def test_start_up_block_says_what_runs_and_what_is_off(configure, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    with caplog.at_level(logging.INFO, logger="vllm"):
        configure(
            max_num_seqs=7,
            enable_lora=True,
            max_loras=3,
            specialize_active_lora=True,
            additional_config={"npu_prep": {"mask": "compressed"}},
            compilation_config={"backend": "inductor"},
        )
    block = next(r.getMessage() for r in caplog.records if "vllm_npu_prep:\n" in r.getMessage())
    parts = "CPU fallback", "reference", "compressed", "graph mode    FULL_AND_PIECEWISE"
    parts += ("check         cheap",)
    for part in (*parts, "7 requests", "off           Inductor", "LoRA          3", "active-lora"):
        assert part in block


@pytest.mark.parametrize("caches", [True, False])
def test_start_up_warns_of_priorities_beside_a_prefix_cache(configure, caplog, monkeypatch, caches):
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    with caplog.at_level(logging.INFO, logger="vllm"):
        configure(  # of a size of its own: what was said once is not said again
            scheduling_policy="priority", enable_prefix_caching=caches, max_num_seqs=11 + caches
        )
    block = next(r.getMessage() for r in caplog.records if "vllm_npu_prep:\n" in r.getMessage())
    assert ("note          priority scheduling may leave blocks" in block) == caches


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"NPU_PREP_DEVICE": "gpu"}, "NPU_PREP_DEVICE='gpu' is not a device"),
        ({"NPU_PREP_DEVICE": "npu"}, "torch_npu is not installed"),
        ({"VLLM_USE_V2_MODEL_RUNNER": "1"}, "VLLM_USE_V2_MODEL_RUNNER=1"),
    ],
)
def test_bad_environment_gets_one_line_and_no_traceback(environment, message, model):
    code = "from vllm.platforms import current_platform"
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 2
    assert message in run.stderr
    assert "Traceback" not in run.stderr


def test_vllm_takes_every_flag_of_the_manifests():
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser())
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
    monkeypatch.setattr(compat, "_other_platform_works", lambda: True)
    monkeypatch.setenv("NPU_PREP_DEVICE", "auto")
    assert compat.activate_platform() is None
    monkeypatch.setenv("NPU_PREP_DEVICE", "cpu")
    assert compat.activate_platform() == compat.PLATFORM_CLASS
