"""What a device computes, held against float64 formulas: ``verify-device``, and a start-up probe.

`rows` has the list: one row for each form in which the plugin calls an operator. A row is held
against the formulas in `formulas` and nothing else. They share no code with other references, so
that each is a check of the other.
"""
