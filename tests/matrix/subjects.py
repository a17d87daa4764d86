"""Models whose cells are filled on purpose: one of each row, and what transformers makes of it.

Sizes are those that an NPU's operators take, so that one config does for both devices. All of them
have the demo model's tokenizer, which structured output needs.
"""

import json
import shutil
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import quantize
import tiny_model

from tests.helpers.demo import make_demo
from tests.helpers.drafters import disturb_model, make_eagle_head, save_weights
from tests.helpers.engine import LLAMA4, make_model
from tests.helpers.grammars import GRAMMAR, REGEX, SCHEMA
from tests.helpers.hybrids import EXPERTS, ON_NPUS, make_model_that_sees
from tests.helpers.latent import GLM_FLASH_ON_NPUS, LATENT_ON_NPUS, V2_LITE, V3_EXPERTS_ON_NPUS
from tests.helpers.lora import ATTENTION, make_adapter, merge
from tests.helpers.mixtures import MIXTURES
from tests.helpers.mtp import add_mtp_layer, make_mtp_model
from tests.helpers.pooling import normalized
from tests.helpers.prompts import prompts_of
from tests.helpers.quantized import round_modules, rounded_model, tensors_in
from tests.helpers.vision import Reference, Request, chat, make_image, make_video
from tests.helpers.windows import SHARED_LAYERS, THREE_GROUPS
from tests.npu.only_some import HEAD_SIZE
from tests.soak.models import float_model

SEED = 57
LENGTHS = [70, 3, 1, 40, 17, 90]
SHORT, LONG = 128, 320
"""Lengths of contexts. The second is for models whose blocks have 128 tokens."""
ENDS_A_STEP = 7
"""The token that a process reward model gives numbers to."""
HYBRID, LATENT, EXPERT, SEES, POOLS, CHUNKS = "hybrid", "latent", "experts", "sees", "pools", "cut"


@dataclass(frozen=True)
class Subject:
    """A row of the matrix."""

    family: str
    sizes: dict[str, Any]
    kinds: tuple[str, ...] = ()
    head: str = "ForCausalLM"
    mtp: bool = False

    def has(self, kind: str) -> bool:
        return kind in self.kinds


