"""Random traffic through vLLM's scheduler and ours; all that both return and keep must be equal."""

import copy
import tempfile
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.outputs import DraftTokenIds, LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from tests.helpers.traffic import Traffic
from tests.scheduling import connectors
from tests.scheduling.connectors import Worker
from tests.scheduling.engines import EOS, VOCAB, draw, hasher, make
from tests.scheduling.state import compare, view, view_scheduler

SHARES = {
    "stop tokens": 0.12,
    "stops at the end": 0.14,
    "min tokens": 0.05,
    "logprobs": 0.04,
    "prompt logprobs": 0.01,
    "repetition": 0.02,
    "traced": 0.03,
    "streamed": 0.02,
    "grammar": 0.04,
    "pooling": 0.01,
}
"""Features of requests; of those from the fourth on, engines have as many, fewer or none."""


PAUSED = (PauseState.PAUSED_NEW, PauseState.PAUSED_ALL)


def features(places: list[tuple[str, int, int]]) -> list[MultiModalFeatureSpec]:
    """Images: name, position and tokens of each."""
    return [
        MultiModalFeatureSpec(None, "image", name, PlaceholderRange(start, size))
        for name, start, size in places
    ]


def as_drafts(drafts: dict[str, list[int]]) -> DraftTokenIds:
    """Drafts of requests, for one scheduler, which may change them."""
    return DraftTokenIds(list(drafts), copy.deepcopy(list(drafts.values())))


class UpstreamFailedError(Exception):
    """vLLM's scheduler failed, and ours by the same error: the engine would have ended."""


