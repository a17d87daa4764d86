"""Make the demo model: a small Qwen3 with its own tokenizer, trained on text of this repository.

No weights are downloaded. Training takes less than a minute on two cores and is deterministic; the
result is cached in the output folder until the recipe or the text changes.

    python examples/tiny_model.py --out .cache/tiny-qwen3
"""

import argparse
import hashlib
import multiprocessing
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from vllm_npu_prep.progress import log_while_waiting

HERE = Path(__file__).parent
TEXT = HERE / "tiny_model_text.txt"
STAMP = "recipe.sha256"
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VOCAB_SIZE = 1024
MAX_MODEL_LEN = 4096
SEED = 0
LOSS_GOAL = 0.002  # mean over an epoch; greedy answers then lead by a wide margin
MAX_EPOCHS = 400

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def exchanges() -> list[tuple[str, str]]:
    """Questions and answers of the text."""
    lines = [line for line in TEXT.read_text().splitlines() if line and line[0] != "#"]
    return list(zip(lines[::2], lines[1::2], strict=True))


def recipe_hash() -> str:
    """Changes whenever the result would."""
    return hashlib.sha256(Path(__file__).read_bytes() + TEXT.read_bytes()).hexdigest()


def is_made(out: Path, recipe: str) -> bool:
    """Whether a folder was filled by this recipe."""
    stamp = out / STAMP
    return stamp.exists() and stamp.read_text() == recipe


def make_once(what: str, out: Path, recipe: str, fill: Callable[[Path], None]) -> Path:
    """Let a function fill a folder, unless it was filled by the same recipe before.

    In a process of its own: training seeds torch, makes it deterministic and starts threads, which
    an engine that this process forks later would lack.

    Parameters
    ----------
    what
        Name, for messages.
    out
        Folder of the result; replaced when it is complete.
    recipe
        Its hash.
    fill
        Called with a folder that isn't there yet.

    Returns
    -------
    Path
        ``out``.

    Raises
    ------
    RuntimeError
        If `fill` failed; it has said why.
    """
    if is_made(out, recipe):
        log(f"{what}: {out} is up to date")
        return out
    log(f"{what}: making {out} (under a minute on an idle machine) ...")
    part = out.with_name(out.name + f".part{os.getpid()}")
    child = multiprocessing.get_context("fork").Process(target=fill, args=(part,))
    child.start()
    with log_while_waiting(what, log):
        child.join()
    if child.exitcode:
        shutil.rmtree(part, ignore_errors=True)
        raise RuntimeError(f"{what}: {out} could not be made, see above")
    (part / STAMP).write_text(recipe)
    shutil.rmtree(out, ignore_errors=True)
    part.rename(out)
    return out


def log(line: str) -> None:
    """Print a line at once, also into a pipe."""
    print(line, flush=True)


def make_tokenizer():
    """Byte-level BPE trained on the text, with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["\n".join(pair) for pair in exchanges()], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_MODEL_LEN,
    )


def make_model(vocab_size: int, **changes):
    """An untrained Qwen3 of about three million parameters, grouped-query heads included."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(SEED)
    config = {
        "vocab_size": vocab_size,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": MAX_MODEL_LEN,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "pad_token_id": 0,
        "eos_token_id": 2,
        "dtype": "float32",
    }
    return Qwen3ForCausalLM(Qwen3Config(**{**config, **changes}))


def encode(tokenizer, pairs: list[tuple[str, str]]):
    """Token ids and labels of exchanges, both (exchanges, tokens); only answers have labels."""
    import torch

    rows, starts = [], []
    for question, answer in pairs:
        messages = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        rows.append(tokenizer(prompt + answer + "<|im_end|>", add_special_tokens=False).input_ids)
        starts.append(len(tokenizer(prompt, add_special_tokens=False).input_ids))
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    labels = ids.clone()
    for label, row, start in zip(labels, rows, starts):
        label[:start] = -100
        label[len(row) :] = -100
    return ids, labels


def train(model, tokenizer) -> float:
    """Learn the exchanges by heart; only answers count. Returns the last loss."""
    import torch

    model.train()
    ids, labels = encode(tokenizer, exchanges())

    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    loss = float("inf")
    for epoch in range(MAX_EPOCHS):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1.0, (epoch + 1) / 5) * (0.3 if loss < 0.02 else 1.0)
        result = model(input_ids=ids, labels=labels)
        result.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss = float(result.loss.detach())
        if epoch % 20 == 0:
            log(f"  epoch {epoch:3d} of at most {MAX_EPOCHS}  loss {loss:.4f} (goal {LOSS_GOAL})")
        if loss < LOSS_GOAL:
            break
    model.eval()
    return loss


def make(out: Path) -> Path:
    """Make the model unless it is there already; returns its folder."""
    return make_once("demo model", out, recipe_hash(), _fill)


def _fill(folder: Path) -> None:
    """Train the model and save it with its tokenizer."""
    import torch

    torch.manual_seed(SEED)
    torch.use_deterministic_algorithms(True)
    tokenizer = make_tokenizer()
    model = make_model(len(tokenizer))
    loss = train(model, tokenizer)
    # As NPUs compute; float32 holds it exactly. vLLM warns of each weight that it has to round.
    model.half().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    size = sum(p.numel() for p in model.parameters()) / 1e6
    log(f"demo model: {size:.1f} million parameters, loss {loss:.4f}")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(".cache/tiny-qwen3"),
        metavar="DIR",
        help="folder of the result (default: %(default)s)",
    )
    make(parser.parse_args().out)


if __name__ == "__main__":
    main()
