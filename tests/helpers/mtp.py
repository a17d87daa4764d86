"""Tiny models with layers of multi-token prediction (MTP), and a plain reading of what they draft.

A layer is fitted to its model: its first projection by least squares, and its decoder layer adds a
little noise. So drafts are accepted, rejected and accepted in part. `PlainDrafter` is made of
transformers' decoder layers and reads a whole sequence at a time; it shares nothing with vLLM.
"""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import nn

from tests.helpers.drafters import save_weights
from tests.helpers.engine import make_model
from tests.helpers.huggingface import load
from tests.helpers.hybrids import GATED_DELTA, QWEN3_NEXT
from tests.helpers.latent import GLM_DSA, GROUPED_EXPERTS, LATENT, ONE_GROUP, V3_EXPERTS, V32

QWEN = ("Qwen3Next", "Qwen3_5", "Qwen3_5Moe")
"""Hybrids, whose MTP layer attends, and whose norms add 1 to weights."""
FAMILIES: dict[str, dict[str, Any]] = {
    "MiMo": {},
    "Glm4Moe": {**GROUPED_EXPERTS, **ONE_GROUP, "first_k_dense_replace": 1, "use_qk_norm": True},
    "DeepseekV3": {**LATENT, **V3_EXPERTS, "q_lora_rank": 20},
    "DeepseekV32": V32,
    "GlmMoeDsa": GLM_DSA,
    "Qwen3Next": QWEN3_NEXT,
    "Qwen3_5": GATED_DELTA,
    "Qwen3_5Moe": QWEN3_NEXT,  # the same sizes, and experts
}
"""Configs by family of transformers; MiMo is a Qwen2 to it."""
OF_MIMO = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
OF_QWEN = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
OF_DEEPSEEK = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
"""What norms of embeddings and states, the projection and the final norm are called."""


class Read(NamedTuple):
    """Hidden states of a model over a sequence, float32 ``[len, hidden_size]``."""

    embeddings: torch.Tensor
    states: torch.Tensor  # as the MTP layer is given them
    before_norm: torch.Tensor


class PlainDrafter(nn.Module):
    """One MTP layer over whole sequences, without a cache."""

    def __init__(self, family: str, target: Any) -> None:
        super().__init__()
        self.family, self.target = family, target
        self.is_mimo, self.is_qwen = family == "MiMo", family in QWEN
        config = copy.deepcopy(target.config)
        hidden = config.hidden_size
        self.embedding_norm, self.state_norm, self.final_norm = (
            nn.RMSNorm(hidden, eps=config.rms_norm_eps) for _ in range(3)
        )
        self.project = nn.Linear(2 * hidden, hidden, bias=False)
        layers = target.model.layers  # of the kind that MTP layers are: with experts, if any
        attentions = {i: getattr(each, "self_attn", None) for i, each in enumerate(layers)}
        # An MTP layer has attention, and an indexer of its own where a model has some
        index = max(i for i, each in attentions.items() if getattr(each, "indexer", each))
        self.block = type(layers[index])(config, layer_idx=index)
        self.rotary = target.model.rotary_emb

    @torch.no_grad()
    def read(self, token_ids: list[int]) -> Read:
        """What the model computes of a sequence."""
        seen: dict[str, torch.Tensor] = {}
        model = self.target.model
        hook = model.norm.register_forward_hook(
            lambda module, args, output: seen.update(given=args[0][0], normed=output[0])
        )
        ids = torch.tensor([token_ids])
        self.target(ids)
        hook.remove()
        states = seen["given" if self.is_mimo else "normed"]
        return Read(model.embed_tokens(ids)[0], states, seen["given"])

    def inputs(self, embeddings: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Input of the projection: normed, side by side; most have no embedding at position 0."""
        if not self.is_qwen:
            embeddings = torch.cat([torch.zeros_like(embeddings[:1]), embeddings[1:]])
        parts = [self.embedding_norm(embeddings), self.state_norm(states)]
        return torch.cat(parts[::-1] if self.is_mimo else parts, dim=-1)

    def forward(
        self, embeddings: torch.Tensor, states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits of the last token's draft, and hidden states for the next pass."""
        hidden = self.project(self.inputs(embeddings, states))[None]
        positions = torch.arange(len(states))[None]
        mask = torch.full((len(states),) * 2, float("-inf")).triu(1)[None, None]
        hidden = self.block(
            hidden,
            attention_mask=mask,
            position_ids=positions,
            position_embeddings=self.rotary(hidden, positions),
        )
        hidden = (hidden[0] if isinstance(hidden, tuple) else hidden)[0]
        normed = self.final_norm(hidden)
        logits = self.target.lm_head(normed[-1])
        return logits, hidden if self.family == "Glm4Moe" else normed

    @torch.no_grad()
    def drafts(self, token_ids: list[int], read: Read, num_drafts: int) -> list[int]:
        """Drafts after a sequence, one by one, each over the whole sequence.

        The model has computed all but its last token; `read` may go further.
        """
        embed, states = self.target.model.embed_tokens, read.states[: len(token_ids) - 1]
        drafts: list[int] = []
        for _ in range(num_drafts):
            following = torch.tensor([*token_ids[1:], *drafts])
            logits, fed = self(embed(following), states)
            drafts.append(int(logits.argmax()))
            states = torch.cat([states, fed[-1:]])
        return drafts


def _fit(drafter: PlainDrafter, generator: torch.Generator, noise: float) -> None:
    """Fit the projection to the model's next hidden state; `noise` is what the layer adds."""
    with torch.no_grad():
        for name, weight in drafter.block.named_parameters():
            if "norm" not in name:
                scale = noise if ("o_proj" in name or "down_proj" in name) else 0.25
                weight.copy_(scale * torch.randn(weight.shape, generator=generator))
        for name, buffer in drafter.block.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))
    vocab, given, wanted = drafter.target.config.vocab_size, [], []
    for ids in torch.randint(4, vocab, (64, 48), generator=generator).tolist():
        read = drafter.read(ids)
        inputs = drafter.inputs(read.embeddings[1:], read.states[:-1])
        given.append(inputs[1:].detach())  # position 0 has no embedding
        wanted.append(read.before_norm[2:])
    solution = torch.linalg.lstsq(torch.cat(given), torch.cat(wanted)).solution
    drafter.project.weight.data.copy_(solution.T)


