"""Record the steps of a run, prepare each again, and find one that was prepared wrongly.

    python examples/record_and_replay.py [--dir steps]

Replaying needs neither the model nor the device that the steps were recorded on.
"""

import argparse
import subprocess
import sys
from pathlib import Path

import demo
from vllm import LLM, SamplingParams

from vllm_npu_prep.records.record_file import read_record, record_files

QUESTIONS = ["What is a slot mapping?", "What is chunked prefill?", "Count to ten."]


def replay(folder: Path) -> None:
    """Show the command and what it says."""
    print(f"\n$ vllm-npu-prep replay {folder}", flush=True)
    subprocess.run([Path(sys.executable).with_name("vllm-npu-prep"), "replay", folder])


def main() -> None:
    """Record, replay, and replay again with a wrong slot in a record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, default=Path("steps"), help="folder of the records")
    folder = parser.parse_args().dir

    record = {"dir": str(folder), "steps": "0:1000"}
    llm = LLM(**demo.settings(), additional_config={"npu_prep": {"record": record}})
    params = SamplingParams(temperature=0, max_tokens=64)
    for output in llm.chat([[{"role": "user", "content": each}] for each in QUESTIONS], params):
        print(f"assistant: {output.outputs[0].text}")
    del llm  # the engine ends, and its last step is written

    run = max(folder.iterdir())  # each run has a folder of its own
    replay(run)

    file = record_files(run)[0]
    changed = read_record(file)
    slot = changed.prepared["slot_mapping"][2]
    print(f"\nA bug, planted in {file.name}: token 2 is written into slot {slot + 1}, not {slot}.")
    changed.prepared["slot_mapping"][2] += 1
    file.write_bytes(changed.to_bytes())
    replay(run)


if __name__ == "__main__":
    main()
