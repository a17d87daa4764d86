"""A vLLM platform plugin for Ascend NPUs: it prepares every step's inputs, and can show how.

This module holds only the entry points that vLLM calls; `docs/` tells how a step is prepared.
"""

__version__ = "0.2.0"


def register() -> str | None:
    """Return the platform class, or None to stay inactive (entry point ``vllm.platform_plugins``).

    vLLM logs errors of platform plugins at debug level only, so they are reported from here.
    """
    from vllm_npu_prep import chosen_platform

    if chosen_platform.leaves_to_another():
        return None
    from vllm_npu_prep.compat import activation

    return activation.activate_platform()


def register_general() -> None:
    """Do what every process of an engine needs (entry point ``vllm.general_plugins``).

    vLLM has chosen its platform by now; if that is another one, nothing is patched.
    """
    from vllm_npu_prep import chosen_platform

    if chosen_platform.is_ours():
        from vllm_npu_prep import quantization
        from vllm_npu_prep.compat import activation

        activation.prepare_process()
        quantization.register_formats()
