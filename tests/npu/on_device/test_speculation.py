"""What a speculative step asks of the device, drafting included: copies, read-backs, launches."""

from dataclasses import asdict

import pytest

import ascend_emulator
from tests.helpers.counting import PreparationCounts
from tests.helpers.drafters import make_eagle_head
from tests.helpers.engine import engine, generate, greedy, make_model, runner_of
from tests.helpers.prompts import prompts_of
from tests.helpers.watch import count_verified, on_prepared


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3")
    return make_model(folder, num_hidden_layers=1, spread=0.1, embedding_scale=20)


@pytest.fixture(scope="module")
def head(model, tmp_path_factory):
    return make_eagle_head(tmp_path_factory.mktemp("eagle"), model)


TO_THE_HOST = {  # samples, and: drafts for the scheduler; counts for later passes or the next step
    (1, False): 2,
    (3, False): 3,
    (1, True): 2,
    (3, True): 2,
}


@pytest.mark.parametrize(("num_drafts", "asynchronous"), TO_THE_HOST)
def test_a_step_copies_once_and_reads_back_no_more_than_it_must(
    model, head, seed, num_drafts, asynchronous
):
    drafts = {"method": "eagle", "model": str(head), "num_speculative_tokens": num_drafts}
    with engine(
        model,
        dtype="float16",
        max_num_seqs=4,
        async_scheduling=asynchronous,
        speculative_config=drafts,
    ) as llm:
        runner = runner_of(llm)
        steps, verified = [], count_verified(llm)
        on_prepared(llm, lambda step: steps.append((step.attn_state.name, step.num_block_changes)))
        preparation, whole = PreparationCounts(runner), []
        execute_model, sample_tokens = runner.execute_model, runner.sample_tokens

        def counted_execute_model(*args):
            whole.append(asdict(ascend_emulator.counters()))
            return execute_model(*args)

        def counted_sample_tokens(*args):
            result, before = sample_tokens(*args), whole[-1]
            after = asdict(ascend_emulator.counters())
            whole[-1] = {name: after[name] - count for name, count in before.items()}
            return result

        runner.execute_model, runner.sample_tokens = counted_execute_model, counted_sample_tokens
        generate(llm, prompts_of(seed, [5, 30, 9]), greedy(20))
        started = runner.speculation.num_valid_tokens.started
    whole = [counts for counts in whole if "h2d_copies" in counts][: len(steps)]
    assert verified["rejected"] > 0 and verified["accepted"] + verified["partly"] > 0
    seen = 0
    for (state, num_block_changes), prepared, counts in zip(steps, preparation.steps, whole):
        if state != "SpecDecoding":
            continue
        seen += 1
        assert prepared["h2d_copies"] == 1 == counts["h2d_copies"], counts
        assert prepared.get("launches", 0) <= asynchronous + (num_block_changes > 0), prepared
        assert counts["d2h_copies"] == TO_THE_HOST[num_drafts, asynchronous], counts
        left = set(prepared) - {"h2d_copies", "h2d_bytes", "launches", "peak_memory_bytes"}
        assert not left, "preparation waits for nothing and reads nothing back"
    assert seen > 5
    assert started == (0 if (num_drafts, asynchronous) == (1, False) else len(steps))
