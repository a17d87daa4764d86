"""The plugin on npu:0: the unmodified torch_npu on the emulated Ascend runtime.

Each test starts a process under ``vllm-npu-prep emulate``, where hazards are errors. What only
hardware can show (numerics, speed, layout limits of real kernels) is not shown here.
"""

import json
import os
from functools import cache
from pathlib import Path

import pytest

from tests.helpers.emulator import emulate, selected, why_no_emulator
from tests.helpers.engine import make_model
from tests.helpers.latent import LATENT_ON_NPUS, V3_EXPERTS_ON_NPUS
from tests.helpers.mtp import make_mtp_model
from tests.helpers.windows import SHARED_LAYERS, THREE_GROUPS
from tests.matrix.collect import add
from tests.npu import generate
from tests.npu.close_calls import same_but_close_calls
from tests.npu.only_some import HEAD_SIZE

pytestmark = pytest.mark.skipif(bool(why_no_emulator()), reason=why_no_emulator())


KEPT = os.environ.get("NPU_PREP_TEST_REFERENCE")
"""Folder in which the model and the reference tokens are kept for other runs (make mutants)."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return Path(KEPT) if KEPT else tmp_path_factory.mktemp("npu")


@pytest.fixture(scope="module")
def model(folder):
    if not (folder / "model").exists():
        # Much of a next token follows from the one before it: drafters can guess some.
        make_model(folder / "model", spread=0.1, embedding_scale=20)
    return folder / "model"


@pytest.fixture(scope="module")
def windowed(folder):
    """Three KV-cache groups: two of windows, one of full attention."""
    if not (folder / "windowed").exists():
        sizes = {"head_dim": HEAD_SIZE, "query_pre_attn_scalar": HEAD_SIZE}
        make_model(folder / "windowed", "Gemma3", **{**THREE_GROUPS, **sizes})
    return folder / "windowed"


@pytest.fixture(scope="module")
def sharing(folder):
    """Windows beside full attention, and layers that share their K and V."""
    if not (folder / "sharing").exists():
        make_model(folder / "sharing", "Gemma3n", **SHARED_LAYERS)
    return folder / "sharing"


@pytest.fixture(scope="module")
def mimo(folder):
    """A model with an MTP layer, whose drafts are accepted at times."""
    if not (folder / "mimo").exists():
        make_mtp_model(folder / "mimo", "MiMo")
    return folder / "mimo"


@pytest.fixture(scope="module")
def glm(folder):
    """Experts, in the MTP layer, too."""
    if not (folder / "glm").exists():
        sizes = {"head_dim": HEAD_SIZE, "n_group": 1, "topk_group": 1}
        make_mtp_model(folder / "glm", "Glm4Moe", **sizes)
    return folder / "glm"


@pytest.fixture(scope="module")
def deepseek(folder):
    """Latent attention and experts, in the MTP layer, too; vLLM compiles its draft passes."""
    if not (folder / "deepseek").exists():
        config = {"q_lora_rank": 96, **LATENT_ON_NPUS, **V3_EXPERTS_ON_NPUS}
        make_mtp_model(folder / "deepseek", "DeepseekV3", **config)
    return folder / "deepseek"


@pytest.fixture(scope="module")
def reference(model, folder):
    """Function of a dtype, a scheduling and maybe another model: tokens and states of the reference
    family on the CPU fallback, eagerly. In this process, which has imported vLLM."""

    def tokens(dtype: str, scheduling: str, model: Path = model) -> dict:
        out = folder / f"tokens-{model.name}-{dtype}-{scheduling}.json"
        if not out.exists():
            made = generate.run(model, "reference", dtype, scheduling, "eager")
            out.write_text(json.dumps(made))
        return json.loads(out.read_text())

    return tokens


@pytest.fixture(scope="module")
def on_npu(request, folder, tmp_path_factory):
    """Function of a model, a delay, a family and cases: what each case gave on npu:0.

    All cases that this run asks for with one delay and allocator share a process, in which hazards
    are errors.
    """
    asked: dict[str, list[str]] = {}
    for params in selected(request, test_tokens_equal_the_reference_family):
        for case in params["cases"]:
            name = f"{folder / 'model'}:{params['attention']}:{case}"
            asked.setdefault(params["delay"], []).append(name)
    for params in selected(request, test_windows_beside_full_attention):
        name = f"{folder / params['which']}:{params['attention']}:bfloat16/windows/{params['mode']}"
        asked.setdefault(params["delay"], []).append(name)

    for params in selected(request, test_mtp_layers_draft):
        for mode in params["cases"]:
            name = f"{folder / params['which']}:{params['attention']}:{mode}"
            asked.setdefault("skewed", []).append(name)

    @cache
    def run_all(delay: str) -> dict[str, dict]:
        for which in {Path(name.split(":")[0]).name for name in asked[delay]}:
            request.getfixturevalue(which)
        out = tmp_path_factory.mktemp("on_npu") / "tokens.json"
        report = out.with_name("report.json")
        name, *others = delay.split()
        options = [each for each in others if each.startswith("--")]
        environment = dict(each.split("=") for each in others if each not in options)
        result = emulate(
            *("-m", "tests.npu.generate", str(out), *asked[delay]),
            options=("--delay", name, "--report", str(report), *options),
            **environment,
        )
        assert result.returncode == 0, (result.stdout + result.stderr)[-4000:]
        written = json.loads(report.read_text())
        assert written["hazards"] == []
        # Segments expand unless the user says otherwise.
        is_fixed = "PYTORCH_NPU_ALLOC_CONF" in environment
        assert (written["calls"].get("aclrtMapMem", 0) > 0) != is_fixed
        said = "TASK_QUEUE_ENABLE=2 is taken for 1" in result.stdout + result.stderr
        assert said == ("TASK_QUEUE_ENABLE" in environment)
        return json.loads(out.read_text())

    def of(model: Path, delay: str, attention: str, cases: list[str]) -> dict[str, dict]:
        results = {case: run_all(delay)[f"{model}:{attention}:{case}"] for case in cases}
        for case, got in results.items():
            assert "error" not in got, f"{case}\n{got['error']}"
            assert got["device"] == "npu:0"
            add(got["cells"])
        return results

    return of


FIXED = "skewed PYTORCH_NPU_ALLOC_CONF=expandable_segments:False"
"""A delay, and a variable of torch_npu's."""

