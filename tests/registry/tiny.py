"""Tiny models of any architecture: transformers' defaults, made small by the names of fields."""

import ast
import importlib.util
import json
import re
import shutil
from pathlib import Path
from typing import Any

from pydantic import ValidationError

VOCABULARY = 512

SIZES: tuple[tuple[str, int], ...] = (
    (r"vocab(_size)?(_per_layer_input)?|n_vocab|padded_vocab_size|vocabulary_size", VOCABULARY),
    (r"(num_|n_)?(hidden_|encoder_|decoder_|text_)?layers?|depth|num_\w*(layers|blocks)", 2),
    (r"(moe|expert|shared)\w*(intermediate|ffn|hidden)\w*_(size|dim)", 32),
    (r"\w*(intermediate|ffn|inner)\w*(size|dim)\w*|ffn_dim|n_inner|d_ff|mlp_dim", 256),
    (r"qk_rope_head_dim|qk_rope_dim|rotary_dim", 8),
    (r"\w*head_(dim|size)|\w*head_dim|kv_channels|d_kv|attention_head_size", 16),
    (r"\w*(kv_heads|key_value_heads|num_key_heads|attention_groups|query_groups?(_num)?)", 2),
    (r"topk_group|n_group|\w*expert_group\w*", 1),
    (r"\w*top_k|moe_topk|num_\w*per_tok\w*|moe_k", 2),
    (r"\w*(num|n|local|routed)_?\w*experts?", 4),
    (r"\w*(num|n|attention)_?\w*heads?(_\w+)?", 4),
    (r"q_lora_rank|kv_lora_rank", 32),
    (r"image_size|\w*crop_size", 224),
    (r"(\w*_)?(hidden_size|hidden_dim|embed_dim|embedding_dim|width|dim|out_hidden_size)", 64),
    (r"d_model|n_embd|word_embed_proj_dim|projection_dim|embedding_size|n_embed", 64),
    (r"(\w*_)?(max_position_embeddings|n_positions|seq_length|max_\w*positions)", 2048),
)
"""Names of fields, and how large each may be."""

MAMBA = (("num_heads", "head_dim", "expand"), ("mamba_n_heads", "mamba_d_head", "mamba_expand"))
"""Heads, their size and what a state is wider than hidden states, which have to fit."""

UNSET: dict[str, int] = {
    "num_key_value_heads": 2,
    "n_group": 1,
    "num_experts_per_tok": 2,
    "topk_group": 1,
    "max_position_embeddings": 2048,
}
"""Fields that may be None by default, and that vLLM counts with."""

FIELDS: dict[str, Any] = {
    "activation_function": "gelu",
    "block_dim": 64,
    "embed_dim": 64,
    "expert_hidden_dim": 32,
    "first_k_dense_replace": 1,
    "force_image_size": 224,
    "head_dim": 16,
    "hybrid_layer_pattern": [0, 1],
    "max_position_embeddings": 2048,
    "layernorm_epsilon": 1e-5,
    "mla_scale_kv_lora": True,
    "n_group": 1,
    "mla_scale_q_lora": True,
    "mlp_ratio": 4,
    "norm_topk_prob": True,
    "original_rope": True,
    "padded_vocab_size": VOCABULARY,
    "position_embedding_type": "absolute",
    "rotary_dim": 8,
    "route_norm": True,
    "route_scale": 1.0,
    "score_func": "sigmoid",
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "use_qk_norm": False,
    "vision_feature_layer": -1,
    "zero_expert_num": 0,
    "zero_expert_type": "identity",
}
"""Fields that files of checkpoints have, vLLM reads, and some configs of transformers lack."""

LAYERS = {
    "Lfm2": ["conv", "full_attention"],
    "Qwen3Next": ["linear_attention", "full_attention"],
    "Qwen3_5": ["linear_attention", "full_attention"],
}
"""Kinds of layers of hybrids, by how their names begin: few layers would be of one kind."""

