"""The start-up probe and the steps it is made of, with kernels of the CPU fallback made wrong.

The same on NPUs: `tests/npu/on_device/test_verify_device.py`.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from vllm_npu_prep.attention.families import REFERENCE
from vllm_npu_prep.attention.kernels.reference import ReferenceKernels
from vllm_npu_prep.attention.mla import AscendMLAImpl
from vllm_npu_prep.device import make_device
from vllm_npu_prep.errors import PrepError
from vllm_npu_prep.prep.state import AttentionState
from vllm_npu_prep.verify.fused import stays_on
from vllm_npu_prep.verify.latent import shape_of
from vllm_npu_prep.verify.outcome import Outcome, Verdict
from vllm_npu_prep.verify.probe import attention_forms, latent_forms, probe_forms, probed_forms
from vllm_npu_prep.verify.row import Probe, compare
from vllm_npu_prep.verify.steps import (
    LONGEST_WINDOW,
    AttentionForm,
    forms_of,
    layer_of,
    masks_for,
)


def prompts_of(window=None, causal=True, shares=False, heads=(4, 2)) -> AttentionForm:
    """The first form of layers of 32 elements a head in blocks of 16; encoders have no cache."""
    layer, size = layer_of(*heads, 32), 16 if causal else 0
    state, lengths = AttentionState.PrefillNoCache, ((0, 3), (0, 5))
    given = layer, torch.float16, size, window, causal
    return AttentionForm(state, lengths, *given, reads_cache_only=shares)


def run(*kinds: AttentionForm, with_padding=False) -> list[str]:
    lines: list[str] = []
    masks = masks_for(REFERENCE, torch.float16, torch.device("cpu"), 256)
    forms = [
        form for kind in kinds for form in probed_forms(kind, "reference", masks, with_padding)
    ]
    probe_forms("attention", forms, make_device("cpu"), lines.append)
    return lines


@pytest.mark.parametrize(
    ("window", "shares", "with_padding"), [(None, False, True), (3, True, True), (40, False, False)]
)
def test_right_kernels_pass_in_one_line(window, shares, with_padding):
    encoders = prompts_of(causal=False), prompts_of(3, causal=False)
    (line,) = run(prompts_of(window, shares=shares), *encoders, with_padding=with_padding)
    assert "5 forms" in line


def wrong(monkeypatch, verb, change):
    """Let a verb of the reference kernels do something else."""
    right = getattr(ReferenceKernels, verb)

    def changed(self, *args):
        return change(right, self, *args)

    monkeypatch.setattr(ReferenceKernels, verb, changed)


def uniform_average(right, self, query, own, cache, metadata, layer, output, *rest):
    if metadata.causal:
        return right(self, query, own, cache, metadata, layer, output, *rest)
    return right(self, torch.zeros_like(query), own, cache, metadata, layer, output, *rest)


def ignored_mask(right, self, query, own, cache, metadata, *rest):
    metadata.attn_mask = None
    return right(self, query, own, cache, metadata, *rest)


def nothing_written(right, self, *args):
    pass


PLANTED = {
    "a plain average": (
        "attend",
        uniform_average,
        prompts_of(None, False),
        "an encoder",
        "average",
    ),
    "no mask": ("attend", ignored_mask, prompts_of(), "prompts", "as no mask"),
    "no write": ("write_kv", nothing_written, prompts_of(), "prompts", "as nothing written"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_wrong_kernel_ends_the_start_and_is_named(monkeypatch, name):
    verb, change, kind, form, shown = PLANTED[name]
    wrong(monkeypatch, verb, change)
    with pytest.raises(PrepError) as error:
        run(kind, with_padding=True)
    message = str(error.value)
    assert "\n" not in message
    assert form in message and shown in message, message
    assert "4/2 heads of 32" in message and "float16" in message
    assert "verify-device" in message and '"probe": false' in message


def test_a_kernel_that_refuses_is_named_with_its_form(monkeypatch):
    def refuse(right, self, *args):
        raise RuntimeError("error 561002\nand pages of more")

    wrong(monkeypatch, "attend", refuse)
    with pytest.raises(PrepError, match=r"could not run prompts .*error 561002") as error:
        run(prompts_of())
    assert "pages of more" not in str(error.value)


def test_a_window_is_reached_by_the_lengths_that_are_probed():
    for window in (4, 100):
        for what, form in forms_of(prompts_of(window), False).items():
            assert what == "prompts" or max(form.seq_lens) > window
    huge = forms_of(prompts_of(LONGEST_WINDOW + 1), False)
    assert max(huge["decodes"].seq_lens) < 100


def test_layers_are_probed_once_for_each_kind():
    def layer(window, heads=(4, 2), shares=False):
        impl = SimpleNamespace(
            kernels=ReferenceKernels(),
            layer_shape=layer_of(*heads, 32),
            has_cache=True,
            shares_kv=shares,
        )
        return SimpleNamespace(impl=impl)

    layers = {"a": layer(None), "b": layer(None), "c": layer(None, (2, 2)), "d": layer(7)}
    layers["e"] = layer(None, shares=True)

    def group(names, window):
        builder = SimpleNamespace(
            sliding_window=window, causal=True, masks=None, kernel_block_size=16
        )
        return SimpleNamespace(layer_names=names, get_metadata_builder=lambda: builder)

    groups = [[group(["a", "b", "c", "e"], None)], [group(["d"], 7)]]
    forms = attention_forms(groups, layers, torch.float16, False)
    prompts = [form.given for form in forms if form.what == "prompts"]
    assert len(forms) == 12 and [form.what for form in forms[:3]] == [
        "prompts",
        "decodes",
        "chunks",
    ]
    assert [("4/2" in each, "window 7" in each) for each in prompts] == [
        (True, False),
        (False, False),
        (True, False),
        (True, True),
    ]


def test_wrong_latent_attention_is_not_sent_to_atb():
    impl = object.__new__(AscendMLAImpl)
    impl.shape = shape_of(4)
    builder = SimpleNamespace(latent=SimpleNamespace(decode_threshold=1), masks=None)
    sizes = SimpleNamespace(block_size=16)
    group = SimpleNamespace(
        layer_names=["a"], get_metadata_builder=lambda: builder, kv_cache_spec=sizes
    )
    layers = {"a": SimpleNamespace(impl=impl)}
    (form, _) = latent_forms([[group]], layers, torch.bfloat16)
    wrong = replace(form, run=lambda device: Outcome("", "1", "2", Verdict.DIFFERS))
    with pytest.raises(PrepError, match="serve the model on the CPU fallback") as refusal:
        probe_forms("latent attention", [wrong], make_device("cpu"), print)
    assert "(fia: " in str(refusal.value) and "atb" not in str(refusal.value)


def test_a_fused_operator_that_differs_is_switched_off():
    x = torch.linspace(-1, 1, 9)
    lines: list[str] = []

    def is_right(name, call, *expected: torch.Tensor) -> bool:
        return stays_on(name, Probe(call, lambda: expected), torch.clone, lines.append)

    assert is_right("doubled", lambda put: (put(x) * 2,), x.double() * 2)
    assert is_right("pair", lambda put: (x, x), x.double(), x.double())
    assert lines == []
    assert not is_right("tripled", lambda put: (put(x) * 3,), x.double() * 2)
    assert not is_right("one of two", lambda put: (x,), x, x)

    def refuse(put):
        raise RuntimeError("no kernel\nmore")

    assert not is_right("missing", refuse, x)
    assert len(lines) == 3
    assert lines[0].startswith("tripled is switched off: this device computes it wrongly")
    assert "no kernel" in lines[2] and "more" not in lines[2]


def test_nan_infinity_and_shape_are_differences():
    x = torch.zeros(3)
    same = compare(x, x, "")
    assert same.verdict is Verdict.SAME
    assert compare(torch.full((3,), float("nan")), x, "").verdict is Verdict.DIFFERS
    assert compare(torch.full((3,), float("inf")), x, "").verdict is Verdict.DIFFERS
    infinite = torch.full((3,), float("inf"))
    assert compare(infinite, infinite, "").verdict is Verdict.SAME
    filled = torch.full((3,), float("nan"))
    assert compare(filled, filled, "").verdict is Verdict.SAME
    assert compare(x, filled, "").verdict is Verdict.DIFFERS
    assert compare(x[:2], x, "").verdict is Verdict.DIFFERS
