"""What goes into an engine of the matrix, and that only agreement leaves a mark."""

import pytest

from tests.helpers.judge import Judge
from tests.helpers.models import MODELS
from tests.matrix import combined
from tests.matrix.cells import FALLBACK, FEATURES
from tests.matrix.plan import TOGETHER, no_use
from tests.matrix.results import Matrix


def test_each_feature_goes_into_one_engine():
    planned = [name for engine in TOGETHER for name in engine]
    assert sorted(planned) == sorted(feature.name for feature in FEATURES)


def test_every_row_of_the_matrix_has_a_model_that_can_be_made():
    assert {line["model"] for line in Matrix.read().engines} <= set(MODELS)
    assert no_use("BertModel", "MTP") and not no_use("Qwen3ForCausalLM", "MTP")


def test_a_mark_comes_only_from_answers_that_agree(monkeypatch):
    """The same engine, once with a wrong token in the answers and once with those it gave."""
    asked = ("Qwen3ForCausalLM", FALLBACK, "V1", ["LoRA", "synchronous scheduling"])
    margins = Judge.margins

    def of_a_wrong_token(self, prompt, got, form=None):
        return margins(self, prompt, [*got[:3], got[3] ^ 1, *got[4:]], form)

    with monkeypatch.context() as planted:
        planted.setattr(Judge, "margins", of_a_wrong_token)
        with pytest.raises(AssertionError, match="an answer differs"):
            combined.agrees(*asked)
    (cell,) = combined.agrees(*asked)
    assert cell["model"] == asked[0] and set(asked[3]) <= set(cell["features"])
