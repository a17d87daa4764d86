"""What the long runs have come to: python -m tests.resume"""

from tests.resume.log import Log
from tests.resume.tree import RESULTS

for path in sorted(RESULTS.glob("*.jsonl")):
    if (log := Log(path)).run:
        print(f"{path.stem}: {log.summary()}")
