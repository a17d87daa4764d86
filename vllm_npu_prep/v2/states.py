"""Requests by slot: the tables of the fused pass, and the samples that the device has."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from vllm_npu_prep.device.readback import ReadBack
from vllm_npu_prep.prep.arrays import NO_PREVIOUS_ROW
from vllm_npu_prep.prep.layout import targets_per_row
from vllm_npu_prep.v2.buffers import SlotRows, SlotValues

UNKNOWN_TOKEN = -1
"""What the token table holds where the device has a sample that the host never sees, and what the
device's table holds where a prompt has an embedding."""


class SlotStates:
    """What is known of each request, by slot; stands in for upstream's ``RequestState``.

    A request gets a slot when it arrives and keeps it until it is finished or preempted. Upstream
    keeps tokens and counts on the device, and computes a step's inputs there; here the host has
    them, and the step's one copy brings its inputs.

    Parameters
    ----------
    max_num_reqs, max_model_len, max_num_batched_tokens, num_speculative_steps, vocab_size, device
        As upstream's.
    num_prefill_lookahead
        Of speculation that is refused.
    use_dense_all_token_ids
        Whether the device has the tokens of all requests, for drafts that are looked up in them.

    Attributes
    ----------
    req_id_to_index
        Slot of each request.
    token_ids
        int32 ``[max_num_reqs, max_model_len]``: prompts and what they were resumed with;
        `UNKNOWN_TOKEN` after them.
    num_computed_tokens_np, num_tokens
        int32 ``[max_num_reqs]``. Every sample counts as a known token.
    all_token_ids, total_len
        Tokens on the device, and their number, of requests whose sampling parameters need them:
        penalties, bad words, log-probabilities of prompts.
    read_on_device
        Requests that arrive with such parameters.
    keeps_all_tokens
        Whether it is all requests.
    have_ids
        Of requests that arrive with embeddings: which places of the prompt have an id, by name.
    is_token_ids
        bool like `token_ids`: False where a prompt has an embedding, and an id of 0; None while no
        request came with some.
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
        self.index_to_req_id: dict[int, str] = {}
        self.free_indices = list(range(max_num_reqs))
        self.token_ids = np.full((max_num_reqs, max_model_len), UNKNOWN_TOKEN, np.int32)
        self.num_tokens = np.zeros(max_num_reqs, np.int32)
        self.prompt_len = SlotValues(device, max_num_reqs, torch.int32)
        self.prefill_len = SlotValues(device, max_num_reqs, torch.int32)
        self.num_computed_tokens = SlotValues(device, max_num_reqs, torch.int32)
        self.num_computed_tokens_np = self.num_computed_tokens.np
        self.num_computed_prefill_tokens = np.zeros(max_num_reqs, np.int32)
        self.max_seq_len = np.zeros(max_num_reqs, np.int32)
        self.all_token_ids = SlotRows((max_num_reqs, max_model_len), torch.int32, device)
        self.total_len = SlotRows(max_num_reqs, torch.int32, device)
        self.read_on_device: set[str] = set()
        self.keeps_all_tokens = use_dense_all_token_ids
        self.have_ids: dict[str, Sequence[bool]] = {}
        self.is_token_ids: np.ndarray | None = None
        self.samples = Samples(max_num_reqs, num_speculative_steps)
        # Of the last step: where it ends, and how many drafts it verifies
        self._ends = np.zeros(max_num_reqs, np.int32)
        self._num_drafts = np.zeros(max_num_reqs, np.int32)
        # Of upstream's dummy runs and drafters; empty without these
        self.last_sampled_tokens = torch.zeros(max_num_reqs, 1, dtype=torch.int64, device=device)
        self.draft_tokens = self.last_sampled_tokens[:, :0]
        self.next_prefill_tokens = self.last_sampled_tokens[:0].T

    @property
    def num_reqs(self) -> int:
        """Requests that have a slot."""
        return len(self.req_id_to_index)

    def slots_of(self, req_ids: Sequence[str]) -> np.ndarray:
        """Slots of requests, int64 ``[len(req_ids)]``."""
        return np.fromiter(map(self.req_id_to_index.__getitem__, req_ids), np.intp, len(req_ids))

    def add_request(
        self,
        req_id: str,
        prompt_len: int,
        all_token_ids: Sequence[int],
        num_computed_tokens: int,
        max_tokens: int,
    ) -> None:
        """Give a slot to a request that is new, or resumed after preemption.

        Parameters
        ----------
        req_id
            Its name.
        prompt_len
            Tokens of its prompt.
        all_token_ids
            Prompt, and tokens that were generated before it was preempted.
        num_computed_tokens
            Tokens that the cache has already.
        max_tokens
            Most tokens that it may generate.
        """
        slot = self.free_indices.pop()
        self.req_id_to_index[req_id], self.index_to_req_id[slot] = slot, req_id
        length = len(all_token_ids)
        self.max_seq_len[slot] = prompt_len + max_tokens
        self.prompt_len.np[slot], self.prefill_len.np[slot] = prompt_len, length
        self.num_tokens[slot] = length
        self.token_ids[slot, :length] = all_token_ids
        self.token_ids[slot, length : prompt_len + max_tokens + 1] = UNKNOWN_TOKEN
        self.num_computed_tokens_np[slot] = num_computed_tokens
        self.num_computed_prefill_tokens[slot] = num_computed_tokens
        if self.is_token_ids is not None:
            self.is_token_ids[slot] = True
        if has_id := self.have_ids.get(req_id):
            if self.is_token_ids is None:
                self.is_token_ids = np.ones_like(self.token_ids, bool)
            self.is_token_ids[slot, : len(has_id)] = has_id
        if self.keeps_all_tokens or req_id in self.read_on_device:
            self.all_token_ids.stage_write(slot, 0, self.ids_at_arrival(slot))
            self.total_len.stage_write_elem(slot, length)

    def ids_at_arrival(self, slot: int) -> np.ndarray:
        """Tokens with which a request arrived, int32; `UNKNOWN_TOKEN` for embeddings."""
        length = self.prefill_len.np[slot]
        ids = self.token_ids[slot, :length]
        if self.is_token_ids is None:
            return ids
        return np.where(self.is_token_ids[slot, :length], ids, UNKNOWN_TOKEN)

    def apply_staged_writes(self) -> None:
        """Send what samplers read of new requests, as far as it has changed."""
        self.prompt_len.copy_to_uva()
        self.prefill_len.copy_to_uva()
        self.all_token_ids.apply_write()
        self.total_len.apply_write()

    def remove_request(self, req_id: str) -> int | None:
        """Free a request's slot; None if it has none."""
        slot = self.req_id_to_index.pop(req_id, None)
        if slot is None:
            return None
        del self.index_to_req_id[slot]
        self.free_indices.append(slot)
        self.samples.forget(slot)
        self._num_drafts[slot] = 0
        return slot

    def begin_step(
        self, slots: np.ndarray, num_scheduled: np.ndarray, num_drafts: np.ndarray | None
    ) -> None:
        """Note what a step computes, for `exact_counts` of the next one.

        Parameters
        ----------
        slots, num_scheduled, num_drafts
            Slot, tokens and drafts of each request of the step, int ``[num_reqs]`` each; None if no
            request has drafts.
        """
        self._num_drafts[:] = 0
        if num_drafts is not None:
            self._num_drafts[slots] = num_drafts
            self._ends[slots] = self.num_computed_tokens_np[slots] + num_scheduled

    def exact_counts(
        self,
        slots: np.ndarray,
        num_computed_tokens: "Sequence[int] | np.ndarray",
        num_valid_tokens: ReadBack,
    ) -> np.ndarray:
        """The scheduler's counts without the drafts that the last step rejected.

        Under asynchronous scheduling, the scheduler takes all drafts of the last step for accepted,
        unless it has waited for the step.

        Parameters
        ----------
        slots, num_computed_tokens
            int ``[n]``: slots of requests that stay, and the scheduler's counts.
        num_valid_tokens
            Counts of accepted tokens by row of the last step, which are read if they are needed.

        Returns
        -------
        numpy.ndarray
            int32 ``[n]``.
        """
        counts = np.asarray(num_computed_tokens, np.int32)
        rows = self.samples.rows[slots] - self.samples.num_older  # in the last step
        drafts = self._num_drafts[slots]
        verified = np.flatnonzero((rows >= 0) & (drafts > 0))
        if len(verified):
            rejected = drafts[verified] + 1 - num_valid_tokens.read()[rows[verified]]
            ends = self._ends[slots[verified]] - rejected
            counts[verified] = np.minimum(counts[verified], ends)
        return counts

    def advance(self, slots: np.ndarray, num_computed_tokens: "Sequence[int] | np.ndarray") -> None:
        """Enter counts of requests that stay.

        Parameters
        ----------
        slots
            int ``[n]``.
        num_computed_tokens
            Of each of them. A request past its prompt knows one token more: its last sample.
        """
        self.num_computed_tokens_np[slots] = num_computed_tokens
        computed = self.num_computed_tokens_np[slots]
        prefill = self.prefill_len.np[slots]
        self.num_computed_prefill_tokens[slots] = np.minimum(computed, prefill)
        self.num_tokens[slots] = np.maximum(prefill, computed + 1)

    def enter_samples(self, slots: np.ndarray, token_ids: Sequence[Sequence[int]]) -> None:
        """Enter the tokens of a step as the scheduler tells them to pipeline stages.

        Parameters
        ----------
        slots
            int ``[n]``, of requests whose counts `advance` has entered.
        token_ids
            Of each of them the tokens from its count on, those of its prompt, too.
        """
        for slot, tokens in zip(slots.tolist(), token_ids, strict=True):
            start = self.num_computed_tokens_np[slot]
            self.token_ids[slot, start : start + len(tokens)] = tokens

    def append_samples(
        self,
        slots: np.ndarray,  # [num_reqs] int
        discard: np.ndarray,  # [num_reqs] bool
        num_scheduled: np.ndarray,  # [num_reqs] int
        token_ids: np.ndarray,  # [num_reqs] int
    ) -> None:
        """Enter the samples of a step for which the host has waited, but for those discarded."""
        places = self.num_computed_tokens_np[slots] + num_scheduled
        kept = ~discard & (places < self.max_model_len)  # a context's end is never computed
        self.token_ids[slots[kept], places[kept]] = token_ids[kept]


