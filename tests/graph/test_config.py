"""What vLLM's switches make of graphs, before any process starts."""

import dataclasses
from types import SimpleNamespace

import pytest
from vllm.config import CUDAGraphMode

from tests.helpers.engine import engine_config, make_model
from tests.helpers.latent import LATENT_ON_NPUS, V2_LITE
from tests.helpers.v2 import asked_for
from vllm_npu_prep.attention import fused_calls
from vllm_npu_prep.config import decisions_of
from vllm_npu_prep.device import NPU_KIND, waits_for_launches
from vllm_npu_prep.errors import PrepError
from vllm_npu_prep.graph.modes import settle_mode, settle_sizes


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("qwen3"), num_hidden_layers=3)


@pytest.fixture
def configure(model):
    return lambda folder=model, **settings: engine_config(
        folder, **{"max_num_seqs": 16, **settings}
    )


def mode_of(config) -> str:
    return config.compilation_config.cudagraph_mode.name


@pytest.mark.parametrize(
    ("settings", "mode", "compiled"),
    [
        ({"cudagraph_mode": "NONE"}, "NONE", "NONE"),
        ({"cudagraph_mode": "PIECEWISE"}, "PIECEWISE", "VLLM_COMPILE"),
        ({"cudagraph_mode": "FULL"}, "FULL", "NONE"),
        ({"cudagraph_mode": "FULL_DECODE_ONLY"}, "FULL_DECODE_ONLY", "NONE"),
        ({"cudagraph_mode": "FULL_AND_PIECEWISE"}, "FULL_AND_PIECEWISE", "VLLM_COMPILE"),
        # Without compilation there are no pieces, and torch.compile as it comes is off
        ({"cudagraph_mode": "FULL_AND_PIECEWISE", "mode": 0}, "FULL_DECODE_ONLY", "NONE"),
        ({"cudagraph_mode": "FULL_DECODE_ONLY", "mode": 1}, "FULL_DECODE_ONLY", "NONE"),
        ({"cudagraph_mode": "FULL_DECODE_ONLY", "splitting_ops": []}, "FULL_DECODE_ONLY", "NONE"),
    ],
    ids=str,
)
def test_modes_are_honoured_and_only_pieces_are_compiled(configure, settings, mode, compiled):
    compilation = configure(compilation_config=settings).compilation_config
    assert (compilation.cudagraph_mode.name, compilation.mode.name) == (mode, compiled)
    assert compilation.backend == "eager"
    assert bool(compilation.cudagraph_capture_sizes) == (mode != "NONE")


@pytest.mark.parametrize(
    ("settings", "mode"),
    [
        ({"optimization_level": 0}, "NONE"),
        ({"optimization_level": 1}, "PIECEWISE"),
        ({"optimization_level": 2}, "FULL_AND_PIECEWISE"),
        ({"enforce_eager": True}, "NONE"),
    ],
)
def test_optimization_levels_are_vllms(configure, settings, mode):
    config = configure(**settings)
    assert mode_of(config) == mode
    assert bool(config.compilation_config.cudagraph_capture_sizes) == (mode != "NONE")


def test_fusion_passes_and_inductor_are_off(configure):
    config = configure(
        compilation_config={"pass_config": {"fuse_norm_quant": True}, "backend": "inductor"}
    )
    passes = vars(config.compilation_config.pass_config)
    on = [name for name, value in passes.items() if name.startswith(("fuse_", "enable_")) and value]
    assert on == []
    assert config.compilation_config.backend == "eager"


# ------------------------------------------------------------------- masks


NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}


@pytest.mark.parametrize(
    ("mode", "speculative", "form"),
    [
        ("FULL_AND_PIECEWISE", None, "dense"),  # decodes of one token have no mask
        ("PIECEWISE", NGRAM, "dense"),  # attention is outside
        ("FULL", None, "compressed"),
        ("FULL_DECODE_ONLY", NGRAM, "compressed"),
    ],
)
def test_masks_that_graphs_read_are_compressed(configure, mode, speculative, form):
    config = configure(
        compilation_config={"cudagraph_mode": mode},
        speculative_config=speculative,
        additional_config={"npu_prep": {"attention": "reference"}},  # whose default is dense
    )
    assert decisions_of(config).mask_form == form
    assert mode_of(config) == mode


