"""Random tokens of the V2 runner, drawn by each request's temperature and seed.

Random numbers of requests without a seed come from torch's generator. Those of requests with a seed
are hashed from the seed and the position, so that a request gets the same tokens whatever it is
batched with.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from vllm.v1.worker.gpu.sample.states import SamplingStates

from vllm_npu_prep.ops.triton.gumbel import gumbel_noise, seeded_uniform

DRAFTING = 1 << 30
"""Added to the position at which a draft is drawn; upstream's ``_DRAFT_NOISE_SALT``."""

VERIFYING = 1 << 31
"""Added to the position at which a draft is verified, to get numbers that drew no token."""


class RowsToDraw(NamedTuple):
    """The request of each row of logits.

    Attributes
    ----------
    states
        Temperatures and seeds, by request row.
    request_rows
        int ``[num_rows]``: the request row of each row of logits.
    idx_mapping
        int64 ``[num_rows]``: the same numbers on the device.
    in_float64
        Whether noise is float64 (``--use-fp64-gumbel``) instead of float32.
    """

    states: SamplingStates
    request_rows: np.ndarray
    idx_mapping: torch.Tensor
    in_float64: bool = False

    @property
    def are_random(self) -> np.ndarray:
        """Return which rows are not greedy, bool ``[num_rows]`` on the host."""
        random: np.ndarray = self.states.temperature.np[self.request_rows] != 0
        return random

    @property
    def temperature(self) -> torch.Tensor:
        """Return the temperatures, float32 ``[num_rows]`` on the device; 0 means greedy."""
        temperature: torch.Tensor = self.states.temperature.gpu[self.idx_mapping]
        return temperature

    def by_seed(
        self,
        pos: Callable[[], torch.Tensor],
        unseeded: Callable[[], torch.Tensor],
        seeded: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """Return random numbers ``[num_rows, ...]`` in which rows with a seed follow their seed.

        Parameters
        ----------
        pos
            Returns the position of each row, int64 ``[num_rows]``; called only if a row has a seed.
        unseeded
            Returns random numbers of all rows.
        seeded
            Returns the numbers of rows from their seeds and positions.
        """
        has_seed = self.states.seeds_set[self.request_rows] & self.are_random
        if has_seed.all():
            return seeded(self.states.seeds.gpu[self.idx_mapping], pos())
        numbers = unseeded()
        if has_seed.any():
            rows = torch.from_numpy(np.flatnonzero(has_seed)).to(numbers.device)
            of_rows = seeded(self.states.seeds.gpu[self.idx_mapping[rows]], pos()[rows])
            numbers.index_copy_(0, rows, of_rows)
        return numbers


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """Return the index of the largest number of each row, int64 ``[num_rows]``; the first if equal.

    On a CPU numpy's search takes a tenth of the time of torch's.
    """
    if logits.device.type != "cpu":
        return logits.argmax(-1)
    exact = logits if logits.dtype == torch.float64 else logits.float()
    return torch.from_numpy(exact.numpy().argmax(-1))


def draw(
    logits: torch.Tensor, requests: RowsToDraw, pos: Callable[[], torch.Tensor]
) -> torch.Tensor:
    """Return the token with the largest logit of each row, with Gumbel noise in random rows.

    The tokens are int64 ``[num_rows]``.

    Parameters
    ----------
    logits
        ``[num_rows, vocab_size]``, divided by the temperature.
    pos
        Returns the position from which each row samples, int64 ``[num_rows]``.
    """
    are_random = requests.are_random
    if not are_random.any():
        return argmax(logits)
    logits = logits.double() if requests.in_float64 else logits.float()
    noise = requests.by_seed(
        pos,
        lambda: torch.empty_like(logits).exponential_().log_().neg_(),
        lambda seeds, positions: gumbel_noise(seeds, positions, logits.shape[1], logits.dtype),
    )
    if not are_random.all():
        noise.masked_fill_((requests.temperature == 0)[:, None], 0)
    return argmax(noise.add_(logits))


def draw_drafts(
    logits: torch.Tensor, requests: RowsToDraw, positions: torch.Tensor
) -> torch.Tensor:
    """Draw a draft of each row, int64 ``[num_reqs]``, at its request's temperature.

    No other sampling parameter applies. `logits` are the drafter's, ``[num_reqs, vocab_size]``, and
    `positions` those of the tokens before the drafts, int64 ``[num_reqs]``.
    """
    temperature = requests.temperature
    scaled = logits.float() / temperature.masked_fill(temperature == 0, 1)[:, None]
    return draw(scaled, requests, lambda: positions + DRAFTING)


def uniform(requests: RowsToDraw, pos: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Return a number from 0 to 1 for each row that verifies a draft, float32 ``[num_rows]``.

    `pos` returns positions as for `draw`.
    """
    device = requests.idx_mapping.device
    return requests.by_seed(
        pos,
        lambda: torch.rand(len(requests.request_rows), device=device),
        lambda seeds, positions: seeded_uniform(seeds, positions + VERIFYING),
    )
