"""Prompts given as embeddings, by slot: held against a scalar reading of upstream's kernel."""

from types import SimpleNamespace

import numpy as np
import torch

from vllm_npu_prep.runner.v2.prompt_embeds import NPUPromptEmbedsState, ids_of
from vllm_npu_prep.runner.v2.request_states import NPURequestState

SLOTS, LENGTH, SIZE = 6, 20, 3


def test_vectors_are_where_upstreams_kernel_puts_them(seed):
    """Some requests have vectors alone, some have ids between them, and some have ids alone."""
    rng = np.random.default_rng(seed)
    placed = 0
    for _ in range(30):
        state = NPUPromptEmbedsState(SLOTS, SIZE, torch.float32, torch.device("cpu"))
        slots = rng.permutation(SLOTS)[:4]
        is_token_ids = np.ones((SLOTS, LENGTH), bool)
        lengths, arrived = np.zeros(SLOTS, np.int32), []
        for kind, slot in enumerate(slots.tolist()):
            lengths[slot] = rng.integers(1, LENGTH - 6)
            vectors = torch.tensor(rng.normal(size=(lengths[slot], SIZE)))  # float64: converted
            new = SimpleNamespace(
                req_id=str(slot),
                prompt_embeds=None if kind == 3 else vectors,
                prompt_is_token_ids=None if kind != 1 else (rng.random(lengths[slot]) < 0.5),
            )
            arrived.append(new)
            state.add_request(slot, new)
            if kind == 1:
                new.prompt_is_token_ids = new.prompt_is_token_ids.tolist()
        for req_id, has_id in ids_of(arrived).items():
            is_token_ids[int(req_id), : len(has_id)] = has_id
        computed = np.minimum(rng.integers(0, LENGTH - 6, SLOTS), lengths).astype(np.int32)
        counts = rng.integers(1, 6, len(slots))
        reqs = np.repeat(np.arange(len(slots)), counts)
        first = np.cumsum(counts) - counts
        positions = np.arange(counts.sum()) - first[reqs] + computed[slots][reqs]
        tables = SimpleNamespace(num_computed_tokens=computed, num_prompt_tokens=lengths)
        step = SimpleNamespace(
            req_indices=reqs,
            positions=positions,
            request_rows=slots,
            input_ids=np.full(len(reqs), 7, np.int32),
            batch=SimpleNamespace(tables=tables),
        )
        expected = torch.zeros(len(reqs) + 2, SIZE)
        for row, slot in enumerate(slots.tolist()):
            new = arrived[row]
            if new.prompt_embeds is None:
                continue
            start, known = int(computed[slot]), len(new.prompt_embeds)
            for token in range(min(int(counts[row]), known - start)):
                mask = new.prompt_is_token_ids
                if mask is None or not mask[start + token]:
                    expected[first[row] + token] = new.prompt_embeds[start + token].float()
                    placed += 1
        embeds = torch.zeros_like(expected)
        state.follow(step, slots, is_token_ids)
        state.apply(None, torch.empty(0), embeds)
        assert torch.equal(embeds, expected)
        has_vector = expected[: len(reqs)].any(1).numpy()
        assert (step.input_ids[has_vector] == 0).all() and (step.input_ids[~has_vector] == 7).all()
        for slot in slots.tolist():
            state.remove_request(str(slot))
        state.follow(step, slots, is_token_ids)
        state.apply(None, torch.empty(0), embeds.zero_())
        assert not embeds.any()
    assert placed > 50


def test_the_sampler_finds_no_token_where_a_prompt_has_a_vector():
    """The scheduler says 0 there, which penalties would count; of a slot's next request, ids are
    known."""
    states = NPURequestState(2, LENGTH, LENGTH, 0, 99, torch.device("cpu"))
    states.read_on_device = {"first", "second", "third"}
    states.have_ids = {"first": [True, False, True, False]}
    states.add_request("first", 4, [5, 0, 7, 0, 9], 0, 8)  # resumed after a token
    states.add_request("second", 3, [1, 0, 3], 0, 8)
    states.apply_staged_writes()
    slots = states.rows_of(["first", "second"])
    assert states.all_token_ids.gpu[slots[0], :5].tolist() == [5, -1, 7, -1, 9]
    assert states.all_token_ids.gpu[slots[1], :3].tolist() == [1, 0, 3]
    assert states.token_ids[slots[0], :5].tolist() == [5, 0, 7, 0, 9], "the model embeds it"
    states.remove_request("first")
    states.have_ids = {}
    states.add_request("third", 4, [0, 0, 0, 0], 0, 8)
    states.apply_staged_writes()
    assert states.rows_of(["third"])[0] == slots[0]
    assert states.all_token_ids.gpu[slots[0], :4].tolist() == [0, 0, 0, 0]
