"""Record 300 steps of SmolLM2 while it answers mixed chats, into an archive that is small.

    python examples/smollm2_steps.py [--out examples/smollm2-steps.tar.xz]

The archive of this repository was made by it; docs/guides/debugging.md says what to do with that.
Beside the records it has the texts of their tokens: a tokenizer that knows no other tokens.
"""

import argparse
import io
import json
import os
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import smollm2

ROOT = Path(__file__).parents[1]
MODEL = Path(".cache/smollm2")
FOLDER = "smollm2-steps"
STEPS = 300
QUESTIONS = (
    "What is the capital of France?",
    "Write a Python function that returns the largest number of a list.",
    "Name the planets of the solar system.",
    "Repeat this sentence three times: The cat sat on the mat, and the mat was red.",
    "List five animals that live in the sea.",
    "Explain in two sentences why the sky is blue.",
    "Write a haiku about rain.",
    "Give me a recipe for pancakes, with a list of what I need.",
    "Shorten this: The harbour of the small town lies between two hills. In the morning the "
    "fishermen come back with herring and cod, which they sell on the quay before breakfast. Anna, "
    "who is nine years old, waits for her father every day. He has a blue boat with a white sail, "
    "and its name is the Swallow. When the wind blows from the west, the boats stay at home, and "
    "the fishermen mend their nets in the hall beside the church.",
    "Who wrote Romeo and Juliet?",
)
FOLLOW_UP = "Thank you. Can you say that in other words?"


def record(folder: Path) -> Path:
    """Let the model answer until there are enough steps; returns the folder of the run."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        str(MODEL),
        dtype="float32",
        max_model_len=512,
        max_num_seqs=4,
        max_num_batched_tokens=64,  # prompts come in chunks
        block_size=16,
        num_gpu_blocks_override=40,  # four long chats don't fit: some are preempted
        async_scheduling=False,  # the host knows every token
        compilation_config={
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": [4, 16],
        },
        speculative_config={"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3},
        additional_config={"npu_prep": {"record": {"dir": str(folder), "steps": f"0:{STEPS}"}}},
        seed=0,
    )
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    params = SamplingParams(temperature=0, max_tokens=96)
    while len(list(folder.glob("*/step-*.npz"))) < STEPS:
        for chat, output in zip(chats, llm.chat(chats, params, use_tqdm=False), strict=True):
            chat += [
                {"role": "assistant", "content": output.outputs[0].text},
                {"role": "user", "content": FOLLOW_UP},
            ]
    return next(folder.iterdir())


def known_texts(tokenizer: Path, token_ids: set[int]) -> bytes:
    """A tokenizer of these tokens alone: enough to show them, not to make them of a text."""
    whole = json.loads(tokenizer.read_text(encoding="utf-8"))
    vocab = {
        text: number for text, number in whole["model"]["vocab"].items() if number in token_ids
    }
    added = [each for each in whole["added_tokens"] if each["id"] in token_ids]
    vocab |= {each["content"]: each["id"] for each in added}
    whole["model"] |= {"vocab": vocab, "merges": [], "unk_token": None}
    whole |= {"added_tokens": added, "post_processor": None}
    return json.dumps(whole, ensure_ascii=False).encode()


def unpacked(file: Path) -> bytes:
    """A record that is not compressed: the archive compresses all of them together."""
    out = io.BytesIO()
    with zipfile.ZipFile(file) as record, zipfile.ZipFile(out, "w") as stored:
        for member in record.infolist():
            stored.writestr(zipfile.ZipInfo(member.filename), record.read(member))
    return out.getvalue()


def pack(run: Path, out: Path) -> None:
    """Write the archive: manifest, texts, records."""
    from vllm_npu_prep.records.record_file import read_record

    files = sorted(run.glob("step-*.npz"))
    tokens = {token for file in files for token in read_record(file).batch.token_ids.tolist()}
    contents = {"manifest.json": (run / "manifest.json").read_bytes()}
    contents["tokenizer.json"] = known_texts(MODEL / "tokenizer.json", tokens)
    contents |= {file.name: unpacked(file) for file in files}
    with tarfile.open(out, "w:xz") as archive:
        for name, content in contents.items():
            member = tarfile.TarInfo(f"{FOLDER}/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    print(f"{out}: {len(files)} steps, {out.stat().st_size:,} bytes")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = Path(__file__).with_name(f"{FOLDER}.tar.xz")
    parser.add_argument("--out", type=Path, default=default, help="default: %(default)s")
    out = parser.parse_args().out.resolve()
    os.chdir(ROOT)  # the manifest names the model as it is named here
    try:
        smollm2.make(MODEL)
    except smollm2.NoModelError as error:
        sys.exit(str(error))
    with tempfile.TemporaryDirectory() as folder:
        pack(record(Path(folder) / "steps"), out)


if __name__ == "__main__":
    main()
