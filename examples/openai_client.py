"""Ask a server by the OpenAI client, and print the answer while it comes.

make serve                                # in another terminal
python examples/openai_client.py [--url http://localhost:8000/v1] [QUESTION]
"""

import argparse
import time

import demo


def main() -> None:
    """Ask twice: for the answer in pieces, and as a whole."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--url",
        default="http://localhost:8000/v1",
        help="of the server's API (default: %(default)s)",
    )
    parser.add_argument(
        "question",
        nargs="?",
        default="What is a block table?",
        metavar="QUESTION",
        help="default: %(default)s",
    )
    args = parser.parse_args()
    client, model = demo.connect(args.url, "make serve")
    request = {
        "model": model,
        "messages": [{"role": "user", "content": args.question}],
        "temperature": 0,
        "max_tokens": 64,
    }

    print(f"user:      {args.question}\nassistant: ", end="", flush=True)
    start, first, pieces = time.perf_counter(), 0.0, []
    for chunk in client.chat.completions.create(**request, stream=True):
        piece = chunk.choices[0].delta.content
        if piece:
            first = first or time.perf_counter() - start
            pieces.append(piece)
            print(piece, end="", flush=True)
    seconds = time.perf_counter() - start
    print(f"\n\n{len(pieces)} chunks, the first after {first:.2f} s, all after {seconds:.2f} s")

    whole = client.chat.completions.create(**request)
    print(f"as a whole: {whole.choices[0].message.content}")
    print(
        f"tokens of the prompt: {whole.usage.prompt_tokens}, "
        f"of the answer: {whole.usage.completion_tokens}"
    )


if __name__ == "__main__":
    main()
