"""Fake graphs for the CPU fallback: they capture nothing, but check what real graphs rely on.

A captured graph reads and writes the addresses that it was captured with, whatever the caller
passes later. A fake graph checks that every input is still at its captured address, runs the call
eagerly, and copies the results to those of the first call. So a caller that keeps results across
steps finds them overwritten, as on a device. At capture only the largest size runs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from vllm_npu_prep.device.staging import StagedArrays
from vllm_npu_prep.graph import GraphCall, tensors_of
from vllm_npu_prep.prep.arrays import NULL_BLOCK_ID, PAD_SLOT_ID
from vllm_npu_prep.prep.batch import PreparedStep
from vllm_npu_prep.prep.padding import GraphMode
from vllm_npu_prep.wording import counted


class GraphSafetyError(RuntimeError):
    """A replay would have read other values than those of its step."""


Place = tuple[int, torch.Size, tuple[int, ...], torch.dtype]
"""Address, shape, strides and dtype of a tensor."""


def place(tensor: torch.Tensor) -> Place:
    """Return where a tensor is; packed weights, which only the host has, tell no address."""
    address = 0 if tensor.is_mkldnn else tensor.data_ptr()
    return address, tensor.shape, tensor.stride(), tensor.dtype


def inputs_of(call: GraphCall) -> dict[str, torch.Tensor]:
    """Return all tensors on the device that a graph of this call reads, by name."""
    inputs = {f"argument {i}": each for i, each in enumerate(tensors_of(call.args))}
    for name, value in call.kwargs.items():
        inputs |= {f"{name} {i}".removesuffix(" 0"): t for i, t in enumerate(tensors_of(value))}
    if isinstance(call.run, torch.nn.Module):
        inputs |= dict(call.run.named_parameters()) | dict(call.run.named_buffers())
        inputs |= _adapters_of(call.run)
    for name in call.attn_metadata:
        caches = tensors_of([call.layers[name].kv_cache])  # recurrent states have two parts
        inputs |= {f"KV cache {i} of {name}".replace(" 0 ", " "): t for i, t in enumerate(caches)}
    groups: dict[int, tuple[str, Any]] = {}
    for layer_name, metadata in call.attn_metadata.items():
        groups.setdefault(id(metadata), (layer_name, metadata))
    for layer_name, metadata in groups.values():
        metadata = getattr(metadata, "step", metadata)  # MLA layers get a wrapper
        for item in fields(metadata):
            value = getattr(metadata, item.name)
            if isinstance(value, torch.Tensor):
                inputs[f"{item.name} of {layer_name}"] = value
    return inputs


def _adapters_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return what a graph reads of adapters; nothing if it is for steps without adapters."""
    inputs: dict[str, torch.Tensor] = {}
    for name, layer in model.named_modules():
        wrapper = getattr(layer, "punica_wrapper", None)
        if wrapper is not None and wrapper.is_active:
            weights = tensors_of([layer.lora_a_stacked, layer.lora_b_stacked])
            inputs |= wrapper.graph_inputs()
            inputs |= {f"LoRA weights {i} of {name}": each for i, each in enumerate(weights)}
    return inputs


