"""Pipeline stages of the V2 runner: the scheduler tells each stage what was sampled."""

from typing import Any


class SchedulerPPHandler:
    """Stands in for upstream's ``PPHandler``, by which the last stage sends samples to the others.

    Pipeline stages are scheduled synchronously here: the next step of a request is scheduled when
    its sample is known, and the scheduler's output has the sample for every stage. Stages send each
    other nothing but hidden states.
    """

    def __init__(self, **unused: Any) -> None:
        del unused

    def on_req_idx_freed(self, req_idx: int) -> None:
        """Do nothing: no sample is on its way."""

    def get_prev_sampled_outputs(self, *args: Any) -> None:
        """Return None: no sample was received."""

    def relay_aux_hidden_states(self, intermediate_tensors: Any, output: Any) -> Any:
        """Return `output` as it is: drafters that read other layers are refused with pipeline
        stages."""
        del intermediate_tensors
        return output
