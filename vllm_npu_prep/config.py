"""The plugin's own options, and what start-up decides from them.

`PrepConfig` parses and validates ``--additional-config``. `decide` turns it into `Decisions`, the
kernel family and the form of masks, together with the device and the model.
"""

import difflib
import errno
import json
import os
import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from vllm_npu_prep.attention.families import KERNEL_FAMILIES, KernelFamily
from vllm_npu_prep.errors import PrepError
from vllm_npu_prep.prep.mask import MaskForm, dense_mask_bytes
from vllm_npu_prep.validation import reason_of, shown

if TYPE_CHECKING:
    from vllm.config import VllmConfig


SECTION = "npu_prep"

STEPS = re.compile(r"(?P<first>\d{1,15}):(?P<end>\d{1,15})|last (?P<last>\d{1,6})", re.ASCII)


class RecordConfig(BaseModel):
    """The options of the recorder (`vllm_npu_prep.observe.recorder`).

    Attributes
    ----------
    dir
        Folder for the records.
    steps
        ``"100:200"``: these steps are written as they run. ``"last 64"``: the last 64 steps are
        kept in memory and written when the engine fails or on request.
    max_bytes
        Most bytes of the files, or of the memory.
    request_ids
        Whether records name requests by a salted hash, or by the engine's ids.
    choices
        Whether the positions that indexers choose are written beside each record.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    dir: str = Field(min_length=1)
    steps: str = "last 64"
    max_bytes: int = Field(default=256 << 20, ge=1 << 16, le=1 << 40)
    request_ids: Literal["hashed", "plain"] = "hashed"
    choices: bool = False

    @field_validator("steps")
    @classmethod
    def _check_steps(cls, steps: str) -> str:
        match = STEPS.fullmatch(steps)
        if match is None or int(match["first"] or 0) >= int(match["last"] or match["end"]):
            raise ValueError('give a span of steps as "100:200", or "last 64"')
        return steps

    def make_folder(self) -> Path:
        """Make the folder ``dir`` if it doesn't exist; refuse one that can't be written to."""
        folder = Path(self.dir).expanduser()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not os.access(folder, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        except OSError as error:
            raise PrepError(
                f'"{SECTION}.record.dir" = "{self.dir}": {error.strerror}; give a folder that '
                "this process may write to"
            ) from None
        return folder

    @property
    def span(self) -> range | None:
        """The steps to write as they run; None if the last steps are kept instead."""
        first, _, end = self.steps.partition(":")
        return range(int(first), int(end)) if end else None

    @property
    def last(self) -> int:
        """The number of last steps that are kept; 0 if steps are written as they run."""
        return 0 if self.span else int(self.steps.removeprefix("last "))


FUSED_OPERATORS: Mapping[str, str] = {
    "rms_norm": "npu_rms_norm",
    "add_rms_norm": "npu_add_rms_norm",
    "add_rms_norm_cast": "npu_add_rms_norm_cast",
    "gemma_rms_norm": "npu_gemma_rms_norm",
    "rotary": "npu_mrope",
    "mrope": "npu_mrope",
    "vision_attention": "npu_fusion_attention",
    "vision_rotary": "npu_rotary_mul",
    "qkv": "npu_grouped_matmul",
    "swiglu": "npu_swiglu",
    "geglu": "npu_geglu",
    "gelu": "npu_gelu",
    "latent": "npu_transpose_batchmatmul",
    "experts": "npu_moe_init_routing_v2",
    "finalize_routing": "npu_moe_finalize_routing",
    "gating": "npu_moe_gating_top_k",
    "gating_softmax": "npu_moe_gating_top_k_softmax_v2",
    "top_k_top_p": "npu_top_k_top_p",
    "int8_norm": "npu_add_rms_norm_dynamic_quant",
    "int8_swiglu": "npu_dequant_swiglu_quant",
}
"""The operators of torch_npu that serve each switch; what they replace is in
``docs/reference/options.md``. Experts need several operators; the newest one is named."""

OF_QUANTIZED_MODELS = frozenset(("int8_norm", "int8_swiglu"))
"""Fused operators that models without quantised layers don't use."""


