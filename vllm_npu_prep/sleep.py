"""Sleep mode: weights and the KV cache lie in regions whose memory is given back and mapped again.

Upstream allocates both from a pool whose allocator is CUDA's. Here the KV cache is made in a
region, and weights move into regions after they have been loaded. So regions are all that a device
has to offer, and graphs and compiled code, which come later, hold addresses that stay valid.
"""

import dataclasses
import gc
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from vllm.device_allocator.sleep_mode_backend import SleepModeBackend
from vllm.logger import init_logger

from vllm_npu_prep.device import Device
from vllm_npu_prep.device.regions import Region
from vllm_npu_prep.errors import PrepError

logger = init_logger(f"vllm.{__name__}")

WEIGHTS, KV_CACHE = "weights", "kv_cache"
TAGS = (WEIGHTS, KV_CACHE)
"""What can sleep, by the names that clients use."""

REGION_BYTES = 256 << 20
"""The bytes of weights in one region, unless one weight is larger. Moving weights into regions
needs so much memory beside them.
"""

_ALIGNMENT, _READ_BEYOND = 512, 32
"""The alignment of a weight in its region and the unused bytes after it, as torch_npu's allocator
has them: operators may read 32 bytes beyond a tensor's end.
"""


class SleepingMemory(SleepModeBackend):
    """The memory of one rank that can sleep: its regions, by tag."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device
        self._regions: dict[str, list[Region]] = {tag: [] for tag in TAGS}
        self._of_drafter: list[Region] = []  # among the weights, and never lost

    @property
    def drafter_bytes(self) -> int:
        """The bytes of weights that the drafter doesn't share with the model."""
        return sum(region.data.numel() for region in self._of_drafter)

    def zeros(self, nbytes: int) -> torch.Tensor:
        """Return a zeroed part of the KV cache, int8 ``[nbytes]``, in a region of its own."""
        region = self._device.region(nbytes)
        self._regions[KV_CACHE].append(region)
        return region.data.view(torch.int8)

    def adopt(self, model: nn.Module, drafter: nn.Module | None = None) -> None:
        """Move the parameters of loaded models into regions.

        A parameter stays where it is, and never sleeps, if anything outside of the models refers to
        its memory. The weights that the drafter has for itself get regions of their own, which the
        host keeps at every level: new weights are for the model alone, in whatever way they come.

        Parameters
        ----------
        model, drafter
            The model, and what drafts for it if that is a model, too.
        """
        waiting: dict[bool, list[_Shared]] = {False: [], True: []}  # True: the drafter's
        of_model = {each.untyped_storage().data_ptr() for each in model.parameters()}
        stayed = 0
        for shared in _shared_memory([model] if drafter is None else [model, drafter]):
            if not shared.is_known:
                stayed += shared.nbytes
                continue
            is_drafters = shared.storage.data_ptr() not in of_model
            together = waiting[is_drafters]
            if sum(each.room for each in together) + shared.room > REGION_BYTES:
                self._move(together, is_drafters)
            together.append(shared)
        for is_drafters, rest in waiting.items():
            self._move(rest, is_drafters)
        gc.collect()
        logger.info(
            "Sleep mode: %s bytes of weights can be released; %s bytes that other tensors share "
            "stay.",
            f"{sum(region.data.numel() for region in self._regions[WEIGHTS]):,}",
            f"{stayed:,}",
        )

    def _move(self, waiting: "list[_Shared]", is_drafters: bool) -> None:
        """Move memory into one new region; empty the list, so that the old memory can be freed."""
        if not waiting:
            return
        region = self._device.region(sum(each.room for each in waiting))
        self._regions[WEIGHTS].append(region)
        if is_drafters:
            self._of_drafter.append(region)
        begin = 0
        while waiting:
            shared = waiting.pop()
            shared.move(region.data, begin)
            begin += shared.room
            del shared
        self._device.memory_info()  # so that torch_npu's allocator returns what is free now

    def suspend(self, level: int = 1) -> None:
        self.unmap(level)

    def unmap(self, level: int = 1) -> list[Region]:
        """Release all regions; at level 1 the host keeps the weights, at level 2 the drafter's.

        Returns
        -------
        list of Region
            What was awake and is asleep now, for `restore`.

        Raises
        ------
        PrepError
            If the host has no room for them. What was awake is awake then.
        """
        self._device.synchronize()
        done: list[Region] = []
        kept = self._regions[WEIGHTS] if level == 1 else self._of_drafter
        try:
            for region in self._regions[WEIGHTS] + self._regions[KV_CACHE]:
                if region.is_mapped:
                    region.release(keep=region in kept)
                    done.append(region)
        except PrepError:
            self.restore(done)
            raise
        self._state = "SUSPENDED"
        return done

    def restore(self, regions: Iterable[Region]) -> None:
        """Map again what `unmap` released; what slept before that sleeps on."""
        for region in regions:
            region.map()
        if self._is_awake:
            self._state = "RUNNING"

    @property
    def _is_awake(self) -> bool:
        return all(region.is_mapped for tag in TAGS for region in self._regions[tag])

    def resume(self, tags: Sequence[str] | None = None) -> None:
        self.map(tags)

    def map(self, tags: Sequence[str] | None = None) -> list[Region]:
        """Map the regions of some tags again, of all if `tags` is None.

        Returns
        -------
        list of Region
            What was asleep and is awake now, for `release`.

        Raises
        ------
        PrepError
            If a tag is unknown, or there is no memory. What was asleep is asleep then.
        """
        unknown = set(tags or ()) - set(TAGS)
        if unknown:
            raise PrepError(f"wake-up: no tag {sorted(unknown)}; there are {', '.join(TAGS)}")
        done: list[Region] = []
        try:
            for tag in tags or TAGS:
                for region in self._regions[tag]:
                    if not region.is_mapped:
                        region.map()
                        done.append(region)
        except PrepError:
            self.release(done)
            raise
        if self._is_awake:
            self._state = "RUNNING"
        return done

    def release(self, regions: Iterable[Region]) -> None:
        """Let what `map` mapped sleep again; the host keeps weights, and the KV cache is lost."""
        for region in regions:
            region.release(keep=region in self._regions[WEIGHTS])
        self._state = "SUSPENDED"

    def discard(self, tags: tuple[str, ...]) -> None:
        """Release the regions of these tags, and lose what they hold."""
        self._device.synchronize()
        for tag in tags:
            for region in self._regions[tag]:
                region.release(keep=False)
        self._state = "SUSPENDED"

    @classmethod
    def preserves_communicators(cls) -> bool:
        """Return True: communicators are not in a region."""
        return True

    @classmethod
    def preserves_compiled_artifacts(cls) -> bool:
        """Return True: graphs and compiled code find everything at its address."""
        return True

    @classmethod
    def preserves_graphs_with_communicators(cls) -> bool:
        """Return True: communicators stay."""
        return True