CALM: dict[str, Any] = {"spread": 0.1, "embedding_scale": 20}
"""Random weights as they are leave 16 bits more often in doubt."""
WIDE = {**CALM, "head_dim": HEAD_SIZE}
FOR_TWO_STAGES = {"num_hidden_layers": 3}
"""The first layer has no experts, and vLLM asks that each stage has some."""
ENCODER = {"num_key_value_heads": 4, "spread": 0.15}
SUBJECTS: dict[str, Subject] = {
    "BertForSequenceClassification": Subject(
        "Bert", {**ENCODER, "spread": 0.3, "num_labels": 3}, (POOLS,), "ForSequenceClassification"
    ),
    "BertModel": Subject("Bert", ENCODER, (POOLS,), "Model"),
    "DeepseekV2ForCausalLM": Subject(
        "DeepseekV2", {**CALM, **LATENT_ON_NPUS, **V2_LITE}, (LATENT, EXPERT)
    ),
    "DeepseekV3ForCausalLM": Subject(
        "DeepseekV3",
        {**CALM, **LATENT_ON_NPUS, **V3_EXPERTS_ON_NPUS, "q_lora_rank": 96},
        (LATENT, EXPERT),
        mtp=True,
    ),
    "Gemma2ForCausalLM": Subject(
        "Gemma2",
        {
            "sliding_window": 13,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 8.0,
            "query_pre_attn_scalar": 16,
            "embedding_scale": 0.02,
            "tie_word_embeddings": True,
            "head_dim": HEAD_SIZE,
        },
    ),
    "Gemma3ForCausalLM": Subject("Gemma3", {**THREE_GROUPS, "head_dim": HEAD_SIZE}),
    # A row of padding is 0, and its length divides: drafts that nobody has made yet are such rows
    "Gemma3nForCausalLM": Subject(
        "Gemma3n", {**SHARED_LAYERS, "head_dim": HEAD_SIZE, "pad_token_id": None}
    ),
    "Glm4ForCausalLM": Subject("Glm4", {**WIDE, "partial_rotary_factor": 0.5}),
    "Glm4MoeForCausalLM": Subject(
        "Glm4Moe", {**WIDE, "use_qk_norm": True, **FOR_TWO_STAGES}, (EXPERT,), mtp=True
    ),
    "Glm4MoeLiteForCausalLM": Subject(
        "Glm4MoeLite",
        {
            **CALM,
            **LATENT_ON_NPUS,
            **GLM_FLASH_ON_NPUS,
            **FOR_TWO_STAGES,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
        },
        (LATENT, EXPERT),
    ),
    "Llama4ForCausalLM": Subject(
        "Llama4",
        {**WIDE, **{k: v for k, v in LLAMA4.items() if k != "family"}, "attention_chunk_size": 256},
        (CHUNKS,),
    ),
    "LlamaForCausalLM": Subject("Llama", WIDE),
    "MiMoForCausalLM": Subject("MiMo", {}, mtp=True),
    "MiniMaxM2ForCausalLM": Subject("MiniMaxM2", {**WIDE, **MIXTURES["MiniMaxM2"]}, (EXPERT,)),
    "MistralForCausalLM": Subject("Mistral", {**WIDE, "sliding_window": 13}),
    "MixtralForCausalLM": Subject("Mixtral", {**WIDE, **MIXTURES["Mixtral"]}, (EXPERT,)),
    "ModernBertModel": Subject(
        "ModernBert",
        {
            **ENCODER,
            "num_hidden_layers": 3,
            "local_attention": 16,
            "global_attn_every_n_layers": 3,
            "spread": 0.3,
        },
        (POOLS,),
        "Model",
    ),
    "Qwen2ForCausalLM": Subject("Qwen2", CALM),
    "Qwen2ForProcessRewardModel": Subject("Qwen2", {"spread": 0.15}, (POOLS,)),
    "Qwen2ForSequenceClassification": Subject(
        "Qwen2", {"spread": 0.15, "num_labels": 3}, (POOLS,), "ForSequenceClassification"
    ),
    "Qwen2MoeForCausalLM": Subject("Qwen2Moe", {**CALM, **MIXTURES["Qwen2Moe"]}, (EXPERT,)),
    "Qwen2_5_VLForConditionalGeneration": Subject("qwen2_5_vl", {}, (SEES,)),
    "Qwen3ForCausalLM": Subject("Qwen3", CALM),
    "Qwen3MoeForCausalLM": Subject(
        "Qwen3Moe", {**CALM, **MIXTURES["Qwen3Moe"], **FOR_TWO_STAGES}, (EXPERT,)
    ),
    "Qwen3NextForCausalLM": Subject(
        "Qwen3Next", {**ON_NPUS, **EXPERTS, "head_dim": 256}, (HYBRID, EXPERT), mtp=True
    ),
    "Qwen3VLForConditionalGeneration": Subject("qwen3_vl", {}, (SEES,)),
    "Qwen3_5ForCausalLM": Subject("Qwen3_5", {**ON_NPUS, "head_dim": 256}, (HYBRID,), mtp=True),
    "Qwen3_5ForConditionalGeneration": Subject("Qwen3_5", {}, (HYBRID, SEES), mtp=True),
    "Qwen3_5MoeForCausalLM": Subject(
        "Qwen3_5Moe", {**ON_NPUS, **EXPERTS, "head_dim": 256}, (HYBRID, EXPERT), mtp=True
    ),
    "Qwen3_5MoeForConditionalGeneration": Subject(
        "Qwen3_5Moe", EXPERTS, (HYBRID, SEES, EXPERT), mtp=True
    ),
}
"""By the name that vLLM gives their class."""
ROTATED = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "mrope_section": [8, 12, 12],
    "mrope_interleaved": True,
    "partial_rotary_factor": 0.25,
}
"""Of a head of 256, as `make_model_that_sees` has it of a head of 16."""


