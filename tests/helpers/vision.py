"""Requests with images and videos, what transformers makes of them, and what an engine did."""

import inspect
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from tests.helpers.engine import runner_of
from tests.helpers.watch import on_prepared

MARKS = {"image": "<|image_pad|>", "video": "<|video_pad|>"}
VISION = "<|vision_start|>{}<|vision_end|>"
IMAGE, VIDEO = (VISION.format(mark) for mark in MARKS.values())
FPS = 8.0
"""So fast that a video lasts no longer than it is wide, in positions: text behind it then counts on
from the same one by either rule, transformers 5.19's (its width) and vLLM's (its last frame)."""


def make_image(seed: int, width: int = 40, height: int = 24) -> Image.Image:
    """Noise; a token is 8 x 8 pixels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def make_video(seed: int, frames: int = 6, width: int = 24, height: int = 16) -> np.ndarray:
    """Noise, uint8 ``[frames, height, width, 3]``; a token is 8 x 8 pixels of two frames."""
    shape = (frames, height, width, 3)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def metadata(video: np.ndarray) -> dict[str, Any]:
    """What a reader of video files says: these are all its frames."""
    frames = len(video)
    return {
        "total_num_frames": frames,
        "fps": FPS,
        "duration": frames / FPS,
        "frames_indices": list(range(frames)),
        "video_backend": "opencv",
    }


@dataclass(frozen=True)
class Request:
    """A prompt with a mark for each of its images and videos."""

    text: str
    images: list[Image.Image] = field(default_factory=list)
    videos: list[np.ndarray] = field(default_factory=list)

    def prompt(self) -> dict[str, Any]:
        """As `LLM.generate` takes it."""
        videos = [(video, {**metadata(video), "do_sample_frames": False}) for video in self.videos]
        items = {"image": self.images, "video": videos}
        return {
            "prompt": self.text,
            "multi_modal_data": {name: each for name, each in items.items() if each},
        }


def chat(*parts: Any) -> Request:
    """A user's message of texts, images and videos, in their order."""
    images = [part for part in parts if isinstance(part, Image.Image)]
    videos = [part for part in parts if isinstance(part, np.ndarray)]
    marks = ((IMAGE if isinstance(p, Image.Image) else VIDEO, p) for p in parts)
    content = "".join(p if isinstance(p, str) else mark for mark, p in marks)
    text = f"<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n"
    return Request(text, images, videos)


@dataclass(frozen=True)
class Answer:
    """Greedy tokens, and the positions of the prompt and of all tokens but the last."""

    prompt_token_ids: list[int]
    tokens: list[int]
    positions: np.ndarray  # [3, num_prompt_tokens + len(tokens) - 1] int64

    def positions_of(self, start: int, count: int) -> np.ndarray:
        """``[3, count]`` from a token on; what is behind the answer counts on."""
        beyond = max(0, start + count - self.positions.shape[1])
        more = self.positions[:, -1:] + 1 + np.arange(beyond)
        return np.concatenate([self.positions, more], axis=1)[:, start : start + count]


class Reference:
    """A model of transformers behind its own processor."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        from transformers import AutoModelForImageTextToText, AutoProcessor

        self.processor = AutoProcessor.from_pretrained(folder)
        self.model = AutoModelForImageTextToText.from_pretrained(
            folder, dtype=dtype, attn_implementation="eager"
        ).eval()

    def _inputs(self, request: Request, behind: int) -> tuple[Any, torch.Tensor]:
        """What the processor makes of a request; positions of it and of so many tokens behind."""
        inputs = self.processor(
            text=[request.text],
            images=request.images or None,
            videos=[torch.from_numpy(v).permute(0, 3, 1, 2) for v in request.videos] or None,
            video_metadata=[metadata(video) for video in request.videos] or None,
            do_sample_frames=False,
            return_tensors="pt",
        )
        length = inputs.input_ids.shape[1]
        positions, delta = torch.arange(length).expand(3, 1, length), 0
        if request.images or request.videos:
            asks = inspect.signature(self.model.model.get_rope_index).parameters
            given = {name: inputs[name] for name in asks if name in inputs}
            positions, delta = self.model.model.get_rope_index(**given)
        later = (torch.arange(length, length + behind) + delta).expand(3, 1, behind)
        return inputs, torch.cat([positions, later], dim=2)

    @torch.no_grad()
    def answer(self, request: Request, max_tokens: int) -> Answer:
        inputs, positions = self._inputs(request, max_tokens - 1)
        prompt, end = inputs.input_ids[0].tolist(), positions.shape[2]
        # Not `generate`: behind a prompt that ends with an image it counts on in each dimension
        # from the image's last patch, which is not the model's rule.
        out = self.model(**inputs, position_ids=positions[..., : len(prompt)], use_cache=True)
        tokens = [int(out.logits[0, -1].argmax())]
        for at in range(len(prompt), end):
            out = self.model(
                input_ids=torch.tensor([tokens[-1:]]),
                position_ids=positions[..., at : at + 1],
                past_key_values=out.past_key_values,
            )
            tokens.append(int(out.logits[0, -1].argmax()))
        return Answer(prompt, tokens, positions[:, 0].numpy())

    @torch.no_grad()
    def logits_behind(self, request: Request, tokens: list[int]) -> torch.Tensor:
        """Logits of an answer's tokens, each behind those before it, ``[tokens, vocab_size]``."""
        inputs, positions = self._inputs(request, len(tokens))
        ids = torch.cat([inputs.pop("input_ids"), torch.tensor([tokens], dtype=torch.int64)], dim=1)
        seen = {name: each for name, each in inputs.items() if "pixel" in name or "grid" in name}
        logits = self.model(input_ids=ids, position_ids=positions, use_cache=False, **seen).logits
        return logits[0, ids.shape[1] - len(tokens) - 1 : -1]

    def answers(self, requests: list[Request], max_tokens: int) -> list[Answer]:
        """One request at a time."""
        return [self.answer(request, max_tokens) for request in requests]


