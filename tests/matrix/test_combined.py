"""What goes into an engine of the matrix, and that only agreement leaves a mark."""

import random
from itertools import combinations

import pytest
import torch

from tests.matrix import plan, subjects
from tests.matrix.cells import FALLBACK, FEATURES, MTP
from tests.matrix.combined import agrees
from tests.matrix.plan import RANKS, engines_for, engines_of, go_together, without_sense
from tests.matrix.results import Matrix, table_of
from tests.matrix.subjects import SUBJECTS, judge_of
from vllm_npu_prep.compat.releases import installed_vllm

NAMES = [feature.name for feature in FEATURES]


def test_features_go_to_engines_that_can_have_them(seed):
    rng = random.Random(seed)
    drawn = [rng.sample(NAMES, rng.randrange(len(NAMES))) for _ in range(200)]
    for wanted in (NAMES, *drawn):
        engines = engines_for(wanted)
        assert sorted(f for each in engines for f in each) == sorted(wanted)
        for each in engines:
            assert all(go_together(*pair) for pair in combinations(each, 2)), each
        of_ranks = [bool(set(each) & RANKS) for each in engines]
        assert of_ranks == sorted(of_ranks), "engines of several ranks come last"
    assert len(engines_for(NAMES)) <= 13
    assert not go_together("ngram", MTP) and go_together("LoRA", "sleep mode")
    assert not go_together("LoRA", "tensor parallelism")


def test_every_row_of_the_matrix_has_a_model_that_can_be_made():
    rows = {line["model"] for line in Matrix.read().engines}
    assert rows <= set(SUBJECTS)
    assert {name for name, each in SUBJECTS.items() if each.has(subjects.SEES)} == set(plan.SEES)
    assert {name for name, each in SUBJECTS.items() if each.has(subjects.POOLS)} == set(plan.POOLS)
    assert without_sense("BertModel", MTP) and not without_sense("Qwen3ForCausalLM", MTP)


def test_engines_fill_what_is_served_and_still_empty():
    own = "tests/matrix/combined.py::agrees[M, CPU fallback, V1, LoRA]"
    line = {"test": own, "outcome": "passed", "release": installed_vllm(), "device": FALLBACK}
    line |= {"runner": "V1", "model": "M", "features": ["LoRA", "float32"]}
    matrix = Matrix([line], {("M", FALLBACK): {}})
    matrix.answers[table_of(line), "M"] = {
        **{name: {} for name in ("LoRA", "float32", "ngram", "sleep mode", "EAGLE")},
        "MTP": {"refused": ["mtp"]},
    }
    matrix.tried[table_of(line), "M", "EAGLE"] = {"tried": "no"}
    assert engines_of(matrix, FALLBACK) == [
        "M, CPU fallback, V1, LoRA",
        "M, CPU fallback, V1, ngram, sleep mode",
    ]


class OneOff:
    """A judge to whom one token of each answer is another one."""

    def __init__(self, judge) -> None:
        self.judge = judge

    def __getattr__(self, name):
        return getattr(self.judge, name)

    def margin(self, prompt, got, form=None):
        return self.judge.margin(prompt, [*got[:3], got[3] ^ 1, *got[4:]], form)


def test_a_mark_comes_only_from_answers_that_agree(monkeypatch):
    """The same engine, once with the answers it gave and once with a wrong token in them."""
    asked = ("Qwen3ForCausalLM", FALLBACK, "V1", ["LoRA", "synchronous scheduling"])
    with monkeypatch.context() as planted:
        planted.setattr(subjects, "judge_of", lambda *args, **form: OneOff(judge_of(*args, **form)))
        with pytest.raises(AssertionError, match="an answer differs"):
            agrees(*asked)
    (cell,) = agrees(*asked)
    assert cell["model"] == asked[0] and set(asked[3]) <= set(cell["features"])


def test_a_pooling_model_with_another_result_leaves_no_mark(monkeypatch):
    of_transformers = subjects.pooled_by_transformers

    def off(*args):
        task, rows = of_transformers(*args)
        return task, [*rows[:-1], rows[-1] + 0.01]

    with monkeypatch.context() as planted:
        planted.setattr(subjects, "pooled_by_transformers", off)
        with pytest.raises(AssertionError, match="not close"):
            agrees("BertModel", FALLBACK, "V1", [])
    (cell,) = agrees("BertModel", FALLBACK, "V1", [])
    assert "pooling" in cell["features"]


def test_the_judge_reads_each_token_behind_those_before_it():
    judge, prompt = judge_of("Qwen3ForCausalLM"), subjects.prompts("Qwen3ForCausalLM")[3]
    best: list[int] = []
    for _ in range(4):
        logits = judge.network(torch.tensor([prompt + best])).logits[0, -1]
        best.append(int(logits.argmax()))
    assert judge.margin(prompt, best) == 0.0
    assert judge.margin(prompt, [*best[:2], best[2] ^ 1, best[3]]) > 0.1
    with pytest.raises(AssertionError, match="not allowed"):
        judge.margin(prompt, best, "json")
