"""``replay --upstream``: made-up steps, and one line for whatever goes wrong."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from importlib import metadata

import numpy as np
import pytest
import vllm  # noqa: F401  here, so that it logs in other tests as it does without this one
from hypothesis import given, settings

from tests.helpers import worked_examples
from tests.helpers.batches import random_batches
from tests.helpers.records import record_of
from tests.inspect.test_record import GROUPS, several_groups, shared_context
from vllm_npu_prep import device
from vllm_npu_prep.cli import main
from vllm_npu_prep.compat import activation, releases
from vllm_npu_prep.errors import PrepError
from vllm_npu_prep.inspect.record import StepRecord
from vllm_npu_prep.inspect.scenario import parse_scenario, scenario_batch
from vllm_npu_prep.inspect.upstream import UpstreamReplay
from vllm_npu_prep.prep.batch import prepare_step


@pytest.fixture(scope="module")
def upstream() -> UpstreamReplay:
    return UpstreamReplay()


def made_up(scenario: dict, groups=GROUPS[:1]) -> StepRecord:
    return record_of(prepare_step(*scenario_batch(parse_scenario(scenario))), groups)


@pytest.fixture
def folder(tmp_path):
    """A run of one step."""
    record = made_up(worked_examples.load("decode-only")[0])
    (tmp_path / "step-000000.npz").write_bytes(record.to_bytes())
    return tmp_path


@given(batch=random_batches())
@settings(max_examples=50)
def test_any_step_is_prepared_alike(upstream, batch):
    assert upstream.first_difference(record_of(batch.step())) is None


def test_groups_chunks_mrope_and_padding_are_prepared_alike(upstream):
    record = made_up(several_groups(), GROUPS)
    assert record.settings.num_input_tokens > record.settings.total_num_scheduled_tokens
    assert upstream.first_difference(record) is None


@pytest.mark.parametrize("rank", range(3))
@pytest.mark.parametrize("size", [1, 2, 4])
def test_shared_contexts_are_prepared_alike_on_every_rank(upstream, rank, size):
    shards = {"world_size": 3, "rank": rank, "interleave_size": size}
    record = made_up(shared_context() | {"dcp": shards})
    assert upstream.first_difference(record) is None
    lengths = {"dcp.dcp_local_seq_lens", "dcp.dcp_local_context_lens"}
    assert {"slot_mapping", "block_table", *lengths} <= upstream.prepare(record).keys()


@pytest.mark.parametrize(
    ("scenario", "groups"),
    [(several_groups, GROUPS), (shared_context, GROUPS[:1])],
    ids=["groups", "shared"],
)
def test_each_array_that_is_wrong_is_named(upstream, scenario, groups):
    """With padding and without; what is padding is not upstream's."""
    record = made_up(scenario(), groups)
    said = upstream.prepare(record)
    assert len(said) > (40 if scenario is several_groups else 25)
    for name, array in said.items():
        if not array.size:
            continue
        wrong = dict(record.prepared)
        wrong[name] = wrong[name].copy()
        wrong[name].reshape(-1)[0] ^= 1
        found = upstream.first_difference(StepRecord(record.settings, record.batch, wrong))
        assert (found.variable, found.by) == (name, "upstream")
        assert found.index == (0,) * array.ndim and found.expected == record.prepared[name].flat[0]
    wrong = dict(record.prepared)
    wrong["seq_lens"] = wrong["seq_lens"][:-1]
    found = upstream.first_difference(StepRecord(record.settings, record.batch, wrong))
    assert found.variable == "seq_lens.shape"


def test_layers_without_a_cache_have_what_all_steps_have(upstream):
    """Encoder-only layers have neither blocks nor slots."""
    record = made_up(several_groups(), GROUPS)
    alone = replace_settings(record, block_sizes=[], max_num_blocks=[], groups=[GROUPS[0]])
    none = np.empty((0, record.settings.num_reqs), np.int32)
    batch = replace(record.batch, num_blocks=none, block_ids=np.empty(0, np.int32))
    said = upstream.prepare(StepRecord(alone, batch, record.prepared))
    assert "positions" in said and not any("slot_mapping" in name for name in said)


def replace_settings(record: StepRecord, **changes):
    return record.settings.model_copy(update=changes)


def test_a_step_that_upstream_refuses_is_one_line(upstream):
    record = made_up(several_groups(), GROUPS)
    num_blocks = np.full_like(record.batch.num_blocks, 100)  # of rows of 64
    ids = np.zeros(num_blocks.sum(), np.int32)
    batch = replace(record.batch, num_blocks=num_blocks, block_ids=ids)
    with pytest.raises(PrepError, match="step 0 can't be prepared by upstream's runner") as error:
        upstream.prepare(StepRecord(record.settings, batch, record.prepared))
    assert "\n" not in str(error.value)
    assert upstream.first_difference(record) is None  # and does no harm to the next


def test_tables_larger_than_the_machine_are_refused(folder, monkeypatch, capsys):
    monkeypatch.setattr(device, "free_memory", lambda: 100)
    assert main(["replay", str(folder), "--upstream"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "bytes in vLLM, and 100 are free here" in line


def test_another_vllm_or_none_is_one_line(folder, monkeypatch, capsys):
    monkeypatch.setattr(activation, "SUPPORTED_VLLM", ("0.99.0",))
    assert main(["replay", str(folder), "--upstream"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "is installed, vllm_npu_prep supports 0.99.0" in line

    def not_installed(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(releases.metadata, "version", not_installed)
    assert main(["replay", str(folder), "--upstream"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--upstream needs vLLM, which is not installed" in line
    assert main(["replay", str(folder)]) == 0  # it doesn't without


def test_a_vllm_that_can_not_be_imported_is_one_line(folder):
    code = (
        "import sys; sys.modules['vllm.v1.worker.gpu_model_runner'] = None\n"
        "sys.modules['vllm'] = None\n"
        "from vllm_npu_prep.cli import main\n"
        f"sys.exit(main(['replay', {str(folder)!r}, '--upstream']))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 2 and run.stdout == ""
    assert run.stderr.splitlines()[-1].startswith(
        "vllm-npu-prep: error: --upstream needs vLLM, which can't be imported here: ModuleNotFound"
    )
    assert "Traceback" not in run.stderr


def test_a_process_of_its_own_needs_records_only(folder):
    """No engine, model or device; what vLLM has to say stays out of the JSON."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "NPU_PREP"))}
    command = [sys.executable, "-m", "vllm_npu_prep.cli", "replay", str(folder), "--upstream"]
    run = subprocess.run([*command, "--json"], capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout) == {"steps": 1, "differing": 0, "file": None, "first": []}
    assert "max_num_batched_tokens" not in run.stderr  # vLLM's advice on sizes that are made up
