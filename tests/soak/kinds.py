"""What `tests.soak` draws: one engine a seed, of all that start-up accepts together."""

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from examples import quantize
from tests.helpers.engine import graphs
from tests.soak.models import CPU, FAMILIES, HYBRIDS, LATENT_ONES, NPU, VISION, WITH_EXPERTS

MAX_MODEL_LEN = 128
LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "tp2": {"tensor_parallel_size": 2},
    "pp2": {"pipeline_parallel_size": 2, "async_scheduling": False},
    "dp2": {"data_parallel_size": 2},
}
"""Ranks of an engine; of several, each is a process of its own. vLLM schedules pipeline stages
synchronously."""
DRAFTERS = {
    "Qwen3": ("ngram", "draft_model", "eagle", "eagle3"),
    "DeepseekV3": ("ngram", "mtp", "mtp"),
    "Qwen3Next": ("ngram", "mtp", "mtp"),
    "Qwen3_5": ("ngram", "mtp", "mtp"),
    **dict.fromkeys(("Qwen3Moe", "Glm4Moe", *VISION), ("ngram",)),
}
"""Speculative methods of a family."""
FILES, HOST = "ExampleConnector", "OffloadingConnector"
MODES = ("NONE", "PIECEWISE", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")


def bound_of(dtype: str, routed: bool, int8: bool) -> float:
    """How far from the best token one may be, in standard deviations of a step's logits.

    0 in float32: its tokens are those of transformers. With 16 bits close calls fall otherwise,
    with int8 more often. Where a router takes another expert for that, logits move by ten times
    as much. A margin is of two logits, which may both be off.

    Measured by transformers itself in 16 bits against float32, 60 to 100 prompts of 16 tokens with
    Qwen3 and the families with experts: logits are off by at most 0.066 (bfloat16) and 0.006
    (float16) without experts, by 0.54 and 0.26 with them, which makes margins of up to 1.07 and
    0.51 possible; those met were up to 0.022 and 0.002, with experts 0.071 and 0.024. Tokens
    shifted by a place have one that is off by at least 2.2 in 99 of 100 answers.
    """
    rounds = {"float32": 0.0, "float16": 0.05, "bfloat16": 0.1}[dtype]
    levels = (0.75 if routed else 0.25) if int8 else 0.0
    return rounds * (11 if routed else 1) + levels


@dataclass(frozen=True)
class Kind:
    """One engine, a function of its seed and its device.

    `int8`, `drafts` and `connector` name a format, a speculative method and what stores prompts, in
    files or in memory of the host; empty without. `settings` have no paths.
    """

    seed: int
    device: str
    family: str
    runner: str = "V1"
    layout: str = "one rank"
    int8: str = ""
    drafts: str = ""
    connector: str = ""
    adapters: bool = False
    sleeps: bool = False
    settings: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def draw(cls, seed: int, device: str = CPU) -> "Kind":
        draw = _Draw(seed, device)
        return cls(seed, device, settings=draw.settings(), **draw.parts)

    @property
    def on_card(self) -> bool:
        return self.device == NPU

    @property
    def bound(self) -> float:
        return bound_of(self.settings["dtype"], self.family in WITH_EXPERTS, bool(self.int8))

    @property
    def sessions(self) -> bool:
        """Whether it has sessions: of token ids, in one process; refused beside offloading."""
        return self.layout == "one rank" and self.family not in VISION and self.connector != HOST

    def parts(self) -> set[str]:
        """What of an engine it has, in a few words each."""
        settings, options = self.settings, self.settings["additional_config"]["npu_prep"]
        mode = settings.get("compilation_config", {}).get("cudagraph_mode", "NONE")
        parts = {self.family, self.runner, self.layout, f"graphs {mode}", settings["dtype"]}
        parts.add("hybrid" if self.family in HYBRIDS else "attention alone")
        parts.add(f"{options.get('scheduler', 'upstream')} scheduler")
        parts |= {f"by {options['attention']}"} if "attention" in options else set()
        parts |= {f"drafts by {self.drafts}"} if self.drafts else set()
        parts |= {f"int8 by {self.int8}"} if self.int8 else set()
        parts |= {self.connector} - {""}
        parts |= {"expert parallelism"} if settings.get("enable_expert_parallel") else set()
        parts |= {"images"} if self.family in VISION else set()
        return parts | {
            n
            for n, has in {
                "LoRA": self.adapters,
                "sleep": self.sleeps,
                "sessions": self.sessions,
            }.items()
            if has
        }

    def told(self) -> dict[str, Any]:
        """What is recorded of it."""
        return {
            name: value
            for name, value in asdict(self).items()
            if value and name not in ("seed", "settings", "sleeps")
        }


class _Draw:
    """Draws the parts of an engine one after another, each among those that go with the others."""

    def __init__(self, seed: int, device: str) -> None:
        self.rng = np.random.default_rng((seed, 33 if device == CPU else 34))
        self.on_card = device == NPU
        self.family = family = self.pick("Qwen3", "Qwen3", *FAMILIES)
        self.hybrid, self.sees = family in HYBRIDS, family in VISION
        self.experts = family in WITH_EXPERTS
        self.parts: dict[str, Any] = {"family": family, "runner": self.pick("V1", "V2")}
        self.v2 = self.parts["runner"] == "V2"
        self.layout = self.parts["layout"] = self.draw_layout()
        alone, staged = self.layout == "one rank", self.layout == "pp2"
        plain = family == "Qwen3" and not staged
        int8 = self.chance(0.2) and not self.sees and (alone or plain)
        self.parts["int8"] = self.pick(*quantize.FORMATS) if int8 else ""
        adapters = family == "Qwen3" and not int8 and not staged and self.chance(0.4)
        self.parts["adapters"] = adapters
        self.connector = self.parts["connector"] = self.draw_connector()
        self.drafts = self.parts["drafts"] = self.draw_drafts()
        # vLLM empties the prefix cache when an engine sleeps, and has its connector forget: of the
        # blocks on the host nothing stays, and all of the files
        self.parts["sleeps"] = self.chance(0.3)

    def chance(self, share: float) -> bool:
        return bool(self.rng.random() < share)

    def pick(self, *values: Any) -> Any:
        return values[self.rng.integers(len(values))]

    def draw_layout(self) -> str:
        """Several ranks now and then: their engines take long to start."""
        if not self.chance(0.15) or self.sees:
            return "one rank"
        if self.hybrid:
            return "tp2"
        # vLLM's code of these wants experts in each stage, and the first layer has none
        staged = ["pp2"] if self.family not in ("Qwen3Moe", "Glm4Moe") else []
        return str(self.pick("tp2", "tp2", "dp2", *staged))

    def draw_connector(self) -> str:
        """Files name prompts by token ids alone, and states have groups of their own."""
        if self.sees or self.layout != "one rank" or not self.chance(0.3):
            return ""
        no_files = self.parts["adapters"] or self.hybrid
        return HOST if no_files else str(self.pick(FILES, HOST))

    def draw_drafts(self) -> str:
        if not self.chance(0.35) or self.layout == "pp2":
            return ""
        if self.v2 and self.sees:
            return ""
        method = str(self.pick(*DRAFTERS[self.family]))
        if self.connector and method != "ngram":  # the KV cache of drafters is not stored
            return "" if self.hybrid else "ngram"
        return method

    def settings(self) -> dict[str, Any]:
        """Keyword arguments that go with the parts."""
        family, hybrid, alone = self.family, self.hybrid, self.layout == "one rank"
        long = hybrid and self.on_card
        max_model_len = 320 if long else 256 if self.sees else MAX_MODEL_LEN
        max_num_seqs = self.pick(4, 8)
        settings: dict[str, Any] = {
            "dtype": self.draw_dtype(),
            "max_model_len": max_model_len,
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": self.pick(24, 48, 96),
            "async_scheduling": self.chance(0.6),
            "enable_prefix_caching": bool(self.connector) or self.chance(0.7),
            "skip_tokenizer_init": not self.sees,
            **LAYOUTS[self.layout],
        }
        if hybrid or family in LATENT_ONES:
            block_size = 128 if long else 16
        else:
            block_size = self.pick(16, 128) if self.on_card else self.pick(4, 8, 16)
        if self.connector and not long:  # prompts have several
            block_size = 16
        settings["block_size"] = block_size
        per_request = -(-max_model_len // block_size)
        settings["num_gpu_blocks_override"] = per_request * self.pick(2, 3) + 4
        if hybrid:  # three groups of states beside attention's
            settings["num_gpu_blocks_override"] = self.pick(24, 36) if long else self.pick(40, 60)
        options: dict[str, Any] = {"check": "full"}
        if not hybrid:
            options["scheduler"] = self.pick("batched", "batched", "upstream")
        if self.on_card and not hybrid and family not in LATENT_ONES:
            options["attention"] = self.pick("fia", "fia", "atb")
        mode = self.pick(*MODES)
        if self.connector == FILES:
            mode = self.pick("NONE", "PIECEWISE")
            settings |= {"enable_chunked_prefill": False, "max_num_batched_tokens": max_model_len}
        if mode != "NONE":
            settings |= graphs(mode, 1, 4, 8, 16)
        if self.drafts:
            number = self.pick(1, 2, 3)
            settings["speculative_config"] = {
                "method": self.drafts,
                "num_speculative_tokens": number,
            }
            if self.drafts == "ngram":
                settings["speculative_config"] |= {"prompt_lookup_max": 2, "prompt_lookup_min": 1}
                settings["async_scheduling"] = False
            # vLLM wants room for the drafts of all requests, and for a draft model's next tokens
            room = max_num_seqs * (2 + number)
            settings["max_num_batched_tokens"] = max(room, settings["max_num_batched_tokens"])
        if self.connector == HOST:
            settings["kv_offloading_size"] = 0.01
        if self.parts["adapters"]:
            settings |= {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
        if self.parts["sleeps"]:
            settings["enable_sleep_mode"] = True
        if self.sees:  # all processed images, or two of them
            settings["mm_processor_cache_gb"] = self.pick(4, 2e-4)
        if self.experts and not alone and self.layout != "pp2":
            settings["enable_expert_parallel"] = self.chance(0.6)
        settings["additional_config"] = {"npu_prep": options}
        return settings

    def draw_dtype(self) -> str:
        if not self.on_card:
            return "float32"
        return "bfloat16" if self.hybrid else str(self.pick("float16", "bfloat16"))
