"""What transformers makes of prompts for pooling models, a prompt at a time in float32."""

from pathlib import Path
from typing import Any

import torch

from tests.helpers.quantized import round_modules, tensors_in


def hidden_states(
    folder: Path, prompts: list[list[int]], both_ways: bool = False, int8: Path | None = None
) -> list:
    """Last hidden states of each prompt, float32 ``[len(prompt), hidden_size]``.

    `both_ways` shows a causal model all tokens. `int8` is a copy by whose weights, and with whose
    rounded inputs, the model is to compute.
    """
    from transformers import AutoModel

    hf = AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    if int8 is not None:
        round_modules(hf, tensors_in(int8))
    states = []
    with torch.no_grad():
        for prompt in prompts:
            mask: Any = torch.zeros(1, 1, len(prompt), len(prompt)) if both_ways else None
            output = hf(input_ids=torch.tensor([prompt]), attention_mask=mask)
            states.append(output.last_hidden_state[0])
    return states


def normalized(rows: torch.Tensor) -> torch.Tensor:
    """Rows of length 1, as vLLM returns embeddings."""
    return torch.nn.functional.normalize(rows, dim=-1)


def pooled(llm: Any, prompts: list[list[int]], task: str, params: Any = None) -> list[torch.Tensor]:
    """What the engine makes of prompts given as token ids."""
    outputs = llm.encode(
        [{"prompt_token_ids": prompt} for prompt in prompts],
        params,
        pooling_task=task,
        use_tqdm=False,
    )
    return [output.outputs.data.float() for output in outputs]


def check_close(
    got: list[torch.Tensor], expected: list[torch.Tensor], tolerance: float = 1e-4
) -> None:
    """Equal within a tolerance, and expected to differ between prompts: else a weak oracle."""
    assert len(got) == len(expected)
    for one, other in zip(got, expected):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
    last = torch.stack([each.reshape(-1, each.shape[-1])[-1] for each in expected])
    apart = (last[:, None] - last[None]).abs().amax(-1)
    assert apart.fill_diagonal_(1).min() > 20 * tolerance