OLD_CANN = "skewed --profile=8.5"
DOCUMENTED = "skewed --profile=docs TASK_QUEUE_ENABLE=2"
OLD_DRIVER = "skewed --driver=24.1.RC3"
"""A delay, and other options of the emulated card. The driver keeps old arguments in replays."""

FEATURES = [
    "float16/async/eager/eagle",
    "float16/sync/FULL/ngram",
    "float16/async/PIECEWISE/draft_model",
    "float16/async/FULL_AND_PIECEWISE/eagle3",
    "float16/lora/FULL_AND_PIECEWISE",
]
"""Cases whose attention the profiles route in other ways."""

WITHOUT_FULL = {"FULL_AND_PIECEWISE": "PIECEWISE", "FULL_DECODE_ONLY": "eager"}
"""Graph modes that start-up chooses where captured attention can't be updated."""

REPLAYED = {
    "eager": set(),
    "PIECEWISE": {"piecewise graphs"},
    "FULL_DECODE_ONLY": {"full graph"},
    "FULL_AND_PIECEWISE": {"full graph", "piecewise graphs"},
    "FULL": {"full graph"},
}


@pytest.mark.parametrize(
    ("attention", "delay", "cases"),
    [
        ("fia", "none", ["float16/sync/eager", "float16/async/eager/eagle"]),
        ("fia", "skewed", ["float16/sync/PIECEWISE", "float16/async/FULL_AND_PIECEWISE"]),
        ("fia", "skewed", ["float16/sync/FULL/ngram", "bfloat16/async/FULL_DECODE_ONLY"]),
        ("fia", "skewed", ["float16/sync/FULL/eagle", "float16/async/PIECEWISE/draft_model"]),
        ("fia", "skewed", ["float16/async/FULL_AND_PIECEWISE/eagle3"]),
        ("fia", "skewed", ["float16/lora/eager", "float16/lora/FULL_AND_PIECEWISE"]),
        ("fia", FIXED, ["float16/sync/FULL_AND_PIECEWISE", "float16/sync/eager"]),
        ("fia", OLD_CANN, ["bfloat16/async/FULL_AND_PIECEWISE", "float16/sync/eager"]),
        ("fia", DOCUMENTED, ["bfloat16/async/FULL_AND_PIECEWISE", "float16/sync/eager"]),
        ("fia", OLD_CANN, FEATURES),
        ("fia", DOCUMENTED, FEATURES),
        ("fia", OLD_DRIVER, ["float16/sync/FULL_AND_PIECEWISE", "bfloat16/async/FULL_DECODE_ONLY"]),
        ("fia", "skewed", ["float16/async-v2/FULL_AND_PIECEWISE", "float16/sync-v2/FULL/eagle"]),
        (
            "fia",
            "skewed",
            [
                "float16/async-v2/FULL_AND_PIECEWISE/eagle3",
                "float16/sync-v2/FULL",
                "float16/async-v2/FULL_AND_PIECEWISE/draft_model",
            ],
        ),
        ("fia", "skewed", ["float16/lora-v2/FULL_AND_PIECEWISE", "float16/async-v2/PIECEWISE"]),
        ("atb", "skewed", ["float16/async-v2/FULL_DECODE_ONLY", "float16/sync-v2/eager"]),
        ("atb", "skewed", ["float16/async-v2/eager/eagle", "float16/sync-v2/PIECEWISE/eagle3"]),
        ("atb", "none", ["float16/sync/eager", "float16/sync/FULL_AND_PIECEWISE/ngram"]),
        ("atb", "skewed", ["float16/async/eager/draft_model", "float16/sync/PIECEWISE/eagle3"]),
        ("atb", "skewed", ["bfloat16/async/FULL_DECODE_ONLY", "float16/lora/PIECEWISE"]),
    ],
    ids=[
        "fia-eager",
        "fia-piecewise",
        "fia-full",
        "fia-drafts",
        "fia-eagle3",
        "fia-lora",
        "fia-fixed-segments",
        "fia-cann-8.5",
        "fia-documented",
        "fia-cann-8.5-features",
        "fia-documented-features",
        "fia-old-driver",
        "fia-v2",
        "fia-v2-drafts",
        "fia-v2-lora",
        "atb-v2",
        "atb-v2-drafts",
        "atb-eager",
        "atb-drafts",
        "atb-full",
    ],
)
def test_tokens_equal_the_reference_family(model, reference, on_npu, attention, delay, cases):
    states: set[str] = set()
    for case, ours in on_npu(model, delay, attention, cases).items():
        dtype, scheduling, mode, *method = case.split("/")
        if delay == OLD_DRIVER:
            mode = WITHOUT_FULL[mode]
        theirs = reference(dtype, scheduling.removesuffix("-v2"))  # V1's
        if dtype == "bfloat16":  # fused operators round elsewhere: close calls may fall otherwise
            same_but_close_calls(model, scheduling, ours, theirs)
        else:
            assert ours["tokens"] == theirs["tokens"], case
        replayed = {kind for kind in ours["steps"] if not kind.startswith("eager")}
        if (attention, mode, method) == ("atb", "FULL_AND_PIECEWISE", ["ngram"]):
            assert replayed == {"piecewise graphs"}, "dense masks of drafts stay out of graphs"
        else:
            assert replayed == REPLAYED[mode], (case, ours["steps"])
        if method and method != ["ngram"]:
            assert ours["verified"].keys() >= {"rejected", "partly"}, case
            assert mode == "FULL" or "SpecDecoding" in ours["states"]
        elif mode == "eager":
            assert ours["states"] == theirs["states"], case
        states |= set(ours["states"])
    assert "ChunkedPrefill" in states


