"""Says of one step its reasons, and every variable by level: ``vllm-npu-prep explain``.

Tables (`StepTable`) and texts are made here for the terminal (`vllm_npu_prep.inspect.terminal`) and
for the HTML page (`vllm_npu_prep.inspect.page`); `explain_json` is the same for programs.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_npu_prep.errors import PrepError
from vllm_npu_prep.inspect.view import StepView
from vllm_npu_prep.prep.arrays import STEP_ARRAYS, ShownInExplain
from vllm_npu_prep.prep.batch import PreparedStep
from vllm_npu_prep.prep.choices import NOTHING, num_chosen
from vllm_npu_prep.prep.latent_split import LatentStep
from vllm_npu_prep.prep.mask import MaskForm, MaskKind, MaskPlan
from vllm_npu_prep.records.contract import (
    REQUEST_LEVEL,
    SCALARS,
    SEVERAL_PER_TOKEN,
    STATE_BLOCKS,
    TOKEN_LEVEL,
    TOKEN_STATES,
    dcp_variables,
    group_variables,
    latent_variables,
    mask_arrays,
    pcp_variables,
    state_variables,
)
from vllm_npu_prep.records.settings import RecordExperts
from vllm_npu_prep.wording import counted, runs_of

FOLDED_TOKENS = 400
FOLDED_REQUESTS = 64
"""Tables longer than these are folded in the terminal; ``--json`` always has all."""

LISTED = 32
"""Longer lists of blocks are shown as ranges."""

REQUEST_COLUMNS = ("query_lens", "cu_num_tokens", "seq_lens", "num_computed_tokens")
SLOT_COLUMNS = ("block_table_indices", "block_numbers", "block_offsets", "slot_mapping")


def token_level(view: StepView) -> dict[str, np.ndarray]:
    """Return the token-level variables by name, each ``[total_num_scheduled_tokens]``."""
    variables = {name: getattr(view.step, name) for name in TOKEN_LEVEL}
    own = group_level(view, 0)
    return variables | {name: own[name] for name in SLOT_COLUMNS if name in own}


def group_level(view: StepView, index: int) -> dict[str, np.ndarray]:
    """Return the variables of one KV-cache group: its block table, and its variables of each token.

    The result is empty for layers without a KV cache.
    """
    if index not in view.tables:
        return {}
    return group_variables(view.step, view.tables[index])


def explain_json(view: StepView) -> dict[str, Any]:
    """Return every variable of the step, by exactly the keys of the JSON contract."""
    step = view.step
    out: dict[str, Any] = {name: value.tolist() for name, value in token_level(view).items()}
    out |= {name: value.tolist() for name, value in group_level(view, 0).items()}
    out |= {name: getattr(step, name).tolist() for name in REQUEST_LEVEL}
    out |= {name: int(getattr(step, name)) for name in SCALARS}
    out["attn_state"] = step.attn_state.name
    if view.settings.index_topk:
        out["num_chosen"] = num_chosen(step.positions, view.settings.index_topk).tolist()
    if view.choices:
        out["choices"] = {
            layer: [runs_of_choice(row) for row in chosen] for layer, chosen in view.choices.items()
        }
    if view.settings.experts:
        out["experts"] = view.settings.experts.model_dump()
    if view.samples:
        out["samples"] = [each.model_dump(exclude_none=True) for each in view.samples]
    out["attn_mask"] = _mask_json(view.plans[0], step.positions)
    if view.padded:
        out["num_reqs_padded"] = step.padding.num_reqs_padded
        for name, line in STEP_ARRAYS.items():
            array = getattr(step.arrays, name)
            if ShownInExplain.PADDED not in line.shown:
                continue
            if not line.by_group:
                out[f"{name}_padded"] = array.tolist()
            elif 0 in view.tables:
                out[f"{name}_padded"] = array[view.tables[0]].tolist()
    if len(view.groups) > 1 or view.groups[0].attention_chunk_size:
        out["kv_cache_groups"] = [_group_json(view, index) for index in range(len(view.groups))]
    out |= {n: a.tolist() for n in SEVERAL_PER_TOKEN if len(a := getattr(step, n))}
    if view.input_texts:
        out["input_texts"] = view.input_texts
    if step.shape.latent:
        out["latent"] = {name: value.tolist() for name, value in latent_variables(step).items()}
    if dcp_variables(step):
        out["dcp"] = {name: value.tolist() for name, value in dcp_variables(step).items()}
    if pcp_variables(step):
        out["pcp"] = {name: value.tolist() for name, value in pcp_variables(step).items()}
    if view.state_groups:
        out["states"] = [
            {
                "group": group,
                "block_size": int(step.batch.tables.block_sizes[group]),
                **{name: value.tolist() for name, value in state_variables(step, group).items()},
            }
            for group in view.state_groups
        ]
    if any(request.items for request in view.requests):
        out["model_input"] = view.model_input
        out["multimodal"] = view.spans()
    return out


def _group_json(view: StepView, index: int) -> dict[str, Any]:
    step, group = view.step, view.groups[index]
    out: dict[str, Any] = {
        "block_size": view.block_size(index),
        "sliding_window": group.sliding_window,
        "attention_chunk_size": group.attention_chunk_size,
    }
    out |= {name: value.tolist() for name, value in group_level(view, index).items()}
    out["attn_mask"] = _mask_json(view.plans[index], step.positions)
    if group.attention_chunk_size is not None and index in view.tables:
        local = step.local_requests(group.group).items()
        out["local_requests"] = {name: value.tolist() for name, value in local}
    return out


def _mask_json(plan: MaskPlan, positions: np.ndarray) -> dict[str, Any] | None:
    arrays = mask_arrays(plan, positions)
    if plan.shape is None:
        return None
    if plan.kind == MaskKind.COMPRESSED:
        return {"form": MaskForm.COMPRESSED.value, "shape": list(plan.shape)}
    if "masked" in arrays:
        arrays["masked"] = arrays["masked"].astype(np.int64)
    return {name: array.tolist() for name, array in arrays.items()}


@dataclass(frozen=True)
class Selection:
    """What of a step is shown."""

    requests: list[int]  # rows of the batch
    first: int  # of the tokens
    end: int  # excluded; not larger than `first` if there are none
    whole: bool  # whether that is all of the step


def select(
    view: StepView,
    req_id: str | None = None,  # the only request whose lines and tokens are shown; None: all
    # The tokens to show, as first and end (excluded); None: all
    tokens: tuple[int, int] | None = None,
) -> Selection:
    """Choose what of a step is shown; refuse a request or a token that isn't in it."""
    step = view.step
    first, end = tokens or (0, step.total_num_scheduled_tokens)
    if not 0 <= first < end <= step.total_num_scheduled_tokens:
        raise PrepError(
            f"--tokens {first}:{end}: the step has tokens 0:{step.total_num_scheduled_tokens}"
        )
    if req_id is None:
        return Selection(list(range(len(view.requests))), first, end, tokens is None)
    rows = [row for row, request in enumerate(view.requests) if request.req_id == req_id]
    if not rows:
        names = ", ".join(request.req_id for request in view.requests[:10])
        raise PrepError(f"--request {req_id}: no such request; there are {names}")
    own = step.query_start_loc[rows[0] : rows[0] + 2].tolist()
    return Selection(rows, max(first, own[0]), min(end, own[1]), False)


