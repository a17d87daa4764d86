"""Records the lists that are named, or all of them, on the device of this process."""

import argparse
import json
import tempfile
import time
from pathlib import Path

from vllm_npu_prep.verify.calls.lists import FOLDER, engines, path_of
from vllm_npu_prep.verify.children import record_calls


def main() -> None:
    known = engines()
    parser = argparse.ArgumentParser(description="Records lists of calls.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="lists (default: all)")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder that they go to")
    args = parser.parse_args()
    for name in args.names or known:
        start, target = time.monotonic(), args.out.absolute() / path_of(name).name
        with tempfile.TemporaryDirectory() as folder:
            model = Path(folder, name)
            model.mkdir()
            (model / "config.json").write_text(json.dumps(known[name]["config"]))
            settings = {"model": str(model), **known[name]["settings"]}
            record_calls(settings, target, Path(folder))
        taken = time.monotonic() - start
        print(f"{name}: {target.stat().st_size:,} bytes after {taken:.0f} seconds", flush=True)


if __name__ == "__main__":
    main()
