"""Images and videos: greedy tokens and M-RoPE positions are those of transformers."""

import os
import shutil
from collections import Counter
from copy import copy
from multiprocessing import Lock
from types import SimpleNamespace

import numpy as np
import pytest
from vllm.exceptions import VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm.multimodal.cache import (
    LruKeyReplicatedReceiverCache,
    LruKeyReplicatedSenderCache,
    MultiModalCacheMissError,
    ShmObjectStoreReceiverCache,
    ShmObjectStoreSenderCache,
)
from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalKwargsItem, PlaceholderRange

from tests.helpers.drafters import make_eagle_head
from tests.helpers.engine import REPLAYED, graphs, greedy, runner_of
from tests.helpers.hybrids import make_model_that_sees
from tests.helpers.lora import ATTENTION, make_adapter, merge
from tests.helpers.mtp import add_mtp_layer
from tests.helpers.v2 import RUNNERS, engine_of
from tests.helpers.vision import (
    MARKS,
    Reference,
    Request,
    chat,
    make_image,
    make_video,
    save_text_model,
    serve,
    serve_with_resets,
    tokens_of,
    watch,
)
from tests.helpers.watch import count_preemptions, count_verified
from vllm_npu_prep.compat.multimodal import believe_only_what_was_sent

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
    with engine_of("V1", vision_models / name, async_scheduling=asynchronous, **settings) as llm:
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
            runner._dummy_run(20)  # as an engine that idles beside others, in graphs of pieces
        kinds = runner.padding.counts.by_kind
    assert (preempted["preempted"] > 0) == (which != "graphs")
    assert which != "graphs" or REPLAYED["FULL_AND_PIECEWISE"] <= set(kinds)


@pytest.fixture
def adapted(vision_models, tmp_path, seed):
    """An adapter of Qwen3-VL, and what transformers makes of the weights with it."""
    model = vision_models / "qwen3_vl"
    folder = make_adapter(tmp_path / "adapter", model, seed=seed, modules=ATTENTION)
    merged = shutil.copytree(model, tmp_path / "merged")
    shutil.copy(merge(model, folder, tmp_path / "weights") / "model.safetensors", merged)
    return LoRARequest("adapter", 1, str(folder)), Reference(merged)


@pytest.mark.parametrize("runner", RUNNERS)
def test_adapters_and_ngram_drafts_beside_images(vision_models, references, adapted, seed, runner):
    """Every other request has an adapter; texts that repeat themselves have drafts accepted."""
    model, image = vision_models / "qwen3_vl", make_image(seed)
    requests = [
        chat(image, "to and fro and to and fro and to and fro and"),
        chat("A slot, a block, a slot, a block, a slot, a block"),
        chat(make_image(seed + 1, 64, 32), image, QUESTION),
        chat(image, "to and fro and to and fro and to and fro and"),
    ]
    adapter, of_adapter = adapted
    loras, known = [None, adapter] * 2, (references["qwen3_vl"], of_adapter)
    expected = [of.answer(each, 32).tokens for of, each in zip(known * 2, requests, strict=True)]
    settings = SETTINGS | graphs("FULL_AND_PIECEWISE", 4, 16, 32)
    settings["additional_config"] = {"npu_prep": {"check": "full"}}
    settings["speculative_config"] = {"method": "ngram", "num_speculative_tokens": 3}
    settings["speculative_config"]["prompt_lookup_max"] = 3
    with engine_of(runner, model, **settings, enable_lora=True, max_lora_rank=8) as llm:
        verified, kinds = count_verified(llm), runner_of(llm).padding.counts.by_kind
        for _ in range(2):
            assert tokens_of(serve(llm, requests, greedy(32), loras)) == expected
    assert verified["accepted"] > 0 and verified["rejected"] > 0
    # On V1, requests have as many drafts as were found, so that decodes seldom have one length
    assert {"V2": "full graph", "V1": "piecewise graphs"}[runner] in kinds
    assert expected[0] != expected[3]


@pytest.mark.parametrize(
    ("name", "scheduler", "asynchronous"),
    [("qwen2_5_vl", "upstream", False), ("qwen3_vl", "batched", True)],
)
def test_the_prefix_cache_knows_images_by_what_they_show(
    vision_models, references, seed, name, scheduler, asynchronous
):
    """Pixels of an image that it has are left out, and come with the step that misses them."""
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
    settings["additional_config"] = {"npu_prep": {"scheduler": scheduler, "check": "full"}}
    with engine_of("V1", vision_models / name, async_scheduling=asynchronous, **settings) as llm:
        runner, watched = runner_of(llm), watch(llm)
        outputs = [serve(llm, [each], greedy(MAX_TOKENS))[0] for each in requests]
        encoded = runner.inputs.counts.encoded
        several = [*requests, chat(make_video(seed), one, other, QUESTION)]
        expected = [answer.tokens for answer in references[name].answers(several, MAX_TOKENS)]
        for first_reset in (2, 4, 9):
            assert tokens_of(serve(llm, several, greedy(MAX_TOKENS))) == expected  # all is cached
            steps = (first_reset, first_reset + 3)
            assert serve_with_resets(llm, several, greedy(MAX_TOKENS), steps) == expected
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
    with engine_of("V1", vision_models / name, **settings) as llm:
        watched = watch(llm)
        outputs = serve(llm, requests, greedy(40))
        check_refused_requests(llm, references[name], seed + 1)
    assert tokens_of(outputs) == [answer.tokens for answer in answers]
    watched.check_positions(outputs, answers)
    assert watched.preempted_in_item > 0