@dataclass(frozen=True)
class StepTable:
    """A table of a step, for a terminal or a page."""

    title: str
    columns: list[str]
    rows: list[list[object]]
    most: int = FOLDED_REQUESTS  # lines that a terminal shows


def summary(view: StepView) -> list[tuple[str, str]]:
    """Return state, masks, graph and padding with their reasons, each as a name and a text."""
    step, padding = view.step, view.step.padding
    lines = [("state", f"{step.attn_state.name}: {view.state_reason}")]
    other = view.settings.runner
    if other is not None:
        differs = "".join(f"; {each}" for each in other.differs)
        lines.append(("runner", f"{other.name} ({other.version}){differs}"))
    for index, plan in enumerate(view.plans if other is None else ()):
        mask = "none" if plan.shape is None else f"{plan.kind.value} {list(plan.shape)}"
        size = f", {view.mask_bytes(index):,} bytes" if plan.shape else ""
        where = f"group {index}: " if len(view.groups) > 1 else ""
        lines.append(("mask", f"{where}{mask}{size}: {view.mask_reason(index)}"))
    if step.shape.latent:
        lines.append(("latent", latent_halves(step.latent)))
    if view.settings.index_topk:
        lines.append(("sparse", who_chooses(step.positions, view.settings.index_topk)))
    if step.shape.dcp:
        lines.append(("ranks", shared_context(view)))
    if step.shape.pcp:
        lines.append(("ranks", shared_prompts(step)))
    if view.settings.experts:
        lines.append(("experts", busiest(view.settings.experts)))
    if step.shape.states:
        lines.append(("states", state_halves(view)))
    tokens = step.num_input_tokens - step.total_num_scheduled_tokens
    requests = padding.num_reqs_padded - step.num_reqs
    return [
        *lines,
        ("graph", view.graph),
        ("padding", f"{counted(tokens, 'token')}, {counted(requests, 'request')}"),
        ("input", view.model_input),
        (
            "sizes",
            f"{counted(step.num_reqs, 'request')}, "
            f"{counted(step.total_num_scheduled_tokens, 'token')}, "
            f"num_input_tokens {step.num_input_tokens}, max_query_len {step.max_query_len}, "
            f"max_seq_len {step.max_seq_len}",
        ),
    ]


