"""Streams and events for a machine that has none."""

import torch


class InertEvent:
    """Stands for a CUDA event where all work is complete when it returns."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def record(self, *args: object) -> None:
        """Nothing to mark."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """Always complete."""
        return True


class InertStream:
    """Stands for a CUDA stream where all work is complete when it returns."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        self.device = torch.device("cpu")

    def wait_stream(self, *args: object) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""
