"""Requests that set fields of vLLM's in pairs, for servers that draft.

The fields are vLLM's own: those of its sampling parameters, each of which a client may send to the
path of tokens, and those of chats and completions. `VALUES` has a value for each, or `LEFT_OUT` a
reason to have none; a test fails where vLLM has a field that neither has.
"""

import itertools
import json
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer
from vllm import SamplingParams
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest

from tests.helpers.engine import engine
from tests.server.hostile import CHAT, COMPLETIONS, tool
from tests.server.test_server import QUESTIONS, XGRAMMAR

TOKENS = "/inference/v1/generate"
FIELDS: dict[str, list[str]] = {
    TOKENS: [name for name in SamplingParams.__struct_fields__ if not name.startswith("_")],
    CHAT: list(ChatCompletionRequest.model_fields),
    COMPLETIONS: list(CompletionRequest.model_fields),
}
"""By path: fields that a client may set."""

LEAST = -9999.0
"""What vLLM's servers tell of a token that a grammar leaves no probability."""

MOST, PARALLEL, DOZEN = 8, 16, 12
"""Tokens of an answer; requests at once; pairs that are drawn where not all are asked."""

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
    "messages": "every chat has them",
    "model": "a server has one",
    "prompt": "every completion has one",
    "prompt_embeds": "off unless --enable-prompt-embeds",
    **dict.fromkeys(("request_id", "session_id", "user"), "a name"),
    **dict.fromkeys(
        (
            *("add_generation_prompt", "continue_final_message", "documents"),
            *("chat_template", "chat_template_kwargs"),
        ),
        "another prompt, made before the engine is asked",
    ),
    **dict.fromkeys(
        ("media_io_kwargs", "mm_processor_kwargs", "mm_payload", "return_mm_kwargs"),
        "for images and the like",
    ),
    **dict.fromkeys(("ec_transfer_params", "kv_transfer_params"), "for connectors"),
    **dict.fromkeys(("return_token_offsets", "return_prompt_text"), "of the prompt's text"),
    "parallel_tool_calls": "read when the answer is there",
    "suffix": "refused by vLLM for every model",
    "trace_decode_token_ids": "refused by a plain ValueError, which is status 500, and here its "
    "option, too",
}
"""By field: why it is not asked for."""

REFUSED = {"logit_bias", "min_p"}
"""Fields that vLLM refuses beside drafts."""
REFUSED_BY_V1 = {"prompt_logprob_start", "prompt_logprob_token_ids"}
"""Fields that vLLM takes on V2 alone."""


@dataclass(frozen=True)
class Case:
    """A request.

    Attributes
    ----------
    path
        Where it is sent.
    names
        Of the fields that it sets; one of them, or two.
    set
        What it sets.
    body
        What is sent.
    """

    path: str
    names: tuple[str, ...]
    set: dict[str, Any]
    body: dict[str, Any]

    @property
    def is_greedy(self) -> bool:
        """Whether its tokens can be told beforehand."""
        return "temperature" not in self.set and "use_beam_search" not in self.set


def cases(path: str, prompts: list[tuple[str, list[int]]], pairs: int | None, seed: int) -> list:
    """Requests with each field, and with pairs of them, in any order.

    Parameters
    ----------
    path
        A key of `FIELDS`.
    prompts
        Text and token ids of each; requests take them in turn.
    pairs
        How many pairs; None: all.
    seed
        Of the pairs, and of the order.
    """
    rng = random.Random(seed)
    names = [name for name in FIELDS[path] if name in VALUES]
    drawn = list(itertools.combinations(names, 2))
    if pairs is not None:
        drawn = rng.sample(drawn, pairs)
    every = [(name,) for name in names] + drawn
    rng.shuffle(every)
    made = []
    for index, each in enumerate(every):
        text, ids = prompts[index % len(prompts)]
        fields: dict[str, Any] = {}
        for name in each:
            fields |= NEEDS.get(name, {})
        fields |= {name: VALUES[name] for name in each}
        if path == CHAT and "logprobs" in fields:
            fields["logprobs"] = True
        if "prompt_logprob_start" in fields:  # the last rows of the prompt
            fields["prompt_logprob_start"] = len(ids) - 3
        body = {"temperature": 0, "max_tokens": MOST, **fields}
        if path == TOKENS:
            body = {"token_ids": ids, "sampling_params": body}
        elif path == CHAT:
            body = {"messages": [{"role": "user", "content": text}], **body}
        else:
            body = {"prompt": ids, **body}
        made.append(Case(path, each, fields, body))
    return made


