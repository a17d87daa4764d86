"""Make tiny models that see: Qwen2.5-VL and Qwen3-VL with random weights and real processors.

No weights are downloaded, and nothing is trained: what the models say is gibberish, but depends on
each pixel and each word. Seconds on two cores, deterministic; the result is cached in the output
folder until the recipe changes.

    python examples/tiny_vision_model.py --out .cache/tiny-vision

Each is a folder that vLLM loads, with processors for images and videos and a chat template:
``vllm serve .cache/tiny-vision/qwen2_5_vl``. An image is 4 to 30 tokens.
"""

import argparse
import hashlib
from pathlib import Path

import tiny_model
import torch

NAMES = ("qwen2_5_vl", "qwen3_vl")
SPECIAL_TOKENS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
PATCH_SIZE = 4  # pixels
TOKEN_SIZE = 2 * PATCH_SIZE  # pixels a side; patches are merged two by two
IMAGE_TOKENS = (4, 30)
VIDEO_TOKENS = (4, 12)  # of two frames
MAX_FRAMES = 8
SPREAD = 0.25  # of weights: answers vary with all that the model reads

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] in ('image', 'image_url') %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part['type'] in ('video', 'video_url') %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

TEXT_CONFIG = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": SPREAD,
}
VISION_CONFIG = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "patch_size": PATCH_SIZE,
    "out_hidden_size": 64,
    "initializer_range": SPREAD,
}


def recipe_hash() -> str:
    """Changes whenever the result would, so with the demo model's tokenizer, too."""
    recipe = Path(__file__).read_bytes() + tiny_model.recipe_hash().encode()
    return hashlib.sha256(recipe).hexdigest()


def make_tokenizer():
    """The demo model's, with the tokens that mark images and videos."""
    tokenizer = tiny_model.make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL_TOKENS})
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def pixels(tokens: tuple[int, int], frames: int = 1) -> dict[str, int]:
    """Least and most pixels of what becomes so many tokens, by the names that processors use."""
    area = TOKEN_SIZE**2 * frames
    return {"shortest_edge": tokens[0] * area, "longest_edge": tokens[1] * area}


def make_processor(name: str, tokenizer):
    """Of images, videos and text."""
    from transformers import (
        Qwen2_5_VLProcessor,
        Qwen2VLImageProcessor,
        Qwen2VLVideoProcessor,
        Qwen3VLProcessor,
        Qwen3VLVideoProcessor,
    )

    size, frames = pixels(IMAGE_TOKENS), {"max_frames": MAX_FRAMES, "cap_pixels_per_frame": False}
    if name == "qwen2_5_vl":  # counts pixels of a frame
        images = Qwen2VLImageProcessor(patch_size=PATCH_SIZE, size=size)
        frames |= {"patch_size": PATCH_SIZE, "size": pixels(VIDEO_TOKENS)}
        videos = Qwen2VLVideoProcessor(**frames)
        return Qwen2_5_VLProcessor(images, tokenizer, videos, chat_template=CHAT_TEMPLATE)
    half = [0.5, 0.5, 0.5]  # as the published models: vLLM takes one for images and videos
    norm = {"patch_size": PATCH_SIZE, "image_mean": half, "image_std": half}
    images = Qwen2VLImageProcessor(size=size, **norm)
    videos = Qwen3VLVideoProcessor(size=pixels(VIDEO_TOKENS, MAX_FRAMES), **frames, **norm)
    return Qwen3VLProcessor(images, tokenizer, videos, chat_template=CHAT_TEMPLATE)


def make_model(name: str, tokenizer):
    """Two layers of text and two of vision; the tower of each kind has all that is its own."""
    from transformers import (
        Qwen2_5_VLConfig,
        Qwen2_5_VLForConditionalGeneration,
        Qwen3VLConfig,
        Qwen3VLForConditionalGeneration,
    )

    torch.manual_seed(tiny_model.SEED)
    ids = tokenizer.convert_tokens_to_ids(SPECIAL_TOKENS)
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    special = dict(zip(names, ids, strict=True))
    text = {"vocab_size": len(tokenizer), **TEXT_CONFIG}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
    if name == "qwen2_5_vl":  # a layer of windows of two by two tokens, and one of whole images
        config = Qwen2_5_VLConfig(
            text_config={**text, "rope_parameters": rope},
            vision_config={
                **VISION_CONFIG,
                "window_size": 2 * TOKEN_SIZE,
                "fullatt_block_indexes": [1],
            },
            **special,
        )
        return Qwen2_5_VLForConditionalGeneration(config)
    config = Qwen3VLConfig(  # both layers of vision reach into those of text
        text_config={**text, "rope_parameters": {**rope, "mrope_interleaved": True}},
        vision_config={
            **VISION_CONFIG,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 1],
        },
        **special,
    )
    return Qwen3VLForConditionalGeneration(config)


def make(out: Path) -> Path:
    """Make the models unless they are there already; returns their folder."""
    return tiny_model.make_once("vision models", out, recipe_hash(), _fill)


def _fill(folder: Path) -> None:
    """Save each model with its processor."""
    tokenizer = make_tokenizer()
    for name in NAMES:
        tiny_model.log(f"{name}: model and processors")
        make_model(name, tokenizer).save_pretrained(folder / name)
        make_processor(name, tokenizer).save_pretrained(folder / name)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(".cache/tiny-vision"),
        metavar="DIR",
        help="folder of the result (default: %(default)s)",
    )
    make(parser.parse_args().out)


if __name__ == "__main__":
    main()