@pytest.mark.parametrize(
    ("attention", "which", "mode", "replayed", "delay"),
    [
        ("fia", "windowed", "FULL_AND_PIECEWISE", REPLAYED["FULL_AND_PIECEWISE"], "skewed"),
        ("fia", "sharing", "FULL", REPLAYED["FULL"], "skewed"),
        # Dense masks of windows stay out of graphs
        ("atb", "windowed", "FULL_AND_PIECEWISE", REPLAYED["PIECEWISE"], "skewed"),
        ("fia", "windowed", "FULL_AND_PIECEWISE", REPLAYED["FULL_AND_PIECEWISE"], OLD_CANN),
        ("fia", "windowed", "FULL_AND_PIECEWISE", REPLAYED["FULL_AND_PIECEWISE"], DOCUMENTED),
    ],
    ids=["fia", "fia-sharing", "atb", "cann-8.5", "documented"],
)
def test_windows_beside_full_attention(
    request, reference, on_npu, attention, which, mode, replayed, delay
):
    """Three groups, or layers that share K and V; in bfloat16: vLLM refuses float16 for Gemma 3."""
    model, case = request.getfixturevalue(which), f"bfloat16/windows/{mode}"
    ours = on_npu(model, delay, attention, [case])[case]
    same_but_close_calls(model, "windows", ours, reference("bfloat16", "windows", model))
    assert {"PrefillNoCache", "ChunkedPrefill"} <= set(ours["states"])
    assert ("DecodeOnly" in ours["states"]) == (mode != "FULL")
    assert {kind for kind in ours["steps"] if not kind.startswith("eager")} == replayed


