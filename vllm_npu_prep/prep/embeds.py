"""Which tokens of a step come as embeddings instead of ids."""

from collections.abc import Sequence

import numpy as np

from vllm_npu_prep.prep.batch import BatchTables, PreparedStep


def reads_prompt(tables: BatchTables, rows: Sequence[int]) -> bool:
    """Whether some of these requests, by row, still have prompt tokens to compute."""
    return bool((tables.num_computed_tokens[rows] < tables.num_prompt_tokens[rows]).any())


def embedded_tokens(
    step: PreparedStep,
    is_token_ids: np.ndarray,  # [max_num_reqs, max_model_len] bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The tokens of a step that have no id.

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
