"""Both forms of the gated delta rule against a plain reading in float64."""

import numpy as np
import pytest
import torch

from ascend_emulator.operators.delta_rule import CHUNK, RECURRENT
from tests.emulator.operators.calls import call
from tests.emulator.operators.delta_calls import chunk_arguments, int32, recurrent_arguments


def reading(arguments, token, state):
    """The state of all heads after a token, and its outputs, in loops over heads."""
    query, key, value, beta, g = (
        arguments[name][token].double().numpy() for name in ("query", "key", "value", "beta", "g")
    )
    group = len(value) // len(query)
    outputs = []
    for head, rows in enumerate(state):
        k, q = key[head // group], query[head // group] * arguments["scale"]
        rows *= np.exp(g[head])
        rows += beta[head] * np.outer(value[head] - rows @ k, k)
        outputs.append(rows @ q)
    return np.stack(outputs)


def close(got, wanted):
    wanted = torch.from_numpy(np.asarray(wanted))
    torch.testing.assert_close(got.double(), wanted, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("accepted", [None, (1, 2, 1)], ids=["decodes", "drafts"])
def test_the_recurrent_form(accepted, seed):
    """Each token's state is written to its own block; the first is the last accepted one's."""
    arguments = recurrent_arguments(seed=seed)
    if accepted is not None:
        arguments["num_accepted_tokens"] = int32(*accepted)
    states, indices = arguments["state"].double().numpy(), arguments["ssm_state_indices"].tolist()
    outputs, start = [], 0
    wanted = states.copy()
    for length, count in zip((1, 3, 1), accepted or (1, 1, 1)):
        state = states[indices[start + count - 1]].copy()
        for token in range(start, start + length):
            outputs.append(reading(arguments, token, state))
            wanted[indices[token]] = state
        start += length
    got = call(RECURRENT, arguments)
    close(got, np.stack(outputs))
    close(arguments["state"], wanted)


def test_the_chunk_form(seed):
    """Sequences longer than a chunk, and one of a single token; the states given stay."""
    arguments = chunk_arguments(seed=seed)
    given = arguments["initial_state"].clone()
    outputs, finals, start = [], [], 0
    for state, length in zip(given.double().numpy().copy(), (70, 1, 9)):
        outputs += [reading(arguments, token, state) for token in range(start, start + length)]
        finals.append(state)
        start += length
    got, final = call(CHUNK, arguments)
    close(got, np.stack(outputs))
    close(final, np.stack(finals))
    assert torch.equal(arguments["initial_state"], given)


def test_without_decays_nothing_is_forgotten(seed):
    arguments = recurrent_arguments(seed=seed)
    zeros = {**arguments, "state": arguments["state"].clone(), "g": arguments["g"] * 0}
    none = {**arguments, "state": arguments["state"].clone(), "g": None}
    assert torch.equal(call(RECURRENT, zeros), call(RECURRENT, none))
