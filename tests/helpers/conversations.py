"""Chats with SmolLM2 over many turns, and how far its tokens are from the best by transformers."""

import json
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from perplexity import book

from tests.helpers.engine import graphs
from tests.helpers.grammars import allowed, compiler_of
from tests.helpers.lora import make_adapter, merge
from tests.helpers.v2 import engine_of
from tests.helpers.watch import count_lookups, count_preemptions, record_cached

TEXT = Path(__file__).with_name("conversations.txt")
MAX_TOKENS = 24
CALL = {
    "type": "object",
    "properties": {
        "name": {"enum": ["get_weather", "get_time"]},
        "arguments": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "arguments"],
    "additionalProperties": False,
}
"""Of a call of a tool, as models write it."""
TOOLS = (
    "You have two tools: get_weather tells the weather of a city, get_time tells what time it is "
    f"there. Answer each question with a call in this form: {json.dumps(CALL)}"
)
FORMS = {
    "list": {"type": "array", "items": {"type": "integer"}, "minItems": 3, "maxItems": 5},
    "call": CALL,
}
ADAPTERS = 2


def conversations() -> list[list[str]]:
    """The user's turns of each."""
    lines = [line for line in TEXT.read_text().splitlines() if not line.startswith("#")]
    return [block.splitlines() for block in "\n".join(lines).split("\n\n")]


@dataclass
class Turn:
    prompt: list[int]
    tokens: list[int]
    form: str
    scores: list[float]
    """Log-probabilities of the prompt's tokens but the first; empty if nobody asked for them."""


@dataclass
class Chat:
    """A conversation under way: its own earlier answers are in each prompt."""

    asked: list[str]
    adapter: int = 0
    """Number of a LoRA adapter; 0: none."""
    system: str = "You are a helpful assistant."
    forms: dict[int, str] = field(default_factory=dict)
    """Turns, and one of `FORMS` into which their answers are forced."""
    scored: int = -1
    """Turn whose prompt gets log-probabilities."""
    turns: list[Turn] = field(default_factory=list)

    def next_prompt(self, tokenizer: Any) -> list[int]:
        """Token ids up to where the next answer begins."""
        end = "<|im_end|>\n"
        asked = f"<|im_start|>user\n{self.asked[len(self.turns)]}{end}<|im_start|>assistant\n"
        if not self.turns:
            return tokenizer.encode(f"<|im_start|>system\n{self.system}{end}{asked}")
        last = self.turns[-1]
        is_ended = last.tokens[-1:] == [tokenizer.eos_token_id]
        asked = f"{end.removeprefix('<|im_end|>' if is_ended else '')}{asked}"
        return last.prompt + last.tokens + tokenizer.encode(asked)