class FusedConfig(BaseModel):
    """The fused operators of torch_npu that stand in for vLLM's layers on NPUs, each on or off.

    ``"fused": false`` switches all of them off.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    off: list[str] = []

    @field_validator("off")
    @classmethod
    def _check_names(cls, off: list[str]) -> list[str]:
        for name in off:
            if name not in FUSED_OPERATORS:
                raise ValueError(
                    f'no fused operator is called "{name}"{_nearest(name, FUSED_OPERATORS)}; '
                    f"allowed: {', '.join(FUSED_OPERATORS)}"
                )
        return off

    @property
    def names(self) -> frozenset[str]:
        return frozenset(FUSED_OPERATORS).difference(self.off)


class PrepConfig(BaseModel):
    """The section ``npu_prep`` of ``--additional-config``, with every key validated.

    Attributes
    ----------
    attention
        Kernel family; ``auto`` takes the device's default, or the first that takes `mask`.
    mask
        Form of the attention mask; ``auto`` takes the family's default, or the compressed form when
        dense masks could outgrow the budget.
    mask_budget_bytes
        Most memory that dense masks may take, in bytes.
    triton_kernels
        Whether torch replaces vLLM's Triton kernels (drafters, the rejection sampler and others),
        or they are kept, which needs Triton on the device.
    record
        Which steps are recorded, None for none.
    check
        The rules that each step is checked against before its launch
        (`vllm_npu_prep.observe.check_level`).
    probe
        Whether start-up compares the device's attention with formulas
        (`vllm_npu_prep.verify.probe`).
    verified
        The table of `verify-device` that says which calls torch's own form makes
        (`vllm_npu_prep.verify.calls.table`), None for none.
    kernel_rules
        The rules that calls of fused attention have to keep: those of the installed CANN's code, or
        also what only the documentation demands (`vllm_npu_prep.attention.fused_releases`).
    cpu_binding
        Whether each rank runs on the CPUs of its NPU's NUMA node.
    fused
        Which fused operators are off.
    mc2
        Whether the experts of several ranks exchange the tokens of small steps by MC2
        (`vllm_npu_prep.device.mc2`): where vllm-ascend would, wherever its operators take them, or
        never.
    scheduler
        Whether vLLM's scheduler handles plain requests in bulk (`vllm_npu_prep.scheduling`), or is
        left as it is.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    attention: Literal["auto", "compiled", "reference", "fia", "atb"] = "auto"
    mask: Literal["auto", "dense", "compressed"] = "auto"
    mask_budget_bytes: int = Field(default=256 << 20, ge=1 << 14, le=1 << 40)
    triton_kernels: Literal["replace", "keep"] = "replace"
    record: RecordConfig | None = None
    check: Literal["off", "cheap", "full"] = "cheap"
    probe: bool = True
    verified: str | None = Field(default=None, min_length=1)
    kernel_rules: Literal["release", "documented"] = "release"
    cpu_binding: bool = True
    fused: FusedConfig = FusedConfig()
    mc2: Literal["auto", "on", "off"] = "auto"
    scheduler: Literal["batched", "upstream"] = "batched"

    @field_validator("fused", mode="before")
    @classmethod
    def _as_list(cls, fused: object) -> object:
        if isinstance(fused, bool):
            return FusedConfig(off=[] if fused else list(FUSED_OPERATORS))
        if isinstance(fused, Mapping) and fused and fused.keys() <= set(FUSED_OPERATORS):
            off = [name for name, is_on in fused.items() if is_on is False]
            if len(off) + sum(is_on is True for is_on in fused.values()) == len(fused):
                warnings.warn(
                    f'"{SECTION}.fused" with a switch for each operator is read for this release '
                    f'only: write {{"fused": {{"off": {json.dumps(off)}}}}}',
                    FutureWarning,
                    stacklevel=2,
                )
                return FusedConfig(off=off)
        return fused


PARTS: Mapping[str, type[BaseModel]] = {"record": RecordConfig, "fused": FusedConfig}


