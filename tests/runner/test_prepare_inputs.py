"""Both runners prepare a step in `_prepare_inputs`: six stages, and metadata for each layer."""

import pytest

from tests.helpers.engine import generate, greedy, make_model, runner_of
from tests.helpers.v2 import RUNNERS, engine_of
from vllm_npu_prep.attention.metadata import AscendMetadata
from vllm_npu_prep.prep import batch

STAGES = ("padding", "layout", "fused pass", "state", "copy", "metadata")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"), num_hidden_layers=2)


def followed(runner, monkeypatch):
    """The stages of each later step, in the order in which they were gone through, and the step."""
    steps, stages = [], []

    def note(stage, owner, name):
        function = getattr(owner, name)

        def noted(*args, **kwargs):
            stages.append(stage)
            return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, noted)

    note("padding", runner.padding, "decide")
    note("layout", runner.preparer, "layout")
    note("fused pass", batch, "fill_step_at")
    note("state", batch, "attention_state")
    note("copy", runner.preparer.staging, "send")
    note("metadata", runner.preparer, "build_metadata")
    prepare_inputs = runner._prepare_inputs

    def prepared(*args):
        stages.clear()
        result = prepare_inputs(*args)
        steps.append((tuple(stages), runner.in_flight))
        return result

    monkeypatch.setattr(runner, "_prepare_inputs", prepared)
    return steps


@pytest.mark.parametrize("runner_name", RUNNERS)
def test_a_step_goes_through_six_stages_to_its_metadata(model, runner_name, monkeypatch):
    with engine_of(runner_name, model) as llm:
        runner = runner_of(llm)
        layers = {name for _, _, names in runner.preparer.builders for name in names}
        steps = followed(runner, monkeypatch)
        generate(llm, [[2, 3, 4], [5] * 40], greedy(3))
        assert runner.in_flight is None
        monkeypatch.undo()
    assert {stages for stages, _ in steps} == {STAGES}
    assert len(layers) == 2
    for _, in_flight in steps:
        assert in_flight.metadata.keys() == layers
        for metadata in in_flight.metadata.values():
            assert type(metadata) is AscendMetadata
            assert metadata.attn_state is in_flight.step.attn_state
            assert metadata.num_actual_tokens == in_flight.step.total_num_scheduled_tokens