def ask(server: Any, made: list[Case]) -> list[tuple[int, Any]]:
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


def check(
    server: Any, model: Path, path: str, pairs: int | None, seed: int, refused: set[str]
) -> None:
    """Send requests with fields in pairs: nothing fails, and drafts change no greedy answer.

    Parameters
    ----------
    server
        A `Server` that drafts.
    model
        That it has.
    path, pairs, seed
        As `cases` takes them.
    refused
        Fields that are refused by themselves.
    """
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = []
    for question, _ in QUESTIONS:
        chat = [{"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        prompts.append((question, tokenizer.encode(text, add_special_tokens=False)))
    made = cases(path, prompts, pairs, seed)
    answers = check_answers(server, made, refused)
    question, answer = QUESTIONS[0]
    assert server.chat(question) == answer
    if path == TOKENS:
        check_tokens(model, made, answers)


def fails(piece: dict[str, Any]) -> bool:
    """Whether a piece of a stream tells of a failure: a refusal may come in a stream, too."""
    return "error" in piece and piece["error"]["code"] not in (400, 422)


def check_answers(server: Any, made: list[Case], refused: set[str]) -> list[tuple[int, Any]]:
    """Ask, and check that nothing fails, and that no field is refused that is served by itself.

    Parameters
    ----------
    server
        A `Server`.
    made
        Requests.
    refused
        Fields that are refused by themselves.

    Returns
    -------
    list
        Status and answer of each.
    """
    answers = ask(server, made)
    failed = {
        case.names: (status, answer)
        for case, (status, answer) in zip(made, answers, strict=True)
        if status not in (200, 400, 422)
        or (isinstance(answer, list) and any(fails(piece) for piece in answer))
    }
    assert not failed, failed
    alone = {
        case.names[0]: status == 200
        for case, (status, _) in zip(made, answers, strict=True)
        if len(case.names) == 1
    }
    assert {name for name, served in alone.items() if not served} == refused & alone.keys()
    pairs = [status == 200 for case, (status, _) in zip(made, answers) if len(case.names) == 2]
    assert sum(pairs) > len(pairs) / 2
    return answers


def check_tokens(model: Path, made: list[Case], answers: list[tuple[int, Any]]) -> None:
    """Check that greedy answers of `TOKENS` are those of V1 without drafts.

    Parameters
    ----------
    model
        That the server has.
    made, answers
        As `check_answers` took and returned them.
    """
    compared = [
        (case, answer)
        for case, (status, answer) in zip(made, answers, strict=True)
        if status == 200 and case.is_greedy and not REFUSED_BY_V1 & case.set.keys()
    ]
    prompts = [{"prompt_token_ids": case.body["token_ids"]} for case, _ in compared]
    params = [GenerateRequest.model_validate(case.body).sampling_params for case, _ in compared]
    for each in params:  # all that a stream would tell in pieces
        each.output_kind = type(each.output_kind).FINAL_ONLY
    with engine(
        model,
        skip_tokenizer_init=False,
        max_num_seqs=PARALLEL,
        reasoning_config=json.loads(REASONING),
        structured_outputs_config=json.loads(XGRAMMAR),
    ) as llm:
        expected = llm.generate(prompts, params, use_tqdm=False)
    wrong = {}
    for (case, answer), output in zip(compared, expected, strict=True):
        (choice,), (wanted,) = answer["choices"], output.outputs
        told = choice["token_ids"], choice["finish_reason"]
        known = list(wanted.token_ids), wanted.finish_reason
        if told != known:
            wrong[case.names] = told, known
    assert not wrong, wrong
    for (case, answer), output in zip(compared, expected, strict=True):
        (choice,), (wanted,) = answer["choices"], output.outputs
        rows: list[tuple[dict[int, float], Any]] = []
        if "logprobs" in case.set:
            told = choice["logprobs"]["content"]
            assert len(told) == len(wanted.token_ids), case
            told = [{e["token_id"]: e["logprob"] for e in (t, *t["top_logprobs"])} for t in told]
            rows += zip(told, wanted.logprobs)
        if "prompt_logprobs" in case.set:
            told = [
                {int(t): e["logprob"] for t, e in row.items()}
                for row in answer["prompt_logprobs"][1:]
            ]
            rows += zip(told, output.prompt_logprobs[1:], strict=True)
        for found, entries in rows:
            known = {token: max(entries[token].logprob, LEAST) for token in found}
            assert found == pytest.approx(known, abs=1e-3), case
