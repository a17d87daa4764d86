"""What KV connectors are told when the cache sleeps, by releases of vLLM that tell them."""

from typing import Any

from vllm_npu_prep.compat.releases import is_since


def forget_caches() -> None:
    """Have a KV connector drop what it registered of the cache, which is about to sleep."""
    _tell("unregister_kv_caches")


def restore_caches() -> None:
    """Have a KV connector register the cache again, which is awake at the same addresses."""
    _tell("restore_kv_caches")


def _tell(what: str) -> None:
    """Call a method that connectors have from vLLM 0.33.0 on, if there is a connector."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    if is_since("0.33.0") and has_kv_transfer_group():
        connector: Any = get_kv_transfer_group()
        getattr(connector, what)()
