"""Sparse attention: which positions an indexer chooses, and attention over chosen positions.

Both operators get lengths and blocks as tensors of the device, so a captured graph reads those of
its replay. Choices are compared as sets, by their scores: of nearly equal scores, any may be
chosen.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from vllm_npu_prep.aclnn import first_release, missing_functions
from vllm_npu_prep.attention.kernels.latent import LatentShape, Planes
from vllm_npu_prep.attention.kernels.sparse import IndexShape
from vllm_npu_prep.attention.kernels.sparse_fia import SparseFiaKernels
from vllm_npu_prep.attention.metadata import AscendMetadata
from vllm_npu_prep.device import graph_pool
from vllm_npu_prep.graph import GraphCall, make_pool
from vllm_npu_prep.prep.choices import NOTHING, wrong_choice
from vllm_npu_prep.prep.state import AttentionState
from vllm_npu_prep.verify import formulas
from vllm_npu_prep.verify.outcome import NotHereError, Outcome, Verdict, worst_of
from vllm_npu_prep.verify.row import DTYPES, FILLER, Row, RowContext, compare, normal
from vllm_npu_prep.verify.steps import PagedForm, PagedStep
from vllm_npu_prep.wording import counted

INDEX_HEAD, LATENT, ROPE = 128, 512, 64
SCALE = (128 + ROPE) ** -0.5

SCORE_TOLERANCE = 1e-3
"""Scores are computed in float32, of numbers that are not rounded before."""

OUTPUT_TOLERANCE = 0.03
"""Probabilities are rounded between two products."""


class Given(NamedTuple):
    """What a layer gives both operators, on the device; ``N`` heads attend, ``H`` choose."""

    index_query: torch.Tensor  # [T, H, 128]
    weights: torch.Tensor  # [T, H]
    index_keys: torch.Tensor  # [num_blocks, block_size, 1, 128]
    query: torch.Tensor  # [T, N, 512]
    query_rope: torch.Tensor  # [T, N, 64]
    latent: torch.Tensor  # [num_blocks, block_size, 1, 512]
    rope: torch.Tensor  # [num_blocks, block_size, 1, 64]


def choose(given: Given, metadata: AscendMetadata, count: int) -> torch.Tensor:
    """Return the positions that tokens choose, int32 ``[T, count]``."""
    chosen = given.index_query.new_empty(len(given.index_query), count, dtype=torch.int32)
    queries = given.index_query, given.weights, given.index_keys
    SparseFiaKernels().choose(*queries, metadata, chosen)
    return chosen


def attend_chosen(given: Given, metadata: AscendMetadata, chosen: torch.Tensor) -> torch.Tensor:
    """Attend over the latent rows of chosen positions, ``[T, N, 512]``."""
    shape = LatentShape(given.query.shape[1], LATENT, ROPE, 128, 128, SCALE)
    planes = Planes(given.latent, given.rope)
    queries = given.query, given.query_rope
    return SparseFiaKernels().attend_chosen(*queries, planes, chosen, metadata, shape)


@dataclass(frozen=True)
class SparseForm(PagedForm):
    """What a step depends on.

    Behind the padding requests come rows of no request at all.
    """

    lengths: tuple[tuple[int, int], ...]
    count: int  # number of positions that a token chooses at most
    dtype: torch.dtype
    heads: int = 4  # of the indexer, or of attention
    weights_dtype: torch.dtype | None = None  # that of the queries if it is None
    block_size: int = 128
    num_padding: int = 0
    padding_len: int = 1
    num_rows_of_nobody: int = 0

    def __str__(self) -> str:
        padding = f", {counted(self.num_padding, 'padding request')}" * bool(self.num_padding)
        return (
            f"{self.count} of (cached, new) tokens {list(self.lengths)}, {self.heads} heads, "
            f"{str(self.dtype).removeprefix('torch.')}{padding}"
        )


class SparseStep(PagedStep):
    """A step with random queries, keys and latent rows; other rows of the caches are large.

    Attributes
    ----------
    keys, latent, rope
        Lists by request, on the host: ``[seq_len, 128]``, ``[seq_len, 512]``, ``[seq_len, 64]``.
    index_query, weights, query, query_rope
        On the host, as in `Given`.
    given
        The step on the device.
    """

    form: SparseForm

    def __init__(
        self,
        form: SparseForm,
        device: torch.device,
        seed: int = 0,
        num_blocks: int | None = None,
        table_width: int | None = None,
    ) -> None:
        self.form, self.device = form, device
        self._generator = torch.Generator().manual_seed(seed)
        draw = partial(normal, self._generator, dtype=form.dtype)
        self.num_tokens = sum(form.query_lens)
        rows = self.num_tokens + form.num_padding + form.num_rows_of_nobody
        self.index_query = draw(rows, form.heads, INDEX_HEAD)
        weights_dtype = form.weights_dtype or form.dtype
        self.weights = normal(self._generator, rows, form.heads, dtype=weights_dtype)
        # Few of many chosen rows have weight: a plain average of them would be near 0
        self.query = draw(rows, form.heads, LATENT, scale=1.5)
        self.query_rope = draw(rows, form.heads, ROPE)
        self.keys, self.latent, self.rope = (
            [draw(length, size) for length in form.seq_lens] for size in (INDEX_HEAD, LATENT, ROPE)
        )
        self.place_in_blocks(self._generator, num_blocks, table_width)
        self.metadata = self.metadata_with(AttentionState.ChunkedPrefill, None)
        self.given = Given(
            self.put(self.index_query),
            self.put(self.weights),
            self.put(self._plane(self.keys)),
            self.put(self.query),
            self.put(self.query_rope),
            self.put(self._plane(self.latent)),
            self.put(self._plane(self.rope)),
        )

    def _plane(self, rows: list[torch.Tensor]) -> torch.Tensor:
        shape = self.num_blocks, self.form.block_size, 1, rows[0].shape[1]
        plane = torch.full(shape, FILLER, dtype=self.form.dtype)
        slots = self.slots_of([range(length) for length in self.form.seq_lens])
        return formulas.paged_write(plane, torch.cat(rows)[:, None], slots, self.form.block_size)

    def write_keys(self) -> Outcome:
        """Write the step's own index keys to a cache that lacks them, and compare all blocks.

        Padding may be written to the null block.
        """
        form = self.form
        whole, cached = self._plane(self.keys), self._plane(self.keys)
        own = self.slots[: self.num_tokens]
        cached.view(-1, INDEX_HEAD)[own] = FILLER
        plane = self.put(cached)
        keys = torch.cat((self.own_rows(self.keys), torch.ones(form.num_padding, INDEX_HEAD)))
        SparseFiaKernels().write_keys(self.put(keys.to(form.dtype)), plane, self.metadata)
        where = "block", "row", "head", "element"
        return compare(plane[1:], whole[1:], str(form), where=where)

    def _tokens(self) -> Iterator[tuple[int, int]]:
        """Yield each token's request, and how many keys the token sees."""
        for request, (old, new) in enumerate(self.form.lengths):
            for position in range(old, old + new):
                yield request, position + 1

    def check_choice(self, chosen: torch.Tensor) -> Outcome:
        """Compare the scores of what was chosen with the best ones."""
        form, given = self.form, str(self.form)
        shape = len(self.index_query), form.count
        if chosen.shape != shape or chosen.dtype is not torch.int32:
            text = f"{[*chosen.shape]} {chosen.dtype}"
            return Outcome(given, f"{[*shape]} of int32", text, Verdict.DIFFERS)
        rows = chosen.cpu()
        positions = np.array([seen - 1 for _, seen in self._tokens()])
        if (wrong := wrong_choice(rows[: self.num_tokens].numpy(), positions)) is not None:
            at = f"{wrong.rule} at token {wrong.token} of {self.num_tokens}"
            return Outcome(given, f"{wrong.allowed}", f"{wrong.given}, {at}", Verdict.DIFFERS)
        got, expected = [], []
        for token, (request, seen) in enumerate(self._tokens()):
            own = self.index_query[token, None], self.weights[token, None]
            scores = formulas.index_scores(*own, self.keys[request])[0]
            count = min(form.count, seen)
            got.append(scores[rows[token, :count].long()].sort(descending=True).values)
            expected.append(scores[:seen].topk(count).values)
        scores, best = torch.cat(got), torch.cat(expected)
        padding = rows[self.num_tokens : self.num_tokens + form.num_padding]
        of_padding = self.draw_choice()[self.num_tokens :][: form.num_padding]
        outcomes = [
            compare(scores, best, given, tolerance=SCORE_TOLERANCE, where=("score",)),
            compare(padding, of_padding, f"padding of {given}"),
        ]
        return worst_of(outcomes, given)

    def draw_choice(self) -> torch.Tensor:
        """Draw different positions up to each token, on the host; -1 in rows of nobody.

        Padding has chosen all positions of its request.
        """
        chosen = torch.full((len(self.query), self.form.count), NOTHING)
        of_padding = chosen[self.num_tokens :][: self.form.num_padding, : self.form.padding_len]
        of_padding[:] = torch.arange(self.form.padding_len)
        for token, (_, seen) in enumerate(self._tokens()):
            own = torch.randperm(seen, generator=self._generator)[: self.form.count]
            chosen[token, : len(own)] = own
        return chosen.int()

    def check_output(self, output: torch.Tensor, chosen: torch.Tensor) -> Outcome:
        """Compare attention over a choice, which is on the host, with the formula."""
        form, expected = self.form, []
        queries = torch.cat((self.query, self.query_rope), -1)
        for token, (request, _) in enumerate(self._tokens()):
            latent, rope = self.latent[request][:, None], self.rope[request][:, None]
            keys, own = torch.cat((latent, rope), -1), chosen[token]
            seen = torch.zeros(1, len(latent), dtype=torch.bool)
            seen[0, own[own >= 0].long()] = True
            expected.append(formulas.attention(queries[token, None], keys, latent, SCALE, seen)[0])
        of_padding = torch.full((form.num_padding, form.heads, LATENT), FILLER)
        expected.append(of_padding.double())  # what the null block has
        own_rows = output[: self.num_tokens + form.num_padding]
        return compare(own_rows, torch.cat(expected), str(form), tolerance=OUTPUT_TOLERANCE)