def request_tables(view: StepView, selection: Selection) -> Iterator[StepTable]:
    """Yield the table of requests, then those of what some engines do with them."""
    yield request_table(view, selection)
    if view.step.shape.latent:
        yield latent_table(view, selection)
    if view.step.shape.dcp:
        yield shard_table(view, selection)
    if view.step.shape.pcp:
        yield rank_table(view, selection)
    for group in view.state_groups:
        yield state_table(view, selection, group)
    tables = item_table, sample_table, choice_table, expert_table
    for table in (make(view, selection) for make in tables):
        if table.rows:
            yield table


def request_table(view: StepView, selection: Selection) -> StepTable:
    step, starts = view.step, view.step.query_start_loc
    rows: list[list[object]] = []
    for row in selection.requests:
        own = step.logits_indices
        own = own[(own >= starts[row]) & (own < starts[row + 1])]
        values = (getattr(step, name)[row] for name in REQUEST_COLUMNS)
        owned = [str(np.count_nonzero(view.blocks_owned(row, group))) for group in view.tables]
        touched = [_list(view.blocks_touched(row, group)) for group in view.tables]
        span = f"{starts[row]}:{starts[row + 1]}"
        logits = ", ".join(map(str, own))
        lists = "; ".join(owned), "; ".join(touched)
        rows.append([view.requests[row].req_id, *values, span, logits, *lists])
    columns = ["req_id", *REQUEST_COLUMNS, "query_start_loc", "logits_indices"]
    columns += ["blocks_owned", "blocks_written"]
    return StepTable("request level", columns, rows)


def item_table(view: StepView, selection: Selection) -> StepTable:
    names = {view.requests[row].req_id for row in selection.requests}
    spans = [span for span in view.spans() if span["req_id"] in names]
    rows = [[*list(span.values())[:4], _span(span["tokens"])] for span in spans]
    columns = ["req_id", "modality", "offset", "length", "tokens"]
    return StepTable("images and videos", columns, rows)


def sample_table(view: StepView, selection: Selection) -> StepTable:
    """Return what the step sampled, and from which tokens each was drawn."""
    rows: list[list[object]] = []
    for row in selection.requests if view.samples else ():
        samples = view.samples[row]
        for index, token in enumerate(samples.token_ids):
            source, kept = "a trace" if samples.from_trace else "the model", "-"
            if samples.kept is not None:
                runs = samples.kept[index]
                source += f", of {counted(sum(count for _, count in runs), 'token')}"
                kept = _ranges(range(first, first + count) for first, count in runs)
            rows.append([view.requests[row].req_id, token, source, kept])
    return StepTable("samples", ["req_id", "token", "from", "tokens to draw from"], rows)


