"""Our runner and upstream's own, on the same real schedules in one process: every array agrees.

The scheduler is vLLM's. Requests arrive, run in chunks, share prefixes, finish, are aborted and
preempted and come back; tokens are random instead of sampled, so no forward pass is needed.
"""

import copy
import os
from collections import Counter

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from tests.helpers.engine import engine, make_model, runner_of
from tests.helpers.stepping import bookkeep, books, prepare, upstream_twin
from vllm_npu_prep.prep.kernels import book_tokens, fill_step_at

VOCAB = 512
NUM_DRAFTS = 3
STEPS = int(os.environ.get("NPU_PREP_TEST_STEPS", "400"))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(
        tmp_path_factory.mktemp("qwen3"), "Qwen3", vocab_size=VOCAB, num_hidden_layers=1
    )


class Traffic:
    """Random traffic through vLLM's scheduler, given to both runners."""

    def __init__(self, llm, seed: int):
        core = llm.llm_engine.engine_core.engine_core
        self.scheduler, self.hasher = core.scheduler, core.request_block_hasher
        self.ours = runner_of(llm)
        self.upstream = upstream_twin(self.ours)
        self.rng = np.random.default_rng(seed)
        self.prefixes = [self.rng.integers(2, VOCAB, 70).tolist() for _ in range(3)]
        self.draining = False
        self.count = Counter()
        self.states = Counter()

    def reorder(self, threshold: int) -> None:
        """Let both runners put requests of up to `threshold` tokens first."""
        self.ours.reorder_batch_threshold = self.upstream.reorder_batch_threshold = threshold
        reorder = self.ours._may_reorder_batch

        def counted(output):
            before = list(self.ours.input_batch.req_ids)
            reorder(output)
            self.count["reordered"] += before != self.ours.input_batch.req_ids

        self.ours._may_reorder_batch = counted

    def arrive(self) -> None:
        rng = self.rng
        prompt = rng.integers(2, VOCAB, rng.integers(1, 60)).tolist()
        if rng.random() < 0.4:
            prompt = self.prefixes[rng.integers(3)][: rng.integers(16, 70)] + prompt
        params = SamplingParams(temperature=0, max_tokens=int(rng.integers(1, 40)), ignore_eos=True)
        request = Request(
            request_id=f"r{self.count['arrived']}",
            prompt_token_ids=prompt,
            sampling_params=params,
            pooling_params=None,
            block_hasher=self.hasher,
        )
        self.scheduler.add_request(request)
        self.count["arrived"] += 1

    def act(self) -> None:
        """Between steps: arrivals, and now and then an abort or a lost prefix cache."""
        if not self.scheduler.has_unfinished_requests():
            self.draining = False
            for _ in range(self.rng.integers(1, 6)):
                self.arrive()
        elif self.rng.random() < 0.04:
            self.draining = True  # no more arrivals until all is quiet
        while not self.draining and self.rng.random() < 0.5 and len(self.scheduler.requests) < 12:
            self.arrive()
        if self.rng.random() < 0.03:  # as data-parallel ranks without work do
            self.ours._dummy_run(4)
            # With attention it commits whole rows and then clears those of its padding.
            self.ours.block_tables.commit_block_table(self.ours.max_num_reqs)
            self.ours.block_tables.entries.zero_()
            self.count["dummy run"] += 1
        if self.rng.random() < 0.03 and self.scheduler.running:
            victim = self.scheduler.running[self.rng.integers(len(self.scheduler.running))]
            self.scheduler.finish_requests(victim.request_id, RequestStatus.FINISHED_ABORTED)
            self.count["aborted"] += 1

    def prepare_both(self, output: SchedulerOutput) -> None:
        expected = prepare(self.upstream, output)
        got = prepare(self.ours, output)
        self.ours._build_attention_metadata()  # what ends a step's preparation
        assert got == expected
        step = self.ours.last_step
        self.states[step.attn_state.name] += 1
        self.count["steps"] += 1
        self.count["resumed"] += len(output.scheduled_cached_reqs.resumed_req_ids)
        self.count["cached prefix"] += sum(
            new.num_computed_tokens > 0 for new in output.scheduled_new_reqs
        )

    def sample_both(self, output: SchedulerOutput) -> ModelRunnerOutput:
        req_ids = list(self.ours.input_batch.req_ids)
        drafts = output.scheduled_spec_decode_tokens
        tokens = {}
        for req_id in req_ids:
            accepted = list(drafts.get(req_id, []))
            accepted = accepted[: self.rng.integers(0, len(accepted) + 1)]
            tokens[req_id] = [*accepted, int(self.rng.integers(2, VOCAB))]
        discarded = self.ours.discard_request_mask.np[: len(req_ids)].copy()
        valid = bookkeep(self.ours, output, tokens)
        assert bookkeep(self.upstream, output, tokens) == valid
        assert books(self.ours) == books(self.upstream)
        if self.ours.use_async_scheduling:
            valid = [[] if skip else tokens[req_id] for req_id, skip in zip(req_ids, discarded)]
        index = {req_id: row for row, req_id in enumerate(req_ids)}
        return ModelRunnerOutput(req_ids=req_ids, req_id_to_index=index, sampled_token_ids=valid)

    def draft(self, result: ModelRunnerOutput) -> None:
        ids, drafts = [], []
        for req_id, sampled in zip(result.req_ids, result.sampled_token_ids):
            ids.append(req_id)
            count = self.rng.integers(0, NUM_DRAFTS + 1) if sampled else 0
            drafts.append(self.rng.integers(2, VOCAB, count).tolist())
        self.scheduler.update_draft_token_ids(DraftTokenIds(ids, drafts))

    def run(self, steps: int) -> None:
        in_flight = None
        while self.count["steps"] < steps:
            self.act()
            output = self.scheduler.schedule()
            if output.total_num_scheduled_tokens:
                self.prepare_both(output)
                result = self.sample_both(output)
            else:
                with torch.inference_mode():
                    self.ours._update_states(copy.deepcopy(output))
                    self.upstream._update_states(copy.deepcopy(output))
                result = ModelRunnerOutput(req_ids=[], req_id_to_index={})
            if not self.ours.use_async_scheduling:
                self.scheduler.update_from_output(output, result)
                if self.ours.speculative_config is not None:
                    self.draft(result)
                continue
            # Asynchronous: the next step is scheduled before this one's tokens are known.
            if in_flight is not None:
                self.scheduler.update_from_output(*in_flight)
            in_flight = (output, result)


