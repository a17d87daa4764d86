"""Every step run by our runner and by upstream's; what they prepared and sampled is compared."""

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from vllm.forward_context import get_forward_context
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from tests.differential.upstream import UpstreamRunner
from tests.helpers.stepping import arrays_of

GREATEST_DIFFERENCE = {torch.float32: 1e-4, torch.float16: 0.02}
"""Of logits, by the model's dtype.

Padding of a graph changes how a product of matrices is cut, hence the last bits.
"""


class DisagreementError(AssertionError):
    """The two runners prepared or sampled something else."""


class Watched:
    """What a runner hands to its model in a step, by upstream's names, on the host.

    `passes` is the same of its drafter's passes.
    """

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.passes: list[dict[str, Any]] = []
        self.seen: dict[str, Any] = {}
        self.step: Any = None  # as our runner prepared it
        self.logits: torch.Tensor | None = None
        self.decision: Any = None
        self.took_embeds = False
        self.to_sample_from: Any = lambda logits: logits
        prepare, forward, sample = runner._prepare_inputs, runner._model_forward, runner._sample
        decide = runner._determine_batch_execution_and_padding

        def prepare_inputs(*args: Any) -> Any:
            self.prepared = prepare(*args)
            if not isinstance(runner, UpstreamRunner):
                self.step = runner.in_flight.step
            return self.prepared

        def determine(*args: Any, **kwargs: Any) -> Any:
            decision = decide(*args, **kwargs)
            self.decision = decision[:2]
            return decision

        def model_forward(*args: Any, **kwargs: Any) -> Any:
            self.seen = self._arrays(**kwargs)
            return forward(*args, **kwargs)

        def sample_logits(logits: torch.Tensor | None, *args: Any) -> Any:
            self.logits = None if logits is None else logits.clone()
            return sample(self.to_sample_from(logits), *args)

        runner._prepare_inputs = prepare_inputs
        runner._determine_batch_execution_and_padding = determine
        runner._model_forward = model_forward
        runner._sample = sample_logits
        if hasattr(getattr(runner, "drafter", None), "_draft_attn_layer_names"):
            self._watch_drafter(runner.drafter)

    def _watch_drafter(self, drafter: Any) -> None:
        """A pass builds its metadata, fills its inputs, then asks for the slots of its layers."""
        build, get_slots = (
            drafter.build_per_group_and_layer_attn_metadata,
            drafter._get_slot_mapping,
        )
        built: list[Any] = []

        def build_metadata(*args: Any, **kwargs: Any) -> Any:
            result = build(*args, **kwargs)
            built[:] = result[0]
            return result

        def get_slot_mapping(*args: Any, **kwargs: Any) -> Any:
            slots = get_slots(*args, **kwargs)
            for metadata in built:  # none in a dummy run
                total = metadata.num_actual_tokens
                self.passes.append(
                    {
                        "input_ids": drafter.input_ids[:total].tolist(),
                        "positions": drafter.positions[:total].tolist(),
                        "hidden_states": drafter.hidden_states[:total].clone(),
                        "slot_mapping": {name: s[:total].tolist() for name, s in slots.items()},
                        "query_start_loc": metadata.query_start_loc.tolist(),
                        "query_start_loc_np": metadata.query_start_loc_np.tolist(),
                        "seq_lens": metadata.seq_lens.tolist(),
                        "seq_lens_np": metadata.seq_lens_np.tolist(),
                        "max_seq_len": metadata.max_seq_len,
                    }
                )
            built.clear()
            return slots

        drafter.build_per_group_and_layer_attn_metadata = build_metadata
        drafter._get_slot_mapping = get_slot_mapping

    def _arrays(
        self,
        positions: torch.Tensor,
        input_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **others: Any,
    ) -> dict[str, Any]:
        runner, reqs = self.runner, self.runner.input_batch.num_reqs
        total = int(runner.query_start_loc.np[reqs])
        arrays = arrays_of(runner, *self.prepared) | {
            "positions": positions[..., :total].tolist(),
            "slot_mapping": {
                name: slots[:total].tolist()
                for name, slots in (get_forward_context().slot_mapping or {}).items()
            },
            "other arguments": sorted(name for name, value in others.items() if value is not None),
        }
        if runner.use_async_spec_decode and isinstance(runner, UpstreamRunner):
            arrays["seq_lens_cpu"] = arrays["seq_lens"]  # its own count drafts as accepted
        if runner.lora_config is not None:
            (wrapper,) = self.lora_wrappers(runner)
            arrays["token_lora_indices"] = wrapper.token_lora_indices[:total].tolist()
            arrays["sampler_indices"] = wrapper.sampler_indices.tolist()
        self.took_embeds = inputs_embeds is not None
        if runner.model_config.enable_prompt_embeds or runner.supports_mm_inputs:
            # Upstream's steps of such engines all take embeddings.
            inputs_embeds = (
                runner.model.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
            )
        if inputs_embeds is not None:  # ids under embeddings are nobody's
            arrays["inputs_embeds"] = inputs_embeds[:total].tolist()
        else:
            arrays["input_ids"] = input_ids[:total].tolist()
        return arrays

    @staticmethod
    def lora_wrappers(runner: Any) -> list[Any]:
        """Where a step's adapters are kept; both runners have the same."""
        return list(runner.lora_manager._adapter_manager.punica_wrapper_mapping.values())


