"""`vllm serve` with a model that sees: images and videos over HTTP, beside text and bad data."""

import base64
import io
import json
import signal
import sys
from collections.abc import Callable
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
from tests.server.test_server import Server

MAX_TOKENS = 12


def encoded(image: Image.Image, kind: str) -> str:
    file = io.BytesIO()
    image.save(file, kind)
    return base64.b64encode(file.getvalue()).decode()


def decoded(frame: str) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(frame))))


def url(kind: str, address: str) -> dict:
    return {"type": kind, kind: {"url": address}}


def check_image_request_example(server: Server, reference: Reference) -> None:
    """It says what transformers says of the same image, and how long the prompts are."""
    printed = run_client("image_request.py", server.port)
    sunset = Image.open(io.BytesIO(base64.b64decode(demo.image_url().partition(",")[2])))
    tokenizer, lengths = reference.processor.tokenizer, []
    for image, parts in (("[a sunset] ", [sunset]), ("", [])):
        answer = reference.answer(chat(*parts, "What is this?"), MAX_TOKENS)
        end = answer.tokens.index(2) if 2 in answer.tokens else MAX_TOKENS
        text = tokenizer.decode(answer.tokens[:end], skip_special_tokens=True)
        text = text.rstrip("\N{REPLACEMENT CHARACTER}")  # vLLM leaves out what ends within one
        assert f"user:      {image}What is this?\nassistant: {text}\n\n" in printed
        lengths.append(len(answer.prompt_token_ids))
    took = lengths[0] - lengths[1]
    assert f"\ntokens of the prompt: {lengths[0]}, of the image: {took}\n" in printed


def check_hostile_requests(
    server: Server,
    model: Path,
    ask: Callable[[list[dict]], tuple[int, dict]],
    other: Callable[[], list[int]],
    expected: list[int],
) -> None:
    """What advisories describe of models that see; others are served beside each and after it."""
    question = {"type": "text", "text": "What is this?"}

    def image(width: int, height: int) -> dict:
        png = encoded(make_image(3, width, height), "PNG")
        return url("image_url", f"data:image/png;base64,{png}")

    hostile = {
        # GHSA-hpv8-x276-m59f: tokens that stand for images, without one
        "placeholders": [
            {"type": "text", "text": "<|vision_start|><|image_pad|><|vision_end|>" * 3}
        ],
        "placeholders beside an image": [
            {"type": "text", "text": "<|image_pad|><|video_pad|>"},
            image(32, 32),
            question,
        ],
        # GHSA-grg2-63fw-f2qr: sizes that a processor doesn't expect
        "one pixel": [image(1, 1), question],
        "three pixels wide": [image(3, 1), question],
        "a strip": [image(1, 900), question],
        # GHSA-pmqf-x6x8-p7qw: embeddings in place of an image
        "embeddings": [{"type": "image_embeds", "image_embeds": "AAAA"}, question],
    }
    with ThreadPoolExecutor(1) as pool:
        for name, content in hostile.items():
            beside = pool.submit(other)
            status, told = ask(content)
            assert status in (200, 400, 422), (name, told)
            assert beside.result() == expected, name
    # GHSA-gx7p-2j49-hfq4: a size that only memory would limit
    body = {
        "messages": [{"role": "user", "content": [image(64, 64), question]}],
        "mm_processor_kwargs": {"min_pixels": 2**36, "max_pixels": 2**40},
        "max_tokens": 2,
    }
    assert server.request("POST", "/v1/chat/completions", body)[0] in (400, 422)
    # GHSA-hpv8-x276-m59f once more: ids of placeholders in a prompt of token ids
    config = json.loads((model / "config.json").read_text())
    pads = [config["image_token_id"], config["video_token_id"]] * 2
    body = {"prompt": [7, *pads, 8], "max_tokens": 2}
    assert server.request("POST", "/v1/completions", body)[0] in (200, 400, 422)
    assert other() == expected


def check_refused_requests(server: Server, reference: Reference, seed: int) -> None:
    """An image that comes with a refused request first is seen with the next one."""
    question = "What is this?"
    refused = {
        "logit_bias": {"logit_bias": {"1000000": 1}},
        "length": {"max_tokens": 1 << 20},
        "number": {"n": 1 << 20},
    }
    for number, (name, change) in enumerate(refused.items()):
        image = make_image(seed + number, 48, 32)
        png = url("image_url", f"data:image/png;base64,{encoded(image, 'PNG')}")
        body = {
            "messages": [{"role": "user", "content": [png, {"type": "text", "text": question}]}],
            **{"temperature": 0, "max_tokens": 4, "ignore_eos": True, "return_token_ids": True},
        }
        status, told = server.request("POST", "/v1/chat/completions", body | change)
        assert status == 400, (name, told)
        status, told = server.request("POST", "/v1/chat/completions", body)
        assert status == 200, (name, told)
        expected = reference.answer(chat(image, question), 4).tokens
        assert json.loads(told)["choices"][0]["token_ids"] == expected, name


