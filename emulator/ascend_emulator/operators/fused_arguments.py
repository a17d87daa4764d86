"""Arguments of ``npu_fused_infer_attention_score``, both versions under one set of names.

Both versions compute the same and differ in the names of arguments. Their signatures are bound from
the recorded schemas, so a wrong keyword fails here as it fails in torch's dispatcher.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from ascend_emulator.operators import schemas
from ascend_emulator.operators.constraint import Call

V2_NAMES = {
    "actual_seq_lengths": "actual_seq_qlen",
    "actual_seq_lengths_kv": "actual_seq_kvlen",
    "num_heads": "num_query_heads",
    "scale": "softmax_scale",
    "softmax_lse_flag": "return_softmax_lse",
}
"""Names of the second version where they differ."""
Demand = Callable[..., None]
LATENT_HEAD_SIZE = 512
"""Head size of latent attention over rows of the cache."""

HANDLED = (
    *("query", "key", "value", "atten_mask", "actual_seq_lengths", "actual_seq_lengths_kv"),
    *("block_table", "num_heads", "scale", "pre_tokens", "next_tokens", "input_layout"),
    *("num_key_value_heads", "sparse_mode", "inner_precise", "block_size", "softmax_lse_flag"),
    *("query_rope", "key_rope"),
)
"""Arguments that the references read; every other one has to keep its default."""


@dataclass(frozen=True)
class FusedAttention:
    """Arguments of one call under the names of the first version.

    ``B`` requests, ``T`` query tokens, ``N`` heads, ``Nkv`` K/V heads, ``D`` head size.
    """

    call: Call
    version: int
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    atten_mask: torch.Tensor | None
    actual_seq_lengths: Sequence[int] | None
    actual_seq_lengths_kv: Sequence[int] | None
    block_table: torch.Tensor | None  # [B, max_blocks] int32
    num_heads: int
    scale: float
    pre_tokens: int
    next_tokens: int
    input_layout: str
    num_key_value_heads: int
    sparse_mode: int
    inner_precise: int
    block_size: int
    softmax_lse_flag: bool
    query_rope: torch.Tensor | None
    key_rope: torch.Tensor | None
    unsupported: dict[str, object]

    def demand_of(self, kernel: str) -> Demand:
        """Return `Call.demand` of this call for what one kernel, or one subject, demands."""
        return replace(self.call, family=f"fused attention, {kernel}").demand

    @property
    def is_tnd(self) -> bool:
        """Whether requests are concatenated instead of padded side by side."""
        return self.input_layout in ("TND", "TND_NTD")

    @property
    def has_rope(self) -> bool:
        """Whether rotated parts of query and key are given beside them (latent attention)."""
        return self.query_rope is not None or self.key_rope is not None

    @property
    def is_absorbed(self) -> bool:
        """Whether keys are latent rows, which are values, too."""
        return self.has_rope and self.head_size == LATENT_HEAD_SIZE

    @property
    def is_paged(self) -> bool:
        return self.block_table is not None

    @property
    def kv_heads(self) -> int:
        """Number of K/V heads; the default 0 means as many as query heads."""
        return self.num_key_value_heads or self.num_heads

    @property
    def has_equal_heads(self) -> bool:
        return self.kv_heads == self.num_heads

    @property
    def head_size(self) -> int:
        if self.input_layout == "BSH":
            return self.query.shape[2] // self.num_heads
        return self.query.shape[-1]

    @property
    def starts(self) -> list[int]:
        """Where each request's query tokens start in TND, and where the last one's end."""
        return [0, *(self.actual_seq_lengths or ())]

    @property
    def batch_size(self) -> int:
        return len(self.starts) - 1 if self.is_tnd else self.query.shape[0]

    @property
    def query_width(self) -> int:
        """Query tokens of the longest request, ``Q_S``."""
        if self.is_tnd:
            return max((b - a for a, b in pairwise(self.starts)), default=0)
        return self.query.shape[2 if self.input_layout.startswith("BNSD") else 1]

    @property
    def packed_query_lengths(self) -> list[int]:
        """Query tokens of each request in TND."""
        return [b - a for a, b in pairwise(self.starts)]

    @property
    def packed_kv_lengths(self) -> list[int]:
        """Keys of each request in TND, where lengths are only cumulative without a block table."""
        lengths = list(self.actual_seq_lengths_kv or ())
        return lengths if self.is_paged else [b - a for a, b in pairwise([0, *lengths])]

    @property
    def blocks_in_use(self) -> int:
        """Blocks of a paged call over all requests; a shared block counts for each of them."""
        lengths = self.actual_seq_lengths_kv if self.is_tnd else self.kv_lengths(0)
        return sum(-(-length // self.block_size) for length in lengths or ())

    def by_request(self, tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
        """View a query, fresh K or fresh V as ``[B, S, N, D]`` or ``[T, N, D]``."""
        if self.input_layout == "BSH":
            return tensor.unflatten(2, (num_heads, -1))
        if self.input_layout.startswith("BNSD"):
            return tensor.transpose(1, 2)
        return tensor

    def cache_rows(self, cache: torch.Tensor) -> torch.Tensor:
        """View a cache of either form as ``[num_blocks, block_size, Nkv, D]``."""
        if cache.dim() == 3:
            return cache.unflatten(2, (self.kv_heads, -1))  # of key, value and key_rope alike
        return cache.transpose(1, 2)

    def query_lengths(self) -> list[int]:
        """Return the query tokens of each request where requests lie side by side."""
        # Documented: without effect for one query token.
        given = None if self.query_width == 1 else self.actual_seq_lengths
        return self._each(given, self.query_width)

    def kv_lengths(self, width: int) -> list[int]:
        """Return the keys of each request where requests lie side by side, `width` by default."""
        return self._each(self.actual_seq_lengths_kv, width)

    def _each(self, given: Sequence[int] | None, default: int) -> list[int]:
        if given is None:
            return [default] * self.batch_size
        return list(given[: self.batch_size]) if len(given) > 1 else [given[0]] * self.batch_size

    @property
    def output_shape(self) -> tuple[int, ...]:
        """Shape of ``attention_out``, as torch_npu's Meta function infers it."""
        shape = tuple(self.query.shape)
        if self.input_layout == "BNSD_BSND":
            return shape[0], shape[2], shape[1], shape[3]
        if self.input_layout == "BNSD_NBSD":
            return shape[1], shape[0], shape[2], shape[3]
        if self.input_layout == "TND_NTD":
            return shape[1], shape[0], shape[2]
        return shape

    @property
    def lse_shape(self) -> tuple[int, ...]:
        """Shape of ``softmax_lse`` when it is asked for."""
        if self.is_tnd:
            return self.query.shape[0], self.num_heads, 1
        return self.batch_size, self.num_heads, self.query_width, 1


def bind(name: str, overload: str, args: tuple, kwargs: dict) -> tuple[FusedAttention, dict]:
    """Bind a call to its schema; also return all arguments under the schema's own names."""
    version = 2 if "_v2" in name else 1
    bound = schemas.signature(name, overload).bind(*args, **kwargs)
    bound.apply_defaults()
    arguments = dict(bound.arguments)
    renamed = V2_NAMES if version == 2 else {}
    fields = {field: arguments[renamed.get(field, field)] for field in HANDLED}
    handled = {renamed.get(field, field) for field in HANDLED} | {"workspace", "out"}
    parameters = schemas.signature(name, overload).parameters
    unsupported = {
        argument: value
        for argument, value in arguments.items()
        if argument not in handled
        and value is not parameters[argument].default
        # Tensors compare elementwise, and none of them is a default.
        and (isinstance(value, torch.Tensor) or value != parameters[argument].default)
    }
    operator = f"{name}.{overload}" if overload else name
    call = Call("fused attention", operator, renamed)
    return FusedAttention(call, version, **fields, unsupported=unsupported), arguments
