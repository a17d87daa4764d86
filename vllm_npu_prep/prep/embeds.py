"""The rule by which a step gives the model embeddings or ids, and the search for embedded tokens.

A step gives the model ``inputs_embeds``, and ``input_ids`` is None, if at least one of its tokens
comes as a vector: a token of a prompt given as embeddings, or the placeholder of an image or a
video, which the encoder's output replaces. Every other step gives ``input_ids``, so that graphs
include the embedding layer. These are steps of text, and all steps after the images
(`takes_embeds`).

Source: the reference documents replace placeholders in ``inputs_embeds`` and make ``input_ids``
None, and let text-only models keep ``input_ids`` so that the embedding layer can be inside the
graph. vLLM decides once for an engine, by its model; here each step decides.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vllm_npu_prep.prep.batch import BatchTables, PreparedStep


@dataclass(frozen=True)
class Placeholders:
    """Runs of prompt tokens whose embeddings an encoder makes.

    They are in the order of the batch, and positions rise within a request.
    """

    rows: np.ndarray  # [num_runs] int64, request
    starts: np.ndarray  # [num_runs] int64, first position
    ends: np.ndarray  # [num_runs] int64, past the last one

    @classmethod
    def of_rows(cls, runs: Sequence[Sequence[tuple[int, int]]]) -> "Placeholders":
        """Make the runs of a batch from those of each request, ``(start, end)``, by row."""
        flat = [(row, *run) for row, of_row in enumerate(runs) for run in of_row]
        return cls(*np.array(flat, np.int64).reshape(-1, 3).T)

    def touched(
        self,
        num_computed_tokens: np.ndarray,  # [num_reqs or more]
        num_scheduled_tokens: np.ndarray,  # [num_reqs]
        shift: int = 0,  # 1 for a drafter, which reads the token after each token of the step
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the runs of which a step computes some tokens.

        Returns
        -------
        runs, starts, ends
            int64 ``[num_touched]`` each: the indices of the runs, and the positions that the step
            computes.
        """
        first = num_computed_tokens[self.rows] + shift
        starts = np.maximum(self.starts, first)
        ends = np.minimum(self.ends, first + num_scheduled_tokens[self.rows])
        runs = np.flatnonzero(starts < ends)
        return runs, starts[runs], ends[runs]


NO_PLACEHOLDERS = Placeholders.of_rows([])


def takes_embeds(
    tables: BatchTables,
    num_scheduled_tokens: np.ndarray,  # [num_reqs]
    # The requests whose prompt was given as embeddings, in whole or in part
    rows_with_embeds: Sequence[int],
    placeholders: Placeholders,
) -> bool:
    """Return whether the step gives the model ``inputs_embeds``, by this module's rule."""
    if not len(num_scheduled_tokens):  # a dummy run
        return False
    if rows_with_embeds and reads_prompt(tables, rows_with_embeds):
        return True
    if not len(placeholders.rows):
        return False
    return len(placeholders.touched(tables.num_computed_tokens, num_scheduled_tokens)[0]) > 0


def reads_prompt(tables: BatchTables, rows: Sequence[int]) -> bool:
    """Return whether some of these requests, given by row, still have prompt tokens to compute."""
    rows = list(rows)
    return bool((tables.num_computed_tokens[rows] < tables.num_prompt_tokens[rows]).any())


def embedded_tokens(
    step: PreparedStep,
    is_token_ids: np.ndarray,  # [max_num_reqs, max_model_len] bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Find the tokens of a step that were given as embeddings and have no id.

    Parameters
    ----------
    is_token_ids
        False where a position of a request is given as an embedding; rows are those of the tables.

    Returns
    -------
    token_indices, reqs, positions
        int64 ``[num_embeds]`` each: the index of the token in the step, its request in the batch,
        and its position in the request; in the order of the step.
    """
    reqs, positions = step.req_indices, step.positions
    token_indices = np.flatnonzero(~is_token_ids[step.request_rows[reqs], positions])
    return token_indices, reqs[token_indices], positions[token_indices]
