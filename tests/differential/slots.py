"""Every step run by our V2 runner and by upstream's V1; what they prepared is compared by request.

Upstream's V2 prepares a step by kernels of Triton, which a CPU has not, so V1 says what is right.
V2's requests have slots in place of rows and another order: nothing is compared by place. V2 draws
in another way, so V1 goes on from what V2 has sampled; greedy samples have to be its own.

With drafts V1 is scheduled synchronously, whatever the engine is: it knows every token when a step
begins, and verifies V2's drafts. Its own drafter, which shares the weights of V2's, has to draft
the same. V2 looks drafts up in another way than V1, so that rule is written here once more.
"""

import copy
import itertools
from typing import Any

import torch
from vllm.v1.outputs import ModelRunnerOutput

from tests.differential.pair import Pair, PairOutput, Watched, check, flat, is_there
from tests.differential.upstream import UpstreamRunner
from tests.helpers.watch import looked_up
from vllm_npu_prep.runner.v2.speculator import NPUSpeculator

BY_TOKEN = ("positions", "input_ids", "inputs_embeds", "token_lora_indices")
"""Arrays with a value for each token of a batch."""
BY_REQUEST = ("seq_lens", "seq_lens_cpu", "num_computed_tokens", "discard_request_mask")
BY_REQUEST += ("discard_request_mask_cpu",)
"""Arrays with a value for each request of a batch."""


class WatchedSlots:
    """What our V2 runner hands to its model in a step, by the names of `Watched`, on the host."""

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.seen: dict[str, Any] = {}
        self.step: Any = None
        self.sampled: dict[str, list[int]] = {}  # of the last step, by request
        self.drafts: dict[str, list[int]] = {}  # after the last sample of each request
        self._embeds: torch.Tensor | None = None
        state, sample = runner.model_state, runner.sample
        prepare = state.prepare_inputs

        def prepare_inputs(batch: Any, req_states: Any) -> Any:
            given = prepare(batch, req_states)
            if runner.in_flight is not None and state.metadata is not None:  # no dummy run
                self._see(batch, given)
            return given

        def sample_batch(hidden_states: Any, batch: Any, grammar_output: Any) -> Any:
            found = sample(hidden_states, batch, grammar_output)
            tokens = found[0].sampled_token_ids
            most = runner.in_flight.step.max_num_sampled_tokens
            check("samples of a request", tokens.shape[1], most)
            kept = [[token for token in row if token >= 0] for row in tokens.tolist()]
            self.sampled = dict(zip(batch.req_ids, kept, strict=True))
            return found

        state.prepare_inputs = prepare_inputs
        runner.sample = sample_batch
        if runner.speculator is not None:
            handler = runner.draft_tokens_handler
            keep = handler.keep

            def keep_drafts(req_ids: list[str], drafts: torch.Tensor, **more: Any) -> None:
                self.drafts |= dict(zip(req_ids, drafts.tolist(), strict=True))
                keep(req_ids, drafts, **more)

            handler.keep = keep_drafts
        if runner.uses_inputs_embeds:
            embed = state.prepare_inputs_embeds

            def prepare_inputs_embeds(*args: Any, **kwargs: Any) -> Any:
                self._embeds = embed(*args, **kwargs)
                return self._embeds

            state.prepare_inputs_embeds = prepare_inputs_embeds

    def _see(self, batch: Any, given: dict[str, Any]) -> None:
        """The step in flight, as its arrays are on the device."""
        runner, in_flight = self.runner, self.runner.in_flight
        self.step, staged = in_flight.step, in_flight.staged
        step, arrays, reqs = self.step, staged.device, batch.num_reqs
        total = step.total_num_scheduled_tokens
        tables = runner.block_tables.device_rows(reqs)
        owned = runner.block_tables.num_blocks[:, batch.idx_mapping_np]
        computed = arrays.seq_lens[:reqs] - arrays.query_start_loc[: reqs + 1].diff()
        seen = {
            "req_ids": list(batch.req_ids),
            "positions": given.get("positions", batch.positions)[..., :total].tolist(),
            "query_start_loc": arrays.query_start_loc[: reqs + 1].tolist(),
            "query_start_loc_cpu": staged.np.query_start_loc[: reqs + 1].tolist(),
            "seq_lens": arrays.seq_lens[:reqs].tolist(),
            "seq_lens_cpu": staged.np.seq_lens[:reqs].tolist(),
            "num_computed_tokens": computed.tolist(),
            "discard_request_mask": arrays.discard_request_mask[:reqs].tolist(),
            "discard_request_mask_cpu": staged.np.discard_request_mask[:reqs].tolist(),
            "logits_indices": torch.arange(len(batch.positions), device=runner.device)[
                batch.logits_indices
            ].tolist(),
            "num_draft_tokens": step.batch.num_draft_tokens[:reqs].tolist(),
            "draft_token_ids": arrays.draft_token_ids[: step.num_drafts].tolist(),
            "block_table": [
                [row[:count].tolist() for row, count in zip(rows, counts.tolist())]
                for rows, counts in zip(tables, owned, strict=True)
            ],
            "slot_mapping": {
                name: slots[:total].tolist()
                for name, slots in runner.preparer.slot_mappings(staged)[1].items()
            },
        }
        if runner.lora_config is not None:
            (wrapper,) = Watched.lora_wrappers(runner)
            seen["token_lora_indices"] = wrapper.token_lora_indices[:total].tolist()
            seen["sampler_indices"] = wrapper.sampler_indices.tolist()
        if runner.uses_inputs_embeds:
            assert self._embeds is not None
            seen["inputs_embeds"] = self._embeds[:total].tolist()
        else:
            seen["input_ids"] = arrays.input_ids[:total].tolist()
        self.seen = seen