NOT_SIZES = ("transformers_version", "_name_or_path", "architectures", "dtype")
NOT_SIZES += ("output_attentions",)
END = re.compile(r"(For[A-Z]\w*|Model|LMHeadModel|ChatModel)$")
"""What a class's name has after that of its family."""


class CannotBeMadeError(Exception):
    """No tiny model of an architecture; says why."""


def plain(name: str) -> str:
    """A name of an architecture or of a config's type, to compare the two."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def registered() -> dict[str, tuple[str, str]]:
    """Module and class of each architecture of vLLM's registry."""
    from vllm.model_executor.models import registry

    return dict(registry._VLLM_MODELS)


def model_class_of(architecture: str) -> Any | None:
    """The class of this name in transformers."""
    import transformers

    found = getattr(transformers, architecture, None)
    return found if getattr(found, "config_class", None) is not None else None


def _configs() -> dict[str, Any]:
    """Classes of configs that transformers and vLLM have, by their plain names."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES
    from vllm.transformers_utils import config

    names = {plain(name): (lambda name=name: CONFIG_MAPPING[name]) for name in CONFIG_MAPPING_NAMES}
    ours = config._CONFIG_REGISTRY
    names |= {plain(name): (lambda name=name: ours[name]) for name in ours}
    return names


def _config_by_name(architecture: str) -> Any | None:
    found = model_class_of(architecture)
    if found is not None:
        return found.config_class
    make = _configs().get(plain(END.sub("", architecture)))
    return None if make is None else make()


def _stand_in(architecture: str) -> Any | None:
    """A config for names of vLLM's that no model has: drafters, and runs of transformers' code."""
    import transformers
    from vllm.model_executor.models import registry

    if architecture in registry._SPECULATIVE_DECODING_MODELS:
        return transformers.LlamaConfig
    if architecture in registry._TRANSFORMERS_BACKEND_MODELS:
        several = transformers.LlavaConfig if "MultiModal" in architecture else None
        return several or getattr(
            transformers, f"{'Mixtral' * ('MoE' in architecture) or 'Llama'}Config"
        )
    return None


def _config_that_its_code_names(module: str) -> Any | None:
    """The one config of transformers that a module of vLLM imports."""
    import transformers

    name = module if "." in module else f"vllm.model_executor.models.{module}"
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        return None
    named = {
        alias.name
        for node in ast.walk(ast.parse(Path(spec.origin).read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("transformers")
        for alias in node.names
        if alias.name.endswith("Config") and getattr(transformers, alias.name, None) is not None
    } - {"PretrainedConfig", "PreTrainedConfig"}
    return getattr(transformers, named.pop()) if len(named) == 1 else None


def config_class_of(architecture: str) -> Any:
    """The class of an architecture's config.

    Found by the class of the same name in transformers, by the config of its name, by another
    architecture that vLLM runs with the same class, or by what vLLM's code of it imports.
    """
    if stand_in := _stand_in(architecture):
        return stand_in
    models = registered()
    module, name = models[architecture]
    for other in [architecture, *(each for each in models if models[each] == (module, name))]:
        found = _config_by_name(other)
        if found is not None:
            return found
    found = _config_that_its_code_names(module)
    if found is None:
        raise CannotBeMadeError("its config is remote code")
    return found


def _small(name: str, value: Any) -> Any:
    """A field's value, made small."""
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    if re.search(r"token_?(id|ids|index)$|_id$", name):
        return value if value < VOCABULARY else VOCABULARY - 2 - value % 97
    for pattern, size in SIZES:
        if re.fullmatch(pattern, name):
            return min(value, size)
    return value


