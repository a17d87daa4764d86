"""The batched half of ``update_from_output``: the tokens of a step, entered for their requests.

Upstream goes through the rows of a step one after the other. So do we, in one loop, for rows to
which upstream would only append tokens, and hand it the others in their place. `Rows` stands for
``num_scheduled_tokens`` in the step that upstream's method gets, and its ``items()`` yields only
those. Therefore everything that upstream does, it does in the order in which it would have done it.

Two passes, first all plain rows and then upstream's method with the others, would do without a
generator. But rows would be done in another order than upstream's: of two requests
with the same tokens another's block would be the one that the prefix cache finds, encoder outputs
would be evicted in another order, and events of the KV cache would be published in another one. The
twin test (`tests/scheduling`) compares these, too.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from vllm_npu_prep.scheduling.requests import MEDIA, SPECIAL, TRACED, BatchedRequest

RUNNING = RequestStatus.RUNNING


class UpstreamRow(NamedTuple):
    """A row that upstream gets, and the place of an output that it makes of the row."""

    request_id: str
    client: int  # the index of the client that gets the output
    before: int  # the number of plain outputs for this client that come first


@dataclass
class Rows:
    """The rows of a step, in place of ``num_scheduled_tokens``; `items` is gone through once."""

    scheduler: Scheduler  # a `vllm_npu_prep.scheduling.scheduler.BatchedMixin`
    step: SchedulerOutput  # as it was scheduled
    sampled: ModelRunnerOutput
    outputs: dict[int, list[EngineCoreOutput]] = field(default_factory=dict)  # plain, by client
    # For each of these clients, how many rows had been handed to upstream before its first output
    first: dict[int, int] = field(default_factory=dict)
    handed: list[UpstreamRow] = field(default_factory=list)  # the rows that upstream got
    # How often a plain row verified some drafts and accepted some: {(drafts, accepted): rows}
    drafts: Counter[tuple[int, int]] = field(default_factory=Counter)

    def get(self, request_id: str, default: int = 0) -> int:
        """Return a row's number of tokens; MFU metrics ask for those of all rows."""
        return self.step.num_scheduled_tokens.get(request_id, default)

    def items(self) -> Iterator[tuple[str, int]]:
        """Do plain rows, and yield the others where they come.

        A row is plain if upstream would only append its tokens: the request runs, has no stale
        output, emitted something before, and none of the tokens ends it. The rest of upstream's
        rules for such a row is here; each line names its source in vLLM's ``v1/core/sched``.
        """
        scheduler = self.scheduler
        ours: Any = scheduler
        find: Any = scheduler.requests.get
        cache_blocks, note_cached = scheduler.kv_cache_manager.cache_blocks, ours.needs.note_cached
        asynchronous, hash_block_size = ours.asynchronous, scheduler.hash_block_size
        caches_verified = ours.rules.caches_verified_tokens
        caches = asynchronous or (caches_verified and scheduler.num_spec_tokens > 0)
        index, sampled = self.sampled.req_id_to_index, self.sampled.sampled_token_ids
        drafts_of = self.step.scheduled_spec_decode_tokens
        invalid_drafts = self.step.num_invalid_spec_tokens or {}
        client: int | None = None
        outputs: list[EngineCoreOutput] = []
        for request_id, num_scheduled in self.step.num_scheduled_tokens.items():
            request: BatchedRequest | None = find(request_id)
            if (
                request is None
                or request.status is not RUNNING
                or request.num_stale_output_tokens
                or request.prefill_stats is not None
                or request.events
                or request.traits & SPECIAL
            ):
                yield self._hand(request_id, num_scheduled, request)
                continue
            new_ids = sampled[index[request_id]]
            all_ids = request._all_token_ids
            num_new = len(new_ids)
            length = len(all_ids) + num_new
            if (
                length >= request.stop_length
                or not num_new
                or not (
                    new_ids[0] not in request.stop_tokens
                    if num_new == 1
                    else request.stop_tokens.isdisjoint(new_ids)
                )
            ):
                yield self._hand(request_id, num_scheduled, request)
                continue
            request.num_in_flight_tokens -= num_scheduled  # Scheduler.update_from_output
            drafts = drafts_of.get(request_id) if drafts_of else None
            if drafts:
                num_drafts, num_accepted = len(drafts), num_new - 1
                rejected = num_drafts - num_accepted
                if rejected:  # Scheduler.update_from_output rolls them back
                    if request.num_computed_tokens > 0:
                        request.num_computed_tokens -= rejected
                    if request.num_output_placeholders > 0:
                        request.num_output_placeholders -= rejected
                if invalid_drafts:  # Scheduler.make_spec_decoding_stats
                    num_drafts -= invalid_drafts.get(request_id, 0)
                self.drafts[num_drafts, num_accepted] += 1
            traits = request.traits
            if traits & MEDIA:
                scheduler._free_encoder_inputs(request)
            all_ids += new_ids  # Request.append_output_token_ids
            request._output_token_ids += new_ids
            if length % hash_block_size < num_new:
                request.update_block_hashes()
            if asynchronous:  # _update_request_with_output, of AsyncScheduler in vLLM 0.32
                request.num_output_placeholders -= num_new
                assert request.num_output_placeholders >= 0
            if caches:  # there, and in Scheduler.update_from_output from vLLM 0.33 on
                cacheable = request.num_computed_tokens - (
                    request.num_in_flight_tokens
                    if caches_verified
                    else request.num_output_placeholders
                )
                if cacheable >= request.cached_until:
                    cache_blocks(request, cacheable)
                    note_cached(request)
            if request.client_index != client:
                client = request.client_index
                if client not in self.outputs:
                    self.outputs[client], self.first[client] = [], len(self.handed)
                outputs = self.outputs[client]
            outputs.append(
                EngineCoreOutput(request_id, new_ids)
                if not traits & TRACED
                else EngineCoreOutput(request_id, new_ids, trace_headers=request.trace_headers)
            )

    def _hand(
        self, request_id: str, num_scheduled: int, request: Request | None
    ) -> tuple[str, int]:
        if request is not None:
            client = request.client_index
            before = len(self.outputs.get(client, ()))
            self.handed.append(UpstreamRow(request_id, client, before))
        return request_id, num_scheduled

    def join(self, upstream: dict[int, EngineCoreOutputs]) -> dict[int, EngineCoreOutputs]:
        """Put the outputs of plain rows among upstream's, where upstream would have had them.

        Clients come in the order of their first output, then those of upstream's tail. Statistics
        go to the first client.
        """
        if not self.outputs:
            return upstream
        stats = None
        for outputs in upstream.values():
            stats = stats or outputs.scheduler_stats
            outputs.scheduler_stats = None
        # If it had no other outputs, upstream has made one for its statistics alone
        rest = {
            client: outputs
            for client, outputs in upstream.items()
            if outputs.outputs or outputs.finished_requests is not None
        }
        place = {client: number - 0.5 for client, number in self.first.items()}
        if any(outputs.outputs for outputs in rest.values()):
            self._join_rows(rest, place)
        joined = {}
        for client in sorted(place, key=place.__getitem__):
            outputs = rest.pop(client) if client in rest else EngineCoreOutputs()
            outputs.outputs = self.outputs.get(client, outputs.outputs)
            joined[client] = outputs
        joined |= rest
        if stats is not None:
            next(iter(joined.values())).scheduler_stats = stats
        return joined

    def _join_rows(self, upstream: dict[int, EngineCoreOutputs], place: dict[int, float]) -> None:
        """Put each output that upstream made of a row after the plain ones before it.

        `place` gets the clients of these rows, too.
        """
        by_client: dict[int, list[tuple[int, UpstreamRow]]] = {}
        for number, row in enumerate(self.handed):
            by_client.setdefault(row.client, []).append((number, row))
        for client, each in upstream.items():
            theirs = each.outputs
            ours = self.outputs.get(client, [])
            pieces: list[list[EngineCoreOutput]] = []
            done = taken = 0
            for number, row in by_client.get(client, ()):
                if taken == len(theirs) or not _is_of_row(theirs[taken], row.request_id):
                    continue
                pieces += [ours[done : row.before], [theirs[taken]]]
                done, taken = row.before, taken + 1
                place[client] = min(place.get(client, number), number)
            if client in place:
                self.outputs[client] = [*chain(*pieces), *ours[done:], *theirs[taken:]]


def _is_of_row(output: EngineCoreOutput, request_id: str) -> bool:
    """Return whether upstream made an output of a row.

    If not, upstream's tail made it, of a request that failed.
    """
    return output.request_id == request_id and (
        bool(output.new_token_ids)
        or output.pooling_output is not None
        or output.finish_reason is not FinishReason.ERROR
    )


def add_drafts(
    stats: SpecDecodingStats | None, drafts: Counter[tuple[int, int]], num_spec_tokens: int
) -> SpecDecodingStats | None:
    """Add the drafts of plain rows to a step's statistics.

    This does what ``SpecDecodingStats.observe_draft`` of vLLM's ``v1/spec_decode/metrics.py`` does,
    for all rows of a kind at once.
    """
    if not drafts:
        return stats
    if stats is None:
        stats = SpecDecodingStats.new(num_spec_tokens)
    for (num_drafts, num_accepted), rows in drafts.items():
        stats.num_drafts += rows
        stats.num_draft_tokens += rows * num_drafts
        stats.num_accepted_tokens += rows * num_accepted
        for position in range(num_accepted):
            stats.num_accepted_tokens_per_pos[position] += rows
        for position in range(num_drafts):
            stats.num_draft_tokens_per_pos[position] += rows
    return stats
