"""Attention over latent rows against the formula of the reference kernels' tests, in float64."""

from types import SimpleNamespace

import pytest
import torch

from tests.attention.test_reference_kernels import BATCHES, Step
from vllm_npu_prep.attention import mla
from vllm_npu_prep.prep.mask import MaskForm

LATENT, ROPE, PADDING = 10, 6, 3


def attend(step: Step, monkeypatch, in_full_graph: bool = False) -> torch.Tensor:
    """What vLLM's layer does: the rows of all tokens are written, then all queries attend."""
    monkeypatch.setattr(mla, "decisions_of", lambda config: SimpleNamespace(attention="reference"))
    impl = mla.AscendMLAImpl(
        num_heads=4,
        head_size=LATENT + ROPE,
        scale=step.layer.scale,
        num_kv_heads=1,
        alibi_slopes=None,
        sliding_window=None,
        kv_cache_dtype="auto",
        logits_soft_cap=None,
        attn_type="decoder",
        kv_sharing_target_layer_name=None,
        kv_lora_rank=LATENT,
        qk_rope_head_dim=ROPE,
    )
    garbage = torch.full((PADDING, 4, LATENT + ROPE), 7.0)
    query, rows = torch.cat([step.query, garbage]), torch.cat([step.key, garbage[:, :1]])
    slots = torch.cat([step.slots, torch.full((PADDING,), -1, dtype=torch.int32)])
    step.metadata.num_input_tokens += PADDING
    seen = mla.MLALayerMetadata(step.metadata)
    assert seen.num_actual_tokens == seen.num_decode_tokens == len(query)
    impl.do_kv_cache_update(
        rows[:, 0, :LATENT], rows[..., LATENT:], step.cache, slots, "auto", torch.ones(())
    )
    split = query[..., :LATENT], query[..., LATENT:]
    output, lse = impl.forward_mqa(split, step.cache, seen, None)
    assert lse is None
    return output


@pytest.mark.parametrize("form", list(MaskForm))
@pytest.mark.parametrize("state", BATCHES)
def test_a_latent_row_is_key_and_value(state, form, seed, monkeypatch):
    step = Step(state, seed, form=form, heads=(4, 1), head_size=LATENT + ROPE)
    step.cache = step.cache[:1].clone()  # one plane
    written = step.cache.isnan()
    step.values = step.keys
    output = attend(step, monkeypatch)
    assert output.shape == (len(step.query) + PADDING, 4, LATENT)
    real = output[:-PADDING].double()
    torch.testing.assert_close(real, step.formula()[..., :LATENT], rtol=1e-5, atol=1e-5)
    assert not output[-PADDING:].any(), "padding attends to nothing"
    fresh = (written & ~step.cache.isnan()).any(-1).sum()
    assert fresh == len(step.slots), "the step's own slots are written, padding's are not"
