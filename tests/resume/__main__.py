"""What the long runs have come to: python -m tests.resume"""

from tests.resume.log import Results
from tests.resume.slice import summary
from tests.resume.tree import RESULTS

for name in ("test-all", "mutants", "soak"):
    results = Results(RESULTS / f"{name}.jsonl")
    runs = results.runs()
    print(f"make {name}:", "" if runs else "never run")
    for run in results.folded:
        commits = ", ".join(run["commits"])
        print(f"run {run['folded']}, begun {run['begun']}, at {commits}: {run['outcomes']}")
    for run in runs:
        print(summary(results, run, f"make {name}"))
