"""Extensions: packages with custom operators, whose libraries are linked against CANN's.

An operator exists only after its extension has been loaded, so the references of its operators
are registered then (`hook/sitecustomize.py` calls `install`).
"""

PACKAGES = ("vllm_ascend",)
"""Packages whose libraries are given what they are linked against, when they are installed."""


def install() -> None:
    """Register the references of operators that an extension has brought."""
    from ascend_emulator import api
    from ascend_emulator.operators import custom

    custom.install(api.register_reference)