class FollowingRunner(UpstreamRunner):
    """Upstream's V1 runner, which goes on from the samples of our V2 runner, and has its `own`."""

    def __init__(self, ours: Any) -> None:
        self.sampled: dict[str, list[int]] = {}
        self.own: dict[str, list[int]] = {}
        config = ours.vllm_config
        if config.speculative_config is not None:
            config = copy.copy(config)
            config.scheduler_config = copy.copy(config.scheduler_config)
            config.scheduler_config.async_scheduling = False
        super().__init__(ours, config)

    def drafter_of(self, ours: Any) -> tuple[Any, set[str]]:
        speculator = ours.speculator
        if not isinstance(speculator, NPUSpeculator):
            return None, set()
        return speculator.model, speculator.draft_attn_layer_names

    def _input_fits_in_drafter(self, common_attn_metadata: Any) -> bool:
        """As ours: drafts end at the context's end request by request."""
        return common_attn_metadata is not None

    def _sample(self, logits: torch.Tensor | None, *args: Any) -> Any:
        found, req_ids = super()._sample(logits, *args), self.input_batch.req_ids
        tokens = found.sampled_token_ids
        kept = [[token for token in row if token >= 0] for row in tokens.tolist()]
        self.own = dict(zip(req_ids, kept, strict=True))
        width = tokens.shape[1]
        rows = [self.sampled[req_id] for req_id in req_ids]
        tokens.copy_(torch.tensor([row + [-1] * (width - len(row)) for row in rows]))
        return found

    def propose_draft_token_ids(self, *args: Any) -> Any:
        """As upstream's, but for ngram, whose rule is V2's (`drafts_after`)."""
        return super().propose_draft_token_ids(*args) if self.drafts_by_model else []

    def drafts_after(self, req_id: str) -> list[int]:
        """What is to be drafted after a request's samples."""
        config = self.speculative_config
        if self.drafts_by_model:
            drafts: list[int] = self._draft_token_ids[self.input_batch.req_id_to_index[req_id]]
            return torch.as_tensor(drafts).tolist()
        request = self.requests[req_id]
        tokens = [*request.prompt_token_ids, *request.output_token_ids]
        return looked_up("V2", tokens, config)

    def as_for_v1(self, output: Any, requests: dict[str, Any]) -> Any:
        """A scheduler's output for V2, a copy, as the scheduler would have made it for V1.

        To V2, a request that comes back after preemption is a new one.
        """
        cached, arrived = output.scheduled_cached_reqs, []
        here, left = (
            self.requests.keys() - output.finished_req_ids,
            self.input_batch.req_id_to_index,
        )
        for req_id in cached.req_ids:
            if req_id not in left:
                cached.all_token_ids[req_id] = list(requests[req_id].all_token_ids)
        for new in output.scheduled_new_reqs:
            if new.req_id not in here:
                arrived.append(new)
                continue
            cached.req_ids.append(new.req_id)
            cached.resumed_req_ids.add(new.req_id)
            cached.new_block_ids.append(new.block_ids)
            cached.num_computed_tokens.append(new.num_computed_tokens)
            cached.num_output_tokens.append(len(new.prefill_token_ids) - new.prompt_len)
            cached.all_token_ids[new.req_id] = list(new.prefill_token_ids)
            if self.speculative_config is not None:  # synchronous V1 keeps its own otherwise
                outputs = list(new.prefill_token_ids[new.prompt_len :])
                self.requests[new.req_id].output_token_ids = outputs
        output.scheduled_new_reqs = arrived
        if (
            self.speculative_config is not None
        ):  # an asynchronous scheduler takes drafts for accepted
            for index, req_id in enumerate(cached.req_ids):
                last = self.requests[req_id].num_tokens - 1
                cached.num_computed_tokens[index] = min(cached.num_computed_tokens[index], last)
        return output


