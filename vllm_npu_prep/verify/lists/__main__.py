"""Records the lists that are named, or all of them, on the device of this process."""

import json
import sys
import tempfile
import time
from pathlib import Path

from vllm_npu_prep.verify.children import record_calls
from vllm_npu_prep.verify.lists import engines, path_of


def main() -> None:
    known = engines()
    for name in sys.argv[1:] or known:
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            model = Path(folder, name)
            model.mkdir()
            (model / "config.json").write_text(json.dumps(known[name]["config"]))
            settings = {"model": str(model), **known[name]["settings"]}
            record_calls(settings, path_of(name), Path(folder))
        size, taken = path_of(name).stat().st_size, time.monotonic() - start
        print(f"{name}: {size:,} bytes after {taken:.0f} seconds", flush=True)


if __name__ == "__main__":
    main()
