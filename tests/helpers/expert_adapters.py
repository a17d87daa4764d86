"""Random adapters of a layer's experts, what merged weights make of them, and engines' adapters
that come and go.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch.nn import functional

from tests.helpers.engine import greedy
from tests.helpers.life_cycle import LifeCycle
from tests.helpers.traffic import Traffic
from vllm_npu_prep.ops.moe_lora import AdaptersOfExperts

RANK = 4


def draw_adapters(
    generator: torch.Generator,
    slots: list[int],
    num_slots: int,
    w13: torch.Tensor,  # [experts, 2 * inner, hidden]
    w2: torch.Tensor,  # [experts, hidden, inner]
    slices: int = 2,
) -> AdaptersOfExperts:
    """Adapters in all slots, with gates and ups apart or as one matrix; -1 is a token without."""

    def normal(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) / 2).to(w13.dtype)

    experts, outputs, hidden = w13.shape
    inner = w2.shape[2]
    layer = SimpleNamespace(
        w13_lora_a_stacked=[normal(num_slots, experts, RANK, hidden) for _ in range(slices)],
        w13_lora_b_stacked=[
            normal(num_slots, experts, outputs // slices, RANK) for _ in range(slices)
        ],
        w2_lora_a_stacked=[normal(num_slots, experts, RANK, inner)],
        w2_lora_b_stacked=[normal(num_slots, experts, hidden, RANK)],
        fully_sharded=False,
        tp_size=1,
        tp_rank=0,
    )
    foreign = torch.tensor(slots)[:, None, None] != torch.arange(num_slots)[:, None]
    wrapper = SimpleNamespace(is_active=True, foreign_tokens=foreign)
    return AdaptersOfExperts(layer, wrapper)  # type: ignore[arg-type]


def by_expert(adapters: AdaptersOfExperts, share: Any = slice(None), device: str = "cpu") -> Any:
    """The adapters of some experts as the layer keeps them in memory, on a device."""
    held = vars(adapters.layer).copy()
    for name, order, back in (("a", (1, 0, 2, 3), (1, 0, 2, 3)), ("b", (1, 2, 0, 3), (2, 0, 1, 3))):
        for product in ("w13", "w2"):
            key = f"{product}_lora_{name}_stacked"
            held[key] = [
                each[:, share].permute(order).contiguous().to(device).permute(back)
                for each in held[key]
            ]
    wrapper = SimpleNamespace(is_active=True, foreign_tokens=adapters.foreign.to(device))
    return AdaptersOfExperts(SimpleNamespace(**held), wrapper)  # type: ignore[arg-type]


def by_merged_weights(
    x: torch.Tensor,  # [T, hidden]
    w13: torch.Tensor,
    w2: torch.Tensor,
    weights: torch.Tensor,  # [T, k]
    ids: torch.Tensor,  # [T, k]; below 0 or from `experts` on: none
    adapters: AdaptersOfExperts,
    share: Any = None,  # experts of this rank; None: all
) -> torch.Tensor:
    """Each token through each of its experts in float64, with W + B A of its own adapter."""
    layer, output = adapters.layer, torch.zeros(x.shape, dtype=torch.float64)
    for token, row in enumerate(x.double()):
        own = (~adapters.foreign[token, :, 0]).nonzero().flatten().tolist()
        for weight, expert in zip(weights[token].tolist(), ids[token].tolist()):
            if not 0 <= expert < len(w13) or (share is not None and expert not in share):
                continue
            up, down = w13[expert].double(), w2[expert].double()
            for slot in own:
                pairs = zip(layer.w13_lora_a_stacked, layer.w13_lora_b_stacked)
                up = up + torch.cat(
                    [b[slot, expert].double() @ a[slot, expert].double() for a, b in pairs]
                )
                (a,), (b,) = layer.w2_lora_a_stacked, layer.w2_lora_b_stacked
                down = down + b[slot, expert].double() @ a[slot, expert].double()
            gate, upper = (up @ row).chunk(2)
            output[token] += weight * (down @ (functional.silu(gate) * upper))
    return output


def come_and_go(
    llm: Any, prompts: dict[str, list[int]], adapters: dict[str, Any], seed: int
) -> dict[str, list[int]]:
    """Sixteen tokens of each request, whose adapter may be None; "goes" is given up before.

    While "stays", "plain" and "goes" run, the last one's adapter makes room for that of "comes".
    "returns" begins after a sleep of level 1, and then the engine sleeps at level 2.
    """
    core, said = llm.llm_engine, dict[str, list[int]]()

    def begin(*asked: str) -> None:
        for each in asked:
            prompt = {"prompt_token_ids": prompts[each]}
            core.add_request(each, prompt, greedy(16), lora_request=adapters[each])

    def step(times: int = 1) -> None:
        for _ in range(times):
            for output in core.step():
                said[output.request_id] = list(output.outputs[0].token_ids)

    begin("stays", "plain", "goes")
    step(6)
    core.abort_request(["goes"])
    core.remove_lora(adapters["goes"].lora_int_id)
    core.add_lora(adapters["comes"])
    begin("comes")
    step(3)
    assert {"stays", "plain", "goes", "comes"} == set(said)
    life_cycle = LifeCycle(llm, Traffic((seed, 63)), step)
    life_cycle.sleep(1)
    begin("returns")
    step(2)
    life_cycle.sleep(2)
    while core.has_unfinished_requests():
        step()
    assert life_cycle.count.items() >= {f"sleeps at level {n}": 1 for n in (1, 2)}.items()
    return said
