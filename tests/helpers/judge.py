"""What transformers would have said in an engine's place, each token behind those before it."""

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from examples import tiny_model
from tests.helpers.demo import new_folder
from tests.helpers.grammars import REGEX, SCHEMA, allowed, compiler_of
from tests.helpers.huggingface import load
from tests.helpers.lora import merge
from tests.helpers.models import SEES, adapter_of, folder_of, int8_of, is_a
from tests.helpers.quantized import round_modules, tensors_in
from tests.helpers.vision import Reference, Request


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


class Judge:
    """A model of `tests.helpers.models` by transformers, in float32.

    `int8` names the format of a copy that the engine has, `keep` what is not rounded in it. `ranks`
    of tensor parallelism round their slices of inputs of int8 layers. `adapter` is the number of
    one, 0 for none.
    """

    def __init__(
        self,
        name: str,
        int8: str = "",
        ranks: int = 1,
        adapter: int = 0,
        one_kv_head: bool = False,
        keep: tuple[str, ...] = (),
    ) -> None:
        folder = _merged(name, adapter) if adapter else folder_of(name, one_kv_head)
        self.reference = Reference(folder) if is_a(SEES, name) else None
        how = {"experts_implementation": "eager"} if int8 else {}
        self.network = self.reference.model if self.reference else load(folder, **how)
        if int8:
            round_modules(self.network, tensors_in(int8_of(name, int8, keep)), ranks=ranks)

    @torch.no_grad()
    def margins(self, prompt: Any, got: list[int], form: str | None = None) -> list[float]:
        """How far each token is from being the best one, in deviations of its step's logits.

        0 if it is the best one; among those that a grammar allows, if there is a `form`.
        """
        if not got:
            return []
        if isinstance(prompt, Request):
            assert self.reference is not None
            logits = self.reference.logits_behind(prompt, got).double()
        else:
            output = self.network(torch.tensor([prompt + got]))
            logits = output.logits[0, len(prompt) - 1 : -1].double()
        spread = logits.std(1)
        if form is not None:
            logits = allowed(_compiled(form), got, logits)
        return margins_of(logits, got, spread)

    @torch.no_grad()
    def embedded(self, prompt: list[int]) -> torch.Tensor:
        """Embeddings of a prompt as its first layer reads them, ``[len, hidden_size]``."""
        return self.network.get_input_embeddings()(torch.tensor(prompt))


def margins_of(logits: torch.Tensor, got: list[int], spread: torch.Tensor) -> list[float]:
    """How far tokens are from the best of their rows of ``[len, vocab]``, in units of ``[len]``."""
    chosen = logits.gather(1, torch.tensor(got)[:, None])[:, 0]
    margins: list[float] = ((logits.amax(1) - chosen) / spread).tolist()
    return margins


judge_of: Callable[..., Judge] = cache(Judge)
"""A `Judge`, made once."""


def _merged(name: str, adapter: int) -> Path:
    """Folder of a model with an adapter in its weights, and its processor, if it has one."""
    model, merged = folder_of(name), new_folder("merged") / "merged"
    merge(model, adapter_of(name, adapter), merged)
    for file in model.iterdir():
        if file.is_file() and not (merged / file.name).exists():
            shutil.copy(file, merged)
    return merged


@cache
def _compiled(form: str) -> Any:
    compiler = compiler_of(tiny_model.make_tokenizer())
    if form == "json":
        return compiler.compile_json_schema(SCHEMA, any_whitespace=False, separators=(",", ":"))
    return compiler.compile_regex(REGEX)
