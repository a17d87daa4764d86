"""Random engines of every kind that the other parts of `make soak` can't pair with upstream's.

Their tokens are held against transformers instead, under the full check: states beside attention,
latent attention, mixtures, Model Runner V2, either scheduler, adapters, sleep between waves of
requests, a KV connector, two ranks.
"""

import tempfile
from collections import Counter
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from tests.helpers.engine import graphs, greedy, make_model
from tests.helpers.huggingface import reference
from tests.helpers.hybrids import GATED_DELTA, QWEN3_NEXT
from tests.helpers.latent import LATENT, V3_EXPERTS
from tests.helpers.lora import make_adapter, merge
from tests.helpers.mixtures import MIXTURES
from tests.helpers.prompts import prompts_of
from tests.helpers.ranks import Ranks, serve_on_ranks
from tests.helpers.v2 import RUNNERS, engine_of
from tests.helpers.watch import count_preemptions

MAX_MODEL_LEN = 128
MAX_TOKENS = 16
NUM_PROMPTS = 10
ADAPTERS = 2
HYBRIDS = {"Qwen3Next": QWEN3_NEXT, "Qwen3_5": GATED_DELTA}
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3": {},
    "DeepseekV3": {**LATENT, **V3_EXPERTS},
    "Qwen3Moe": MIXTURES["Qwen3Moe"],
    "Glm4Moe": MIXTURES["Glm4Moe"],
    **HYBRIDS,
}


