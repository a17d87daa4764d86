"""Gated delta nets: steps through the plugin's calls, held against a formula in float64.

Rows of ``verify-device`` run the same steps as the start-up of an engine.
"""

from dataclasses import dataclass
from functools import partial

import torch

from vllm_npu_prep.aclnn import first_release, missing_functions
from vllm_npu_prep.attention.recurrent_backend import RecurrentMetadata
from vllm_npu_prep.prep.state import AttentionState
from vllm_npu_prep.verify import formulas
from vllm_npu_prep.verify.outcome import NotHereError, Outcome, worst_of
from vllm_npu_prep.verify.row import FILLER, Row, RowContext, compare, normal

KERNEL_SIZE = 4
"""Size of the convolution in tokens: Qwen3-Next's and Qwen3.5's."""

HEAD = 128
"""Number of elements of a head."""

TOLERANCE = 0.04
"""Queries, keys, values and recurrent states are rounded to bfloat16 between the parts of a
layer."""


@dataclass(frozen=True)
class DeltaForm:
    """What a step of a layer depends on.

    Attributes
    ----------
    lengths
        For each request the tokens before the step, and its tokens in the step. Decodes, which come
        first, have one token and a recurrent state.
    accepted
        For each request how many tokens of the last step count. If it is given, all requests are
        decodes with drafts.
    """

    num_k_heads: int
    num_v_heads: int
    lengths: tuple[tuple[int, int], ...]
    accepted: tuple[int, ...] = ()

    def __str__(self) -> str:
        heads = f"{self.num_k_heads} heads of keys and {self.num_v_heads} of values"
        counts = f", {list(self.accepted)} of the last count" if self.accepted else ""
        return f"{heads}, (computed, new) tokens {list(self.lengths)}{counts}"

    @property
    def num_decodes(self) -> int:
        """Number of leading requests of one token with a state; with drafts, of all requests."""
        if self.accepted:
            return len(self.lengths)
        rest = (row for row, (old, new) in enumerate(self.lengths) if new > 1 or not old)
        return next(rest, len(self.lengths))


def forms_of(num_k_heads: int, num_v_heads: int) -> dict[str, DeltaForm]:
    heads = num_k_heads, num_v_heads
    return {
        "decodes over states": DeltaForm(*heads, ((5, 1), (9, 1), (2, 1))),
        "prefills in chunks": DeltaForm(*heads, ((0, 70), (3, 2), (0, 1))),
        "drafts over states": DeltaForm(*heads, ((5, 3), (9, 3), (7, 3)), (2, 1, 3)),
        "other numbers of drafts": DeltaForm(*heads, ((5, 4), (9, 1), (7, 2)), (2, 1, 2)),
    }


