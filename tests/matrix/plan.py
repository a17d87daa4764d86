"""Which features go into one engine: as many as fit together, so that few engines are started."""

from itertools import product

from tests.helpers.models import POOLS, SEES, is_a
from tests.matrix.cells import IMAGES, RANKS, STRUCTURED, W8A8
from tests.matrix.results import Matrix
from vllm_npu_prep.compat.releases import installed_vllm

OWN = "tests/matrix/test_rows.py::test_answers_agree"
DRAFTS = ("ngram", "draft model", "EAGLE", "EAGLE-3", "MTP")
TOGETHER = (
    (
        *("without graphs", "synchronous scheduling", "chunked prefill", "prefix caching", "LoRA"),
        *("ngram", "sleep mode", STRUCTURED, "float32"),
    ),
    ("piecewise graphs", "full graphs", "asynchronous scheduling", "draft model", IMAGES),
    ("EAGLE", "bfloat16"),
    ("EAGLE-3", "float16"),
    ("MTP", W8A8),
    # It knows prompts by their token ids, and takes them whole. Drafters' caches it doesn't store
    ("KV connector",),
    ("KV offloading",),
    ("prompt embeddings",),
    ("pooling",),
    ("tensor parallelism", "expert parallelism", "decode context parallelism"),
    ("pipeline parallelism",),
    ("data parallelism",),
)
"""Features that an engine may have together. Those of several ranks, which take long to start, come
last."""


def no_use(model: str, feature: str) -> str:
    """Why a feature isn't tried with a model: nobody refuses it, and nothing could show it."""
    if feature == IMAGES and not is_a(SEES, model):
        return "the model reads text alone"
    if is_a(POOLS, model) and feature == "full graphs":
        return "vLLM takes piecewise graphs in their place for models that pool"
    if is_a(POOLS, model) and feature in (*DRAFTS, STRUCTURED, "KV connector", "KV offloading"):
        return "the model generates no tokens"
    if is_a(POOLS, model) and feature in RANKS:
        return "engines of several ranks generate"
    return ""


def engines_for(wanted: set[str]) -> list[list[str]]:
    """Share features out among few engines."""
    engines = ([name for name in together if name in wanted] for together in TOGETHER)
    return [engine for engine in engines if engine]


def engines_of(matrix: Matrix, device: str) -> list[str]:
    """Engines that fill the rows of a device, each as "model, device, runner, features".

    Those that did so before, and new ones for cells that nothing has filled yet.
    """
    release, known, found = installed_vllm(), {*matrix.filled(), *matrix.tried}, list[str]()
    for line in matrix.engines:
        if line["test"].startswith(OWN) and (line["release"], line["device"]) == (release, device):
            found.append(line["test"].partition("[")[2].removesuffix("]"))
    models = sorted({model for _, model in matrix.answers})
    for runner, model in product(("V1", "V2"), models):
        table = release, device, runner
        wanted = {
            name
            for name, told in matrix.answers.get((table, model), {}).items()
            if not told and (table, model, name) not in known and not no_use(model, name)
        }
        found += [", ".join([model, device, runner, *each]) for each in engines_for(wanted)]
    return list(dict.fromkeys(found))
