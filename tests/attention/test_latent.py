"""Latent attention of the families of the CPU: formulas in float64, and both of its paths."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import EXAMPLES
from vllm_npu_prep.attention.kernels import latent_reference
from vllm_npu_prep.attention.kernels.latent import Projected, make_latent_kernels
from vllm_npu_prep.attention.latent import LatentArrays, split_metadata
from vllm_npu_prep.attention.mla import attend_prefills, split_common
from vllm_npu_prep.prep.latent_split import LatentSplit
from vllm_npu_prep.prep.mask import compressed_mask
from vllm_npu_prep.verify.latent import LatentForm, LatentStep, forms_of, shape_of

SHAPE = shape_of(3, 24, 8, 12)
MASK = torch.from_numpy(compressed_mask())
STEPS = {
    "decodes": ((5, 1), (16, 1), (3, 1)),
    "drafts": ((5, 3), (16, 2), (3, 1)),
    "prompts": ((0, 5), (0, 17)),
    "both": ((7, 1), (3, 3), (40, 9), (17, 5), (0, 6)),
    "chunks after chunks": ((33, 4), (70, 6), (5, 7), (0, 4), (50, 5)),
}


on_cpu = pytest.mark.parametrize("family", ["compiled", "reference"])


def run(form: LatentForm, seed: int, family: str):
    step = LatentStep(form, torch.device("cpu"), make_latent_kernels(family), MASK, seed)
    return step.run()


@on_cpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("name", STEPS)
def test_a_step_equals_the_formula(name, blocks, dtype, family, seed):
    form = LatentForm(STEPS[name], SHAPE, dtype, 8, 3, blocks)
    outcome = run(form, seed, family)
    assert not outcome.verdict.is_bad, outcome


@on_cpu
def test_the_forms_of_an_engine_equal_their_formulas(family, seed):
    forms = forms_of(shape_of(4), torch.float32, 16, 3)
    assert len(forms) == 3
    for what, form in forms.items():
        assert not run(form, seed, family).verdict.is_bad, what


def test_scores_of_a_prompt_are_bounded_however_long_it_is(monkeypatch, seed):
    """So many queries at a time as have few pairs with its rows; a query at least."""
    torch.manual_seed(seed)
    widths = SHAPE.qk_nope_head_dim, SHAPE.qk_rope_head_dim, SHAPE.v_head_dim
    nope, rope, value = (torch.rand(37, 3, width) for width in widths)
    given = Projected(nope[:23], rope[:23], nope, rope[:, :1], value)
    whole = latent_reference._attend(given, [7, 23], [9, 37], SHAPE)
    monkeypatch.setattr(latent_reference, "TILE_PAIRS", 60)
    tiles = []

    def all_are_seen(request: int, first: int, last: int) -> torch.Tensor:
        tiles.append((last - first) * (9, 28)[request])
        return torch.ones(1, last - first, (9, 28)[request], dtype=torch.bool)

    cut = latent_reference._attend(given, [7, 23], [9, 37], SHAPE, all_are_seen)
    assert max(tiles) <= 60 and len(tiles) == 2 + 8, "six queries of the first, two of the second"
    torch.testing.assert_close(cut.output, whole.output)
    torch.testing.assert_close(cut.lse, whole.lse)


@st.composite
def random_forms(draw) -> LatentForm:
    """Steps with a prefill at least; decodes, drafts and prompts in any mixture."""
    threshold, block_size = draw(st.integers(1, 4)), draw(st.sampled_from([4, 8, 16]))
    cached = st.integers(0, 60)
    decodes = draw(st.lists(st.tuples(cached, st.integers(1, threshold)), max_size=3))
    long = st.integers(threshold + 1, threshold + 20)
    prefills = draw(st.lists(st.tuples(cached, long), min_size=1, max_size=4))
    shape = shape_of(draw(st.integers(1, 5)), 24, 8, draw(st.sampled_from([8, 12])), 12)
    blocks = draw(st.integers(1, 4))
    lengths = (*decodes, *prefills)
    return LatentForm(lengths, shape, torch.float32, block_size, threshold, blocks)


@on_cpu
@settings(max_examples=min(EXAMPLES, 100))
@given(random_forms(), st.integers(0, 2**16))
def test_prefills_equal_the_absorbed_path_of_all_tokens(family, form, seed):
    """Projected and merged by chunks, or over latent rows as decodes: the same in float32."""
    kernels, shape = make_latent_kernels(family), form.shape
    step = LatentStep(form, torch.device("cpu"), kernels, MASK, seed)
    new = [
        torch.cat([rows[cached:] for rows, (cached, _) in zip(each, form.lengths)])
        for each in (step.latent, step.rope)
    ]
    latent, rope = (rows.unsqueeze(1) for rows in new)
    kernels.write(latent, rope, step.planes, step.metadata.slot_mapping)
    sizes = shape.qk_nope_head_dim, shape.qk_rope_head_dim
    query, query_rope = (part.contiguous() for part in step.query.split(sizes, -1))

    weights = step.weight.unflatten(1, (shape.num_heads, -1))  # [L, N, nope + v]
    w_uk, w_uv = weights.split([shape.qk_nope_head_dim, shape.v_head_dim], -1)
    absorbed = torch.einsum("tnd,lnd->tnl", query, w_uk).contiguous()
    attended = torch.empty_like(absorbed)
    kernels.attend_latent(absorbed, query_rope, step.planes, step.metadata, shape, attended)
    expected = torch.einsum("tnl,lnd->tnd", attended, w_uv)

    workspace = form.workspace_blocks * form.block_size
    split = LatentSplit(form.decode_threshold, workspace, form.block_size, max(step.seq_lens))
    num_decodes, arrays = split_common(step.metadata, split)
    tensors = LatentArrays(*(torch.from_numpy(each) for each in arrays))
    halves = split_metadata(step.metadata, num_decodes, arrays, tensors)
    first = halves.prefills.first_token
    assert num_decodes == sum(count <= form.decode_threshold for _, count in form.lengths)
    assert first == int(np.sum([count for _, count in form.lengths[:num_decodes]]))
    own = step._project(query[first:], query_rope[first:], new[0][first:], rope[first:])
    output = torch.empty(len(query) - first, shape.num_heads, shape.v_head_dim)
    args = kernels, shape, step.planes, own, halves.prefills, step.metadata, output
    with pytest.MonkeyPatch.context() as patch:  # the reference attends a few queries at a time
        patch.setattr(latent_reference, "TILE_PAIRS", 60)
        attend_prefills(*args, step._project)
    torch.testing.assert_close(output, expected[first:], rtol=1e-4, atol=1e-4)
