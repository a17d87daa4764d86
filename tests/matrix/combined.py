"""An engine of a model with several features at once, held against transformers."""

from functools import partial
from typing import Any

import torch

from tests.helpers.engine import greedy
from tests.helpers.grammars import forced, has_form
from tests.helpers.huggingface import load
from tests.helpers.judge import Judge, bound_of, judge_of
from tests.helpers.models import (
    ENDS_A_STEP,
    LATENT,
    POOLS,
    REWARDS,
    ROUTED,
    SEES,
    adapter_of,
    as_input,
    folder_of,
    int8_of,
    is_a,
    prompts,
)
from tests.helpers.pooling import normalized, pooled
from tests.helpers.quantized import round_modules, tensors_in
from tests.helpers.ranks import Ranks, serve_on_ranks
from tests.helpers.v2 import asked_for, engine_of
from tests.helpers.watch import record_stored
from tests.matrix.asked import engine_for
from tests.matrix.cells import RANKS, STRUCTURED, W8A8
from tests.matrix.collect import taken

NUM_TOKENS, LONGEST = 12, 60
POOLED = {"float32": 1e-4, "float16": 5e-3, "bfloat16": 4e-2}
"""Tolerance of what a model pools, by dtype."""
PATIENCE = 50
"""Empty steps in which a connector may finish what it stores."""
CONNECTORS = {"KV connector", "KV offloading"}


def agrees(model: str, device: str, runner: str, features: list[str]) -> list[dict[str, Any]]:
    """Serve a model of `MODELS` by an engine that has these features, and look at what it says.

    Returns its cells, as `tests.matrix.cells.cell_of` has them.
    """
    taken()
    wanted = set(features)
    folder, settings = engine_for(model, device, wanted)
    limit = bound_of(settings["dtype"], is_a(ROUTED, model), W8A8 in wanted)
    asked = prompts(model)[: 4 if is_a(SEES, model) else 6]
    if wanted & RANKS:
        one_head = "decode context parallelism" in wanted and not is_a(LATENT, model)
        judge = judge_of(model, one_kv_head=one_head)
        with asked_for(runner):
            waves = serve_on_ranks(folder, settings, partial(_traffic, asked))
        for rows in waves:
            for prompt, got in zip(asked, rows, strict=True):
                look(judge, prompt, got, limit)
            check_varied(rows)
        return taken()
    with engine_of(runner, folder, **settings) as llm:
        if settings.get("runner") == "pooling":
            _serve_pooled(model, llm, settings["dtype"], wanted)
        else:
            _serve(model, llm, asked, limit, wanted)
    return taken()


def look(judge: Judge, prompt: Any, got: list[int], limit: float, form: str | None = None) -> None:
    """Hold an answer against the tokens that transformers would choose."""
    margin = max(judge.margins(prompt, got, form))
    assert margin <= limit, (
        f"an answer differs: {margin:.3f} standard deviations from the best token"
        f" ({str(prompt)[:60]} ...: {got})"
    )


def check_varied(rows: list[list[int]]) -> None:
    """A model that repeats itself would hide somebody else's rows."""
    distinct = {token for row in rows for token in row}
    assert len(distinct) > 2 * len(rows), f"{len(distinct)} different tokens in {len(rows)} answers"


async def _traffic(asked: list[Any], ranks: Ranks) -> list[list[list[int]]]:
    return [await ranks.generate([as_input(each) for each in asked], NUM_TOKENS) for _ in range(2)]


