"""What `tests.soak` draws: one engine a seed, of all that start-up accepts together."""

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from examples import quantize
from tests.helpers.engine import graphs
from tests.helpers.judge import bound_of
from tests.helpers.models import HYBRID, LATENT, ROUTED, SEES, is_a

CPU, NPU = "cpu", "npu"
QWEN3 = "Qwen3ForCausalLM"
MAX_TOKENS = 16
ADAPTERS = 2
DRAFTERS = {
    QWEN3: ("ngram", "draft_model", "eagle", "eagle3"),
    "Qwen3MoeForCausalLM": ("ngram",),
    "Glm4MoeForCausalLM": ("ngram",),
    "DeepseekV3ForCausalLM": ("ngram", "mtp", "mtp"),
    "Qwen3NextForCausalLM": ("ngram", "mtp", "mtp"),
    "Qwen3_5ForCausalLM": ("ngram", "mtp", "mtp"),
    "Qwen2_5_VLForConditionalGeneration": ("ngram", "eagle", "eagle3", "draft_model"),
    "Qwen3VLForConditionalGeneration": ("ngram", "eagle", "eagle3", "draft_model"),
}
"""Models that are drawn, and speculative methods of each. V1 has no draft models beside images."""
SEES_TOO = {"Qwen3_5ForCausalLM": "Qwen3_5ForConditionalGeneration"}
"""What is drawn in place of a model every other time: images, states and MTP layers together."""
CHOOSES_TOO = {"DeepseekV3ForCausalLM": "DeepseekV32ForCausalLM"}
"""The same on the CPU: in 16 bits, scores may be so close that tokens attend to other positions."""
LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "tp2": {"tensor_parallel_size": 2},
    "pp2": {"pipeline_parallel_size": 2},
    "dp2": {"data_parallel_size": 2},
}
"""Ranks of an engine; of several, each is a process of its own."""
TASKS = ("embed", "token_embed")
"""What a pooling model is asked for: a row of its last token, or one of each."""
FILES, HOST = "ExampleConnector", "OffloadingConnector"
MODES = ("NONE", "PIECEWISE", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")


@dataclass(frozen=True)
class Kind:
    """One engine, a function of its seed and its device.

    `int8`, `drafts`, `connector` and `pools` name a format, a speculative method, what stores
    prompts, in files or in memory of the host, and a pooling task; empty without. `settings` have
    no paths.
    """

    seed: int
    device: str
    model: str
    runner: str
    layout: str
    int8: str
    drafts: str
    connector: str
    adapters: bool
    sleeps: bool
    settings: dict[str, Any] = field(default_factory=dict)
    pools: str = ""

    @property
    def bound(self) -> float:
        return bound_of(self.settings["dtype"], is_a(ROUTED, self.model), bool(self.int8))

    @property
    def sees(self) -> bool:
        return is_a(SEES, self.model)

    @property
    def sessions(self) -> bool:
        """Whether it has sessions: of token ids, in one process; refused beside offloading."""
        talks = not self.sees and not self.pools
        return self.layout == "one rank" and talks and self.connector != HOST

    def parts(self) -> set[str]:
        """What of an engine it has, in a few words each."""
        settings = self.settings
        having = {
            **self.told(),
            **{kind: is_a(kind, self.model) for kind in (HYBRID, SEES)},
            **settings["additional_config"]["npu_prep"],
            "graphs": settings.get("compilation_config", {}).get("cudagraph_mode", "NONE"),
            "dtype": settings["dtype"],
            "expert parallelism": settings.get("enable_expert_parallel"),
            "sleep": self.sleeps,
            "sessions": self.sessions,
        }
        return {name if has is True else f"{name} {has}" for name, has in having.items() if has}

    def told(self) -> dict[str, Any]:
        """What is recorded of it."""
        left_out = ("seed", "settings", "sleeps")
        return {name: each for name, each in asdict(self).items() if each and name not in left_out}


def draw(seed: int, device: str = CPU) -> Kind:
    """Draw the parts of an engine one after another, each among those that go with the others."""
    rng = np.random.default_rng((seed, 33 if device == CPU else 34))

    def chance(share: float) -> bool:
        return bool(rng.random() < share)

    def pick(*values: Any) -> Any:
        return values[rng.integers(len(values))]

    model, runner = pick(QWEN3, QWEN3, *DRAFTERS), pick("V1", "V2")
    methods = DRAFTERS[model]
    if model in SEES_TOO and chance(0.5):
        model = SEES_TOO[model]
    hybrid, latent, sees, routed = (is_a(kind, model) for kind in (HYBRID, LATENT, SEES, ROUTED))
    layout = "one rank"
    if chance(0.15) and not sees:  # engines of several ranks take long to start
        # vLLM's code of these wants experts in each stage, and the first layer has none
        staged = ["pp2"] if "Moe" not in model else []
        layout = "tp2" if hybrid else pick("tp2", "tp2", "dp2", *staged)
    alone, staged = layout == "one rank", layout == "pp2"
    quantised = chance(0.2) and not sees and (alone or (model == QWEN3 and not staged))
    int8 = pick(*quantize.FORMATS) if quantised else ""
    adapters = model == QWEN3 and not int8 and not staged and chance(0.4)
    connector = drafts = ""
    if not sees and alone and chance(0.3):
        # Files name prompts by token ids alone, and states have groups of their own
        connector = HOST if adapters or hybrid else pick(FILES, HOST)
    if chance(0.35) and not staged:
        if sees and runner == "V1":
            methods = tuple(method for method in methods if method != "draft_model")
        drafts = pick(*methods)
        if connector and drafts != "ngram":  # the KV cache of drafters is not stored
            drafts = "" if hybrid else "ngram"
    # vLLM empties the prefix cache when an engine sleeps, and has its connector forget: of the
    # blocks on the host nothing stays, and all of the files
    sleeps = chance(0.3)

    max_model_len, max_num_seqs = 320 if hybrid else 256 if sees else 128, pick(4, 8)
    dtype = "float32" if device == CPU else "bfloat16"
    if device == NPU and not hybrid:
        dtype = pick("float16", "bfloat16")
    settings: dict[str, Any] = {
        "dtype": dtype,
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": pick(24, 48, 96),
        "async_scheduling": chance(0.6),
        "enable_prefix_caching": bool(connector) or chance(0.7),
        "skip_tokenizer_init": not sees,
        **LAYOUTS[layout],
    }
    settings["async_scheduling"] &= not (staged and runner == "V1")
    block_size = 128 if hybrid else 16
    if not hybrid and not latent:
        block_size = pick(16, 128) if device == NPU else pick(4, 8, 16)
    if connector and not hybrid:  # prompts have several
        block_size = 16
    blocks = -(-max_model_len // block_size) * pick(2, 3) + 4
    if hybrid:  # three groups of states beside attention's
        blocks = pick(24, 36)
    settings |= {"block_size": block_size, "num_gpu_blocks_override": blocks}
    options: dict[str, Any] = {"check": "full"}
    if not hybrid:
        options["scheduler"] = pick("batched", "batched", "upstream")
    if device == NPU and not hybrid and not latent:
        options["attention"] = pick("fia", "fia", "atb")
    mode = pick(*MODES)
    if connector == FILES:
        mode = pick("NONE", "PIECEWISE")
        settings |= {"enable_chunked_prefill": False, "max_num_batched_tokens": max_model_len}
    settings |= graphs(mode, 1, 4, 8, 16) if mode != "NONE" else {}
    if drafts:
        number = pick(1, 2, 3)
        settings["speculative_config"] = {"method": drafts, "num_speculative_tokens": number}
        settings["async_scheduling"] &= drafts != "ngram"
        # vLLM wants room for the drafts of all requests, and for a draft model's next tokens
        room = max_num_seqs * (2 + number)
        settings["max_num_batched_tokens"] = max(room, settings["max_num_batched_tokens"])
    settings |= {"kv_offloading_size": 0.01} if connector == HOST else {}
    settings |= {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8} if adapters else {}
    settings |= {"enable_sleep_mode": True} if sleeps else {}
    if sees:  # all processed images, or two of them
        settings["mm_processor_cache_gb"] = pick(4, 2e-4)
    if routed and not alone and not staged:
        settings["enable_expert_parallel"] = chance(0.6)
    settings["additional_config"] = {"npu_prep": options}
    pools, of_pools = "", np.random.default_rng((seed, 36))  # leaves other kept seeds as they are
    plain = not (hybrid or sees or int8 or drafts or connector or adapters)
    if alone and plain and of_pools.random() < 0.5:
        pools = TASKS[of_pools.integers(len(TASKS))]
        settings |= {"runner": "pooling", "pooler_config": {"task": pools}}
        settings["skip_tokenizer_init"] = False  # which its processors ask for
    elif device == CPU and seed % 2:
        model = CHOOSES_TOO.get(model, model)
    return Kind(
        *(seed, device, model, runner, layout, int8, drafts, connector, adapters, sleeps),
        settings=settings,
        pools=pools,
    )
