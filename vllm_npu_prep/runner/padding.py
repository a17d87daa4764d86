"""Decides how a step is padded and whether it replays a graph, once, before it is prepared."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from vllm.config import CUDAGraphMode, VllmConfig

from vllm_npu_prep.attention.fused_calls import limits_batches
from vllm_npu_prep.errors import PrepError
from vllm_npu_prep.graph.counts import EAGER, StepCounts
from vllm_npu_prep.prep.batch import StepBatch
from vllm_npu_prep.prep.padding import GraphMode, Padding, full_padding, no_padding
from vllm_npu_prep.prep.pcp import largest_share
from vllm_npu_prep.runner.step import DummyRun

KEPT_DECISIONS = 4096
"""The most padding decisions that are cached. Decodes need one for each batch size."""


class CacheLimits(NamedTuple):
    """The limits of one call of attention, if there are any
    (`vllm_npu_prep.attention.fused_calls.limits_batches`).

    A full graph is one call for all its requests; an eager step can be split into several.
    """

    # The blocks of the cache; those of all requests, padding included, may not exceed them
    num_blocks: int
    block_size: int  # the smallest block size of the engine's groups, in tokens

    def allow(self, batch: StepBatch, padding: Padding) -> bool:
        """Return whether one call may serve a batch, with padding requests of one block each.

        Engines for more requests than a call takes have no full graphs at all
        (`vllm_npu_prep.graph.modes`).
        """
        num_reqs, rows = batch.num_reqs, padding.num_reqs_padded
        tables = batch.tables
        computed = tables.num_computed_tokens[tables.request_rows[:num_reqs]]
        seq_lens = computed + batch.num_scheduled_tokens
        blocks = int((-(-seq_lens // self.block_size)).sum()) + rows - num_reqs
        return blocks <= self.num_blocks

    def refuse_long_requests(self, max_model_len: int) -> None:
        """Refuse a cache that is too small for one request, which can't be split."""
        if -(-max_model_len // self.block_size) > self.num_blocks:
            raise PrepError(
                f"--max-model-len {max_model_len}: the KV cache has {self.num_blocks} blocks of "
                f"{self.block_size} tokens, and fused attention of this CANN takes no request that "
                f"is longer than the cache; give at most {self.num_blocks * self.block_size}, or "
                "more --kv-cache-memory-bytes"
            )


class DispatchKey(NamedTuple):
    """What a decision depends on: decisions are cached by it."""

    eager: bool  # the step has to run without a graph
    takes_embeds: bool
    num_tokens: int
    num_reqs: int
    query_len: int  # the tokens of each request; 0 if they differ
    num_encoder_reqs: int  # requests whose images or videos are encoded in this step
    num_active_loras: int


Dispatch = Callable[[StepBatch, DispatchKey], tuple[Any, ...]]
"""Asks upstream's dispatcher for a step. The answer begins with the graph mode and the batch
descriptor."""


class PaddingDecision(NamedTuple):
    dispatched: tuple[Any, ...]  # upstream's answer, unchanged
    padding: Padding
    kind: str  # how the step is counted (`StepCounts.kind`)


class StepPadding:
    """Decides the padding of each step.

    Parameters
    ----------
    captured
        Returns the engine's graph mode and its largest capture size in tokens.
    decode_query_len
        The tokens of a decode: one and its drafts.
    depends_on_counts_only
        True if the same counts always get the same answer, which is then cached. It is False if
        data-parallel ranks must agree in every step, or the dispatcher makes metrics of graphs.
    num_ranks
        The ranks that share the tokens of a step (prefill context parallelism). All are padded as
        the one with the largest share is; the step's padding is that of their tokens together.

    Attributes
    ----------
    counts
        How many steps ran in which way.
    cache_limits
        What a full graph has to keep to, once the cache is allocated; None: no limits.
    """

    def __init__(
        self,
        dispatch: Dispatch,
        captured: Callable[[], tuple[GraphMode, int]],
        decode_query_len: int = 1,
        depends_on_counts_only: bool = True,
        num_ranks: int = 1,
    ) -> None:
        self.dispatch, self.captured = dispatch, captured
        self.num_ranks = num_ranks
        self.decode_query_len = decode_query_len
        self.depends_on_counts_only = depends_on_counts_only
        self.counts = StepCounts()
        self.cache_limits: CacheLimits | None = None
        self._kept: dict[tuple[int, ...], PaddingDecision] = {}  # by `DispatchKey`

    def decide(
        self,
        batch: StepBatch,
        num_encoder_reqs: int,  # the requests whose images or videos are encoded in this step
        num_active_loras: int,  # the adapters of the batch
    ) -> PaddingDecision:
        """Decide the padding of a step and count the step."""
        if self.num_ranks > 1:
            return self._decide_for_ranks(batch)
        num_tokens, num_reqs = batch.total_num_scheduled_tokens, batch.num_reqs
        query_len, rest = divmod(num_tokens, num_reqs)
        if rest or (query_len > 1 and int(batch.num_scheduled_tokens.max()) > query_len):
            query_len = 0
        counts = (  # a plain tuple: a `DispatchKey` takes longer to make than to look up
            False,
            batch.takes_embeds,
            num_tokens,
            num_reqs,
            query_len,
            num_encoder_reqs,
            num_active_loras,
        )
        decision = self._kept.get(counts) or self._decide(batch, DispatchKey(*counts))
        limits = self.cache_limits
        in_full_graph = decision.padding.mode is GraphMode.FULL
        if limits is not None and in_full_graph and not limits.allow(batch, decision.padding):
            counts = True, *counts[1:]
            decision = self._kept.get(counts) or self._decide(batch, DispatchKey(*counts))
        self.counts.add(decision.kind)
        return decision

    def _decide_for_ranks(self, batch: StepBatch) -> PaddingDecision:
        num_reqs = batch.num_reqs
        num_tokens, num_rows = largest_share(batch.num_scheduled_tokens, self.num_ranks)
        query_len = int(batch.total_num_scheduled_tokens == num_reqs)
        counts = DispatchKey(False, False, num_tokens, num_rows, query_len, 0, 0)
        decision = self._kept.get(counts) or self._decide(batch, counts)
        padding = replace(decision.padding, num_reqs_padded=num_reqs)
        limits = self.cache_limits
        if limits is not None and padding.mode is GraphMode.FULL:
            # As if one rank had all requests, and the padding rows besides
            most_rows = replace(padding, num_reqs_padded=num_reqs + padding.num_input_tokens)
            if not limits.allow(batch, most_rows):
                counts = counts._replace(eager=True)
                decision = self._kept.get(counts) or self._decide(batch, counts)
                padding = replace(decision.padding, num_reqs_padded=num_reqs)
        chosen = decision._replace(padding=padding)
        self.counts.add(chosen.kind)
        return chosen

    def _decide(self, batch: StepBatch, counts: DispatchKey) -> PaddingDecision:
        decision = self._ask(batch, counts)
        if self.depends_on_counts_only:
            if len(self._kept) == KEPT_DECISIONS:
                self._kept.clear()
            self._kept[counts] = decision
        return decision

    def _ask(self, batch: StepBatch, counts: DispatchKey) -> PaddingDecision:
        dispatched = self.dispatch(batch, counts)
        padding = self._padding_of(dispatched, counts.num_reqs)
        num_tokens, uniform_decode = counts.num_tokens, counts.query_len == self.decode_query_len
        mode, largest = self.captured()
        kind = self.counts.kind(
            padding, num_tokens, uniform_decode, mode, largest, counts.takes_embeds
        )
        if counts.eager:
            kind = EAGER + "more blocks than the cache has, shared ones counted for each request"
        return PaddingDecision(dispatched, padding, kind)

    def of_dummy_run(
        self,
        dummy_run: DummyRun,  # what upstream asked of the dummy run
        dispatched: tuple[Any, ...],  # upstream's answer for it
        num_tokens: int,
        num_reqs: int,
        uniform_decode: bool,
    ) -> Padding | None:
        """Return the padding of a dummy run that we prepare as a step without requests.

        We do that for a dummy run that captures or replays a graph: the graph then reads the
        addresses of steps, and all values are padding, which is safe to run. We also do it for the
        run that warms attention up for a capture, because upstream would make up lengths beyond
        ``max_model_len``.

        Parameters
        ----------
        num_tokens, num_reqs, uniform_decode
            Its sizes, as the dispatcher got them.

        Returns
        -------
        Padding or None
            None for a dummy run that upstream prepares itself.
        """
        if dispatched[0] != CUDAGraphMode.NONE:
            # In a piecewise graph, attention sees requests without padding: here there are none
            return self._padding_of(dispatched, 0)
        if dummy_run.attends:
            decode_query_len = self.decode_query_len if uniform_decode else 0
            return full_padding(num_tokens, num_reqs, decode_query_len)
        return None

    def of_capture(self, mode: CUDAGraphMode, descriptor: Any) -> Padding:
        return self._padding_of((mode, descriptor), 0)

    def forget(self) -> None:
        """Drop cached decisions, because capture sizes have changed."""
        self._kept.clear()

    def _padding_of(self, dispatched: tuple[Any, ...], num_reqs: int) -> Padding:
        """Return upstream's decision as a `Padding`, for this number of real requests."""
        mode, descriptor = dispatched[:2]
        if self.num_ranks > 1:  # padding rows belong to ranks, and no request is padded
            decode_query_len = int(mode == CUDAGraphMode.FULL)
            num_tokens = self.num_ranks * descriptor.num_tokens
            return Padding(num_tokens, 0, decode_query_len, GraphMode(mode.name))
        if mode == CUDAGraphMode.FULL:
            decode_query_len = self.decode_query_len if descriptor.uniform else 0
            return full_padding(descriptor.num_tokens, descriptor.num_reqs, decode_query_len)
        if mode == CUDAGraphMode.PIECEWISE:
            return Padding(descriptor.num_tokens, num_reqs, mode=GraphMode.PIECEWISE)
        return no_padding(descriptor.num_tokens, num_reqs)


def depends_on_counts_only(vllm_config: VllmConfig) -> bool:
    """Return whether the dispatcher's answer is the same for the same counts (`StepPadding`)."""
    one_rank = vllm_config.parallel_config.data_parallel_size == 1
    return one_rank and not vllm_config.observability_config.cudagraph_metrics


def cache_limits(
    vllm_config: VllmConfig, num_blocks: int, block_size: int, *, is_profiling: bool
) -> tuple[CacheLimits | None, int | None]:
    """Return what one call of attention allows, and the most requests of a full graph.

    None stands for no limit.

    Parameters
    ----------
    num_blocks, block_size
        The sizes of the cache; the block size is the smallest of its groups.
    is_profiling
        Whether the cache is a small one, made to measure memory.
    """
    if not limits_batches(vllm_config):
        return None, None
    limits = CacheLimits(num_blocks, block_size)
    if not is_profiling:
        limits.refuse_long_requests(vllm_config.model_config.max_model_len)
    return limits, num_blocks  # each request has at least one block
