"""The picture of what long runs held: failures and growth show in it."""

import xml.etree.ElementTree as ET

import pytest

from tests.resume import picture, seeds
from tests.resume.log import Results
from tests.resume.slice import Slice
from tests.resume.tree import TreeState

STATE = TreeState("one", dirty=False, source="one")


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Play a slice whose process holds what it is told to, a tuple of RSS and descriptors each."""

    def run(name, held, fail=(), **options):
        values = iter(held)

        class Player:
            def play(self, seed, steps):
                return ("failed" if seed in fail else "agreed"), {"steps": steps}

            def report(self):
                pass

        def held_now():
            rss, descriptors = next(values)
            if rss == held[-1][0]:
                part.deadline = 0
            return {"rss": rss, "descriptors": descriptors}

        monkeypatch.setattr(seeds, "held", held_now)
        path = tmp_path / f"{name}.jsonl"
        with Slice(path, 30, default_seed=100, look=lambda: STATE, **options) as part:
            seeds.resume(part, Player(), steps=7)
        return picture.processes_of(Results(path))

    return run


def test_a_leak_and_a_failure_show(run, tmp_path, capsys):
    run("soak", [(500 + 10 * n, 40) for n in range(9)], fail={104})
    processes = run("soak", [(700, 41), (702, 41), (701, 41), (709, 44)])
    assert [len(each.episodes) for each in processes] == [9, 4]
    assert picture.main([str(tmp_path / "p.svg")], tmp_path) == 0
    out = capsys.readouterr().out
    assert "soak: 13 episodes, 91 steps, 1 failed ['104']; grew by at most 30 MiB and 2" in out
    tree = ET.parse(tmp_path / "p.svg").getroot()
    texts = ["".join(each.itertext()) for each in tree.iter() if each.tag.endswith("}text")]
    assert "soak: resident memory in MiB" in texts and "soak: open descriptors" in texts
    notes = [text for text in texts if "13 episodes in 2 processes; last third" in text]
    assert [note.partition(";")[0] for note in notes] == ["500 to 709", "40 to 44"]
    assert "in sum 91 steps" in out
    assert len([each for each in tree.iter() if each.get("class") == "failed"]) == 2
    assert len([each for each in tree.iter() if each.tag.endswith("}circle")]) == 26


def test_what_this_process_holds_is_told():
    held = seeds.held()
    assert held["rss"] > 10 and held["descriptors"] > 2 and held["threads"] >= 1
    with open("/dev/null"):
        assert seeds.held()["descriptors"] == held["descriptors"] + 1


def test_without_results_there_is_no_picture(tmp_path, capsys):
    assert picture.main([str(tmp_path / "p.svg")], tmp_path) == 2
    assert "run a slice first" in capsys.readouterr().err
    assert not (tmp_path / "p.svg").exists()
