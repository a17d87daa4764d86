"""Groups of state-space layers beside full attention, as vLLM's hybrid manager plans them.

Their models are refused; tables and slots of all groups are upstream's all the same.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
)
from vllm.v1.request import Request
from vllm.v1.worker.block_table import MultiGroupBlockTable, SlotMappingMode

from vllm_npu_prep.attention.block_tables import DeviceBlockTables
from vllm_npu_prep.ops import register_overrides
from vllm_npu_prep.prep.batch import BatchTables, StepBatch, prepare_step
from vllm_npu_prep.prep.padding import no_padding

ROWS, MAX_MODEL_LEN, BUDGET, STEPS = 5, 192, 200, 150
MODES = [SlotMappingMode.TOKEN_TO_KV_SLOT, SlotMappingMode.NONE, SlotMappingMode.NONE]
CPU = torch.device("cpu")


def plan(mode: str) -> KVCacheConfig:
    """Two groups of states, one with a block for each request or for every 32 tokens of it."""
    full = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=16, dtype=torch.float32)
    states = MambaSpec(
        block_size=MAX_MODEL_LEN if mode == "none" else 32,
        shapes=((4, 8), (6,)),
        dtypes=(torch.float32, torch.float32),
        page_size_padded=full.page_size_bytes,
        mamba_cache_mode=mode,
        num_speculative_blocks=0,
    )
    groups = [
        KVCacheGroupSpec([f"layer {i}"], spec) for i, spec in enumerate([full, states, states])
    ]
    return KVCacheConfig(num_blocks=200, kv_cache_tensors=[], kv_cache_groups=groups)


def tables_of(config: KVCacheConfig, mode: str) -> MultiGroupBlockTable:
    """Upstream's tables, as its runner makes them."""
    specs = [group.kv_cache_spec for group in config.kv_cache_groups]
    parallel = SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1)
    vllm_config = SimpleNamespace(
        cache_config=SimpleNamespace(mamba_cache_mode=mode), parallel_config=parallel
    )
    return MultiGroupBlockTable(
        max_num_reqs=ROWS,
        max_num_batched_tokens=BUDGET,
        pin_memory=False,
        device=CPU,
        block_sizes=[spec.block_size for spec in specs],
        max_num_blocks=[spec.max_num_blocks_per_req(vllm_config, MAX_MODEL_LEN) for spec in specs],
        slot_mapping_modes=MODES,
    )


@pytest.mark.parametrize("mode", ["none", "align"])
def test_tables_and_slots_equal_upstreams_on_random_schedules(mode, seed):
    register_overrides("replace")
    rng = np.random.default_rng(seed)
    config = plan(mode)
    manager = KVCacheManager(
        config,
        MAX_MODEL_LEN,
        scheduler_block_size=MAX_MODEL_LEN,
        hash_block_size=16,
        enable_caching=False,
    )
    theirs = tables_of(config, mode)
    ours = DeviceBlockTables(tables_of(config, mode), ROWS, CPU)
    computed, tokens = np.zeros(ROWS, np.int32), np.zeros((ROWS, MAX_MODEL_LEN), np.int32)
    tables = BatchTables(
        num_computed_tokens=computed,
        num_prompt_tokens=np.full(ROWS, 1, np.int32),
        num_tokens=np.full(ROWS, MAX_MODEL_LEN, np.int32),
        token_ids=tokens,
        block_table_flat=ours.block_table_flat_np,
        max_num_blocks=ours.max_num_blocks,
        block_sizes=np.array([table.block_size for table in ours.block_tables], np.int32),
        num_blocks=ours.num_blocks,
        num_synced_blocks=ours.num_synced_blocks,
        num_device_blocks=ours.num_device_blocks,
    )
    running: list[Request] = []
    nulls = made = 0
    for _ in range(STEPS):
        # Some leave, and the last ones take their rows; others change places; some come.
        for row in range(len(running) - 1, -1, -1):
            if running[row].num_computed_tokens > 180 or rng.random() < 0.05:
                manager.free(running[row])
                last = len(running) - 1
                for each in (theirs, ours):
                    each.clear_row(row)
                    if row != last:
                        each.move_row(last, row)
                running[row] = running[-1]
                running.pop()
        if len(running) > 1 and rng.random() < 0.3:
            a, b = rng.choice(len(running), 2, replace=False).tolist()
            running[a], running[b] = running[b], running[a]
            for each in (theirs, ours):
                each.swap_row(a, b)
        scheduled, left = [], BUDGET
        for row, request in enumerate(running):
            count = 1 if rng.random() < 0.5 else int(rng.integers(1, 70))
            count = min(count, MAX_MODEL_LEN - request.num_computed_tokens, left - (ROWS - row))
            new = manager.allocate_slots(request, count)
            blocks = new.get_block_ids()
            for each in (theirs, ours):
                each.append_row(blocks, row)
            scheduled.append(count)
            left -= count
        while len(running) < ROWS and rng.random() < 0.5:
            made += 1
            prompt = rng.integers(0, 500, MAX_MODEL_LEN).tolist()
            params = SamplingParams(max_tokens=1)
            request = Request(str(made), prompt, params, None)
            count = int(rng.integers(1, min(100, left - (ROWS - len(running)) + 2)))
            assert manager.allocate_slots(request, count) is not None
            for each in (theirs, ours):
                each.add_row(manager.get_block_ids(request.request_id), len(running))
            running.append(request)
            scheduled.append(count)
            left -= count
        if not running:
            continue
        num_reqs, counts = len(running), np.array(scheduled, np.int32)
        computed[:num_reqs] = [request.num_computed_tokens for request in running]
        total = int(counts.sum())
        step = prepare_step(
            StepBatch(tables, counts, np.zeros(num_reqs, np.int32), total),
            no_padding(total, num_reqs),
        )
        # The device gets what the step brings along.
        count = step.num_block_changes
        changed = step.arrays.variable_int64[:count]
        ours.block_table_flat.numpy()[changed] = step.arrays.variable_int32[2 * count : 3 * count]
        theirs.commit_block_table(num_reqs)
        theirs.compute_slot_mapping(
            num_reqs, torch.from_numpy(step.query_start_loc), torch.from_numpy(step.positions)
        )
        for group, (mine, upstream) in enumerate(
            zip(ours.device_rows(num_reqs), theirs.block_tables)
        ):
            rows, width = upstream.get_device_tensor(num_reqs), upstream.num_blocks_per_row
            for row in range(num_reqs):
                assert mine[row, : width[row]].tolist() == rows[row, : width[row]].tolist()
                nulls += rows[row, : width[row]].tolist().count(0)
            if MODES[group] is SlotMappingMode.TOKEN_TO_KV_SLOT:  # states have no slots
                assert (
                    step.slot_mapping[group].tolist() == upstream.slot_mapping.gpu[:total].tolist()
                )
        for request, count in zip(running, scheduled):
            request.num_computed_tokens += count
    assert made > 10
    assert (nulls > 0) == (mode == "align"), "states of earlier blocks are given up"
