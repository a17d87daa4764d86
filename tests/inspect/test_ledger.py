"""The ledger follows what the scheduler does to blocks before a step."""

from types import SimpleNamespace

from vllm_npu_prep.observe.ledger import SlotLedger
from vllm_npu_prep.observe.ledger_owners import LedgerGroup


def test_a_copied_block_has_what_its_source_has():
    ledger = SlotLedger([LedgerGroup(4)], num_blocks=6)
    ledger.contents[2] = 7
    ledger.states = {2: 9, 3: 8, 5: 6}
    copies = {"new_block_ids_to_zero": None, "kv_cache_block_copies": [(2, 3), (4, 5)]}
    ledger._empty(SimpleNamespace(**copies))
    assert ledger.contents[3].tolist() == [7] * 4
    assert ledger.states == {2: 9, 3: 9}, "a source without a state leaves none behind"
