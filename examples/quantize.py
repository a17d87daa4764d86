"""Write a quantised copy of a model: int8 or int4 weights, int8 or float inputs.

For serving in earnest use a tool that knows more models and more ways to choose scales:
llm-compressor writes compressed-tensors, msModelSlim writes the format of `--quantization ascend`.

    python examples/quantize.py --out .cache/tiny-qwen3-w8a8
    python examples/quantize.py --model MODEL --out FOLDER --format modelslim
    python examples/quantize.py --model MODEL --out FOLDER --static --text BOOK.txt
    python examples/quantize.py --model MODEL --out FOLDER --scheme W4A16 --group 32

What is quantised: the projections of attention, linear attention and MLPs, those of experts among
them. Embeddings, norms, routers, gates, the head and the first projection of MTP layers keep their
dtype. Inputs have a scale for each token, or with `--static` one scale for all tokens, from the
smallest and the largest number that was seen. MTP layers and experts stay dynamic.

First, transformers runs the model in float32 over the beginning of a text (`calibration_text`, or
`--text`). Outliers of inputs behind norms are moved into weights (SmoothQuant). A module keeps its
dtype if a few of its tokens have inputs that are many times larger than those of the others, as
some `down_proj` do, because no scale suits both. `--plain` does neither of the two, and rounds to
nearest; without `--static` it needs no run. `perplexity.py` tells what a copy loses.

With int4 weights, nothing is smoothed, and no module keeps its dtype because of its inputs. Groups
of `--group` inputs have a scale, among several that with which the module's outputs in the run lose
least; with `--plain`, and for experts that transformers keeps in one tensor, its weights.
W4A16_ASYM has zero points, too, and with W4A8 each token's inputs get a scale while serving
(`four_bits.py`).
"""

import argparse
import json
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file

DEFAULT_MODEL = Path(".cache/tiny-qwen3")
PROJECTION = re.compile(
    r"\.(?!eh_proj|input_proj)(\w+_proj|kv_a_proj_with_mqa|wq_b|in_proj_(qkvz?|z)|w[123])\.weight$"
    r"|\.layers?\.\d+\.(.+\.)?(query|key|value|dense|W(qkv|o|i))\.weight$"  # encoders
)
"""Weights that are quantised: two-dimensional ones of these modules, but not the projections with
which layers that draft begin. Of linear attention, rates and decays stay float: a head has two."""

IN_LAYER = re.compile(r"\.layers?\.\d+\.")

FUSED_EXPERTS = re.compile(r"\.experts\.(gate_up_proj|down_proj)$")
"""Three-dimensional weights of all experts of a layer, as Qwen3.5's files have them."""

SMOOTHED = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}
"""Norms whose results go to these projections alone, in layers of `SMOOTHED_MODELS`."""

SMOOTHED_MODELS = ("llama", "mistral", "qwen2", "qwen3")

OUTLYING = 20
"""With a scale for each token, a module keeps its dtype if a token's largest input is this many
times that of the median token. In SmolLM2 it is 25 to 2,190 times for six `down_proj`, and at most
13 times for all other modules."""
LOST = 0.005
"""With one scale for all tokens, a module keeps its dtype if the expected mean square of the
rounding error is a larger share of the mean square of the median token's inputs."""

OF_INDEXERS = r"\.indexer\.(wk|weights_proj)$"
"""What vLLM makes one float projection of, whatever the rest of a model is."""

BOOK = "3rdparty/libbacktrace/Isaac.Newton-Opticks.txt"
DESCRIPTION = "quant_model_description.json"
SIZE_OF_FILE = 4 << 30
TOKENS_OF_RUN = 256
RUNS_OVER_TEXT = 8
FORMATS = ("compressed-tensors", "modelslim")
OF_FOUR_BITS = ("awq", "gptq")
"""Formats without int8."""
SCHEMES = ("W8A8", "W4A16", "W4A16_ASYM", "W4A8")
"""As llm-compressor names them."""


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
    kept = any(re.search(pattern, module) for pattern in (OF_INDEXERS, *keep))
    return tensor.dim() == 2 and bool(PROJECTION.search(name)) and not kept


