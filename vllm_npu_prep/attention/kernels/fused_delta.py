"""Gated delta nets on NPUs: the recurrence by torch_npu's operators, the convolution by torch's.

Sources: schemas and docstrings of ``npu_recurrent_gated_delta_rule`` (decodes, over states in the
cache) and ``npu_chunk_gated_delta_rule`` (prefills, over states that are gathered), and what CANN's
``ops-transformer`` checks: everything is in bfloat16 except decays, and heads are of size 128.

The first operator writes a state where it reads it. So before a step's forward pass, states of
decodes that enter another block are copied there, and those of decodes without a state are zeroed
(`vllm_npu_prep.attention.recurrent_backend.move_states`). Therefore a graph serves the decodes of
any step.
"""

from itertools import accumulate
from math import gcd
from typing import NamedTuple

import torch
import torch_npu
from torch.nn import functional

from vllm_npu_prep.attention.kernels.torch_delta import EPSILON
from vllm_npu_prep.attention.recurrent_backend import (
    DecodeRows,
    DraftRows,
    PrefillRows,
    RecurrentMetadata,
)


class DeltaShape(NamedTuple):
    """The sizes of a layer, as one rank has it."""

    num_k_heads: int
    num_v_heads: int
    key_dim: int  # of one head
    value_dim: int

    @property
    def keys(self) -> int:
        """Return the number of elements of queries and keys of one token."""
        return 2 * self.num_k_heads * self.key_dim


class DeltaWeights(NamedTuple):
    """The layer's parameters in float32, in the form that the operators take."""

    taps: torch.Tensor  # [kernel_size, width]
    bias: torch.Tensor | None  # [width]
    decay: torch.Tensor  # [num_v_heads]: the negative of A
    dt_bias: torch.Tensor  # [num_v_heads]
    norm: torch.Tensor  # [key_dim]: turns RMS norm's mean of squares into a sum

    @classmethod
    def of(
        cls,
        weight: torch.Tensor,  # [width, kernel_size]
        bias: torch.Tensor | None,
        a_log: torch.Tensor,
        dt_bias: torch.Tensor,
        key_dim: int,
    ) -> "DeltaWeights":
        """Convert the parameters, once, when the cache is bound."""
        decay = -a_log.detach().float().exp()
        return cls(
            weight.detach().t().float().contiguous(),
            None if bias is None else bias.detach().float(),
            decay,
            dt_bias.detach().float(),
            torch.full((key_dim,), key_dim**-0.5, device=decay.device),
        )

    def refresh(self, new: "DeltaWeights") -> None:
        """Copy new weights in place, so that graphs read them."""
        for mine, other in zip(self, new):
            if mine is not None and other is not None:
                mine.copy_(other)


class RuleArguments(NamedTuple):
    """The arguments of both operators for some tokens."""

    query: torch.Tensor  # [T, num_k_heads, key_dim] bfloat16, vectors of length 1
    key: torch.Tensor  # the same
    value: torch.Tensor  # [T, num_v_heads, value_dim] bfloat16
    beta: torch.Tensor  # [T, num_v_heads] bfloat16, between 0 and 1
    g: torch.Tensor  # [T, num_v_heads] float32, at most 0


