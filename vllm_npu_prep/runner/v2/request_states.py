"""Requests by request row: the tables of the fused pass, and the samples that are on the device."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from vllm_npu_prep.device.readback import ReadBack
from vllm_npu_prep.prep.arrays import NO_PREVIOUS_ROW
from vllm_npu_prep.prep.batch import NO_PREVIOUS_ROWS
from vllm_npu_prep.prep.bookkeeping import enter_counts, place_samples, take_back_drafts
from vllm_npu_prep.prep.layout import targets_per_row
from vllm_npu_prep.runner.v2.buffers import RowValues, StagedRows

UNKNOWN_TOKEN = -1
"""Marks a token whose id is not known: in the host's table, a sample that only the device has; in
the device's table, a position of a prompt that is given as an embedding."""


class NPURequestState:
    """What is known of each request, by request row; a stand-in for upstream's ``RequestState``.

    A request gets a row when it arrives and keeps it until it is finished or preempted. Upstream
    keeps tokens and counts on the device and computes a step's inputs there. Here the host has
    them, and the step's one copy brings the inputs.

    Parameters
    ----------
    num_prefill_lookahead
        Not used: the kind of speculation that needs it is refused.
    use_dense_all_token_ids
        Whether the device keeps the tokens of all requests, for drafts that are looked up in them.

    Attributes
    ----------
    req_id_to_index
        The request row of each request.
    one_token_each, all_drafts, all_drafts_and_one
        int32 ``[max_num_reqs]``, the same number for each request: the tokens of a decode without
        drafts; the most drafts of a decode; and the tokens of a decode that has these.
    token_ids
        int32 ``[max_num_reqs, max_model_len]``: prompts, and tokens generated before a preemption;
        `UNKNOWN_TOKEN` after them.
    num_computed_tokens_np, num_tokens
        int32 ``[max_num_reqs]``. Every sample counts as a known token.
    some_prefill
        Whether a request of the step that arrived in an earlier step still computes its prompt.
        Also true if the step has no such earlier request.
    all_token_ids, total_len
        Tokens on the device and their number, for requests whose sampling parameters read them:
        penalties, bad words, log-probabilities of prompts, budgets of thinking tokens.
    read_on_device
        The requests that arrive with such parameters in this step.
    readers
        The request rows of all requests that have such parameters.
    keeps_all_tokens
        Whether the device keeps the tokens of all requests.
    have_ids
        For requests that arrive with embeddings, which positions of the prompt have a token id.
    is_token_ids
        bool, shaped as `token_ids`: False where a prompt has an embedding, and an id of 0. None
        until a request with embeddings arrives.
    """

    def __init__(
        self,
        max_num_reqs: int,
        max_model_len: int,
        max_num_batched_tokens: int,
        num_speculative_steps: int,
        vocab_size: int,
        device: torch.device,
        num_prefill_lookahead: int = 1,
        use_dense_all_token_ids: bool = False,
    ) -> None:
        self.max_num_reqs, self.max_model_len = max_num_reqs, max_model_len
        self.max_num_batched_tokens = max_num_batched_tokens
        self.num_speculative_steps = num_speculative_steps
        self.vocab_size, self.device = vocab_size, device
        self.req_id_to_index: dict[str, int] = {}
        # The requests of the last call of `running_rows`, and its result
        self._running: list[str] = []
        self._running_rows = np.empty(0, np.intp)
        self.one_token_each = np.ones(max_num_reqs, np.int32)
        self.all_drafts = np.full(max_num_reqs, num_speculative_steps, np.int32)
        self.all_drafts_and_one = self.all_drafts + 1
        self.free_indices = list(range(max_num_reqs))
        self.token_ids = np.full((max_num_reqs, max_model_len), UNKNOWN_TOKEN, np.int32)
        self.num_tokens = np.zeros(max_num_reqs, np.int32)
        self.prompt_len = RowValues(device, max_num_reqs, torch.int32)
        self.prefill_len = RowValues(device, max_num_reqs, torch.int32)
        self.num_computed_tokens = RowValues(device, max_num_reqs, torch.int32)
        self.num_computed_tokens_np = self.num_computed_tokens.np
        self.num_computed_prefill_tokens = np.zeros(max_num_reqs, np.int32)
        self.some_prefill = True
        self.max_seq_len = np.zeros(max_num_reqs, np.int32)
        self.all_token_ids = StagedRows((max_num_reqs, max_model_len), torch.int32, device)
        self.total_len = StagedRows(max_num_reqs, torch.int32, device)
        self.read_on_device: set[str] = set()
        self.readers: set[int] = set()
        self.keeps_all_tokens = use_dense_all_token_ids
        self.have_ids: dict[str, Sequence[bool]] = {}
        self.is_token_ids: np.ndarray | None = None
        self.samples = Samples(max_num_reqs, num_speculative_steps)
        # For each request of the last step: where it ends, and how many drafts it verifies
        self._ends = np.zeros(max_num_reqs, np.int32)
        self._num_drafts = np.zeros(max_num_reqs, np.int32)
        # Read by upstream's dummy runs and drafters only
        self.last_sampled_tokens = torch.zeros(max_num_reqs, 1, dtype=torch.int64, device=device)
        self.draft_tokens = self.last_sampled_tokens[:, :0]
        self.next_prefill_tokens = self.last_sampled_tokens[:0].T

    @property
    def num_reqs(self) -> int:
        return len(self.req_id_to_index)

    def rows_of(self, req_ids: Sequence[str]) -> np.ndarray:
        """Return the request rows of requests, int64 ``[len(req_ids)]``."""
        return np.fromiter(map(self.req_id_to_index.__getitem__, req_ids), np.intp, len(req_ids))

    def running_rows(self, req_ids: Sequence[str]) -> np.ndarray:
        """Return what `rows_of` returns, which is looked up if these are others than the last ones.

        Most steps have the requests of the last one, and to look 256 of them up takes longer than
        the fused pass.
        """
        if self._running != req_ids:
            self._running, self._running_rows = list(req_ids), self.rows_of(req_ids)
        return self._running_rows

    def add_request(
        self,
        req_id: str,
        prompt_len: int,
        all_token_ids: Sequence[int],
        num_computed_tokens: int,
        max_tokens: int,
    ) -> None:
        """Give a request row to a request that is new, or resumed after preemption.

        `all_token_ids` are its prompt and the tokens that were generated before a preemption;
        `num_computed_tokens` of them are in the KV cache already.
        """
        request_row = self.free_indices.pop()
        self.req_id_to_index[req_id] = request_row
        length = len(all_token_ids)
        self.max_seq_len[request_row] = prompt_len + max_tokens
        self.prompt_len.np[request_row], self.prefill_len.np[request_row] = prompt_len, length
        self.num_tokens[request_row] = length
        self.token_ids[request_row, :length] = all_token_ids
        self.token_ids[request_row, length : prompt_len + max_tokens + 1] = UNKNOWN_TOKEN
        self.num_computed_tokens_np[request_row] = num_computed_tokens
        self.num_computed_prefill_tokens[request_row] = num_computed_tokens
        if self.is_token_ids is not None:
            self.is_token_ids[request_row] = True
        if has_id := self.have_ids.get(req_id):
            if self.is_token_ids is None:
                self.is_token_ids = np.ones_like(self.token_ids, bool)
            self.is_token_ids[request_row, : len(has_id)] = has_id
        if self.keeps_all_tokens or req_id in self.read_on_device:
            self.readers.add(request_row)
            self.all_token_ids.stage_write(request_row, 0, self.ids_at_arrival(request_row))
            self.total_len.stage_write_elem(request_row, length)

    def ids_at_arrival(self, request_row: int) -> np.ndarray:
        """Return the tokens with which a request arrived, int32; `UNKNOWN_TOKEN` for embeddings."""
        length = self.prefill_len.np[request_row]
        ids = self.token_ids[request_row, :length]
        if self.is_token_ids is None:
            return ids
        return np.where(self.is_token_ids[request_row, :length], ids, UNKNOWN_TOKEN)

    def apply_staged_writes(self) -> None:
        self.prompt_len.copy_to_uva()
        self.prefill_len.copy_to_uva()
        self.all_token_ids.apply_write()
        self.total_len.apply_write()

    def remove_request(self, req_id: str) -> int | None:
        """Free a request's row and return it; return None if the request has none."""
        request_row = self.req_id_to_index.pop(req_id, None)
        if request_row is None:
            return None
        self._running = []  # the request may come back in another row
        self.free_indices.append(request_row)
        self.readers.discard(request_row)
        self.samples.forget(request_row)
        self._num_drafts[request_row] = 0
        return request_row

    def begin_step(
        self, request_rows: np.ndarray, num_scheduled: np.ndarray, num_drafts: np.ndarray | None
    ) -> None:
        """Note what a step computes, for the `exact_counts` of the next step.

        The arrays are int ``[num_reqs]`` in the order of the batch; `request_rows` are request
        rows, and `num_drafts` is None if no request has drafts.
        """
        if not self.num_speculative_steps:
            return
        self._num_drafts[:] = 0
        if num_drafts is not None:
            self._num_drafts[request_rows] = num_drafts
            self._ends[request_rows] = self.num_computed_tokens_np[request_rows] + num_scheduled

    def exact_counts(
        self,
        request_rows: np.ndarray,
        num_computed_tokens: "Sequence[int] | np.ndarray",
        num_valid_tokens: ReadBack,
    ) -> np.ndarray:
        """Return the scheduler's counts of computed tokens, less the drafts that were rejected.

        Under asynchronous scheduling the scheduler counts all drafts of the last step as accepted,
        unless it has waited for the step. `request_rows` are the request rows of requests that
        stay; the result is int32 ``[n]``. `num_valid_tokens` has the counts of accepted tokens by
        row of the last step; it is read, and waited for, only if needed.
        """
        counts = np.fromiter(num_computed_tokens, np.int32, len(num_computed_tokens))
        if np.count_nonzero(self._num_drafts[request_rows]):  # `any` calls Python
            take_back_drafts(
                request_rows,
                counts,
                self.samples.rows,
                self.samples.num_older,
                self._num_drafts,
                self._ends,
                num_valid_tokens.read(),
            )
        return counts

    def advance(
        self, request_rows: np.ndarray, num_computed_tokens: "Sequence[int] | np.ndarray"
    ) -> None:
        """Enter counts of computed tokens, int ``[n]``, of the requests in these request rows."""
        self.some_prefill = enter_counts(
            request_rows,
            np.asarray(num_computed_tokens, np.int32),
            self.prefill_len.np,
            self.num_computed_tokens_np,
            self.num_computed_prefill_tokens,
            self.num_tokens,
        )

    def enter_samples(self, request_rows: np.ndarray, token_ids: Sequence[Sequence[int]]) -> None:
        """Enter the tokens that the scheduler tells pipeline stages.

        Parameters
        ----------
        request_rows
            int ``[n]``: request rows of requests whose counts `advance` has entered.
        token_ids
            For each of them, its tokens from the computed count on, those of its prompt included.
        """
        for request_row, tokens in zip(request_rows.tolist(), token_ids, strict=True):
            start = self.num_computed_tokens_np[request_row]
            self.token_ids[request_row, start : start + len(tokens)] = tokens

    def append_samples(
        self,
        request_rows: np.ndarray,  # [num_reqs] int
        discard: np.ndarray,  # [num_reqs] bool
        num_scheduled: np.ndarray,  # [num_reqs] int
        token_ids: np.ndarray,  # [num_reqs] int
    ) -> None:
        """Enter the samples of a step for which the host has waited, except discarded ones."""
        places = self.num_computed_tokens_np[request_rows] + num_scheduled
        kept = ~discard & (places < self.max_model_len)  # a context's end is never computed
        self.token_ids[request_rows[kept], places[kept]] = token_ids[kept]