def token_ids(model: Path, text: str, vocabulary: int) -> list[list[int]]:
    """The beginning of a text for the runs that calibrate, by the model's tokenizer.

    Token ids are drawn at random if the text is empty.

    Raises
    ------
    ValueError
        If the tokenizer gives no token, as transformers' own without files does, or one that the
        model's vocabulary has no room for.
    """
    from transformers import AutoTokenizer

    if not text:
        generator = torch.Generator().manual_seed(0)
        return torch.randint(0, vocabulary, (1, TOKENS_OF_RUN), generator=generator).tolist()
    ids = AutoTokenizer.from_pretrained(model)(text, verbose=False).input_ids
    if not ids:
        raise ValueError("it has no tokenizer, or one that makes no token of the text")
    if (largest := max(ids)) >= vocabulary:
        raise ValueError(f"its tokenizer gives token {largest}, its vocabulary has {vocabulary}")
    ends = range(TOKENS_OF_RUN, len(ids) + 1, TOKENS_OF_RUN)
    return [ids[end - TOKENS_OF_RUN : end] for end in ends][:RUNS_OVER_TEXT] or [ids]


def book() -> Path | None:
    """Isaac Newton's Opticks, a file of apache-tvm-ffi, which vLLM needs for structured output."""
    spec = find_spec("tvm_ffi")
    path = Path(spec.origin).parent / BOOK if spec and spec.origin else Path(BOOK)
    return path if path.exists() else None


