"""Requests that once crashed, stalled or misled a vLLM server, by the advisory that describes each.

Those that reach the engine, its runner or the plugin. What only meets the API server's own code is
left to vLLM's tests: headers that are too large, regular expressions of tool parsers, templates
that run on, addresses that media are loaded from, and models that bring code.

Advisories on images, GHSA-ph72-cqr5-qpp7 and PYSEC-2026-4353 among them, are cases of
`tests/server/test_multimodal.py`; GHSA-2phq-3phc-84px, on scores of others' queries, is one of
`tests/server/test_pooling.py`.
"""

import base64
import io
import json
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import torch

from tests.server.process import CHAT, COMPLETIONS, Server

HUGE = 2**40
REFUSED = frozenset({400, 422})
EITHER = REFUSED | {200}
FAILS = REFUSED | {500}


class Hostile(NamedTuple):
    """A request: what is sent besides model, prompt and number of tokens, and what may come."""

    advisory: str
    body: dict[str, Any]
    statuses: frozenset[int] = REFUSED  # others where vLLM serves such a request by now
    path: str = COMPLETIONS


def encoded(tensor: Any) -> str:
    """A tensor, or what else torch saves, as ``prompt_embeds`` carries it."""
    file = io.BytesIO()
    torch.save(tensor, file)
    return base64.b64encode(file.getvalue()).decode()


def tool(parameters: dict[str, Any]) -> dict[str, Any]:
    schema = {"type": "object", "properties": parameters}
    function = {"name": "look", "strict": True, "parameters": schema}
    named = {"type": "function", "function": {"name": "look"}}
    return {"tools": [{"type": "function", "function": function}], "tool_choice": named}


def send(server: Server, hostile: Hostile, question: str) -> tuple[int, dict, str]:
    """Status and answer of a request, and what another client is told beside it."""
    chat = {"messages": [{"role": "user", "content": question}]}
    body = chat if hostile.path == CHAT else {"prompt": "one, two,"}
    body |= {"temperature": 0, "max_tokens": 4, **hostile.body}
    body = {name: value for name, value in body.items() if value is not None}
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(server.chat, question)
        status, told = server.request("POST", hostile.path, body)
        return status, json.loads(told), other.result()


def send_all(server: Server, question: str) -> dict[str, Future]:
    """What `send` returns of each request, or how it failed; several are under way at once."""
    with ThreadPoolExecutor(8) as pool:
        return {each.advisory: pool.submit(send, server, each, question) for each in HOSTILE}


NESTED: dict[str, Any] = {"type": "integer"}
for _ in range(400):
    NESTED = {"type": "object", "properties": {"a": NESTED}, "required": ["a"]}

# Its indices are outside of its shape; to make it dense would write there.
SPARSE = torch.sparse_coo_tensor(
    torch.tensor([[0, HUGE], [0, 0]]), torch.ones(2), (2, 64), check_invariants=False
)
EMBEDDINGS = {
    "CVE-2025-62164 embeddings where they are off": encoded(torch.zeros(4, 64)),
    "GHSA-mcmc-2m55-j8jj a sparse tensor with wrong indices": encoded(SPARSE),
    "CVE-2025-62164 embeddings that are no tensor": "AAAA",
}
GRAMMARS: dict[str, dict[str, Any]] = {
    "CVE-2025-48943 no regular expression": {"regex": "([a-"},
    "CVE-2025-48943 a NUL in a regular expression": {"regex": "a\0b"},
    "CVE-2025-48942 no schema": {"json": "{not json"},
    "CVE-2025-48942 an unknown type": {"json": {"type": "stsring"}},
    "CVE-2025-48942 a schema of 400 levels": {"json": NESTED},
    "GHSA-85xf-c7hm-whqw an empty schema": {"json": ""},
    "GHSA-85xf-c7hm-whqw an empty grammar": {"grammar": ""},
    "GHSA-85xf-c7hm-whqw no choice": {"choice": []},
    "GHSA-85xf-c7hm-whqw no object wanted": {"json_object": False},
    "GHSA-85xf-c7hm-whqw two grammars": {"regex": "a+", "choice": ["b"]},
    "GHSA-85xf-c7hm-whqw a grammar of no rule": {"grammar": "root ::= ((("},
}
QUANTIFIERS = {
    "GHSA-rwxx-mrjm-wc2m nested quantifiers": "(a+)+b",
    "GHSA-rwxx-mrjm-wc2m counted quantifiers": "((((a{1,99}){1,99}){1,99}){1,99}){1,99}",
}
PENALTIES = {"frequency_penalty": 2, "presence_penalty": -2, "repetition_penalty": 1e30}
PAST_THE_END = {"stop_token_ids": [60_000], "min_tokens": 2}
TOO_MANY = {"stop_token_ids": [*range(200)], "min_tokens": 2}
TEMPLATE = {"tokenize": False, "chat_template": "{{ 1/0 }}"}
PATTERN = {"type": "string", "pattern": "([a-"}

