"""Random batches for property tests, and the same batch for the core and for the oracle."""

import dataclasses
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from vllm_npu_prep.prep.batch import PreparedStep, StepBatch, prepare_step
from vllm_npu_prep.prep.latent_split import LatentSplit
from vllm_npu_prep.prep.layout import StepLayout
from vllm_npu_prep.prep.local_attention import LocalGroups
from vllm_npu_prep.prep.oracle import OracleRequest
from vllm_npu_prep.prep.padding import (
    GraphMode,
    Padding,
    full_graph_padding,
    no_padding,
    uniform_query_len,
)
from vllm_npu_prep.prep.recurrent_states import RecurrentGroups
from vllm_npu_prep.prep.shape import EngineShape
from vllm_npu_prep.prep.tables import BatchTables, device_has_all

LOCAL_GROUPS = (0, 2)
"""Groups with chunks; the one between them has none, and the first one's blocks."""


@dataclass(frozen=True)
class RandomBatch:
    requests: list[OracleRequest]
    block_size: int
    max_model_len: int
    capture_sizes: list[int] | None
    sliding_window: int | None
    chunked_prefill: bool

    def step(self) -> PreparedStep:
        """Prepared by the pure core."""
        # Of an engine that speculates, whether this batch has drafts or not.
        return padded_step(self.batch(), self)

    def batch(self, extra_columns: int = 3) -> StepBatch:
        """Not prepared yet."""
        sizes = self.block_size, self.max_model_len, self.chunked_prefill, extra_columns
        return step_batch(self.requests, *sizes)

    def settings(self) -> dict:
        """Keyword arguments of the oracle."""
        return {
            "block_size": self.block_size,
            "max_model_len": self.max_model_len,
            "capture_sizes": self.capture_sizes,
            "sliding_window": self.sliding_window,
            "chunked_prefill": self.chunked_prefill,
        }


