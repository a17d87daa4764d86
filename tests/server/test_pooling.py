"""`vllm serve` with a pooling model: embeddings and scores over HTTP are those of transformers."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import AutoTokenizer

from tests.helpers.engine import make_model, save_tokenizer
from tests.helpers.pooling import check_close, hidden_states, normalized
from tests.server.process import COMPLETIONS, Server

TEXTS = ["t5 t6 t7", "t400 t3", " ".join(f"t{token}" for token in range(2, 150))]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    model = make_model(tmp_path_factory.mktemp("pooling") / "model")
    save_tokenizer(model)
    return model


@pytest.fixture(scope="module")
def rows(model):
    """Of each text, the normalised states of all its tokens."""
    prompts = [AutoTokenizer.from_pretrained(model)(text).input_ids for text in TEXTS]
    return [normalized(each) for each in hidden_states(model, prompts)]


@pytest.fixture
def server(model, tmp_path, request):
    server = Server(model, tmp_path / "log", "--runner", "pooling", *request.param)
    yield server
    server.kill()


def ask(server: Server, path: str, **body) -> list[dict]:
    status, answer = server.request("POST", path, body, **{"X-Request-Id": "everybody's"})
    assert status == 200, answer
    return json.loads(answer)["data"]


@pytest.mark.parametrize("server", [()], ids=["embed"], indirect=True)
def test_embeddings_and_scores_of_whole_texts(server, rows):
    expected = [each[-1] for each in rows]
    for path in ("/v1/embeddings", "/pooling"):
        data = ask(server, path, input=TEXTS)
        check_close([torch.tensor(e.get("embedding", e.get("data"))) for e in data], expected)
    (score,) = ask(server, "/score", text_1=TEXTS[0], text_2=TEXTS[1])
    assert score["score"] == pytest.approx(float(expected[0] @ expected[1]), abs=1e-4)
    assert server.request("POST", COMPLETIONS, {"prompt": "t5"})[0] in (400, 404)


BY_TOKEN = ("--pooler-config", '{"task": "token_embed"}')


@pytest.mark.parametrize("server", [BY_TOKEN], ids=["token_embed"], indirect=True)
def test_scores_by_token_are_those_of_a_requests_own_query(server, rows):
    """GHSA-2phq-3phc-84px: workers keep a query's embeddings, and concurrent requests share a name.

    A score is the sum over the query's tokens of the best match.
    """

    def scores(query: int) -> list[float]:
        found = ask(server, "/score", text_1=TEXTS[query], text_2=TEXTS)
        return [each["score"] for each in sorted(found, key=lambda each: each["index"])]

    queries = [*range(len(TEXTS))] * 6
    with ThreadPoolExecutor(len(queries)) as pool:
        found = list(pool.map(scores, queries))
    for query, got in zip(queries, found):
        expected = [float((rows[query] @ text.T).amax(1).sum()) for text in rows]
        assert got == pytest.approx(expected, rel=1e-4), f"query {query}"
