"""Latent attention's split and context chunks: the oracle's, upstream's, and what bounds them."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.model_executor.layers.attention.mla_attention import build_mla_chunked_context_metadata
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.utils import split_decodes_and_prefills

from tests.helpers.batches import RandomBatch, latent_step, random_batches
from tests.helpers.records import beside_oracle
from vllm_npu_prep.prep.latent_split import LatentSplit, LatentStep
from vllm_npu_prep.prep.layout import StepLayout
from vllm_npu_prep.records.contract import LATENT_LINES

PIECES = ("context_piece_reqs", "context_piece_starts", "context_piece_lens")
thresholds = st.integers(1, 4)
workspaces = st.integers(1, 40)


def sorted_batch(batch: RandomBatch, threshold: int) -> RandomBatch:
    """The batch in the order into which upstream's runner brings it."""

    def region(request) -> int:
        if request.num_computed_tokens == 0:
            return 3
        if request.num_scheduled_tokens > threshold:
            return 2
        return int(request.num_computed_tokens < request.num_prompt_tokens)

    return dataclasses.replace(batch, requests=sorted(batch.requests, key=region))


def chunks_of(step) -> list[list[tuple[int, int, int]]]:
    """The step's pieces by chunk."""
    chunks: list[list[tuple[int, int, int]]] = [[] for _ in range(step.latent.num_chunks)]
    pieces = zip(*(getattr(step, name).tolist() for name in PIECES), strict=True)
    for chunk, piece in zip(step.context_piece_chunks.tolist(), pieces, strict=True):
        chunks[chunk].append(piece)
    return chunks


@given(random_batches(), thresholds, workspaces, st.booleans())
def test_every_array_equals_the_oracle(batch, threshold, workspace_blocks, is_sorted):
    if is_sorted:
        batch = sorted_batch(batch, threshold)
    step, _ = latent_step(batch, threshold, workspace_blocks)
    names, difference = beside_oracle(step, batch.requests)
    assert difference is None
    assert names >= {f"latent.{item.name}" for item in dataclasses.fields(LatentStep)}
    assert names >= {f"{line.name}_padded" for line in LATENT_LINES}


@settings(max_examples=settings.default.max_examples // 3)
@given(random_batches(), thresholds, workspaces)
def test_every_array_equals_upstream_s(batch, threshold, workspace_blocks):
    """`split_decodes_and_prefills` and the plan of `MLACommonMetadataBuilder`, array by array."""
    batch = sorted_batch(batch, threshold)
    step, split = latent_step(batch, threshold, workspace_blocks)
    starts = torch.from_numpy(step.query_start_loc.copy())
    seq_lens = torch.from_numpy(step.seq_lens.copy())
    common = CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=seq_lens,
        num_reqs=step.num_reqs,
        num_actual_tokens=step.total_num_scheduled_tokens,
        max_query_len=step.max_query_len,
        max_seq_len=step.max_seq_len,
        block_table_tensor=torch.zeros(step.num_reqs, 1, dtype=torch.int32),
        slot_mapping=torch.zeros(step.total_num_scheduled_tokens, dtype=torch.int32),
        seq_lens_cpu_upper_bound=seq_lens,
    )
    decodes, prefills, decode_tokens, _ = split_decodes_and_prefills(common, threshold)
    latent = step.latent
    assert (latent.num_decodes, latent.num_prefills) == (decodes, prefills)
    assert latent.num_decode_tokens == decode_tokens
    if not prefills:
        assert latent.num_chunks == 0
        return
    prefill_starts = starts[decodes:] - starts[decodes]
    assert step.prefill_query_start_loc.tolist() == prefill_starts.tolist()
    planned = build_mla_chunked_context_metadata(
        context_lens_cpu=seq_lens[decodes:] - starts.diff()[decodes:],
        prefill_query_start_loc_cpu=prefill_starts,
        chunked_prefill_workspace=torch.empty(0),
        chunked_prefill_workspace_size=split.workspace_tokens,
        block_size=batch.block_size,
        align_chunk_to_block=True,
        device=torch.device("cpu"),
        dcp_world_size=1,
        dcp_local_block_size=1,
        dcp_virtual_block_size=1,
    )
    if planned is None:
        assert latent.num_chunks == 0
        return
    assert latent.num_chunks == len(planned.chunks)
    for ours, theirs in zip(chunks_of(step), planned.chunks, strict=True):
        requests, first, lengths = map(list, zip(*ours))
        rows = theirs.request_slice
        assert requests == list(range(rows.start + decodes, rows.stop + decodes))
        assert first == theirs.starts.tolist()
        assert lengths == theirs.seq_lens.tolist()


@given(random_batches(), thresholds, workspaces)
def test_chunks_keep_the_workspace_and_read_each_context_once(batch, threshold, workspace_blocks):
    step, split = latent_step(batch, threshold, workspace_blocks)
    read: dict[int, int] = {}
    for chunk in chunks_of(step):
        assert 0 < sum(length for _, _, length in chunk) <= split.workspace_tokens
        requests = [request for request, _, _ in chunk]
        assert requests == list(range(requests[0], requests[0] + len(requests))), "neighbours"
        for request, first, length in chunk:
            assert first % split.block_size == 0, "a piece starts with a block"
            assert first == read.get(request, 0), "in order, nothing left out or read twice"
            read[request] = first + length
    computed = step.num_computed_tokens.tolist()
    prefills = range(step.latent.num_decodes, step.num_reqs)
    assert read == {request: computed[request] for request in prefills if computed[request]}


def test_a_layout_has_room_for_the_most_pieces():
    """Every request begins in the rest of a chunk, and each further chunk holds less than it."""
    split = LatentSplit(1, 32, 16, 64)
    assert split.max_pieces(100, 3) == 9
    assert split.max_pieces(2, 3) == 6, "not more prefills than tokens"


def test_other_engines_carry_nothing():

    layout = StepLayout(64, 8).arrays
    for name in (*PIECES, "context_piece_chunks", "prefill_query_start_loc"):
        assert layout[name].nbytes == 0, name


@pytest.mark.parametrize(("threshold", "workspace"), [(0, 32), (1, 40), (1, 0)])
def test_a_split_that_cannot_be_is_refused(threshold, workspace):
    with pytest.raises(ValueError, match=r"at least one|whole blocks"):
        LatentSplit(threshold, workspace, 16, 64)
