"""Launches of the kernels that this plugin replaces: vLLM's own launchers, and random arguments.

Outputs are longer than what a kernel writes where vLLM's buffers are, and filled with -9, so that
what a kernel leaves alone shows, too.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from vllm.v1.sample import rejection_sampler

VOCAB = 7
UNTOUCHED = -9


@dataclass
class Launch:
    """A launcher, its arguments by name, and those of them that the kernel writes."""

    launcher: Callable[..., Any]
    arguments: dict[str, Any]
    written: tuple[str, ...]

    def run(self) -> dict[str, torch.Tensor]:
        """Launch on a copy of the arguments on the host; what the kernel wrote."""
        copy = self.to("cpu")
        copy.launch()
        return {name: copy.arguments[name] for name in self.written}

    def to(self, device: str) -> "Launch":
        """A copy with the arguments on a device; one that is given twice stays one."""
        copies = {
            id(value): _copy(value, device)
            for value in self.arguments.values()
            if isinstance(value, torch.Tensor)
        }
        arguments = {name: copies.get(id(value), value) for name, value in self.arguments.items()}
        return Launch(self.launcher, arguments, self.written)

    def launch(self) -> None:
        """Launch on the arguments themselves."""
        self.launcher(**self.arguments)


def _copy(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """A copy with the same strides, so a column block stays one."""
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return copy.copy_(tensor)


def untouched(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.full(shape, UNTOUCHED, dtype=dtype)


class Drafts:
    """Random drafts of several requests; few distinct tokens, so that some are accepted."""

    def __init__(self, lengths: list[int], seed: int):
        generator = torch.Generator().manual_seed(seed)
        self.lengths = lengths
        total = sum(lengths)
        self.cu = torch.tensor(lengths).cumsum(0).int()
        self.max_len = max(1, *lengths)

        def probs(rows: int) -> torch.Tensor:
            return torch.rand(rows, VOCAB, generator=generator).softmax(-1)

        def tokens(rows: int, high: int = VOCAB) -> torch.Tensor:
            return torch.randint(0, high, (rows,), generator=generator)

        self.draft = tokens(total, 3).int()
        self.argmax = tokens(total, 3)
        self.draft_probs, self.target_probs = probs(total), probs(total)
        self.draft_probs[torch.rand(total, generator=generator) < 0.2] = 0  # never accepted
        self.bonus, self.recovered = tokens(len(lengths))[:, None], tokens(total).int()
        self.uniform = torch.rand(total, generator=generator, dtype=torch.float64)
        self.is_greedy = torch.rand(len(lengths), generator=generator) < 0.5
        self.inv_q = torch.rand(len(lengths), VOCAB, generator=generator).reciprocal()
        self.output = torch.full((len(lengths), self.max_len + 1), -1, dtype=torch.int32)
        if total:
            self.draft[int(torch.randint(0, total, (1,), generator=generator))] = -1  # padded draft

    def spans(self):
        """Request, index of its first draft, number of its drafts."""
        start = 0
        for row, length in enumerate(self.lengths):
            yield row, start, length
            start += length

    def greedy(self, mixed: bool) -> Launch:
        arguments = {
            "output_token_ids": self.output,
            "cu_num_draft_tokens": self.cu,
            "draft_token_ids": self.draft,
            "target_argmax": self.argmax,
            "bonus_token_ids": self.bonus,
            "is_greedy": self.is_greedy if mixed else None,
            "max_spec_len": self.max_len,
            "uniform_probs": None,
            "synthetic_conditional_rates": None,
        }
        launcher = rejection_sampler._rejection_greedy_sample
        return Launch(launcher, arguments, ("output_token_ids",))

    def random(self, with_draft_probs: bool) -> Launch:
        arguments = {
            "output_token_ids": self.output,
            "cu_num_draft_tokens": self.cu,
            "draft_token_ids": self.draft,
            "draft_probs": self.draft_probs if with_draft_probs else None,
            "target_probs": self.target_probs,
            "bonus_token_ids": self.bonus,
            "recovered_token_ids": self.recovered,
            "uniform_probs": self.uniform,
            "is_greedy": self.is_greedy,
            "max_spec_len": self.max_len,
            "synthetic_conditional_rates": None,
        }
        launcher = rejection_sampler._rejection_random_sample
        return Launch(launcher, arguments, ("output_token_ids",))

    def recover(self, with_draft_probs: bool) -> Launch:
        arguments = {
            "output_token_ids": untouched(sum(self.lengths)),
            "cu_num_draft_tokens": self.cu,
            "draft_token_ids": self.draft,
            "draft_probs": self.draft_probs if with_draft_probs else None,
            "target_probs": self.target_probs,
            "inv_q": self.inv_q,
            "max_spec_len": self.max_len,
        }
        launcher = rejection_sampler._sample_recovered_tokens
        return Launch(launcher, arguments, ("output_token_ids",))

    def expand(self, replace_to: int = 100) -> Launch:
        arguments = {
            "output": untouched(sum(self.lengths), dtype=torch.int64),
            "input": self.bonus[:, 0],
            "cu_num_tokens": self.cu,
            "replace_from": int(self.bonus[0]),
            "replace_to": replace_to,
        }
        return Launch(rejection_sampler._expand, arguments, ("output",))
