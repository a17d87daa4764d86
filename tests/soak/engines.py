"""Engines of every kind under random traffic, whose tokens are held against transformers.

Those that `tests.differential` can't pair with upstream's runner are among them: states beside
attention, Model Runner V2 with drafts, either scheduler, sleep between waves of requests, KV
connectors, several ranks; on the CPU fallback and on NPUs. Every step passes the full check, and
after each wave all blocks are free again.
"""

import asyncio
import gc
import tempfile
import weakref
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import PoolingParams
from vllm.exceptions import VLLMValidationError

from tests.helpers.engine import greedy, runner_of
from tests.helpers.fused import forget_layers
from tests.helpers.judge import judge_of
from tests.helpers.life_cycle import LifeCycle
from tests.helpers.models import (
    ROUTED,
    as_input,
    drafts_by,
    files_in,
    folder_of,
    int8_of,
    is_a,
    prompts,
)
from tests.helpers.pooling import hidden_states, normalized
from tests.helpers.ranks import Ranks, serve_on_ranks
from tests.helpers.traffic import Traffic
from tests.helpers.v2 import asked_for, engine_of
from tests.helpers.watch import count_preemptions, count_verified, record_stored
from tests.soak.adapters import Adapters, Use, in_place, margin_of
from tests.soak.kinds import ADAPTERS, FILES, MAX_TOKENS, Kind
from tests.soak.sessions import Sessions

RESET_AFTER = 10
"""Steps after which all requests are preempted, whatever else is drawn."""
ROUNDS = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
"""How far a pooled row of length 1 may be from transformers' in float32; others are 1 or more."""
PATIENCE = 50
"""Empty steps in which a connector may finish what it stores."""


class Answers:
    """Holds an engine's tokens against transformers, and counts them.

    `margin` is the largest that was met, in standard deviations; close calls are answers that part
    from transformers' where it hardly prefers one token.
    """

    def __init__(self, kind: Kind) -> None:
        self.kind, self.margin, self.count = kind, 0.0, Counter[str]()
        numbers = range(1 + ADAPTERS * kind.adapters)
        ranks = 2 if kind.layout == "tp2" else 1
        self.judges = [judge_of(kind.model, kind.int8, ranks, each) for each in numbers]

    def params(self, tokens: int) -> Any:
        """What a request asks for, whose answer may have so many tokens."""
        return greedy(tokens)

    def said(self, output: Any) -> Any:
        """What there is of an answer."""
        return list(output.outputs[0].token_ids)

    def look(self, prompt: Any, use: Use, tokens: list[int]) -> None:
        """An answer, whole or begun: each token has to be one that the model would choose."""
        margins = {each: self.judges[each].margins(prompt, tokens) for each in set(use.weights)}
        margin = margin_of(use, margins.__getitem__)
        worst = [max(each, default=0) for each in margins.values()]  # nothing came yet: no margins
        by_two = len(worst) > 1 and min(worst) > 0
        self.count["answers by two adapters"] += by_two
        self.margin = max(margin, self.margin)
        self.count["tokens"] += len(tokens)
        self.count["close calls"] += margin > 0
        assert margin <= self.kind.bound, (
            f"behind {prompt}, adapters {use.weights}: {tokens}"
            f" ({margin:.3f} standard deviations from the best)"
        )


class Rows(Answers):
    """Holds a pooling model's rows against transformers."""

    def __init__(self, kind: Kind) -> None:
        self.kind, self.margin, self.count = kind, 0.0, Counter[str]()
        asked, each = prompts(kind.model), kind.pools == "token_embed"
        of_prompts = zip(asked, hidden_states(folder_of(kind.model), asked))
        self.rows = {
            tuple(prompt): normalized(rows if each else rows[-1]) for prompt, rows in of_prompts
        }

    def params(self, tokens: int) -> Any:
        del tokens
        return PoolingParams(task=self.kind.pools)

    def said(self, output: Any) -> Any:
        return output.outputs.data.float()

    def look(self, prompt: Any, use: Use, tokens: Any) -> None:
        """An answer comes whole; of one that was aborted there is an empty list."""
        if not isinstance(tokens, torch.Tensor):
            return
        expected, bound = self.rows[tuple(prompt)], ROUNDS[self.kind.settings["dtype"]]
        bound *= 10 if is_a(ROUTED, self.kind.model) else 1  # see `tests.helpers.judge.bound_of`
        assert tokens.shape == expected.shape, f"behind {prompt}: rows {list(tokens.shape)}"
        far = (tokens - expected).norm(dim=-1).max().item()
        self.margin = max(far, self.margin)
        self.count["tokens"] += len(tokens) if tokens.dim() > 1 else 1
        assert far <= bound, f"behind {prompt}: a row is {far:.3f} from transformers'"


