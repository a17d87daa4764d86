"""The order of a batch: requests stay in their places, so that their rows on the device do, too."""

from collections.abc import Iterable, Mapping

import numpy as np


class BatchOrder:
    """Finds a place for each request of a step.

    The device's block tables are in the order of the batch, and a request in another place has its
    whole row sent again. So requests that stay keep their places, new ones fill the places of
    those that left, and what is still empty is filled from the end.
    """

    def __init__(self) -> None:
        self._scheduled: list[str] = []  # in the scheduler's order
        self._req_ids: list[str] = []  # in the batch's

    def of_step(
        self, scheduled: Iterable[str], slot_of: Mapping[str, int]
    ) -> tuple[list[str], np.ndarray]:
        """The requests of a step in the order of the batch, and their slots.

        Parameters
        ----------
        scheduled
            Requests of the step, in any order.
        slot_of
            Slot of each request. A name may come back with another slot.

        Returns
        -------
        req_ids, slots
            List, and int64 ``[num_reqs]``; not changed later.
        """
        names = list(scheduled)
        if names != self._scheduled:
            self._scheduled = names
            self._req_ids = self._placed(names)
        slots = np.fromiter(map(slot_of.__getitem__, self._req_ids), np.intp, len(names))
        return self._req_ids, slots

    def _placed(self, names: list[str]) -> list[str]:
        places = {req_id: place for place, req_id in enumerate(self._req_ids)}
        placed: list[str | None] = [None] * len(names)
        others = []
        for req_id in names:
            place = places.get(req_id, len(names))
            if place < len(names):
                placed[place] = req_id
            else:
                others.append(req_id)
        without = iter(others)
        return [next(without) if req_id is None else req_id for req_id in placed]
