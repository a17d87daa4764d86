"""``explain --png``, and the colours that pages draw with."""

import io

import numpy as np
from PIL import Image

from tests.helpers.scenarios import many, view_of
from vllm_npu_prep.inspect.explain import select
from vllm_npu_prep.inspect.pictures import (
    mask_picture,
)
from vllm_npu_prep.inspect.png import MAX_HEIGHT, explain_png


def picture_of(scenario: dict, *args) -> np.ndarray:
    return np.array(Image.open(io.BytesIO(explain_png(view_of(scenario), *args))))


def test_big_batches_and_long_names_stay_in_bounds():
    scenario = many(300, 1)
    scenario["requests"][0]["req_id"] = "\u05d0W" * 300
    scenario["name"] = "n" * 3000
    picture = picture_of(scenario)
    assert len(picture) <= MAX_HEIGHT + 60
    assert len(picture_of(scenario, "cmpl-7")) < 800


def test_large_masks_are_shown_by_the_mean_of_their_cells():
    view = view_of(many(4, 1000, 0))
    step = mask_picture(view, 0, select(view))
    assert step.pixels.shape == (640, 640, 4)
    assert step.num_rows == step.num_columns == 1000
    opacity = step.pixels[..., 3] / 255
    cells = ~np.triu(np.ones((1000, 1000), bool), 1)
    edges = np.arange(640) * 1000 // 640
    want = np.add.reduceat(np.add.reduceat(cells.astype(float), edges, 0), edges, 1)
    counts = np.diff([*edges, 1000])
    assert np.abs(opacity - want / np.outer(counts, counts)).max() < 0.1
