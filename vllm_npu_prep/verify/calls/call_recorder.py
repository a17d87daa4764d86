"""Records each distinct call of an operator that an engine makes, from its configuration alone.

No kernel that computes with floats is launched, and large weights are neither read nor written, so
a model of any size can be recorded: on a card that the model fits on, or without one where device
memory is only used where it is written. What an operator would return has the shape that the
operator's Meta function says. Whole numbers (slots, blocks, lengths) are computed as ever, since
they say what a kernel meets. All tokens are 0.

``python -m vllm_npu_prep.verify.calls.call_recorder SETTINGS FILE`` records one engine.
"""

import json
import math
import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch_npu
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from vllm_npu_prep.compat.executor import be_a_rank_without_the_others
from vllm_npu_prep.errors import PrepError
from vllm_npu_prep.verify.calls.call import MC2, OF_PYTHON, Call, is_tried, size_of, write_list
from vllm_npu_prep.verify.outcome import first_line_of

RANDOM = ("aten::uniform_", "aten::normal_", "aten::random_")
"""What fills weights that are not loaded: an engine that serves does not call these."""

SMALL = 1 << 22
"""Weights of up to so many elements are 1, and truths about them are found: the scales of int8
weights, which are checked when they have been loaded."""

META = torch.device("meta")
"""Where vLLM keeps the layout of each weight, for a reload: a copy to it takes no memory."""

ON_HOST = "get_max_workspace"
"""End of the names of operators that size a workspace on the host: they launch nothing."""

TOKENS = (1, 7, 49)
"""How many requests of one token a step has, beside the most that an engine takes."""

CAPTURED = (1, 8, 56)
"""Sizes of graphs: what these steps are padded to, beside the largest one."""

NEW_TOKENS = 2

OWN_SETTINGS: Mapping[str, Any] = {
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "kv_cache_memory_bytes": 4 << 30,
    "additional_config": {"npu_prep": {"probe": False}},  # which computes
    # torch.compile refuses a mode of dispatch; the operators are the same without it
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
    "enable_prefix_caching": False,  # all prompts are alike
    "max_num_seqs": 256,
}
"""Settings of the recorded engine, unless others are asked for."""


class CallRecorder(TorchDispatchMode):
    """Keeps each distinct call with a tensor of the device, and skips those that compute floats."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: dict[str, Call] = {}
        self._noted: list[tuple[torch.Tensor, dict[str, Any]]] = []

    @property
    def calls(self) -> list[Call]:
        """What was recorded, in the order of operators and of their first calls."""
        self._read_noted()
        return sorted(self._calls.values(), key=lambda call: call.operator)

    def _read_noted(self) -> None:
        """Read what could not be read when it was given, before the next step changes it."""
        for tensor, found in self._noted:
            found["values"] = tensor.flatten().tolist()
        self._noted.clear()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        on_device = [tensor for tensor in tensors if tensor.device.type == "npu"]
        schema = func._schema
        if schema.name == "aten::zeros" and _is_a_cache(*args, **kwargs):
            return torch.ops.aten.empty.memory_format(*args, **kwargs)  # which takes no memory
        if on_device and schema.name.startswith(MC2):  # which would wait for the other ranks
            return _not_computed(func, args, kwargs, on_device[0].device)
        if not on_device or not is_tried(func) or kwargs.get("device") == META:
            return func(*args, **kwargs)
        if func.namespace in OF_PYTHON:
            with self:
                return func._op_dk(torch._C.DispatchKey.PrivateUse1, *args, **kwargs)
        captured = torch_npu.npu.is_current_stream_capturing()
        if schema.name in RANDOM and _is_float(args[0]):
            return args[0].fill_(1) if args[0].numel() <= SMALL else args[0]
        self._keep(schema, args, kwargs, captured)
        if schema.name.endswith(ON_HOST) or not any(map(_is_float, on_device)):
            return func(*args, **kwargs)
        return _not_computed(func, args, kwargs, on_device[0].device)

    def _keep(self, schema: Any, args: Any, kwargs: Any, captured: bool) -> None:
        in_order = not captured and torch_npu.npu.current_stream() == torch_npu.npu.default_stream()
        if in_order:
            self._read_noted()

        def note(tensor: torch.Tensor, found: dict[str, Any]) -> None:
            # A capture allows no wait, and another stream may wait for what comes next
            if tensor.device.type == "cpu" or in_order:
                found["values"] = tensor.flatten().tolist()
            else:
                self._noted.append((tensor, found))

        call = Call.of(schema, args, kwargs, captured, note)
        known = self._calls.get(call.key)
        if known is None or size_of(call) > size_of(known):
            self._calls[call.key] = call


def _is_float(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.dtype is torch.int8


def _is_a_cache(size: Any, *, dtype: Any = None, device: Any = None, **others: Any) -> bool:
    """Return whether zeros are room for floats on the device, larger than any weight in `SMALL`."""
    is_on_device = device is not None and torch.device(device).type == "npu"
    holds_floats = dtype is torch.int8 or (dtype or torch.get_default_dtype()).is_floating_point
    return is_on_device and holds_floats and math.prod(size) > SMALL


def _not_computed(func: Any, args: Any, kwargs: Any, device: torch.device) -> Any:
    """Return what the operator would return, with nothing in it; whole numbers are 0."""
    schema = func._schema
    given = dict(zip((argument.name for argument in schema.arguments), args)) | kwargs
    written = [
        tensor
        for argument in schema.arguments
        if argument.name == "out" or (argument.alias_info and argument.alias_info.is_write)
        for tensor in tree_leaves(given.get(argument.name))
    ]
    if not schema.returns:
        return None
    if "out" in given or (written and all(result.alias_info for result in schema.returns)):
        return written[0] if len(schema.returns) == 1 else tuple(written)
    on_meta = tree_map(_on_meta, (args, kwargs))
    results = func(*on_meta[0], **on_meta[1])
    if all(each.dtype is torch.bool for each in tree_leaves(results)) and _are_small(args):
        return func(*args, **kwargs)
    return tree_map(lambda result: _empty_like(result, device), results)


def _are_small(args: Any) -> bool:
    tensors = [each for each in tree_leaves(args) if isinstance(each, torch.Tensor)]
    return all(tensor.numel() <= SMALL for tensor in tensors)


def _on_meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to("meta")
    return torch.device("meta") if isinstance(value, torch.device) else value


def _empty_like(result: Any, device: torch.device) -> Any:
    if not isinstance(result, torch.Tensor):
        return result
    empty = torch.empty_strided(result.shape, result.stride(), dtype=result.dtype, device=device)
    return empty if _is_float(empty) else empty.zero_()


def prompt_lengths(
    max_model_len: int, max_num_seqs: int, max_tokens: int, block_size: int
) -> Iterator[list[int]]:
    """Yield the lengths of prompts that are asked together: steps of each kind and size.

    Steps of decodes follow each of them.
    """
    most = max_model_len - NEW_TOKENS
    for count in (*TOKENS, max_num_seqs):
        yield [1] * min(count, max_num_seqs)
    for length in (*TOKENS[1:], block_size - 1, block_size, block_size + 1, max_tokens):
        yield [min(length, most)]
    yield [most]
    yield [min(block_size + 1, most), 1, 7][:max_num_seqs]


def _all_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is asked for, with the rest of a recorded engine's settings."""
    found = {**OWN_SETTINGS, **settings}
    most = found["max_num_seqs"]
    sizes = sorted({*(size for size in CAPTURED if size < most), most})
    found["compilation_config"] = {**found["compilation_config"], "cudagraph_capture_sizes": sizes}
    # LLM takes it in no other way
    os.environ["VLLM_DP_SIZE"] = str(found.pop("data_parallel_size", 1))
    # Each rank is on a host of its own: this one needs one device
    ranks = found.get("tensor_parallel_size", 1)
    return {**found, "nnodes": ranks, "distributed_executor_backend": "uni"}


