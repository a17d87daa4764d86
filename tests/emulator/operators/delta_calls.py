"""Valid calls of both forms of the gated delta rule, and calls that break one demand each."""

import torch

from ascend_emulator.operators.delta_rule import CHUNK, RECURRENT
from tests.emulator.operators.calls import call, spoiled, strided

DIM = 128


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def rule_arguments(lengths, seed=0, key_heads=2, value_heads=4, dim=DIM):
    """What both forms take: queries, keys, values, decays and rates of sequences."""
    generator = torch.Generator().manual_seed(seed)
    tokens = sum(lengths)

    def random(*shape):
        return torch.randn(*shape, generator=generator)

    query, key = (
        torch.nn.functional.normalize(random(tokens, key_heads, dim), dim=-1).bfloat16()
        for _ in range(2)
    )
    return {
        "query": query,
        "key": key,
        "value": random(tokens, value_heads, dim).bfloat16(),
        "beta": random(tokens, value_heads).sigmoid().bfloat16(),
        "g": -random(tokens, value_heads).exp(),
        "actual_seq_lengths": int32(*lengths),
        "scale": dim**-0.5,
    }


def recurrent_arguments(lengths=(1, 3, 1), seed=0, blocks=9, **sizes):
    """Three sequences whose states are anywhere in the cache."""
    generator = torch.Generator().manual_seed(seed + 1)
    arguments = rule_arguments(lengths, seed, **sizes)
    tokens, heads, dim = arguments["value"].shape
    indices = torch.randperm(blocks - 1, generator=generator)[:tokens] + 1
    return {
        **arguments,
        "state": torch.randn(blocks, heads, dim, dim, generator=generator).bfloat16(),
        "ssm_state_indices": indices.int(),
    }


def chunk_arguments(lengths=(70, 1, 9), seed=0, **sizes):
    """Three sequences, one of them longer than a chunk."""
    generator = torch.Generator().manual_seed(seed + 2)
    arguments = rule_arguments(lengths, seed, **sizes)
    _, heads, dim = arguments["value"].shape
    state = torch.randn(len(lengths), heads, dim, dim, generator=generator).bfloat16()
    return {**arguments, "initial_state": state}


def recurrent(changes=None, **functions):
    arguments = recurrent_arguments() | (changes or {})
    return lambda: call(RECURRENT, spoiled(arguments, **functions))


def chunk(changes=None, **functions):
    arguments = chunk_arguments((3, 1)) | (changes or {})
    return lambda: call(CHUNK, spoiled(arguments, **functions))


def missing(build, *names):
    return [build({name: None}) for name in names]


def of_size(**sizes):
    return lambda: call(RECURRENT, recurrent_arguments((1, 1), blocks=4, **sizes))


def chunk_of_size(**sizes):
    return lambda: call(CHUNK, chunk_arguments((1, 1), **sizes))


RECURRENT_VIOLATIONS = {
    "dtype": [recurrent(**{n: torch.Tensor.half}) for n in ("query", "key", "value", "beta")],
    "dtype of states": [recurrent(state=torch.Tensor.float)],
    "all given": missing(recurrent, "beta", "scale", "actual_seq_lengths", "ssm_state_indices"),
    "shapes": [
        recurrent(key=lambda k: k[:, :1]),
        recurrent(beta=lambda b: b[:, :1]),
        recurrent(state=lambda s: s[:, :2].contiguous()),
        recurrent(query=lambda q: q.flatten(1)),
    ],
    "heads": [
        of_size(key_heads=3, value_heads=4, dim=16),
        of_size(key_heads=1, value_heads=257, dim=16),
        of_size(key_heads=1, value_heads=1, dim=272),
    ],
    "room for all tokens": [
        recurrent({"ssm_state_indices": int32(1, 2, 3, 3, 0)}, state=lambda s: s[:4])
    ],
    "contiguous states": [recurrent(state=strided)],
    "integers": [
        recurrent(actual_seq_lengths=torch.Tensor.long),
        recurrent(ssm_state_indices=lambda i: i[1:]),
        recurrent({"num_accepted_tokens": int32(1, 1)}),
    ],
    "lengths": [
        recurrent({"actual_seq_lengths": int32(1, 3, 2)}),
        recurrent({"actual_seq_lengths": int32(5, 0, 0)}),
        lambda: call(RECURRENT, recurrent_arguments((9,), blocks=12)),
    ],
    "accepted": [
        recurrent({"num_accepted_tokens": int32(1, 4, 1)}),
        recurrent({"num_accepted_tokens": int32(0, 1, 1)}),
    ],
    "state indices": [
        recurrent({"ssm_state_indices": int32(1, 2, 3, 4, 9)}),
        recurrent({"ssm_state_indices": int32(1, 2, 3, 4, -1)}),
    ],
    "one sequence a state": [recurrent({"ssm_state_indices": int32(1, 2, 3, 4, 1)})],
    "lengths of vectors": [recurrent(query=lambda q: q * 9), recurrent(key=lambda k: k * 9)],
    "decays": [
        recurrent(g=torch.Tensor.neg),
        recurrent(g=torch.Tensor.bfloat16),
        recurrent(g=lambda g: g[:, :1]),
    ],
    "rates": [recurrent(beta=lambda b: b + 1), recurrent(beta=torch.Tensor.neg)],
    "no decays of elements": [recurrent({"gk": torch.zeros(5, 4, DIM)})],
}

CHUNK_VIOLATIONS = {
    "dtype": [
        chunk(**{name: torch.Tensor.half})
        for name in ("query", "key", "value", "beta", "initial_state")
    ],
    "all given": missing(chunk, "beta", "initial_state", "actual_seq_lengths", "scale"),
    "shapes": [
        chunk(key=lambda k: k[1:]),
        chunk(initial_state=lambda s: s[:1]),
        chunk(beta=lambda b: b[:, :1]),
    ],
    "heads": [
        chunk_of_size(key_heads=3, value_heads=4),
        chunk_of_size(key_heads=1, value_heads=65),
        chunk_of_size(dim=64),
    ],
    "lengths": [
        chunk({"actual_seq_lengths": int32(3, 2)}),
        chunk({"actual_seq_lengths": int32(4, 0)}),
        chunk(actual_seq_lengths=torch.Tensor.long),
    ],
    "decays": [chunk(g=torch.Tensor.neg), chunk(g=torch.Tensor.double)],
}
