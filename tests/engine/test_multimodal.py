"""Images and videos: greedy tokens and M-RoPE positions are those of transformers."""

from collections import Counter

import pytest

from tests.helpers.drafters import make_eagle_head
from tests.helpers.engine import REPLAYED, engine, graphs, greedy, runner_of
from tests.helpers.v2 import engine_of
from tests.helpers.vision import (
    MARKS,
    Reference,
    Request,
    chat,
    make_image,
    make_video,
    save_text_model,
    serve,
    tokens_of,
    watch,
)
from tests.helpers.watch import count_preemptions, count_verified

MODELS = ["qwen2_5_vl", "qwen3_vl"]
QUESTION = "What is a slot mapping?"
MAX_TOKENS = 12
SETTINGS = {
    "skip_tokenizer_init": False,
    "max_model_len": 256,
    "max_num_batched_tokens": 32,
    "block_size": 16,
}


@pytest.fixture(scope="module")
def references(vision_models):
    return {name: Reference(vision_models / name) for name in MODELS}


def requests_of(seed: int) -> list[Request]:
    """Of every kind; eight different images and two videos."""
    first, second, large = (
        make_image(seed),
        make_image(seed + 1, 16, 16),
        make_image(seed + 2, 90, 60),
    )
    video = make_video(seed + 3)
    return [
        chat(first, QUESTION),
        chat(QUESTION),
        chat("Compare ", second, " with ", large, " and ", make_image(seed + 4), QUESTION),
        Request(f"{MARKS['image']}{QUESTION}", [make_image(seed + 5)]),
        Request(f"{QUESTION}{MARKS['image']}", [make_image(seed + 6, 64, 32)]),
        chat("Which blocks does the same image take here? ", first),
        chat(video, "What happens here?"),
        Request("Of a slot mapping. " * 6),
        chat(video, " or ", make_video(seed + 7, 4), " beside ", first, second),
    ]


NUM_DIFFERENT_ITEMS = 8
MODES = [
    ("qwen2_5_vl", "eager", False),
    ("qwen2_5_vl", "FULL_AND_PIECEWISE", True),
    ("qwen3_vl", "FULL_AND_PIECEWISE", False),
    ("qwen3_vl", "PIECEWISE", True),
]


@pytest.mark.parametrize(("name", "mode", "asynchronous"), MODES)
def test_images_and_videos_beside_text(vision_models, references, seed, name, mode, asynchronous):
    """Cut across chunks, at either end of a prompt, several in one, waiting for the encoder."""
    requests = requests_of(seed)
    answers = references[name].answers(requests, MAX_TOKENS)
    settings = SETTINGS | ({} if mode == "eager" else graphs(mode, 4, 16, 32))
    with engine(vision_models / name, async_scheduling=asynchronous, **settings) as llm:
        runner, watched = runner_of(llm), watch(llm)
        outputs = serve(llm, requests, greedy(MAX_TOKENS))
        counts, kinds = runner.inputs.counts, runner.padding.counts.by_kind
    assert tokens_of(outputs) == [answer.tokens for answer in answers]
    assert len({tuple(answer.tokens) for answer in answers}) == len(answers)
    watched.check_positions(outputs, answers)
    assert watched.cut_items > 1
    if name == "qwen2_5_vl":
        assert counts.encoded == NUM_DIFFERENT_ITEMS, "equal items are encoded once"
    else:  # its largest video is smaller, and so are its encoder's cache and budget
        assert NUM_DIFFERENT_ITEMS < counts.encoded < counts.placed, "some were dropped"
    assert counts.placed == sum(len(each.images) + len(each.videos) for each in requests)
    if mode != "eager":
        eager = sum(kinds[kind] for kind in kinds if kind.startswith("eager"))
        assert {kind for kind in kinds if not kind.startswith("eager")} == REPLAYED[mode]
        assert eager == kinds["eager: embeddings, which graphs don't read"]
        assert kinds.total() - eager >= MAX_TOKENS - 1, "text never leaves the graph"


ON_V2 = {
    "eager": ("qwen2_5_vl", {"block_size": 4, "num_gpu_blocks_override": 90}),
    "graphs": ("qwen3_vl", graphs("FULL_AND_PIECEWISE", 4, 16, 32)),
    "synchronous": ("qwen3_vl", {"async_scheduling": False, "enable_prefix_caching": True}),
}


@pytest.mark.parametrize("which", ON_V2)
def test_v2_sees_what_v1_sees(vision_models, references, seed, which):
    """The same requests, twice, preempted in the first case; positions are checked in each step."""
    name, settings = ON_V2[which]
    requests = requests_of(seed)
    answers = references[name].answers(requests, MAX_TOKENS)
    checked = {"additional_config": {"npu_prep": {"check": "full"}}}
    with engine_of("V2", vision_models / name, **SETTINGS | checked | settings) as llm:
        runner, preempted = runner_of(llm), count_preemptions(llm)
        for _ in range(2):
            outputs = serve(llm, requests, greedy(MAX_TOKENS))
            assert tokens_of(outputs) == [answer.tokens for answer in answers]
        kinds = runner.padding.counts.by_kind
        layers = runner.preparer.mrope_dims
    assert layers == 3
    assert (preempted["preempted"] > 0) == (which == "eager")
    assert which != "graphs" or REPLAYED["FULL_AND_PIECEWISE"] <= set(kinds)


