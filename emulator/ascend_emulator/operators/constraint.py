"""What a kernel demands, as records, and how a reference refuses what the kernel would refuse.

A reference never raises on its own: it calls `Call.demand` with the name of a record, so that what
is enforced and what the documentation lists can't drift apart.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

import torch


class Enforced(Enum):
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
    argument
        Argument as the operator's first version calls it.
    name
        Short name, unique within the family, by which a reference and a test refer to it.
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
    argument: str
    name: str
    demand: str
    docstring_says: str
    practice: str
    source: str
    enforced: Enforced
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
            f"{constraint.demand} [{constraint.name}, enforced: {constraint.enforced.value}]"
        )
        self.constraint = constraint


class Family:
    """Constraints of operators that share them, by name."""

    def __init__(self, name: str, constraints: Iterable[Constraint]):
        self.name = name
        self.constraints = {constraint.name: constraint for constraint in constraints}
        assert all(constraint.operator == name for constraint in self.constraints.values())

    def call(self, operator: str, renamed: dict[str, str] | None = None) -> "Call":
        """Begin a call of `operator`, whose arguments may have other names than the records."""
        return Call(self, operator, renamed or {})


@dataclass(frozen=True)
class Call:
    """One call of one operator, while its arguments are checked."""

    family: Family
    operator: str
    renamed: dict[str, str]

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
        constraint = self.family.constraints[name]
        argument = argument or constraint.argument
        for old, new in self.renamed.items():
            argument = new if argument == old else argument
        raise KernelRefusalError(self.operator, constraint, argument, given)


def shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the shape as a plain tuple, which reads better in a message."""
    return tuple(tensor.shape)
