"""Engines that `make soak` holds against transformers: what is drawn, and one of each kind."""

from pathlib import Path

import pytest

from tests.soak import __main__ as soak
from tests.soak import engines
from tests.soak.engines import FAMILIES, Kind, play

KEPT = Path(soak.SEEDS).read_text().split() if Path(soak.SEEDS).exists() else []  # failed once
DRAWN = [Kind.draw(seed) for seed in range(400)]


def first(**having) -> Kind:
    """The first engine drawn that has all of this."""
    return next(k for k in DRAWN if all(getattr(k, name) == v for name, v in having.items()))


KINDS = {
    "adapters": first(adapters=True, runner="V1"),
    "sleep": first(sleeps=True, family="DeepseekV3"),
    "connector": first(connected=True),
    "hybrid": first(family="Qwen3_5", ranks=1),
    "V2": first(runner="V2"),
    "ranks": first(ranks=2, family="Qwen3"),
    **{f"seed {seed}": Kind.draw(int(seed)) for seed in KEPT},
}


def test_everything_is_drawn():
    parts = set().union(*(kind.parts() for kind in DRAWN))
    assert parts >= {*FAMILIES, "V1", "V2", "1 rank", "2 rank", "adapters", "sleep", "a connector"}
    assert parts >= {"batched scheduler", "upstream scheduler", "graphs NONE", "graphs PIECEWISE"}
    assert parts >= {"graphs FULL_DECODE_ONLY", "graphs FULL_AND_PIECEWISE"}
    assert all(k.settings["additional_config"]["npu_prep"]["check"] == "full" for k in DRAWN)


@pytest.mark.parametrize("name", KINDS)
def test_an_engine_of_each_kind_agrees(name):
    count = play(KINDS[name], 60)
    print(KINDS[name], dict(count))
    assert count["steps"] >= 60 and count["finished"] > 0


def test_a_wrong_token_is_found_and_its_seed_is_kept(monkeypatch, tmp_path, capsys):
    """Of one prompt in ten, the last token."""
    monkeypatch.setattr(soak, "SEEDS", tmp_path / "seeds.txt")
    folder, prompts, expected = engines.family_of("Qwen3")
    wrong = [*expected[:-1], [*expected[-1][:1], -1, *expected[-1][2:]]]
    monkeypatch.setattr(engines, "family_of", lambda family: (folder, prompts, wrong))
    seed = first(family="Qwen3", runner="V1", ranks=1, adapters=False).seed
    outcome, recorded = soak.Engines().play(seed, 60)
    assert outcome == "failed" and "prompt 9, adapter 0" in recorded["error"]
    assert (tmp_path / "seeds.txt").read_text() == f"{seed}\n"
    assert f"seed {seed} FAILED" in capsys.readouterr().out
