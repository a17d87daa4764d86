"""Top-k and top-p by one operator."""

import torch
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler


class FusedTopKTopPSampler(TopKTopPSampler):
    """vLLM's sampler with its limits applied by ``npu_top_k_top_p``.

    torch's form sorts all logits in float32 and takes some fourteen launches.
    """

    def __init__(self, sampler: TopKTopPSampler) -> None:
        super().__init__(sampler.logprobs_mode, sampler.use_fp64_gumbel)
        self.forward = self._forward

    def _forward(
        self,
        logits: torch.Tensor,  # [num_reqs, vocab_size] float32
        generators: dict[int, torch.Generator],
        k: torch.Tensor | None,  # [num_reqs] int32
        p: torch.Tensor | None,  # [num_reqs] float32
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As vLLM's, whose dummy runs have limits of other dtypes."""
        if k is not None or p is not None:
            logits = torch.ops.npu.npu_top_k_top_p(
                logits,
                None if p is None else p.to(logits.dtype),
                None if k is None else k.to(torch.int32),
            )
        return self.forward_native(logits, generators, None, None)
