"""Engines that reports are played on: a model of `tests.helpers.models` and settings of vLLM."""

from typing import Any, NamedTuple

from tests.helpers.engine import graphs

QWEN3 = "Qwen3ForCausalLM"
HYBRID = "Qwen3_5ForCausalLM"


class Kind(NamedTuple):
    """A model and settings. `drafts` is a speculative method, of `number` drafts."""

    model: str
    settings: dict[str, Any]
    drafts: str = ""
    number: int = 3


DEFAULTS: dict[str, Any] = {
    "max_model_len": 128,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 48,
    "block_size": 16,
    "num_gpu_blocks_override": 64,
    "enable_prefix_caching": True,
    "async_scheduling": True,
    "skip_tokenizer_init": False,
    "additional_config": {"npu_prep": {"check": "full"}},
}
SYNC = {"async_scheduling": False}
FEW_BLOCKS = {"num_gpu_blocks_override": 12}
"""Four requests don't fit: some are preempted."""
HOST = {"kv_offloading_size": 0.01}
ADAPTERS = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
LONG = {"max_model_len": 512, "block_size": 128, "num_gpu_blocks_override": 40}
"""Blocks of 128 tokens, which models with recurrent states have."""
THINKS, UNTHINKS = 40, [41, 42]
"""Tokens that begin and end a thought."""
BUDGETS = {"reasoning_config": {"reasoning_start_str": "F", "reasoning_end_str": "GH"}}
"""Those tokens, as words of the tokenizer."""
SEES = "Qwen3VLForConditionalGeneration"
GRAMMAR = {"structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True}}

ENGINES = {
    "plain": Kind(QWEN3, GRAMMAR),
    "sync": Kind(QWEN3, SYNC | GRAMMAR),
    "few blocks": Kind(QWEN3, FEW_BLOCKS),
    "few blocks, sync": Kind(QWEN3, FEW_BLOCKS | SYNC),
    "priority": Kind(QWEN3, FEW_BLOCKS | {"scheduling_policy": "priority"}),
    "short chunks": Kind(QWEN3, {"long_prefill_token_threshold": 16}),
    "sleeps": Kind(QWEN3, {"enable_sleep_mode": True}),
    "adapters": Kind(QWEN3, ADAPTERS),
    "graphs": Kind(QWEN3, graphs("FULL_AND_PIECEWISE", 1, 2, 4, 8)),
    "eagle": Kind(QWEN3, GRAMMAR, "eagle"),
    "eagle, sync": Kind(QWEN3, SYNC | GRAMMAR, "eagle"),
    "eagle, few blocks": Kind(QWEN3, GRAMMAR | {"num_gpu_blocks_override": 24}, "eagle"),
    "eagle, graphs": Kind(QWEN3, graphs("FULL_AND_PIECEWISE", 1, 2, 4, 8, 12, 16, 24), "eagle"),
    "ngram": Kind(QWEN3, SYNC | GRAMMAR, "ngram"),
    "mtp": Kind("DeepseekV3ForCausalLM", GRAMMAR, "mtp", 2),
    "hybrid": Kind(HYBRID, LONG),
    "hybrid, graphs": Kind(HYBRID, LONG | graphs("FULL_DECODE_ONLY", 1, 2, 4, 8)),
    "hybrid, ngram": Kind(HYBRID, LONG | SYNC, "ngram"),
    "hybrid, mtp": Kind(HYBRID, LONG, "mtp", 2),
    "windows": Kind("Gemma3ForCausalLM", {}),
    "windows, eagle": Kind("Gemma3ForCausalLM", {}, "eagle"),
    "images": Kind(SEES, {"max_model_len": 256}),
    "images, small cache": Kind(SEES, {"max_model_len": 256, "mm_processor_cache_gb": 2e-4}),
    "images, few blocks": Kind(SEES, {"max_model_len": 256, "num_gpu_blocks_override": 18}),
    "images, hybrid": Kind("Qwen3_5ForConditionalGeneration", LONG),
    "images, offloading": Kind(
        SEES, {"max_model_len": 256, "num_gpu_blocks_override": 18, "kv_offloading_size": 0.02}
    ),
    "images, eagle3": Kind(SEES, {"max_model_len": 256}, "eagle3", 2),
    "hybrid, thinks": Kind(HYBRID, LONG | BUDGETS, "mtp", 2),
    "eagle, thinks": Kind(QWEN3, BUDGETS, "eagle"),
    "offloading": Kind(QWEN3, FEW_BLOCKS | HOST),
    "adapters, offloading": Kind(QWEN3, FEW_BLOCKS | HOST | ADAPTERS),
    "hybrid, offloading": Kind(
        HYBRID, LONG | {"num_gpu_blocks_override": 16, "kv_offloading_size": 0.05}
    ),
}
