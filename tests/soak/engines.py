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
from typing import Any

import numpy as np
import pytest
from vllm.exceptions import VLLMValidationError

from tests.helpers.engine import greedy, runner_of
from tests.helpers.fused import forget_layers
from tests.helpers.ranks import Ranks, serve_on_ranks
from tests.helpers.v2 import asked_for, engine_of
from tests.helpers.watch import count_preemptions, count_verified
from tests.soak.kinds import FILES, Kind
from tests.soak.models import (
    ADAPTERS,
    MAX_TOKENS,
    VISION,
    adapter_of,
    answers,
    drafter_of,
    int8_of,
    model_of,
    prompts,
)
from tests.soak.sessions import Sessions

SECONDS = 600
"""Time limit of an engine of several ranks."""
PATIENCE = 50
"""Empty steps in which a connector may finish what it stores."""


class Judge:
    """Holds an engine's tokens against transformers.

    Attributes
    ----------
    count
        ``tokens`` that were looked at, and ``close calls``: answers that part from transformers'
        where it hardly prefers one token.
    margin
        The largest that was met, in standard deviations.
    """

    def __init__(self, kind: Kind) -> None:
        self.kind, self.margin, self.count = kind, 0.0, Counter[str]()
        numbers = range(1 + ADAPTERS * kind.adapters)
        ranks = 2 if kind.layout == "tp2" else 1
        self.readers = [answers(kind.device, kind.family, kind.int8, ranks, n) for n in numbers]

    def look(self, prompt: int, adapter: int, tokens: list[int]) -> None:
        """Look at an answer, whole or begun.

        Raises
        ------
        AssertionError
            If a token is none that the model would choose.
        """
        expected = self.readers[adapter].tokens[prompt][: len(tokens)]
        margin = self.readers[adapter].margin(prompt, tokens)
        self._note(margin, tokens, f"prompt {prompt}, adapter {adapter}: {tokens}, not {expected}")

    def look_behind(self, text: list[int], adapter: int, tokens: list[int]) -> None:
        """The same of a text that is none of the prompts."""
        margin = self.readers[adapter].margin_behind(text, tokens)
        self._note(margin, tokens, f"behind {text}, adapter {adapter}: {tokens}")

    def _note(self, margin: float, tokens: list[int], what: str) -> None:
        self.margin = max(margin, self.margin)
        self.count["tokens"] += len(tokens)
        self.count["close calls"] += margin > 0
        assert margin <= self.kind.bound, f"{what} ({margin:.3f} standard deviations from the best)"


def play(kind: Kind, steps: int, alone: bool = True) -> Counter:
    """Serve waves of requests until `steps` are done; what happened how often.

    Parameters
    ----------
    kind, steps
        The engine, and how long it serves.
    alone
        Whether nothing else in this process keeps an engine, as tests before this one may.

    Raises
    ------
    AssertionError
        If a token differs, or blocks or requests are left, or parts of models outlive the engine.
    """
    forget_layers()
    judge = Judge(kind)
    with tempfile.TemporaryDirectory() as stored:
        settings = settings_of(kind, stored)
        model = model_of(kind.device, kind.family)
        if kind.int8:
            model = int8_of(kind.device, kind.family, kind.int8)
        if kind.layout != "one rank":
            count = serve_ranks(kind, model, settings, judge, steps)
        else:
            with engine_of(kind.runner, model, **settings) as llm:
                parts = parts_of(llm)
                count = _Serving(kind, llm, judge).serve(steps)
            del llm
            gc.unfreeze()  # an engine that began before froze what there was
            for _ in range(2):  # of seed 3111, what the first one frees has let go of more
                gc.collect()
            kept = Counter(type(each).__name__ for part in parts if (each := part()) is not None)
            assert not (kept and alone), f"parts of the engine outlive it: {dict(kept)}"
    count["largest margin in thousandths"] = round(1000 * judge.margin)
    return count + judge.count


def parts_of(llm: Any) -> list[weakref.ref]:
    """What must not outlive an engine: its runner, and the models' parts that have weights."""
    runner = runner_of(llm)
    drafter = getattr(runner, "drafter", None) or getattr(runner, "speculator", None)
    models = [each for each in (runner.model, getattr(drafter, "model", None)) if each is not None]
    parts = [each for model in models for each in model.modules()]
    with_weights = [each for each in parts if any(True for _ in each.parameters(recurse=False))]
    return [weakref.ref(each) for each in (runner, *with_weights)]


