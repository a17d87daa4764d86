"""A scheduler's whole state as plain values, and the first difference between two of them."""

from collections import deque
from collections.abc import Mapping
from enum import Enum
from typing import Any

import numpy as np
import torch
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.engine import EngineCoreEvent
from vllm.v1.request import Request
from vllm.v1.utils import ConstantList

from vllm_npu_prep.scheduling.requests import BatchedRequest

NOTES = set(BatchedRequest.__annotations__)
"""What only our scheduler notes on a request."""
OURS = {"needs", "rules", "decodes", "reason", "taken", "num_left", "active_loras"}
OURS |= {"plain_drafts", "fewest", "counts_nans"}
"""Attributes of our scheduler alone."""
CONSTANT = {"connector", "structured_output_manager", "kv_event_publisher", "kv_cache_manager"}
"""What is the same object for both, or is viewed apart. So is whatever is named ``..._config``."""


class DifferenceError(Exception):
    """The two schedulers are not equal."""


ATOMS = {type(None), bool, int, float, str, bytes}
SKIPPED = {"timestamp", "_block_hasher", "interval_start_time"}


def view(value: Any) -> Any:
    """A value as numbers, strings and containers; requests and blocks by their ids."""
    if type(value) in ATOMS:
        return value
    if isinstance(value, list | tuple | deque | ConstantList):
        return [each if type(each) in ATOMS else view(each) for each in value]
    if isinstance(value, Mapping):
        return [(view(key), view(each)) for key, each in value.items()]
    if isinstance(value, Request):
        return value.request_id
    if isinstance(value, KVCacheBlock):
        return value.block_id
    if isinstance(value, EngineCoreEvent):
        return value.type
    if isinstance(value, Enum | int | str | bytes):
        return value
    if isinstance(value, np.ndarray | torch.Tensor):
        return value.tolist()
    if isinstance(value, set | frozenset):
        return sorted(map(repr, map(view, value)))
    if callable(value):
        return None
    fields = getattr(value, "__struct_fields__", None)
    if fields is None:
        fields = vars(value) if hasattr(value, "__dict__") else value.__slots__
    viewed = {name: view(getattr(value, name)) for name in fields if name not in SKIPPED}
    if "kv_connector_stats" in viewed:  # those of offloading are times
        viewed["kv_connector_stats"] = bool(viewed["kv_connector_stats"])
    return viewed


def view_request(request: Request) -> dict[str, Any]:
    """Everything about a request."""
    return {
        name: view(value)
        for name, value in vars(request).items()
        if name not in NOTES and name not in ("_block_hasher", "output_token_ids", "all_token_ids")
    }


def view_scheduler(scheduler: Any) -> dict[str, Any]:
    """Everything that a scheduler keeps between two calls."""
    constant = CONSTANT | OURS
    state = {
        name: view(value)
        for name, value in vars(scheduler).items()
        if name not in constant and not name.endswith("_config")
    }
    state["requests"] = [(key, view_request(each)) for key, each in scheduler.requests.items()]
    state["waiting"] = view(list(scheduler.waiting))
    state["kv_holding_waiting"] = view(list(scheduler.kv_holding_waiting))
    pool = scheduler.kv_cache_manager.block_pool
    state["free"] = view(pool.free_block_queue.get_all_free_blocks())
    state["blocks"] = [(each.block_id, each.ref_cnt, each.block_hash) for each in pool.blocks]
    state["cached"] = view(pool.cached_block_hash_to_block._cache)
    state["events"] = view(pool.kv_event_queue)
    state["prefix_cache_stats"] = view(scheduler.kv_cache_manager.prefix_cache_stats)
    for number, manager in enumerate(scheduler.kv_cache_manager.coordinator.single_type_managers):
        state[f"group {number}"] = {
            name: view(value)
            for name, value in vars(manager).items()
            if name not in ("block_pool", "kv_cache_spec", "_null_block")
        }
    return state


def compare(upstream: Any, ours: Any, path: str) -> None:
    """Raise `DifferenceError` with the first place where two views differ."""
    if upstream == ours:
        return
    if isinstance(upstream, dict) and isinstance(ours, dict):
        for name in upstream.keys() & ours.keys():
            compare(upstream[name], ours[name], f"{path}.{name}")
    if isinstance(upstream, list | tuple) and isinstance(ours, list | tuple):
        path += f" ({len(upstream)} and {len(ours)})" * (len(upstream) != len(ours))
        for number, (one, other) in enumerate(zip(upstream, ours, strict=False)):
            compare(one, other, f"{path}[{number}]")
    raise DifferenceError(f"{path}: upstream {str(upstream)[:600]}, ours {str(ours)[:600]}")
