"""Steps whose tokens ranks share: shown, recorded, compared, and described when a rule breaks."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from tests.helpers.records import record_of
from tests.helpers.scenarios import example
from tests.inspect.test_record import through_a_file
from vllm_npu_prep.cli import main
from vllm_npu_prep.errors import PrepError
from vllm_npu_prep.observe.check import StepCheck, explain_fault
from vllm_npu_prep.observe.violation import StepCheckError
from vllm_npu_prep.prep.batch import PreparedStep
from vllm_npu_prep.prep.checks import Rule, find_fault
from vllm_npu_prep.records.comparison import core_difference, oracle_difference
from vllm_npu_prep.records.scenario import parse_scenario

LIMITS = np.array([1 << 31, 1 << 10], np.int64)


def prepared(rank: int = 0) -> PreparedStep:
    scenario = example("shared-prompts", pcp={"world_size": 2, "rank": rank})
    return parse_scenario(scenario).record().prepare()


def test_explain_says_who_computes_what(capsys):
    assert main(["explain", "examples/scenarios/shared-prompts.json"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "rank 0 of 2 computes 5 tokens of the step in 3 rows, and has 2 padding tokens" in out
    assert "b 3-5 12 6-11 rank 0" in out


def test_json_has_the_shares_of_the_rank(capsys):
    assert main(["explain", "examples/scenarios/shared-prompts.json", "--json"]) == 0
    pcp = json.loads(capsys.readouterr().out)["pcp"]
    assert pcp["pcp_ranks"] == [0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 0, 1]
    assert (pcp["pcp_positions"], pcp["pcp_seq_lens"]) == ([5, 3, 4, 5, 12], [6, 6, 13])


@pytest.mark.parametrize("rank", [0, 1])
def test_records_come_back_and_prepare_alike(tmp_path, rank):
    record = through_a_file(record_of(prepared(rank)), tmp_path)
    assert record.settings.pcp.rank == rank
    assert core_difference(record) is None and oracle_difference(record) is None


@pytest.mark.parametrize(
    "name",
    [
        "pcp.pcp_ranks",
        "pcp.num_rows",
        "pcp_positions_padded",
        "pcp_slot_mapping_padded",
        "pcp_seq_lens_padded",
        "pcp_table_rows_padded",
        "pcp_gathered_rows_padded",
    ],
)
def test_a_difference_is_found(tmp_path, name):
    record = through_a_file(record_of(prepared()), tmp_path)
    index = () if record.prepared[name].ndim == 0 else (0,)
    record.prepared[name][index] ^= 1
    found = core_difference(record), oracle_difference(record)
    assert [(each.variable, each.index) for each in found] == [(name, index)] * 2


SAID = {
    Rule.RANK_TOKENS: ("pcp_positions", 0, "token 1005 at position 5, at place 0 of rank 0"),
    Rule.RANK_SLOTS: ("pcp_slot_mapping", 0, "[10] at place 0 of all ranks, allowed [9]"),
    Rule.RANK_ROWS: ("pcp_seq_lens", 0, "(row 0): given tokens 0 to 1 of request 0, length 7"),
    Rule.RANK_SAMPLES: ("pcp_gathered_rows", 0, "position 5, which rank 0 computes at place 0"),
    Rule.RANK_PADDING: ("pcp_table_rows", -1, "(row 5): given length 0, table 4, allowed"),
}
"""Of each rule an entry that breaks it, one too high, and a part of what the message says."""


@pytest.mark.parametrize("rule", SAID)
def test_a_message_says_what_a_rank_has(rule):
    step, (name, place, words) = prepared(), SAID[rule]
    getattr(step.arrays, name)[..., place] += 1
    fault = find_fault(step, LIMITS)
    message = str(explain_fault(step, LIMITS, fault, ["a", "b", "c"]))
    assert fault.rule == rule and words in message, message


def test_padding_that_is_none_is_named():
    step = prepared()
    step.arrays.pcp_is_padding[-1] = False
    assert "a token, allowed padding" in message_of(step)
    step = prepared()
    step.arrays.pcp_slot_mapping[0, 6] = 9
    assert "a slot of padding, allowed -1" in message_of(step)


def message_of(step: PreparedStep) -> str:
    return str(explain_fault(step, LIMITS, find_fault(step, LIMITS), ["a", "b", "c"]))


def test_shares_are_checked_even_after_a_pass_without_faults():
    step = prepared()
    step.rule, step.arrays.pcp_positions[0] = Rule.HOLDS, 9
    flight, batch = SimpleNamespace(step=step), SimpleNamespace(req_ids=["a", "b", "c"])
    with pytest.raises(StepCheckError, match="tokens of ranks"):
        StepCheck(1 << 20, [1 << 10]).verify(
            SimpleNamespace(in_flight=flight, input_batch=batch), None
        )


BAD = {
    "pcp.rank: 2; ranks are 0 to 1": {"pcp": {"world_size": 2, "rank": 2}},
    "has no capture_sizes, mrope_dims": {"capture_sizes": [8], "mrope_dims": 3},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_scenarios_get_one_line(message):
    with pytest.raises(PrepError, match=message):
        parse_scenario(example("shared-prompts", **BAD[message]))
