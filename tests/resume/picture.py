"""What random engines held over time, as one picture: memory, descriptors, failures.

    python -m tests.resume.picture [soak.svg]

A panel for each part of `make soak` and each thing that it says it held, over its episodes, with a
line for each process and a red one for each episode that failed. Its title says how much a process
grew after its first third, when most things have been loaded once: what grows leaks.
"""

import sys
from itertools import groupby
from pathlib import Path
from statistics import mean

from tests.resume.log import Log, Result
from tests.resume.tree import RESULTS

PARTS = ("scheduling", "soak", "soak-device", "soak-engines", "soak-engines-device")
"""Files of results."""
KINDS = {
    "rss": "resident memory in MiB",
    "descriptors": "open descriptors",
    "card": "memory taken of the emulated card in MiB",
}
WIDTH, HEIGHT, ROW = 820, 110, 150


def growth(values: list[int]) -> float:
    """By how much the last third of a process is above its second, on average."""
    third = len(values) // 3
    return mean(values[-third:]) - mean(values[third : 2 * third]) if third else 0


def panel(title: str, kind: str, episodes: list[Result], top: int) -> list[str]:
    """Values over episodes as SVG."""
    values = [each.more[kind] for each in episodes]
    low, most = min(values), max(values)
    processes = [[*same] for _, same in groupby(range(len(values)), lambda n: episodes[n].slice)]
    grown = max((growth([values[n] for n in each]) for each in processes), key=abs)
    points = [
        f"{20 + (n + 0.5) * WIDTH / len(values):.1f},"
        f"{top + HEIGHT - 8 - (value - low) / max(most - low, 1) * (HEIGHT - 16):.1f}"
        for n, value in enumerate(values)
    ]
    lines = [
        f'<text x="20" y="{top - 8}">{title}: {low:,} to {most:,} in {len(values):,} episodes of '
        f"{len(processes)} processes; last third against the second: {grown:+.1f} at most</text>",
        f'<rect x="20" y="{top}" width="{WIDTH}" height="{HEIGHT}" fill="#fff" stroke="#999"/>',
    ]
    for each in processes:
        lines.append(f'<polyline points="{" ".join(points[n] for n in each)}" class="held"/>')
    for each, point in zip(episodes, points):
        if each.failed:
            path = f"M{point.partition(',')[0]},{top}v{HEIGHT}"
            lines.append(f'<path d="{path}" class="failed"><title>{each.unit}</title></path>')
    return lines


def main(words: list[str], folder: Path = RESULTS) -> int:
    """Write the picture."""
    lines: list[str] = []
    top = 30
    for part in PARTS:
        held = [each for each in Log(folder / f"{part}.jsonl").results if "rss" in each.more]
        for kind, about in KINDS.items():
            if held and all(kind in each.more for each in held):
                lines += panel(f"{part}: {about}", kind, held, top)
                top += ROW
    if not lines:
        print("make soak: no results say what was held: run a slice first", file=sys.stderr)
        return 2
    style = (
        "text{font:12px sans-serif} polyline,path{fill:none;stroke:#2563eb} .failed{stroke:#dc2626}"
    )
    size = f'width="{WIDTH + 40}" height="{top}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{style}</style>'
    path = Path(words[0] if words else "soak.svg")
    path.write_text("\n".join([head, *lines, "</svg>", ""]))
    print(f"picture: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
