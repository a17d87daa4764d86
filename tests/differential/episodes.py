"""Random engines and random serving traffic, both drawn from a seed."""

import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from vllm import PoolingParams, SamplingParams
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind

from examples import quantize
from examples.tiny_model import make_tokenizer
from tests.differential.pair import Pair, check
from tests.differential.slots import SlotPair
from tests.differential.upstream import forget_unwritten_blocks
from tests.helpers.demo import make_demo, new_folder
from tests.helpers.drafters import disturb_model, make_eagle_head
from tests.helpers.engine import make_model, runner_of
from tests.helpers.latent import V32
from tests.helpers.life_cycle import LifeCycle
from tests.helpers.lora import make_adapter
from tests.helpers.mixtures import MIXTURES
from tests.helpers.traffic import Drawn, Traffic
from tests.helpers.v2 import engine_of
from tests.helpers.watch import count_preemptions
from tests.npu.models import INDEXED

VOCAB = 512
MAX_MODEL_LEN = 160
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
SPARSE = "DeepseekV32"
"""A family whose indexers choose positions; every sixteenth engine is of it."""
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3": {"num_hidden_layers": 1},
    "Gemma2": {  # windows beside full attention: two KV-cache groups
        "num_hidden_layers": 2,
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention"],
        "query_pre_attn_scalar": 16,
        "tie_word_embeddings": True,
    },
    "Qwen3Moe": {"num_hidden_layers": 1, "num_experts": 4, **EXPERTS},
    "DeepseekV3": {  # MLA: latent rows instead of K and V
        "num_hidden_layers": 1,
        "first_k_dense_replace": 1,
        "topk_method": "noaux_tc",
        "q_lora_rank": None,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        **EXPERTS,
    },
    SPARSE: V32,
}
KINDS = ("Qwen3", "Qwen3", "Qwen3", "Gemma2", "Gemma2", "Qwen3Moe", "DeepseekV3", "pooling")
"""What is drawn from: a family that generates, or Qwen3 as an embedding model."""
VISION = {"Qwen2.5-VL": "qwen2_5_vl", "Qwen3-VL": "qwen3_vl"}
"""Models that see, of `examples/tiny_vision_model.py`; every tenth engine has one."""
DRAFTERS: dict[str, tuple[tuple[str, str], ...]] = {
    "Qwen3": (
        ("ngram", ""),
        ("draft_model", "same"),
        ("draft_model", "near"),
        ("draft_model", "other"),
        ("eagle", "head"),
        ("eagle", "head"),
        ("eagle3", "head"),
    ),
    "Qwen3Moe": (("ngram", ""), ("draft_model", "near"), ("eagle", "head"), ("eagle3", "head")),
    "Gemma2": (("ngram", ""), ("draft_model", "other")),  # no lm_head that a head could share
    "DeepseekV3": (("ngram", ""),),
    SPARSE: (("ngram", ""),),
    "Qwen2.5-VL": (("ngram", ""),),
    "Qwen3-VL": (("ngram", ""),),
}
"""Speculative methods by family, and which drafter: the model itself, all of whose drafts count if
they are greedy; one near it; another one; or a head (`tests.helpers.drafters`)."""
UNCHANGED = {"cache salt", "logprobs", "prompt logprobs", "stops at the end"}
"""Features with which a request gets the likeliest tokens of the model as it is."""
ADAPTERS = 4
SHARES = {
    "random": 0.4,
    "seed": 0.5,
    "top-p, top-k": 0.5,
    "min-p": 0.3,
    "several samples": 0.2,
    "penalties": 0.2,
    "logit bias": 0.2,
    "min tokens": 0.2,
    "bad words": 0.2,
    "allowed tokens": 0.2,
    "logprobs": 0.2,
    "prompt logprobs": 0.1,
    "stops at the end": 0.5,
    "grammar": 0.2,
}
"""Of requests that are not plain, as two in five are."""
NOT_WITH_DRAFTS = ("min-p", "logit bias", "min tokens")
CACHES_EVERY = 25
"""Steps between two comparisons of the whole KV caches."""


