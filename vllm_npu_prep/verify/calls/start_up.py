"""The table that an engine names in its options, held against the engine before it starts."""

from pathlib import Path
from typing import TYPE_CHECKING

from vllm_npu_prep.compat.releases import installed
from vllm_npu_prep.config import parse_config
from vllm_npu_prep.device import cann_version, device_name
from vllm_npu_prep.verify.calls.table import Table, read_table
from vllm_npu_prep.wording import counted

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def table_of(vllm_config: "VllmConfig") -> Table | None:
    """Read the table of an engine; None if its options name none.

    Raises
    ------
    PrepError
        If the file can't be read or is no table.
    """
    path = parse_config(vllm_config.additional_config).verified
    return None if path is None else read_table(Path(path).expanduser())


def check_table(vllm_config: "VllmConfig") -> str:
    """Hold the table of an engine against the engine; return a few words about it.

    Raises
    ------
    PrepError
        If it is of another device, other software or another model, or if it has a wrong call that
        nothing can replace.
    """
    from vllm.transformers_utils.config import get_hf_file_to_dict

    table = table_of(vllm_config)
    if table is None:
        return "no table of calls"
    device_type = vllm_config.device_config.device_type
    here = {"chip": device_name(device_type), "CANN": cann_version(device_type)}
    if device_type == "npu":
        here["torch_npu"] = installed("torch_npu")
    table.refuse_other_software(here)
    model = vllm_config.model_config
    table.refuse_other_model(get_hf_file_to_dict("config.json", model.model, model.revision) or {})
    table.refuse_what_cannot_be_replaced()
    return f"{counted(len(table.results), 'call')}, in {table.path}"
