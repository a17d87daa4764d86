"""Refusals of KV caches that are stored, moved or shared: of connectors and offloading."""

import importlib
from typing import TYPE_CHECKING

from vllm_npu_prep.startup.asked import RequestedEngine
from vllm_npu_prep.startup.refusal import Refusal, Subject

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig

EXAMPLE, OFFLOADING, MOONCAKE = "ExampleConnector", "OffloadingConnector", "MooncakeConnector"
MOONCAKE_STORE = "MooncakeStoreConnector"
CONNECTOR_MODULE = "vllm_npu_prep.attention.kv_transfer"
"""The module with `PLANE_SPEC`, and with the connectors that need nothing but vLLM."""
CONNECTOR_MODULES = {
    EXAMPLE: CONNECTOR_MODULE,
    OFFLOADING: CONNECTOR_MODULE,
    MOONCAKE: "vllm_npu_prep.attention.mooncake",
    MOONCAKE_STORE: "vllm_npu_prep.attention.mooncake_store",
}
"""Where vLLM finds the KV connectors that `KernelFamily.kv_connectors` names."""

PROTOCOL = "mooncake_protocol"
"""vLLM's key of the protocol by which Mooncake moves memory."""
MOONCAKE_PROTOCOLS = {"cpu": ("tcp", "rdma"), "npu": ("ascend", "tcp", "rdma")}
"""Mooncake's protocols for the memory of each type of device, the default first."""
MOONCAKE_KEYS = {PROTOCOL, "num_workers", "device_name", "bootstrap_server_address"}
"""What vLLM's MooncakeConnector reads of ``kv_connector_extra_config``."""
LOOKUP_PORT = "lookup_rpc_port"
"""vLLM's key of what tells apart the sockets by which schedulers ask what a store has."""
STORE_KEYS = {"cache_prefix", "enable_lookup", "lookup_async", LOOKUP_PORT}
STORE_KEYS |= {"preferred_segment", "save_decode_cache"}
"""What vLLM's MooncakeStoreConnector reads of it, but for what it does with other caches."""

UPSTREAM_SPEC, PLANE_SPEC = "CPUOffloadingSpec", "PlaneOffloadingSpec"
"""vLLM's names of its class that offloads to the host, and of ours that takes its place."""

_MADE_FOR_OTHER_CACHES = ("vllm", "vllm_ascend")
"""Packages whose connectors read other forms of caches."""


def connector_module(transfer: "KVTransferConfig") -> str | None:
    """Return a connector's module: the one that was given, else that of the registered class.

    It is None if vLLM doesn't know the name, or can't import the module.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if transfer.kv_connector_module_path:
        return transfer.kv_connector_module_path
    try:
        return KVConnectorFactory.get_connector_class(transfer).__module__
    except Exception:  # vLLM's own import what they were made for, which may fail in any way
        return None


def _brings_its_code(asked: RequestedEngine) -> bool:
    """Tell whether the connector is the user's own."""
    module = connector_module(asked.connector)
    return (
        module not in (None, *CONNECTOR_MODULES.values())
        and str(module).split(".")[0] not in _MADE_FOR_OTHER_CACHES
    )


def _is_known(asked: RequestedEngine) -> bool:
    """Tell whether the kernel family has this connector, and the code is ours."""
    transfer = asked.transfer
    return (
        transfer is not None
        and transfer.kv_connector in asked.family.kv_connectors
        and transfer.kv_connector_module_path
        in (None, CONNECTOR_MODULES[str(transfer.kv_connector)])
    )


def _is(asked: RequestedEngine, connector: str) -> bool:
    return _is_known(asked) and asked.connector.kv_connector == connector


def _knows_several_groups(asked: RequestedEngine) -> bool:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    return bool(KVConnectorFactory.supports_hma_config(asked.connector))


def _extra(asked: RequestedEngine, key: str) -> object:
    return asked.connector.kv_connector_extra_config.get(key)


def _words(asked: RequestedEngine) -> dict[str, object]:
    return {
        "name": asked.connector.kv_connector,
        "known": ", ".join(asked.family.kv_connectors) or "none",
    }


def _missing_transfer_engine(asked: RequestedEngine) -> str:
    """Tell why Mooncake's transfer engine, or its store, can't be imported; empty if it can."""
    part = "store" if asked.connector.kv_connector == MOONCAKE_STORE else "engine"
    try:
        importlib.import_module(f"mooncake.{part}")
    except Exception as error:  # libraries of the network, of any kind
        return " ".join(str(error).split()) or repr(error)
    return ""


