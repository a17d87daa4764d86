"""What a checkpoint's files hold, checked before any weight is loaded.

Of safetensors files, headers are read (names, dtypes and shapes), and small tensors of four-bit
weights. A model whose files aren't on this host yet is checked by the loader alone.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vllm_npu_prep.errors import PrepError

DESCRIPTION = "quant_model_description.json"
FLOAT, STATIC, DYNAMIC, INT4 = "FLOAT", "W8A8", "W8A8_DYNAMIC", "W4A8_DYNAMIC"
TYPES = (FLOAT, STATIC, DYNAMIC, INT4)
"""The names that ModelSlim has for how a weight was quantised, as far as this plugin can serve
them."""

REQUIRED = {
    STATIC: ("weight_scale", "input_scale", "input_offset", "quant_bias", "deq_scale"),
    DYNAMIC: ("weight_scale",),
    INT4: ("weight_scale",),
}
"""Tensors beside ``weight`` that each type needs."""

PACKED_WEIGHT = ".weight_packed"
"""End of the names of weights of four bits, eight to an int32."""

LAYER = re.compile(r"\blayers\.(\d+)\.")
MTP_LAYER = re.compile(r"\bmtp_layers\.(\d+)\.")
"""Layers of MiMo that draft, which its files count from 0."""

MTP = "mtp."
"""Beginning of the names of Qwen3-Next's and Qwen3.5's modules that draft, in files and in vLLM."""

FUSED_EXPERTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""Parts of tensors ``[experts, ...]`` that hold all experts of a layer, as Qwen3.5's files do."""

NEVER_QUANTISED = re.compile(
    r"(^|\.)(embed_tokens|lm_head|shared_head\.head|eh_proj|input_proj)$"
    r"|\.indexer\.(wk|weights_proj)$"
)
"""Modules that vLLM makes without a look at how they were quantised."""


EXPERT = re.compile(r"\.experts\.")

MEND = "quantise the model again, or fetch its files again"
"""What to do about files that don't fit together."""


class Int4Form(NamedTuple):
    """How a ModelSlim checkpoint has its weights of four bits."""

    in_pairs: bool  # two outputs in a byte, the first in its low half; else one
    group_size: int  # inputs that share a second scale; 0 if there is none


class Entry(NamedTuple):
    dtype: str  # as safetensors names it: I8, F32, BF16
    shape: tuple[int, ...]
    file: str


Headers = Mapping[str, Entry]


def read_headers(folder: Path) -> dict[str, Entry]:
    """Read the header of every tensor in the safetensors files of a folder, by the tensor's name.

    The result is empty if there are no such files.

    Raises
    ------
    PrepError
        For a file that can't be read.
    """
    from safetensors import SafetensorError, safe_open

    found = {}
    for path in sorted(folder.glob("*.safetensors")) if folder.is_dir() else ():
        try:
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118  (not a dict)
                    part = file.get_slice(name)
                    found[name] = Entry(part.get_dtype(), tuple(part.get_shape()), path.name)
        except (SafetensorError, OSError) as error:
            raise PrepError(f"{path}: no safetensors file: {error}; fetch it again") from None
    return found


Read = Callable[[str], "np.ndarray | None"]


def _reader_of(folder: Path, headers: Headers) -> Read:
    """Return what reads a small tensor of whole numbers by its name; None if no file has it.

    Each file is opened once: a mixture of experts has tens of thousands of such tensors.
    """
    from safetensors import safe_open

    opened: dict[str, Any] = {}

    def read(name: str) -> np.ndarray | None:
        if name not in headers:
            return None
        file = headers[name].file
        if file not in opened:
            opened[file] = safe_open(folder / file, "np")
        return opened[file].get_tensor(name)

    return read


def modules_of(description: Mapping[str, Any]) -> dict[str, str]:
    return {
        name.removesuffix(".weight"): str(value)
        for name, value in description.items()
        if name.endswith(".weight")
    }


def served_name(module: str, num_decoder_layers: int) -> str:
    """Return a module's name in vLLM, which counts layers that draft after the others."""
    return MTP_LAYER.sub(lambda found: f"layers.{num_decoder_layers + int(found[1])}.", module)


def prefix_of(module: str, hf_config: Any) -> str:
    """Return the name by which vLLM asks how to make a module.

    It is the module's name, except for MiniMax-M2's mixtures of experts, for which vLLM's code has
    another name than for their weights.
    """
    if getattr(hf_config, "model_type", "") == "minimax_m2":
        return module.replace(".block_sparse_moe.", ".mlp.")
    return module


