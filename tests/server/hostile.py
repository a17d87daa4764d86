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
SERVED_OR_REFUSED = REFUSED | {200}


class Hostile(NamedTuple):
    """A request: what is sent besides model, prompt and number of tokens, and what may come."""

    advisory: str
    body: dict[str, Any]
    path: str = COMPLETIONS
    statuses: frozenset[int] = REFUSED  # others where vLLM serves such a request by now
    headers: dict[str, str] = {}  # noqa: RUF012 - nobody writes to it


def encoded(tensor: Any) -> str:
    """A tensor, or what else torch saves, as ``prompt_embeds`` carries it."""
    file = io.BytesIO()
    torch.save(tensor, file)
    return base64.b64encode(file.getvalue()).decode()


def broken_sparse_tensor() -> torch.Tensor:
    """A sparse tensor with indices outside of its shape, which densifying would write to."""
    indices = torch.tensor([[0, HUGE], [0, 0]])
    return torch.sparse_coo_tensor(indices, torch.ones(2), (2, 64), check_invariants=False)


def tool(parameters: dict[str, Any]) -> dict[str, Any]:
    function = {
        "name": "look",
        "strict": True,
        "parameters": {"type": "object", "properties": parameters},
    }
    named = {"type": "function", "function": {"name": "look"}}
    return {"tools": [{"type": "function", "function": function}], "tool_choice": named}


def structured(**what: Any) -> dict[str, Any]:
    return {"structured_outputs": what}


def send(server: Server, hostile: Hostile, question: str) -> tuple[int, dict, str]:
    """Status and answer of a request, and what another client is told beside it."""
    chat = hostile.path == CHAT
    body = (
        {"messages": [{"role": "user", "content": question}]} if chat else {"prompt": "one, two,"}
    )
    body |= {"temperature": 0, "max_tokens": 4, **hostile.body}
    body = {name: value for name, value in body.items() if value is not None}
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(server.chat, question)
        status, told = server.request("POST", hostile.path, body, **hostile.headers)
        return status, json.loads(told), other.result()


def send_all(server: Server, question: str) -> dict[str, Future]:
    """What `send` returns of each request, or how it failed; several are under way at once."""
    with ThreadPoolExecutor(8) as pool:
        return {each.advisory: pool.submit(send, server, each, question) for each in HOSTILE}


NESTED: dict[str, Any] = {"type": "integer"}
for _ in range(400):
    NESTED = {"type": "object", "properties": {"a": NESTED}, "required": ["a"]}

