"""Engines of several ranks on emulated NPUs: tokens, steps and copies of every rank, as JSON.

python -m tests.npu.on_ranks OUT MODEL:float16/tp2/async/PIECEWISE MODEL:bfloat16/pp2/sync/eager

A case is a dtype, a layout of ranks, a scheduling, a graph mode and, maybe, a feature: lora, eagle,
images, one-head (of K and V), how ranks share experts (experts, scattered, cut, latent, mtp), or an
int8 model. Prompts and settings are those of `tests.npu.generate`.
"""

import argparse
import json
import traceback
from functools import partial
from pathlib import Path
from typing import Any

from tests.helpers.counting import PreparationCounts
from tests.helpers.engine import graphs
from tests.helpers.ranks import RankProbe, Ranks, accepted_drafts, serve_on_ranks
from tests.helpers.v2 import asked_for
from tests.matrix.collect import taken
from tests.npu.generate import SCHEDULING, adapters_of, drafts_of, prompts

LAYOUTS = {
    "tp2": {"tensor_parallel_size": 2},
    "pp2": {"pipeline_parallel_size": 2},
    "tp2pp2": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    "dp2": {"data_parallel_size": 2},
    "dp2tp2": {"data_parallel_size": 2, "tensor_parallel_size": 2},
    "tp2cp2": {"tensor_parallel_size": 2, "decode_context_parallel_size": 2},
    "tp4cp2": {"tensor_parallel_size": 4, "decode_context_parallel_size": 2},
}
EXPERTS: dict[str, dict[str, Any]] = {
    "experts": {"enable_expert_parallel": True},
    "scattered": {"enable_expert_parallel": True, "expert_placement_strategy": "round_robin"},
    "cut": {},
    "latent": {"enable_expert_parallel": True},
    "states": {},
    "states-experts": {"enable_expert_parallel": True},
    "mtp": {"enable_expert_parallel": True},
    "one-head": {},
}
"""How ranks share the experts of a mixture: neighbours, every n-th, or a part of each; or of a
model with latent attention, whose MTP layer may draft; or of models without any."""

INT8: dict[str, dict[str, Any]] = {
    "int8": {},
    "int8-static": {},
    "int8-experts": {"enable_expert_parallel": True},
    "int8-latent": {"enable_expert_parallel": True},
    "int8-mtp": {"enable_expert_parallel": True},
}
"""Int8 models: dense ones, a mixture, two with latent attention and experts."""
SEED = 20240607
SECONDS = 480
"""Time limit of an engine: hosts may have fewer cores than it has ranks."""


class NPURankProbe(RankProbe):
    """Adds what each step asks of the rank's device."""

    def probe_count(self) -> None:
        """From now on, count each step's preparation."""
        self.probe_preparations = PreparationCounts(self.model_runner)

    def probe_copies(self) -> list[int]:
        """Host-to-device copies of each step that was counted."""
        return [step.get("h2d_copies", 0) for step in self.probe_preparations.steps]

    def probe_kept(self) -> int:
        """Outputs whose copies this rank waits for."""
        return len(self._outputs)


def image_requests() -> list[Any]:
    """Requests with and without images."""
    from tests.helpers.vision import chat, make_image

    first, question = make_image(SEED), "What is a slot mapping?"
    second = chat(make_image(SEED + 1, 90, 60), " or ", first, question)
    return [chat(first, question), chat(question), second]


async def traffic(ranks: Ranks, inputs: list[Any], loras: list[Any] | None) -> dict[str, Any]:
    """Tokens, undisturbed; then copies of some steps, then their arrays."""
    tokens = await ranks.generate(inputs[:1], 4)  # without an adapter, as the reference
    tokens += await ranks.generate(inputs, 12, loras=loras)
    told = {"facts": await ranks.ask("probe_facts"), "counts": await ranks.ask("probe_counts")}
    told["accepted"] = accepted_drafts()
    await ranks.ask("probe_count")
    await ranks.generate(inputs[:3], 8, loras=loras and loras[:3])
    told |= {"copies": await ranks.ask("probe_copies"), "kept": await ranks.ask("probe_kept")}
    await ranks.ask("probe_watch")
    await ranks.generate(inputs[:3], 8, loras=loras and loras[:3])
    return {"tokens": tokens, **told, "noted": await ranks.ask("probe_noted")}


def run(model: Path, case: str) -> dict[str, Any]:
    dtype, layout, scheduling, mode, *features = case.split("/")
    feature = features[0] if features else ""
    settings: dict[str, Any] = {
        "dtype": dtype,
        "block_size": 128,
        "max_num_batched_tokens": 64,
        "max_num_seqs": 4,
        "kv_cache_memory_bytes": 32 << 20,
        "worker_extension_cls": "tests.npu.on_ranks.NPURankProbe",
        "additional_config": {"npu_prep": {"check": "cheap"}},
        **LAYOUTS[layout],
        **SCHEDULING[scheduling],
        **({} if mode == "eager" else {"enforce_eager": False, **graphs(mode, 4, 16)}),
    }
    if (layout, mode, feature) == ("tp2", "FULL_AND_PIECEWISE", ""):  # measured as in production
        settings |= {"kv_cache_memory_bytes": None, "num_gpu_blocks_override": 64}
    loras = None
    if feature == "lora":
        settings |= SCHEDULING["lora"]
        if "pp2" in layout:
            # With batches in flight, vLLM 0.32's scheduler asserts that running requests have no
            # more adapters than a step may have, and lets more come in (Scheduler.schedule).
            settings["max_loras"] = 3
        loras = adapters_of(model)
    elif feature == "images":
        settings["skip_tokenizer_init"] = False
    elif feature in EXPERTS | INT8:
        settings |= (EXPERTS | INT8)[feature]
        settings |= drafts_of(model, "mtp") if feature.endswith("mtp") else {}
    elif feature:
        settings |= drafts_of(model, feature)
    if feature == "images":
        inputs: list[Any] = [each.prompt() for each in image_requests()]
    else:
        inputs = prompts(scheduling)
    talk = partial(traffic, inputs=inputs, loras=loras)
    with asked_for("V2" if scheduling.endswith("-v2") else "V1"):
        return serve_on_ranks(model, settings, talk, seconds=SECONDS)


def on_the_fallback(model: Path, dtype: str, layout: str, feature: str) -> list[list[int]]:
    """Tokens of an int8 model over as many ranks of the CPU fallback, eagerly.

    Ranks round their slices of a row, so tokens of one process would be others.
    """
    settings = {
        "dtype": dtype,
        "max_num_batched_tokens": 64,
        "max_num_seqs": 4,
        "kv_cache_memory_bytes": 32 << 20,
        "additional_config": {"npu_prep": {"check": "cheap"}},
        **LAYOUTS[layout],
        **INT8[feature],
    }
    talk = partial(only_tokens, inputs=prompts("sync"))
    return serve_on_ranks(model, settings, talk, seconds=SECONDS)


async def only_tokens(ranks: Ranks, inputs: list[Any]) -> list[list[int]]:
    """Tokens of `traffic`."""
    return await ranks.generate(inputs[:1], 4) + await ranks.generate(inputs, 12)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path, help="file of the result, as JSON")
    parser.add_argument("cases", nargs="+", metavar="MODEL:CASE", help="what to run")
    args = parser.parse_args()
    results = {}
    for name in args.cases:
        model, case = name.split(":")
        try:
            results[name] = {**run(Path(model), case), "cells": taken()}
        except Exception:
            results[name] = {"error": traceback.format_exc(), "cells": taken()}
    args.out.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
