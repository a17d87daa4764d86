"""Rows of captured graphs: attention is told other lengths before each replay."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from vllm_npu_prep.attention.kernels import make_kernels
from vllm_npu_prep.attention.metadata import AscendMetadata
from vllm_npu_prep.device import graph_pool
from vllm_npu_prep.graph import Graph, GraphCall, GraphPool, make_pool
from vllm_npu_prep.prep.state import AttentionState
from vllm_npu_prep.verify.outcome import Outcome, Verdict, worst_of
from vllm_npu_prep.verify.row import DTYPES, Row, RowContext, compare
from vllm_npu_prep.verify.steps import AttentionForm, AttentionStep, layer_of, masks_for

LAYER = layer_of(4, 2, 128)
NUM_BLOCKS, TABLE_WIDTH = 12, 3

DECODE_STEPS = (
    ((5, 1), (140, 1), (127, 1)),
    ((200, 1), (3, 1), (128, 1)),
    ((1, 1), (255, 1), (60, 1)),
)
CHUNK_STEPS = (((5, 1), (120, 7)), ((130, 4), (0, 4)), ((260, 6), (40, 2)))
"""Lengths of the steps that take turns in one graph, by request."""


class Group:
    """Layers that share their metadata, and where its tensors are in every step.

    There is a form for each of the steps that take turns.
    """

    def __init__(
        self,
        family: str,
        forms: list[AttentionForm],
        num_layers: int,
        device: torch.device,
        seed: int = 0,
    ) -> None:
        self.num_layers, self.kernels = num_layers, make_kernels(family)
        self.steps = [
            AttentionStep(form, device, self.kernels, seed + i, NUM_BLOCKS, TABLE_WIDTH)
            for i, form in enumerate(forms)
        ]
        first, longest = self.steps[0], max(max(form.seq_lens) for form in forms)
        masks = masks_for(self.kernels.family, forms[0].dtype, device, longest)
        self.metadata = [step.metadata(masks) for step in self.steps]
        self.query, self.key = first.query(), first.own(first.keys)
        self.value = first.own(first.values)
        self.tables = first.put(first.table)
        self.slots = first.put(np.array(first.slots, np.int32))
        self.caches = [torch.zeros_like(first.kv_cache) for _ in range(num_layers)]
        self.outputs = [torch.zeros_like(self.query) for _ in range(num_layers)]

    def load(self, index: int) -> AscendMetadata:
        """Put a step where the graph reads it, in stream order, and return its metadata."""
        step, metadata = self.steps[index], self.metadata[index]
        self.query.copy_(step.query())
        self.key.copy_(step.own(step.keys))
        self.value.copy_(step.own(step.values))
        assert metadata.block_tables is not None and metadata.slot_mapping is not None
        self.tables.copy_(metadata.block_tables)
        self.slots.copy_(metadata.slot_mapping)
        for cache, output in zip(self.caches, self.outputs):
            cache.copy_(step.kv_cache)
            output.fill_(float("nan"))
        return replace(
            metadata, block_tables=self.tables, slot_mapping=self.slots, kernel_plan=None
        )


class Model:
    """Layers of attention, one after another; the layers of all groups take turns."""

    def __init__(self, groups: list[Group]) -> None:
        self.groups = groups
        most = max(group.num_layers for group in groups)
        self.layers = [
            (f"layer{layer}.group{index}", group, layer)
            for layer in range(most)
            for index, group in enumerate(groups)
            if layer < group.num_layers
        ]

    def load(self, index: int) -> dict[str, AscendMetadata]:
        by_group = {id(group): group.load(index) for group in self.groups}
        return {name: by_group[id(group)] for name, group, _ in self.layers}

    def __call__(self, attn_metadata: dict[str, AscendMetadata]) -> None:
        """Run every layer as `AscendAttentionImpl.forward` runs it."""
        for name, group, layer in self.layers:
            metadata, cache, output = attn_metadata[name], group.caches[layer], group.outputs[layer]
            assert metadata.slot_mapping is not None
            group.kernels.write_kv(group.key, group.value, cache, metadata.slot_mapping)
            call = replace(group.steps[0].call(name, output, group.query), kv_cache=cache)
            if metadata.tasks is not None:
                metadata.tasks.capture(call, metadata)
            else:
                call(metadata)

    def call(self, attn_metadata: dict[str, AscendMetadata]) -> GraphCall:
        return GraphCall(self, (attn_metadata,), {}, attn_metadata)

    def taken(self) -> list[torch.Tensor]:
        """Copy all outputs in stream order, so that no step has to be waited for."""
        return [group.outputs[layer].clone() for _, group, layer in self.layers]

    def check(self, index: int, outputs: list[torch.Tensor], what: str) -> list[Outcome]:
        found = []
        for (name, group, _), output in zip(self.layers, outputs):
            outcome = group.steps[index].check_attention(output)
            given = f"{what}, {name}: {outcome.given}"
            found.append(replace(outcome, given=given))
        return found

    def capture_metadata(self) -> dict[str, AscendMetadata]:
        """Return metadata for the capture: as many keys as queries, as start-up captures."""
        loaded = self.load(0)
        short = {
            id(metadata): replace(metadata, seq_lens_np=metadata.query_lens.copy())
            for metadata in loaded.values()
        }
        return {name: short[id(metadata)] for name, metadata in loaded.items()}


def captured(model: Model, pool: GraphPool, context: RowContext) -> Graph:
    with context.device.capturing():
        model(model.capture_metadata())
        graph = pool.new_graph()
        graph.capture(model.call(model.capture_metadata()))
    return graph


def replayed(models: list[Model], context: RowContext) -> Outcome:
    """Replay all steps of all models, in turn, without waiting between them; then run them eagerly.

    Each model has one graph, and all graphs are in one pool. The eager run comes only after a
    difference, and tells whether graphs are to blame.
    """
    num_steps = len(models[0].groups[0].steps)
    pool = make_pool("npu", graph_pool("npu"))
    graphs = [captured(model, pool, context) for model in models]
    outputs: dict[tuple[int, int], list[torch.Tensor]] = {}
    for index in [*range(num_steps), 0]:  # the first again: nothing of the others may be left
        for number, (model, graph) in enumerate(zip(models, graphs)):
            graph.replay(model.call(model.load(index)))
            outputs[number, index] = model.taken()
    context.device.synchronize()
    parts = []
    for (number, index), found in outputs.items():
        parts += models[number].check(index, found, f"replay of step {index}")
    outcome = worst_of(
        parts, f"{len(outputs) + len(models)} replays; {models[0].groups[0].steps[0].form}"
    )
    if outcome.verdict is Verdict.SAME:
        return outcome
    eager = []
    for index in range(num_steps):
        for model in models:
            model(model.load(index))
            eager += model.check(index, model.taken(), "eager")
    also = "eager differs, too" if worst_of(eager, "").verdict.is_bad else "eager is right"
    return replace(outcome, got=f"{outcome.got}; {also}")


def _forms(
    lengths: tuple[Any, ...], state: AttentionState, dtype: torch.dtype, window: int | None = None
) -> list[AttentionForm]:
    return [AttentionForm(state, each, LAYER, dtype, window=window) for each in lengths]


DECODE, CHUNK = AttentionState.DecodeOnly, AttentionState.ChunkedPrefill


def decodes(family: str, dtype: torch.dtype, context: RowContext) -> Outcome:
    """Replay three layers: the first has an event of its own, the others share one."""
    group = Group(family, _forms(DECODE_STEPS, DECODE, dtype), 3, context.device.device)
    return replayed([Model([group])], context)


def padded_decodes(family: str, context: RowContext) -> Outcome:
    forms = [replace(f, num_padding=2) for f in _forms(DECODE_STEPS, DECODE, torch.bfloat16)]
    return replayed([Model([Group(family, forms, 1, context.device.device)])], context)


def chunks(dtype: torch.dtype, context: RowContext) -> Outcome:
    group = Group("fia", _forms(CHUNK_STEPS, CHUNK, dtype), 2, context.device.device)
    return replayed([Model([group])], context)


def windows(lengths: tuple[Any, ...], state: AttentionState, context: RowContext) -> Outcome:
    """Replay windowed layers beside layers of full attention, each group with its block tables."""
    device, dtype = context.device.device, torch.bfloat16
    full = Group("fia", _forms(lengths, state, dtype), 2, device)
    windowed = Group("fia", _forms(lengths, state, dtype, window=4), 2, device, seed=10)
    return replayed([Model([full, windowed])], context)


def two_sizes(family: str, context: RowContext) -> Outcome:
    models = []
    for lengths in (DECODE_STEPS, tuple(each[:1] for each in DECODE_STEPS)):
        forms = _forms(lengths, DECODE, torch.bfloat16)
        models.append(Model([Group(family, forms, 2, context.device.device)]))
    return replayed(models, context)


def plain(context: RowContext) -> Outcome:
    source = context.put(torch.zeros(64))
    target = torch.zeros_like(source)

    def run() -> torch.Tensor:
        torch.add(source * 3, 1, out=target)
        return target

    graph = make_pool("npu", graph_pool("npu")).new_graph()
    with context.device.capturing():
        run()
        graph.capture(GraphCall(run, (), {}))
    found = []
    for number in range(4):
        source.fill_(number)
        graph.replay(GraphCall(run, (), {}))
        found.append(target.clone())
    expected = torch.tensor([1.0, 4.0, 7.0, 10.0])[:, None].expand(4, 64)
    return compare(torch.stack(found), expected, "3 x + 1, x changes", where=("replay", "element"))


def _rows() -> Iterator[Row]:
    yield Row("graph-plain", "a captured graph whose input changes", plain)
    for family in ("fia", "atb"):
        what = f"{family} decodes in a graph"
        for short, dtype in DTYPES.items():
            name, run = f"graph-{family}-decode-{short}", partial(decodes, family, dtype)
            yield Row(name, f"{what}, lengths changed before each replay", run)
        run = partial(padded_decodes, family)
        yield Row(f"graph-{family}-padding", f"{what} with padding rows", run)
        what = f"{family} decodes in graphs of two sizes with one memory"
        yield Row(f"graph-{family}-sizes", what, partial(two_sizes, family))
    what = "fia chunks in a graph, query lengths changed, too"
    for short, dtype in DTYPES.items():
        yield Row(f"graph-fia-chunk-{short}", what, partial(chunks, dtype))
    for name, lengths, state in (
        ("decode", DECODE_STEPS, DECODE),
        ("chunk", CHUNK_STEPS, CHUNK),
    ):
        what = f"fia {name}s in a graph, windows beside full attention"
        yield Row(f"graph-fia-window-{name}", what, partial(windows, lengths, state))


ROWS: tuple[Row, ...] = tuple(_rows())