class Pair:
    """A worker's model runner that runs every step twice and compares.

    Everything else is ours; what it returns are our results.
    """

    def __init__(self, ours: Any) -> None:
        self.ours = ours
        self._begin(UpstreamRunner(ours), Watched(ours))
        self.watched[self.upstream].to_sample_from = self._logits_of_ours

    def _begin(self, upstream: UpstreamRunner, watched: Any) -> None:
        """Take the other runner, and what is noted of ours."""
        self.upstream = upstream
        layers = self.ours.compilation_config.static_forward_context
        self.caches = {
            self.ours: {name: layers[name].kv_cache for name in upstream.caches},
            upstream: upstream.caches,
        }
        self.watched = {self.ours: watched, upstream: Watched(upstream)}
        self.on_step: Any = lambda scheduler_output: None
        self.on_output: Any = lambda output, drafts: None
        self.drafts: dict[str, int] = {}  # of the last step, by request
        self.own_layers: set[str] = set()  # in whose caches each runner may have something else
        self.steps = 0
        self.fault: Exception | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ours, name)

    def close(self, name: str, ours: list[np.ndarray], theirs: list[np.ndarray]) -> None:
        """As near as the model's dtype allows."""
        close(name, ours, theirs, GREATEST_DIFFERENCE[self.ours.dtype])

    @contextlib.contextmanager
    def running(self, runner: Any) -> Iterator[None]:
        """Bind the runner's cache to the layers; random numbers start anew for both."""
        layers = self.ours.compilation_config.static_forward_context
        for name, cache in self.caches[runner].items():
            layers[name].kv_cache = cache
        torch.manual_seed(self.steps)  # that of an NPU, too
        yield

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if self.fault is not None:  # of sampling, which vLLM only looks at later
            raise self.fault
        self.steps += 1
        theirs_output = copy.deepcopy(scheduler_output)  # runners keep and extend its lists
        drafts = scheduler_output.scheduled_spec_decode_tokens
        if self.upstream.drafts_by_model and not self.watched[self.ours].passes:
            drafts = {}  # zeros, because the drafter had no room
        self.drafts = {req_id: len(tokens) for req_id, tokens in drafts.items()}
        with self.running(self.upstream):
            theirs = self.upstream.execute_model(theirs_output, *args, **kwargs)
        with self.running(self.ours):
            ours = self.ours.execute_model(scheduler_output, *args, **kwargs)
        if scheduler_output.total_num_scheduled_tokens:
            self._compare_step()
            self._forget_places()
            self.on_step(scheduler_output)
        if ours is None or theirs is None:
            check("result of execute_model", ours, theirs)
            return None
        return self._compare_results(ours, theirs)

    def compare_caches(self) -> None:
        """Both runners' caches hold the same: nothing was written but by a step's own tokens."""
        ours, theirs = (self.caches[each] for each in (self.ours, self.upstream))
        for name in ours.keys() - self.own_layers:
            self.close(f"KV cache of {name}", flat([ours[name]]), flat([theirs[name]]))

    def _forget_places(self) -> None:
        """A request that a step left out has places in the next one, and none of its drafts."""
        seen = self.watched[self.ours].seen
        if (spec := seen["spec_decode_metadata"]) is not None:
            ids = iter(spec["draft_token_ids"])
            for req_id, count in zip(seen["req_ids"], spec["num_draft_tokens"]):
                if -1 in [next(ids) for _ in range(count)]:
                    self.drafts.pop(req_id, None)

    def sample_tokens(self, grammar_output: Any) -> Any:
        try:
            return self._sample_both(grammar_output)
        except Exception as error:
            self.fault = error
            raise

    def _sample_both(self, grammar_output: Any) -> Any:
        for watched in self.watched.values():
            watched.passes.clear()
        theirs_grammar = copy.deepcopy(grammar_output)
        with self.running(self.ours):
            ours = self.ours.sample_tokens(grammar_output)
        with self.running(self.upstream):
            theirs = self.upstream.sample_tokens(theirs_grammar)
        self._compare_drafts()
        return self._compare_results(ours, theirs)

    def _logits_of_ours(self, logits: torch.Tensor | None) -> torch.Tensor | None:
        """What upstream's runner samples from, once its own logits were found to be as near as the
        dtype allows: two tokens that rounding alone tells apart are no disagreement."""
        mine = self.watched[self.ours].logits
        self.close("logits", flat([mine]), flat([logits]))
        return None if mine is None else mine.clone()

    def _compare_drafts(self) -> None:
        """What both drafters were given in each of their passes, and what they made of it."""
        ours, theirs = (self.watched[each].passes for each in (self.ours, self.upstream))
        check("draft passes", len(ours), len(theirs))
        for index, (mine, others) in enumerate(zip(ours, theirs)):
            name = f"hidden_states of draft pass {index}"
            self.close(name, flat([mine.pop("hidden_states")]), flat([others.pop("hidden_states")]))
            for name in mine:
                check(f"{name} of draft pass {index}", mine[name], others[name])
        check(
            "drafts", as_lists(self.ours._draft_token_ids), as_lists(self.upstream._draft_token_ids)
        )
        for name in ("_draft_prob_req_ids", "prev_num_spec_tokens"):
            check(name, getattr(self.ours, name), getattr(self.upstream, name))
        probs = self.ours._draft_probs, self.upstream._draft_probs
        self.close("draft probabilities", *(flat([each]) for each in probs))

    def take_draft_token_ids(self) -> Any:
        ours, theirs = self.ours.take_draft_token_ids(), self.upstream.take_draft_token_ids()
        check("drafts", ours and vars_of(ours), theirs and vars_of(theirs))
        return ours

    def _compare_step(self) -> None:
        ours, theirs = (self.watched[each].seen for each in (self.ours, self.upstream))
        check("names", sorted(ours), sorted(theirs))
        for name in ours:
            check(name, ours[name], theirs[name])
        if not self.watched[self.ours].took_embeds:
            decided = self.watched[self.ours].decision
            check("graph and padding", decided, self.upstream.decision)

    def _compare_results(self, ours: Any, theirs: Any) -> Any:
        if isinstance(ours, AsyncModelRunnerOutput):
            return PairOutput(self, ours, theirs)
        self.compare_outputs(ours, theirs, self.drafts)
        return ours

    def compare_outputs(
        self, ours: ModelRunnerOutput, theirs: ModelRunnerOutput, drafts: dict[str, int]
    ) -> None:
        """Sampled tokens and log-probabilities; logits say how near a wrong token was."""
        for name in ("req_ids", "req_id_to_index", "sampled_token_ids"):
            check(name, getattr(ours, name), getattr(theirs, name))
        check("pooled", is_there(ours.pooler_output), is_there(theirs.pooler_output))
        self.close("pooled", flat(ours.pooler_output), flat(theirs.pooler_output))
        self.close("logprobs", flat(ours.logprobs), flat(theirs.logprobs))
        mine, others = ours.prompt_logprobs_dict, theirs.prompt_logprobs_dict
        check("requests with prompt logprobs", sorted(mine), sorted(others))
        for req_id in mine:
            self.close("prompt logprobs", flat(mine[req_id]), flat(others[req_id]))
        self.on_output(ours, drafts)


