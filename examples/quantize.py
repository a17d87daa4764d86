"""Write an int8 copy of a model: W8A8, round to nearest, one scale for each output channel.

No data is needed and nothing is calibrated, so the copy is less exact than it could be. For serving
in earnest use a tool that calibrates: llm-compressor writes compressed-tensors, msModelSlim writes
the format of `--quantization ascend`; both choose scales by what a model computes on sample text.

    python examples/quantize.py --out .cache/tiny-qwen3-w8a8
    python examples/quantize.py --model MODEL --out FOLDER --format modelslim

What is quantised: the projections of attention, linear attention and MLPs, those of experts among
them. Embeddings, norms, routers, gates, the head and the first projection of MTP layers keep their
dtype. `--static`
(ModelSlim only) gives inputs one scale for all tokens, taken from a short run over token ids drawn
at random: good enough to try the format. MTP layers don't run in it, and stay dynamic.
"""

import argparse
import json
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

DEFAULT_MODEL = Path(".cache/tiny-qwen3")
PROJECTION = re.compile(
    r"\.(?!eh_proj|input_proj)(\w+_proj|kv_a_proj_with_mqa|in_proj_(qkvz?|z)|w[123])\.weight$"
    r"|\.layers?\.\d+\.(.+\.)?(query|key|value|dense|W(qkv|o|i))\.weight$"  # encoders
)
"""Weights that are quantised: two-dimensional ones of these modules, but not the projections with
which layers that draft begin. Of linear attention, rates and decays stay float: a head has two."""

IN_LAYER = re.compile(r"\.layers?\.\d+\.")

FUSED_EXPERTS = re.compile(r"\.experts\.(gate_up_proj|down_proj)$")
"""Three-dimensional weights of all experts of a layer, as Qwen3.5's files have them."""

DESCRIPTION = "quant_model_description.json"
SIZE_OF_FILE = 4 << 30
TOKENS_OF_RUN = 256
FORMATS = ("compressed-tensors", "modelslim")


