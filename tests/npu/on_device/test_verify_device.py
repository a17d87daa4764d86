"""Rows of ``verify-device`` and the start-up probe on the device: right kernels pass, wrong ones
are found by the rows that are meant to find them.

``stale-lengths`` is a fault of the runtime, not of an operator: `tests/npu/test_verify_device.py`.
"""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ascend_emulator import faults, profiles
from ascend_emulator.operators import CONSTRAINTS
from ascend_emulator.operators.constraint import Enforced
from tests.npu.only_some import LEFT_OUT
from vllm_npu_prep.attention.families import ATB, FIA
from vllm_npu_prep.device import make_device
from vllm_npu_prep.errors import PrepError
from vllm_npu_prep.prep.state import AttentionState
from vllm_npu_prep.verify.child import run_row
from vllm_npu_prep.verify.probe import probe_forms, probed_forms
from vllm_npu_prep.verify.row import RowContext
from vllm_npu_prep.verify.steps import AttentionForm, layer_of, masks_for

TRIED = Path(__file__).parents[1] / "tried_by_rows.txt"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Function of the name of a row, or of its beginning: verdicts of these rows, by name."""
    from vllm_npu_prep.verify.rows import ROWS  # they need torch_npu

    context = RowContext(make_device("npu"), tmp_path_factory.mktemp("rows"))
    rows = [row for row in ROWS if row.group != "engine" and row.ranks == 1]

    def run(*names: str) -> dict[str, dict]:
        return {row.name: run_row(row, context)[0] for row in rows if row.name.startswith(names)}

    return run


@pytest.fixture
def fault(monkeypatch) -> Iterator:
    """Function that switches a fault on, on all threads: kernels run on those of their streams."""

    def switch_on(name: str) -> None:
        monkeypatch.setenv(faults.FAULTS_VARIABLE, name)
        faults._of_process.cache_clear()

    yield switch_on
    monkeypatch.undo()
    faults._of_process.cache_clear()


def test_rows_are_the_same_as_their_formulas(run):
    outcomes, left_out = run(""), LEFT_OUT.get(profiles.current().name, ())
    verdicts = {name: outcome["verdict"] for name, outcome in outcomes.items()}
    expected = {name: "left out" if name in left_out else "same" for name in verdicts}
    assert verdicts == expected, outcomes
    assert len(verdicts) > 100


FOUND_BY = {
    "uniform-average": ("fia-unpaged-bf16 fia-unpaged-fp16", "fia-prompt-bf16"),
    "wide-window": (
        "fia-window-prompt-bf16 fia-window-decode-fp16 fia-window-chunk-bf16 "
        "fia-window-encoder-bf16 graph-fia-window-decode",
        "fia-chunk-bf16 atb-window-decode-bf16",
    ),
    "unnarrowed-decode": (
        "fia-window-decode-bf16 graph-fia-window-decode",
        "fia-decode-bf16 fia-window-encoder-fp16",
    ),
    "upper-left-causal": (
        "fia-chunk-bf16 fia-chunk-fp16 graph-fia-chunk-bf16 fia-long",
        "fia-decode-bf16 fia-prompt-bf16",
    ),
    "ignored-mask": (
        "fia-prompt-bf16 fia-chunk-fp16 fia-window-decode-bf16 atb-prompt-fp16 "
        "atb-chunk-bf16 atb-window-decode-bf16 graph-fia-chunk-bf16",
        "fia-decode-bf16 atb-decode-bf16",
    ),
    "ignored-scale": (
        "fia-prompt-bf16 fia-decode-bf16 atb-decode-fp16 atb-encoder-bf16",
        "write-fia-bf16",
    ),
    "last-token-dropped": (
        "fia-prompt-bf16 fia-decode-bf16 atb-decode-bf16 graph-atb-decode-bf16",
        "write-fia-bf16",
    ),
    "interleaved-heads": (
        "fia-prompt-bf16 fia-decode-bf16 atb-chunk-bf16",
        "fia-equal-heads-decode fia-one-kv-head-decode",
    ),
    "wrong-lse": (
        "fia-lse fia-shared-bf16 latent-lse-bf16 latent-prefill-bf16",
        "fia-no-lse fia-decode-bf16",
    ),
    "first-table-row": (
        "fia-decode-bf16 fia-chunk-bf16 atb-decode-bf16 fia-shared-blocks "
        "sparse-index-decode-bf16 sparse-attend-decode-fp16",
        "fia-prompt-bf16 write-atb-bf16",
    ),
    "ignored-rope": (
        "latent-decode-bf16 latent-drafts-bf16 latent-prefill-bf16 sparse-attend-decode-bf16",
        "fia-decode-bf16 sparse-index-decode-bf16",
    ),
    "whole-block-read": (
        "fia-decode-bf16 atb-decode-bf16 graph-fia-decode-bf16 latent-decode-bf16 "
        "sparse-index-decode-bf16 sparse-index-all-fp16",
        "fia-prompt-bf16",
    ),
    "padding-slot-written": (
        "write-fia-bf16 write-atb-fp16 write-fia-padding-only fia-padding-bf16",
        "fia-decode-bf16",
    ),
    "transposed-cache": (
        "write-fia-bf16 write-atb-bf16 fia-decode-bf16 graph-fia-decode-bf16",
        "fia-one-kv-head-decode fia-encoder-bf16",
    ),
    "future-chosen": (
        "sparse-index-drafts-bf16 sparse-index-prefill-fp16 graph-sparse-drafts",
        "sparse-index-decode-bf16 sparse-attend-drafts-bf16 graph-sparse-decode",
    ),
    "neighbours-choice": (
        "sparse-attend-drafts-bf16 sparse-attend-prefill-fp16 graph-sparse-drafts",
        "sparse-attend-decode-bf16 sparse-index-drafts-bf16 graph-sparse-decode",
    ),
    "unchosen-read": (
        "sparse-attend-all-bf16 sparse-attend-decode-fp16 sparse-attend-padding-bf16",
        "sparse-attend-2048 sparse-index-all-bf16",
    ),
    "early-maximum": ("int8-swiglu-wide-bf16 int8-swiglu-wide-fp16", "int8-dynamic-quant-bf16"),
    "added-flags": ("atb-prompt-bf16 atb-window-encoder-bf16", "atb-prompt-fp16 atb-chunk-bf16"),
}
"""For each fault of an operator: rows that find it, and some that don't meet it."""

