"""`vllm serve` with a pooling model: scores over HTTP are those of transformers."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from transformers import AutoTokenizer

from tests.helpers.engine import make_model, save_tokenizer
from tests.helpers.pooling import hidden_states, normalized
from tests.server.process import Server

TEXTS = ["t5 t6 t7", "t400 t3", " ".join(f"t{token}" for token in range(2, 150))]


BY_TOKEN = ("--runner", "pooling", "--pooler-config", '{"task": "token_embed"}')


def test_scores_by_token_are_those_of_a_requests_own_query(tmp_path):
    """GHSA-2phq-3phc-84px: workers keep a query's embeddings, and concurrent requests share a name.

    A score is the sum over the query's tokens of the best match.
    """

    save_tokenizer(model := make_model(tmp_path / "model"))
    prompts = [AutoTokenizer.from_pretrained(model)(text).input_ids for text in TEXTS]
    rows = [normalized(each) for each in hidden_states(model, prompts)]
    server = Server(model, tmp_path / "log", *BY_TOKEN)

    def scores(query: int) -> list[float]:
        body = {"text_1": TEXTS[query], "text_2": TEXTS}
        status, told = server.request("POST", "/score", body, **{"X-Request-Id": "everybody's"})
        assert status == 200, told
        found = sorted(json.loads(told)["data"], key=lambda each: each["index"])
        return [each["score"] for each in found]

    queries = [*range(len(TEXTS))] * 6
    try:
        with ThreadPoolExecutor(len(queries)) as pool:
            found = list(pool.map(scores, queries))
    finally:
        server.kill()
    for query, got in zip(queries, found):
        expected = [float((rows[query] @ text.T).amax(1).sum()) for text in rows]
        assert got == pytest.approx(expected, rel=1e-4), f"query {query}"
