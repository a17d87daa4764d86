"""Engines that `make soak` holds against transformers: what is drawn, and one of each kind."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.huggingface import greedy_tokens
from tests.helpers.judge import Judge, judge_of
from tests.helpers.models import SEES, prompts
from tests.resume.tree import PRODUCTS, ROOT
from tests.soak import __main__ as soak
from tests.soak import engines
from tests.soak.kinds import (
    CHOOSES_TOO,
    CPU,
    DRAFTERS,
    FILES,
    HOST,
    LAYOUTS,
    MODES,
    NPU,
    QWEN3,
    SEES_TOO,
    TASKS,
    Kind,
    draw,
)

DRAWN = {device: [draw(seed, device) for seed in range(800)] for device in (CPU, NPU)}
DEEPSEEK, QWEN3_5 = "DeepseekV3ForCausalLM", "Qwen3_5ForCausalLM"
QWEN3_VL = "Qwen3VLForConditionalGeneration"


def kept(device: str) -> list[int]:
    """Seeds that failed once."""
    return [int(line) for line in Path(soak.SEEDS[device]).read_text().split()]


def first(device=CPU, layout="one rank", **having) -> Kind:
    """The first engine drawn that has all of this, and generates unless it is to pool."""
    having = {"layout": layout, "pools": "", **having}
    return next(
        k for k in DRAWN[device] if all(getattr(k, name) == value for name, value in having.items())
    )


KINDS = {
    "adapters": first(adapters=True, runner="V1", drafts="", connector=""),
    "adapters on the host": first(adapters=True, runner="V2", connector=HOST),
    "sleep": first(sleeps=True, model=DEEPSEEK, int8=""),
    "files": first(connector=FILES, runner="V1"),
    "host": draw(113),  # of a hybrid on V2; prompts of its first 60 steps are found again
    "hybrid": first(model=QWEN3_5, runner="V1", drafts="mtp", int8=""),
    "V2": first(runner="V2", model="Qwen3NextForCausalLM", drafts="mtp", int8=""),
    "int8": first(runner="V2", model=CHOOSES_TOO[DEEPSEEK], int8="modelslim"),
    "images": first(runner="V2", model=QWEN3_VL, drafts="eagle3"),
    "images and states": first(runner="V2", model=SEES_TOO[QWEN3_5], drafts="mtp"),
    "images in the prefix cache": next(
        kind
        for kind in DRAWN[CPU]
        if kind.model == QWEN3_VL and kind.runner == "V1" and not kind.drafts
        if kind.settings["enable_prefix_caching"] and kind.settings["mm_processor_cache_gb"] < 1
    ),
    "pooling": next(
        kind
        for kind in DRAWN[CPU]
        if kind.pools == "token_embed" and kind.runner == "V1"
        if kind.settings["max_num_batched_tokens"] == 24
    ),
    "ranks": first(layout="tp2", runner="V2", model=QWEN3),
    "stages": first(layout="pp2"),
    "engines": first(layout="dp2", sleeps=True, model="Glm4MoeForCausalLM"),
    **{f"seed {seed}": draw(seed) for seed in kept(CPU)},
}


@pytest.mark.parametrize("device", DRAWN)
def test_everything_is_drawn(device):
    """Each feature with each runner, as far as start-up accepts it."""
    features = {f"model {each}" for each in (*DRAFTERS, *SEES_TOO.values())}
    features |= {f"layout {each}" for each in LAYOUTS}
    features |= {f"connector {FILES}", f"connector {HOST}", *(f"graphs {mode}" for mode in MODES)}
    features |= {"scheduler batched", "scheduler upstream", "adapters", "sleep", "sessions"}
    features |= {f"drafts {method}" for method in ("ngram", "mtp", "eagle", "draft_model")}
    features |= {f"pools {task}" for task in TASKS}
    features |= {"int8 modelslim", "int8 compressed-tensors", "expert parallelism"}
    if device == CPU:
        features |= {f"model {each}" for each in CHOOSES_TOO.values()}
    if device == NPU:
        features |= {"attention fia", "attention atb", "dtype float16", "dtype bfloat16"}
    with_states = {"drafts mtp", "sleep", f"connector {HOST}", "layout tp2"}
    beside_images = {f"drafts {method}" for method in ("ngram", "mtp", "eagle", "eagle3")}
    for runner in ("V1", "V2"):
        drawn = [kind.parts() for kind in DRAWN[device] if kind.runner == runner]
        assert set().union(*drawn) >= features, runner
        assert set().union(*(parts for parts in drawn if "hybrid" in parts)) >= with_states
        drafts = {each for parts in drawn if SEES in parts for each in parts if "drafts" in each}
        assert drafts == beside_images | ({"drafts draft_model"} if runner == "V2" else set())
        for having in ({"drafts ngram"}, {"expert parallelism", "sleep"}):
            assert any({"layout dp2", *having} <= parts for parts in drawn), runner
    options = [kind.settings["additional_config"]["npu_prep"] for kind in DRAWN[device]]
    assert all(each["check"] == "full" for each in options)


def test_what_start_up_refuses_is_not_drawn():
    for kind in (*DRAWN[CPU], *DRAWN[NPU]):
        drafts, on_v2 = bool(kind.drafts), kind.runner == "V2"
        assert not (drafts and kind.connector) or kind.drafts == "ngram"
        assert not (kind.drafts == "draft_model" and kind.sees and not on_v2)
        asynchronous = kind.settings["async_scheduling"]
        assert not (kind.layout == "pp2" and (drafts or (asynchronous and not on_v2)))
        assert not (kind.drafts == "ngram" and asynchronous)
        assert not (kind.connector == FILES and (kind.adapters or kind.model == QWEN3_5))


@pytest.mark.parametrize("name", KINDS)
def test_an_engine_of_each_kind_agrees(name):
    kind = KINDS[name]
    count = engines.play(kind, 60, alone=False)
    print(kind, dict(count))
    assert count["steps"] >= 60 and count["finished"] > 0
    assert kind.int8 or count["close calls"] == 0
    assert not kind.sleeps or count["sleeps"] > 0
    assert count["life-cycle calls"] > 0
    assert not kind.sessions or count["parts of sessions"] > 0
    assert not kind.adapters or count["adapters overwritten"] > 0
    assert not kind.sees or count["refused"] > 0
    assert not kind.pools or count["preempted"] > 0
    if kind.layout == "one rank":
        assert count["requests reset"] + count["caches in use"] > 0
        assert not kind.connector or count["tokens that a connector had"] > 0
        # Models that see have drafters that are seldom right: of other models, or hardly fitted
        seldom = kind.sees and kind.drafts != "ngram"
        verified = ("rejected",) if seldom else ("accepted", "partly")
        assert not kind.drafts or any(count[f"drafts {each}"] for each in verified)


def test_nothing_of_the_first_engine_of_a_process_outlives_it():
    """The engines above end in a process that keeps others."""
    first_one = "from tests.soak import engines, kinds; engines.play(kinds.draw(2), 20)"
    done = subprocess.run([sys.executable, "-c", first_one], cwd=ROOT, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()[-500:]


def test_a_wrong_token_is_found_and_its_seed_is_kept(monkeypatch, tmp_path, capsys):
    """Where transformers would say another one: of one prompt in two, the second token."""
    monkeypatch.setitem(soak.SEEDS, CPU, tmp_path / "seeds.txt")
    margins, doubted = Judge.margins, prompts(QWEN3)[::2]

    def of_transformers(self, prompt, got, form=None):
        right = margins(self, prompt, got, form)
        return [right[0], 1.0, *right[2:]] if prompt in doubted and len(got) > 1 else right

    monkeypatch.setattr(Judge, "margins", of_transformers)
    plain = {"drafts": "", "connector": "", "int8": "", "adapters": False, "sleeps": False}
    seed = first(model=QWEN3, runner="V1", **plain).seed
    outcome, recorded = soak.Engines().play(seed, 200)
    assert outcome == "failed" and "AssertionError: behind [" in recorded["error"]
    assert (tmp_path / "seeds.txt").read_text() == f"{seed}\n"
    said = capsys.readouterr()
    assert f"seed {seed} FAILED" in said.out and "1.000 standard deviations" in said.err


@pytest.mark.parametrize(("name", "int8"), [(QWEN3, ""), (QWEN3, "modelslim"), (QWEN3_VL, "")])
def test_how_far_a_token_is_from_the_best_is_told(name, int8):
    """0 for transformers' own; what follows from a wrong one is looked at, too."""
    judge, prompt = judge_of(name, int8), prompts(name)[2]
    if judge.reference is not None:
        best = judge.reference.answer(prompt, 5).tokens
    else:
        best = greedy_tokens(judge.network, [prompt], 5)[0]
    assert judge.margins(prompt, best) == [0.0] * 5 and judge.margins(prompt, []) == []
    wrong = judge.margins(prompt, [*best[:2], best[2] ^ 7, *best[3:]])
    assert wrong[:2] == [0.0, 0.0] and wrong[2] > 0.1
    with pytest.raises(AssertionError, match="not allowed"):
        judge.margins(prompt, best, "json")


def test_seeds_that_fail_do_not_make_the_tree_another_one():
    assert {str(path.relative_to(ROOT)) for path in soak.SEEDS.values()} <= set(PRODUCTS)
