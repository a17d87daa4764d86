"""What a checkpoint's four-bit weights are, read byte by byte, without the package's code."""

import json
from pathlib import Path

import numpy as np
import torch

Tensors = dict[str, torch.Tensor]


def numbers_in(words: torch.Tensor) -> np.ndarray:
    """Numbers along the last axis of int32 words; a byte has one in its low half, then another."""
    halves = np.ascontiguousarray(words.numpy()).astype("<i4").view(np.uint8)
    return np.stack((halves % 16, halves // 16), -1).reshape(*words.shape[:-1], -1).astype(int)


def weight_in(tensors: Tensors, module: str) -> torch.Tensor | None:
    """A module's weight, float32 ``[N, K]``; None if it is not of four bits."""
    if f"{module}.qweight" in tensors:
        return _weight_of_words(tensors, module)
    if f"{module}.scale_bias" in tensors:
        return _weight_of_pairs(tensors, module)
    if f"{module}.weight_packed" not in tensors:
        return _weight_of_levels(tensors, module)
    outputs, inputs = tensors[f"{module}.weight_shape"].tolist()
    numbers = numbers_in(tensors[f"{module}.weight_packed"])[:, :inputs]
    scales = tensors[f"{module}.weight_scale"].float().numpy()
    zeros = np.full(scales.shape, 8)
    if f"{module}.weight_zero_point" in tensors:
        zeros = numbers_in(tensors[f"{module}.weight_zero_point"].t()).T[:outputs]
    return dequantised(numbers, scales, zeros)


def _weight_of_levels(tensors: Tensors, module: str) -> torch.Tensor | None:
    """A weight of levels alone in int8, with scales of groups; None if it has no groups."""
    scales = tensors.get(f"{module}.weight_scale", torch.ones(1)).float().numpy()
    if scales.ndim != 2 or scales.shape[1] == 1:
        return None
    levels = tensors[f"{module}.weight"].numpy().astype(int)
    return dequantised(levels, scales, np.zeros(scales.shape, dtype=int))


def _weight_of_words(tensors: Tensors, module: str) -> torch.Tensor:
    """A weight that AWQ or GPTQ wrote; AWQ packs outputs, GPTQ inputs."""
    words, scales = tensors[f"{module}.qweight"], tensors[f"{module}.scales"].float().numpy().T
    if f"{module}.g_idx" in tensors:
        numbers = numbers_in(words.t())
        zeros = np.full(scales.shape, 8)
    else:
        numbers, zeros = (_in_order(tensors[f"{module}.{n}"]) for n in ("qweight", "qzeros"))
    return dequantised(numbers, scales, zeros)


def _weight_of_pairs(tensors: Tensors, module: str) -> torch.Tensor:
    """A weight that ModelSlim wrote: bytes have an even output in the low half, then an odd one."""
    pairs = tensors[f"{module}.weight"].numpy().view(np.uint8)
    levels = np.empty((2 * len(pairs), pairs.shape[1]), dtype=int)
    levels[::2], levels[1::2] = pairs % 16, pairs // 16
    levels[levels > 7] -= 16
    scales = tensors[f"{module}.weight_scale"].numpy()
    scales = scales * tensors.get(f"{module}.weight_scale_second", torch.ones(1, 1)).numpy()
    return dequantised(levels, scales, np.zeros(scales.shape, dtype=int))


def rounds_inputs(folder: Path) -> bool:
    """Whether a copy of int4 weights has int8 inputs."""
    config = json.loads((folder / "config.json").read_text()).get("quantization_config", {})
    groups = config.get("config_groups", {}).values()
    return "quant_method" not in config or any(group["input_activations"] for group in groups)


def _in_order(words: torch.Tensor) -> np.ndarray:
    """Numbers ``[8 N, K]`` in AWQ's words ``[K, N]``: a byte has those of places p and p + 4."""
    found = numbers_in(words)
    places = np.array([0, 4, 1, 5, 2, 6, 3, 7])
    return found.reshape(len(found), -1, 8)[:, :, places].reshape(len(found), -1).T


def dequantised(numbers: np.ndarray, scales: np.ndarray, zeros: np.ndarray) -> torch.Tensor:
    """Weights ``[N, K]`` of numbers ``[N, K]`` and scales and zero points ``[N, G]``."""
    inputs = numbers.shape[1]
    group = np.arange(inputs) // (inputs // scales.shape[1])
    return torch.from_numpy(((numbers - zeros[:, group]) * scales[:, group]).astype(np.float32))
