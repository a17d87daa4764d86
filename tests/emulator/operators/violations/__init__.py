"""Calls that break one demand and nothing else: a row has the demand's name and some of them.

``VIOLATIONS[family, name]`` is a list of functions without arguments that make such a call.
"""

from tests.emulator.operators.violations import (
    attention,
    custom,
    exchanges,
    experts,
    layers,
    sparse,
)
from tests.emulator.operators.violations.breaking import in_profile

VIOLATIONS = {
    (family, name): violations
    for subject in (attention, layers, experts, exchanges, sparse, custom)
    for family, rows in subject.FAMILIES.items()
    for name, *violations in rows
}
for (kernel, profile), rows in attention.BY_KERNEL.items():
    for name, refused, _ in rows:
        key = f"fused attention, {kernel}", name
        VIOLATIONS.setdefault(key, []).append(in_profile(profile, refused))