def quantize_weight(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round to nearest: int8 ``[N, K]``, and a float32 scale ``[N, 1]`` for each row."""
    rows = weight.float()
    scale = rows.abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
    return (rows / scale).round().clamp(-127, 127).to(torch.int8), scale


def tensors_of(model: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and values of a checkpoint, one at a time."""
    for path in sorted(model.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  (not a dict)
                yield from parts_of(name, file.get_tensor(name))


def parts_of(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """A tensor by its name; weights of fused experts one by one, each with scales of its own."""
    if tensor.dim() != 3 or not FUSED_EXPERTS.search(name):
        yield name, tensor
        return
    layer, _, last = name.rpartition(".")
    parts = ("gate_proj", "up_proj") if last == "gate_up_proj" else (last,)
    for expert, weights in enumerate(tensor):
        for part, weight in zip(parts, weights.chunk(len(parts))):
            yield f"{layer}.{expert}.{part}.weight", weight


def is_quantized(name: str, tensor: torch.Tensor, keep: list[str]) -> bool:
    """Whether a tensor is a projection that `keep` does not leave in its dtype."""
    module = name.removesuffix(".weight")
    kept = any(re.search(pattern, module) for pattern in keep)
    return tensor.dim() == 2 and bool(PROJECTION.search(name)) and not kept


def input_ranges(model: Path, modules: set[str]) -> dict[str, tuple[float, float]]:
    """Smallest and largest input of each module, over token ids drawn at random."""
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    found: dict[str, tuple[float, float]] = {}

    def watch(name: str) -> Any:
        def hook(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            low, high = found.get(name, (0.0, 0.0))
            found[name] = min(low, float(inputs[0].min())), max(high, float(inputs[0].max()))

        return hook

    for name, module in network.named_modules():
        if name in modules:
            module.register_forward_pre_hook(watch(name))
    generator = torch.Generator().manual_seed(0)
    vocab = network.config.get_text_config().vocab_size
    with torch.no_grad():
        network(torch.randint(0, vocab, (1, TOKENS_OF_RUN), generator=generator))
    return found


def static_scales(low: float, high: float) -> tuple[torch.Tensor, torch.Tensor]:
    """``input_scale``, which bfloat16 holds, and ``input_offset``: -128 and 127 are the ends."""
    scale = torch.tensor([max(high - low, 1e-6) / 255]).bfloat16().float()
    return scale, (-128 - low / scale).round()


class Files:
    """Safetensors files of limited size, and the index that names them.

    Parameters
    ----------
    out
        Folder, which exists.
    """

    def __init__(self, out: Path) -> None:
        self.out, self.count = out, 0
        self.held: dict[str, torch.Tensor] = {}
        self.where: dict[str, str] = {}

    def add(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Keep tensors, and write a file when enough are kept."""
        self.held |= {name: tensor.contiguous() for name, tensor in tensors.items()}
        if sum(tensor.nbytes for tensor in self.held.values()) >= SIZE_OF_FILE:
            self.write()

    def write(self) -> None:
        """Write what is kept."""
        if not self.held:
            return
        self.count += 1
        name = f"model-{self.count:05}.safetensors"
        save_file(self.held, self.out / name, metadata={"format": "pt"})
        self.where |= dict.fromkeys(self.held, name)
        self.held = {}

    def close(self) -> None:
        """Write the rest and the index."""
        self.write()
        index = {"metadata": {}, "weight_map": self.where}
        (self.out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def quantize(
    model: Path, out: Path, form: str, static: bool = False, keep: tuple[str, ...] = ()
) -> None:
    """Write an int8 copy of a model.

    Parameters
    ----------
    model, out
        Folders; the second is replaced.
    form
        One of `FORMATS`.
    static
        Give inputs one scale for all tokens: ModelSlim's ``W8A8`` in place of ``W8A8_DYNAMIC``.
        Experts stay dynamic.
    keep
        Regular expressions; modules in which one is found keep their dtype.

    Raises
    ------
    ValueError
        If the folder holds no weights, or is quantised already.
    """
    if static and form != "modelslim":
        raise ValueError("--static: only --format modelslim writes scales for inputs")
    weights = dict.fromkeys(name for name, _ in tensors_of(model))
    if not weights:
        raise ValueError(f"{model} has no safetensors files")
    config = json.loads((model / "config.json").read_text())
    if "quantization_config" in config or (model / DESCRIPTION).exists():
        raise ValueError(f"{model} is quantised already")
    shutil.rmtree(out, ignore_errors=True)
    skipped = shutil.ignore_patterns("*.safetensors", "*.bin", "*.index.json", "recipe.sha256")
    shutil.copytree(model, out, ignore=skipped)
    biases = {name: t for name, t in tensors_of(model) if name.endswith(".bias")}
    quantized = {n for n, t in tensors_of(model) if is_quantized(n, t, list(keep))}
    modules = {name.removesuffix(".weight") for name in quantized}
    ranges = input_ranges(model, modules) if static else {}
    files, description = Files(out), {}
    for name, tensor in tensors_of(model):
        module = name.removesuffix(".weight")
        if name not in quantized:
            files.add({name: tensor})
            description[name] = "FLOAT"
            continue
        values, scale = quantize_weight(tensor)
        made = {name: values, f"{module}.weight_scale": scale}
        if form == "modelslim":
            made[f"{module}.weight_offset"] = torch.zeros_like(scale)
            if module in ranges:
                made |= static_tensors(module, values, scale, ranges, biases, tensor.dtype)
            kind = "W8A8" if module in ranges else "W8A8_DYNAMIC"
            description |= dict.fromkeys(made, kind)
        files.add(made)
    files.close()
    if form == "modelslim":
        header = {"model_quant_type": "W8A8" if static else "W8A8_DYNAMIC", "version": "1.0.0"}
        (out / DESCRIPTION).write_text(json.dumps(header | description, indent=1))
    else:
        left_out = sorted(
            {
                name.removesuffix(".weight")
                for name, tensor in tensors_of(model)
                if name.endswith(".weight") and tensor.dim() == 2 and name not in quantized
            }
        )
        ignored = [each if IN_LAYER.search(each) else end_of(each, modules) for each in left_out]
        config["quantization_config"] = compressed_tensors_config(ignored)
        (out / "config.json").write_text(json.dumps(config, indent=1))


def static_tensors(
    module: str,
    values: torch.Tensor,
    scale: torch.Tensor,
    ranges: Mapping[str, tuple[float, float]],
    biases: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
) -> dict[str, torch.Tensor]:
    """What static quantisation adds to a module, by ModelSlim's names."""
    step, offset = static_scales(*ranges[module])
    both = (step * scale).flatten()
    bias = biases.get(f"{module}.bias")
    start = torch.zeros_like(both) if bias is None else (bias.float() / both).round()
    sums = values.sum(1, dtype=torch.int32)
    packed = both.view(torch.int32).to(torch.int64) if dtype == torch.float16 else both
    return {
        f"{module}.input_scale": step,
        f"{module}.input_offset": offset,
        f"{module}.deq_scale": packed,
        f"{module}.quant_bias": start.int() - offset.int() * sums,
    }


def end_of(module: str, quantized: Collection[str]) -> str:
    """Pattern of compressed-tensors for a module outside of layers.

    It is the shortest end of its name that no quantised module shares: engines put some of them
    into other modules than the checkpoint does.
    """
    parts = module.split(".")
    ends = (".".join(parts[i:]) for i in reversed(range(len(parts))) if not parts[i].isdigit())
    taken = [f".{each}" for each in quantized]
    free = next(end for end in ends if not any(each.endswith(f".{end}") for each in taken))
    return f"re:(.*\\.)?{re.escape(free)}$"


def compressed_tensors_config(ignored: list[str]) -> dict[str, Any]:
    """``quantization_config`` of int8 weights by channel and int8 inputs by token."""
    common = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**common, "strategy": "channel", "dynamic": False},
        "input_activations": {**common, "strategy": "token", "dynamic": True},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": ignored,
        "config_groups": {"group_0": group},
    }


def main() -> None:
    """Quantise as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="folder of a model (default: the demo model)")
    parser.add_argument("--out", type=Path, required=True, help="folder of the copy; replaced")
    parser.add_argument(
        "--format",
        choices=FORMATS,
        default=FORMATS[0],
        help="whose files: %(default)s if not given",
    )
    parser.add_argument("--static", action="store_true", help="one scale for all tokens")
    parser.add_argument(
        "--keep", nargs="*", default=[], metavar="REGEX", help="modules that keep their dtype"
    )
    args = parser.parse_args()
    model = args.model
    if model is None:
        import tiny_model  # beside this script

        model = tiny_model.make(DEFAULT_MODEL)
    try:
        quantize(model, args.out, args.format, args.static, tuple(args.keep))
    except ValueError as error:
        parser.error(str(error))
    serve = "vllm serve " + str(args.out)
    print(
        f"Wrote {args.out}: {serve}\n"
        "Rounded to nearest, without calibration: llm-compressor and msModelSlim, which calibrate, "
        "keep more of a model's accuracy."
    )


if __name__ == "__main__":
    main()
