"""Images and videos: data that is left out on the way to an engine has to come when it is needed.

vLLM leaves out an item's data twice, each time by a guess about what the other side has: a client
sends an item without its data if the engine should have it cached, and a scheduler does the same if
the prefix cache covers the item. The patches here make both guesses right.
"""

import threading
from collections import deque
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any
from weakref import finalize

from vllm_npu_prep.compat.patches import instead_of

if TYPE_CHECKING:
    from vllm.multimodal.cache import LruKeyReplicatedSenderCache, ShmObjectStoreSenderCache
    from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalKwargsItem
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.core_client import AsyncMPClient, InprocClient, SyncMPClient
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.request import Request

# ------------------------------------------------------------------------ scheduler and runner


def send_items_that_were_left_out() -> None:
    """Send the data of an item when its encoder runs, if the request came without it.

    A request for which the prefix cache covers an image comes to the runner without its pixels. If
    its blocks are lost (the cache is emptied, the request is preempted and others take its blocks,
    a connector fails to load them), the image is encoded once more: vLLM then skips it, and the
    engine ends. Model Runner V2 gets a request anew after a preemption, but not after a failed
    load.

    The patch applies to vLLM's schedulers and to ours. `NPUWorker` hands a runner what `items_of`
    returns.
    """
    from vllm.v1.core.sched.output import NewRequestData
    from vllm.v1.core.sched.scheduler import Scheduler

    @instead_of(NewRequestData, "from_request")
    def from_request(
        make: Any, cls: type[NewRequestData], request: "Request", *args: Any, **kwargs: Any
    ) -> NewRequestData:
        new: NewRequestData = make(cls, request, *args, **kwargs)
        if request.mm_features:
            pairs = enumerate(zip(request.mm_features, new.mm_features, strict=True))
            left_out = {number for number, (whole, sent) in pairs if sent is not whole}
            request.left_out = left_out  # type: ignore[attr-defined]
        return new

    @instead_of(Scheduler, "_update_after_schedule")
    def update_after_schedule(
        update: Any, self: "Scheduler", scheduler_output: "SchedulerOutput"
    ) -> None:
        if scheduler_output.scheduled_encoder_inputs:
            step: Any = scheduler_output
            step.items_left_out = _left_out(self.requests, step.scheduled_encoder_inputs)
        update(self, scheduler_output)


def _left_out(
    requests: Mapping[str, Any], encoded: Mapping[str, list[int]]
) -> dict[str, dict[int, "MultiModalFeatureSpec"]]:
    """Return items that a step encodes and the runner never got, by request and number."""
    found: dict[str, dict[int, MultiModalFeatureSpec]] = {}
    for req_id, numbers in encoded.items():
        missing = getattr(requests[req_id], "left_out", ())
        items = {n: requests[req_id].mm_features[n] for n in numbers if n in missing}
        if items:
            found[req_id] = items
    return found


def items_of(scheduler_output: "SchedulerOutput") -> Mapping[str, dict[int, Any]]:
    """Return items that come with a step, left out before, by request and number."""
    found: Mapping[str, dict[int, Any]] = getattr(scheduler_output, "items_left_out", {})
    return found


# --------------------------------------------------------------------------- client and engine


def believe_only_what_was_sent() -> None:
    """Let a client's cache of processed items follow the requests that it sends.

    vLLM's cache notes an item when a prompt is processed. The request may still be refused (a bad
    parameter, a prompt that is too long, too many requests) or given up, and then never reaches the
    engine: the next request with the same image comes without pixels, and fails. Here an item is
    noted when its request is sent, in the order of sending, as the engine's cache notes it when it
    arrives.

    For an item in shared memory, a request that is not sent gives its reference back: an item that
    waits for a reader can't be freed, nor can any item behind it.

    A request that fails on its way to the engine also leaves no state behind: vLLM would wait for
    its answer forever.
    """
    from vllm.multimodal.cache import LruKeyReplicatedSenderCache, ShmObjectStoreSenderCache
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.core_client import AsyncMPClient, InprocClient, SyncMPClient
    from vllm.v1.engine.llm_engine import LLMEngine

    if hasattr(LLMEngine.add_request, "__wrapped__"):
        return
    _note_when_sent(LruKeyReplicatedSenderCache)
    _give_references_back(ShmObjectStoreSenderCache)
    for engine in (LLMEngine, AsyncLLM):
        _tell_of_the_cache(engine)
    for client in (SyncMPClient, AsyncMPClient):
        _tell_what_is_sent(client)
    _tell_what_is_handed_over(InprocClient)
    _leave_no_state_of_refused_requests(LLMEngine)


