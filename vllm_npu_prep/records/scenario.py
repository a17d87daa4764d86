"""Scenario files: a batch as JSON, checked at the boundary.

A file holds a scenario, or an object with a ``scenario`` (as worked examples do). The classes here
say which keys its JSON has; `Scenario.record` makes the record of a step that wasn't prepared yet.
"""

import difflib
import json
from collections import Counter
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, Field, ValidationError

from vllm_npu_prep.errors import PrepError
from vllm_npu_prep.prep.dcp import NO_DCP, DCPRank
from vllm_npu_prep.prep.embeds import Placeholders
from vllm_npu_prep.prep.freed_blocks import first_needed
from vllm_npu_prep.prep.latent_split import NO_LATENT_SPLIT, LatentSplit
from vllm_npu_prep.prep.layout import StepLayout
from vllm_npu_prep.prep.padding import (
    full_graph_padding,
    no_padding,
    uniform_query_len,
)
from vllm_npu_prep.prep.pcp import NO_PCP, PCPRank, largest_share
from vllm_npu_prep.prep.shape import EngineShape
from vllm_npu_prep.records.record import RecordBatch, StepRecord
from vllm_npu_prep.records.settings import (
    BlockSize,
    Count,
    LayerGroup,
    Positive,
    RecordSettings,
    Size,
    Strict,
    Text,
)
from vllm_npu_prep.validation import described
from vllm_npu_prep.wording import counted

MAX_FILE_BYTES = 64 << 20
ARCHIVE = b"PK\x03\x04"
MAX_TABLE_CELLS = 1 << 26
"""The most cells of a token table or block table, so that a small file can't use up the memory."""

Int32 = Annotated[int, Field(ge=0, lt=1 << 31)]


class ScenarioItem(Strict):
    """An image or a video in a prompt: which tokens are its placeholders."""

    modality: Text
    offset: Count
    length: Positive

    @property
    def end(self) -> int:
        return self.offset + self.length


class ScenarioGroup(Strict):
    """A KV-cache group: its blocks, and what its layers see."""

    block_size: BlockSize
    block_ids: list[list[Int32]]  # the blocks of each request
    sliding_window: Positive | None = None
    attention_chunk_size: Positive | None = None
    holds_states: bool = False  # a recurrent state for every block_size tokens


class ScenarioRequest(Strict):
    req_id: Text
    num_computed_tokens: Count
    num_scheduled_tokens: Positive
    num_prompt_tokens: Positive
    block_ids: list[Int32]
    token_ids: list[Int32]
    num_draft_tokens: Count = 0
    draft_token_ids: list[Int32] = Field(default_factory=list)
    multimodal: list[ScenarioItem] = Field(default_factory=list)
    mrope_positions: list[list[Int32]] | None = None  # [mrope_dims, num_prompt_tokens]
    mrope_position_delta: Annotated[int, Field(ge=-(1 << 24), le=1 << 24)] = 0

    @property
    def seq_len(self) -> int:
        """The number of the request's tokens after the step."""
        return self.num_computed_tokens + self.num_scheduled_tokens


class ScenarioLatent(Strict):
    """How a step is split for latent attention (`vllm_npu_prep.prep.latent_split`)."""

    decode_threshold: Positive = 1
    workspace_blocks: Positive = 1


class ScenarioShards(Strict):
    """The rank that prepares the step under decode context parallelism (`prep.dcp`)."""

    world_size: Annotated[int, Field(ge=2, le=64)]
    rank: Annotated[int, Field(ge=0, lt=64)] = 0
    interleave_size: BlockSize = 1


class ScenarioRanks(Strict):
    """The rank that prepares the step under prefill context parallelism (`prep.pcp`)."""

    world_size: Annotated[int, Field(ge=2, le=64)]
    rank: Annotated[int, Field(ge=0, lt=64)] = 0


