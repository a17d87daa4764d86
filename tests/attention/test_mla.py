"""What vLLM's MLA layer gets: both halves of a step, each beside its formula, and padding."""

from types import SimpleNamespace

import pytest
import torch

from vllm_npu_prep.attention import mla
from vllm_npu_prep.attention.kernels.latent import make_latent_kernels
from vllm_npu_prep.attention.latent import LatentArrays, split_metadata
from vllm_npu_prep.prep.latent_split import LatentSplit
from vllm_npu_prep.prep.mask import compressed_mask
from vllm_npu_prep.verify.latent import LatentForm, LatentStep, shape_of

SHAPE, PADDING, BLOCK = shape_of(4, 24, 8, 12), 3, 8
STEPS = {
    "decodes": ((5, 1), (16, 1)),
    "prompts": ((0, 5), (0, 17)),
    "both": ((7, 1), (40, 9), (17, 5), (0, 6)),
}


class Layer:
    """A layer's attention over a random step, padded as a piecewise graph pads it."""

    def __init__(self, lengths, seed, monkeypatch, family):
        kernels = make_latent_kernels(family)
        form = LatentForm(lengths, SHAPE, torch.float32, BLOCK, 1, 2)
        mask = torch.from_numpy(compressed_mask())
        self.step = step = LatentStep(form, torch.device("cpu"), kernels, mask, seed)
        split = LatentSplit(1, 2 * BLOCK, BLOCK, 64)
        self.num_decodes, arrays = mla.split_common(step.metadata, split)
        if self.num_decodes < len(lengths):
            tensors = LatentArrays(*map(torch.from_numpy, arrays))
            halves = split_metadata(step.metadata, self.num_decodes, arrays, tensors)
            step.metadata.halves = halves
        step.metadata.num_input_tokens += PADDING
        self.seen = mla.MLALayerMetadata(step.metadata)
        monkeypatch.setattr(mla, "get_current_vllm_config", lambda: None)
        decided = SimpleNamespace(attention=family)
        monkeypatch.setattr(mla, "decisions_of", lambda config: decided)
        monkeypatch.setattr(mla, "limits_batches", lambda config: False)
        self.impl = mla.AscendMLAImpl(
            num_heads=SHAPE.num_heads,
            head_size=SHAPE.kv_lora_rank + SHAPE.qk_rope_head_dim,
            scale=SHAPE.scale,
            num_kv_heads=1,
            alibi_slopes=None,
            sliding_window=None,
            kv_cache_dtype="auto",
            logits_soft_cap=None,
            attn_type="decoder",
            kv_sharing_target_layer_name=None,
            q_lora_rank=None,
            kv_lora_rank=SHAPE.kv_lora_rank,
            qk_nope_head_dim=SHAPE.qk_nope_head_dim,
            qk_rope_head_dim=SHAPE.qk_rope_head_dim,
            qk_head_dim=SHAPE.qk_nope_head_dim + SHAPE.qk_rope_head_dim,
            v_head_dim=SHAPE.v_head_dim,
            kv_b_proj=lambda rows: (rows @ step.weight, None),
        )

    def padded(self, tensor):
        return torch.cat([tensor, torch.full((PADDING, *tensor.shape[1:]), 7.0)])

    def fresh(self, rows):
        firsts = [first for first, _ in self.step.form.lengths]
        return self.padded(torch.cat([each[first:] for each, first in zip(rows, firsts)]))


@pytest.mark.parametrize("family", ["compiled", "reference"])
@pytest.mark.parametrize("name", STEPS)
def test_both_halves_equal_their_formulas_and_padding_is_zero(name, family, seed, monkeypatch):
    layer = Layer(STEPS[name], seed, monkeypatch, family)
    step, seen, impl = layer.step, layer.seen, layer.impl
    latent, rope = layer.fresh(step.latent), layer.fresh(step.rope).unsqueeze(1)
    slots = torch.cat([step.metadata.slot_mapping, torch.full((PADDING,), -1, dtype=torch.int32)])
    before = step.kv_cache.clone()
    impl.do_kv_cache_update(latent, rope, step.kv_cache, slots, "auto", torch.ones(()))
    written = (step.kv_cache != before).sum()
    assert written == len(step.query) * (SHAPE.kv_lora_rank + SHAPE.qk_rope_head_dim)
    total, decodes = len(step.query) + PADDING, layer.num_decodes
    assert seen.num_actual_tokens == total, "the layer cuts nothing off"
    assert (seen.num_decodes, seen.num_prefills) == (decodes, len(STEPS[name]) - decodes)
    first = seen.num_decode_tokens
    query = layer.padded(step.query)
    outputs = []
    if first:
        absorbed = layer.padded(step.absorbed)[:first]
        rotated = query[:first, :, SHAPE.qk_nope_head_dim :]
        named = SimpleNamespace(layer_name="layer")
        output, lse = impl.forward_mqa((absorbed, rotated), step.kv_cache, seen, named)
        assert lse is None and output.shape == (first, SHAPE.num_heads, SHAPE.kv_lora_rank)
        outputs.append(output)
        wanted = torch.cat([step._decode(row)[0] for row in range(decodes)])
        torch.testing.assert_close(output[: len(wanted)].double(), wanted, rtol=1e-4, atol=1e-4)
        assert not output[len(wanted) :].any()
    if first < total:
        output = torch.full((total - first, SHAPE.num_heads * SHAPE.v_head_dim), 5.0)
        scale = torch.ones(())
        impl.forward_mha(
            query[first:], latent[first:], rope[first:], step.kv_cache, seen, scale, output
        )
        wanted = torch.cat([step._prefill(row) for row in range(decodes, len(STEPS[name]))])
        real = output[:-PADDING].unflatten(1, (SHAPE.num_heads, -1))
        torch.testing.assert_close(real.double(), wanted, rtol=1e-4, atol=1e-4)
        assert not output[-PADDING:].any(), "padding attends to nothing"


def test_without_prefills_padding_is_the_decodes(seed, monkeypatch):
    """A full graph hands over padding requests with the others."""
    layer = Layer(STEPS["decodes"], seed, monkeypatch, "compiled")
    seen = layer.seen
    assert seen.prefill is None and seen.decode is seen.step
    assert seen.num_decode_tokens == seen.num_actual_tokens == len(layer.step.query) + PADDING