def settings_of(kind: Kind, stored: str) -> dict[str, Any]:
    """Keyword arguments of the engine; `stored` is a folder for a connector."""
    settings = dict(kind.settings)
    if kind.connector == FILES:
        settings["kv_transfer_config"] = {
            "kv_connector": FILES,
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": stored},
        }
    if kind.drafts not in ("", "ngram", "mtp"):
        folder = drafter_of(kind.device, kind.family, kind.drafts)
        drafts = settings["speculative_config"]
        settings["speculative_config"] = {**drafts, "model": str(folder)}
    return settings


def adapters_of(kind: Kind) -> list[Any]:
    """Adapters that requests choose from; None is none of them."""
    if not kind.adapters:
        return [None]
    from vllm.lora.request import LoRARequest

    numbers = range(1, ADAPTERS + 1)
    folders = [str(adapter_of(kind.device, number)) for number in numbers]
    return [None] + [LoRARequest(f"adapter {n}", n, f) for n, f in zip(numbers, folders)]


class _Serving:
    """The traffic of one engine in this process."""

    def __init__(self, kind: Kind, llm: Any, judge: Judge) -> None:
        self.kind, self.llm, self.core, self.judge = kind, llm, llm.llm_engine, judge
        self.rng, self.count = np.random.default_rng((kind.seed, 35)), Counter[str]()
        self.scheduler = self.core.engine_core.engine_core.scheduler
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.free = self.pool.get_num_free_blocks()
        self.prompts = prompts(kind.device, kind.family)
        self.loras = adapters_of(kind)
        self.preempted = count_preemptions(llm)
        self.verified = count_verified(llm) if kind.drafts else Counter[str]()
        self.sessions: Sessions | None = None
        if kind.sessions:
            asked = [prompt["prompt_token_ids"] for prompt in self.prompts]
            self.sessions = Sessions(llm, kind.seed, asked, self.loras, judge.look_behind)
        if kind.connector:
            self._count_loads(self.scheduler.connector)

    def _count_loads(self, connector: Any) -> None:
        """Count the tokens that a connector has of requests."""
        find = connector.get_num_new_matched_tokens

        def counted(*args: Any) -> Any:
            found = find(*args)
            self.count["tokens that a connector had"] += found[0] or 0
            return found

        connector.get_num_new_matched_tokens = counted

    def serve(self, steps: int) -> Counter:
        while self.count["steps"] < steps:
            self._wave(int(self.rng.integers(4, 20)))
            self.count["waves"] += 1
            self._rest()
            if self.kind.sleeps and (self.count["waves"] == 1 or self.rng.random() < 0.5):
                self._sleep()
            elif self.rng.random() < (0.6 if self.kind.connector else 0.2):
                assert self.llm.reset_prefix_cache()
                self.count["resets"] += 1
        drafts = {f"drafts {what}": number for what, number in self.verified.items()}
        sessions = self.sessions.count if self.sessions else Counter[str]()
        return self.count + Counter(self.preempted) + Counter(drafts) + sessions

    def _rest(self) -> None:
        """Nothing is kept for anybody, once a connector has stored what it was to store."""
        for _ in range(PATIENCE * bool(self.kind.connector)):
            if self.pool.get_num_free_blocks() == self.free and not self.scheduler.requests:
                break
            self.core.engine_core.engine_core.step_fn()
        assert self.pool.get_num_free_blocks() == self.free, "blocks are kept"
        assert not self.scheduler.requests, "requests are kept by the scheduler"
        assert not self.core.output_processor.request_states, "requests are kept"

    def _sleep(self) -> None:
        """At level 2, weights are read anew: those of the model, which adapters are not.

        Beside files that is refused: they have keys and values of the old ones.
        """
        stay = self.kind.adapters or self.kind.connector == FILES
        others = stay or self.kind.drafts not in ("", "ngram")
        level = 1 if others or self.rng.random() < 0.6 else 2
        self.llm.sleep(level=level)
        self.llm.wake_up(tags=["weights"])
        if level == 2:
            path = self.core.vllm_config.model_config.model
            self.llm.collective_rpc("reload_weights", kwargs={"weights_path": path})
        self.llm.wake_up(tags=["kv_cache"])
        self.count[f"sleeps at level {level}"] += 1
        self.count["sleeps"] += 1

    def _refuse_or_take_back(self) -> None:
        """Now and then: send a prompt that is refused, or empty the caches under what runs."""
        chance = self.rng.random()
        if chance < 0.1:
            prompt = self.prompts[int(self.rng.integers(len(self.prompts)))]
            with pytest.raises(VLLMValidationError, match="logit_bias"):
                self.core.add_request("refused", prompt, greedy(1, logit_bias={10**6: 1.0}))
            self.count["refused"] += 1
        elif chance < 0.15:
            assert self.llm.reset_prefix_cache(reset_running_requests=True)
            self.core.reset_encoder_cache()
            self.count["resets under requests"] += 1

    def _wave(self, number: int) -> None:
        alive: dict[str, tuple[int, int]] = {}
        said: dict[str, list[int]] = {}
        added = 0
        while added < number or self.core.has_unfinished_requests() or self.scheduler.requests:
            while added < number and self.rng.random() < 0.6:
                prompt, adapter = (
                    int(self.rng.integers(n)) for n in (len(self.prompts), len(self.loras))
                )
                name = f"{self.count['waves']}-{added}"
                self.core.add_request(
                    name,
                    self.prompts[prompt],
                    greedy(int(self.rng.integers(1, MAX_TOKENS + 1))),
                    lora_request=self.loras[adapter],
                )
                alive[name] = prompt, adapter
                added += 1
            if self.sessions is not None:
                self.sessions.step(begin=added < number)
            if self.kind.family in VISION:
                self._refuse_or_take_back()
            if alive and self.rng.random() < 0.05:
                name = list(alive)[int(self.rng.integers(len(alive)))]
                self.core.abort_request([name])
                self.judge.look(*alive.pop(name), said.get(name, []))
                self.count["aborted"] += 1
            for output in self.core.step():
                if output.request_id not in alive:
                    continue
                said[output.request_id] = list(output.outputs[0].token_ids)
                if output.finished:
                    self.judge.look(*alive.pop(output.request_id), said[output.request_id])
                    self.count["finished"] += 1
            self.count["steps"] += 1


