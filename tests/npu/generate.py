"""Greedy tokens of a fixed set of prompts, as JSON: run once on the CPU fallback and once on npu:0.

python -m tests.npu.generate OUT MODEL:fia:float16/async/FULL MODEL:atb:bfloat16/sync/eager

A case is a dtype, a scheduling (with ``-v2``: on Model Runner V2), a graph mode and, if drafts are
to be verified, how these are made.
With ``/recorded`` at its end, the full check looks at every step, `records_of` has their records,
and the cache is too small for the batch: 4 blocks, or as many as ``/recorded-N`` says.
Where a case fails, its error stands in place of its tokens, and the next one begins.
"""

import argparse
import json
import traceback
from pathlib import Path

import numpy as np
from vllm.lora.request import LoRARequest

from tests.helpers.drafters import disturb_model, make_eagle_head
from tests.helpers.engine import generate, graphs, greedy, runner_of
from tests.helpers.lora import ATTENTION, HEAD, MLP, make_adapter
from tests.helpers.v2 import engine_of
from tests.helpers.watch import count_preemptions, count_states, count_verified
from tests.matrix.collect import taken
from tests.npu.only_some import HEAD_SIZE

LENGTHS = [5, 150, 33, 1, 70, 128, 129]
SEED = 20240607


def prompts(scheduling: str) -> list[list[int]]:
    rng = np.random.default_rng(SEED)
    lengths, shared = (LENGTHS, 128) if scheduling != "windows" else ([5, 290, 33, 150], 256)
    drawn = [rng.integers(2, 512, length).tolist() for length in lengths]
    # The last one shares full blocks of a prompt before it; of 256 tokens, half are in no window.
    return [*drawn, drawn[1][:shared] + drawn[0]]


LORA_IDS = [1, 0, 2, 3, 0, 1, 2, 0]
"""Adapter of each prompt; 0: none."""

SCHEDULING = {
    "sync": {"async_scheduling": False},
    "async": {"async_scheduling": True},
    "windows": {"async_scheduling": True, "max_model_len": 384},
    "lora": {"enable_lora": True, "max_loras": 2, "max_cpu_loras": 3, "max_lora_rank": 8},
}
SCHEDULING |= {f"{name}-v2": settings for name, settings in SCHEDULING.items()}


def drafts_of(model: Path, method: str) -> dict:
    """Settings of speculation; drafters are kept beside the model."""
    config: dict = {"method": method, "num_speculative_tokens": 3}
    if method == "ngram":
        return {"speculative_config": {**config, "prompt_lookup_max": 2, "prompt_lookup_min": 1}}
    if method == "mtp":  # the model's own layers
        return {"speculative_config": config}
    folder = model.parent / method
    if not folder.exists():
        if method == "draft_model":
            disturb_model(folder, model, share=0.05)
        else:
            make_eagle_head(folder, model, method, head_dim=HEAD_SIZE)
    return {"speculative_config": {**config, "model": str(folder)}}


def adapters_of(model: Path) -> list[LoRARequest | None]:
    """Adapter of each prompt, or none: three kinds of adapter, kept beside the model."""
    requests: list[LoRARequest | None] = [None]
    for index, modules in enumerate((ATTENTION + MLP + HEAD, MLP, ATTENTION[:1]), 1):
        folder = model.parent / f"adapter-{index}"
        if not folder.exists():
            make_adapter(folder, model, seed=index, modules=modules, rank=2 * index)
        requests.append(LoRARequest(folder.name, index, str(folder)))
    return [requests[index] for index in LORA_IDS]


def records_of(model: Path) -> Path:
    """Folder of the records of a model's steps."""
    return model.with_name(f"{model.name}-steps")


def run(
    model: Path,
    attention: str,
    dtype: str,
    scheduling: str,
    mode: str,
    method: str = "",
    recorded: str = "",
) -> dict:
    options: dict = {"attention": attention}
    if recorded:
        options |= {
            "check": "full",
            "record": {"dir": str(records_of(model)), "steps": "0:1000"},
        }
    runner_name = "V2" if scheduling.endswith("-v2") else "V1"
    with engine_of(
        runner_name,
        model,
        dtype=dtype,
        block_size=128,
        max_num_batched_tokens=64,
        max_num_seqs=4,
        kv_cache_memory_bytes=32 << 20,
        additional_config={"npu_prep": options},
        **({"num_gpu_blocks_override": int(recorded.partition("-")[2] or 4)} if recorded else {}),
        **SCHEDULING[scheduling],
        **(drafts_of(model, method) if method else {}),
        **({} if mode == "eager" else graphs(mode, 4, 16)),
    ) as llm:
        runner = runner_of(llm)
        states, verified = count_states(llm), count_verified(llm)
        preempted = count_preemptions(llm)
        loras = adapters_of(model) if "lora" in scheduling else None
        inputs = prompts(scheduling)
        tokens = generate(llm, inputs[:1], greedy(4))
        tokens += generate(llm, inputs, greedy(12), loras)
        device = str(runner.device)
        steps = dict(runner.padding.counts.by_kind)
    return {
        "tokens": tokens,
        "states": dict(states),
        "steps": steps,
        "verified": dict(verified),
        "preempted": preempted["preempted"],
        "device": device,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path, help="file of the result, as JSON")
    parser.add_argument("cases", nargs="+", metavar="MODEL:FAMILY:CASE", help="what to run")
    args = parser.parse_args()
    results = {}
    for name in args.cases:
        model, attention, case = name.split(":")
        try:
            results[name] = {**run(Path(model), attention, *case.split("/")), "cells": taken()}
        except Exception:
            results[name] = {"error": traceback.format_exc(), "cells": taken()}
    args.out.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