class SlotPair(Pair):
    """A worker's V2 runner beside upstream's V1, which is fed the same steps.

    What V1 is told of requests that V2 knows already comes from the scheduler's books.
    """

    def __init__(self, ours: Any, scheduler: Any) -> None:
        self.ours, self.scheduler = ours, scheduler
        self._begin(FollowingRunner(ours), WatchedSlots(ours))
        self.logits: dict[Any, torch.Tensor] = {}
        self._running: Any = None
        self._pooled: Any = None
        if self.upstream.drafts_by_model:  # rows of rejected drafts hold some token there
            self.own_layers = set(self.upstream.drafter._draft_attn_layer_names)
        model, compute = ours.model, ours.model.compute_logits

        def compute_logits(*args: Any, **kwargs: Any) -> Any:
            logits = compute(*args, **kwargs)
            if self._running is not None:  # first of a step; later ones are of prompts
                self.logits.setdefault(self._running, logits.clone())
            return logits

        model.compute_logits = compute_logits

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if self.fault is not None:  # of sampling, which vLLM only looks at later
            raise self.fault
        self.steps += 1
        self.logits.clear()
        v1s = self.upstream.as_for_v1(copy.deepcopy(scheduler_output), self.scheduler.requests)
        drafts, made = v1s.scheduled_spec_decode_tokens, self.watched[self.ours].drafts
        for req_id, places in drafts.items():  # V2's scheduler knows their number alone
            # A prompt of one token has places, too, so that its step fits a graph of decodes
            drafts[req_id] = made.get(req_id, places)[: len(places)]
        self.drafts = {req_id: len(tokens) for req_id, tokens in drafts.items()}
        seen_by_traffic = copy.deepcopy(v1s)  # runners keep and extend its lists
        theirs = self._run(self.upstream, "execute_model", v1s, *args, **kwargs)
        ours = self._run(self.ours, "execute_model", scheduler_output, *args, **kwargs)
        if not scheduler_output.total_num_scheduled_tokens:
            return ours
        self._compare_step()
        self.on_step(seen_by_traffic)
        check("result of execute_model", ours, None)
        self._pooled = theirs
        return None

    def _run(self, runner: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        with self.running(runner):
            self._running = runner
            try:
                return getattr(runner, method)(*args, **kwargs)
            finally:
                self._running = None

    def _compare_step(self) -> None:
        ours, theirs = (by_request(self.watched[each].seen) for each in (self.ours, self.upstream))
        for name in sorted(ours.keys() | theirs.keys()):
            check(name, ours.get(name), theirs.get(name))

    def _sample_both(self, grammar_output: Any) -> Any:
        self.watched[self.ours].sampled = {}
        ours = self._run(self.ours, "sample_tokens", grammar_output)
        self.upstream.sampled = self.watched[self.ours].sampled
        theirs = self._run(self.upstream, "sample_tokens", grammar_output)
        self._compare_logits()
        self._compare_samples()
        self._compare_drafts()
        return PairOutput(self, ours, theirs)

    def pool(self) -> Any:
        """What a step of a pooling model returns; V1 has it from `execute_model`."""
        return PairOutput(self, self._run(self.ours, "pool"), self._pooled)

    def _compare_logits(self) -> None:
        rows = []
        for runner in (self.ours, self.upstream):
            seen = self.watched[runner].seen
            spans = rows_of_logits(seen)
            order = [row for req_id in sorted(spans) for row in range(*spans[req_id])]
            check("rows of logits", len(self.logits[runner]), len(order))
            rows.append(flat([self.logits[runner][order]]))
        self.close("logits", *rows)

    def _compare_samples(self) -> None:
        """Samples of greedy requests; those by chance are drawn in another way."""
        seen = self.watched[self.ours].seen
        for req_id, discarded in zip(seen["req_ids"], seen["discard_request_mask"], strict=True):
            params = self.upstream.requests[req_id].sampling_params
            if not discarded and params.temperature == 0:
                sampled = self.upstream.sampled[req_id], self.upstream.own[req_id]
                check("greedy sample", (req_id, sampled[0]), (req_id, sampled[1]))

    def _compare_drafts(self) -> None:
        """Drafts of requests that can go on: upstream's drafter makes the same."""
        if self.ours.speculator is None:
            return
        watched = self.watched[self.ours]
        seen = watched.seen
        for req_id, discarded in zip(seen["req_ids"], seen["discard_request_mask"], strict=True):
            is_at_end = self.upstream.requests[req_id].num_tokens >= self.ours.max_model_len
            if not discarded and not is_at_end:
                drafts = watched.drafts[req_id], self.upstream.drafts_after(req_id)
                check("drafts", (req_id, drafts[0]), (req_id, drafts[1]))

    def take_draft_token_ids(self) -> Any:
        return self.ours.take_draft_token_ids()

    def compare_outputs(
        self, ours: ModelRunnerOutput, theirs: ModelRunnerOutput, drafts: dict[str, int]
    ) -> None:
        """What both return, by request. Log-probabilities of samples by chance are others."""
        check("requests", sorted(ours.req_ids), sorted(theirs.req_ids))
        places = [theirs.req_id_to_index[req_id] for req_id in ours.req_ids]
        check("places", ours.req_id_to_index, {name: n for n, name in enumerate(ours.req_ids)})
        if ours.pooler_output is not None:
            others = [theirs.pooler_output[place] for place in places]
            check("pooled", is_there(ours.pooler_output), is_there(others))
            self.close("pooled", flat(ours.pooler_output), flat(others))
            return
        others = [theirs.sampled_token_ids[place] for place in places]
        check("sampled_token_ids", ours.sampled_token_ids, others)
        self.on_output(ours, drafts)


def num_drafts_of(seen: dict[str, Any]) -> list[int]:
    """Drafts of each request of a step, as either runner has them."""
    spec = seen.get("spec_decode_metadata")
    no_drafts = [0] * len(seen["req_ids"])
    return seen.get("num_draft_tokens", no_drafts if spec is None else spec["num_draft_tokens"])


def rows_of_logits(seen: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """First and last row of logits, plus one, of each request: one for each draft, and one more."""
    borders = itertools.accumulate((1 + count for count in num_drafts_of(seen)), initial=0)
    return dict(zip(seen["req_ids"], itertools.pairwise(borders), strict=True))


def by_request(seen: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Arrays of a batch by name, each by request: in whatever order and place these are."""
    req_ids, starts = seen["req_ids"], seen["query_start_loc"]
    check("query_start_loc on the host", seen["query_start_loc_cpu"], starts)
    spans = {req_id: slice(*span) for req_id, span in zip(req_ids, itertools.pairwise(starts))}

    def of_tokens(values: list[Any]) -> dict[str, Any]:
        return {req_id: values[span] for req_id, span in spans.items()}

    def of_requests(values: list[Any]) -> dict[str, Any]:
        return dict(zip(req_ids, values, strict=True))

    found = {name: of_requests(seen[name]) for name in BY_REQUEST if name in seen}
    for name in BY_TOKEN:
        if name in seen:
            values = seen[name]
            if name == "positions" and isinstance(values[0], list):  # M-RoPE's, by dimension
                values = list(zip(*values))
            found[name] = of_tokens(values)
    rows, spec = rows_of_logits(seen), seen.get("spec_decode_metadata")
    found["rows of logits"] = {
        req_id: [row - spans[req_id].start for row in seen["logits_indices"][slice(*rows[req_id])]]
        for req_id in req_ids
    }
    drafts = iter(seen.get("draft_token_ids", [] if spec is None else spec["draft_token_ids"]))
    found["drafts"] = {
        req_id: list(itertools.islice(drafts, count))
        for req_id, count in zip(req_ids, num_drafts_of(seen), strict=True)
    }
    if "sampler_indices" in seen:
        indices = seen["sampler_indices"]
        found["sampler_indices"] = {name: indices[slice(*span)] for name, span in rows.items()}
    for group, table in enumerate(seen["block_table"]):
        found[f"block table {group}"] = of_requests(table)
    for name, slots in seen["slot_mapping"].items():
        found[f"slots of {name}"] = of_tokens(slots)
    return found
