"""What the long runs have come to: python -m tests.resume"""

from tests.resume.log import Results
from tests.resume.slice import summary
from tests.resume.tree import RESULTS

RUNS = {
    "test-all": "test-all",
    "mutants": "mutants",
    "random-mutants": "mutants RANDOM=50",
    "soak": "soak",
    "soak-device": "soak",
    "soak-engines": "soak",
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
