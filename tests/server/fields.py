"""Requests that set fields of vLLM's in pairs, for servers that draft.

The fields are vLLM's own: those of its sampling parameters, each of which a client may send to the
path of tokens, and those of chats and completions. `VALUES` has a value for each, or `LEFT_OUT` a
reason to have none; a test fails where vLLM has a field that neither has.
"""

import itertools
import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from transformers import AutoTokenizer
from vllm import SamplingParams
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest

from tests.helpers.prompts import chat_prompt
from tests.server.hostile import tool
from tests.server.process import CHAT, COMPLETIONS, QUESTIONS, TOKENS, Server

FIELDS: dict[str, list[str]] = {
    TOKENS: [name for name in SamplingParams.__struct_fields__ if not name.startswith("_")],
    CHAT: list(ChatCompletionRequest.model_fields),
    COMPLETIONS: list(CompletionRequest.model_fields),
}
"""By path: fields that a client may set."""

MOST, PARALLEL = 8, 16
"""Tokens of an answer; requests at once."""

REASONING = '{"reasoning_start_str": "one", "reasoning_end_str": "</think>"}'
"""Answers begin to think by themselves; no thought has the end's first token, which would end it on
V1 beside drafts."""
SERVED = (
    *("--enable-scale-out", "--reasoning-config", REASONING),
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
)
"""Flags without which a server takes fewer of these fields."""

VALUES: dict[str, Any] = {
    # sampling
    "allowed_token_ids": [*range(300)],  # with all single bytes, of which grammars have enough
    "bad_words": ["the", " of"],
    "frequency_penalty": 0.7,
    "logit_bias": {"30": 5.0},
    "min_p": 0.2,
    "n": 2,
    "presence_penalty": 0.5,
    "repetition_penalty": 1.2,
    "seed": 7,
    "temperature": 0.9,
    "thinking_token_budget": 2,
    "top_k": 5,
    "top_p": 0.8,
    "watermarking": False,
    # the end of an answer
    "ignore_eos": True,
    "include_stop_str_in_output": True,
    "max_completion_tokens": 5,
    "max_tokens": 3,
    "min_tokens": 6,
    "repetition_detection": {"max_pattern_size": 1, "min_pattern_size": 1, "min_count": 2},
    "stop": ["a"],
    "stop_token_ids": [*range(300, 330)],
    # what is told of it
    "detokenize": False,
    "echo": True,
    "flat_logprobs": True,
    "logprob_token_ids": [5, 9],
    "logprobs": 2,
    "output_kind": 1,
    "prompt_logprob_start": 3,
    "prompt_logprob_token_ids": [[5, 9], [7, 8]],
    "prompt_logprobs": 2,
    "return_token_ids": False,
    "return_tokens_as_token_ids": True,
    "routed_experts_prompt_start": 1,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "stream": True,
    "stream_interval": 3,
    "stream_options": {"include_usage": True},
    "top_logprobs": 3,
    # its form
    "include_reasoning": False,
    "reasoning_effort": "low",
    "response_format": {"type": "json_object"},
    "structured_outputs": {"regex": "[a-z ,</>]{5,40}"},  # the end of a thought may be forced
    "tool_choice": tool({})["tool_choice"],
    "tools": tool({})["tools"],
    # beam search
    "length_penalty": 0.5,
    "use_beam_search": True,
    # the prompt
    "add_special_tokens": True,
    "cache_salt": "salt",
    "priority": 1,
    "skip_reading_prefix_cache": True,
    "truncate_prompt_tokens": 5,
    "truncation_side": "left",
    # what vLLM or a plugin may read
    "extra_args": {"key": 1},
    "output_text_buffer_length": 2,
    "skip_clone": True,
    "vllm_xargs": {"key": 1},
}
"""By field: a value that changes something where it can."""

