"""The settings of a record: everything that isn't an array of the step.

They are a strict pydantic model, because records are files that others may have changed.
"""

from typing import Annotated, Any, Literal, Self, cast

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from vllm_npu_prep.prep.dcp import NO_DCP, DCPRank
from vllm_npu_prep.prep.latent_split import NO_LATENT_SPLIT, LatentSplit
from vllm_npu_prep.prep.layout import StepLayout
from vllm_npu_prep.prep.local_attention import NO_LOCAL_GROUPS, LocalGroups
from vllm_npu_prep.prep.padding import GraphMode, Padding
from vllm_npu_prep.prep.pcp import NO_PCP, PCPRank
from vllm_npu_prep.prep.recurrent_states import RecurrentGroups
from vllm_npu_prep.prep.shape import EngineShape
from vllm_npu_prep.wording import counted


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("must hold printable characters only")
    return text


Count = Annotated[int, Field(ge=0, le=1 << 24)]
Positive = Annotated[int, Field(ge=1, le=1 << 24)]
BlockSize = Annotated[int, Field(ge=1, le=1 << 16)]
Size = Annotated[int, Field(ge=1, le=1 << 20)]
Text = Annotated[str, AfterValidator(_printable)]
Seconds = Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)]


class Strict(BaseModel):
    """An object in a file: no other keys, and no values of other types."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @classmethod
    def part(cls, value: object) -> Self | None:
        """Return what a file says of an object of the core; None if that is false."""
        return cls.model_validate(value, from_attributes=True) if value else None


class LayerGroup(Strict):
    """Layers with the same view of the step: a KV-cache group, or its part with one window."""

    group: Annotated[int, Field(ge=0, le=255)]  # the group whose block table they use
    sliding_window: Positive | None = None
    attention_chunk_size: Positive | None = None
    causal: bool = True
    # Most tokens of a decode, in a group with recurrent states
    # (`vllm_npu_prep.prep.recurrent_states`)
    state_threshold: Positive | None = None
    # Most positions to which a token of sparse attention attends
    index_topk: Positive | None = None
    state_drafts: Annotated[int, Field(ge=0, le=1 << 10)] = 0  # `RecurrentGroups.num_drafts`

    @property
    def holds_states(self) -> bool:
        return self.state_threshold is not None


class StepTimes(Strict):
    """When a step was prepared, and how long that took."""

    started: Seconds  # on the host's monotonic clock, which all processes of a host share
    prepared: Seconds  # that it took
    waits: Count  # how often it waited for an earlier copy (`vllm_npu_prep.device.staging`)


class RecordLatent(Strict):
    """How steps are split for latent attention: `LatentSplit`."""

    decode_threshold: Positive
    workspace_tokens: Positive
    block_size: BlockSize

    @model_validator(mode="after")
    def _fits(self) -> Self:
        self.split(0)
        return self

    def split(self, max_model_len: int) -> LatentSplit:
        sizes = self.decode_threshold, self.workspace_tokens, self.block_size
        return LatentSplit(*sizes, max_model_len)


class RecordDCP(Strict):
    """The part of each context that the rank kept: `DCPRank`."""

    world_size: Annotated[int, Field(ge=1, le=1 << 10)]
    rank: Annotated[int, Field(ge=0, lt=1 << 10)]
    interleave_size: BlockSize

    @model_validator(mode="after")
    def _fits(self) -> Self:
        self.dcp_rank()
        return self

    def dcp_rank(self) -> DCPRank:
        return DCPRank(self.world_size, self.rank, self.interleave_size)


class RecordPCP(Strict):
    """The ranks that shared the tokens of the step, and the record's own: `PCPRank`."""

    world_size: Annotated[int, Field(ge=1, le=1 << 10)]
    rank: Annotated[int, Field(ge=0, lt=1 << 10)]

    @model_validator(mode="after")
    def _fits(self) -> Self:
        self.pcp_rank(1)
        return self

    def pcp_rank(self, max_num_reqs: int) -> PCPRank:
        return PCPRank(self.world_size, self.rank, 2 * max_num_reqs)


