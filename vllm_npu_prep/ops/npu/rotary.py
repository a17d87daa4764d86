"""Rotary embeddings of Q and K in one launch, which gathers cosines and sines by position.

The operator takes slices of the fused projection as they are, and writes contiguous Q and K.
Variants of vLLM that only compute other tables of cosines and sines (Llama 3, YaRN, NTK, linear,
proportional) are served by the same layer. vLLM still computes tables by head (FoPE), positions in
chunks (dual chunk attention), and the tables of Ernie, Bailing and openPangu.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.rotary_embedding import (
    DeepseekScalingRotaryEmbedding,
    DynamicNTKAlphaRotaryEmbedding,
    DynamicNTKScalingRotaryEmbedding,
    Gemma4RotaryEmbedding,
    LinearScalingRotaryEmbedding,
    Llama3RotaryEmbedding,
    MRotaryEmbedding,
    NTKScalingRotaryEmbedding,
    Phi3LongRoPEScaledRotaryEmbedding,
    RotaryEmbedding,
    YaRNScalingRotaryEmbedding,
)
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase
from vllm.model_executor.layers.rotary_embedding.common import ApplyRotaryEmb

from vllm_npu_prep.aclnn import MROPE_V2, is_missing
from vllm_npu_prep.ops.npu.switches import is_fused

MULTIPLE = 32
"""Sizes of heads, and of the part of a head that is rotated, must be multiples of 64 bytes."""

SECTIONS = ((16, 24, 24), (24, 20, 20), (8, 12, 12))
"""Frequencies of time, height and width that the operator takes: those of Qwen2.5-VL, Qwen3-VL and
GLM-4.1V. The columns of other models' sections are merged before the operator is called; before
CANN 9.0 interleaved sections are merged, too."""

BUFFER = 192 << 10
"""Bytes of a vector core's memory on A2 and A3."""

MAX_HEAD_SIZE_OF_FACTORS = 896
"""Heads for ``npu_rotary_mul`` must be smaller than this."""


def suits(head_size: int, rotary_dim: int, dtype: torch.dtype) -> bool:
    return (
        dtype in (torch.float16, torch.bfloat16)
        and head_size % MULTIPLE == 0
        and rotary_dim % MULTIPLE == 0
        and 0 < rotary_dim <= head_size
    )


