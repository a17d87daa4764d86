"""The picture of where a step's time goes, drawn from the table beside it.

``python -m tests.docs.step_parts`` draws it anew from the table in docs/guides/performance.md,
whose numbers `benchmarks/engine_step.py --parts` prints.
"""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/guides/performance.md"
PICTURE = ROOT / "docs/pictures/engine-step.svg"
REGION = re.compile(r"<!-- engine-step: .*?-->\n(?P<table>.*?)<!-- engine-step: end -->", re.DOTALL)
PARTS = {
    "schedule": "#4c78a8",
    "the runner": "#f58518",
    "update_from_output": "#54a24b",
    "the rest": "#b8b0ac",
}
LEFT, WIDTH, BAR, GAP = 210, 820, 22, 12


def bars(text: str) -> list[tuple[str, list[float]]]:
    """Rows of the table: what was measured, and microseconds of each part."""
    region = REGION.search(text)
    assert region is not None, "the page has no table of engine steps"
    rows = [line.strip("| ").split(" | ") for line in region["table"].splitlines() if "|" in line]
    return [(row[0], [float(cell.replace(",", "")) for cell in row[1:5]]) for row in rows[2:]]


def draw(text: str) -> str:
    """An SVG of the table's rows, each a bar of its parts; rows of a case share a scale."""
    lines = []
    y = 46
    rows = bars(text)
    for number, (name, parts) in enumerate(rows):
        first = number - number % 2
        scale = (WIDTH - LEFT - 80) / max(sum(each) for _, each in rows[first : first + 2])
        lines.append(f'<text x="{LEFT - 8}" y="{y + 15}" text-anchor="end">{name}</text>')
        x = float(LEFT)
        for part, colour in zip(parts, PARTS.values(), strict=True):
            width = part * scale
            lines.append(
                f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BAR}" fill="{colour}"/>'
            )
            x += width
        lines.append(f'<text x="{x + 6:.1f}" y="{y + 15}">{sum(parts) / 1e3:.1f} ms</text>')
        y += BAR + (4 if number % 2 == 0 else GAP + 4)
    x = LEFT
    for part, colour in PARTS.items():
        lines.append(f'<rect x="{x}" y="14" width="14" height="14" fill="{colour}"/>')
        lines.append(f'<text x="{x + 20}" y="26">{part}</text>')
        x += 34 + 8 * len(part)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" '
        'font-family="sans-serif" font-size="13" role="img">\n'
        f"<title>Host time of a step by part, before and after</title>\n"
        f'<rect width="{WIDTH}" height="{y}" fill="white"/>\n'
    )
    return head + "\n".join(lines) + "\n</svg>\n"


def main() -> None:
    PICTURE.write_text(draw(PAGE.read_text()))


if __name__ == "__main__":
    main()
