"""Gated delta nets: transformers' forms, and steps over a cache that others have written to."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

from vllm_npu_prep.attention.gated_delta import AscendGatedDeltaNetAttention
from vllm_npu_prep.attention.kernels import torch_delta
from vllm_npu_prep.attention.recurrent_backend import RecurrentMetadata
from vllm_npu_prep.prep.state import AttentionState

K_HEADS, V_HEADS, KEY, VALUE, KERNEL = 2, 4, 6, 5, 4
WIDTH = 2 * K_HEADS * KEY + V_HEADS * VALUE
BLOCKS = 12
METHODS = (
    "forward_core",
    "_decode",
    "_decode_drafts",
    "_prefill",
    "_parts",
    "_before",
    "_keep",
    "_convolution",
    "_rule_inputs",
)
DRAFTS = 3


def given_tokens(generator: torch.Generator, num_tokens: int) -> tuple[torch.Tensor, ...]:
    """What a core gets of some tokens: queries, keys and values; b; a."""
    sizes = WIDTH, V_HEADS, V_HEADS
    return tuple(torch.randn(num_tokens, size, generator=generator) for size in sizes)


def make_layer(seed: int) -> Any:
    """What `forward_core` reads of a layer; its cache holds not-a-numbers."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(WIDTH, 1, KERNEL, generator=generator)
    layer = SimpleNamespace(
        conv1d=SimpleNamespace(weight=weight, bias=None),
        A_log=torch.randn(V_HEADS, generator=generator),
        dt_bias=torch.randn(V_HEADS, generator=generator),
        fused=None,
        conv_kernel_size=KERNEL,
        head_k_dim=KEY,
        head_v_dim=VALUE,
        kv_cache=(
            torch.full((BLOCKS, KERNEL - 1, WIDTH), torch.nan),
            torch.full((BLOCKS, V_HEADS, VALUE, KEY), torch.nan),
        ),
    )
    for name in METHODS:
        method = getattr(AscendGatedDeltaNetAttention, name)
        setattr(layer, name, method.__get__(layer))
    return layer


def inputs_of(layer: Any, mixed: torch.Tensor, b: torch.Tensor, a: torch.Tensor) -> Any:
    parameters = layer.A_log, layer.dt_bias, KEY, VALUE
    return torch_delta.rule_inputs(mixed, a, b, *parameters)


def plain_reading(layer: Any, mixed: torch.Tensor, b: torch.Tensor, a: torch.Tensor) -> np.ndarray:
    """Outputs of one whole sequence, token by token in float64: ``[T, V_HEADS, VALUE]``."""
    mixed, b, a = (each.double().numpy() for each in (mixed, b, a))
    weight = layer.conv1d.weight[:, 0].double().numpy()
    a_log, dt_bias = layer.A_log.double().numpy(), layer.dt_bias.double().numpy()
    padded = np.concatenate((np.zeros((KERNEL - 1, WIDTH)), mixed))
    states = np.zeros((V_HEADS, VALUE, KEY))
    outputs = np.zeros((len(mixed), V_HEADS, VALUE))
    for token in range(len(mixed)):
        x = (padded[token : token + KERNEL] * weight.T).sum(0)
        x = x / (1 + np.exp(-x))
        queries, keys = x[: 2 * K_HEADS * KEY].reshape(2, K_HEADS, KEY)
        values = x[2 * K_HEADS * KEY :].reshape(V_HEADS, VALUE)
        for head in range(V_HEADS):
            of_keys = head // (V_HEADS // K_HEADS)
            query, key = queries[of_keys], keys[of_keys]
            query = query / np.sqrt((query**2).sum() + 1e-6) / np.sqrt(KEY)
            key = key / np.sqrt((key**2).sum() + 1e-6)
            decay = -np.exp(a_log[head]) * np.log1p(np.exp(a[token, head] + dt_bias[head]))
            state = states[head] * np.exp(decay)
            rate = 1 / (1 + np.exp(-b[token, head]))
            state += rate * np.outer(values[head] - state @ key, key)
            states[head] = state
            outputs[token, head] = state @ query
    return outputs