class Twin(Traffic):
    """One engine's pair of schedulers, and its traffic.

    States are compared in `every` so many steps; what is returned, in each.
    """

    def __init__(self, settings: SimpleNamespace, every: int = 1) -> None:
        super().__init__((settings.seed, 1), vocab=(10, VOCAB), room=settings.max_model_len)
        self.settings, self.every = settings, every
        self.folder = tempfile.TemporaryDirectory(prefix="npu-prep-scheduling-")
        settings.folder = self.folder.name  # of prompts that a connector stores
        self.upstream, self.ours = (make(settings, ours=ours) for ours in (False, True))
        self.both = (self.upstream, self.ours)
        self.flight: deque[tuple[Any, Any, dict[str, bool], Any]] = deque()
        self.worker = Worker(self.upstream, settings, self) if settings.connector else None
        self.sessions: set[str] = set()
        rate = settings.max_num_seqs / 40
        calls: dict[str, tuple[Callable[[], Any], float]] = {
            "arrived": (self.arrive, self.pick(rate / 2, rate, 3 * rate)),
            "streamed on": (self.stream, 0.1),
            "aborted": (self.abort, self.pick(0.0, 0.02, 0.1)),
            "prefix cache reset": (lambda: self.reset(whole=self.chance(0.6)), 0.004),
            "slept": (self.sleep, 0.01),
            "paused": (lambda: self.pause(self.pick(*PAUSED)), 0.004),
            "went on": (lambda: self.pause(PauseState.UNPAUSED), 0.2),
            "grammar compiled": (self.compile, 0.5),
        }
        self.calls = {name: call for name, (call, _) in calls.items()}
        self.rates = {name: often for name, (_, often) in calls.items()}
        special = self.pick(0.0, 0.3, 1.0)
        self.shares = {
            name: share if number < 3 else share * special
            for number, (name, share) in enumerate(SHARES.items())
        }
        self.clients = self.pick(1, 1, 3)
        self.nans = self.chance(0.05)
        self.no_nans: dict[str, int] | None = {} if self.chance(0.5) else None
        self.longest, self.most = self.pick(10, settings.max_model_len - 2), 60
        self.adapters = 4 if settings.loras else 0

    # ------------------------------------------------------------------------------- requests

    def arrive(self) -> bool:
        if len(self.upstream.requests) >= 3 * self.settings.max_num_seqs:
            return False
        name, prompt, asked, params, adapter, priority = self.request()
        client = self.number(1, self.clients) - 1
        hashes = self.settings.caching or self.worker is not None  # as EngineCore decides
        failing, compiled = self.chance(0.2), self.chance(0.5)
        places = self.places(len(prompt)) if self.settings.media and self.chance(0.4) else []
        if self.worker is not None:
            params["extra_args"] = {"kv_transfer_params": self.transfer(len(prompt))}
        for scheduler in self.both:
            params = copy.deepcopy(params)
            sampling, pooling = SamplingParams(**params), PoolingParams(task="embed")
            sampling._eos_token_id = EOS if "stops at the end" in asked else None
            lora = LoRARequest(f"adapter {adapter}", adapter, "no/path") if adapter else None
            request = Request(
                name,
                list(prompt),
                *((None, pooling) if "pooling" in asked else (sampling, None)),
                client_index=client,
                arrival_time=float(self.count["arrived"] // 3),
                priority=priority if self.settings.priorities else 0,
                trace_headers={"traceparent": name} if "traced" in asked else None,
                lora_request=lora,
                mm_features=features(places),
                block_hasher=hasher(self.upstream.hash_block_size) if hashes else None,
                resumable="streamed" in asked,
            )
            if "grammar" in asked and compiled:
                request.structured_output_request._grammar = ValueError() if failing else "grammar"
            scheduler.add_request(request)
        if "streamed" in asked:
            self.sessions.add(name)
        self.count.update(asked)
        return True

    def transfer(self, length: int) -> dict[str, Any] | None:
        """What an engine is asked to do with a request's blocks before and after it."""
        if self.chance(0.4):
            return None
        return {
            "do_remote_prefill": self.chance(0.6),
            "do_remote_decode": self.chance(0.5),
            "stored": self.number(0, length),
            "later": self.chance(0.7),
            "unknown": self.number(0, 2) if self.chance(0.2) else 0,
        }

    def places(self, length: int) -> list[tuple[str, int, int]]:
        """Images in a prompt: name, position and tokens of each."""
        found, start = [], 0
        while len(found) < 3:
            start += self.number(0, 11)
            size = self.number(1, 11)
            if start + size >= length:
                break
            name = f"image {self.number(0, 5)}"
            # The same name for another size is an error, which upstream finds when it encodes
            found.append((name if self.chance(0.03) else f"{name} of {size}", start, size))
            start += size
        size = length - 1 - start
        if 0 < size < 12 and self.chance(0.5):  # up to the end: drafters may still read it
            found.append((f"image {self.number(0, 5)} of {size}", start, size))
        return found

    def stream(self) -> bool:
        """Another part of a streamed input arrives, or its end."""
        self.sessions &= self.upstream.requests.keys()
        if not self.sessions:
            return False
        session = self.pick(*sorted(self.sessions))
        request = self.upstream.requests[session]
        # What a part outputs is kept. vLLM fails if a session gets longer than max_model_len
        parts = 1 + len(request.streaming_queue or ())
        longest = request.num_prompt_tokens + request.max_tokens + parts * (8 + 8)
        ends = self.chance(0.3) or longest > self.settings.max_model_len
        part = self.tokens(self.number(1, 8))
        params = {"temperature": 0.0, "max_tokens": self.number(1, 8), "ignore_eos": True}
        if self.chance(0.3):
            params["stop_token_ids"] = self.tokens(40)
        if self.chance(0.2):
            params["logprobs"] = 1
        places = self.places(len(part)) if self.settings.media and self.chance(0.4) else []
        for scheduler in self.both:
            how = {"mm_features": features(places), "resumable": not ends, "arrival_time": 0.0}
            part_of = Request(session, list(part), SamplingParams(**params), None, **how)
            scheduler.add_request(part_of)
        if ends:
            self.sessions.discard(session)
        return True

    def abort(self) -> bool:
        ids = self.shuffled(list(self.upstream.requests))[: self.number(1, 2)]
        for scheduler in self.both:
            scheduler.finish_requests(ids, RequestStatus.FINISHED_ABORTED)
        return bool(ids)

    def compile(self) -> bool:
        """A grammar that a request waits for is there."""
        grammars = {n: r.structured_output_request for n, r in self.upstream.requests.items()}
        waiting = [name for name, each in grammars.items() if each and each.grammar is None]
        for scheduler in self.both if waiting else ():
            scheduler.requests[waiting[0]].structured_output_request._grammar = "grammar"
        return bool(waiting)

    def pause(self, state: PauseState) -> bool:
        before = self.upstream._pause_state
        for scheduler in self.both:
            scheduler._pause_state = state
        return state is not before

    def sleep(self) -> None:
        """All is paused, loses its blocks and goes on; steps in flight end first, or later.

        So it is in a sleep, and in a pause that clears the cache.
        """
        self.pause(PauseState.PAUSED_ALL)
        drains = self.chance(0.5)
        while drains and self.flight:
            self.take()
        self.reset(whole=True)
        self.pause(PauseState.UNPAUSED)
        self.count["slept, steps in flight" if self.flight else "slept, drained"] += 1

    def reset(self, *, whole: bool) -> None:
        """The prefix cache is emptied, if nobody uses it; `whole`: all running are preempted.

        Upstream raises an error if a session waits for its next part: that keeps its blocks. The
        engine answers with the error, and goes on.
        """
        answers: list[bool | str] = []
        too = self.worker is not None and self.chance(0.5)  # the connector's, too
        for scheduler in self.both:
            try:
                answers.append(scheduler.reset_prefix_cache(whole, reset_connector=too))
            except RuntimeError as error:
                answers.append(str(error))
        compare(*answers, "reset_prefix_cache")
        self.count["prefix cache in use"] += answers[0] is not True

    # ---------------------------------------------------------------------------------- steps

    def step(self) -> None:
        """Schedule a step, and take the output of an earlier one."""
        self.between_steps()
        throttle = self.settings.throttle and self.chance(0.5)
        outputs = self.call(lambda scheduler: scheduler.schedule(throttle))
        compare(view(outputs[0]), view(outputs[1]), "SchedulerOutput")
        self.compare_states("after schedule")
        metadata = outputs[0].kv_connector_metadata
        transfers = None if self.worker is None else self.worker.run(metadata)
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
        self.flight.append((*outputs, samples, transfers))
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
        upstream, ours, samples, transfers = self.flight.popleft()
        if self.settings.asynchronous and upstream.scheduled_spec_decode_tokens:
            self.validate_drafts(upstream, ours)
        result = self.result(upstream, samples)
        result.kv_connector_output = transfers
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
        rows = list(step.num_scheduled_tokens)
        if self.chance(0.3):
            rows = self.shuffled(rows)
        eager = self.pick(0.2, 0.9)
        sampled = []
        for each in rows:
            drafts = len(step.scheduled_spec_decode_tokens.get(each, ()))
            invalid = (step.num_invalid_spec_tokens or {}).get(each, 0)
            tokens = self.tokens(1 + self.kept(drafts - invalid, eager))
            if self.chance(0.03):
                tokens[self.number(0, len(tokens) - 1)] = EOS
            if self.chance(0.1):
                tokens = [self.number(10, 11)] * len(tokens)
            sampled.append(tokens if samples[each] else [])
        known = [self.upstream.requests.get(each) for each in rows]
        asked = [each for each in known if each is not None and each.sampling_params]
        total = sum(map(len, sampled))
        logprobs = LogprobsLists(
            np.arange(2 * total).reshape(total, 2),
            np.arange(2.0 * total).reshape(total, 2),
            np.arange(total),
            np.cumsum([0, *map(len, sampled)]).tolist(),
        )
        wanted = any(each.sampling_params.num_logprobs is not None for each in asked)
        pools = [each is not None and each.pooling_params for each in known]
        ends = [each is not None and not each.is_prefill_chunk for each in known]
        pooled = [torch.arange(2) if p and end else None for p, end in zip(pools, ends)]
        return ModelRunnerOutput(
            req_ids=rows,
            req_id_to_index={each: rows.index(each) for each in step.num_scheduled_tokens},
            sampled_token_ids=sampled,
            logprobs=logprobs if wanted else None,
            prompt_logprobs_dict={
                each.request_id: torch.arange(3)
                for each in asked
                if each.sampling_params.prompt_logprobs is not None
                and samples.get(each.request_id)
                and each.prefill_stats is not None
                and not each.num_stale_output_tokens
            },
            pooler_output=pooled if any(pools) else None,
            num_nans_in_logits=dict.fromkeys(rows, 1)
            if self.nans and self.chance(0.5)
            else self.no_nans,
        )

    def validate_drafts(self, upstream: Any, ours: Any) -> None:
        """As vLLM's engine does for steps with structured output: drafts become known."""
        if not (upstream.pending_structured_output_tokens or self.chance(0.1)):
            return
        drafts = {
            each: self.tokens(self.number(0, len(tokens)))
            for each, tokens in upstream.scheduled_spec_decode_tokens.items()
        }
        for scheduler, step in zip(self.both, (upstream, ours), strict=True):
            step.scheduled_spec_decode_tokens = dict(step.scheduled_spec_decode_tokens)
            scheduler.update_draft_token_ids_in_output(as_drafts(drafts), step)

    def give_drafts(self, step: Any) -> None:
        """The drafter's tokens for the next step, of some requests none."""
        most = self.settings.num_drafts
        drafts = {each: self.tokens(self.number(0, most)) for each in step.num_scheduled_tokens}
        for scheduler in self.both:
            scheduler.update_draft_token_ids(as_drafts(drafts))

    def compare_states(self, when: str) -> None:
        """Compare all that both keep, and all that connectors were told meanwhile."""
        if self.count["steps"] % self.every:
            return
        if self.worker is not None:
            kept = [connectors.view_all(scheduler) for scheduler in self.both]
            compare(*kept, f"connectors {when}")
        compare(view_scheduler(self.upstream), view_scheduler(self.ours), f"state {when}")


def play(
    seed: int,
    steps: int,
    every: int = 10,
    engine: dict[str, Any] | None = None,
    traffic: dict[str, Any] | None = None,
) -> Twin:
    """Run a seed's engine, of which some settings, and attributes of its traffic, are not drawn.

    An error names seed and step. A difference in the states is found at the next comparison; with
    `every` 1, where it begins.
    """
    twin = Twin(draw(seed, **(engine or {})), every)
    for name, value in (traffic or {}).items():
        drawn = getattr(twin, name)
        setattr(twin, name, drawn | value if isinstance(value, dict) else value)
    try:
        for _ in range(steps):
            twin.step()
    except UpstreamFailedError:
        twin.count["upstream failed"] += 1
    except Exception as error:
        error.add_note(f"seed {seed}, step {twin.count['steps']}, {vars(twin.settings)}")
        raise
    return twin
