"""What the long runs have come to: python -m tests.resume"""

from tests.resume.log import Results
from tests.resume.slice import summary
from tests.resume.tree import RESULTS
from vllm_npu_prep.compat.releases import SUPPORTED_VLLM

RUNS = {
    "test-all": "test-all",
    **{f"test-all-{version}": f"test-all VLLM={version}" for version in SUPPORTED_VLLM[1:]},
    "compat": "test-all",
    "mutants": "mutants",
    "random-mutants": "mutants RANDOM=50",
    "random-mutants-scheduling": "mutants RANDOM=50 POOL=scheduling",
    "random-mutants-served": "mutants RANDOM=50 POOL=served",
    "soak": "soak",
    "soak-device": "soak",
    "soak-engines": "soak",
    "soak-engines-device": "soak",
    "scheduling": "soak",
}
"""Files of results, and the command that adds to each."""

for name, command in RUNS.items():
    results = Results(RESULTS / f"{name}.jsonl")
    runs = results.runs()
    print(f"{name}, by make {command}:", "" if runs else "never run")
    for run in results.folded:
        commits = ", ".join(run["commits"])
        print(f"run {run['folded']}, begun {run['begun']}, at {commits}: {run['outcomes']}")
    for run in runs:
        print(summary(results, run, f"make {command}"))
