"""Every row of ``verify-device``: the list of what the plugin asks of a device."""

from vllm_npu_prep.verify import (
    attention,
    collectives,
    copies,
    delta,
    engine,
    exchange,
    fused,
    graphs,
    int8,
    latent,
    sparse,
)
from vllm_npu_prep.verify.row import Row

ROWS: tuple[Row, ...] = (
    *copies.ROWS,
    *attention.ROWS,
    *fused.ROWS,
    *latent.ROWS,
    *sparse.ROWS,
    *delta.ROWS,
    *int8.ROWS,
    *graphs.ROWS,
    *collectives.ROWS,
    *exchange.ROWS,
    *engine.ROWS,
)
"""All rows, in the order in which they run: what others build on comes first."""
