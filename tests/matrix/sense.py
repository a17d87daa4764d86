"""Features that a model has no use for: nobody refuses them, and nothing could show them."""

from tests.matrix.cells import IMAGES, STRUCTURED
from tests.matrix.plan import DRAFTS

SEES = (
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
)
POOLS = (
    "BertForSequenceClassification",
    "BertModel",
    "ModernBertModel",
    "Qwen2ForProcessRewardModel",
    "Qwen2ForSequenceClassification",
)


def without_sense(model: str, feature: str) -> str:
    """Why a model has no use for a feature; empty if it has.

    Parameters
    ----------
    model
        Name of its class.
    feature
        Name of one of `tests.matrix.cells.FEATURES`.
    """
    if feature == IMAGES and model not in SEES:
        return "the model reads text alone"
    if model in POOLS and feature in (*DRAFTS, STRUCTURED, "KV connector", "KV offloading"):
        return "the model generates no tokens"
    return ""
