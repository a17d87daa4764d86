"""Pairs of schedulers for a random engine: vLLM's and ours, with the same settings."""

import copy
import functools
import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.utils.hashing import sha256
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)

from tests.helpers.demo import new_folder
from tests.helpers.engine import engine_config, make_model
from tests.helpers.v2 import asked_for
from tests.scheduling import connectors
from vllm_npu_prep.compat.scheduler import begin_parts_of_sessions_with_what_was_computed
from vllm_npu_prep.scheduling.scheduler import BatchedAsyncScheduler, BatchedScheduler

EOS = 5
"""The token that ends a request."""
VOCAB = 400


def speculation(num: int, method: str) -> Any:
    """What schedulers ask of a speculative config: a method with `num` drafts."""

    def has_method(*names: str) -> Any:
        return lambda: method in names

    eagle = has_method("eagle", "mtp")
    return SimpleNamespace(
        method=method,
        num_speculative_tokens=num,
        num_speculative_tokens_per_batch_size=None,
        max_num_new_slots_for_drafting=int(method == "draft_model"),  # it keeps one token more
        use_eagle=eagle,
        use_eagle_block_drop=eagle,
        needs_eagle_block_drop=eagle,
        disable_eagle_block_drop=False,
        disable_lookahead_block_hashes=False,
        uses_draft_model=has_method("draft_model"),
        use_multi_module_mtp=has_method("mtp"),
        use_dflash=has_method(),
        use_dspark=has_method(),
    )


class Grammars:
    """Stands for vLLM's manager of structured output: refuses tokens by simple rules."""

    def validate_tokens(self, request: Any, tokens: list[int]) -> list[int]:
        """Drafts up to the first that a grammar refuses."""
        if not request.use_structured_output:
            return tokens
        bad = [number for number, token in enumerate(tokens) if token < 0 or token % 7 == 0]
        return tokens[: bad[0]] if bad else tokens

    def accept_tokens(self, request: Any, tokens: list[int]) -> bool:
        return not request.use_structured_output or all(token % 89 for token in tokens)


GROUPS: Sequence[tuple[str, ...]] = (
    *[("full",)] * 3,
    *[("full", "window"), ("full", "window", "window"), ("window",), ("full", "chunk")],
)


