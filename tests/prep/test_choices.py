"""What tokens of sparse attention may choose from, beside upstream's builder, array by array."""

from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from vllm.config import set_current_vllm_config
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.mla import indexer
from vllm.v1.kv_cache_interface import MLAAttentionSpec

from tests.helpers.batches import latent_step, random_batches
from tests.helpers.engine import engine_config, make_model
from tests.helpers.latent import V32
from tests.helpers.triton_source import Source
from vllm_npu_prep.prep.choices import num_chosen

TOPK = V32["index_topk"]


@pytest.fixture(scope="module")
def builder(tmp_path_factory):
    """Upstream's, whose one kernel runs on the host."""
    folder = make_model(tmp_path_factory.mktemp("v32"), "DeepseekV32", **V32)
    config = engine_config(folder, enforce_eager=True, max_num_batched_tokens=1024)
    spec = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=24, dtype=torch.float32)
    named = spec, ["layer"], config, torch.device("cpu")
    with (
        set_current_vllm_config(config),
        mock.patch.object(indexer, "num_compute_units", return_value=1),
    ):
        made = indexer.DeepseekV32IndexerMetadataBuilder(*named, block_table_width=300)

    def build_chunk(*args, num_reqs, **constants):
        Source(indexer, "kernel")[(num_reqs,)](*args, BLOCK_SIZE=1024, **constants)

    with mock.patch.object(indexer, "_BUILD_PREFILL_CHUNK_METADATA_KERNEL", build_chunk):
        yield made


@settings(max_examples=settings.default.max_examples // 3)
@given(random_batches())
def test_bounds_and_arrays_are_upstream_s(builder, batch):
    """Slots, block tables, lengths, and of each token the number of positions it chooses from."""
    decodes_first = sorted(batch.requests, key=lambda request: request.num_scheduled_tokens > 1)
    step, _ = latent_step(replace(batch, requests=decodes_first), 1, 4)
    starts = torch.from_numpy(step.query_start_loc.copy())
    seq_lens = torch.from_numpy(step.seq_lens.copy())
    table = torch.from_numpy(step.block_table(0).copy())
    common = CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=seq_lens,
        num_reqs=step.num_reqs,
        num_actual_tokens=step.total_num_scheduled_tokens,
        max_query_len=step.max_query_len,
        max_seq_len=step.max_seq_len,
        block_table_tensor=table,
        slot_mapping=torch.from_numpy(step.slot_mapping[0].copy()),
        seq_lens_cpu_upper_bound=seq_lens,
    )
    theirs = builder.build(0, common)
    seen = np.full(step.total_num_scheduled_tokens, -1)
    tables = []
    if theirs.decode is not None:
        seen[: theirs.num_decode_tokens] = theirs.decode.seq_lens.flatten()
        tables.append(theirs.decode.block_table)
    for chunk in theirs.prefill.chunks if theirs.prefill is not None else ():
        seen[chunk.token_start : chunk.token_end] = chunk.cu_seqlen_ke - chunk.cu_seqlen_ks
        tables.append(chunk.block_table)
    assert (step.positions + 1).tolist() == seen.tolist()
    assert num_chosen(step.positions, TOPK).tolist() == np.minimum(seen, TOPK).tolist()
    assert theirs.slot_mapping.tolist() == step.slot_mapping[0].tolist()
    assert torch.cat(tables).tolist() == table.tolist()
    assert theirs.seq_lens.tolist() == step.seq_lens.tolist()