LENGTHS = {
    "decode": ((200, 1), (2, 1), (127, 1)),
    "drafts": ((127, 3), (4, 4), (40, 2)),
    "prefill": ((0, 70), (130, 20), (3, 5)),
}
COUNT = 16
"""How many positions a token chooses in most rows, so that it can't choose all."""

MORE_THAN_ALL = ((40, 1), (3, 4), (0, 7))


def forms_of(dtype: torch.dtype, count: int = COUNT) -> dict[str, SparseForm]:
    """Return a form of each kind of step: the choice matters, or has room for all."""
    forms = {name: SparseForm(lengths, count, dtype) for name, lengths in LENGTHS.items()}
    forms["all"] = SparseForm(MORE_THAN_ALL, 2048, dtype)
    forms["padding"] = replace(forms["drafts"], num_padding=2, num_rows_of_nobody=2)
    return forms


def probed_forms(
    shape: LatentShape, index: IndexShape, dtype: torch.dtype, block_size: int
) -> dict[str, Callable[[torch.device], Outcome]]:
    """Return what start-up tries of an engine's layers, by what it is: decodes and chunks, in which
    tokens choose some of their positions, or all."""
    most = index.topk
    lengths = (most + 5, 1), (2, 1), (most - 1, 3), (0, 4)
    of_index = SparseForm(lengths, most, dtype, index.num_heads, block_size=block_size)

    def choice(device: torch.device) -> Outcome:
        step = SparseStep(of_index, device)
        return step.check_choice(choose(step.given, step.metadata, most))

    def attention(device: torch.device) -> Outcome:
        step = SparseStep(replace(of_index, heads=shape.num_heads), device)
        chosen = step.draw_choice()
        return step.check_output(attend_chosen(step.given, step.metadata, step.put(chosen)), chosen)

    return {"positions that are chosen": choice, "attention over chosen positions": attention}


