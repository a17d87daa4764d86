"""Engines whose experts move among ranks, and what each rank has of them."""

import os
import signal
from hashlib import blake2b
from typing import Any

from tests.helpers.ranks import RankProbe, Ranks


def moving(interval: int, **config: Any) -> dict[str, Any]:
    """Settings of an engine that exchanges experts after so many steps, with two to spare."""
    given = {"num_redundant_experts": 2, "step_interval": interval, "window_size": interval}
    return {
        "enable_expert_parallel": True,
        "enable_eplb": True,
        "eplb_config": {**given, **config},
        "worker_extension_cls": f"{__name__}.ExpertProbe",
    }


class ExpertProbe(RankProbe):
    """Adds where a rank's experts are, and their weights."""

    def probe_experts(self) -> dict[str, Any]:
        """The map and the load of each layer, and a digest of each physical expert of this rank."""
        (state,) = self.model_runner.eplb_state.model_states.values()
        return {
            "map": state.physical_to_logical_map.tolist(),
            "load": state.expert_load_window.sum(0).tolist(),
            "weights": [
                [
                    digest_of([each[expert] for each in of_layer])
                    for expert in range(len(of_layer[0]))
                ]
                for of_layer in state.model.expert_weights
            ],
        }

    def probe_end_in_exchange(self, how: str) -> None:
        """Let the second rank end, by itself or by an error, when it sends its next experts."""
        (state,) = self.model_runner.eplb_state.model_states.values()

        def execute() -> None:
            if how == "fails":
                raise RuntimeError("no memory")
            os.kill(os.getpid(), signal.SIGKILL)

        if self.rank == 1:
            state.communicator.execute = execute


def digest_of(tensors: list[Any]) -> str:
    import torch

    data = (each.cpu().view(torch.uint8).numpy().tobytes() for each in tensors)
    return blake2b(b"".join(data)).hexdigest()


async def exchanged(ranks: Ranks, prompts: list[list[int]], num_tokens: int) -> dict[str, Any]:
    """Tokens of some rounds, and where experts were before each and at the end."""
    tokens, experts = [], [await ranks.ask("probe_experts")]
    for _ in range(3):
        tokens.append(await ranks.generate(prompts, num_tokens))
        experts.append(await ranks.ask("probe_experts"))
    return {"tokens": tokens, "experts": experts}


def placed(experts: list[dict[str, Any]]) -> list[list[str]]:
    """The weights of each layer's physical experts, those of all ranks one after the other."""
    of_ranks = [rank["weights"] for rank in experts]
    return [[each for rank in of_layer for each in rank] for of_layer in zip(*of_ranks)]


def assert_weights_follow_the_map(experts: list[list[dict[str, Any]]]) -> None:
    """From the first look on, on all ranks, and maps change."""
    first, *others = experts
    known = [
        dict(zip(row, weights)) for row, weights in zip(first[0]["map"], placed(first), strict=True)
    ]
    assert all(len(set(of_layer.values())) == len(of_layer) > 1 for of_layer in known)
    for look in (first, *others):
        the_map = look[0]["map"]
        assert all(rank["map"] == the_map for rank in look)
        expected = [[of[e] for e in row] for of, row in zip(known, the_map, strict=True)]
        assert placed(look) == expected
    assert others[-1][0]["map"] != first[0]["map"]
