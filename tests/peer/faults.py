"""Faults that are put into vllm-ascend at run time: planted ones, and some that it once had.

Each takes a runner and whether it is V2, breaks it, and returns the function that mends it. One
that breaks a step alone prints ``PLANTED``: the request and the token, and what was there.
"""

import json
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

STEP = 2
"""The step that is broken, from the beginning of the watch: two requests decode."""

Mend = Callable[[], None]


def overwrite(req_ids: list[str], array: Any, change: Callable[[int], int], index: Any = 0) -> None:
    """Change an element of the first request, and print what was there."""
    right = int(array[index])
    print("PLANTED", json.dumps({"request": req_ids[0], "right": right}), flush=True)
    array[index] = change(right)


def in_step(runner: Any, v2: bool, do: Callable[[list[str], Any], None]) -> Mend:
    """Call `do` once a step's arrays are ready, before attention is told of them.

    It gets the requests and, on V2, the arguments of ``prepare_attn``.
    """
    owner, name = (
        (runner.model_state, "prepare_attn") if v2 else (runner, "_build_attention_metadata")
    )
    tell, steps = getattr(owner, name), [0]

    def broken(*args: Any, **kwargs: Any) -> Any:
        if steps[0] == STEP:
            do(args[0].req_ids if v2 else runner.input_batch.req_ids, args)
        steps[0] += 1
        return tell(*args, **kwargs)

    setattr(owner, name, broken)
    return lambda: delattr(owner, name)


def slot_off_by_one(runner: Any, v2: bool) -> Mend:
    def do(req_ids: list[str], args: Any) -> None:
        slots = args[3][0] if v2 else runner.input_batch.block_table[0].slot_mapping.gpu
        overwrite(req_ids, slots, lambda slot: slot + 1, 2)

    return in_step(runner, v2, do)


def stale_seq_lens(runner: Any, v2: bool) -> Mend:
    def do(req_ids: list[str], args: Any) -> None:
        lengths = args[0].seq_lens if v2 else runner.seq_lens
        overwrite(req_ids, lengths, lambda length: length - 1)

    return in_step(runner, v2, do)


def stale_seq_lens_of_attention(runner: Any, v2: bool) -> Mend:
    def do(req_ids: list[str], args: Any) -> None:
        lengths = args[0].seq_lens_np if v2 else runner.optimistic_seq_lens_cpu
        overwrite(req_ids, lengths, lambda length: length - 1)

    return in_step(runner, v2, do)


def another_row_of_the_table(runner: Any, v2: bool) -> Mend:
    def do(req_ids: list[str], args: Any) -> None:
        table = args[2][0] if v2 else runner.input_batch.block_table[0].block_table.gpu
        overwrite(req_ids, table, lambda block: int(table[1, 0]), (0, 0))

    return in_step(runner, v2, do)


def another_token(runner: Any, v2: bool) -> Mend:
    def do(req_ids: list[str], args: Any) -> None:
        ids = runner.input_buffers.input_ids if v2 else runner.input_ids.gpu
        overwrite(req_ids, ids, lambda token: (token + 1) % 100)

    return in_step(runner, v2, do)


def buffer_rewritten_early(runner: Any, v2: bool) -> Mend:
    """The copy of ``query_start_loc`` reads what the host writes a moment later."""
    if v2:
        from vllm_ascend.worker.v2 import model_runner

        copy, steps, ours = model_runner.async_copy_to_gpu, [0], runner.input_buffers

        def copy_late(array: Any, out: Any = None, **kwargs: Any) -> Any:
            if out is ours.query_start_loc:
                if steps[0] == STEP:
                    array = array.copy()
                    array[1] += 1
                steps[0] += 1
            return copy(array, out=out, **kwargs)

        patch = mock.patch.object(model_runner, "async_copy_to_gpu", copy_late)
        patch.start()
        return patch.stop
    buffer, prepare, steps = runner.query_start_loc, runner._prepare_inputs, [0]
    copy = buffer.copy_to_gpu

    def copy_late(*args: Any) -> Any:
        right = buffer.np.copy()
        buffer.np[1] -= 1
        copied = copy(*args)
        runner._sync_device()
        buffer.np[:] = right
        del buffer.copy_to_gpu
        return copied

    def prepare_inputs(*args: Any) -> Any:
        if steps[0] == STEP:
            buffer.copy_to_gpu = copy_late
        steps[0] += 1
        return prepare(*args)

    runner._prepare_inputs = prepare_inputs
    return lambda: setattr(runner, "_prepare_inputs", prepare)


