"""The numeric probe at start-up: does this device compute the attention that the engine will use?

A wrong kernel gives wrong answers without an error. So before graphs are captured, each form of
attention is called once on small tensors, with the engine's own dtype, heads, head size, block
size, window and masks, and held against a float64 formula.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from vllm_npu_prep.attention.kernels import make_kernels
from vllm_npu_prep.attention.kernels.latent import make_latent_kernels
from vllm_npu_prep.attention.mask_cache import MaskCache
from vllm_npu_prep.attention.mla import AscendMLAImpl
from vllm_npu_prep.device import Device
from vllm_npu_prep.errors import PrepError
from vllm_npu_prep.prep.state import AttentionState
from vllm_npu_prep.verify import delta, latent, steps
from vllm_npu_prep.verify.outcome import Outcome, first_line_of
from vllm_npu_prep.verify.steps import AttentionForm, AttentionStep
from vllm_npu_prep.wording import counted

INSTEAD = {
    "fia": 'use {"npu_prep": {"attention": "atb"}}',
    "atb": 'use {"npu_prep": {"attention": "fia"}}',
    "reference": 'use {"npu_prep": {"attention": "auto"}}',
}
"""What to do if the device computes a kernel family wrongly."""

NO_OTHER_KERNELS = "serve the model on the CPU fallback"

Groups = Sequence[Sequence[Any]]
"""vLLM's attention groups of each KV-cache group, with this plugin's builders."""


@dataclass(frozen=True)
class ProbedForm:
    """One form in which layers of an engine compute attention, by a kernel family.

    `what` says it in a word or two, `given` with all sizes, and `instead` what to do if the device
    computes it wrongly, if no other family computes it.
    """

    what: str
    family: str
    given: str
    run: Callable[[torch.device], Outcome]
    instead: str = ""


def probe_layers(
    attn_groups: Groups,
    layers: Mapping[str, Any],
    dtype: torch.dtype,
    device: Device,
    log: Callable[[str], object],
    with_padding: bool,
) -> None:
    """Probe the different kinds of layers of an engine, each once.

    `with_padding` says whether full graphs will give attention padding requests.
    """
    if forms := sparse_forms(attn_groups, layers, dtype):
        probe_forms("sparse attention", forms, device, log)
        return
    if forms := latent_forms(attn_groups, layers, dtype):
        probe_forms("latent attention and cache writes", forms, device, log)
        return
    if forms := delta_forms(layers):
        probe_forms("the gated delta rule", forms, device, log)
    forms = attention_forms(attn_groups, layers, dtype, with_padding)
    probe_forms("attention and cache writes", forms, device, log)


def _impls(attn_groups: Groups, layers: Mapping[str, Any]) -> Iterator[tuple[Any, Any, Any]]:
    """Yield each layer's attention, its builder and its group; layers with states have none."""
    for group in (group for groups in attn_groups for group in groups):
        for name in group.layer_names:
            if hasattr(layers[name], "impl"):
                yield layers[name].impl, group.get_metadata_builder(), group


def attention_forms(
    attn_groups: Groups, layers: Mapping[str, Any], dtype: torch.dtype, with_padding: bool
) -> list[ProbedForm]:
    """Return the forms in which an engine's layers of K and V call their kernel family."""
    found: dict[AttentionForm, tuple[str, MaskCache]] = {}
    for impl, builder, _ in _impls(attn_groups, layers):
        if not isinstance(impl, AscendMLAImpl):
            form = AttentionForm(
                AttentionState.PrefillNoCache,
                ((0, 3), (0, 5)),
                impl.layer_shape,
                dtype,
                builder.kernel_block_size if impl.has_cache else 0,
                builder.sliding_window,
                builder.causal,
                reads_cache_only=impl.shares_kv,
            )
            found.setdefault(form, (impl.kernels.family.name, builder.masks))
    return [
        form for prompts, own in found.items() for form in probed_forms(prompts, *own, with_padding)
    ]


def probed_forms(
    prompts: AttentionForm, family: str, masks: MaskCache, with_padding: bool
) -> list[ProbedForm]:
    """Return each kind of step of one kind of layers; `masks` are the engine's own."""

    def run(form: AttentionForm, device: torch.device) -> Outcome:
        return AttentionStep(form, device, make_kernels(family)).run(masks)

    return [
        ProbedForm(what, family, str(form), partial(run, form))
        for what, form in steps.forms_of(prompts, with_padding).items()
    ]