MODES = {
    "synchronous": {"async_scheduling": False},
    "asynchronous": {"async_scheduling": True},
    "no prefix cache": {"async_scheduling": False, "enable_prefix_caching": False},
    "chunked prefill off": {
        "async_scheduling": False,
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": 256,
    },
    "ngram drafts": {
        "speculative_config": {
            "method": "ngram",
            "num_speculative_tokens": NUM_DRAFTS,
            "prompt_lookup_max": 3,
        }
    },
}
SEEN = {
    "synchronous": {"PrefillNoCache", "DecodeOnly", "ChunkedPrefill"},
    "asynchronous": {"PrefillNoCache", "DecodeOnly", "ChunkedPrefill"},
    "no prefix cache": {"PrefillNoCache", "DecodeOnly", "ChunkedPrefill"},
    "chunked prefill off": {"PrefillNoCache", "DecodeOnly", "ChunkedPrefill", "PrefillCacheHit"},
    "ngram drafts": {"PrefillNoCache", "ChunkedPrefill", "SpecDecoding"},
}


@pytest.mark.parametrize("reorder", [False, True], ids=["in order", "reordered"])
@pytest.mark.parametrize("mode", MODES)
def test_every_prepared_array_equals_upstreams(mode, reorder, model, seed):
    settings = {"block_size": 16, "num_gpu_blocks_override": 24, **MODES[mode]}
    with engine(model, load_format="dummy", **settings) as llm:
        traffic = Traffic(llm, seed)
        if reorder:  # backends that want decodes first make the runner reorder its batch
            traffic.reorder(threshold=1)
        traffic.run(STEPS)
    # Compiled at worker start, for the types that steps have: nothing was compiled in between.
    assert len(fill_step_at.signatures) == len(book_tokens.signatures) == 1
    print(mode, dict(traffic.count), dict(traffic.states))
    assert set(traffic.states) >= SEEN[mode]
    assert traffic.count["resumed"] > 0, "no preemption happened"
    assert traffic.count["aborted"] > 0
    assert traffic.count["dummy run"] > 0
    assert (traffic.count["reordered"] > 0) == reorder
    if mode != "no prefix cache":
        assert traffic.count["cached prefix"] > 0