class RecordExperts(Strict):
    """Where the experts of each layer were that counts them, and for which load they were placed.

    Attributes
    ----------
    rank, num_ranks
        The rank of the record among those that share experts.
    placed
        By layer: the logical expert that each physical one is. Ranks have equal parts of them.
    load
        By layer: tokens of each logical expert, counted by all ranks before the last exchange.
    """

    rank: Annotated[int, Field(ge=0, lt=1 << 16)]
    num_ranks: Annotated[int, Field(ge=1, le=1 << 16)]
    placed: list[list[Count]]
    load: list[list[Annotated[int, Field(ge=0, lt=1 << 62)]]]

    @model_validator(mode="after")
    def _fits(self) -> Self:
        for placed, load in zip(self.placed, self.load, strict=True):
            if len(placed) % self.num_ranks or not set(placed) <= set(range(len(load))):
                on = counted(self.num_ranks, "rank")
                raise ValueError(f"experts: {placed} on {on}, of {len(load)}")
        return self

    def shares(self, layer: int) -> list[float]:
        """Return the part of a layer's load that each rank has; replicas share that of theirs."""
        placed, load = self.placed[layer], self.load[layer]
        own, total = len(placed) // self.num_ranks, max(sum(load), 1)
        of_each = [load[expert] / placed.count(expert) / total for expert in placed]
        return [sum(of_each[rank * own :][:own]) for rank in range(self.num_ranks)]


class WatchedRunner(Strict):
    """The other runner that prepared a step (`vllm_npu_prep.watch`)."""

    name: Text
    version: Text
    # What it does in another way than this plugin's runners, on purpose; a sentence each
    differs: list[Text]


