"""What breaks a call: functions that change arguments of a valid one."""

from functools import partial

import torch

from ascend_emulator import profiles
from tests.emulator.operators.calls import call


def changed(arguments, changes):
    """Arguments with some given, or replaced by a function of themselves."""
    return arguments | {
        name: change(arguments.get(name)) if callable(change) else change
        for name, change in changes.items()
    }


VALID = {}
"""Functions that make the arguments of a valid call, by operator and overload."""


def of(name, make, overload=""):
    """Function that makes a call of an operator, with some of its arguments changed."""
    VALID.setdefault((name, overload), make)
    return lambda **changes: lambda: call(name, changed(make(), changes), overload)


def sized(name, make, *lengths, **sizes):
    """The call of other sizes, with which it is refused."""
    return of(name, partial(make, *lengths, **sizes))()


def every(breakers, **changes):
    """The same change of several calls."""
    return [breaker(**changes) for breaker in breakers]


def in_profile(profile, violate):
    """The call in a profile."""

    def run():
        with profiles.using(profile):
            return violate()

    return run


def int8(tensor):
    return tensor.to(torch.int8)


def zeros(*shape, dtype=torch.float16):
    return torch.zeros(shape, dtype=dtype)


def first(function):
    """The same for the first tensor of a list."""
    return lambda tensors: [function(tensors[0]), *tensors[1:]]


def instead(value):
    return lambda _: value
