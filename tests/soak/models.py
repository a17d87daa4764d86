"""Models of `tests.soak`, what they are asked, and what transformers says to it."""

import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from examples import quantize
from tests.helpers.demo import make_demo
from tests.helpers.drafters import disturb_model, make_eagle_head
from tests.helpers.engine import make_model
from tests.helpers.huggingface import greedy_tokens
from tests.helpers.hybrids import EXPERTS, GATED_DELTA, ON_NPUS, QWEN3_NEXT
from tests.helpers.latent import LATENT, LATENT_ON_NPUS, V3_EXPERTS, V3_EXPERTS_ON_NPUS
from tests.helpers.lora import make_adapter, merge
from tests.helpers.mixtures import MIXTURES
from tests.helpers.mtp import make_mtp_model
from tests.helpers.prompts import prompts_of
from tests.helpers.quantized import rounded_model
from tests.helpers.vision import Reference, Request, chat, make_image, make_video
from tests.npu.only_some import HEAD_SIZE

CPU, NPU = "cpu", "npu"
MAX_TOKENS = 16
ADAPTERS = 2
SEED = 33
HYBRIDS = ("Qwen3Next", "Qwen3_5")
LATENT_ONES = ("DeepseekV3",)
VISION = {"Qwen2.5-VL": "qwen2_5_vl", "Qwen3-VL": "qwen3_vl"}
"""Models that see, of `examples/tiny_vision_model.py`."""
WITH_MTP = (*HYBRIDS, *LATENT_ONES)
"""Families whose model has an MTP layer, used or not."""
WITH_EXPERTS = ("Qwen3Moe", "Glm4Moe", "DeepseekV3", "Qwen3Next")
CONFIGS: dict[str, dict[str, dict[str, Any]]] = {
    CPU: {
        "Qwen3": {},
        "Qwen3Moe": MIXTURES["Qwen3Moe"],
        "Glm4Moe": MIXTURES["Glm4Moe"],
        "DeepseekV3": {**LATENT, **V3_EXPERTS},
        "Qwen3Next": QWEN3_NEXT,
        "Qwen3_5": GATED_DELTA,
    },
    NPU: {
        "Qwen3": {},
        "Qwen3Moe": MIXTURES["Qwen3Moe"],
        "Glm4Moe": MIXTURES["Glm4Moe"],
        "DeepseekV3": {**LATENT_ON_NPUS, **V3_EXPERTS_ON_NPUS, "q_lora_rank": 96},
        # A state fills the K of 128 tokens
        "Qwen3Next": {**ON_NPUS, **EXPERTS, "head_dim": 256},
        "Qwen3_5": {**ON_NPUS, "head_dim": 256},
    },
}
"""Sizes by device and family: those of cards are what the operators take."""
FAMILIES = (*CONFIGS[CPU], *VISION)
LENGTHS = [70, 3, 1, 40, 17, 90, 28, 9, 55, 22]
LONG = [150, 3, 1, 40, 170, 270, 28, 9, 140, 22]
"""Of prompts; the second ones for blocks of 128 tokens."""


@cache
def model_of(device: str, family: str) -> Path:
    if family in VISION:
        return make_demo("tiny_vision_model.py", "tiny-vision") / VISION[family]
    root, sizes = Path(tempfile.mkdtemp(prefix=f"npu-prep-{family}-")), CONFIGS[device][family]
    if device == NPU:  # random weights as they are leave 16 bits more often in doubt
        sizes = {**sizes, "spread": 0.1, "embedding_scale": 20}
    if family in WITH_MTP:
        return make_mtp_model(root, family, **sizes)[0]
    return make_model(root / family, family, **sizes)


@cache
def int8_of(device: str, family: str, form: str) -> Path:
    """The same with int8 weights, in a format of `examples/quantize.py`."""
    folder = Path(tempfile.mkdtemp(prefix=f"npu-prep-{family}-int8-"))
    quantize.quantize(model_of(device, family), folder, form)
    return folder


@cache
def drafter_of(device: str, family: str, method: str) -> Path:
    """Folder of a drafter that isn't a part of its model."""
    target, folder = model_of(device, family), Path(tempfile.mkdtemp(prefix=f"npu-prep-{method}-"))
    if method == "draft_model":
        return disturb_model(folder, target, share=0.05)
    return make_eagle_head(folder, target, method, head_dim=HEAD_SIZE if device == NPU else None)


