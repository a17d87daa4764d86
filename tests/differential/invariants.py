"""What must hold of every step that was prepared, whatever prepared it."""

from typing import Any

import numpy as np
import torch

from vllm_npu_prep.config import decisions_of
from vllm_npu_prep.prep.mask import MaskKind, build_mask, plan_mask
from vllm_npu_prep.prep.oracle import OracleRequest, oracle_step
from vllm_npu_prep.prep.padding import GraphMode

CACHES_EVERY = 25
"""Steps between two comparisons of the whole KV caches."""

MASKS_READ = 0.1
"""Share of the steps whose masks are compared entry by entry."""


class BrokenInvariantError(AssertionError):
    """A prepared step that no device may see."""


def hold(condition: Any, what: str, *values: Any) -> None:
    if not condition:
        raise BrokenInvariantError(f"{what}: {', '.join(map(repr, values))}")


class Invariants:
    """Checks our runner's last step against the scheduler's books and against the scalar oracle."""

    def __init__(self, pair: Any, scheduler: Any, seed: int) -> None:
        self.pair, self.runner, self.scheduler = pair, pair.ours, scheduler
        self.rng = np.random.default_rng(seed)

    def check(self, output: Any) -> None:
        """Everything about the step that has just run.

        Raises
        ------
        BrokenInvariantError
            Names what is broken and the values that break it.
        """
        step = self.runner.last_step
        arrays, total = step.arrays, step.total_num_scheduled_tokens
        starts = arrays.query_start_loc
        hold(starts[0] == 0 and (np.diff(starts) >= 0).all(), "query_start_loc rises", starts)
        hold(starts[step.num_reqs] == total, "real requests end at the tokens", starts, total)
        if step.padding.mode is GraphMode.FULL:
            hold(starts[-1] == step.num_input_tokens, "a full graph ends at its size", starts)
        hold((step.seq_lens >= step.query_lens).all(), "sequences hold their queries")
        hold((step.positions < self.runner.max_model_len).all(), "positions below max_model_len")
        ids = self.pair.watched[self.runner].seen.get("input_ids")
        if ids is not None:
            vocab = self.runner.model_config.get_vocab_size()
            hold(all(0 <= token < vocab for token in ids), "token ids of the vocabulary", ids)
        self._check_slots(step, output)
        self._check_oracle(step)
        self.check_layers(step)
        if self.pair.steps % CACHES_EVERY == 0:
            self.caches_agree()

    def _check_slots(self, step: Any, output: Any) -> None:
        """Slots are distinct, in blocks of their request, and what others have read stays."""
        total, writers = step.total_num_scheduled_tokens, {}  # request by block
        req_ids, manager = self.runner.input_batch.req_ids, self.scheduler.kv_cache_manager
        for group in range(self.runner._num_groups):
            slots, padding = step.slot_mapping(group), step.arrays.slot_mapping[group]
            hold((padding[total:] == -1).all(), "slots of padding", padding[total:])
            hold(len(np.unique(slots)) == total, "slots are distinct", slots)
            block_size = int(step.batch.tables.block_sizes[group])
            hold((slots >= block_size).all(), "no slot of the null block", slots)
            for row, req_id in enumerate(req_ids):
                written = set((slots[step.req_indices == row] // block_size).tolist())
                owned = set(manager.get_block_ids(req_id)[group])
                hold(written <= owned, "slots in blocks of their request", req_id, written, owned)
                twice = written & writers.keys()
                hold(not twice, "a block has one writer in one group", req_id, twice)
                writers |= dict.fromkeys(written, req_id)
        self.check_owners(output, writers)

    def check_owners(self, output: Any, writers: dict[int, str]) -> None:
        """A block of two running requests is a cached one, which nobody writes.

        The scheduler calls a block cached once its tokens are scheduled: what a request writes,
        those may share that begin in this very step.
        """
        manager = self.scheduler.kv_cache_manager
        begin = {new.req_id for new in output.scheduled_new_reqs}
        begin |= output.scheduled_cached_reqs.resumed_req_ids
        owners: dict[int, list[str]] = {}
        for request in self.scheduler.running:
            for block_ids in manager.get_block_ids(request.request_id):
                for block in filter(None, block_ids):  # 0 is the null block
                    owners.setdefault(block, []).append(request.request_id)
        for block, req_ids in owners.items():
            if len(req_ids) > 1:
                hold(len(set(req_ids)) == len(req_ids), "blocks stand once", block, req_ids)
                cached = manager.block_pool.blocks[block].block_hash is not None
                hold(cached, "shared blocks are cached", block, req_ids)
                if block in writers:
                    others = set(req_ids) - begin - {writers[block]}
                    hold(not others, "shared blocks are not written", block, writers[block], others)

    def check_layers(self, step: Any) -> None:
        """What the model's layers were given of the step: the state, the mask, the lists."""
        groups = self.runner.kv_cache_config.kv_cache_groups
        seen = self.pair.watched[self.runner].attn_metadata
        names = sorted(name for group in groups for name in group.layer_names)
        hold(sorted(seen) == names, "every layer has its metadata", sorted(seen))
        compare = self.rng.random() < MASKS_READ
        for index, group in enumerate(groups):
            of_group = {id(seen[name]): seen[name] for name in group.layer_names}
            for metadata in of_group.values():
                metadata = getattr(metadata, "step", metadata)  # MLA's wraps it
                hold(metadata.attn_state is step.attn_state, "state", metadata.attn_state)
                self._check_mask(step, metadata, compare)
                self._check_lists(step, metadata, index)

    def _check_mask(self, step: Any, metadata: Any, compare: bool) -> None:
        """The mask's kind, shape and dtype; all of it if it is to be compared."""
        plan = plan_mask(
            step.attn_state,
            decisions_of(self.runner.vllm_config).mask_form,
            step.num_input_tokens,
            int(step.seq_lens.max()),
            sliding_window=metadata.sliding_window,
        )
        mask = metadata.attn_mask
        hold((mask is None) == (plan.kind is MaskKind.NONE), "a mask where one is due", plan)
        if mask is not None:
            dtype = torch.int8 if plan.kind is MaskKind.COMPRESSED else torch.bool
            hold(tuple(mask.shape) == plan.shape, "shape of the mask", mask.shape, plan)
            hold(mask.dtype == dtype, "dtype of the mask", mask.dtype, plan)
            if compare:
                expected = build_mask(plan, step.positions)
                hold(np.array_equal(mask.cpu().numpy(), expected), "entries of the mask", plan)

    def _check_lists(self, step: Any, metadata: Any, group: int) -> None:
        """Queries, lengths, tables and slots fit together, on the host and on the device."""
        starts, lengths = metadata.query_start_loc_np, metadata.seq_lens_np
        tables, full = metadata.block_tables, step.padding.mode is GraphMode.FULL
        rows = {len(starts) - 1, len(lengths), len(tables), len(metadata.num_computed_tokens)}
        hold(rows == {step.padding.num_reqs_padded}, "lists of one length", rows)
        hold(metadata.in_full_graph == full, "in a full graph", step.padding)
        hold(metadata.query_start_loc.tolist() == starts.tolist(), "queries on the device")
        hold(metadata.seq_lens.tolist() == lengths.tolist(), "lengths on the device")
        end = step.num_input_tokens if full else step.total_num_scheduled_tokens
        hold(starts[0] == 0 and (np.diff(starts) >= 0).all(), "queries of layers rise", starts)
        hold(starts[-1] == end, "queries of layers end at their tokens", starts, end)
        hold((lengths[: step.num_reqs] == step.seq_lens).all(), "lengths of layers", lengths)
        hold((lengths[step.num_reqs :] == 0).all(), "padding has no length", lengths)
        queries = np.diff(starts[: step.num_reqs + 1])
        hold(metadata.max_query_len >= queries.max(), "longest query", metadata.max_query_len)
        hold(metadata.max_seq_len >= lengths.max(), "longest sequence", metadata.max_seq_len)
        hold(metadata.num_reqs == step.num_reqs, "requests of layers", metadata.num_reqs)
        slots = metadata.slot_mapping
        hold(slots.tolist() == step.arrays.slot_mapping[group].tolist(), "slots of layers", slots)
        block_size = int(step.batch.tables.block_sizes[group])
        for row, req_id in enumerate(self.runner.input_batch.req_ids):
            owned = self.scheduler.kv_cache_manager.get_block_ids(req_id)[group]
            needed = -(-int(lengths[row]) // block_size)
            table = tables[row, :needed].tolist()
            # A block that a window has left behind is nobody's, and the table may still name it.
            same = all(block in (mine, 0) for mine, block in zip(table, owned))
            hold(same and needed <= len(owned), "table of a request", req_id, table, owned)

    def _check_oracle(self, step: Any) -> None:
        """State, sizes and slots once more, token by token."""
        batch, tables = self.runner.input_batch, step.batch.tables
        drafts = step.batch.num_draft_tokens
        seen = self.pair.watched[self.runner].seen
        ids = iter(seen.get("input_ids") or step.input_ids.tolist())
        requests = []
        for row, req_id in enumerate(batch.req_ids):
            computed, scheduled = int(step.num_computed_tokens[row]), int(step.query_lens[row])
            tokens = [0] * computed + [next(ids) for _ in range(scheduled)]
            count = int(drafts[row])
            requests.append(
                OracleRequest(
                    num_computed_tokens=computed,
                    num_scheduled_tokens=scheduled,
                    num_prompt_tokens=self.runner.requests[req_id].num_prompt_tokens,
                    token_ids=tokens[: len(tokens) - count],
                    block_ids=self.runner.requests[req_id].block_ids[0],
                    num_draft_tokens=count,
                    draft_token_ids=tokens[len(tokens) - count :],
                    **self._mrope_of(req_id),
                )
            )
        expected = oracle_step(
            requests,
            block_size=int(tables.block_sizes[0]),
            max_model_len=self.runner.max_model_len,
            mask="compressed",
            chunked_prefill=tables.chunked_prefill,
            mrope_dims=self.runner.mrope_dims,
        )
        if self.runner.mrope_dims:
            rows = step.mrope_positions.tolist()
            hold(rows == expected["mrope_positions"], "mrope_positions as the oracle's", rows)
        for name in ("positions", "query_start_loc", "seq_lens", "logits_indices", "query_lens"):
            hold(getattr(step, name).tolist() == expected[name], f"{name} as the oracle's")
        hold(step.slot_mapping().tolist() == expected["slot_mapping"], "slots as the oracle's")
        hold(step.max_seq_len == expected["max_seq_len"], "max_seq_len", step.max_seq_len)
        if step.padding.mode is not GraphMode.FULL:
            state = step.attn_state.name
            hold(state == expected["attn_state"], "state", state, expected["attn_state"])

    def _mrope_of(self, req_id: str) -> dict[str, Any]:
        """What upstream worked out for a request by the model's own rule."""
        request = self.runner.requests[req_id]
        if request.mrope_positions is None:
            return {}
        return {
            "mrope_positions": request.mrope_positions.tolist(),
            "mrope_position_delta": request.mrope_position_delta,
        }

    def caches_agree(self) -> None:
        """Both runners' caches hold the same: nothing was written but by a step's own tokens."""
        ours, theirs = (self.pair.caches[each] for each in (self.runner, self.pair.upstream))
        for name, cache in ours.items():
            hold(torch.allclose(cache, theirs[name], atol=1e-4), "KV caches agree", name)
