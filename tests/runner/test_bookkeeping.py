"""What a scheduler rarely does to requests in the batch: ours and upstream's runner beside it."""

import pytest
import torch

from tests.helpers.engine import greedy, make_model, runner_of
from tests.helpers.stepping import (
    bookkeep,
    books,
    new_request,
    prepare,
    scheduler_output,
    upstream_twin,
)
from tests.helpers.v2 import engine_of
from vllm_npu_prep.runner import common


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("qwen3"), num_hidden_layers=1)


@pytest.fixture(scope="module", params=[False, True], ids=["sync", "async"])
def both(model, request):
    settings = {"block_size": 4, "max_model_len": 16, "async_scheduling": request.param}
    with engine_of("V1", model, load_format="dummy", **settings) as llm:
        ours = runner_of(llm)
        yield ours, upstream_twin(ours)


@pytest.fixture
def runners(both):
    """Ours and upstream's, without requests."""
    yield both
    both[0]._end_step()  # `prepare` and `bookkeep` are parts of one
    for runner in both:
        runner._update_states(scheduler_output({}, finished=set(runner.requests)))
        runner.input_batch.prev_sampled_token_ids = None


def step(runners, output, tokens: dict[str, int]) -> None:
    """One step of both, which have to agree before and after it."""
    ours, upstream = runners
    expected = prepare(upstream, output)
    assert prepare(ours, output) == expected
    ours._build_attention_metadata()
    bookkeep(upstream, output, tokens)
    bookkeep(ours, output, tokens)
    assert books(ours) == books(upstream)


def start(runners) -> None:
    """Two requests with two output tokens each."""
    new = [new_request("a", [2, 3, 4], [1]), new_request("b", [5, 6, 7, 8], [2])]
    step(runners, scheduler_output({"a": 3, "b": 4}, new=new), {"a": 10, "b": 20})
    cached = {"a": ([], 3, 1), "b": ([3], 4, 1)}
    step(runners, scheduler_output({"a": 1, "b": 1}, cached=cached), {"a": 11, "b": 21})


def test_output_tokens_that_were_lost_are_dropped(runners):
    """A KV load failed: the scheduler goes back behind tokens that were sampled already."""
    start(runners)
    cached = {"a": ([], 3, 1), "b": ([], 5, 2)}
    output = scheduler_output({"a": 1, "b": 1}, cached=cached)
    step(runners, output, {"a": 12, "b": 22})
    assert len(runners[0].requests["a"].output_token_ids) == 2


def test_samples_are_placed_whatever_rows_their_requests_got(runners):
    """Asynchronous: rows are swapped between sampling and the next step."""
    names = ["a", "b", "c"]
    new = [new_request(name, [2, 3], [row + 1]) for row, name in enumerate(names)]
    tokens = {"a": 10, "b": 20, "c": 30}
    step(runners, scheduler_output(dict.fromkeys(names, 2), new=new), tokens)
    for runner in runners:
        with torch.inference_mode():
            runner.input_batch.swap_states(0, 2)
    output = scheduler_output({"c": 1, "b": 1}, cached={"c": ([], 2, 1), "b": ([], 2, 1)})
    assert prepare(runners[0], output)["input_ids"] == [30, 20]


def test_the_padding_mask_came_with_the_step(runners):
    runner, _ = runners
    upstreams = runner.is_padding
    prepare(runner, scheduler_output({"a": 3}, new=[new_request("a", [2, 3, 4], [1])]))
    runner._build_attention_metadata()
    assert runner._prepare_padding_mask(3, 3) is None, "without padding there is none"
    mask = runner._prepare_padding_mask(3, 4)
    assert mask.tolist() == [False] * 3
    buffer = runner.preparer.staging.device_buffer.bytes
    assert mask.untyped_storage().data_ptr() == buffer.data_ptr()
    runner._dummy_run(4)
    assert runner._prepare_padding_mask(2, 4).tolist() == [False, False, True, True]
    assert runner._prepare_padding_mask(2, 4).data_ptr() == upstreams.data_ptr()


def test_a_step_is_in_flight_until_it_is_sampled_or_fails(runners, monkeypatch):
    """Whatever fails: nothing of a step is left for the next one."""
    runner, _ = runners
    nothing = scheduler_output({})

    def fail(*args, **kwargs):
        assert runner.in_flight.step.num_reqs == 1
        raise RuntimeError("planted")

    assert runner.in_flight is None
    runner.execute_model(nothing)
    assert runner.in_flight is None, "there was nothing to prepare"
    output = scheduler_output({"a": 3}, new=[new_request("a", [2, 3, 4], [1])])
    assert runner.execute_model(output) is None
    assert runner.in_flight.step.input_ids.tolist() == [2, 3, 4]
    with pytest.raises(RuntimeError, match=r"sample_tokens\(\) must be called"):
        runner.execute_model(nothing)
    assert runner.in_flight is not None, "another call does not end it"
    runner.sample_tokens(None)
    assert runner.in_flight is None

    def run():
        runner.execute_model(scheduler_output({"a": 1}, cached={"a": ([], 3, 1)}))
        runner.sample_tokens(None)

    for method in ("_preprocess", "_model_forward", "_sample"):
        with monkeypatch.context() as patch:
            patch.setattr(runner, method, fail)
            with pytest.raises(RuntimeError, match="planted"):
                run()
        assert runner.in_flight is None, method


def test_a_dummy_run_leaves_nothing_in_flight(runners, monkeypatch):
    runner, _ = runners
    last_asked, seen = runner._prepare_padding_mask, []
    prepare(runner, scheduler_output({"a": 2}, new=[new_request("a", [2, 3], [1])]))

    def fail(*args, **kwargs):
        raise RuntimeError("planted")

    def look(*args, **kwargs):
        seen.append((runner.in_flight, runner.dummy_run))
        assert len(runner.seq_lens) == runner.max_num_reqs, "upstream's own, of the largest size"
        return last_asked(*args, **kwargs)

    monkeypatch.setattr(runner, "_prepare_padding_mask", look)
    runner._dummy_run(4)
    runner._dummy_run(4, force_attention=True)
    (without, dummy_run), (prepared, _) = seen
    assert without is None and not dummy_run.attends
    assert prepared.step.num_reqs == 0 and prepared.step.num_input_tokens == 4
    assert runner.in_flight is runner.dummy_run is None
    monkeypatch.setattr(runner, "_prepare_padding_mask", fail)
    with pytest.raises(RuntimeError, match="planted"):
        runner._dummy_run(4, force_attention=True)
    assert runner.in_flight is runner.dummy_run is None


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_log_probabilities_of_samples_come_out(model, asynchronous, monkeypatch):
    """And an engine that ends says how many steps waited."""
    said = []
    with engine_of("V1", model, async_scheduling=asynchronous) as llm:
        prompts = [{"prompt_token_ids": [2, 3, 4]}, {"prompt_token_ids": [5] * 70}]
        for output in llm.generate(prompts, greedy(6, logprobs=1), use_tqdm=False):
            (completion,) = output.outputs
            assert len(completion.logprobs) == len(completion.token_ids) == 6
            for token, logprobs in zip(completion.token_ids, completion.logprobs):
                assert logprobs[token].rank == 1  # greedy
        monkeypatch.setattr(common.logger, "info", lambda text, *args: said.append(text % args))
    assert said[-1] == "Staging: 0 of 7 steps waited for an earlier copy to the device."
