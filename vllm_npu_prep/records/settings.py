"""The settings of a record: everything that isn't an array of the step.

They are a strict pydantic model, because records are files that others may have changed. Parts for
which the pure core has a class are of that class: `FORMS` says what their JSON may be.
"""

from typing import Annotated, Any, Literal, NamedTuple

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    create_model,
    field_serializer,
    field_validator,
    model_validator,
)

from vllm_npu_prep.prep.context_shards import WHOLE_CONTEXTS, ContextShards
from vllm_npu_prep.prep.latent import NO_LATENT_SPLIT, LatentSplit
from vllm_npu_prep.prep.layout import StepLayout
from vllm_npu_prep.prep.local_attention import NO_LOCAL_GROUPS, LocalGroups
from vllm_npu_prep.prep.padding import GraphMode, Padding
from vllm_npu_prep.prep.shape import EngineShape
from vllm_npu_prep.prep.states import RecurrentGroups


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


class LayerGroup(Strict):
    """Layers with the same view of the step: a KV-cache group, or its part with one window."""

    group: Annotated[int, Field(ge=0, le=255)]  # the group whose block table they use
    sliding_window: Positive | None = None
    attention_chunk_size: Positive | None = None
    causal: bool = True
    # Most tokens of a decode, in a group with recurrent states (`vllm_npu_prep.prep.states`)
    state_threshold: Positive | None = None
    state_drafts: Annotated[int, Field(ge=0, le=1 << 10)] = 0  # `RecurrentGroups.num_drafts`

    @property
    def holds_states(self) -> bool:
        return self.state_threshold is not None


class StepTimes(NamedTuple):
    """When a step was prepared, and how long that took.

    Attributes
    ----------
    started
        When its preparation began: seconds of the host's monotonic clock, which all processes of
        a host share.
    prepared
        Seconds that it took.
    waits
        How often it waited for an earlier copy to the device (`vllm_npu_prep.device.staging`).
    """

    started: float
    prepared: float
    waits: int


def _form(**fields: Any) -> type[Strict]:
    definitions: dict[str, Any] = {name: (kind, ...) for name, kind in fields.items()}
    return create_model("Form", __base__=Strict, **definitions)


FORMS: dict[str, tuple[type, type[Strict]]] = {
    "latent": (
        LatentSplit,
        _form(decode_threshold=Positive, workspace_tokens=Positive, block_size=BlockSize),
    ),
    "dcp": (
        ContextShards,
        _form(
            world_size=Annotated[int, Field(ge=1, le=1 << 10)],
            rank=Annotated[int, Field(ge=0, lt=1 << 10)],
            interleave_size=BlockSize,
        ),
    ),
    "times": (StepTimes, _form(started=Seconds, prepared=Seconds, waits=Count)),
}
"""By key of the settings: the class of the object, and the keys and limits of its JSON."""


class RecordSettings(Strict):
    """All but the arrays: sizes of the engine's tables and of the step, and the padding.

    Attributes
    ----------
    step
        Its number: how many came before it since start-up.
    max_num_reqs, max_model_len, block_sizes, max_num_blocks
        Sizes of the engine's tables; the latter two for each KV-cache group that has one.
    mask, mask_itemsize
        Form of masks; bytes of a cell of dense ones.
    groups
        Layers with the same view of the step, in the engine's order.
    mode, num_input_tokens, num_reqs_padded, decode_query_len
        See `vllm_npu_prep.prep.padding.Padding`.
    kind
        How the step ran, and why if eager (`vllm_npu_prep.graph.counts.StepCounts.kind`).
    max_logits, max_drafts
        See `vllm_npu_prep.prep.layout.StepLayout`.
    mrope_dims
        See `vllm_npu_prep.prep.shape.EngineShape`.
    num_sampled_rows, num_sampled_drafts
        See `vllm_npu_prep.prep.batch.StepBatch`.
    takes_embeds
        What was decided (`vllm_npu_prep.prep.embeds`).
    modalities
        Kind of input of each run of placeholders.
    latent
        How steps are split for latent attention; None without it.
    dcp
        The part of each context that the rank kept; None without decode context parallelism.
    times
        When it was prepared; None in records that older versions wrote.
    """

    format: Literal[2] = 2  # `vllm_npu_prep.records.record.FORMAT`
    step: Annotated[int, Field(ge=0, lt=1 << 62)]
    req_ids: Annotated[list[Text], Field(min_length=1, max_length=1 << 16)]
    max_num_reqs: Annotated[int, Field(ge=1, le=1 << 16)]
    max_model_len: Positive
    chunked_prefill: bool = True
    mask: Literal["dense", "compressed"]
    mask_itemsize: Literal[1, 2, 4]
    block_sizes: Annotated[list[BlockSize], Field(max_length=256)]
    max_num_blocks: Annotated[list[Positive], Field(max_length=256)]
    groups: Annotated[list[LayerGroup], Field(max_length=1024)]
    total_num_scheduled_tokens: Size
    mode: Literal["NONE", "PIECEWISE", "FULL"]
    kind: Text
    num_input_tokens: Size
    num_reqs_padded: Size
    decode_query_len: Count
    max_logits: Size
    max_drafts: Count
    mrope_dims: Annotated[int, Field(ge=0, le=4)]
    num_sampled_rows: Count
    num_sampled_drafts: Annotated[int, Field(ge=0, le=1 << 10)]
    takes_embeds: bool
    modalities: Annotated[list[Text], Field(max_length=1 << 20)]
    latent: LatentSplit | None = None
    dcp: ContextShards | None = None
    times: StepTimes | None = None

    @field_validator(*FORMS, mode="plain")
    @classmethod
    def _of_the_core(cls, given: Any, info: ValidationInfo) -> Any:
        """Make the object of its JSON; its class refuses fields that contradict each other."""
        assert info.field_name is not None
        kind, form = FORMS[info.field_name]
        if given is None or isinstance(given, kind):
            return given
        found = dict(form.model_validate(given))
        if kind is LatentSplit:  # 0: that one is refused already
            found["max_model_len"] = info.data.get("max_model_len", 0)
        return kind(**found)

    @field_serializer(*FORMS)
    def _as_json(self, value: Any, info: Any) -> Any:
        names = FORMS[info.field_name][1].model_fields
        return None if value is None else {name: getattr(value, name) for name in names}

    @model_validator(mode="after")
    def _whole_runs(self) -> "RecordSettings":
        size = 1 if self.dcp is None else self.dcp.interleave_size
        if any(block_size % size for block_size in self.block_sizes):
            raise ValueError(f"dcp: blocks of {self.block_sizes} are no whole runs of {size}")
        return self

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
            latent=self.latent or NO_LATENT_SPLIT,
            states=self._states,
            dcp=self.dcp or WHOLE_CONTEXTS,
        )

    @property
    def _states(self) -> RecurrentGroups:
        found = {g.group: g for g in self.groups if g.holds_states}
        threshold = max((g.state_threshold or 1 for g in found.values()), default=1)
        drafts = max((g.state_drafts for g in found.values()), default=0)
        return RecurrentGroups(tuple(found), threshold, drafts)

    @model_validator(mode="after")
    def _one_split(self) -> "RecordSettings":
        _ = self._states  # thresholds and drafts fit each other
        return self

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