def _note_when_sent(cache: "type[LruKeyReplicatedSenderCache]") -> None:
    """Keep an item's future cache entry with the item, and enter it once the item is sent."""
    import cachetools
    from vllm.multimodal.cache.base import MultiModalProcessorCacheItemMetadata as Entry

    lock = threading.Lock()  # an event loop sends, another thread processes and clears

    @instead_of(cache, "get_and_update_item")
    def get_and_update_item(
        upstream: Any, self: "LruKeyReplicatedSenderCache", mm_item: Any, mm_hash: str
    ) -> tuple[Any, Any]:
        entries: Any = self._cache
        entries._total += 1
        if mm_hash in entries:
            entries._hits += 1
            entry = cachetools.Cache.__getitem__(entries, mm_hash)  # it stays at its place
            return None, entry.prompt_updates
        assert mm_item is not None, f"item {mm_hash} is neither here nor cached"
        mm_item[0].entry = Entry(*mm_item)
        return mm_item

    def touch_sender_cache_item(self: "LruKeyReplicatedSenderCache", mm_hash: str) -> None:
        """Do nothing: the order of eviction follows what is sent."""

    def note_sent(
        self: "LruKeyReplicatedSenderCache", features: Iterable["MultiModalFeatureSpec"]
    ) -> None:
        """Do what the engine's `LruKeyReplicatedReceiverCache` does with these items."""
        items = [(each.mm_hash or each.identifier, each.data) for each in features]
        with lock:
            for mm_hash, _ in items:
                self._cache.touch(mm_hash)
            for mm_hash, data in items:
                entry = getattr(data, "entry", None)
                if entry is None:
                    self._cache.touch(mm_hash)
                    continue
                self._cache.pop(mm_hash, None)
                self.cache_if_fits(self._cache, mm_hash, entry)

    @instead_of(cache, "clear_cache")
    def clear_cache(upstream: Any, self: "LruKeyReplicatedSenderCache") -> None:
        with lock:
            upstream(self)

    @instead_of(cache, "invalidate")
    def invalidate(upstream: Any, self: "LruKeyReplicatedSenderCache", mm_hash: str) -> None:
        with lock:
            upstream(self, mm_hash)

    kind: Any = cache
    kind.touch_sender_cache_item = touch_sender_cache_item
    kind.note_sent = note_sent


def _give_references_back(cache: "type[ShmObjectStoreSenderCache]") -> None:
    """Take back the reference that a handle stands for if the handle is never sent."""

    @instead_of(cache, "get_and_update_item")
    def get_and_update_item(
        upstream: Any, self: "ShmObjectStoreSenderCache", mm_item: Any, mm_hash: str
    ) -> tuple[Any, Any]:
        if not hasattr(self, "unsent"):
            self.unsent = deque[int]()  # type: ignore[attr-defined]
        unsent: deque[int] = self.unsent  # type: ignore[attr-defined]
        references = self._shm_cache.writer_flag
        while unsent:  # here, because only one thread may write
            number = unsent.popleft()
            if number in references:  # else the cache was cleared
                references[number] -= 1
        item: MultiModalKwargsItem | None
        item, updates = upstream(self, mm_item, mm_hash)
        if item is not None and "address" in item:
            written: Any = item["monotonic_id"].data
            item.reference = finalize(item, unsent.append, written)  # type: ignore[union-attr]
        return item, updates

    def note_sent(
        self: "ShmObjectStoreSenderCache", features: Iterable["MultiModalFeatureSpec"]
    ) -> None:
        """Leave the references to the readers."""
        for each in features:
            if (reference := getattr(each.data, "reference", None)) is not None:
                reference.detach()

    cache.note_sent = note_sent  # type: ignore[attr-defined]


def _tell_of_the_cache(engine: Any) -> None:
    @instead_of(engine, "__init__")
    def begin(upstream: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        upstream(self, *args, **kwargs)
        cache = self.renderer.mm_processor_cache
        self.engine_core.note_sent = getattr(cache, "note_sent", None)


def _note(client: Any, request: "EngineCoreRequest") -> None:
    note_sent = getattr(client, "note_sent", None)
    if note_sent is not None and request.mm_features:
        note_sent(request.mm_features)


def _tell_what_is_sent(client: "type[SyncMPClient | AsyncMPClient]") -> None:
    from vllm.v1.engine import EngineCoreRequestType

    @instead_of(client, "_send_input")
    def send_input(
        upstream: Any, self: Any, request_type: EngineCoreRequestType, request: Any, *args: Any
    ) -> Any:
        sent = upstream(self, request_type, request, *args)
        if request_type is EngineCoreRequestType.ADD:
            _note(self, request)
        return sent


def _tell_what_is_handed_over(client: "type[InprocClient]") -> None:
    """Note items before they are handed over in one process, not after.

    There the engine's cache notes them first of all, before anything can fail.
    """

    @instead_of(client, "add_request")
    def add_request(upstream: Any, self: "InprocClient", request: "EngineCoreRequest") -> None:
        _note(self, request)
        upstream(self, request)


def _leave_no_state_of_refused_requests(engine: "type[LLMEngine]") -> None:
    from vllm.multimodal.cache import MultiModalCacheMissError

    @instead_of(engine, "add_request")
    def add_request(upstream: Any, self: "LLMEngine", *args: Any, **kwargs: Any) -> str:
        states = self.output_processor.request_states
        before = len(states)
        try:
            return upstream(self, *args, **kwargs)
        except Exception as error:
            added = list(islice(reversed(states), len(states) - before))
            self.abort_request(added, internal=True)
            cache = self.renderer.mm_processor_cache
            if isinstance(error, MultiModalCacheMissError) and cache is not None:
                for mm_hash in error.mm_hashes:
                    cache.invalidate(mm_hash)
            raise


# ------------------------------------------------------------------------------- prefix cache


def tell_masks_of_embeddings_apart() -> None:
    """Let a block's hash include which positions are embeddings and which are token ids.

    A prompt may have both at every position, and a mask that chooses between them. vLLM hashes the
    ids and the embeddings, but not the mask.
    """
    import hashlib

    from vllm.v1.core import kv_cache_utils

    @instead_of(kv_cache_utils, "_gen_prompt_embeds_extra_hash_keys")
    def keys_of_embeddings(
        upstream: Any, request: "Request", start_token_idx: int, end_token_idx: int
    ) -> list[tuple[str, bytes]]:
        keys = upstream(request, start_token_idx, end_token_idx)
        is_token_ids = request.prompt_is_token_ids
        if not keys or is_token_ids is None:
            return keys
        mask = bytes(is_token_ids[start_token_idx:end_token_idx])
        return [(name, hashlib.sha256(digest + mask).digest()) for name, digest in keys]
