"""Images and videos on npu:0: tokens of transformers in float16, one copy a step with M-RoPE."""

import pytest
import torch

import ascend_emulator
from tests.helpers.counting import PreparationCounts
from tests.helpers.engine import REPLAYED, graphs, greedy, runner_of
from tests.helpers.v2 import engine_of
from tests.helpers.vision import Reference, chat, make_image, make_video, serve, tokens_of, watch

HIDDEN_COPIES = {"qwen2_5_vl": 0, "qwen3_vl": 5}
"""Copies of strided inputs in a step that places rows of images: vLLM's model takes the features of
several layers of the tower apart by slices of columns, and permutes them."""

LAYER_OF_TOWER = {"qwen2_5_vl": 12, "qwen3_vl": 13}
"""Launches of a layer of the vision tower, with the copies of strided inputs; operators of torch
take 102 and 83 for a video of three frames, and read its lengths back from the device."""


def requests_of(seed):
    first, question = make_image(seed), "What is a slot mapping?"
    return [
        chat(first, question),
        chat(question),
        chat(make_image(seed + 1, 90, 60), " or ", first, question),
        chat(make_video(seed), question),
    ]


def count_layer(runner):
    """What a layer of the tower asks of the device: one dict of counts a call."""
    counts, model = [], runner.get_model()
    (name,) = [n for n, _ in model.named_modules() if n.endswith("visual.blocks.1")]
    layer = model.get_submodule(name)
    forward = layer.forward

    def counted(*args, **kwargs):
        with ascend_emulator.count() as c:
            output = forward(*args, **kwargs)
        counts.append(c.nonzero())
        return output

    layer.forward = counted
    return counts


@pytest.mark.parametrize(
    ("name", "attention", "mode"),
    [
        ("qwen2_5_vl", "fia", "FULL_AND_PIECEWISE"),
        ("qwen3_vl", "fia", "PIECEWISE"),
        ("qwen3_vl", "atb", "PIECEWISE"),
    ],
)
def test_images_and_videos_beside_text(vision_models, seed, name, attention, mode):
    requests = requests_of(seed)
    answers = Reference(vision_models / name, torch.float16).answers(requests, 12)
    with engine_of(
        "V1",
        vision_models / name,
        dtype="float16",
        skip_tokenizer_init=False,
        max_num_batched_tokens=32,
        additional_config={"npu_prep": {"attention": attention}},
        **graphs(mode, 4, 16, 32),
    ) as llm:
        runner, watched = runner_of(llm), watch(llm)
        layer, forward, contiguous = count_layer(runner), runner._model_forward, []

        def watched_forward(*args, **kwargs):
            rows = [each for each in (*args, *kwargs.values()) if getattr(each, "ndim", 0) == 2]
            contiguous.extend(each.is_contiguous() for each in rows if len(each) == 3)
            return forward(*args, **kwargs)

        runner._model_forward = watched_forward
        counts, encode, encoding = PreparationCounts(runner), runner._execute_mm_encoder, set()

        def counted_encode(*args):
            encoding.add(len(counts.steps))
            return encode(*args)

        runner._execute_mm_encoder = counted_encode
        outputs = serve(llm, requests, greedy(12))
        assert str(runner.device) == "npu:0"
        waits, kinds = runner.preparer.staging.waits, runner.padding.counts.by_kind
    assert tokens_of(outputs) == [answer.tokens for answer in answers]
    watched.check_positions(outputs, answers)
    assert watched.cut_items > 0
    assert kinds["eager: embeddings, which graphs don't read"] < kinds.total()
    placing = {number for number, step in enumerate(counts.steps) if step.get("launches", 0) > 2}
    assert placing > encoding > set(), "rows of an image that an earlier step encoded"
    for number, step in enumerate(counts.steps):
        if number not in encoding:  # images have copies of their own, and towers wait
            assert step.pop("h2d_copies") == 1
            # A dense mask is gathered from columns of a larger matrix.
            allowed = (HIDDEN_COPIES[name] if number in placing else 0) + (attention == "atb")
            assert step.pop("hidden_copies", 0) <= allowed, step
            assert not set(step) - {"h2d_bytes", "launches", "peak_memory_bytes"}, step
    assert waits == 0
    assert contiguous and all(contiguous), "positions that M-RoPE would copy in each layer"
    assert layer
    for counted in layer:
        assert counted.pop("launches") == LAYER_OF_TOWER[name]
        assert not set(counted) - {"peak_memory_bytes"}, "no copies, and no lengths read back"


def test_v2_sees_on_the_device(vision_models, seed):
    """The same tokens; steps with images are in graphs, too, since all read embeddings."""
    requests, folder = requests_of(seed), vision_models / "qwen2_5_vl"
    answers = Reference(folder, torch.float16).answers(requests, 12)
    settings = {"dtype": "float16", "skip_tokenizer_init": False, "max_num_batched_tokens": 32}
    settings |= graphs("FULL_AND_PIECEWISE", 4, 16, 32)
    with engine_of("V2", folder, **settings) as llm:
        outputs = serve(llm, requests, greedy(12))
        kinds = runner_of(llm).padding.counts.by_kind
    assert tokens_of(outputs) == [answer.tokens for answer in answers]
    assert set(kinds) >= REPLAYED["FULL_AND_PIECEWISE"]