def _wrong_mooncake_config(asked: RequestedEngine) -> str:
    """Tell what is wrong with the extra configuration of `MOONCAKE`; empty if nothing is."""
    extra = asked.connector.kv_connector_extra_config
    protocols = MOONCAKE_PROTOCOLS[asked.kind.device_type]
    workers, protocol = extra.get("num_workers", 1), extra.get(PROTOCOL, protocols[0])
    address = str(extra.get("bootstrap_server_address", "host:8998"))
    if unknown := extra.keys() - MOONCAKE_KEYS:
        return f"vLLM knows no {', '.join(sorted(unknown))}, but {', '.join(sorted(MOONCAKE_KEYS))}"
    if not isinstance(workers, int) or workers < 1:
        return f"num_workers is {workers!r}, and has to be a number of threads, at least 1"
    if protocol not in protocols:
        return f"{PROTOCOL} is {protocol!r}; memory of this device is moved by " + (
            " or ".join(protocols)
        )
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 1 <= int(port) <= 65535:
        return f"bootstrap_server_address is {address!r}, and has to be HOST:PORT"
    return ""


def _wrong_store_file(asked: RequestedEngine) -> str:
    """Tell what is wrong with the file that describes Mooncake's store; empty if nothing is."""
    from vllm.distributed.mooncake_store import MooncakeStoreConfig

    protocols = MOONCAKE_PROTOCOLS[asked.kind.device_type]
    try:
        config = MooncakeStoreConfig.load_from_config()
    except Exception as error:  # the file's, of any kind
        return " ".join(str(error).rstrip(".").split()) or repr(error)
    if not config.master_server_address:
        return "it names no master_server_address"
    if config.protocol not in protocols:
        return f"its protocol is {config.protocol!r}; memory of this device is moved by " + (
            " or ".join(protocols)
        )
    return ""


def _beside_the_store(asked: RequestedEngine) -> str:
    """Tell with what a pool was not tried; empty if it was tried with all that is asked for."""
    parallel, config = asked.config.parallel_config, asked.config
    found = {
        "drafts": config.speculative_config is not None,
        "LoRA": config.lora_config is not None,
        "pipeline stages": parallel.pipeline_parallel_size > 1,
        "data parallelism": parallel.data_parallel_size > 1,
        "prompt embeddings": asked.model.enable_prompt_embeds,
    }
    return ", ".join(name for name, is_there in found.items() if is_there)


ANY = (
    Refusal(
        "kv-offloading",
        lambda c: (
            c.config.cache_config.kv_offloading_size is not None
            and c.transfer is not None
            and c.transfer.kv_connector != OFFLOADING
            and c.config.cache_config.kv_offloading_backend == "native"
        ),
        "--kv-offloading-size with KV connector {name}",
        "vLLM would replace the connector by its own, OffloadingConnector",
        "use one of the two",
        _words,
    ),
    Refusal(
        "kv-connector",
        lambda c: c.transfer is not None and not _is_known(c) and not _brings_its_code(c),
        "KV connector {name}",
        "kernel family {family} keeps K and V as separate planes, and of vLLM's connectors it has "
        "these: {known}",
        "leave --kv-transfer-config out, use one of those, or one of your own that reads planes: "
        "registered by its name, or with its module in kv_connector_module_path",
        _words,
    ),
    Refusal(
        "kv-connector-pooling",
        lambda c: c.transfer is not None and c.pools,
        "KV connector {name} with pooling",
        "connectors were tried with requests that generate tokens",
        "leave --kv-transfer-config out",
        _words,
    ),
    Refusal(
        "kv-connector-states",
        lambda c: (
            c.has_states
            and c.transfer is not None
            and (_is_known(c) or _brings_its_code(c))
            and not _knows_several_groups(c)
        ),
        "KV connector {name} with {model}",
        "it is told of the blocks of one KV-cache group (vLLM's SupportsHMA is told of all), and "
        "recurrent states have groups of their own",
        "use --kv-offloading-size, or leave --kv-transfer-config out",
        _words,
    ),
)

EXAMPLE_CONNECTOR = (
    Refusal(
        "kv-connector-lora-or-embeds",
        lambda c: c.config.lora_config is not None or c.model.enable_prompt_embeds,
        "KV connector {name} with LoRA or prompt embeddings",
        "it identifies prompts by their token ids alone",
        "use one of the two",
        _words,
    ),
    Refusal(
        "kv-connector-chunked-prefill",
        lambda c: (
            c.config.scheduler_config.enable_chunked_prefill
            or c.config.scheduler_config.long_prefill_token_threshold > 0
        ),
        "KV connector {name} with chunked prefill",
        "it would store only the first chunk of a prompt",
        "use --no-enable-chunked-prefill, without --long-prefill-token-threshold",
        _words,
    ),
    Refusal(
        "kv-connector-folder",
        lambda c: "shared_storage_path" not in c.connector.kv_connector_extra_config,
        "KV connector {name} without a folder",
        "vLLM would use /tmp, which all users share",
        'give it "kv_connector_extra_config": {{"shared_storage_path": ...}}',
        _words,
    ),
)

