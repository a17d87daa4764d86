"""Contexts beyond the compressed mask's 2048 positions on npu:0."""

import numpy as np

from tests.helpers.engine import engine, generate, greedy, make_model, runner_of
from tests.npu.only_some import HEAD_SIZE
from vllm_npu_prep.prep.mask import MaskForm

LONGEST, BUDGET, TOKENS = 8192, 3000, 4


def test_a_long_prompt_in_chunks(tmp_path, seed):
    model = make_model(
        tmp_path / "model",
        num_hidden_layers=1,
        hidden_size=32,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=HEAD_SIZE,
        max_position_embeddings=LONGEST,
    )
    prompt = np.random.default_rng(seed).integers(2, 512, LONGEST - TOKENS).tolist()
    with engine(
        model,
        dtype="float16",
        max_model_len=LONGEST,
        max_num_batched_tokens=BUDGET,
        max_num_seqs=2,
    ) as llm:
        runner = runner_of(llm)
        (tokens,) = generate(llm, [prompt], greedy(TOKENS))
        (builder,) = (builder for _, builder, _ in runner.preparer.builders)
        assert builder.decisions.mask_form is MaskForm.COMPRESSED
        assert not builder.masks._matrices
        # The last chunk alone, over the cached rest
        assert generate(llm, [prompt], greedy(TOKENS)) == [tokens]
    assert len(set(tokens)) > 1