class _Place(NamedTuple):
    """A place where a module keeps a tensor: a dict and a name, or a list and an index."""

    holder: Any
    key: Any

    @property
    def tensor(self) -> torch.Tensor:
        return self.holder[self.key]

    def put(self, tensor: torch.Tensor) -> None:
        """Put another tensor here. A parameter remains the object that it is, with other data."""
        if isinstance(self.tensor, nn.Parameter):
            self.tensor.data = tensor
        else:
            self.holder[self.key] = tensor


class _Shared(NamedTuple):
    """One storage in which parameters lie, with all places whose tensors lie in it."""

    storage: torch.UntypedStorage
    places: list[_Place]

    @property
    def nbytes(self) -> int:
        return self.storage.nbytes()

    @property
    def room(self) -> int:
        return -(-(self.nbytes + _READ_BEYOND) // _ALIGNMENT) * _ALIGNMENT

    @property
    def is_known(self) -> bool:
        """Whether nothing refers to the storage but its places, their tensors' bases and this."""
        known = {id(place.tensor) for place in self.places}
        bases = [place.tensor._base for place in self.places]  # a view keeps its base
        known |= {id(base) for base in bases if base is not None}
        return torch._C._storage_Use_Count(self.storage._cdata) == len(known) + 1  # and self

    def move(self, region: torch.Tensor, begin: int) -> None:
        """Copy the storage to a region, from byte `begin` on, and let all places point there."""
        device, target = region.device, region.untyped_storage()
        whole = torch.empty(0, dtype=torch.uint8, device=device).set_(self.storage)
        region[begin : begin + self.nbytes].copy_(whole)
        for place in self.places:
            old = place.tensor
            if old.untyped_storage().data_ptr() == self.storage.data_ptr():
                offset = begin // old.element_size() + old.storage_offset()
                new = torch.empty(0, dtype=old.dtype, device=device)
                place.put(new.set_(target, offset, old.shape, old.stride()))


def _shared_memory(models: Iterable[nn.Module]) -> Iterator[_Shared]:
    """Yield each storage in which parameters of the models lie; empty ones are left out."""
    places: dict[int, list[_Place]] = {}
    with_parameters: dict[int, None] = {}
    for model in models:
        for module in model.modules():
            for place in _places_of(module):
                address = place.tensor.untyped_storage().data_ptr()
                places.setdefault(address, []).append(place)
                if isinstance(place.tensor, nn.Parameter):
                    with_parameters[address] = None
    for address in with_parameters:
        found = places.pop(address)
        storage = found[0].tensor.untyped_storage()
        if storage.nbytes():
            yield _Shared(storage, found)


def _places_of(module: nn.Module) -> Iterator[_Place]:
    """Yield places of parameters and buffers, and of attributes' tensors, alone or in a list.

    Attributes that are dataclasses are looked into, too.
    """
    attributes = vars(module)
    records = [vars(each) for each in attributes.values() if dataclasses.is_dataclass(each)]
    holders: tuple[dict[str, Any], ...] = module._parameters, module._buffers, attributes, *records
    for holder in holders:
        for name, value in holder.items():
            if isinstance(value, torch.Tensor):
                yield _Place(holder, name)
            elif isinstance(value, list):
                for index, each in enumerate(value):
                    if isinstance(each, torch.Tensor):
                        yield _Place(value, index)
