"""Ask a server about an image, by the OpenAI client.

    make serve VISION=1                       # in another terminal
    python examples/image_request.py [--url http://localhost:8000/v1] [--image FILE] [QUESTION]

Without a file, about a picture of a sunset. The tiny model of `make serve VISION=1` has random
weights: what it says is gibberish, but depends on each pixel.
"""

import argparse
import base64
import mimetypes
from pathlib import Path

import demo


def data_url(file: Path) -> str:
    """A file as a URL, so that the server needs no access to it."""
    kind = mimetypes.guess_type(file)[0] or "image/png"
    return f"data:{kind};base64," + base64.b64encode(file.read_bytes()).decode()


def main() -> None:
    """Ask once with the image and once without, to tell what the image takes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--url",
        default="http://localhost:8000/v1",
        help="of the server's API (default: %(default)s)",
    )
    parser.add_argument(
        "--image", type=Path, metavar="FILE", help="a picture; default: a sunset that is drawn here"
    )
    parser.add_argument(
        "question",
        nargs="?",
        default="What is this?",
        metavar="QUESTION",
        help="asked of the picture",
    )
    args = parser.parse_args()
    client, model = demo.connect(args.url, "make serve VISION=1")
    url = data_url(args.image) if args.image else demo.image_url()
    image = {"type": "image_url", "image_url": {"url": url}}
    text = {"type": "text", "text": args.question}

    tokens = []
    for name, content in ((f"[{args.image or 'a sunset'}] ", [image, text]), ("", [text])):
        answer = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": content}],
            temperature=0,
            max_tokens=12,
        )
        tokens.append(answer.usage.prompt_tokens)
        print(f"user:      {name}{args.question}")
        print(f"assistant: {answer.choices[0].message.content}\n")
    print(f"tokens of the prompt: {tokens[0]}, of the image: {tokens[0] - tokens[1]}")


if __name__ == "__main__":
    main()
