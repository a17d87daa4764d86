"""Rows of gated delta nets. Their calls are those that start-up makes, too."""

from functools import partial

from vllm_npu_prep.aclnn import first_release, missing_functions
from vllm_npu_prep.verify.delta import DeltaStep, forms_of
from vllm_npu_prep.verify.outcome import NotHereError, Outcome
from vllm_npu_prep.verify.row import Record, Row, RowContext

RECURRENT: tuple[Record, ...] = (("npu_recurrent_gated_delta_rule", "one sequence a state"),)

WHAT: dict[str, tuple[str, tuple[Record, ...]]] = {
    "decode": ("decodes over states", RECURRENT),
    "prefill": ("prefills in chunks", ()),
    "drafts": ("drafts over states", RECURRENT),
    "ragged-drafts": ("other numbers of drafts", RECURRENT),
}
"""The form of a step and the records that it tries, by the name of its row."""

HEADS = {"": (2, 4), "equal-": (2, 2), "most-": (16, 64)}
"""Numbers of heads of keys and of values, by a part of the row's name."""


def delta(what: str, heads: tuple[int, int], context: RowContext) -> Outcome:
    operator = "npu_chunk_gated_delta_rule" if what == "prefill" else RECURRENT[0][0]
    for function in missing_functions([operator]).values():
        raise NotHereError(f"CANN has no {function}; CANN {first_release(function)} has it")
    return DeltaStep(forms_of(*heads)[what], context.device.device).run()


ROWS = tuple(
    Row(
        f"delta-{which}{name}",
        f"gated delta net, {heads[0]} heads of keys and {heads[1]} of values: {what}",
        partial(delta, what, heads),
        records,
    )
    for name, (what, records) in WHAT.items()
    for which, heads in HEADS.items()
    if not which or "drafts" not in name
)