OF_RANKS = {"mask-ignored", "combined-twice"}
"""Faults that rows of several ranks find: `tests/npu/test_verify_device.py`."""

NAMED = {
    "uniform-average": "as a plain average of the values",
    "wide-window": "as a window of 5 tokens",
    "ignored-mask": "as no mask",
    "ignored-scale": "as without a scale",
    "first-table-row": "as all requests over the first one's blocks",
    "future-chosen": "last position chosen at token",
    "padding-slot-written": "as a slot of -1 written to the last slot",
}
"""What the first row that finds a fault says of it."""


def test_every_fault_of_an_operator_is_planted():
    of_runtime = {name for name, each in faults.FAULTS.items() if each.point == "runtime"}
    assert of_runtime == {"stale-lengths"}
    assert set(FOUND_BY) == set(faults.FAULTS) - of_runtime - OF_RANKS


@pytest.mark.parametrize("name", FOUND_BY)
def test_a_wrong_kernel_is_found_by_the_rows_that_meet_it(name, run, fault):
    finders, others = (set(rows.split()) for rows in FOUND_BY[name])
    fault(name)
    asked = finders | others
    outcomes = {row: got for row, got in run(*asked).items() if row in asked}
    verdicts = {row: outcome["verdict"] for row, outcome in outcomes.items()}
    assert verdicts == {row: "DIFFERS" if row in finders else "same" for row in verdicts}, outcomes
    assert any(NAMED.get(name, "differ") in each["got"] for each in outcomes.values()), outcomes


def test_what_to_try_first_on_hardware_has_a_row_or_a_reason():
    from vllm_npu_prep.verify.rows import ROWS

    lines = TRIED.read_text().splitlines()
    tried = [line.split(" | ") for line in lines if not line.startswith("#")]
    first = {
        record.key
        for record in CONSTRAINTS
        if not record.refused or record.enforced in (Enforced.PRACTICE, Enforced.READING)
    }
    assert first == {(family, name) for family, name, _ in tried}
    assert len(first) == len(tried)
    for *record, by in tried:
        begin = [] if by.startswith("- ") else by.split()
        assert all(any(row.name.startswith(each) for row in ROWS) for each in begin), record


def probed(family, window=None, causal=True, dtype=torch.bfloat16, heads=(4, 2)):
    """What start-up probes of layers of a family; encoders have no cache."""
    masks = masks_for(family, dtype, torch.device("npu:0"), 512)
    given = layer_of(*heads, 128), dtype, 128 if causal else 0, window, causal
    prompts = AttentionForm(AttentionState.PrefillNoCache, ((0, 3), (0, 5)), *given)
    return probed_forms(prompts, family.name, masks, with_padding=True)


PROBED = {  # not uniform-average, which hits a form that the plugin avoids
    "wide-window": ((FIA, 4), "prompts"),
    "wide-window of encoders": ((FIA, 4, False), "an encoder"),
    "unnarrowed-decode": ((FIA, 200), "decodes"),
    "upper-left-causal": ((FIA,), "chunks"),
    "ignored-mask": ((ATB,), "prompts"),
    "ignored-scale": ((FIA,), "prompts"),
    "last-token-dropped": ((ATB,), "prompts"),
    "interleaved-heads": ((FIA,), "prompts"),
    "first-table-row": ((FIA,), "decodes"),
    "whole-block-read": ((FIA,), "decodes"),
    "padding-slot-written": ((FIA,), "decodes"),
    "transposed-cache": ((ATB,), "cache write"),
    "added-flags": ((ATB,), "prompts"),
}
"""For each fault the layers of an engine that meets it, and what its start-up names."""


@pytest.mark.parametrize("name", PROBED)
def test_the_start_up_probe_names_the_form_that_is_wrong(name, fault):
    arguments, form = PROBED[name]
    fault(name.partition(" ")[0])
    with pytest.raises(PrepError) as error:
        probe_forms("attention", probed(*arguments), make_device("npu"), print)
    assert form in str(error.value)
    assert "\n" not in str(error.value)


def test_the_probe_of_usual_layers_is_quick():
    """Two kinds of layers of a usual size, as Gemma has them: a second on this runtime."""
    heads = (16, 8)
    forms = probed(FIA, heads=heads) + probed(FIA, 1024, heads=heads)
    lines: list[str] = []
    start = time.perf_counter()
    probe_forms("attention", forms, make_device("npu"), lines.append)
    print("probe", time.perf_counter() - start)
    assert len(forms) == 6 and len(lines) == 1
