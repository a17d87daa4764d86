"""SmolLM2-135M-Instruct, a real chat model: its tokens are those of transformers on real text."""

import pytest

from tests.helpers.engine import generate, graphs, greedy
from tests.helpers.real_model import CLOSE, chat_prompt, reference, tokenizer_of
from tests.helpers.v2 import ALSO_V2, engine_of
from tests.helpers.watch import count_lookups, count_preemptions, record_cached

STORY = """The harbour of the small town lies between two hills. In the morning the fishermen \
come back with herring and cod, which they sell on the quay before breakfast. Anna, who is nine \
years old, waits for her father every day. He has a blue boat with a white sail, and its name is \
the Swallow. When the wind blows from the west, the boats stay at home, and the fishermen mend \
their nets in the hall beside the church. On Sundays there is a market in front of the town hall: \
farmers sell apples, cheese and honey, and a man with a grey beard plays the violin. In winter \
the sea freezes near the shore, and the children skate to the lighthouse and back. The keeper of \
the lighthouse gives them hot chocolate, and tells them of ships that were lost in the fog, of \
whales, and of a storm that took the roof of the church."""
CHATS = (
    f"Copy this text word by word:\n{STORY}",
    "What is the capital of France?",
    "List five animals that live in the sea.",
    "Repeat this sentence three times: The cat sat on the mat, and the mat was red.",
)
AGAIN = "Thank you. Say it again, please."
MAX_TOKENS = 16


@pytest.fixture(scope="module")
def chats(real_model):
    """Prompts of first turns and of second turns, and transformers' tokens for each of both."""
    first = [chat_prompt(real_model, chat) for chat in CHATS]
    answers = reference(real_model, first, MAX_TOKENS)
    decode = tokenizer_of(real_model).decode
    second = [
        chat_prompt(real_model, chat, decode(answer.tokens).split("<|im_end|>")[0], AGAIN)
        for chat, answer in zip(CHATS[::3], answers[::3], strict=True)
    ]
    return first, second, [*answers, *reference(real_model, second, MAX_TOKENS)]


@pytest.mark.parametrize("runner", ALSO_V2)
@pytest.mark.parametrize("mode", ["FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"])
def test_chats_in_graphs_have_the_tokens_of_transformers(real_model, chats, mode, runner):
    """A prompt is cut, ngram drafts are verified, the cache is too small for all at once, and
    second turns find their first ones in it."""
    first, second, expected = chats
    with engine_of(
        runner,
        real_model,
        max_model_len=320,
        max_num_batched_tokens=128,
        block_size=16,
        num_gpu_blocks_override=22,
        kv_cache_memory_bytes=None,
        speculative_config={"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3},
        **graphs(mode, 4, 16),
    ) as llm:
        preempted, drafts = count_preemptions(llm), count_lookups(llm, runner)
        tokens = generate(llm, first, greedy(MAX_TOKENS))
        cached = record_cached(llm)
        tokens += generate(llm, second, greedy(MAX_TOKENS))
    assert tokens == [row.tokens for row in expected]
    assert min(min(row.margins) for row in expected) > CLOSE
    assert "The capital of France is Paris." in tokenizer_of(real_model).decode(tokens[1])
    assert len(first[0]) > 128
    assert preempted["preempted"] > 0
    assert max(cached) > 128
    assert not drafts["otherwise"]
    assert 0 < drafts["kept"] < drafts["drafted"]