def most_columns(head_size: int, rotary_dim: int, is_neox_style: bool) -> int | None:
    """Return how many columns of Q the operator takes at most; None if there is no limit.

    Before CANN 9.0 its tiling divides by the number of tokens whose heads fit into `BUFFER` at
    once, even if that is zero (ops-transformer, ``rope_with_sin_cos_cache_tiling.cpp`` of v8.5.0;
    guarded from v9.0.0 on, the first release that has `MROPE_V2`): the process would die of it.
    """
    if not is_missing(MROPE_V2):
        return None
    of_head = 4 * ((5 if is_neox_style else 6) * rotary_dim + 2 * head_size)
    return head_size * ((BUFFER - 4 * 10 * rotary_dim) // of_head)


def has_more(query: torch.Tensor, most: int | None) -> bool:
    return most is not None and math.prod(query.shape[1:]) > most


def rotate(
    positions: torch.Tensor,  # [T], or [3, T] with sections
    query: torch.Tensor,  # [T, N * D] or [T, N, D]
    key: torch.Tensor | None,  # [T, Nkv * D] or [T, Nkv, D]
    cos_sin_cache: torch.Tensor,  # [max positions, rotary_dim], cosines before sines
    head_size: int,
    is_neox_style: bool,
    sections: tuple[int, int, int] = (0, 0, 0),
    interleaved_sections: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rotate Q and K in one launch; K may be missing in layers that share another layer's."""
    rows = query.flatten(1)
    other = rows[:, :head_size] if key is None else key.flatten(1)
    rotated, rotated_key = torch.ops.npu.npu_mrope(
        positions,
        rows,
        other,
        cos_sin_cache,
        head_size,
        mrope_section=sections,
        rotary_mode="half" if is_neox_style else "interleave",
        cache_mode="interleave" if interleaved_sections else "default",
    )
    if key is None:
        return rotated.view(query.shape), None
    return rotated.view(query.shape), rotated_key.view(key.shape)


class _Fused(RotaryEmbeddingBase):
    """A rotary embedding with one position for each token."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._is_fused = is_fused("rotary") and suits(self.head_size, self.rotary_dim, self.dtype)
        self._most_columns = most_columns(self.head_size, self.rotary_dim, self.is_neox_style)

    def forward_oot(
        self,
        positions: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        is_fused = self._is_fused and query.dtype == self.dtype
        if not is_fused or has_more(query, self._most_columns):
            return self.forward_native(positions, query, key)
        cache = self._match_cos_sin_cache_dtype(query)
        return rotate(positions.flatten(), query, key, cache, self.head_size, self.is_neox_style)


def _fused(base: type[RotaryEmbeddingBase]) -> type[RotaryEmbeddingBase]:
    return type(f"Fused{base.__name__}", (_Fused, base), {"__doc__": _Fused.__doc__})


ROTARY = {
    base: _fused(base)
    for base in (
        DeepseekScalingRotaryEmbedding,
        DynamicNTKAlphaRotaryEmbedding,
        DynamicNTKScalingRotaryEmbedding,
        Gemma4RotaryEmbedding,
        LinearScalingRotaryEmbedding,
        Llama3RotaryEmbedding,
        NTKScalingRotaryEmbedding,
        RotaryEmbedding,
        YaRNScalingRotaryEmbedding,
    )
}
"""The layer that stands in for each of vLLM's."""


class FusedMRotaryEmbedding(MRotaryEmbedding):
    """A rotary embedding with positions by time, height and width.

    Sections that the operator doesn't know cost four launches more.
    """

    _section_of_column: torch.Tensor  # int64 [rotary_dim]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._is_fused = is_fused("mrope") and suits(self.head_size, self.rotary_dim, self.dtype)
        self._most_columns = most_columns(self.head_size, self.rotary_dim, self.is_neox_style)
        self._sections = tuple(self.mrope_section or ())
        self._merges = self._sections not in SECTIONS
        self._merges |= self.mrope_interleaved and is_missing(MROPE_V2)
        if self._is_fused and self._sections and self._merges:
            columns = columns_of_sections(self._sections, self.mrope_interleaved)
            self.register_buffer("_section_of_column", columns, persistent=False)

    def forward_oot(
        self,
        positions: torch.Tensor,  # [T], or [3, T]
        query: torch.Tensor,
        key: torch.Tensor | None = None,
        offsets: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        is_fused = self._is_fused and query.dtype == self.dtype and offsets is None
        if not is_fused or has_more(query, self._most_columns):
            return self.forward_native(positions, query, key, offsets)
        cache = self._match_cos_sin_cache_dtype(query)
        size, is_neox = self.head_size, self.is_neox_style
        if positions.dim() == 1:
            return rotate(positions, query, key, cache, size, is_neox)
        if not self._merges:
            time, height, width = self._sections
            # The kernel of older releases reads the rows of positions one after another.
            rows, sections = positions.contiguous(), (time, height, width)
            return rotate(rows, query, key, cache, size, is_neox, sections, self.mrope_interleaved)
        merged = self._merge(cache, positions)
        rows = torch.arange(len(merged), device=positions.device)
        return rotate(rows, query, key, merged, size, is_neox)

    def _merge(self, cache: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        of_sections = cache[positions]  # [3, T, rotary_dim]
        columns = self._section_of_column.expand(1, *of_sections.shape[1:])
        return of_sections.gather(0, columns)[0]


def columns_of_sections(sections: tuple[int, ...], interleaved: bool) -> torch.Tensor:
    """Return the section that each column of cosines and sines follows, int64 ``[rotary_dim]``."""
    if interleaved:
        columns = torch.zeros(sum(sections), dtype=torch.int64)
        for row in (1, 2):
            columns[row : 3 * sections[row] : 3] = row
    else:
        columns = torch.repeat_interleave(torch.arange(len(sections)), torch.tensor(sections))
    return torch.cat((columns, columns))


class FusedApplyRotaryEmb(ApplyRotaryEmb):
    """Rotary embedding of a vision tower, which gets its cosines and sines from the tower."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._is_fused = is_fused("vision_rotary")

    def forward_oot(
        self,
        x: torch.Tensor,  # [S, N, D] or [B, S, N, D]
        cos: torch.Tensor,  # [S, D / 2]
        sin: torch.Tensor,  # the same
    ) -> torch.Tensor:
        """Rotate `x`; the operator wants cosines and sines of the whole head, not of its half."""
        size = x.shape[-1]
        suits = 2 * cos.shape[-1] == size < MAX_HEAD_SIZE_OF_FACTORS and cos.dim() == 2
        if not self._is_fused or not suits or x.shape[-2] >= 1000 or x[..., 0, 0, 0].numel() >= 999:
            return self.forward_native(x, cos, sin)
        batch = x if x.dim() == 4 else x[None]
        dtype = torch.float32 if self.enable_fp32_compute else x.dtype
        factors = [self._whole_head(each, dtype) for each in (cos, sin)]
        mode = "half" if self.is_neox_style else "interleave"
        output = torch.ops.npu.npu_rotary_mul(batch.to(dtype), *factors, mode)
        return output.to(x.dtype).view(x.shape)

    def _whole_head(self, factors: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Repeat ``[S, D / 2]`` to ``[1, S, 1, D]``, once for all layers of a tower.

        All layers get the same tensor of cosines; what is made of it is kept as an attribute of it.
        """
        made: dict[Any, torch.Tensor] = factors.__dict__.setdefault("_whole_heads", {})
        form = (self.is_neox_style, dtype)
        if form not in made:
            if self.is_neox_style:
                whole = torch.cat((factors, factors), -1)
            else:
                whole = factors.repeat_interleave(2, -1)
            made[form] = whole.to(dtype)[None, :, None]
        return made[form]


class FusedLongRotaryEmbedding(nn.Module):
    """Phi-3's rotary embedding, which vLLM makes as a plain module with two tables in one."""

    def __init__(self, layer: Phi3LongRoPEScaledRotaryEmbedding) -> None:
        super().__init__()
        self.layer = layer
        self._first = layer.original_max_position_embeddings if layer.use_long_rope else 0
        self._most_columns = most_columns(layer.head_size, layer.rotary_dim, True)

    def forward(
        self,
        positions: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor | None = None,
        offsets: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Rotate Q and K by the table of short or of long contexts."""
        if offsets is not None or has_more(query, self._most_columns):
            return self.layer(positions, query, key, offsets)
        table = self.layer.long_short_cos_sin_cache
        assert isinstance(table, torch.Tensor)
        cache, size = table[self._first :], self.layer.head_size
        return rotate(positions.flatten(), query, key, cache, size, True)


def replace_long_rotary(model: nn.Module) -> None:
    """Replace Phi-3's rotary embeddings in a loaded model; vLLM has no hook for them."""
    made: dict[int, nn.Module] = {}
    for name, child in _long_rotary_layers(model):
        table = child.long_short_cos_sin_cache
        assert isinstance(table, torch.Tensor)
        if suits(child.head_size, child.rotary_dim, table.dtype):
            made.setdefault(id(child), FusedLongRotaryEmbedding(child))
            model.set_submodule(name, made[id(child)])


def _long_rotary_layers(
    model: nn.Module,
) -> Iterable[tuple[str, Phi3LongRoPEScaledRotaryEmbedding]]:
    return [
        (name, module)
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, Phi3LongRoPEScaledRotaryEmbedding)
    ]