def rejected_drafts_stay(runner: Any, v2: bool) -> Mend:
    """Positions go on as if each draft had been accepted."""
    if v2:
        postprocess = runner.postprocess_sampled

        def accept_all(rows: Any, tokens: Any, sampled: Any, rejected: Any, *args: Any) -> Any:
            return postprocess(rows, tokens, sampled, rejected * 0, *args)

        runner.postprocess_sampled = accept_all
        return lambda: delattr(runner, "postprocess_sampled")
    from vllm_ascend.worker import model_runner_v1

    def as_told(computed: Any, *args: Any) -> None:
        computed[: len(args[-1])].copy_(args[-1])

    name = "update_num_computed_tokens_for_batch_change"
    patch = mock.patch.object(model_runner_v1, name, as_told)
    patch.start()
    return patch.stop


# ------------------------------ what vllm-ascend once did, by the number of the pull request


def put(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Mend:
    """Replace a method of one object by what `make` makes of it."""
    setattr(owner, name, make(getattr(owner, name)))
    return lambda: delattr(owner, name)


def reached() -> None:
    """Say that a fault of which the watch may say nothing has changed something."""
    print("REACHED", flush=True)


def pr_8461(runner: Any, v2: bool) -> Mend:
    """V1: lengths on the host, which attention reads, count rejected drafts."""
    return put(runner, "_correct_optimistic_seq_lens_cpu", lambda correct: lambda num_reqs: None)


def pr_10250(runner: Any, v2: bool) -> Mend:
    """V2: the host does not learn how many tokens are computed: vLLM calls another method."""
    return put(runner, "_copy_num_computed_tokens_to_cpu", lambda copy: lambda: None)


def pr_12630(runner: Any, v2: bool) -> Mend:
    """V1: pinned buffers are rewritten while copies of the step before may read them."""

    def unguarded() -> Any:
        reached()
        return nullcontext()

    return put(runner, "synchronize_input_prep", lambda guard: unguarded)


def pr_6835(runner: Any, v2: bool) -> Mend:
    """V1: a prompt of as many tokens as a decode with its drafts runs as a decode."""

    def make(determine: Callable[..., Any]) -> Callable[..., Any]:
        def blindly(**step: Any) -> Any:
            longest, num_reqs = step["max_num_scheduled_tokens"], step["num_reqs"]
            uniform = longest == runner.uniform_decode_query_len
            uniform &= step["num_tokens"] == longest * num_reqs
            if uniform and not runner.input_batch.num_computed_tokens_cpu[:num_reqs].all():
                reached()
            return determine(**step, force_uniform_decode=uniform)

        return blindly

    return put(runner, "_determine_batch_execution_and_padding", make)


def pr_7019(runner: Any, v2: bool) -> Mend:
    """V1: passes of the drafter after its first take slots by a page of two blocks."""
    drafter = runner.drafter

    def make(update: Callable[..., Any]) -> Callable[..., Any]:
        def by_pages(*args: Any, **kwargs: Any) -> Any:
            reached()
            with mock.patch.object(drafter, "block_size", 2 * drafter.block_size):
                return update(*args, **kwargs)

        return by_pages

    return put(drafter, "attn_update_stack_num_spec_norm", make)


BY_NAME = {
    fault.__name__: fault
    for fault in (
        slot_off_by_one,
        stale_seq_lens,
        stale_seq_lens_of_attention,
        another_row_of_the_table,
        another_token,
        buffer_rewritten_early,
        rejected_drafts_stay,
        pr_8461,
        pr_10250,
        pr_12630,
        pr_6835,
        pr_7019,
    )
}