def check_forged_items(
    server: Server, image: dict, other: Callable[[], list[int]], expected: list[int]
) -> None:
    """GHSA-ph72-cqr5-qpp7, PYSEC-2026-4353: items as a client says that they were processed.

    The engine goes on, and others get their tokens, whatever the request claims of places, numbers
    and kinds. Hashes are another matter: vLLM 0.32 takes a client's word for them, which is why
    `docs/guides/serving.md` says who is to reach this path.
    """
    question = {"type": "text", "text": "What is this?"}

    def rendered(content: list[dict]) -> dict:
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 2}
        status, told = server.request("POST", "/v1/chat/completions/render", body)
        assert status == 200, told
        return json.loads(told)

    plain = rendered([image, question])
    assert server.request("POST", "/inference/v1/generate", plain)[0] == 200
    (place,) = plain["features"]["mm_placeholders"]["image"]
    length = len(plain["token_ids"])
    (item,) = plain["features"]["kwargs_data"]["image"]
    (own,) = plain["features"]["mm_hashes"]["image"]
    forged = {
        "nobody's hash": {"mm_hashes": {"image": ["f" * 64]}},
        "no item under a new hash": {"mm_hashes": {"image": ["0" * 64]}, "kwargs_data": None},
        "a place twice": {
            "mm_placeholders": {"image": [place, place]},
            "mm_hashes": {"image": [own, own]},
            "kwargs_data": {"image": [item, item]},
        },
        "two hashes": {"mm_hashes": {"image": [own, own]}},
        "a place past the end": {"mm_placeholders": {"image": [{**place, "offset": length - 1}]}},
        "a place of nothing": {"mm_placeholders": {"image": [{**place, "length": 0}]}},
        "a place below zero": {"mm_placeholders": {"image": [{**place, "length": -3}]}},
        "a shorter place": {"mm_placeholders": {"image": [{**place, "length": 1}]}},
        "no item at all": {"kwargs_data": {"image": ["AAAA"]}},
        "a video": {name: {"video": plain["features"][name]["image"]} for name in FEATURES},
    }
    with ThreadPoolExecutor(1) as pool:
        for name, change in forged.items():
            beside = pool.submit(other)
            body = {**plain, "request_id": name, "features": {**plain["features"], **change}}
            status, told = server.request("POST", "/inference/v1/generate", body)
            print(name, status)
            assert status in (200, 400, 422, 500), (name, told)
            assert beside.result() == expected, name
    assert other() == expected


FEATURES = ("mm_hashes", "mm_placeholders", "kwargs_data")


DRAFTS = {"method": "mtp", "num_speculative_tokens": 2}


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl", "qwen3_5 with its MTP layer"])
def test_images_and_videos_over_http(vision_models, seed, tmp_path, name):
    model, one = vision_models / name, make_image(seed)
    drafts = name.startswith("qwen3_5")
    if drafts:  # a hybrid, as published
        model = make_model_that_sees(tmp_path / "qwen3_5")
        add_mtp_layer(model, "Qwen3_5")
    other, question = make_image(seed + 1, 64, 32), {"type": "text", "text": "What is this?"}
    frames = [encoded(Image.fromarray(frame), "JPEG") for frame in make_video(seed)]
    video = np.stack([decoded(frame) for frame in frames])  # JPEG loses some
    # GHSA-c65p-x677-fgj6: the same bytes in another shape are another image
    turned = Image.frombytes("RGB", (one.height, one.width), one.tobytes())
    images = (one, other, turned)
    png = [url("image_url", f"data:image/png;base64,{encoded(i, 'PNG')}") for i in images]
    jpegs = url("video_url", "data:video/jpeg;base64," + ",".join(frames))
    asked = {
        "one image": ([png[0], question], chat(one, "What is this?")),
        "the same bytes": ([png[2], question], chat(turned, "What is this?")),
        "two images": ([png[1], png[0], question], chat(other, one, "What is this?")),
        "a video": ([jpegs, question], chat(video, "What is this?")),
        "a video and an image": ([jpegs, png[1]], chat(video, other)),
        "text": ([question], chat("What is this?")),
    }
    reference = Reference(model)
    expected = {
        name: reference.answer(each, MAX_TOKENS).tokens for name, (_, each) in asked.items()
    }
    io_kwargs = json.dumps({"video": {"fps": FPS}})
    flags = ["--media-io-kwargs", io_kwargs, "--enable-scale-out"]
    if drafts:
        flags += ["--block-size", "16", "--speculative-config", json.dumps(DRAFTS)]
    server = Server(model, tmp_path / "log", *flags)
    try:

        def ask(content: list[dict]) -> tuple[int, dict]:
            body = {
                "messages": [{"role": "user", "content": content}],
                **{"temperature": 0, "max_tokens": MAX_TOKENS, "ignore_eos": True},
                "return_token_ids": True,
            }
            status, answer = server.request("POST", "/v1/chat/completions", body)
            return status, json.loads(answer)

        def tokens(name: str) -> list[int]:
            status, answer = ask(asked[name][0])
            assert status == 200, answer
            return answer["choices"][0]["token_ids"]

        with ThreadPoolExecutor(8) as pool:
            assert dict(zip(asked, pool.map(tokens, asked))) == expected
        check_image_request_example(server, reference)
        for data in ("image/png;base64,####", "image/png;base64,aGVsbG8=", "video/jpeg;base64,aa"):
            kind = data.partition("/")[0] + "_url"
            status, answer = ask([url(kind, "data:" + data), question])
            assert 400 <= status < 500, answer
        check_hostile_requests(
            server, model, ask, lambda: tokens("one image"), expected["one image"]
        )
        check_refused_requests(server, reference, seed + 10)
        check_forged_items(server, png[1], lambda: tokens("one image"), expected["one image"])
        assert tokens("two images") == expected["two images"]
        assert server.stop(signal.SIGTERM) == 0
        assert "Encoder: " in server.log()
        assert ("a state of " in server.log()) == drafts
    finally:
        server.kill()