@cache
def adapter_of(device: str, number: int) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="npu-prep-lora-")) / "adapter"
    return make_adapter(folder, model_of(device, "Qwen3"), seed=number)


@cache
def prompts(device: str, family: str) -> list[Any]:
    """As engines take them; half of those of token ids begin as the first one does."""
    if family in VISION:
        return [request.prompt() for request in requests()]
    is_long = device == NPU and family in HYBRIDS
    drawn, shared = prompts_of(SEED, LONG if is_long else LENGTHS), 128 if is_long else 48
    return [
        {"prompt_token_ids": drawn[0][:shared] + each if n % 2 and len(each) < 50 else each}
        for n, each in enumerate(drawn)
    ]


@cache
def requests() -> list[Request]:
    """With images, a video, and without."""
    first, question = make_image(SEED), "What is a slot mapping?"
    second = make_image(SEED + 1, 90, 60)
    return [
        chat(first, question),
        chat(question),
        chat(second, " or ", first, question),
        chat(make_video(SEED), question),
        chat("Why?"),
        chat(question, second),
    ]


class Reader:
    """What transformers makes of a model's prompts: greedy tokens of each, and `logits_of` a prompt
    and tokens behind it, ``[tokens, vocab_size]``."""

    def __init__(
        self,
        asked: list[Any],
        tokens: list[list[int]],
        logits_of: Callable[[Any, list[int]], torch.Tensor],
    ) -> None:
        self.asked, self.tokens, self._logits_of = asked, tokens, logits_of

    def margin(self, prompt: int, got: list[int]) -> float:
        """How far tokens are from being the best ones, each behind those before it.

        In standard deviations of a step's logits, of the worst token; 0 if all are the best.
        """
        if got == self.tokens[prompt][: len(got)]:
            return 0.0
        return self.margin_behind(self.asked[prompt], got)

    def margin_behind(self, prompt: Any, got: list[int]) -> float:
        """The same of a prompt that is none of `asked`."""
        return max(self.margins_behind(prompt, got))

    def margins_behind(self, prompt: Any, got: list[int]) -> list[float]:
        """The same of each token."""
        logits = self._logits_of(prompt, got).double()
        chosen = logits.gather(1, torch.tensor(got)[:, None])[:, 0]
        margins: list[float] = ((logits.amax(1) - chosen) / logits.std(1)).tolist()
        return margins


def reader_of(network: Any, asked: list[Any]) -> Reader:
    """A reader by a model of transformers that takes token ids."""
    ids = [prompt["prompt_token_ids"] for prompt in asked]

    @torch.no_grad()
    def logits_of(prompt: list[int], got: list[int]) -> torch.Tensor:
        return network(torch.tensor([prompt + got])).logits[0, len(prompt) - 1 : -1]

    return Reader(ids, greedy_tokens(network, ids, MAX_TOKENS), logits_of)


def float_model(folder: Path) -> Any:
    """transformers' model in float32."""
    from transformers import AutoModelForCausalLM, logging

    logging.set_verbosity_error()  # layers that draft aren't transformers'
    made = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    return made.eval()


@cache
def answers(device: str, family: str, int8: str = "", ranks: int = 1, adapter: int = 0) -> Reader:
    """What transformers says, with an adapter perhaps (0: none).

    `ranks` of tensor parallelism round their slices of inputs of int8 layers.
    """
    folder = model_of(device, family)
    if family in VISION:
        return _answers_of_images(folder)
    asked = prompts(device, family)
    if int8:
        return reader_of(rounded_model(folder, int8_of(device, family, int8), ranks), asked)
    if adapter:
        merged = Path(tempfile.mkdtemp()) / "merged"
        folder = merge(folder, adapter_of(device, adapter), merged)
    return reader_of(float_model(folder), asked)


def _answers_of_images(folder: Path) -> Reader:
    reference = Reference(folder)
    tokens = [answer.tokens for answer in reference.answers(requests(), MAX_TOKENS)]

    def logits_of(prompt: Request, got: list[int]) -> torch.Tensor:
        reference.answer(prompt, len(got), got)
        return torch.stack(reference.last_logits)

    return Reader(requests(), tokens, logits_of)