def who_chooses(positions: np.ndarray, index_topk: int) -> str:
    """Say in words how many tokens attend to chosen positions, and how many to all."""
    choosing = int(np.count_nonzero(positions >= index_topk))
    return (
        f"an indexer chooses {index_topk} of the positions up to a token's own for "
        f"{counted(choosing, 'token')}, and all of them for {len(positions) - choosing}"
    )


def runs_of_choice(chosen: np.ndarray) -> list[tuple[int, int]]:
    """Return the positions that a token has chosen as runs, each as first and count."""
    return [(run.start, len(run)) for run in runs_of(sorted(chosen[chosen > NOTHING].tolist()))]


def choice_table(view: StepView, selection: Selection) -> StepTable:
    """Return what the indexer of each layer chose, where a record has it."""
    rows: list[list[object]] = []
    for token in range(selection.first, selection.end) if view.choices else ():
        for layer, chosen in view.choices.items():
            own = sorted(chosen[token][chosen[token] > NOTHING].tolist())
            name = layer.partition(".self_attn.")[0]
            rows.append([token, int(view.step.positions[token]), name, ranges(own)])
    columns = ["token", "position", "indexer of", "positions that it chose"]
    return StepTable("sparse attention", columns, rows)


def busiest(experts: RecordExperts) -> str:
    """Say in words where the experts of a step are, and how even their load is."""
    shares = [max(experts.shares(layer)) * experts.num_ranks for layer in range(len(experts.load))]
    layer = max(range(len(shares)), key=shares.__getitem__)
    return (
        f"{len(experts.load[0])} in {counted(len(experts.placed[0]), 'place')} on "
        f"{counted(experts.num_ranks, 'rank')}; by the load before the last exchange, the busiest "
        f"rank has {sum(shares) / len(shares):.2f} times the mean, in layer {layer} "
        f"{shares[layer]:.2f} times"
    )


def expert_table(view: StepView, selection: Selection) -> StepTable:
    """Return which experts are on the record's rank, layer by layer, and each rank's load."""
    del selection
    rows: list[list[object]] = []
    experts = view.settings.experts
    for layer, placed in enumerate(experts.placed if experts else ()):
        assert experts is not None
        own = len(placed) // experts.num_ranks
        here = " ".join(map(str, placed[experts.rank * own :][:own]))
        shares = " ".join(f"{share:.0%}" for share in experts.shares(layer))
        rows.append([layer, here, shares])
    columns = ["layer", f"experts on rank {experts.rank if experts else 0}", "load of each rank"]
    return StepTable("experts that move", columns, rows)


def token_table(view: StepView, tokens: Sequence[int]) -> StepTable:
    step = view.step
    variables = token_level(view)
    for name in SEVERAL_PER_TOKEN:
        variables |= {f"{name} {index}": row for index, row in enumerate(getattr(step, name))}
    if view.settings.index_topk:
        variables["num_chosen"] = num_chosen(step.positions, view.settings.index_topk)
    if len(step.owners()):
        variables["dcp_ranks"] = step.owners()
    if step.shape.pcp:
        variables["pcp_ranks"] = step.computing_ranks()
    for index in view.tables:
        if index:
            own = group_level(view, index)
            variables |= {f"{name} {index}": own[name] for name in SLOT_COLUMNS[1:]}
    chosen = np.asarray(tokens, np.int64)
    columns = {"token": chosen.tolist()}
    for name, value in variables.items():
        columns[name] = value[chosen].tolist()
        if name == "input_ids" and view.input_texts:
            columns["input_texts"] = [_quoted(view.input_texts[token]) for token in tokens]
    rows = [list(row) for row in zip(*columns.values())]
    return StepTable("token level", list(columns), rows, FOLDED_TOKENS)


def _quoted(text: str | None) -> str:
    """Return a token's text so that its spaces are seen and nothing of it moves a cursor."""
    return "-" if text is None else repr(text)


def group_title(view: StepView, index: int) -> str:
    return f", group {index} (block size {view.block_size(index)})" if len(view.groups) > 1 else ""


