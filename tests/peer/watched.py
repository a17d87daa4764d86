"""An engine of vllm-ascend that is watched: its third step may get a slot that is off by one.

Standard input has a job as JSON: ``engine`` (arguments of ``LLM``), ``prompts`` (token ids),
``tokens`` (how many to generate), ``plant`` (whether to break a step).
"""

import json
import os
import sys
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

STEP = 3


def main(job: dict[str, Any]) -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(disable_log_stats=True, **job["engine"])
    if job["plant"]:
        llm.collective_rpc(plant)
    params = SamplingParams(temperature=0, max_tokens=job["tokens"], ignore_eos=True)
    prompts = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    print("TOKENS", json.dumps([len(output.outputs[0].token_ids) for output in outputs]))


def plant(worker: Any) -> None:
    """Wrap the method after which slots are ready, on V2 or on V1."""
    runner, steps = worker.model_runner, [0]
    name = "prepare_attn" if hasattr(runner, "prepare_attn") else "_build_attention_metadata"
    prepare = getattr(runner, name)

    def broken(*args: Any, **kwargs: Any) -> Any:
        prepared = prepare(*args, **kwargs)
        if steps[0] == STEP:
            slots = prepared[1][0] if name == "prepare_attn" else None
            if slots is None:
                slots = runner.input_batch.block_table[0].slot_mapping.gpu
            print("PLANTED", int(slots[0]), flush=True)
            slots[0] += 1
        steps[0] += 1
        return prepared

    setattr(runner, name, broken)


if __name__ == "__main__":
    main(json.load(sys.stdin))
