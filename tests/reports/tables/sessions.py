"""Reports about sessions, whose input comes in parts, each of which is answered."""

from tests.reports.report import Ask, Call, Part, report, words
from tests.reports.tables import drafts

STOPS = {"stop_token_ids": [*range(2, 872)]}
"""Whatever is sampled first ends the answer."""

REPORTS = (
    report(
        "vllm#28973",
        "the last token of an answer is no part of what follows",
        "plain",
        Part("a", words(30), 8),
        Part("b", words(9, 2), 8, at="a"),
        Part("c", words(40, 3), 8, at="b"),
        Part("end", None, at="c"),
        Ask("beside", words(20, 4), 30),
    ),
    report(
        "vllm#52693",
        "a part whose first token ends its answer",
        "plain",
        Part("a", words(30), 8),
        Part("b", words(9, 2), 8, at="a", params=STOPS),
        Part("c", words(12, 3), 8, at="b"),
        Part("end", None, at="c"),
        Ask("beside", words(20, 4), 40),
        expect={"b": {"length": 1, "finish": "stop"}},
    ),
    report(
        "vllm#52693",
        "parts that come at once, each of which ends with its first token",
        "sync",
        *(Part(f"p{n}", words(9 + n, n + 1), 8, params=STOPS) for n in range(4)),
        Part("end", None),
        Ask("beside", words(20, 9), 20),
    ),
    report(
        "vllm#44526",
        "drafts that were accepted behind the end of a part don't count for the next",
        "eagle, sync",
        *(
            each
            for n, stop in enumerate(drafts.STOPS)
            for each in (
                Part(f"a{n}", words(30, 2), 30, params={"stop_token_ids": [stop]}, session=f"s{n}"),
                Part(f"b{n}", words(3, n + 4), 9, at=f"a{n}", session=f"s{n}"),
                Part(f"end{n}", None, at=f"b{n}", session=f"s{n}"),
            )
        ),
        failed=True,
    ),
    report(
        "vllm#42489",
        "parts that fill the context",
        "plain",
        Part("a", words(50), 10),
        Part("b", words(50, 2), 10, at="a"),
        Part("c", words(9, 3), 1, at="b"),
        Part("end", None, at="c"),
    ),
    report(
        "vllm#53861",
        "a session is aborted between two parts, and beside one",
        "plain",
        Part("a", words(30), 8),
        Part("b", words(30, 2), 40, session="t"),
        Call("drop", "a", {"session": "s"}),
        Call("drop", ("b", 4), {"session": "t"}),
        Ask("beside", words(20, 4), 30),
    ),
    report(
        "vllm#57685",
        "a part under a grammar behind one without",
        "plain",
        Part("a", words(30), 8),
        Part("b", words(9, 2), 40, at="a", form="json"),
        Part("end", None, at="b"),
        known=True,
    ),
    report(
        "vllm#57685",
        "a part without a grammar behind one that has one",
        "plain",
        Part("a", words(30), 10, form="json"),
        Part("b", words(9, 2), 12, at="a"),
        Part("end", None, at="b"),
        known=True,
    ),
)
