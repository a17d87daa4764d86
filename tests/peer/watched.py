"""An engine of vllm-ascend that is watched: first as it is, then with one fault after the other.

Standard input has a job as JSON: ``engine`` (arguments of ``LLM``), ``traffic`` (rounds of prompts,
which are token ids), ``tokens`` (how many to generate), ``faults`` (prompts, by a name of
`tests.peer.faults`).
A line ``FAULT`` comes before what the watch says of each.
"""

import json
import os
import sys
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


def main(job: dict[str, Any]) -> None:
    from vllm import LLM, SamplingParams
    from vllm_ascend.ops import rotary_embedding

    from tests.peer.faults import BY_NAME

    # torch_npu's operator, as where Triton is missing: its interpreter takes longest for this one
    rotary_embedding.HAS_TRITON = False
    llm = LLM(disable_log_stats=True, **job["engine"])
    core = llm.llm_engine.engine_core.engine_core
    scheduler, runner = core.scheduler, core.model_executor.driver_worker.worker.model_runner
    seen = note_traffic(scheduler)

    def generate(prompts: list[list[int]]) -> list[int]:
        params = SamplingParams(temperature=0, max_tokens=job["tokens"], ignore_eos=True)
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = llm.generate(asked, params, use_tqdm=False)
        return [len(output.outputs[0].token_ids) for output in outputs]

    tokens = [generate(prompts) for prompts in job["traffic"]]
    print("TOKENS", json.dumps(tokens))
    print("SEEN", json.dumps(seen), flush=True)
    if job["faults"]:
        llm.collective_rpc("dump_steps")
    for name, prompts in job["faults"].items():
        llm.reset_prefix_cache()
        llm.collective_rpc(watch_anew)
        print("FAULT", name, flush=True)
        mend = BY_NAME[name](runner, hasattr(runner, "model_state"))
        try:
            generate(prompts)
        except Exception as error:
            print("RAISED", type(error).__name__, " ".join(str(error).split())[:300], flush=True)
            break
        mend()
    print("END", flush=True)


def note_traffic(scheduler: Any) -> dict[str, int]:
    """Count what the traffic has: preemptions, and tokens found in the prefix cache."""
    seen = {"preempted": 0, "cached": 0, "rejected": 0, "accepted": 0}
    preempt, find = scheduler._preempt_request, scheduler.kv_cache_manager.get_computed_blocks
    update = scheduler.update_from_output

    def counted(*args: Any, **kwargs: Any) -> Any:
        seen["preempted"] += 1
        return preempt(*args, **kwargs)

    def found(request: Any, *args: Any) -> Any:
        result = find(request, *args)
        seen["cached"] += 0 if request.num_preemptions else result[1]
        return result

    def updated(scheduled: Any, output: Any) -> Any:
        drafts = scheduled.scheduled_spec_decode_tokens
        for req_id, tokens in zip(output.req_ids, output.sampled_token_ids):
            if tokens and req_id in drafts:
                seen["accepted"] += len(tokens) - 1
                seen["rejected"] += len(drafts[req_id]) + 1 - len(tokens)
        return update(scheduled, output)

    scheduler._preempt_request = counted
    scheduler.kv_cache_manager.get_computed_blocks = found
    scheduler.update_from_output = updated
    return seen


def watch_anew(worker: Any) -> None:
    """Begin another watch of the worker, as the variable asks for."""
    from vllm_npu_prep.watch.known import watch_worker

    if hasattr(worker, "dump_steps"):
        worker.dump_steps.__self__.detach()
    watch_worker(worker, os.environ["NPU_PREP_WATCH"])


if __name__ == "__main__":
    main(json.load(sys.stdin))
