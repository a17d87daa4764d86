"""vLLM's profiler on npu:0: upstream knows no such device, and records the host there."""

from tests.helpers.engine import engine, generate, greedy, make_model


def test_a_profile_is_written_and_changes_no_token(tmp_path):
    model = make_model(tmp_path / "model", num_hidden_layers=1)
    profiler = {"profiler": "torch", "torch_profiler_dir": str(tmp_path / "traces")}
    with engine(model, dtype="float16", profiler_config=profiler) as llm:
        prompts = [[5, 6, 7], [8, 9, 10, 11]]
        before = generate(llm, prompts, greedy(3))
        llm.start_profile()
        assert generate(llm, prompts, greedy(3)) == before
        llm.stop_profile()
    (trace,) = (tmp_path / "traces").glob("*rank0*.json*")
    assert trace.stat().st_size > 0
