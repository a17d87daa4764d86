"""What the host benchmark runs: schedules of steps, and the cases that it measures."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput

from tests.helpers.drafters import make_eagle_head
from tests.helpers.stepping import new_request, scheduler_output

SEED = 20240607
VOCAB = 512
BLOCK_SIZE = 128
GROWTH_REQUESTS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
GROWTH_PROMPTS = (16, 32, 64, 128, 256)


class Schedule:
    """Decodes that stay and prompts that come and go, as a scheduler would give them.

    Decodes begin at random lengths, so that a few of them get a new block in each step.

    Parameters
    ----------
    case
        What its steps hold.
    asynchronous
        Whether a step with drafts is scheduled before the last one is verified: then all drafts of
        that one count as computed, and the new ones are still on the device.
    """

    def __init__(self, case: "Case", asynchronous: bool = False) -> None:
        self.ahead = asynchronous and case.num_drafts > 0
        self.rng = np.random.default_rng(SEED)
        self.num_prompts, self.prompt_len = case.num_prompts, case.prompt_len
        self.num_drafts = case.num_drafts
        self.lengths = {
            f"d{i}": int(self.rng.integers(*case.first_len)) for i in range(case.num_decodes)
        }  # tokens computed before the next step
        self.num_blocks = {name: -(-(n + 1) // BLOCK_SIZE) for name, n in self.lengths.items()}
        self.outputs = dict.fromkeys(self.lengths, 0)
        self.rejected = dict.fromkeys(self.lengths, 0)  # drafts of the last step
        self.prompts: list[str] = []
        self.next_block = 1
        self.steps = 0

    def _blocks(self, count: int) -> list[int]:
        first, self.next_block = self.next_block, self.next_block + count
        return list(range(first, self.next_block))

    def _prompt(self, name: str, length: int, num_computed_tokens: int) -> NewRequestData:
        prompt = self.rng.integers(2, VOCAB, length).tolist()
        blocks = self._blocks(-(-length // BLOCK_SIZE))
        return new_request(name, prompt, blocks, num_computed_tokens)

    def _grow(self, name: str, length: int) -> list[int]:
        """New blocks of a request that is to hold so many tokens."""
        before, self.num_blocks[name] = self.num_blocks[name], -(-length // BLOCK_SIZE)
        return self._blocks(self.num_blocks[name] - before)

    def sampled(self) -> dict[str, list[int]]:
        """Tokens that the last step samples for each request: accepted drafts and the next one."""
        tokens = {}
        for name in (*self.lengths, *self.prompts):
            drafts = self.drafts.get(name, [])
            kept = int(self.rng.integers(len(drafts) + 1))
            tokens[name] = [*drafts[:kept], int(self.rng.integers(2, VOCAB))]
            if name in self.lengths:
                self.lengths[name] += 1 + kept
                self.outputs[name] += 1 + kept
                self.rejected[name] = len(drafts) - kept
        return tokens

    def step(self) -> SchedulerOutput:
        """The next step."""
        new, cached, self.drafts = [], {}, {}
        if self.steps == 0:
            new = [self._prompt(name, n + 1, n) for name, n in self.lengths.items()]
        else:
            for name, length in self.lengths.items():
                more = self.rejected[name] if self.ahead else 0
                cached[name] = (
                    self._grow(name, length + more + 1 + self.num_drafts),
                    length + more,
                    self.outputs[name] + more,
                )
            self.drafts = self.proposed
        finished = set(self.prompts)
        self.prompts = [f"p{self.steps}-{i}" for i in range(self.num_prompts)]
        new += [self._prompt(name, self.prompt_len, 0) for name in self.prompts]
        counts = {name: 1 + len(self.drafts.get(name, ())) for name in self.lengths}
        counts |= dict.fromkeys(self.prompts, self.prompt_len)
        self.steps += 1
        output = scheduler_output(counts, new=new, cached=cached, finished=finished)
        output.scheduled_spec_decode_tokens = self.drafts
        if self.ahead:
            unknown = [-1] * self.num_drafts
            output.scheduled_spec_decode_tokens = {name: list(unknown) for name in self.drafts}
        self.proposed = {}
        if self.num_drafts:
            rows = self.rng.integers(2, VOCAB, (len(self.lengths), self.num_drafts))
            self.proposed = dict(zip(self.lengths, rows.tolist()))
        return output


def speculation(num_drafts: int, model: Path, asynchronous: bool) -> dict[str, Any]:
    """Settings of an engine with drafts: of n-grams, which asynchronous scheduling doesn't have,
    or of an EAGLE head, which is made beside the model."""
    if not num_drafts:
        return {}
    drafts: dict[str, Any] = {"num_speculative_tokens": num_drafts}
    if asynchronous:
        head = model.with_name(f"{model.name}-eagle")
        if not head.exists():
            make_eagle_head(head, model)
        drafts |= {"method": "eagle", "model": str(head)}
    else:
        drafts |= {"method": "ngram", "prompt_lookup_max": 2}
    return {"speculative_config": drafts}


@dataclasses.dataclass(frozen=True)
class Case:
    """What a measured step holds."""

    num_decodes: int
    num_prompts: int = 0
    prompt_len: int = 0
    num_drafts: int = 0
    whole_step: bool = False
    first_len: tuple[int, int] = (64, 1024)
    settings: tuple[tuple[str, Any], ...] = ()
    num_layers: int = 1
    mrope: bool = False

    @property
    def num_reqs(self) -> int:
        """Requests of a step."""
        return self.num_decodes + self.num_prompts

    def engine_settings(self) -> dict[str, Any]:
        """Engine of just this size, unless `settings` says otherwise."""
        num_tokens = self.num_decodes * (1 + self.num_drafts) + self.num_prompts * self.prompt_len
        return {
            "max_num_seqs": max(self.num_reqs, 256),
            "max_num_batched_tokens": max(8192, num_tokens),
            "max_model_len": 2048,
            **dict(self.settings),
        }

    def kv_cache_bytes(self) -> int:
        """Enough for one request of the longest kind, drafter included; nothing is written."""
        max_model_len = self.engine_settings()["max_model_len"]
        num_layers = self.num_layers + (self.num_drafts > 0)
        return 256 * max_model_len * num_layers * 2 * (2 if self.mrope else 1)


CASES = {
    "decode-256": Case(256),
    "decode-1024": Case(1024),
    "prefill-8192": Case(0, 32, 256),
    "mixed-2200": Case(200, 8, 250),
    "step-256": Case(256, whole_step=True),
    "drafts-256": Case(256, num_drafts=3),
    "mrope-256": Case(256, num_layers=2, mrope=True),
    "drafts-step": Case(256, num_drafts=3, whole_step=True),
}


def growth_cases() -> dict[str, Case]:
    """Requests from 32 to 4096, tokens of prompts, and what a step must not depend on."""
    cases = {f"{n} requests": Case(n) for n in GROWTH_REQUESTS}
    cases |= {f"{32 * n} prompt tokens": Case(0, 32, n) for n in GROWTH_PROMPTS}
    cases["256 requests, max_model_len 65536"] = Case(256, settings=(("max_model_len", 65536),))
    cases["256 requests, max_num_seqs 4096"] = Case(256, settings=(("max_num_seqs", 4096),))
    cases["256 requests, 32 layers"] = Case(256, num_layers=32)
    return cases
