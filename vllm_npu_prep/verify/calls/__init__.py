"""The calls of one engine: recorded, tried by ``verify-device``, and told to the engine by a table.

| stage | modules |
| --- | --- |
| record | `call_recorder` notes each `call` of an engine; `lists` has those of named models |
| try | `call_rows`, on arguments that fit (`fitting`), against `expected` and torch's own `forms` |
| serve | a `table` of what was found; `start_up` reads it, and `verified` acts on it |
"""
