"""What happens inside an engine while it serves: attention states, preemptions."""

from collections import Counter
from collections.abc import Callable
from typing import Any

from tests.helpers.engine import runner_of


def around_forward(runner: Any, before: Callable[[], Any], after: Callable[[Any], None]) -> None:
    """Call functions before and after each later forward pass; `after` gets what `before` returned.

    V1's runner has one method for it. V2's calls it in several ways, so there it begins when the
    step's inputs are handed over and ends with the step.
    """
    if hasattr(runner, "_model_forward"):
        model_forward = runner._model_forward

        def watched(*args: Any, **kwargs: Any) -> Any:
            found = before()
            result = model_forward(*args, **kwargs)
            after(found)
            return result

        runner._model_forward = watched
        return
    prepare_attn, execute_model, found = runner.prepare_attn, runner.execute_model, []

    def handed_over(*args: Any) -> Any:
        result = prepare_attn(*args)
        found.append(before())
        return result

    def executed(*args: Any, **kwargs: Any) -> Any:
        result = execute_model(*args, **kwargs)
        if found:
            after(found.pop())
        return result

    runner.prepare_attn, runner.execute_model = handed_over, executed


def on_prepared(llm: Any, do: Callable[[Any], None]) -> None:
    """Call a function with each `PreparedStep` that is served from now on."""
    runner = runner_of(llm)
    prepare_inputs = runner._prepare_inputs

    def watched(*args: Any) -> Any:
        result = prepare_inputs(*args)
        do(runner.in_flight.step)
        return result

    runner._prepare_inputs = watched


def record_states(llm: Any) -> list[str]:
    """Attention states of all later steps, in order."""
    states: list[str] = []
    on_prepared(llm, lambda step: states.append(step.attn_state.name))
    return states


def count_states(llm: Any) -> Counter:
    """Count the attention states of all later steps."""
    states: Counter = Counter()
    on_prepared(llm, lambda step: states.update([step.attn_state.name]))
    return states


def count_verified(llm: Any) -> Counter:
    """Count what became of each request's drafts in all later steps.

    ``"accepted"``: all of them, ``"partly"``, ``"rejected"``: none.
    """
    scheduler, count = llm.llm_engine.engine_core.engine_core.scheduler, Counter()
    update_from_output = scheduler.update_from_output

    def counted(scheduler_output: Any, output: Any) -> Any:
        drafts = scheduler_output.scheduled_spec_decode_tokens
        for req_id, tokens in zip(output.req_ids, output.sampled_token_ids):
            if tokens and (made := len(drafts.get(req_id, ()))):
                kept = len(tokens) - 1
                count["accepted" if kept == made else "partly" if kept else "rejected"] += 1
        return update_from_output(scheduler_output, output)

    scheduler.update_from_output = counted
    return count


def looked_up(runner: str, tokens: list[int], config: Any) -> list[int]:
    """Drafts by ngram after a request's tokens: what followed when the last of them came before.

    The most of them count. Of several places V1 takes the first one, and V2 the last one, as
    upstream's drafters do. V1 drafts no more than it finds; V2 repeats the last token.
    """
    num_drafts, found = config.num_speculative_tokens, []
    for size in range(config.prompt_lookup_max, config.prompt_lookup_min - 1, -1):
        starts = range(len(tokens) - size)
        ends = [n + size for n in starts if tokens[n : n + size] == tokens[-size:]]
        if ends:
            found = tokens[ends[0 if runner == "V1" else -1] :][:num_drafts]
            break
    return found if runner == "V1" else found + tokens[-1:] * (num_drafts - len(found))


def count_lookups(llm: Any, runner: str) -> Counter:
    """Hold ngram drafts of all later steps against `looked_up`, by how many of them were kept.

    ``"as looked up"``, or ``"otherwise"``; and ``"drafted"`` and ``"kept"`` tokens. A request that
    comes back has no drafts: vLLM's scheduler pads its rows to the shape of the others.
    """
    scheduler, count = llm.llm_engine.engine_core.engine_core.scheduler, Counter()
    config = llm.llm_engine.vllm_config.speculative_config
    update_from_output = scheduler.update_from_output

    def counted(scheduler_output: Any, output: Any) -> Any:
        drafts = scheduler_output.scheduled_spec_decode_tokens
        padded = {request.req_id for request in scheduler_output.scheduled_new_reqs}  # on V2
        padded |= scheduler_output.scheduled_cached_reqs.resumed_req_ids  # on V1
        for req_id, tokens in zip(output.req_ids, output.sampled_token_ids):
            request = scheduler.requests.get(req_id)
            if request is None or request.num_stale_output_tokens:
                continue  # it ended, or was preempted, while the step was under way
            if tokens and req_id not in padded and (made := len(drafts.get(req_id, ()))):
                expected = looked_up(runner, list(request.all_token_ids), config)
                same = [a == b for a, b in zip(expected[:made], tokens)]
                kept = len(tokens) - 1
                count["as looked up" if kept == [*same, False].index(False) else "otherwise"] += 1
                count.update(drafted=made, kept=kept)
        return update_from_output(scheduler_output, output)

    scheduler.update_from_output = counted
    return count


def count_preemptions(llm: Any) -> Counter:
    """Count all later preemptions, under ``"preempted"``."""
    scheduler, count = llm.llm_engine.engine_core.engine_core.scheduler, Counter()
    preempt = scheduler._preempt_request

    def counted(*args: Any, **kwargs: Any) -> Any:
        count["preempted"] += 1
        return preempt(*args, **kwargs)

    scheduler._preempt_request = counted
    return count


def record_cached(llm: Any, of_resumed: bool = False) -> list[int]:
    """Tokens that later requests, or those that were preempted, find in the prefix cache."""
    manager, cached = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager, []
    get_computed_blocks = manager.get_computed_blocks

    def recorded(request: Any, *args: Any) -> Any:
        found = get_computed_blocks(request, *args)
        if request.num_preemptions or not of_resumed:
            cached.append(found[1])
        return found

    manager.get_computed_blocks = recorded
    return cached


def record_stored(llm: Any) -> list[int]:
    """Tokens that a connector has of later requests."""
    connector, found = llm.llm_engine.engine_core.engine_core.scheduler.connector, []
    find = connector.get_num_new_matched_tokens

    def recorded(*args: Any) -> Any:
        told = find(*args)
        found.append(told[0] or 0)
        return told

    connector.get_num_new_matched_tokens = recorded
    return found


def count_batched(llm: Any) -> Counter:
    """Count the requests whose steps the scheduler takes in bulk (``taken``), from now on.

    Steps of few requests, which it would leave to upstream, are taken, too.
    """
    scheduler, count = llm.llm_engine.engine_core.engine_core.scheduler, Counter()
    scheduler.fewest = 1
    decodes, take = scheduler.decodes, scheduler.decodes.take

    def counted(*args: Any) -> Any:
        batch = take(*args)
        count["taken"] += len(batch.requests)
        return batch

    decodes.take = counted
    return count
