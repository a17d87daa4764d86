"""Random traffic, drawn from a seed: what requests ask for, and what happens between steps.

Whoever drives an engine, a scheduler or a runner steps and compares by itself.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
from vllm.sampling_params import RepetitionDetectionParams, StructuredOutputsParams

from tests.helpers.engine import greedy
from tests.helpers.watch import count_preemptions

Value = TypeVar("Value")
BAD_WORDS = ["a", "the", "KV slot"]
"""Their tokens are among the 512 of small models: the demo model's tokenizer has more. Where a
server's tokenizer fits its model, it refuses a word with others by itself."""
GRAMMARS = (
    {"json": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}},
    {"regex": "(ab|cd)+[0-9]{2,30}"},
    {"choice": ["yes", "no", "perhaps not"]},
    {"grammar": 'root ::= "x" [a-f]* "y"'},
)
FEATURES: dict[str, Callable[["Traffic"], dict[str, Any]]] = {
    "random": lambda draw: {"temperature": float(draw.rng.uniform(0.3, 1.5))},
    "seed": lambda draw: {"seed": draw.number(0, 999)},
    "top-p, top-k": lambda draw: {"top_p": 0.8, "top_k": 20},
    "min-p": lambda draw: {"min_p": 0.05},
    "several samples": lambda draw: {"n": 2},
    "penalties": lambda draw: {
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.2,
    },
    "logit bias": lambda draw: {"logit_bias": dict.fromkeys(draw.tokens(3), 2.5)},
    "stop tokens": lambda draw: {"stop_token_ids": draw.tokens(8)},
    "min tokens": lambda draw: {
        "min_tokens": draw.number(1, 5),
        "max_tokens": draw.number(7, 35),
        "stop_token_ids": draw.tokens(40),
    },
    "bad words": lambda draw: {"bad_words": BAD_WORDS},
    "allowed tokens": lambda draw: {"allowed_token_ids": draw.tokens(30)},
    "logprobs": lambda draw: {"logprobs": draw.number(0, 3)},
    "prompt logprobs": lambda draw: {"prompt_logprobs": draw.number(1, 2)},
    "repetition": lambda draw: {"repetition_detection": RepetitionDetectionParams(1, 1, 2)},
    "stops at the end": lambda draw: {"ignore_eos": False},
    "grammar": lambda draw: {
        "structured_outputs": StructuredOutputsParams(**draw.pick(*GRAMMARS)),
        "ignore_eos": False,
    },
}
"""Parameters of a request's sampling, by feature."""
ONLY_WITH = dict.fromkeys(("seed", "top-p, top-k", "min-p", "several samples"), "random")
NEVER_WITH = {
    "grammar": {"bad words", "allowed tokens", "min tokens"},
    "prompt logprobs": {"prompt embeddings"},
    "streamed": {"grammar", "repetition", "prompt logprobs"},
    "pooling": {"streamed", "grammar"},
}
"""What vLLM refuses together, or what makes no sense so; the latter are drawn first."""


class Drawn(NamedTuple):
    """A request, before it is one of an engine's or of a scheduler's."""

    name: str
    prompt: list[int]
    features: set[str]
    params: dict[str, Any]  # of its sampling, as vLLM names them
    adapter: int  # 0: none
    priority: int


