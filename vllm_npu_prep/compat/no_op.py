"""No-op streams and events, for a machine that has none."""

import torch


class NoOpEvent:
    """Replaces a CUDA event on devices whose calls return with their work complete."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def record(self, *args: object) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


class NoOpStream:
    """Replaces a CUDA stream on devices whose calls return with their work complete."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        self.device = torch.device("cpu")

    def wait_stream(self, *args: object) -> None: ...

    def synchronize(self) -> None: ...
