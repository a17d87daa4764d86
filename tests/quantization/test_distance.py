"""How far rounding takes the trained demo model from its float weights."""

import pytest
import torch

from examples import tiny_model
from tests.helpers.demo import make_demo
from tests.helpers.quantized import QUANTIZE, rounded_model

FORMS = {"dynamic": ("compressed-tensors", False), "static": ("modelslim", True)}
AGREE = {"dynamic": 0.99, "static": 0.8}
"""Share of tokens after which both models expect the same one."""


@pytest.mark.parametrize("form", FORMS)
def test_the_demo_model_answers_almost_as_before(tmp_path, form):
    """Its own questions and answers, which it knows by heart."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = make_demo("tiny_model.py", "tiny-qwen3")
    QUANTIZE(folder, tmp_path / "int8", *FORMS[form])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    exact = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    rounded = rounded_model(folder, tmp_path / "int8")
    same, away = [], []
    for question, answer in tiny_model.exchanges()[:12]:
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        ids = tokenizer.apply_chat_template(turns, return_tensors="pt", return_dict=True)
        with torch.no_grad():
            ours, theirs = rounded(**ids).logits[0], exact(**ids).logits[0]
        same.append((ours.argmax(-1) == theirs.argmax(-1)).float())
        away.append((ours - theirs).abs().amax(-1) / theirs.std(-1))
    share, worst = torch.cat(same).mean().item(), torch.cat(away)
    print(f"{form}: {share:.1%} the same, logits {worst.median():.3f} of a deviation apart")
    assert share >= AGREE[form]
    assert worst.median() > 1e-3, "rounding did something"