class DeltaStep:
    """A step of one layer with random weights, inputs and recurrent states."""

    def __init__(self, form: DeltaForm, device: torch.device, seed: int = 0) -> None:
        self.form, self._device = form, device
        generator = torch.Generator().manual_seed(seed)
        count = len(form.lengths)
        width = (2 * form.num_k_heads + form.num_v_heads) * HEAD
        tokens = sum(new for _, new in form.lengths)
        random = partial(normal, generator, dtype=torch.bfloat16)
        self.weight = random(width, KERNEL_SIZE)
        self.a_log, self.dt_bias = random(form.num_v_heads).float(), random(form.num_v_heads)
        self.mixed = random(tokens, width)
        self.a, self.b = random(tokens, form.num_v_heads), random(tokens, form.num_v_heads)
        # Each request finds its state in one block; prefills leave theirs in another
        self.num_blocks = 2 * count + 2 + (tokens if form.accepted else 0)
        blocks = (torch.randperm(self.num_blocks - 1, generator=generator) + 1).int()
        self.source, self.target = blocks[:count].clone(), blocks[count : 2 * count].clone()
        self.target[: form.num_decodes] = self.source[: form.num_decodes]
        self.of_tokens = blocks[2 * count :]  # with drafts: the block of each token
        if form.accepted:
            starts = torch.tensor([0, *(new for _, new in form.lengths[:-1])]).cumsum(0)
            self.target = self.of_tokens[starts].clone()
            self.source = self.of_tokens[starts + torch.tensor(form.accepted) - 1].clone()
        sizes = form.num_v_heads, HEAD, HEAD
        half = form.num_v_heads * HEAD * HEAD
        plane = torch.full((2, self.num_blocks, half), FILLER, dtype=torch.bfloat16)
        self.last = random(count, KERNEL_SIZE - 1, width)
        self.states = random(count, *sizes, scale=4.0)
        for row, (computed, _) in enumerate(form.lengths):
            if computed:
                block = int(self.source[row])
                plane[0, block] = self.states[row].flatten()
                plane[1, block, : self.last[row].numel()] = self.last[row].flatten()
            else:
                self.last[row], self.states[row] = 0, 0
        on_device = plane.to(device)
        self.states_on_device = on_device[0].view(-1, *sizes)
        self.conv_on_device = on_device[1, :, : (KERNEL_SIZE - 1) * width].unflatten(
            1, (KERNEL_SIZE - 1, width)
        )

    def run(self) -> Outcome:
        from vllm_npu_prep.attention.kernels.fused_delta import (
            DeltaShape,
            DeltaWeights,
            FusedDelta,
        )

        form, put = self.form, self._put
        weights = DeltaWeights.of(put(self.weight), None, put(self.a_log), put(self.dt_bias), HEAD)
        shape = DeltaShape(form.num_k_heads, form.num_v_heads, HEAD, HEAD)
        layer = FusedDelta(shape, weights, self.conv_on_device, self.states_on_device)
        metadata, parts = self._metadata(), []
        decode_tokens = metadata.num_decode_tokens
        for compute, tokens in (
            (layer.decode, slice(decode_tokens)),
            (layer.prefill, slice(decode_tokens, None)),
        ):
            mixed, b, a = (put(each[tokens]) for each in (self.mixed, self.b, self.a))
            if len(mixed):
                parts.append(compute(mixed, b, a, metadata))
        wanted = [self._formula(row, new) for row, (_, new) in enumerate(form.lengths)]
        output = torch.cat([each[0] for each in wanted])
        outcomes = [compare(torch.cat(parts), output, str(form), tolerance=TOLERANCE)]
        blocks = self.target.long()
        if form.accepted:  # the state after each token
            blocks = self.of_tokens[: len(self.mixed)].long()
            wanted = [
                self._formula(row, token + 1)
                for row, (_, new) in enumerate(form.lengths)
                for token in range(new)
            ]
        old = [row for row, (computed, _) in enumerate(form.lengths) if computed]
        for plane, index, before in (
            (self.conv_on_device, 1, self.last),
            (self.states_on_device, 2, self.states),
        ):
            kept = torch.full(plane.shape, FILLER, dtype=torch.float64)
            kept[self.source[old].long()] = before[old].double()
            kept[blocks] = torch.stack([each[index] for each in wanted])
            outcomes.append(compare(plane, kept, "the states", tolerance=TOLERANCE))
        return worst_of(outcomes, str(form))

    def _put(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._device)

    def _metadata(self) -> RecurrentMetadata:
        form, put, first = self.form, self._put, self.form.num_decodes
        starts = torch.tensor([0, *(new for _, new in form.lengths)]).cumsum(0).int()
        own = starts[first:] - starts[first]
        tokens = int(starts[-1])
        metadata = RecurrentMetadata(
            AttentionState.ChunkedPrefill,
            put(self.source),
            put(self.target),
            put(torch.tensor([computed > 0 for computed, _ in form.lengths])),
            put(starts),
            put(own),
            own[1:].tolist(),
            first,
            int(starts[first]),
            tokens,
            tokens,
        )
        if form.accepted:
            metadata.token_state_indices = put(self.of_tokens[:tokens])
            metadata.num_accepted_tokens = put(torch.tensor(form.accepted, dtype=torch.int32))
            metadata.decode_lens = [new for _, new in form.lengths]
        return metadata

    def _formula(
        self, row: int, num_tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Compute outputs and the state's parts after a request's first tokens of the step."""
        start = sum(new for _, new in self.form.lengths[:row])
        tokens = slice(start, start + num_tokens)
        return formulas.gated_delta(
            self.mixed[tokens],
            self.last[row],
            self.states[row],
            self.weight,
            self.a[tokens],
            self.b[tokens],
            self.a_log,
            self.dt_bias,
        )


RECURRENT, CHUNKED = "npu_recurrent_gated_delta_rule", "npu_chunk_gated_delta_rule"

WHAT = {
    "decode": ("decodes over states", RECURRENT),
    "prefill": ("prefills in chunks", CHUNKED),
    "drafts": ("drafts over states", RECURRENT),
    "ragged-drafts": ("other numbers of drafts", RECURRENT),
}
"""The form of a step and the operator that it calls, by the name of its row."""

HEADS = {"": (2, 4), "equal-": (2, 2), "most-": (16, 64)}
"""Numbers of heads of keys and of values, by a part of the row's name."""


def _run(what: str, operator: str, heads: tuple[int, int], context: RowContext) -> Outcome:
    for function in missing_functions([operator]).values():
        raise NotHereError(f"CANN has no {function}; CANN {first_release(function)} has it")
    return DeltaStep(forms_of(*heads)[what], context.device.device).run()


ROWS = tuple(
    Row(
        f"delta-{which}{name}",
        f"gated delta net, {heads[0]} heads of keys and {heads[1]} of values: {what}",
        partial(_run, what, operator, heads),
    )
    for name, (what, operator) in WHAT.items()
    for which, heads in HEADS.items()
    if not which or "drafts" not in name
)
