"""Engines that fill the matrix: of each model few, with many features each, beside transformers.

With NPU_PREP_DEVICE=npu, under the emulator, those of the emulated card: `make matrix` runs both.
"""

import os

import pytest

from tests.matrix.cells import EMULATED, FALLBACK
from tests.matrix.collect import add
from tests.matrix.plan import engines_of, no_use
from tests.matrix.results import Matrix

DEVICE = EMULATED if os.environ.get("NPU_PREP_DEVICE") == "npu" else FALLBACK


@pytest.mark.parametrize("engine", engines_of(Matrix.read(), DEVICE), ids=str)
def test_answers_agree(engine):
    from tests.matrix.combined import agrees  # which makes models

    model, device, runner, *features = engine.split(", ")
    cells = agrees(model, device, runner, features)
    add(cells)
    useful = {feature for feature in features if not no_use(model, feature)}
    assert useful <= {feature for cell in cells for feature in cell["features"]}