HOSTILE = (
    # Arrays and indices of the sampler
    Hostile("CVE-2026-93840 allowed ids past the vocabulary", {"allowed_token_ids": [5, 60_000]}),
    Hostile("CVE-2026-93840 allowed ids below zero", {"allowed_token_ids": [-1]}),
    Hostile("CVE-2026-93840 no allowed ids", {"allowed_token_ids": []}),
    Hostile("CVE-2026-93989 more bad words than fit", {"bad_words": [f"w{n}" for n in range(900)]}),
    Hostile("CVE-2026-93989 bad words of nothing", {"bad_words": [""]}),
    Hostile("CVE-2026-93989 bias of ids past the vocabulary", {"logit_bias": {"60000": 5}}),
    Hostile("CVE-2026-93989 bias of ids below zero", {"logit_bias": {"-4": 5}}),
    Hostile("CVE-2026-93989 stops past the vocabulary", PAST_THE_END),
    Hostile(
        "CVE-2026-93989 more stops than upstream's V2 has room for", TOO_MANY, frozenset({200})
    ),
    Hostile("PYSEC-2026-4350 more log-probabilities than the server gives", {"logprobs": 30_000}),
    Hostile("PYSEC-2026-4350 prompt log-probabilities", {"prompt_logprobs": 30_000}),
    Hostile("PYSEC-2026-4350 log-probabilities below -1", {"logprobs": -7}),
    Hostile("GHSA-7h4p-rffg-7823 temperature is NaN", {"temperature": float("nan")}),
    Hostile("GHSA-7h4p-rffg-7823 temperature is infinite", {"temperature": float("inf")}),
    Hostile("GHSA-7h4p-rffg-7823 penalty is NaN", {"repetition_penalty": float("nan")}),
    Hostile("GHSA-7h4p-rffg-7823 top_p is NaN", {"top_p": float("nan")}),
    Hostile("GHSA-7h4p-rffg-7823 min_p is NaN", {"min_p": float("nan")}),
    Hostile("GHSA-7h4p-rffg-7823 top_k of 41 bits", {"top_k": HUGE}, EITHER),
    Hostile("GHSA-7h4p-rffg-7823 seed of 71 bits", {"seed": 2**70}),
    Hostile("GHSA-83vm-p52w-f9pw penalties", PENALTIES, frozenset({200})),
    # Numbers that cost without a limit
    Hostile("GHSA-3mwp-wvh9-7528 a billion answers", {"n": 10**9, "temperature": 1.0}),
    Hostile("CVE-2024-8939 the best of a billion", {"best_of": 10**9, "n": 1}, EITHER),
    Hostile("GHSA-3mwp-wvh9-7528 priority of 71 bits", {"priority": 2**70}, FAILS),
    Hostile("GHSA-3mwp-wvh9-7528 arguments of 71 bits", {"vllm_xargs": {"a": 2**70}}, FAILS),
    # Prompts
    Hostile("CVE-2024-8768 an empty prompt", {"prompt": ""}, EITHER),
    Hostile("CVE-2024-8768 no token", {"prompt": []}),
    Hostile("CVE-2024-8768 an empty list of prompts", {"prompt": [[]]}),
    Hostile("CVE-2024-8768 ids past the vocabulary", {"prompt": [1, 60_000]}),
    Hostile("CVE-2024-8768 ids of 41 bits", {"prompt": [HUGE]}),
    Hostile("CVE-2024-8768 ids below zero", {"prompt": [-1, 5]}),
    Hostile("issue 40302 a prompt past the model's length", {"prompt": [7] * 5000}),
    Hostile("issue 40302 as long as the model's length", {"prompt": [7] * 512}),
    *(Hostile(n, {"prompt": None, "prompt_embeds": data}) for n, data in EMBEDDINGS.items()),
    # Grammars
    *(Hostile(n, {"structured_outputs": {"regex": e}}, EITHER) for n, e in QUANTIFIERS.items()),
    *(Hostile(name, {"structured_outputs": what}) for name, what in GRAMMARS.items()),
    Hostile("GHSA-vrq3-r879-7m65 a tool's pattern", tool({"a": PATTERN}), path=CHAT),
    Hostile("GHSA-vrq3-r879-7m65 a tool's type", tool({"a": {"type": "somthing"}}), path=CHAT),
    # Whose request is it
    Hostile("CVE-2026-105756 an empty cache salt", {"cache_salt": ""}),
    Hostile("CVE-2026-105756 a long cache salt", {"cache_salt": "\u2713/../" * 9999}, EITHER),
    Hostile(
        "GHSA-fpch-3xrf-7q96 a budget of thoughts", {"thinking_token_budget": -5}, EITHER, CHAT
    ),
    Hostile("CVE-2026-92365 a budget of 41 bits", {"thinking_token_budget": HUGE}, EITHER, CHAT),
    Hostile(
        "CVE-2025-62426 a template's arguments", {"chat_template_kwargs": TEMPLATE}, EITHER, CHAT
    ),
    Hostile(
        "GHSA-gx7p-2j49-hfq4 a processor's arguments",
        {"mm_processor_kwargs": {"max_pixels": HUGE}},
        EITHER,
        CHAT,
    ),
)
"""Text requests: each is sent while others are served."""

REFUSED_AT_STARTUP = {
    "PYSEC-2026-2303 nothing but embeddings, for a model with M-RoPE": "mm-prompt-embeds",
    "CVE-2026-105775 states of Mamba read past their end": "states",
    "CVE-2026-44223 penalties beside drafts by hidden states": "speculative-method",
}
"""Advisories on what is not served here, and the refusal that says so."""
