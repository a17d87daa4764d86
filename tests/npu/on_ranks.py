"""Engines of several ranks on emulated NPUs: tokens, steps and copies of every rank, as JSON.

python -m tests.npu.on_ranks OUT MODEL:float16/tp2/async/PIECEWISE MODEL:bfloat16/pp2/sync/eager

A case is a dtype, a layout of ranks, a scheduling, a graph mode and, maybe, a feature: lora, eagle,
images, one-head (of K and V), how ranks share experts (experts, scattered, cut, latent, mtp), an
int8 model, or what memory does (sleep, offload). Prompts and settings are those of
`tests.npu.generate`. In place of a layout, ``two-cards`` stands for `tests.npu.two_cards`.
"""

import argparse
import asyncio
import json
import os
import traceback
from functools import partial
from pathlib import Path
from typing import Any

from tests.helpers.counting import ModuleCounts, PreparationCounts
from tests.helpers.engine import graphs
from tests.helpers.ranks import RankProbe, Ranks, accepted_drafts, loaded_tokens, serve_on_ranks
from tests.helpers.v2 import asked_for
from tests.matrix.collect import taken
from tests.npu import two_cards
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
    "states-mtp": {},
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
    "int8-states": {},
}
"""Int8 models: dense ones, a mixture, two with latent attention and experts, one with states."""
MEMORY: dict[str, dict[str, Any]] = {
    "sleep": {"enable_sleep_mode": True},
    "offload": {"block_size": 16, "kv_offloading_size": 0.01, "num_gpu_blocks_override": 40},
}
"""Memory that comes and goes: of an engine that sleeps; blocks that the host keeps, while the cache
holds four prompts at once, but not all of them."""

LAYER = "model.layers.1.self_attn"
"""Attention with its projections, whose launches are counted."""

CACHE = 32 << 20
PAGE = 2 << 20
"""Of K and V on each rank, and what the card's virtual memory comes in."""
SEED = 20240607
SECONDS = max(480, int(os.environ.get("NPU_PREP_TEST_SECONDS", "0")))
"""Time limit of an engine: hosts may have fewer cores than it has ranks."""


