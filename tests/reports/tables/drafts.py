"""Reports about speculation: drafts change nothing that a request gets, but the time."""

from tests.reports.report import Ask, Call, report, seeded, words
from tests.reports.tables.sampling import BAD_WORDS

SAME = [30, 31, 32, 33] * 10
"""A prompt that repeats itself, so that drafts are found in it."""
STOPS = {450: 9, 810: 12, 310: 14, 730: 7}
"""Tokens of the answer to `words(30, 2)`, and the length of the answer that ends with each."""

REPORTS = (
    report(
        "vllm#48245",
        "placeholders of drafts on their way when their request is preempted",
        "eagle, few blocks",
        *(Ask(f"r{n}", words(45 + n, n + 1), 60) for n in range(4)),
        happened=("preempted",),
    ),
    report(
        "vllm#41190",
        "requests with drafts are preempted again and again",
        "eagle, few blocks",
        *(Ask(f"r{n}", words(80, n + 1), 40, at=n) for n in range(5)),
        happened=("preempted",),
    ),
    report(
        "vllm#30142",
        "a reset under drafts that were not verified yet",
        "eagle",
        *(Ask(f"r{n}", words(20 + n, n + 1), 24) for n in range(3)),
        Call("reset", ("r0", 5)),
        Call("reset", ("r1", 11)),
        happened=("preempted",),
    ),
    report(
        "vllm#42043",
        "a pause in mode keep, whose steps end before the next is scheduled",
        "eagle",
        *(Ask(f"r{n}", words(20 + n, n + 1), 30) for n in range(4)),
        *(
            Call(name, ("r0", tokens))
            for tokens in (4, 9, 15, 22)
            for name in ("pause", "drain", "resume")
        ),
        failed=True,
    ),
    report(
        "sglang#22049",
        "penalties count drafts that are verified",
        "eagle",
        Ask("frequency", words(9), 30, params={"frequency_penalty": 1.5}),
        Ask("repetition", words(30, 2), 30, params={"repetition_penalty": 1.6}),
        Ask("presence", words(20, 3), 30, params={"presence_penalty": 1.5}),
        Ask("plain", words(40, 4), 30),
        happened=("changed",),
    ),
    report(
        "sgl-project/sglang-jax#1293",
        "each request's own temperature and filters draw its tokens",
        "eagle",
        Ask("greedy", words(20, 3), 24),
        Ask("hot", words(9), 24, params=seeded(1, temperature=1.5)),
        Ask("few", words(30, 2), 24, params=seeded(2, top_k=3)),
        Ask("likely", words(40, 4), 24, params=seeded(3, top_p=0.5, temperature=0.7)),
    ),
    report(
        "vllm#31908",
        "bad words of a request that isn't the first one of the batch",
        "eagle",
        Ask("plain", words(9), 30),
        Ask("words", words(30, 2), 30, params={"bad_words": BAD_WORDS}),
        Ask("late", words(20, 3), 30, at=5, params={"bad_words": BAD_WORDS}),
        happened=("changed",),
    ),
    report(
        "vllm#32642",
        "drafts don't end a request before its least number of tokens",
        "eagle",
        Ask("a", words(9), 20, params={"stop_token_ids": [*range(40, 300)], "min_tokens": 9}),
        Ask("b", words(9, 2), 20, params={"stop_token_ids": [*range(40, 300)], "min_tokens": 2}),
        Ask("c", words(9, 3), 20),
        happened=("changed",),
    ),
    report(
        "sglang#31599",
        "a stop among accepted drafts comes before the most tokens",
        "eagle",
        *(
            Ask(f"{token}, {most}", words(30, 2), most, params={"stop_token_ids": [token]})
            for token, length in STOPS.items()
            for most in (length, length + 1, 30)
        ),
        happened=("partly",),
    ),
    report(
        "vllm#34497",
        "log-probabilities of accepted drafts are the model's",
        "eagle",
        Ask("a", words(9), 24, params={"logprobs": 2}),
        Ask("b", words(30, 2), 24),
        Ask("c", words(60, 3), 24, params={"logprobs": 0}),
    ),
    report(
        "vllm-ascend#7861",
        "log-probabilities beside drafts, scheduled synchronously",
        "eagle, sync",
        Ask("a", words(9), 24, params={"logprobs": 2}),
        Ask("b", words(30, 2), 24),
        Ask("c", SAME, 24, params={"logprobs": 1}),
    ),
    report(
        "vllm#17876",
        "log-probabilities of drafts that were looked up are not 0",
        "ngram",
        Ask("a", words(90), 24, params={"logprobs": 1}),
        Ask("b", words(100, 2), 24, params={"logprobs": 2}),
        happened=("rejected",),
    ),
    report(
        "vllm#38711",
        "log-probabilities as near the context's end as drafts are many",
        "eagle, sync",
        Ask("a", words(100), 28, params={"logprobs": 1}),
        Ask("b", words(90, 2), 38, params={"logprobs": 1}),
        Ask("c", words(9, 3), 60),
    ),
    report(
        "vllm#16087",
        "drafts beyond the end of the context",
        "eagle",
        *(Ask(f"r{n}", words(100 + 5 * n, n + 1), 28 - 5 * n) for n in range(5)),
    ),
    report(
        "vllm#42533",
        "looked up drafts beyond the end of the context",
        "ngram",
        *(Ask(f"r{n}", words(100 + 3 * n, n + 1), 28 - 3 * n) for n in range(5)),
        happened=("rejected",),
    ),
    report(
        "vllm#7047",
        "prompts of one token have nothing to look up",
        "ngram",
        Ask("a", words(1), 20),
        Ask("b", [7, 7, 7, 7, 7, 7], 20),
        Ask("c", words(2, 3), 20),
    ),
    report(
        "vllm-ascend#2280",
        "more tokens than the first drafts found",
        "ngram",
        *(
            Ask(f"r{n}", words(60, n + 1), 64, params=seeded(n, temperature=0.7, top_p=0.9))
            for n in range(3)
        ),
        happened=("rejected",),
    ),
    report(
        "vllm#27969",
        "drafts that a grammar doesn't take",
        "eagle",
        Ask("a", words(9), 40, form="json"),
        Ask("b", words(30, 2), 40, form="regex"),
        Ask("c", words(20, 3), 24),
    ),
    report(
        "vllm#44006",
        "a grammar advances by accepted drafts alone",
        "eagle, sync",
        *(Ask(f"r{n}", words(9 + 7 * n, n + 1), 40, form="json") for n in range(4)),
        Ask("plain", words(20, 9), 24),
    ),
    report(
        "vllm#52620",
        "looked up drafts of concurrent requests under grammars",
        "ngram",
        *(
            Ask(f"r{n}", words(60, n + 1), 60, at=n // 2, form=("json", "regex")[n % 2])
            for n in range(6)
        ),
        happened=("SpecDecoding",),
    ),
    report(
        "vllm#30916",
        "drafts of a preempted request under a grammar",
        "eagle, few blocks",
        *(Ask(f"r{n}", words(80, n + 1), 40, form="json") for n in range(4)),
        Ask("plain", words(80, 9), 40),
        happened=("preempted",),
    ),
    report(
        "vllm#41838",
        "a prompt of the same step is found in the cache before it is written",
        "eagle",
        *(Ask(f"r{n}", words(70), 24) for n in range(4)),
        Ask("late", words(70), 24, at=("r0", 6)),
        happened=("cached",),
    ),
    report(
        "vllm-ascend#9024",
        "MTP drafts behind prefixes in the cache",
        "mtp",
        Ask("first", words(70), 16),
        Ask("again", words(70), 16, at="first"),
        Ask("longer", words(70) + words(20, 2), 16, at=("again", 3)),
        happened=("cached",),
    ),
    report(
        "vllm#46118",
        "MTP drafts that a grammar doesn't take",
        "mtp",
        Ask("a", words(9), 60, form="json"),
        Ask("b", words(30, 2), 60, form="json", at=3),
        Ask("c", words(20, 3), 24),
    ),
    report(
        "vllm#39273",
        "looked up drafts leave no trace in recurrent states",
        "hybrid, ngram",
        Ask("a", SAME, 30),
        Ask("b", words(40) * 3, 30),
        Ask("c", words(150, 3), 30, at=4),
        happened=("rejected",),
    ),
    report(
        "vllm#53912",
        "MTP drafts of a hybrid behind prefixes in the cache",
        "hybrid, mtp",
        Ask("first", words(280), 16),
        Ask("again", words(280), 16, at="first"),
        Ask("longer", words(270) + words(20, 2), 16, at=("again", 3)),
        Ask("other", words(140) + words(20, 4), 16, at=("again", 3)),
        happened=("cached",),
    ),
    report(
        "vllm#51113",
        "chunks of prompts that share steps end where their states are kept",
        "hybrid, mtp",
        *(Ask(f"r{n}", words(280 + 3 * n, n + 1), 8) for n in range(4)),
        *(
            Ask(f"again{n}", words(280 + 3 * n, n + 1) + words(30, 9), 12, at="r3")
            for n in range(4)
        ),
        happened=("cached",),
    ),
    report(
        "vllm#53488",
        "scores of a hybrid's prompts in chunks beside drafts",
        "hybrid, mtp",
        *(
            Ask(f"r{n}", words(60 + 50 * n, n + 1), 6, params={"prompt_logprobs": 1})
            for n in range(5)
        ),
        happened=("ChunkedPrefill",),
    ),
    report(
        "vllm#55178",
        "the last tokens of a hybrid's prompt beside rows with drafts",
        "hybrid, mtp",
        Ask("going", words(20), 60),
        *(Ask(f"r{n}", words(47 + n, n + 2), 12, at=3 + 2 * n) for n in range(6)),
    ),
    report(
        "vllm#53407",
        "batches between the sizes of full graphs",
        "eagle, graphs",
        *(Ask(f"r{n}", words(9 + n, n + 1), 12 + 6 * n, at=n) for n in range(6)),
    ),
    report(
        "vllm-ascend#5164",
        "padding of uniform decodes in graphs, beside prompts",
        "eagle, graphs",
        *(Ask(f"r{n}", words(9, n + 1), 20) for n in range(3)),
        Ask("late", words(70, 9), 20, at=4),
    ),
)
