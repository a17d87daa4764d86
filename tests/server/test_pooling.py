"""`vllm serve` with a pooling model: embeddings and scores over HTTP are those of transformers."""

import json
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.helpers.engine import make_model, save_tokenizer
from tests.helpers.pooling import check_close, hidden_states, normalized
from tests.server.test_server import Server

TEXTS = ["t5 t6 t7", "t400 t3", " ".join(f"t{token}" for token in range(2, 150))]


@pytest.mark.parametrize("task", ["embed", "token_embed"])
def test_embeddings_pooling_and_scores(tmp_path, task):
    """Of whole texts; and scores token by token, for which workers keep the embeddings of a query.

    GHSA-2phq-3phc-84px: concurrent requests that give the same name have the scores of their own
    queries.
    """
    from transformers import AutoTokenizer

    model = make_model(tmp_path / "model")
    save_tokenizer(model)
    prompts = [AutoTokenizer.from_pretrained(model)(text).input_ids for text in TEXTS]
    rows = [normalized(each) for each in hidden_states(model, prompts)]
    expected = [each[-1] for each in rows]
    pooler = ("--pooler-config", json.dumps({"task": task})) if task != "embed" else ()
    server = Server(model, tmp_path / "log", "--runner", "pooling", *pooler)
    try:

        def ask(path: str, **body) -> list:
            headers = {"X-Request-Id": "everybody's"}
            status, answer = server.request("POST", path, body, **headers)
            assert status == 200, answer
            return json.loads(answer)["data"]

        if task == "token_embed":
            check_scores(ask, rows)
            assert server.stop(signal.SIGTERM) == 0
            assert "Traceback" not in server.log()
            return
        for path in ("/v1/embeddings", "/pooling"):
            data = ask(path, input=TEXTS)
            got = [torch.tensor(each.get("embedding", each.get("data"))) for each in data]
            check_close(got, expected)
        (score,) = ask("/score", text_1=TEXTS[0], text_2=TEXTS[1])
        assert abs(score["score"] - float(expected[0] @ expected[1])) < 1e-4
        assert server.request("POST", "/v1/completions", {"prompt": "t5"})[0] in (400, 404)
        assert server.stop(signal.SIGTERM) == 0
        assert "Traceback" not in server.log()
    finally:
        server.kill()


def check_scores(ask: Callable[..., list], rows: list[torch.Tensor]) -> None:
    """Of each text as a query to all, many at a time: sums over its tokens of the best match."""

    def scores(query: int) -> list[float]:
        found = ask("/score", text_1=TEXTS[query], text_2=TEXTS)
        return [each["score"] for each in sorted(found, key=lambda each: each["index"])]

    queries = [*range(len(TEXTS))] * 6
    expected = [
        [float((rows[query] @ text.T).amax(1).sum()) for text in rows]
        for query in range(len(TEXTS))
    ]
    with ThreadPoolExecutor(len(queries)) as pool:
        for query, got in zip(queries, pool.map(scores, queries)):
            assert got == pytest.approx(expected[query], rel=1e-4), f"query {query}"
