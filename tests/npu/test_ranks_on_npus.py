"""Engines of several ranks, each on an emulated NPU: tokens are those of the CPU fallback.

Hazards are errors, and streams are slow in different ways. Prompts and models are those of
`test_on_emulated_npu`; the reference is one process of the CPU fallback.
"""

import json
import shutil
from functools import cache
from pathlib import Path

import pytest

from tests.helpers.clear_choices import decide_clearly
from tests.helpers.emulator import emulate, selected, why_no_emulator
from tests.helpers.engine import REPLAYED, make_model
from tests.helpers.huggingface import greedy_tokens
from tests.helpers.hybrids import EXPERTS as EXPERTS_BESIDE
from tests.helpers.hybrids import ON_NPUS
from tests.helpers.latent import LATENT_ON_NPUS, V3_EXPERTS_ON_NPUS
from tests.helpers.mtp import make_mtp_model
from tests.helpers.quantized import QUANTIZE, rounded_model
from tests.matrix.collect import add
from tests.npu import generate, two_cards
from tests.npu.close_calls import CLOSE_IN_INT8, same_but_close_calls
from tests.npu.on_ranks import EXPERTS, INT8, SECONDS, on_the_fallback

pytestmark = pytest.mark.skipif(bool(why_no_emulator()), reason=why_no_emulator())

CASES = [
    "float16/tp2/async/FULL_AND_PIECEWISE",
    "bfloat16/pp2/sync/eager",
    "float16/tp2/sync/PIECEWISE/lora",
    "bfloat16/tp2/async/eager",
    "float16/tp2/async/FULL_AND_PIECEWISE/eagle",
    "bfloat16/tp2/sync/FULL_DECODE_ONLY",
    "float16/tp2/async/PIECEWISE/images",
    "float16/pp2/sync/FULL_AND_PIECEWISE",
    "float16/pp2/sync/PIECEWISE/lora",
    "bfloat16/tp2pp2/sync/PIECEWISE",
    "float16/tp2pp2/sync/eager",
    "float16/dp2tp2/async/FULL_AND_PIECEWISE",
    "bfloat16/dp2tp2/sync/eager",
    "float16/dp2/async/FULL_AND_PIECEWISE/experts",
    "bfloat16/dp2/async/FULL_AND_PIECEWISE/experts",
    "bfloat16/tp2/sync/PIECEWISE/scattered",
    "float16/tp2/async/FULL_AND_PIECEWISE/experts",
    "float16/tp2/sync/PIECEWISE/scattered",
    "float16/tp2/sync/eager/cut",
    "float16/dp2tp2/sync/eager/experts",
    "float16/dp2tp2/async/FULL_AND_PIECEWISE/experts",
    "bfloat16/tp2/async/FULL_AND_PIECEWISE/latent",
    "bfloat16/dp2/async/FULL_AND_PIECEWISE/latent",
    "float16/tp2/sync/eager/int8",
    "bfloat16/tp2/async/FULL_AND_PIECEWISE/int8-static",
    "float16/tp2/async/FULL_AND_PIECEWISE/int8-experts",
    "float16/tp2/async/FULL_AND_PIECEWISE/int8-latent",
    "bfloat16/pp2/sync/FULL_AND_PIECEWISE/latent",
    "bfloat16/tp2/async/FULL_AND_PIECEWISE/mtp",
    "bfloat16/tp2/async/FULL_AND_PIECEWISE/int8-mtp",
    "bfloat16/tp2/sync/eager/int8-states",
    "bfloat16/dp2/async/FULL_AND_PIECEWISE/mtp",
    "bfloat16/tp2/async/FULL_AND_PIECEWISE/states",
    "bfloat16/tp2/async/FULL_AND_PIECEWISE/states-experts",
    "bfloat16/tp2/async/FULL_AND_PIECEWISE/states-mtp",
    "float16/tp2/async-v2/FULL_AND_PIECEWISE/eagle",
    "float16/pp2/sync-v2/FULL_AND_PIECEWISE",
    "float16/dp2/async-v2/FULL_AND_PIECEWISE/experts",
    "float16/dp2tp2/sync-v2/eager",
    "float16/tp2cp2/sync/eager/one-head",
    "float16/tp4cp2/async/FULL_AND_PIECEWISE",
    "bfloat16/tp4cp2/async/FULL_AND_PIECEWISE/latent",
    "bfloat16/tp2cp2/sync/eager/latent",
    "float16/tp2/async/FULL_AND_PIECEWISE/sleep",
    "float16/tp2/async/FULL_AND_PIECEWISE/offload",
]
"""Dtype, layout, scheduling, graphs, feature. vLLM schedules pipeline stages synchronously."""

