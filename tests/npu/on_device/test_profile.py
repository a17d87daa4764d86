"""vLLM's profiler on npu:0: upstream knows no such device, and records the host there."""

from tests.helpers.engine import engine, generate, greedy, make_model, runner_of
from tests.inspect.test_scopes import check_phases, is_wrapped, numbers, recorded


def test_a_profile_shows_the_phases_of_each_step(tmp_path):
    model = make_model(tmp_path / "model", num_hidden_layers=1)
    profiler = {"profiler": "torch", "torch_profiler_dir": str(tmp_path / "traces")}
    with engine(model, dtype="float16", profiler_config=profiler) as llm:
        runner, prompts = runner_of(llm), [[5, 6, 7], [8, 9, 10, 11]]
        before = generate(llm, prompts, greedy(3))
        steps = runner.preparer.staging.steps
        llm.start_profile()
        assert generate(llm, prompts, greedy(3)) == before
        llm.stop_profile()
        steps = runner.preparer.staging.steps - steps
        assert is_wrapped(runner) == []
    events = recorded(tmp_path / "traces")
    check_phases(events, steps)
    assert [step["tokens"] for step in numbers(events)] == [7, *[2] * (steps - 1)]