def float_modules_that_draft(headers: Headers, num_decoder_layers: int) -> list[str]:
    """List the modules of MTP layers whose weights are floats, by their names in vLLM.

    Tools that quantise a model often copy its MTP layers as they are, and don't name them.
    """
    found = []
    for name, entry in headers.items():
        for module in _modules_in(name, entry):
            module = served_name(module, num_decoder_layers)
            if entry.dtype != "I8" and _drafts(module, num_decoder_layers):
                found.append(module)
    return found


def check_description(
    folder: Path, modules: Mapping[str, str], headers: Headers, num_layers: int, int4: Int4Form
) -> None:
    """Hold ModelSlim's description against the files and the model's config.

    The number of layers includes those that draft.

    Raises
    ------
    PrepError
        For the first module that is missing, unknown or of a wrong shape; it names the module and
        the file.
    """
    source = folder / DESCRIPTION
    for module, kind in modules.items():
        _refuse_layers_beyond(module, num_layers, source)
        weight = headers.get(f"{module}.weight")
        if weight is None:
            raise PrepError(
                f"{source}: names {module}, but no safetensors file has its weight; {MEND}"
            )
        is_int8 = weight.dtype == "I8"
        if is_int8:
            _refuse_where_unserved(module, folder / weight.file)
        if is_int8 == (kind == FLOAT):
            raise PrepError(
                f"{source}: calls {module} {kind}, but its weight in {weight.file} is "
                f"{weight.dtype}; quantise the model again, or mend the description"
            )
        if kind != FLOAT:
            _check_module(folder, module, kind, headers, int4)
    for name, entry in headers.items():
        module = name.removesuffix(".weight")
        if name.endswith(".weight") and entry.dtype == "I8" and module not in modules:
            raise PrepError(
                f"{folder / entry.file}: {module} is int8, but {DESCRIPTION} lacks it; use the "
                "description that was written with these weights"
            )


def check_compressed(
    folder: Path,
    headers: Headers,
    ignored: Iterable[str],
    num_layers: int,
    num_decoder_layers: int | None = None,
    schemes: Iterable[Any] = (),
) -> None:
    """Hold the weights of a compressed-tensors checkpoint against their scales.

    Modules that config.json leaves out (`ignored`) are names, or ``re:`` and a pattern.
    `num_layers` includes layers that draft, `num_decoder_layers` doesn't; None means that no layer
    drafts. `schemes` are the ``weights`` of ``config_groups``.

    Raises
    ------
    PrepError
        For the first module that lacks something; it names the module and the file.
    """
    ignored = tuple(ignored)
    num_decoder_layers = num_layers if num_decoder_layers is None else num_decoder_layers
    modules = quantized_modules(headers)
    names = {module.rpartition(".")[2] for module in modules}
    int4 = [each for each in schemes if each and each.num_bits == 4]
    forms = {(each.group_size or -1, bool(each.symmetric)) for each in int4}
    read = _reader_of(folder, headers)
    for module, weight in modules.items():
        path = folder / headers[weight].file
        _refuse_layers_beyond(module, num_layers, path)
        _refuse_where_unserved(module, path)
        if weight.endswith(PACKED_WEIGHT):
            _check_packed(folder, module, forms, headers, read)
        else:
            sizes = {size for size, _ in forms if size > 0}
            _check_module(folder, module, DYNAMIC, headers, group_sizes=sizes)
    for name in _weights(headers):
        module, entry = name.removesuffix(".weight"), headers[name]
        is_left_out = any(_matches(module, pattern) for pattern in ignored)
        if _drafts(served_name(module, num_decoder_layers), num_decoder_layers):
            continue  # it drafts, and is served as it is
        if module.rpartition(".")[2] in names and entry.dtype != "I8" and not is_left_out:
            raise PrepError(
                f"{folder / entry.file}: the weight of {module} is {entry.dtype}, a quantised one "
                'is expected; quantise it, or add it to "ignore" in config.json'
            )
    for name, entry in headers.items():
        module, _, last = name.rpartition(".")
        if last == "weight_scale" and module not in modules:
            raise PrepError(
                f"{folder / entry.file}: {module} has a weight_scale but no weight; {MEND}"
            )