class Scenario(Strict):
    """A batch, and the settings under which it is prepared."""

    block_size: BlockSize
    max_model_len: Positive
    max_num_reqs: Annotated[int, Field(ge=1, le=1 << 16)]
    max_num_batched_tokens: Size
    requests: Annotated[list[ScenarioRequest], Field(min_length=1)]
    name: Text = ""
    source: Text = ""
    capture_sizes: Annotated[list[Size], Field(min_length=1)] | None = None
    mask: Literal["dense", "compressed"] = "dense"
    sliding_window: Positive | None = None
    attention_chunk_size: Positive | None = None
    chunked_prefill: bool = True
    mrope_dims: Annotated[int, Field(ge=0, le=4)] = 0
    latent: ScenarioLatent | None = None
    index_topk: Positive | None = (
        None  # most positions to which a token of sparse attention attends
    )
    dcp: ScenarioShards | None = None
    pcp: ScenarioRanks | None = None
    more_kv_cache_groups: list[ScenarioGroup] = Field(default_factory=list, max_length=15)

    @property
    def groups(self) -> list[ScenarioGroup]:
        """The KV-cache groups: the one that the scenario describes itself, and the others."""
        first = ScenarioGroup(
            block_size=self.block_size,
            block_ids=[request.block_ids for request in self.requests],
            sliding_window=self.sliding_window,
            attention_chunk_size=self.attention_chunk_size,
        )
        return [first, *self.more_kv_cache_groups]

    @property
    def dcp_rank(self) -> DCPRank:
        dcp = self.dcp
        return DCPRank(dcp.world_size, dcp.rank, dcp.interleave_size) if dcp else NO_DCP

    @property
    def pcp_rank(self) -> PCPRank:
        pcp = self.pcp
        return PCPRank(pcp.world_size, pcp.rank, 2 * self.max_num_reqs) if pcp else NO_PCP

    def tokens_per_block(self, group: ScenarioGroup) -> int:
        return self.dcp_rank.tokens_per_block(group.block_size)

    @property
    def latent_split(self) -> LatentSplit:
        if self.latent is None:
            return NO_LATENT_SPLIT
        size = self.tokens_per_block(self.groups[0])
        rows = self.latent.workspace_blocks * size
        return LatentSplit(self.latent.decode_threshold, rows, size, self.max_model_len)

    def record(self) -> StepRecord:
        """Return the record of the step, which isn't prepared yet."""
        batch = _batch_of(self)
        num_reqs, total = len(self.requests), int(batch.num_scheduled_tokens.sum())
        padding, kind = no_padding(total, num_reqs), "eager: no capture sizes given"
        if self.capture_sizes:
            query_len = uniform_query_len(batch.num_scheduled_tokens, batch.num_draft_tokens)
            sizes, max_model_len = self.capture_sizes, self.max_model_len
            padding = full_graph_padding(total, num_reqs, query_len, sizes, max_model_len)
            kind = "full graph"
            if total > max(sizes):
                kind = f"eager: more than {counted(max(sizes), 'token')}, the largest capture size"
        if self.pcp is not None:
            share, _ = largest_share(batch.num_scheduled_tokens, self.pcp.world_size)
            padding = no_padding(int(share) * self.pcp.world_size, num_reqs)
        shape = EngineShape(
            max_logits_per_req=1 + int(batch.num_draft_tokens.max()),
            mrope_dims=self.mrope_dims,
            latent=self.latent_split,
            dcp=self.dcp_rank,
            pcp=self.pcp_rank,
        )
        layout = StepLayout(padding.num_input_tokens, padding.num_reqs_padded, shape)
        widths = [-(-self.max_model_len // self.tokens_per_block(group)) for group in self.groups]
        for group in self.groups:
            if group.attention_chunk_size is not None:  # rows are whole chunks, all of one size
                per_chunk = group.attention_chunk_size // group.block_size
                widths = [-(-width // per_chunk) * per_chunk for width in widths]
        placed = Placeholders(*batch.placeholders.T)
        touched, *_ = placed.touched(batch.num_computed_tokens, batch.num_scheduled_tokens)
        settings = RecordSettings.of(
            padding,
            layout,
            step=0,
            req_ids=[request.req_id for request in self.requests],
            max_num_reqs=num_reqs,  # rows to spare would hold nothing
            max_model_len=self.max_model_len,
            chunked_prefill=self.chunked_prefill,
            mask=self.mask,
            mask_itemsize=1,
            block_sizes=[group.block_size for group in self.groups],
            max_num_blocks=widths,
            groups=[
                LayerGroup(
                    group=index,
                    sliding_window=group.sliding_window,
                    attention_chunk_size=group.attention_chunk_size,
                    state_threshold=1 if group.holds_states else None,
                    index_topk=None if group.holds_states else self.index_topk,
                )
                for index, group in enumerate(self.groups)
            ],
            total_num_scheduled_tokens=total,
            kind=kind,
            num_sampled_rows=0,
            num_sampled_drafts=0,
            takes_embeds=len(touched) > 0,
            modalities=[item.modality for r in self.requests for item in r.multimodal],
        )
        return StepRecord(settings, batch)


def _batch_of(scenario: Scenario) -> RecordBatch:
    requests = scenario.requests

    def column(name: str) -> np.ndarray:
        return np.array([getattr(request, name) for request in requests], np.int32)

    token_ids, next_token_ids, positions = [], [], []
    for request in requests:
        known = request.token_ids + request.draft_token_ids
        token_ids += known[request.num_computed_tokens : request.seq_len]
        next_token_ids.append(known[min(request.seq_len, len(request.token_ids) - 1)])
        rows = np.zeros((scenario.mrope_dims, request.num_scheduled_tokens), np.int64)
        if request.mrope_positions is not None:
            prompt = np.array(request.mrope_positions, np.int64)
            seen = prompt[:, request.num_computed_tokens : request.seq_len]
            rows[:, : seen.shape[1]] = seen
        positions.append(rows)
    with_mrope = requests if scenario.mrope_dims else []
    has_drafts = any(request.num_draft_tokens for request in requests)
    blocks = [ids for group in scenario.groups for ids in group.block_ids]
    placed = Placeholders.of_rows([[(i.offset, i.end) for i in r.multimodal] for r in requests])
    return RecordBatch(
        num_computed_tokens=column("num_computed_tokens"),
        num_prompt_tokens=column("num_prompt_tokens"),
        num_tokens=np.array([len(request.token_ids) for request in requests], np.int32),
        num_scheduled_tokens=column("num_scheduled_tokens"),
        num_draft_tokens=column("num_draft_tokens"),
        previous_rows=np.empty(0, np.int64),
        token_ids=np.array(token_ids, np.int32),
        next_token_ids=np.array(next_token_ids if has_drafts else [], np.int32),
        num_blocks=np.array([len(ids) for ids in blocks], np.int32).reshape(-1, len(requests)),
        block_ids=np.array([block for ids in blocks for block in ids], np.int32),
        mrope_positions=np.concatenate(positions, axis=1),
        mrope_lengths=np.array([len((r.mrope_positions or [[]])[0]) for r in with_mrope], np.int64),
        mrope_position_deltas=np.array([r.mrope_position_delta for r in with_mrope], np.int64),
        placeholders=np.stack([placed.rows, placed.starts, placed.ends], axis=1),
        rows_with_embeds=np.empty(0, np.int64),
    )


def read_scenario(path: Path) -> Scenario:
    """Read and check a scenario file."""
    data = _read_json(path)
    try:
        return parse_scenario(data)
    except PrepError as error:
        raise PrepError(f"{path}: {error}") from None


def _read_json(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise PrepError(f"{path}: {error.strerror or error}") from None
    if len(text) > MAX_FILE_BYTES:
        raise PrepError(f"{path}: larger than {MAX_FILE_BYTES:,} bytes: no scenario is that large")
    if text.startswith(ARCHIVE):
        raise PrepError(f"{path}: not JSON, but an archive; records are files that end in .npz")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PrepError(f"{path}: not JSON: {why_not_json(error)}") from None


def why_not_json(error: ValueError | RecursionError) -> str:
    """Say why a file, or a part of it, isn't valid JSON; nothing is quoted from it."""
    if isinstance(error, json.JSONDecodeError):
        return f"line {error.lineno}, column {error.colno}: {error.msg[0].lower()}{error.msg[1:]}"
    if isinstance(error, UnicodeError):
        return "it holds bytes that are no text"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return "it holds a number that is too long"


def parse_scenario(data: Any) -> Scenario:
    """Check a scenario that was read from JSON; one line names the first field that is wrong."""
    if isinstance(data, dict) and "scenario" in data:
        data = data["scenario"]
    if not isinstance(data, dict):
        raise PrepError(f"a scenario is an object, not {type(data).__name__}")
    try:
        scenario = Scenario.model_validate(data)
    except ValidationError as error:
        raise PrepError(_first_error(error)) from None
    _check(scenario)
    return scenario


OBJECTS: dict[int | str, type[BaseModel]] = {
    "requests": ScenarioRequest,
    "multimodal": ScenarioItem,
    "more_kv_cache_groups": ScenarioGroup,
    "latent": ScenarioLatent,
    "dcp": ScenarioShards,
    "pcp": ScenarioRanks,
}
"""By key: which keys the object there, or each of a list, may have."""


def _first_error(error: ValidationError) -> str:
    detail = error.errors()[0]
    where = ".".join(str(part) for part in detail["loc"]) or "scenario"
    if detail["type"] == "extra_forbidden":
        objects = [OBJECTS[part] for part in detail["loc"][:-1] if part in OBJECTS]
        allowed = list((objects or [Scenario])[-1].model_fields)
        near = difflib.get_close_matches(str(detail["loc"][-1]), allowed, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        return f"{where}: {described(detail)}{hint}; allowed: {', '.join(allowed)}"
    return f"{where}: {described(detail)}"


def _check(scenario: Scenario) -> None:
    requests = scenario.requests
    if len(requests) > scenario.max_num_reqs:
        raise PrepError(
            f"requests: {len(requests)} given, max_num_reqs allows {scenario.max_num_reqs}"
        )
    if len(requests) * scenario.max_model_len * len(scenario.groups) > MAX_TABLE_CELLS:
        raise PrepError(
            f"max_model_len: {scenario.max_model_len} for {counted(len(requests), 'request')} "
            f"needs tables of more than {MAX_TABLE_CELLS:,} cells"
        )
    total = sum(request.num_scheduled_tokens for request in requests)
    if total > scenario.max_num_batched_tokens:
        raise PrepError(
            f"requests: {total} tokens scheduled, max_num_batched_tokens allows "
            f"{scenario.max_num_batched_tokens}"
        )
    for req_id, count in Counter(request.req_id for request in requests).items():
        if count > 1:
            raise PrepError(f"requests: req_id {req_id!r} is given {count} times")
    _check_shards(scenario)
    _check_ranks(scenario)
    for index, request in enumerate(requests):
        _check_request(scenario, request, f"requests.{index}")
        _check_inputs(scenario, request, f"requests.{index}")
    _check_chunks(scenario.groups)
    _check_states(scenario.groups, scenario.latent)
    for place, group in enumerate(scenario.groups):
        if len(group.block_ids) != len(requests):
            raise PrepError(
                f"more_kv_cache_groups.{place - 1}.block_ids: "
                f"{counted(len(group.block_ids), 'list')} for {counted(len(requests), 'request')}"
            )
        where = [
            f"more_kv_cache_groups.{place - 1}.block_ids.{i}"
            if place
            else f"requests.{i}.block_ids"
            for i in range(len(requests))
        ]
        for row, request in enumerate(requests):
            _check_blocks(scenario, group, request, group.block_ids[row], where[row])
        per_block = scenario.tokens_per_block(group)
        _check_owners(group, per_block, requests, where)


def _check_states(groups: list[ScenarioGroup], latent: ScenarioLatent | None) -> None:
    for place, group in enumerate(groups[1:]):
        narrowed = group.sliding_window or group.attention_chunk_size
        if group.holds_states and (narrowed or latent is not None):
            raise PrepError(
                f"more_kv_cache_groups.{place}.holds_states: a group with recurrent states has "
                "neither sliding_window nor attention_chunk_size, and its scenario has no latent "
                "attention"
            )


def _check_shards(scenario: Scenario) -> None:
    dcp = scenario.dcp
    if dcp is None:
        return
    if dcp.rank >= dcp.world_size:
        raise PrepError(f"dcp.rank: {dcp.rank}; ranks are 0 to {dcp.world_size - 1}")
    for group in scenario.groups:
        if group.block_size % dcp.interleave_size:
            raise PrepError(
                f"dcp.interleave_size: {dcp.interleave_size} in blocks of {group.block_size}; "
                "blocks must consist of whole runs of neighbouring tokens"
            )
        if group.sliding_window or group.attention_chunk_size or group.holds_states:
            raise PrepError(
                "dcp: decode context parallelism is for layers that see whole contexts; "
                "leave out sliding_window, attention_chunk_size and holds_states"
            )


def _check_ranks(scenario: Scenario) -> None:
    pcp = scenario.pcp
    if pcp is None:
        return
    if pcp.rank >= pcp.world_size:
        raise PrepError(f"pcp.rank: {pcp.rank}; ranks are 0 to {pcp.world_size - 1}")
    others = {
        "capture_sizes": scenario.capture_sizes,
        "dcp": scenario.dcp,
        "mrope_dims": scenario.mrope_dims,
        "drafts": any(request.num_draft_tokens for request in scenario.requests),
        "attention_chunk_size": any(group.attention_chunk_size for group in scenario.groups),
        "holds_states": any(group.holds_states for group in scenario.groups),
    }
    if given := [name for name, value in others.items() if value]:
        raise PrepError(
            f"pcp: a step whose tokens ranks share has no {', '.join(given)}; leave one of both out"
        )


def _check_chunks(groups: list[ScenarioGroup]) -> None:
    sizes = {(size, g.block_size) for g in groups if (size := g.attention_chunk_size)}
    for chunk_size, block_size in sizes:
        if len(sizes) > 1 or chunk_size % block_size:
            raise PrepError(
                f"attention_chunk_size: {chunk_size} in blocks of {block_size}; chunks must "
                "consist of whole blocks, all of one size"
            )
    if any(group.attention_chunk_size and group.sliding_window for group in groups):
        raise PrepError("attention_chunk_size: a group has either this or sliding_window, not both")


def _check_request(scenario: Scenario, request: ScenarioRequest, where: str) -> None:
    if request.seq_len > scenario.max_model_len:
        raise PrepError(
            f"{where}.num_scheduled_tokens: {request.num_computed_tokens} computed + "
            f"{request.num_scheduled_tokens} scheduled tokens are past max_model_len "
            f"{scenario.max_model_len}"
        )
    drafts = request.num_draft_tokens
    if drafts >= request.num_scheduled_tokens:
        raise PrepError(
            f"{where}.num_draft_tokens: {counted(drafts, 'draft')} of "
            f"{counted(request.num_scheduled_tokens, 'scheduled token')} leave no token that is "
            "not a draft"
        )
    if len(request.draft_token_ids) != drafts:
        raise PrepError(
            f"{where}.draft_token_ids: {counted(len(request.draft_token_ids), 'id')} for "
            f"num_draft_tokens {drafts}"
        )
    known = request.seq_len - drafts
    if len(request.token_ids) < max(known, request.num_prompt_tokens):
        raise PrepError(
            f"{where}.token_ids: {counted(len(request.token_ids), 'id')}, but "
            f"{max(known, request.num_prompt_tokens)} are needed (prompt, computed and scheduled)"
        )
    if len(request.token_ids) > scenario.max_model_len:
        raise PrepError(
            f"{where}.token_ids: {counted(len(request.token_ids), 'id')}, past "
            f"max_model_len {scenario.max_model_len}"
        )
    if drafts and len(request.token_ids) > known:
        raise PrepError(
            f"{where}.token_ids: {counted(len(request.token_ids), 'id')}, but drafts begin at "
            f"position {known}"
        )


def _check_inputs(scenario: Scenario, request: ScenarioRequest, where: str) -> None:
    end = 0
    for place, item in enumerate(request.multimodal):
        if item.offset < end or item.end > request.num_prompt_tokens:
            raise PrepError(
                f"{where}.multimodal.{place}: {item.modality} from {item.offset} to {item.end}; "
                "items must not overlap, and must lie in the prompt's "
                f"{counted(request.num_prompt_tokens, 'token')}"
            )
        end = item.end
    if request.mrope_positions is None:
        return
    lengths = [len(row) for row in request.mrope_positions]
    if lengths != [request.num_prompt_tokens] * scenario.mrope_dims or not lengths:
        raise PrepError(
            f"{where}.mrope_positions: rows of {lengths} positions; mrope_dims "
            f"{scenario.mrope_dims} needs as many rows, each of num_prompt_tokens = "
            f"{request.num_prompt_tokens}"
        )


def _check_blocks(
    scenario: Scenario,
    group: ScenarioGroup,
    request: ScenarioRequest,
    block_ids: list[int],
    where: str,
) -> None:
    per_block = scenario.tokens_per_block(group)
    needed = -(-request.seq_len // per_block)
    columns = -(-scenario.max_model_len // per_block)
    if not needed <= len(block_ids) <= columns:
        raise PrepError(
            f"{where}: {counted(len(block_ids), 'block')} of {counted(per_block, 'token')}; "
            f"num_computed_tokens + num_scheduled_tokens = {request.seq_len} needs {needed}, and a "
            f"row holds {columns}"
        )
    kept_from = first_needed(
        request.num_computed_tokens,
        group.sliding_window,
        group.attention_chunk_size,
        group.holds_states,
    )
    for place, block in enumerate(block_ids):
        freed = (place + 1) * group.block_size <= kept_from
        if block == 0 and not freed:
            raise PrepError(f"{where}.{place}: block 0 is the null block, which no request can own")
        if (block + 1) * group.block_size >= 1 << 31:
            raise PrepError(f"{where}.{place}: slots of block {block} exceed 32 bits")
    owned = Counter(block for block in block_ids if block)
    for block, count in owned.items():
        if count > 1:
            raise PrepError(f"{where}: block {block} is listed {count} times")


def _check_owners(
    group: ScenarioGroup, per_block: int, requests: list[ScenarioRequest], where: list[str]
) -> None:
    owner: dict[int, tuple[int, bool]] = {}
    for index, request in enumerate(requests):
        full = request.num_computed_tokens // per_block
        for place, block in enumerate(group.block_ids[index]):
            is_prefix = place < full
            if block and block in owner:
                other, other_is_prefix = owner[block]
                if not (is_prefix and other_is_prefix):
                    raise PrepError(
                        f"{where[index]}.{place}: block {block} belongs to "
                        f"requests.{other} too; only full prefix blocks may be shared"
                    )
            elif block:
                owner[block] = (index, is_prefix)
