"""What indexers choose in steps: checked (``"check": "full"``) and recorded (``"choices": true``).

Graphs of a device choose without this: what a replay chose is neither checked nor recorded.
"""

from typing import Any

import numpy as np
import torch

from vllm_npu_prep.observe.recorder import StepRecorder
from vllm_npu_prep.observe.violation import given_allowed
from vllm_npu_prep.prep.choices import wrong_choice


class ChoiceWatch:
    """Looks at what each layer's indexer chose in the step in flight, once it has chosen.

    Parameters
    ----------
    runner
        Its `in_flight` is the step; most draft passes have other metadata, and dummy runs have no
        tokens.
    layers
        The names of the indexers' caches, without those of drafters.
    recorder
        Gets the choices of a step when its last layer has chosen; None if they aren't recorded.
    """

    def __init__(
        self, runner: Any, layers: list[str], *, check: bool, recorder: StepRecorder | None
    ) -> None:
        self.runner, self.layers = runner, layers
        self.check, self.recorder = check, recorder
        self._seen: dict[str, np.ndarray] = {}

    def see(self, layer: str, chosen: torch.Tensor, metadata: Any) -> None:
        """Look at ``[num_tokens, index_topk]`` positions, int32.

        Raises
        ------
        StepCheckError
            If a token has chosen what it must not see, or another number of positions.
        """
        in_flight = self.runner.in_flight
        if in_flight is None or in_flight.metadata.get(layer) is not metadata:
            return
        step = in_flight.step
        is_recorded = (
            layer in self.layers
            and self.recorder is not None
            and self.recorder.takes_choices(self.recorder.steps - 1)
        )
        positions = step.model_positions
        if not len(positions) or not (self.check or is_recorded):
            return
        of_tokens = chosen[: len(positions)].cpu().numpy()
        found = wrong_choice(of_tokens, positions) if self.check else None
        if found is not None:
            starts = step.pcp_query_start_loc if step.shape.pcp else step.query_start_loc
            row = int(np.searchsorted(starts, found.token, side="right")) - 1
            row = int(step.pcp_table_rows[row]) if step.shape.pcp else row
            raise given_allowed(
                found.rule,
                f"{found.rule} by the indexer of {layer}",
                found.given,
                found.allowed,
                request=self.runner.input_batch.req_ids[row],
                token=found.token,
            )
        if is_recorded:
            assert self.recorder is not None
            self._seen[layer] = of_tokens.copy()
            if layer == self.layers[-1]:
                self.recorder.note_choices(self.recorder.steps - 1, self._seen)
                self._seen = {}


def watch_choices(runner: Any, *, check: bool, record: bool) -> None:
    """Let the indexers of a runner's model show what they choose, if anybody looks."""
    recorder = runner.recorder if record else None
    layers = runner.vllm_config.compilation_config.static_forward_context
    caches = {name: each for name, each in layers.items() if hasattr(each, "watch_choices")}
    model = {id(each) for each in runner.get_model().modules()}
    of_model = [name for name, each in caches.items() if id(each) in model]
    watch = ChoiceWatch(runner, of_model, check=check, recorder=recorder)
    for each in caches.values():
        each.watch_choices = watch.see if check or recorder else None
