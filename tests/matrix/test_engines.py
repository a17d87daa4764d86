"""Engines that fill cells on purpose: what goes into one, and that only agreement leaves a mark."""

import json
import random
import sys
import time
from itertools import combinations

import pytest
import torch

from tests.matrix import combined, engines, subjects
from tests.matrix.cells import FALLBACK, FEATURES, MTP
from tests.matrix.combined import agrees
from tests.matrix.engines import Filler, Worker, halves
from tests.matrix.plan import RANKS, engines_for, go_together
from tests.matrix.results import Matrix, exists
from tests.matrix.sense import POOLS, SEES, without_sense
from tests.matrix.subjects import SUBJECTS, judge_of
from vllm_npu_prep.compat.releases import installed_vllm

NAMES = [feature.name for feature in FEATURES]
TABLE = (installed_vllm(), FALLBACK, "V1")


def test_features_are_shared_out_among_engines_that_can_have_them(seed):
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
    assert {name for name, each in SUBJECTS.items() if each.has(subjects.SEES)} == set(SEES)
    assert {name for name, each in SUBJECTS.items() if each.has(subjects.POOLS)} == set(POOLS)
    assert without_sense("BertModel", MTP) and not without_sense("Qwen3ForCausalLM", MTP)


class Card:
    """Answers as a worker does, about engines of which some features fail or are left out."""

    def __init__(self, fails: set[str] = frozenset(), leaves_out: set[str] = frozenset()) -> None:
        self.fails, self.leaves_out, self.asked = fails, leaves_out, []

    def ask(self, model, runner, features):
        self.asked.append(features)
        if self.fails & {*features, "plain"}:
            return {"error": "it fell over"}
        cell = dict(zip(("release", "device", "runner"), TABLE)) | {"model": model}
        has = [each for each in features if each not in self.leaves_out]
        return {"cells": [cell | {"features": [*has, "chunked prefill"], "config": {"a": 1}}]}


def filled_by(card: Card, tmp_path, wanted: list[str], monkeypatch) -> tuple[set, dict, Filler]:
    filler = Filler(Matrix(), time.time() + 100, tmp_path / "cells.jsonl")
    filler.commit, filler.package = "c" * 10, "p" * 10
    told = {name: {} if name in wanted else {"refused": ["x"]} for name in NAMES}
    filler.matrix.answers[TABLE, "Qwen3ForCausalLM"] = told
    assert filler.row(TABLE, "Qwen3ForCausalLM", False, card.ask)
    matrix = Matrix()
    lines = [json.loads(line) for line in (tmp_path / "cells.jsonl").read_text().splitlines()]
    matrix.merge(lines, "p" * 10)
    return {cell[2] for cell in matrix.filled()}, {c[2]: t for c, t in matrix.tried.items()}, filler


def test_what_agrees_is_filled_and_what_fails_alone_is_kept_with_its_error(tmp_path, monkeypatch):
    wanted = ["float32", "LoRA", "ngram", "sleep mode", "prefix caching"]
    card = Card(fails={"ngram"})
    filled, tried, filler = filled_by(card, tmp_path, wanted, monkeypatch)
    assert filled == {*wanted, "chunked prefill"} - {"ngram"}
    assert {name: line["tried"] for name, line in tried.items()} == {"ngram": "it fell over"}
    asked = len(card.asked)
    assert filler.row(TABLE, "Qwen3ForCausalLM", False, card.ask)
    assert len(card.asked) == asked, "nothing is tried twice"
    assert exists(combined.name_of("Qwen3ForCausalLM", FALLBACK, "V1", ["LoRA"]))


def test_a_feature_that_vllm_leaves_out_is_no_mark(tmp_path, monkeypatch):
    card = Card(leaves_out={"sleep mode"})
    filled, tried, _ = filled_by(card, tmp_path, ["LoRA", "sleep mode"], monkeypatch)
    assert filled == {"LoRA", "chunked prefill"} and set(tried) == {"sleep mode"}
    assert card.asked[-1] == ["sleep mode"], "alone, too"


def test_a_model_that_fails_anyway_is_not_tried_feature_by_feature(tmp_path, monkeypatch):
    card = Card(fails={"plain"})
    filled, tried, _ = filled_by(card, tmp_path, ["LoRA", "ngram", "pooling"], monkeypatch)
    assert not filled and set(tried) == {"LoRA", "ngram", "pooling"}
    assert len(card.asked) == 2 and card.asked[1] == []


def test_time_that_is_up_leaves_the_rest_for_the_next_slice(tmp_path):
    filler = Filler(Matrix(), time.time() - 1, tmp_path / "cells.jsonl")
    filler.matrix.answers[TABLE, "Qwen3ForCausalLM"] = {}
    card = Card()
    assert not filler.row(TABLE, "Qwen3ForCausalLM", False, card.ask) and not card.asked


def test_an_error_that_speaks_of_features_parts_them_from_the_others():
    features = ["sleep mode", "LoRA", "EAGLE-3", "float32"]
    assert halves(features, "Model does not support EAGLE3 interface")[0] == ["EAGLE-3"]
    assert halves(features, "no LoRA yet") == [["LoRA"], ["sleep mode", "EAGLE-3", "float32"]]
    assert halves(features, "?") == [features[:2], features[2:]]


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


def test_a_worker_that_dies_or_says_nothing_is_replaced(monkeypatch):
    """The first process takes the question with it; what it left behind is not the next one's."""
    worker, started = Worker(FALLBACK), []
    scripts = ["import sys; sys.exit(3)", "print(input()); print('@@ {\"cells\": []}')"]

    def start(command, **settings):
        started.append(command)
        return popen([sys.executable, "-c", scripts[len(started) - 1]], **settings)

    popen = engines.subprocess.Popen
    monkeypatch.setattr(engines.subprocess, "Popen", start)
    first = worker.ask("M", "V1", [])
    second = worker.ask("M", "V1", [])
    monkeypatch.undo()
    worker.end()
    assert "died" in first and second == {"cells": []} and len(started) == 2