@pytest.mark.parametrize("num_tokens", [1, 3, 64, 65, 150])
def test_both_forms_equal_transformers(num_tokens, seed):
    generator = torch.Generator().manual_seed(seed + num_tokens)
    layer = make_layer(seed)
    mixed, b, a = given_tokens(generator, num_tokens)
    given = inputs_of(layer, mixed, b, a)
    state = torch.randn(V_HEADS, VALUE, KEY, generator=generator)
    width = K_HEADS * KEY
    query, key, value = (
        each.unflatten(-1, (-1, size)).unsqueeze(0)
        for each, size in zip(mixed.split([width, width, V_HEADS * VALUE], -1), (KEY, KEY, VALUE))
    )
    repeats = V_HEADS // K_HEADS
    query, key = (each.repeat_interleave(repeats, 2) for each in (query, key))
    ours = {"chunk": torch_delta.scan(given, state)}
    outputs, states = [], state.unsqueeze(0)
    for token in range(num_tokens):
        output, states = torch_delta.update_states(given.of_tokens(slice(token, token + 1)), states)
        outputs.append(output)
    ours["recurrent"] = torch.cat(outputs), states[0]
    for form, (output, last) in ours.items():
        expected, final = getattr(qwen3_next, f"torch_{form}_gated_delta_rule")(
            query,
            key,
            value,
            g=given.decay.unsqueeze(0),
            beta=given.rate.unsqueeze(0),
            initial_state=state.transpose(1, 2).unsqueeze(0),
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        torch.testing.assert_close(output, expected[0], rtol=1e-4, atol=1e-5, msg=form)
        torch.testing.assert_close(last, final[0].transpose(1, 2), rtol=1e-4, atol=1e-5, msg=form)


def metadata_of(
    rows: list[tuple[int, int, int, int]], full_graph_rows: int = 0
) -> RecurrentMetadata:
    """Metadata of requests: computed and scheduled tokens, block read and block written."""
    counts = [scheduled for _, scheduled, _, _ in rows]
    decodes = 0
    while decodes < len(rows) and counts[decodes] == 1:
        decodes += 1
    padding = [0] * (full_graph_rows - len(rows)) if full_graph_rows else []
    starts = torch.tensor([0, *np.cumsum(counts + [1] * len(padding))], dtype=torch.int32)
    prefills = starts[decodes:] - starts[decodes] if not full_graph_rows else starts[:1]
    return RecurrentMetadata(
        AttentionState.ChunkedPrefill,
        torch.tensor([read for _, _, read, _ in rows] + padding, dtype=torch.int32),
        torch.tensor([write for _, _, _, write in rows] + padding, dtype=torch.int32),
        torch.tensor([computed > 0 for computed, _, _, _ in rows] + [False] * len(padding)),
        starts,
        prefills,
        prefills[1:].tolist(),
        full_graph_rows or decodes,
        full_graph_rows or decodes,
        sum(counts),
        int(starts[-1]),
        bool(full_graph_rows),
    )


@pytest.mark.parametrize("moves", [False, True], ids=["one block", "a block after another"])
def test_steps_of_requests_equal_a_plain_reading_of_each(moves, seed):
    """Decodes, chunks and prompts in one step; requests that end, and others in their blocks.

    No block is ever cleared, and all hold not-a-numbers at first.
    """
    rng = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    layer = make_layer(seed)
    free = list(range(1, BLOCKS))
    running: list[dict[str, Any]] = []
    finished = in_graphs = reused = 0
    used: set[int] = set()
    for _ in range(60):
        while len(running) < 4 and rng.random() < 0.6:
            mixed, b, a = given_tokens(generator, int(rng.integers(2, 90)))
            expected = plain_reading(layer, mixed, b, a)
            block = free.pop(int(rng.integers(len(free))))
            reused += block in used
            used.add(block)
            running.append({"tokens": (mixed, b, a), "expected": expected, "at": 0, "block": block})
        for request in running:
            left = len(request["expected"]) - request["at"]
            request["count"] = 1 if rng.random() < 0.5 else int(rng.integers(1, left + 1))
            request["written"] = request["block"]
            if moves and request["at"] and rng.random() < 0.3:
                request["written"] = free.pop()
        running.sort(key=lambda request: request["count"] > 1)
        if not running:
            continue
        rows = [(r["at"], r["count"], r["block"], r["written"]) for r in running]
        all_decode = all(count == 1 for _, count, _, _ in rows)
        padded = len(rows) + 2 if all_decode else 0
        in_graphs += all_decode
        metadata = metadata_of(rows, padded)
        before = [cache.clone() for cache in layer.kv_cache]
        parts = [
            torch.cat([r["tokens"][i][r["at"] : r["at"] + r["count"]] for r in running])
            for i in range(3)
        ]
        extra = metadata.num_input_tokens - metadata.num_actual_tokens + (0 if padded else 2)
        mixed, b, a = (torch.cat((p, torch.randn(extra, p.shape[1]))) for p in parts)
        output = torch.full((len(mixed), V_HEADS, VALUE), 7.0)
        layer.forward_core(mixed, b, a, output, metadata)
        start = 0
        for request in running:
            end = request["at"] + request["count"]
            expected = request["expected"][request["at"] : end]
            got = output[start : start + request["count"]].numpy()
            np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-4)
            start, request["at"] = start + request["count"], end
        assert padded or (output[start:] == 7).all(), "padding is not written"
        written = {0, *(row[3] for row in rows)} if padded else {row[3] for row in rows}
        others = [block for block in range(BLOCKS) if block not in written]
        for cache, old in zip(layer.kv_cache, before):
            assert torch.equal(cache[others].nan_to_num(9), old[others].nan_to_num(9))
        for request in list(running):
            if request["written"] != request["block"]:
                free.append(request["block"])
                request["block"] = request["written"]
            if request["at"] == len(request["expected"]):
                running = [each for each in running if each is not request]
                free.append(request["block"])
                finished += 1
    assert finished > 5 and in_graphs > 3 and reused > 3