class Traffic:
    """Draws requests, and makes calls between steps.

    Attributes
    ----------
    count
        What happened how often.
    rates
        By name of a call, how many there are between two steps on average.
    calls
        What makes a call of a name; it counts unless it returns False.
    shares
        By feature, how many of the requests have it.
    longest, most
        Tokens of a prompt, but for those that nearly fill the `room` of the context, and of what
        follows.
    adapters
        From how many requests choose.
    """

    def __init__(
        self, seed: Any, vocab: tuple[int, int] = (2, 512), longest: int = 50, room: int = 128
    ) -> None:
        self.rng = np.random.default_rng(seed)
        self.count: Counter[str] = Counter()
        self.rates: dict[str, float] = {}
        self.calls: dict[str, Callable[[], Any]] = {}
        self.shares: dict[str, float] = {}
        self.vocab, self.longest, self.room = vocab, longest, room
        self.most, self.adapters, self.fills = 29, 0, 0.0
        self.beginnings = [self.tokens(room) for _ in range(3)]

    def chance(self, share: float, what: str = "") -> bool:
        """Draw, and count what it is a chance of."""
        drawn = bool(self.rng.random() < share)
        if drawn and what:
            self.count[what] += 1
        return drawn

    def number(self, least: int, most: int) -> int:
        """One of these, or between them."""
        return int(self.rng.integers(least, most + 1))

    def pick(self, *values: Value) -> Value:
        return values[self.number(0, len(values) - 1)]

    def shuffled(self, values: Sequence[Value]) -> list[Value]:
        return [values[place] for place in self.rng.permutation(len(values))]

    def tokens(self, number: int) -> list[int]:
        return self.rng.integers(*self.vocab, number).tolist()

    def kept(self, drafts: int, eager: float) -> int:
        """How many of a request's drafts are accepted, each with this chance."""
        kept = 0
        while kept < drafts and self.rng.random() < eager:
            kept += 1
        return kept

    def prompt(self) -> list[int]:
        """Tokens, of which some begin as those of others do, and some nearly fill the context."""
        length = self.number(1, self.longest)
        if self.fills and self.chance(self.fills):
            length = self.number(self.room * 3 // 4, self.room - 2)
        shared = self.number(0, length) if self.chance(0.5) else 0
        return self.pick(*self.beginnings)[:shared] + self.tokens(length - shared)

    def request(self, features: set[str] = frozenset(), share: float = 1.0) -> Drawn:  # type: ignore[assignment]
        """Draw one that has these features already; others have so much of their share."""
        features, params = set(features), {"temperature": 0.0, "ignore_eos": True}
        prompt, params["max_tokens"] = self.prompt(), self.number(1, self.most)
        for name, of_name in self.shares.items():
            needed, others = ONLY_WITH.get(name), NEVER_WITH.get(name, set())
            fits = (needed is None or needed in features) and not features & others
            if fits and self.chance(share * of_name):
                features.add(name)
                params |= FEATURES[name](self) if name in FEATURES else {}
        adapter = self.number(1, self.adapters) if self.adapters and self.chance(0.7) else 0
        name = f"r{self.count['arrived']}"
        return Drawn(name, prompt, features, params, adapter, priority=self.number(0, 2))

    def between_steps(self) -> None:
        """Make the calls that come before the next step."""
        for name, rate in self.rates.items():
            for _ in range(self.rng.poisson(rate)):
                self.count[name] += self.calls[name]() is not False


def traffic(
    llm: Any, seed: int, steps: int, longest_prompt: int = 50
) -> tuple[list[list[int]], Counter]:
    """Greedy tokens of requests that come while others run; and what happened to them.

    The same for every engine of the same settings.
    """
    core, tokens, draw = llm.llm_engine, {}, Traffic(seed, longest=longest_prompt)
    scheduler, draw.count = core.engine_core.engine_core.scheduler, count_preemptions(llm)

    def arrive() -> bool:
        if len(scheduler.requests) >= 12:
            return False
        asked = draw.request()
        prompt, params = {"prompt_token_ids": asked.prompt}, greedy(asked.params["max_tokens"])
        core.add_request(asked.name, prompt, params)
        return True

    draw.rates, draw.calls = {"arrived": 0.3}, {"arrived": arrive}
    while draw.count["steps"] < steps or core.has_unfinished_requests():
        if draw.count["steps"] < steps:
            draw.between_steps()
        for output in core.step():
            if output.finished:
                tokens[int(output.request_id[1:])] = list(output.outputs[0].token_ids)
        draw.count["steps"] += 1
    return [tokens[key] for key in sorted(tokens)], draw.count
