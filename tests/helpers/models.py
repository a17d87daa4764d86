"""The tiny models of `tests.matrix` and `tests.soak`, and what goes with them: one list.

Sizes are those that an NPU's operators take, so that one config does for both devices. Models that
don't see have the demo model's tokenizer, which structured output needs.
"""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from examples import quantize, tiny_model
from tests.helpers.demo import make_demo, new_folder
from tests.helpers.drafters import disturb_model, make_eagle_head, save_weights
from tests.helpers.engine import LLAMA4, make_model
from tests.helpers.hybrids import EXPERTS, ON_NPUS, make_model_that_sees
from tests.helpers.latent import GLM_FLASH_ON_NPUS, LATENT_ON_NPUS, V2_LITE, V3_EXPERTS_ON_NPUS
from tests.helpers.lora import ATTENTION, MLP, make_adapter
from tests.helpers.mixtures import MIXTURES
from tests.helpers.mtp import FAMILIES, add_mtp_layer, make_mtp_model
from tests.helpers.prompts import prompts_of
from tests.helpers.vision import Request, chat, make_image, make_video
from tests.helpers.windows import SHARED_LAYERS, THREE_GROUPS
from tests.npu.only_some import HEAD_SIZE

SEED = 57
HYBRID, LATENT, ROUTED, SEES, POOLS, CHUNKS = "hybrid", "latent", "experts", "sees", "pools", "cut"


class Tiny:
    """What a model's config has beside the defaults of `make_model`, and what kinds it is of."""

    def __init__(self, sizes: dict[str, Any], *kinds: str) -> None:
        self.sizes, self.kinds = sizes, kinds


CALM: dict[str, Any] = {"spread": 0.1, "embedding_scale": 20}
"""Random weights as they are leave 16 bits more often in doubt."""
WIDE = {**CALM, "head_dim": HEAD_SIZE}
STATES = {**ON_NPUS, "head_dim": 256}
"""A state fills the K of 128 tokens."""
FOR_TWO_STAGES = {"num_hidden_layers": 3}
"""The first layer has no experts, and vLLM asks that each stage has some."""
ENCODER = {"num_key_value_heads": 4, "spread": 0.15}
CUT = {name: value for name, value in LLAMA4.items() if name != "family"}
GEMMA2 = {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 8.0, "embedding_scale": 0.02}
GEMMA2 |= {"query_pre_attn_scalar": 16, "tie_word_embeddings": True, "head_dim": HEAD_SIZE}
MODERN = {"num_hidden_layers": 3, "local_attention": 16, "global_attn_every_n_layers": 3}
ROTATED = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
ROTATED |= {"mrope_section": [8, 12, 12], "mrope_interleaved": True}
SEEN = {**STATES, "rope_parameters": ROTATED}
"""Of heads of 256, as `make_model_that_sees` has it of heads of 16."""
V3 = {**LATENT_ON_NPUS, **V3_EXPERTS_ON_NPUS, "q_lora_rank": 96}
INDEXED = {"index_n_heads": 8, "index_head_dim": 128, "index_topk": 24}
FLASH = {**LATENT_ON_NPUS, **GLM_FLASH_ON_NPUS, **FOR_TWO_STAGES}
REWARDS, ENDS_A_STEP = "Qwen2ForProcessRewardModel", 7
"""A process reward model, and the token that it gives numbers to."""