def chats_of(tokenizer: Any, which: slice, length: int) -> list[Chat]:
    """Some of the conversations, and two about a book: `length` tokens of it, and an eighth.

    A third each is without an adapter, with the first and with the second. Every fourth has scores.
    Every fifth ends with a form, of which half are calls of tools.
    """
    chats = []
    for number, asked in [*enumerate(conversations())][which]:
        chat = Chat(asked, number % (ADAPTERS + 1), scored=3 if number % 4 == 0 else -1)
        last = len(asked) - 1
        if number % 10 == 4:
            chat.forms = {last: "list"}
        elif number % 10 == 9 or number == 1:
            chat.system, chat.forms = TOOLS, {last - 1: "call", last: "call"}
            chat.asked = [*asked[:-2], "What time is it in Rome?", "Does it rain in Oslo?"]
        chats.append(chat)
    ids = tokenizer(book(), verbose=False).input_ids
    for adapter, part in enumerate((ids[:length], ids[8000 : 8000 + length // 8])):
        text = tokenizer.decode(part)
        asked = [f"{text}\n\nWhat is this text about?", "Who wrote it?", "Sum it up in a line."]
        chats.append(Chat(asked, adapter, scored=2 - adapter))
    return chats


def play(llm: Any, tokenizer: Any, chats: list[Chat], loras: list[Any]) -> None:
    """Let an engine answer, turn by turn, all conversations together."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    def params(chat: Chat) -> Any:
        turn = len(chat.turns)
        form = chat.forms.get(turn)
        return SamplingParams(
            temperature=0,
            max_tokens=2 * MAX_TOKENS if form else MAX_TOKENS,
            prompt_logprobs=0 if turn == chat.scored else None,
            structured_outputs=form and StructuredOutputsParams(json=FORMS[form]),
        )

    while running := [chat for chat in chats if len(chat.turns) < len(chat.asked)]:
        prompts = [chat.next_prompt(tokenizer) for chat in running]
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            [params(chat) for chat in running],
            lora_request=[loras[chat.adapter] for chat in running],
            use_tqdm=False,
        )
        for chat, prompt, output in zip(running, prompts, outputs, strict=True):
            told = zip(prompt[1:], (output.prompt_logprobs or [])[1:])
            chat.turns.append(
                Turn(
                    prompt,
                    list(output.outputs[0].token_ids),
                    chat.forms.get(len(chat.turns), ""),
                    [each[token].logprob for token, each in told],
                )
            )


@dataclass
class Verdict:
    """What transformers says in float32 of each token."""

    short: list[float] = field(default_factory=list)
    """How far its logit is below the best one, among those that its form allows."""
    scores_off: list[float] = field(default_factory=list)
    """How far a log-probability of a prompt's token is off."""


@torch.no_grad()
def judge(
    model: Path, loras: list[Path], folder: Path, tokenizer: Any, chats: list[Chat]
) -> Verdict:
    """Read each conversation once, with its adapter merged into the weights."""
    from transformers import AutoModelForCausalLM

    verdict = Verdict()
    for adapter in sorted({chat.adapter for chat in chats}):
        merged = merge(model, loras[adapter - 1], folder / str(adapter)) if adapter else model
        network = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32).eval()
        for chat in chats:
            if chat.adapter == adapter:
                _read(network, chat, tokenizer, verdict)
    return verdict


def _read(network: Any, chat: Chat, tokenizer: Any, verdict: Verdict) -> None:
    last = chat.turns[-1]
    states = network.model(torch.tensor([last.prompt + last.tokens])).last_hidden_state[0]
    for turn in chat.turns:
        first = len(turn.prompt) - 1
        logits = network.lm_head(states[first : first + len(turn.tokens)])
        chosen = logits.gather(1, torch.tensor(turn.tokens)[:, None])[:, 0]
        if turn.form:
            schema = json.dumps(FORMS[turn.form])
            form = compiler_of(tokenizer).compile_json_schema(
                schema, any_whitespace=False, separators=(",", ":")
            )
            logits = allowed(form, turn.tokens, logits.clone())
        verdict.short += (logits.amax(1) - chosen).tolist()
        for start in range(0, len(turn.scores), 512):
            told = torch.tensor(turn.scores[start : start + 512])
            rows = network.lm_head(states[start : start + len(told)]).log_softmax(-1)
            ids = torch.tensor(turn.prompt[start + 1 : start + 1 + len(told)])
            verdict.scores_off += (rows.gather(1, ids[:, None])[:, 0] - told).abs().tolist()


@dataclass
class Outcome:
    """What an engine answered, what transformers says of it, and what happened meanwhile."""

    turns: list[Turn]
    verdict: Verdict
    preempted: int
    drafts: Counter
    """What `count_lookups` says."""
    cached: int
    """Tokens of prompts that were in the prefix cache."""

    @property
    def lengths(self) -> list[int]:
        return [len(turn.prompt) for turn in self.turns]

    def __str__(self) -> str:
        short, off = self.verdict.short, self.verdict.scores_off
        return (
            f"{len(self.turns)} turns, {len(short)} tokens: {sum(map(bool, short))} not the best "
            f"one, by {max(short):.2g} at most; {len(off)} log-probabilities of prompts: off by "
            f"{max(off):.2g} at most; {self.preempted} preempted, {dict(self.drafts)}, "
            f"prompts of {max(self.lengths):,} tokens at most and {sum(self.lengths):,} in all, of "
            f"which {self.cached:,} were cached"
        )


def converse(
    runner: str, model: Path, folder: Path, which: slice, length: int, **settings: Any
) -> Outcome:
    """Hold conversations with an engine that has to do everything at once.

    Adapters, forms, drafts, cached prefixes, a cache that is too small, prompts in chunks, graphs.
    `which` and `length` are as in `chats_of`.
    """
    from transformers import AutoTokenizer
    from vllm.lora.request import LoRARequest

    tokenizer = AutoTokenizer.from_pretrained(model)
    numbers = range(1, ADAPTERS + 1)
    adapters = [
        make_adapter(folder / f"adapter-{n}", model, seed=n, rank=4, spread=0.02) for n in numbers
    ]
    loras = [None, *(LoRARequest(f"{n}", n, str(path)) for n, path in zip(numbers, adapters))]
    chats = chats_of(tokenizer, which, length)
    defaults = {
        "skip_tokenizer_init": False,
        "max_model_len": 8192,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 256,
        "kv_cache_memory_bytes": None,
        "enable_lora": True,
        "max_loras": ADAPTERS,
        "max_lora_rank": 8,
        "speculative_config": {
            "method": "ngram",
            "num_speculative_tokens": 3,
            "prompt_lookup_max": 3,
        },
        "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
        **graphs("FULL_AND_PIECEWISE", 4, 16, 64),
    }
    with engine_of(runner, model, **defaults | settings) as llm:
        preempted, cached = count_preemptions(llm), record_cached(llm)
        drafts = count_lookups(llm, runner)
        play(llm, tokenizer, chats, loras)
    outcome = Outcome(
        [turn for chat in chats for turn in chat.turns],
        judge(model, adapters, folder, tokenizer, chats),
        preempted["preempted"],
        drafts,
        sum(cached),
    )
    print(f"{runner}, {settings}: {outcome}")
    return outcome
