"""Counts how many steps replayed a graph, how many did not, and why."""

from collections import Counter

from vllm.logger import init_logger

from vllm_npu_prep.prep.padding import GraphMode, Padding, why_eager

logger = init_logger(f"vllm.{__name__}")  # vLLM configures loggers below its own only

REPLAYED = {GraphMode.FULL: "full graph", GraphMode.PIECEWISE: "piecewise graphs"}
EAGER = "eager: "


class StepCounts:
    """The number of steps by how they ran; `last` is the kind of the last step."""

    def __init__(self) -> None:
        self.by_kind: Counter[str] = Counter()
        self.last = ""

    def kind(
        self,
        padding: Padding,
        num_tokens: int,
        uniform_decode: bool,
        mode: GraphMode,
        largest_size: int | None,
        takes_embeds: bool = False,
    ) -> str:
        """Return how a step runs, in a few words; for an eager step, the reason.

        `mode` is the engine's graph mode, and `largest_size` its largest capture size, in tokens.
        """
        if padding.mode in REPLAYED:
            return REPLAYED[padding.mode]
        if mode == GraphMode.NONE:
            return EAGER + "no graphs"
        if takes_embeds:
            return EAGER + "embeddings, which graphs don't read"
        return EAGER + why_eager(mode, num_tokens, largest_size or 0, uniform_decode)

    def add(self, kind: str) -> None:
        """Count a step; log the reason for the first step that runs eagerly for this reason."""
        if kind not in self.by_kind and kind.startswith(EAGER) and kind != EAGER + "no graphs":
            logger.info(
                "A step runs without a graph (%s). Later ones are counted, not logged.",
                kind[len(EAGER) :],
            )
        self.by_kind[kind] += 1
        self.last = kind

    def log_summary(self) -> None:
        if self.by_kind:
            counts = ", ".join(f"{count} {kind}" for kind, count in self.by_kind.most_common())
            logger.info("Steps: %s.", counts)
