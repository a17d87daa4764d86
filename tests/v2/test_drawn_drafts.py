"""Drafts by chance on the V2 runner: what is drawn, verified and drawn instead."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.v1.worker.gpu.sample.states import SamplingStates

from tests.helpers.statistics import follows
from tests.v2.test_verification import prepared, verified_batch
from vllm_npu_prep.compat import v2
from vllm_npu_prep.ops.triton.gumbel import gumbel_noise
from vllm_npu_prep.ops.triton.sampling_v2 import scale_by_temperature
from vllm_npu_prep.runner.v2.buffers import RowValues
from vllm_npu_prep.runner.v2.drawing import DRAFTING, RowsToDraw, argmax, draw, draw_drafts
from vllm_npu_prep.runner.v2.sampler import NPUSampler
from vllm_npu_prep.runner.v2.speculator import NPUSpeculator
from vllm_npu_prep.runner.v2.verification import NPURejectionSampler

VOCAB, MOST_DRAFTS, CPU = 6, 3, torch.device("cpu")
KINDS = [{"seed": None}, {"seed": 0}, {"temperature": 0}]
"""Parameters of every third request: drawn, drawn by a seed of its own, greedy."""


def states_of(number, temperature=1.3):
    """Parameters of so many requests by slot, kinds in turn."""
    with v2.stand_ins(UvaBackedTensor=lambda *args, **more: RowValues(CPU, *args, **more)):
        states = SamplingStates(number, VOCAB)
    for slot in range(number):
        kind = {"temperature": temperature, **KINDS[slot % 3]}
        if kind.get("seed") is not None:
            kind["seed"] = slot
        states.add_request(slot, SamplingParams(**kind))
    states.apply_staged_writes()
    return states


def sampler_of(states):
    """The sampler of requests that have a temperature, a seed, and nothing else."""
    sampler = NPUSampler.__new__(NPUSampler)
    sampler.sampling_states, sampler.compute_nans = states, False
    sampler.use_fp64_gumbel = sampler.return_sampling_mask = False
    sampler.trace_replay_state = None
    sampler.logprobs_mode = "raw_logprobs"
    sampler.needs_logits_processing = np.ones(len(states.seeds_set), bool)
    sampler.get_logprobs_dims = lambda slots: None

    def scaled(logits, idx_mapping, *_, **__):
        logits = logits.clone()
        scale_by_temperature(logits, VOCAB, idx_mapping, states.temperature.gpu, VOCAB)
        return logits

    sampler.apply_sampling_params = scaled
    return sampler


def drafted(states, slots, of_drafter):
    """Drafts of requests at slots, and what was kept of their logits, as a drafter's passes."""
    number = len(states.seeds_set)
    speculator = NPUSpeculator.__new__(NPUSpeculator)
    speculator.num_speculative_steps, speculator.num_extra_query_per_req = MOST_DRAFTS, 0
    speculator.draft_logits = torch.full((number, MOST_DRAFTS, VOCAB), torch.nan)
    speculator.model = SimpleNamespace(compute_logits=lambda states: states)
    requests = RowsToDraw(states, slots, torch.from_numpy(slots))
    drafts = [
        speculator._tokens(
            of_drafter[place].expand(len(slots), VOCAB),
            place,
            torch.full((len(slots),), 9 + place),
            requests,
        )
        for place in range(MOST_DRAFTS)
    ]
    return torch.stack(drafts, 1), speculator.draft_logits


def verified(states, slots, num_drafts, drafts, draft_logits, of_target, invalid=None):
    """Rows of tokens of a step that verifies so many of the drafts."""
    number = len(slots)
    tokens = np.zeros((number, 100), np.int32)
    computed, known = np.full(number, 10, np.int32), np.full(number, 11, np.int32)
    step, arrays = prepared(num_drafts, 1 + num_drafts, known, computed, tokens)
    arrays.draft_token_ids = torch.cat([row[:n] for row, n in zip(drafts, num_drafts)])
    batch = verified_batch(step, arrays)
    batch.idx_mapping, batch.idx_mapping_np = torch.from_numpy(slots), slots
    batch.num_draft_tokens_per_req = num_drafts
    batch.logits_indices, batch.positions = (
        arrays.logits_indices[: step.num_logits],
        arrays.positions,
    )
    batch.input_ids, batch.seq_lens_cpu_upper_bound = arrays.input_ids, arrays.seq_lens
    sampler = NPURejectionSampler.__new__(NPURejectionSampler)
    sampler.sampler = sampler_of(states)
    places = torch.cat([torch.arange(1 + n) for n in num_drafts.tolist()])
    output = sampler(of_target[places], batch, draft_logits, invalid)
    return output.sampled_token_ids