def _need(*operators: str) -> None:
    for function in missing_functions(operators).values():
        raise NotHereError(f"CANN has no {function}; CANN {first_release(function)} has it")


INDEXER, ATTENTION = "npu_lightning_indexer", "npu_sparse_flash_attention"
SCATTER = "npu_scatter_nd_update_"


def _run_choice(form: SparseForm, context: RowContext) -> Outcome:
    _need(INDEXER)
    step = SparseStep(form, context.device.device)
    return step.check_choice(choose(step.given, step.metadata, form.count))


def _run_write(form: SparseForm, context: RowContext) -> Outcome:
    _need(SCATTER)
    return SparseStep(form, context.device.device).write_keys()


def _run_attention(form: SparseForm, context: RowContext) -> Outcome:
    _need(ATTENTION)
    step = SparseStep(form, context.device.device)
    chosen = step.draw_choice()
    output = attend_chosen(step.given, step.metadata, step.put(chosen))
    return step.check_output(output, chosen)


STEPS = {
    "decode": (LENGTHS["decode"], ((5, 1), (250, 1), (60, 1)), ((139, 1), (1, 1), (128, 1))),
    "drafts": (LENGTHS["drafts"], ((9, 2), (200, 4), (1, 3)), ((60, 1), (61, 2), (5, 2))),
}
"""Lengths of the steps that take turns in one graph, by request; some have fewer tokens."""