def calibration_text(model: Path) -> str:
    """The second half of the Opticks; empty if the book or the model's tokenizer is missing."""
    path = book()
    if path is None or not any(model.glob("tokenizer*")):
        return ""
    text = path.read_text()
    return text[len(text) // 2 :]


class Inputs(NamedTuple):
    """What a module's inputs were in the run that calibrates."""

    low: torch.Tensor  # [K] float32: the smallest of each column, and 0 if that is smaller
    high: torch.Tensor  # [K] float32: the largest
    largest: torch.Tensor  # [num_tokens] float32: the largest magnitude of each token
    squares: torch.Tensor  # [num_tokens] float32: the mean square of each token
    of_columns: torch.Tensor  # [K] float32: the sum of squares of each column

    def have_no_scale(self, static: bool) -> bool:
        """Whether a few tokens are so large that no scale suits them and the others."""
        if static:
            step = (self.high.max() - self.low.min()) / 255
            return bool(step**2 / 12 > LOST * self.squares.median())
        return bool(self.largest.max() > OUTLYING * self.largest.median())


Ranges = dict[str, Inputs]


def input_ranges(model: Path, modules: set[str], text: str = "") -> Ranges:
    """Inputs of each module over the beginning of a text, or over token ids drawn at random.

    Raises
    ------
    ValueError
        If transformers can't run the model, or a text by its tokenizer.
    """
    from transformers import AutoModelForCausalLM

    try:
        network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        runs = token_ids(model, text, network.config.get_text_config().vocab_size)
    except (ValueError, OSError, ImportError) as error:
        raise ValueError(
            f"transformers can't run {model}, which shows what its layers are given "
            f"({str(error).strip().splitlines()[0]}); --plain without --static needs no run"
        ) from error
    found: Ranges = {}

    def watch(name: str) -> Any:
        def hook(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            rows = inputs[0].flatten(0, -2)
            none = rows.new_zeros(rows.shape[-1])
            before = Inputs(none, none, none[:0], none[:0], none)
            low, high, largest, squares, of_columns = found.get(name, before)
            found[name] = Inputs(
                low.minimum(rows.amin(0)),
                high.maximum(rows.amax(0)),
                torch.cat((largest, rows.abs().amax(1))),
                torch.cat((squares, rows.square().mean(1))),
                of_columns + rows.square().sum(0),
            )

        return hook

    for name, module in network.named_modules():
        if name in modules:
            module.register_forward_pre_hook(watch(name))
    with torch.no_grad():
        for ids in runs:
            network(torch.tensor([ids]))
    return found


Factors = dict[str, torch.Tensor]


def smoothing(model: Path, ranges: Ranges) -> tuple[Factors, Factors]:
    """SmoothQuant, with a strength of 0.5: outliers behind norms move into weights.

    Returns factors ``[K]`` by which columns of projections are multiplied and weights of norms
    divided, by module. They are powers of two, so no dtype rounds what they multiply.
    """
    columns: Factors = {}
    norms: Factors = {}
    largest = {
        name.removesuffix(".weight"): tensor.float().abs().amax(0)
        for name, tensor in tensors_of(model)
        if tensor.dim() == 2 and IN_LAYER.search(name)
    }
    for layer in dict.fromkeys(re.sub(r"(?<=\.layers\.)(\d+\.).*", r"\1", name) for name in ranges):
        for norm, behind in SMOOTHED.items():
            modules = [layer + name for name in behind]
            known = [ranges[name] for name in modules if name in ranges]
            if not known:
                continue
            low, high, *_ = known[0]  # of all: they have the same input
            weights = torch.stack([largest[name] for name in modules]).amax(0)
            ratio = high.maximum(-low).clamp(min=1e-5) / weights.clamp(min=1e-5)
            factors = 2 ** (ratio.log2() / 2).round()
            columns |= dict.fromkeys(modules, factors)
            norms[layer + norm] = factors
    return columns, norms


def smoothed(model: Path, columns: Factors, norms: Factors) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and values of a checkpoint with the factors of `smoothing`."""
    for name, tensor in tensors_of(model):
        module, dtype = name.rpartition(".")[0], tensor.dtype
        if module in columns and tensor.dim() == 2:
            tensor = tensor * columns[module]
        if module in norms:
            tensor = tensor / norms[module]
        yield name, tensor.to(dtype)


def ends_of(ranges: Ranges, columns: Factors) -> dict[str, tuple[float, float]]:
    """Smallest and largest input of each module, once its columns have these factors."""
    found = {}
    for name, (low, high, *_) in ranges.items():
        factors = columns.get(name, torch.ones(1))
        found[name] = float((low / factors).min()), float((high / factors).max())
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
    model: Path,
    out: Path,
    form: str,
    static: bool = False,
    keep: tuple[str, ...] = (),
    text: str = "",
    plain: bool = False,
    scheme: str = SCHEMES[0],
    group: int = 128,
) -> list[str]:
    """Write a quantised copy of a model; return modules that keep their dtype for their inputs.

    Parameters
    ----------
    model, out
        Folders; the second is replaced.
    form
        One of `FORMATS`, or with four bits of `OF_FOUR_BITS`.
    static
        Give inputs one scale for all tokens: ModelSlim's ``W8A8`` in place of ``W8A8_DYNAMIC``.
        Experts stay dynamic.
    keep
        Regular expressions; modules in which one is found keep their dtype.
    text
        Calibrates; token ids drawn at random do if it is empty.
    plain
        Don't smooth, keep no module because of its inputs, and choose scales by weights alone.
    scheme
        One of `SCHEMES`.
    group
        Inputs that share a scale of four-bit weights; 0 for all of an output channel.

    Raises
    ------
    ValueError
        If the folder holds no weights, or is quantised already; if transformers can't run it; if a
        module would be dynamic in a static copy in compressed-tensors' form; if a module has no
        whole number of groups; for a form that the scheme doesn't have.
    """
    import four_bits  # beside this script

    is_int8 = scheme == SCHEMES[0]
    has_zeros = scheme.endswith("_ASYM")
    schemes_of = {"modelslim": ("W8A8", "W4A8"), "awq": ("W4A16_ASYM",), "gptq": ("W4A16",)}
    if scheme not in schemes_of.get(form, SCHEMES) or (static and not is_int8):
        raise ValueError(f"--format {form} has no {scheme}{' with --static' if static else ''}")
    weights = dict.fromkeys(name for name, _ in tensors_of(model))
    if not weights:
        raise ValueError(f"{model} has no safetensors files")
    config = json.loads((model / "config.json").read_text())
    if "quantization_config" in config or (model / DESCRIPTION).exists():
        raise ValueError(f"{model} is quantised already")
    quantized = {n for n, t in tensors_of(model) if is_quantized(n, t, list(keep))}
    modules = {name.removesuffix(".weight") for name in quantized}
    ranges: Ranges = {}
    if static or not plain:
        ranges = input_ranges(model, modules, text)
    outlying: list[str] = []
    if is_int8 and not plain:
        outlying = sorted(name for name, each in ranges.items() if each.have_no_scale(static))
    modules.difference_update(outlying)
    quantized.difference_update(f"{name}.weight" for name in outlying)
    ranges = {name: ranges[name] for name in ranges if name in modules}
    smooth = is_int8 and not plain and config.get("model_type") in SMOOTHED_MODELS
    columns, norms = smoothing(model, ranges) if smooth else ({}, {})
    ends = ends_of(ranges, columns) if static else {}
    if static and form != "modelslim" and (rest := sorted(modules - ends.keys())):
        raise ValueError(
            f"--static: {rest[0]} (of {len(rest)} such modules) has no input of its own to "
            "calibrate, as experts and MTP layers; --keep them, or take --format modelslim, "
            "in which they stay dynamic"
        )
    shutil.rmtree(out, ignore_errors=True)
    skipped = shutil.ignore_patterns("*.safetensors", "*.bin", "*.index.json", "recipe.sha256")
    shutil.copytree(model, out, ignore=skipped)
    tensors = partial(smoothed, model, columns, norms)
    biases = {name: t for name, t in tensors() if name.endswith(".bias")}
    files, description = Files(out), {}
    for name, tensor in tensors():
        module = name.removesuffix(".weight")
        if name not in quantized:
            files.add({name: tensor})
            description[name] = "FLOAT"
            continue
        if not is_int8:
            squares = ranges[module].of_columns if module in ranges else None
            # ModelSlim's scales of channels are positive
            signed = squares is not None and (form != "modelslim" or group > 0)
            rounded = four_bits.round_groups(
                tensor, group, has_zeros, module, squares, signed=signed
            )
            made = four_bits.tensors(form, module, rounded, group)
            description |= dict.fromkeys(made, "W4A8_DYNAMIC")
            files.add(made)
            continue
        values, scale = quantize_weight(tensor)
        made = {name: values, f"{module}.weight_scale": scale}
        if form != "modelslim" and static:
            step, offset = static_scales(*ends[module])
            made[f"{module}.input_scale"] = step
            made[f"{module}.input_zero_point"] = offset.to(torch.int8)
        if form == "modelslim":
            made[f"{module}.weight_offset"] = torch.zeros_like(scale)
            if module in ends:
                made |= static_tensors(module, values, scale, ends, biases, tensor.dtype)
            kind = "W8A8" if module in ends else "W8A8_DYNAMIC"
            description |= dict.fromkeys(made, kind)
        files.add(made)
    files.close()
    if form == "modelslim":
        kind = "W8A8" if static else "W8A8_DYNAMIC" if is_int8 else "W4A8_DYNAMIC"
        header = {
            "model_quant_type": kind,
            "version": "1.0.0",
            "group_size": 0 if is_int8 else group,
        }
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
        made_config = compressed_tensors_config(ignored, static)
        if not is_int8:
            made_config = four_bits.config_of(form, scheme, group, made_config)
        config["quantization_config"] = made_config
        (out / "config.json").write_text(json.dumps(config, indent=1))
    return outlying


def static_tensors(
    module: str,
    values: torch.Tensor,
    scale: torch.Tensor,
    ends: Mapping[str, tuple[float, float]],
    biases: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
) -> dict[str, torch.Tensor]:
    """What static quantisation adds to a module, by ModelSlim's names."""
    step, offset = static_scales(*ends[module])
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


def compressed_tensors_config(ignored: list[str], static: bool = False) -> dict[str, Any]:
    """``quantization_config`` of int8 weights by channel, and inputs by token or static."""
    common = {"num_bits": 8, "type": "int"}
    inputs = {
        "symmetric": not static,
        "strategy": "tensor" if static else "token",
        "dynamic": not static,
    }
    group = {
        "targets": ["Linear"],
        "weights": {**common, "symmetric": True, "strategy": "channel", "dynamic": False},
        "input_activations": common | inputs,
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
        choices=(*FORMATS, *OF_FOUR_BITS),
        default=FORMATS[0],
        help="whose files: %(default)s if not given",
    )
    parser.add_argument(
        "--scheme", choices=SCHEMES, default=SCHEMES[0], help="what is rounded: %(default)s"
    )
    parser.add_argument(
        "--group",
        type=int,
        default=128,
        metavar="INPUTS",
        help="inputs that share a scale of four-bit weights; 0: all (default: %(default)s)",
    )
    parser.add_argument("--static", action="store_true", help="one scale for all tokens")
    parser.add_argument(
        "--text",
        type=Path,
        metavar="FILE",
        help="calibrates (default: the second half of Newton's Opticks, else random tokens)",
    )
    parser.add_argument(
        "--keep", nargs="*", default=[], metavar="REGEX", help="modules that keep their dtype"
    )
    parser.add_argument(
        "--plain",
        action="store_true",
        help="round all to nearest, without a look at inputs: don't smooth, keep no module float",
    )
    args = parser.parse_args()
    model = args.model
    if model is None:
        import tiny_model  # beside this script

        model = tiny_model.make(DEFAULT_MODEL)
    if args.text and args.plain and not args.static:
        parser.error("--text is for calibration, which --plain does only with --static")
    try:
        text = args.text.read_text() if args.text else calibration_text(model)
        given = args.format, args.static, tuple(args.keep), text, args.plain
        outlying = quantize(model, args.out, *given, args.scheme, args.group)
    except ValueError as error:
        parser.error(str(error))
    except OSError as error:
        parser.error(f"{error.filename}: {error.strerror}")
    print(f"Wrote {args.out}: vllm serve {args.out}")
    if outlying:
        print(f"Modules that keep their dtype, because of large inputs: {', '.join(outlying)}")
    print("llm-compressor and msModelSlim know more models, and more ways to choose scales.")


if __name__ == "__main__":
    main()
