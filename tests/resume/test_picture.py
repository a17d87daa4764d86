"""The picture of what long runs held: failures and growth show in it."""

import xml.etree.ElementTree as ET

from tests.resume import picture
from tests.resume.slice import Slice
from tests.resume.tree import TreeState


def test_a_leak_and_a_failure_show(tmp_path, capsys):
    path, state = tmp_path / "soak.jsonl", TreeState("one", dirty=False, source="one")
    assert picture.main([], tmp_path) == 2
    for held in ([(500 + 10 * n, 40) for n in range(9)], [(700, 41), (709, 44)]):
        with Slice(path, 30, look=lambda: state) as part:
            for unit, (rss, descriptors) in enumerate(held, held[0][0]):
                outcome = "failed" if unit == 504 else "agreed"
                part.record(str(unit), outcome, 1, steps=7, rss=rss, descriptors=descriptors)
    assert picture.main([str(tmp_path / "p.svg")], tmp_path) == 0
    out = capsys.readouterr().out
    assert "soak: 11 episodes, 77 steps, 1 failed ['504']; grew by at most 30 MiB and 0" in out
    assert "in sum 77 steps" in out
    tree = ET.parse(tmp_path / "p.svg").getroot()
    texts = ["".join(each.itertext()) for each in tree.iter() if each.tag.endswith("}text")]
    assert "soak: resident memory in MiB" in texts and "soak: open descriptors" in texts
    notes = [text for text in texts if "11 episodes in 2 processes; last third" in text]
    assert [note.partition(";")[0] for note in notes] == ["500 to 709", "40 to 44"]
    assert len([each for each in tree.iter() if each.get("class") == "failed"]) == 2
