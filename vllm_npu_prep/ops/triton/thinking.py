"""Budgets of thinking tokens: which rows of logits have to end a request's thinking.

Upstream's V2 does this by two kernels of Triton (``vllm/v1/worker/gpu/sample/thinking_budget.py``);
this is the same in torch. Shapes follow from sizes that the host knows, so nothing is read back.
`tests/ops/test_thinking.py` holds both against the source of the kernels.

A request thinks from its last start marker on, unless an end marker comes after it. Where the
markers are is kept by request row; a step looks for them only in the tokens that are new since the
last step.

Sizes in comments: rows of logits R, request rows S, vocabulary V.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

NO_TOKEN = -1
"""What stands before a request's first token; no marker contains it."""
FORCED = 1.0e9
"""Logit of a token that has to come."""


@dataclass(frozen=True)
class Markers:
    """Tokens between which a model thinks; no marker is empty.

    Attributes
    ----------
    forced_end
        Tokens that are forced one by one when the budget is used up. They may say more than
        `natural_end`.
    """

    start: Sequence[int]  # tokens that begin thinking
    natural_end: Sequence[int]  # tokens by which the model ends it
    forced_end: Sequence[int]

    @property
    def longest(self) -> int:
        """Length of the longer one of the two markers that are looked for."""
        return max(len(self.start), len(self.natural_end))

    def last_of(self, token_ids: np.ndarray) -> list[int]:
        """Return where the last start and the last end are in tokens on the host; -1 is nowhere."""
        return [_last_place(token_ids, np.asarray(m)) for m in (self.start, self.natural_end)]


def note_markers(
    last: torch.Tensor,  # [S, 2] int32, changed: places of the last start and the last end
    request_rows: torch.Tensor,  # [requests] int64
    all_token_ids: torch.Tensor,  # [S, max_model_len] int32
    total_len: torch.Tensor,  # [S] int32
    markers: Markers,
    most_new: int,
) -> None:
    """Look for markers in tokens that are new since the last step, at most `most_new` of a request.

    This is ``_update_committed_marker_cache_kernel``. What the kernel looks for in a request that
    has just arrived, the host has found already (`Markers.last_of`).
    """
    length = total_len[request_rows].long()
    tail = _tails(all_token_ids, request_rows, length, length, most_new + markers.longest - 1)
    found = _last_markers(last[request_rows], tail, length, markers)
    last.index_copy_(0, request_rows.long(), found)


def end_thinking(
    logits: torch.Tensor,  # [R, V] float32, changed
    request_rows: torch.Tensor,  # [R] int64
    budgets: torch.Tensor,  # [S] int32; negative: none
    last: torch.Tensor,  # [S, 2] int32, as `note_markers` has left it
    all_token_ids: torch.Tensor,  # [S, max_model_len] int32
    total_len: torch.Tensor,  # [S] int32
    input_ids: torch.Tensor,  # [R] int32, the input of each row
    local_pos: torch.Tensor,  # [R] int32, place of each row among its request's
    markers: Markers,
    most_drafts: int,
) -> None:
    """Force the end of thinking where the budget is used up: ``_thinking_budget_kernel``.

    Drafts before a row, at most `most_drafts` of a request, count as tokens that the request has
    generated.
    """
    forced = markers.forced_end
    has_drafts = bool(local_pos.stride(0))  # else the one value is 0: no row has drafts before it
    known = total_len[request_rows].long()
    length, places = known, last[request_rows]
    size = len(forced) - 1
    if has_drafts:
        length = known + local_pos
        size = max(size, most_drafts + markers.longest - 1)
    drafts = (input_ids, local_pos) if has_drafts else None
    tail = _tails(all_token_ids, request_rows, known, length, size, drafts)
    if has_drafts:
        places = _last_markers(places, tail, length, markers)
    start, end = places.unbind(1)
    budget = budgets[request_rows]
    num_thought = length - start - len(markers.start)
    is_over = (start > end) & (budget >= 0) & (num_thought >= budget)
    # If the end has begun already, its next token is forced
    tokens = torch.full_like(request_rows, forced[0])
    for begun in range(1, len(forced)):
        tokens.masked_fill_(_equal(tail[:, size - begun :], forced[:begun]), forced[begun])
    tokens = tokens[:, None]
    kept = logits.gather(1, tokens)
    logits.scatter_(1, tokens, kept.masked_fill_(is_over[:, None], FORCED))


def _tails(
    all_token_ids: torch.Tensor,  # [S, max_model_len] int32
    request_rows: torch.Tensor,  # [R] int64
    known: torch.Tensor,  # [R] int64: tokens of the table
    length: torch.Tensor,  # [R] int64: with the drafts before a row
    size: int,
    drafts: tuple[torch.Tensor, torch.Tensor] | None = None,  # inputs and places of the rows
) -> torch.Tensor:
    """Return the last tokens of each row, int32 ``[R, size]``; `NO_TOKEN` before the first."""
    at = length[:, None] + torch.arange(-size, 0, device=request_rows.device)
    tail = all_token_ids[request_rows[:, None], at.clamp(0, all_token_ids.shape[1] - 1)]
    if drafts is not None:
        input_ids, local_pos = drafts
        rows = (
            torch.arange(len(request_rows), device=request_rows.device)[:, None]
            - local_pos[:, None]
        )
        inputs = (rows + at - known[:, None] + 1).clamp(0, len(input_ids) - 1)
        tail = torch.where(at >= known[:, None], input_ids[inputs], tail)
    return tail.masked_fill(at < 0, NO_TOKEN)


def _last_markers(
    before: torch.Tensor,  # [R, 2] int32
    tail: torch.Tensor,  # [R, size] int32
    length: torch.Tensor,  # [R] int64
    markers: Markers,
) -> torch.Tensor:
    """Return the last markers' places, int32 ``[R, 2]``: those in `tail`, else `before`."""
    size = tail.shape[1]
    found = []
    for column, marker in enumerate((markers.start, markers.natural_end)):
        places = size - len(marker) + 1
        matches = _equal(
            torch.stack([tail[:, shift : shift + places] for shift in range(len(marker))], -1),
            marker,
        )
        at = length[:, None] + torch.arange(-size, places - size, device=tail.device)
        at = torch.where(matches, at, NO_TOKEN).amax(1)
        found.append(torch.maximum(before[:, column], at.int()))
    return torch.stack(found, 1)


def _equal(tokens: torch.Tensor, marker: Sequence[int]) -> torch.Tensor:
    matches = tokens[..., 0] == marker[0]
    for index, token in enumerate(marker[1:], 1):
        matches = matches & (tokens[..., index] == token)
    return matches


def _last_place(token_ids: np.ndarray, marker: np.ndarray) -> int:
    if len(marker) > len(token_ids):
        return -1
    windows = np.lib.stride_tricks.sliding_window_view(token_ids, len(marker))
    places = np.flatnonzero((windows == marker).all(1))
    return int(places[-1]) if len(places) else -1
