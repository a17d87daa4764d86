"""Forms of torch_npu's operators in the committed lists, and which of them the suite never meets.

A form is what of a call is no size, as the emulator tells calls apart: operator, dtypes, ranks,
layouts, flags, and whether a graph makes it.

    python -m ascend_emulator --calls FILE -- python -m pytest tests/npu/on_device    # or in parts
    python -m tests.verify.forms FILE ...    # of all parts together; writes `UNMET`
"""

import json
import math
import sys
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any

from torch.utils._pytree import tree_leaves

from ascend_emulator.calls import key_of
from tests.helpers.emulator import ROOT
from vllm_npu_prep.verify.calls import lists
from vllm_npu_prep.verify.calls.call import Call, read_list

UNMET = ROOT / "tests" / "results" / "unmet_forms.jsonl"
"""How many forms are listed, and how many of them are met; then a line for each other one."""


def is_tensor(value: Any) -> bool:
    return isinstance(value, dict) and "shape" in value


def form_of(call: Call) -> str:
    """The key by which the emulator would record the call: calls of one form have one key."""
    operator, _, overload = call.operator.partition(".")
    arguments = {name: _recorded(value) for name, value in call.arguments.items()}
    named = {"operator": operator, "overload": overload, "captured": call.captured}
    return key_of({**named, "arguments": arguments})


def _recorded(value: Any) -> Any:
    if isinstance(value, list):
        return [_recorded(item) for item in value]
    is_dtype = isinstance(value, dict) and "type" in value
    return f"torch.{value['type']}" if is_dtype else value


@cache
def listed() -> dict[str, dict[str, Call]]:
    """By forms, and by lists: the smallest call."""
    found: dict[str, dict[str, Call]] = defaultdict(dict)
    for name in lists.names():
        for call in read_list(lists.path_of(name))[1]:
            if call.operator.startswith("npu::"):
                of_form = found[form_of(call)]
                if name not in of_form or elements(call) < elements(of_form[name]):
                    of_form[name] = call
    return found


def elements(call: Call) -> int:
    tensors = [x for x in tree_leaves(call.arguments, is_leaf=is_tensor) if is_tensor(x)]
    return sum(math.prod(each["shape"]) for each in tensors)


def main(paths: list[str]) -> None:
    texts = [Path(path).read_text() for path in paths]
    met = {key_of(json.loads(line)) for text in texts for line in text.splitlines()}
    unmet = sorted(listed().keys() - met)
    lines: list[dict[str, Any]] = [{"listed": len(listed()), "met": len(listed()) - len(unmet)}]
    lines += [{"lists": [*listed()[form]], "form": json.loads(form)} for form in unmet]
    UNMET.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    print(lines[0])


if __name__ == "__main__":
    main(sys.argv[1:])