@dataclass(frozen=True)
class Kind:
    """One engine, a function of its seed.

    Attributes
    ----------
    seed
        What everything is drawn from.
    family
        Of transformers.
    runner
        vLLM's model runner: V1 or V2.
    ranks
        Of tensor parallelism; two are processes of their own.
    adapters, sleeps, connected
        Whether requests have adapters, the engine sleeps between waves, and prompts are stored and
        loaded by a KV connector.
    settings
        Keyword arguments of the engine.
    """

    seed: int
    family: str
    runner: str = "V1"
    ranks: int = 1
    adapters: bool = False
    sleeps: bool = False
    connected: bool = False
    settings: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def draw(cls, seed: int) -> "Kind":
        """Draw an engine that start-up accepts."""
        rng = np.random.default_rng((seed, 33))

        def pick(*values: Any) -> Any:
            return values[rng.integers(len(values))]

        family = pick("Qwen3", *FAMILIES)
        hybrid = family in HYBRIDS
        ranks = 2 if rng.random() < 0.15 else 1
        # V2 serves plain dense models, which is where it is worth its time
        runner = pick(*RUNNERS) if family == "Qwen3" and ranks == 1 else "V1"
        adapters = family == "Qwen3" and ranks == 1 and bool(rng.random() < 0.4)
        sleeps = not hybrid and runner == "V1" and ranks == 1 and bool(rng.random() < 0.4)
        connected = family == "Qwen3" and runner == "V1" and ranks == 1 and not adapters
        connected = connected and not sleeps and bool(rng.random() < 0.4)
        block_size = 16 if hybrid or family == "DeepseekV3" else pick(4, 8, 16)
        settings: dict[str, Any] = {
            "block_size": block_size,
            "max_model_len": MAX_MODEL_LEN,
            "max_num_seqs": pick(4, 8),
            "max_num_batched_tokens": pick(24, 48, 96),
            "async_scheduling": bool(rng.random() < 0.6),
            "enable_prefix_caching": connected or bool(rng.random() < 0.7),
            "num_gpu_blocks_override": MAX_MODEL_LEN // block_size * pick(2, 3) + 4,
        }
        if hybrid:
            settings["num_gpu_blocks_override"] = pick(40, 60)
        options: dict[str, Any] = {"check": "full"}
        if not hybrid:
            options["scheduler"] = pick("batched", "batched", "upstream")
        mode = pick("NONE", "PIECEWISE", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")
        if mode != "NONE" and not connected and ranks == 1:
            settings |= graphs(mode, 1, 4, 8, 16)
        if connected:
            settings |= {"enable_chunked_prefill": False, "max_num_batched_tokens": MAX_MODEL_LEN}
        if adapters:
            settings |= {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
        if sleeps:
            settings["enable_sleep_mode"] = True
        settings["additional_config"] = {"npu_prep": options}
        return cls(seed, family, runner, ranks, adapters, sleeps, connected, settings)

    def parts(self) -> set[str]:
        """What of an engine it has, in a few words each."""
        mode = self.settings.get("compilation_config", {}).get("cudagraph_mode", "NONE")
        scheduler = self.settings["additional_config"]["npu_prep"].get("scheduler", "upstream")
        parts = {self.family, self.runner, f"{self.ranks} rank", f"graphs {mode}"}
        parts |= {f"{scheduler} scheduler"}
        named = {"adapters": self.adapters, "sleep": self.sleeps, "a connector": self.connected}
        return parts | {name for name, has in named.items() if has}


@cache
def family_of(family: str) -> tuple[Path, list[list[int]], list[list[int]]]:
    """A model, prompts that share beginnings, and transformers' tokens for them."""
    folder = make_model(Path(tempfile.mkdtemp()) / family, family, **FAMILIES[family])
    return folder, prompts(), reference(folder, prompts(), MAX_TOKENS)


@cache
def adapter_of(number: int) -> tuple[Path, list[list[int]]]:
    """An adapter of the dense model, and transformers' tokens with it merged."""
    model, root = family_of("Qwen3")[0], Path(tempfile.mkdtemp())
    folder = make_adapter(root / "adapter", model, seed=number)
    return folder, reference(merge(model, folder, root / "merged"), prompts(), MAX_TOKENS)


def prompts() -> list[list[int]]:
    """The same for all engines: half of them begin as the first one does."""
    drawn = prompts_of(33, [70, 3, 1, 40, 17, 90, 28, 9, 55, 22])
    return [
        drawn[0][:48] + each if n % 2 and len(each) < 50 else each for n, each in enumerate(drawn)
    ]


def play(kind: Kind, steps: int) -> Counter:
    """Serve waves of requests until `steps` are done; what happened how often.

    Raises
    ------
    AssertionError
        If a token differs, or blocks or requests are left.
    """
    with tempfile.TemporaryDirectory() as stored:
        settings = dict(kind.settings)
        if kind.connected:
            settings["kv_transfer_config"] = {
                "kv_connector": "ExampleConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"shared_storage_path": stored},
            }
        model, asked, expected = family_of(kind.family)
        if kind.ranks > 1:
            waves = -(-steps // MAX_TOKENS)  # of as many steps at least
            traffic = partial(_waves, asked, waves)
            settings["tensor_parallel_size"] = kind.ranks
            for got in serve_on_ranks(model, settings, traffic):
                assert got == expected
            return Counter(steps=waves * MAX_TOKENS, finished=waves * len(asked))
        with engine_of(kind.runner, model, **settings) as llm:
            return _Serving(kind, llm).serve(steps)


async def _waves(asked: list[list[int]], waves: int, ranks: Ranks) -> list[list[list[int]]]:
    return [await ranks.generate(asked, MAX_TOKENS) for _ in range(waves)]


class _Serving:
    """The traffic of one engine in this process."""

    def __init__(self, kind: Kind, llm: Any) -> None:
        self.kind, self.llm, self.core = kind, llm, llm.llm_engine
        self.rng, self.count = np.random.default_rng((kind.seed, 34)), Counter[str]()
        self.scheduler = self.core.engine_core.engine_core.scheduler
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.free = self.pool.get_num_free_blocks()
        _, self.prompts, plain = family_of(kind.family)
        self.expected, self.loras = [plain], [None]
        if kind.adapters:
            from vllm.lora.request import LoRARequest

            for number in range(1, ADAPTERS + 1):
                folder, tokens = adapter_of(number)
                self.loras.append(LoRARequest(f"adapter {number}", number, str(folder)))
                self.expected.append(tokens)

    def serve(self, steps: int) -> Counter:
        preempted = count_preemptions(self.llm)
        while self.count["steps"] < steps:
            self._wave(int(self.rng.integers(4, 20)))
            self.count["waves"] += 1
            assert self.pool.get_num_free_blocks() == self.free, "blocks are kept"
            assert not self.scheduler.requests and not self.core.output_processor.request_states
            if self.kind.sleeps and self.rng.random() < 0.5:
                self.llm.sleep(level=1)
                self.llm.wake_up()
                self.count["sleeps"] += 1
            elif self.rng.random() < 0.2:
                assert self.llm.reset_prefix_cache()
                self.count["resets"] += 1
        return self.count + Counter(preempted)

    def _wave(self, number: int) -> None:
        alive: dict[str, tuple[int, int]] = {}
        added = 0
        while added < number or self.core.has_unfinished_requests():
            while added < number and self.rng.random() < 0.6:
                prompt, adapter = (
                    int(self.rng.integers(n)) for n in (NUM_PROMPTS, len(self.loras))
                )
                name = f"{self.count['waves']}-{added}"
                self.core.add_request(
                    name,
                    {"prompt_token_ids": self.prompts[prompt]},
                    greedy(int(self.rng.integers(1, MAX_TOKENS + 1))),
                    lora_request=self.loras[adapter],
                )
                alive[name] = prompt, adapter
                added += 1
            if alive and self.rng.random() < 0.05:
                name = list(alive)[int(self.rng.integers(len(alive)))]
                self.core.abort_request([name])
                del alive[name]
                self.count["aborted"] += 1
            for output in self.core.step():
                if output.request_id not in alive:
                    continue
                prompt, adapter = alive[output.request_id]
                got = list(output.outputs[0].token_ids)
                wanted = self.expected[adapter][prompt][: len(got)]
                assert got == wanted, f"prompt {prompt}, adapter {adapter}: {got}, not {wanted}"
                self.count["tokens"] += 1
                if output.finished:
                    del alive[output.request_id]
                    self.count["finished"] += 1
            self.count["steps"] += 1
