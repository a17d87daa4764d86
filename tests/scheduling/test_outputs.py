"""The order of outputs, and which decodes have nothing to compute: what traffic rarely shows."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

from tests.scheduling.engines import draw, make
from vllm_npu_prep.scheduling.outputs import Handed, Rows

NOT_READ: Any = None


def joined(theirs: EngineCoreOutput) -> list[str]:
    """Ids of outputs: of rows a and b by us, and between them a row c that upstream got."""
    rows = Rows(NOT_READ, NOT_READ, NOT_READ)
    rows.outputs = {0: [EngineCoreOutput("a", [1]), EngineCoreOutput("b", [2])]}
    rows.first = {0: 0}
    rows.handed = [Handed("c", 0, before=1)]
    outputs = rows.join({0: EngineCoreOutputs(outputs=[theirs])})
    return [each.request_id for each in outputs[0].outputs]


@pytest.mark.parametrize(
    ("theirs", "order"),
    [
        (EngineCoreOutput("c", [3]), ["a", "c", "b"]),
        (EngineCoreOutput("c", [3], finish_reason=FinishReason.ERROR), ["a", "c", "b"]),
        (EngineCoreOutput("c", [], finish_reason=FinishReason.STOP), ["a", "c", "b"]),
        # Not of its row: it failed otherwise, and upstream tells of it after all rows
        (EngineCoreOutput("c", [], finish_reason=FinishReason.ERROR), ["a", "b", "c"]),
        (EngineCoreOutput("d", [], finish_reason=FinishReason.ERROR), ["a", "b", "d"]),
    ],
    ids=["tokens", "tokens that a grammar refused", "no tokens", "failed", "another failed"],
)
def test_an_output_of_upstream_s_is_where_its_row_is(theirs, order):
    assert joined(theirs) == order


def decode(computed: int, placeholders: int, last_length: int) -> SimpleNamespace:
    return SimpleNamespace(
        is_prefill_chunk=False,
        num_computed_tokens=computed,
        num_output_placeholders=placeholders,
        last_length=last_length,
        next_decode_eligible_step=0,
    )


def test_the_last_decode_with_something_to_compute_is_found():
    decodes = make(draw(2), ours=True).decodes
    goes_on = decode(10, 1, last_length=40)
    has_all = decode(20, 1, last_length=21)  # its last token is on its way
    longest = decodes.scheduler.max_model_len
    at_the_end = decode(longest - 1, 1, last_length=2 * longest)
    prompt = SimpleNamespace(is_prefill_chunk=True)
    running: Any = [goes_on, goes_on, has_all, at_the_end, prompt]
    assert decodes.last_to_schedule(running) == 1
    assert decodes.last_to_schedule([has_all, at_the_end]) == 0