def check_refused_requests(llm, reference, seed) -> None:
    """The next request with the same image is answered; so is one after the engine lost it."""
    refused = {
        "a token that isn't there": ({"logit_bias": {10**6: 1.0}}, QUESTION),
        "a prompt that is too long": ({}, QUESTION * 100),
    }
    for number, (name, (params, question)) in enumerate(refused.items()):
        image = make_image(seed + number, 48, 32)
        with pytest.raises(VLLMValidationError, match=r"logit_bias|length"):
            serve(llm, [chat("And? "), chat(image, question)], [greedy(4), greedy(4, **params)])
        sees = chat(image, QUESTION)
        (answer,) = reference.answers([sees], 4)
        assert tokens_of(serve(llm, [sees], greedy(4))) == [answer.tokens], name
    llm.llm_engine.engine_core.engine_core.mm_receiver_cache.clear_cache()
    with pytest.raises(MultiModalCacheMissError):
        serve(llm, [chat("And? "), sees], greedy(4))
    assert not llm.llm_engine.has_unfinished_requests()
    assert tokens_of(serve(llm, [sees], greedy(4))) == [answer.tokens]


def test_a_clients_cache_has_what_the_engines_has(seed):
    """In the same order of eviction, whatever is refused, repeated or overtaken by others."""
    believe_only_what_was_sent()
    settings = SimpleNamespace(mm_processor_cache_gb=3000 / 2**30)
    config = SimpleNamespace(get_multimodal_config=lambda: settings)
    sender, receiver = LruKeyReplicatedSenderCache(config), LruKeyReplicatedReceiverCache(config)
    rng, processed, outcomes = np.random.default_rng(seed), [], Counter()
    for _ in range(3000):
        if rng.random() < 0.5 or not processed:
            hashes = [str(each) for each in rng.integers(0, 12, rng.integers(1, 4))]
            there = sender.is_cached(hashes)
            for each in hashes:
                sender.touch_sender_cache_item(each)
            items = [
                sender.get_and_update_item(
                    None if known else (MultiModalKwargsItem.dummy(100 * int(each) + 1), []), each
                )[0]
                for each, known in zip(hashes, there)
            ]
            place = PlaceholderRange(offset=0, length=1)
            rows = zip(items, hashes)
            processed.append([MultiModalFeatureSpec(i, "image", n, place, n) for i, n in rows])
            continue
        features = processed.pop(rng.integers(len(processed)))
        if rng.random() < 0.3:
            outcomes["refused"] += 1
            continue
        known = set(sender._cache)
        sender.note_sent(features)
        missing = [each.mm_hash for each in features if each.data is None]
        if known.issuperset(missing):
            receiver.get_and_update_features([copy(feature) for feature in features])
            outcomes["arrived"] += 1
        else:  # evicted while it waited, on either side
            with pytest.raises(MultiModalCacheMissError):
                receiver.get_and_update_features([copy(feature) for feature in features])
            outcomes["missed"] += 1
        assert list(sender._cache.order) == list(receiver._cache.order)
        assert sender._cache.currsize == receiver._cache.currsize
    assert min(outcomes.values()) > 10 and len(outcomes) == 3, outcomes


def test_a_handle_that_is_not_sent_holds_no_shared_memory(monkeypatch):
    """What is sent stays until it is read, and what is refused can be freed."""
    believe_only_what_was_sent()
    monkeypatch.setenv("VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME", f"npu-prep-{os.getpid()}")
    settings = SimpleNamespace(mm_processor_cache_gb=4 * 2**-10, mm_shm_cache_max_object_size_mb=1)
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(world_size=1),
        model_config=SimpleNamespace(get_multimodal_config=lambda: settings),
    )
    sender = ShmObjectStoreSenderCache(config)
    receiver = ShmObjectStoreReceiverCache(config, Lock())

    def process(name):
        item = sender.get_and_update_item((MultiModalKwargsItem.dummy(900_000), []), name)[0]
        place = PlaceholderRange(offset=0, length=1)
        return [MultiModalFeatureSpec(item, "image", name, place, name)]

    try:
        for number in range(12):
            features = process(f"refused {number}")
            assert "address" in features[0].data, number
        del features
        sent = process("sent")
        sender.note_sent(sent)
        for number in range(12):
            features = process(f"read {number}")
            sender.note_sent(features)
            if "address" in features[0].data:
                receiver.get_and_update_features(features)
        assert "address" not in features[0].data, "what is behind the one that waits"
        receiver.get_and_update_features(sent)
        assert "dummy" in sent[0].data
        assert "address" in process("last")[0].data
    finally:
        del receiver
        sender.close()


