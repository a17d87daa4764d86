"""Plays reports on an engine in this process, and tells what came of them."""

import contextlib
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm.sampling_params import StructuredOutputsParams

from tests.helpers.demo import new_folder
from tests.helpers.grammars import REGEX, SCHEMA
from tests.helpers.judge import judge_of
from tests.helpers.models import adapter_of, as_input, drafts_by, folder_of
from tests.helpers.sessions import send_part
from tests.helpers.v2 import engine_of
from tests.helpers.watch import (
    count_preemptions,
    count_states,
    count_verified,
    record_cached,
    record_stored,
)
from tests.reports.engines import DEFAULTS, ENGINES
from tests.reports.oracle import assert_prompt_scores, assert_scores, assert_tokens
from tests.reports.report import Ask, Call, Part, When

PATIENCE = 600
"""Steps after which an engine counts as one that hangs."""


@dataclass
class Answer:
    """What a request got. Of several samples, each has its own."""

    ask: Ask
    params: SamplingParams = field(init=False)
    by_index: dict[int, Any] = field(default_factory=dict)
    cached: int = 0  # tokens of its prompt that were found in the prefix cache
    prompt_logprobs: Any = None
    ended: bool = False

    def __post_init__(self) -> None:
        self.params = _params(self.ask)

    @property
    def outputs(self) -> list[Any]:
        return [self.by_index[index] for index in sorted(self.by_index)]

    @property
    def tokens(self) -> list[int]:
        return list(self.outputs[0].token_ids) if self.outputs else []

    def found(self, what: Any) -> Any:
        """What a report expects something of; a pair of numbers: the tokens between them."""
        if isinstance(what, tuple):
            return self.tokens[slice(*what)]
        return {
            "length": lambda: len(self.tokens),
            "lengths": lambda: [len(each.token_ids) for each in self.outputs],
            "finish": lambda: self.outputs[0].finish_reason,
            "cached": lambda: self.cached,
            "different": lambda: len({tuple(each.token_ids) for each in self.outputs}),
        }[what]()


