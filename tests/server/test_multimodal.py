"""`vllm serve` with a model that sees: images and videos over HTTP, beside text and bad data."""

import base64
import io
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import demo

from tests.helpers.examples import run_client
from tests.helpers.hybrids import make_model_that_sees
from tests.helpers.mtp import add_mtp_layer
from tests.helpers.vision import FPS, Reference, chat, make_image, make_video
from tests.server.process import CHAT, COMPLETIONS, TOKENS, Server

MAX_TOKENS = 12
WHAT = "What is this?"
QUESTION = {"type": "text", "text": WHAT}
DRAFTS = {"method": "mtp", "num_speculative_tokens": 2}


def encoded(image: Image.Image, kind: str) -> str:
    file = io.BytesIO()
    image.save(file, kind)
    return base64.b64encode(file.getvalue()).decode()


def decoded(data: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(data)))


def url(address: str) -> dict:
    kind = address.partition("/")[0] + "_url"
    return {"type": kind, kind: {"url": f"data:{address}"}}


def png(image: Image.Image) -> dict:
    return url(f"image/png;base64,{encoded(image, 'PNG')}")


class VisionServer(Server):
    """A server, what transformers says of the same model, and a request whose answer is known."""

    def __init__(self, model: Path, log: Path, seed: int, *flags: str) -> None:
        self.reference, self.image = Reference(model), make_image(seed)
        self.expected = self.reference.answer(chat(self.image, WHAT), MAX_TOKENS).tokens
        super().__init__(model, log, "--enable-scale-out", *flags)

    def ask(self, content: list[dict], **params) -> tuple[int, dict]:
        """Status and answer of a request."""
        body = {"messages": [{"role": "user", "content": content}], "return_token_ids": True}
        body |= {"temperature": 0, "max_tokens": MAX_TOKENS, "ignore_eos": True, **params}
        status, answer = self.request("POST", CHAT, body)
        return status, json.loads(answer)

    def tokens(self, content: list[dict], **params) -> list[int]:
        status, answer = self.ask(content, **params)
        assert status == 200, answer
        return answer["choices"][0]["token_ids"]

    def beside(self, path: str, body: dict) -> tuple[int, bool]:
        """Status of a request, and whether another one, beside it, got its tokens."""
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(self.tokens, [png(self.image), QUESTION])
            status, _ = self.request("POST", path, body)
            return status, other.result() == self.expected


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl", "qwen3_5 with its MTP layer"])
def server(request, vision_models, tmp_path_factory):
    folder, flags = tmp_path_factory.mktemp("sees"), []
    model = vision_models / request.param
    if request.param.startswith("qwen3_5"):  # a hybrid, as published
        model = make_model_that_sees(folder / "qwen3_5")
        add_mtp_layer(model, "Qwen3_5")
        flags = ["--block-size", "16", "--speculative-config", json.dumps(DRAFTS)]
    flags += ["--media-io-kwargs", json.dumps({"video": {"fps": FPS}})]
    server = VisionServer(model, folder / "log", 3, *flags)
    yield server
    server.kill()


def test_images_and_videos_beside_text(server, seed):
    one, other = server.image, make_image(seed + 1, 64, 32)
    frames = [encoded(Image.fromarray(frame), "JPEG") for frame in make_video(seed)]
    video = np.stack([np.asarray(decoded(frame)) for frame in frames])  # JPEG loses some
    jpegs = url("video/jpeg;base64," + ",".join(frames))
    # GHSA-c65p-x677-fgj6: the same bytes in another shape are another image
    turned = Image.frombytes("RGB", (one.height, one.width), one.tobytes())
    asked = {
        "one image": ([png(one), QUESTION], (one, WHAT)),
        "the same bytes": ([png(turned), QUESTION], (turned, WHAT)),
        "two images": ([png(other), png(one), QUESTION], (other, one, WHAT)),
        "a video": ([jpegs, QUESTION], (video, WHAT)),
        "a video and an image": ([jpegs, png(other)], (video, other)),
        "text": ([QUESTION], (WHAT,)),
    }
    with ThreadPoolExecutor(8) as pool:
        told = pool.map(server.tokens, [content for content, _ in asked.values()])
    for name, (_, parts), tokens in zip(asked, asked.values(), told):
        assert tokens == server.reference.answer(chat(*parts), MAX_TOKENS).tokens, name


def test_the_image_request_example_says_what_transformers_says(server):
    """Of an image and without one; and how long the prompts are."""
    printed = run_client("image_request.py", server.port)
    sunset = decoded(demo.image_url().partition(",")[2])
    tokenizer, lengths = server.reference.processor.tokenizer, []
    for image, parts in (("[a sunset] ", [sunset]), ("", [])):
        answer = server.reference.answer(chat(*parts, WHAT), MAX_TOKENS)
        end = answer.tokens.index(2) if 2 in answer.tokens else MAX_TOKENS
        text = tokenizer.decode(answer.tokens[:end], skip_special_tokens=True)
        text = text.rstrip("\N{REPLACEMENT CHARACTER}")  # vLLM leaves out what ends within one
        assert f"user:      {image}{WHAT}\nassistant: {text}\n\n" in printed
        lengths.append(len(answer.prompt_token_ids))
    took = lengths[0] - lengths[1]
    assert f"\ntokens of the prompt: {lengths[0]}, of the image: {took}\n" in printed


