"""Outputs that are forced into a form, and a tiny random model that can spell them."""

import json
import re
import sys
from pathlib import Path
from typing import Any

from tests.helpers.engine import make_model

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import tiny_model

SCHEMA = {
    "type": "object",
    "properties": {
        "form": {"enum": ["dense", "compressed"]},
        "rows": {"type": "integer", "minimum": 0, "maximum": 4096},
        "exact": {"type": "boolean"},
    },
    "required": ["form", "rows", "exact"],
    "additionalProperties": False,
}
REGEX = r"[A-F]{4}-[0-9]{3}(yes|no)"
GRAMMAR = 'root ::= ("rows" | "columns") " of " name\nname ::= [a-z] [a-z] [a-z] "."'
KINDS = ("json", "regex", "grammar")


def make_text_model(folder: Path, **config: Any) -> Path:
    """A tiny random Qwen3 beside a tokenizer of its size, which ends with the tokenizer's end."""
    tokenizer = tiny_model.make_tokenizer()
    end = {"eos_token_id": tokenizer.eos_token_id}
    make_model(folder, vocab_size=len(tokenizer), **end, **config)
    tokenizer.save_pretrained(folder)
    return folder


def forced(kind: str | None, max_tokens: int) -> Any:
    """Greedy sampling parameters: of a kind that is forced into a form, or plain for None."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    form = {"json": SCHEMA, "regex": REGEX, "grammar": GRAMMAR}.get(kind or "")
    return SamplingParams(
        temperature=0,
        max_tokens=max_tokens,
        ignore_eos=kind is None,
        structured_outputs=kind and StructuredOutputsParams(**{kind: form}),
    )


def has_form(kind: str, text: str) -> bool:
    """Whether the text is what its kind asks for, to the end."""
    if kind != "json":
        form = {"regex": REGEX, "grammar": r"(rows|columns) of [a-z]{3}\."}[kind]
        return re.fullmatch(form, text) is not None
    value = json.loads(text)
    return (
        set(value) == {"form", "rows", "exact"}
        and value["form"] in ("dense", "compressed")
        and isinstance(value["exact"], bool)
        and 0 <= value["rows"] <= 4096
    )


def compiler_of(tokenizer: Any) -> Any:
    """xgrammar's compiler for a tokenizer of transformers."""
    import xgrammar

    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=len(tokenizer))
    return xgrammar.GrammarCompiler(info)


def allowed(compiled: Any, got: list[int], logits: Any) -> Any:
    """Logits ``[len(got), vocab_size]`` of what a grammar allows; the others are -inf.

    Raises
    ------
    AssertionError
        If it doesn't allow a token that was got.
    """
    import xgrammar

    matcher, logits = xgrammar.GrammarMatcher(compiled), logits.float()
    bits = xgrammar.allocate_token_bitmask(1, logits.shape[1])
    for row, token in zip(logits, got, strict=True):
        matcher.fill_next_token_bitmask(bits)
        xgrammar.apply_token_bitmask_inplace(row[None], bits)
        assert matcher.accept_token(token), f"token {token} is not allowed there"
    return logits.double()
