"""A tiny engine on a model that it makes itself, held against the tokens of the CPU fallback.

``python -m vllm_npu_prep.verify.engine FOLDER`` makes the model and the tokens, with
``NPU_PREP_DEVICE=cpu`` in a process of its own, because a process of vLLM has one platform.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from vllm_npu_prep.verify.outcome import Outcome, Verdict
from vllm_npu_prep.verify.row import Row, RowContext

MODEL, TOKENS = "model", "tokens.json"
"""Names of the model's folder and of the tokens' file."""

SECONDS = 900.0
"""Time limit of an engine's row, which first runs the CPU fallback's process, then an engine."""

VOCABULARY, SEED = 512, 20261122
PROMPT_LENGTHS = (5, 150, 33, 1, 70, 128, 129)
"""Prompt lengths in tokens: some need several steps and several blocks. One more prompt shares a
block with another."""

NEW_TOKENS = 12
LEAST_LEAD = 0.05
"""Lead in nats over the second best token by which a token has to win to be compared. Below it,
other rounding may choose the other token, after which nothing can be compared in this answer."""


def make_model(folder: Path) -> None:
    """Save a random Qwen3 of two layers, the same every time.

    Its embeddings are large, so that greedy tokens vary and win by a clear lead.
    """
    import torch
    import transformers

    torch.manual_seed(SEED)
    config = transformers.Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        initializer_range=0.1,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=0,
    )
    model = transformers.Qwen3ForCausalLM(config)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(20)
    model.save_pretrained(folder)


def prompts() -> list[list[int]]:
    import numpy as np

    rng = np.random.default_rng(SEED)
    drawn = [rng.integers(2, VOCABULARY, length).tolist() for length in PROMPT_LENGTHS]
    return [*drawn, drawn[1][:128] + drawn[0]]


@contextmanager
def _engine(model: Path, **settings: Any) -> Iterator[Any]:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["HF_HUB_OFFLINE"] = "1"
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    llm = LLM(
        str(model),
        dtype="float16",
        max_model_len=256,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        kv_cache_memory_bytes=32 << 20,
        skip_tokenizer_init=True,
        seed=0,
        **settings,
    )
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        cleanup_dist_env_and_memory()


def tokens_of(model: Path, mode: str) -> tuple[list[list[int]], list[list[float]]]:
    """Generate greedy tokens for each prompt; return each answer's tokens and their leads in nats.

    The first prompt is answered twice: alone, and with the others. The mode is ``"eager"``, or a
    graph mode of vLLM.
    """
    from vllm import SamplingParams

    settings: dict[str, Any] = {"enforce_eager": True}
    if mode != "eager":
        sizes = {"cudagraph_mode": mode, "cudagraph_capture_sizes": [4, 16]}
        settings = {"enforce_eager": False, "compilation_config": sizes}
    params = SamplingParams(
        temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False, logprobs=2
    )
    inputs: list[Any] = [{"prompt_token_ids": prompt} for prompt in prompts()]
    with _engine(model, **settings) as llm:
        answers = llm.generate(inputs[:1], params, use_tqdm=False)
        answers += llm.generate(inputs, params, use_tqdm=False)
    tokens, leads = [], []
    for answer in answers:
        output = answer.outputs[0]
        tokens.append([*output.token_ids])
        leads.append([_lead([each.logprob for each in step.values()]) for step in output.logprobs])
    return tokens, leads


def _lead(logprobs: list[float]) -> float:
    best, second = sorted(logprobs, reverse=True)[:2]
    return best - second


def difference(
    tokens: list[list[int]], expected: list[list[int]], leads: list[list[float]]
) -> tuple[int, str, str]:
    """Compare tokens as far as rounding can't decide.

    Returns
    -------
    compared
        Number of tokens that had to be equal.
    expected, got
        The first difference; empty if there is none.
    """
    compared = 0
    for index, (answer, wanted, lead) in enumerate(zip(tokens, expected, leads)):
        for place, (token, right, nats) in enumerate(zip(answer, wanted, lead)):
            if nats < LEAST_LEAD:
                if token != right:
                    break  # the answers part here, and both may be right
                continue
            compared += 1
            if token != right:
                return (
                    compared,
                    f"token {right} at place {place} of answer {index} (leads by {nats:.2g} nats)",
                    f"token {token}",
                )
    return compared, "", ""


def expected_tokens(folder: Path) -> tuple[list[list[int]], list[list[float]]]:
    """Return the tokens of the CPU fallback and their leads, made once in the command's folder."""
    made = folder / TOKENS
    if not made.exists():
        done = subprocess.run(
            [sys.executable, "-P", "-m", "vllm_npu_prep.verify.engine", str(folder)],
            env={**os.environ, "NPU_PREP_DEVICE": "cpu"},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode or not made.exists():
            last = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["no output"]
            raise RuntimeError(f"the CPU fallback ended with {done.returncode}: {last[0]}")
    answer = json.loads(made.read_text())
    return answer["tokens"], answer["leads"]


def _run(mode: str, context: RowContext) -> Outcome:
    expected, leads = expected_tokens(context.folder)
    tokens, _ = tokens_of(context.folder / MODEL, mode)
    compared, wanted, got = difference(tokens, expected, leads)
    total = sum(map(len, expected))
    given = f"{len(expected)} prompts of 1 to {max(PROMPT_LENGTHS)} tokens, {mode}"
    if wanted:
        return Outcome(given, wanted, got, Verdict.DIFFERS)
    same = f"{compared} of {total} tokens compared, all equal"
    return Outcome(given, "the tokens of the CPU fallback", same, Verdict.SAME)


ROWS: tuple[Row, ...] = (
    Row("engine-eager", "a tiny engine, eager", partial(_run, "eager"), seconds=SECONDS),
    Row(
        "engine-graphs",
        "a tiny engine with graphs",
        partial(_run, "FULL_AND_PIECEWISE"),
        seconds=SECONDS,
    ),
)


def main() -> None:
    folder = Path(sys.argv[1])
    make_model(folder / MODEL)
    tokens, leads = tokens_of(folder / MODEL, "eager")
    part = folder / f"{TOKENS}.part"
    part.write_text(json.dumps({"tokens": tokens, "leads": leads}))
    part.rename(folder / TOKENS)


if __name__ == "__main__":
    main()