class Found(NamedTuple):
    """Where samples are that a step needs."""

    # [num_rows * (1 + 2 * num_drafts)] int32 on the device: of each row its sample, then the drafts
    # made after it, twice, as `prep.fused_pass.list_targets` scatters them
    token_ids: torch.Tensor | None
    num_rows: int
    rows: np.ndarray  # [num_reqs] int64: row of each request, -1 for those whose tokens are known
    num_drafts: int = 0  # after each sample

    @property
    def by_row(self) -> torch.Tensor:
        """A row for each request that has a sample on the device: the sample comes first."""
        assert self.token_ids is not None
        return self.token_ids.view(-1, targets_per_row(self.num_drafts))


class Samples:
    """Each request's last sample. The host doesn't know it when the next step is prepared.

    Samples are in the order in which they were drawn, as on V1. Those of requests that a step left
    out come before the step's own: one launch more after such a step, and none when any step is
    prepared.

    Parameters
    ----------
    max_num_reqs
        Slots.
    num_drafts
        Drafts that are made after each sample.

    Attributes
    ----------
    rows
        int64 ``[max_num_reqs]``: row of each slot's sample; `NO_PREVIOUS_ROW` if it has none.
    num_older
        Rows before those of the last step.
    """

    def __init__(self, max_num_reqs: int, num_drafts: int = 0) -> None:
        self.num_drafts = num_drafts
        self.rows = np.full(max_num_reqs, NO_PREVIOUS_ROW, np.int64)
        self.num_older = 0
        self._by_row: torch.Tensor | None = None  # [num_rows], or as `Found.by_row` with drafts

    def forget(self, slot: int) -> None:
        """A slot lost its request."""
        self.rows[slot] = NO_PREVIOUS_ROW

    def find(self, slots: np.ndarray, is_awaited: np.ndarray) -> Found:
        """The samples from which a step continues.

        Parameters
        ----------
        slots
            int ``[num_reqs]``: slot of each request of the batch.
        is_awaited
            bool ``[num_reqs]``: whether a request continues from a sample.
        """
        rows = np.where(is_awaited, self.rows[slots], NO_PREVIOUS_ROW)
        if self._by_row is None or not is_awaited.any():
            return Found(None, 0, rows)
        num_rows = self._by_row.shape[0]  # `len` of a tensor asks for tracing first
        return Found(self._by_row.view(-1), num_rows, rows, self.num_drafts)

    def keep(
        self,
        sampled_token_ids: torch.Tensor,  # [num_reqs] int32: the last one of each request
        slots: np.ndarray,  # [num_reqs] int
        discard: np.ndarray,  # [num_reqs] bool
        drafts: torch.Tensor | None = None,  # [num_reqs, num_drafts] int32
    ) -> None:
        """Take note of a step's samples, but for requests whose sample doesn't count."""
        if drafts is not None:
            sampled_token_ids = torch.cat((sampled_token_ids[:, None], drafts, drafts), 1)
        self.rows[slots] = NO_PREVIOUS_ROW
        left_out = np.flatnonzero(self.rows >= 0)
        self.num_older = len(left_out)
        if len(left_out):
            assert self._by_row is not None
            left_out = left_out[np.argsort(self.rows[left_out])]
            older = _runs_of(self._by_row, self.rows[left_out])
            sampled_token_ids = torch.cat((*older, sampled_token_ids))
            self.rows[left_out] = np.arange(self.num_older)
        self._by_row = sampled_token_ids
        ends = self.num_older + np.arange(len(slots))
        self.rows[slots] = np.where(discard, NO_PREVIOUS_ROW, ends)


def _runs_of(by_row: torch.Tensor, rows: np.ndarray) -> list[torch.Tensor]:
    """Ascending rows as views: indices would have to be copied to the device."""
    borders = np.flatnonzero(np.diff(rows) > 1) + 1
    runs = np.split(rows, borders)
    return [by_row[run[0] : run[-1] + 1] for run in runs]
