"""Logits of each step of an engine, and how far those of two engines lie apart."""

from dataclasses import dataclass, field
from typing import Any

import torch

from tests.helpers.engine import generate, greedy, runner_of


@dataclass
class Steps:
    """Greedy tokens of each prompt, and the logits that chose them, ``[tokens, vocab_size]``."""

    tokens: list[list[int]]
    logits: list[torch.Tensor]


def greedy_steps(llm: Any, prompts: list[list[int]], max_tokens: int) -> Steps:
    """Run prompts that fit one step each; the model's logits, in float32."""
    runner = runner_of(llm)
    model = runner.get_model()
    rows: dict[str, list[torch.Tensor]] = {}
    compute = model.compute_logits

    def recorded(*args: Any) -> torch.Tensor:
        logits = compute(*args)
        for req_id, row in zip(runner.input_batch.req_ids, logits.float().cpu()):
            rows.setdefault(req_id, []).append(row)
        return logits

    model.compute_logits = recorded
    try:
        tokens = generate(llm, prompts, greedy(max_tokens))
    finally:
        model.compute_logits = compute
    in_order = sorted(rows, key=lambda req_id: int(req_id.partition("-")[0]))
    return Steps(tokens, [torch.stack(rows[req_id]) for req_id in in_order])


@dataclass
class Difference:
    """How two engines differ on the steps that they share."""

    bound: float
    largest: float = 0.0  # of logits, in units of their standard deviation
    compared: int = 0  # tokens
    excluded: int = 0  # steps whose two best logits are closer than the bound
    wrong: list[tuple[int, int]] = field(default_factory=list)  # although the margin exceeds it


def difference(ours: Steps, theirs: Steps, bound: float) -> Difference:
    """Compare until the tokens of a prompt part; `bound` is in standard deviations of logits."""
    out = Difference(bound)
    for prompt, (mine, other) in enumerate(zip(ours.logits, theirs.logits, strict=True)):
        for step, (got, expected) in enumerate(zip(mine, other, strict=True)):
            scale = float(expected.std())
            out.largest = max(out.largest, float((got - expected).abs().max()) / scale)
            best = expected.topk(2).values
            is_clear = float(best[0] - best[1]) / scale > 2 * bound
            out.compared += is_clear
            out.excluded += not is_clear
            if ours.tokens[prompt][step] != theirs.tokens[prompt][step]:
                if is_clear:
                    out.wrong.append((prompt, step))
                break
    return out