MODELS = {
    "BertForSequenceClassification": Tiny({**ENCODER, "spread": 0.3, "num_labels": 3}, POOLS),
    "BertModel": Tiny(ENCODER, POOLS),
    "DeepseekV2ForCausalLM": Tiny({**CALM, **LATENT_ON_NPUS, **V2_LITE}, LATENT, ROUTED),
    "DeepseekV3ForCausalLM": Tiny({**CALM, **V3}, LATENT, ROUTED),
    "DeepseekV32ForCausalLM": Tiny({**CALM, **V3, **INDEXED}, LATENT, ROUTED),
    "Gemma2ForCausalLM": Tiny({**GEMMA2, "sliding_window": 13}),
    "Gemma3ForCausalLM": Tiny({**THREE_GROUPS, "head_dim": HEAD_SIZE}),
    # A row of padding is 0, and its length divides: drafts that nobody has made yet are such rows
    "Gemma3nForCausalLM": Tiny({**SHARED_LAYERS, "head_dim": HEAD_SIZE, "pad_token_id": None}),
    "Glm4ForCausalLM": Tiny({**WIDE, "partial_rotary_factor": 0.5}),
    "Glm4MoeForCausalLM": Tiny({**WIDE, "use_qk_norm": True, **FOR_TWO_STAGES}, ROUTED),
    "Glm4MoeLiteForCausalLM": Tiny(
        {**CALM, **FLASH, "mlp_layer_types": ["dense", "sparse", "sparse"]}, LATENT, ROUTED
    ),
    "Llama4ForCausalLM": Tiny({**WIDE, **CUT, "attention_chunk_size": 256}, CHUNKS),
    "LlamaForCausalLM": Tiny(WIDE),
    "MiMoForCausalLM": Tiny({}),
    "MiniMaxM2ForCausalLM": Tiny({**WIDE, **MIXTURES["MiniMaxM2"]}, ROUTED),
    "MistralForCausalLM": Tiny({**WIDE, "sliding_window": 13}),
    "MixtralForCausalLM": Tiny({**WIDE, **MIXTURES["Mixtral"]}, ROUTED),
    "ModernBertModel": Tiny({**ENCODER, **MODERN, "spread": 0.3}, POOLS),
    "Qwen2ForCausalLM": Tiny(CALM),
    REWARDS: Tiny({"spread": 0.15}, POOLS),
    "Qwen2ForSequenceClassification": Tiny({"spread": 0.15, "num_labels": 3}, POOLS),
    "Qwen2MoeForCausalLM": Tiny({**CALM, **MIXTURES["Qwen2Moe"]}, ROUTED),
    "Qwen2_5_VLForConditionalGeneration": Tiny({}, SEES),
    "Qwen3ForCausalLM": Tiny(CALM),
    "Qwen3MoeForCausalLM": Tiny({**CALM, **MIXTURES["Qwen3Moe"], **FOR_TWO_STAGES}, ROUTED),
    "Qwen3NextForCausalLM": Tiny({**STATES, **EXPERTS}, HYBRID, ROUTED),
    "Qwen3VLForConditionalGeneration": Tiny({}, SEES),
    "Qwen3_5ForCausalLM": Tiny(STATES, HYBRID),
    "Qwen3_5ForConditionalGeneration": Tiny(SEEN, HYBRID, SEES),
    "Qwen3_5MoeForCausalLM": Tiny({**STATES, **EXPERTS}, HYBRID, ROUTED),
    "Qwen3_5MoeForConditionalGeneration": Tiny({**SEEN, **EXPERTS}, HYBRID, SEES, ROUTED),
}
"""By the name that vLLM gives their class. Those of `FAMILIES` have an MTP layer, used or not."""


def is_a(kind: str, name: str) -> bool:
    return kind in MODELS[name].kinds


def of_kind(kind: str) -> list[str]:
    return [name for name in MODELS if is_a(kind, name)]


def is_long(name: str) -> bool:
    """Whether its blocks have 128 tokens, so that prompts are longer."""
    return is_a(HYBRID, name) or is_a(CHUNKS, name)