def play(kind: Kind, steps: int, alone: bool = True) -> Counter:
    """Serve waves of requests until `steps` are done; what happened how often.

    Fails if a token differs, if blocks or requests are left, or if parts of models outlive the
    engine: unless others, which are not `alone`, keep an engine in this process.
    """
    forget_layers()
    answers = Rows(kind) if kind.pools else Answers(kind)
    with tempfile.TemporaryDirectory() as stored:
        settings = dict(kind.settings)
        if kind.connector == FILES:
            settings["kv_transfer_config"] = files_in(stored)
        if kind.drafts:
            number = settings["speculative_config"]["num_speculative_tokens"]
            settings["speculative_config"] = drafts_by(kind.model, kind.drafts, number)
        model = int8_of(kind.model, kind.int8) if kind.int8 else folder_of(kind.model)
        adapters = Adapters(kind.model, Path(stored), ADAPTERS * kind.adapters)
        if kind.layout != "one rank":
            # At rest `serve_on_ranks` shuts an engine down; what it has then is asked for before
            settings["distributed_executor_backend"] = "mp"
            traffic = partial(_waves, kind, prompts(kind.model), adapters, steps)
            with asked_for(kind.runner):
                answered, count = serve_on_ranks(model, settings, traffic)
            for answer in answered:
                answers.look(*answer)
        else:
            with engine_of(kind.runner, model, **settings) as llm:
                parts = parts_of(llm)
                count = _Serving(kind, llm, answers, adapters).serve(steps)
            del llm
            gc.unfreeze()  # an engine that began before froze what there was
            for _ in range(2):  # of seed 3111, what the first one frees has let go of more
                gc.collect()
            kept = Counter(type(each).__name__ for part in parts if (each := part()) is not None)
            assert not (kept and alone), f"parts of the engine outlive it: {dict(kept)}"
    count["largest margin in thousandths"] = round(1000 * answers.margin)
    return count + answers.count


def parts_of(llm: Any) -> list[weakref.ref]:
    """What must not outlive an engine: its runner, and the models' parts that have weights."""
    runner = runner_of(llm)
    drafter = getattr(runner, "drafter", None) or getattr(runner, "speculator", None)
    models = [each for each in (runner.model, getattr(drafter, "model", None)) if each is not None]
    parts = [each for model in models for each in model.modules()]
    with_weights = [each for each in parts if any(True for _ in each.parameters(recurse=False))]
    return [weakref.ref(each) for each in (runner, *with_weights)]


class _Serving(Traffic):
    """The traffic of one engine in this process."""

    def __init__(self, kind: Kind, llm: Any, answers: Answers, adapters: Adapters) -> None:
        super().__init__((kind.seed, 35))
        self.kind, self.llm, self.core, self.answers = kind, llm, llm.llm_engine, answers
        self.count, self.adapters = count_preemptions(llm), adapters
        self.scheduler = self.core.engine_core.engine_core.scheduler
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.free = self.pool.get_num_free_blocks()
        self.prompts = prompts(kind.model)
        self.verified = count_verified(llm) if kind.drafts else Counter[str]()
        self.stored = record_stored(llm) if kind.connector else []
        self.sessions: Sessions | None = None
        if kind.sessions:
            self.sessions = Sessions(llm, self, self.prompts, adapters, answers.look)
        # At level 2, weights are read anew: those of the model, which adapters are not. Beside
        # files that is refused: they have keys and values of the old ones
        self.levels = (1,) if kind.adapters or kind.connector == FILES else (1, 2)
        levels = (0, *self.levels) if kind.sleeps else (0,)
        self.life_cycle = LifeCycle(llm, self, self._step, levels, self.verified)
        self.rates = {"arrived": 1.5, "aborted": 0.05, "life-cycle calls": 0.15}
        self.rates |= {"adapters overwritten": 0.1} if kind.adapters else {}
        self.rates |= {"refused": 0.1} if kind.sees else {}
        self.calls = {
            "arrived": self._arrive,
            "aborted": self._abort,
            "life-cycle calls": self.life_cycle.call,
            "adapters overwritten": self._overwrite,
            "refused": self._send_a_bad_prompt,
        }
        self.reset_is_due = True
        self.expected = 0  # requests that this wave still gets
        self.alive: dict[str, tuple[Any, Use]] = {}  # prompt and adapter of each request
        self.said: dict[str, Any] = {}  # of each answer, what came so far
        self.ended: list[str] = []  # ids that later requests may have again
        self.again = Traffic((kind.seed, 64))  # draws whether they do, and leaves kept seeds as is

    def serve(self, steps: int) -> Counter:
        while self.count["steps"] < steps:
            self.expected = self.number(4, 19)
            self._wave()
            self.count["waves"] += 1
            self._rest()
            if self.kind.sleeps and (self.count["waves"] == 1 or self.chance(0.5)):
                self.life_cycle.sleep(1 if self.levels == (1,) or self.chance(0.6) else 2)
                self.count["sleeps"] += 1
            elif self.chance(0.6 if self.kind.connector else 0.2):
                assert self.llm.reset_prefix_cache()
                self.count["resets"] += 1
        lost = self.life_cycle.lost + self.life_cycle.lost_acceptance()
        assert not lost, lost
        self.count["tokens that a connector had"] = sum(self.stored)
        drafts = {f"drafts {what}": number for what, number in self.verified.items()}
        return self.count + Counter(drafts)

    def _rest(self) -> None:
        """Nothing is kept for anybody, once a connector has stored what it was to store."""
        for _ in range(PATIENCE * bool(self.kind.connector)):
            if self.pool.get_num_free_blocks() == self.free and not self.scheduler.requests:
                break
            self.core.engine_core.engine_core.step_fn()
        assert self.pool.get_num_free_blocks() == self.free, "blocks are kept"
        assert not self.scheduler.requests, "requests are kept by the scheduler"
        assert not self.core.output_processor.request_states, "requests are kept"

    def _send_a_bad_prompt(self) -> None:
        """A prompt, with an image perhaps, that is refused, and leaves no trace."""
        prompt, biased = as_input(self.pick(*self.prompts)), greedy(1, logit_bias={10**6: 1.0})
        with pytest.raises(VLLMValidationError, match="logit_bias"):
            self.core.add_request("refused", prompt, biased)

    def _arrive(self) -> bool:
        if not self.expected:
            return False
        prompt = self.pick(*self.prompts)
        use = self.adapters.use(self.number(0, len(self.adapters) - 1))
        name, params = f"r{self.count['arrived']}", self.answers.params(self.number(1, MAX_TOKENS))
        if self.ended and self.again.chance(0.2):
            name = self.ended.pop()
            self.count["ids used again"] += 1
            del self.said[name]
        self.core.add_request(name, as_input(prompt), params, lora_request=use.request)
        self.alive[name] = prompt, use
        self.expected -= 1
        return True

    def _abort(self) -> bool:
        if not self.alive:
            return False
        name = self.pick(*self.alive)
        self.core.abort_request([name])
        self.answers.look(*self.alive.pop(name), self.said.setdefault(name, []))
        self.ended.append(name)
        return True

    def _overwrite(self) -> None:
        self.count[f"adapters overwritten, loaded {self.adapters.change(self, self.core)}"] += 1

    def _wave(self) -> None:
        while self.expected or self.core.has_unfinished_requests() or self.scheduler.requests:
            self.between_steps()
            if self.reset_is_due and self.count["steps"] >= RESET_AFTER and self.scheduler.running:
                self.life_cycle.reset(whole=True)
                self.reset_is_due = False
            if self.sessions is not None:
                self.sessions.step(begin=self.expected > 0)
            self._step()

    def _step(self) -> None:
        """Take a step, and look at what it said."""
        for output in self.core.step():
            if output.request_id not in self.alive:
                continue
            self.said[output.request_id] = self.answers.said(output)
            if output.finished:
                self.answers.look(*self.alive.pop(output.request_id), self.said[output.request_id])
                self.ended.append(output.request_id)
                self.count["finished"] += 1
        self.count["steps"] += 1