def _checkpoint(drafter: PlainDrafter, index: int) -> dict[str, torch.Tensor]:
    """A layer's weights by their names in a checkpoint."""
    target, names = drafter.target, OF_DEEPSEEK
    prefix = f"model.layers.{target.config.num_hidden_layers + index}."
    if drafter.is_mimo:
        prefix, names = f"model.mtp_layers.{index}.", OF_MIMO
    elif drafter.is_qwen:
        prefix, names = f"mtp.layers.{index}.", OF_QWEN
    modules = drafter.embedding_norm, drafter.state_norm, drafter.project, drafter.final_norm
    weights = {f"{prefix}{name}.weight": each.weight for name, each in zip(names, modules)}
    if drafter.is_qwen:
        of_norms = {f"mtp.{n}.weight": m.weight - 1 for n, m in zip(names, modules) if n != "fc"}
        weights = {"mtp.fc.weight": drafter.project.weight, **of_norms}
    for name, weight in drafter.block.state_dict().items():
        if name.endswith("experts.gate_up_proj"):
            for expert, both in enumerate(weight):
                for part, half in zip(("gate_proj", "up_proj"), both.chunk(2)):
                    weights[f"{prefix}mlp.experts.{expert}.{part}.weight"] = half
        elif name.endswith("experts.down_proj"):
            for expert, down in enumerate(weight):
                weights[f"{prefix}mlp.experts.{expert}.down_proj.weight"] = down
        else:
            weights[prefix + name] = weight
    if names is OF_DEEPSEEK:  # checkpoints repeat them
        weights[f"{prefix}embed_tokens.weight"] = target.model.embed_tokens.weight
        weights[f"{prefix}shared_head.head.weight"] = target.lm_head.weight
    return {name: weight.detach().clone() for name, weight in weights.items()}


def _count_of(family: str) -> str:
    """The field of ``config.json`` that has the number of MTP layers."""
    return "mtp_num_hidden_layers" if "Qwen3_5" in family else "num_nextn_predict_layers"


def make_mtp_model(
    folder: Path, family: str, *, num_layers: int = 1, noise: float = 0.01, **config: Any
) -> tuple[Path, PlainDrafter]:
    """Save a tiny model of `FAMILIES` with MTP layers, of which the second has other weights.

    The more `noise` a layer adds beside its first projection, the fewer drafts are accepted.
    Returns the model's folder and the plain reading of its first MTP layer.
    """
    settings = {"spread": 0.1, "embedding_scale": 20.0, **FAMILIES[family], **config}
    settings[_count_of(family)] = num_layers
    make_model(folder, "Qwen2" if family == "MiMo" else family, **settings)
    if family == "MiMo":
        of_file = json.loads((folder / "config.json").read_text())
        of_file["architectures"] = ["MiMoForCausalLM"]
        (folder / "config.json").write_text(json.dumps(of_file))
    target = load(folder)
    target.requires_grad_(False)
    weights = load_file(folder / "model.safetensors")
    drafters = []
    for index in range(num_layers):
        drafter = PlainDrafter(family, target).requires_grad_(False)
        _fit(drafter, torch.Generator().manual_seed(index), noise)
        weights |= _checkpoint(drafter, index)
        drafters.append(drafter)
    save_weights(weights, folder)
    return folder, drafters[0]


