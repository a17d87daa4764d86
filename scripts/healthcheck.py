"""Health check of the images: does the server that the entry point started answer?

Exit code 0 if it does, or if no ``vllm serve`` was started (a node of a Ray cluster, say), else 1.
The address is the one of the command line; one that is given in ``--config FILE`` isn't seen.
"""

import os
import re
import ssl
import sys
import tempfile
import urllib.request
from pathlib import Path

SECONDS = 4
"""Less than the image's own limit, so that the reason is told."""


def health_url(command: str) -> str | None:
    """Address to ask for a command that `entrypoint.sh` ran; None without a server."""
    serve = re.search(r"\bvllm serve\b(?P<flags>.*)", command, re.DOTALL)
    if serve is None:
        return None

    def flag(name: str) -> str | None:
        found = re.findall(rf"--{name}[=\s]+['\"]?([^\s'\"]+)", serve["flags"])
        return found[-1] if found else None

    host = flag("host") or "127.0.0.1"
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, host)
    scheme = "https" if flag("ssl-certfile") else "http"
    return f"{scheme}://{host}:{flag('port') or 8000}/health"


def main() -> int:
    """Ask once."""
    file = Path(os.environ.get("TMPDIR", tempfile.gettempdir()), "npu_prep_command")
    if not file.exists():
        print("the entry point has started nothing yet", file=sys.stderr)
        return 1
    url = health_url(file.read_text())
    if url is None:
        return 0
    # The certificate is made out to another name than the one that is asked here.
    trusting = ssl._create_unverified_context()
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=trusting)
    )
    try:
        with opener.open(url, timeout=SECONDS):
            return 0
    except OSError as error:
        print(f"{url}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
