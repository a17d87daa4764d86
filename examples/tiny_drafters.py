"""Make drafters for the demo model: a draft model, an EAGLE head and an EAGLE-3 head.

They learn to say what the demo model would say, and are stopped before they always do: most drafts
are accepted, some in part, some not at all. All three take less than half a minute on two cores,
deterministically; the result is cached in the output folder until a recipe or the text changes.

    python examples/tiny_drafters.py --out .cache/tiny-qwen3-drafters

Each is a folder that vLLM loads: ``--speculative-config '{"method": "eagle", "model":
".cache/tiny-qwen3-drafters/eagle", "num_speculative_tokens": 3}'``.
"""

import argparse
import hashlib
from collections.abc import Iterator
from pathlib import Path

import tiny_model
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    LlamaConfig,
    PreTrainedModel,
)
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

METHODS = ("draft_model", "eagle", "eagle3")
AUX_LAYERS = (1, 2, 3)  # EAGLE-3 reads the target's hidden states before these layers
STEPS = 3  # draft tokens in a row that are trained
RATE_GOAL = 0.9  # accepted of all drafts, mean over the steps: most, not all
MAX_EPOCHS = 100
BATCH = 8  # exchanges
LEARNING_RATE = 3e-3


def recipe_hash() -> str:
    """Changes whenever the result would, so with the demo model, too."""
    recipe = Path(__file__).read_bytes() + tiny_model.recipe_hash().encode()
    return hashlib.sha256(recipe).hexdigest()


class DraftModel(nn.Module):
    """A smaller Qwen3: reads tokens only."""

    def __init__(self, target: PreTrainedModel) -> None:
        super().__init__()
        self.model = tiny_model.make_model(
            target.config.vocab_size, hidden_size=128, intermediate_size=256, num_hidden_layers=1
        )

    def unroll(self, target, ids, states, steps: int) -> Iterator[torch.Tensor]:
        """See `Head.unroll`; a draft model keeps no state, so steps differ by place only."""
        hidden_states = self.model.model(ids).last_hidden_state
        for step in range(steps):
            yield hidden_states.roll(-1 - step, dims=1)

    def logits(self, target, hidden_states: torch.Tensor) -> torch.Tensor:
        """Over the target's vocabulary."""
        return self.model.lm_head(hidden_states)

    def save(self, folder: Path) -> None:
        """In Hugging Face's layout."""
        self.model.save_pretrained(folder)


class Head(nn.Module):
    """One Llama layer that reads the target's hidden states beside the tokens that follow them.

    The target's embeddings (and for EAGLE its ``lm_head``) are used, neither trained nor saved.
    Names of parameters are those that vLLM's loaders look for.
    """

    def __init__(self, target: PreTrainedModel, architecture: str, **more) -> None:
        super().__init__()
        names = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")
        names += ("num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps")
        self.config = LlamaConfig(
            **{name: getattr(target.config, name) for name in names},
            num_hidden_layers=1,
            tie_word_embeddings=False,
            architectures=[architecture],
            dtype="float32",
            **more,
        )
        self.config._attn_implementation = "sdpa"
        self.rotary_emb = LlamaRotaryEmbedding(self.config)

    def unroll(self, target, ids, states, steps: int) -> Iterator[torch.Tensor]:
        """Draft several tokens after every position at once, as if all drafts had been accepted.

        The first step reads the target's hidden states, each further one the head's own. A query
        of step s at row i stands at position i + s. It sees the first step's keys up to row i, and
        of later steps only its own row's, the drafts between.

        Parameters
        ----------
        target
            Lends its embeddings.
        ids
            (rows, width) token ids.
        states
            Tuple of (rows, width, hidden_size): the target's embeddings, its layers' outputs, and
            last its final hidden states after the norm.
        steps
            Draft tokens in a row.

        Yields
        ------
        torch.Tensor
            (rows, width, hidden_size) for each step s; row i's logits guess token i + 2 + s.
        """
        width = ids.shape[1]
        cache = DynamicCache()
        row = torch.arange(width)
        own = torch.eye(width, dtype=torch.bool)
        mask = torch.ones(width, width, dtype=torch.bool).tril()  # (width, (s + 1) * width)
        hidden_states = self.combine(states)
        for step in range(steps):
            embeds = target.model.embed_tokens(ids.roll(-1 - step, dims=1)).detach()
            hidden_states = self(
                embeds,
                hidden_states,
                attention_mask=mask[None, None],
                past_key_values=cache,
                position_embeddings=self.rotary_emb(hidden_states, row[None] + step),
            )
            yield hidden_states
            mask = torch.cat([mask, own], dim=1)

    def save(self, folder: Path) -> None:
        """As vLLM loads it."""
        folder.mkdir(parents=True)
        self.config.save_pretrained(folder)
        save_file(self.state_dict(), folder / "model.safetensors", {"format": "pt"})


