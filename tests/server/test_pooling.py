"""`vllm serve` with a pooling model: embeddings and scores over HTTP are those of transformers."""

import json
import signal

import torch

from tests.helpers.engine import make_model, save_tokenizer
from tests.helpers.pooling import check_close, hidden_states, normalized
from tests.server.test_server import Server

TEXTS = ["t5 t6 t7", "t400 t3", " ".join(f"t{token}" for token in range(2, 150))]


def test_embeddings_pooling_and_scores(tmp_path):
    from transformers import AutoTokenizer

    model = make_model(tmp_path / "model")
    save_tokenizer(model)
    prompts = [AutoTokenizer.from_pretrained(model)(text).input_ids for text in TEXTS]
    expected = [normalized(rows[-1]) for rows in hidden_states(model, prompts)]
    server = Server(model, tmp_path / "log", "--runner", "pooling")
    try:

        def ask(path: str, **body) -> list:
            status, answer = server.request("POST", path, body)
            assert status == 200, answer
            return json.loads(answer)["data"]

        for path in ("/v1/embeddings", "/pooling"):
            data = ask(path, input=TEXTS)
            rows = [torch.tensor(each.get("embedding", each.get("data"))) for each in data]
            check_close(rows, expected)
        (score,) = ask("/score", text_1=TEXTS[0], text_2=TEXTS[1])
        assert abs(score["score"] - float(expected[0] @ expected[1])) < 1e-4
        assert server.request("POST", "/v1/completions", {"prompt": "t5"})[0] in (400, 404)
        assert server.stop(signal.SIGTERM) == 0
        assert "Traceback" not in server.log()
    finally:
        server.kill()
