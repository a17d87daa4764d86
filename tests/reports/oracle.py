"""What transformers says of an answer: its tokens under a request's parameters, its scores."""

from typing import Any

import torch
from vllm import SamplingParams

from tests.helpers.judge import Judge, margins_of
from tests.helpers.vision import Request

CLOSE = 1e-3
"""By how much log-probabilities in float32 may differ from those of transformers."""


def assert_tokens(judge: Judge, prompt: Any, tokens: list[int], params: SamplingParams) -> int:
    """Each token of a greedy answer is the best one of what the parameters make of the logits.

    Returns how many are not the best ones of the logits themselves.
    """
    logits = _logits(judge, prompt, tokens)
    if not tokens:
        return 0
    changed = torch.stack(
        [_changed(row.clone(), prompt, tokens[:place], params) for place, row in enumerate(logits)]
    )
    margins = margins_of(changed, tokens, logits.std(1))
    assert not any(margins), f"{tokens}: {[round(margin, 3) for margin in margins]}"
    return int((logits.argmax(1) != torch.tensor(tokens)).sum())


def assert_scores(judge: Judge, prompt: list[int], output: Any, params: SamplingParams) -> None:
    """Log-probabilities of an answer are those of the model, with as many of the likeliest."""
    tokens = list(output.token_ids)
    _assert_scores(_logits(judge, prompt, tokens), tokens, output.logprobs, params.logprobs)


def assert_prompt_scores(judge: Judge, prompt: list[int], scores: Any, number: int) -> None:
    assert len(scores) == len(prompt) and scores[0] is None
    _assert_scores(_logits(judge, prompt[:1], prompt[1:]), prompt[1:], scores[1:], number)


@torch.no_grad()
def _logits(judge: Judge, prompt: Any, tokens: list[int]) -> torch.Tensor:
    """Logits from which each of the tokens was chosen, float64 ``[len(tokens), vocab]``."""
    if isinstance(prompt, Request):
        assert judge.reference is not None
        return judge.reference.logits_behind(prompt, tokens).double()
    output = judge.network(torch.tensor([prompt + tokens]))
    return output.logits[0, len(prompt) - 1 : -1].double()


def _changed(
    logits: torch.Tensor, prompt: Any, tokens: list[int], params: SamplingParams
) -> torch.Tensor:
    """Logits of one token behind those of an answer, as vLLM documents its parameters."""
    if params.allowed_token_ids:
        others = torch.ones_like(logits, dtype=torch.bool)
        others[params.allowed_token_ids] = False
        logits[others] = -torch.inf
    for word in params.bad_words_token_ids or ():
        if tokens[len(tokens) - len(word) + 1 :] == word[:-1]:
            logits[word[-1]] = -torch.inf
    if len(tokens) < params.min_tokens:
        logits[list(params.all_stop_token_ids)] = -torch.inf
    for token, bias in (params.logit_bias or {}).items():
        logits[token] += bias
    if params.repetition_penalty != 1:
        seen = list({*prompt, *tokens})
        scaled = logits[seen], params.repetition_penalty
        logits[seen] = torch.where(scaled[0] > 0, scaled[0] / scaled[1], scaled[0] * scaled[1])
    counts = torch.bincount(torch.tensor(tokens, dtype=torch.long), minlength=len(logits))
    return logits - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)


def _assert_scores(
    logits: torch.Tensor, tokens: list[int], scores: Any, number: int | None
) -> None:
    assert scores is not None and len(scores) == len(tokens)
    rows = logits.log_softmax(1)
    for row, token, given in zip(rows, tokens, scores, strict=True):
        likeliest = set(row.topk(number or 0).indices.tolist())
        assert set(given) == likeliest | {token}
        assert given[token].rank == 1 + int((row > row[token]).sum())
        for each, score in given.items():
            assert abs(score.logprob - float(row[each])) < CLOSE