class EagleHead(Head):
    """EAGLE: embedding and final hidden state, combined before the layer; the target's lm_head."""

    def __init__(self, target: PreTrainedModel) -> None:
        super().__init__(target, "EagleLlamaForCausalLM")
        size = self.config.hidden_size
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.layers = nn.ModuleList([LlamaDecoderLayer(self.config, 0)])
        self.layers[0].input_layernorm = nn.Identity()

    def combine(self, states) -> torch.Tensor:
        """What the first step reads of the target."""
        return states[-1]

    def forward(self, embeds, hidden_states, **attention) -> torch.Tensor:
        """One draft step; all (rows, width, hidden_size)."""
        return self.layers[0](self.fc(torch.cat([embeds, hidden_states], dim=-1)), **attention)

    def logits(self, target, hidden_states: torch.Tensor) -> torch.Tensor:
        """Over the target's vocabulary."""
        return target.lm_head(hidden_states)


class Eagle3Head(Head):
    """EAGLE-3: three of the target's layers, a wider attention input, an own norm and lm_head.

    Its vocabulary is a part of the target's: ``d2t`` is what to add to an id of its own.
    """

    def __init__(self, target: PreTrainedModel, vocabulary: torch.Tensor) -> None:
        super().__init__(
            target,
            "Eagle3LlamaForCausalLM",
            draft_vocab_size=len(vocabulary),
            eagle_aux_hidden_state_layer_ids=list(AUX_LAYERS),
        )
        config, size = self.config, self.config.hidden_size
        self.fc = nn.Linear(len(AUX_LAYERS) * size, size, bias=False)
        self.midlayer = LlamaDecoderLayer(config, 0)
        self.midlayer.hidden_norm = LlamaRMSNorm(size, eps=config.rms_norm_eps)
        for name in ("q_proj", "k_proj", "v_proj"):
            width = getattr(self.midlayer.self_attn, name).out_features
            setattr(self.midlayer.self_attn, name, nn.Linear(2 * size, width, bias=False))
        self.norm = LlamaRMSNorm(size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(size, len(vocabulary), bias=False)
        self.register_buffer("d2t", vocabulary - torch.arange(len(vocabulary)))
        t2d = torch.zeros(config.vocab_size, dtype=torch.bool)
        t2d[vocabulary] = True
        self.register_buffer("t2d", t2d)

    def combine(self, states) -> torch.Tensor:
        """What the first step reads of the target."""
        return self.fc(torch.cat([states[layer] for layer in AUX_LAYERS], dim=-1))

    def forward(self, embeds, hidden_states, **attention) -> torch.Tensor:
        """One draft step; all (rows, width, hidden_size)."""
        layer, residual = self.midlayer, hidden_states
        both = [layer.input_layernorm(embeds), layer.hidden_norm(hidden_states)]
        residual = residual + layer.self_attn(torch.cat(both, dim=-1), **attention)[0]
        return residual + layer.mlp(layer.post_attention_layernorm(residual))

    def logits(self, target, hidden_states: torch.Tensor) -> torch.Tensor:
        """Over the target's vocabulary, minus infinity outside its own."""
        own = self.lm_head(self.norm(hidden_states))
        logits = own.new_full((*own.shape[:-1], self.config.vocab_size), float("-inf"))
        logits[..., self.d2t + torch.arange(len(self.d2t))] = own
        return logits


def train(drafter, target: PreTrainedModel, ids: torch.Tensor, labels: torch.Tensor) -> list[float]:
    """Learn the target's choices after the answers' tokens.

    Parameters
    ----------
    drafter
        One of the three.
    target
        The demo model.
    ids, labels
        See `tiny_model.encode`.

    Returns
    -------
    list of float
        For each step, how many of its drafts are accepted: right, and all before them, too.
    """
    with torch.no_grad():
        outputs = target(ids, output_hidden_states=True)
    choices = outputs.logits.argmax(-1).roll(1, dims=1).where(labels >= 0, -100)  # of token i
    # The token after row i is the target's own, so it is in the answer, as all drafts are.
    wanted = [  # for each step s (rows, width): the choice of token i + 2 + s, or -100
        shifted(choices, 2 + step).where(shifted(choices, 1) >= 0, -100) for step in range(STEPS)
    ]
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    for epoch in range(MAX_EPOCHS):
        accepted, drafted = [0] * STEPS, [0] * STEPS
        for rows in torch.randperm(len(ids)).split(BATCH):
            states = [state[rows] for state in outputs.hidden_states]
            right = torch.ones(ids[rows].shape, dtype=torch.bool)
            loss = torch.zeros(())
            for step, hidden_states in enumerate(drafter.unroll(target, ids[rows], states, STEPS)):
                here = wanted[step][rows] >= 0
                labels = wanted[step][rows][here]
                logits = drafter.logits(target, hidden_states[here])
                loss = loss + nn.functional.cross_entropy(logits, labels)
                right[here] &= logits.argmax(-1) == labels
                accepted[step] += int(right[here].sum())
                drafted[step] += len(labels)
            loss.backward()
            nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        rates = [a / d for a, d in zip(accepted, drafted)]
        done = sum(rates) / STEPS >= RATE_GOAL
        if done or epoch % 5 == 0:
            shown = " ".join(f"{rate:.0%}" for rate in rates) + f" (goal {RATE_GOAL:.0%})"
            tiny_model.log(f"  epoch {epoch:2d} of at most {MAX_EPOCHS}  accepted {shown}")
        if done:
            break
    return rates


def shifted(choices: torch.Tensor, by: int) -> torch.Tensor:
    """(rows, width): the values ``by`` places later, -100 past the end."""
    return nn.functional.pad(choices[:, by:], (0, by), value=-100)


def make_drafters(target: PreTrainedModel, labels: torch.Tensor) -> Iterator[tuple[str, nn.Module]]:
    """The three, untrained, each with weights of its own seed."""
    for method in METHODS:
        torch.manual_seed(tiny_model.SEED)
        if method == "draft_model":
            yield method, DraftModel(target)
        elif method == "eagle":
            yield method, EagleHead(target)
        else:
            yield method, Eagle3Head(target, labels[labels >= 0].unique())


def make(out: Path, demo_model: Path) -> Path:
    """Make the drafters unless they are there already.

    Parameters
    ----------
    out
        Folder of the result.
    demo_model
        What `tiny_model.make` returned.

    Returns
    -------
    Path
        ``out``, with a folder for each of `METHODS`.
    """

    def fill(folder: Path) -> None:
        torch.use_deterministic_algorithms(True)
        target = AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32)
        target.eval().requires_grad_(False)
        tokenizer = AutoTokenizer.from_pretrained(demo_model)
        ids, labels = tiny_model.encode(tokenizer, tiny_model.exchanges())
        for method, drafter in make_drafters(target, labels):
            size = sum(p.numel() for p in drafter.parameters()) / 1e6
            tiny_model.log(f"{method}: {size:.1f} million parameters")
            train(drafter, target, ids, labels)
            drafter.save(folder / method)

    return tiny_model.make_once("drafters", out, recipe_hash(), fill)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model",
        type=Path,
        default=Path(".cache/tiny-qwen3"),
        metavar="DIR",
        help="folder of the demo model, which is made if it is missing (default: %(default)s)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(".cache/tiny-qwen3-drafters"),
        metavar="DIR",
        help="folder of the result (default: %(default)s)",
    )
    args = parser.parse_args()
    make(args.out, tiny_model.make(args.model))


if __name__ == "__main__":
    main()