class Engine:
    """An engine of `ENGINES` with one runner, and what happens in it."""

    def __init__(self, name: str, llm: Any) -> None:
        self.kind, self.llm, self.core = ENGINES[name], llm, llm.llm_engine
        inner = self.core.engine_core.engine_core
        self.inner, self.scheduler = inner, inner.scheduler
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.free = self.pool.get_num_free_blocks()
        self.folder = new_folder("reports")
        self.counts = [count_preemptions(llm), count_verified(llm), count_states(llm)]
        self.cached = record_cached(llm)
        self.stored = record_stored(llm) if self.scheduler.connector else []
        self.by_id: dict[str, Answer] = {}  # the last request of each id
        self.sessions: dict[str, list[Answer]] = {}  # parts that are not answered yet
        self.texts: dict[str, list[int]] = {}  # of each session, as far as it is answered
        self.get_output = self.core.engine_core.get_output
        self.core.engine_core.get_output = self._get_output

    def play(self, does: tuple[Ask | Call, ...]) -> dict[str, Answer]:
        """Make requests and calls when they are due, until all have been answered."""
        for each in (*self.counts, self.cached, self.stored):
            each.clear()
        answers: dict[str, Answer] = {}
        due, steps = list(does), 0
        while due or self.core.has_unfinished_requests() or any(self.sessions.values()):
            for each in [each for each in due if _is_due(each.at, steps, answers)]:
                due.remove(each)
                if isinstance(each, Call):
                    CALLS[each.name](self, **each.given)
                elif isinstance(each, Part):
                    self._send(each, answers)
                else:
                    self._ask(each, answers)
            for output in self.core.step():
                answer = self.by_id[output.request_id]
                for each in output.outputs:
                    answer.by_index[each.index] = each
                answer.ended = output.finished
                answer.cached = output.num_cached_tokens or 0
                answer.prompt_logprobs = output.prompt_logprobs
            steps += 1
            assert steps < PATIENCE, f"after {PATIENCE} steps {due or 'requests'} are left"
        return answers

    def _ask(self, ask: Ask, answers: dict[str, Answer]) -> None:
        name = ask.id or ask.name
        if ask.refused:
            with pytest.raises(VLLMValidationError, match=ask.refused):
                self._add(name, ask, _params(ask))
            return
        answer = answers[ask.name] = self.by_id[name] = Answer(ask)
        answer.params.update_from_tokenizer(self.core.get_tokenizer())
        self._add(name, ask, answer.params)

    def _add(self, name: str, ask: Ask, params: SamplingParams) -> None:
        """Process a prompt, then send its request, as `LLM` and servers do."""
        prompt = dict(as_input(ask.prompt)) | ({"cache_salt": ask.salt} if ask.salt else {})
        adapter = self.adapter(ask.adapter, ask.adapter_name) if ask.adapter else None
        given = {"lora_request": adapter, "priority": ask.priority}
        self.core.add_request(name, self.llm._preprocess_cmpl_one(prompt), params, **given)

    def adapter(self, number: int, name: str = "") -> LoRARequest:
        folder = self.folder / f"{number}"
        if not folder.exists():
            self.overwrite(number, number)
        return LoRARequest(name or f"adapter {number}", number, str(folder))

    def overwrite(self, number: int, weights: int) -> None:
        """Put the weights of an adapter into a folder, which has those of another one perhaps."""
        source = adapter_of(self.kind.model, weights)
        shutil.copytree(source, self.folder / f"{number}", dirs_exist_ok=True)

    def _send(self, part: Part, answers: dict[str, Answer]) -> None:
        parts = self.sessions.setdefault(part.session, [])
        answer = Answer(part)
        if part.prompt is not None:
            answers[part.name] = answer
            parts.append(answer)
        send_part(self.llm, part.session, part.prompt, answer.params)

    def _get_output(self) -> Any:
        """Outputs of the engine's core, of which those of sessions are kept here."""
        outputs = self.get_output()
        for output in outputs.outputs:
            if not (parts := self.sessions.get(output.request_id)):
                continue
            text = self.texts.setdefault(output.request_id, [])
            said = parts[0].by_index.setdefault(
                0, SimpleNamespace(token_ids=[], finish_reason=None)
            )
            said.token_ids += output.new_token_ids
            if output.finish_reason is not None:
                said.finish_reason = str(output.finish_reason)
                answer = parts.pop(0)
                answer.ask = replace(answer.ask, prompt=[*text, *answer.ask.prompt])
                answer.ended, text[:] = True, [*answer.ask.prompt, *said.token_ids[:-1]]
        return outputs

    def drop(self, session: str) -> None:
        """Abort a session, whose parts are not looked at any more."""
        self.core.engine_core.abort_requests([session])
        self.sessions.pop(session)

    def happened(self) -> Counter[str]:
        found = sum(self.counts, Counter[str]())
        return found + Counter(cached=sum(self.cached), stored=sum(self.stored))

    def assert_nothing_is_kept(self) -> None:
        """Requests that have ended hold no blocks or entries. This empties the prefix cache."""
        for _ in range(50):
            if self.pool.get_num_free_blocks() == self.free and not self.inner.batch_queue:
                break
            self.inner.step_fn()
        assert self.pool.get_num_free_blocks() == self.free, "blocks are kept"
        self.sessions.clear()
        self.texts.clear()
        assert not self.scheduler.requests, "the scheduler keeps requests"
        assert not self.core.output_processor.request_states, "requests are kept"
        assert self.llm.reset_prefix_cache()

    def drain(self) -> None:
        """Steps in flight end."""
        while self.inner.batch_queue:
            self.core.step()


def _is_due(at: When, steps: int, answers: dict[str, Answer]) -> bool:
    if isinstance(at, int):
        return steps >= at
    name, tokens = (at, None) if isinstance(at, str) else at
    if name not in answers:
        return False
    return answers[name].ended if tokens is None else len(answers[name].tokens) >= tokens


def _params(ask: Ask) -> SamplingParams:
    params = {"temperature": 0.0, "ignore_eos": not ask.form, "max_tokens": ask.tokens}
    if ask.form:
        forms = {"json": SCHEMA, "regex": REGEX}
        params["structured_outputs"] = StructuredOutputsParams(**{ask.form: forms[ask.form]})
    return SamplingParams(**params | ask.params)


def _reload(engine: Engine) -> None:
    path = engine.core.vllm_config.model_config.model
    engine.llm.collective_rpc("reload_weights", kwargs={"weights_path": path})