def _serve(model: str, llm: Any, plain: list[Any], limit: float, wanted: set[str]) -> None:
    """Serve everything twice, the second time after a rest, and look at the answers."""
    from vllm.lora.request import LoRARequest

    judge = judge_of(model, "compressed-tensors" if W8A8 in wanted else "")
    forms = ["json", "regex"] if STRUCTURED in wanted else []
    asked = [*((prompt, None) for prompt in plain), *((plain[1], form) for form in forms)]
    inputs, params = [], []
    loras, judges = [None] * len(asked), [judge] * len(asked)
    for row, (prompt, form) in enumerate(asked):
        inputs.append(as_input(prompt))
        params.append(forced(form, LONGEST) if form else greedy(NUM_TOKENS))
        if "prompt embeddings" in wanted and row % 2 == 0:
            inputs[row] = {"prompt_embeds": judge.embedded(prompt)}
        if "LoRA" in wanted and row % 2 == 0:
            loras[row] = LoRARequest("adapter", 1, str(adapter_of(model)))
            judges[row] = judge_of(model, adapter=1)
    found = record_stored(llm) if wanted & CONNECTORS else []
    for wave in range(2):
        outputs = llm.generate(inputs, params, lora_request=loras, use_tqdm=False)
        rows = [list(output.outputs[0].token_ids) for output in outputs]
        for (prompt, form), judge, output, got in zip(asked, judges, outputs, rows, strict=True):
            look(judge, prompt, got, limit, form)
            if form is not None:
                assert has_form(form, output.outputs[0].text)
        check_varied(rows[: len(plain)])
        if wave == 0:
            _rest(llm, wanted)
    assert not wanted & CONNECTORS or sum(found) > 0, "the connector had none of what was served"


def _rest(llm: Any, wanted: set[str]) -> None:
    """Let the engine sleep, or forget its prefixes so that a connector is asked for them."""
    if wanted & CONNECTORS:
        for _ in range(PATIENCE):
            llm.llm_engine.engine_core.engine_core.step_fn()
        assert llm.reset_prefix_cache(), "blocks are kept"
    if "sleep mode" in wanted:
        llm.sleep(level=1)
        llm.wake_up()


def _serve_pooled(model: str, llm: Any, dtype: str, wanted: set[str]) -> None:
    asked = prompts("Qwen3ForCausalLM" if is_a(SEES, model) else model)[:6]
    asked = [[row + 2, *ids] for row, ids in enumerate(asked)]  # none begins as another one does
    int8 = W8A8 in wanted
    task, expected = pooled_by_transformers(model, asked, int8)
    tolerance = max(POOLED[dtype], POOLED["bfloat16"] if int8 else 0)  # levels may fall otherwise
    nearer = 2 if int8 and dtype != "float32" else 3
    for wave in range(2):
        check_pooled(pooled(llm, asked, task), expected, tolerance, nearer)
        if wave == 0:
            _rest(llm, wanted)


def check_pooled(
    got: list[torch.Tensor], expected: list[torch.Tensor], tolerance: float, nearer: float
) -> None:
    """Equal within a tolerance, and at least `nearer` times as near as another prompt's results."""
    ends = [each.reshape(-1, each.shape[-1])[-1] for each in expected]
    for row, (one, other) in enumerate(zip(got, expected, strict=True)):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
        last = one.reshape(-1, one.shape[-1])[-1]
        apart = [float((last - each).abs().max()) for each in ends]
        own = apart.pop(row)
        assert nearer * own < min(apart), (
            f"a result is {own:.4f} off, another prompt's {min(apart):.4f}"
        )


def pooled_by_transformers(
    model: str, asked: list[list[int]], int8: bool
) -> tuple[str, list[torch.Tensor]]:
    """Task of a model that pools, or is made to, and what transformers returns for each prompt."""
    import transformers

    folder, loader = folder_of(model), transformers.AutoModel
    if model.endswith("ForSequenceClassification"):
        loader = transformers.AutoModelForSequenceClassification
        task, read = "classify", lambda out, ids: out.logits[0].softmax(-1)
    elif model == REWARDS:
        task, read = "token_classify", _rewards
    else:
        token = 0 if is_a(POOLS, model) else -1
        task, read = "embed", lambda out, ids: normalized(out.last_hidden_state[0, token])
    network = load(folder, loader=loader)
    if int8:
        round_modules(network, tensors_in(int8_of(model)))
    network = network.language_model if is_a(SEES, model) else network
    with torch.no_grad():
        return task, [read(network(input_ids=torch.tensor([ids])), ids) for ids in asked]


def _rewards(out: Any, ids: list[int]) -> torch.Tensor:
    weights, linear = tensors_in(folder_of(REWARDS)), torch.nn.functional.linear
    hidden = linear(out.last_hidden_state[0], weights["score.0.weight"], weights["score.0.bias"])
    logits = linear(hidden.relu(), weights["score.2.weight"], weights["score.2.bias"])
    return logits.softmax(-1)[torch.tensor(ids) == ENDS_A_STEP]
