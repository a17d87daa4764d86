"""Valid calls of both forms of the gated delta rule, and calls that break one demand each."""

import torch

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
