"""The plugin imports and starts beside the pinned vLLM; what doesn't is said in a line each."""

import sys
from pathlib import Path

import pytest

from tests.compat.start import failing_imports, failing_start
from tests.helpers.v2 import ALSO_V2, asked_for
from vllm_npu_prep.attention import kv_transfer


@pytest.mark.parametrize("runner_name", ALSO_V2)
def test_every_module_imports_and_an_engine_generates(demo_model, runner_name):
    assert failing_imports() == []
    with asked_for(runner_name):
        assert failing_start(demo_model) == []


def test_a_module_that_does_not_import_is_named_with_the_reason(monkeypatch):
    monkeypatch.delitem(sys.modules, "vllm_npu_prep.attention.kv_transfer", raising=False)
    connector = "vllm.distributed.kv_transfer.kv_connector.v1.example_connector"
    monkeypatch.delattr(connector, raising=False)
    monkeypatch.setitem(sys.modules, connector, None)
    (line,) = failing_imports()
    assert line.startswith(
        f"import of attention.kv_transfer: ModuleNotFoundError: import of {connector}"
    )
    source = Path(kv_transfer.__file__).read_text().splitlines()
    (number,) = (i for i, text in enumerate(source, 1) if text.endswith(" example_connector"))
    assert line.endswith(f"(kv_transfer.py:{number})")