@pytest.mark.parametrize(
    ("attention", "which", "cases"),
    [
        ("fia", "mimo", ["float16/async/FULL_AND_PIECEWISE/mtp"]),
        (
            "fia",
            "mimo",
            ["float16/sync/eager/mtp", "float16/async/FULL/mtp", "float16/sync/PIECEWISE/mtp"],
        ),
        ("atb", "mimo", ["float16/async/FULL_DECODE_ONLY/mtp"]),
        ("fia", "mimo", ["float16/async-v2/FULL_AND_PIECEWISE/mtp", "float16/sync-v2/eager/mtp"]),
        ("fia", "glm", ["float16/async/FULL_AND_PIECEWISE/mtp"]),
        ("fia", "glm", ["float16/sync/eager/mtp"]),
        ("fia", "deepseek", ["bfloat16/async/FULL_AND_PIECEWISE/mtp"]),
        (
            "fia",
            "deepseek",
            [
                "bfloat16/sync/eager/mtp",
                "bfloat16/async/eager/mtp",
                "bfloat16/sync/PIECEWISE/mtp",
                "bfloat16/sync/FULL_DECODE_ONLY/mtp",
            ],
        ),
    ],
    ids=[
        "fia",
        "fia-other-modes",
        "atb",
        "v2",
        "glm",
        "glm-eager",
        "deepseek",
        "deepseek-other-modes",
    ],
)
def test_mtp_layers_draft(request, reference, on_npu, attention, which, cases):
    """Draft passes of DeepSeek are compiled, so they are padded to the sizes of graphs."""
    model = request.getfixturevalue(which)
    for case, ours in on_npu(model, "skewed", attention, cases).items():
        dtype, scheduling, mode, _ = case.split("/")
        theirs = reference(dtype, scheduling.removesuffix("-v2"), model)
        if dtype == "bfloat16":
            same_but_close_calls(model, scheduling, ours, theirs)
        else:
            assert ours["tokens"] == theirs["tokens"], case
        print(case, ours["verified"])
        kinds = (
            ("partly", "rejected") if which == "deepseek" else ("accepted", "partly", "rejected")
        )
        assert min(ours["verified"][what] for what in kinds) > 0
        assert {kind for kind in ours["steps"] if not kind.startswith("eager")} == (
            set() if (attention, mode) == ("atb", "FULL_DECODE_ONLY") else REPLAYED[mode]
        )


