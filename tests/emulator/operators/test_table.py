"""The table of references: schemas, installation, documentation, and that it needs no torch_npu."""

import copy
import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils import _pytree as pytree

from ascend_emulator.operators import CONSTRAINTS, REFERENCES, install
from ascend_emulator.operators.constraint import FAMILIES, FOLDER
from ascend_emulator.operators.document import render
from ascend_emulator.operators.schemas import SCHEMAS, parse, schema_text, signature
from tests.emulator.operators.calls import FUNCTIONS, MIXED, V2_NAMES, Batch, cache_arguments
from tests.emulator.operators.violations.breaking import VALID
from tests.helpers.emulator import import_path

DOCUMENT = Path(__file__).parents[3] / "emulator" / "operators.md"
KEYS = [(reference.name, reference.overload) for reference in REFERENCES]


def test_each_reference_has_one_recorded_schema():
    assert len(set(KEYS)) == len(KEYS)
    assert set(KEYS) == set(SCHEMAS)


@pytest.mark.parametrize("reference", REFERENCES, ids=lambda r: f"{r.name}.{r.overload}")
def test_arguments_are_those_of_the_schema(reference):
    """Names, order, kinds and defaults; the fused references bind to the schema itself."""
    found = inspect.signature(reference.function).parameters.values()
    if [parameter.kind for parameter in found] == [
        inspect.Parameter.VAR_POSITIONAL,
        inspect.Parameter.VAR_KEYWORD,
    ]:
        with pytest.raises(TypeError, match="unexpected keyword argument 'actual_lengths'"):
            reference.function(None, None, None, actual_lengths=[1], out=[])
        return
    wanted = signature(reference.name, reference.overload).parameters.values()
    assert [(p.name, p.kind, p.default) for p in found] == [
        (p.name, p.kind, p.default) for p in wanted
    ]


@pytest.mark.parametrize("key", KEYS, ids=".".join)
def test_recorded_schemas_are_as_torch_prints_them(key):
    assert str(parse(*key)) == schema_text(*key)


def test_install_registers_every_reference_once():
    registered = []

    def register_reference(
        name, function, overload, on_host, contiguous, paged, block_ids, written
    ):
        row = (name, overload, function, on_host, contiguous, paged, block_ids, written)
        registered.append(row)

    install(register_reference)
    assert registered == [tuple(reference) for reference in REFERENCES]


@pytest.fixture(scope="module")
def dispatched():
    """Operators of torch's dispatcher with the real schemas and the references as CPU kernels."""
    library = torch.library.Library("npu_prep_test", "FRAGMENT")
    for name, overload, function, *_ in REFERENCES:
        library.define(schema_text(name, overload).split("::")[1])
        library.impl(".".join(filter(None, (name.split("::")[1], overload))), function, "CPU")
    yield torch.ops.npu_prep_test
    library._destroy()


def tensors(values):
    return [value for value in pytree.tree_leaves(values) if torch.is_tensor(value)]


def results(function, arguments):
    """What a call returns, and what its tensors hold afterwards."""
    arguments = copy.deepcopy(arguments)
    return tensors(function(**arguments)) + tensors(arguments)


HALF = torch.randn(3, 8).half()
NORMS = {
    "npu::npu_gemma_rms_norm": {"input": HALF, "gamma": HALF[0]},
    "npu::npu_add_rms_norm_cast": {"x1": HALF, "x2": HALF, "gamma": HALF[0]},
}
"""Of which the table of violations has no valid call."""


def valid(name, overload):
    if "fused_infer" not in name:
        return NORMS.get(name) or VALID[name, overload]()
    batch = Batch(MIXED)
    arguments = batch.paged(softmax_lse_flag=True)
    if "_v2" in name:
        arguments = {V2_NAMES.get(key, key): value for key, value in arguments.items()}
    out = {"out": [torch.zeros_like(batch.query), torch.zeros(103, 4, 1)]}
    return arguments | (out if overload else {})


@pytest.mark.parametrize("key", KEYS, ids=".".join)
def test_references_compute_the_same_behind_torchs_dispatcher(key, dispatched):
    """As the runtime launches them: it strips defaults and passes lists of symbolic integers."""
    name, overload = key
    arguments = valid(name, overload)
    operator = getattr(getattr(dispatched, name.split("::")[1]), overload or "default")
    direct, behind = (results(f, arguments) for f in (FUNCTIONS[key], operator))
    assert len(direct) == len(behind)
    for ours, theirs in zip(direct, behind):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


def test_refusals_pass_the_dispatcher(dispatched):
    with pytest.raises(RuntimeError, match="cache_mode"):
        dispatched.npu_scatter_pa_kv_cache(**cache_arguments(slot_name="slot_mapping"))
    with pytest.raises(RuntimeError, match=r"(unexpected|[Uu]nknown) keyword"):
        dispatched.npu_fused_infer_attention_score(**Batch(MIXED).paged(actual_lengths=[1]))


def test_the_document_is_up_to_date():
    command = "python -m ascend_emulator.operators.document emulator/operators.md"
    assert DOCUMENT.read_text() == render(), f"run {command}"


def test_records_are_complete():
    assert len(FAMILIES) == len([*FOLDER.iterdir()])
    assert len({constraint.key for constraint in CONSTRAINTS}) == len(CONSTRAINTS)
    for constraint in CONSTRAINTS:
        texts = (constraint.argument, constraint.demand, constraint.docstring_says)
        assert all((*texts, constraint.practice, constraint.source)), constraint


def test_references_need_neither_torch_npu_nor_vllm():
    code = (
        "import sys, ascend_emulator.operators as o;"
        "sys.exit(bool({'torch_npu', 'vllm'} & set(sys.modules)))"
    )
    environment = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "PATH": "", "PYTHONPATH": import_path()}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