HOSTILE = {
    "no base64": [url("image/png;base64,####"), QUESTION],
    "no image": [url("image/png;base64,aGVsbG8="), QUESTION],
    "no video": [url("video/jpeg;base64,aa"), QUESTION],
    # GHSA-hpv8-x276-m59f: tokens that stand for images, without one
    "placeholders": [{"type": "text", "text": "<|vision_start|><|image_pad|><|vision_end|>" * 3}],
    "placeholders beside an image": [
        {"type": "text", "text": "<|image_pad|><|video_pad|>"},
        png(make_image(3, 32, 32)),
    ],
    # GHSA-grg2-63fw-f2qr: sizes that a processor doesn't expect
    "one pixel": [png(make_image(3, 1, 1)), QUESTION],
    "three pixels wide": [png(make_image(3, 3, 1)), QUESTION],
    "a strip": [png(make_image(3, 1, 900)), QUESTION],
    # GHSA-pmqf-x6x8-p7qw: embeddings in place of an image
    "embeddings": [{"type": "image_embeds", "image_embeds": "AAAA"}, QUESTION],
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_what_advisories_describe_is_answered_beside_others(server, content):
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 2}
    status, others_are_well = server.beside(CHAT, body)
    assert status in (200, 400, 422) and others_are_well


def test_sizes_without_a_limit_and_ids_of_placeholders(server):
    """GHSA-gx7p-2j49-hfq4: a size that only memory would limit; and GHSA-hpv8-x276-m59f by ids."""
    sizes = {"min_pixels": 2**36, "max_pixels": 2**40}
    content = [png(make_image(3, 64, 64)), QUESTION]
    assert server.ask(content, mm_processor_kwargs=sizes)[0] in (400, 422)
    config = json.loads((Path(server.model) / "config.json").read_text())
    prompt = [7, *[config["image_token_id"], config["video_token_id"]] * 2, 8]
    status, others_are_well = server.beside(COMPLETIONS, {"prompt": prompt, "max_tokens": 2})
    assert status in (200, 400, 422) and others_are_well


REFUSED = [{"logit_bias": {"1000000": 1}}, {"max_tokens": 1 << 20}, {"n": 1 << 20}]


@pytest.mark.parametrize("change", REFUSED, ids=lambda change: next(iter(change)))
def test_an_image_of_a_refused_request_is_seen_with_the_next(server, seed, change):
    image = make_image(seed + 10 + REFUSED.index(change), 48, 32)
    content = [png(image), QUESTION]
    assert server.ask(content, **change)[0] == 400
    expected = server.reference.answer(chat(image, WHAT), MAX_TOKENS).tokens
    assert server.tokens(content) == expected


@pytest.fixture(scope="module")
def rendered(server):
    """A request with an image as it is processed, which a client may send itself."""
    content = [png(make_image(7, 64, 32)), QUESTION]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 2}
    status, told = server.request("POST", f"{CHAT}/render", body)
    assert status == 200, told
    return json.loads(told)


PARTS = ("mm_placeholders", "mm_hashes", "kwargs_data")
FORGED = {
    "nobody's hash": lambda of: {"mm_hashes": ["f" * 64]},
    "no item": lambda of: {"mm_hashes": ["0" * 64], "kwargs_data": None},
    "twice": lambda of: {name: of[name] * 2 for name in PARTS},
    "two hashes": lambda of: {"mm_hashes": of["mm_hashes"] * 2},
    "past the end": lambda of: at(of, offset=of["last"]),
    "of nothing": lambda of: at(of, length=0),
    "below zero": lambda of: at(of, length=-3),
    "shorter": lambda of: at(of, length=1),
    "no data": lambda of: {"kwargs_data": ["AAAA"]},
    "a video": lambda of: {name: {"video": of[name]} for name in PARTS},
}
"""What is claimed of an image, by its hash, its place and its data."""


def at(of: dict, **place: int) -> dict:
    return {"mm_placeholders": [{**of["mm_placeholders"][0], **place}]}


@pytest.mark.parametrize("forge", FORGED.values(), ids=FORGED)
def test_forged_items_harm_nobody_else(server, rendered, forge):
    """GHSA-ph72-cqr5-qpp7, PYSEC-2026-4353: what clients claim of places, numbers and kinds.

    Hashes are another matter: vLLM 0.32 takes a client's word for them, which is why
    `docs/guides/serving.md` says who is to reach this path.
    """
    assert server.request("POST", TOKENS, rendered)[0] == 200
    features = rendered["features"]
    of = {name: features[name]["image"] for name in PARTS}
    forged = forge(of | {"last": len(rendered["token_ids"]) - 1})
    forged = {n: {"image": each} if isinstance(each, list) else each for n, each in forged.items()}
    body = {**rendered, "request_id": repr(forge), "features": {**features, **forged}}
    status, others_are_well = server.beside(TOKENS, body)
    assert status in (200, 400, 422, 500) and others_are_well