def parse_config(additional_config: object) -> PrepConfig:
    """Parse the plugin's section of ``--additional-config``; other sections are left alone.

    Raises
    ------
    PrepError
        For an unknown key or a value of the wrong type: the message names it and the allowed keys,
        and suggests the closest one.
    """
    if not isinstance(additional_config, Mapping):
        return PrepConfig()
    _check_section_name(additional_config)
    section = additional_config.get(SECTION, {})
    allowed = list(PrepConfig.model_fields)
    if not isinstance(section, Mapping):
        raise PrepError(
            f'--additional-config: "{SECTION}" must be an object with keys among '
            f"{', '.join(allowed)}, not {shown(section)}"
        )
    try:
        return PrepConfig.model_validate(dict(section))
    except ValidationError as error:
        detail = error.errors()[0]
        key = ".".join(str(part) for part in detail["loc"])
        part = str(detail["loc"][0])
        if part in PARTS:
            allowed = list(PARTS[part].model_fields)
        if detail["type"] == "extra_forbidden":
            section_name = f"{SECTION}.{part}" if part in PARTS else SECTION
            key = str(detail["loc"][-1])
            raise PrepError(
                f'--additional-config: "{section_name}" has no key "{key}"'
                f"{_nearest(key, allowed)}; allowed: {', '.join(allowed)}"
            ) from None
        if detail["type"] == "missing":
            raise PrepError(f'--additional-config: "{SECTION}.{key}" is missing') from None
        keys = f" with keys among {', '.join(allowed)}" * (detail["type"] == "model_type")
        raise PrepError(
            f'--additional-config: "{SECTION}.{key}" = {shown(detail["input"])}: '
            f"{reason_of(detail)}{keys}"
        ) from None


def parse_flag(text: str) -> dict[str, Any]:
    """Parse the text of ``--additional-config``, so that mistakes are reported at once.

    Raises
    ------
    PrepError
        If it is not a JSON object, or `parse_config` refuses it.
    """
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PrepError(
            f"--additional-config {shown(text)}: not JSON ({error}); write for example "
            f'\'{{"{SECTION}": {{"check": "full"}}}}\''
        ) from None
    if not isinstance(given, dict):
        raise PrepError(
            f"--additional-config {shown(given)}: must be an object; write for example "
            f'\'{{"{SECTION}": {{"check": "full"}}}}\''
        )
    parse_config(given)
    return given


def _check_section_name(additional_config: Mapping[str, Any]) -> None:
    """Refuse a misspelt section, which would otherwise be ignored silently."""
    for name in additional_config:
        if name != SECTION and difflib.get_close_matches(str(name), [SECTION], cutoff=0.8):
            raise PrepError(f'--additional-config: unknown section "{name}": write "{SECTION}"')


def _nearest(key: str, allowed: Iterable[str]) -> str:
    match = difflib.get_close_matches(key, list(allowed), n=1, cutoff=0.5)
    return f' (did you mean "{match[0]}"?)' if match else ""


@dataclass(frozen=True)
class Decisions:
    """What start-up decided from options, device and model; all other code reads this."""

    attention: str
    mask_form: MaskForm
    mask_budget_bytes: int
    # Most memory that dense masks could take with this model and token budget, in bytes
    dense_bytes: int
    note: str = ""  # why the form of masks is not the family's default; empty if it is