class CheckedGraphPool:
    """Holds the outputs of the largest size; the outputs of all other sizes share their memory."""

    def __init__(self) -> None:
        self.outputs: list[torch.Tensor] = []
        self.results: Any = None  # of the largest size: what the call returned, and its size
        self.num_tokens = 0
        self.memory_pool: Any = None  # only devices have one

    def new_graph(self) -> "CheckedGraph":
        return CheckedGraph(self)

    def close(self) -> None:
        """Do nothing: captures hold no memory."""

    def results_of(self, num_tokens: int) -> Any:
        """Return where a smaller size has its results, without a run of it.

        The result is None if nothing has run yet, or if there are results without a row for each
        token.
        """
        has_rows = all(each.dim() and len(each) == self.num_tokens for each in self.outputs)
        if not 0 < num_tokens <= self.num_tokens or not has_rows:
            return None
        return pytree.tree_map_only(torch.Tensor, lambda each: each[:num_tokens], self.results)

    def at_home(self, outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return memory for results of these shapes, shared by all sizes, as in a real pool."""
        if not self.outputs:
            self.outputs = list(outputs)
        homes = []
        for output, largest in zip(outputs, self.outputs):
            fits = (
                output.dim() > 0
                and output.shape[1:] == largest.shape[1:]
                and len(output) <= len(largest)
                and output.stride() == largest.stride()
                and output.dtype == largest.dtype
            )
            homes.append(largest[: len(output)] if fits else output)
        return homes


class CheckedGraph:
    """A call whose replays are checked against the addresses of its "capture"."""

    def __init__(self, pool: CheckedGraphPool) -> None:
        self.pool = pool
        self.places: dict[str, Place] = {}
        self.homes: list[torch.Tensor] = []

    def capture(self, call: GraphCall) -> Any:
        self.places = {name: place(tensor) for name, tensor in inputs_of(call).items()}
        results = self.pool.results_of(call.num_tokens)
        if results is not None:
            self.homes = tensors_of(results)
            return results
        outputs = call()
        if not self.pool.outputs:
            self.pool.results, self.pool.num_tokens = outputs, call.num_tokens
        self.homes = self.pool.at_home(tensors_of(outputs))
        return self._bring_home(outputs)

    def replay(self, call: GraphCall) -> Any:
        """Check that every input is where it was at capture, and run the call.

        Raises
        ------
        GraphSafetyError
            If an input changed its address, shape, strides or dtype; the message names the first
            one.
        """
        places = {name: place(tensor) for name, tensor in inputs_of(call).items()}
        if places != self.places:
            raise GraphSafetyError(_difference(self.places, places))
        return self._bring_home(call())

    def _bring_home(self, outputs: Any) -> Any:
        homes = iter(self.homes)

        def copied(result: torch.Tensor) -> torch.Tensor:
            home = next(homes)
            return home if home is result else home.copy_(result)

        return pytree.tree_map_only(torch.Tensor, copied, outputs)


def _difference(captured: dict[str, Place], now: dict[str, Place]) -> str:
    for name in (*captured, *now):
        if name not in now or name not in captured:
            which = "is no longer" if name not in now else "was not"
            return f"{name} {which} among the inputs of the captured call"
        if captured[name] != now[name]:
            names = "address", "shape", "strides", "dtype"
            changed = [
                f"{what} {before} -> {after}"
                for what, before, after in zip(names, captured[name], now[name])
                if before != after
            ]
            return f"{name} is not where the graph was captured with it: {', '.join(changed)}"
    return "nothing"


def check_padding(
    step: PreparedStep,
    staged: StagedArrays,
    block_tables: Sequence[torch.Tensor],
    local_tables: Mapping[int, torch.Tensor] | None = None,
) -> None:
    """Check what a graph is about to read past the step's own tokens and requests.

    The rules are those of `vllm_npu_prep.prep.padding`. `block_tables` are int32
    ``[num_reqs_padded, max_num_blocks]`` on the device, one for each group; `local_tables` are
    those of virtual requests, by group.

    Raises
    ------
    GraphSafetyError
        The message names the array, the place, the value and the rule.
    """
    tokens, reqs = step.total_num_scheduled_tokens, step.num_reqs
    arrays = staged.device
    if step.shape.pcp:
        _check_rank_padding(step, staged)
        return
    _expect("input_ids", arrays.input_ids, tokens, 0)
    _expect("positions", arrays.positions, tokens, 0)
    for group, slots in enumerate(arrays.slot_mappings):
        _expect(f"slot_mapping of group {group}", slots, tokens, PAD_SLOT_ID)
    if step.padding.mode is not GraphMode.FULL:
        return
    for group, table in enumerate(block_tables):
        _expect(f"block table of group {group}", table, reqs, NULL_BLOCK_ID)
    for starts in (arrays.query_start_loc.numpy(), staged.np.query_start_loc):
        _expect_starts("query_start_loc", starts, reqs, step)
    _expect("seq_lens", arrays.seq_lens, reqs, arrays.query_start_loc.diff()[reqs:].numpy())
    if not step.shape.local:
        return
    reqs = step.local.num_reqs
    for group, table in (local_tables or {}).items():
        _expect(f"local block table of group {group}", table, reqs, NULL_BLOCK_ID)
    for starts in (
        arrays.chunk_local_query_start_loc.numpy(),
        staged.np.chunk_local_query_start_loc,
    ):
        _expect_starts("chunk_local_query_start_loc", starts, reqs, step)
    query_lens = arrays.chunk_local_query_start_loc.diff()[reqs:].numpy()
    _expect("chunk_local_seq_lens", arrays.chunk_local_seq_lens, reqs, query_lens)


def _check_rank_padding(step: PreparedStep, staged: StagedArrays) -> None:
    """Check what a graph is about to read past the tokens and the rows of this rank, and what it is
    about to write past the tokens of all ranks."""
    tokens, rows, arrays = step.pcp.num_tokens, step.pcp.num_rows, staged.device
    _expect("pcp_input_ids", arrays.pcp_input_ids, tokens, 0)
    _expect("pcp_positions", arrays.pcp_positions, tokens, 0)
    is_padding = np.ones(step.num_input_tokens, np.bool_)
    is_padding[step.gathered_places()] = False
    for group, slots in enumerate(arrays.slot_mappings):
        wanted = np.where(is_padding, PAD_SLOT_ID, slots.numpy())
        _expect(f"pcp_slot_mapping of group {group}", slots, 0, wanted)
    if step.padding.mode is not GraphMode.FULL:
        return
    _expect("pcp_table_rows", arrays.pcp_table_rows, rows, len(step.batch.tables.token_ids))
    for starts in (arrays.pcp_query_start_loc.numpy(), staged.np.pcp_query_start_loc):
        if starts[rows] != tokens or starts[-1] != step.num_rank_tokens:
            raise GraphSafetyError(
                f"pcp_query_start_loc {starts.tolist()} must reach {tokens} after "
                f"{counted(rows, 'row')}, and end at {step.num_rank_tokens}"
            )
    query_lens = arrays.pcp_query_start_loc.diff()[rows:].numpy()
    _expect("pcp_seq_lens", arrays.pcp_seq_lens, rows, query_lens)


def _expect_starts(name: str, starts: np.ndarray, reqs: int, step: PreparedStep) -> None:
    tokens = step.total_num_scheduled_tokens
    if starts[0] != 0 or (np.diff(starts) < 0).any() or starts[reqs] != tokens:
        raise GraphSafetyError(
            f"{name} {starts.tolist()} must rise from 0 and reach {tokens} after "
            f"{counted(reqs, 'request')}"
        )
    if starts[-1] != step.num_input_tokens:
        raise GraphSafetyError(
            f"{name} ends at {starts[-1]}, the graph has {step.num_input_tokens} tokens: a fused "
            "attention kernel refuses that (561002)"
        )


def _expect(name: str, array: torch.Tensor, start: int, value: int | np.ndarray) -> None:
    padding = array.numpy()[start:]
    wanted = np.broadcast_to(np.asarray(value), padding.shape)
    wrong = np.argwhere(padding != wanted)
    if len(wrong):
        first = tuple(wrong[0])
        where = ", ".join(map(str, (start + first[0], *first[1:])))
        raise GraphSafetyError(
            f"{name}[{where}] is {padding[first]} in padding, and must be {wanted[first]}"
        )