OFFLOADING_CONNECTOR = (
    Refusal(
        "kv-offloading-bytes",
        lambda c: not _extra(c, "cpu_bytes_to_use"),
        "KV connector {name} without memory",
        "it keeps blocks in host memory, whose size it has to be told",
        "use --kv-offloading-size, in GiB of all ranks together",
        _words,
    ),
    Refusal(
        "kv-offloading-spec",
        lambda c: (
            _extra(c, "spec_name") not in (None, UPSTREAM_SPEC, PLANE_SPEC)
            or _extra(c, "canonical_layout")
        ),
        "spec_name or canonical_layout of {name}",
        "blocks go to the memory of the host, plane by plane, and to no other place or form",
        "leave both keys out",
        _words,
    ),
    Refusal(
        "kv-offloading-states",
        lambda c: c.has_states and not c.config.cache_config.enable_prefix_caching,
        "KV offloading of {model} without the prefix cache",
        "only with it does a request keep the recurrent states at the ends of blocks for the host",
        "use --enable-prefix-caching",
    ),
    Refusal(
        "kv-offloading-stages",
        lambda c: c.config.parallel_config.pipeline_parallel_size > 1,
        "KV offloading over pipeline stages",
        "vLLM counts the host's blocks by the layers of one stage, and other stages may have more",
        "use --tensor-parallel-size instead of --pipeline-parallel-size",
    ),
)

MOONCAKE_ANY = (
    Refusal(
        "kv-mooncake-engine",
        lambda c: _missing_transfer_engine(c),
        "KV connector {name} without Mooncake's transfer engine",
        "{why}",
        "install mooncake-transfer-engine-npu by pip on an Ascend host, elsewhere "
        "mooncake-transfer-engine-non-cuda, and Debian's libibverbs1 and librdmacm1",
        lambda c: _words(c) | {"why": _missing_transfer_engine(c)},
    ),
    Refusal(
        "kv-mooncake-sleep",
        lambda c: c.model.enable_sleep_mode,
        "KV connector {name} with sleep mode",
        "the memory of the KV cache, which a sleep takes away, is registered with Mooncake",
        "use one of the two",
        _words,
    ),
)

MOONCAKE_CONNECTOR = (
    Refusal(
        "kv-mooncake-config",
        lambda c: _wrong_mooncake_config(c),
        "kv_connector_extra_config of {name}",
        "{why}",
        "leave the key out, or correct it",
        lambda c: _words(c) | {"why": _wrong_mooncake_config(c)},
    ),
    Refusal(
        "kv-mooncake-drafts",
        lambda c: c.config.speculative_config is not None,
        "KV connector {name} with drafts",
        "drafts take blocks behind a prompt's, and vLLM pairs the blocks of two engines from the "
        "last one on",
        "leave --speculative-config out of both engines",
        _words,
    ),
    Refusal(
        "kv-mooncake-data-parallel",
        lambda c: c.config.parallel_config.data_parallel_size > 1,
        "KV connector {name} with data parallelism",
        "a request that is decoded has to name the rank that computed its prompt, which was not "
        "tried",
        "start several servers behind one proxy",
        _words,
    ),
)

MOONCAKE_STORE_CONNECTOR = (
    Refusal(
        "kv-store-keys",
        lambda c: c.connector.kv_connector_extra_config.keys() - STORE_KEYS,
        "{keys} in kv_connector_extra_config of {name}",
        "planes are stored with these alone: {known}",
        "leave them out",
        lambda c: {
            "name": c.connector.kv_connector,
            "keys": ", ".join(sorted(c.connector.kv_connector_extra_config.keys() - STORE_KEYS)),
            "known": ", ".join(sorted(STORE_KEYS)),
        },
    ),
    Refusal(
        "kv-store-file",
        lambda c: _wrong_store_file(c),
        "MOONCAKE_CONFIG_PATH for KV connector {name}",
        "{why}",
        'give it a file such as {{"metadata_server": "P2PHANDSHAKE", "master_server_address": '
        '"HOST:50051", "protocol": "{protocol}"}}',
        lambda c: (
            _words(c)
            | {"why": _wrong_store_file(c), "protocol": MOONCAKE_PROTOCOLS[c.kind.device_type][0]}
        ),
    ),
    Refusal(
        "kv-store-beside",
        lambda c: _beside_the_store(c),
        "KV connector {name} with {beside}",
        "a pool of blocks was not tried with it",
        "leave it out, or --kv-transfer-config",
        lambda c: _words(c) | {"beside": _beside_the_store(c)},
    ),
    Refusal(
        "kv-store-states",
        lambda c: c.has_states and not c.config.cache_config.enable_prefix_caching,
        "KV connector {name} with {model} without the prefix cache",
        "only with it does a request keep the recurrent states at the ends of blocks for the pool",
        "use --enable-prefix-caching",
        _words,
    ),
)

SUBJECTS = (
    Subject("offloading", ANY),
    Subject("connector", EXAMPLE_CONNECTOR, when=lambda c: _is(c, EXAMPLE)),
    Subject("offloading-connector", OFFLOADING_CONNECTOR, when=lambda c: _is(c, OFFLOADING)),
    Subject("mooncake", MOONCAKE_ANY, when=lambda c: _is(c, MOONCAKE) or _is(c, MOONCAKE_STORE)),
    Subject("mooncake-connector", MOONCAKE_CONNECTOR, when=lambda c: _is(c, MOONCAKE)),
    Subject("mooncake-store", MOONCAKE_STORE_CONNECTOR, when=lambda c: _is(c, MOONCAKE_STORE)),
)
