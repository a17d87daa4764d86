"""Records of steps that no engine made."""

from collections.abc import Sequence

import numpy as np

from vllm_npu_prep.observe.step_snapshot import Recorded, StepSnapshot
from vllm_npu_prep.prep.batch import PreparedStep
from vllm_npu_prep.prep.embeds import NO_PLACEHOLDERS, Placeholders
from vllm_npu_prep.prep.mask import MaskForm
from vllm_npu_prep.prep.oracle import OracleRequest
from vllm_npu_prep.records.comparison import Difference, first_difference, oracle_arrays
from vllm_npu_prep.records.record import StepRecord
from vllm_npu_prep.records.settings import LayerGroup

EAGER = "eager: no graphs"
ONE_GROUP = LayerGroup(group=0)


def record_of(
    step: PreparedStep,
    groups: tuple[LayerGroup, ...] = (ONE_GROUP,),
    mask: str = "dense",
    number: int = 0,
    placeholders: Placeholders = NO_PLACEHOLDERS,
    rows_with_embeds: Sequence[int] = (),
) -> StepRecord:
    """As a recorder makes it, of a step that `prepare_step` gave a buffer of its own."""
    tables = step.batch.tables
    for group in range(tables.shape.num_groups):  # `device_has_all` counts none
        owned = tables.block_table(group) != 0
        width = np.arange(1, owned.shape[1] + 1)
        tables.num_blocks[group] = (owned * width).max(axis=1)
    req_ids = [f"r{row}" for row in range(step.num_reqs)]
    modalities = ["image"] * len(placeholders.rows)
    snapshot = StepSnapshot.of_step(
        number, step, EAGER, req_ids, placeholders, modalities, rows_with_embeds
    )
    recorded = Recorded(groups, MaskForm(mask), mask_itemsize=1)
    return snapshot.record(recorded, req_ids, tables.block_table_flat)


def beside_oracle(
    step: PreparedStep, requests: Sequence[OracleRequest], layers: LayerGroup = ONE_GROUP
) -> tuple[set[str], Difference | None]:
    """The variables that the oracle says of a step of one group, and where it differs first."""
    record = record_of(step, (layers,), mask="compressed")
    ((_, expected),) = oracle_arrays(record, lambda group: requests)
    return set(expected), first_difference(record, expected, "oracle")