def block_table(view: StepView, selection: Selection, index: int) -> StepTable:
    rows: list[list[object]] = [
        [view.requests[row].req_id, _list(view.blocks_owned(row, index))]
        for row in selection.requests
    ]
    return StepTable(f"system level{group_title(view, index)}", ["req_id", "block_table"], rows)


def local_table(view: StepView, index: int) -> StepTable:
    """Return the virtual requests: what a group with chunked local attention sees of the step."""
    local = view.step.local_requests(view.tables[index])
    starts = local["query_start_loc"].tolist()
    rows: list[list[object]] = [
        [f"{start}:{end}", length, computed, " ".join(map(str, blocks))]
        for start, end, length, computed, blocks in zip(
            starts,
            starts[1:],
            local["seq_lens"],
            local["num_computed_tokens"],
            local["block_table"].tolist(),
        )
    ]
    names = ["query_start_loc", "seq_lens", "num_computed_tokens", "block_table"]
    return StepTable(f"system level{group_title(view, index)}: virtual requests", names, rows)


def shared_context(view: StepView) -> str:
    """Say in words how decode context parallelism places the step's tokens on ranks."""
    shards = view.step.shape.dcp
    kept = int(np.count_nonzero(view.step.owners() == shards.rank))
    runs = counted(shards.interleave_size, "neighbouring token")
    return (
        f"rank {shards.rank} of {shards.world_size} keeps {counted(kept, 'token')} of the step; "
        f"{runs} to each rank in turn"
    )


def shard_table(view: StepView, selection: Selection) -> StepTable:
    """Return which positions of each request are in each of its blocks, rank by rank."""
    step, tables = view.step, view.step.batch.tables
    shards = step.shape.dcp
    per_block = tables.tokens_per_block(view.tables[0])
    rows: list[list[object]] = []
    for row in selection.requests:
        positions = np.arange(int(step.seq_lens[row]))
        owners, columns = shards.owner(positions), positions // per_block
        kept = step.dcp_local_context_lens[row], step.dcp_local_seq_lens[row]
        for column, block in enumerate(view.blocks_owned(row)[: columns[-1] + 1].tolist()):
            here = columns == column
            cells = [
                ranges(positions[here & (owners == rank)].tolist()) or "-"
                for rank in range(shards.world_size)
            ]
            lengths = " of ".join(map(str, kept)) if column == 0 else ""
            rows.append([view.requests[row].req_id, lengths, block, *cells])
    own = [" (this one)" if rank == shards.rank else "" for rank in range(shards.world_size)]
    names = [f"rank {rank}{mine}" for rank, mine in enumerate(own)]
    title = "positions of each block, by the rank that keeps them"
    return StepTable(title, ["req_id", "computed of kept here", "block", *names], rows)


def shared_prompts(step: PreparedStep) -> str:
    """Say in words what a rank computes with prefill context parallelism."""
    ranks = step.shape.pcp
    padding = counted(step.num_rank_tokens - step.pcp.num_tokens, "padding token")
    return (
        f"rank {ranks.rank} of {ranks.world_size} computes "
        f"{counted(step.pcp.num_tokens, 'token')} of the step in "
        f"{counted(step.pcp.num_rows, 'row')}, and has {padding}; every rank keeps all tokens"
    )


def rank_table(view: StepView, selection: Selection) -> StepTable:
    """Return which positions of each request each rank computes, and which one samples it."""
    step = view.step
    computing, ranks = step.computing_ranks(), step.shape.pcp
    rows: list[list[object]] = []
    for row in selection.requests:
        tokens = slice(*step.query_start_loc[row : row + 2].tolist())
        positions, owners = step.positions[tokens], computing[tokens]
        of_ranks = range(ranks.world_size)
        cells = [ranges(positions[owners == rank].tolist()) or "-" for rank in of_ranks]
        rows.append([view.requests[row].req_id, *cells, f"rank {owners[-1]}"])
    own = [" (this one)" if rank == ranks.rank else "" for rank in range(ranks.world_size)]
    names = [f"rank {rank}{mine}" for rank, mine in enumerate(own)]
    title = "positions of each request, by the rank that computes them"
    return StepTable(title, ["req_id", *names, "last token"], rows)