def test_windows_in_full_graphs_take_the_compressed_form(tmp_path, configure):
    folder = make_model(tmp_path, "Mistral", sliding_window=8, num_hidden_layers=1)
    config = configure(folder, compilation_config={"cudagraph_mode": "FULL_DECODE_ONLY"})
    assert decisions_of(config).mask_form == "compressed"


DENSE = {"npu_prep": {"mask": "dense"}}


@pytest.mark.parametrize(
    ("mode", "instead"), [("FULL_AND_PIECEWISE", "PIECEWISE"), ("FULL_DECODE_ONLY", "NONE")]
)
def test_dense_masks_of_drafted_tokens_stay_out_of_graphs(configure, mode, instead):
    config = configure(
        compilation_config={"cudagraph_mode": mode},
        speculative_config=NGRAM,
        additional_config=DENSE,
    )
    assert mode_of(config) == instead
    assert decisions_of(config).mask_form == "dense"


# ------------------------------------------------------------------- sizes


def sizes_of(config) -> list[int]:
    sizes = config.compilation_config.cudagraph_capture_sizes
    assert config.compilation_config.max_cudagraph_capture_size == sizes[-1]
    return sizes


@pytest.mark.parametrize("max_num_seqs", [12, 20, 13])
def test_the_largest_decode_is_on_the_grid(configure, max_num_seqs):
    config = configure(
        max_num_seqs=max_num_seqs, compilation_config={"cudagraph_mode": "FULL_DECODE_ONLY"}
    )
    assert sizes_of(config)[-1] == max_num_seqs


def test_the_largest_decode_is_added_to_the_users_sizes(configure):
    config = configure(compilation_config={"cudagraph_capture_sizes": [3, 40]})
    assert sizes_of(config) == [3, 16, 40]


def test_sizes_are_multiples_of_the_decode_length(configure):
    config = configure(max_num_seqs=10, speculative_config=NGRAM, max_num_batched_tokens=256)
    sizes = sizes_of(config)
    assert 30 in sizes
    assert all(size % 3 == 0 for size in sizes)


def test_decodes_beyond_the_token_budget_are_refused(configure):
    many = {"method": "ngram", "num_speculative_tokens": 20, "prompt_lookup_max": 2}
    with pytest.raises(PrepError, match=r"--max-num-batched-tokens 16.*needs 21 tokens"):
        configure(max_num_batched_tokens=16, speculative_config=many)


@pytest.mark.parametrize(("mode", "streams"), [("FULL_DECODE_ONLY", 1), ("FULL_AND_PIECEWISE", 5)])
def test_sizes_beyond_the_stream_budget_are_thinned(configure, mode, streams):
    """Three layers are four pieces; a full graph is one."""
    config = configure(max_num_seqs=200, compilation_config={"cudagraph_mode": mode})
    before = list(sizes_of(config))
    kind = dataclasses.replace(NPU_KIND, graph_streams=streams * 6 + streams - 1)
    (note,) = settle_sizes(config, kind)
    after = sizes_of(config)
    of_each = "1 stream for each" if streams == 1 else f"{streams} streams for each"
    assert f"{len(before)} thinned to 6 ({of_each}" in note
    assert len(after) == 6
    assert set(after) <= set(before)
    assert {before[0], 200, before[-1]} <= set(after)
    assert settle_sizes(config, kind) == [], "vLLM asks again in the engine's process"


