"""Random traffic through vLLM's scheduler and ours; all that both return and keep must be equal."""

import copy
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from typing import Any

import numpy as np
import torch
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import (
    RepetitionDetectionParams,
    SamplingParams,
    StructuredOutputsParams,
)
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.outputs import DraftTokenIds, LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from tests.scheduling.engines import EOS, VOCAB, Settings, draw, hasher, make
from tests.scheduling.state import compare, view, view_scheduler

KINDS = {
    "plain": 60,
    "stop tokens": 12,
    "eos": 14,
    "logprobs": 4,
    "prompt logprobs": 1,
    "structured": 4,
    "repetition": 2,
    "streamed": 2,
    "pooling": 1,
    "traced": 3,
}
"""Kinds of requests, and how many of a hundred are of it."""


def features(places: list[tuple[str, int, int]]) -> list[MultiModalFeatureSpec]:
    """Images: name, position and tokens of each."""
    return [
        MultiModalFeatureSpec(None, "image", name, PlaceholderRange(start, size))
        for name, start, size in places
    ]


class UpstreamFailedError(Exception):
    """vLLM's scheduler failed, and ours by the same error: the engine would have ended."""


class Twin:
    """One engine's pair of schedulers, and its traffic.

    Parameters
    ----------
    settings
        Of the engine.
    every
        States are compared in every so many steps; what is returned, in each.

    Attributes
    ----------
    count
        What happened how often.
    """

    def __init__(self, settings: Settings, every: int = 1) -> None:
        self.settings, self.every = settings, every
        self.rng = np.random.default_rng([settings.seed, 1])
        self.upstream, self.ours = (make(settings, ours=ours) for ours in (False, True))
        self.both = (self.upstream, self.ours)
        self.flight: deque[tuple[Any, Any, dict[str, bool]]] = deque()
        self.count: Counter[str] = Counter()
        self.sessions: set[str] = set()
        rate = settings.max_num_seqs / 40
        self.rate = float(self.rng.choice([rate / 2, rate, 3 * rate]))
        self.aborts = float(self.rng.choice([0, 0.02, 0.1]))
        self.shares_special = float(self.rng.choice([0, 0.3, 1]))
        self.clients = int(self.rng.choice([1, 1, 3]))
        self.nans = bool(self.rng.random() < 0.05)
        self.kinds, self.streams, self.resets, self.sleeps = KINDS, 0.1, 0.004, 0.01
        self.sleep_rng = np.random.default_rng([settings.seed, 48])
        self.no_nans: dict[str, int] | None = {} if self.chance(0.5) else None
        self.longest = int(self.rng.choice([10, settings.max_model_len - 2]))

    def chance(self, share: float) -> bool:
        """Draw."""
        return bool(self.rng.random() < share)

    # ------------------------------------------------------------------------------- requests

    def add(self) -> None:
        """A request arrives."""
        rng, settings = self.rng, self.settings
        request_id = f"r{self.count['arrived']}"
        self.count["arrived"] += 1
        names = list(self.kinds)
        weights = np.array(list(self.kinds.values()), float)
        weights[3:] *= self.shares_special
        kind = str(rng.choice(names, p=weights / weights.sum()))
        length = int(rng.integers(1, self.longest + 1))
        shared = int(rng.integers(0, length + 1))
        start = int(rng.integers(3)) * 50
        prompt = [10 + start + each % 90 for each in range(shared)]
        prompt += rng.integers(10, VOCAB, length - shared).tolist()
        most = settings.max_model_len - length
        options: dict[str, Any] = {
            "temperature": 0.0,
            "ignore_eos": kind != "eos",
            "max_tokens": int(rng.integers(1, max(2, min(most, 60) + 1))),
        }
        if kind == "stop tokens":
            options["stop_token_ids"] = rng.integers(10, VOCAB, 8).tolist()
        if self.chance(0.1):
            options["min_tokens"] = int(rng.integers(0, options["max_tokens"] + 1))
        if kind == "logprobs":
            options["logprobs"] = 1
        if kind == "prompt logprobs":
            options["prompt_logprobs"] = 1
        if kind == "repetition":
            options["repetition_detection"] = RepetitionDetectionParams(
                max_pattern_size=1, min_pattern_size=1, min_count=2
            )
        more: dict[str, Any] = {
            "client_index": int(rng.integers(self.clients)),
            "arrival_time": float(self.count["arrived"] // 3),
            "priority": int(rng.integers(3)) if settings.priorities else 0,
            "trace_headers": {"traceparent": request_id} if kind == "traced" else None,
        }
        if settings.loras and self.chance(0.7):
            number = int(rng.integers(1, 5))
            more["lora_request"] = LoRARequest(f"adapter {number}", number, "no/path")
        compiled, fails = self.chance(0.5), self.chance(0.2)
        places = self.places(length) if settings.media and self.chance(0.4) else []
        for scheduler in self.both:
            params = SamplingParams(**options)
            if kind == "structured":
                params.structured_outputs = StructuredOutputsParams(regex="a")
            params._eos_token_id = EOS if kind == "eos" else None
            request = Request(
                request_id,
                list(prompt),
                None if kind == "pooling" else params,
                PoolingParams(task="embed") if kind == "pooling" else None,
                mm_features=features(places),
                block_hasher=hasher(settings.block_size) if settings.caching else None,
                resumable=kind == "streamed",
                **more,
            )
            if kind == "structured" and compiled:
                request.structured_output_request._grammar = ValueError() if fails else "grammar"
            scheduler.add_request(request)
        if kind == "streamed":
            self.sessions.add(request_id)
        self.count[kind] += 1

    def places(self, length: int) -> list[tuple[str, int, int]]:
        """Images in a prompt: name, position and tokens of each."""
        found, start = [], 0
        while len(found) < 3:
            start += int(self.rng.integers(0, 12))
            size = int(self.rng.integers(1, 12))
            if start + size >= length:
                break
            name = f"image {int(self.rng.integers(6))}"
            # The same name for another size is an error, which upstream finds when it encodes
            found.append((name if self.chance(0.03) else f"{name} of {size}", start, size))
            start += size
        size = length - 1 - start
        if 0 < size < 12 and self.chance(0.5):  # up to the end: drafters may still read it
            found.append((f"image {int(self.rng.integers(6))} of {size}", start, size))
        return found

    def stream(self, session: str) -> None:
        """Another part of a streamed input arrives, or its end."""
        request = self.upstream.requests.get(session)
        if request is None:
            self.sessions.discard(session)
            return
        # What a part outputs is kept. vLLM fails if a session gets longer than max_model_len
        parts = 1 + len(request.streaming_queue or ())
        longest = request.num_prompt_tokens + request.max_tokens + parts * (8 + 8)
        ends = self.chance(0.3) or longest > self.settings.max_model_len
        part = self.rng.integers(10, VOCAB, int(self.rng.integers(1, 9))).tolist()
        options: dict[str, Any] = {"max_tokens": int(self.rng.integers(1, 9)), "ignore_eos": True}
        if self.chance(0.3):
            options["stop_token_ids"] = self.rng.integers(10, VOCAB, 40).tolist()
        if self.chance(0.2):
            options["logprobs"] = 1
        places = self.places(len(part)) if self.settings.media and self.chance(0.4) else []
        for scheduler in self.both:
            scheduler.add_request(
                Request(
                    session,
                    list(part),
                    SamplingParams(temperature=0.0, **options),
                    None,
                    mm_features=features(places),
                    resumable=not ends,
                    arrival_time=0.0,
                )
            )
        self.count["streamed on"] += 1
        if ends:
            self.sessions.discard(session)

    def act(self) -> None:
        """What comes from outside between two steps."""
        rng = self.rng
        for _ in range(int(rng.poisson(self.rate))):
            if len(self.upstream.requests) < 3 * self.settings.max_num_seqs:
                self.add()
        if self.sessions and self.chance(self.streams):
            self.stream(str(rng.choice(sorted(self.sessions))))
        if self.upstream.requests and self.chance(self.aborts):
            ids = rng.choice(list(self.upstream.requests), size=int(rng.integers(1, 3))).tolist()
            for scheduler in self.both:
                scheduler.finish_requests(ids, RequestStatus.FINISHED_ABORTED)
            self.count["aborted"] += 1
        if self.chance(self.resets):
            self.reset(whole=self.chance(0.6))
        if self.sleep_rng.random() < self.sleeps:
            self.sleep()
        if self.chance(0.02):
            states = [PauseState.UNPAUSED, PauseState.PAUSED_NEW, PauseState.PAUSED_ALL]
            state = states[int(rng.choice(3, p=[0.8, 0.1, 0.1]))]
            for scheduler in self.both:
                scheduler._pause_state = state
            self.count["paused"] += state is not PauseState.UNPAUSED
        elif self.chance(0.2):
            for scheduler in self.both:
                scheduler._pause_state = PauseState.UNPAUSED
        for request_id, request in self.upstream.requests.items():
            grammar = request.structured_output_request
            if grammar is not None and grammar.grammar is None and self.chance(0.3):
                for scheduler in self.both:
                    mine = scheduler.requests[request_id]
                    mine.structured_output_request._grammar = "grammar"

    def sleep(self) -> None:
        """All is paused, loses its blocks and goes on; steps in flight end first, or later.

        So it is in a sleep, and in a pause that clears the cache.
        """
        for scheduler in self.both:
            scheduler._pause_state = PauseState.PAUSED_ALL
        drains = self.sleep_rng.random() < 0.5
        while drains and self.flight:
            self.take()
        self.reset(whole=True)
        for scheduler in self.both:
            scheduler._pause_state = PauseState.UNPAUSED
        self.count["slept, steps in flight" if self.flight else "slept, drained"] += 1

    def reset(self, *, whole: bool) -> None:
        """The prefix cache is emptied, if nobody uses it; `whole`: all running are preempted.

        Upstream raises an error if a session waits for its next part: that keeps its blocks. The
        engine answers with the error, and goes on.
        """
        answers: list[bool | str] = []
        for scheduler in self.both:
            try:
                answers.append(scheduler.reset_prefix_cache(reset_running_requests=whole))
            except RuntimeError as error:
                answers.append(str(error))
        compare(*answers, "reset_prefix_cache")
        self.count["prefix cache reset"] += 1
        self.count["prefix cache in use"] += answers[0] is not True

    # ---------------------------------------------------------------------------------- steps

    def step(self) -> None:
        """Schedule a step, and take the output of an earlier one."""
        self.act()
        throttle = self.settings.throttle and self.chance(0.5)
        outputs = self.call(lambda scheduler: scheduler.schedule(throttle))
        compare(view(outputs[0]), view(outputs[1]), "SchedulerOutput")
        self.compare_states("after schedule")
        scheduled = outputs[0].num_scheduled_tokens
        self.count["steps"] += 1
        self.count["tokens"] += outputs[0].total_num_scheduled_tokens
        self.count["preempted"] += len(outputs[0].preempted_req_ids)
        self.count["resumed"] += len(outputs[0].scheduled_cached_reqs.resumed_req_ids)
        find = self.upstream.requests
        samples = {
            each: not find[each].is_prefill_chunk and find[each].pooling_params is None
            for each in scheduled
        }
        self.flight.append((*outputs, samples))
        if len(self.flight) >= self.settings.depth or not scheduled:
            self.take()

    def call(self, method: Callable[[Any], Any]) -> list[Any]:
        """What both return; where upstream fails, ours has to fail by the same error.

        Upstream does fail: it admits a request with another adapter while one that runs has
        nothing to compute, and asserts in the next step that there aren't too many adapters.
        """
        try:
            theirs = method(self.upstream)
        except Exception as error:
            try:
                method(self.ours)
            except type(error):
                raise UpstreamFailedError from error
            raise
        return [theirs, method(self.ours)]

    def take(self) -> None:
        """The runner returns the oldest step."""
        upstream, ours, samples = self.flight.popleft()
        if self.settings.asynchronous and upstream.scheduled_spec_decode_tokens:
            self.validate_drafts(upstream, ours)
        result = self.result(upstream, samples)
        steps = {self.upstream: upstream, self.ours: ours}
        returned = self.call(
            lambda scheduler: scheduler.update_from_output(steps[scheduler], copy.deepcopy(result))
        )
        compare(view(returned[0]), view(returned[1]), "EngineCoreOutputs")
        self.compare_states("after update_from_output")
        published = [scheduler.kv_event_publisher for scheduler in self.both]
        compare(view(published[0]), view(published[1]), "KV events")
        for each in published:
            each.clear()
        for outputs in returned[0].values():
            for output in outputs.outputs:
                self.count["outputs"] += 1
                self.count[f"finished: {output.finish_reason}"] += output.finish_reason is not None
        if self.settings.num_drafts and not self.settings.asynchronous:
            self.give_drafts(upstream)

    def result(self, step: Any, samples: dict[str, bool]) -> ModelRunnerOutput:
        """What a runner would return: rows in another order, drafts accepted at random."""
        rng = self.rng
        rows = list(step.num_scheduled_tokens)
        if self.chance(0.3):
            rng.shuffle(rows)
        eager = float(rng.choice([0.2, 0.9]))
        sampled = []
        for each in rows:
            drafts = len(step.scheduled_spec_decode_tokens.get(each, ()))
            invalid = (step.num_invalid_spec_tokens or {}).get(each, 0)
            accepted = 0
            while accepted < drafts - invalid and rng.random() < eager:
                accepted += 1
            tokens = rng.integers(10, VOCAB, 1 + accepted).tolist()
            if self.chance(0.03):
                tokens[int(rng.integers(len(tokens)))] = EOS
            if self.chance(0.1):
                tokens = [int(rng.integers(10, 12))] * len(tokens)
            sampled.append(tokens if samples[each] else [])
        find = self.upstream.requests.get
        known = {each: find(each) for each in rows}
        asked = [each for each in known.values() if each is not None and each.sampling_params]
        total = sum(map(len, sampled))
        pooled = any(each is not None and each.pooling_params for each in known.values())
        starts = np.cumsum([0, *map(len, sampled)]).tolist()
        return ModelRunnerOutput(
            req_ids=rows,
            req_id_to_index={each: rows.index(each) for each in step.num_scheduled_tokens},
            sampled_token_ids=sampled,
            logprobs=LogprobsLists(
                np.arange(2 * total).reshape(total, 2),
                np.arange(2.0 * total).reshape(total, 2),
                np.arange(total),
                starts,
            )
            if any(each.sampling_params.num_logprobs is not None for each in asked)
            else None,
            prompt_logprobs_dict={
                each.request_id: torch.arange(3)
                for each in asked
                if each.sampling_params.prompt_logprobs is not None
                and samples.get(each.request_id)
                and each.prefill_stats is not None
                and not each.num_stale_output_tokens
            },
            pooler_output=[
                torch.arange(2)
                if known[each] is not None
                and known[each].pooling_params
                and not known[each].is_prefill_chunk
                else None
                for each in rows
            ]
            if pooled
            else None,
            num_nans_in_logits=dict.fromkeys(rows, 1)
            if self.nans and self.chance(0.5)
            else self.no_nans,
        )

    def validate_drafts(self, upstream: Any, ours: Any) -> None:
        """As vLLM's engine does for steps with structured output: drafts become known."""
        if not (upstream.pending_structured_output_tokens or self.chance(0.1)):
            return
        drafts = {
            each: self.rng.integers(10, VOCAB, int(self.rng.integers(0, len(tokens) + 1))).tolist()
            for each, tokens in upstream.scheduled_spec_decode_tokens.items()
        }
        for scheduler, step in zip(self.both, (upstream, ours), strict=True):
            own = copy.deepcopy(list(drafts.values()))
            step.scheduled_spec_decode_tokens = dict(step.scheduled_spec_decode_tokens)
            scheduler.update_draft_token_ids_in_output(DraftTokenIds(list(drafts), own), step)

    def give_drafts(self, step: Any) -> None:
        """The drafter's tokens for the next step, of some requests none."""
        drafts = {
            each: self.rng.integers(
                10, VOCAB, int(self.rng.integers(0, self.settings.num_drafts + 1))
            ).tolist()
            for each in step.num_scheduled_tokens
        }
        for scheduler in self.both:
            own = copy.deepcopy(list(drafts.values()))
            scheduler.update_draft_token_ids(DraftTokenIds(list(drafts), own))

    def compare_states(self, when: str) -> None:
        """Compare all that both keep."""
        if self.count["steps"] % self.every == 0:
            compare(view_scheduler(self.upstream), view_scheduler(self.ours), f"state {when}")


def play(seed: int, steps: int, every: int = 10, **special: Any) -> Twin:
    """Run a seed's engine; returns it with what happened.

    `special` are settings of the engine, or attributes of its traffic, that are not drawn.

    A difference in the states is found at the next comparison; with `every` 1, where it begins.

    Raises
    ------
    DifferenceError
        Where the schedulers differ: names seed, step and place.
    """
    names = {field.name for field in fields(Settings)}
    given = {name: value for name, value in special.items() if name in names}
    twin = Twin(replace(draw(seed), **given), every)
    for name in special.keys() - names:
        setattr(twin, name, special[name])
    try:
        for _ in range(steps):
            twin.step()
    except UpstreamFailedError:
        twin.count["upstream failed"] += 1
    except Exception as error:
        error.add_note(f"seed {seed}, step {twin.count['steps']}, {asdict(twin.settings)}")
        raise
    return twin
