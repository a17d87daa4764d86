"""The table of references: schemas, installation, documentation, and that it needs no torch_npu."""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from vllm_npu_prep.emulator.operators import CONSTRAINTS, REFERENCES, install
from vllm_npu_prep.emulator.operators.document import render
from vllm_npu_prep.emulator.operators.schemas import SCHEMAS, parse, schema_text, signature

DOCUMENT = Path(__file__).parents[3] / "docs" / "operators.md"
KEYS = [(reference.name, reference.overload) for reference in REFERENCES]


def test_each_reference_has_one_recorded_schema():
    assert len(set(KEYS)) == len(KEYS)
    assert set(KEYS) == set(SCHEMAS)


@pytest.mark.parametrize("reference", REFERENCES, ids=lambda r: f"{r.name}.{r.overload}")
def test_arguments_are_those_of_the_schema_in_name_order_and_default(reference):
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


@pytest.mark.parametrize("key", KEYS, ids=".".join)
def test_recorded_schemas_are_those_of_torch_npu_where_it_is_loaded(key):
    if "torch_npu" not in sys.modules:
        pytest.skip("torch_npu is not loaded")
    real = [str(schema) for schema in torch._C._jit_get_schemas_for_operator(key[0])]
    assert schema_text(*key) in real


def test_install_registers_every_reference_once():
    registered = []

    def register_reference(name, function, overload=""):
        registered.append((name, overload, function))

    install(register_reference)
    assert registered == [tuple(reference) for reference in REFERENCES]


def test_references_work_as_cpu_kernels_of_torch_dispatcher():
    """As the runtime launches them: with defaults stripped and mutated arguments as aliases."""
    library = torch.library.Library("npu_prep_test", "FRAGMENT")
    functions = {reference.name: reference.function for reference in REFERENCES}
    for name in ("npu::npu_rms_norm", "npu::npu_scatter_pa_kv_cache"):
        short = name.split("::")[1]
        library.define(schema_text(name).split("::")[1])
        library.impl(short, functions[name], "CPU")
    output, _ = torch.ops.npu_prep_test.npu_rms_norm(torch.ones(2, 4), torch.ones(4))
    torch.testing.assert_close(output, torch.ones(2, 4))
    cache = torch.zeros(2, 2, 16, 1, 16, dtype=torch.float16)
    rows = torch.ones(1, 1, 16, dtype=torch.float16)
    slots = torch.tensor([17], dtype=torch.int32)
    write = torch.ops.npu_prep_test.npu_scatter_pa_kv_cache
    write(rows, rows, cache[0], cache[1], slots, cache_mode="Norm")
    assert cache.sum() == 32 and cache[0, 1, 1].sum() == 16
    with pytest.raises(RuntimeError, match="cache_mode"):
        write(rows, rows, cache[0], cache[1], slots)


def test_the_document_is_up_to_date():
    command = "python -m vllm_npu_prep.emulator.operators.document docs/operators.md"
    assert DOCUMENT.read_text() == render(), f"run {command}"


def test_records_are_complete():
    assert len({constraint.key for constraint in CONSTRAINTS}) == len(CONSTRAINTS)
    for constraint in CONSTRAINTS:
        texts = (constraint.argument, constraint.demand, constraint.docstring_says)
        assert all((*texts, constraint.practice, constraint.source)), constraint


def test_importing_the_references_needs_neither_torch_npu_nor_vllm():
    code = (
        "import sys, vllm_npu_prep.emulator.operators as o;"
        "sys.exit(bool({'torch_npu', 'vllm'} & set(sys.modules)))"
    )
    environment = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "PATH": ""}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