class RecordSettings(Strict):
    """All but the arrays: sizes of the engine's tables and of the step, and the padding."""

    format: Literal[2] = 2  # `vllm_npu_prep.records.record.FORMAT`
    step: Annotated[int, Field(ge=0, lt=1 << 62)]  # how many came before it since start-up
    req_ids: Annotated[list[Text], Field(min_length=1, max_length=1 << 16)]
    # Sizes of the engine's tables; the lists have an entry for each KV-cache group with a table
    max_num_reqs: Annotated[int, Field(ge=1, le=1 << 16)]
    max_model_len: Positive
    chunked_prefill: bool = True
    mask: Literal["dense", "compressed"]  # form of masks
    mask_itemsize: Literal[1, 2, 4]  # bytes of a cell of dense ones
    block_sizes: Annotated[list[BlockSize], Field(max_length=256)]
    max_num_blocks: Annotated[list[Positive], Field(max_length=256)]
    groups: Annotated[list[LayerGroup], Field(max_length=1024)]  # in the engine's order
    total_num_scheduled_tokens: Size
    mode: Literal["NONE", "PIECEWISE", "FULL"]  # this and three below: `prep.padding.Padding`
    kind: Text  # `vllm_npu_prep.graph.counts.StepCounts.kind`
    num_input_tokens: Size
    num_reqs_padded: Size
    decode_query_len: Count
    max_logits: Size  # `vllm_npu_prep.prep.layout.StepLayout`
    max_drafts: Count
    mrope_dims: Annotated[int, Field(ge=0, le=4)]  # `vllm_npu_prep.prep.shape.EngineShape`
    num_sampled_rows: Count  # `vllm_npu_prep.prep.batch.StepBatch`
    num_sampled_drafts: Annotated[int, Field(ge=0, le=1 << 10)]
    takes_embeds: bool  # what was decided (`vllm_npu_prep.prep.embeds`)
    modalities: Annotated[list[Text], Field(max_length=1 << 20)]  # kind of each run of placeholders
    latent: RecordLatent | None = None  # None without latent attention
    dcp: RecordDCP | None = None  # None without decode context parallelism
    pcp: RecordPCP | None = None  # None without prefill context parallelism
    experts: RecordExperts | None = None  # None unless experts move (--enable-eplb)
    times: StepTimes | None = None  # None in records that older versions wrote
    runner: WatchedRunner | None = None  # None for this plugin's own runners

    @model_validator(mode="after")
    def _agrees(self) -> "RecordSettings":
        size = self.dcp.interleave_size if self.dcp else 1
        if any(block_size % size for block_size in self.block_sizes):
            raise ValueError(f"dcp: blocks of {self.block_sizes} are no whole runs of {size}")
        _ = self._states  # thresholds and drafts fit each other
        if self.pcp and self.num_input_tokens % self.pcp.world_size:
            raise ValueError(f"pcp: ranks have unequal parts of {self.num_input_tokens} tokens")
        return self

    @classmethod
    def of(cls, padding: Padding, layout: StepLayout, **more: Any) -> Self:
        """Return the settings of a step of these sizes; `more` has those that they don't tell."""
        return cls(
            mode=cast(Any, padding.mode.value),
            num_input_tokens=padding.num_input_tokens,
            num_reqs_padded=padding.num_reqs_padded,
            decode_query_len=padding.decode_query_len,
            max_logits=layout.max_logits,
            max_drafts=layout.max_drafts,
            mrope_dims=layout.shape.mrope_dims,
            latent=RecordLatent.part(layout.shape.latent),
            dcp=RecordDCP.part(layout.shape.dcp),
            pcp=RecordPCP.part(layout.shape.pcp),
            **more,
        )

    @property
    def num_reqs(self) -> int:
        return len(self.req_ids)

    @property
    def shape(self) -> EngineShape:
        """The shape of the engine that prepared the step."""
        chunked = {g.group: g.attention_chunk_size for g in self.groups if g.attention_chunk_size}
        local = NO_LOCAL_GROUPS
        if chunked:
            group, chunk_size = next(iter(chunked.items()))
            per_chunk = chunk_size // self.block_sizes[group]
            local = LocalGroups(chunk_size, per_chunk, tuple(chunked))
        return EngineShape(
            num_groups=len(self.block_sizes),
            max_logits_per_req=1 - (-self.max_drafts // self.num_reqs_padded),
            mrope_dims=self.mrope_dims,
            local=local,
            latent=self.latent.split(self.max_model_len) if self.latent else NO_LATENT_SPLIT,
            states=self._states,
            dcp=self.dcp.dcp_rank() if self.dcp else NO_DCP,
            pcp=self.pcp.pcp_rank(self.max_num_reqs) if self.pcp else NO_PCP,
        )

    @property
    def _states(self) -> RecurrentGroups:
        found = {g.group: g for g in self.groups if g.holds_states}
        threshold = max((g.state_threshold or 1 for g in found.values()), default=1)
        drafts = max((g.state_drafts for g in found.values()), default=0)
        return RecurrentGroups(tuple(found), threshold, drafts)

    @property
    def index_topk(self) -> int | None:
        """The most positions to which a token attends; None without sparse attention."""
        return next((group.index_topk for group in self.groups if group.index_topk), None)

    @property
    def main_group(self) -> int:
        """The index of the first group that attends; recurrent states have no values of tokens."""
        return next((i for i, g in enumerate(self.groups) if not g.holds_states), 0)

    @property
    def group_prefixes(self) -> list[str]:
        """The prefix of each group's array names; the main group has unprefixed names as well."""
        if len(self.groups) == 1 and not self.groups[0].attention_chunk_size:
            return [""]
        return [f"kv_cache_groups.{index}." for index in range(len(self.groups))]

    @property
    def layout(self) -> StepLayout:
        return StepLayout(self.num_input_tokens, self.num_reqs_padded, self.shape)

    @property
    def padding(self) -> Padding:
        return Padding(
            self.num_input_tokens,
            self.num_reqs_padded,
            self.decode_query_len,
            GraphMode(self.mode),
        )
