"""Operators of latent attention against formulas in float64."""

import pytest
import torch

from ascend_emulator import faults, profiles
from tests.emulator.operators.calls import call
from tests.emulator.operators.latent_calls import (
    GATHER,
    LATENT,
    TRANSPOSE,
    UPDATE,
    absorbed,
    fused,
    gather_arguments,
    matmul_of_heads,
    projected,
    update_arguments,
)

LENGTHS = ((5, 1), (130, 1), (16, 3), (0, 2))


def formula(query, key, value, scale, computed):
    """Causal attention of one request, ``[Q, N, D]``, ``[S, Nkv, D]``, and its lse."""
    group = query.shape[1] // key.shape[1]
    key, value = (rows.double().repeat_interleave(group, 1) for rows in (key, value))
    scores = torch.einsum("qnd,snd->nqs", query.double(), key) * scale
    ahead = torch.arange(key.shape[0])[None] - torch.arange(query.shape[0])[:, None]
    scores = scores.masked_fill(ahead > computed, float("-inf"))
    output = torch.einsum("nqs,snd->qnd", scores.softmax(-1), value)
    return output, scores.logsumexp(-1).T


def absorbed_formula(arguments, lengths):
    outputs, lses, start = [], [], 0
    for row, (computed, new) in zip(arguments["block_table"].long(), lengths):
        rows = [
            arguments[name][row].flatten(0, 1)[: computed + new] for name in ("key", "key_rope")
        ]
        tokens = slice(start, start + new)
        query = torch.cat((arguments["query"][tokens], arguments["query_rope"][tokens]), -1)
        key = torch.cat(rows, -1).unsqueeze(1)
        scale = arguments["softmax_scale"]
        output, lse = formula(query, key, rows[0].unsqueeze(1), scale, computed)
        outputs.append(output)
        lses.append(lse)
        start += new
    return torch.cat(outputs), torch.cat(lses)


@pytest.mark.parametrize("profile", ["8.5", "9.1", "docs"])
@pytest.mark.parametrize("layout", ["TND", "TND_NTD"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_attention_over_latent_rows(dtype, layout, profile, seed):
    arguments = absorbed(
        LENGTHS, seed, dtype=dtype, input_layout=layout, return_softmax_lse=True, block_size=16
    )
    with profiles.using(profile):
        output, lse = fused(arguments)
    wanted, wanted_lse = absorbed_formula(arguments, LENGTHS)
    if layout == "TND_NTD":
        output = output.transpose(0, 1)
    torch.testing.assert_close(output.double(), wanted, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(lse[..., 0].double(), wanted_lse, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("heads", [1, 2, 128])
def test_numbers_of_heads(heads, seed):
    arguments = absorbed(((3, 1), (20, 1)), seed, heads=heads, sparse_mode=0, atten_mask=None)
    wanted, _ = absorbed_formula(arguments, ((3, 1), (20, 1)))
    output, _ = fused(arguments)
    torch.testing.assert_close(output.double(), wanted, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("kv_lengths", [None, (16, 40, 9)], ids=["own", "context"])
def test_attention_over_projected_rows(kv_lengths, seed):
    lengths = (5, 1, 9)
    mask = {"sparse_mode": 0, "atten_mask": None} if kv_lengths else {}
    arguments = projected(lengths, kv_lengths, seed, return_softmax_lse=True, **mask)
    output, lse = fused(arguments)
    start = kv_start = 0
    for count, rows in zip(lengths, kv_lengths or lengths):
        tokens, keys = slice(start, start + count), slice(kv_start, kv_start + rows)
        query, key = (
            torch.cat((arguments[name][part], arguments[f"{name}_rope"][part]), -1)
            for name, part in (("query", tokens), ("key", keys))
        )
        computed = rows if kv_lengths else 0
        value, scale = arguments["value"][keys], arguments["softmax_scale"]
        wanted, wanted_lse = formula(query, key, value, scale, computed)
        torch.testing.assert_close(output[tokens].double(), wanted, rtol=1e-2, atol=1e-2)
        given = lse[tokens, :, 0].double()
        torch.testing.assert_close(given, wanted_lse, rtol=1e-4, atol=1e-4)
        start, kv_start = tokens.stop, keys.stop


def test_rows_past_a_length_are_not_read(seed):
    arguments = absorbed(LENGTHS, seed)
    expected, _ = fused(arguments)
    for row, (computed, new) in zip(arguments["block_table"].tolist(), LENGTHS):
        length = computed + new
        for plane in ("key", "key_rope"):
            arguments[plane][row[length // 128], length % 128 :] = float("nan")
    output, _ = fused(arguments)
    assert torch.equal(output, expected)


def test_the_rotated_half_counts(seed):
    arguments = absorbed(LENGTHS, seed)
    expected, _ = fused(arguments)
    with faults.using("ignored-rope"):
        output, _ = fused(arguments)
    assert (output - expected).abs().max() > 0.1
    assert output.shape[-1] == LATENT


def test_gather(seed):
    arguments = gather_arguments()
    call(GATHER, arguments)
    for cache, rows in (("key_cache", "key"), ("value_cache", "value")):
        blocks = arguments[cache]
        wanted = [*blocks[1], *blocks[4], *blocks[8][:8], *blocks[2], *blocks[7][:5]]
        assert torch.equal(arguments[rows], torch.stack(wanted))


def test_gather_takes_cumulative_lengths():
    arguments = gather_arguments()
    call(GATHER, arguments)
    lengths = torch.tensor([0, 40, 56, 61], dtype=torch.int32)
    again = gather_arguments(seq_lens=lengths, is_seq_lens_cumsum=True)
    call(GATHER, again)
    assert torch.equal(arguments["key"], again["key"])


@pytest.mark.parametrize("update_type", [0, 1])
def test_update(update_type):
    arguments = update_arguments(3, update_type=update_type, dtype=torch.float32)
    output, lse = call(UPDATE, arguments)
    sums = torch.stack(arguments["lse"]).double()
    shares = sums.softmax(0)
    outputs = torch.stack(arguments["local_out"]).double()
    wanted = (shares.unsqueeze(-1) * outputs).sum(0)
    torch.testing.assert_close(output.double(), wanted, rtol=1e-5, atol=1e-5)
    assert lse.shape == ((6,) if update_type else (0,))
    if update_type:
        torch.testing.assert_close(lse.double(), sums.logsumexp(0), rtol=1e-5, atol=1e-5)


def test_matrices_of_heads():
    arguments = matmul_of_heads()
    result = call(TRANSPOSE, arguments)
    wanted = torch.einsum("tnk,nkl->tnl", arguments["input"].double(), arguments["weight"].double())
    torch.testing.assert_close(result.double(), wanted, rtol=1e-5, atol=1e-5)
    assert result.is_contiguous()
