"""Refusals of graphs that can't be captured."""

import os

from vllm_npu_prep.config import SECTION, decisions_of, graphs_need_masks
from vllm_npu_prep.device import NPU_KIND
from vllm_npu_prep.driver import EXPANDING_PINS
from vllm_npu_prep.prep.mask import MaskForm
from vllm_npu_prep.startup.asked import RequestedEngine
from vllm_npu_prep.startup.refusal import Refusal, Subject


def _are_breakable(asked: RequestedEngine) -> bool:
    from vllm.compilation.breakable_cudagraph import is_breakable_cudagraph_enabled

    return is_breakable_cudagraph_enabled()


def _hold_attention(asked: RequestedEngine) -> bool:
    """Tell whether piecewise graphs of the model would have attention inside."""
    compilation = asked.config.compilation_config
    splits = compilation.splitting_ops is None or compilation.splitting_ops_contain_attention()
    return compilation.cudagraph_mode.has_piecewise_cudagraphs() and not splits


def _reads_dense_masks(asked: RequestedEngine) -> bool:
    """Tell whether mixed batches are to be captured with masks whose shape changes.

    With a KV connector no full graph is captured.
    """
    if asked.config.compilation_config.cudagraph_mode.name != "FULL" or asked.transfer is not None:
        return False
    is_dense = decisions_of(asked.config).mask_form == MaskForm.DENSE
    return is_dense and graphs_need_masks(asked.config)


def _captures_with_expanding_pins(asked: RequestedEngine) -> bool:
    captures = bool(asked.config.compilation_config.cudagraph_mode)
    return asked.kind == NPU_KIND and captures and EXPANDING_PINS in _allocator_settings()


def _allocator_settings() -> str:
    return os.environ.get("PYTORCH_NPU_ALLOC_CONF", "").replace(" ", "")


GRAPHS = (
    Refusal(
        "breakable-graphs",
        _are_breakable,
        "VLLM_USE_BREAKABLE_CUDAGRAPH",
        "graphs are split at attention by torch.compile here",
        "set it to 0",
    ),
    Refusal(
        "pieces-with-attention",
        _hold_attention,
        "splitting_ops {ops}",
        "piecewise graphs must not contain attention",
        "leave the key out, or use cudagraph_mode {without_piecewise}",
        lambda c: {
            "ops": c.config.compilation_config.splitting_ops,
            "without_piecewise": c.config.compilation_config.cudagraph_mode.without_piecewise(),
        },
    ),
    Refusal(
        "dense-masks-in-graphs",
        _reads_dense_masks,
        "cudagraph_mode FULL",
        "dense masks change their shape from step to step, and graphs need fixed shapes",
        f'use {{{{"{SECTION}": {{{{"mask": "compressed"}}}}}}}} where the kernel family has it, '
        "or cudagraph_mode FULL_AND_PIECEWISE",
    ),
    Refusal(
        "expanding-pins",
        _captures_with_expanding_pins,
        "PYTORCH_NPU_ALLOC_CONF={settings}",
        "no graph can be captured beside pinned memory in segments that expand",
        "take pin_memory_expandable_segments out, or give --enforce-eager",
        lambda c: {"settings": _allocator_settings()},
    ),
)

SUBJECTS = (Subject("graphs", GRAPHS, verdict=""),)