def test_a_chip_that_is_not_supported_is_refused_in_one_line(model):
    code = CONFIGURE.format(settings=[{}], model=str(model))
    result = emulate("-c", code, options=("--soc", "Ascend310P3"))
    assert result.returncode != 0
    (line,) = [row for row in result.stderr.splitlines() if "vllm_npu_prep: error" in row]
    assert "Ascend310P" in line
    assert "Traceback" not in result.stderr


REFUSED = {
    "bfloat16, float16": {"dtype": "float32"},
    "multiples of 16": {"block_size": 24},
    "npu": {"additional_config": {"npu_prep": {"attention": "reference"}}},
    "compressed": {"additional_config": {"npu_prep": {"mask": "dense"}}},
    "FULL_AND_PIECEWISE": {
        "additional_config": {"npu_prep": {"attention": "atb"}},
        "compilation_config": {"cudagraph_mode": "FULL"},
    },
    "KV connector NixlConnector is not supported": {
        "kv_transfer_config": {"kv_connector": "NixlConnector", "kv_role": "kv_both"},
        "enable_chunked_prefill": False,
    },
    "4 ranks on this host: 2 NPUs are visible": {"data_parallel_size": 4},
}

CONFIGURE = """
from vllm.engine.arg_utils import EngineArgs
from vllm_npu_prep.errors import PrepError
for settings in {settings!r}:
    settings = {{"dtype": "float16", "skip_tokenizer_init": True, **settings}}
    try:
        EngineArgs(model={model!r}, **settings).create_engine_config()
    except PrepError as error:
        if len({settings!r}) == 1:
            raise
        print("REFUSED", str(error).replace(chr(10), "NEWLINE"))
"""


@pytest.fixture(scope="module")
def configured(model, folder):
    """What came of configuring engines with `REFUSED`, and one with too many sizes of graphs."""
    if not (folder / "deep").exists():
        make_model(folder / "deep", num_hidden_layers=64, hidden_size=16, head_dim=16)
    code = CONFIGURE.format(settings=list(REFUSED.values()), model=str(model))
    code += (
        "settings = dict(dtype='float16', skip_tokenizer_init=True, max_num_seqs=256)\n"
        f"config = EngineArgs(model={str(folder / 'deep')!r}, **settings).create_engine_config()\n"
        "print('SIZES', config.compilation_config.cudagraph_capture_sizes)\n"
    )
    result = emulate("-c", code, options=("--devices", "2"))
    assert result.returncode == 0, (result.stdout + result.stderr)[-4000:]
    return result.stdout


def test_what_an_npu_cannot_run_is_refused(configured):
    lines = [line for line in configured.splitlines() if line.startswith("REFUSED")]
    assert len(lines) == len(REFUSED)
    for line, message in zip(lines, REFUSED):
        assert message in line
        assert "NEWLINE" not in line


def test_more_sizes_than_streams_are_thinned(configured):
    """1800 streams for 65 pieces of each size and one whole model."""
    assert " thinned to 27 (66 streams for each, 1800 for all)" in configured
    (line,) = [line for line in configured.splitlines() if line.startswith("SIZES")]
    sizes = json.loads(line.removeprefix("SIZES"))
    assert len(sizes) == 27
    assert {1, 256, 512} <= set(sizes)
