"""What long runs held over time, as one picture: memory, descriptors, threads, failures.

    python -m tests.resume.picture [soak.svg]

A row for each part of `make soak` that has results: resident memory and open descriptors after each
episode, by slices, each of which is a process of its own. Failed episodes are red lines. The text
below says how much a process grew after its first third, when everything has been loaded once.
"""

import sys
from pathlib import Path

from tests.resume.log import Result, Results
from tests.resume.tree import RESULTS

PARTS = ("scheduling", "soak", "soak-device", "soak-engines")
"""Files of results."""
KINDS = {"rss": "resident memory in MiB", "descriptors": "open descriptors"}
WIDTH, HEIGHT, GAP = 760, 120, 46
COLORS = ("#2563eb", "#0f766e", "#9333ea", "#b45309")


def processes_of(results: Results) -> list[list[Result]]:
    """Episodes of each process of the current run, those that say what was held."""
    runs = results.runs()
    if not runs:
        return []
    slices = [results.by_slice.get(each["slice"], []) for each in results.slices_of(runs[-1])]
    held = [[each for each in episodes if "rss" in each.more] for episodes in slices]
    return [episodes for episodes in held if episodes]


def growth(values: list[int]) -> float:
    """By how much the last third of a process is above its second, on average."""
    third = len(values) // 3
    if third == 0:
        return 0.0
    second, last = values[third : 2 * third], values[2 * third :]
    return sum(last) / len(last) - sum(second) / len(second)


def _row(name: str, kind: str, processes: list[list[Result]], top: int) -> list[str]:
    values = [[each.more[kind] for each in episodes] for episodes in processes]
    most, total = max(map(max, values)), sum(map(len, values))
    low = min(map(min, values))
    span = max(most - low, 1)
    grown = [growth(each) for each in values]
    lines = [
        f'<text x="10" y="{top - 8}" class="title">{name}: {KINDS[kind]} ({low} to {most}, '
        f"{total} episodes in {len(values)} processes, largest growth {max(grown):+.1f})</text>",
        f'<rect x="10" y="{top}" width="{WIDTH}" height="{HEIGHT}" class="frame"/>',
    ]
    step, place = WIDTH / max(total, 1), 10.0
    for number, (episodes, heights) in enumerate(zip(processes, values)):
        points = []
        for episode, value in zip(episodes, heights):
            x, y = place + step / 2, top + HEIGHT - 6 - (value - low) / span * (HEIGHT - 12)
            points.append(f"{x:.1f},{y:.1f}")
            if episode.failed:
                lines.append(
                    f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{top + HEIGHT}" '
                    f'class="failed"><title>{episode.unit}</title></line>'
                )
            place += step
        color = COLORS[number % len(COLORS)]
        lines.append(f'<polyline points="{" ".join(points)}" stroke="{color}"/>')
        lines += [
            f'<circle cx="{point.split(",")[0]}" cy="{point.split(",")[1]}" r="2" fill="{color}"/>'
            for point in points
        ]
    return lines


def draw(parts: dict[str, list[list[Result]]]) -> str:
    """The picture as SVG, of the parts that have results."""
    rows, top = [], GAP
    for name, processes in parts.items():
        for kind in KINDS:
            rows += _row(name, kind, processes, top)
            top += HEIGHT + GAP
    style = (
        "text{font:13px sans-serif;fill:#111} .title{font-weight:bold} polyline{fill:none;"
        "stroke-width:1.5} .frame{fill:#fff;stroke:#999} .failed{stroke:#dc2626;stroke-width:1.5}"
    )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH + 20}" height="{top}">'
    background = f'<rect width="{WIDTH + 20}" height="{top}" fill="#f8fafc"/>'
    return "\n".join([head, f"<style>{style}</style>", background, *rows, "</svg>", ""])


def tell(parts: dict[str, list[list[Result]]]) -> list[str]:
    """Episodes, failures, steps and growth of each part, in a line."""
    lines = []
    for name, processes in parts.items():
        episodes = [each for process in processes for each in process]
        steps = sum(each.more.get("steps", 0) for each in episodes)
        failed = [each.unit for each in episodes if each.failed]
        grown = {
            kind: max(growth([each.more[kind] for each in process]) for process in processes)
            for kind in KINDS
        }
        lines.append(
            f"{name}: {len(episodes)} episodes, {steps:,} steps, {len(failed)} failed "
            f"{failed or ''}; grew by at most {grown['rss']:.0f} MiB and "
            f"{grown['descriptors']:.0f} descriptors in a process"
        )
    return lines


def main(words: list[str], folder: Path = RESULTS) -> int:
    """Write the picture, and print its numbers."""
    parts = {name: processes_of(Results(folder / f"{name}.jsonl")) for name in PARTS}
    parts = {name: processes for name, processes in parts.items() if processes}
    if not parts:
        print("make soak: no results say what was held: run a slice first", file=sys.stderr)
        return 2
    path = Path(words[0] if words else "soak.svg")
    path.write_text(draw(parts))
    print("\n".join([*tell(parts), f"picture: {path}"]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
