"""The choice of the scheduler that an engine gets: one of ours, vLLM's, or the user's own."""

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from vllm.config import VllmConfig

MODULE = "vllm_npu_prep.scheduling.scheduler"
SCHEDULERS = {False: f"{MODULE}.BatchedScheduler", True: f"{MODULE}.BatchedAsyncScheduler"}
"""The names of our classes; the key says whether scheduling is asynchronous."""


def choose_scheduler(vllm_config: "VllmConfig", wanted: Literal["batched", "upstream"]) -> str:
    """Set vLLM's ``scheduler_cls``, unless it is set already, and describe the choice.

    Parameters
    ----------
    vllm_config
        The engine's config after asynchronous scheduling was settled.
    wanted
        The plugin's option ``scheduler``.

    Returns
    -------
    str
        The description for the log of start-up.
    """
    config = vllm_config.scheduler_config
    how = "asynchronous" if config.async_scheduling else "synchronous"
    ours = SCHEDULERS.values()
    if config.scheduler_cls is not None and config.scheduler_cls not in ours:
        given = config.scheduler_cls
        name = given if isinstance(given, str) else given.__qualname__
        return f"{how}, by {name}: --scheduler-cls takes precedence over the option scheduler"
    if vllm_config.diffusion_config is not None:
        return f"{how}, by vLLM's scheduler of diffusion models"
    # vLLM checks its config again, in the engine's process
    config.scheduler_cls = (
        SCHEDULERS[bool(config.async_scheduling)] if wanted == "batched" else None
    )
    return f"{how}, {'batched' if wanted == 'batched' else 'by vLLM alone'}"
