"""Reports about engines that pause, sleep and get new weights, and about graphs."""

from tests.reports.report import Ask, Call, report, words

RELOADED = (
    Call("drain", "before"),
    Call("sleep", "before", {"level": 2}),
    Call("wake", "before", {"tags": ["weights"]}),
    Call("reload", "before"),
    Call("wake", "before", {"tags": ["kv_cache"]}),
)


def sleep(at):
    """Calls that let the engine sleep and wake up once its requests have ended."""
    return Call("drain", at), Call("sleep", at, {"level": 1}), Call("wake", at)


REPORTS = (
    report(
        "vllm#17103",
        "a prompt that was cached before a sleep has its answer after it",
        "sleeps",
        Ask("before", words(60), 12),
        *sleep("before"),
        Ask("after", words(60), 12, at="before"),
        Ask("other", words(40, 2), 12, at="before"),
    ),
    report(
        "vllm#16234",
        "an engine sleeps and wakes three times",
        "sleeps",
        Ask("a0", words(60), 8),
        *(
            each
            for n in range(3)
            for each in (*sleep(f"a{n}"), Ask(f"a{n + 1}", words(60), 8, at=f"a{n}"))
        ),
    ),
    report(
        "vllm#29341",
        "answers after level 2 are those of the weights that were read again",
        "sleeps",
        Ask("before", words(60), 12),
        *RELOADED,
        Ask("after", words(60), 12, at="before"),
        expect={"after": {"cached": 0}},
    ),
    report(
        "sglang#10071",
        "requests go on, computed again, after a pause that takes their blocks",
        "plain",
        *(Ask(f"r{n}", words(20 + 9 * n, n + 1), 24) for n in range(3)),
        Call("pause", ("r0", 5), {"clear": True}),
        Call("drain", ("r0", 5)),
        Call("resume", ("r0", 5)),
    ),
    report(
        "vllm#32103",
        "requests stay in place over a pause, and others come after it",
        "plain",
        *(Ask(f"r{n}", words(20 + 9 * n, n + 1), 24) for n in range(3)),
        Call("pause", ("r0", 5)),
        Ask("late", words(40, 9), 12, at=("r0", 5)),
        Call("resume", ("r0", 5)),
    ),
    report(
        "vllm#13418",
        "steps between the sizes of graphs are padded",
        "graphs",
        *(Ask(f"r{n}", words(7 + n, n + 1), 8 + 4 * n, at=n) for n in range(6)),
    ),
    report(
        "vllm-ascend#7460",
        "padding of a hybrid's decodes in full graphs",
        "hybrid, graphs",
        *(Ask(f"r{n}", words(9 + 20 * n, n + 1), 10 + 5 * n, at=n) for n in range(5)),
    ),
    report(
        "vllm-ascend#15560",
        "the first answers of a hybrid in graphs are right, too",
        "hybrid, graphs",
        Ask("a", words(20), 16),
        Ask("b", words(20), 16, at="a"),
    ),
)
