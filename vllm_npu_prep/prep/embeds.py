"""Which tokens of a step come as embeddings instead of ids, and the one rule that follows.

**Which input.** A step gives the model ``inputs_embeds``, and ``input_ids`` is None, when one of
its tokens comes as a vector: of a prompt given as embeddings, or at the placeholder of an image or
a video, where the encoder's output goes. Every other step gives it ``input_ids``, so that the
embedding layer is inside of graphs: steps of text, and all that come once images are computed
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
    """Tokens of the batch's prompts whose embeddings an encoder makes: runs of them.

    In the order of the batch, rising in each request.
    """

    rows: np.ndarray  # [num_runs] int64, request
    starts: np.ndarray  # [num_runs] int64, first position
    ends: np.ndarray  # [num_runs] int64, past the last one

    @classmethod
    def of_rows(cls, runs: Sequence[Sequence[tuple[int, int]]]) -> "Placeholders":
        """Runs of each request, ``(start, end)``, by row of the batch."""
        flat = [(row, *run) for row, of_row in enumerate(runs) for run in of_row]
        return cls(*np.array(flat, np.int64).reshape(-1, 3).T)

    def touched(
        self,
        num_computed_tokens: np.ndarray,  # [num_reqs or more]
        num_scheduled_tokens: np.ndarray,  # [num_reqs]
        shift: int = 0,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Runs that a step computes tokens of.

        Parameters
        ----------
        num_computed_tokens, num_scheduled_tokens
            Of the step.
        shift
            1 for a drafter, which reads the token after each of the step's.

        Returns
        -------
        runs, starts, ends
            int64 ``[num_touched]`` each: which runs, and the positions that the step computes.
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
    rows_with_embeds: Sequence[int],
    placeholders: Placeholders,
) -> bool:
    """Whether the step gives the model ``inputs_embeds``: the rule of this module.

    Parameters
    ----------
    tables, num_scheduled_tokens
        The step.
    rows_with_embeds
        Requests whose prompt was given as embeddings, in whole or in part.
    placeholders
        Of the batch.
    """
    if not len(num_scheduled_tokens):  # a dummy run
        return False
    if rows_with_embeds and reads_prompt(tables, rows_with_embeds):
        return True
    if not len(placeholders.rows):
        return False
    return len(placeholders.touched(tables.num_computed_tokens, num_scheduled_tokens)[0]) > 0


def reads_prompt(tables: BatchTables, rows: Sequence[int]) -> bool:
    """Whether some of these requests, by row, still have prompt tokens to compute."""
    rows = list(rows)
    return bool((tables.num_computed_tokens[rows] < tables.num_prompt_tokens[rows]).any())


def embedded_tokens(
    step: PreparedStep,
    is_token_ids: np.ndarray,  # [max_num_reqs, max_model_len] bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The tokens of a step that have no id, of prompts given as embeddings.

    Parameters
    ----------
    step
        The prepared step.
    is_token_ids
        False where a position of a request is given as an embedding.

    Returns
    -------
    token_indices, reqs, positions
        int64 ``[num_embeds]`` each: which of the step's tokens, of which request of the batch, at
        which position of it; in the order of the step.
    """
    is_id = is_token_ids.reshape(-1)[step.token_indices]
    token_indices = np.flatnonzero(~is_id)
    return token_indices, step.req_indices[token_indices], step.positions[token_indices]
