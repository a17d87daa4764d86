"""How vLLM gets this plugin's scheduler."""

import functools
from typing import Any

PREFIX = "vllm_npu_prep."
"""Of our schedulers' names."""


def get_our_schedulers_quietly() -> None:
    """Keep vLLM from warning of schedulers that it doesn't know where the scheduler is ours.

    The warning says that compatibility may not be maintained, and that asynchronous scheduling may
    be off. Neither holds for our schedulers: they belong to one release of vLLM, and there is one
    for each kind of scheduling. It stays for schedulers that users give.
    """
    from vllm.config import SchedulerConfig
    from vllm.utils.import_utils import resolve_obj_by_qualname

    upstream = SchedulerConfig.get_scheduler_cls
    if hasattr(upstream, "__wrapped__"):
        return

    @functools.wraps(upstream)
    def get_scheduler_cls(self: SchedulerConfig) -> Any:
        name = self.scheduler_cls
        if isinstance(name, str) and name.startswith(PREFIX):
            return resolve_obj_by_qualname(name)
        return upstream(self)

    SchedulerConfig.get_scheduler_cls = get_scheduler_cls  # type: ignore[method-assign]
