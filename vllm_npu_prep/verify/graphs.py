"""Rows of captured graphs: attention is told other lengths before each replay."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

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


@dataclass
class Group:
    """Layers that share their metadata, and where its tensors are in every step."""

    forms: list[AttentionForm]  # of each step
    num_layers: int

    def make(self, family: str, device: torch.device, seed: int) -> None:
        self.kernels = make_kernels(family)
        self.steps = [
            AttentionStep(form, device, self.kernels, seed + i, NUM_BLOCKS, TABLE_WIDTH)
            for i, form in enumerate(self.forms)
        ]
        first = self.steps[0]
        longest = max(max(form.seq_lens) for form in self.forms)
        masks = masks_for(self.kernels.family, self.forms[0].dtype, device, longest)
        self.metadata = [step.metadata(masks) for step in self.steps]
        self.query, self.key = first.query(), first.own(first.keys)
        self.value = first.own(first.values)
        self.tables, self.slots = self.metadata[0].block_tables, self.metadata[0].slot_mapping
        self.tables, self.slots = self.tables.clone(), self.slots.clone()  # type: ignore[union-attr]
        self.caches = [torch.zeros_like(first.kv_cache) for _ in range(self.num_layers)]
        self.outputs = [torch.zeros_like(self.query) for _ in range(self.num_layers)]

    def load(self, index: int) -> AscendMetadata:
        """Put a step where the graph reads it, in stream order, and return its metadata."""
        step, metadata = self.steps[index], self.metadata[index]
        self.query.copy_(step.query())
        self.key.copy_(step.own(step.keys))
        self.value.copy_(step.own(step.values))
        for target, source in (
            (self.tables, metadata.block_tables),
            (self.slots, metadata.slot_mapping),
        ):
            target.copy_(source)  # type: ignore[union-attr, arg-type]
        for cache, output in zip(self.caches, self.outputs):
            cache.copy_(step.kv_cache)
            output.fill_(float("nan"))
        return replace(
            metadata, block_tables=self.tables, slot_mapping=self.slots, kernel_plan=None
        )


class Model:
    """Layers of attention, one after another; the layers of all groups take turns."""

    def __init__(self, family: str, groups: list[Group], context: RowContext) -> None:
        self.groups = groups
        for index, group in enumerate(groups):
            group.make(family, context.device.device, 10 * index)
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


def pool_for(context: RowContext) -> GraphPool:
    del context
    return make_pool("npu", graph_pool("npu"))


def captured(model: Model, pool: GraphPool, context: RowContext) -> Graph:
    with context.device.capturing():
        model(model.capture_metadata())
        graph = pool.new_graph()
        graph.capture(model.call(model.capture_metadata()))
    return graph


def replayed(models: list[Model], num_steps: int, context: RowContext) -> Outcome:
    """Replay all steps of all models, in turn, without waiting between them; then run them eagerly.

    Each model has one graph, and all graphs are in one pool. The eager run comes only after a
    difference, and tells whether graphs are to blame.
    """
    pool = pool_for(context)
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
        parts, f"{len(outputs) + len(models)} replays; {models[0].groups[0].forms[0]}"
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
    group = Group(_forms(DECODE_STEPS, DECODE, dtype), 3)
    return replayed([Model(family, [group], context)], len(DECODE_STEPS), context)


def padded_decodes(family: str, context: RowContext) -> Outcome:
    forms = [replace(f, num_padding=2) for f in _forms(DECODE_STEPS, DECODE, torch.bfloat16)]
    return replayed([Model(family, [Group(forms, 1)], context)], len(DECODE_STEPS), context)


def chunks(dtype: torch.dtype, context: RowContext) -> Outcome:
    group = Group(_forms(CHUNK_STEPS, CHUNK, dtype), 2)
    return replayed([Model("fia", [group], context)], len(CHUNK_STEPS), context)


def windows(lengths: tuple[Any, ...], state: AttentionState, context: RowContext) -> Outcome:
    """Replay windowed layers beside layers of full attention, each group with its block tables."""
    full = Group(_forms(lengths, state, torch.bfloat16), 2)
    windowed = Group(_forms(lengths, state, torch.bfloat16, window=4), 2)
    return replayed([Model("fia", [full, windowed], context)], len(lengths), context)


def two_sizes(family: str, context: RowContext) -> Outcome:
    large = Group(_forms(DECODE_STEPS, DECODE, torch.bfloat16), 2)
    small = Group(_forms(tuple(e[:1] for e in DECODE_STEPS), DECODE, torch.bfloat16), 2)
    models = [Model(family, [group], context) for group in (large, small)]
    return replayed(models, len(DECODE_STEPS), context)


def plain(context: RowContext) -> Outcome:
    source = context.put(torch.zeros(64))
    target = torch.zeros_like(source)

    def run() -> torch.Tensor:
        torch.add(source * 3, 1, out=target)
        return target

    graph = pool_for(context).new_graph()
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
        for short, dtype in DTYPES.items():
            yield Row(
                f"graph-{family}-decode-{short}",
                f"{family} decodes in a graph, lengths changed before each replay",
                partial(decodes, family, dtype),
                (("fused attention", "workspace size"),) if family == "fia" else (),
            )
        yield Row(
            f"graph-{family}-padding",
            f"{family} decodes in a graph with padding rows",
            partial(padded_decodes, family),
        )
        yield Row(
            f"graph-{family}-sizes",
            f"{family} decodes in graphs of two sizes with one memory",
            partial(two_sizes, family),
        )
    for short, dtype in DTYPES.items():
        yield Row(
            f"graph-fia-chunk-{short}",
            "fia chunks in a graph, query lengths changed, too",
            partial(chunks, dtype),
        )
    window = (("fused attention", "window"), ("fused attention", "window of one token"))
    yield Row(
        "graph-fia-window-decode",
        "fia decodes in a graph, windows beside full attention",
        partial(windows, DECODE_STEPS, DECODE),
        window,
    )
    yield Row(
        "graph-fia-window-chunk",
        "fia chunks in a graph, windows beside full attention",
        partial(windows, CHUNK_STEPS, CHUNK),
        window,
    )


ROWS: tuple[Row, ...] = tuple(_rows())
