"""Logical experts mapped to physical ones, against the source of upstream's kernel."""

from types import SimpleNamespace

import pytest
import torch
from vllm.distributed.eplb.eplb_state import EplbState
from vllm.forward_context import override_forward_context
from vllm.model_executor.layers.fused_moe.router import base_router

from tests.helpers.triton_source import Source
from vllm_npu_prep.ops.triton.eplb import map_to_physical_and_record
from vllm_npu_prep.runner.eplb import NPUEplbState

TOKENS, TOP_K, LOGICAL, PHYSICAL, SLOTS = 50, 3, 6, 10, 7


def maps() -> tuple[torch.Tensor, torch.Tensor]:
    """Physical experts of each logical one, -1 past them, and how many there are."""
    order = torch.cat([torch.arange(LOGICAL), torch.randint(LOGICAL, (PHYSICAL - LOGICAL,))])
    to_physical = torch.full((LOGICAL, SLOTS), -1)
    counts = torch.zeros(LOGICAL, dtype=torch.long)
    for physical, logical in enumerate(order[torch.randperm(PHYSICAL)].tolist()):
        to_physical[logical, counts[logical]] = physical
        counts[logical] += 1
    return to_physical, counts


@pytest.mark.parametrize("records", [True, False])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_and_load_are_those_of_upstreams_kernel(seed, records, dtype):
    """Padding has the id -1, or that of one more expert than there are."""
    torch.manual_seed(seed)
    kernel = Source(base_router, "_eplb_map_and_record_i32_kernel")
    ids = torch.randint(-1, LOGICAL + 1, (TOKENS, TOP_K), dtype=dtype)
    (to_physical, counts), enabled = maps(), torch.tensor(records)
    load = torch.randint(9, (PHYSICAL,), dtype=torch.int32)
    expected_load, expected = load.clone(), torch.empty(TOKENS * TOP_K, dtype=dtype)
    sizes = LOGICAL, SLOTS, PHYSICAL, expected.numel(), TOP_K
    inputs = ids.int().flatten(), counts, to_physical.flatten(), expected
    kernel[(3,)](*inputs, expected_load, enabled, None, *sizes, False, 64)
    got = map_to_physical_and_record(ids, load, to_physical, counts, enabled)
    assert got.dtype == dtype
    assert got.tolist() == expected.view(TOKENS, TOP_K).tolist()
    assert load.tolist() == expected_load.tolist()


def test_no_rank_masks_another_ranks_tokens():
    """Behind a gather, the first rows are those of rank 0; each rank counts them all."""
    one_each = torch.arange(LOGICAL)[:, None], torch.ones(LOGICAL, dtype=torch.long)
    ids = torch.tensor([[0, 1], [2, 3], [-1, -1], [4, 5]])
    load = torch.zeros(LOGICAL, dtype=torch.int32)
    map_to_physical_and_record(ids, load, *one_each, torch.tensor(True), torch.tensor(1))
    assert load.tolist() == [1] * LOGICAL


def test_hashes_are_made_once_in_a_forward_pass():
    (to_physical, counts), enabled = maps(), torch.tensor(False)
    load, kept = torch.zeros(PHYSICAL, dtype=torch.int32), {}

    class Context:
        additional_kwargs = kept

    with override_forward_context(Context()):
        for tokens in (5, 5, 3):
            ids = torch.zeros(tokens, TOP_K, dtype=torch.long)
            map_to_physical_and_record(ids, load, to_physical, counts, enabled)
    assert list(kept["eplb_hashes"]) == [5, 3]


def test_records_have_the_map_anew_after_each_layer_that_moved(monkeypatch):
    """A step puts the layer in place that the thread has brought, and nothing is pending then."""
    state, model = NPUEplbState.__new__(NPUEplbState), SimpleNamespace(pending_result=None)
    state.model_states, state._placement = {"model": model}, {}
    monkeypatch.setattr(EplbState, "step", lambda *_: setattr(model, "pending_result", None))
    state.step()
    assert state._placement == {}, "no layer has moved"
    model.pending_result = object()
    state.step()
    assert state._placement is None
