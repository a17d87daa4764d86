"""Answer a batch of questions without a server.

    python examples/offline_batch.py [--model PATH] [QUESTION ...]

Without a question, those that the demo model learned.
"""

import argparse
import time

import demo
import tiny_model
from vllm import LLM, SamplingParams


def main() -> None:
    """Generate and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="folder or name of a model; default: the demo model")
    parser.add_argument(
        "questions",
        nargs="*",
        metavar="QUESTION",
        help="default: those that the demo model learned",
    )
    args = parser.parse_args()
    questions = args.questions or [question for question, _ in tiny_model.exchanges()]

    llm = LLM(**demo.settings(args.model))
    params = SamplingParams(temperature=0, max_tokens=64)
    start = time.perf_counter()
    outputs = llm.chat([[{"role": "user", "content": each}] for each in questions], params)
    seconds = time.perf_counter() - start

    total = 0
    for question, output in zip(questions, outputs):
        answer = output.outputs[0]
        total += len(answer.token_ids)
        print(f"\nuser:      {question}\nassistant: {answer.text}")
        print(f"           tokens: {len(answer.token_ids)}, finished by {answer.finish_reason}")
    print(f"\nrequests: {len(questions)}, tokens: {total}, {seconds:.1f} s")


if __name__ == "__main__":
    main()
