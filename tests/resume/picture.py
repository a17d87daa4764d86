"""What long runs held over time, as one picture: memory, descriptors, threads, failures.

    python -m tests.resume.picture [soak.svg]

A row for each part of `make soak` that has results: resident memory, open descriptors and, where
there is a card, what is taken of its memory, after each episode, by slices, each of which is a
process of its own. Failed episodes are red lines. A note says how much a process grew after its
first third, when most things have been loaded once.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

from tests.resume.log import Result, Results
from tests.resume.tree import RESULTS

PARTS = ("scheduling", "soak", "soak-device", "soak-engines", "soak-engines-device")
"""Files of results."""
KINDS = {
    "rss": "resident memory in MiB",
    "descriptors": "open descriptors",
    "card": "memory taken of the emulated card in MiB",
}
LEFT, WIDTH, HEIGHT, TOP, GAP = 64, 820, 110, 70, 74
COLORS = ("#2563eb", "#0f766e", "#9333ea", "#b45309")
LABEL = 84
"""Width that the time of a process takes below its part of a row."""


@dataclass
class Process:
    """A slice of a run, which is a process of its own: when it began, and its episodes."""

    begun: str
    episodes: list[Result]

    def values(self, kind: str) -> list[int]:
        """What it held after each episode."""
        return [each.more[kind] for each in self.episodes]


def processes_of(results: Results) -> list[Process]:
    """Episodes of each process of the current run, those that say what was held."""
    runs = results.runs()
    found = []
    for header in results.slices_of(runs[-1]) if runs else ():
        episodes = results.by_slice.get(header["slice"], [])
        held = [each for each in episodes if "rss" in each.more]
        if held:
            found.append(Process(header["begun"], held))
    return found


def growth(values: list[int]) -> float:
    """By how much the last third of a process is above its second, on average."""
    third = len(values) // 3
    if third == 0:
        return 0.0
    second, last = values[third : 2 * third], values[2 * third :]
    return sum(last) / len(last) - sum(second) / len(second)


def _row(name: str, kind: str, processes: list[Process], top: int) -> list[str]:
    """A panel: values over episodes, a color for each process, and when it began below it."""
    values = [each.values(kind) for each in processes]
    low, most, total = min(map(min, values)), max(map(max, values)), sum(map(len, values))
    span = max(most - low, 1)
    grown = max((growth(each) for each in values), key=abs)
    lines = [
        f'<text x="{LEFT}" y="{top - 24}" class="title">{name}: {KINDS[kind]}</text>',
        f'<text x="{LEFT}" y="{top - 8}" class="note">{low:,} to {most:,}; {total:,} episodes in '
        f"{len(values)} processes; last third against the second: {grown:+.1f} at most</text>",
        f'<rect x="{LEFT}" y="{top}" width="{WIDTH}" height="{HEIGHT}" class="frame"/>',
    ]

    def height(value: float) -> float:
        return top + HEIGHT - 8 - (value - low) / span * (HEIGHT - 16)

    for value in sorted({low, (low + most) // 2, most}):
        y = height(value)
        lines.append(f'<line x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>')
        lines.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" class="tick">{value:,}</text>')
    step, place, labelled = WIDTH / total, float(LEFT), -LABEL
    for number, (process, heights) in enumerate(zip(processes, values)):
        color = COLORS[number % len(COLORS)]
        if number:
            ends = f'x1="{place:.1f}" x2="{place:.1f}" y1="{top}" y2="{top + HEIGHT}"'
            lines.append(f'<line {ends} class="border"/>')
        if place - labelled >= LABEL and place + LABEL <= LEFT + WIDTH:
            begun = f"{process.begun[5:10]} {process.begun[11:16]}"
            where = f'x="{place:.1f}" y="{top + HEIGHT + 15}"'
            lines.append(f'<text {where} class="note" style="fill:{color}">{begun}</text>')
            labelled = place
        points = []
        for episode, value in zip(process.episodes, heights):
            x = place + step / 2
            points.append((x, height(value)))
            if episode.failed:
                ends = f'x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{top + HEIGHT}"'
                lines.append(f'<line {ends} class="failed"><title>{episode.unit}</title></line>')
            place += step
        joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        lines.append(f'<polyline points="{joined}" stroke="{color}"/>')
        radius = min(2.0, max(0.6, step / 3))
        lines += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}" fill="{color}"/>'
            for x, y in points
        ]
    return lines


STYLE = (
    "text{font:12px sans-serif;fill:#111} .head{font-size:15px;font-weight:bold} "
    ".title{font-weight:bold} .note{font-size:11px;fill:#555} "
    ".tick{font-size:10px;fill:#555;text-anchor:end} polyline{fill:none;stroke-width:1.2} "
    ".frame{fill:#fff;stroke:#999} line{stroke:#e5e7eb} .border{stroke:#9ca3af;"
    "stroke-dasharray:2 3} .failed{stroke:#dc2626;stroke-width:1.5}"
)


def draw(parts: dict[str, list[Process]]) -> str:
    """The picture as SVG, of the parts that have results."""
    rows, top = [], TOP + GAP - 30
    for name, processes in parts.items():
        for kind in KINDS:
            told = [each for each in processes if all(kind in e.more for e in each.episodes)]
            if told:
                rows += _row(name, kind, told, top)
                top += HEIGHT + GAP
    width = LEFT + WIDTH + 20
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{top}">',
            f"<style>{STYLE}</style>",
            f'<rect width="{width}" height="{top}" fill="#f8fafc"/>',
            f'<text x="{LEFT}" y="28" class="head">What make soak held after each episode</text>',
            f'<text x="{LEFT}" y="46" class="note">A point is an episode; a colour, from a dashed '
            "line to the next, is a process, with the time (UTC) when it began;</text>",
            f'<text x="{LEFT}" y="60" class="note">a red line is an episode that failed. What '
            "grows from episode to episode leaks; caches of models fill up at first.</text>",
            *rows,
            "</svg>",
            "",
        ]
    )


def tell(parts: dict[str, list[Process]]) -> list[str]:
    """Episodes, failures, steps and growth of each part, in a line."""
    lines, in_sum = [], 0
    for name, processes in parts.items():
        episodes = [each for process in processes for each in process.episodes]
        steps = sum(each.more.get("steps", 0) for each in episodes)
        in_sum += steps
        failed = [each.unit for each in episodes if each.failed]
        grown = {
            kind: max(growth(process.values(kind)) for process in processes)
            for kind in ("rss", "descriptors")
        }
        lines.append(
            f"{name}: {len(episodes)} episodes, {steps:,} steps, {len(failed)} failed "
            f"{failed or ''}; grew by at most {grown['rss']:.0f} MiB and "
            f"{grown['descriptors']:.0f} descriptors in a process"
        )
    return [*lines, f"in sum {in_sum:,} steps"]


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
