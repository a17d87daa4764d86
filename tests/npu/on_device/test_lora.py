"""What adapters ask of the device while a step is prepared: a copy and a launch if they change."""

import shutil

import msgspec
import numpy as np
from vllm.lora.request import LoRARequest

from tests.helpers.counting import PreparationCounts
from tests.helpers.engine import engine, generate, greedy, make_model, runner_of
from tests.helpers.lora import HEAD, MLP, make_adapter
from tests.helpers.watch import record_states


def test_a_mapping_that_stays_is_not_sent_again(tmp_path, seed):
    model = make_model(tmp_path / "model", num_hidden_layers=1)
    folder = make_adapter(tmp_path / "adapter", model, seed=seed, modules=MLP + HEAD)
    lora = LoRARequest("adapter", 1, str(folder))
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(2, 512, n).tolist() for n in (5, 30, 9)]
    with engine(
        model,
        dtype="float16",
        enable_lora=True,
        enforce_eager=False,
        compilation_config={"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [4]},
    ) as llm:
        runner = runner_of(llm)
        llm.llm_engine.add_lora(lora)  # weights travel once
        counts = PreparationCounts(runner)
        states = record_states(llm)
        got = generate(llm, prompts, greedy(8), [lora, None, lora])
        plain = generate(llm, prompts, greedy(8))
        again, kept = [], shutil.copytree(folder, tmp_path / "kept")
        another = make_adapter(tmp_path / "another", model, seed=seed + 1, modules=MLP + HEAD)
        for source in (another, kept):
            shutil.copytree(source, folder, dirs_exist_ok=True)
            llm.llm_engine.add_lora(msgspec.structs.replace(lora, load_inplace=True))
            again.append(generate(llm, prompts, greedy(8), [lora, None, lora]))
    assert got[1] == plain[1]
    assert got[0] != plain[0] and got[2] != plain[2]
    assert again[0][1] == plain[1] and again[0][0] not in (got[0], plain[0])
    assert again[1] == got, "its folder is as it was"
    assert states[:3] == ["PrefillNoCache", "DecodeOnly", "DecodeOnly"]
    copies = [step["h2d_copies"] for step in counts.steps[:8]]
    # The prompts, the first decode of these three rows, and then the step's own copy alone.
    assert copies == [2, 2, *[1] * 6], copies
    assert all(step.get("launches", 0) <= 2 for step in counts.steps[2:8])
    assert not any(step.get("syncs") or step.get("d2h_copies") for step in counts.steps)