NUM_BLOCKS, TABLE_WIDTH = 12, 3


def _replayed(name: str, context: RowContext) -> Outcome:
    """Capture both operators once, and replay them with other lengths, blocks and numbers."""
    _need(INDEXER, ATTENTION)
    most = sum(new for _, new in STEPS[name][0])
    steps = []
    for seed, lengths in enumerate(STEPS[name]):
        spare = most - sum(new for _, new in lengths)
        form = SparseForm(lengths, COUNT, torch.bfloat16, num_rows_of_nobody=spare)
        sizes = seed, NUM_BLOCKS, TABLE_WIDTH
        steps.append(SparseStep(form, context.device.device, *sizes))
    first = steps[0]
    given = Given(*(torch.zeros_like(each) for each in first.given))
    at = first.metadata
    metadata = replace(
        at,
        query_start_loc=at.query_start_loc.clone(),
        seq_lens=at.seq_lens.clone(),
        block_tables=first.put(first.table),
    )

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        chosen = choose(given, metadata, COUNT)
        return chosen, attend_chosen(given, metadata, chosen)

    def load(step: SparseStep) -> None:
        for target, source in zip(given, step.given):
            target.copy_(source)
        for name in ("query_start_loc", "seq_lens", "block_tables"):
            getattr(metadata, name).copy_(getattr(step.metadata, name))

    load(first)
    graph = make_pool("npu", graph_pool("npu")).new_graph()
    with context.device.capturing():
        run()
        graph.capture(GraphCall(run, (), {}))
    found = []
    for step in (*steps, first):  # the first again: nothing of the others may be left
        load(step)
        chosen, output = graph.replay(GraphCall(run, (), {}))
        found.append((step, chosen.clone(), output.clone()))
    context.device.synchronize()
    outcomes = []
    for step, chosen, output in found:
        outcomes.append(step.check_choice(chosen))
        if not outcomes[-1].verdict.is_bad:
            outcomes.append(step.check_output(output, chosen.cpu()))
    return worst_of(outcomes, f"{len(found)} replays; {first.form}")


WHAT = {
    "decode": "decodes",
    "drafts": "decodes with drafts",
    "prefill": "prompts and chunks",
    "all": "fewer keys than a token may choose",
    "padding": "padding requests, and rows of nobody",
}


def _rows() -> Iterator[Row]:
    for short, dtype in DTYPES.items():
        form = replace(forms_of(dtype)["padding"], num_rows_of_nobody=0)
        what = "sparse attention, write of index keys: slots in any order, and padding"
        yield Row(f"sparse-write-{short}", what, partial(_run_write, form))
    for part, operator, run in (
        ("index", "choice of positions", _run_choice),
        ("attend", "attention over chosen positions", _run_attention),
    ):
        for short, dtype in DTYPES.items():
            for name, form in forms_of(dtype).items():
                what = f"sparse attention, {operator}: {WHAT[name]}"
                yield Row(f"sparse-{part}-{name}-{short}", what, partial(run, form))
        what = f"sparse attention, {operator}: "
        long = SparseForm(((3000, 1), (2500, 2)), 2048, torch.bfloat16)
        most = replace(long, heads=64 if part == "index" else 16)
        yield Row(f"sparse-{part}-2048", f"{what}2,048 of more keys", partial(run, most))
        blocks = SparseForm(LENGTHS["drafts"], COUNT, torch.bfloat16, block_size=64)
        yield Row(f"sparse-{part}-block-64", f"{what}blocks of 64", partial(run, blocks))
    heads = SparseForm(LENGTHS["decode"], COUNT, torch.bfloat16, heads=128)
    yield Row(
        "sparse-attend-most-heads",
        "sparse attention over chosen positions: 128 heads",
        partial(_run_attention, heads),
    )
    weights = SparseForm(LENGTHS["drafts"], COUNT, torch.bfloat16, weights_dtype=torch.float32)
    yield Row(
        "sparse-index-float-weights",
        "sparse attention, choice of positions: weights in float32",
        partial(_run_choice, weights),
        instead="give weights in the dtype of queries, or use CANN 9.0 or newer",
    )
    for name in STEPS:
        what = f"sparse attention in a graph, {WHAT[name]}: lengths changed before each replay"
        yield Row(f"graph-sparse-{name}", what, partial(_replayed, name))


ROWS: tuple[Row, ...] = tuple(_rows())
