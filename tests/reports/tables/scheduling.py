"""Reports about who is scheduled when: chunks, preemption, priorities, ends of requests."""

from tests.reports.report import ALONE, Ask, Call, Report, words

CROWD = tuple(Ask(f"r{n}", words(30 + n, n + 1), 40) for n in range(4))
"""More than fit into a cache of 12 blocks: some are preempted."""

REPORTS = (
    Report(
        "vllm#28787",
        "chunks of a prompt that is computed again read its answer, too",
        "few blocks",
        CROWD,
        happened=("preempted", "ChunkedPrefill"),
    ),
    Report(
        "vllm#38624",
        "a token on its way at a preemption comes once",
        "few blocks",
        tuple(Ask(f"r{n}", words(20, n + 1), 50, at=n) for n in range(5)),
        happened=("preempted",),
    ),
    Report(
        "vllm#16832",
        "answers of preempted requests are whole",
        "few blocks, sync",
        CROWD,
        expect={f"r{n}": {"length": 40, "finish": "length"} for n in range(4)},
        happened=("preempted",),
    ),
    Report(
        "vllm-ascend#11296",
        "a resumed prompt ends where its tokens end, not where its prompt did",
        "few blocks, sync",
        tuple(Ask(f"r{n}", words(9, n + 1), 70) for n in range(4)),
        happened=("preempted", "ChunkedPrefill"),
    ),
    Report(
        "sglang#1860",
        "requests that are taken back beside overlapping steps",
        "few blocks",
        tuple(Ask(f"r{n}", words(45, n + 1), 30, at=2 * n) for n in range(4)),
        happened=("preempted",),
    ),
    Report(
        "vllm#29071",
        "scores of a prompt whose chunks are computed again",
        "few blocks",
        tuple(
            Ask(f"r{n}", words(60 + n, n + 1), 40, params={"prompt_logprobs": 1, "logprobs": 1})
            for n in range(3)
        ),
        happened=("preempted", "ChunkedPrefill"),
    ),
    Report(
        "vllm#8844",
        "several samples of one request are preempted",
        "few blocks",
        (
            Ask("a", words(30), 40, params={"temperature": 1.0, "seed": 5, "n": 3}),
            Ask("b", words(30, 2), 40, params={"temperature": 1.0, "seed": 6, "n": 3}),
        ),
        ALONE,
        expect={each: {"lengths": [40, 40, 40], "different": 3} for each in "ab"},
        happened=("preempted",),
    ),
    Report(
        "vllm#46066",
        "running requests are preempted by a reset while steps are in flight",
        "plain",
        (
            *(Ask(f"r{n}", words(20 + n, n + 1), 20, at=n) for n in range(3)),
            Call("reset", ("r0", 4)),
            Call("reset", ("r2", 9)),
        ),
        happened=("preempted",),
    ),
    Report(
        "vllm#23347",
        "a request that was scheduled is preempted in the same step",
        "priority",
        (
            *(Ask(f"low{n}", words(20, n + 1), 50, priority=5) for n in range(3)),
            Ask("high", words(40, 9), 40, at=4, priority=0),
            Ask("higher", words(20, 8), 40, at=8, priority=-1),
        ),
        happened=("preempted",),
    ),
    Report(
        "vllm#9272",
        "a request of priority -10 takes the place of others",
        "priority",
        (
            *(Ask(f"low{n}", words(30, n + 1), 40) for n in range(4)),
            Ask("high", words(60, 9), 40, at=6, priority=-10),
        ),
        happened=("preempted",),
    ),
    Report(
        "vllm#21519",
        "several samples of one request by priority",
        "priority",
        (
            Ask("a", words(30), 30, priority=3, params={"temperature": 1.0, "seed": 5, "n": 3}),
            Ask("b", words(30, 2), 30, at=3, params={"temperature": 1.0, "seed": 6, "n": 2}),
            Ask("c", words(30, 3), 30, at=5, priority=-1),
        ),
        ALONE,
        expect={"a": {"lengths": [30, 30, 30]}, "b": {"lengths": [30, 30]}},
    ),
    Report(
        "vllm#49097",
        "nobody is skipped when the victim stood before the request that needs its blocks",
        "priority",
        (
            Ask("late", words(20), 50, priority=9),
            Ask("b", words(45, 2), 40, at=2, priority=2),
            Ask("c", words(45, 3), 40, at=4, priority=1),
            Ask("d", words(45, 4), 40, at=6, priority=0),
        ),
        happened=("preempted",),
    ),
    Report(
        "vllm#11186",
        "a prompt of whole blocks that are all cached computes its last block",
        "plain",
        (
            Ask("first", words(48), 4),
            Ask("again", words(48), 4, at="first"),
            Ask("longer", words(49), 4, at="again"),
        ),
        expect={"again": {"cached": 32}, "longer": {"cached": 48}},
    ),
    Report(
        "vllm#25780",
        "what a preempted request finds of its own is no hit of its prompt",
        "few blocks",
        CROWD,
        expect={f"r{n}": {"cached": 0} for n in range(4)},
        happened=("preempted", "cached"),
    ),
    Report(
        "vllm-ascend#2943",
        "chunks of a prompt behind a prefix that is cached",
        "plain",
        (
            Ask("first", words(60), 8),
            Ask("second", words(60) + words(60, 2), 8, at="first"),
            Ask("third", words(50) + words(60, 3), 8, at=("second", 2)),
        ),
        expect={"second": {"cached": 48}, "third": {"cached": 48}},
        happened=("ChunkedPrefill",),
    ),
    Report(
        "vllm#15041",
        "a request of the same id after one that ended",
        "plain",
        (
            Ask("first", words(20), 8, id="same"),
            Ask("second", words(30, 2), 8, at="first", id="same"),
            Ask("other", words(9, 3), 30),
        ),
    ),
    Report(
        "vllm#29355",
        "a request of the same id while the step behind a stop is in flight",
        "plain",
        (
            Ask("first", words(20), 40, id="same", params={"stop_token_ids": [*range(40, 500)]}),
            Ask("second", words(30, 2), 8, at="first", id="same"),
        ),
    ),
    Report(
        "vllm#23697",
        "a request of the same id at once after its predecessor's abort",
        "plain",
        (
            Ask("first", words(20), 60, id="same"),
            Ask("other", words(9, 3), 30),
            Call("abort", ("first", 5), {"name": "same"}),
            Ask("second", words(30, 2), 8, at=("first", 5), id="same"),
        ),
    ),
    Report(
        "vllm-project/sglang-jax#1487",
        "tokens on their way belong to their request, whatever prompts come between",
        "plain",
        (
            Ask("long", words(9), 40),
            *(Ask(f"r{n}", words(3 + 5 * n, n + 2), 3, at=2 + n) for n in range(12)),
        ),
    ),
    Report(
        "vllm#36580",
        "slots of a prompt's second chunk follow those of its first",
        "sync",
        (
            Ask("a", words(110), 8),
            Ask("b", words(101, 2), 8),
            Ask("c", words(5, 3), 20),
        ),
        happened=("ChunkedPrefill",),
    ),
    Report(
        "sglang#38319",
        "a prompt is aborted between two chunks, and others begin as it does",
        "plain",
        (
            Ask("gone", words(110), 8),
            Ask("beside", words(20, 2), 20),
            Call("abort", 2, {"name": "gone"}),
            *(Ask(f"r{n}", words(90) + words(9, n + 3), 8, at=2 + n) for n in range(3)),
        ),
        happened=("cached",),
    ),
    Report(
        "sglang#38981",
        "a prompt longer than its windows is aborted between two chunks",
        "windows",
        (
            Ask("gone", words(110), 8),
            Ask("beside", words(20, 2), 20),
            Call("abort", 2, {"name": "gone"}),
            *(Ask(f"r{n}", words(90) + words(9, n + 3), 8, at=2 + n) for n in range(3)),
        ),
    ),
    Report(
        "sglang#38319",
        "a hybrid's prompt is aborted between two chunks",
        "hybrid",
        (
            Ask("gone", words(400), 8),
            Ask("beside", words(20, 2), 40),
            Call("abort", 6, {"name": "gone"}),
            *(Ask(f"r{n}", words(380) + words(9, n + 3), 8, at=6 + n) for n in range(2)),
        ),
    ),
    Report(
        "vllm#16528",
        "long prompts are cut beside short ones and decodes",
        "short chunks",
        tuple(Ask(f"r{n}", words(9 + 30 * (n % 4), n + 1), 12, at=n) for n in range(8)),
        happened=("ChunkedPrefill",),
    ),
    Report(
        "vllm#40302",
        "prompts as long as the context and longer are refused, and others go on",
        "plain",
        (
            Ask("going", words(9), 20),
            Ask("full", words(128, 2), at=3, refused="longer than|maximum|at least one"),
            Ask("over", words(200, 3), at=4, refused="longer than|maximum|at least one"),
            Ask("fits", words(127, 4), 1, at=5),
        ),
    ),
)
