"""The page of a recorded run: a time line, requests as rows, KV blocks and ranks.

The page holds what `vllm_npu_prep.inspect.run_data.run_json` derived from the records. Its script
draws on canvases what is visible: a run of 10,000 steps has as few elements as one of ten.
As the page of a step (`vllm_npu_prep.inspect.page`), it loads nothing.
"""

import json
import shlex
from importlib.resources import files
from typing import Any
from urllib.parse import quote

import numpy as np
from markupsafe import Markup

from vllm_npu_prep.inspect.page import content_policy, template
from vllm_npu_prep.inspect.run import DIGITS, RankRun, Run, Step
from vllm_npu_prep.inspect.run_data import counted_runs, run_json
from vllm_npu_prep.inspect.run_steps import StepPages
from vllm_npu_prep.prep.state import AttentionState
from vllm_npu_prep.wording import counted

COMMAND = "vllm-npu-prep explain"
MARKUP = {ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}
"""Characters that could end or change the element that holds the data, each with its escape."""


def run_html(
    run: Run,
    pages: StepPages | None = None,  # pages of its steps, to which it links
) -> str:
    """Return the page of a run."""
    own, states = files(__package__), [state.name for state in AttentionState]
    script = (own / "run.js").read_text(encoding="utf-8")
    style = "".join((own / name).read_text(encoding="utf-8") for name in ("page.css", "run.css"))
    data = run_json(run)
    data |= {"state_names": states, "command": COMMAND}
    for rank, of_rank in zip(data["ranks"], run.ranks):
        rank["quoted_folder"] = shlex.quote(rank["folder"])
        rank["pages"] = None if pages is None else _pages_json(pages, run, of_rank)
    lines = [
        rank_line(rank, of_engine[0], run.numbers)
        for of_engine in run.engines.values()
        for rank in of_engine
    ]
    return template("run.html").render(
        policy=content_policy(script),
        style=Markup(style),
        script=Markup(script),
        data=Markup(json.dumps(data, separators=(",", ":"), ensure_ascii=True).translate(MARKUP)),
        name=run.name,
        pages=pages is not None,
        facts=_facts(run),
        columns=list(lines[0]),
        rows=[list(line.values()) for line in lines],
        older=run.older,
        states=states,
    )


def _pages_json(pages: StepPages, run: Run, rank: RankRun) -> dict[str, Any]:
    """Return which steps of a rank have a page, and the text around a number in its address."""
    begin, end = quote(f"{pages.folder.name}/step-"), quote(pages.ending(rank))
    return {"begin": begin, "end": end, "steps": counted_runs(pages.indices(run, rank))}


def _facts(run: Run) -> list[tuple[str, str]]:
    config, numbers = run.ranks[0].config, run.numbers
    gaps = numbers[-1] - numbers[0] + 1 - len(numbers)
    left_out = f"; {counted(gaps, 'step')} between them not recorded" if gaps else ""
    lines = [("steps", f"{counted(len(numbers), 'step')}, {numbers[0]} to {numbers[-1]}{left_out}")]
    if "model" in config:
        lines.insert(0, ("model", str(config["model"])))
    named = ("device_type", "attention", "cudagraph_mode", "speculative_method")
    engine = [f"{name} {config[name]}" for name in named if config.get(name)]
    if engine:
        lines.append(("engine", ", ".join(engine)))
    if len(run.engines) > 1:
        shared = counted(len(run.shared_requests), "request")
        lines.append(("engines", f"{', '.join(run.engines)}; {shared} in several of them"))
    return lines


def accepted_drafts(rank: RankRun) -> tuple[int, int]:
    """Return how many drafts were accepted, of how many, where records show what became of them."""
    accepted = drafts = 0
    for row in rank.rows:
        for span in row.spans:
            known = [DIGITS.index(c) for c in span.accepted if c in DIGITS]
            accepted += sum(known)
            drafts += span.drafts * len(known)
    return accepted, drafts


def rank_line(rank: RankRun, first: RankRun, numbers: list[int]) -> dict[str, str]:
    """Return a rank's line of the table, by the names of columns; `first` is of its engine."""
    steps, tokens = len(rank.steps), sum(step.tokens for step in rank.steps)
    padding = sum(step.padding for step in rank.steps)
    times = rank.times
    seconds = np.array([prepared for _, prepared, _ in times])
    blocks = ", ".join(f"{max(counts):,}" for counts in zip(*(s.blocks for s in rank.steps)))
    pool = rank.config.get("num_blocks")
    if isinstance(pool, int) and blocks:
        blocks += f" of {pool:,}"
    hits = [tokens for row in rank.rows for _, tokens in row.hits]
    accepted, drafts = accepted_drafts(rank)
    preempted = sum(len(row.preemptions) for row in rank.rows)
    line = {
        "rank": rank.title.removeprefix("rank ") or "-",
        "steps": f"{steps:,}",
        "requests": f"{len(rank.rows):,}",
        "tokens": f"{tokens:,}",
        "padding": _share(padding, tokens + padding),
    }
    for way in ("full graph", "piecewise graphs", "eager"):
        line[way] = _share(sum(step.kind.startswith(way) for step in rank.steps), steps)
    return line | {
        "host time, median": _time(np.median(seconds)) if times else "-",
        "host time, p99": _time(np.quantile(seconds, 0.99)) if times else "-",
        "waits": f"{sum(waits for _, _, waits in times):,}" if times else "-",
        "most KV blocks": blocks or "-",
        "prefix hits": f"{sum(hits):,} tokens of {counted(len(hits), 'request')}" if hits else "-",
        "drafts accepted": f"{accepted:,} of {drafts:,}" if drafts else "-",
        "preempted": f"{preempted:,}",
        "compared with the first rank": (
            "-" if rank is first else compare_ranks(rank, first, numbers)
        ),
    }


def compare_ranks(rank: RankRun, first: RankRun, numbers: list[int]) -> str:
    """Say whether two ranks prepared the same steps.

    Ranks of one engine do, under tensor and pipeline parallelism; data-parallel ranks don't.
    """

    def steps(of: RankRun) -> dict[int, Step]:
        return {index: step._replace(times=None) for index, step in zip(of.index, of.steps)}

    own, others = steps(rank), steps(first)
    for index in sorted(own.keys() & others.keys()):
        if own[index] != others[index]:
            return f"differs from step {numbers[index]}"
    return "same steps" if own.keys() & others.keys() else "no step in common"


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if part else "-"


def _time(seconds: float) -> str:
    return f"{1e6 * seconds:,.0f} µs"