NEEDS: dict[str, dict[str, Any]] = {
    "flat_logprobs": {"logprobs": 2},
    "include_stop_str_in_output": {"stop": ["a"]},
    "length_penalty": {"use_beam_search": True},
    "logprob_token_ids": {"logprobs": 2},
    **{name: {"temperature": 0.9} for name in ("min_p", "n", "seed", "top_k", "top_p")},
    "prompt_logprob_start": {"prompt_logprob_token_ids": [[5, 9], [7, 8]]},
    "prompt_logprob_token_ids": {"prompt_logprob_start": 3},
    "stream_interval": {"stream": True},
    "stream_options": {"stream": True},
    "tool_choice": {"tools": VALUES["tools"]},
    "top_logprobs": {"logprobs": True},
    "truncation_side": {"truncate_prompt_tokens": 5},
}
"""By field: others without which it is refused or has no effect."""

LEFT_OUT = {
    "every request has one": "messages model prompt",
    "off unless --enable-prompt-embeds": "prompt_embeds",
    "a name": "request_id session_id user",
    "another prompt": "add_generation_prompt chat_template chat_template_kwargs "
    "continue_final_message documents",
    "for images": "media_io_kwargs mm_payload mm_processor_kwargs return_mm_kwargs",
    "for connectors": "ec_transfer_params kv_transfer_params",
    "of the prompt's text": "return_prompt_text return_token_offsets",
    "read when the answer is there": "parallel_tool_calls",
    "refused for every model": "suffix",
    "refused with status 500 unless --enable-trace-replay": "trace_decode_token_ids",
}
"""By reason: fields that are not asked for."""

REFUSED = {"logit_bias", "min_p"}
"""Fields that vLLM refuses beside drafts."""
REFUSED_BY_V1 = {"prompt_logprob_start", "prompt_logprob_token_ids"}
"""Fields that vLLM takes on V2 alone."""


class Case(NamedTuple):
    """A request that sets one field, or two."""

    path: str
    names: tuple[str, ...]
    body: dict[str, Any]


def cases(path: str, model: Path, pairs: int | None, seed: int) -> list[Case]:
    """Requests with each field, and with pairs of them (None: all), in any order."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    rng = random.Random(seed)
    names = [name for name in FIELDS[path] if name in VALUES]
    drawn = list(itertools.combinations(names, 2))
    every = [(name,) for name in names] + (drawn if pairs is None else rng.sample(drawn, pairs))
    rng.shuffle(every)
    made = []
    for each, (question, _) in zip(every, itertools.cycle(QUESTIONS)):
        ids = chat_prompt(tokenizer, question)
        body: dict[str, Any] = {"temperature": 0, "max_tokens": MOST}
        for name in each:
            body |= NEEDS.get(name, {})
        body |= {name: VALUES[name] for name in each}
        if path == CHAT and "logprobs" in body:
            body["logprobs"] = True
        if "prompt_logprob_start" in body:  # the last rows of the prompt
            body["prompt_logprob_start"] = len(ids) - 3
        by_path = {
            TOKENS: {"token_ids": ids, "sampling_params": body},
            CHAT: {"messages": [{"role": "user", "content": question}], **body},
            COMPLETIONS: {"prompt": ids, **body},
        }
        made.append(Case(path, each, by_path[path]))
    return made


def ask(server: Server, made: list[Case]) -> list[tuple[int, Any]]:
    """Status and answer of each request, many of which run at once; of a stream, its pieces."""

    def send(case: Case) -> tuple[int, Any]:
        status, told = server.request("POST", case.path, case.body)
        if not told.startswith(b"data: "):
            return status, json.loads(told)
        *pieces, end, _ = told.decode().split("\n\n")
        assert end == "data: [DONE]", case
        return status, [json.loads(piece.removeprefix("data: ")) for piece in pieces]

    with ThreadPoolExecutor(PARALLEL) as pool:
        return list(pool.map(send, made))


def statuses(status: int, answer: Any) -> set[int]:
    """Of an answer: a refusal may come in a stream, too."""
    pieces = answer if isinstance(answer, list) else []
    return {status} | {piece["error"]["code"] for piece in pieces if "error" in piece}
