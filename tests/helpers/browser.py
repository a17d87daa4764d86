"""A page in a headless browser, and what it asks of the network meanwhile."""

import functools
import http.server
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from tests.helpers.waiting import LIMIT


@functools.cache
def browser() -> str | None:
    """A headless browser: ``NPU_PREP_BROWSER``, or what Debian's package installs.

    Not a whole Chromium: it asks its maker's hosts by itself, whatever it shows.
    """
    return os.environ.get("NPU_PREP_BROWSER") or shutil.which("chromium-headless-shell")


needs_browser = pytest.mark.skipif(
    browser() is None,
    reason="no browser: apt-get install chromium-headless-shell, or set NPU_PREP_BROWSER",
)


class Asked(http.server.BaseHTTPRequestHandler):
    """Counts what a browser asks of the network."""

    paths: list[str]

    def do_GET(self):
        self.paths.append(self.path)
        self.send_error(404)

    do_CONNECT = do_GET  # noqa: N815

    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def network() -> Iterator[tuple[int, list[str]]]:
    """A proxy that a browser sends everything to, and what it was asked for."""
    Asked.paths = []
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Asked)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_address[1], Asked.paths
    server.shutdown()
    server.server_close()


def opened(
    page: Path, network: tuple[int, list[str]], behind: str = "", *flags: str, dark: bool = False
) -> tuple[str, Image.Image]:
    """The document after its scripts ran, and a screenshot.

    Parameters
    ----------
    page
        The file.
    network
        The fixture; forgets what other pages asked for.
    behind
        What comes behind its address, a fragment say.
    flags
        More of the browser's.
    dark
        Which colours the page is told that its reader prefers.
    """
    port, paths = network
    paths.clear()
    picture = page.with_suffix(".png")
    assert browser() is not None
    command = [
        browser(),
        "--headless",
        *(["--no-sandbox"] if os.getuid() == 0 else []),
        "--disable-gpu",
        "--disable-background-networking",
        "--hide-scrollbars",
        f"--user-data-dir={page.parents[1] / 'browser'}",
        f"--proxy-server=http://127.0.0.1:{port}",
        "--proxy-bypass-list=<-loopback>",
        f"--blink-settings=preferredColorScheme={0 if dark else 1}",
        "--window-size=1400,900",
        f"--screenshot={picture}",
        "--dump-dom",
        *flags,
        page.as_uri() + behind,
    ]
    done = subprocess.run(command, capture_output=True, timeout=LIMIT)
    assert picture.exists(), done.stderr.decode()[-2000:]
    return done.stdout.decode(), Image.open(picture).convert("RGB")
