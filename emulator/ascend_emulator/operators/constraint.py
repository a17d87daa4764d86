"""What a kernel demands, as records, and how a reference refuses what the kernel would refuse.

The records are the tables of the files in ``constraints/``, one for each family. A reference never
raises on its own: it calls `Call.demand` with the name of a record, so that what is enforced and
what the documentation lists can't drift apart.
"""

import re
import tomllib
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from pathlib import Path

import torch

FOLDER = Path(__file__).parent / "constraints"
FAMILIES = (
    "fused attention",
    "fused attention, route",
    "fused attention, FAI",
    "fused attention, V3",
    "fused attention, PFA",
    "fused attention, IFA",
    "fused attention, documentation",
    "fused attention, rope",
    "npu_fusion_attention",
    "cache write",
    "atb attention",
    "norms",
    "npu_swiglu",
    "npu_clipped_swiglu",
    "gelu",
    "npu_rotary_mul",
    "npu_mrope",
    "npu_rotary_embedding",
    "npu_grouped_matmul",
    "npu_grouped_matmul, rows",
    "npu_grouped_matmul, int8 rows",
    "npu_grouped_matmul, int4 weights",
    "npu_grouped_matmul, int8 rows and int4 weights",
    "npu_moe_gating_top_k",
    "npu_moe_gating_top_k_softmax_v2",
    "npu_moe_init_routing_v2",
    "npu_moe_token_permute",
    "npu_moe_token_unpermute",
    "npu_moe_finalize_routing",
    "npu_moe_distribute_dispatch_v2",
    "npu_moe_distribute_combine_v2",
    "npu_top_k_top_p",
    "npu_transpose_batchmatmul",
    "npu_recurrent_gated_delta_rule",
    "npu_chunk_gated_delta_rule",
    "npu_interleave_rope",
    "npu_kv_rmsnorm_rope_cache",
    "npu_gather_pa_kv_cache",
    "npu_attention_update",
    "npu_scatter_nd_update",
    "npu_lightning_indexer",
    "npu_sparse_flash_attention",
    "npu_weight_quant_batchmatmul",
    "npu_matmul_add_fp32",
    "npu_format_cast",
    "npu_dynamic_quant",
    "npu_quantize",
    "npu_quant_matmul",
    "npu_quant_matmul, int4 weights",
    "norms to int8",
    "npu_dequant_swiglu_quant",
    "custom operators",
    "placement",
)
"""Operators that share constraints, in the order of the documentation."""


class Enforced(StrEnum):
    """Whose word a reference follows."""

    AGREED = "docstring and practice agree"
    DOCSTRING = "docstring"
    PRACTICE = "practice"
    SOURCES = "kernel sources"
    SCHEMA = "schema"
    READING = "our reading"


@dataclass(frozen=True)
class Constraint:
    """One thing that a kernel demands, or one thing that its documentation leaves open.

    Attributes
    ----------
    operator
        Family: ``fused attention``, or the name of one operator.
    name
        Short name, unique within the family, by which a reference and a test refer to it.
    argument
        Argument as the operator's first version calls it.
    demand
        What the kernel demands, to be read after "the kernel demands".
    docstring_says
        What the docstrings of the torch_npu 2.13.0 wheel say.
    practice
        What production code does, or what is known of the kernel.
    source
        Where practice is seen: an issue, a file, the wheel itself.
    enforced, why
        Whose word the reference follows, and why.
    refused
        False where nothing is refused: the record says how the reference reads the documentation.
    where
        Releases of CANN, or the profile, in which it holds; empty where it always does.
    """

    operator: str
    name: str
    argument: str
    demand: str
    docstring_says: str = "the same"
    practice: str = "the same"
    source: str = "none needed"
    enforced: str = Enforced.AGREED
    why: str = ""
    refused: bool = True
    where: str = ""

    @property
    def key(self) -> tuple[str, str]:
        """Family and name, which are unique in the table."""
        return self.operator, self.name


class KernelRefusalError(RuntimeError):
    """The kernel would refuse this call, or would compute garbage.

    `constraint` is the record that the call violates.
    """

    def __init__(self, operator: str, constraint: Constraint, argument: str, given: object):
        super().__init__(
            f"{operator}: argument {argument}: given {given}; the kernel demands "
            f"{constraint.demand} [{constraint.name}, enforced: {constraint.enforced}]"
        )
        self.constraint = constraint


@cache
def constraints_of(family: str) -> dict[str, Constraint]:
    """Return a family's records by name, in the order of its file in ``constraints/``.

    A table of the file is a record, and its key is the record's name. The table ``defaults`` has
    what most of the records have in common.
    """
    file = re.sub(r"\W+", "_", family) + ".toml"
    tables = tomllib.loads((FOLDER / file).read_text())
    common = tables.pop("defaults", {})
    return {name: Constraint(family, name, **common | fields) for name, fields in tables.items()}


@dataclass(frozen=True)
class Call:
    """One call of one operator, while its arguments are checked.

    `renamed` has the operator's names of arguments that the family's records name otherwise.
    """

    family: str
    operator: str
    renamed: dict[str, str] = field(default_factory=dict)

    def demand(self, name: str, ok: object, given: object, argument: str | None = None) -> None:
        """Refuse the call unless `ok`.

        Parameters
        ----------
        name
            Name of the constraint in the family.
        given
            What was passed, for the message.
        argument
            Argument at fault where the record names several.

        Raises
        ------
        KernelRefusalError
            If the demand is not met: a `RuntimeError` that names operator, argument, what was given
            and what is demanded.
        """
        if ok:
            return
        constraint = constraints_of(self.family)[name]
        argument = argument or constraint.argument
        for old, new in self.renamed.items():
            argument = new if argument == old else argument
        raise KernelRefusalError(self.operator, constraint, argument, given)


def shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the shape as a plain tuple, which reads better in a message."""
    return tuple(tensor.shape)
