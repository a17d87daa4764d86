"""Tokens that the V2 runner draws, by each request's temperature and seed.

Without a seed, numbers come from torch's generator. With one they are hashed from the seed and the
position, so that a request gets the same ones whatever it is batched with.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from vllm.v1.worker.gpu.sample.states import SamplingStates

from vllm_npu_prep.ops.gumbel import gumbel_noise, seeded_uniform

DRAFTING = 1 << 30
"""Added to positions of which a draft is drawn: upstream's ``_DRAFT_NOISE_SALT``."""

VERIFYING = 1 << 31
"""Added to positions of which a draft is verified, for numbers that no token was drawn by."""


class Requests(NamedTuple):
    """Rows of logits, and the request of each.

    Attributes
    ----------
    states
        Temperatures and seeds, by slot.
    slots
        int ``[num_rows]``: the request's slot.
    idx_mapping
        int64 ``[num_rows]``: the same on the device.
    in_float64
        Whether noise is of float64 (``--use-fp64-gumbel``), and not of float32.
    """

    states: SamplingStates
    slots: np.ndarray
    idx_mapping: torch.Tensor
    in_float64: bool = False

    @property
    def are_random(self) -> np.ndarray:
        """Rows that are not greedy, bool ``[num_rows]``."""
        random: np.ndarray = self.states.temperature.np[self.slots] != 0
        return random

    @property
    def temperature(self) -> torch.Tensor:
        """float32 ``[num_rows]`` on the device; 0: greedy."""
        temperature: torch.Tensor = self.states.temperature.gpu[self.idx_mapping]
        return temperature

    def by_seed(
        self,
        pos: Callable[[], torch.Tensor],
        unseeded: Callable[[], torch.Tensor],
        seeded: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """Numbers of each row, ``[num_rows, ...]``.

        Parameters
        ----------
        pos
            Returns the position of each row, int64 ``[num_rows]``.
        unseeded
            Returns numbers of all rows.
        seeded
            Returns numbers of rows by their seeds and positions.
        """
        has_seed = self.states.seeds_set[self.slots] & self.are_random
        if has_seed.all():
            return seeded(self.states.seeds.gpu[self.idx_mapping], pos())
        numbers = unseeded()
        if has_seed.any():
            rows = torch.from_numpy(np.flatnonzero(has_seed)).to(numbers.device)
            of_rows = seeded(self.states.seeds.gpu[self.idx_mapping[rows]], pos()[rows])
            numbers.index_copy_(0, rows, of_rows)
        return numbers


def draw(logits: torch.Tensor, requests: Requests, pos: Callable[[], torch.Tensor]) -> torch.Tensor:
    """The largest logit of each row, with Gumbel noise where the temperature is not 0.

    Parameters
    ----------
    logits
        ``[num_rows, vocab_size]``, divided by the temperature.
    requests
        Of the rows.
    pos
        Returns the position that is sampled from, int64 ``[num_rows]``.

    Returns
    -------
    torch.Tensor
        int64 ``[num_rows]``.
    """
    are_random = requests.are_random
    if not are_random.any():
        return logits.argmax(-1)
    logits = logits.double() if requests.in_float64 else logits.float()
    noise = requests.by_seed(
        pos,
        lambda: torch.empty_like(logits).exponential_().log_().neg_(),
        lambda seeds, positions: gumbel_noise(seeds, positions, logits.shape[1], logits.dtype),
    )
    if not are_random.all():
        noise.masked_fill_((requests.temperature == 0)[:, None], 0)
    return noise.add_(logits).argmax(-1)


def draw_drafts(logits: torch.Tensor, requests: Requests, positions: torch.Tensor) -> torch.Tensor:
    """A draft of each row: of its logits at its temperature, whatever else limits the request.

    Parameters
    ----------
    logits
        ``[num_reqs, vocab_size]`` of the drafter.
    requests
        Of the rows.
    positions
        int64 ``[num_reqs]``: of the token before the draft.

    Returns
    -------
    torch.Tensor
        int64 ``[num_reqs]``.
    """
    temperature = requests.temperature
    scaled = logits.float() / temperature.masked_fill(temperature == 0, 1)[:, None]
    return draw(scaled, requests, lambda: positions + DRAFTING)


def uniform(requests: Requests, pos: Callable[[], torch.Tensor]) -> torch.Tensor:
    """A number from 0 to 1 of each row that verifies a draft, float32 ``[num_rows]``.

    Parameters
    ----------
    requests, pos
        As of `draw`.
    """
    device = requests.idx_mapping.device
    return requests.by_seed(
        pos,
        lambda: torch.rand(len(requests.slots), device=device),
        lambda seeds, positions: seeded_uniform(seeds, positions + VERIFYING),
    )
