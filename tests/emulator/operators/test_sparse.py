"""Sparse attention: what is chosen, what is attended to, what is left unwritten."""

import math

import pytest
import torch

from ascend_emulator import faults, profiles
from ascend_emulator.operators import KernelRefusalError
from ascend_emulator.operators.lightning_indexer import UNWRITTEN
from tests.emulator.operators.calls import call
from tests.emulator.operators.formula import DTYPES, assert_close
from tests.emulator.operators.layer_calls import int32
from tests.emulator.operators.sparse_calls import (
    ATTENTION,
    INDEXER,
    LENGTHS,
    attention,
    choice_of,
    fresh,
    indexer,
)

PLANES = ("key", "value", "key_rope")


def rows_of(arguments, plane, request, length):
    """A request's rows of a plane, by its blocks one after the other, in float64."""
    size = arguments[plane].shape[1]
    table = arguments["block_table"][request].tolist()
    rows = [arguments[plane][table[p // size], p % size, 0] for p in range(length)]
    return torch.stack(rows).double()


def scores_of(arguments, lengths):
    """For each token the scores of all keys of its request, and how many it sees."""
    token, found = 0, []
    for request, (old, new) in enumerate(lengths):
        keys = rows_of(arguments, "key", request, old + new)
        for position in range(old, old + new):
            scores = torch.zeros(old + new, dtype=torch.float64)
            for head, weight in enumerate(arguments["weights"][token].double()):
                scores += weight * (keys @ arguments["query"][token, head].double()).clamp(min=0)
            found.append((scores, position + 1))
            token += 1
    return found


def assert_best(indices, expected, count, sees_all=False):
    """Different positions that the token sees, best first, none better left out; -1 behind."""
    for row, (scores, seen) in zip(indices[:, 0].tolist(), expected, strict=True):
        seen = len(scores) if sees_all else seen
        own = row[: min(count, seen)]
        assert len(set(own)) == len(own) and set(own) <= set(range(seen))
        assert set(row[len(own) :]) <= {-1}
        best = scores[:seen].sort(descending=True).values[: len(own)]
        torch.testing.assert_close(scores[own], best, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("mode", [3, 0])
@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("count", [16, 64, 2048])
def test_the_best_positions_are_chosen(count, dtype, mode, seed):
    arguments = indexer(seed=seed, dtype=dtype, sparse_count=count, sparse_mode=mode)
    indices, values = call(INDEXER, arguments)
    assert_best(indices, scores_of(arguments, LENGTHS), count, sees_all=mode == 0)
    assert values.shape == (0,)


@pytest.mark.parametrize("layout", ["TND", "BSND"])
def test_fresh_keys_have_the_same_choice_and_scores(layout, seed):
    arguments = indexer(seed=seed)
    expected, _ = call(INDEXER, arguments)
    given = fresh(arguments, ("key",), layout)
    indices, values = call(INDEXER, given | {"return_value": True})
    if layout == "BSND":
        counts = [new for _, new in LENGTHS]
        for own, count in zip(indices, counts):
            assert (own[count:] == -1).all()
        indices = torch.cat([own[:count] for own, count in zip(indices, counts)])
        values = torch.cat([own[:count] for own, count in zip(values, counts)])
    assert torch.equal(indices, expected)
    for row, scores, (all_scores, _) in zip(
        indices[:, 0], values[:, 0], scores_of(arguments, LENGTHS)
    ):
        chosen = row >= 0
        wanted = all_scores[row[chosen].long()]
        torch.testing.assert_close(scores[chosen].double(), wanted, rtol=8e-3, atol=8e-3)
        assert (scores[~chosen] == -math.inf).all()


def test_larger_choices_begin_with_9_0(seed):
    arguments = indexer(((3000, 1),), seed, heads=2, sparse_count=3072)
    indices, _ = call(INDEXER, arguments)
    assert_best(indices, scores_of(arguments, ((3000, 1),)), 3072)
    with profiles.using("8.5"), pytest.raises(KernelRefusalError, match="sparse_count of 8"):
        call(INDEXER, arguments)


def test_of_equal_scores_the_earlier_position_is_chosen():
    arguments = indexer(((99, 1),), weights=torch.zeros(1, 8, dtype=torch.bfloat16))
    indices, _ = call(INDEXER, arguments)
    assert indices.flatten().tolist() == list(range(16))


def test_rows_of_nobody_are_not_written(seed):
    indices, _ = call(INDEXER, indexer(seed=seed, padding=2))
    assert (indices[-2:] == UNWRITTEN).all() and (indices[:-2] < UNWRITTEN).all()
    arguments = attention(((5, 1), (3, 2)), seed)
    output, *_ = call(ATTENTION, arguments | {"actual_seq_lengths_query": int32(1, 2)})
    assert output[2:].isnan().all() and output[:2].isfinite().all()


def test_requests_without_keys_choose_nothing_and_get_zeros(seed):
    lengths = ((5, 1), (0, 2), (0, 1))
    keys = int32(6, 0, 0)
    indices, _ = call(INDEXER, indexer(lengths, seed, actual_seq_lengths_key=keys))
    assert (indices[1:] == -1).all() and (indices[0, 0, :6] >= 0).all()
    output, *_ = call(ATTENTION, attention(lengths, seed, actual_seq_lengths_kv=keys))
    assert (output[1:] == 0).all() and output[0].any()


def test_more_tokens_than_keys_leave_the_first_ones_without_any(seed):
    lengths, keys = ((0, 4), (9, 1)), int32(2, 10)
    indices, _ = call(INDEXER, indexer(lengths, seed, actual_seq_lengths_key=keys))
    assert (indices[:, 0] >= 0).sum(1).tolist() == [0, 0, 1, 2, 10]
    given = attention(lengths, seed, actual_seq_lengths_kv=keys, sparse_indices=indices)
    output, *_ = call(ATTENTION, given)
    assert (output != 0).any(-1).any(-1).tolist() == [False, False, True, True, True]


def test_without_any_key_nothing_is_written_in_tnd(seed):
    arguments = indexer(((0, 1), (0, 2)), seed, actual_seq_lengths_key=int32(0, 0))
    indices, _ = call(INDEXER, arguments)
    assert (indices == UNWRITTEN).all()
    indices, _ = call(
        INDEXER, fresh(arguments, (), "BSND") | {"key": torch.ones(2, 4, 1, 128).bfloat16()}
    )
    assert (indices == -1).all()


def attended(arguments, lengths, seen_by):
    """Attention over chosen rows, one token and head at a time, in float64."""
    token, outputs, largest, sums = 0, [], [], []
    for request, (old, new) in enumerate(lengths):
        keys, ropes = (rows_of(arguments, p, request, old + new) for p in ("key", "key_rope"))
        for position in range(old, old + new):
            chosen = [p for p in seen_by(token) if p <= position]
            row = torch.cat((arguments["query"][token], arguments["query_rope"][token]), -1)
            scores = row.double() @ torch.cat((keys, ropes), -1)[chosen].T
            scores = scores * arguments["scale_value"]
            outputs.append(scores.softmax(-1) @ keys[chosen])
            largest.append(scores.amax(-1))
            sums.append((scores - scores.amax(-1, keepdim=True)).exp().sum(-1))
            token += 1
    return [torch.stack(each) for each in (outputs, largest, sums)]


def own_choice(arguments):
    return lambda token: [p for p in arguments["sparse_indices"][token, 0].tolist() if p >= 0]


@pytest.mark.parametrize("count", [16, 64, 256])
@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_tokens_attend_to_what_they_have_chosen(dtype, count, seed):
    arguments = attention(seed=seed, dtype=dtype, count=count)
    output, largest, sums = call(ATTENTION, arguments)
    wanted, *_ = attended(arguments, LENGTHS, own_choice(arguments))
    assert_close(output / 4, wanted / 4, dtype)
    assert largest.shape == sums.shape == (0,)


@pytest.mark.parametrize("layout", ["TND", "BSND"])
def test_fresh_keys_give_statistics_of_the_softmax(layout, seed):
    lengths = ((5, 3), (60, 3))
    arguments = attention(lengths, seed)
    given = fresh(arguments, PLANES, layout)
    output, largest, sums = call(ATTENTION, given | {"return_softmax_lse": True})
    if layout == "BSND":
        output, largest, sums = (
            output.flatten(0, 1),
            largest.flatten(0, 2)[None],
            sums.flatten(0, 2)[None],
        )
    wanted = attended(arguments, lengths, own_choice(arguments))
    assert_close(output / 4, wanted[0] / 4, torch.bfloat16)
    assert_close(largest[0], wanted[1], torch.float16)
    assert_close(sums[0], wanted[2], torch.float16)


@pytest.mark.parametrize("layout", ["TND", "BSND"])
def test_tokens_without_keys_have_no_statistics_before_9(layout, seed):
    arguments = attention(((3, 2), (0, 2)), seed, actual_seq_lengths_kv=int32(5, 0))
    given = fresh(arguments, PLANES, layout) | {"return_softmax_lse": True}
    _, *found = call(ATTENTION, given)
    with profiles.using("8.5"):
        _, *found_before = call(ATTENTION, given)
    for now, before in zip(found, found_before):
        now, before = now.reshape(4, -1), before.reshape(4, -1)
        assert (now[2:] == 0).all() and now[:2].all()
        assert before[2:].isnan().all() and torch.equal(before[:2], now[:2])


def test_blocks_of_positions_are_chosen(seed):
    lengths = ((37, 1), (90, 2))
    generator = torch.Generator().manual_seed(seed)
    blocks = choice_of([((old + new) // 8 - new, new) for old, new in lengths], 4, generator)
    arguments = attention(lengths, seed, sparse_indices=blocks, sparse_block_size=8)
    output, *_ = call(ATTENTION, arguments)

    def positions(token):
        own = [block for block in blocks[token, 0].tolist() if block >= 0]
        return [block * 8 + step for block in own for step in range(8)]

    wanted, *_ = attended(arguments, lengths, positions)
    assert_close(output / 4, wanted / 4, torch.bfloat16)


def test_positions_behind_a_token_count_for_nothing(seed):
    arguments = attention(((20, 4),), seed)
    own = arguments["sparse_indices"].clone()
    arguments["sparse_indices"][0, 0, 3] = 23
    output, *_ = call(ATTENTION, arguments)
    own[0, 0, 3:] = torch.cat((own[0, 0, 4:], int32(-1)))
    expected, *_ = call(ATTENTION, arguments | {"sparse_indices": own})
    torch.testing.assert_close(output, expected, rtol=8e-3, atol=8e-3)


def test_entries_past_what_a_token_sees_are_not_read(seed):
    arguments = attention(((3, 1),), seed)
    expected, *_ = call(ATTENTION, arguments)
    arguments["sparse_indices"][0, 0, 4:] = UNWRITTEN
    output, *_ = call(ATTENTION, arguments)
    assert torch.equal(output, expected)


def test_a_choice_that_no_indexer_wrote_is_refused(seed):
    """As that of a row of padding, which a wrong length turns into a request's own."""
    arguments = indexer(((5, 1), (60, 1)), seed, padding=1)
    indices, _ = call(INDEXER, arguments)
    given = attention(((5, 1), (60, 2)), seed, sparse_indices=indices)
    with pytest.raises(KernelRefusalError, match="chosen positions"):
        call(ATTENTION, given)


@pytest.mark.parametrize("fault", ["future-chosen", "whole-block-read", "first-table-row"])
def test_a_wrong_choice_is_seen(fault, seed):
    arguments = indexer(seed=seed)
    with faults.using(fault):
        indices, _ = call(INDEXER, arguments)
    with pytest.raises(AssertionError):
        assert_best(indices, scores_of(arguments, LENGTHS), 16)


@pytest.mark.parametrize("fault", ["neighbours-choice", "unchosen-read", "ignored-rope"])
def test_attention_to_other_rows_is_seen(fault, seed):
    arguments = attention(((5, 1), (130, 3), (40, 2)), seed)
    with faults.using(fault):
        output, *_ = call(ATTENTION, arguments)
    wanted, *_ = attended(arguments, ((5, 1), (130, 3), (40, 2)), own_choice(arguments))
    with pytest.raises(AssertionError):
        assert_close(output / 4, wanted / 4, torch.bfloat16)
