"""The shape of an engine: what its steps consist of, whatever their number of tokens."""

from dataclasses import dataclass

from vllm_npu_prep.prep.dcp import NO_DCP, DCPRank
from vllm_npu_prep.prep.latent_split import NO_LATENT_SPLIT, LatentSplit
from vllm_npu_prep.prep.local_attention import NO_LOCAL_GROUPS, LocalGroups
from vllm_npu_prep.prep.pcp import NO_PCP, PCPRank
from vllm_npu_prep.prep.recurrent_states import NO_RECURRENT_GROUPS, RecurrentGroups


@dataclass(frozen=True)
class EngineShape:
    """What decides, together with a step's padded sizes, which arrays the step has.

    Where an engine lacks a part, an object stands for none of it and is false: ``if shape.local``
    asks whether there is chunked local attention.
    """

    # The number of KV-cache groups, each of which has its own block table and slots
    num_groups: int = 1
    # The most rows of logits of one request: one for each draft, and one after them
    max_logits_per_req: int = 1
    mrope_dims: int = 0  # the dimensions of M-RoPE positions; 0 for a model without them
    local: LocalGroups = NO_LOCAL_GROUPS  # the groups with chunked local attention
    latent: LatentSplit = NO_LATENT_SPLIT  # how steps are split for latent attention
    states: RecurrentGroups = NO_RECURRENT_GROUPS  # the groups that hold recurrent states
    # The part of each context that this rank keeps (decode context parallelism)
    dcp: DCPRank = NO_DCP
    # The ranks that share a step's tokens (prefill context parallelism)
    pcp: PCPRank = NO_PCP
    # Whether steps tell the device the request rows of their requests (vLLM's V2 runner)
    has_request_rows: bool = False


PLAIN_SHAPE = EngineShape()
"""One KV-cache group of causal attention, without speculation."""