CALLS: dict[str, Callable[..., Any]] = {
    "drop": Engine.drop,
    "abort": lambda engine, name: engine.core.abort_request([name]),
    "pause": lambda engine, clear=False: engine.inner.pause_scheduler("keep", clear_cache=clear),
    "resume": lambda engine: engine.inner.resume_scheduler(),
    "drain": Engine.drain,
    "sleep": lambda engine, level: engine.core.sleep(level, mode="keep"),
    "wake": lambda engine, tags=None: engine.core.wake_up(tags),
    "reload": _reload,
    "reset": lambda engine: engine.core.reset_prefix_cache(reset_running_requests=True),
    "reset images": lambda engine: engine.core.reset_encoder_cache(),
    "overwrite": Engine.overwrite,
    "load": lambda engine, number: engine.core.add_lora(engine.adapter(number)),
    "unload": lambda engine, number: engine.core.remove_lora(number),
}
"""Calls between steps, by name."""


@contextlib.contextmanager
def start(name: str, runner: str) -> Iterator[Engine]:
    kind = ENGINES[name]
    settings = DEFAULTS | kind.settings
    if kind.drafts:
        settings["speculative_config"] = drafts_by(kind.model, kind.drafts, kind.number)
    with engine_of(runner, folder_of(kind.model), **settings) as llm:
        engine = Engine(name, llm)
        yield engine
        engine.__dict__.clear()


def assert_right(engine: Engine, answer: Answer) -> int:
    """A greedy answer is that of transformers, and one that was drawn at random is the same alone.

    Alone means: on the same engine, without other requests and without calls. One that was drawn
    without a seed isn't looked at. Returns how many tokens are others than without the request's
    parameters.
    """
    if answer.params.temperature == 0:
        return _assert_as_by_transformers(engine, answer)
    if answer.params.seed is not None:
        alone = engine.play((replace(answer.ask, at=0, priority=0),))[answer.ask.name]
        engine.assert_nothing_is_kept()
        _assert_same(alone, answer)
    return 0


def _assert_as_by_transformers(engine: Engine, answer: Answer) -> int:
    changed = 0
    judge = judge_of(engine.kind.model, adapter=answer.ask.weights or answer.ask.adapter)
    prompt, params = answer.ask.prompt, answer.params
    for output in answer.outputs:
        name, tokens, finish = answer.ask.name, list(output.token_ids), output.finish_reason
        stops = [n for n, token in enumerate(tokens) if token in params.all_stop_token_ids]
        assert finish != "length" or len(tokens) == answer.ask.tokens, name
        if answer.ask.form:
            assert finish == "stop", name
            assert not any(judge.margins(prompt, tokens, answer.ask.form)), name
        elif answer.ended:
            assert stops == ([len(tokens) - 1] if finish == "stop" else []), name
        if not answer.ask.form and params.thinking_token_budget is None:
            changed += assert_tokens(judge, prompt, tokens, params)
        if params.logprobs is not None:
            assert_scores(judge, prompt, output, params)
    if params.prompt_logprobs is not None and answer.ended:
        assert_prompt_scores(judge, prompt, answer.prompt_logprobs, params.prompt_logprobs)
    return changed


def _assert_same(alone: Answer, answer: Answer) -> None:
    name, whole = answer.ask.name, answer.ended
    for one, other in zip(alone.outputs, answer.outputs, strict=True):
        tokens = list(other.token_ids)
        assert tokens == list(one.token_ids)[: None if whole else len(tokens)], name
        if whole:
            assert (other.finish_reason, other.stop_reason) == (one.finish_reason, one.stop_reason)
            assert other.text == one.text
        _assert_same_logprobs(one.logprobs, other.logprobs, len(tokens), name)
    _assert_same_logprobs(alone.prompt_logprobs, answer.prompt_logprobs, None, name)


def _assert_same_logprobs(expected: Any, found: Any, length: int | None, name: str) -> None:
    assert (found is None) == (expected is None), name
    for one, other in zip((expected or [])[:length], (found or [])[:length], strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert {t: e.rank for t, e in one.items()} == {t: e.rank for t, e in other.items()}
            values = [[each[t].logprob for t in one] for each in (one, other)]
            np.testing.assert_allclose(*values, atol=1e-4, err_msg=name)
