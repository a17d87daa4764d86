"""What only some profiles of the emulated card take, and what the plugin does about it.

Models of `tests/npu` have `HEAD_SIZE` where a smaller head would do for 9.1 alone, so that the same
engines run under every profile. The matrix of heads, blocks and releases, with what is refused in
it, is `SERVED` of `tests.npu.test_fused_releases`.
"""

HEAD_SIZE = 64
"""Every profile takes it in every form: 8.5 takes windows, and heads of which each has K and V of
its own, of few sizes only. Start-up refuses the others in one line."""

LEFT_OUT = {
    "docs": {"fia-block-256", "fia-block-384", "fia-block-512", "latent-prefill-fp16"},
    "8.5": {"latent-wide-prefill-bf16", "sparse-index-float-weights"}
    | {"delta-prefill", "delta-equal-prefill", "delta-most-prefill"},
}
"""Rows of ``verify-device`` that are left out: the documentation wants blocks of 128, and projected
keys with a rotated part in bfloat16. Start-up refuses others where it is asked to
(``"kernel_rules": "documented"``). Weights of an indexer in float32 begin with 9.0. On 8.5 see
`REFUSED_MODELS`; gated delta nets begin with 9.1."""

NO_STATES = "no aclnnChunkGatedDeltaRule"
REFUSED_MODELS = {
    "8.5": {"GLM-4.7-Flash": "projected heads of 128"}
    | dict.fromkeys(("Qwen3-Next", "Qwen3.5", "Qwen3.5 MoE"), NO_STATES),
}
"""Models that start-up refuses by profile, and what it says: joined heads of 256, of which each has
K and V of its own, have no kernel in 8.5; gated delta nets begin with 9.1."""
