"""Reports about images beside text."""

from tests.helpers.vision import Request, chat, make_image
from tests.reports.report import Ask, Call, report

QUESTION = "What is a slot mapping?"
IMAGES = [make_image(70 + n, 40 + 8 * n, 32) for n in range(5)]
LARGE = make_image(80, 90, 60)
SIMILAR = [make_image(150 + n, 90, 60) for n in range(11)]
LONG = "Of a slot mapping, of a block table and of a step. " * 24

REPORTS = (
    report(
        "vllm#20261",
        "equal texts with different images don't share blocks",
        "images",
        *(Ask(f"r{n}", chat(make_image(90 + n), QUESTION), 10) for n in range(3)),
        Ask("again", chat(make_image(90), QUESTION), 10, at="r0"),
        Ask("fourth", chat(make_image(94), QUESTION), 10, at="r0"),
        happened=("cached",),
    ),
    report(
        "vllm#10388",
        "positions of an image that two chunks share",
        "images",
        Ask("a", chat(LARGE, QUESTION), 10),
        Ask("b", chat("Compare ", IMAGES[0], LARGE, QUESTION), 10, at=1),
        happened=("ChunkedPrefill",),
    ),
    report(
        "vllm#16875",
        "an image has left the cache of processed ones before its request is read",
        "images, small cache",
        *(Ask(f"r{n}", chat(IMAGES[n], QUESTION), 6) for n in range(5)),
        *(Ask(f"again{n}", chat(IMAGES[n], QUESTION), 6) for n in range(5)),
    ),
    report(
        "vllm#16273",
        "images that were sent before are sent again once they were dropped",
        "images, small cache",
        Ask("first", chat(IMAGES[0], QUESTION), 6),
        *(Ask(f"r{n}", chat(IMAGES[n], QUESTION), 6, at="first") for n in range(1, 5)),
        Ask("again", chat("Why? ", IMAGES[0]), 6, at="r4"),
        Ask("two", chat(IMAGES[1], IMAGES[0], QUESTION), 6, at="r4"),
    ),
    report(
        "tenstorrent/vllm#326",
        "images of requests that were preempted",
        "images, few blocks",
        *(Ask(f"r{n}", chat(IMAGES[n], QUESTION), 40) for n in range(4)),
        happened=("preempted",),
    ),
    report(
        "vllm#46747",
        "an image that the prefix cache covered is encoded when its blocks are lost",
        "images, few blocks",
        Ask("first", chat(LARGE, QUESTION), 4),
        Ask("covered", chat(LARGE, QUESTION), 30, at="first"),
        Call("reset", ("covered", 4)),
        Call("reset images", ("covered", 4)),
        Ask("beside", chat(IMAGES[1], QUESTION), 12, at="first"),
        happened=("cached", "preempted"),
        failed=True,
    ),
    report(
        "vllm#46354",
        "an image is sent again after a request with it was refused",
        "images, few blocks",
        Ask(
            "refused",
            chat(IMAGES[3], QUESTION),
            params={"logit_bias": {10**6: 1.0}},
            refused="logit_bias",
        ),
        Ask("same", chat(IMAGES[3], QUESTION), 8, at=1),
        Ask("other", chat(IMAGES[4], QUESTION), 8, at=1),
        failed=True,
    ),
    report(
        "vllm#12545",
        "a request with an image is aborted while the image is encoded",
        "images, small cache",
        Ask("gone", chat(LARGE, QUESTION), 12),
        Ask("other", chat("Which? ", LARGE), 8),
        Call("abort", 1, {"name": "gone"}),
        Ask("after", chat(LARGE, QUESTION), 8, at="other"),
    ),
    report(
        "vllm#31857",
        "more images wait than the encoder's cache takes",
        "images, small cache",
        *(Ask(f"r{n}", chat(LARGE, make_image(100 + n, 90, 60), QUESTION), 6) for n in range(6)),
    ),
    report(
        "vllm#43587",
        "prefixes of a hybrid that sees are found in the cache",
        "images, hybrid",
        Ask("first", Request(LONG), 6),
        Ask("again", Request(LONG + " Why?"), 6, at="first"),
        Ask("image", chat(LARGE, LARGE, LARGE, LARGE, QUESTION), 6),
        Ask("image again", chat(LARGE, LARGE, LARGE, LARGE, "Why?"), 6, at="image"),
        happened=("cached",),
    ),
    report(
        "vllm#47738",
        "a hybrid's prompt has more images than its encoder takes at once",
        "images, hybrid",
        Ask("a", chat(LARGE, " and ", make_image(120, 90, 60), QUESTION), 8),
        Ask("b", chat(make_image(121, 90, 60), IMAGES[0], LARGE, QUESTION), 8, at=1),
        happened=("ChunkedPrefill",),
    ),
    report(
        "vllm#32469",
        "a head that drafts reads images whose part of a prompt is behind the chunk",
        "images, eagle3",
        Ask("a", chat("Compare ", IMAGES[0], LARGE, QUESTION), 16),
        Ask("b", chat(IMAGES[2], QUESTION), 16, at=1),
        Ask("again", chat("Compare ", IMAGES[0], LARGE, QUESTION), 16, at="a"),
        happened=("ChunkedPrefill",),
    ),
    report(
        "vllm#45347",
        "an image at the end of a prompt is kept until drafts no longer read it",
        "images, eagle3",
        *(Ask(f"r{n}", chat(QUESTION * (n + 1), LARGE), 20, at=n) for n in range(4)),
        *(Ask(f"s{n}", chat("Why? " * n, IMAGES[n], LARGE), 20, at=("r0", 3)) for n in range(4)),
    ),
    report(
        "LMCache#4086",
        "blocks on the host are those of an image, not of its place in the text",
        "images, offloading",
        *(
            Ask(f"r{n}", chat(SIMILAR[n], QUESTION), 6, at=f"r{n - 1}" if n else 0)
            for n in range(8)
        ),
        *(Ask(f"again{n}", chat(SIMILAR[n], QUESTION), 8, at="r7") for n in range(4)),
        *(Ask(f"new{n}", chat(SIMILAR[8 + n], QUESTION), 8, at="again3") for n in range(3)),
        expect={f"again{n}": {"cached": 32} for n in range(4)},
        happened=("stored",),
    ),
)
