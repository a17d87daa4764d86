"""What is refused of speculation, by name, before a process starts."""

import json
import sys

import pytest

from tests.helpers.drafters import disturb_model
from tests.helpers.engine import engine_config, make_model
from vllm_npu_prep.errors import PrepError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, another one near it, and models that are no drafters."""
    folder = tmp_path_factory.mktemp("speculation")
    small = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32, "head_dim": 8}
    make_model(folder / "model", **small)
    disturb_model(folder / "drafter", folder / "model", share=0.1)
    windows = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
    make_model(folder / "windows", "Gemma2", **{**small, "num_hidden_layers": 2}, **windows)
    return folder


REFUSED = {
    "suffix decoding": ({"method": "suffix"}, ["speculative method suffix", "ngram", "eagle3"]),
    "ngrams on the device": ({"method": "ngram_gpu"}, ["speculative method ngram_gpu", "ngram"]),
    "a class of one's own": (
        {"method": "custom_class", "model": "package.module.Class"},
        ["speculative method custom_class"],
    ),
    "hidden states": (
        {"method": "extract_hidden_states", "num_speculative_tokens": 1},
        ["speculative method extract_hidden_states"],
    ),
    "drafts of one pass": (
        {"method": "draft_model", "parallel_drafting": True},
        ["parallel drafting", "one token of each request"],
    ),
    "a draft model without padding": (
        {"method": "draft_model", "disable_padded_drafter_batch": True},
        ["disable_padded_drafter_batch (draft_model)", "leave the key out"],
    ),
    "blocks of drafts": (
        {"method": "draft_model", "rejection_sample_method": "block"},
        ["rejection_sample_method block", "standard"],
    ),
    "made-up acceptance": (
        {
            "method": "draft_model",
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_rates": [0.5, 0.2],
        },
        ["rejection_sample_method synthetic", "standard"],
    ),
    "drafts by batch size": (
        {"method": "draft_model", "num_speculative_tokens_per_batch_size": [[1, 4, 2], [5, 8, 1]]},
        ["num_speculative_tokens_per_batch_size", "one number of drafts"],
    ),
    "another vocabulary": (
        {"method": "draft_model", "use_heterogeneous_vocab": True},
        ["use_heterogeneous_vocab"],
    ),
    "argmax by rank": (
        {"method": "draft_model", "use_local_argmax_reduction": True},
        ["use_local_argmax_reduction", "whole logits"],
    ),
    "another backend": (
        {"method": "draft_model", "attention_backend": "TRITON_ATTN"},
        ["attention_backend", "leave the key out"],
    ),
    "experts of another backend": (
        {"method": "draft_model", "moe_backend": "triton"},
        ["moe_backend triton", "leave the key out"],
    ),
    "a cache of another dtype": (
        {"method": "draft_model", "kv_cache_dtype": "fp8"},
        ["kv_cache_dtype fp8", "auto"],
    ),
    "a drafter of several windows": (
        {"method": "draft_model", "model": "windows"},
        ["windows as a drafter", "full_attention, sliding_attention"],
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_supported_is_refused_by_name(folder, case, monkeypatch):
    config, parts = REFUSED[case]
    # Packages that vLLM wants for a method are beside the point.
    monkeypatch.setitem(sys.modules, "arctic_inference", sys)
    monkeypatch.setattr("vllm.config.speculative.has_arctic_inference", lambda: True)
    config = {"num_speculative_tokens": 2, **config}
    if config["method"] == "draft_model":
        config["model"] = str(folder / config.get("model", "drafter"))
    with pytest.raises(PrepError) as error:
        engine_config(folder / "model", speculative_config=config)
    assert "\n" not in str(error.value)
    for part in parts:
        assert part in str(error.value)


def test_a_drafter_beside_a_kv_connector_is_refused(folder, tmp_path):
    transfer = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
    }
    drafts = {
        "method": "draft_model",
        "model": str(folder / "drafter"),
        "num_speculative_tokens": 2,
    }
    settings = {"kv_transfer_config": transfer, "enable_chunked_prefill": False}
    with pytest.raises(PrepError, match=r"draft_model with a KV connector.*ngram drafts work"):
        engine_config(folder / "model", speculative_config=drafts, **settings)
    ngram = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
    engine_config(folder / "model", speculative_config=ngram, **settings)


def test_a_drafter_of_a_model_with_mla_is_refused(folder, tmp_path):
    model = make_model(
        tmp_path / "mla",
        "DeepseekV2",
        num_hidden_layers=1,
        first_k_dense_replace=1,
        q_lora_rank=None,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        head_dim=8,
        num_key_value_heads=4,
    )
    drafts = {
        "method": "draft_model",
        "model": str(folder / "drafter"),
        "num_speculative_tokens": 2,
    }
    with pytest.raises(PrepError, match=r"speculative method draft_model with MLA.*ngram"):
        engine_config(model, speculative_config=drafts)


def test_drafters_leave_scheduling_as_vllm_decides_it(folder):
    drafts = {
        "method": "draft_model",
        "model": str(folder / "drafter"),
        "num_speculative_tokens": 2,
    }
    config = engine_config(folder / "model", speculative_config=drafts)
    assert config.scheduler_config.async_scheduling
    ngram = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
    config = engine_config(folder / "model", speculative_config=ngram)
    assert not config.scheduler_config.async_scheduling


def test_a_draft_model_for_one_with_mrope_is_refused(vision_models, tmp_path):
    target = vision_models / "qwen2_5_vl"
    config = json.loads((target / "config.json").read_text())["text_config"]
    drafter = make_model(tmp_path, num_hidden_layers=1, vocab_size=config["vocab_size"])
    drafts = {"method": "draft_model", "model": str(drafter), "num_speculative_tokens": 2}
    with pytest.raises(PrepError, match=r"draft_model for a model with M-RoPE.*ngram and EAGLE"):
        engine_config(target, speculative_config=drafts, skip_tokenizer_init=False)
