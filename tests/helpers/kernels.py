"""Launches of the kernels that this plugin replaces: vLLM's own launchers, and random arguments.

Outputs are longer than what a kernel writes where vLLM's buffers are, and filled with -9, so that
what a kernel leaves alone shows, too.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from vllm.v1.sample import rejection_sampler
from vllm.v1.spec_decode import utils

from tests.helpers.triton_source import Source

VOCAB = 7
UNTOUCHED = -9
LAUNCHERS = {
    utils: (
        "_eagle_step_slot_mapping_metadata",
        "_eagle_prepare_inputs_padded",
        "_eagle_prepare_next_token_padded",
        "_copy_and_expand_eagle_inputs",
    ),
    rejection_sampler: (
        "_rejection_greedy_sample",
        "_rejection_random_sample",
        "_sample_recovered_tokens",
        "_expand",
    ),
}
"""What launches a kernel, by its module; the kernel is named after it."""


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

    def run_source(self) -> dict[str, torch.Tensor]:
        """The same by the source of vLLM's kernels."""
        with contextlib.ExitStack() as patches:
            for module, names in LAUNCHERS.items():
                for name in names:
                    kernel = Source(module, f"{name[1:]}_kernel")
                    launcher = getattr(module, name)
                    patches.enter_context(mock.patch.object(launcher, "kernel", kernel))
            return self.run()

    def check(self) -> None:
        """What was written is what the source writes."""
        expected = self.run_source()
        for name, values in self.run().items():
            assert torch.equal(values, expected[name]), name

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


def random_ints(seed: int) -> Callable[..., torch.Tensor]:
    """Random int32 from `low` to `high`, both included."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.randint(low, high + 1, shape, generator=generator, dtype=dtype)

    return draw


def next_draft_step(
    batch_size: int, padding: int, block_size: int, max_model_len: int, in_place: bool, seed: int
) -> Launch:
    """One step of a drafter, some requests of it at the end of `max_model_len`."""
    draw = random_ints(seed)
    n_blocks = max(1, -(-max_model_len // block_size) - seed % 2)  # odd seeds: one too few
    positions = draw(0, max_model_len - 1, batch_size, dtype=torch.int64)
    ends = draw(0, 2, batch_size) == 0
    positions[ends] = max_model_len - draw(0, 2, int(ends.sum()), dtype=torch.int64).clamp(max=1)
    out_positions = positions if in_place else untouched(batch_size, dtype=torch.int64)
    arguments = {
        "positions_1d": positions,
        "block_table_tensor": draw(0, 99, batch_size + 1, n_blocks + 2)[:, :n_blocks],
        "seq_lens": draw(1, max_model_len + 1, batch_size + padding),
        "block_size": block_size,
        "max_model_len": max_model_len,
        "out_clamped_positions": out_positions,
        "out_slot_mapping": untouched(batch_size + padding, dtype=torch.int64),
        "input_batch_size": batch_size + padding if padding else None,
    }
    return Launch(
        utils.eagle_step_update_slot_mapping_and_metadata,
        arguments,
        ("seq_lens", "out_clamped_positions", "out_slot_mapping"),
    )


def padded_inputs(num_drafts: list[int], seed: int) -> Launch:
    """Requests after verification: from none to all of their samples are valid."""
    draw, num_reqs = random_ints(seed), len(num_drafts)
    drafts = torch.tensor(num_drafts, dtype=torch.int32)
    query_lens = drafts + draw(1, 3, num_reqs)
    arguments = {
        "cu_num_draft_tokens": drafts.cumsum(0).int(),
        "valid_sampled_tokens_count": draw(0, 99, num_reqs) % (drafts + 2),
        "query_start_loc_gpu": torch.cat([torch.zeros(1), query_lens.cumsum(0)]).int(),
        "token_indices_to_sample": untouched(num_reqs),
        "num_rejected_tokens_gpu": untouched(num_reqs),
        "num_reqs": num_reqs,
    }
    written = ("token_indices_to_sample", "num_rejected_tokens_gpu")
    return Launch(utils._eagle_prepare_inputs_padded, arguments, written)


def padded_next_tokens(num_reqs: int, num_sampled: int, seed: int) -> Launch:
    """Samples of which some are rejected, some outside of the vocabulary, some discarded."""
    draw = random_ints(seed)
    sampled = draw(-2, VOCAB + 1, num_reqs, num_sampled + seed % 2)[:, :num_sampled]
    arguments = {
        "sampled_token_ids": sampled.clamp_(min=-1),
        "discard_request_mask": draw(0, 3, num_reqs + 2) == 0,
        "backup_next_token_ids": draw(100, 199, num_reqs + 2),
        "next_token_ids": untouched(num_reqs),
        "valid_sampled_tokens_count": untouched(num_reqs),
        "vocab_size": VOCAB,
        "num_sampled_tokens_per_req": num_sampled,
        "num_reqs": num_reqs,
        "stride_sampled_token_ids": sampled.stride(0),
        "BLOCK_SIZE_TOKENS": utils.next_power_of_2(num_sampled),
    }
    written = ("next_token_ids", "valid_sampled_tokens_count")
    return Launch(utils._eagle_prepare_next_token_padded, arguments, written)


def expanded_inputs(query_lens: list[int], num_slots: int, shift: bool, seed: int) -> Launch:
    """Inputs that get room for `num_slots` tokens a request, some of their own rejected."""
    draw, num_reqs = random_ints(seed), len(query_lens)
    lens = torch.tensor(query_lens, dtype=torch.int32)
    query_start_loc = torch.cat([torch.zeros(1), lens.cumsum(0)]).int()
    num_tokens = sum(query_lens)
    num_outputs = num_tokens + num_reqs * (num_slots - shift) + 3
    num_rejected = draw(0, 99, num_reqs) % (lens + (not shift))
    arguments = {
        "target_token_ids_ptr": draw(0, 99, num_tokens),
        "target_positions_ptr": draw(0, 999, num_tokens, dtype=torch.int64),
        "next_token_ids_ptr": draw(100, 199, num_reqs),
        "out_input_ids_ptr": untouched(num_outputs),
        "out_positions_ptr": untouched(num_outputs, dtype=torch.int64),
        "out_is_rejected_token_mask_ptr": draw(0, 1, num_outputs).bool(),
        "out_is_masked_token_mask_ptr": draw(0, 1, num_outputs).bool(),
        "out_new_token_indices_ptr": untouched(num_reqs * num_slots),
        "out_hidden_state_mapping_ptr": untouched(num_tokens),
        "query_start_loc_ptr": query_start_loc,
        "query_end_loc_ptr": query_start_loc[1:] - 1 - num_rejected,
        "padding_token_id": 300,
        "parallel_drafting_token_id": 301,
        "total_input_tokens": num_tokens,
        "num_padding_slots_per_request": num_slots,
        "shift_input_ids": shift,
        "BLOCK_SIZE_TOKENS": 4,
        "batch_size": num_reqs,
        "num_blocks": 9,
    }
    written = tuple(name for name in arguments if name.startswith("out_"))
    return Launch(utils._copy_and_expand_eagle_inputs, arguments, written)


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
