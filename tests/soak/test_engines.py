"""Engines that `make soak` holds against transformers: what is drawn, and one of each kind."""

from pathlib import Path

import pytest

from tests.resume.tree import PRODUCTS, ROOT
from tests.soak import __main__ as soak
from tests.soak import engines
from tests.soak.kinds import FILES, HOST, LAYOUTS, MODES, Kind
from tests.soak.models import CPU, FAMILIES, NPU, VISION, Reader

DRAWN = {device: [Kind.draw(seed, device) for seed in range(800)] for device in (CPU, NPU)}


def kept(device: str) -> list[int]:
    """Seeds that failed once."""
    return [int(line) for line in Path(soak.SEEDS[device]).read_text().split()]


def first(device=CPU, layout="one rank", **having) -> Kind:
    """The first engine drawn that has all of this."""
    having |= {"layout": layout}
    return next(
        k for k in DRAWN[device] if all(getattr(k, name) == value for name, value in having.items())
    )


KINDS = {
    "adapters": first(adapters=True, runner="V1", drafts="", connector=""),
    "adapters on the host": first(adapters=True, runner="V2", connector=HOST),
    "sleep": first(sleeps=True, family="DeepseekV3", int8=""),
    "files": first(connector=FILES, runner="V1"),
    "host": first(connector=HOST, runner="V2", family="Qwen3_5"),
    "hybrid": first(family="Qwen3_5", runner="V1", drafts="mtp", int8=""),
    "V2": first(runner="V2", family="Qwen3Next", drafts="mtp", int8=""),
    "int8": first(runner="V2", family="DeepseekV3", int8="modelslim"),
    "images": first(runner="V2", family="Qwen3-VL"),
    "images in the prefix cache": next(
        kind
        for kind in DRAWN[CPU]
        if kind.family == "Qwen3-VL" and kind.runner == "V1" and not kind.drafts
        if kind.settings["enable_prefix_caching"] and kind.settings["mm_processor_cache_gb"] < 1
    ),
    "ranks": first(layout="tp2", runner="V2", family="Qwen3"),
    "stages": first(layout="pp2"),
    "engines": first(layout="dp2", sleeps=True, family="Glm4Moe"),
    **{f"seed {seed}": Kind.draw(seed) for seed in kept(CPU)},
}


@pytest.mark.parametrize("device", DRAWN)
def test_everything_is_drawn(device):
    """Each feature with each runner, as far as start-up accepts it."""
    features = {*FAMILIES, *LAYOUTS, *(f"graphs {mode}" for mode in MODES), FILES, HOST, "sleep"}
    features |= {"batched scheduler", "upstream scheduler", "LoRA", "drafts by eagle"}
    features |= {"drafts by ngram", "drafts by mtp", "int8 by modelslim", "expert parallelism"}
    features |= {"int8 by compressed-tensors", "images", "hybrid", "sessions"}
    if device == NPU:
        features |= {"by fia", "by atb", "float16", "bfloat16"}
    for runner in ("V1", "V2"):
        drawn = [kind.parts() for kind in DRAWN[device] if kind.runner == runner]
        assert set().union(*drawn) >= features, runner
        with_states = set().union(*(parts for parts in drawn if "hybrid" in parts))
        assert with_states >= {"drafts by mtp", "sleep", HOST, "tp2", "graphs FULL_AND_PIECEWISE"}
        for having in ({"dp2", "drafts by ngram"}, {"dp2", "expert parallelism", "sleep"}):
            assert any(having <= parts for parts in drawn), runner
    options = [kind.settings["additional_config"]["npu_prep"] for kind in DRAWN[device]]
    assert all(each["check"] == "full" for each in options)


def test_what_start_up_refuses_is_not_drawn():
    for kind in (*DRAWN[CPU], *DRAWN[NPU]):
        drafts, on_v2 = bool(kind.drafts), kind.runner == "V2"
        assert not (drafts and kind.connector) or kind.drafts == "ngram"
        assert not (on_v2 and kind.family in VISION and drafts)
        assert not (kind.layout == "pp2" and (drafts or kind.settings["async_scheduling"]))
        assert not (kind.drafts == "ngram" and kind.settings["async_scheduling"])
        assert not (kind.connector == FILES and (kind.adapters or "Qwen3_5" in kind.family))


@pytest.mark.parametrize("name", KINDS)
def test_an_engine_of_each_kind_agrees(name):
    count = engines.play(KINDS[name], 60, alone=False)
    print(KINDS[name], dict(count))
    assert count["steps"] >= 60 and count["finished"] > 0
    assert KINDS[name].int8 or count["close calls"] == 0
    assert not KINDS[name].sleeps or count["sleeps"] > 0
    assert count["life-cycle calls"] > 0
    assert count["requests reset"] + count["caches in use"] > 0 or KINDS[name].layout != "one rank"
    assert not KINDS[name].sessions or count["parts of sessions"] > 0
    assert not KINDS[name].adapters or count["adapters overwritten"] > 0
    assert KINDS[name].family not in VISION or count["refused"] > 0
    for what, happened in (
        (KINDS[name].connector, "tokens that a connector had"),
        (KINDS[name].drafts, "drafts accepted"),
    ):
        assert not what or KINDS[name].layout != "one rank" or count[happened] > 0


def test_a_wrong_token_is_found_and_its_seed_is_kept(monkeypatch, tmp_path, capsys):
    """Of one prompt in ten, the second token."""
    monkeypatch.setitem(soak.SEEDS, CPU, tmp_path / "seeds.txt")
    reader = engines.answers(CPU, "Qwen3")
    last = reader.tokens[-1]
    wrong = [*reader.tokens[:-1], [last[0], last[1] ^ 1, *last[2:]]]
    monkeypatch.setattr(
        engines, "answers", lambda *args: Reader(reader.asked, wrong, reader._logits_of)
    )
    plain = {"drafts": "", "connector": "", "int8": "", "adapters": False, "sleeps": False}
    seed = first(family="Qwen3", runner="V1", **plain).seed
    # transformers itself would say that the engine's token is the best one
    monkeypatch.setattr(Reader, "margin", lambda self, n, got: float(got != wrong[n][: len(got)]))
    outcome, recorded = soak.Engines().play(seed, 200)
    assert outcome == "failed" and "prompt 9, adapters [0]" in recorded["error"]
    assert (tmp_path / "seeds.txt").read_text() == f"{seed}\n"
    assert f"seed {seed} FAILED" in capsys.readouterr().out


def test_how_far_a_token_is_from_the_best_is_told():
    """0 for transformers' own; what follows from a wrong one is looked at, too."""
    reader = engines.answers(CPU, "Qwen3")
    tokens = reader.tokens[0]
    assert reader.margin(0, tokens) == reader.margin(0, []) == 0.0
    assert reader.margin(0, [tokens[0], (tokens[1] + 5) % 512]) > 0.5
    images = engines.answers(CPU, "Qwen3-VL")
    assert images.margin(2, images.tokens[2]) == 0.0
    assert images.margin(2, [*images.tokens[2][:3], images.tokens[2][3] ^ 7]) > 0.2
    assert images.margin(2, images.tokens[2][:5]) == 0.0


def test_seeds_that_fail_do_not_make_the_tree_another_one():
    assert {str(path.relative_to(ROOT)) for path in soak.SEEDS.values()} <= set(PRODUCTS)
