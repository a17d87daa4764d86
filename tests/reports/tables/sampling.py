"""Reports about what samples are drawn from, and what is told of them."""

from tests.reports.report import ALONE, Ask, Report, words

SEEDED = {"temperature": 1.0, "seed": 42}
RANDOM = {"temperature": 1.0}
AMONG_FEW = {"allowed_token_ids": [*range(60, 80)]}
"""The model has to repeat itself, so that penalties count."""
HALF_OF_PROMPT = {"allowed_token_ids": sorted({*words(40), *words(40, 9)})}
BAD_WORDS = ["Wh made", "igh It", "che reads", "refill gav", "addingor", "Iing", "hunked came"]
"""Pairs of tokens that the model says behind prompts of `words`."""

REPORTS = (
    Report(
        "vllm#27878",
        "penalties see tokens of asynchronous steps",
        "plain",
        (
            Ask("frequency", words(9), 24, params=AMONG_FEW | {"frequency_penalty": 1.5}),
            Ask("presence", words(20, 2), 24, params=AMONG_FEW | {"presence_penalty": 1.5}),
            Ask("plain", words(30, 3), 24),
        ),
        happened=("changed",),
    ),
    Report(
        "vllm-ascend#7769",
        "a repetition penalty counts generated tokens",
        "plain",
        (Ask("a", words(1), 30, params=AMONG_FEW | {"repetition_penalty": 1.8}),),
        happened=("changed",),
    ),
    Report(
        "vllm-ascend#7769",
        "a repetition penalty counts generated tokens, synchronously",
        "sync",
        (Ask("a", words(1), 30, params=AMONG_FEW | {"repetition_penalty": 1.8}),),
        happened=("changed",),
    ),
    Report(
        "vllm-project/vllm-metal#69",
        "prompts count for repetition, not for presence",
        "plain",
        (
            Ask("repetition", words(40), 16, params=HALF_OF_PROMPT | {"repetition_penalty": 1.5}),
            Ask("presence", words(40), 16, params=HALF_OF_PROMPT | {"presence_penalty": 2.0}),
        ),
        happened=("changed",),
    ),
    Report(
        "vllm#51226",
        "a seed holds beside a request without one",
        "plain",
        (
            Ask("seeded", words(9), 16, params=SEEDED),
            Ask("free", words(9, 2), 16, params=RANDOM),
            Ask("other", words(9, 3), 16, params={"temperature": 0.8, "seed": 7}),
        ),
        ALONE,
    ),
    Report(
        "tenstorrent/tt-metal#46350",
        "seeds follow requests when the batch closes its gaps",
        "sync",
        (
            Ask("first", words(9), 3, params={"temperature": 1.0, "seed": 1}),
            Ask("second", words(9, 2), 6, params={"temperature": 1.0, "seed": 2}),
            Ask("third", words(9, 3), 20, params={"temperature": 1.0, "seed": 3}),
            Ask("fourth", words(9, 4), 20, params={"temperature": 1.0, "seed": 4}),
        ),
        ALONE,
    ),
    Report(
        "vllm#16529",
        "a bias of a token beyond the vocabulary is refused",
        "plain",
        (
            Ask("bad", words(9), params={"logit_bias": {10**6: 5.0}}, refused="logit_bias"),
            Ask("good", words(9, 2), params={"logit_bias": {40: 50.0, 41: -100.0}}),
        ),
        happened=("changed",),
    ),
    Report(
        "vllm#21987",
        "a stop string waits for the least number of tokens",
        "plain",
        (Ask("a", words(9), 20, params={"stop": ["a", "e", " "], "min_tokens": 20}),),
        expect={"a": {"length": 20, "finish": "length"}},
    ),
    Report(
        "vllm#5849",
        "none of several ends comes before the least number of tokens",
        "plain",
        (
            Ask("a", words(9), 20, params={"stop_token_ids": [*range(40, 400)], "min_tokens": 8}),
            Ask("b", words(9, 2), 20, params={"stop_token_ids": [*range(40, 400)]}),
        ),
        happened=("changed",),
    ),
    Report(
        "vllm#12584",
        "samples of one request don't replace each other",
        "plain",
        (
            Ask("a", words(9), 8, params={"temperature": 1.0, "seed": 3, "n": 3}),
            Ask("b", words(9, 2), 8),
        ),
        ALONE,
        expect={"a": {"lengths": [8, 8, 8], "different": 3}},
    ),
    Report(
        "vllm#8268",
        "a prompt in the prefix cache is scored again",
        "plain",
        (
            Ask("first", words(33), 1, params={"prompt_logprobs": 1}),
            Ask("again", words(33), 1, at="first", params={"prompt_logprobs": 1}),
            Ask("plain", words(33), 4, at="again"),
        ),
        expect={"again": {"cached": 0}, "plain": {"cached": 32}},
    ),
    Report(
        "vllm#42019",
        "scores of prompts that share a beginning are their own",
        "plain",
        (
            Ask("a", words(40) + words(9, 2), 2, params={"prompt_logprobs": 0}),
            Ask("b", words(40) + words(20, 3), 2, params={"prompt_logprobs": 3}),
            Ask("c", words(17) + words(60, 4), 2, at="a", params={"prompt_logprobs": 1}),
            Ask("d", words(40), 2, at="b"),
        ),
    ),
    Report(
        "sglang#1795",
        "log-probabilities of steps that overlap are those of their tokens",
        "plain",
        (
            Ask("a", words(9), 12, params={"logprobs": 3}),
            Ask("b", words(60, 2), 12, params={"logprobs": 0}),
            Ask("c", words(5, 3), 12, at=3),
        ),
    ),
    Report(
        "vllm#44727",
        "tokens that one request names leave the likeliest ones to the others",
        "eagle",
        (
            Ask("named", words(9), 8, params={"logprob_token_ids": [5, 9]}),
            Ask("three", words(20, 2), 8, params={"logprobs": 3}),
            Ask("none", words(30, 3), 8),
            Ask("sampled", words(40, 4), 8, params={"logprobs": 0}),
        ),
        failed=True,
    ),
    Report(
        "vllm#57986",
        "bad words that leave no allowed token are refused",
        "plain",
        (
            Ask(
                "none",
                words(9),
                3,
                params={"allowed_token_ids": [67, 261], "bad_words": ["a"]},
                refused="bad_words",
            ),
        ),
        known="vllm#57986",
    ),
    Report(
        "vllm#13376",
        "bad words of several tokens leave their beginnings alone",
        "plain",
        (
            Ask("a", words(9), 24, params={"bad_words": BAD_WORDS}),
            Ask("b", words(20, 2), 24, params={"bad_words": BAD_WORDS}),
            Ask("plain", words(30, 3), 24),
        ),
        happened=("changed",),
    ),
    Report(
        "vllm-project/vllm-gaudi#1200",
        "a grammar leaves other rows of the batch alone",
        "plain",
        (
            Ask("plain", words(9), 20),
            Ask("forced", words(20, 2), 40, form="json"),
            Ask("late", words(30, 3), 20, at=4),
        ),
    ),
    Report(
        "vllm#29379",
        "grammars advance by the tokens of asynchronous steps",
        "plain",
        (
            Ask("a", words(9), 40, form="json"),
            Ask("b", words(60, 2), 40, form="regex"),
            Ask("c", words(5, 3), 40, at=3, form="json"),
        ),
        expect={each: {"finish": "stop"} for each in "abc"},
    ),
)