@dataclass(frozen=True)
class Episode:
    """One engine and its traffic, a function of its seed."""

    seed: int
    family: str  # of transformers, or "pooling"
    settings: dict[str, Any] = field(default_factory=dict)
    reordered: bool = False  # decodes come first for both runners, as some backends ask for
    int8: str = ""  # format of quantised weights
    runner: str = "V1"  # which of ours is compared with upstream's V1

    @classmethod
    def draw(cls, seed: int) -> "Episode":
        """Draw an engine that vLLM accepts."""
        rng = np.random.default_rng(seed)

        def pick(*values: Any) -> Any:
            return values[rng.integers(len(values))]

        family = pick(*KINDS)
        if seed % 10 == 9:
            family = list(VISION)[seed // 10 % 2]
        if seed % 16 == 15:
            family = SPARSE
        groups = 2 if family == "Gemma2" else 1  # one request of `MAX_MODEL_LEN` has to fit
        chunked = rng.random() < 0.65
        block_size = pick(8, 16, 32)
        max_num_seqs = pick(2, 4, 8, 12)
        settings: dict[str, Any] = {
            "block_size": block_size,
            "enable_chunked_prefill": bool(chunked),
            "enable_prefix_caching": bool(rng.random() < 0.75),
            "async_scheduling": bool(rng.random() < 0.6),
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": pick(12, 24, 48, 96) if chunked else MAX_MODEL_LEN,
            "scheduling_policy": pick("fcfs", "fcfs", "priority"),
            "num_gpu_blocks_override": groups * MAX_MODEL_LEN // block_size + pick(3, 8, 24),
            "additional_config": {"npu_prep": {"mask": pick("dense", "compressed")}},
        }
        if chunked and rng.random() < 0.2:
            settings["long_prefill_token_threshold"] = pick(5, 10)
        if family == "Gemma2" and rng.random() < 0.3:
            settings["disable_hybrid_kv_cache_manager"] = True
        mode = pick("NONE", "NONE", "PIECEWISE", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE", "FULL")
        if mode != "NONE":
            sizes = sorted({1, 2, max_num_seqs, pick(5, 7), pick(12, 16)})
            settings["enforce_eager"] = False
            settings["compilation_config"] = {
                "cudagraph_mode": mode,
                "cudagraph_capture_sizes": sizes,
            }
            settings["additional_config"] = {}
        if family == "pooling":
            settings |= {"runner": "pooling", "convert": "embed"}
        elif rng.random() < 0.4:
            method, drafter = pick(*DRAFTERS[family])
            drafts: dict[str, Any] = {"method": method, "num_speculative_tokens": pick(1, 2, 3, 4)}
            settings["speculative_config"] = drafts
            if method == "ngram":
                settings["async_scheduling"] = False
                drafts |= {"prompt_lookup_max": 3, "prompt_lookup_min": 1}
            else:
                drafts["model"] = drafter
                settings["max_num_batched_tokens"] += max_num_seqs  # a place for each next token
                if family == "Gemma2":  # a group more
                    settings["num_gpu_blocks_override"] += MAX_MODEL_LEN // block_size
                if rng.random() < 0.4:
                    drafts["draft_sample_method"] = "probabilistic"
        elif rng.random() < 0.25 and family not in VISION:
            settings["enable_prompt_embeds"] = True
        if family == "Qwen3" and rng.random() < 0.4:
            settings |= {"enable_lora": True, "max_loras": 2, "max_cpu_loras": 3}
            if "speculative_config" in settings:  # vLLM wants room for the drafts of all requests
                drafts = settings["speculative_config"]
                room = max_num_seqs * (1 + drafts["num_speculative_tokens"])
                settings["max_num_batched_tokens"] = max(settings["max_num_batched_tokens"], room)
        reordered, int8 = bool(rng.random() < 0.2), ""
        drafter = settings.get("speculative_config", {}).get("model")
        # A float copy is not the same model. Drawn apart, so that other draws stay as they were.
        if family in ("Qwen3", "Qwen3Moe") and drafter != "same":
            formats = ["", "", "", *quantize.FORMATS]
            int8 = str(np.random.default_rng((seed, 10)).choice(formats))
        return cls(seed, family, settings, reordered, int8)

    @classmethod
    def draw_for_device(cls, seed: int, family: str = "") -> "Episode":
        """Draw an engine with experts that an NPU serves: without drafts, which have other cases.

        Its sizes are those that fused attention takes. Some have int8 weights. `SPARSE` is not
        drawn, but may be given: in 16 bits, two scores may be so close that the runners' padding
        decides which position is chosen.
        """
        drawn, rng = cls.draw(seed), np.random.default_rng((seed, 26))
        drawn_family = str(rng.choice(list(MIXTURES)))
        family = family or drawn_family
        left_out = ("speculative_config", "enable_prompt_embeds", "runner", "convert")
        left_out += ("enable_lora", "max_loras", "max_cpu_loras", "disable_hybrid_kv_cache_manager")
        settings = {name: v for name, v in drawn.settings.items() if name not in left_out}
        settings |= {
            "dtype": "float16",
            "block_size": 128,
            "num_gpu_blocks_override": -(-MAX_MODEL_LEN // 128) + int(rng.integers(2, 9)),
            "additional_config": {"npu_prep": {"attention": str(rng.choice(["fia", "atb"]))}},
        }
        if family == SPARSE:
            settings["additional_config"] = {"npu_prep": {"attention": "fia"}}
        int8 = str(rng.choice(["", "", *quantize.FORMATS]))
        return cls(seed, family, settings, int8=int8)

    @classmethod
    def draw_for_v2(cls, seed: int) -> "Episode":
        """Draw an engine whose runner is our V2: no drafts by chance, which it draws in another way
        than V1, and none by models of their own."""
        drawn = cls.draw(seed)
        settings = dict(drawn.settings)
        if drafts := settings.pop("speculative_config", None):
            drafts = {name: v for name, v in drafts.items() if name != "draft_sample_method"}
            if drafts["method"] != "draft_model":
                settings["speculative_config"] = drafts
        return cls(seed, drawn.family, settings, int8=drawn.int8, runner="V2")

    @classmethod
    def draw_for_soak(cls, seed: int) -> "Episode":
        """Draw an engine of either runner: every other one has V2, seed 0 the first."""
        return cls.draw(seed) if seed % 2 else cls.draw_for_v2(seed)

    @property
    def is_for_device(self) -> bool:
        return self.settings.get("dtype") == "float16"

    def parts(self) -> set[str]:
        """What of an engine it has, in a few words each."""
        settings = self.settings
        graphs = settings.get("compilation_config", {}).get("cudagraph_mode", "NONE")
        options = settings["additional_config"].get("npu_prep", {})
        parts = {
            self.family,
            f"graphs {graphs}",
            f"by {options['attention']}"
            if self.is_for_device
            else f"mask {options.get('mask', 'auto')}",
            settings["scheduling_policy"],
            "asynchronous" if settings["async_scheduling"] else "synchronous",
            "chunked prefill" if settings["enable_chunked_prefill"] else "whole prompts",
            "prefix cache" if settings["enable_prefix_caching"] else "no prefix cache",
            self.runner,
        }
        names = {
            "enable_prompt_embeds": "prompt embeddings",
            "enable_lora": "LoRA",
            "long_prefill_token_threshold": "long prefills cut",
            "disable_hybrid_kv_cache_manager": "windows in one group with full attention",
        }
        parts |= {name for key, name in names.items() if key in settings}
        if drafts := settings.get("speculative_config"):
            parts.add(f"{drafts['method']} drafts")
            if "model" in drafts:
                parts.add(f"drafter: {drafts['model']}")
                parts.add(f"{drafts.get('draft_sample_method', 'greedy')} drafts")
        if self.int8:
            parts.add(f"int8 by {self.int8}")
        return parts | ({"decodes first"} if self.reordered else set())

    def dumps(self) -> str:
        """As JSON, so that a failing one can be kept."""
        return json.dumps(asdict(self), indent=2)


@cache
def model_of(family: str, for_device: bool = False) -> Path:
    """A random model with the demo model's tokenizer: of one or two layers; for a device, a mixture
    of experts whose sizes suit an NPU."""
    if family in VISION:
        return make_demo("tiny_vision_model.py", "tiny-vision") / VISION[family]
    folder = new_folder(family)
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder)
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    if for_device:
        sizes = MIXTURES | {SPARSE: INDEXED}
        return make_model(folder, family, vocab_size=VOCAB, **ids, **sizes[family])
    small = {"hidden_size": 32, "intermediate_size": 64, "head_dim": 8, "vocab_size": VOCAB}
    sizes = small | ids | FAMILIES[family]
    return make_model(folder, family, **{"embedding_scale": 0.2, **sizes})


@cache
def int8_of(model: Path, form: str) -> Path:
    """A model with int8 weights, in a format of `examples/quantize.py`."""
    folder = new_folder("int8")
    quantize.quantize(model, folder, form, plain=True)
    return folder


@cache
def drafter_of(family: str, method: str, drafter: str) -> Path:
    """A drafter for a family, as `DRAFTERS` names it."""
    target = model_of(family)
    if drafter == "same":
        return target
    folder = new_folder(method)
    if drafter == "near":
        return disturb_model(folder, target, share=0.05)
    if drafter == "head":
        return make_eagle_head(folder, target, method)
    small = {"hidden_size": 16, "intermediate_size": 32, "head_dim": 8, "vocab_size": VOCAB}
    shape = {"num_attention_heads": 2, "num_key_value_heads": 1}
    if family == "Gemma2":  # one layer in one of the groups, which have pages of one size
        shape = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1}
    return make_model(folder, seed=1, **small, **shape)


@cache
def adapter_of(number: int) -> LoRARequest:
    """One of a few adapters for Qwen3: more than an engine holds."""
    folder = new_folder("lora") / str(number)
    make_adapter(folder, model_of("Qwen3"), seed=number, rank=2 * number)
    return LoRARequest(f"adapter-{number}", number, str(folder))


class Serving(Traffic):
    """Random traffic in an engine with two runners; counts steps by attention state, too."""

    def __init__(self, llm: Any, episode: Episode) -> None:
        super().__init__(episode.seed + 1, (4, VOCAB), longest=90, room=MAX_MODEL_LEN)
        self.llm, self.core, self.episode = llm, llm.llm_engine, episode
        engine_core = self.core.engine_core.engine_core
        self.scheduler = engine_core.scheduler
        self.count = count_preemptions(llm)
        forget_unwritten_blocks(self.scheduler, self.count)
        ours = runner_of(llm)
        if episode.reordered:
            ours.reorder_batch_threshold = 1
        is_v2 = episode.runner == "V2"
        self.pair = SlotPair(ours, self.scheduler) if is_v2 else Pair(ours)
        self.pair.upstream.steps_in_flight = engine_core.batch_queue
        self.pair.on_step = self.after_forward
        self.pair.on_output = self.after_sampling
        engine_core.model_executor.driver_worker.worker.model_runner = self.pair
        self.tokenizer = llm.get_tokenizer()
        settings = episode.settings
        if "enable_prompt_embeds" in settings:
            self.embedding = ours.get_model().model.embed_tokens.weight.detach()
        if episode.family in VISION:
            self.images = [self.image() for _ in range(6)]
        left_out = NOT_WITH_DRAFTS if "speculative_config" in settings else ()
        self.fills, self.adapters = 0.05, ADAPTERS if "enable_lora" in settings else 0
        self.shares = {name: share for name, share in SHARES.items() if name not in left_out}
        self.rates = {"arrived": 1.0, "drained": 0.03, "aborted": 0.03, "prefix cache reset": 0.01}
        self.rates |= {"dummy run": 0.02, "life-cycle calls": 0.04}
        self.calls = {
            "arrived": self.arrive,
            "drained": self.drain,
            "aborted": self.abort,
            "prefix cache reset": self.reset,
            "dummy run": self.dummy_run,
            "life-cycle calls": LifeCycle(llm, self, self.step).call,
        }
        self.features: dict[str, set[str]] = {}  # of each request that is under way
        self.draining = False
        self.states: Counter = Counter()

    # ----------------------------------------------------------------- requests

    def image(self) -> Image.Image:
        height, width = self.number(16, 47), self.number(16, 47)
        return Image.fromarray(self.rng.integers(0, 256, (height, width, 3), dtype=np.uint8))

    def with_images(self, ids: list[int]) -> dict[str, Any]:
        """A prompt with one or two of a few images, anywhere in it."""
        ids, place = ids[:60], self.tokenizer.encode("<|vision_start|><|image_pad|><|vision_end|>")
        images = [self.pick(*self.images) for _ in range(self.number(1, 2))]
        for _ in images:
            where = self.number(0, len(ids))
            while 0 < where < len(ids) and ids[where] in place[1:]:  # not inside of another
                where -= 1
            ids = ids[:where] + place + ids[where:]
        return {"prompt_token_ids": ids, "multi_modal_data": {"image": images}}

    def prompt_of(self, drawn: Drawn) -> dict[str, Any]:
        prompt: dict[str, Any] = {"prompt_token_ids": drawn.prompt}
        if "prompt embeddings" in drawn.features:
            return {"prompt_embeds": self.embedding[drawn.prompt].clone()}
        if self.episode.family in VISION and self.chance(0.6):
            drawn.features.add("images")
            prompt = self.with_images(drawn.prompt)
        if self.chance(0.1):
            drawn.features.add("cache salt")
            prompt["cache_salt"] = str(self.number(0, 1))
        return prompt

    def arrive(self) -> bool:
        room = 2 * self.episode.settings["max_num_seqs"]
        if self.draining or len(self.scheduler.requests) >= room:
            return False
        embeds = "enable_prompt_embeds" in self.episode.settings and self.chance(0.5)
        drawn = self.request(
            {"prompt embeddings"} if embeds else set(), share=0.0 if self.chance(0.4) else 1.0
        )
        if self.episode.family == "pooling":
            params: Any = PoolingParams(task="embed")
            drawn.features.add("pooling")
        else:
            params = SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY, **drawn.params)
        adapter = adapter_of(drawn.adapter) if drawn.adapter else None
        drawn.features.update({"LoRA"} if adapter else ())
        prompt, priority = self.prompt_of(drawn), drawn.priority
        self.core.add_request(drawn.name, prompt, params, lora_request=adapter, priority=priority)
        self.features[drawn.name] = drawn.features
        return True

    def drain(self) -> None:
        """No more arrivals until all is quiet."""
        self.draining = True

    def abort(self) -> bool:
        if self.features:
            self.core.abort_request([self.pick(*sorted(self.features))])
        return bool(self.features)

    def reset(self) -> bool:
        return self.core.reset_prefix_cache(reset_running_requests=self.chance(0.5))

    def act(self) -> None:
        """What happens between two steps; some request has something to compute in the next."""
        self.draining &= self.core.has_unfinished_requests()
        self.between_steps()
        while not self.core.has_unfinished_requests():
            self.draining = False
            self.count["arrived"] += self.arrive()

    def dummy_run(self) -> None:
        """As data-parallel ranks without work do; ours keeps its tables through it."""
        ours = self.pair.ours
        with self.pair.running(ours):
            ours._dummy_run(4)
            if self.episode.runner == "V1":  # V2's tables are those of requests at any time
                # With attention it commits whole rows and then clears those of its padding.
                ours.block_tables.commit_block_table(ours.max_num_reqs)
                ours.block_tables.block_table_flat.zero_()

    # ----------------------------------------------------------------- steps

    def after_forward(self, output: Any) -> None:
        """What our step was made of; now and then, whether caches are still the same."""
        ours = self.pair.ours
        step = self.pair.watched[ours].step
        self.states[step.attn_state.name] += 1
        self.count["steps"] += 1
        if self.count["steps"] % CACHES_EVERY == 0:
            self.pair.compare_caches()
        self.count["tokens"] += output.total_num_scheduled_tokens
        self.count["resumed"] += len(output.scheduled_cached_reqs.resumed_req_ids)
        self.count["cached prefix"] += sum(
            new.num_computed_tokens > 0 for new in output.scheduled_new_reqs
        )
        on_v1 = self.episode.runner == "V1"
        if on_v1 and ours.speculative_config and not ours._input_fits_in_drafter(step):
            # Upstream's drafter leaves the whole batch out, and has holes in its cache behind that
            for req_id in output.num_scheduled_tokens:
                self.features.get(self.name_of(req_id), set()).add("drafter left out")
            self.count["drafter left out"] += 1

    def after_sampling(self, output: Any, drafts: dict[str, int]) -> None:
        """How many of each request's drafts were kept: all, where the model drafts for itself."""
        settings = self.episode.settings.get("speculative_config", {})
        for req_id, tokens in zip(output.req_ids, output.sampled_token_ids):
            if tokens and (made := drafts.get(req_id)):
                kept = len(tokens) - 1
                name = "accepted" if kept == made else "rejected" if not kept else "partly accepted"
                self.count[f"drafts {name}"] += 1
                self.count["draft tokens"] += made
                self.count["accepted draft tokens"] += kept
                changed = self.features.get(self.name_of(req_id), {"gone"}) - UNCHANGED
                if settings.get("model") == "same" and not changed:
                    check(f"drafts of {req_id} that the model itself made", kept, made)

    def name_of(self, req_id: str) -> str:
        """Our name of a request: vLLM appends a random tail, and a head for several samples."""
        return req_id.rpartition("-")[0].rpartition("_")[2]

    def step(self) -> None:
        """Take a step, and what requests say at their end."""
        for output in self.core.step():
            if output.finished:
                self.features.pop(output.request_id, None)
                self.count["finished"] += 1

    def run(self, steps: int) -> None:
        """Go on for at least so many steps, then until all requests have left."""
        while self.count["steps"] < steps or self.core.has_unfinished_requests():
            if self.count["steps"] < steps:
                self.act()
            self.step()
        self.pair.compare_caches()
        if self.episode.runner == "V1":
            self.count["images encoded"] += self.pair.ours.inputs.counts.encoded
            self.count["images placed"] += self.pair.ours.inputs.counts.placed
        for kind, steps_of in self.pair.ours.padding.counts.by_kind.items():
            self.count[kind.partition(":")[0]] += steps_of


def play(episode: Episode, steps: int) -> Serving:
    """Run an episode; raises at the first disagreement."""
    family = "Qwen3" if episode.family == "pooling" else episode.family
    settings = dict(episode.settings)
    options = settings.get("additional_config", {}).get("npu_prep", {})
    settings["additional_config"] = {"npu_prep": {"check": "full", **options}}
    if drafts := settings.get("speculative_config"):
        drafts = settings["speculative_config"] = dict(drafts)
        if "model" in drafts:
            drafts["model"] = str(drafter_of(family, drafts["method"], drafts["model"]))
    model = model_of(family, episode.is_for_device)
    if episode.int8:
        model = int8_of(model, episode.int8)
    with (
        engine_of(
            episode.runner,
            model,
            max_model_len=MAX_MODEL_LEN,
            skip_tokenizer_init=False,
            structured_outputs_config={"backend": "xgrammar", "disable_any_whitespace": True},
            **settings,
        ) as llm,
        torch.inference_mode(False),
    ):
        serving = Serving(llm, episode)
        serving.run(steps)
    return serving