@pytest.mark.parametrize(
    ("method", "runner"),
    [("eagle", "V2"), ("eagle", "V1"), ("eagle3", "V2"), ("eagle3", "V1"), ("draft_model", "V2")],
)
def test_drafts_behind_images(vision_models, references, adapted, seed, tmp_path, method, runner):
    """The heads are always wrong; the draft model is the model's own text part. The positions of
    drafts count on from the last token. The third request has an adapter."""
    model, first = vision_models / "qwen3_vl", make_image(seed)
    requests = [
        chat(first, "to and fro and to and fro and to and fro and"),
        chat("A slot, a block, a slot, a block, a slot, a block"),
        chat(make_image(seed + 1, 64, 32), first, QUESTION),
    ]
    (adapter, of_adapter), plain = adapted, references["qwen3_vl"]
    loras, known = [None, None, adapter], (plain, plain, of_adapter)
    answers = [of.answer(each, 32) for of, each in zip(known, requests, strict=True)]
    drafter = save_text_model(tmp_path / "text", model)
    if method != "draft_model":
        drafter = make_eagle_head(tmp_path / method, drafter, method)
    drafts = {"method": method, "model": str(drafter), "num_speculative_tokens": 3}
    settings = SETTINGS | graphs("FULL_AND_PIECEWISE", 4, 16, 32)
    settings["additional_config"] = {"npu_prep": {"check": "full"}}
    settings |= {"enable_lora": True, "max_lora_rank": 8, "speculative_config": drafts}
    with engine_of(runner, model, **settings) as llm:
        verified = count_verified(llm)
        watched, passes = (watch(llm), watch_draft_passes(llm)) if runner == "V1" else (None, [])
        outputs = serve(llm, requests, greedy(32), loras)
    assert tokens_of(outputs) == [answer.tokens for answer in answers]
    assert verified["rejected"] > 1 and (verified["accepted"] > 1 or method != "draft_model")
    if watched is None:  # the full check looks at positions
        return
    watched.check_positions(outputs, answers)
    assert min(Counter(index for index, _, _ in passes).values()) > 10
    for number, seen, expected in passes:
        assert seen == expected, f"draft pass {number}"


def test_mtp_layers_read_images_on_v2_as_on_v1(tmp_path, seed):
    """Of Qwen3.5: with embeddings of images and their positions, all drafts are the same."""
    model = make_model_that_sees(tmp_path / "model")
    add_mtp_layer(model, "Qwen3_5")
    image = make_image(seed)
    requests = [
        chat(image, QUESTION),
        chat("A slot, a block, a slot, a block, a slot, a block"),
        chat(make_image(seed + 1, 64, 32), " beside ", image, make_video(seed + 2), QUESTION),
        Request(f"{QUESTION}{MARKS['image']}", [make_image(seed + 3, 64, 32)]),
    ]
    answers = Reference(model).answers(requests, MAX_TOKENS)
    settings = SETTINGS | graphs("FULL_AND_PIECEWISE", 4, 16, 32) | {"async_scheduling": False}
    settings["speculative_config"] = {"method": "mtp", "num_speculative_tokens": 3}
    drafts, shifts = {}, set()
    for runner in RUNNERS:
        with engine_of(runner, model, **settings) as llm:
            drafts[runner] = record_drafts(runner_of(llm))
            shifts = record_shifts(runner_of(llm)) if runner == "V2" else shifts
            outputs = serve(llm, requests, greedy(MAX_TOKENS))
        assert tokens_of(outputs) == [answer.tokens for answer in answers]
    assert len({*drafts["V1"]}) > MAX_TOKENS
    assert sorted(drafts["V2"]) == sorted(drafts["V1"])
    of_answers = {row.positions[0, -1] + 1 - row.positions.shape[1] for row in answers}
    assert len(of_answers) > 2 and of_answers <= shifts  # and those of cut prompts


def record_drafts(runner) -> list[tuple[int, ...]]:
    """Record what is drafted for each request in all later steps."""
    drafts = []
    drafter, name = getattr(runner, "speculator", None), "draft"
    if drafter is None:
        drafter, name = runner.drafter, "propose"
    draft = getattr(drafter, name)

    def recorded(*args, **kwargs):
        found = draft(*args, **kwargs)
        drafts.extend(map(tuple, found.tolist()))
        return found

    setattr(drafter, name, recorded)
    return drafts


def record_shifts(runner) -> set[int]:
    """By how much tokens rotate beside their places, in V2's draft passes after the first one."""
    run, shifts = runner.speculator.passes.run, set()

    def recorded(tokens, rotations, hidden_states, metadata, slots, size, *images):
        if metadata and not images:  # a pass after the first one
            of_attention = next(one for one in metadata.values() if hasattr(one, "seq_lens"))
            shifts.update((rotations[0] - of_attention.seq_lens + 1).tolist())
        return run(tokens, rotations, hidden_states, metadata, slots, size, *images)

    runner.speculator.passes.run = recorded
    return shifts


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
