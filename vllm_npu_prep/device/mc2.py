"""MC2: two operators of torch_npu send tokens to the ranks of their experts, and bring them back.

They take the place of vLLM's gather and scatter in steps that are small enough. What they take was
read in Ascend/op-plugin (August 2026, the pages of ``npu_moe_distribute_dispatch_v2`` and
``npu_moe_distribute_combine_v2``) and in cann/ops-transformer (November 2025, their tiling, for
CANN 8.5). When they are chosen is the rule of vllm-project/vllm-ascend 0.26
(``ascend_forward_context.py``).
"""

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from vllm.utils.math_utils import cdiv

from vllm_npu_prep.errors import PrepError

MC2 = "mc2"
"""The key in the forward context of a pass whose tokens are exchanged: an `Mc2`."""

OPERATORS = ("npu_moe_distribute_dispatch_v2", "npu_moe_distribute_combine_v2")
MAX_TOP_K = 16
MB = 1 << 20
DEFAULT_BUFFER = 200
"""MB of ``HCCL_BUFFSIZE`` unless it is given."""
CHOSEN_ON_A2 = 16, 24
"""The fewest ranks, and the most experts of a rank, with which MC2 is chosen on A2."""


class Limits(NamedTuple):
    """What the operators take on a chip."""

    chip: str
    ranks: Collection[int]
    tokens: int  # of a rank
    widths: Collection[int]
    experts: int
    experts_of_rank: int
    comm_alg: str


A2 = Limits(
    "A2",
    (*range(2, 9), 16, 32, 64, 128, 256),
    256,
    range(32, 7169, 32),
    1024,
    1024,
    "fullmesh",  # without it, variables of HCCL choose
)
A2_8_5 = A2._replace(ranks=range(8, 257, 8), experts=512, experts_of_rank=24)
A3 = Limits("A3", range(2, 769), 512, range(1024, 8193), 1024, 1024, "")


def limits_of(device_name: str, cann: tuple[int, int] | None) -> Limits | None:
    """Return the limits of a chip by its name, with a release of CANN; None for other chips."""
    if device_name.startswith("Ascend910_93"):
        return A3
    if not device_name.startswith("Ascend910B"):
        return None
    return A2_8_5 if cann is not None and cann < (9, 0) else A2


class ExpertSizes(NamedTuple):
    """A layer of experts: all of them, those of a token, and the width of a row."""

    experts: int
    top_k: int
    width: int


@dataclass(frozen=True)
class Mc2:
    """The ranks that exchange tokens, by the names that the operators use.

    `active` are the tokens of this rank that have experts, bool ``[num_tokens]`` with True before
    False, or None for all of them.
    """

    group: str
    rank: int
    num_ranks: int
    max_tokens: int  # of a rank, in a step whose tokens are exchanged
    comm_alg: str
    active: torch.Tensor | None = None


def buffer_bytes(limits: Limits, sizes: ExpertSizes, num_ranks: int, tokens: int) -> int:
    """Return the bytes of HCCL's buffer that a call with so many tokens on each rank needs."""
    local = sizes.experts // num_ranks
    if limits.chip == "A2":
        pairs = tokens * num_ranks * min(local, sizes.top_k)
        return 2 * (pairs * sizes.width * 2 + (2 << 20))
    sent = 512 * cdiv(32 * cdiv(2 * sizes.width, 32) + 64, 512)
    back = 512 * cdiv(2 * sizes.width, 512)
    return 2 * tokens * (local * num_ranks * sent + sizes.top_k * back)


def given_buffer() -> int:
    """Return the size of HCCL's buffer of a group, in bytes."""
    given = os.environ.get("HCCL_BUFFSIZE", "")
    return (int(given) if given.isdigit() and int(given) else DEFAULT_BUFFER) * MB