class NPURankProbe(RankProbe):
    """Adds what each step asks of the rank's device, and its memory."""

    probe_layer: ModuleCounts | None = None
    probe_held: tuple[Any, ...] = ()

    def probe_count(self) -> None:
        """From now on, count each step's preparation."""
        self.probe_preparations = PreparationCounts(self.model_runner)

        if LAYER in dict(self.get_model().named_modules()):  # another stage may have it
            self.probe_layer = ModuleCounts(self.get_model(), [LAYER])

    def probe_asked(self) -> list[dict[str, int]]:
        """What each step that was counted asked of the device to be prepared."""
        return self.probe_preparations.steps

    def probe_launched(self) -> dict[str, int]:
        """What a layer's attention asked of the device in the last step that called it."""
        return getattr(self.probe_layer, "counts", {}).get(LAYER, {})

    def probe_free(self) -> tuple[int, int]:
        """Free memory of the device, and what sleep gives back of it, in pages."""
        import torch

        torch.npu.synchronize()
        torch.npu.empty_cache()
        regions = [each for of_tag in self.sleep_mode_backend._regions.values() for each in of_tag]
        pages = sum(-(-region.data.numel() // PAGE) for region in regions)
        return torch.npu.mem_get_info()[0], pages * PAGE

    def probe_hold(self, rank: int) -> None:
        """Take the memory of one rank's device, but for less than half of the cache."""
        import torch

        while self.rank == rank and (left := self.probe_free()[0]) > CACHE // 2:
            more = torch.empty(left - PAGE, dtype=torch.uint8, device="npu")
            self.probe_held = (*self.probe_held, more)

    def probe_reload(self, path: str) -> None:
        """Read weights anew."""
        self.reload_weights(weights_path=path)

    def probe_let_go(self) -> None:
        """Give it back."""
        self.probe_held = ()

    def probe_kept(self) -> int:
        """Outputs whose copies this rank waits for."""
        return len(self._outputs)


def image_requests() -> list[Any]:
    """Requests with and without images."""
    from tests.helpers.vision import chat, make_image

    first, question = make_image(SEED), "What is a slot mapping?"
    second = chat(make_image(SEED + 1, 90, 60), " or ", first, question)
    return [chat(first, question), chat(question), second]


async def traffic(
    ranks: Ranks,
    inputs: list[Any],
    loras: list[Any] | None,
    layout: str,
    feature: str,
    model: Path,
) -> dict[str, Any]:
    """Tokens, undisturbed; then copies of some steps, then their arrays; then what memory does."""
    tokens = await ranks.generate(inputs[:1], 4)  # without an adapter, as the reference
    tokens += await ranks.generate(inputs, 12, loras=loras)
    told = {"facts": await ranks.ask("probe_facts"), "counts": await ranks.ask("probe_counts")}
    told["accepted"] = accepted_drafts()
    await ranks.ask("probe_count")
    await ranks.generate(inputs[:3], 8, loras=loras and loras[:3])
    told |= {"asked": await ranks.ask("probe_asked"), "kept": await ranks.ask("probe_kept")}
    told["launched"] = await ranks.ask("probe_launched")
    await ranks.ask("probe_watch")
    if layout.startswith("dp") and feature == "experts":  # which know of each other
        longer = ranks.generate(inputs[:2], 8, engine=0)
        await asyncio.gather(longer, ranks.generate(inputs[2:3], 4, engine=1))
    else:
        await ranks.generate(inputs[:3], 8, loras=loras and loras[:3])
    told |= {"tokens": tokens, "noted": await ranks.ask("probe_noted")}
    if feature == "sleep":
        told["slept"] = await slept(ranks, inputs, model)
    elif feature == "offload":
        more = inputs + [each[::-1] for each in inputs]  # twice what the cache holds
        rounds = [[await ranks.generate([each], 6) for each in more] for _ in range(2)]
        told |= {"rounds": rounds, "loaded": loaded_tokens()}
    return told


async def slept(ranks: Ranks, inputs: list[Any], model: Path) -> dict[str, Any]:
    """Tokens after sleeps of both levels, and free memory of all ranks awake, asleep and awake.

    In between, one rank after the other has no memory to wake up.
    """
    free, tokens, failures = [await ranks.ask("probe_free")], [], []
    for level in (1, 2):
        await ranks.llm.sleep(level=level)
        free.append(await ranks.ask("probe_free"))
        for rank in range(len(free[0])):
            await ranks.ask("probe_hold", rank)
            try:
                await ranks.llm.wake_up()
            except Exception as error:
                failures.append([str(error), await ranks.llm.is_sleeping()])
            await ranks.ask("probe_let_go")
            free.append(await ranks.ask("probe_free"))
        await ranks.llm.wake_up(["weights"])
        if level == 2:
            await ranks.ask("probe_reload", str(model))
        await ranks.llm.wake_up(["kv_cache"])
        tokens.append(await only_tokens(ranks, inputs))
        free.append(await ranks.ask("probe_free"))
    return {"free": free, "tokens": tokens, "failures": failures}


def run(model: Path, case: str) -> dict[str, Any]:
    dtype, layout, scheduling, mode, *features = case.split("/")
    feature = features[0] if features else ""
    if layout == "two-cards":
        return two_cards.run(model, dtype, prompts(scheduling))
    settings: dict[str, Any] = {
        "dtype": dtype,
        "block_size": 128,
        "max_num_batched_tokens": 64,
        "max_num_seqs": 4,
        "kv_cache_memory_bytes": CACHE,
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
    elif feature in MEMORY:
        settings |= MEMORY[feature]
    elif feature:
        settings |= drafts_of(model, feature)
    if feature == "images":
        inputs: list[Any] = [each.prompt() for each in image_requests()]
    else:
        inputs = prompts(scheduling)
    talk = partial(traffic, inputs=inputs, loras=loras, layout=layout, feature=feature, model=model)
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