MIXTURE = {
    "num_experts": 5,  # which neither two ranks nor four share evenly
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "mlp_only_layers": [0],
}
CLEAR = 0.6
"""By how many standard deviations of logits the int8 model with an MTP layer decides: a level more
or less moves logits by less, so tokens are exactly those of transformers' rounded model."""

RANKS = {"tp2": (2, 2), "pp2": (2, 2), "dp2": (2, 1), "tp2pp2": (4, 4), "dp2tp2": (4, 2)}
RANKS |= {"tp2cp2": (2, 2), "tp4cp2": (4, 4)}
"""Ranks of a layout, and of each of its engines."""

OF_SHARED_CONTEXTS = {
    "one-head": {"launches": 40, "hidden_copies": 16, "event_waits": 8},
    "latent": {"launches": 31, "event_waits": 8},
}
"""What attention of a layer with its projections asks of each card in a step of decodes; ranks wait
twice for each of four exchanges: of queries, of sums, of results, and of what is projected."""

MIXED = {"one-head": 5, "latent": 23}
"""Most launches that prepare a mixed step with contexts; of decodes it is two at most."""


OF_A_SHARE = ("slot_mapping", "slot_mappings", "dcp_local_seq_lens", "dcp_local_context_lens")
"""Arrays of which ranks that share contexts have their own."""

