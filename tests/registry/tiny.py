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

UNSET = ("num_key_value_heads", "n_group", "num_experts_per_tok", "topk_group")
UNSET += ("max_position_embeddings",)
"""Fields that may be None by default, and that vLLM counts with."""

ON = ("mla_scale_kv_lora", "mla_scale_q_lora", "norm_topk_prob", "original_rope", "route_norm")
OFF = ("tie_word_embeddings", "use_qk_norm", "zero_expert_num")
FIELDS: dict[str, Any] = {
    **dict.fromkeys(ON, True),
    **dict.fromkeys(OFF, False),
    **dict.fromkeys(("score_func", "scoring_func"), "sigmoid"),
    **dict.fromkeys(("first_k_dense_replace", "route_scale"), 1),
    "activation_function": "gelu",
    "force_image_size": 224,
    "hybrid_layer_pattern": [0, 1],
    "layernorm_epsilon": 1e-5,
    "mlp_ratio": 4,
    "position_embedding_type": "absolute",
    "vision_feature_layer": -1,
    "zero_expert_type": "identity",
}
"""Fields that files of checkpoints have, vLLM reads, and some configs of transformers lack, beside
those of `SIZES`."""

LAYERS = {
    "Lfm2": ["conv", "full_attention"],
    "Qwen3Next": ["linear_attention", "full_attention"],
    "Qwen3_5": ["linear_attention", "full_attention"],
}
"""Kinds of layers of hybrids, by how their names begin: few layers would be of one kind."""

NOT_SIZES = "transformers_version", "_name_or_path", "architectures", "dtype", "output_attentions"
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


def _stand_in(architecture: str) -> str:
    """A config for names of vLLM's that no model has: drafters, and runs of transformers' code."""
    from vllm.model_executor.models import registry

    if architecture in registry._TRANSFORMERS_BACKEND_MODELS:
        kinds = {"MultiModal": "LlavaConfig", "MoE": "MixtralConfig", "": "LlamaConfig"}
        return next(config for part, config in kinds.items() if part in architecture)
    return "LlamaConfig" if architecture in registry._SPECULATIVE_DECODING_MODELS else ""


def _config_by_name(architecture: str) -> Any | None:
    """The config of the class of this name in transformers, or of its type there or in vLLM."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES
    from vllm.transformers_utils.config import _CONFIG_REGISTRY

    if (found := model_class_of(architecture)) is not None:
        return found.config_class
    family = plain(END.sub("", architecture))
    for mapping, names in (
        (_CONFIG_REGISTRY, _CONFIG_REGISTRY),
        (CONFIG_MAPPING, CONFIG_MAPPING_NAMES),
    ):
        for name in names:
            if plain(name) == family:
                return mapping[name]
    return None


def _config_that_its_code_names(module: str) -> str:
    """The one config of transformers that a module of vLLM imports."""
    import transformers

    name = module if "." in module else f"vllm.model_executor.models.{module}"
    spec = importlib.util.find_spec(name)
    text = Path(spec.origin).read_text() if spec is not None and spec.origin is not None else ""
    named = {
        alias.name
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("transformers")
        for alias in node.names
        if alias.name.endswith("Config") and getattr(transformers, alias.name, None) is not None
    } - {"PretrainedConfig", "PreTrainedConfig"}
    return named.pop() if len(named) == 1 else ""


def config_class_of(architecture: str) -> Any:
    """The class of an architecture's config.

    Found by the class of the same name in transformers, by the config of its name, by another
    architecture that vLLM runs with the same class, or by what vLLM's code of it imports.
    """
    import transformers

    models, name = registered(), _stand_in(architecture)
    same = (each for each in models if models[each] == models[architecture])
    for other in (architecture, *same) if not name else ():
        if (found := _config_by_name(other)) is not None:
            return found
    name = name or _config_that_its_code_names(models[architecture][0])
    if not name:
        raise CannotBeMadeError("its config is remote code")
    return getattr(transformers, name)


def size_of(name: str) -> int | None:
    """How large a field of this name may be, if it is a size."""
    return next((size for pattern, size in SIZES if re.fullmatch(pattern, name)), None)


def _small(name: str, value: Any) -> Any:
    """A field's value, made small."""
    if isinstance(value, list) and re.search(r"token_ids?$", name):
        return [_small(name, each) for each in value]
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    if re.search(r"token_?(id|ids|index)$|_id$", name):
        return value if value < VOCABULARY else VOCABULARY - 2 - value % 97
    return min(value, size_of(name) or value)


def shrunk(fields: dict[str, Any]) -> dict[str, Any]:
    """A config's fields made small, in configs inside of it, too.

    Lists with an entry for each layer are left out: configs make them by the number of layers.
    """
    counts = [fields.get(each) for each in ("num_hidden_layers", "n_layer", "num_layers")]
    found: dict[str, Any] = {}
    for key, value in fields.items():
        name = str(key)
        if isinstance(value, dict) and name != "per_layer_config":
            found[name] = shrunk(value)
        elif value is None and name in UNSET:
            found[name] = size_of(name)
        elif name == "num_key_value_heads" and fields.get("kv_lora_rank"):
            found[name] = _small("num_attention_heads", value)
        elif name == "mrope_section":
            found[name] = [2, 3, 3]
        elif name != "per_layer_config" and not (
            isinstance(value, list) and len(value) in counts and len(value) > 2
        ):
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


def field_of(name: str) -> Any | None:
    """What a config that lacks a field may have there, if that is known."""
    return FIELDS.get(name, size_of(name))


def add_field(folder: Path, name: str) -> None:
    """Add a field that is known to ``config.json``, and to the configs inside of it."""

    def add(part: dict[str, Any]) -> None:
        part.setdefault(name, field_of(name))
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
    ends = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
    if kind is not None and kind.__name__.endswith(ends):
        torch.manual_seed(0)
        parts = [config, *(each for each in vars(config).values() if hasattr(each, "model_type"))]
        try:
            for part in parts:
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