def state_halves(view: StepView) -> str:
    """Say in words how a step is split for layers with recurrent states, and which begin empty."""
    states, begun = view.step.states, view.step.has_initial_state
    empty = int(np.count_nonzero(~begun))
    return (
        f"{counted(states.num_decodes, 'decode')} of {counted(states.num_decode_tokens, 'token')} "
        f"updated together, {counted(states.num_prefills, 'prefill')} in chunks; "
        f"{counted(empty, 'request')} with an empty state; "
        f"{counted(len(view.state_groups), 'group')}"
    )


def states_of(
    view: StepView,
    group: int,  # a KV-cache group that holds recurrent states
    row: int,  # the request's row of the batch
) -> tuple[list[int], list[int]]:
    """Return the blocks of states that a request reads, one or none, and those that it writes."""
    step, found = view.step, state_variables(view.step, group)
    reads, writes = (int(found[name][row]) for name in STATE_BLOCKS)
    written = [writes]
    if len(found[TOKEN_STATES]) and row < int(found["num_decodes"]):
        start, end = step.query_start_loc[row : row + 2].tolist()
        written = found[TOKEN_STATES][start:end].tolist()
    return [reads] if found["has_initial_state"][row] else [], written


def state_table(view: StepView, selection: Selection, group: int) -> StepTable:
    step, found = view.step, state_variables(view.step, group)
    rows: list[list[object]] = []
    for row in selection.requests:
        read, written = states_of(view, group, row)
        kind = "decode" if row < int(found["num_decodes"]) else "prefill"
        from_ = " ".join(map(str, read)) or "empty"
        computed, length = int(step.num_computed_tokens[row]), int(step.seq_lens[row])
        states = " ".join(map(str, written))
        rows.append([view.requests[row].req_id, kind, computed, from_, length, states])
    names = ["req_id", "half", "tokens before", "reads state", "tokens after", "writes state"]
    return StepTable(f"states of group {group}", names, rows)


def latent_halves(latent: LatentStep) -> str:
    """Say in words what both halves of a step of latent attention are."""
    decodes = (
        f"{counted(latent.num_decodes, 'decode')} of {counted(latent.num_decode_tokens, 'token')} "
        "over latent rows"
    )
    prefills = f"{counted(latent.num_prefills, 'prefill')} over projected K and V"
    if not latent.num_chunks:
        return f"{decodes}; {prefills}, without context"
    chunks, pieces = counted(latent.num_chunks, "chunk"), counted(latent.num_pieces, "piece")
    return f"{decodes}; {prefills}, whose contexts are read in {chunks} ({pieces})"


def latent_table(view: StepView, selection: Selection) -> StepTable:
    step, latent = view.step, view.step.latent
    pieces: dict[int, list[str]] = {}
    columns = (step.context_piece_reqs, step.context_piece_chunks)
    for req, chunk, first, length in zip(
        *columns, step.context_piece_starts, step.context_piece_lens
    ):
        pieces.setdefault(int(req), []).append(f"{chunk} ({first}:{first + length})")
    starts = step.prefill_query_start_loc.tolist()
    rows: list[list[object]] = []
    for row in selection.requests:
        name, prefill = view.requests[row].req_id, row - latent.num_decodes
        context = int(step.num_computed_tokens[row])
        if prefill < 0:
            rows.append([name, "decode", "-", context, "latent rows"])
            continue
        queries = f"{starts[prefill]}:{starts[prefill + 1]}"
        rows.append([name, "prefill", queries, context, "; ".join(pieces.get(row, ["-"]))])
    names = ["req_id", "half", "prefill_query_start_loc", "context_len", "chunk (positions)"]
    return StepTable("latent attention", names, rows)


def _list(blocks: np.ndarray) -> str:
    return " ".join(map(str, blocks.tolist())) if len(blocks) <= LISTED else ranges(blocks.tolist())


def ranges(numbers: Sequence[int]) -> str:
    """Return numbers as ranges, ``3-7 9``."""
    return _ranges(runs_of(numbers))


def _ranges(runs: Iterable[range]) -> str:
    return " ".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)


def _span(tokens: list[int] | None) -> str:
    return "-" if tokens is None else f"{tokens[0]}:{tokens[1]}"