OF_CONTEXTS = tuple(f"context_piece_{what}" for what in ("reqs", "starts", "lens", "chunks"))
"""Arrays that only steps with contexts of prefills fill."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def model(folder):
    return make_model(folder / "model", spread=0.1, embedding_scale=20)


@pytest.fixture(scope="module")
def one_head(folder):
    config = {"spread": 0.1, "embedding_scale": 20, "num_key_value_heads": 1}
    return make_model(folder / "one_head", **config)


@pytest.fixture(scope="module")
def mixture(folder):
    return make_model(folder / "mixture", "Qwen3Moe", **MIXTURE)


@pytest.fixture(scope="module")
def latent(folder):
    config = {"spread": 0.1, "embedding_scale": 20, "q_lora_rank": 96, **V3_EXPERTS_ON_NPUS}
    return make_model(folder / "latent", "DeepseekV3", **LATENT_ON_NPUS, **config)


@pytest.fixture(scope="module")
def mtp(folder):
    config = {"q_lora_rank": 96, **LATENT_ON_NPUS, **V3_EXPERTS_ON_NPUS}
    return make_mtp_model(folder / "mtp", "DeepseekV3", **config)[0]


@pytest.fixture(scope="module")
def states(folder):
    """Gated delta nets; a state of a rank fills the K of 256 tokens."""
    config = {**ON_NPUS, "head_dim": 128, "spread": 0.1, "embedding_scale": 20}
    return make_model(folder / "states", "Qwen3_5", **config)


@pytest.fixture(scope="module")
def states_experts(folder):
    """Gated delta nets and experts, some on either rank; a state fills the K of 256 tokens."""
    config = {**ON_NPUS, **EXPERTS_BESIDE, "head_dim": 128, "spread": 0.1, "embedding_scale": 20}
    return make_model(folder / "states-experts", "Qwen3Next", **config)


@pytest.fixture(scope="module")
def states_mtp(folder):
    """The same as `states`, and a layer that drafts."""
    return make_mtp_model(folder / "states-mtp", "Qwen3_5", **{**ON_NPUS, "head_dim": 128})[0]


@pytest.fixture(scope="module")
def int8(request, folder, model, latent):
    """Folders of int8 models and of their float ones, by feature; files are written once."""
    # Which token follows is clearer than in `mixture`: a level more moves routers, too.
    how = {"spread": 0.1, "embedding_scale": 20, **MIXTURE}
    clear_mixture = make_model(folder / "clear_mixture", "Qwen3Moe", **how)
    made = {
        "int8": (model, "compressed-tensors", False, ()),
        "int8-static": (model, "modelslim", True, ()),
        "int8-experts": (clear_mixture, "modelslim", False, ()),
        "int8-latent": (latent, "modelslim", False, ("kv_b_proj",)),
        "int8-mtp": (folder / "clear_mtp", "modelslim", False, ("kv_b_proj",)),
        "int8-states": (folder / "states", "compressed-tensors", False, ()),
    }

    @cache
    def find(feature: str) -> tuple[Path, Path]:
        source, *how = made[feature]
        if feature == "int8-mtp":
            shutil.copytree(request.getfixturevalue("mtp"), source)
        elif feature == "int8-states":
            assert request.getfixturevalue("states") == source
        QUANTIZE(source, folder / feature, *how)
        if feature == "int8-mtp":
            network = rounded_model(source, folder / feature, RANKS["tp2"][1])
            made_of = source, folder / feature
            decide_clearly(network, generate.prompts("sync"), 12, CLEAR, *made_of)
        return folder / feature, source

    return find


@pytest.fixture(scope="module")
def model_of(request, model):
    """Function of a feature: the folder of its model."""

    def find(feature: str) -> Path:
        if feature == "images":
            return request.getfixturevalue("vision_models") / "qwen2_5_vl"
        if feature in ("latent", "mtp", "states", "states-experts", "states-mtp", "one-head"):
            return request.getfixturevalue(feature.replace("-", "_"))
        if feature in INT8:
            return request.getfixturevalue("int8")(feature)[0]
        return request.getfixturevalue("mixture") if feature in EXPERTS else model

    return find


@pytest.fixture(scope="module")
def reference(model_of):
    """Function of a dtype and a feature: tokens of one process of the CPU fallback, eagerly."""

    @cache
    def tokens(dtype: str, feature: str) -> list[list[int]]:
        scheduling = "lora" if feature == "lora" else "sync"
        return generate.run(model_of(feature), "reference", dtype, scheduling, "eager")["tokens"]

    return tokens


@pytest.fixture(scope="module")
def on_ranks(request, model_of, tmp_path_factory):
    """Function of a case: what its engine gave. All cases of this run share a command."""

    @cache
    def run_all() -> dict[str, dict]:
        asked = (
            *selected(request, test_tokens_are_those_of_the_cpu_fallback),
            *selected(request, test_one_card_computes_what_another_decodes),
        )
        cases = [params["case"] for params in asked]
        names = [f"{model_of(feature_of(case))}:{case}" for case in cases]
        out = tmp_path_factory.mktemp("on_ranks") / "tokens.json"
        report = out.with_name("report.json")
        options = ("--devices", "4", "--delay", "skewed", "--hang-seconds", "120")
        result = emulate(
            *("-m", "tests.npu.on_ranks", str(out), *names),
            options=(*options, "--report", str(report)),
            timeout=60 + SECONDS * len(names),
        )
        assert result.returncode == 0, (result.stdout + result.stderr)[-4000:]
        found = json.loads(report.read_text())
        assert found["hazards"] == []
        alone = all("two-cards" in case for case in cases)  # which share a folder alone
        assert alone or any(name.startswith("Hccl") for name in found["kernels"])
        return {name.split(":")[1]: got for name, got in json.loads(out.read_text()).items()}

    def of(case: str) -> dict:
        add(run_all()[case]["cells"])
        return run_all()[case]

    return of


def feature_of(case: str) -> str:
    """The last part of a case, if it has one."""
    return "".join(case.split("/")[4:])


@pytest.mark.parametrize("case", CASES, ids=[case.replace("/", "-") for case in CASES])
def test_tokens_are_those_of_the_cpu_fallback(request, model_of, reference, on_ranks, case):
    """And every rank of an engine prepared the same arrays in every step, with one copy each."""
    got = on_ranks(case)
    assert "error" not in got, got["error"]
    dtype, layout, scheduling, mode, *_ = case.split("/")
    of_case = "V2" if scheduling.endswith("-v2") else "V1"
    assert {fact["runner"] for fact in got["facts"]} == {of_case}
    feature = feature_of(case)
    if feature == "images":
        expected = tokens_of_transformers(model_of(feature))
    elif feature == "int8-mtp":  # the fallback's, too: `tests/engine/test_quantization.py`
        expected = tokens_of_rounded(*request.getfixturevalue("int8")(feature)[::-1])
    elif feature in INT8:
        expected = on_the_fallback(model_of(feature), dtype, layout, feature)
    else:
        expected = reference(dtype, feature)
    if feature in INT8 and feature != "int8-mtp":  # a level more or less, here and there
        rounded = rounded_model(*request.getfixturevalue("int8")(feature)[::-1], RANKS[layout][1])
        one_of = 2 if feature == "int8-states" else 4  # a state remembers each level
        tokens = {"tokens": expected}
        same_but_close_calls(rounded, "sync", got, tokens, CLOSE_IN_INT8, one_of)
    elif dtype == "bfloat16" and feature not in INT8:
        # Fused operators round elsewhere: close calls may fall otherwise. Where a router takes
        # another expert, logits move by ten times of what rounding does else.
        one_of = 2 if feature == "states-experts" else 4
        tokens = {"tokens": expected}
        same_but_close_calls(model_of(feature), "sync", got, tokens, one_of=one_of)
    else:
        assert got["tokens"] == expected

    if feature.endswith("mtp"):
        assert got["accepted"] > 0
    num_ranks, per_engine = RANKS[layout]
    devices = [fact["device"] for fact in got["facts"]]
    assert devices == [f"npu:{rank}" for rank in range(num_ranks)]
    replayed = REPLAYED[mode] if mode != "eager" else set()
    if layout.endswith("cp2"):  # ranks exchange results between the pieces of a graph
        replayed = replayed & {"piecewise graphs"}
    several = per_engine < num_ranks  # which engine gets a request is a matter of time
    if several:
        replayed = replayed & {"full graph"}
    for counts in got["counts"]:
        assert replayed <= set(counts)
    least = max if several else min
    assert least(map(len, got["noted"])) >= 8
    for first in range(0, num_ranks, per_engine):
        steps = got["noted"][first : first + per_engine]
        if layout.startswith("pp"):  # stages have experts of their own, or none
            steps = [[{**each, "num_pairs": 0} for each in stage] for stage in steps]
        if layout.endswith("cp2"):
            check_shares(steps)
            steps = [[without_shares(step) for step in rank] for rank in steps]
        for other in steps[1:]:
            assert other == steps[0], differing(steps[0], other)
    if layout.startswith("dp") and feature == "experts":
        check_engines(*got["noted"][::per_engine])
    if feature == "sleep":
        check_sleep(expected, **got["slept"])
    elif feature == "offload":
        assert got["rounds"][0] == got["rounds"][1]
        assert got["loaded"] >= 4 * 128, "tokens that came from the host"
    if layout.endswith("cp2") and mode == "eager":
        assert got["launched"] == [OF_SHARED_CONTEXTS[feature]] * num_ranks, "and no syncs"
        for asked in got["asked"]:
            launches = [step.get("launches", 0) for step in asked]
            assert max(launches) <= MIXED[feature] and sum(each > 2 for each in launches) <= 3
    assert least(map(len, got["asked"])) >= 8
    for asked in filter(None, got["asked"]):
        copies = [step.get("h2d_copies", 0) for step in asked]
        # Which rows have which adapter is a copy of its own, if it changed.
        if feature == "lora":
            assert set(copies) <= {1, 2}
        elif feature == "images":  # which have copies of their own
            assert min(copies) == 1
        else:
            assert set(copies) == {1}


@pytest.mark.parametrize("case", ["float16/two-cards/async/PIECEWISE"], ids=["float16"])
def test_one_card_computes_what_another_decodes(reference, on_ranks, case):
    """Prompts are handed over one by one, each while the one before is decoded, on another card.

    Tokens are those of an engine alone. The engine that decodes computes the rest of each prompt
    and no more; all of one that is asked for while it is half stored.
    """
    got = on_ranks(case)
    assert "error" not in got, got["error"]
    prompts, computes, decodes = generate.prompts("async"), got["computes"], got["decodes"]
    facts = [fact for engine in (computes, decodes) for fact in engine["facts"]]
    assert [fact["device"] for fact in facts] == ["npu:0", "npu:1"]
    assert len({fact["pid"] for fact in facts}) == 2
    alone = decodes["alone"]
    assert [row[:12] for row in alone] == reference("float16", "")[1:]
    assert decodes["tokens"] == alone
    firsts = {str(number): alone[number][:1] for number in two_cards.with_blocks(prompts)}
    assert computes["tokens"] == firsts
    size, early = two_cards.BLOCK_SIZE, two_cards.early_one(prompts)
    found = {str(number): (len(prompt) - 1) // size * size for number, prompt in enumerate(prompts)}
    assert decodes["cached"] == {**found, str(early): 0}
    assert (decodes["again"], decodes["cached_again"]) == (alone[early], found[str(early)])
    assert decodes["most"] > 1, "requests decoded at once"
    assert "piecewise graphs" in decodes["counts"][0]


def check_engines(steps: list[dict], others: list[dict]) -> None:
    """Two engines that share experts step together, with the same tokens of both for experts.

    The first one gets two requests, the other one gets one with half as many tokens. Routers of
    replayed graphs tell nothing: what these count is in `tests/npu/on_device/test_experts.py`.
    """
    together = list(zip(steps, others))  # one may have had a last dummy run more
    assert any(other["is_dummy"] for _, other in together), "the other engine was idle"
    assert any(not other["is_dummy"] for _, other in together), "and had a request"
    sizes: dict[bool, set[int]] = {True: set(), False: set()}
    for mine, other in together:
        assert (mine["mode"], mine["across"]) == (other["mode"], other["across"])
        is_eager = mine["mode"] == "NONE"
        sizes[is_eager].add(len(set(mine["across"])))
        if is_eager:
            tokens = mine["num_real_tokens"] + other["num_real_tokens"]
            pairs = MIXTURE["num_experts_per_tok"] * tokens
            assert mine["num_pairs"] == other["num_pairs"] == pairs, "padding goes to no expert"
    assert 2 in sizes[True], "without a graph, engines had unequal pieces"
    assert sizes[False] <= {1}, "graphs pad to one size"


def check_sleep(
    expected: list[list[int]],
    free: list[list[tuple[int, int]]],
    tokens: list[list[list[int]]],
    failures: list[tuple[str, bool]],
) -> None:
    """Both levels give back what weights and cache take, to a page, and find it again.

    A rank without memory is one line, whichever it is, and the other one sleeps on, too.
    """
    assert tokens == [expected] * 2
    awake = [of_rank for of_rank, _ in free[0]]
    asleep = [of_rank + released for of_rank, released in free[0]]
    assert [[of_rank for of_rank, _ in each] for each in free] == [
        awake,
        *[[*asleep]] * 3,
        awake,
        *[[*asleep]] * 3,
        awake,
    ]
    assert len(failures) == 4
    for said, still_asleep in failures:
        assert "wake-up: no memory" in said and "\n" not in said
        assert still_asleep


def differing(steps: list[dict], others: list[dict]) -> list[tuple]:
    """What two ranks have of their own: index of the step, and names of what differs."""
    found = []
    for index, (step, other) in enumerate(zip(steps, others)):
        flat, more = ({**each, **each.get("arrays", {})} for each in (step, other))
        names = [name for name in flat | more if flat.get(name) != more.get(name)]
        found += [(index, *names)] if names else []
    return found


def without_shares(step: dict) -> dict:
    """A step without what ranks that share contexts have of their own."""
    left_out = OF_A_SHARE
    if step["state"] in ("DecodeOnly", "PrefillNoCache"):  # without contexts of prefills
        left_out += OF_CONTEXTS  # what the buffer held before: slots of a rank, maybe
    kept = {name: each for name, each in step["arrays"].items() if name not in left_out}
    return {**step, "arrays": kept}


def check_shares(steps: list[list[dict]]) -> None:
    """Neighbours share contexts, so each pair of ranks has the same arrays as the first pair."""
    for rank, of_rank in enumerate(steps):
        assert of_rank == steps[rank % 2]
    slots = [[step["arrays"]["slot_mappings"] for step in of_rank] for of_rank in steps[:2]]
    assert all(mine != other for mine, other in zip(*slots, strict=True))


def tokens_of_rounded(model: Path, int8: Path) -> list[list[int]]:
    """Of transformers' model in float32, whose weights and inputs are rounded as two ranks do."""
    rounded, given = rounded_model(model, int8, RANKS["tp2"][1]), generate.prompts("sync")
    return greedy_tokens(rounded, given[:1], 4) + greedy_tokens(rounded, given, 12)


def tokens_of_transformers(folder: Path) -> list[list[int]]:
    import torch

    from tests.helpers.vision import Reference
    from tests.npu.on_ranks import image_requests

    requests = image_requests()
    made = Reference(folder, torch.float16)
    return [
        made.answers(requests[:1], 4)[0].tokens,
        *(a.tokens for a in made.answers(requests, 12)),
    ]
