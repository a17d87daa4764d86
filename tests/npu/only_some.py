"""What only some profiles of the emulated card take, and what the plugin does about it.

Models of `tests/npu` have `HEAD_SIZE` where a smaller head would do for 9.1 alone, so that the same
engines run under every profile. The matrix of heads, blocks and releases, with what is refused in
it, is `SERVED` of `tests.npu.test_fused_releases`.
"""

HEAD_SIZE = 64
"""Every profile takes it in every form: 8.5 takes windows, and heads of which each has K and V of
its own, of few sizes only. Start-up refuses the others in one line."""

LEFT_OUT = {"docs": {"fia-block-256", "fia-block-384", "fia-block-512"}}
"""Rows of ``verify-device`` that are left out: the documentation wants blocks of 128. Start-up
refuses other blocks where it is asked to (``"kernel_rules": "documented"``)."""
