"""What a device computes, held against float64 formulas: ``verify-device``, and a start-up probe.

`rows` has the list: one row for each form in which the plugin calls an operator. The formulas in
`formulas` are all that a row is held against. They share no code with other references, so that
each is a check of the other.
"""
