"""Adapters of a step, told to vLLM's manager."""

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest
from vllm.lora.request import LoRARequest
from vllm.v1.request import RequestStatus
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from vllm_npu_prep.compat.lora import AdapterLoads
from vllm_npu_prep.runner import lora
from vllm_npu_prep.runner.lora import activate_adapters
from vllm_npu_prep.runner.v1.runner import NPUModelRunner
from vllm_npu_prep.runner.v2.adapters import NPULoraState
from vllm_npu_prep.runner.v2.prompt_scores import PromptScores, score_with_adapters


def batch_of(lora_ids: list[int], adapters: dict[int, LoRARequest]) -> SimpleNamespace:
    return SimpleNamespace(
        num_reqs=len(lora_ids),
        request_lora_mapping=np.array([*lora_ids, 99]),  # rows past the last request are undefined
        lora_id_to_lora_request=adapters,
    )


def test_tokens_and_samples_get_the_adapter_of_their_request():
    told = []
    manager = SimpleNamespace(set_active_adapters=lambda *args: told.append(args))
    batch = batch_of([5, 0], {5: LoRARequest("one", 5, "/path")})
    activate_adapters(manager, batch, np.array([2, 3]), np.array([1, 2]))
    activate_adapters(manager, batch, np.array([2, 3]))
    (_, mapping), (_, without) = told
    assert mapping.index_mapping.tolist() == [5, 5, 0, 0, 0]
    assert mapping.prompt_mapping.tolist() == [5, 0, 0]
    assert without.prompt_mapping.tolist() == [5, 0]


def test_adapters_in_use_are_touched_before_another_is_read():
    """So none of them has to go. One too many waits, and two ranks' loads make one name."""
    told, names = [], {1: "running", 2: "waiting", 3: "one too many"}

    def load(adapters: list[LoRARequest]) -> list[dict[int, str]]:
        told.append([each.lora_int_id for each in adapters])
        return [{1: "first", 2: "second"}, {1: "first", 2: "of another stage"}]

    running, waiting, third = requests = [
        SimpleNamespace(
            request_id=name,
            lora_request=LoRARequest(name, number, "/path"),
            status=RequestStatus.WAITING,
            num_computed_tokens=0,
            block_hashes=["of no load"],
            update_block_hashes=lambda: None,
        )
        for number, name in names.items()
    ]
    running.status = RequestStatus.RUNNING
    scheduler = SimpleNamespace(
        requests={each.request_id: each for each in requests},
        reset_preempted_req_ids=set(),
        connector=None,
    )
    loads = AdapterLoads(scheduler, load, max_loras=2)
    assert [loads.is_ready(waiting), loads.is_ready(third), loads.is_ready(waiting)] == [1, 0, 1]
    assert told == [[1, 2]]
    assert waiting.adapter_load == "secondof another stage" and not waiting.block_hashes


def test_two_adapters_of_one_name_are_both_told():
    """One that was removed, and whose requests are not done, is equal to the one after it."""
    told = []
    manager = SimpleNamespace(set_active_adapters=lambda adapters, _: told.extend(adapters))
    adapters = {number: LoRARequest("one", number, "/path") for number in (5, 6)}
    activate_adapters(manager, batch_of([5, 6], adapters), np.array([2, 3]))
    assert [each.lora_int_id for each in told] == [5, 6]
    slots = NPULoraState(4)
    for slot, (number, adapter) in enumerate(adapters.items()):
        slots.add_request(f"of {number}", slot, adapter)
    assert [each.lora_int_id for each in slots.get_activate_loras(["of 6", "of 5"])] == [6, 5]


@pytest.fixture
def logits(monkeypatch):
    """Adapter of the rows of logits that are being computed."""
    whose = []

    @contextlib.contextmanager
    def logits_of(manager, lora_id):
        whose.append(lora_id)
        yield
        whose.pop()

    monkeypatch.setattr(lora, "logits_of", logits_of)
    return whose


def test_prompts_are_scored_one_at_a_time_until_they_are_done(logits, monkeypatch):
    batch = batch_of([7, 0, 9], {})
    batch.req_id_to_index = {"c": 0, "a": 1, "b": 2}
    runner = NPUModelRunner.__new__(NPUModelRunner)
    runner.num_prompt_logprobs = {"a": 1, "b": 2, "c": 3}
    runner.lora_config, runner.lora_manager, runner.input_batch = True, None, batch

    def score(self, hidden_states, num_scheduled_tokens):
        (req_id,) = self.num_prompt_logprobs
        assert logits == [{"a": 0, "b": 9}[req_id]]
        if req_id == "b":
            del self.num_prompt_logprobs["b"]  # its prompt is done
        return {req_id: "scores"}

    monkeypatch.setattr(GPUModelRunner, "_get_prompt_logprobs_dict", score)
    result = runner._get_prompt_logprobs_dict(None, {"a": 4, "b": 4})
    assert result == {"a": "scores", "b": "scores"}
    assert runner.num_prompt_logprobs == {"a": 1, "c": 3}


def test_scores_of_named_tokens_stay_with_their_request(logits):
    """Of requests by row: b has no adapter and named tokens, c is not scored."""
    worker = SimpleNamespace(
        uses_prompt_logprobs=np.array([True, False, False]), token_id_scores={"b": [5]}
    )
    batch = SimpleNamespace(req_ids=["a", "b", "c"], idx_mapping_np=np.array([0, 2, 1]))
    adapters = SimpleNamespace(lora_ids=np.array([7, 9, 0]))
    scored = []

    def score():
        scored.append((worker.uses_prompt_logprobs.tolist(), dict(worker.token_id_scores), *logits))
        if worker.token_id_scores:
            worker.token_id_scores["b"] = [5, 6]  # of the next chunk
        return PromptScores({len(scored): "most likely"}, {len(scored): "named"})

    wanted, tokens_of = worker.uses_prompt_logprobs, worker.token_id_scores
    result = score_with_adapters(None, adapters, worker, batch, score)
    assert scored == [([True, False, False], {}, 7), ([False] * 3, {"b": [5]}, 0)]
    assert result == ({1: "most likely", 2: "most likely"}, {1: "named", 2: "named"})
    assert (worker.uses_prompt_logprobs, worker.token_id_scores) == (wanted, tokens_of)
    assert tokens_of == {"b": [5, 6]}