@pytest.mark.parametrize("name", MODELS)
def test_the_prefix_cache_knows_images_by_what_they_show(vision_models, references, seed, name):
    one, other = make_image(seed, 64, 32), make_image(seed + 1, 64, 32)
    text = "A long text before the image, a few blocks of it, so that some can be cached. "
    requests = [
        chat(text, one, QUESTION),
        chat(text, other, QUESTION),
        chat(text, one, QUESTION),
        chat(text, one, "Another question, with the same image."),
    ]
    answers = references[name].answers(requests, MAX_TOKENS)
    assert answers[0].tokens == answers[2].tokens != answers[1].tokens
    marks = references[name].processor.tokenizer.convert_tokens_to_ids(list(MARKS.values()))
    ids = answers[0].prompt_token_ids
    first, num_tokens = ids.index(marks[0]), ids.count(marks[0])
    settings = SETTINGS | {"block_size": 8, "enable_prefix_caching": True}
    with engine(vision_models / name, **settings) as llm:
        runner, watched = runner_of(llm), watch(llm)
        outputs = [serve(llm, [each], greedy(MAX_TOKENS))[0] for each in requests]
        encoded = runner.inputs.counts.encoded
    assert tokens_of(outputs) == [answer.tokens for answer in answers]
    watched.check_positions(outputs, answers)
    cached = [output.num_cached_tokens for output in outputs]
    assert cached[0] == 0
    assert 8 <= cached[1] <= first, "the text, and nothing of another image"
    assert cached[2] >= len(ids) - 9, "all but what has to be computed anew"
    assert first + num_tokens <= cached[3] < len(ids), "the text and the image"
    assert encoded == 2


@pytest.mark.parametrize("name", MODELS)
def test_a_request_preempted_within_an_image_comes_back(vision_models, references, seed, name):
    """Others that generate take the blocks that the rest of its prompt would need."""
    others = [Request(f"{number} blocks of the cache are free. ") for number in range(4)]
    sees = [chat("Look: ", image, image, QUESTION) for image in (make_image(seed, 80, 24),)]
    requests, few = others + 2 * sees, {"block_size": 4, "num_gpu_blocks_override": 50}
    answers = references[name].answers(requests, 40)
    settings = SETTINGS | few | {"max_model_len": 192, "max_num_batched_tokens": 8}
    with engine(vision_models / name, **settings) as llm:
        watched = watch(llm)
        outputs = serve(llm, requests, greedy(40))
    assert tokens_of(outputs) == [answer.tokens for answer in answers]
    watched.check_positions(outputs, answers)
    assert watched.preempted_in_item > 0


NGRAM = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3}


@pytest.mark.parametrize("method", ["ngram", "eagle"])
def test_drafts_behind_images(vision_models, references, seed, tmp_path, method):
    """Found in the text, or by a head that is always wrong; each draft's positions count on."""
    model, first = vision_models / "qwen3_vl", make_image(seed)
    requests = [
        chat(first, "to and fro and to and fro and to and fro and"),
        chat("A slot, a block, a slot, a block, a slot, a block"),
        chat(make_image(seed + 1, 64, 32), first, QUESTION),
    ]
    answers = references["qwen3_vl"].answers(requests, 32)
    drafting = dict(NGRAM)
    if method == "eagle":
        head = make_eagle_head(tmp_path / "eagle", save_text_model(tmp_path / "text", model))
        drafting = {"method": "eagle", "model": str(head)}
    settings = SETTINGS | graphs("FULL_AND_PIECEWISE", 4, 16, 32)
    settings["speculative_config"] = drafting | {"num_speculative_tokens": 3}
    with engine(model, **settings) as llm:
        watched, verified = watch(llm), count_verified(llm)
        passes = watch_draft_passes(llm) if method == "eagle" else []
        outputs = serve(llm, requests, greedy(32))
    assert tokens_of(outputs) == [answer.tokens for answer in answers]
    watched.check_positions(outputs, answers)
    assert verified["rejected"] > 1
    assert method == "eagle" or verified["accepted"] + verified["partly"] > 1
    if method == "eagle":
        assert min(Counter(index for index, _, _ in passes).values()) > 10
        for number, seen, expected in passes:
            assert seen == expected, f"draft pass {number}"


def watch_draft_passes(llm) -> list[tuple[int, dict, dict]]:
    """Of each draft pass: its number, where its tokens are and what they rotate by, and where the
    sequences say that they are."""
    runner, block_size = runner_of(llm), SETTINGS["block_size"]
    drafter, passes = runner.drafter, []
    build = drafter.build_per_group_and_layer_attn_metadata

    def watched(common, draft_index=0):
        result = build(common, draft_index)
        starts = common.query_start_loc_cpu.tolist()
        ends = common.seq_lens_cpu_upper_bound.tolist()  # as attention has them
        places, slots, rotated = [], [], {}  # rotated: by token, of what no prompt says
        for row, (start, behind, end) in enumerate(zip(starts, starts[1:], ends)):
            request = runner.requests[runner.input_batch.req_ids[row]]
            for place in range(end - (behind - start), end):
                block = int(common.block_table_tensor[row, place // block_size])
                if place >= request.num_prompt_tokens:
                    rotated[len(places)] = place + request.mrope_position_delta
                places.append(place)
                slots.append(block * block_size + place % block_size)
        seen = {"positions": common.positions.tolist()}
        expected = {"positions": places}
        if draft_index:
            now = drafter.positions.tolist()
            seen["slots"], expected["slots"] = common.slot_mapping.tolist(), slots
            seen["rotated"], expected["rotated"] = {i: now[i] for i in rotated}, rotated
        passes.append((draft_index, seen, expected))
        return result

    drafter.build_per_group_and_layer_attn_metadata = watched
    return passes
