"""Watches the steps of any runner of vLLM: records and checks what another runner prepared.

It only reads. ``NPU_PREP_WATCH`` switches it on; without the variable nothing is imported or
wrapped.
"""

import os

WATCH_ENV_VAR = "NPU_PREP_WATCH"


def register() -> None:
    """Watch the runners of this process if asked (entry point ``vllm.general_plugins``)."""
    text = os.environ.get(WATCH_ENV_VAR, "")
    if text:
        from vllm_npu_prep.watch.attach import watch_workers

        watch_workers(text)
