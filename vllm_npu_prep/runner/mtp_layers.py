"""The warning about MTP layers that no drafter uses, which both runners give."""

from vllm.config import SpeculativeConfig
from vllm.logger import init_logger

logger = init_logger(f"vllm.{__name__}")  # vLLM configures loggers below its own only


def warn_of_unused_layers(config: SpeculativeConfig) -> None:
    """Say that of several MTP layers only the first one drafts, in all passes."""
    num_layers = getattr(config.draft_model_config.hf_config, "num_nextn_predict_layers", 1)
    if config.method == "mtp" and num_layers > 1:
        logger.warning(
            "Speculation: the model has %d MTP layers; the first one drafts in all passes.",
            num_layers,
        )