def test_graphs_with_and_without_adapters_hold_streams_each(configure):
    kind = dataclasses.replace(NPU_KIND, graph_streams=2 * 5 * 6)
    mode = {"cudagraph_mode": "FULL_AND_PIECEWISE"}
    config = configure(max_num_seqs=200, enable_lora=True, compilation_config=mode)
    (note,) = settle_sizes(config, kind)
    assert "thinned to 6 (10 streams" in note
    one_kind = {**mode, "cudagraph_specialize_lora": False}
    for runner, thinned in {"V1": "12 (5 streams", "V2": "6 (10 streams"}.items():
        with asked_for(runner):
            config = configure(max_num_seqs=200, enable_lora=True, compilation_config=one_kind)
            (note,) = settle_sizes(config, kind)
        assert f"thinned to {thinned}" in note


@pytest.mark.parametrize(
    ("parallel", "groups"),
    [
        ({}, 0),
        ({"tensor_parallel_size": 2}, 1),
        ({"tensor_parallel_size": 2, "data_parallel_size": 2}, 2),
        ({"tensor_parallel_size": 2, "data_parallel_size": 2, "enable_expert_parallel": True}, 3),
    ],
    ids=["one rank", "TP", "TP, DP", "TP, DP, EP"],
)
def test_streams_of_collectives_count(configure, parallel, groups):
    """40 layers by 27 sizes: (1800 - 40 g) / (L + 1) / (1 + 2 g) of them are left."""
    mode = {"cudagraph_mode": "PIECEWISE", "cudagraph_capture_sizes": [*range(1, 28)]}
    config = configure(max_num_seqs=27, compilation_config=mode)
    config.model_config.get_total_num_hidden_layers = lambda: 40
    for name, value in parallel.items():
        setattr(config.parallel_config, name, value)
    settle_sizes(config, NPU_KIND)
    most = int((1800 - 40 * groups) / 41 / (1 + 2 * groups))
    assert len(sizes_of(config)) == min(27, most) == (27, 14, 8, 5)[groups]


@pytest.mark.parametrize(
    ("chip", "driver", "cann", "count"),
    [
        ("Ascend910_9391", "25.5.1", "8.5.0", 60),
        ("Ascend910_9391", "25.5.0", "9.1.0", 43),
        ("Ascend910_9391", "25.5.1", "8.3.0", 43),
        ("Ascend910_9391", "", "9.1.0", 43),
        ("Ascend910B3", "25.5.1", "9.1.0", 43),
    ],
)
def test_newer_drivers_of_a3_hold_more_graphs(configure, monkeypatch, chip, driver, cann, count):
    """1800 streams hold 43 sizes of 41 pieces each."""
    for name, value in {
        "device_name": chip,
        "driver_version": driver,
        "cann_version": cann,
    }.items():
        monkeypatch.setattr(f"vllm_npu_prep.graph.modes.{name}", lambda kind, value=value: value)
    mode = {"cudagraph_mode": "PIECEWISE", "cudagraph_capture_sizes": [*range(1, 61)]}
    config = configure(max_num_seqs=60, compilation_config=mode)
    config.model_config.get_total_num_hidden_layers = lambda: 40
    settle_sizes(config, NPU_KIND)
    assert len(sizes_of(config)) == count


WITHOUT_FULL = [
    ("FULL", "PIECEWISE"),
    ("FULL_AND_PIECEWISE", "PIECEWISE"),
    ("FULL_DECODE_ONLY", "NONE"),
]


@pytest.mark.parametrize(("mode", "instead"), WITHOUT_FULL)
def test_an_old_driver_has_no_full_graphs(configure, monkeypatch, mode, instead):
    monkeypatch.setattr("vllm_npu_prep.graph.modes.driver_version", lambda kind: "24.1.RC3")
    config = configure(compilation_config={"cudagraph_mode": mode})
    assert mode_of(config) == instead
    if instead == "PIECEWISE":
        assert config.compilation_config.splitting_ops_contain_attention()
    config.compilation_config.cudagraph_mode = getattr(CUDAGraphMode, mode)
    assert f"{mode} graphs: driver 24.1.RC3" in "\n".join(settle_mode(config))


