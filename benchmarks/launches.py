"""Launches of one decoder layer by its parts: with torch's operators, and with fused ones.

Counts, not times: the emulated runtime can't show speed.

    vllm-npu-prep emulate --quiet -- python benchmarks/launches.py [--json] [--models Qwen3 Llama]

Beside `device_counts.py`, which counts what preparing a step costs: this is the forward pass and
the sampler. Copies are those that operators make of strided inputs, and our own. Bytes are those of
the tensors that kernels read and write, for four decodes of the tiny model. The column of
vllm-project/vllm-ascend is not measured: it is read from its sources (main, August 2026).
"""

import argparse
import json
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parents[1]))
import ascend_emulator
from tests.helpers.engine import engine, generate, greedy, make_model, runner_of
from tests.helpers.fused import forget_layers

LAYER = "model.layers.1"
PARTS = {
    "norms": ("input_layernorm", "post_attention_layernorm"),
    "projection to Q, K, V": ("self_attn.qkv_proj",),
    "norms of Q and K": ("self_attn.q_norm", "self_attn.k_norm"),
    "rotary embedding": ("self_attn.rotary_emb",),
    "cache write, attention": ("self_attn.attn",),
    "other projections": ("self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"),
    "activation": ("mlp.act_fn",),
}
"""Modules of each part of a layer."""

VLLM_ASCEND = {
    "norms": 2,  # npu_add_rms_norm
    "projection to Q, K, V": 1,
    "norms of Q and K": 4,  # npu_rms_norm, and a copy of each slice of the projection
    "rotary embedding": 1,  # npu_mrope; without norms of Q and K, `contiguous` of both before it
    "cache write, attention": 3,  # `contiguous` of V before npu_scatter_pa_kv_cache
    "other projections": 3,
    "activation": 1,  # npu_swiglu
}
"""Of a Qwen3 layer, without its Triton kernels: ops/layernorm.py, ops/rotary_embedding.py,
device/device_op.py."""

COPIES_BEFORE_ROTARY = 2
"""More of them in vllm-ascend's rotary embedding where no norm has made Q and K contiguous."""


@dataclass
class Part:
    """What one part of a layer asks of the device."""

    launches: int = 0
    copies: int = 0
    bytes: int = 0
    kernels: Counter = field(default_factory=Counter)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "launches": self.launches,
            "copies": self.copies,
            "bytes": self.bytes,
            "kernels": dict(sorted(self.kernels.items())),
        }


class Kernels(TorchDispatchMode):
    """Names and bytes of the operators that launch a kernel while it is entered."""

    def __init__(self, part: Part) -> None:
        super().__init__()
        self.part = part

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Count an operator; those of vLLM are looked into."""
        kwargs = kwargs or {}
        if function.namespace in ("vllm", "vllm_ir"):
            with self:
                return function(*args, **kwargs)
        with ascend_emulator.count() as c:
            result = function(*args, **kwargs)
        if c.launches + c.d2d_copies:
            self.part.kernels[str(function)] += c.launches + c.d2d_copies
            tensors = pytree.tree_leaves((args, kwargs, result))
            self.part.bytes += sum(t.nbytes for t in tensors if isinstance(t, torch.Tensor))
        return result


def watch(model: Any) -> dict[str, Part]:
    """Parts of a layer, counted from now on in each forward; the last one is kept."""
    parts: dict[str, Part] = {}
    for name, modules in PARTS.items():
        for module_name in modules:
            try:
                module = model.get_submodule(f"{LAYER}.{module_name}")
            except AttributeError:
                continue  # a model without norms of Q and K
            forward = module.forward

            def counted(
                *args: Any, name: str = name, forward: Any = forward, first: bool, **kwargs: Any
            ) -> Any:
                part = parts[name] = Part() if first else parts[name]
                with Kernels(part), ascend_emulator.count() as c:
                    result = forward(*args, **kwargs)
                part.launches += c.launches
                part.copies += c.hidden_copies + c.d2d_copies
                return result

            is_first = module_name == modules[0]
            module.forward = lambda *a, run=counted, is_first=is_first, **k: run(
                *a, first=is_first, **k
            )
    return parts


def measure(folder: Path, fused: bool) -> tuple[dict[str, Part], int]:
    """Parts of a layer in a decode of four requests, and the launches of the whole layer."""
    forget_layers()
    options = {"npu_prep": {"fused": fused}}
    with engine(folder, dtype="float16", block_size=128, additional_config=options) as llm:
        model = runner_of(llm).get_model()
        parts, layer = watch(model), model.get_submodule(LAYER)
        forward, whole = layer.forward, [0]

        def counted(*args: Any, **kwargs: Any) -> Any:
            with ascend_emulator.count() as c:
                result = forward(*args, **kwargs)
            whole[0] = c.launches + c.hidden_copies
            return result

        layer.forward = counted
        generate(llm, [[5, 6], [7], [8, 9], [10]], greedy(3))
    return parts, whole[0]


def main() -> None:
    """Print a table for each model, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--models",
        nargs="+",
        default=["Qwen3", "Llama"],
        metavar="FAMILY",
        help="families of models to count",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    found: dict[str, Any] = {}
    for family in args.models:
        with tempfile.TemporaryDirectory() as folder:
            model = make_model(
                Path(folder) / "model", family, hidden_size=128, head_dim=32, num_hidden_layers=2
            )
            before, unfused = measure(model, fused=False)
            after, fused = measure(model, fused=True)
        theirs = {name: count for name, count in VLLM_ASCEND.items() if name in after}
        if "norms of Q and K" not in after:
            theirs["rotary embedding"] += COPIES_BEFORE_ROTARY
        found[family] = {
            "unfused": {name: part.as_dict() for name, part in before.items()},
            "fused": {name: part.as_dict() for name, part in after.items()},
            "vllm-ascend, launches and copies": theirs,
            "layer": {"unfused": unfused, "fused": fused, "vllm-ascend": sum(theirs.values())},
        }
    if args.json:
        print(json.dumps(found, indent=1))
        return
    for family, row in found.items():
        columns = ("launches", "copies", "bytes", "kernels")
        headers = [f"{name}, {kind}" for kind in ("unfused", "fused") for name in columns]
        table = Table(family, *headers, "vllm-ascend")
        for name in row["fused"]:
            cells = [row[kind][name] for kind in ("unfused", "fused")]
            values = [
                f"{len(cell[column]) if column == 'kernels' else cell[column]:,}"
                for cell in cells
                for column in columns
            ]
            table.add_row(name, *values, str(row["vllm-ascend, launches and copies"][name]))
        Console(width=180).print(table)
        print("whole layer, launches and copies:", row["layer"])


if __name__ == "__main__":
    main()
