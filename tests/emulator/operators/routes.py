"""What becomes of a typical call of fused attention in a profile: kernel, and what it refuses."""

from typing import NamedTuple

import torch

from ascend_emulator import profiles
from ascend_emulator.operators.constraint import KernelRefusalError
from ascend_emulator.operators.fused_arguments import V2_NAMES, bind
from ascend_emulator.operators.fused_checks import check
from ascend_emulator.operators.fused_route import route


class Verdict(NamedTuple):
    """What becomes of a call; `constraint` is the family and name of the demand that it breaks."""

    kernel: str
    accepted: bool
    constraint: tuple[str, str] | None = None


class _Form(NamedTuple):
    paged: bool
    sparse_mode: int
    query_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]


FORMS = {
    "prompt": _Form(False, 3, (5, 7), (5, 7)),
    "decode": _Form(True, 0, (1, 1), (40, 300)),
    "chunk": _Form(True, 3, (5, 1), (45, 300)),
    "window": _Form(False, 4, (5, 7), (5, 7)),
    "paged window": _Form(True, 4, (5, 1), (45, 300)),
    "encoder": _Form(False, 0, (5, 7), (5, 7)),
}
"""Forms of call over TND that a model needs, with the lengths of a typical step."""


def explain(
    profile: str,
    *,
    form: str,
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    head_size: int,
    block_size: int = 0,
    query_lens: list[int] | None = None,
    kv_lens: list[int] | None = None,
    num_blocks: int | None = None,
    inner_precise: int = 0,
    version: int = 1,
    cache_rank: int = 3,
) -> Verdict:
    """Say which kernel a call reaches in a profile, and whether it takes it.

    The call goes through the checks of the references, with tensors that have no memory. Lengths
    are those of each request, by default of `FORMS`. Requests share blocks if the cache has fewer
    than all of them together.
    """
    paged, sparse_mode, *lengths = FORMS[form]
    query_lens = list(query_lens or lengths[0])
    kv_lens = list(kv_lens or lengths[1])
    if paged:
        blocks = [-(-length // max(block_size, 1)) for length in kv_lens]
        num_blocks = num_blocks or sum(blocks) + 1
        ids = torch.arange(len(blocks) * max(blocks), dtype=torch.int32) % num_blocks
        cache = (
            (num_blocks, block_size, kv_heads * head_size)
            if cache_rank == 3
            else (num_blocks, kv_heads, block_size, head_size)
        )
        keys = {
            "block_table": ids.view(len(blocks), -1),
            "block_size": block_size,
            "actual_seq_lengths_kv": kv_lens,
        }
    else:
        cache = (sum(kv_lens), kv_heads, head_size)
        keys = {"actual_seq_lengths_kv": _cumulative(kv_lens)}
    arguments = {
        "query": torch.empty(sum(query_lens), heads, head_size, dtype=dtype, device="meta"),
        "key": torch.empty(cache, dtype=dtype, device="meta"),
        "value": torch.empty(cache, dtype=dtype, device="meta"),
        "num_heads": heads,
        "num_key_value_heads": kv_heads,
        "input_layout": "TND",
        "sparse_mode": sparse_mode,
        "actual_seq_lengths": _cumulative(query_lens),
        "inner_precise": inner_precise,
        **keys,
    }
    if sparse_mode:
        arguments["atten_mask"] = torch.empty(2048, 2048, dtype=torch.int8, device="meta")
    if sparse_mode == 4:
        arguments |= {"pre_tokens": 15, "next_tokens": 0}
    name = "npu::npu_fused_infer_attention_score"
    if version == 2:
        name += "_v2"
        arguments = {V2_NAMES.get(key, key): value for key, value in arguments.items()}
    fused, _ = bind(name, "", (), arguments)
    with profiles.using(profile):
        kernel = route(fused)
        try:
            check(fused)
        except KernelRefusalError as refusal:
            return Verdict(kernel, False, refusal.constraint.key)
        return Verdict(kernel, True)


def _cumulative(lengths: list[int]) -> list[int]:
    return torch.tensor(lengths).cumsum(0).tolist()