@pytest.mark.parametrize("uniform", [True, False], ids=["as many drafts", "fewer drafts"])
def test_rejected_drafts_leave_nothing(uniform, seed):
    """Each step continues after the tokens that count, whatever drafts came after them.

    A request has a block for each token of a step. In uniform steps there is padding, as in a full
    graph; in others a request may have fewer drafts than tokens of its last step count.
    """
    rng = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    layer = make_layer(seed)
    requests: list[dict[str, Any]] = []
    for index in range(2):
        mixed, b, a = given_tokens(generator, 40)
        blocks = [1 + index * (1 + DRAFTS) + i for i in range(1 + DRAFTS)]
        expected = plain_reading(layer, mixed, b, a)
        requests.append({"tokens": (mixed, b, a), "expected": expected, "at": 0, "blocks": blocks})
        requests[-1]["kept"] = 1
    kept_counts = set()
    for _ in range(10):
        for request in requests:
            most = 1 + DRAFTS
            request["count"] = most if uniform else int(rng.integers(1, most + 1))
            request["next"] = int(rng.integers(1, request["count"] + 1))
        padding = 1 if uniform else 0
        counts = [r["count"] for r in requests] + [1 + DRAFTS] * padding
        starts = torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32)
        total = int(starts[-1])
        reads = [r["blocks"][r["kept"] - 1] for r in requests] + [0] * padding
        of_tokens = [block for r in requests for block in r["blocks"][: r["count"]]]
        of_tokens += [0] * (total - len(of_tokens))
        metadata = RecurrentMetadata(
            AttentionState.SpecDecoding,
            torch.tensor(reads, dtype=torch.int32),
            torch.tensor([r["blocks"][0] for r in requests] + [0] * padding, dtype=torch.int32),
            torch.tensor([r["at"] > 0 for r in requests] + [False] * padding),
            starts,
            starts[:1],
            [],
            len(counts),
            total,
            total,
            total,
            uniform,
            token_state_indices=torch.tensor(of_tokens, dtype=torch.int32),
            num_accepted_tokens=torch.tensor([r["kept"] for r in requests] + [1] * padding),
            decode_lens=counts,
        )
        drafted = given_tokens(generator, total)
        for place, request in enumerate(requests):
            first, at, kept = int(starts[place]), request["at"], request["next"]
            for part, tokens in zip(drafted, request["tokens"]):
                part[first : first + kept] = tokens[at : at + kept]
        output = torch.full((total, V_HEADS, VALUE), 7.0)
        layer.forward_core(*drafted, output, metadata)
        for place, request in enumerate(requests):
            first, at, kept = int(starts[place]), request["at"], request["next"]
            got = output[first : first + kept].numpy()
            wanted = request["expected"][at : at + kept]
            np.testing.assert_allclose(got, wanted, rtol=1e-3, atol=1e-4)
            kept_counts.add((kept, request["count"]))
            request["at"], request["kept"] = at + kept, kept
            if request["at"] > 40 - 1 - DRAFTS:
                request["at"] = 0
    assert {kept for kept, _ in kept_counts} == set(range(1, 2 + DRAFTS))
