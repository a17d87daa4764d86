"""Upstream's V1 runner without an engine: a made-up model, and a step in its tables.

vLLM is imported by `import_vllm` and not before.
"""

import json
import os
import sys
import tempfile
from dataclasses import dataclass, replace
from importlib import metadata
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_npu_prep.errors import PrepError
from vllm_npu_prep.prep.context_shards import ContextShards, tokens_per_block
from vllm_npu_prep.wording import counted

if TYPE_CHECKING:
    from vllm_npu_prep.inspect.record import StepRecord
    from vllm_npu_prep.inspect.record_settings import RecordSettings

LEAST_MAX_NUM_TOKENS = 8192
"""The least room for tokens in a runner, because records don't give the engine's limit."""


@dataclass(frozen=True)
class RunnerSizes:
    """The sizes of a runner; steps with the same sizes share one."""

    max_num_reqs: int
    max_model_len: int
    max_num_tokens: int
    block_sizes: tuple[int, ...]
    mrope_dims: int
    shards: ContextShards | None

    @classmethod
    def of(cls, settings: "RecordSettings") -> "RunnerSizes":
        """Return sizes that serve a step, and most likely the others of its run."""
        tokens = settings.total_num_scheduled_tokens
        most = max(LEAST_MAX_NUM_TOKENS, settings.max_num_reqs, 1 << (tokens - 1).bit_length())
        return cls(
            settings.max_num_reqs,
            settings.max_model_len,
            most,
            tuple(settings.block_sizes),
            settings.mrope_dims,
            settings.shards,
        )

    @property
    def nbytes(self) -> int:
        """The bytes of its tables, which vLLM zero-fills: ids, marks of known ids, and blocks."""
        sizes = (tokens_per_block(self.shards, size) for size in self.block_sizes)
        blocks = sum(-(-self.max_model_len // size) for size in sizes)
        return self.max_num_reqs * (5 * self.max_model_len + 8 * blocks)


def import_vllm() -> None:
    """Import the runner, with this plugin's kernels where upstream would launch Triton's."""
    if "vllm" not in sys.modules:
        os.environ["NPU_PREP_DEVICE"] = "cpu"  # whatever the host has
        os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the model is made up, nothing is fetched
    try:
        from vllm_npu_prep.compat.activation import check_vllm_version

        check_vllm_version()
    except metadata.PackageNotFoundError:
        raise PrepError(
            "--upstream needs vLLM, which is not installed; install it as the README says, or "
            "replay without --upstream"
        ) from None
    import vllm.v1.worker.gpu_model_runner  # noqa: F401

    from vllm_npu_prep.ops import replace_triton_kernels

    replace_triton_kernels()


def make_runner(sizes: RunnerSizes) -> Any:
    """Return upstream's runner on the host, for a model whose weights are never loaded."""
    import torch
    from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from vllm_npu_prep.compat.torch_names import no_op_cuda_streams
    from vllm_npu_prep.device import free_memory

    if sizes.nbytes > free_memory() // 2:
        raise PrepError(
            f"--upstream: tables of {counted(sizes.max_num_reqs, 'request')} of "
            f"{counted(sizes.max_model_len, 'token')} take {sizes.nbytes:,} bytes in "
            f"vLLM, and {free_memory():,} are free here; replay "
            "without --upstream, or on a larger machine"
        )
    with tempfile.TemporaryDirectory(prefix="vllm-npu-prep-") as folder:
        with open(os.path.join(folder, "config.json"), "w") as file:
            json.dump(_model(sizes), file)
        model = ModelConfig(
            model=folder,
            skip_tokenizer_init=True,
            dtype="float32",
            max_model_len=sizes.max_model_len,
        )
        config = VllmConfig(
            model_config=model,
            cache_config=CacheConfig(block_size=16),  # the groups' own sizes come below
            scheduler_config=SchedulerConfig(
                max_num_seqs=sizes.max_num_reqs,
                max_num_batched_tokens=sizes.max_num_tokens,
                max_model_len=sizes.max_model_len,
                is_encoder_decoder=False,
                async_scheduling=False,  # `fill_batch` says what is left on the device
            ),
        )
    # Windows and chunks change neither tables nor slots.
    groups = []
    for group, block_size in enumerate(sizes.block_sizes):
        spec = FullAttentionSpec(
            block_size=block_size, num_kv_heads=1, head_size=16, dtype=torch.float32
        )
        groups.append(KVCacheGroupSpec([f"layers of group {group}"], spec))
    with no_op_cuda_streams():
        runner = GPUModelRunner(config, torch.device("cpu"))
    runner.kv_cache_config = KVCacheConfig(1, [], groups)
    shards = sizes.shards or ContextShards(1, 0)
    parallel = config.parallel_config  # only now: the runner asks process groups for its rank
    parallel.decode_context_parallel_size = shards.world_size
    parallel.cp_kv_cache_interleave_size = shards.interleave_size
    runner.may_reinitialize_input_batch(runner.kv_cache_config)
    for table in runner.input_batch.block_table.block_tables:
        table.dcp_world_size, table.dcp_rank = shards.world_size, shards.rank
    return runner


def _model(sizes: RunnerSizes) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
    if sizes.mrope_dims:
        rope["mrope_section"] = [2] * sizes.mrope_dims
    return {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 32,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": sizes.max_model_len,
        "rope_parameters": rope,
    }


def fill_batch(record: "StepRecord", runner: Any, first_sample: int) -> Any:
    """Put a step's batch into the runner's tables.

    Parameters
    ----------
    record, runner
        The step, and a runner of its sizes.
    first_sample
        First of the ids that replace the last step's samples, which only the device had: sample and
        drafts of row 0, then row 1 and so on.

    Returns
    -------
    SchedulerOutput
        What the runner reads of it.
    """
    import torch
    from vllm import SamplingParams
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.worker.gpu_input_batch import CachedRequestState

    settings, batch, tables = record.settings, record.batch, runner.input_batch
    for req_id in list(tables.req_id_to_index):
        tables.remove_request(req_id)
    greedy = SamplingParams(temperature=0)
    req_ids = [str(req) for req in range(settings.num_reqs)]  # names in a file may be the same
    blocks = np.split(batch.block_ids, np.cumsum(batch.num_blocks)[:-1])
    runner.requests = {}
    drafts, start = {}, 0
    for req, req_id in enumerate(req_ids):
        computed, scheduled = (
            int(counts[req]) for counts in (batch.num_computed_tokens, batch.num_scheduled_tokens)
        )
        num_prompt_tokens = int(batch.num_prompt_tokens[req])
        mrope: dict[str, Any] = {}
        if settings.mrope_dims:
            mrope = {
                "mrope_positions": torch.from_numpy(_prompt_mrope(record, req, start)),
                "mrope_position_delta": int(batch.mrope_position_deltas[req]),
            }
        runner.requests[req_id] = request = CachedRequestState(
            req_id=req_id,
            prompt_token_ids=[0] * num_prompt_tokens,
            mm_features=[],
            sampling_params=greedy,
            generator=None,
            block_ids=tuple(
                blocks[group * settings.num_reqs + req].tolist()
                for group in range(len(settings.block_sizes))
            ),
            num_computed_tokens=computed,
            output_token_ids=[0] * (int(batch.num_tokens[req]) - num_prompt_tokens),
            **mrope,
        )
        row = tables.add_request(request)
        assert row == req
        span = batch.token_ids[start : start + scheduled]
        tables.token_ids_cpu[row, computed : computed + scheduled] = span
        num_drafts = int(batch.num_draft_tokens[req])
        if num_drafts:
            drafts[req_id] = span[scheduled - num_drafts :].tolist()
        start += scheduled
    tables.condense()
    tables.refresh_metadata()

    rows, width = settings.num_sampled_rows, 1 + settings.num_sampled_drafts
    tables.prev_sampled_token_ids = tables.prev_req_id_to_index = runner._draft_token_ids = None
    if rows:
        samples = torch.arange(first_sample, first_sample + rows * width, dtype=torch.int32)
        samples = samples.view(rows, width)
        tables.prev_sampled_token_ids = samples[:, :1]
        previous = zip(req_ids, batch.previous_rows.tolist())
        tables.prev_req_id_to_index = {req_id: row for req_id, row in previous if row >= 0}
        if settings.num_sampled_drafts:
            runner._draft_token_ids = samples[:, 1:]
            runner.prev_num_spec_tokens = settings.num_sampled_drafts
    # Only whether there is a drafter matters; a real one needs process groups and weights
    runner.speculative_config = "made up" if settings.max_drafts else None
    return replace(
        SchedulerOutput.make_empty(),
        num_scheduled_tokens=dict(zip(req_ids, batch.num_scheduled_tokens.tolist())),
        total_num_scheduled_tokens=settings.total_num_scheduled_tokens,
        scheduled_spec_decode_tokens=drafts,
    )


def _prompt_mrope(record: "StepRecord", req: int, start: int) -> np.ndarray:
    """Return a prompt's positions, int64 ``[mrope_dims, length]``; 0 where none is read."""
    batch, dims = record.batch, record.settings.mrope_dims
    length = int(batch.mrope_lengths[req])
    if not length:  # they count up from 0
        return np.tile(np.arange(batch.num_prompt_tokens[req], dtype=np.int64), (dims, 1))
    first = int(batch.num_computed_tokens[req])
    seen = max(0, min(length - first, int(batch.num_scheduled_tokens[req])))
    positions = np.zeros((dims, length), np.int64)
    positions[:, first : first + seen] = batch.mrope_positions[:, start : start + seen]
    return positions
