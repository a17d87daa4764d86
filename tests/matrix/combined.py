"""An engine of a model with several features at once, held against transformers."""

import json
import tempfile
from functools import partial
from typing import Any

import torch

from tests.helpers.engine import graphs, greedy
from tests.helpers.grammars import forced, has_form
from tests.helpers.pooling import pooled
from tests.helpers.ranks import Ranks, serve_on_ranks
from tests.helpers.v2 import asked_for, engine_of
from tests.helpers.vision import Request
from tests.matrix import subjects
from tests.matrix.cells import EMULATED, FEATURES, MTP, STRUCTURED
from tests.matrix.collect import taken
from tests.matrix.plan import DTYPES, RANKS
from tests.matrix.subjects import CHUNKS, EXPERT, HYBRID, LATENT, LONG, POOLS, SEES, SHORT, SUBJECTS
from tests.soak.kinds import bound_of

NUM_TOKENS, LONGEST = 12, 60
POOLED = {"float32": 1e-4, "float16": 5e-3, "bfloat16": 4e-2}
"""Tolerance of what a model pools, by dtype."""
METHODS = {"ngram": "ngram", "draft model": "draft_model", "EAGLE": "eagle", "EAGLE-3": "eagle3"}
METHODS |= {MTP: "mtp"}
W8A8 = "int8 weights and inputs (W8A8)"
PATIENCE = 50
"""Empty steps in which a connector may finish what it stores."""


def agrees(model: str, device: str, runner: str, features: list[str]) -> list[dict[str, Any]]:
    """Serve a model of `SUBJECTS` by an engine that has these features, and look at what it says.

    Returns its cells, as `tests.matrix.cells.cell_of` has them.
    """
    taken()
    wanted = set(features)
    with tempfile.TemporaryDirectory() as stored:
        settings = settings_of(model, device, runner, wanted, stored)
        int8 = W8A8 in wanted
        one_head = "decode context parallelism" in wanted and not SUBJECTS[model].has(LATENT)
        folder = subjects.int8_of(model) if int8 else subjects.folder_of(model, one_head)
        if wanted & RANKS:
            judge = subjects.judge_of(model, one_kv_head=one_head)
            _serve_ranks(model, runner, folder, settings, judge)
        else:
            with engine_of(runner, folder, **settings) as llm:
                _serve(model, llm, settings, wanted)
    return taken()


