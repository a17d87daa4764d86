"""Answer with and without drafts: the same tokens, in fewer steps.

    python examples/speculative_decoding.py [--method eagle3|eagle|draft_model|ngram]

The demo model's drafters learned what it says, which is why most drafts are accepted. For a model
of your own, name its drafter as ``model`` of the speculative config.
"""

import argparse
import time
from typing import Any

import demo
import tiny_model
from vllm import LLM, SamplingParams


def answer(**more: Any) -> tuple[list[tuple[int, ...]], float, dict[str, Any]]:
    """Tokens of each answer, seconds, and what the engine counted."""
    llm = LLM(**demo.settings(), **more, disable_log_stats=False)
    questions = [[{"role": "user", "content": each}] for each, _ in tiny_model.exchanges()]
    start = time.perf_counter()
    outputs = llm.chat(questions, SamplingParams(temperature=0, max_tokens=64))
    seconds = time.perf_counter() - start
    metrics = {metric.name: metric for metric in llm.get_metrics()}
    return [tuple(output.outputs[0].token_ids) for output in outputs], seconds, metrics


def main() -> None:
    """Print what the drafts were good for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    methods = ("eagle3", "eagle", "draft_model", "ngram")
    parser.add_argument(
        "--method",
        choices=methods,
        default="eagle3",
        help="how tokens are drafted (default: %(default)s)",
    )
    drafts = demo.speculation(parser.parse_args().method)

    plain, plain_seconds, _ = answer()
    drafted, seconds, metrics = answer(speculative_config=drafts)

    equal = sum(one == other for one, other in zip(plain, drafted))
    steps = metrics["vllm:spec_decode_num_drafts"].value
    by_place = metrics["vllm:spec_decode_num_accepted_tokens_per_pos"].values
    rates = ", ".join(f"{accepted / steps:.1%}" for accepted in by_place)
    print(f"\nequal answers: {equal} of {len(plain)}, tokens: {sum(map(len, plain))}")
    print(f"accepted of the first draft token, the second, ...: {rates}")
    print(f"tokens of a request's step: {1 + sum(by_place) / steps:.2f} instead of 1")
    print(f"time: {seconds:.1f} s with drafts, {plain_seconds:.1f} s without")


if __name__ == "__main__":
    main()
