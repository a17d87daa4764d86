"""The full check, ``{"npu_prep": {"check": "full"}}``: every invariant of every step.

Every variable is compared with the oracle. Inputs of the layers and arrays on the device are
compared with the prepared step. The owner and writer of each slot are tracked from step to step
(`vllm_npu_prep.observe.ledger`). The check is slow, and waits for the device in each step.
"""

import sys
import zlib
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_npu_prep.observe.check import StepCheck
from vllm_npu_prep.observe.ledger import SlotLedger
from vllm_npu_prep.observe.step_snapshot import Recorded, StepSnapshot, recorded_groups
from vllm_npu_prep.observe.violation import StepCheckError, expect, given_allowed
from vllm_npu_prep.prep.arrays import STEP_ARRAYS
from vllm_npu_prep.prep.checks import NO_LIMITS
from vllm_npu_prep.prep.mask import MaskForm, MaskKind, build_mask
from vllm_npu_prep.prep.oracle import OracleRequest
from vllm_npu_prep.prep.padding import GraphMode
from vllm_npu_prep.records.comparison import (
    NOTHING,
    Difference,
    first_difference,
    oracle_arrays,
    oracle_requests,
)
from vllm_npu_prep.records.contract import (
    GROUP_LEVEL,
    LATENT_LINES,
    STATE_BLOCKS,
    TOKEN_STATES,
    mask_plan,
    state_variables,
)
from vllm_npu_prep.records.record import StepRecord
from vllm_npu_prep.records.settings import LayerGroup

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

    from vllm_npu_prep.device.staging import StagedArrays
    from vllm_npu_prep.prep.batch import PreparedStep

MAX_MASK_ENTRIES = 1 << 24
"""The most entries of a dense mask that are compared; of larger masks only the shape is."""

LATENT_NAMES = {line.name for line in LATENT_LINES}
KINDS = {"local": "virtual requests", "latent": "latent attention", "states": "states"}
"""Kinds of attention whose arrays a message shows whole, and what it calls them."""


