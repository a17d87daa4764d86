"""Reports about sessions, whose input comes in parts, each of which is answered."""

from tests.reports.report import Ask, Call, Part, Report, words

STOPS = {"stop_token_ids": [*range(2, 872)]}
"""Whatever is sampled first ends the answer."""

REPORTS = (
    Report(
        "vllm#28973",
        "the last token of an answer is no part of what follows",
        "plain",
        (
            Part("a", "s", words(30), 8),
            Part("b", "s", words(9, 2), 8, at="a"),
            Part("c", "s", words(40, 3), 8, at="b"),
            Part("end", "s", None, at="c"),
            Ask("beside", words(20, 4), 30),
        ),
    ),
    Report(
        "vllm#52693",
        "a part whose first token ends its answer",
        "plain",
        (
            Part("a", "s", words(30), 8),
            Part("b", "s", words(9, 2), 8, at="a", params=STOPS),
            Part("c", "s", words(12, 3), 8, at="b"),
            Part("end", "s", None, at="c"),
            Ask("beside", words(20, 4), 40),
        ),
        expect={"b": {"length": 1, "finish": "stop"}},
    ),
    Report(
        "vllm#52693",
        "parts that come at once, each of which ends with its first token",
        "sync",
        (
            *(Part(f"p{n}", "s", words(9 + n, n + 1), 8, params=STOPS) for n in range(4)),
            Part("end", "s", None),
            Ask("beside", words(20, 9), 20),
        ),
    ),
    Report(
        "vllm#44526",
        "drafts that were accepted behind the end of a part don't count for the next",
        "eagle, sync",
        (
            *(
                each
                for n, stop in enumerate((450, 810, 310, 730))
                for each in (
                    Part(f"a{n}", f"s{n}", words(30, 2), 30, params={"stop_token_ids": [stop]}),
                    Part(f"b{n}", f"s{n}", words(3, n + 4), 9, at=f"a{n}"),
                    Part(f"end{n}", f"s{n}", None, at=f"b{n}"),
                )
            ),
        ),
        happened=("rejected",),
        failed=True,
    ),
    Report(
        "vllm#42489",
        "parts that fill the context",
        "plain",
        (
            Part("a", "s", words(50), 10),
            Part("b", "s", words(50, 2), 10, at="a"),
            Part("c", "s", words(9, 3), 1, at="b"),
            Part("end", "s", None, at="c"),
        ),
    ),
    Report(
        "vllm#53861",
        "a session is aborted between two parts, and beside one",
        "plain",
        (
            Part("a", "s", words(30), 8),
            Part("b", "t", words(30, 2), 40),
            Call("drop", "a", {"session": "s"}),
            Call("drop", ("b", 4), {"session": "t"}),
            Ask("beside", words(20, 4), 30),
        ),
    ),
    Report(
        "vllm#57685",
        "a part under a grammar behind one without",
        "plain",
        (
            Part("a", "s", words(30), 8),
            Part("b", "s", words(9, 2), 40, at="a", form="json"),
            Part("end", "s", None, at="b"),
        ),
        known="vllm#57685",
    ),
    Report(
        "vllm#57685",
        "a part without a grammar behind one that has one",
        "plain",
        (
            Part("a", "s", words(30), 10, form="json"),
            Part("b", "s", words(9, 2), 12, at="a"),
            Part("end", "s", None, at="b"),
        ),
        known="vllm#57685",
    ),
)