def step_batch(
    requests: list[OracleRequest],
    block_size: int,
    max_model_len: int,
    chunked_prefill: bool = True,
    extra_columns: int = 3,
) -> StepBatch:
    """Tables as vLLM keeps them: rows to spare, block-table rows wider than the logical ones."""
    columns = -(-max_model_len // block_size) + extra_columns
    rows = len(requests) + 2
    token_ids = np.full((rows, max_model_len), -7, np.int32)  # what must never be read
    block_table = np.zeros((rows, columns), np.int32)
    for row, request in enumerate(requests):
        tokens = [*request.token_ids, *request.draft_token_ids]
        token_ids[row, : len(tokens)] = tokens
        block_table[row, : len(request.block_ids)] = request.block_ids

    def column(values) -> np.ndarray:
        return np.array(list(values), np.int32)

    def rows_of(values) -> np.ndarray:
        return np.pad(column(values), (0, rows - len(requests)), constant_values=-7)

    most_drafts = max((request.num_draft_tokens for request in requests), default=0)
    tables = BatchTables(
        num_computed_tokens=rows_of(r.num_computed_tokens for r in requests),
        num_prompt_tokens=rows_of(r.num_prompt_tokens for r in requests),
        num_tokens=rows_of(len(r.token_ids) for r in requests),
        token_ids=token_ids,
        block_sizes=np.array([block_size], np.int32),
        shape=EngineShape(max_logits_per_req=1 + most_drafts),
        chunked_prefill=chunked_prefill,
        **device_has_all([block_table]),
    )
    return StepBatch(
        tables,
        num_scheduled_tokens=column(r.num_scheduled_tokens for r in requests),
        num_draft_tokens=column(r.num_draft_tokens for r in requests),
        total_num_scheduled_tokens=sum(r.num_scheduled_tokens for r in requests),
    )


def decodes(count: int, drafts: int = 0) -> list[OracleRequest]:
    """Requests of two blocks of 4 tokens each, of which 5 are computed; some verify drafts."""
    return [
        OracleRequest(
            num_computed_tokens=5,
            num_scheduled_tokens=1 + drafts,
            num_prompt_tokens=3,
            token_ids=list(range(6)),
            block_ids=[2 * index + 1, 2 * index + 2],
            num_draft_tokens=drafts,
            draft_token_ids=list(range(drafts)),
        )
        for index in range(count)
    ]


def at_slots(batch: StepBatch, slots: list[int]) -> StepBatch:
    """The same batch with each request's row at its slot, as vLLM's V2 runner keeps them.

    All block ids are still to be sent.
    """
    tables, count = batch.tables, len(slots)
    names = ("num_computed_tokens", "num_prompt_tokens", "num_tokens", "token_ids")
    moved = {name: np.full_like(getattr(tables, name), -9) for name in names}
    for name, array in moved.items():
        array[slots] = getattr(tables, name)[:count]
    num_groups = tables.shape.num_groups
    block_tables = [np.full_like(tables.block_table(g), -9) for g in range(num_groups)]
    sizes = np.zeros((num_groups, len(tables.token_ids)), np.int32)
    for group, rows in enumerate(block_tables):
        of_batch = tables.block_table(group)[:count]
        rows[slots] = of_batch
        sizes[group, slots] = (of_batch > 0).sum(axis=1)
    order = np.zeros(len(tables.token_ids), np.int32)
    order[:count] = slots
    none = {name: np.zeros_like(sizes) for name in ("num_synced_blocks", "num_device_blocks")}
    moved |= device_has_all(block_tables) | none | {"num_blocks": sizes, "request_rows": order}
    return dataclasses.replace(batch, tables=dataclasses.replace(tables, **moved))


def padded_step(step: StepBatch, batch: RandomBatch, padded: bool = True) -> PreparedStep:
    """Prepare a step as a full graph of the batch's capture sizes pads it, if it has some."""
    tokens, reqs = step.total_num_scheduled_tokens, step.num_reqs
    padding = no_padding(tokens, reqs)
    if padded and batch.capture_sizes is not None:
        uniform = uniform_query_len(step.num_scheduled_tokens, step.num_draft_tokens)
        sizes = tokens, reqs, uniform, batch.capture_sizes, batch.max_model_len
        padding = full_graph_padding(*sizes)
    shape = dataclasses.replace(step.tables.shape, max_logits_per_req=4)
    layout = StepLayout(padding.num_input_tokens, padding.num_reqs_padded, shape)
    return prepare_step(step, padding, layout)


def local_step(batch: RandomBatch, blocks_per_chunk: int) -> PreparedStep:
    """The step of an engine with three groups; ids of the last are those of the first plus 1000."""
    local = LocalGroups(batch.block_size * blocks_per_chunk, blocks_per_chunk, LOCAL_GROUPS)
    step = batch.batch(extra_columns=0)
    table = step.tables.block_table(0)
    table = np.pad(table, ((0, 0), (0, -table.shape[1] % blocks_per_chunk)))
    tables = [
        table,
        np.pad(table, ((0, 0), (0, blocks_per_chunk))),
        table + np.int32(1000) * (table > 0),
    ]
    step.tables = dataclasses.replace(
        step.tables,
        block_sizes=np.full(3, batch.block_size, np.int32),
        shape=EngineShape(3, local=local),
        **device_has_all(tables),
    )
    return padded_step(step, batch)


def latent_step(
    batch: RandomBatch, decode_threshold: int, workspace_blocks: int
) -> tuple[PreparedStep, LatentSplit]:
    """The step of an engine with latent attention, whose batch has decodes first."""
    step = batch.batch()
    workspace = workspace_blocks * batch.block_size
    split = LatentSplit(decode_threshold, workspace, batch.block_size, batch.max_model_len)
    step.tables = dataclasses.replace(step.tables, shape=EngineShape(latent=split))
    return padded_step(step, batch, padded=False), split


STATE_GROUPS = (0, 2)
"""Groups with states; attention's is between them."""


def state_step(batch: RandomBatch, decode_threshold: int, keeps_states: bool) -> PreparedStep:
    """The step of an engine with states of two groups; ids of the last are the first's plus 1000.

    `keeps_states`: a state for every block, as with the prefix cache, instead of one.
    """
    step = batch.batch()
    table = step.tables.block_table(0)
    of_states = table if keeps_states else table[:, :1].copy()
    size = batch.block_size if keeps_states else batch.max_model_len
    step.tables = dataclasses.replace(
        step.tables,
        block_sizes=np.array([size, batch.block_size, size], np.int32),
        shape=EngineShape(3, states=RecurrentGroups(STATE_GROUPS, decode_threshold)),
        **device_has_all([of_states, table, of_states + np.int32(1000) * (of_states > 0)]),
    )
    return padded_step(step, batch)


def drafts_step(
    requests: list[OracleRequest], max_model_len: int, num_drafts: int, state_size: int = 0
) -> PreparedStep:
    """The step of an engine with states of two groups and speculation, as `state_step` makes it.

    `state_size`: tokens of a state, as with the prefix cache; 0: a request has one.
    """
    states = RecurrentGroups(STATE_GROUPS, 1 + num_drafts, num_drafts)
    shape = EngineShape(3, max_logits_per_req=1 + num_drafts, states=states)
    few = [dataclasses.replace(r, block_ids=r.block_ids[: 1 + num_drafts]) for r in requests]
    step = step_batch(few, 16, max_model_len, True)
    width = 1 + num_drafts if not state_size else len(requests[0].block_ids)
    of_states = np.zeros((len(step.tables.token_ids), width), np.int32)
    of_states[: len(requests)] = [request.block_ids[:width] for request in requests]
    size = state_size or max_model_len
    table = np.zeros((len(of_states), -(-max_model_len // 16)), np.int32)
    table[:] = 1 + np.arange(table.size, dtype=np.int32).reshape(table.shape)
    step.num_accepted_tokens = np.array([r.num_accepted_tokens for r in requests], np.int32)
    step.tables = dataclasses.replace(
        step.tables,
        block_sizes=np.array([size, 16, size], np.int32),
        shape=shape,
        **device_has_all([of_states, table, of_states + np.int32(1000)]),
    )
    sizes = step.total_num_scheduled_tokens + 3, step.num_reqs + 2
    return prepare_step(step, Padding(*sizes, mode=GraphMode.PIECEWISE))


@st.composite
def random_batches(draw) -> RandomBatch:
    """Any batch that a scheduler can make, and many shapes of it in particular."""
    block_size = draw(st.sampled_from([1, 2, 3, 4, 7, 16, 128]))
    max_model_len = draw(st.integers(min_value=8, max_value=300))
    shape = draw(st.sampled_from(["any", "fresh", "decode", "verify", "ragged drafts", "prompt"]))
    num_reqs = draw(st.integers(min_value=1, max_value=12))
    kinds = draw(st.lists(st.integers(0, 2**31 - 1), min_size=num_reqs, max_size=num_reqs))
    drafts_of_all = draw(st.integers(1, 3))
    requests = []
    for kind in kinds:
        rng = np.random.default_rng(kind)
        drafts = 0
        if shape == "fresh":
            computed, scheduled = 0, int(rng.integers(1, min(60, max_model_len) + 1))
        elif shape == "decode":
            computed, scheduled = int(rng.integers(1, max_model_len)), 1
        elif shape in ("verify", "ragged drafts"):
            drafts = drafts_of_all if shape == "verify" else int(rng.integers(0, 4))
            computed = int(rng.integers(1, max_model_len - drafts))
            scheduled = 1 + drafts
        else:
            computed = int(rng.integers(0, max_model_len - 1)) * int(rng.random() < 0.7)
            scheduled = int(rng.integers(1, min(60, max_model_len - computed) + 1))
        known = computed + scheduled - drafts
        if shape == "prompt":
            prompt = int(rng.integers(computed + 1, max_model_len + 1))
        else:
            prompt = int(rng.integers(1, known + 1))
        num_tokens = max(known, prompt if not drafts else 0)
        draft_token_ids = rng.integers(0, 150_000, drafts)
        draft_token_ids[rng.random(drafts) < 0.1] = -1  # a place for a draft that nobody made
        prompt = min(prompt, num_tokens)
        requests.append(
            {
                "num_computed_tokens": computed,
                "num_scheduled_tokens": scheduled,
                "num_prompt_tokens": prompt,
                "token_ids": rng.integers(0, 150_000, num_tokens).tolist(),
                "num_draft_tokens": drafts,
                "draft_token_ids": draft_token_ids.tolist(),
            }
        )
    # Blocks of all requests come from one shuffled pool: no order to rely on.
    needed = [
        -(-(r["num_computed_tokens"] + r["num_scheduled_tokens"]) // block_size) for r in requests
    ]
    pool = np.random.default_rng(kinds[0]).permutation(np.arange(1, sum(needed) + 1)).tolist()
    requests = [
        OracleRequest(**r, block_ids=[pool.pop() for _ in range(n)])
        for r, n in zip(requests, needed)
    ]
    sizes = draw(
        st.none()
        | st.lists(st.integers(1, 256), min_size=1, max_size=4)
        | st.just([1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128])
    )
    window = draw(st.none() | st.integers(1, 40))
    return RandomBatch(requests, block_size, max_model_len, sizes, window, draw(st.booleans()))