@cache
def folder_of(name: str, one_kv_head: bool = False) -> Path:
    """Folder of a model."""
    subject, tokenizer = SUBJECTS[name], tiny_model.make_tokenizer()
    root = Path(tempfile.mkdtemp(prefix=f"npu-prep-{name}-"))
    sizes = {**subject.sizes, "num_key_value_heads": 1} if one_kv_head else dict(subject.sizes)
    if subject.has(SEES) and not subject.has(HYBRID):
        return make_demo("tiny_vision_model.py", "tiny-vision") / subject.family
    if subject.has(SEES):
        sizes = {**ON_NPUS, **sizes, "head_dim": 256, "rope_parameters": ROTATED}
        folder = make_model_that_sees(root / "model", subject.family, **sizes)
        add_mtp_layer(folder, subject.family)
        return folder
    sizes |= {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    if "vocab_size_per_layer_input" in sizes:
        sizes["vocab_size_per_layer_input"] = len(tokenizer)
    if subject.mtp:
        folder = make_mtp_model(root / "model", subject.family, **sizes)[0]
    else:
        folder = make_model(root / "model", subject.family, subject.head, **sizes)
    if name == "Qwen2ForProcessRewardModel":
        _give_rewards(folder, name)
    tokenizer.save_pretrained(folder)
    return folder


def _give_rewards(folder: Path, name: str) -> None:
    """Make a process reward model of a causal one: two numbers for each token, by two layers."""
    from safetensors.torch import load_file

    generator = torch.Generator().manual_seed(SEED)
    shapes = {"0.weight": (64, 64), "0.bias": (64,), "2.weight": (2, 64), "2.bias": (2,)}
    head = {
        f"score.{key}": torch.randn(shape, generator=generator) / 8 for key, shape in shapes.items()
    }
    save_weights(load_file(folder / "model.safetensors") | head, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": [name]}))


@cache
def int8_of(name: str) -> Path:
    """The same with int8 weights, whose inputs are rounded token by token."""
    out = Path(tempfile.mkdtemp(prefix="npu-prep-int8-")) / "model"
    quantize.quantize(folder_of(name), out, "compressed-tensors")
    return out


@cache
def adapter_of(name: str) -> Path:
    """Folder of an adapter for its attention.

    vLLM sorts Llama 4's queries and keys anew when it loads them, and adapters of these it doesn't.
    """
    folder = Path(tempfile.mkdtemp(prefix="npu-prep-lora-")) / "adapter"
    modules = ATTENTION[2:] if SUBJECTS[name].has(CHUNKS) else ATTENTION
    return make_adapter(folder, folder_of(name), seed=SEED, modules=modules)


@cache
def drafter_of(name: str, method: str) -> Path:
    """Folder of a drafter that isn't a part of its model."""
    root = Path(tempfile.mkdtemp(prefix="npu-prep-drafter-"))
    target, config = folder_of(name), json.loads((folder_of(name) / "config.json").read_text())
    if method != "draft_model":
        if SUBJECTS[name].has(SEES):  # a head of another model's guesses worse, which does as well
            sizes = {key: config["text_config"][key] for key in ("hidden_size", "vocab_size")}
            target = make_model(root / "target", "Llama", **sizes)
        return make_eagle_head(root / "head", target, method, head_dim=HEAD_SIZE)
    several_kinds = len(set(config.get("layer_types") or ())) > 1
    if SUBJECTS[name].mtp or several_kinds or SUBJECTS[name].has(CHUNKS):
        target = folder_of("LlamaForCausalLM")  # drafters are dense, of layers of one kind
    return disturb_model(root / "model", target, share=0.05)


def prompts(name: str) -> list[list[int]]:
    """Token ids of prompts; half of them begin as the first one does."""
    subject = SUBJECTS[name]
    long = subject.has(HYBRID) or subject.has(CHUNKS)
    lengths = [150, 3, 1, 270, 17, 140] if long else LENGTHS
    drawn, shared = prompts_of(SEED, lengths), 128 if long else 48
    asked = [
        drawn[0][:shared] + each if n % 2 and len(each) < 50 else each
        for n, each in enumerate(drawn)
    ]
    if name == "Qwen2ForProcessRewardModel":
        for each in asked:
            each[len(each) // 2] = each[-1] = ENDS_A_STEP
    return asked


@cache
def requests() -> list[Request]:
    """For models that see: with images, a video, and without."""
    image, question = make_image(SEED), "What is a slot mapping?"
    other, third = make_image(SEED + 1, 90, 60), make_image(SEED + 2, 90, 60)
    return [
        chat(image, question),
        chat(question),
        chat(other, third, " or ", other, third, other, question),  # more than a block of 128
        chat(make_video(SEED), question),
    ]


class Judge:
    """What transformers would have said, each token behind those before it, in float32."""

    def __init__(
        self, name: str, int8: bool = False, adapted: bool = False, one_kv_head: bool = False
    ) -> None:
        self.name, folder = name, folder_of(name, one_kv_head)
        self.reference: Reference | None = None
        if adapted:
            folder = _merged(name)
        if SUBJECTS[name].has(SEES):
            self.reference = Reference(folder)
            self.network = self.reference.model
            if int8:
                round_modules(self.network, tensors_in(int8_of(name)))
            return
        if int8:
            self.network = rounded_model(folder, int8_of(name))
            return
        self.network = float_model(folder)

    def margin(self, prompt: list[int] | Request, got: list[int], form: str | None = None) -> float:
        """How far tokens are from being the best ones, in deviations of a step's logits.

        0 if each is the best one; among those that a grammar allows, if there is a `form`.
        """
        logits = self._logits(prompt, got).double()
        spread = logits.std(1)
        if form is not None:
            logits = _allowed(form, got, logits)
        chosen = logits.gather(1, torch.tensor(got)[:, None])[:, 0]
        return float(((logits.amax(1) - chosen) / spread).max())

    @torch.no_grad()
    def _logits(self, prompt: list[int] | Request, got: list[int]) -> torch.Tensor:
        if isinstance(prompt, Request):
            assert self.reference is not None
            self.reference.answer(prompt, len(got), got)
            return torch.stack(self.reference.last_logits)
        return self.network(torch.tensor([prompt + got])).logits[0, len(prompt) - 1 : -1]

    @torch.no_grad()
    def embedded(self, prompt: list[int]) -> torch.Tensor:
        """Embeddings of a prompt as its first layer reads them, ``[len, hidden_size]``."""
        return self.network.get_input_embeddings()(torch.tensor(prompt))


@cache
def judge_of(
    name: str, int8: bool = False, adapted: bool = False, one_kv_head: bool = False
) -> Judge:
    """A `Judge`, made once."""
    return Judge(name, int8, adapted, one_kv_head)


def _merged(name: str) -> Path:
    """Folder of a model with its adapter in its weights, and its processor, if it has one."""
    model, merged = folder_of(name), Path(tempfile.mkdtemp(prefix="npu-prep-merged-")) / "merged"
    merge(model, adapter_of(name), merged)
    for file in model.iterdir():
        if file.is_file() and not (merged / file.name).exists():
            shutil.copy(file, merged)
    return merged


@cache
def _compiled(form: str) -> Any:
    import xgrammar

    tokenizer = tiny_model.make_tokenizer()
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=len(tokenizer))
    compiler = xgrammar.GrammarCompiler(info)
    if form == "json":
        return compiler.compile_json_schema(SCHEMA, any_whitespace=False, separators=(",", ":"))
    return compiler.compile_regex(REGEX) if form == "regex" else compiler.compile_grammar(GRAMMAR)


def _allowed(form: str, got: list[int], logits: torch.Tensor) -> torch.Tensor:
    """Logits of tokens that a grammar allows in their place; the others are -inf."""
    import xgrammar

    matcher, logits = xgrammar.GrammarMatcher(_compiled(form)), logits.float()
    bits = xgrammar.allocate_token_bitmask(1, logits.shape[1])
    for row, token in zip(logits, got, strict=True):
        matcher.fill_next_token_bitmask(bits)
        xgrammar.apply_token_bitmask_inplace(row[None], bits)
        assert matcher.accept_token(token), f"{form}: token {token} is not allowed there"
    return logits.double()


def pooled_by_transformers(
    name: str, asked: list[list[int]], int8: bool = False
) -> tuple[str, list[torch.Tensor]]:
    """Task of a model that pools, or is made to, and what transformers returns for each prompt."""
    import transformers

    folder, subject = folder_of(name), SUBJECTS[name]
    settings = {"dtype": torch.float32, "attn_implementation": "eager"}
    if subject.head == "ForSequenceClassification":
        loader: Any = transformers.AutoModelForSequenceClassification
        task, read = "classify", lambda out, ids: out.logits[0].softmax(-1)
    elif name == "Qwen2ForProcessRewardModel":
        loader, task, read = transformers.AutoModel, "token_classify", _rewards
    else:
        loader, task, token = transformers.AutoModel, "embed", 0 if subject.head == "Model" else -1
        read = lambda out, ids: normalized(out.last_hidden_state[0, token])  # noqa: E731
    network = loader.from_pretrained(folder, **settings).eval()
    if int8:
        round_modules(network, tensors_in(int8_of(name)))
    if subject.has(SEES):
        network = network.language_model
    with torch.no_grad():
        return task, [read(network(input_ids=torch.tensor([ids])), ids) for ids in asked]


def _rewards(out: Any, ids: list[int]) -> torch.Tensor:
    from safetensors.torch import load_file

    weights = load_file(folder_of("Qwen2ForProcessRewardModel") / "model.safetensors")
    linear = torch.nn.functional.linear
    hidden = linear(out.last_hidden_state[0], weights["score.0.weight"], weights["score.0.bias"])
    logits = linear(hidden.relu(), weights["score.2.weight"], weights["score.2.bias"])
    return logits.softmax(-1)[torch.tensor(ids) == ENDS_A_STEP]
