"""Top-k and top-p by one operator, for vLLM's sampler and for its rejection sampler."""

from collections.abc import Callable

import torch
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler, apply_top_k_top_p

from vllm_npu_prep.compat import kernels

OLDER_LARGEST_K = 1024
"""Largest k of CANN 8.5's kernel, and in op-plugin's documentation (CANN's ops-nn, page of
``aclnnApplyTopKTopP``: v8.5.0 and v9.0.0). The code refuses nothing, but has room for no more."""

FIRST_WITHOUT_LIMIT = (9, 0)
"""Version of CANN from which k may be as large as the vocabulary."""


def largest_k_of(cann: tuple[int, int] | None, documented: bool) -> int | None:
    """Return the largest k that the operator takes; None if it may be the size of the vocabulary.

    A version of CANN that isn't known counts as the newest. With `documented`, the documentation's
    limits hold, too.
    """
    is_older = cann is not None and cann < FIRST_WITHOUT_LIMIT
    return OLDER_LARGEST_K if is_older or documented else None


class FusedTopKTopPSampler(TopKTopPSampler):
    """vLLM's sampler with its limits applied by ``npu_top_k_top_p``.

    torch's form sorts all logits in float32 and takes some fourteen launches.

    Parameters
    ----------
    largest_k
        The largest k that the operator takes; None if it takes any.
    k_of_step
        Returns the largest k of the step's requests, which the host knows; None in a dummy run,
        where it doesn't. A request without top-k has the size of the vocabulary. The function is
        called only if `largest_k` is set.
    """

    def __init__(
        self,
        sampler: TopKTopPSampler,
        largest_k: int | None,
        k_of_step: Callable[[], int | None],
    ) -> None:
        super().__init__(sampler.logprobs_mode, sampler.use_fp64_gumbel)
        self._largest_k = largest_k
        self._k_of_step = k_of_step
        self.forward = self._forward

    def _forward(
        self,
        logits: torch.Tensor,  # [num_reqs, vocab_size] float32
        generators: dict[int, torch.Generator],
        k: torch.Tensor | None,  # [num_reqs] int32
        p: torch.Tensor | None,  # [num_reqs] float32
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self.forward_native(self.limit(logits, k, p), generators, None, None)

    def limit(
        self,
        logits: torch.Tensor,  # [rows, vocab_size] float32
        k: torch.Tensor | None,  # [rows] int32
        p: torch.Tensor | None,  # [rows] float32
    ) -> torch.Tensor:
        """Return logits with -inf for tokens left out; rows are the step's requests or drafts.

        Limits are cast, because vLLM's dummy runs have them in other dtypes.
        """
        if (k is None and p is None) or not len(logits):
            return logits
        if not self._is_taken(k):
            return apply_top_k_top_p(logits, k, p)
        return torch.ops.npu.npu_top_k_top_p(
            logits,
            None if p is None else p.to(logits.dtype),
            None if k is None else k.to(torch.int32),
        )

    def _is_taken(self, k: torch.Tensor | None) -> bool:
        if k is None or self._largest_k is None:
            return True
        of_step = self._k_of_step()
        return of_step is not None and of_step <= self._largest_k


def limit_drafts_by(sampler: FusedTopKTopPSampler | None) -> None:
    kernels.limit_drafts_by(None if sampler is None else sampler.limit)