def check_awq_gptq(
    folder: Path, headers: Headers, form: str, group_size: int, num_layers: int
) -> dict[str, str]:
    """Hold AWQ's or GPTQ's weights against their scales; return each module's file.

    The form is ``auto_awq`` or ``auto_gptq``, the size of groups -1 if all inputs are one, and the
    number of layers includes those that draft.

    Raises
    ------
    PrepError
        For the first module that lacks something; it names the module and the file.
    """
    found, read = {}, _reader_of(folder, headers)
    for name, weight in headers.items():
        module, _, last = name.rpartition(".")
        if last != "qweight":
            continue
        path = folder / weight.file
        found[module] = str(path)
        _refuse_layers_beyond(module, num_layers, path)
        _refuse_where_unserved(module, path)
        if weight.dtype != "I32" or len(weight.shape) != 2:
            raise PrepError(
                f"{path}: qweight of {module} is {list(weight.shape)} {weight.dtype}; int32 with "
                f"two dimensions is expected; {MEND}"
            )
        first, second = weight.shape
        is_awq = form == "auto_awq"
        inputs, outputs = (first, 8 * second) if is_awq else (8 * first, second)
        size = inputs if group_size == -1 else group_size
        groups = -(-inputs // size)
        for kind, shape in {"scales": (groups, outputs), "qzeros": (groups, outputs // 8)}.items():
            entry = headers.get(f"{module}.{kind}")
            if entry is None:
                raise PrepError(f"{path}: {module} has no {kind}, which {form} needs; {MEND}")
            if entry.shape != shape:
                raise PrepError(
                    f"{folder / entry.file}: {kind} of {module} is {list(entry.shape)}, its weight "
                    f"{list(weight.shape)}: {list(shape)} is expected; {MEND}"
                )
        order = read(f"{module}.g_idx")
        in_order = np.arange(inputs) // size
        if order is not None and order.size and not np.array_equal(order, in_order):
            raise PrepError(
                f"{path}: g_idx of {module} is not one group of {size} after another (act-order), "
                "which is not supported; quantise without desc_act"
            )
    for name, entry in headers.items():
        module, _, last = name.rpartition(".")
        if last == "scales" and module not in found:
            raise PrepError(f"{folder / entry.file}: {module} has scales but no qweight; {MEND}")
    return found


def quantized_modules(headers: Headers) -> dict[str, str]:
    """Return the names of quantised weights, int8 or packed into int32, by their modules."""
    int8 = {n.removesuffix(".weight"): n for n in _weights(headers) if headers[n].dtype == "I8"}
    packed = {n.removesuffix(PACKED_WEIGHT): n for n in headers if n.endswith(PACKED_WEIGHT)}
    return int8 | packed


def _weights(headers: Headers) -> Iterator[str]:
    return (name for name in headers if name.endswith(".weight"))


def _modules_in(name: str, entry: Entry) -> list[str]:
    """Return the modules whose weight a tensor is: each expert's, if it holds those of all."""
    if name.endswith(".weight"):
        return [name.removesuffix(".weight")]
    layer, _, last = name.rpartition(".")
    if not layer.endswith(".experts") or last not in FUSED_EXPERTS:
        return []
    return [f"{layer}.{i}.{part}" for i in range(entry.shape[0]) for part in FUSED_EXPERTS[last]]


def _matches(module: str, pattern: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), module) is not None
    return module == pattern or module.startswith(f"{pattern}.")


def _layer_of(module: str) -> int:
    found = LAYER.search(module)
    return int(found[1]) if found else -1


def _drafts(module: str, num_decoder_layers: int) -> bool:
    return module.startswith(MTP) or _layer_of(module) >= num_decoder_layers


def _refuse_where_unserved(module: str, path: Path) -> None:
    if NEVER_QUANTISED.search(module):
        raise PrepError(
            f"{path}: {module} is quantised; embeddings, heads, the projections with which MTP "
            "layers begin, and an indexer's wk and weights_proj are served in 16 or 32 bits only; "
            "leave them as they are when you quantise"
        )


def _refuse_layers_beyond(module: str, num_layers: int, source: Path) -> None:
    if _layer_of(module) >= num_layers:
        raise PrepError(
            f"{source}: names {module}, but the model has {num_layers} layers (config.json); take "
            "the files of one model, with its own config.json"
        )


def _check_module(
    folder: Path,
    module: str,
    kind: str,
    headers: Headers,
    int4: Int4Form | None = None,
    group_sizes: Collection[int] = (),
) -> None:
    weight = headers[f"{module}.weight"]
    path = folder / weight.file
    if weight.dtype != "I8" or len(weight.shape) != 2:
        raise PrepError(
            f"{path}: the weight of {module} is {weight.dtype} {list(weight.shape)}; int8 with "
            f"two dimensions is expected; {MEND}"
        )
    outputs, inputs = weight.shape
    required, second = REQUIRED[kind], (outputs, 1)
    if kind == INT4 and int4 is not None:
        outputs *= 2 if int4.in_pairs else 1
        if int4.group_size:
            required = (*required, "weight_scale_second")
            second = (outputs, -(-inputs // int4.group_size))
    for name in required:
        if f"{module}.{name}" not in headers:
            raise PrepError(f"{path}: {module} has no {name}, which {kind} needs; {MEND}")
    single, channel = {(), (1,)}, {(outputs,), (outputs, 1)}
    shapes: dict[str, set[Any]] = {
        "weight_scale": (channel | single if kind == DYNAMIC else channel)
        | {(outputs, inputs // size) for size in group_sizes if inputs % size == 0},
        "weight_scale_second": {second},
        "weight_offset_second": {second},
        "weight_offset": channel,
        "input_scale": single,
        "input_offset": single,
        "quant_bias": channel,
        "deq_scale": channel,
        "bias": channel,
    }
    for name, allowed in shapes.items():
        entry = headers.get(f"{module}.{name}")
        if entry is not None and entry.shape not in allowed:
            expected = " or ".join(str(list(shape)) for shape in sorted(allowed))
            raise PrepError(
                f"{folder / entry.file}: {name} of {module} is {list(entry.shape)}, its weight "
                f"{list(weight.shape)}: {expected} is expected; {MEND}"
            )


def _check_packed(
    folder: Path,
    module: str,
    forms: Collection[tuple[int, bool]],
    headers: Headers,
    read: Read,
) -> None:
    """Hold a weight of four bits against its scales.

    Forms are the sizes of groups in config.json, -1 for one group, each with whether its weights
    are symmetric.
    """
    weight = headers[f"{module}{PACKED_WEIGHT}"]
    path, found = folder / weight.file, f"weight_packed of {module} is {list(weight.shape)}"
    if weight.dtype != "I32" or len(weight.shape) != 2:
        raise PrepError(
            f"{path}: {found} {weight.dtype}; int32 with two dimensions is expected; {MEND}"
        )
    if f"{module}.weight_g_idx" in headers:
        raise PrepError(
            f"{path}: {module} has a weight_g_idx: its groups follow an order of activations "
            "(act-order), which is not supported; quantise without it, or with actorder static"
        )
    outputs, inputs = weight.shape[0], 8 * weight.shape[1]
    if (shape := read(f"{module}.weight_shape")) is not None:
        told = shape.tolist()
        is_shape = len(told) == 2
        expected = [told[0], -(-told[1] // 8)] if is_shape else [outputs, inputs]
        if not is_shape or list(weight.shape) != expected:
            raise PrepError(
                f"{path}: {found}, its weight_shape {told}: {expected} is expected; {MEND}"
            )
    allowed: set[tuple[Any, ...]] = set()
    for size, is_symmetric in forms:
        groups = 1 if size == -1 else inputs // size
        if size == -1 or inputs % size == 0:
            zeros = None if is_symmetric else (-(-outputs // 8), groups)
            allowed.add(((outputs, groups), zeros))
    entries = [headers.get(f"{module}.{n}") for n in ("weight_scale", "weight_zero_point")]
    given = tuple(None if each is None else each.shape for each in entries)
    if given not in allowed:
        sizes = " or ".join(str(size) for size in sorted({size for size, _ in forms}))
        raise PrepError(
            f"{path}: {found}; for groups of {sizes} (config.json) {_shapes(*allowed)} is "
            f"expected beside it, {_shapes(given)} is there; {MEND}"
        )


def _shapes(*pairs: tuple[Any, ...]) -> str:
    """Name pairs of shapes of scales and zero points; None is a tensor that is missing."""
    told = [
        " and ".join(
            f"no {name}" if shape is None else f"{name} {list(shape)}"
            for name, shape in zip(("weight_scale", "weight_zero_point"), pair)
        )
        for pair in sorted(pairs, key=str)
    ]
    return " or ".join(told) or "another width"
