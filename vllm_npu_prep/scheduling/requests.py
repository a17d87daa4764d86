"""What the batched scheduler notes about a request when it arrives.

The notes are attributes of vLLM's own `Request`, so that the loops read one object for each row.
"""

from typing import cast

from vllm.v1.request import Request

NEVER = 1 << 62
"""A number of tokens that no request reaches."""


# Traits say why a row of the batched loops needs a second look. They are numbers, since flags of
# the standard library take longer to test than the rest of a row.
SPECIAL = 1
"""Upstream's method has to append the tokens: the request has log-probabilities, pooling,
structured output, repetition detection, streamed input (whose outputs repeat the stop reason of the
part before), or acceptance counts of its own."""
GRAMMAR = 2
"""The request has structured output, which ``SchedulerOutput`` tells the runner about."""
MEDIA = 4
"""The request has images or other encoder inputs."""
TRACED = 8
"""The request's outputs carry trace headers."""


class BatchedRequest(Request):
    """A request with what `note` added; the class is for type checkers and never instantiated."""

    traits: int  # the sum of `SPECIAL`, `GRAMMAR`, `MEDIA` and `TRACED`; 0 for most requests
    stop_tokens: frozenset[int]  # the tokens that may end the request
    last_length: int  # number of tokens, prompt and output, with which it reaches ``max_tokens``
    stop_length: int  # with which it ends for its length: `last_length` or ``max_model_len``
    # Numbers of tokens, 0 if unknown: for which it has blocks in every KV-cache group, from which
    # on another block can enter the prefix cache, and from which on one may leave a window
    blocks_until: int
    cached_until: int
    window_until: int
    # The number of tokens, those of a step included, below which none of these numbers is reached;
    # 0 if that isn't known, or if the request has structured output
    quiet_until: int


def note(request: Request, max_model_len: int) -> BatchedRequest:
    """Note what doesn't change while a request runs.

    Stops are those of ``check_stop`` in vLLM's ``v1/core/sched/utils.py``. Upstream decides by
    them; here they only tell which rows to hand to it.
    """
    noted = cast("BatchedRequest", request)
    params = request.sampling_params
    traits = 0
    if (
        params is None
        or request.pooling_params is not None
        or request.structured_output_request is not None
        or request.resumable
        or request.spec_decode_metrics is not None
        or params.repetition_detection is not None
        or params.num_logprobs is not None
        or params.prompt_logprobs is not None
        or params.prompt_logprob_token_ids is not None
    ):
        traits |= SPECIAL
    if request.structured_output_request is not None:
        traits |= GRAMMAR
    if request.mm_features:
        traits |= MEDIA
    if request.trace_headers is not None:
        traits |= TRACED
    noted.traits = traits
    stops = set(params.stop_token_ids or ()) if params is not None else set()
    if params is not None and params.eos_token_id is not None:
        stops.add(params.eos_token_id)
    noted.stop_tokens = frozenset(stops)
    noted.last_length = request.num_prompt_tokens + request.max_tokens
    noted.stop_length = min(max_model_len, noted.last_length)
    forget_blocks(noted)
    return noted


def forget_blocks(request: BatchedRequest) -> None:
    """Have the next step ask for blocks, whatever was known of them."""
    request.blocks_until = request.cached_until = request.window_until = request.quiet_until = 0


def note_quiet(request: BatchedRequest) -> None:
    """Note until when a step has nothing to do for a decode but to count its tokens."""
    if not request.traits & GRAMMAR:
        request.quiet_until = min(
            request.stop_length - 1,  # from there on a step may have nothing to compute
            request.blocks_until,
            request.cached_until,
            request.window_until,
        )