async def _waves(
    kind: Kind, asked: list[Any], adapters: Adapters, steps: int, ranks: Ranks
) -> tuple[list[tuple[Any, Use, list[int]]], Counter]:
    """Waves of requests to an engine of several ranks, as a server would send them.

    Returns prompt, adapter and tokens of each request, and what happened how often.
    """
    draw = Traffic((kind.seed, 35))
    count = draw.count
    answered: list[tuple[Any, Use, list[int]]] = []

    async def one(prompt: Any, adapter: int, tokens: int, patience: float | None) -> None:
        use = adapters.use(adapter)
        task = ranks.generate([as_input(prompt)], tokens, loras=[use.request])
        try:
            (got,) = await asyncio.wait_for(task, patience)
        except TimeoutError:
            count["aborted"] += 1
            return
        assert len(got) == tokens
        answered.append((prompt, use, got))
        count["finished"] += 1

    async def pause(clear_cache: bool) -> None:
        await ranks.llm.pause_generation(mode="keep", clear_cache=clear_cache)
        await ranks.llm.resume_generation()
        count["life-cycle calls"] += 1

    async def change() -> None:
        of_name, adapter = adapters.overwrite(draw)
        assert await ranks.llm.add_lora(in_place(adapter))
        of_name.weights = of_name.weights[-1:]
        count["adapters overwritten"] += 1

    while count["steps"] < steps:
        requests = []
        for _ in range(draw.number(4, 19)):
            prompt, adapter = draw.pick(*asked), draw.number(0, len(adapters) - 1)
            patience = draw.rng.uniform(0, 0.2) if draw.chance(0.05) else None
            requests.append(one(prompt, adapter, draw.number(1, MAX_TOKENS), patience))
        for _ in range(draw.number(1, 3)):
            requests.append(pause(clear_cache=draw.chance(0.3)))
        if kind.adapters:
            requests.append(change())
        await asyncio.gather(*requests)
        count["waves"] += 1
        if kind.sleeps and (count["waves"] == 1 or draw.chance(0.5)):
            await ranks.llm.sleep(level=1)
            await ranks.llm.wake_up()
            count["sleeps"] += 1
        counts = await ranks.ask("probe_counts")
        count["steps"] = max(sum(of_rank.values()) for of_rank in counts)
    assert await ranks.llm.reset_prefix_cache(), "blocks are kept"
    return answered, count
