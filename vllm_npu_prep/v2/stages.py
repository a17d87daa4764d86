"""Pipeline stages of the V2 runner: the scheduler tells all of them what was sampled."""

from typing import Any


class ToldByScheduler:
    """Stands in for upstream's ``PPHandler``, which has the last stage send samples to the others.

    Stages are scheduled synchronously here: a request's next step is scheduled when its sample is
    known, and the scheduler's output has it for every stage. Nothing is sent between them but
    hidden states.

    Parameters
    ----------
    **unused
        Upstream's sizes and device.
    """

    def __init__(self, **unused: Any) -> None:
        del unused

    def on_req_idx_freed(self, req_idx: int) -> None:
        """Does nothing: no sample is on its way."""

    def get_prev_sampled_outputs(self, *args: Any) -> None:
        """None: no sample was received."""

    def relay_aux_hidden_states(self, intermediate_tensors: Any, output: Any) -> Any:
        """The output: drafters, who read the states of other layers, are refused over stages.

        Parameters
        ----------
        intermediate_tensors
            That the stage received.
        output
            That it sends.
        """
        del intermediate_tensors
        return output