@cache
def folder_of(name: str, one_kv_head: bool = False) -> Path:
    """Folder of a model, made once."""
    import transformers

    named = re.fullmatch(r"(\w+?)(For\w+|Model)", name)
    assert named is not None
    family, head = named.groups()
    if is_a(SEES, name) and not is_a(HYBRID, name):
        folder = getattr(transformers, name).config_class.model_type
        return make_demo("tiny_vision_model.py", "tiny-vision") / folder
    folder, sizes = new_folder(name), dict(MODELS[name].sizes)
    sizes |= {"num_key_value_heads": 1} if one_kv_head else {}
    if is_a(SEES, name):
        make_model_that_sees(folder, family, **sizes)
        add_mtp_layer(folder, family)
        return folder
    tokenizer = tiny_model.make_tokenizer()
    tokenizer.save_pretrained(folder)
    sizes |= {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    if "vocab_size_per_layer_input" in sizes:
        sizes["vocab_size_per_layer_input"] = len(tokenizer)
    if family in FAMILIES:
        return make_mtp_model(folder, family, **sizes)[0]
    make_model(folder, family, "ForCausalLM" if name == REWARDS else head, **sizes)
    return _give_rewards(folder) if name == REWARDS else folder


def _give_rewards(folder: Path) -> Path:
    """Make a process reward model of a causal one: two numbers for each token, by two layers."""
    generator = torch.Generator().manual_seed(SEED)
    shapes = {"0.weight": (64, 64), "0.bias": (64,), "2.weight": (2, 64), "2.bias": (2,)}
    head = {
        f"score.{key}": torch.randn(shape, generator=generator) / 8 for key, shape in shapes.items()
    }
    save_weights(load_file(folder / "model.safetensors") | head, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": [REWARDS]}))
    return folder


@cache
def int8_of(
    name: str, form: str = "compressed-tensors", keep: tuple[str, ...] = (), **how: Any
) -> Path:
    """The same with int8 weights, whose inputs are rounded, or as `quantize` is told."""
    folder = new_folder("int8")
    quantize.quantize(folder_of(name), folder, form, keep=keep, plain=True, **how)
    return folder


@cache
def adapter_of(name: str, number: int = 1) -> Path:
    """Folder of an adapter, of which a model may have several.

    vLLM sorts Llama 4's queries and keys anew when it loads them, and adapters of these it doesn't.
    """
    modules = {"Qwen3ForCausalLM": ATTENTION + MLP, "Llama4ForCausalLM": ATTENTION[2:]}
    default = ATTENTION + MLP + ("w1", "w2", "w3") if is_a(ROUTED, name) else ATTENTION
    folder = new_folder("lora") / "adapter"
    return make_adapter(folder, folder_of(name), seed=number, modules=modules.get(name, default))


@cache
def drafter_of(name: str, method: str) -> Path:
    """Folder of a drafter that isn't a part of its model."""
    target, folder = folder_of(name), new_folder(method)
    config = json.loads((target / "config.json").read_text())
    of_one_kind = len(set(config.get("layer_types") or ())) < 2 and not is_a(LATENT, name)
    if is_a(SEES, name):  # a head of another model's guesses worse, which does as well
        sizes = {key: config["text_config"][key] for key in ("hidden_size", "vocab_size")}
        target = make_model(folder / "target", "Llama", **sizes)
    elif method == "draft_model" and (name.partition("For")[0] in FAMILIES or not of_one_kind):
        target = folder_of("LlamaForCausalLM")  # drafters are dense, of layers of one kind
    if method == "draft_model":
        return disturb_model(folder, target, share=0.05)
    return make_eagle_head(folder, target, method, head_dim=HEAD_SIZE)


def drafts_by(name: str, method: str, number: int = 2) -> dict[str, Any]:
    """The ``speculative_config`` of an engine of a model."""
    config = {"method": method, "num_speculative_tokens": number}
    if method == "ngram":
        return {**config, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
    return config if method == "mtp" else {**config, "model": str(drafter_of(name, method))}


def files_in(folder: str) -> dict[str, Any]:
    """The ``kv_transfer_config`` of an engine that keeps prompts in files."""
    extra = {"shared_storage_path": folder}
    return {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }


@cache
def prompts(name: str) -> list[Any]:
    """Token ids, or requests of models that see; half of the former begin as the first one does."""
    if is_a(SEES, name):
        return requests()
    lengths = [150, 3, 1, 270, 17, 140] if is_long(name) else [70, 3, 1, 40, 17, 90]
    drawn, shared = prompts_of(SEED, [*lengths, 28, 9, 55, 22]), 128 if is_long(name) else 48
    asked = [
        drawn[0][:shared] + each if n % 2 and len(each) < 50 else each
        for n, each in enumerate(drawn)
    ]
    for each in asked if name == REWARDS else ():
        each[len(each) // 2] = each[-1] = ENDS_A_STEP
    return asked


@cache
def requests() -> list[Request]:
    """With images, a video, and without."""
    image, question = make_image(SEED), "What is a slot mapping?"
    other, third = make_image(SEED + 1, 90, 60), make_image(SEED + 2, 90, 60)
    return [
        chat(image, question),
        chat(question),
        chat(other, third, " or ", other, third, other, question),  # more than a block of 128
        chat(make_video(SEED), question),
        chat("Why?"),
        chat(question, other),
    ]


def as_input(prompt: Any) -> Any:
    """A prompt as engines take it."""
    return prompt.prompt() if isinstance(prompt, Request) else {"prompt_token_ids": prompt}
