"""How a step is checked before its launch: ``{"npu_prep": {"check": "off|cheap|full"}}``.

``cheap`` is one compiled pass over the step's host arrays (`vllm_npu_prep.observe.check`); ``full``
is `vllm_npu_prep.observe.full_check`. Neither needs the scheduler, which runs in another process of
a server.
"""

from typing import Any

from vllm_npu_prep.observe.check import StepCheck
from vllm_npu_prep.observe.ledger import SlotLedger
from vllm_npu_prep.observe.ledger_owners import LedgerGroup
from vllm_npu_prep.prep.checks import NO_SLOTS
from vllm_npu_prep.prep.dcp import NO_DCP, DCPRank
from vllm_npu_prep.prep.tables import BatchTables


def make_check(level: str, runner: Any, tables: BatchTables | None = None) -> StepCheck | None:
    """Return the check of a runner whose KV cache is allocated; None for the level ``"off"``.

    `tables` are those of its steps, by default the ones from which it prepares them.
    """
    if level == "off":
        return None
    vocab_size, cache = runner.model_config.get_vocab_size(), runner.kv_cache_config
    tables = runner.preparer.tables if tables is None else tables
    # Groups of encoder-only layers come after the groups that have tables.
    block_sizes, shape = tables.block_sizes.tolist(), tables.shape
    specs = [group.kv_cache_spec for group in cache.kv_cache_groups[: len(block_sizes)]]
    num_slots = [
        NO_SLOTS if group in shape.states.groups else cache.num_blocks * spec.block_size
        for group, spec in enumerate(specs)
    ]
    if level == "cheap":
        return StepCheck(vocab_size, num_slots)
    from vllm_npu_prep.observe.full_check import FullCheck

    groups = [ledger_group(spec, size, shape.dcp) for spec, size in zip(specs, block_sizes)]
    num_blocks = cache.num_blocks * max((group.blocks_per_page for group in groups), default=1)
    loads = runner.vllm_config.kv_transfer_config is not None
    ledger = SlotLedger(groups, num_blocks, loads, lambda number: load_of(runner, number))
    return FullCheck(vocab_size, num_slots, ledger)


def load_of(runner: Any, number: int) -> str | None:
    """Return the load of the adapter with this number that a runner holds; None if it holds none.

    A load is named by `compat.lora`.
    """
    adapters = runner.lora_manager._adapter_manager.list_adapters()
    return getattr(adapters.get(number), "load", None)


def ledger_group(spec: Any, block_size: int, dcp: DCPRank = NO_DCP) -> LedgerGroup:
    """Return a KV-cache group for the ledger.

    Parameters
    ----------
    spec
        The group's ``KVCacheSpec``. A full-attention spec may have a window, too: its layers see
        less, but its blocks are not freed.
    block_size
        Tokens in a block of its block table.
    dcp
        The part of each context that this rank keeps.
    """
    from vllm.v1.kv_cache_interface import MambaSpec, SlidingWindowSpec

    if isinstance(spec, MambaSpec):
        return LedgerGroup(block_size, holds_states=True)
    pages = spec.block_size // block_size
    for each in getattr(spec, "kv_cache_specs", {}).values():  # layers of one kind, other sizes
        spec = each
    window = spec.sliding_window if isinstance(spec, SlidingWindowSpec) else None
    size, chunk = dcp.tokens_per_block(block_size), getattr(spec, "attention_chunk_size", None)
    return LedgerGroup(size, pages, window, chunk, dcp=dcp)
