"""LoRA adapters by what was loaded: a request finds cached blocks of its adapter's weights alone.

vLLM knows an adapter by its name, its path and its number. The weights change under all three: a
folder is overwritten, an adapter is removed and its number given to another, a rank that has no
room for one more drops an adapter and reads its folder again in the middle of a step. Here a load
is a digest of the weights that ranks hold, and a request computes with one load from beginning to
end. The engine asks its ranks for the load before a request begins, names blocks by it, and lets
requests begin anew whose adapter was exchanged meanwhile.
"""

import hashlib
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from vllm_npu_prep.compat.kv_connector import forget_hashes
from vllm_npu_prep.compat.patches import instead_of
from vllm_npu_prep.compat.scheduler import begin_anew

if TYPE_CHECKING:
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.request import LoRARequest
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request

logger = logging.getLogger(f"vllm.{__name__}")


class AdapterLoads:
    """What the ranks of an engine hold of adapters.

    Ranks read an adapter when they are asked to, here or by ``add_lora``, and never in a step:
    before they read one more, those in use are touched, so that another one has to go.

    Parameters
    ----------
    load
        Lets each rank hold these adapters, in this order, and returns what it holds then: one dict
        for each rank, of loads by the adapter's number.
    max_loras
        How many adapters a step may have.
    """

    def __init__(
        self,
        scheduler: "Scheduler",
        load: "Callable[[list[LoRARequest]], list[dict[int, str]]]",
        max_loras: int,
    ) -> None:
        self._scheduler, self._load, self._max_loras = scheduler, load, max_loras
        self._held: dict[int, str] = {}  # loads by number, as far as it is certain
        self._in_use: dict[int, LoRARequest] | None = None  # in this step; None: not asked yet

    def hashing(
        self, hash_blocks: "Callable[[Request], list[Any]] | None"
    ) -> "Callable[[Request], list[Any]] | None":
        """Wrap the engine's function that hashes blocks: only known loads are hashed.

        A request whose load isn't known yet gets no hashes.
        """
        if hash_blocks is None:
            return None

        def hash_loaded(request: "Request") -> list[Any]:
            adapter = request.lora_request
            if adapter is not None and load_of(request) is None:  # it has just arrived
                _set_load(request, self._held.get(adapter.lora_int_id))
                if load_of(request) is None:
                    return []
            return hash_blocks(request)

        return hash_loaded

    def watch(self) -> None:
        """Let the scheduler, vLLM's or ours, ask `is_ready` before it schedules a request."""
        scheduler: Any = self._scheduler
        schedule, may_go_on = scheduler.schedule, scheduler._handle_blocked_waiting_request

        def begin_step(*args: Any, **kwargs: Any) -> Any:
            self._in_use = None  # others may run than in the step before
            return schedule(*args, **kwargs)

        def handle_blocked_waiting_request(request: "Request") -> bool:
            ready: bool = may_go_on(request)
            return ready and (request.lora_request is None or self.is_ready(request))

        scheduler.schedule = begin_step
        scheduler._handle_blocked_waiting_request = handle_blocked_waiting_request

    def is_ready(self, request: "Request") -> bool:
        """Return whether a waiting request can be scheduled, with what ranks hold of its adapter.

        Blocks that it has of another load are given back. An adapter that nobody holds is read,
        unless it is one too many beside those in use; if it can't be read, its request ends with an
        error. A request that lost its blocks between steps waits for the step that tells of it, as
        one that is preempted in a step does: a connector can't load for it before.
        """
        adapter: Any = request.lora_request
        number = adapter.lora_int_id
        if request.request_id in self._scheduler.reset_preempted_req_ids:
            return False
        if number not in self._held:
            self._read(request)
        elif self._in_use is not None:
            self._in_use[number] = adapter
        load = self._held.get(number)
        if request.num_computed_tokens and load_of(request) != load:
            begin_anew(self._scheduler, request)  # a session, or blocks that came from a connector
            return False
        if load is None:
            return False
        if load_of(request) != load:
            _set_load(request, load)
            request.block_hashes.clear()
            request.update_block_hashes()
            forget_hashes(self._scheduler.connector, request)
        return True

    def _read(self, request: "Request") -> None:
        adapter: Any = request.lora_request
        if self._in_use is None:
            self._in_use = self._of_running()
        if len(self._in_use.keys() | {adapter.lora_int_id}) > self._max_loras:
            return
        try:
            self._held = _on_all(self._load([*self._in_use.values(), adapter]))
        except Exception as error:
            self._held = {}
            self.refuse(request, error)
        else:
            self._in_use[adapter.lora_int_id] = adapter

    def refuse(self, request: "Request", error: Exception) -> None:
        """End a request whose adapter can't be read; the others go on."""
        adapter: Any = request.lora_request
        logger.error(
            "Request %s ends with an error: its adapter %s can't be read from %s: %s",
            request.request_id,
            adapter.lora_name,
            adapter.lora_path,
            error,
        )
        # Upstream's list of requests that end with an error after the step, whatever it was
        self._scheduler.encoder_cache_mismatch_reqs.add(request.request_id)

    def were_given(self, adapter: "LoRARequest") -> None:
        """Take note that ranks were given an adapter.

        It has its number from now on, also in requests that are here already.
        """
        for request in self._scheduler.requests.values():
            other = request.lora_request
            if other is not None and other.lora_int_id == adapter.lora_int_id:
                request.lora_request = once(adapter)
        self.may_have_changed()

    def may_have_changed(self) -> None:
        """Look at the adapters in use, after ranks may have read or dropped some.

        A running request begins anew if it computed with another load than its adapter has now.
        """
        scheduler, in_use, self._held = self._scheduler, self._of_running(), {}
        if not in_use:
            return
        try:
            self._held = _on_all(self._load([*in_use.values()]))
        except Exception as error:
            logger.error("All requests with adapters begin anew: one can't be read: %s", error)
        changed = {
            request.request_id: request
            for request in scheduler.running
            if request.lora_request is not None
            and load_of(request) != self._held.get(request.lora_request.lora_int_id)
        }
        scheduler.running = [each for each in scheduler.running if each.request_id not in changed]
        now, drop = time.monotonic(), scheduler.requires_kv_delivery
        for request in reversed(changed.values()):  # each is put before those that wait
            scheduler._preempt_request(request, now, drop_stale_output=drop)

    def _of_running(self) -> "dict[int, LoRARequest]":
        """Return the adapters of running requests, by number.

        They are told by status, because our scheduler takes some requests out of ``running`` for a
        while.
        """
        from vllm.v1.request import RequestStatus

        return {
            request.lora_request.lora_int_id: request.lora_request
            for request in self._scheduler.requests.values()
            if request.lora_request is not None and request.status == RequestStatus.RUNNING
        }


