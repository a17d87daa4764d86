"""Graph padding: how a step runs, its padded sizes, and the values of padding.

Sizes
    ``num_input_tokens`` is the smallest capture size that holds the step's tokens. Without graphs,
    above the largest size, or if no graph was captured for such a step (`dispatch`), it is the
    number of scheduled tokens and nothing is padded.

Values
    The table of arrays (`vllm_npu_prep.prep.arrays`) has the constants, which the fused pass
    writes. Other values follow the rules below.

Token level
    ================  =============================================
    array             value in padding
    ================  =============================================
    input_ids         0
    positions         0
    mrope_positions   0
    slot_mapping      -1, which no cache writer may write
    ================  =============================================

Request level, in a full graph
    ===================  ==========================  ==============================
    array                uniform decode batch        any other batch
    ===================  ==========================  ==============================
    padding requests     as many as fill the size    the first takes all padding
                                                     tokens; it always exists
    query_start_loc      + decode length for each    + max_model_len for each, and
                                                     ends at ``num_input_tokens``
    seq_lens             its tokens                  its tokens
    num_computed_tokens  0                           0
    block-table rows     0, the null block           0
    ===================  ==========================  ==============================

    ``query_start_loc`` must end at ``num_input_tokens``: the fused Ascend attention kernel demands
    it for its TND layout (else error 561002; vllm-project/vllm-ascend 4518, 6357).

    A padding request is a prompt over the null block: ``num_computed_tokens`` is 0, and its length
    is its number of tokens. This is defined in every kernel, and a request without keys is not: the
    decode kernel of CANN 9 leaves the output of such rows unwritten, the prompt kernel up to
    CANN 8.5 refuses a batch without keys, and the documentation wants at least as many keys as
    queries for a causal mask. The results of padding rows are finite, and nothing reads them. A
    capture and its warm-up run with the same lengths: every cache that vLLM allows has room for
    them.

    A row of the block table holds ``max_model_len`` tokens, so the padding requests of a mixed
    batch share the padding tokens if one request can't hold them. Sizes with more padding than all
    of these rows can hold are not captured (`vllm_npu_prep.prep.capture_sizes.fitting_sizes`).

Piecewise graphs run attention eagerly on the real requests alone, so only tokens are padded.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from vllm_npu_prep.prep.arrays import PADDING_ROWS


class GraphMode(StrEnum):
    """vLLM's graph modes by name; a step itself runs in one of the first three.

    ==================  ==============  ==============
    mode                uniform decode  any other step
    ==================  ==============  ==============
    NONE                eager           eager
    PIECEWISE           piecewise       piecewise
    FULL                full            full
    FULL_DECODE_ONLY    full            eager
    FULL_AND_PIECEWISE  full            piecewise
    ==================  ==============  ==============
    """

    NONE = "NONE"
    PIECEWISE = "PIECEWISE"
    FULL = "FULL"
    FULL_DECODE_ONLY = "FULL_DECODE_ONLY"
    FULL_AND_PIECEWISE = "FULL_AND_PIECEWISE"


RUNTIME_MODES = frozenset({GraphMode.NONE, GraphMode.PIECEWISE, GraphMode.FULL})


@dataclass(frozen=True)
class Padding:
    """How a step runs, and its sizes as the device sees them.

    Attributes
    ----------
    decode_query_len
        The tokens of each padding request in a uniform decode batch; 0: the first padding request
        has all padding tokens that one request can hold.
    """

    num_input_tokens: int  # the number of tokens after padding
    num_reqs_padded: int  # the number of requests after padding
    decode_query_len: int = 0
    mode: GraphMode = GraphMode.NONE  # one of `RUNTIME_MODES`


def full_padding(
    num_input_tokens: int,  # the capture size
    # The most requests of a batch that replays the graph (num_reqs of vLLM's descriptor)
    max_num_reqs: int,
    # The tokens of a decode in a graph for uniform decode batches; 0 in a graph for mixed batches
    decode_query_len: int,
) -> Padding:
    """Return the padding of a step that replays a full graph."""
    num_rows = max_num_reqs if decode_query_len else max_num_reqs + PADDING_ROWS
    return Padding(num_input_tokens, num_rows, decode_query_len, GraphMode.FULL)


@dataclass(frozen=True)
class CapturedGraphs:
    """What an engine captured."""

    mode: GraphMode  # the mode of vLLM's compilation config
    capture_sizes: tuple[int, ...]  # in tokens
    max_num_seqs: int  # the most requests of a step
    decode_query_len: int = 1  # the tokens of a decode: one, and one for each draft
    # The numbers of active adapters that graphs exist for; 0 is a step without any
    lora_counts: tuple[int, ...] = (0,)


def dispatch(
    graphs: CapturedGraphs,  # what was captured
    num_tokens: int,
    num_reqs: int,
    uniform_decode: bool,  # whether every request has decode_query_len tokens
    num_active_loras: int = 0,  # the number of adapters that the step's requests use
    allowed: frozenset[GraphMode] = RUNTIME_MODES,
) -> Padding:
    """Decide how a step runs and how it is padded, as vLLM's graph dispatcher does.

    A running engine asks vLLM itself; this function is for batches outside an engine.

    Parameters
    ----------
    num_tokens, num_reqs
        The sizes of the step; with data parallelism, the number of tokens that the ranks agreed on.
    allowed
        The modes to choose from; data-parallel ranks agree on one.
    """
    eager = no_padding(num_tokens, num_reqs)
    size = padded_size(num_tokens, graphs.capture_sizes)
    loras = min((c for c in graphs.lora_counts if c >= num_active_loras > 0), default=0)
    if num_active_loras > 0 and not loras:
        loras = num_active_loras  # more than any graph has
    if size is None or loras not in graphs.lora_counts:
        return eager
    mode, query_len = graphs.mode, graphs.decode_query_len
    apart = mode in (GraphMode.FULL_DECODE_ONLY, GraphMode.FULL_AND_PIECEWISE)
    if GraphMode.FULL in allowed:
        if mode == GraphMode.FULL:
            return full_padding(size, min(size, graphs.max_num_seqs), 0)
        if apart and uniform_decode and query_len <= size <= query_len * graphs.max_num_seqs:
            return full_padding(size, size // query_len, query_len)
    piecewise = mode in (GraphMode.PIECEWISE, GraphMode.FULL_AND_PIECEWISE)
    if piecewise and GraphMode.PIECEWISE in allowed:
        return Padding(size, num_reqs, mode=GraphMode.PIECEWISE)
    return eager


def why_eager(mode: GraphMode, num_tokens: int, largest_size: int, uniform_decode: bool) -> str:
    """Return the reason, in a few words, why a step runs eagerly although there are graphs."""
    if mode == GraphMode.FULL_DECODE_ONLY and not uniform_decode:
        return f"not a uniform decode, the only kind that {mode} captures"
    if num_tokens > largest_size:
        return f"more than {largest_size} tokens, the largest capture size"
    return "no graph was captured for such a batch"


def no_padding(num_tokens: int, num_reqs: int) -> Padding:
    return Padding(num_tokens, num_reqs)


def padded_size(num_tokens: int, capture_sizes: Sequence[int]) -> int | None:
    """Return the smallest capture size that holds the tokens; None if the step runs eagerly."""
    return min((size for size in capture_sizes if size >= num_tokens), default=None)


def uniform_query_len(num_scheduled_tokens: np.ndarray, num_draft_tokens: np.ndarray) -> int:
    """Return the decode length of a uniform decode batch; 0 for any other batch.

    Parameters
    ----------
    num_scheduled_tokens, num_draft_tokens
        Integers of shape ``[num_reqs]``. A decode schedules one token and its drafts.
    """
    query_len = int(num_scheduled_tokens[0])
    uniform = (num_scheduled_tokens == query_len).all()
    decodes = (num_scheduled_tokens - num_draft_tokens == 1).all()
    return query_len if uniform and decodes else 0


def full_graph_padding(
    num_tokens: int,
    num_reqs: int,
    decode_query_len: int,  # the result of `uniform_query_len`
    capture_sizes: Sequence[int],  # the captured sizes in tokens, in any order
    max_model_len: int,  # the most tokens of a padding request
) -> Padding:
    """Return the padding of a batch in a full graph of a fitting size; none if no size fits.

    This is for batches outside an engine: the batch gets as many rows as it needs, and keeps its
    own attention state.
    """
    if decode_query_len:
        sizes = [size for size in capture_sizes if size % decode_query_len == 0]
        size = padded_size(num_tokens, sizes)
        if size is not None:
            return Padding(size, size // decode_query_len, decode_query_len)
    size = padded_size(num_tokens, capture_sizes)
    if size is None:
        return no_padding(num_tokens, num_reqs)
    return Padding(size, num_reqs - (num_tokens - size) // max_model_len)
