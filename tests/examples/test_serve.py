"""examples/serve.py: what it asks, what it refuses, and that it ends with an answer."""

import base64
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import demo
import serve

from tests.helpers.waiting import LIMIT
from tests.server.process import ROOT, free_port


def test_it_sends_an_image_and_a_question(monkeypatch):
    sent = []

    def answer(request, timeout):
        sent.append(json.loads(request.data))
        return io.BytesIO(b'{"choices": [{"message": {"content": "uspositorks"}}]}')

    monkeypatch.setattr("urllib.request.urlopen", answer)
    assert serve.chat(8000, serve.IMAGE_QUESTION, vision=True) == "uspositorks"
    image, text = sent[0]["messages"][0]["content"]
    kind, data = image["image_url"]["url"].split(",")
    assert kind == "data:image/png;base64"
    assert Image.open(io.BytesIO(base64.b64decode(data))).size == (64, 48)
    assert text == {"type": "text", "text": serve.IMAGE_QUESTION}
    serve.chat(8000, "Why?", vision=False)
    assert sent[1]["messages"] == [{"role": "user", "content": "Why?"}]


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--model", "other"], "--speculate eagle has a drafter for the demo model only"),
        (["--vision"], "--vision: the model that sees has no drafter for eagle"),
    ],
)
def test_drafters_of_the_demo_model_are_for_no_other(monkeypatch, capsys, flags, why):
    monkeypatch.setattr(sys, "argv", ["serve.py", *flags, "--speculate", "eagle"])
    with pytest.raises(SystemExit):
        serve.arguments()
    assert why in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "served"),
    [
        ([], ("smollm2", serve.CHAT_FLAGS, "Paris?", 1)),
        (["--model", "smollm2"], ("smollm2", serve.CHAT_FLAGS, "Paris?", 1)),
        (["--model", "tiny"], ("tiny", serve.DEMO_FLAGS, demo.TINY_QUESTION, 1)),
        (["--speculate", "eagle"], ("tiny", serve.DEMO_FLAGS, demo.TINY_QUESTION, 1)),
        (["--speculate", "ngram"], ("smollm2", serve.CHAT_FLAGS, "Paris?", 1)),
        (["--model", "mine"], ("mine", [], demo.QUESTION, 1)),
        (["--emulate"], ("deepseek", demo.STACK, demo.TINY_QUESTION, 2)),
        (["--emulate", "--model", "smollm2"], ("smollm2", demo.ON_A_CARD, "Paris?", 1)),
    ],
)
def test_what_is_served_and_asked(monkeypatch, words, served):
    monkeypatch.setattr(demo, "chat_model", lambda: ("smollm2", "Paris?"))
    monkeypatch.setattr(demo, "deepseek", lambda: "deepseek")
    monkeypatch.setattr(serve.tiny_model, "make", lambda folder: "tiny")
    monkeypatch.setattr(sys, "argv", ["serve.py", *words])
    args, _ = serve.arguments()
    assert serve.what_to_serve(args) == served


def test_once_it_prints_the_answer_of_a_real_model_and_exits(real_model):
    command = [sys.executable, "examples/serve.py", "--once", "--port", str(free_port())]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT)
    assert run.returncode == 0, run.stderr[-3000:]
    assert "user:      What is the capital of France?\n" in run.stdout
    assert "assistant: The capital of France is Paris.\n" in run.stdout