class AwaitedSamples(NamedTuple):
    """The samples on the device from which a step continues, and the row of each request."""

    # [num_rows * (1 + 2 * num_drafts)] int32 on the device: each row has its sample, then twice the
    # drafts made after it, as `prep.fused_pass.list_targets` scatters them
    token_ids: torch.Tensor | None
    num_rows: int
    rows: np.ndarray  # [num_reqs] int64: row of each request, -1 for those whose tokens are known
    num_drafts: int = 0  # after each sample

    @property
    def by_row(self) -> torch.Tensor:
        """Return `token_ids` as ``[num_rows, 1 + 2 * num_drafts]``; a sample begins each row."""
        assert self.token_ids is not None
        return self.token_ids.view(-1, targets_per_row(self.num_drafts))


NOTHING_AWAITED = AwaitedSamples(None, 0, NO_PREVIOUS_ROWS)


class Samples:
    """The last sample of each request, on the device: the host may not know it in the next step.

    Samples are in the order in which they were drawn, as in the V1 runner. Samples of requests that
    a step leaves out are kept before the step's own. That takes one launch after such a step, and
    no launch when a step is prepared.

    Attributes
    ----------
    rows
        int64 ``[max_num_reqs]``: the row of each request's sample; `NO_PREVIOUS_ROW` if it has
        none.
    num_older
        Number of rows before those of the last step.
    num_drafts
        Number of drafts that are made after each sample.
    """

    def __init__(self, max_num_reqs: int, num_drafts: int = 0) -> None:
        self.num_drafts = num_drafts
        self.rows = np.full(max_num_reqs, NO_PREVIOUS_ROW, np.int64)
        self.num_older = 0
        # Request rows of the last step, if no other request has a sample; else None
        self._settled: np.ndarray | None = None
        # [num_rows], or as `AwaitedSamples.by_row` with drafts
        self._by_row = torch.empty(0, dtype=torch.int32)
        self._num_rows = 0  # to ask the tensor takes longer than to find a batch's samples

    def forget(self, request_row: int) -> None:
        self.rows[request_row] = NO_PREVIOUS_ROW
        self._settled = None

    def find(
        self, request_rows: np.ndarray, is_awaited: np.ndarray | None = None
    ) -> AwaitedSamples:
        """Return the samples from which a step continues.

        `request_rows`, int ``[num_reqs]``, are the request rows in the order of the batch;
        `is_awaited`, bool ``[num_reqs]``, says which requests continue from a sample; None: all
        that have one.
        """
        rows = self.rows[request_rows]
        if is_awaited is not None:
            rows[~is_awaited] = NO_PREVIOUS_ROW
        num_rows = self._num_rows
        if not num_rows or (is_awaited is not None and not is_awaited.any()):
            return AwaitedSamples(None, 0, rows)
        token_ids = self._by_row.view(-1) if self.num_drafts else self._by_row
        return AwaitedSamples(token_ids, num_rows, rows, self.num_drafts)

    def keep(
        self,
        sampled_token_ids: torch.Tensor,  # [num_reqs] int32: the last one of each request
        request_rows: np.ndarray,  # [num_reqs] int
        discard: np.ndarray,  # [num_reqs] bool
        drafts: torch.Tensor | None = None,  # [num_reqs, num_drafts] int32
    ) -> None:
        """Keep a step's samples, except those of requests whose sample doesn't count."""
        if drafts is not None:
            sampled_token_ids = torch.cat((sampled_token_ids[:, None], drafts, drafts), 1)
        all_count = not np.count_nonzero(discard)
        if not (all_count and request_rows is self._settled):  # else rows stay as they are
            self.num_older = place_samples(request_rows, discard, self.rows)
            self._settled = request_rows if all_count else None
            if self.num_older:
                sampled_token_ids = self._after_older(sampled_token_ids, request_rows, discard)
        self._by_row = sampled_token_ids
        self._num_rows = self.num_older + request_rows.shape[0]

    def _after_older(
        self, sampled_token_ids: torch.Tensor, request_rows: np.ndarray, discard: np.ndarray
    ) -> torch.Tensor:
        """Put the samples of requests that the step leaves out in front of the step's own."""
        self._settled = None
        left_out = np.flatnonzero(self.rows >= 0)
        left_out = left_out[np.argsort(self.rows[left_out])]
        older = _runs_of(self._by_row, self.rows[left_out])
        self.rows[left_out] = np.arange(self.num_older)
        ends = self.num_older + np.arange(len(request_rows))
        self.rows[request_rows] = np.where(discard, NO_PREVIOUS_ROW, ends)
        return torch.cat((*older, sampled_token_ids))


def _runs_of(by_row: torch.Tensor, rows: np.ndarray) -> list[torch.Tensor]:
    """Return the ascending rows as views, because indices would have to be copied to the device."""
    borders = np.flatnonzero(np.diff(rows) > 1) + 1
    runs = np.split(rows, borders)
    return [by_row[run[0] : run[-1] + 1] for run in runs]
