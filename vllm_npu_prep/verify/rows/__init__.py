"""Every row of ``verify-device``: the list of what the plugin asks of a device."""

from vllm_npu_prep.verify.row import Record, Row
from vllm_npu_prep.verify.rows import attention, copies, elementwise, engine, graphs

ROWS: tuple[Row, ...] = (
    *copies.ROWS,
    *attention.ROWS,
    *elementwise.ROWS,
    *graphs.ROWS,
    *engine.ROWS,
)
"""All rows, in the order in which they run: what others build on comes first."""
