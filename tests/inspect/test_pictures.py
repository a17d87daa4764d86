"""``explain --png``, and the colours that pages draw with."""

import io

import numpy as np
import pytest
from PIL import Image

from tests.helpers import worked_examples
from tests.helpers.scenarios import many, small, view_of, with_an_image
from vllm_npu_prep.inspect.drawings import axis_ticks, block_map, row_names
from vllm_npu_prep.inspect.explain import select
from vllm_npu_prep.inspect.pictures import (
    ITEM_COLOUR,
    mask_picture,
    png_bytes,
    request_colour,
)
from vllm_npu_prep.inspect.png import MAX_HEIGHT, explain_png


def picture_of(scenario: dict, *args) -> np.ndarray:
    return np.array(Image.open(io.BytesIO(explain_png(view_of(scenario), *args))))


@pytest.mark.parametrize(
    ("number", "most", "ticks"),
    [
        (5, 8, [0, 1, 2, 3, 4]),
        (8, 8, list(range(8))),
        (9, 8, [0, 2, 4, 6, 8]),
        (200, 10, list(range(0, 200, 20))),
        (1, 1, [0]),
        (131072, 2, [0, 100000]),
    ],
)
def test_sides_are_numbered_at_round_steps(number, most, ticks):
    assert axis_ticks(number, most) == ticks


@pytest.mark.parametrize("height", [80, 480])
def test_rows_of_a_mask_are_named_near_their_first_one(height):
    view = view_of(worked_examples.load("mixed-200-tokens")[0])
    picture = mask_picture(view, 0, select(view))
    places, rows = zip(*row_names(view, picture, height, 16))
    assert rows == (0, 1, 2, 3, 4)
    assert min(np.diff(places)) >= 16 and max(places) <= height - 16
    wanted = view.step.query_start_loc[:-1] * height / 200
    near = [0, 3, 4] if height == 480 else [0]
    assert np.allclose(np.array(places)[near], wanted[near])
    # Those with the most rows, where there is no place for all.
    assert {row for _, row in row_names(view, picture, 60, 16)} == {2, 3, 4}


def test_images_have_their_colour():
    with_it, without = with_an_image() | {"capture_sizes": [8]}, with_an_image()
    for request in without["requests"]:
        del request["multimodal"]
    pixels = [(picture_of(each) == np.array(ITEM_COLOUR)).all(-1) for each in (with_it, without)]
    assert pixels[0].sum() > 1000 and not pixels[1].any()


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


@pytest.mark.parametrize("channels", [3, 4])
def test_a_picture_in_a_page_is_a_png(channels, seed):
    pixels = np.random.default_rng(seed).integers(0, 256, (7, 5, channels), np.uint8)
    file = io.BytesIO(png_bytes(pixels))
    assert np.array_equal(np.array(Image.open(file, formats=["PNG"])), pixels)


def test_a_scenario_without_some_requests_draws_the_rest():
    assert picture_of(small(), "1", (0, 1)).shape[1] < 1200  # none of them: no mask to draw


def test_a_stray_token_is_named_on_pages_and_pictures():
    view = view_of(small())
    without = len(np.array(Image.open(io.BytesIO(explain_png(view)))))
    view.step.slot_mapping[0][1] = 40  # as a record of something broken may have it
    (line,) = [line for line in block_map(view, 0, [0, 1, 2]).lines if line.strays]
    assert (line.row, line.strays) == (1, "1 token writes blocks that this request doesn't own: 1")
    assert len(np.array(Image.open(io.BytesIO(explain_png(view))))) == without + 20


def test_rows_of_a_mask_have_the_colour_of_their_request():
    view = view_of(small())
    for req_id, owners in ((None, [0, 1, 2, 2, 2]), ("2", [2, 2, 2])):
        pixels = mask_picture(view, 0, select(view, req_id)).pixels
        assert [tuple(row[0, :3]) for row in pixels] == [request_colour(row) for row in owners]