def tokens_that_fit(limits: Limits, sizes: ExpertSizes, num_ranks: int, buffer: int) -> int:
    """Return how many tokens each rank may have in a call, by the buffer."""
    one, two = (buffer_bytes(limits, sizes, num_ranks, n) for n in (1, 2))
    each = two - one
    return max(0, (buffer - (one - each)) // each)


def why_not_taken(limits: Limits, sizes: ExpertSizes, num_ranks: int) -> str:
    """Return what of a layer the operators don't take; empty if they take it."""
    local = sizes.experts // num_ranks
    if num_ranks not in limits.ranks:
        return f"{num_ranks} ranks"
    if (
        sizes.experts % num_ranks
        or sizes.experts > limits.experts
        or local > limits.experts_of_rank
    ):
        return f"{sizes.experts} experts on {num_ranks} ranks"
    if sizes.width not in limits.widths:
        return f"rows of {sizes.width} numbers"
    if sizes.top_k > MAX_TOP_K:
        return f"{sizes.top_k} experts for each token"
    return ""


def is_chosen(limits: Limits, sizes: ExpertSizes, num_ranks: int) -> bool:
    """Return whether vllm-ascend would choose MC2 for small steps, if the operators take them."""
    fewest, most = CHOSEN_ON_A2
    return limits.chip != "A2" or (num_ranks >= fewest and sizes.experts // num_ranks <= most)


def tokens_to_exchange(
    vllm_config: Any, limits: Limits, layers: Collection[ExpertSizes], is_asked: bool
) -> tuple[int, str]:
    """Return up to how many tokens of a rank the experts of a model exchange; if 0, also why.

    Raises
    ------
    PrepError
        If `is_asked`, and a layer or HCCL's buffer is not as the operators want it.
    """
    parallel = vllm_config.parallel_config
    num_ranks = parallel.data_parallel_size * parallel.tensor_parallel_size
    why = next(filter(None, (why_not_taken(limits, each, num_ranks) for each in layers)), "")
    if why and is_asked:
        raise PrepError(
            f'"npu_prep.mc2" = "on": {limits.chip} does not take {why}; leave the option out'
        )
    if not why and not is_asked:
        chosen = all(is_chosen(limits, each, num_ranks) for each in layers)
        why = "" if chosen else f"{num_ranks} ranks on {limits.chip}, where vllm-ascend gathers"
    if why:
        return 0, why
    asked, buffer = asked_tokens(vllm_config, limits), given_buffer()
    fit = min(tokens_that_fit(limits, each, num_ranks, buffer) for each in layers)
    needed = max(buffer_bytes(limits, each, num_ranks, asked) for each in layers)
    if fit < asked and is_asked:
        raise PrepError(
            f'"npu_prep.mc2" = "on": steps of {asked} tokens on each of {num_ranks} ranks need '
            f"HCCL_BUFFSIZE={cdiv(needed, MB)} or more, {buffer // MB} MB are given; set it on all "
            "ranks, or lower --max-cudagraph-capture-size or --max-num-seqs"
        )
    return min(asked, fit), f"HCCL_BUFFSIZE={buffer // MB}, which holds no token" * (fit == 0)


def asked_tokens(vllm_config: Any, limits: Limits) -> int:
    """Return the most tokens of a rank for which MC2 is asked: those of the largest graph, or of
    the largest batch of decodes."""
    compilation = vllm_config.compilation_config
    tokens = compilation.max_cudagraph_capture_size if compilation.cudagraph_capture_sizes else 0
    if not tokens:
        tokens = vllm_config.scheduler_config.max_num_seqs * vllm_config.uniform_decode_query_len
    parts = cdiv(tokens, vllm_config.parallel_config.tensor_parallel_size)
    return min(parts, limits.tokens)


def join(ranks: Sequence[int]) -> tuple[str, int]:
    """Make a group of these ranks, which no other operator uses; return its name and this rank.

    Every one of the ranks has to call it. HCCL takes the group's buffers now: in a collective,
    which lets other threads of the process run while it waits for the other ranks.
    ``get_hccl_comm_name`` alone would wait, too, but hold the GIL meanwhile (torch_npu 2.13): if
    another rank waited for something that this process's Python code has to do, neither would go
    on.
    """
    group: Any = dist.new_group(list(ranks), backend="hccl", use_local_synchronization=True)
    dist.all_reduce(torch.zeros(1, device="npu"), group=group)
    rank = dist.get_rank(group)
    return group._get_backend(torch.device("npu")).get_hccl_comm_name(rank), rank