def batch_of(slots, of_rows, num_drafts=None):
    """As much of a batch as the sampler reads: slots of its requests and of its rows of logits."""
    return SimpleNamespace(
        idx_mapping_np=slots,
        idx_mapping=torch.from_numpy(slots),
        expanded_idx_mapping=torch.from_numpy(of_rows),
        expanded_local_pos=None,
        num_draft_tokens_per_req=num_drafts,
        positions=torch.arange(len(of_rows)),
        logits_indices=torch.arange(len(of_rows)),
        input_ids=torch.zeros(len(of_rows), dtype=torch.int32),
        seq_lens_cpu_upper_bound=torch.ones(len(slots), dtype=torch.int32),
    )


def chances(logits, temperature=1.3):
    return (logits.double() / temperature).softmax(-1).numpy()


@pytest.fixture
def logits(seed):
    """Logits of a drafter and of the target for each place; the target excludes a token.

    Token 0 is drafted too often: numbers of verification are hashed like the noise of this token.
    """
    generator = torch.Generator().manual_seed(seed)
    of_drafter = torch.randn(MOST_DRAFTS, VOCAB, generator=generator)
    of_target = torch.randn(MOST_DRAFTS + 1, VOCAB, generator=generator)
    of_target[:, 2] = -torch.inf
    of_drafter[:, 0], of_target[:, 0] = 1.5, -0.5
    return of_drafter, of_target


