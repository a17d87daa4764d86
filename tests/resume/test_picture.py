"""The picture of what long runs held: failures and growth show in it."""

import re
from argparse import Namespace

from tests.resume import picture
from tests.resume.log import Slice


def test_a_leak_and_a_failure_show(tmp_path):
    path, drawn = tmp_path / "soak.jsonl", tmp_path / "p.svg"
    assert picture.main([str(drawn)], tmp_path) == 2
    for held in ([500 + 10 * n for n in range(9)], [700, 709]):
        with Slice(path, Namespace(minutes=30, fresh=False, retry=False)) as part:
            for rss in held:
                part.record(str(rss), "failed" if rss == 540 else "agreed", 1, rss=rss)
    assert picture.main([str(drawn)], tmp_path) == 0
    (title,) = re.findall("<text.*>(.+)</text>", drawn.read_text())
    assert title == (
        "soak: resident memory in MiB: 500 to 709 in 11 episodes of 2 processes; last third "
        "against the second: +30.0 at most"
    )
    assert re.findall("failed.*<title>(.+)</title>", drawn.read_text()) == ["540"]
    assert len(re.findall("<polyline", drawn.read_text())) == 2