def load_of(request: "Request") -> str | None:
    """Return the load of its adapter that a request computes with; None while it isn't known."""
    load: str | None = getattr(request, "adapter_load", None)
    return load


def _set_load(request: Any, load: str | None) -> None:
    request.adapter_load = load


def once(adapter: "LoRARequest") -> "LoRARequest":
    """Return the same adapter, to be read only if it isn't held.

    The given one may be asked to be read in any case (``load_inplace``).
    """
    return msgspec.structs.replace(adapter, load_inplace=False)


def _on_all(held: list[dict[int, str]]) -> dict[int, str]:
    """Return the loads of adapters that all ranks hold.

    A load joins the ranks' digests, because pipeline stages hold different parts of an adapter.
    """
    numbers = set.intersection(*(set(of_rank) for of_rank in held))
    return {
        number: "".join(dict.fromkeys(of_rank[number] for of_rank in held)) for number in numbers
    }


def identify_loads() -> None:
    """Let adapters be identified by what was loaded; the module's docstring says why."""
    from vllm.lora.worker_manager import WorkerLoRAManager
    from vllm.v1.core import kv_cache_utils

    @instead_of(WorkerLoRAManager, "_load_adapter")
    def load_adapter(
        read: Any, self: "WorkerLoRAManager", lora_request: "LoRARequest"
    ) -> "LoRAModel":
        adapter: Any = read(self, lora_request)
        _refuse_parts_of_experts(self._adapter_manager, adapter)
        adapter.load = _take_and_digest(adapter)
        return adapter

    @instead_of(kv_cache_utils, "_gen_lora_extra_hash_keys")
    def keys_of_adapter(name_blocks: Any, request: "Request") -> list[tuple[str, ...]]:
        return [(*key, load_of(request) or "") for key in name_blocks(request)]

    _tell_loads_of_calls()


