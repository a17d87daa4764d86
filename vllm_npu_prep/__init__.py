"""vLLM platform plugin for Ascend NPUs: prepares every step's inputs, and can show how.

Entry points only; see `docs/` for how a step is prepared.
"""

__version__ = "0.1.0"


def register() -> str | None:
    """Entry point ``vllm.platform_plugins``: the platform class, or None to stay inactive.

    vLLM logs errors of platform plugins at debug level only, so they are reported from here.
    """
    from vllm_npu_prep.compat import activation

    return activation.activate_platform()


def register_general() -> None:
    """Entry point ``vllm.general_plugins``: what must run in every process of an engine."""
    from vllm_npu_prep.compat import activation

    if activation.prepare_process():
        from vllm_npu_prep import quantization

        quantization.register_formats()