def test_tokens_have_the_probabilities_of_the_target(seed, logits):
    """Each place by itself, of requests with seeds and without; ragged, and in other slots."""
    of_drafter, of_target = logits
    number = 36000
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    states, slots = states_of(number), rng.permutation(number)[: number * 3 // 4]
    num_drafts = rng.integers(1, MOST_DRAFTS + 1, len(slots)).astype(np.int32)
    drafts, kept = drafted(states, slots, of_drafter)
    rows = verified(states, slots, num_drafts, drafts, kept, of_target).numpy()
    for kind in (0, 1):
        of_kind = slots % 3 == kind
        for place in range(MOST_DRAFTS):
            counts = np.bincount(drafts[of_kind, place].numpy(), minlength=VOCAB)
            assert follows(counts, chances(of_drafter[place]))
        for place in range(MOST_DRAFTS + 1):
            tokens = rows[of_kind, place]
            assert (tokens >= 0).sum() > 100
            counts = np.bincount(tokens[tokens >= 0], minlength=VOCAB)
            assert follows(counts, chances(of_target[place]))
        # As many drafts are accepted as can be: where the two have the same chances
        p, q = chances(of_target[0]), chances(of_drafter[0])
        share, expected = (rows[of_kind, 1] >= 0).mean(), np.minimum(p, q).sum()
        assert abs(share - expected) < 5 * np.sqrt(expected * (1 - expected) / of_kind.sum())


def test_missing_and_forbidden_drafts_are_replaced(seed, logits):
    """-1 in a place that the scheduler reserved, or a draft that a grammar forbids."""
    of_drafter, of_target = logits
    number = 12000
    torch.manual_seed(seed)
    states, slots = states_of(number), np.arange(number)
    num_drafts = np.full(number, 2, np.int32)
    drafts, kept = drafted(states, slots, of_drafter)
    drafts[: number // 2] = -1
    invalid = torch.zeros(3 * number, dtype=torch.bool)
    invalid[3 * (number // 2) + 1 :: 3] = True  # the first draft's row, one after its target's
    rows = verified(states, slots, num_drafts, drafts, kept, of_target, invalid).numpy()
    assert (rows[:, 1:] == -1).all()
    for half in (slice(number // 2), slice(number // 2, None)):
        tokens = rows[half, 0][slots[half] % 3 != 2]
        assert follows(np.bincount(tokens, minlength=VOCAB), chances(of_target[0]))
    seeded = slots[slots % 3 == 1]
    plain = draw(
        of_target[0].expand(len(seeded), VOCAB) / 1.3,
        RowsToDraw(states, seeded, torch.from_numpy(seeded)),
        lambda: torch.full((len(seeded),), 10),
    )
    assert rows[slots % 3 == 1, 0].tolist() == plain.tolist(), "as without drafts"


def test_greedy_steps_draw_nothing_and_keep_nothing():
    states = states_of(6)
    requests = RowsToDraw(states, np.array([2, 5]), torch.tensor([2, 5]))
    assert not requests.are_random.any()
    logits = torch.randn(2, VOCAB)
    before = torch.get_rng_state()
    assert torch.equal(draw_drafts(logits, requests, torch.zeros(2)), logits.argmax(-1))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("in_float64", [False, True], ids=["float32", "float64"])
def test_noise_has_the_dtype_that_was_asked_for(monkeypatch, seed, in_float64):
    """``--use-fp64-gumbel``: of requests with seeds and without, of samples and of drafts."""
    dtype = torch.float64 if in_float64 else torch.float32
    draw_exponential, drawn = torch.Tensor.exponential_, []

    def exponential(self, *args, **kwargs):
        drawn.append(self.dtype)
        return draw_exponential(self, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "exponential_", exponential)
    states, slots = states_of(60), np.arange(60)
    logits = torch.randn(60, VOCAB, generator=torch.Generator().manual_seed(seed))
    batch = batch_of(slots, slots)
    sampler = sampler_of(states)
    sampler.use_fp64_gumbel = in_float64
    samples = sampler(logits, batch).sampled_token_ids[:, 0]
    requests = RowsToDraw(states, slots, batch.idx_mapping, in_float64)
    drafts = draw_drafts(logits, requests, batch.positions)
    assert drawn == [dtype, dtype]
    seeded = slots[slots % 3 == 1]
    scaled = (logits[seeded] / 1.3).to(dtype)
    for tokens, salt in ((samples, 0), (drafts, DRAFTING)):
        noise = gumbel_noise(torch.from_numpy(seeded), batch.positions[seeded] + salt, VOCAB, dtype)
        assert tokens[seeded].tolist() == (scaled + noise).argmax(-1).tolist()
    greedy = slots % 3 == 2
    assert samples[greedy].tolist() == drafts[greedy].tolist() == logits[greedy].argmax(-1).tolist()


def rows_with_nans(logits):
    """A scalar reading of ``_num_nans_kernel``: NaNs of each row, as float32."""
    return [sum(value != value for value in row) for row in logits.float().tolist()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("drafts", [[0, 0, 0, 0], [2, 0, 3, 1]], ids=["plain", "drafts"])
def test_nans_of_logits_are_counted_before_they_are_sampled_from(seed, drafts, dtype):
    """By request, as upstream's ranks that share a batch do it; its runner names rows by requests,
    of which there are fewer."""
    rng, num_drafts = np.random.default_rng(seed), np.array(drafts, np.int32)
    slots, ends = np.array([4, 2, 3, 0]), np.cumsum(1 + num_drafts)
    of_rows = slots.repeat(1 + num_drafts)
    for _ in range(20):
        logits = torch.from_numpy(rng.standard_normal((len(of_rows), VOCAB))).to(dtype)
        logits[torch.from_numpy(rng.random(logits.shape) < 0.2)] = torch.nan
        logits[rng.integers(len(of_rows))] = torch.inf
        sampler = sampler_of(states_of(5))
        sampler.compute_nans = True
        sampler.apply_sampling_params = lambda logits, *_, **__: logits.float() * torch.nan
        batch = batch_of(slots, of_rows, num_drafts if num_drafts.any() else None)
        expected = [sum(part) for part in np.split(rows_with_nans(logits), ends[:-1])]
        assert sampler(logits, batch).num_nans.tolist() == expected
        assert sum(expected) < logits.numel()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_greedy_token_is_torchs(dtype):
    logits = torch.randn(5, 70, generator=torch.Generator().manual_seed(0)).to(dtype)
    logits[0, 11] = logits[0, 40] = logits.max() + 1  # the first of equal ones
    logits[1], logits[2, 7], logits[3, 50] = -torch.inf, torch.inf, torch.nan
    logits[4, 3], logits[4, 60] = 9, torch.tensor(9 + 1e-12, dtype=torch.float64)
    for rows in (logits, logits[:0], logits[:, ::2]):
        assert torch.equal(argmax(rows), rows.argmax(-1))