class StateRows:
    """The convolution's parts of the states of all blocks, as rows of a contiguous matrix.

    A part is the beginning of a row of the second plane. Operators over such a strided view would
    first copy the whole plane. They don't if the plane is seen as rows whose length divides both
    the part and the stride.

    Parameters
    ----------
    parts
        ``[num_blocks, kernel_size - 1, width]``; each block's part is contiguous.
    """

    def __init__(self, parts: torch.Tensor) -> None:
        self.shape = tuple(parts.shape[1:])
        count, stride = self.shape[0] * self.shape[1], parts.stride(0)
        self.unit = gcd(count, stride)
        self.rows_of_block = stride // self.unit
        size = (len(parts) * self.rows_of_block, self.unit)
        self.plane = parts.as_strided(size, (self.unit, 1))  # [num_blocks * rows_of_block, unit]
        self._offsets = torch.arange(count // self.unit, device=parts.device)

    def indices(self, blocks: torch.Tensor) -> torch.Tensor:
        """Return the matrix rows of blocks, int64 ``[len(blocks) * rows per part]``."""
        rows = torch.add(self._offsets, blocks.unsqueeze(1), alpha=self.rows_of_block)
        return rows.flatten()

    def read(self, indices: torch.Tensor) -> torch.Tensor:
        """Return the parts at these matrix rows, ``[R, kernel_size - 1, width]``."""
        return self.plane.index_select(0, indices).view(-1, *self.shape)

    def write(self, indices: torch.Tensor, parts: torch.Tensor) -> None:
        self.plane.index_copy_(0, indices, parts.reshape(-1, self.unit))


class FusedDelta:
    """The core of one gated delta net layer on an NPU.

    Parameters
    ----------
    conv_states, states
        Both parts of the recurrent states of all blocks, in bfloat16: ``[num_blocks, kernel_size -
        1, width]``, and ``[num_blocks, num_v_heads, value_dim, key_dim]``, contiguous.
    """

    def __init__(
        self,
        shape: DeltaShape,
        weights: DeltaWeights,
        conv_states: torch.Tensor,
        states: torch.Tensor,
    ) -> None:
        self.shape, self.weights = shape, weights
        self.conv_states, self.states = conv_states, states
        self.rows = StateRows(conv_states)
        self.scale = shape.key_dim**-0.5

    def decode(
        self,
        mixed: torch.Tensor,  # [T, width]
        b: torch.Tensor,  # [T, num_v_heads]
        a: torch.Tensor,  # [T, num_v_heads]
        metadata: RecurrentMetadata,
    ) -> torch.Tensor:
        """Compute one token of each request; in a full graph also padding, over the null block.

        The operator demands at least as many blocks as tokens. Only padding can have more tokens,
        and is then computed by several calls.
        """
        if metadata.decode_lens is not None:
            return self._decode_drafts(mixed, b, a, metadata)
        blocks = metadata.state_indices[: len(mixed)]
        if metadata.decode_rows is None:  # in the group's first layer; graphs contain it
            metadata.decode_rows = DecodeRows(self.rows.indices(blocks), torch.ones_like(blocks))
        rows = metadata.decode_rows
        inputs = torch.cat((self.rows.read(rows.both), mixed.unsqueeze(1)), 1)
        self.rows.write(rows.both, inputs[:, 1:])
        convolved = (inputs * self.weights.taps).sum(1)
        given = self._arguments(convolved, b, a)
        outputs = [
            torch_npu.npu_recurrent_gated_delta_rule(
                given.query[part],
                given.key[part],
                given.value[part],
                self.states,
                beta=given.beta[part],
                scale=self.scale,
                actual_seq_lengths=rows.query_lens[part],
                ssm_state_indices=blocks[part],
                g=given.g[part],
            )
            for part in pieces(len(mixed), len(self.states))
        ]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _decode_drafts(
        self, mixed: torch.Tensor, b: torch.Tensor, a: torch.Tensor, metadata: RecurrentMetadata
    ) -> torch.Tensor:
        """Compute each request's token and drafts; the operator keeps a state for each token.

        It finds the state after the last token that counts in that token's block. If the step has
        fewer tokens of the request, the state was copied to the block of its last token.
        """
        blocks, reqs = metadata.token_state_indices, slice(metadata.num_decodes)
        assert blocks is not None and metadata.decode_lens is not None
        uniform = metadata.uniform_decode_len
        if metadata.draft_rows is None:  # in the group's first layer; graphs contain it
            assert metadata.num_accepted_tokens is not None
            to_write = self.rows.indices(blocks)
            starts = metadata.query_start_loc[: metadata.num_decodes + 1]
            counts = starts[1:] - starts[:-1]
            kept = torch.minimum(metadata.num_accepted_tokens[reqs], counts)
            to_read = self.rows.indices(blocks.index_select(0, starts[:-1] + kept - 1))
            metadata.draft_rows = DraftRows(to_read, to_write, counts, kept)
        rows = metadata.draft_rows
        last = self.rows.read(rows.to_read)
        if uniform:
            convolved, windows = self._convolve_drafts(mixed, last, uniform)
        else:
            ends = list(accumulate(metadata.decode_lens))
            convolved, windows = self._convolve_ragged(mixed, last, ends)
        self.rows.write(rows.to_write, windows)
        given = self._arguments(convolved, b, a)
        outputs, lens = [], metadata.decode_lens
        most = len(self.states) // max(lens) if uniform else len(lens)
        for part in pieces(len(lens), most):
            first, last_token = sum(lens[: part.start]), sum(lens[: part.stop])
            tokens_of_part = slice(first, last_token)
            outputs.append(
                torch_npu.npu_recurrent_gated_delta_rule(
                    given.query[tokens_of_part],
                    given.key[tokens_of_part],
                    given.value[tokens_of_part],
                    self.states,
                    beta=given.beta[tokens_of_part],
                    scale=self.scale,
                    actual_seq_lengths=rows.query_lens[part],
                    ssm_state_indices=blocks[tokens_of_part],
                    num_accepted_tokens=rows.accepted[part],
                    g=given.g[tokens_of_part],
                )
            )
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _convolve_drafts(
        self,
        mixed: torch.Tensor,  # [R * length, width]
        last: torch.Tensor,  # [R, kernel_size - 1, width]
        length: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Convolve requests that have `length` tokens each.

        Returns
        -------
        convolved, windows
            ``[T, width]`` float32, and the last inputs after each token, ``[T, kernel_size - 1,
            width]``.
        """
        taps = self.weights.taps
        before = len(taps) - 1
        inputs = torch.cat((last, mixed.view(len(last), length, -1)), 1)
        sums = inputs[:, before:] * taps[before]
        for tap in range(before):
            sums += inputs[:, tap : tap + length] * taps[tap]
        windows = inputs[:, 1:].unfold(1, before, 1).transpose(2, 3)
        return sums.flatten(0, 1), windows.flatten(0, 1)

    def _convolve_ragged(
        self,
        mixed: torch.Tensor,  # [T, width]
        last: torch.Tensor,  # [R, kernel_size - 1, width]
        ends: list[int],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Convolve requests with different numbers of tokens, one after the other."""
        starts = [0, *ends[:-1]]
        parts = [
            self._convolve_drafts(mixed[start:end], last[row : row + 1], end - start)
            for row, (start, end) in enumerate(zip(starts, ends))
        ]
        return torch.cat([each for each, _ in parts]), torch.cat([each for _, each in parts])

    def prefill(
        self, mixed: torch.Tensor, b: torch.Tensor, a: torch.Tensor, metadata: RecurrentMetadata
    ) -> torch.Tensor:
        reqs = slice(metadata.num_decodes, metadata.num_decodes + metadata.num_prefills)
        source, target = metadata.initial_state_indices[reqs], metadata.state_indices[reqs]
        if metadata.prefill_rows is None:  # in the group's first layer
            starts = metadata.prefill_query_start_loc
            metadata.prefill_rows = PrefillRows(
                query_lens=starts[1:] - starts[:-1],
                is_empty=~metadata.has_initial_state[reqs].view(-1, 1, 1),
                to_read=self.rows.indices(source),
                to_write=self.rows.indices(target),
                blocks=target.long(),
            )
        rows = metadata.prefill_rows
        last = self.rows.read(rows.to_read).masked_fill_(rows.is_empty, 0)
        convolved, last = self._convolve(mixed, last, metadata.prefill_ends)
        self.rows.write(rows.to_write, last)
        given = self._arguments(convolved, b, a)
        states = self.states.index_select(0, source)
        states.masked_fill_(rows.is_empty.unsqueeze(-1), 0)
        output, states = torch_npu.npu_chunk_gated_delta_rule(
            given.query,
            given.key,
            given.value,
            beta=given.beta,
            initial_state=states,
            actual_seq_lengths=rows.query_lens,
            scale=self.scale,
            g=given.g,
        )
        self.states.index_copy_(0, rows.blocks, states)
        return output

    def _convolve(
        self,
        mixed: torch.Tensor,  # [T, width]
        last: torch.Tensor,  # [R, kernel_size - 1, width]: inputs before each sequence's own
        ends: list[int],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Convolve all sequences at once, each placed behind its last inputs.

        Returns
        -------
        convolved, last
            ``[T, width]`` float32, and the last inputs, ``[R, kernel_size - 1, width]``.
        """
        taps = self.weights.taps
        before = len(taps) - 1
        starts = [0, *ends[:-1]]
        parts = [
            part
            for row, (start, end) in enumerate(zip(starts, ends))
            for part in (last[row], mixed[start:end])
        ]
        inputs = torch.cat(parts)  # [T + R * before, width]
        count = len(inputs) - before
        sums = inputs[before:] * taps[before]
        for tap in range(before):
            sums += inputs[tap : tap + count] * taps[tap]
        # Sums over two sequences lie between them, and are left out
        own = [slice(s + before * i, e + before * i) for i, (s, e) in enumerate(zip(starts, ends))]
        convolved = sums if len(own) == 1 else torch.cat([sums[rows] for rows in own])
        return convolved, torch.stack([inputs[rows.stop : rows.stop + before] for rows in own])

    def _arguments(
        self,
        convolved: torch.Tensor,  # [T, width] float32
        b: torch.Tensor,
        a: torch.Tensor,
    ) -> RuleArguments:
        """Activate queries, keys and values, and compute decays and rates from the gates."""
        shape, weights = self.shape, self.weights
        if weights.bias is not None:
            convolved = convolved + weights.bias
        functional.silu(convolved, inplace=True)
        keys = convolved[:, : shape.keys].unflatten(1, (-1, shape.key_dim))
        # With this gamma, the norm is x / sqrt(sum of squares + EPSILON)
        keys, _ = torch_npu.npu_rms_norm(keys, weights.norm, EPSILON / shape.key_dim)
        heads = slice(shape.num_k_heads), slice(shape.num_k_heads, None)
        query, key = (keys[:, part].to(torch.bfloat16) for part in heads)
        value = convolved[:, shape.keys :].to(torch.bfloat16)
        g = functional.softplus(a + weights.dt_bias).mul_(weights.decay)
        return RuleArguments(
            query,
            key,
            value.view(len(a), shape.num_v_heads, shape.value_dim),
            b.sigmoid(),
            g,
        )


def gated_norm(
    x: torch.Tensor,  # [T, num_v_heads, value_dim]
    z: torch.Tensor,  # the same
    weight: torch.Tensor,  # [value_dim]
    epsilon: float,
    activation: str,
) -> torch.Tensor:
    """Compute vLLM's ``RMSNormGated`` without groups: the norm of each head, times an activated
    gate."""
    gate = z.sigmoid() if activation == "sigmoid" else functional.silu(z)
    normed, _ = torch_npu.npu_rms_norm(x, weight, epsilon)
    return normed.mul_(gate)


def pieces(num_tokens: int, at_most: int) -> list[slice]:
    """Return the tokens of each call, where a call has at most `at_most` tokens."""
    return [
        slice(start, min(start + at_most, num_tokens)) for start in range(0, num_tokens, at_most)
    ]
