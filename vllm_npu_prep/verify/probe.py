"""The numeric probe at start-up: does this device compute the attention that the engine will use?

A wrong kernel gives wrong answers without an error. So before graphs are captured, each form of
attention is called once on small tensors, with the engine's own dtype, heads, head size, block
size, window and masks, and held against a float64 formula.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from vllm_npu_prep.attention.kernels import LayerShape, make_kernels
from vllm_npu_prep.attention.kernels.latent import LatentShape, make_latent_kernels
from vllm_npu_prep.attention.mask_cache import MaskCache
from vllm_npu_prep.attention.mla import AscendMLAImpl
from vllm_npu_prep.device import Device
from vllm_npu_prep.errors import PrepError
from vllm_npu_prep.prep.state import AttentionState
from vllm_npu_prep.verify.delta import DeltaStep
from vllm_npu_prep.verify.delta import forms_of as delta_forms
from vllm_npu_prep.verify.latent import LatentStep, forms_of
from vllm_npu_prep.verify.row import Outcome, compare
from vllm_npu_prep.verify.steps import AttentionForm, AttentionStep
from vllm_npu_prep.wording import counted

LONGEST_WINDOW = 8192
"""Windows up to this many tokens are probed with sequences that reach past them. Larger ones are
probed with shorter sequences, which show the form but not the limit."""

OTHER_FAMILY = {"fia": "atb", "atb": "fia"}

NO_OTHER_RULE = "serve the model on the CPU fallback"
"""What to do if the device computes the gated delta rule wrongly."""


@dataclass(frozen=True)
class ProbedLayers:
    """What layers of attention have in common, as far as kernels can tell.

    Attributes
    ----------
    layer
        Heads of this rank, head size, scale.
    block_size
        Size of a block in tokens; 0 without a cache.
    window
        Sliding window in tokens.
    causal
        False for encoders.
    reads_cache_only
        Whether they share the K and V of another layer.
    masks
        The engine's own masks.
    """

    family: str
    layer: LayerShape
    dtype: torch.dtype
    block_size: int
    window: int | None
    causal: bool
    reads_cache_only: bool
    masks: MaskCache

    def forms(self, with_padding: bool) -> Iterator[tuple[str, AttentionForm]]:
        """Yield each state that steps of such layers can have, with lengths that show its limits.

        `with_padding` says whether full graphs will give attention padding requests.
        """
        size, window = self.block_size, self.window
        form = AttentionForm(
            AttentionState.PrefillNoCache,
            ((0, 3), (0, 5)),
            self.layer,
            self.dtype,
            size,
            window,
            self.causal,
        )
        if not size:
            yield "an encoder", form
            return
        yield "prompts", form
        reach = size - 1
        if window is not None and window <= LONGEST_WINDOW:
            reach = max(reach, window)
        yield (
            "decodes",
            replace(
                form,
                state=AttentionState.DecodeOnly,
                lengths=((reach + 2, 1), (2, 1)),
                num_padding=int(with_padding),
            ),
        )
        chunks = ((reach, 3), (0, 4), (2, 1))
        yield "chunks", replace(form, state=AttentionState.ChunkedPrefill, lengths=chunks)


def probed_layers(
    attn_groups: Sequence[Sequence[Any]], layers: Mapping[str, Any], dtype: torch.dtype
) -> list[ProbedLayers]:
    """Return the different kinds of attention layers of an engine.

    The groups are vLLM's attention groups of each KV-cache group, with this plugin's builders.
    """
    found: dict[tuple[Any, ...], ProbedLayers] = {}
    for group in (group for groups in attn_groups for group in groups):
        builder = group.get_metadata_builder()
        if builder.holds_states:  # `probe_delta`
            continue
        for name in group.layer_names:
            impl = layers[name].impl
            if isinstance(impl, AscendMLAImpl):  # `probe_latent`
                continue
            kind = ProbedLayers(
                impl.kernels.family.name,
                impl.layer_shape,
                dtype,
                builder.kernel_block_size if impl.has_cache else 0,
                builder.sliding_window,
                builder.causal,
                impl.shares_kv,
                builder.masks,
            )
            key = (kind.layer, kind.block_size, kind.window, kind.causal, kind.reads_cache_only)
            found.setdefault(key, kind)
    return [*found.values()]


@dataclass(frozen=True)
class ProbedLatentLayers:
    """What layers of latent attention have in common, as far as kernels can tell.

    A decode has one token, and one for each draft (`decode_query_len`). The masks are the engine's
    own.
    """

    shape: LatentShape
    dtype: torch.dtype
    block_size: int
    decode_query_len: int
    masks: MaskCache


def probed_latent_layers(
    attn_groups: Sequence[Sequence[Any]], layers: Mapping[str, Any], dtype: torch.dtype
) -> list[ProbedLatentLayers]:
    found: dict[tuple[Any, ...], ProbedLatentLayers] = {}
    for group in (group for groups in attn_groups for group in groups):
        builder = group.get_metadata_builder()
        for name in group.layer_names:
            impl = getattr(layers[name], "impl", None)  # layers with states have none
            if isinstance(impl, AscendMLAImpl) and builder.latent:
                sizes = group.kv_cache_spec.block_size, builder.latent.decode_threshold
                kind = ProbedLatentLayers(impl.shape, dtype, *sizes, builder.masks)
                found.setdefault((kind.shape, *sizes), kind)
    return [*found.values()]


def _run_latent(*args: Any) -> Any:
    return LatentStep(*args).run()


def probe_latent(
    kinds: Sequence[ProbedLatentLayers], device: Device, log: Callable[[str], object]
) -> int:
    """Do for latent attention what `probe_attention` does."""
    start, number = time.perf_counter(), 0
    for kind in kinds:
        sizes = kind.shape, kind.dtype, kind.block_size, kind.decode_query_len
        for what, form in forms_of(*sizes).items():
            number += 1
            kernels, mask = make_latent_kernels("fia"), kind.masks.constant()
            step = partial(_run_latent, form, device.device, kernels, mask)
            _probe_step("fia", what, str(form), device, step)
    if number:
        seconds = time.perf_counter() - start
        log(
            f"Probe: {counted(number, 'form')} of latent attention and cache writes equal their "
            f"formulas ({seconds:.2f} s)."
        )
    return number


def probe_delta(
    heads: Sequence[tuple[int, int]], device: Device, log: Callable[[str], object]
) -> int:
    """Do for the gated delta rule what `probe_attention` does.

    `heads` has the numbers of heads of keys and of values, for each kind of layer.
    """
    start, number = time.perf_counter(), 0
    for key_heads, value_heads in heads:
        for what, form in delta_forms(key_heads, value_heads).items():
            number += 1
            run = DeltaStep(form, device.device).run
            _probe_step("gated delta net", what, str(form), device, run, NO_OTHER_RULE)
    if number:
        seconds = time.perf_counter() - start
        log(
            f"Probe: {counted(number, 'form')} of the gated delta rule equal their formulas "
            f"({seconds:.2f} s)."
        )
    return number


def probe_attention(
    kinds: Sequence[ProbedLayers],
    device: Device,
    log: Callable[[str], object],
    with_padding: bool = False,
) -> int:
    """Run every form of attention once, and compare its result and the cache with a formula.

    The number of forms is returned, and one line is logged at the end. `with_padding` says whether
    full graphs will give attention padding requests.

    Raises
    ------
    PrepError
        If a form differs or raises an error. It names the form, what was expected and what to do.
    """
    start, number = time.perf_counter(), 0
    for kind in kinds:
        for what, form in kind.forms(with_padding):
            number += 1
            _probe_form(kind, what, form, device)
    seconds = time.perf_counter() - start
    log(
        f"Probe: {counted(number, 'form')} of attention and cache writes equal their formulas "
        f"({seconds:.2f} s)."
    )
    return number


def _probe_form(kind: ProbedLayers, what: str, form: AttentionForm, device: Device) -> None:
    def run() -> Outcome:
        step = AttentionStep(form, device.device, make_kernels(kind.family))
        return step.run(kind.masks, cache_only=kind.reads_cache_only)

    _probe_step(kind.family, what, str(form), device, run)


def _probe_step(
    family: str,
    what: str,
    form: str,
    device: Device,
    run: Callable[[], Outcome],
    instead: str | None = None,
) -> None:
    if instead is None:
        instead = f'use {{"npu_prep": {{"attention": "{OTHER_FAMILY.get(family, "auto")}"}}}}'
    advice = (
        f"run vllm-npu-prep verify-device and send its table back; to start now, {instead}, or "
        '{"npu_prep": {"probe": false}} to take the risk'
    )
    try:
        outcome = run()
        device.synchronize()
    except Exception as error:
        first = str(error).strip().partition("\n")[0]
        raise PrepError(
            f"the start-up probe could not run {what} ({family}: {form}): "
            f"{type(error).__name__}: {first}; {advice}"
        ) from error
    if outcome.verdict.is_bad:
        raise PrepError(
            f"this device computes {what} wrongly ({family}: {outcome.given}): expected "
            f"{outcome.expected}, got {outcome.got}; {advice}"
        )


def probe_operator(
    name: str,
    call: Callable[[], torch.Tensor | tuple[torch.Tensor, ...]],
    expected: Callable[[], torch.Tensor | tuple[torch.Tensor, ...]],
    log: Callable[[str], object],
    tolerance: float | None = None,
) -> bool:
    """Return whether a fused operator gives what its formula says; if not, log that it is off.

    An operator that raises an error is wrong, too. The caller then uses torch's own operators.

    Parameters
    ----------
    call
        Calls the operator on small tensors; returns one result or several, on the device.
    expected
        Returns the same by a formula, in float64 on the host.
    tolerance
        Absolute and relative difference that is allowed; None allows that of the result's dtype.
    """
    try:
        got, wanted = call(), expected()
        results = got if isinstance(got, tuple) else (got,)
        formulas = wanted if isinstance(wanted, tuple) else (wanted,)
        outcomes = [
            compare(result, formula, name, tolerance=tolerance)
            for result, formula in zip(results, formulas, strict=True)
        ]
    except Exception as error:
        first = str(error).strip().partition("\n")[0]
        log(f"{name} is switched off: it fails on this device ({type(error).__name__}: {first})")
        return False
    for outcome in outcomes:
        if outcome.verdict.is_bad:
            log(
                f"{name} is switched off: this device computes it wrongly (expected "
                f"{outcome.expected}, got {outcome.got})"
            )
            return False
    return True