@dataclass
class Watched:
    """What later steps of an engine did."""

    positions: dict[str, list[tuple[int, np.ndarray]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    """First token and ``[3, tokens]`` of each step, by request."""
    cut_items: int = 0  # images and videos of which a step had a part only
    preempted_in_item: int = 0  # requests that lost their blocks with an item half computed

    def check_positions(self, outputs: list[Any], answers: list[Answer]) -> None:
        """Each step's positions are those of transformers, and none is left out."""
        for output, answer in zip(outputs, answers, strict=True):
            seen = np.zeros(answer.positions.shape[1], bool)
            for start, got in self.positions[output.request_id]:
                np.testing.assert_array_equal(got, answer.positions_of(start, got.shape[1]))
                seen[start : start + got.shape[1]] = True
            cached = output.num_cached_tokens or 0
            assert seen[cached:].all(), "tokens that no step had"


def watch(llm: Any) -> Watched:
    """Watch all later steps of an engine."""
    watched, runner = Watched(), runner_of(llm)
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    preempt = scheduler._preempt_request

    def items(req_id: str) -> list[tuple[int, int]]:
        features = runner.requests[req_id].mm_features
        places = [feature.mm_position for feature in features]
        return [(place.offset, place.offset + place.length) for place in places]

    def note(step: Any) -> None:
        starts, firsts = step.query_start_loc, step.num_computed_tokens
        for row, req_id in enumerate(runner.input_batch.req_ids):
            first, rows = int(firsts[row]), slice(starts[row], starts[row + 1])
            positions = step.mrope_positions[:, rows].copy()
            watched.positions[req_id.partition("-")[0]].append((first, positions))
            last = first + positions.shape[1]
            watched.cut_items += sum(start < last < end for start, end in items(req_id))

    def noted(request: Any, *args: Any, **kwargs: Any) -> Any:
        computed = request.num_computed_tokens
        inside = any(start < computed < end for start, end in items(request.request_id))
        watched.preempted_in_item += inside
        return preempt(request, *args, **kwargs)

    on_prepared(llm, note)
    scheduler._preempt_request = noted
    return watched


def serve(llm: Any, requests: list[Request], params: Any, loras: Any = None) -> list[Any]:
    prompts = [request.prompt() for request in requests]
    return llm.generate(prompts, params, lora_request=loras, use_tqdm=False)


def serve_with_resets(
    llm: Any, requests: list[Request], params: Any, steps: Collection[int]
) -> list[list[int]]:
    """Generated token ids, where all caches are emptied before these steps, under what runs.

    As a pause that clears the cache does: running requests lose their blocks and come again.
    """
    core, tokens, step = llm.llm_engine, {}, 0
    for number, request in enumerate(requests):
        core.add_request(str(number), request.prompt(), params)
    while core.has_unfinished_requests():
        if step in steps:
            assert llm.reset_prefix_cache(reset_running_requests=True)
            core.reset_encoder_cache()
        for output in core.step():
            tokens[int(output.request_id)] = list(output.outputs[0].token_ids)
        step += 1
    return [tokens[number] for number in range(len(requests))]


def tokens_of(outputs: list[Any]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def save_text_model(folder: Path, model: Path) -> Path:
    """Save the Qwen3 that is inside of a Qwen3-VL: where there is no image it says the same."""
    from transformers import AutoModelForImageTextToText, Qwen3Config, Qwen3ForCausalLM

    sees = AutoModelForImageTextToText.from_pretrained(model)
    names = vars(Qwen3Config()).keys() - {"model_type", "architectures", "rope_parameters"}
    config = {name: value for name, value in vars(sees.config.text_config).items() if name in names}
    text = Qwen3ForCausalLM(Qwen3Config(**config, rope_theta=10000.0))
    text.model.load_state_dict(sees.model.language_model.state_dict())
    text.lm_head.load_state_dict(sees.lm_head.state_dict())
    text.save_pretrained(folder)
    return folder
