"""Which layers of latent attention the fused operator takes, by release of CANN.

Two forms of call with rope reach kernel V3: over latent rows, and over projected heads of size 128.
Projected heads of another size are joined with their rotated part, which makes an ordinary call.
Decodes get heads of zeros up to the next number in `NUM_HEADS`; vllm-project/vllm-ascend does both.

Sources: CANN's published ops-transformer (GitHub ``mirror-cann/ops-transformer``), tag v8.5.0
(``CheckFeatureHeadDim`` and ``CheckFeatureMlaNoQuantShape``) and branch 9.1.0
(``rope_checker.cpp``, ``CheckHeadNum``, ``CheckBlockSizeNonQuant910B``); for what only the
documentation demands, the docstring of ``torch_npu.npu_fused_infer_attention_score_v2``. No source
is published of releases before 8.5. Nothing was run on hardware.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_npu_prep.attention.fused_releases import (
    MAX_LENGTHS,
    OLDEST,
    Form,
    FusedCall,
    FusedRules,
    Kernel,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

NUM_HEADS = (1, 2, 4, 8, 16, 32, 64, 128)
KV_LORA_RANK, ROPE_SIZE, HEAD_SIZE = 512, 64, 128
MAX_INDEX_HEADS, MAX_CHOSEN = 64, 2048


@dataclass(frozen=True)
class LatentLayers:
    """What decides whether the calls of a model's layers are taken.

    The number of heads is that of one rank; `key_size` and `value_size` are those of a head of
    projected K and V; `block_size` is in tokens, and `dtype` is as torch prints it:
    ``torch.bfloat16``. `max_num_seqs` is the most requests of a step.
    """

    num_heads: int
    kv_lora_rank: int
    rope_size: int
    key_size: int
    value_size: int
    dtype: str
    block_size: int
    max_num_seqs: int


def latent_layers_of(vllm_config: "VllmConfig", block_size: int) -> LatentLayers | None:
    """Return the latent attention layers of an engine's model; None if it has none."""
    model = vllm_config.model_config
    if not model.use_mla:
        return None
    text = model.hf_text_config
    return LatentLayers(
        model.get_num_attention_heads(vllm_config.parallel_config),
        text.kv_lora_rank,
        text.qk_rope_head_dim,
        text.qk_nope_head_dim,
        text.v_head_dim,
        str(model.dtype),
        block_size,
        vllm_config.scheduler_config.max_num_seqs,
    )


def latent_refusal(layers: LatentLayers, rules: FusedRules) -> str | None:
    """Return what the operator takes instead, to follow "takes" in a message; None if it takes all
    calls."""
    if rules.release is OLDEST:
        return "no latent attention that is known (CANN 8.5 and newer do)"
    if layers.kv_lora_rank != KV_LORA_RANK:
        return f"latent rows of {KV_LORA_RANK}, not {layers.kv_lora_rank}"
    if layers.rope_size != ROPE_SIZE:
        return f"rotated keys of {ROPE_SIZE}, not {layers.rope_size}"
    if not _takes_projected(layers, rules):
        return (
            f"projected heads of {HEAD_SIZE} (CANN 9.0 and newer: or values as wide as a key and "
            f"its rotated part), not {layers.key_size} and {layers.value_size}"
        )
    if layers.num_heads > NUM_HEADS[-1]:
        return f"up to {NUM_HEADS[-1]} heads a rank, not {layers.num_heads}"
    size = layers.block_size
    if size % 16 or size > 1024:
        return f"blocks of 16 to 1024 tokens, in steps of 16, not {size}"
    if rules.documented and size not in (16, 128):
        return f"blocks of 16 or 128 tokens, by its documentation, not {size}"
    if rules.documented and layers.dtype != "torch.bfloat16":
        return "bfloat16, by its documentation"
    if rules.documented and layers.max_num_seqs > MAX_LENGTHS:  # prefills can't be split
        return f"--max-num-seqs {MAX_LENGTHS}, by its documentation, not {layers.max_num_seqs}"
    return None


@dataclass(frozen=True)
class Indexer:
    """What decides whether the calls of an indexer are taken."""

    num_heads: int
    head_dim: int
    topk: int  # the most positions that a token chooses


def indexer_of(text: Any) -> Indexer:
    """Return the indexer of a model's ``hf_text_config``."""
    return Indexer(text.index_n_heads, text.index_head_dim, text.index_topk)


def sparse_refusal(layers: LatentLayers, indexer: Indexer, rules: FusedRules) -> str | None:
    """Return what both operators of sparse attention take instead; None if they take all calls.

    Sources: ``lightning_indexer_tiling.cpp`` and ``sparse_flash_attention_tiling.cpp`` in CANN's
    ops-transformer, and the operators' pages in Ascend/op-plugin.
    """
    if rules.release is OLDEST:
        return "no sparse attention that is known (CANN 8.5 and newer do)"
    if (layers.kv_lora_rank, layers.rope_size) != (KV_LORA_RANK, ROPE_SIZE):
        given = f"{layers.kv_lora_rank} and {layers.rope_size}"
        return f"latent rows of {KV_LORA_RANK} and rotated keys of {ROPE_SIZE}, not {given}"
    if indexer.head_dim != HEAD_SIZE or indexer.num_heads > MAX_INDEX_HEADS:
        given = f"{indexer.num_heads} of {indexer.head_dim}"
        return f"up to {MAX_INDEX_HEADS} index heads of {HEAD_SIZE}, not {given}"
    most, larger = indexer.topk, rules.release.name != "8.5"
    if most > MAX_CHOSEN and not (larger and most <= 4 * MAX_CHOSEN and most % 1024 == 0):
        further = ", or 3072 to 8192 in steps of 1024" if larger else ""
        return f"up to {MAX_CHOSEN} chosen positions{further}, not {most}"
    if layers.num_heads > NUM_HEADS[-1]:
        return f"up to {NUM_HEADS[-1]} heads a rank, not {layers.num_heads}"
    if layers.block_size % 16 or layers.block_size > 1024:
        return f"blocks of 16 to 1024 tokens, in steps of 16, not {layers.block_size}"
    return None


def _takes_projected(layers: LatentLayers, rules: FusedRules) -> bool:
    """Return whether the calls of prefills are taken: with rope, or with it joined to the heads."""
    if {layers.key_size, layers.value_size} == {HEAD_SIZE}:
        return True
    heads, size = layers.num_heads, layers.key_size + layers.rope_size
    call = FusedCall(Form.PROMPT, layers.dtype, heads, heads, size, layers.block_size)
    kernel = rules.release.kernel_of(call)
    return size == layers.value_size and kernel is not Kernel.PFA and not rules.refusal(call)
