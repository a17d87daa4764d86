"""Engines of vLLM in this process, and small models for them."""

import contextlib
import gc
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from tests.helpers.waiting import wait_until

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("NPU_PREP_DEVICE", "cpu")


CHECK = os.environ.get("NPU_PREP_TEST_CHECK")
"""Level of the step check in engines that don't choose one: the whole suite can run with "full"."""

LLAMA4 = {
    "family": "Llama4",
    "intermediate_size_mlp": 128,
    "num_hidden_layers": 3,
    "num_local_experts": 0,
    "moe_layers": [],
    "interleave_moe_layer_step": 0,
    "attention_chunk_size": 32,
    "no_rope_layers": [1, 0, 1],
    "attn_temperature_tuning": False,
}
"""A dense Llama 4 with a layer of full attention between two with attention chunks. vLLM tunes
temperatures above 32K tokens only, whatever the config says."""


def make_model(
    folder: Path,
    family: str = "Qwen3",
    head: str = "ForCausalLM",
    *,
    seed: int = 0,
    spread: float = 0.25,
    embedding_scale: float = 1.0,
    **config: Any,
) -> Path:
    """Save a tiny random model of a family of transformers, with untied weights.

    `head` is the rest of its class's name.

    `spread` is the deviation of its weights: large enough that greedy tokens vary, which a model
    that repeats one token would hide. `embedding_scale` shrinks embeddings that are tied or scaled
    up by the model, and would drown its layers.
    """
    import torch
    import transformers

    torch.manual_seed(seed)
    settings = {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "initializer_range": spread,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "dtype": "float32",
    }
    model_class = getattr(transformers, f"{family}{head}")
    model = model_class(model_class.config_class(**{**settings, **config}))
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(embedding_scale)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):  # zeros, which would correct nothing
                buffer.normal_(std=0.1)
    model.save_pretrained(folder)
    return folder


def save_tokenizer(folder: Path, vocab_size: int = 512) -> None:
    """Save a tokenizer for a model: token n is the word ``tn``, a pair is ``0 a 1 b 1``."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = {"[CLS]": 0, "[SEP]": 1} | {f"t{token}": token for token in range(2, vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[CLS]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 0), ("[SEP]", 1)],
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        cls_token="[CLS]",
        sep_token="[SEP]",
        pad_token="[CLS]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    ).save_pretrained(folder)


def inspect_models_here() -> None:
    """Let vLLM inspect a model's class in this process, which imports it anyway.

    vLLM starts a process for each architecture that its cache lacks, so that inspecting cannot
    initialise CUDA. On a fresh machine that is nine seconds for each of some thirty architectures.
    """
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda inspect: inspect()


@contextlib.contextmanager
def engine(model: Path, **settings: Any) -> Iterator[Any]:
    """An `LLM` in this process, gone afterwards."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    from tests.matrix.cells import came_with_requests
    from tests.matrix.collect import note

    inspect_models_here()
    defaults = {
        "dtype": "float32",
        "max_model_len": 256,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "kv_cache_memory_bytes": 16 << 20,
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "seed": 0,
    }
    if CHECK:
        options = settings.get("additional_config", {}).get("npu_prep", {})
        settings["additional_config"] = {"npu_prep": {"check": CHECK, **options}}
    # An engine collects garbage some fifteen times, 0.3 s each with every module's objects to look
    # at. Only its own are looked at now: it neither freezes them nor thaws the others. What is left
    # of the engine before is collected first: frozen, it would keep its memory for good.
    gc.collect()
    gc.freeze()
    # vLLM adds a random tail to the id of a request, and walks through sets of ids.
    tails = (f"{number:08x}" for number in itertools.count())
    with (
        mock.patch("gc.freeze"),
        mock.patch("gc.unfreeze"),
        mock.patch("vllm.v1.engine.input_processor.random_uuid", tails.__next__),
    ):
        try:
            llm = LLM(str(model), **{**defaults, **settings})
        except BaseException:
            cleanup_dist_env_and_memory()  # the next engine would take the groups for its own
            raise
        cell = note(llm.llm_engine.vllm_config)
        try:
            yield llm
            # No name for the scheduler: an import that fails later keeps this frame, for good
            cell["features"] += came_with_requests(llm.llm_engine.engine_core.engine_core.scheduler)
        finally:
            llm.llm_engine.engine_core.shutdown()
            # The caller still has a name for it. What is alive when another engine begins is
            # frozen, and keeps its memory for good.
            llm.__dict__.clear()
            del llm
            cleanup_dist_env_and_memory()
            gc.collect()


REPLAYED = {
    "PIECEWISE": {"piecewise graphs"},
    "FULL_DECODE_ONLY": {"full graph"},
    "FULL_AND_PIECEWISE": {"full graph", "piecewise graphs"},
    "FULL": {"full graph"},
}
"""Kinds of steps that mixed traffic has in each graph mode, by `StepCounts`."""


def graphs(mode: str, *sizes: int, **settings: Any) -> dict[str, Any]:
    """Settings of an engine with graphs."""
    config = {"cudagraph_mode": mode} | ({"cudagraph_capture_sizes": list(sizes)} if sizes else {})
    return {"enforce_eager": False, "compilation_config": config, **settings}


def engine_config(model: Path, **settings: Any) -> Any:
    """An engine's config, resolved as `vllm serve` does before any process starts."""
    from vllm.engine.arg_utils import EngineArgs

    inspect_models_here()
    defaults = {"max_model_len": 128, "skip_tokenizer_init": True, "dtype": "float32"}
    return EngineArgs(model=str(model), **{**defaults, **settings}).create_engine_config()


def runner_of(llm: Any) -> Any:
    core = llm.llm_engine.engine_core.engine_core
    return core.model_executor.driver_worker.worker.model_runner


def scheduler_of(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.scheduler


def free_blocks(llm: Any) -> int:
    """Blocks that nobody holds once all requests have ended and sent what they had to send."""
    scheduler = scheduler_of(llm)
    wait_until(lambda: llm.llm_engine.step() == [] and not scheduler.has_requests())
    return scheduler.kv_cache_manager.block_pool.get_num_free_blocks()


def greedy(max_tokens: int, **params: Any) -> Any:
    """Greedy sampling parameters without detokenisation."""
    from vllm import SamplingParams

    return SamplingParams(
        temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, **params
    )


def generate(
    llm: Any, prompts: list[list[int]], params: Any, lora_requests: list[Any] | None = None
) -> list[list[int]]:
    """Token ids that the engine generates for prompts given as token ids."""
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = llm.generate(inputs, params, lora_request=lora_requests, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]