class FullCheck(StepCheck):
    """The check of every invariant, across steps."""

    def __init__(self, vocab_size: int, num_slots: list[int], ledger: SlotLedger) -> None:
        super().__init__(vocab_size, num_slots)
        self.limits_in_pass = NO_LIMITS  # it looks at steps as they are launched, not earlier
        self.ledger = ledger
        self._sent: tuple[Any, int, int] | None = None  # buffer, bytes sent, checksum
        self._compressed_mask: np.ndarray | None = None
        self._req_ids: list[str] = []  # ids of the batch's requests, in order

    def follow(self, scheduler_output: "SchedulerOutput") -> None:
        self.ledger.follow(scheduler_output)

    def verify(self, runner: Any, scheduler_output: "SchedulerOutput") -> None:
        step, staged = runner.in_flight.step, runner.in_flight.staged
        self._check_staging(runner.preparer.staging, step.nbytes)
        super().verify(runner, scheduler_output)
        if not step.num_reqs:  # a dummy run, all of it padding
            return
        num_kept: dict[str, int] = {}
        if runner.use_async_spec_decode:
            num_kept = dict(zip(self._req_ids, runner.num_valid_tokens.read().tolist()))
        self._req_ids = list(runner.input_batch.req_ids)
        self._check_scheduled(step, scheduler_output)
        input_ids = staged.device.input_ids.cpu().numpy()[: step.total_num_scheduled_tokens]
        if step.shape.pcp:
            input_ids = self._ids_of_all_ranks(runner, step, staged)
        self._check_samples(runner, step, input_ids)
        self.ledger.verify(step, self._req_ids, input_ids, num_kept)
        self._check_oracle(step, recorded_groups(runner.preparer.builders), input_ids, runner)
        self._check_device(step, staged)
        self.check_layers(runner, step, runner.in_flight.metadata)

    def verify_watched(
        self,
        step: "PreparedStep",
        req_ids: list[str],
        scheduler_output: "SchedulerOutput",
        groups: tuple[LayerGroup, ...],
        num_kept: Mapping[str, int],
    ) -> None:
        """Check a step of another runner, whose arrays are those that its device has.

        Parameters
        ----------
        step
            Has the runner's own arrays in place of what the core prepared.
        req_ids
            The requests, in the order of the batch.
        groups
            What layers see of a step.
        num_kept
            See `SlotLedger.verify`.
        """
        self.ledger.check_tables(step, req_ids)  # before slots are held against them
        self.check_rules(step, req_ids)
        self._req_ids = req_ids
        self._check_scheduled(step, scheduler_output)
        self.ledger.verify(step, req_ids, step.input_ids, num_kept)
        self._check_oracle(step, groups, step.input_ids)

    def _check_scheduled(self, step: "PreparedStep", scheduler_output: "SchedulerOutput") -> None:
        for row, req_id in enumerate(self._req_ids):
            told = scheduler_output.num_scheduled_tokens.get(req_id)
            expect("scheduled tokens", int(step.query_lens[row]), told, request=req_id)

    def _check_staging(self, staging: Any, nbytes: int) -> None:
        """Check that the last step's staging buffer is unchanged; its copy may still be running."""
        if self._sent is not None and self._sent[0] is not staging.buffers[staging.turn]:
            buffer, sent_bytes, checksum = self._sent
            if zlib.crc32(buffer.host_np[:sent_bytes]) != checksum:
                raise given_allowed(
                    "staging",
                    "a staging buffer must not change before it is used again",
                    "other bytes",
                    f"the {sent_bytes} bytes that were sent",
                )
        buffer = staging.buffers[staging.turn]
        self._sent = buffer, nbytes, zlib.crc32(buffer.host_np[:nbytes])

    @staticmethod
    def _ids_of_all_ranks(runner: Any, step: "PreparedStep", staged: "StagedArrays") -> np.ndarray:
        """Return the token ids of a step: this rank's as they are on its device.

        Samples of the last step are on the device of the rank that computes their request; those
        for other ranks are taken from the samples themselves, which all ranks have.
        """
        input_ids = staged.np.input_ids[: step.total_num_scheduled_tokens].copy()
        if step.batch.num_sampled_rows:
            sampled = runner.input_batch.prev_sampled_token_ids[:, 0].cpu().numpy()
            rows = step.batch.previous_rows[: step.num_reqs]
            input_ids[step.cu_num_tokens[rows >= 0] - 1] = sampled[rows[rows >= 0]]
        places = step.gathered_places() - step.shape.pcp.rank * step.num_rank_tokens
        is_own = (places >= 0) & (places < step.num_rank_tokens)
        input_ids[is_own] = staged.device.pcp_input_ids.cpu().numpy()[places[is_own]]
        return input_ids

    def _check_samples(self, runner: Any, step: "PreparedStep", input_ids: np.ndarray) -> None:
        """Check that samples still on the device went to their own requests."""
        batch = runner.input_batch
        if not step.batch.num_sampled_rows:
            return
        sampled = batch.prev_sampled_token_ids[:, 0].cpu().numpy()
        of_last_step = batch.prev_req_id_to_index or {}
        for row, req_id in enumerate(batch.req_ids):
            last = of_last_step.get(req_id, -1)
            given = int(step.batch.previous_rows[row])
            expect("row of the last step's sample", given, last, request=req_id)
            if last >= 0:
                token = int(step.query_start_loc[row + 1]) - 1
                token -= int(step.batch.num_draft_tokens[row])
                where = {"request": req_id, "token": token}
                expect("last step's sample", int(input_ids[token]), int(sampled[last]), **where)
                drafts = input_ids[token + 1 : int(step.query_start_loc[row + 1])].tolist()
                if drafts:
                    made = runner._draft_token_ids[last, : len(drafts)].clamp(min=0).tolist()
                    expect("last step's drafts", drafts, made, **where)

    def _check_oracle(
        self,
        step: "PreparedStep",
        groups: tuple[LayerGroup, ...],
        input_ids: np.ndarray,
        runner: Any = None,  # whose requests have the M-RoPE positions, where there are any
    ) -> None:
        record = self._record(step, groups)
        record.prepared["input_ids"] = input_ids  # the last step's samples are on the device only
        requests = partial(self._oracle_requests, runner, record)
        for layers, expected in oracle_arrays(record, requests, sys.maxsize):
            if step.batch.takes_embeds:  # embedded tokens have no ids
                for name in ("input_ids", "input_ids_padded"):
                    expected.pop(name, None)
            found = first_difference(record, expected, "oracle")
            if found is not None:
                raise self._differs(step, record, layers, expected, found)
        known = step.batch.tables.num_tokens[step.request_rows]
        discard, right = step.arrays.discard_request_mask[: step.num_reqs], step.seq_lens < known
        for row in np.flatnonzero(discard != right)[:1].tolist():
            raise given_allowed(
                "discard_request_mask",
                f"discard_request_mask[{row}] is the oracle's",
                bool(discard[row]),
                bool(right[row]),
                request=self._req_ids[row],
            )

    def _record(self, step: "PreparedStep", groups: tuple[LayerGroup, ...]) -> StepRecord:
        """Return the step as a record, in which a request is named by its row."""
        names = list(map(str, range(step.num_reqs)))
        blocks = step.batch.tables.device_block_table_flat()
        # Masks are compared where layers get them
        recorded = Recorded(groups, MaskForm.COMPRESSED, 1)
        return StepSnapshot.of_step(0, step, "", names).record(recorded, names, blocks)

    def _oracle_requests(self, runner: Any, record: StepRecord, group: int) -> list[OracleRequest]:
        """Return the requests with the prompts and blocks that the scheduler told of."""
        told = [self.ledger.requests[req_id] for req_id in self._req_ids]
        has_table = group < len(record.settings.block_sizes)
        owned = [request.blocks[group] for request in told] if has_table else None
        found = []
        for row, request in enumerate(oracle_requests(record, group, owned)):
            mrope: dict[str, Any] = {}
            if record.settings.mrope_dims:
                state = runner.requests[self._req_ids[row]]
                positions = state.mrope_positions
                mrope["mrope_positions"] = () if positions is None else positions.tolist()
                mrope["mrope_position_delta"] = state.mrope_position_delta or 0
            found.append(replace(request, num_prompt_tokens=len(told[row].prompt), **mrope))
        return found

    def _differs(
        self,
        step: "PreparedStep",
        record: StepRecord,
        layers: LayerGroup,
        oracle: dict[str, np.ndarray],
        found: Difference,
    ) -> StepCheckError:
        variable = found.variable
        name = variable if variable in oracle else variable.removesuffix(".shape")
        base = name.rpartition(".")[2].removesuffix("_padded")
        is_shape, is_padded = name != variable, name.endswith("_padded")
        kind = ""
        if "local_requests." in name:
            kind = "local"
        elif layers.holds_states and base not in GROUP_LEVEL:
            kind = "states"
        elif name.startswith("latent.") or base in LATENT_NAMES:
            kind = "latent"
        group = None
        if kind in ("local", "states") or base in GROUP_LEVEL or "attn_mask." in name:
            group = layers.group
        if kind and found.recorded != NOTHING:
            pair = [record.prepared[name], oracle[name]]
            if base == TOKEN_STATES:
                index = step.shape.states.groups.index(layers.group)
                pair = [array[index] for array in pair]
            if is_padded:
                pair = [array[..., : getattr(step, base).shape[-1]] for array in pair]
            text = f"{base} of {KINDS[kind]} are the oracle's"
            given, allowed = (array.tolist() for array in pair)
            return given_allowed(f"{kind} {base}", text, given, allowed, group=group)
        if name == "attn_state":
            return given_allowed("state", "state as prepared", found.recorded, found.expected)
        if is_shape:
            rule = f"length of {base}"
            lengths = found.recorded[-1], found.expected[-1]
            return given_allowed(rule, f"{rule} as prepared", *lengths, group=group)
        place = "".join(f"[{index}]" for index in found.index)
        return given_allowed(
            base,
            f"{base}{place} is the oracle's",
            found.recorded,
            found.expected,
            request=None if found.req_id is None else self._req_ids[int(found.req_id)],
            token=found.token,
            group=group,
        )

    def _check_device(self, step: "PreparedStep", staged: "StagedArrays") -> None:
        for name, line in STEP_ARRAYS.items():
            if line.sampled and step.batch.num_sampled_rows:
                continue  # the device fills in the last step's samples
            given, expected = getattr(staged.device, name).cpu().numpy(), getattr(staged.np, name)
            if line.by_group:
                for group, rows in enumerate(zip(given, expected)):
                    self._expect_copy(name, *rows, group)
            else:
                self._expect_copy(name, given, expected)

    @staticmethod
    def _expect_copy(
        name: str, given: np.ndarray, expected: np.ndarray, group: int | None = None
    ) -> None:
        for place in np.argwhere(given != expected)[:1]:
            index = tuple(place.tolist())
            raise given_allowed(
                "device",
                f"{name}{list(index)} on the device is the host's",
                given[index],
                expected[index],
                group=group,
            )

    def check_layers(self, runner: Any, step: "PreparedStep", seen: dict[str, Any]) -> None:
        """Check the step's data in the model's layers: state, mask, lists and tables.

        Parameters
        ----------
        seen
            `AscendMetadata` of each layer, by its name.

        Raises
        ------
        StepCheckError
            Names what differs from the step.
        """
        self._req_ids = list(runner.input_batch.req_ids)
        named = sorted(name for _, _, names in runner.preparer.builders for name in names)
        expect("layers", sorted(seen), named)
        for group, builder, layer_names in runner.preparer.builders:
            for metadata in {id(seen[name]): seen[name] for name in layer_names}.values():
                where: dict[str, Any] = {"group": group}
                if builder.holds_states:
                    self._check_state_layers(step, metadata, group)
                    continue
                expect("state of layers", metadata.attn_state.name, step.attn_state.name, **where)
                self._check_mask(step, builder, metadata, group)
                self._check_lists(step, builder, metadata, group)
                self._check_tables(step, builder, metadata, group)

    def _check_state_layers(self, step: "PreparedStep", metadata: Any, group: int) -> None:
        num_reqs, own = len(metadata.state_indices), state_variables(step, group)
        padding = [0] * (num_reqs - step.num_reqs)
        names: dict[str, list[Any]] = dict.fromkeys(STATE_BLOCKS, padding)
        names["has_initial_state"] = [False] * len(padding)
        if step.shape.states.num_drafts:
            names["num_accepted_tokens"] = [1] * len(padding)
        for name, rest in names.items():
            rule = "accepted tokens" if name == "num_accepted_tokens" else name
            given, allowed = getattr(metadata, name).tolist(), own[name].tolist() + rest
            expect(f"{rule} of layers", given, allowed, group=group)
        if step.shape.states.num_drafts:
            blocks, tokens = own[TOKEN_STATES].tolist(), metadata.token_state_indices.tolist()
            blocks += [0] * (len(tokens) - len(blocks))
            expect("states of tokens", tokens, blocks[: len(tokens)], group=group)
        is_full = step.padding.mode is GraphMode.FULL
        expect("in a full graph", metadata.in_full_graph, is_full, group=group)
        if not is_full:
            expect("decodes", metadata.num_decodes, int(own["num_decodes"]), group=group)

    def _check_mask(self, step: "PreparedStep", builder: Any, metadata: Any, group: int) -> None:
        plan = mask_plan(step, builder.decisions.mask_form, builder)
        mask = metadata.attn_mask
        shape = None if mask is None else tuple(mask.shape)
        expect("mask", shape, plan.shape, group=group)
        if mask is None:
            return
        is_constant = plan.kind is MaskKind.COMPRESSED
        dtype = "torch.int8" if is_constant else str(builder.masks.dtype)
        expect("dtype of the mask", str(mask.dtype), dtype, group=group)
        if mask.numel() > MAX_MASK_ENTRIES:
            return
        if is_constant:
            if self._compressed_mask is None:
                self._compressed_mask = build_mask(plan, step.positions)
            expected = self._compressed_mask
        else:
            expected = build_mask(plan, step.model_positions)
        assert expected is not None
        # The constant has four million entries: compare them all at once.
        if is_constant and np.array_equal(mask.cpu().numpy(), expected):
            return
        for place in np.argwhere((mask != 0).cpu().numpy() != (expected != 0))[:1]:
            row, column = place.tolist()
            raise given_allowed(
                "mask",
                f"row {row}, column {column} of the mask",
                "seen" if expected[row, column] else "masked",
                "masked" if expected[row, column] else "seen",
                group=group,
            )

    def _check_lists(self, step: "PreparedStep", builder: Any, metadata: Any, group: int) -> None:
        """Check that queries, lengths, tables and slots agree, on the host and on the device."""
        starts, lengths = metadata.query_start_loc_np, metadata.seq_lens_np
        is_full = step.padding.mode is GraphMode.FULL
        where: dict[str, Any] = {"group": group}
        rows = [len(starts) - 1, len(lengths), len(metadata.num_computed_tokens)]
        if metadata.block_tables is not None:
            rows.append(len(metadata.block_tables))
        expect("lists of one length", rows, [rows[0]] * len(rows), **where)
        expect("in a full graph", metadata.in_full_graph, is_full, **where)
        on_device = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
        expect("queries on the device", on_device[0], starts.tolist(), **where)
        expect("lengths on the device", on_device[1], lengths.tolist(), **where)
        end = step.num_input_tokens if is_full else step.total_num_scheduled_tokens
        arrays = step.arrays
        if step.shape.pcp:
            end = step.num_rank_tokens if is_full else step.pcp.num_tokens
            own = arrays.pcp_query_start_loc.tolist(), arrays.pcp_seq_lens.tolist()
            expect("queries of layers", starts.tolist(), own[0][: len(starts)], **where)
            expect("lengths of layers", lengths.tolist(), own[1][: len(lengths)], **where)
            expect("rows of layers", metadata.num_reqs, step.pcp.num_rows, **where)
        expect("queries of layers", int(starts[-1]), end, **where)
        if builder.attention_chunk_size is None and not step.shape.pcp:
            expect("queries of layers", starts.tolist(), arrays.query_start_loc.tolist(), **where)
            expect("lengths of layers", lengths.tolist(), arrays.seq_lens.tolist(), **where)
            expect("requests of layers", metadata.num_reqs, step.num_reqs, **where)
        queries = np.diff(starts)
        padding = lengths[metadata.num_reqs :].tolist(), queries[metadata.num_reqs :].tolist()
        expect("padding of layers", *padding, **where)
        longest = int(queries[: metadata.num_reqs].max(initial=0))
        expect("longest query of layers", metadata.max_query_len, longest, **where)
        longest = int(lengths[: metadata.num_reqs].max(initial=0))
        expect("longest sequence of layers", metadata.max_seq_len, longest, **where)
        if metadata.slot_mapping is not None:
            slots = arrays.pcp_slot_mapping if step.shape.pcp else arrays.slot_mapping
            slots = slots[group].tolist()
            expect("slots of layers", metadata.slot_mapping.tolist(), slots, **where)

    def _check_tables(self, step: "PreparedStep", builder: Any, metadata: Any, group: int) -> None:
        """Check that the device's block tables equal the host's for all owned entries."""
        if metadata.block_tables is None:
            return
        entries = metadata.block_tables.cpu().numpy()
        if builder.attention_chunk_size is not None:
            local = step.local_requests(group)
            table = local["block_table"]
            owned = -(-local["seq_lens"] // step.batch.tables.block_sizes[group])
        else:
            request_rows = step.request_rows
            if step.shape.pcp:
                request_rows = request_rows[step.pcp_table_rows]
            table = step.batch.tables.block_table(group)[request_rows]
            owned = step.batch.tables.num_blocks[group, request_rows]
        text = "the device's block table is the host's"
        for row, count in enumerate(owned.tolist()):
            for place in np.flatnonzero(entries[row, :count] != table[row, :count])[:1]:
                given, allowed = f"block {entries[row, place]} at place {place}", table[row, place]
                request = None
                if builder.attention_chunk_size is None and not step.shape.pcp:
                    request = self._req_ids[row]
                if request is None:
                    text = f"{text} (virtual request {row})"
                raise given_allowed(
                    "device block table", text, given, allowed, request=request, group=group
                )
        if metadata.in_full_graph:
            expect("null block of padding", entries[metadata.num_reqs :].any(), False, group=group)