HOSTILE = (
    # Arrays and indices of the sampler
    Hostile("CVE-2026-93840 allowed ids past the vocabulary", {"allowed_token_ids": [5, 60_000]}),
    Hostile("CVE-2026-93840 allowed ids below zero", {"allowed_token_ids": [-1]}),
    Hostile("CVE-2026-93840 no allowed ids", {"allowed_token_ids": []}),
    Hostile("CVE-2026-93989 more bad words than fit", {"bad_words": [f"w{n}" for n in range(900)]}),
    Hostile("CVE-2026-93989 bad words of nothing", {"bad_words": [""]}),
    Hostile("CVE-2026-93989 bias of ids past the vocabulary", {"logit_bias": {"60000": 5}}),
    Hostile("CVE-2026-93989 bias of ids below zero", {"logit_bias": {"-4": 5}}),
    Hostile(
        "CVE-2026-93989 stops past the vocabulary", {"stop_token_ids": [60_000], "min_tokens": 2}
    ),
    Hostile(
        "CVE-2026-93989 more stops than V2 has room for",
        {"stop_token_ids": [*range(121)], "min_tokens": 2},
        statuses=SERVED_OR_REFUSED,
    ),
    Hostile("PYSEC-2026-4350 more log-probabilities than the server gives", {"logprobs": 30_000}),
    Hostile("PYSEC-2026-4350 prompt log-probabilities", {"prompt_logprobs": 30_000}),
    Hostile("PYSEC-2026-4350 log-probabilities below -1", {"logprobs": -7}),
    Hostile("GHSA-7h4p-rffg-7823 temperature is NaN", {"temperature": float("nan")}),
    Hostile("GHSA-7h4p-rffg-7823 temperature is infinite", {"temperature": float("inf")}),
    Hostile("GHSA-7h4p-rffg-7823 penalty is NaN", {"repetition_penalty": float("nan")}),
    Hostile("GHSA-7h4p-rffg-7823 top_p is NaN", {"top_p": float("nan")}),
    Hostile("GHSA-7h4p-rffg-7823 min_p is NaN", {"min_p": float("nan")}),
    Hostile("GHSA-7h4p-rffg-7823 top_k of 41 bits", {"top_k": HUGE}, statuses=SERVED_OR_REFUSED),
    Hostile("GHSA-7h4p-rffg-7823 seed of 71 bits", {"seed": 2**70}),
    Hostile(
        "GHSA-83vm-p52w-f9pw penalties",
        {"frequency_penalty": 2, "presence_penalty": -2, "repetition_penalty": 1e30},
        statuses=frozenset({200}),
    ),
    # Numbers that cost without a limit
    Hostile("GHSA-3mwp-wvh9-7528 a billion answers", {"n": 10**9, "temperature": 1.0}),
    Hostile(
        "CVE-2024-8939 the best of a billion",
        {"best_of": 10**9, "n": 1},
        statuses=SERVED_OR_REFUSED,
    ),
    Hostile(
        "GHSA-3mwp-wvh9-7528 priority of 71 bits", {"priority": 2**70}, statuses=REFUSED | {500}
    ),
    Hostile(
        "GHSA-3mwp-wvh9-7528 arguments of 71 bits",
        {"vllm_xargs": {"a": 2**70}},
        statuses=REFUSED | {500},
    ),
    # Prompts
    Hostile("CVE-2024-8768 an empty prompt", {"prompt": ""}, statuses=SERVED_OR_REFUSED),
    Hostile("CVE-2024-8768 no token", {"prompt": []}),
    Hostile("CVE-2024-8768 an empty list of prompts", {"prompt": [[]]}),
    Hostile("CVE-2024-8768 ids past the vocabulary", {"prompt": [1, 60_000]}),
    Hostile("CVE-2024-8768 ids of 41 bits", {"prompt": [HUGE]}),
    Hostile("CVE-2024-8768 ids below zero", {"prompt": [-1, 5]}),
    Hostile("issue 40302 a prompt past the model's length", {"prompt": [7] * 5000}),
    Hostile("issue 40302 as long as the model's length", {"prompt": [7] * 512}),
    Hostile(
        "CVE-2025-62164 embeddings where they are off",
        {"prompt": None, "prompt_embeds": encoded(torch.zeros(4, 64))},
    ),
    Hostile(
        "GHSA-mcmc-2m55-j8jj a sparse tensor with wrong indices",
        {"prompt": None, "prompt_embeds": encoded(broken_sparse_tensor())},
    ),
    Hostile(
        "CVE-2025-62164 embeddings that are no tensor", {"prompt": None, "prompt_embeds": "AAAA"}
    ),
    # Grammars
    Hostile(
        "GHSA-rwxx-mrjm-wc2m nested quantifiers",
        structured(regex="(a+)+b"),
        statuses=SERVED_OR_REFUSED,
    ),
    Hostile(
        "GHSA-rwxx-mrjm-wc2m counted quantifiers",
        structured(regex="((((a{1,99}){1,99}){1,99}){1,99}){1,99}"),
        statuses=SERVED_OR_REFUSED,
    ),
    Hostile("CVE-2025-48943 no regular expression", structured(regex="([a-")),
    Hostile("CVE-2025-48943 a NUL in a regular expression", structured(regex="a\0b")),
    Hostile("CVE-2025-48942 no schema", structured(json="{not json")),
    Hostile("CVE-2025-48942 an unknown type", structured(json={"type": "stsring"})),
    Hostile("CVE-2025-48942 a schema of 400 levels", structured(json=NESTED)),
    Hostile("GHSA-85xf-c7hm-whqw an empty schema", structured(json="")),
    Hostile("GHSA-85xf-c7hm-whqw an empty grammar", structured(grammar="")),
    Hostile("GHSA-85xf-c7hm-whqw no choice", structured(choice=[])),
    Hostile("GHSA-85xf-c7hm-whqw no object wanted", structured(json_object=False)),
    Hostile("GHSA-85xf-c7hm-whqw two grammars", structured(regex="a+", choice=["b"])),
    Hostile("GHSA-85xf-c7hm-whqw a grammar of no rule", structured(grammar="root ::= (((")),
    Hostile(
        "GHSA-vrq3-r879-7m65 a tool's pattern",
        tool({"a": {"type": "string", "pattern": "([a-"}}),
        CHAT,
    ),
    Hostile("GHSA-vrq3-r879-7m65 a tool's type", tool({"a": {"type": "somthing"}}), CHAT),
    # Whose request is it
    Hostile("CVE-2026-105756 an empty cache salt", {"cache_salt": ""}),
    Hostile(
        "CVE-2026-105756 a long cache salt",
        {"cache_salt": "\u2713/../" * 9999},
        statuses=SERVED_OR_REFUSED,
    ),
    Hostile(
        "no advisory: an engine that is not there",
        {},
        headers={"X-data-parallel-rank": "99"},
        statuses=REFUSED | {500},
    ),
    Hostile(
        "GHSA-fpch-3xrf-7q96 a budget of thoughts",
        {"thinking_token_budget": -5},
        CHAT,
        statuses=SERVED_OR_REFUSED,
    ),
    Hostile(
        "CVE-2026-92365 a budget of 41 bits",
        {"thinking_token_budget": HUGE},
        CHAT,
        statuses=SERVED_OR_REFUSED,
    ),
    Hostile(
        "CVE-2025-62426 a template's arguments",
        {"chat_template_kwargs": {"tokenize": False, "chat_template": "{{ 1/0 }}"}},
        CHAT,
        statuses=SERVED_OR_REFUSED,
    ),
    Hostile(
        "GHSA-gx7p-2j49-hfq4 a processor's arguments",
        {"mm_processor_kwargs": {"max_pixels": HUGE}},
        CHAT,
        statuses=SERVED_OR_REFUSED,
    ),
)
"""Text requests: each is sent while others are served."""

REFUSED_AT_STARTUP = {
    "GHSA-v97p-wpxp-px84 tokens of another's slot, over asynchronous stages": "async-stages",
    "PYSEC-2026-2303 nothing but embeddings, for a model with M-RoPE": "mm-prompt-embeds",
    "CVE-2026-105775 states of Mamba read past their end": "states",
    "CVE-2026-44223 penalties beside drafts by hidden states": "speculative-method",
}
"""Advisories on what is not served here, and the refusal that says so."""