def apply_adapters_under_all_names() -> None:
    """Let a linear layer that a model holds by two names have its adapters by either.

    In vLLM 0.32 only the first name gets them: ``shared_expert_gate`` of Qwen2-MoE doesn't, which
    its shared experts call by another name.
    """
    from vllm.lora.layers import BaseLayerWithLoRA
    from vllm.lora.model_manager import LoRAModelManager
    from vllm.model_executor.layers.linear import LinearBase

    @instead_of(LoRAModelManager, "_create_lora_modules")
    def create_lora_modules(create: Any, self: Any) -> None:
        create(self)
        of_layer = {module.base_layer: module for module in self.modules.values()}
        for owner in list(self.model.modules()):
            if isinstance(owner, BaseLayerWithLoRA):
                continue
            for name, child in list(owner.named_children()):
                if isinstance(child, LinearBase) and child in of_layer:
                    setattr(owner, name, of_layer[child])


def _tell_loads_of_calls() -> None:
    """Let engines keep an `AdapterLoads`, and tell it of calls that reach ranks' adapters."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore

    @instead_of(EngineCore, "__init__")
    def begin_with_loads(begin: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        config = self.vllm_config.lora_config
        if config is None or not isinstance(self.scheduler, Scheduler):
            return
        ask = self.model_executor.collective_rpc
        loads = AdapterLoads(
            self.scheduler,
            lambda adapters: ask("load_adapters", args=(adapters,)),
            config.max_loras,
        )
        loads.watch()
        self.adapter_loads = loads
        self.request_block_hasher = loads.hashing(self.request_block_hasher)

    @instead_of(EngineCore, "add_request")
    def add_request_with_load(
        add_request: Any, self: Any, request: "Request", *args: Any, **kwargs: Any
    ) -> None:
        adapter, loads = request.lora_request, _loads(self)
        add_request(self, request, *args, **kwargs)
        if loads is None or adapter is None or not adapter.load_inplace:
            return
        try:
            self.add_lora(adapter)
        except Exception as error:
            loads.refuse(request, error)

    @instead_of(EngineCore, "add_lora")
    def add_lora_and_look(add_lora: Any, self: Any, lora_request: "LoRARequest") -> bool:
        loads = _loads(self)
        try:
            added = add_lora(self, lora_request)
        except Exception:
            if loads is not None:  # some of several ranks may have read it
                loads.may_have_changed()
            raise
        if loads is not None:
            loads.were_given(lora_request)
        return added

    @instead_of(EngineCore, "remove_lora")
    @instead_of(EngineCore, "collective_rpc")
    def call_and_look(call: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return call(self, *args, **kwargs)
        finally:
            if (loads := _loads(self)) is not None:
                loads.may_have_changed()


def _refuse_parts_of_experts(manager: Any, adapter: "LoRAModel") -> None:
    """Let each layer of experts refuse an adapter that isn't for it."""
    from vllm.lora.layers import FusedMoEWithLoRA

    for name, module in manager.modules.items():
        if isinstance(module, FusedMoEWithLoRA):
            apart = manager._restrict_to_local_experts(name, manager.packed_modules.get(name, []))
            module.refuse_parts(name, apart, adapter.loras)


def _loads(engine: Any) -> AdapterLoads | None:
    loads: AdapterLoads | None = getattr(engine, "adapter_loads", None)
    return loads


def _take_and_digest(adapter: "LoRAModel") -> str:
    """Copy an adapter's weights out of its file, unless they are pinned; return their digest.

    Upstream maps the file into memory: a folder that is overwritten would change what is held.
    """
    import torch

    digest = hashlib.sha256()
    layers: dict[str, Any] = {**adapter.loras, **adapter.modules_to_save}
    for name, layer in sorted(layers.items()):
        digest.update(name.encode())
        for attribute, value in sorted(vars(layer).items()):
            digest.update(attribute.encode())
            if not isinstance(value, torch.Tensor):
                digest.update(repr(value).encode())
                continue
            if not value.is_pinned():
                value = value.clone(memory_format=torch.contiguous_format)
                setattr(layer, attribute, value)
            digest.update(f"{value.dtype} {tuple(value.shape)}".encode())
            digest.update(value.contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()[:32]