def serve_ranks(kind: Kind, model: Any, settings: dict[str, Any], judge: Judge, steps: int) -> Any:
    """Serve waves by an engine of several ranks, as a server would."""
    # At rest `serve_on_ranks` shuts an engine down; what it has then is asked for in the traffic
    settings = {**settings, "distributed_executor_backend": "mp"}
    asked, loras = prompts(kind.device, kind.family), adapters_of(kind)
    traffic = partial(_waves, kind, asked, loras, steps)
    with asked_for(kind.runner):
        answered, count = serve_on_ranks(model, settings, traffic, seconds=SECONDS)
    for answer in answered:
        judge.look(*answer)
    return count


async def _waves(
    kind: Kind, asked: list[Any], loras: list[Any], steps: int, ranks: Ranks
) -> tuple[list[tuple[int, int, list[int]]], Counter]:
    """Prompt, adapter and tokens of each request, and what happened how often."""
    rng, count = np.random.default_rng((kind.seed, 35)), Counter[str]()
    answered: list[tuple[int, int, list[int]]] = []

    async def one(prompt: int, adapter: int, tokens: int, patience: float | None) -> None:
        task = ranks.generate([asked[prompt]], tokens, loras=[loras[adapter]])
        try:
            (got,) = await asyncio.wait_for(task, patience)
        except TimeoutError:
            count["aborted"] += 1
            return
        assert len(got) == tokens
        answered.append((prompt, adapter, got))
        count["finished"] += 1

    while count["steps"] < steps:
        requests = []
        for _ in range(int(rng.integers(4, 20))):
            prompt, adapter = (int(rng.integers(n)) for n in (len(asked), len(loras)))
            patience = float(rng.random()) / 5 if rng.random() < 0.05 else None
            requests.append(one(prompt, adapter, int(rng.integers(1, MAX_TOKENS + 1)), patience))
        await asyncio.gather(*requests)
        count["waves"] += 1
        if kind.sleeps and (count["waves"] == 1 or rng.random() < 0.5):
            await ranks.llm.sleep(level=1)
            await ranks.llm.wake_up()
            count["sleeps"] += 1
        counts = await ranks.ask("probe_counts")
        count["steps"] = max(sum(of_rank.values()) for of_rank in counts)
    assert await ranks.llm.reset_prefix_cache(), "blocks are kept"
    return answered, count
