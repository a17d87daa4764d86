"""Turn texts into embeddings, and find for each the text most like it.

    python examples/embeddings.py [--model PATH] [TEXT ...]

The demo model was not trained for this: its embedding of a text is the last token's hidden state.
"""

import argparse

import demo
import torch
from vllm import LLM

TEXTS = [
    "What is a token?",
    "What is a draft token?",
    "What is a block table?",
    "What is block zero?",
    "Count to ten.",
    "Say goodbye.",
]


def main() -> None:
    """Embed and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="folder or name of a model; default: the demo model")
    parser.add_argument("texts", nargs="*", default=TEXTS, metavar="TEXT", help="what is embedded")
    args = parser.parse_args()

    llm = LLM(**demo.settings(args.model), runner="pooling")
    outputs = llm.embed(args.texts)
    embeddings = torch.tensor([output.outputs.embedding for output in outputs])  # of length 1
    similarities = embeddings @ embeddings.T

    print(f"\n{len(embeddings)} embeddings of {embeddings.shape[1]} numbers each")
    for text, embedding in zip(args.texts, embeddings):
        print(" ".join(f"{number:+.4f}" for number in embedding[:4]) + f" ...  {text}")
    print("\ncosine similarities")
    for text, row in zip(args.texts, similarities):
        print(" ".join(f"{number:+.4f}" for number in row) + f"  {text}")
    nearest = similarities.fill_diagonal_(-1).argmax(dim=1)
    print()
    for text, other in zip(args.texts, nearest):
        print(f"{text} is most like: {args.texts[other]}")


if __name__ == "__main__":
    main()