def add_mtp_layer(folder: Path, family: str) -> None:
    """Give a model of `make_model_that_sees` a layer most of whose drafts are rejected."""
    import transformers

    whole = getattr(transformers, f"{family}ForConditionalGeneration").from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    target = getattr(transformers, f"{family}ForCausalLM")(whole.config.text_config)
    target.model, target.lm_head = whole.model.language_model, whole.lm_head
    target.requires_grad_(False)
    drafter = PlainDrafter(family, target.eval()).requires_grad_(False)
    _fit(drafter, torch.Generator().manual_seed(0), 0.01)
    weights = load_file(folder / "model.safetensors")
    save_weights(weights | _checkpoint(drafter, 0), folder)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"][_count_of(family)] = 1
    (folder / "config.json").write_text(json.dumps(config))


class Verified(NamedTuple):
    """What became of a request's drafts in a step."""

    token_ids: list[int]  # the request's tokens before the step
    drafts: list[int]  # -1 where the scheduler doesn't know them
    num_accepted: int
    are_lost: bool  # whether the request was not in the step before, and drafts stay on the device


def record_verified(llm: Any) -> list[Verified]:
    """Record what becomes of each request's drafts in all later steps."""
    scheduler, records = llm.llm_engine.engine_core.engine_core.scheduler, []
    update_from_output: Callable[..., Any] = scheduler.update_from_output
    before: set[str] = set()

    def recorded(scheduler_output: Any, output: Any) -> Any:
        drafts = scheduler_output.scheduled_spec_decode_tokens
        for req_id, tokens in zip(output.req_ids, output.sampled_token_ids):
            if tokens and drafts.get(req_id) and req_id in scheduler.requests:
                known = list(scheduler.requests[req_id].all_token_ids)
                made, are_lost = list(drafts[req_id]), req_id not in before
                are_lost = are_lost and -1 in made
                records.append(Verified(known, made, len(tokens) - 1, are_lost))
        before.clear()
        before.update(output.req_ids)
        return update_from_output(scheduler_output, output)

    scheduler.update_from_output = recorded
    return records


def wrong_drafts(
    drafter: PlainDrafter, records: list[Verified], sequences: list[list[int]]
) -> list[tuple[Verified, list[int], int]]:
    """Steps whose drafts or accepted counts are not those of the plain reading, and the latter.

    `sequences` are prompts, each with more greedy tokens than the engine gave by the number of
    drafts. Under asynchronous scheduling vLLM leaves a request out of a step if it would reach the
    end of its context in case that all drafts are accepted. If they are not, it comes back after
    that step, and there are no drafts in its places.
    """
    reads, found = [drafter.read(sequence) for sequence in sequences], []
    for step in records:
        length, made = len(step.token_ids), len(step.drafts)
        (which, *_) = [
            index for index, each in enumerate(sequences) if each[:length] == step.token_ids
        ]
        following = sequences[which][length:]
        drafts = drafter.drafts(step.token_ids, reads[which], made)
        wrong = [
            index for index, each in enumerate(drafts) if [each] != following[index : index + 1]
        ]
        accepted = 0 if step.are_lost else wrong[0] if wrong else made
        are_known = -1 not in step.drafts
        if step.num_accepted != accepted or (are_known and step.drafts != drafts):
            found.append((step, drafts, accepted))
    return found


def num_accepted(
    drafter: PlainDrafter, prompt: list[int], tokens: list[int], max_tokens: int, num_drafts: int
) -> int:
    """Drafts of a request that are accepted until it has its tokens; the last step may go on.

    `tokens` are the greedy ones after its prompt, more than `max_tokens` by `num_drafts`.
    """
    sequence, accepted = prompt + tokens, 0
    read, length = drafter.read(sequence), len(prompt) + 1
    while length < len(prompt) + max_tokens:
        drafts = drafter.drafts(sequence[:length], read, num_drafts)
        following = sequence[length : length + num_drafts]
        wrong = [index for index, each in enumerate(drafts) if each != following[index]]
        kept = wrong[0] if wrong else num_drafts
        accepted, length = accepted + kept, length + kept + 1
    return accepted