@pytest.mark.parametrize(("mode", "instead"), WITHOUT_FULL)
def test_waits_for_each_launch_leave_no_full_graphs(configure, monkeypatch, mode, instead):
    monkeypatch.setenv("ASCEND_LAUNCH_BLOCKING", "1")
    config = configure(compilation_config={"cudagraph_mode": mode})
    assert mode_of(config) == mode  # the CPU fallback launches nothing
    config.device_config.device_type = "npu"
    assert f"{mode} graphs: with ASCEND_LAUNCH_BLOCKING" in "\n".join(settle_mode(config))
    assert mode_of(config) == instead


@pytest.mark.parametrize(
    ("value", "waits"), [("1", True), (" 2x", True), ("0", False), ("", False)]
)
def test_waits_for_launches_are_read_as_torch_npu_reads_them(monkeypatch, value, waits):
    monkeypatch.setenv("ASCEND_LAUNCH_BLOCKING", value)
    assert waits_for_launches("npu") == waits


def test_a_driver_that_is_not_known_keeps_full_graphs(configure, monkeypatch):
    monkeypatch.setattr("vllm_npu_prep.graph.modes.driver_version", lambda kind: "")
    assert mode_of(configure(compilation_config={"cudagraph_mode": "FULL"})) == "FULL"


@pytest.mark.parametrize(
    ("settings", "mode", "instead"),
    [
        ({}, "FULL", "FULL_AND_PIECEWISE"),
        ({}, "FULL_DECODE_ONLY", "FULL_DECODE_ONLY"),
        ({}, "FULL_AND_PIECEWISE", "FULL_AND_PIECEWISE"),
        ({"data_parallel_size": 2}, "FULL", "PIECEWISE"),
        ({"data_parallel_size": 2}, "FULL_DECODE_ONLY", "NONE"),
    ],
)
def test_limits_of_a_batch_leave_decodes_of_one_engine(
    configure, monkeypatch, settings, mode, instead
):
    """A step that breaks them runs eagerly, which several engines would have to agree on."""
    monkeypatch.setattr("vllm_npu_prep.graph.modes.limits_batches", lambda config: True)
    config = configure(compilation_config={"cudagraph_mode": mode}, **settings)
    assert mode_of(config) == instead
    if config.compilation_config.cudagraph_mode.has_piecewise_cudagraphs():
        assert config.compilation_config.splitting_ops_contain_attention()


def test_full_graphs_for_too_many_requests_are_off(configure, monkeypatch):
    monkeypatch.setattr("vllm_npu_prep.graph.modes.limits_batches", lambda config: True)
    mode = {"cudagraph_mode": "FULL_DECODE_ONLY"}
    config = configure(max_num_seqs=4097, max_num_batched_tokens=8192, compilation_config=mode)
    assert mode_of(config) == "NONE"


def test_a_drafter_limits_batches_as_the_model_does(configure, monkeypatch, tmp_path):
    """On CANN 8.5, heads of 192 that share no K and V reach the kernel that counts blocks."""
    monkeypatch.setattr(
        fused_calls, "decisions_of", lambda config: SimpleNamespace(attention="fia")
    )
    monkeypatch.setattr(fused_calls, "cann_version", lambda device_type: "8.5.0")
    target = configure(
        make_model(tmp_path / "a", head_dim=128, num_attention_heads=4, num_key_value_heads=2)
    )
    assert not fused_calls.limits_batches(target)
    drafter = make_model(tmp_path / "b", head_dim=192, num_attention_heads=2, num_key_value_heads=2)
    assert fused_calls.limits_batches(configure(drafter))
    draft_config = configure(drafter).model_config
    target.speculative_config = SimpleNamespace(draft_model_config=draft_config)
    assert fused_calls.limits_batches(target)


def test_latent_attention_keeps_what_its_documentation_limits(configure, monkeypatch, tmp_path):
    monkeypatch.setattr(
        fused_calls, "decisions_of", lambda config: SimpleNamespace(attention="fia")
    )
    latent = make_model(tmp_path / "latent", "DeepseekV2", **V2_LITE, **LATENT_ON_NPUS)
    documented = {"npu_prep": {"kernel_rules": "documented"}}
    assert not fused_calls.limits_batches(configure(latent))
    assert fused_calls.limits_batches(configure(latent, additional_config=documented))
