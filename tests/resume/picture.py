"""What long runs held over time, as one picture: memory, descriptors, failures.

    python -m tests.resume.picture [soak.svg]

A row for each part of `make soak` that has results: resident memory, open descriptors and, where
there is a card, what is taken of its memory, after each episode, by slices, each of which is a
process of its own. Failed episodes are red lines. A note says how much a process grew after its
first third, when most things have been loaded once.
"""

import sys
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
LEFT, WIDTH, HEIGHT, TOP, GAP = 64, 820, 110, 70, 60
COLORS = ("#2563eb", "#0f766e", "#9333ea", "#b45309")
STYLE = (
    "text{font:12px sans-serif;fill:#111} .head{font-size:15px;font-weight:bold} "
    ".title{font-weight:bold} .note{font-size:11px;fill:#555} "
    ".tick{font-size:10px;fill:#555;text-anchor:end} polyline{fill:none;stroke-width:1.2} "
    ".frame{fill:#fff;stroke:#999} .failed{stroke:#dc2626;stroke-width:1.5}"
)
Process = list[Result]
"""Episodes of a slice."""


def processes_of(results: Results) -> list[Process]:
    """Episodes of each process of the current run, those that say what was held."""
    runs = results.runs()
    slices = [header["slice"] for header in results.slices_of(runs[-1])] if runs else []
    held = [[e for e in results.by_slice.get(each, []) if "rss" in e.more] for each in slices]
    return [episodes for episodes in held if episodes]


def growth(process: Process, kind: str) -> float:
    """By how much the last third of a process is above its second, on average."""
    values, third = [each.more[kind] for each in process], len(process) // 3
    if third == 0:
        return 0.0
    second, last = values[third : 2 * third], values[2 * third :]
    return sum(last) / len(last) - sum(second) / len(second)


def _row(name: str, kind: str, processes: list[Process], top: int) -> list[str]:
    """A panel: values over episodes, a colour for each process."""
    values = [each.more[kind] for process in processes for each in process]
    low, most, step = min(values), max(values), WIDTH / len(values)
    grown = max((growth(each, kind) for each in processes), key=abs)

    def height(value: float) -> float:
        return top + HEIGHT - 8 - (value - low) / max(most - low, 1) * (HEIGHT - 16)

    lines = [
        f'<text x="{LEFT}" y="{top - 24}" class="title">{name}: {KINDS[kind]}</text>',
        f'<text x="{LEFT}" y="{top - 8}" class="note">{low:,} to {most:,}; {len(values):,} '
        f"episodes in {len(processes)} processes; "
        f"last third against the second: {grown:+.1f} at most</text>",
        f'<rect x="{LEFT}" y="{top}" width="{WIDTH}" height="{HEIGHT}" class="frame"/>',
        f'<text x="{LEFT - 6}" y="{height(low) + 4:.1f}" class="tick">{low:,}</text>',
        f'<text x="{LEFT - 6}" y="{height(most) + 4:.1f}" class="tick">{most:,}</text>',
    ]
    place = LEFT + step / 2
    for number, process in enumerate(processes):
        color, points = COLORS[number % len(COLORS)], []
        for each in process:
            points.append(f"{place:.1f},{height(each.more[kind]):.1f}")
            if each.failed:
                ends = f'x1="{place:.1f}" x2="{place:.1f}" y1="{top}" y2="{top + HEIGHT}"'
                lines.append(f'<line {ends} class="failed"><title>{each.unit}</title></line>')
            place += step
        lines.append(f'<polyline points="{" ".join(points)}" stroke="{color}"/>')
    return lines


def draw(parts: dict[str, list[Process]]) -> str:
    """The picture as SVG, of the parts that have results."""
    rows, top = [], TOP + GAP - 30
    for name, processes in parts.items():
        for kind in KINDS:
            told = [each for each in processes if all(kind in e.more for e in each)]
            if told:
                rows += _row(name, kind, told, top)
                top += HEIGHT + GAP
    width = LEFT + WIDTH + 20
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{top}">'
    head += f'<style>{STYLE}</style><rect width="{width}" height="{top}" fill="#f8fafc"/>'
    title = f'<text x="{LEFT}" y="28" class="head">What make soak held after each episode</text>'
    note = "A colour is a process, a red line an episode that failed. What grows leaks."
    note = f'<text x="{LEFT}" y="46" class="note">{note}</text>'
    return "\n".join([head, title, note, *rows, "</svg>", ""])


def tell(parts: dict[str, list[Process]]) -> list[str]:
    """Episodes, failures, steps and growth of each part, in a line."""
    lines, in_sum = [], 0
    for name, processes in parts.items():
        episodes = [each for process in processes for each in process]
        steps = sum(each.more.get("steps", 0) for each in episodes)
        in_sum += steps
        failed = [each.unit for each in episodes if each.failed]
        rss, files = (max(growth(p, kind) for p in processes) for kind in ("rss", "descriptors"))
        lines.append(
            f"{name}: {len(episodes)} episodes, {steps:,} steps, {len(failed)} failed "
            f"{failed or ''}; grew by at most {rss:.0f} MiB and {files:.0f} descriptors in a "
            "process"
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