def draw(seed: int, **fixed: Any) -> SimpleNamespace:
    """What an engine is made of, but for settings that are not left to the seed."""
    rng = np.random.default_rng(seed)

    def one_in(n: int) -> bool:
        return bool(rng.integers(n) == 0)

    asynchronous = not one_in(3)
    num_drafts = int(rng.choice([0, 0, 1, 3]))
    groups = GROUPS[int(rng.integers(len(GROUPS)))]
    method = str(rng.choice(["ngram", "eagle", "draft_model", "mtp"])) if num_drafts else ""
    if "chunk" in groups and method in ("eagle", "mtp"):
        method = "ngram"  # upstream refuses these together
    block_size = int(rng.choice([4, 16]))
    if method == "mtp" and block_size < num_drafts:
        method = "eagle"
    max_num_seqs = int(rng.integers(4, 25))
    budget = int(rng.choice([max_num_seqs * (1 + num_drafts), max_num_seqs + 2, 96, 256]))
    budget = max(budget, max_num_seqs, 2 * (1 + num_drafts))
    v2 = asynchronous and one_in(4)
    max_model_len = int(rng.choice([48, 96, 200]))
    per_request = -(-max_model_len // block_size) + 2
    least = len(groups) * per_request + 2
    blocks = int(least * rng.choice([1.5, 3, max_num_seqs]))
    drawn = SimpleNamespace(
        seed=seed,
        asynchronous=asynchronous,
        depth=int(rng.choice([2, 2, 3])) if asynchronous else 1,
        max_num_seqs=max_num_seqs,
        budget=budget,
        max_model_len=max_model_len,
        blocks=blocks,
        block_size=block_size,
        groups=groups,
        caching=not one_in(5),
        priorities=one_in(4),
        num_drafts=num_drafts,
        method=method,
        loras=2 if one_in(4) else 0,
        media=one_in(4),
        v2=v2,
        stagger=2 if v2 and one_in(2) else 1,
        threshold=8 if one_in(4) else 0,
        watermark=0.05 if one_in(4) else 0.0,
        whole_prompts=one_in(3),
        finished_sets=one_in(3),
        log_stats=not one_in(4),
        kv_events=one_in(4),
        throttle=one_in(8),
        fewest=int(rng.choice([1, 1, 4])),
    )
    # Drawn last: kept seeds stay what they were
    if not drawn.caching and one_in(2):
        drawn.groups, drawn.blocks = (*groups, "states"), 2 * blocks
    drawn.v2 = drawn.v2 or (not asynchronous and one_in(2))
    if drawn.caching and one_in(4):
        drawn.groups, drawn.blocks = (*drawn.groups, "states"), 2 * blocks
    drawn.stages = 1 if one_in(2) else 2
    drawn.connector = str(rng.choice(["", *connectors.KINDS]))
    drawn.kv_role = str(rng.choice(["kv_both", "kv_producer", "kv_consumer"]))
    drawn.failures = str(rng.choice(["recompute", "fail"]))
    drawn.failing = float(rng.choice([0.0, 0.1]))
    drawn.offload_prompt_only, drawn.chunk = one_in(2), int(rng.choice([1, 2]))
    drawn.waits = one_in(2)
    vars(drawn).update(fixed)
    if drawn.asynchronous:
        drawn.stages = 1  # with more, the runner passes tokens on by itself
    else:
        drawn.depth = drawn.stages
    several = len(drawn.groups) > 1
    if drawn.connector == "example" and several:
        drawn.connector = "transfers"  # vLLM's is told of one group alone
    if "states" in drawn.groups and (not drawn.caching or drawn.chunk > 1):
        drawn.connector = drawn.connector and "transfers"  # offloading needs states at its ends
    return drawn


@functools.cache
def base_config() -> Any:
    """A config of vLLM's, to be copied."""
    folder = new_folder("scheduling")
    make_model(folder, hidden_size=16, intermediate_size=16, num_hidden_layers=1)
    sizes = {"max_model_len": 64, "max_num_batched_tokens": 64}
    return engine_config(folder, enforce_eager=True, **sizes)


def config_of(settings: SimpleNamespace, *, ours: bool) -> Any:
    config = copy.deepcopy(base_config())
    config.model_config.max_model_len = settings.max_model_len
    scheduling, cache = config.scheduler_config, config.cache_config
    scheduling.max_num_seqs = settings.max_num_seqs
    slots = settings.max_num_seqs if settings.method == "draft_model" else 0
    scheduling.max_num_scheduled_tokens = settings.budget
    scheduling.max_num_batched_tokens = settings.budget + slots
    scheduling.async_scheduling = settings.asynchronous
    scheduling.policy = "priority" if settings.priorities else "fcfs"
    scheduling.long_prefill_token_threshold = settings.threshold
    scheduling.watermark = settings.watermark
    scheduling.scheduler_reserve_full_isl = settings.whole_prompts
    cache.num_gpu_blocks = settings.blocks
    cache.block_size = settings.block_size
    cache.enable_prefix_caching = settings.caching
    if settings.num_drafts:
        config.speculative_config = speculation(settings.num_drafts, settings.method)
    config.parallel_config.pipeline_parallel_size = settings.stages
    cache.mamba_cache_mode = "align" if settings.caching else "none"
    if settings.connector:
        scheduling.disable_hybrid_kv_cache_manager = settings.connector == "example"
        config.kv_transfer_config = connectors.transfer_config(settings, ours=ours)
    if settings.loras:
        config.lora_config = SimpleNamespace(max_loras=settings.loras)
    return config


def spec_of(group: str, settings: SimpleNamespace) -> Any:
    of = {"block_size": settings.block_size, "num_kv_heads": 1, "head_size": 8}
    of["dtype"] = torch.float32
    whole = settings.block_size if settings.caching else settings.max_model_len
    states = {"block_size": whole, "num_speculative_blocks": settings.num_drafts}
    states["mamba_cache_mode"] = "align" if settings.caching else "none"
    return {
        "full": lambda: FullAttentionSpec(**of),
        "window": lambda: SlidingWindowSpec(**of, sliding_window=24),
        "chunk": lambda: ChunkedLocalAttentionSpec(**of, attention_chunk_size=32),
        # As vLLM makes them with the prefix cache, and without
        "states": lambda: MambaSpec(**states, shapes=((8,),), dtypes=(torch.float32,)),
    }[group]()


class Published(list):
    """KV-cache events, kept."""

    def publish(self, batch: Any) -> None:
        self.append(batch.events)


def make(settings: SimpleNamespace, *, ours: bool) -> Any:
    """One of the two schedulers."""
    init_none_hash(sha256)
    begin_parts_of_sessions_with_what_was_computed()  # as a process does when it starts
    groups = [
        KVCacheGroupSpec([f"layer {number}"], spec_of(name, settings))
        for number, name in enumerate(settings.groups)
    ]
    sizes = [group.kv_cache_spec.block_size for group in groups]
    alignment = math.lcm(*sizes)  # vLLM's resolve_kv_cache_block_sizes
    kinds = (Scheduler, AsyncScheduler, BatchedScheduler, BatchedAsyncScheduler)
    kind = kinds[2 * ours + settings.asynchronous]
    caches = KVCacheConfig(settings.blocks, [], groups)
    settings.alignment = alignment
    config = config_of(settings, ours=ours)
    with asked_for("V2" if settings.v2 else "V1"):
        scheduler = kind(
            config,
            caches,
            Grammars(),
            alignment,
            hash_block_size=math.gcd(*sizes) if settings.caching else alignment,
            include_finished_set=settings.finished_sets,
            log_stats=settings.log_stats,
        )
    assert scheduler.use_v2_model_runner == settings.v2
    if settings.asynchronous:
        scheduler.decode_stagger = settings.stagger
    if settings.kv_events:
        scheduler.kv_cache_manager.block_pool.enable_kv_cache_events = True
    scheduler.kv_event_publisher = Published()
    if settings.media:
        scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=60)
        scheduler.max_num_encoder_input_tokens = 40
    if settings.connector:
        connectors.prepare(scheduler, caches)
    if ours:
        scheduler.fewest = settings.fewest
    return scheduler


@functools.cache
def hasher(block_size: int) -> Any:
    return get_request_block_hasher(block_size, sha256)
