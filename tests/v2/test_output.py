"""What steps of the V2 runner return, and where its EAGLE-3 heads look for the target's states."""

import weakref
from types import SimpleNamespace

import pytest
import torch
from vllm.v1.outputs import ModelRunnerOutput

from vllm_npu_prep.compat.torch import no_op_cuda_streams
from vllm_npu_prep.runner.v2.drafters import name_aux_layers
from vllm_npu_prep.runner.v2.output import DraftsOfStep, PooledOutput


def pooled(rows, finished):
    """What the scheduler gets of these rows."""
    output = ModelRunnerOutput(req_ids=[], req_id_to_index={})
    with no_op_cuda_streams():
        return PooledOutput(output, rows, finished, torch.cuda.current_stream()).get_output()


@pytest.mark.parametrize("form", ["tensor", "list"])
def test_only_complete_prompts_get_what_was_pooled(form):
    rows = torch.arange(6.0).view(3, 2)
    given = rows if form == "tensor" else [rows[0], rows[1], None]
    found = pooled(given, [True, False, form == "tensor"]).pooler_output
    assert [each is None for each in found] == [False, True, form == "list"]
    assert torch.equal(found[0], rows[0])
    assert [each.tolist() for each in pooled(rows, [True] * 3).pooler_output] == rows.tolist()


class OnDevice:
    """Drafts in memory of their own, of which `to` makes a copy."""

    shape = (2, 2)

    def to(self, *_, **__) -> torch.Tensor:
        return torch.tensor([[4, 5], [6, 7]], dtype=torch.int32)


@pytest.mark.parametrize("is_read", [True, False], ids=["read", "left"])
def test_drafts_on_the_device_are_let_go_once_copied(is_read):
    handler, drafts = DraftsOfStep(), OnDevice()
    assert handler.get_draft_tokens().draft_token_ids == []
    with no_op_cuda_streams():
        stream, of_device = torch.cuda.current_stream(), weakref.ref(drafts)
        handler.keep(["a", "b"], drafts, structured=True, copy_stream=stream)
        del drafts
        assert of_device() is not None
        if is_read:
            assert handler.get_draft_tokens().draft_token_ids == [[4, 5], [6, 7]]
        else:
            handler.keep(["a"], torch.zeros(1, 2), structured=False, copy_stream=stream)
            assert handler.get_draft_tokens().draft_token_ids == [[-1, -1]]
    assert of_device() is None


NAMED = {"eagle_aux_hidden_state_layer_ids": [0, 1]}


@pytest.mark.parametrize(
    ("method", "of_head", "expected"),
    [
        ("eagle3", {"eagle_config": NAMED}, [0, 1]),
        ("eagle3", {"eagle_config": NAMED, "eagle_aux_hidden_state_layer_ids": [2]}, [2]),
        ("eagle3", {"eagle_config": {}}, None),
        ("eagle3", {}, None),
        ("eagle", {"eagle_config": NAMED}, None),
    ],
)
def test_layers_that_an_eagle3_head_names(method, of_head, expected):
    """As V1's runner reads them."""
    hf_config = SimpleNamespace(**of_head)
    draft = SimpleNamespace(hf_config=hf_config)
    name_aux_layers(SimpleNamespace(method=method, draft_model_config=draft))
    assert getattr(hf_config, "eagle_aux_hidden_state_layer_ids", None) == expected
    name_aux_layers(None)
