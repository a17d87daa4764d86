"""A patch of how vLLM's runner moves recurrent states (of linear attention) between blocks."""

from typing import Any


def leave_states_in_their_blocks() -> None:
    """Let nothing copy recurrent states before a step, once for each process.

    With prefix caching, a request that enters a block begins with the state of the block before.
    Upstream's runner copies it there in every such step, by a Triton kernel. Our layers read the
    one block and write the other (`vllm_npu_prep.prep.states`), so there is nothing to copy.
    """
    from vllm.v1.worker import mamba_utils

    mamba_utils.preprocess_mamba = _nothing


def _nothing(*args: Any, **kwargs: Any) -> None: ...
