"""A recorded run as the JSON that its page holds."""

from collections.abc import Iterable
from typing import Any

from vllm_npu_prep.inspect.run import RequestRow, Run
from vllm_npu_prep.wording import runs_of

COUNTS = ("requests", "padding_requests", "tokens", "padding", "drafts")
"""What is counted in each `vllm_npu_prep.inspect.run.Step`."""


def run_json(run: Run) -> dict[str, Any]:
    """Return what the page of a run knows, as JSON: `docs/reference/files.md` describes it.

    Of each rank there is an entry for each of its steps. Ranks whose requests did the same as
    those of an earlier rank name that rank instead of listing them.
    """
    states = _distinct_texts(step.state for rank in run.ranks for step in rank.steps)
    kinds = _distinct_texts(step.kind for rank in run.ranks for step in rank.steps)
    begin = min((started for rank in run.ranks for started, *_ in rank.times), default=0.0)
    listed: list[list[Any]] = []
    ranks = []
    for rank in run.ranks:
        rows = [_row_json(row) for row in rank.rows]
        unnamed = [row[1:] for row in rows]
        same = next((i for i, other in enumerate(listed) if other == unnamed), None)
        listed.append(unnamed)
        ranks.append(
            {
                "rank": rank.rank,
                "engine": rank.engine,
                "title": rank.title,
                "folder": str(rank.folder),
                "config": rank.config,
                "steps": counted_runs(rank.index),
                "state": [states[step.state] for step in rank.steps],
                "kind": [kinds[step.kind] for step in rank.steps],
                **{name: [getattr(step, name) for step in rank.steps] for name in COUNTS},
                "blocks": [list(of_group) for of_group in zip(*(s.blocks for s in rank.steps))],
                "times": [
                    times and [round(1e6 * (times[0] - begin)), round(1e6 * times[1]), times[2]]
                    for times in (step.times for step in rank.steps)
                ],
                "rows": [row[0] for row in rows] if same is not None else rows,
                "rows_like": same,
            }
        )
    return {
        "name": run.name,
        "numbers": counted_runs(run.numbers),
        "states": list(states),
        "kinds": list(kinds),
        "ranks": ranks,
        "older": run.older,
    }


def _row_json(row: RequestRow) -> list[Any]:
    spans: list[list[Any]] = []
    for span in row.spans:
        sizes = span.first, span.steps, span.stride, int(span.in_prompt)
        spans.append([*sizes, span.computed, span.scheduled, span.drafts])
        if span.accepted:
            spans[-1].append("".join(span.accepted))
    return [
        row.name,
        row.num_prompt_tokens,
        spans,
        [list(hit) for hit in row.hits],
        row.preemptions,
    ]


def _distinct_texts(texts: Iterable[str]) -> dict[str, int]:
    return {text: number for number, text in enumerate(dict.fromkeys(texts))}


def counted_runs(numbers: list[int]) -> list[list[int]]:
    """Return growing numbers as runs: first and count of each."""
    return [[run.start, len(run)] for run in runs_of(numbers)]