def settings_of(
    model: str, device: str, runner: str, wanted: set[str], stored: str
) -> dict[str, Any]:
    """Keyword arguments of the engine; `stored` is a folder for a connector."""
    subject, on_card = SUBJECTS[model], device == EMULATED
    asked = {each.name: each.asked or {} for each in FEATURES}
    long = subject.has(HYBRID) or subject.has(CHUNKS)
    max_model_len = 384 if subject.has(CHUNKS) else LONG if long else 256
    if not long and not subject.has(SEES):
        max_model_len = SHORT
    dtype = next((each for each in DTYPES if each in wanted), "")
    settings: dict[str, Any] = {
        "dtype": dtype or ("bfloat16" if on_card else "float32"),
        "max_model_len": max_model_len,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 48,
        "block_size": 128 if long else 16,
        "skip_tokenizer_init": False,
        "enforce_eager": True,
        "additional_config": {"npu_prep": {"check": "full"}},
    }
    modes = wanted & {"piecewise graphs", "full graphs"}
    if modes:
        full = "FULL_AND_PIECEWISE" if len(modes) == 2 else "FULL_DECODE_ONLY"
        mode = full if "full graphs" in modes else "PIECEWISE"
        settings |= graphs(mode, 1, 2, 4, 8, 16)
    for name, value in (("synchronous scheduling", False), ("asynchronous scheduling", True)):
        if name in wanted:
            settings["async_scheduling"] = value
    if wanted & {"ngram", "pipeline parallelism"}:
        settings["async_scheduling"] = False
    pools = subject.has(POOLS) or "pooling" in wanted
    if pools:
        settings["runner"] = "pooling"
    if model == "Qwen2ForProcessRewardModel":
        settings["pooler_config"] = {"step_tag_id": subjects.ENDS_A_STEP}
    if subject.has(POOLS) and "chunked prefill" not in wanted:
        settings |= {"max_num_batched_tokens": 2 * max_model_len}
    if "chunked prefill" in wanted:
        settings["enable_chunked_prefill"] = True
    if wanted & {"prefix caching", "KV connector", "KV offloading"}:
        settings["enable_prefix_caching"] = True
    if method := next((METHODS[each] for each in METHODS if each in wanted), ""):
        drafts = {"method": method, "num_speculative_tokens": 2}
        if method == "ngram":
            drafts |= {"prompt_lookup_max": 2, "prompt_lookup_min": 1}
        elif method != "mtp":
            drafts["model"] = str(subjects.drafter_of(model, method))
        settings["speculative_config"] = drafts
    if "LoRA" in wanted:
        settings |= {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    if "KV connector" in wanted:
        settings |= json.loads(json.dumps(asked["KV connector"]))
        extra = settings["kv_transfer_config"]["kv_connector_extra_config"]
        extra["shared_storage_path"] = stored
        settings["max_num_batched_tokens"] = max_model_len
    if STRUCTURED in wanted:
        settings["structured_outputs_config"] = {
            "backend": "xgrammar",
            "disable_any_whitespace": True,
        }
    if "KV offloading" in wanted:
        settings["kv_offloading_size"] = 0.01
    for name in ("sleep mode", "prompt embeddings", "tensor parallelism", "data parallelism"):
        settings |= asked[name] if name in wanted else {}
    if "pipeline parallelism" in wanted:
        settings |= asked["pipeline parallelism"]
    in_parts = wanted & {"expert parallelism", "decode context parallelism"}
    if in_parts and "data parallelism" not in wanted:
        settings["tensor_parallel_size"] = 2
    if "expert parallelism" in wanted:
        settings["enable_expert_parallel"] = True
    if "decode context parallelism" in wanted:
        settings["decode_context_parallel_size"] = 2
    if subject.has(HYBRID):
        settings["num_gpu_blocks_override"] = 36
    return settings


def bound(model: str, settings: dict[str, Any], int8: bool) -> float:
    """How far from the best token one may be."""
    return bound_of(settings["dtype"], SUBJECTS[model].has(EXPERT), int8)


def look(
    judge: subjects.Judge,
    prompt: list[int] | Request,
    got: list[int],
    limit: float,
    form: str | None = None,
) -> None:
    """Hold an answer against the tokens that transformers would choose."""
    margin = judge.margin(prompt, got, form)
    what = f"{len(prompt)} tokens" if isinstance(prompt, list) else prompt.text[:40]
    assert margin <= limit, (
        f"an answer differs: {margin:.3f} standard deviations from the best token"
        f" (prompt of {what}: {got})"
    )


def check_varied(rows: list[list[int]]) -> None:
    """A model that repeats itself would hide somebody else's rows."""
    distinct = {token for row in rows for token in row}
    assert len(distinct) > 2 * len(rows), f"{len(distinct)} different tokens in {len(rows)} answers"


def _serve(model: str, llm: Any, settings: dict[str, Any], wanted: set[str]) -> None:
    """Serve everything twice, the second time after a rest, and look at the answers."""
    if settings.get("runner") == "pooling":
        _serve_pooled(model, llm, settings["dtype"], wanted)
        return
    judge = subjects.judge_of(model, int8=W8A8 in wanted)
    adapted = subjects.judge_of(model, adapted=True) if "LoRA" in wanted else None
    limit = bound(model, settings, W8A8 in wanted)
    plain: list[Any] = subjects.requests() if SUBJECTS[model].has(SEES) else subjects.prompts(model)
    forms = ["json", "regex"] if STRUCTURED in wanted else []
    asked = [(prompt, None) for prompt in plain]
    asked += [(plain[1], form) for form in forms]
    inputs, params, loras = [], [], []
    for row, (prompt, form) in enumerate(asked):
        if isinstance(prompt, Request):
            inputs.append(prompt.prompt())
        elif "prompt embeddings" in wanted and row % 2 == 0:
            inputs.append({"prompt_embeds": judge.embedded(prompt)})
        else:
            inputs.append({"prompt_token_ids": prompt})
        params.append(forced(form, LONGEST) if form else greedy(NUM_TOKENS))
        loras.append(_adapter(model) if adapted is not None and row % 2 == 0 else None)
    found = _count_loads(llm)
    for wave in range(2):
        outputs = llm.generate(inputs, params, lora_request=loras, use_tqdm=False)
        rows = []
        for (prompt, form), lora, output in zip(asked, loras, outputs, strict=True):
            got = list(output.outputs[0].token_ids)
            look(judge if lora is None else adapted, prompt, got, limit, form)
            if form is not None:
                assert has_form(form, output.outputs[0].text)
            else:
                rows.append(got)
        check_varied(rows)
        if wave == 0:
            _rest(llm, wanted)
    if wanted & {"KV connector", "KV offloading"}:
        assert sum(found) > 0, "the connector had none of what was served before"


def _count_loads(llm: Any) -> list[int]:
    """Tokens that a connector has of each later request."""
    scheduler, found = llm.llm_engine.engine_core.engine_core.scheduler, []
    connector = scheduler.connector
    if connector is not None:
        find = connector.get_num_new_matched_tokens

        def counted(*args: Any) -> Any:
            told = find(*args)
            found.append(told[0] or 0)
            return told

        connector.get_num_new_matched_tokens = counted
    return found


def _rest(llm: Any, wanted: set[str]) -> None:
    """Let the engine sleep, or forget its prefixes so that a connector is asked for them."""
    if wanted & {"KV connector", "KV offloading"}:
        core = llm.llm_engine.engine_core.engine_core
        for _ in range(PATIENCE):
            core.step_fn()
        assert llm.reset_prefix_cache(), "blocks are kept"
    if "sleep mode" in wanted:
        llm.sleep(level=1)
        llm.wake_up()


def _adapter(model: str) -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest("adapter", 1, str(subjects.adapter_of(model)))


def check_pooled(
    got: list[torch.Tensor], expected: list[torch.Tensor], tolerance: float, nearer: float = 3
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


def _serve_pooled(model: str, llm: Any, dtype: str, wanted: set[str]) -> None:
    asked = subjects.prompts("Qwen3ForCausalLM" if SUBJECTS[model].has(SEES) else model)
    asked = [[row + 2, *ids] for row, ids in enumerate(asked)]  # none begins as another one does
    int8 = W8A8 in wanted
    task, expected = subjects.pooled_by_transformers(model, asked, int8)
    tolerance = max(POOLED[dtype], POOLED["bfloat16"] if int8 else 0)  # levels may fall otherwise
    nearer = 2 if int8 and dtype != "float32" else 3
    for wave in range(2):
        check_pooled(pooled(llm, asked, task), expected, tolerance, nearer)
        if wave == 0:
            _rest(llm, wanted)


def _serve_ranks(
    model: str, runner: str, folder: Any, settings: dict[str, Any], judge: subjects.Judge
) -> None:
    """The same by an engine of several ranks, as a server would."""
    sees = SUBJECTS[model].has(SEES)
    asked: list[Any] = subjects.requests() if sees else subjects.prompts(model)
    inputs = [each.prompt() if isinstance(each, Request) else each for each in asked]
    settings = {**settings, "distributed_executor_backend": "mp"}
    with asked_for(runner):
        waves = serve_on_ranks(folder, settings, partial(_traffic, inputs))
    limit = bound(model, settings, False)
    for rows in waves:
        for prompt, got in zip(asked, rows, strict=True):
            look(judge, prompt, got, limit)
        check_varied(rows)


async def _traffic(inputs: list[Any], ranks: Ranks) -> list[list[list[int]]]:
    return [await ranks.generate(inputs, NUM_TOKENS) for _ in range(2)]