def record(settings: Mapping[str, Any]) -> list[Call]:
    """Start an engine with settings of ``vllm.LLM``, let it take its steps, return its calls.

    Mixed steps have decodes of requests that came before, and a prompt. Other data-parallel ranks
    have as many tokens as this one. The last step is the dummy run of a rank without requests.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["HF_HUB_OFFLINE"] = "1"
    from vllm import LLM, SamplingParams
    from vllm.v1.worker.dp_utils import skip_dp_coordination

    names = "tensor_parallel_size", "data_parallel_size"
    if any(settings.get(name, 1) > 1 for name in names):
        be_a_rank_without_the_others()
    settings = _all_settings(settings)

    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
    with CallRecorder() as recorder, skip_dp_coordination():
        llm = LLM(**settings)
        config = llm.llm_engine.vllm_config
        scheduling, block_size = config.scheduler_config, config.cache_config.block_size
        for lengths in prompt_lengths(
            config.model_config.max_model_len,
            scheduling.max_num_seqs,
            scheduling.max_num_batched_tokens,
            block_size,
        ):
            inputs: list[Any] = [{"prompt_token_ids": [0] * length} for length in lengths]
            llm.generate(inputs, params, use_tqdm=False)
        engine = llm.llm_engine
        prompt: Any = {"prompt_token_ids": [0] * (block_size + 1)}
        longer = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
        for number in range(min(8, scheduling.max_num_seqs)):
            engine.add_request(f"mixed-{number}", prompt, longer if number < 7 else params)
            engine.step()
        while engine.has_unfinished_requests():
            engine.step()
        if config.parallel_config.data_parallel_size > 1:
            engine.engine_core.execute_dummy_batch()
    return recorder.calls


def main() -> None:
    settings = json.loads(sys.argv[1])
    model = Path(settings["model"])
    config = json.loads((model / "config.json").read_text())
    engine = {**settings, "model": model.name, "config": config}  # a list goes to other machines
    try:
        calls = record(settings)
    except PrepError:
        raise
    except Exception as error:  # after which torch_npu would have the last word
        traceback.print_exc()
        print(f"vllm_npu_prep: error: {first_line_of(error)}", file=sys.stderr, flush=True)
        os._exit(1)
    write_list(Path(sys.argv[2]), engine, calls)
    os._exit(0)  # the device holds what was never computed: there is nothing to tidy up


if __name__ == "__main__":
    main()