def decide(
    config: PrepConfig,
    device_type: str,
    families: Mapping[str, KernelFamily],
    max_num_batched_tokens: int,
    max_model_len: int,
    num_windows: int = 1,
    masks_in_graphs: bool = False,
) -> Decisions:
    """Choose the kernel family and the form of masks.

    Parameters
    ----------
    families
        Every kernel family by name; the default is the first of the device type, on the CPU the
        first that takes the form of masks that was asked for.
    max_num_batched_tokens, max_model_len
        Limits of a step, in tokens.
    num_windows
        Number of different attention windows, full attention included; each has its own masks.
    masks_in_graphs
        Whether graphs read masks; these must then have a constant shape, which dense masks don't.

    Raises
    ------
    PrepError
        If the device doesn't have the family, the family can't use the form, or dense masks were
        asked for and exceed the budget.
    """
    usable = [name for name, family in families.items() if family.device_type == device_type]
    name: str = config.attention
    if name == "auto":
        taking = [n for n in usable if config.mask in ("auto", *families[n].mask_forms)]
        name = taking[0] if taking and device_type == "cpu" else usable[0]
    if name not in usable:
        raise PrepError(
            f'"{SECTION}.attention" = "{name}" does not run on device type "{device_type}": '
            f"use one of auto, {', '.join(usable)}"
        )
    family = families[name]
    dense_bytes = num_windows * dense_mask_bytes(
        max_num_batched_tokens, max_model_len, family.mask_itemsize
    )
    fits = dense_bytes <= config.mask_budget_bytes
    size = (
        f"dense masks could take {dense_bytes:,} bytes ({max_num_batched_tokens} tokens x "
        f"max_model_len {max_model_len}), more than mask_budget_bytes={config.mask_budget_bytes:,}"
    )
    note = ""
    if config.mask != "auto":
        form = MaskForm(config.mask)
    elif family.mask_forms[0] == MaskForm.DENSE and not fits:
        form = MaskForm.COMPRESSED
        note = f"{size}: the compressed form is used"
    elif masks_in_graphs and MaskForm.COMPRESSED in family.mask_forms:
        form = MaskForm.COMPRESSED
        note = "masks: compressed, because full graphs read them" * (form != family.mask_forms[0])
    else:
        form = family.mask_forms[0]
    if form not in family.mask_forms:
        forms = ", ".join(each.value for each in family.mask_forms)
        raise PrepError(
            f'"{SECTION}.mask" = "{form.value}": kernel family "{name}" supports only {forms} masks'
        )
    if form == MaskForm.DENSE and not fits:
        raise PrepError(
            f"{size}: raise mask_budget_bytes, lower --max-model-len or "
            f'--max-num-batched-tokens, or use {{"{SECTION}": {{"mask": "compressed"}}}}'
        )
    return Decisions(name, form, config.mask_budget_bytes, dense_bytes, note)


def decisions_of(vllm_config: "VllmConfig | None") -> Decisions:
    """Return the decisions for an engine; None stands for the engine that is being built.

    Layers may be made without a model, as vLLM's own tests do; their masks have no size.
    """
    if vllm_config is None:
        from vllm.config import get_current_vllm_config

        vllm_config = get_current_vllm_config()
    model = vllm_config.model_config
    return decide(
        parse_config(vllm_config.additional_config),
        vllm_config.device_config.device_type,
        KERNEL_FAMILIES,
        vllm_config.scheduler_config.max_num_batched_tokens,
        model.max_model_len if model else 0,
        max(1, len(set(_layer_types(vllm_config)))),
        graphs_need_masks(vllm_config),
    )


def fused_operators(vllm_config: "VllmConfig") -> frozenset[str]:
    """Return the names of the fused operators that an engine uses; none on the CPU fallback."""
    if vllm_config.device_config.device_type != "npu":
        return frozenset()
    names = parse_config(vllm_config.additional_config).fused.names
    return names if vllm_config.model_config.quantization else names - OF_QUANTIZED_MODELS


def graphs_need_masks(vllm_config: "VllmConfig") -> bool:
    """Tell whether full graphs with a mask will be captured.

    Decodes of one token have no mask, except with a window.
    """
    mode = vllm_config.compilation_config.cudagraph_mode
    if mode is None or not mode.has_full_cudagraphs() or not vllm_config.model_config:
        return False
    has_window = vllm_config.model_config.get_sliding_window() is not None
    return (
        not mode.separate_routine()
        or vllm_config.uniform_decode_query_len > 1
        or has_window
        or "sliding_attention" in _layer_types(vllm_config)
    )


def _layer_types(vllm_config: "VllmConfig") -> list[str]:
    model = vllm_config.model_config
    return (model and getattr(model.hf_text_config, "layer_types", None)) or []