class PairOutput(AsyncModelRunnerOutput):
    """Both runners' outputs; V2's is not asynchronous where its host has waited for samples."""

    def __init__(self, pair: Pair, ours: Any, theirs: Any) -> None:
        self.pair, self.ours, self.theirs = pair, ours, theirs
        self.drafts = pair.drafts

    def get_output(self) -> ModelRunnerOutput:
        ours, theirs = (
            each.get_output() if isinstance(each, AsyncModelRunnerOutput) else each
            for each in (self.ours, self.theirs)
        )
        self.pair.compare_outputs(ours, theirs, self.drafts)
        return ours

    def get_kv_connector_output(self) -> None:
        """What vLLM 0.33.0 asks of a step that failed; pairs have no connector."""


def check(name: str, ours: Any, theirs: Any) -> None:
    if ours != theirs:
        raise DisagreementError(f"{name}: ours {ours!r}, upstream's {theirs!r}")


def close(name: str, ours: list[np.ndarray], theirs: list[np.ndarray], difference: float) -> None:
    check(f"shapes of {name}", [a.shape for a in ours], [a.shape for a in theirs])
    for mine, other in zip(ours, theirs):
        if not np.allclose(mine, other, rtol=1e-4, atol=difference):
            raise DisagreementError(f"{name}: ours {mine}, upstream's {other}")


def is_there(values: Any) -> Any:
    return None if values is None else [value is None for value in values]


def flat(values: Any) -> list[np.ndarray]:
    """Numbers of a (named) tuple or list of arrays, tensors, lists and Nones."""
    if values is None:
        return []
    on_host = [v.cpu() if torch.is_tensor(v) else v for v in values if v is not None]
    return [np.asarray(value, np.float64) for value in on_host]


def as_lists(values: Any) -> Any:
    return values.tolist() if torch.is_tensor(values) else values


def vars_of(record: Any) -> dict[str, Any]:
    return dict(vars(record))