def latent_forms(
    attn_groups: Groups, layers: Mapping[str, Any], dtype: torch.dtype
) -> list[ProbedForm]:
    """Return the forms in which an engine's layers of latent attention call family ``fia``.

    A decode has one token, and one for each draft.
    """

    def run(form: latent.LatentForm, masks: MaskCache, device: torch.device) -> Outcome:
        kernels = make_latent_kernels("fia")
        return latent.LatentStep(form, device, kernels, masks.constant()).run()

    found: dict[latent.LatentForm, ProbedForm] = {}
    for impl, builder, group in _impls(attn_groups, layers):
        if isinstance(impl, AscendMLAImpl) and builder.latent:
            sizes = group.kv_cache_spec.block_size, builder.latent.decode_threshold
            for what, form in latent.forms_of(impl.shape, dtype, *sizes).items():
                arguments = what, "fia", str(form), partial(run, form, builder.masks)
                found.setdefault(form, ProbedForm(*arguments, NO_OTHER_KERNELS))
    return [*found.values()]


def sparse_forms(
    attn_groups: Groups, layers: Mapping[str, Any], dtype: torch.dtype
) -> list[ProbedForm]:
    """Return what an engine's layers of sparse attention ask of family ``fia``."""
    indexers = [each.shape for each in layers.values() if hasattr(each, "choosing_bytes")]
    if not indexers:
        return []
    from vllm_npu_prep.verify.sparse import probed_forms as of_sparse_attention

    found: dict[tuple[Any, ...], list[ProbedForm]] = {}
    for impl, _, group in _impls(attn_groups, layers):
        given = impl.shape, indexers[0], dtype, group.kv_cache_spec.block_size
        if given not in found:
            text = f"{indexers[0].topk} positions, {indexers[0].num_heads} index heads"
            found[given] = [
                ProbedForm(what, "fia", text, run, NO_OTHER_KERNELS)
                for what, run in of_sparse_attention(*given).items()
            ]
    return [form for forms in found.values() for form in forms]


def delta_forms(layers: Mapping[str, Any]) -> list[ProbedForm]:
    """Return the forms in which an engine's recurrent layers compute the gated delta rule."""

    def run(form: delta.DeltaForm, device: torch.device) -> Outcome:
        return delta.DeltaStep(form, device).run()

    shapes = [layer.fused.shape for layer in layers.values() if hasattr(layer, "fused")]
    heads = dict.fromkeys((shape.num_k_heads, shape.num_v_heads) for shape in shapes)
    return [
        ProbedForm(what, "gated delta net", str(form), partial(run, form), NO_OTHER_KERNELS)
        for each in heads
        for what, form in delta.forms_of(*each).items()
    ]


def probe_forms(
    subject: str, forms: Iterable[ProbedForm], device: Device, log: Callable[[str], object]
) -> None:
    """Run every form once, and compare its results and the cache with a formula; log one line.

    Raises
    ------
    PrepError
        If a form differs or raises an error. It names the form, what was expected and what to do.
    """
    start, number = time.perf_counter(), 0
    for form in forms:
        _probe_form(form, device)
        number += 1
    seconds = time.perf_counter() - start
    log(f"Probe: {counted(number, 'form')} of {subject} equal their formulas ({seconds:.2f} s).")


def _probe_form(form: ProbedForm, device: Device) -> None:
    instead = form.instead or INSTEAD[form.family]
    advice = (
        "run vllm-npu-prep verify-device and send its table back; to start now, "
        f'{instead}, or {{"npu_prep": {{"probe": false}}}} to take the risk'
    )
    try:
        outcome = form.run(device.device)
        device.synchronize()
    except Exception as error:
        raise PrepError(
            f"the start-up probe could not run {form.what} ({form.family}: {form.given}): "
            f"{first_line_of(error)}; {advice}"
        ) from error
    if outcome.verdict.is_bad:
        raise PrepError(
            f"this device computes {form.what} wrongly ({form.family}: {outcome.given}): expected "
            f"{outcome.expected}, got {outcome.got}; {advice}"
        )
