"""The LoRA operations against a scalar reading: row by row, each with its own adapter or none."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.lora.layers import LoRAMapping

from vllm_npu_prep.ops.triton.lora import NO_LORA, PunicaWrapperNPU
from vllm_npu_prep.runner.lora import StepLoRAMapping

MAX_ROWS, RANK, INPUT, VOCAB = 24, 3, 6, 10
WIDTHS = (8, 4, 4)
SLOTS_TO_IDS = {1: [7], 3: [None, 7, 5], 4: [9, 7, None, 5]}
"""LoRA id in each slot, by number of slots."""


def wrapper_of(num_slots: int) -> PunicaWrapperNPU:
    lora_config = SimpleNamespace(max_loras=num_slots)
    return PunicaWrapperNPU(MAX_ROWS, 8, "cpu", lora_config=lora_config)


def update(wrapper, token_ids, sample_ids, ids_by_slot, kind=LoRAMapping) -> None:
    mapping = kind(np.array(token_ids), np.array(sample_ids), is_prefill=True)
    wrapper.update_metadata(mapping, ids_by_slot, len(ids_by_slot) + 1, VOCAB)


def random_ids(rng, ids_by_slot, count: int) -> list[int]:
    return rng.choice([0, *filter(None, ids_by_slot)], count).tolist()


def slot_of(lora_id: int, ids_by_slot) -> int:
    return ids_by_slot.index(lora_id) if lora_id else NO_LORA


def draw(rng, *shape) -> torch.Tensor:
    return torch.from_numpy(rng.standard_normal(shape).astype(np.float32))


def oracle(y, x, lora_a, lora_b, slots) -> torch.Tensor:
    """One row and one slice at a time; x is shrunk already without `lora_a`."""
    out = y.clone()
    for row, slot in enumerate(slots):
        start = 0
        for index, b in enumerate(lora_b):
            width = b.shape[-2]
            if slot != NO_LORA:
                shrunk = lora_a[index][slot].reshape(RANK, -1) @ x[row] if lora_a else x[row]
                out[row, start : start + width] += b[slot, 0] @ shrunk
            start += width
    return out


def weights(rng, num_slots, widths=WIDTHS):
    a = tuple(draw(rng, num_slots, 1, RANK, INPUT) for _ in widths)
    b = tuple(draw(rng, num_slots, 1, width, RANK) for width in widths)
    return a, b


MAPPINGS = {
    "mixed": lambda rng, ids: random_ids(rng, ids, 17),
    "all plain": lambda rng, ids: [0] * 17,
    "one adapter": lambda rng, ids: [7] * 17,
    "one row": lambda rng, ids: [7],
    "one plain row": lambda rng, ids: [0],
}


@pytest.mark.parametrize("mapping", MAPPINGS)
@pytest.mark.parametrize("num_slots", SLOTS_TO_IDS)
@pytest.mark.parametrize("kind", [LoRAMapping, StepLoRAMapping])
def test_each_row_gets_its_own_adapter_or_none(seed, num_slots, mapping, kind):
    rng, ids_by_slot = np.random.default_rng(seed), SLOTS_TO_IDS[num_slots]
    wrapper = wrapper_of(num_slots)
    lora_a, lora_b = weights(rng, num_slots)
    for _ in range(3):  # what an earlier step left must not matter
        tokens = MAPPINGS[mapping](rng, ids_by_slot)
        samples = random_ids(rng, ids_by_slot, 5)
        update(wrapper, tokens, samples, ids_by_slot, kind)
        x, y = draw(rng, len(tokens) + 4, INPUT), draw(rng, len(tokens) + 4, sum(WIDTHS))
        slots = [slot_of(each, ids_by_slot) for each in tokens] + [NO_LORA] * 4  # a graph's padding

        got = y.clone()
        wrapper.add_lora_linear(got, x, lora_a, lora_b, 1.0, WIDTHS)
        expected = oracle(y, x, lora_a, lora_b, slots)
        torch.testing.assert_close(got, expected)
        plain = [row for row, slot in enumerate(slots) if slot == NO_LORA]
        assert torch.equal(got[plain], y[plain]), "plain rows are not touched at all"

        in_two = y.clone()
        shrunk = torch.full((len(WIDTHS), len(x), RANK), 99.0)
        wrapper.add_shrink(shrunk, x, lora_a, 1.0)
        wrapper.add_expand(in_two, shrunk, lora_b, WIDTHS)
        torch.testing.assert_close(in_two, expected)

        rows = len(samples)
        got = y[:rows].clone()
        wrapper.add_lora_logits(got[:, :8], x[:rows], lora_a[0], lora_b[0], 1.0)
        sampled = [slot_of(each, ids_by_slot) for each in samples]
        expected = oracle(y[:rows], x[:rows], lora_a[:1], lora_b[:1], sampled)
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("num_slots", SLOTS_TO_IDS)
def test_embeddings_are_looked_up_in_the_row_s_own_adapter(seed, num_slots):
    rng, ids_by_slot = np.random.default_rng(seed), SLOTS_TO_IDS[num_slots]
    wrapper = wrapper_of(num_slots)
    tables = draw(rng, num_slots, VOCAB, RANK)
    (lora_b,) = weights(rng, num_slots, (8,))[1]
    lora_ids, input_ids = random_ids(rng, ids_by_slot, 15), rng.integers(0, VOCAB, 15)
    update(wrapper, lora_ids, [], ids_by_slot)
    slots = [slot_of(each, ids_by_slot) for each in lora_ids]
    y = draw(rng, 15, 8)
    # As vLLM's layer does it.
    indices = torch.from_numpy(input_ids).int() + wrapper._embeddings_indices[:15]
    x = torch.nn.functional.embedding(indices, tables.flatten(0, 1))
    got = y.clone()
    wrapper.add_lora_embedding(got, x, lora_b, add_input=True)
    own = torch.stack([tables[slot, token] for slot, token in zip(slots, input_ids)])
    torch.testing.assert_close(got, oracle(y, own, (), (lora_b,), slots))


def test_infinities_of_another_adapter_are_dropped(seed):
    rng, ids_by_slot = np.random.default_rng(seed), SLOTS_TO_IDS[3]
    wrapper = wrapper_of(3)
    lora_a, lora_b = weights(rng, 3, (8,))
    lora_a[0][2] = torch.finfo(torch.float32).max
    update(wrapper, [7, 0, 7], [], ids_by_slot)
    x, y = draw(rng, 3, INPUT), torch.zeros(3, 8)
    wrapper.add_lora_linear(y, x, lora_a, lora_b, 1.0, (8,))
    assert torch.isfinite(y).all()
    assert y[[0, 2]].all() and not y[1].any()


@pytest.mark.parametrize(
    ("model", "lora"), [(torch.bfloat16, torch.float16), (torch.float16, torch.float16)]
)
def test_adapters_of_another_dtype(seed, model, lora):
    rng, ids_by_slot = np.random.default_rng(seed), SLOTS_TO_IDS[3]
    wrapper = wrapper_of(3)
    lora_a, lora_b = ([each.to(lora) for each in kind] for kind in weights(rng, 3))
    tokens = random_ids(rng, ids_by_slot, 12)
    update(wrapper, tokens, [], ids_by_slot)
    x, y = draw(rng, 12, INPUT).to(model), draw(rng, 12, sum(WIDTHS)).to(model)
    slots = [slot_of(each, ids_by_slot) for each in tokens]
    exact = oracle(
        y.float(), x.float(), [a.float() for a in lora_a], [b.float() for b in lora_b], slots
    )
    wrapper.add_lora_linear(y, x, lora_a, lora_b, 1.0, WIDTHS)
    torch.testing.assert_close(y.float(), exact, rtol=0.02, atol=0.1)


def test_a_whole_linear_layer_of_an_adapter(seed):
    """A classification head: rows of adapters that have one, and only these, are replaced."""
    rng, ids_by_slot = np.random.default_rng(seed), SLOTS_TO_IDS[4]
    wrapper = wrapper_of(4)
    lora_ids = [7, 0, 5, 9, 5]
    update(wrapper, lora_ids, lora_ids, ids_by_slot)
    weight, bias = draw(rng, 4, 2, INPUT), draw(rng, 4, 2)
    enabled = torch.tensor([True, False, True, True])
    x, y = draw(rng, 5, INPUT), draw(rng, 5, 2)
    expected = y.clone()
    for row, lora_id in enumerate(lora_ids):
        slot = slot_of(lora_id, ids_by_slot)
        if slot != NO_LORA and enabled[slot]:
            expected[row] = weight[slot] @ x[row] + bias[slot]
    wrapper.apply_lora_full_linear(y, x, weight, bias, enabled)
    torch.testing.assert_close(y, expected)


def test_logits_of_one_request(seed):
    """Prompts are scored by rows of one request, more than the step samples."""
    rng, ids_by_slot = np.random.default_rng(seed), SLOTS_TO_IDS[3]
    wrapper = wrapper_of(3)
    lora_a, lora_b = weights(rng, 3, (8,))
    update(wrapper, [5] * 9, [5], ids_by_slot)
    x, y = draw(rng, 9, INPUT), draw(rng, 9, 8)
    for slot in (1, NO_LORA):
        with wrapper.logits_of(slot):
            got = y.clone()
            wrapper.add_lora_logits(got, x, lora_a[0], lora_b[0], 1.0)
        torch.testing.assert_close(got, oracle(y, x, lora_a, lora_b, [slot] * 9))
    got = y[:1].clone()
    wrapper.add_lora_logits(got, x[:1], lora_a[0], lora_b[0], 1.0)
    torch.testing.assert_close(got, oracle(y[:1], x[:1], lora_a, lora_b, [2]))


def test_what_graphs_read_stays_where_it_lies():
    wrapper = wrapper_of(3)
    places = [each.data_ptr() for each in wrapper.graph_inputs().values()]
    for tokens in ([7] * 20, [0], [5, 7]):
        update(wrapper, tokens, tokens, SLOTS_TO_IDS[3])
        assert wrapper.is_active == any(tokens)
        assert [each.data_ptr() for each in wrapper.graph_inputs().values()] == places
        assert len(wrapper.token_lora_indices) == len(tokens)
        assert (wrapper._token_lora_indices[len(tokens) :] == NO_LORA).all()


def test_a_mapping_is_equal_to_one_of_the_same_rows_only():
    def mapping(tokens, samples):
        return StepLoRAMapping(np.array(tokens), np.array(samples), is_prefill=True)

    same = mapping([1, 1, 0], [1, 0])
    assert same == mapping([1, 1, 0], [1, 0])
    for other in (
        mapping([1, 0, 0], [1, 0]),
        mapping([1, 1, 0], [0, 1]),
        mapping([1, 1, 0, 0], [1, 0]),
        LoRAMapping((1, 1, 0), (1, 0), is_prefill=True),
        None,
    ):
        assert same != other and other != same