def shrunk(fields: dict[str, Any]) -> dict[str, Any]:
    """A config's fields made small, in configs inside of it, too.

    Lists with an entry for each layer are left out: configs make them by the number of layers.
    """
    counts = [
        fields[each] for each in ("num_hidden_layers", "n_layer", "num_layers") if each in fields
    ]
    found: dict[str, Any] = {}
    for key, value in fields.items():
        name = str(key)
        if name == "per_layer_config":  # made by the number of layers
            continue
        if isinstance(value, dict):
            found[name] = shrunk(value)
        elif isinstance(value, list) and len(value) in counts and len(value) > 2:
            continue
        elif value is None and name in UNSET:
            found[name] = UNSET[name]
        elif name == "num_key_value_heads" and fields.get("kv_lora_rank"):
            found[name] = _small("num_attention_heads", value)
        elif name == "mrope_section":
            found[name] = [2, 3, 3]
        elif isinstance(value, list) and re.search(r"token_ids?$", name):
            found[name] = [_small(name, each) for each in value]
        else:
            found[name] = _small(name, value)
    for heads, size, expand in MAMBA:
        if all(isinstance(found.get(each), int) for each in (heads, size, expand, "hidden_size")):
            found[heads] = found["hidden_size"] * found[expand] // found[size]
    return found


def tiny_config(architecture: str) -> Any:
    """A small config of an architecture."""
    kind = config_class_of(architecture)
    try:
        fields = kind().to_dict()
    except Exception as error:
        raise CannotBeMadeError(f"its config has no defaults: {first_line(error)}") from error
    fields = shrunk(fields)
    for each in NOT_SIZES:
        fields.pop(each, None)
    for name, kinds in LAYERS.items():
        if architecture.startswith(name):
            fields.get("text_config", fields)["layer_types"] = kinds
    try:
        config = kind.from_dict(fields)
    except Exception as error:
        raise CannotBeMadeError(f"its config takes no small values: {first_line(error)}") from error
    config.architectures = [architecture]
    return config


def first_line(error: BaseException) -> str:
    """The error's class, and the first line of what it says."""
    text = str(error)
    if isinstance(error, ValidationError):
        text = "; ".join(each["msg"] for each in error.errors())
    lines = text.strip().splitlines() or [""]
    last = lines[-1].strip() if lines[0].endswith(":") else ""
    return f"{type(error).__name__}: {lines[0]} {last}".strip()[:300]


def save_config(folder: Path, architecture: str, config: Any) -> None:
    """Write ``config.json``, with the architecture's name."""
    config.save_pretrained(folder)
    path = folder / "config.json"
    written = json.loads(path.read_text())
    path.write_text(json.dumps({**written, "architectures": [architecture], "dtype": "float32"}))


def add_field(folder: Path, name: str) -> None:
    """Add a field of `FIELDS` to ``config.json``, and to the configs inside of it."""

    def add(part: dict[str, Any]) -> None:
        part.setdefault(name, FIELDS[name])
        for inner in part.values():
            if isinstance(inner, dict) and "model_type" in inner:
                add(inner)

    path = folder / "config.json"
    written = json.loads(path.read_text())
    add(written)
    path.write_text(json.dumps(written))


def save_model(folder: Path, architecture: str, config: Any) -> Any | None:
    """Write a model with random weights, which is returned.

    None if transformers has no class of it, or the class doesn't run: then the folder has a
    config.json alone, for weights that vLLM makes up.
    """
    import torch

    kind, model = model_class_of(architecture), None
    if kind is not None and kind.__name__.endswith(
        ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
    ):
        torch.manual_seed(0)
        try:
            for part in [
                config,
                *(each for each in vars(config).values() if hasattr(each, "model_type")),
            ]:
                if getattr(part, "initializer_range", None):
                    part.initializer_range = 0.2
            model = kind(config).float().eval()
            model.save_pretrained(folder)
        except Exception:
            model = None
            shutil.rmtree(folder)
            folder.mkdir()
    save_config(folder, architecture, config)
    return model


def greedy(model: Any, prompts: list[list[int]], count: int) -> list[list[int]] | str:
    """The most probable tokens by transformers; why there are none, where its class fails."""
    import torch

    found = []
    for prompt in prompts:
        ids = list(prompt)
        try:
            for _ in range(count):
                with torch.no_grad():
                    logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits
                ids.append(int(logits[0, -1].argmax()))
        except Exception as error:
            return first_line(error)
        found.append(ids[len(prompt) :])
    return found
