"""Which features go into one engine: as many as fit together, so that few engines are started."""

from collections.abc import Iterable
from itertools import product

from tests.matrix.cells import FEATURES, IMAGES, MTP, STRUCTURED
from tests.matrix.results import Matrix
from vllm_npu_prep.compat.releases import installed_vllm

DTYPES = ("float32", "bfloat16", "float16")
DRAFTS = ("ngram", "draft model", "EAGLE", "EAGLE-3", MTP)
CONNECTORS = ("KV connector", "KV offloading")
RANKS = {
    "tensor parallelism",
    "pipeline parallelism",
    "data parallelism",
    "expert parallelism",
    "decode context parallelism",
}
"""Features of engines of several ranks, which take long to start and are tried last."""
ONE_OF = (
    DTYPES,
    DRAFTS,
    CONNECTORS,
    ("synchronous scheduling", "asynchronous scheduling"),
    ("without graphs", "piecewise graphs"),
    ("without graphs", "full graphs"),
    ("tensor parallelism", "pipeline parallelism", "data parallelism"),
    ("pipeline parallelism", "expert parallelism"),
    ("pipeline parallelism", "decode context parallelism"),
    ("data parallelism", "decode context parallelism"),
)
"""Of each of these an engine has one at most."""
OF_ANY_ENGINE = {
    *DTYPES,
    "synchronous scheduling",
    "asynchronous scheduling",
    "without graphs",
    "piecewise graphs",
    "full graphs",
    "chunked prefill",
    "prefix caching",
}
"""Features that go with ranks and with pooling. Others are left out there."""
APART: tuple[tuple[set[str], set[str]], ...] = (
    ({"pooling"}, {*DRAFTS, *CONNECTORS, STRUCTURED, IMAGES, "prompt embeddings", "LoRA"}),
    ({"pooling"}, {"int8 weights and inputs (W8A8)"}),
    # Drafters have KV caches that no connector stores
    (set(CONNECTORS), {*DRAFTS, "prompt embeddings", IMAGES, "sleep mode"}),
    # It knows prompts by their token ids, and takes them whole
    ({"KV connector"}, {"LoRA", "chunked prefill", "full graphs"}),
    ({"prompt embeddings"}, {*DRAFTS, IMAGES, STRUCTURED, "LoRA"}),
    ({"int8 weights and inputs (W8A8)"}, {"LoRA", IMAGES, "draft model", "EAGLE", "EAGLE-3"}),
    ({"ngram", "pipeline parallelism"}, {"asynchronous scheduling"}),
    ({"LoRA"}, {IMAGES}),
)
"""Features of the first set of a pair go with none of the second."""
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
OWN = ("tests/matrix/test_rows.py::test_answers_agree", "tests/matrix/combined.py::agrees")
"""Where engines that are started on purpose say they come from; the second, until 2026-11-28."""


def without_sense(model: str, feature: str) -> str:
    """Why a model has no use for a feature: nobody refuses it, and nothing could show it."""
    if feature == IMAGES and model not in SEES:
        return "the model reads text alone"
    if model in POOLS and feature in (*DRAFTS, STRUCTURED, *CONNECTORS):
        return "the model generates no tokens"
    return ""


def go_together(one: str, other: str) -> bool:
    """Whether an engine may have both features."""
    if any(one in group and other in group for group in ONE_OF):
        return False
    for features, others in ((one, other), (other, one)):
        if features in RANKS and others not in RANKS | OF_ANY_ENGINE:
            return False
        if any(features in first and others in second for first, second in APART):
            return False
    return True


def engines_for(wanted: Iterable[str]) -> list[list[str]]:
    """Share features out among few engines, in their order.

    Dtypes come last, to engines that have the fewest: without one an engine of the fallback
    computes in float32, where tokens are compared exactly.
    """
    wanted = list(wanted)
    dtypes = [feature for feature in wanted if feature in DTYPES]
    engines: list[list[str]] = []
    for feature in sorted((f for f in wanted if f not in DTYPES), key=lambda f: f in RANKS):
        for engine in engines:
            if all(go_together(feature, each) for each in engine):
                engine.append(feature)
                break
        else:
            engines.append([feature])
    for dtype in dtypes:
        free = [e for e in engines if not set(e) & {*DTYPES, *RANKS}]
        if dtype == "float32":
            free = free[:1]
        if free:
            min(free, key=len).append(dtype)
        else:
            engines.append([dtype])
    return sorted(engines, key=lambda engine: bool(set(engine) & RANKS))


def engines_of(matrix: Matrix, device: str) -> list[str]:
    """Engines that fill the rows of a device, each as "model, device, runner, features".

    Those that did so before, and new ones for cells that nothing has filled yet.
    """
    found, filled = [], matrix.filled()
    for line in matrix.engines:
        test, _, named = line["test"].partition("[")
        if test in OWN and (line["release"], line["device"]) == (installed_vllm(), device):
            found.append(named.removesuffix("]"))
    for runner, model in product(("V1", "V2"), sorted({model for model, _ in matrix.configs})):
        table = installed_vllm(), device, runner
        told = matrix.answers.get((table, model), {})
        wanted = [
            name
            for name in (feature.name for feature in FEATURES)
            if name in told
            and not told[name]
            and (table, model, name) not in {*filled, *matrix.tried}
            and not without_sense(model, name)
            and not (name in RANKS and model in POOLS)  # those only generate
        ]
        found += [", ".join([model, device, runner, *each]) for each in engines_for(wanted)]
    return list(dict.fromkeys(found))
