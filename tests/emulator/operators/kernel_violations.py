"""Calls of fused attention that one kernel, or the documentation alone, refuses.

``KERNEL_VIOLATIONS[family, name]`` is a list of `Violation`, each a call that breaks one constraint
in one profile, and its neighbour that the same profile takes.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from ascend_emulator import profiles
from ascend_emulator.operators.fused_kernel_constraints import family_name
from tests.emulator.operators.calls import Batch, fused, spoiled
from tests.emulator.operators.fused_violations import LENGTHS, many_requests

ONE_TOKEN = [(3, 1), (200, 1)]
NO_MASK = {"sparse_mode": 0, "atten_mask": None}
WINDOW = {"sparse_mode": 4, "pre_tokens": 7, "next_tokens": 0}


class Violation(NamedTuple):
    """A call that a profile refuses, and one beside it that it takes."""

    profile: str
    refused: Callable[[], object]
    accepted: Callable[[], object]

    def violate(self):
        """Make the refused call in the profile."""
        with profiles.using(self.profile):
            return self.refused()

    def keep(self):
        """Make the neighbour in the profile."""
        with profiles.using(self.profile):
            return self.accepted()


def packed(lengths=LENGTHS, version=1, heads=(4, 2), head_size=16, dtype=torch.bfloat16, **changes):
    """Make a call over fresh keys."""
    batch = Batch(lengths, heads=heads, head_size=head_size, dtype=dtype)
    return lambda: fused(batch.packed(**changes), version)


def paged(
    lengths=LENGTHS,
    version=1,
    heads=(4, 2),
    head_size=16,
    block_size=128,
    dtype=torch.bfloat16,
    form=3,
    **changes,
):
    """Make a call over a cache."""
    batch = Batch(lengths, heads=heads, head_size=head_size, block_size=block_size, dtype=dtype)
    return lambda: fused(batch.paged(form, **changes), version)


def shared(blocks, heads=(4, 2), head_size=16, version=1):
    """Three requests of two blocks each over a cache of few blocks."""
    batch = Batch([(200, 1)] * 3, heads=heads, head_size=head_size, dtype=torch.bfloat16)
    arguments = spoiled(
        batch.paged(),
        key=lambda cache: cache[:blocks].nan_to_num(),
        value=lambda cache: cache[:blocks].nan_to_num(),
        block_table=lambda table: table % blocks,
    )
    return lambda: fused(arguments, version)


def one_token_of_bnsd(block_size):
    """A decode in a layout with a batch axis, over a cache."""
    batch = Batch(ONE_TOKEN, block_size=block_size)
    arguments = batch.paged(**NO_MASK) | {"input_layout": "BNSD"}
    return lambda: fused(spoiled(arguments, query=lambda q: q.unsqueeze(2)))


EQUAL = {"heads": (4, 4), "head_size": 192}
"""What reaches PFA in TND on CANN 8.5."""
BY_KERNEL = {
    "route": {
        "zero heads of a paged cache": [
            Violation("9.1", paged(heads=(4, 4), num_key_value_heads=0), paged(heads=(4, 4))),
            Violation(
                "docs",
                paged(ONE_TOKEN, 2, heads=(4, 4), num_key_value_heads=0, **NO_MASK),
                packed(heads=(4, 4), num_key_value_heads=0),
            ),
        ],
    },
    "V3": {
        "head size of V3": [
            Violation("9.1", paged(form=4), paged(form=4, head_size=64)),
            Violation("9.1", packed(head_size=272), packed(head_size=256)),
            Violation("9.1", packed(inner_precise=2), packed(inner_precise=2, head_size=192)),
        ],
        "block size of V3": [
            Violation(
                "9.1",
                paged(head_size=192, block_size=576),
                paged(head_size=192, block_size=640),
            ),
            Violation(
                "9.1",
                paged(ONE_TOKEN, 2, head_size=192, block_size=640),
                paged(ONE_TOKEN, 2, head_size=192, block_size=512),
            ),
            Violation(
                "9.1", paged(head_size=192, block_size=576), paged(head_size=64, block_size=576)
            ),
        ],
    },
    "PFA": {
        "dtype of PFA": [Violation("8.5", packed(**EQUAL, dtype=torch.float16), packed(**EQUAL))],
        "head size of PFA": [
            Violation("8.5", packed(heads=(4, 4), head_size=96), packed(head_size=96)),
            Violation("8.5", paged(**WINDOW), paged(**WINDOW, head_size=128)),
            Violation("8.5", paged(form=4, head_size=256), paged(head_size=256)),
        ],
        "grouped heads of 192": [
            Violation("8.5", packed(**WINDOW, head_size=192), packed(head_size=192)),
        ],
        "window of 192": [Violation("8.5", paged(**EQUAL, **WINDOW), paged(**EQUAL))],
        "block size of PFA": [
            Violation("8.5", paged(**EQUAL, block_size=64), paged(**EQUAL, block_size=256)),
            Violation(
                "8.5",
                paged(ONE_TOKEN, **EQUAL, block_size=16, **NO_MASK),
                paged(ONE_TOKEN, head_size=192, block_size=16, **NO_MASK),
            ),
        ],
        "some keys": [
            Violation(
                "8.5",
                paged(ONE_TOKEN, **EQUAL, **NO_MASK, actual_seq_lengths_kv=[0, 0]),
                paged(ONE_TOKEN, **EQUAL, **NO_MASK, actual_seq_lengths_kv=[0, 1]),
            )
        ],
        "sum of blocks in PFA": [Violation("8.5", shared(5, **EQUAL), shared(6, **EQUAL))],
        "lengths in PFA": [
            Violation(
                "8.5",
                packed([(0, 1)] * 4097, heads=(1, 1), head_size=192),
                packed(heads=(1, 1), head_size=192),
            )
        ],
    },
    "IFA": {
        "head size 512 without rope": [
            Violation("8.5", packed(head_size=512), packed(head_size=256)),
        ],
        "block size of IFA": [Violation("8.5", one_token_of_bnsd(640), one_token_of_bnsd(512))],
    },
    "documentation": {
        "sum of blocks": [Violation("docs", shared(5), shared(6))],
        "number of lengths": [
            Violation("docs", lambda: fused(many_requests(4097)), lambda: fused(many_requests(9))),
            Violation(
                "docs", lambda: fused(many_requests(4097), 2), lambda: fused(many_requests(9), 2)
            ),
        ],
        "keys for every query of mode 3": [
            Violation(
                "docs",
                paged(ONE_TOKEN, actual_seq_lengths_kv=[0, 1]),
                paged(ONE_TOKEN, actual_seq_lengths_kv=[1, 1]),
            ),
            Violation(
                "docs",
                paged(ONE_TOKEN, actual_seq_lengths_kv=[0, 1]),
                paged(ONE_TOKEN, actual_seq_lengths_kv=[0, 1], **NO_MASK),
            ),
        ],
        "block size of TND": [
            Violation("docs", paged(block_size=64), paged(ONE_TOKEN, block_size=64)),
            Violation("docs", paged(ONE_TOKEN, 2, block_size=256), paged(ONE_TOKEN, 2)),
        ],
        "inner_precise of TND": [
            Violation("docs", packed(head_size=64, inner_precise=2), packed(head_size=64)),
            Violation(
                "docs",
                packed(heads=(4, 4), head_size=64, inner_precise=1),
                packed(heads=(4, 4), head_size=64, inner_precise=1, dtype=torch.float16),
            ),
        ],
    },
}
KERNEL_VIOLATIONS = {
    (family_name(kernel), name): violations
    for kernel, table in BY_KERNEL.items()
    for name, violations in table.items()
}
