"""Refusals for models with recurrent states: gated delta nets beside attention."""

from typing import TYPE_CHECKING

import torch

from vllm_npu_prep.attention.families import ATB
from vllm_npu_prep.config import SECTION
from vllm_npu_prep.startup.asked import RequestedEngine
from vllm_npu_prep.startup.refusal import Refusal, Subject, words_of_functions

if TYPE_CHECKING:
    from vllm_npu_prep.attention.state_pages import RecurrentStatePage

MOST_HEADS = 64
"""The most value heads of a rank that ``npu_chunk_gated_delta_rule`` takes."""

HEAD_SIZE = 128
"""The only head size, of keys and of values, that it takes."""

MOST_DRAFTS = 7
"""The most drafts of a request: ``npu_recurrent_gated_delta_rule`` takes 8 tokens of a sequence."""

WITH_STATES = ("mtp", "ngram")
"""Methods whose drafts were verified over recurrent states."""


def _on_npus(asked: RequestedEngine) -> bool:
    return asked.family.device_type == "npu"


def _heads_fit(asked: RequestedEngine) -> bool:
    text, ranks = asked.text, asked.config.parallel_config.tensor_parallel_size
    sizes = {text.linear_key_head_dim, text.linear_value_head_dim}
    return sizes == {HEAD_SIZE} and text.linear_num_value_heads <= MOST_HEADS * ranks


def _page(asked: RequestedEngine) -> "RecurrentStatePage":
    from vllm_npu_prep.attention.state_pages import find_state_page

    page = find_state_page(asked.config)
    assert page is not None
    return page


def _page_words(asked: RequestedEngine) -> dict[str, object]:
    page = _page(asked)
    tokens = 2 * max(page.parts) / page.token_bytes
    fitting = [size for size in range(16, 129, 16) if tokens % size == 0]
    remedy = f"give --block-size {fitting[-1]}, or use the CPU fallback"
    if not fitting:
        remedy = "use another number of ranks, or the CPU fallback"
    return {"block_size": page.asked, "tokens": f"{tokens:g}", "remedy": remedy}


OPERATORS = ("npu_recurrent_gated_delta_rule", "npu_chunk_gated_delta_rule", "npu_rms_norm")
"""The operators of torch_npu without which there is no gated delta net on NPUs."""

STATES = (
    Refusal(
        "states-release",
        lambda c: c.functions_missing_for(*OPERATORS),
        "CANN {version} for {model}",
        "its libopapi has no {functions}, which gated delta nets need",
        "install CANN {release} or newer, or use the CPU fallback",
        lambda c: words_of_functions(c, OPERATORS),
    ),
    Refusal(
        "states-kernels",
        lambda c: c.family is ATB,
        "{model} with kernel family {family}",
        "its blocks are as large as recurrent states, and only fia's kernels see them in parts",
        f'leave "{SECTION}.attention" out, for "fia"',
    ),
    Refusal(
        "states-dtype",
        lambda c: _on_npus(c) and c.model.dtype is not torch.bfloat16,
        "--dtype {dtype} for {model}",
        "the NPU's operators of gated delta nets take bfloat16",
        "give --dtype bfloat16, or use the CPU fallback",
        lambda c: {"dtype": str(c.model.dtype).removeprefix("torch.")},
    ),
    Refusal(
        "states-heads",
        lambda c: _on_npus(c) and not _heads_fit(c),
        "linear attention with {keys} heads of {key_dim} and {values} of {value_dim} ({model})",
        "the NPU's operators take at most 64 heads a rank, of 128 elements",
        "use another model, more ranks, or the CPU fallback",
        lambda c: {
            "keys": c.text.linear_num_key_heads,
            "values": c.text.linear_num_value_heads,
            "key_dim": c.text.linear_key_head_dim,
            "value_dim": c.text.linear_value_head_dim,
        },
    ),
    Refusal(
        "states-page",
        lambda c: _on_npus(c) and _heads_fit(c) and not _page(c).is_exact,
        "blocks of {block_size} tokens for {model}",
        "on NPUs a recurrent state has to fill half a block, that is the K of {tokens} tokens, "
        "which is no multiple of it",
        "{remedy}",
        _page_words,
    ),
    Refusal(
        "states-ranks",
        lambda c: (
            c.config.parallel_config.pipeline_parallel_size > 1
            or c.config.parallel_config.data_parallel_size > 1
        ),
        "{model} with pipeline stages or data parallelism",
        "recurrent states have been tried with tensor parallelism only",
        "use --tensor-parallel-size",
    ),
    Refusal(
        "states-alone",
        lambda c: c.layer_types and "full_attention" not in c.layer_types,
        "a model without full attention ({model})",
        "blocks, which hold its recurrent states, are sized by K and V of layers that attend",
        "use a model that has both",
    ),
    Refusal(
        "states-speculation",
        lambda c: (
            c.config.speculative_config is not None and c.speculative.method not in WITH_STATES
        ),
        "speculative method {method} with {model}",
        "with recurrent states only mtp and ngram have been tried",
        "use one of them, or leave --speculative-config out",
        lambda c: {"method": c.speculative.method},
    ),
    Refusal(
        "states-drafts",
        lambda c: (
            c.config.speculative_config is not None
            and _on_npus(c)
            and c.speculative.num_speculative_tokens > MOST_DRAFTS
        ),
        "num_speculative_tokens {number} for {model}",
        "the NPU's operator of gated delta nets takes at most 8 tokens of a request",
        "give at most {most}, or use the CPU fallback",
        lambda c: {"number": c.speculative.num_speculative_tokens, "most": MOST_DRAFTS},
    ),
    Refusal(
        "states-lora",
        lambda c: c.config.lora_config is not None,
        "LoRA with {model}",
        "adapters of linear attention have not been tried",
        "leave --enable-lora out",
    ),
    Refusal(
        "states-pooling",
        lambda c: c.pools,
        "pooling with {model}",
        "recurrent states have been tried with models that generate only",
        "use a model without linear attention",
    ),
    Refusal(
        "states-replay",
        lambda c: c.config.cache_config.use_replayssm,
        "--use-replayssm",
        "recurrent states are computed step by step, and their inputs are not kept",
    ),
)


def _has_states(asked: RequestedEngine) -> bool:
    return asked.has_states


SUBJECTS = (Subject("states", STATES, when=_has_states),)
