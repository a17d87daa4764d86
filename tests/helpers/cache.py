"""Watching the KV cache: which slots a forward pass writes."""

from typing import Any

import torch


class CacheWatch:
    """Checks after every forward pass that no slots but the step's own were written (one group).

    Attributes
    ----------
    padding_seen
        Numbers of padding tokens of the steps that replayed a full graph.
    """

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.padding_seen: set[int] = set()
        self._forward = runner._model_forward
        runner._model_forward = self._watched

    def _planes(self) -> list[torch.Tensor]:
        """Slots of every plane on the host, ``[num_blocks * block_size, -1]``."""
        return [plane.cpu().flatten(0, 1).flatten(1) for plane in self.runner.kv_caches]

    def _watched(self, *args: Any, **kwargs: Any) -> Any:
        before = self._planes()
        result = self._forward(*args, **kwargs)
        after = self._planes()
        step = self.runner.last_step
        own = set(step.slot_mapping().tolist())
        for plane, (old, new) in enumerate(zip(before, after)):
            written = set((old != new).any(1).nonzero().flatten().tolist())
            assert written <= own, (
                f"plane {plane}: slots {sorted(written - own)} were written, the step owns "
                f"{sorted(own)} (padding {step.padding})"
            )
        if step.padding.mode == "FULL":
            self.padding_seen.add(step.num_input_tokens - step.total_num_scheduled_tokens)
        return result
