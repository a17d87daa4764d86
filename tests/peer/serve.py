"""An engine of vllm-ascend, run in the environment of `make peer`, which this project isn't in.

Standard input has a job as JSON: ``engine`` (arguments of ``LLM``), ``prompts`` (token ids),
``tokens`` (how many to generate), and maybe ``adapter`` (a folder) and ``counted`` (names of
modules of the model). A line ``RUNNER`` of standard output names the model runner's module, a line
``TOKENS`` has what was chosen, greedily, as JSON, and a line ``COUNTS`` what each counted module
asked of the card in the last step.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


def main(job: dict[str, Any]) -> None:
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    llm = LLM(disable_log_stats=True, **job["engine"])
    print("RUNNER", *llm.collective_rpc(runner_of), flush=True)
    adapter = LoRARequest("adapter", 1, job["adapter"]) if job.get("adapter") else None
    names = job.get("counted", [])
    [counted] = llm.collective_rpc(count, args=(names,)) if names else [None]
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in job["prompts"]],
        SamplingParams(temperature=0, max_tokens=job["tokens"], ignore_eos=True),
        use_tqdm=False,
        lora_request=adapter,
    )
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    print("TOKENS", json.dumps(tokens), flush=True)
    if counted is not None:
        print("COUNTS", json.dumps(counted.counts), flush=True)


def runner_of(worker: Any) -> str:
    return type(worker.model_runner).__module__


def count(worker: Any, names: list[str]) -> Any:
    """Count what modules ask of the card; the emulator, which counts, is in this process."""
    sys.path.append(str(Path(__file__).parents[2]))
    from tests.helpers.counting import ModuleCounts

    return ModuleCounts(worker.model_runner.get_model(), names)


if __name__ == "__main__":
    main(json.load(sys.stdin))
