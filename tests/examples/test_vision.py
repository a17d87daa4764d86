"""The demo that sends an image to a tiny model that sees."""

import base64
import io
import json
import sys
from pathlib import Path

import pytest
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import serve


def test_it_sends_an_image_and_a_question(monkeypatch):
    sent = []

    def answer(request, timeout):
        sent.append(json.loads(request.data))
        return io.BytesIO(b'{"choices": [{"message": {"content": "uspositorks"}}]}')

    monkeypatch.setattr("urllib.request.urlopen", answer)
    assert serve.chat(8000, vision=True) == "uspositorks"
    image, text = sent[0]["messages"][0]["content"]
    kind, data = image["image_url"]["url"].split(",")
    assert kind == "data:image/png;base64"
    assert Image.open(io.BytesIO(base64.b64decode(data))).size == (64, 48)
    assert text == {"type": "text", "text": serve.IMAGE_QUESTION}
    serve.chat(8000, vision=False)
    assert sent[1]["messages"] == [{"role": "user", "content": serve.QUESTION}]


def test_drafters_of_the_demo_model_are_not_for_one_that_sees(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["serve.py", "--vision", "--speculate", "eagle"])
    with pytest.raises(SystemExit):
        serve.arguments()
    assert "--vision: the model that sees has no drafter for eagle" in capsys.readouterr().err
