"""The scripts that layers and containers run, in folders of their own."""

import os
import shutil
import signal
import stat
import subprocess
import sys
import sysconfig
import threading
from functools import partial
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path

import pytest

from tests.helpers.deploy import ROOT, files_of, ran
from tests.helpers.waiting import LIMIT

sys.path.insert(0, str(ROOT / "scripts"))
from healthcheck import health_url

SCRIPTS = ROOT / "scripts"


def write_command(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def image(tmp_path):
    """A folder with the entry point as an image has it, and a doctor that finds nothing."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "tmp").mkdir()
    shutil.copy(SCRIPTS / "entrypoint.sh", tmp_path / "bin")
    write_command(tmp_path / "bin" / "vllm-npu-prep", 'echo "doctor $1: CANN ${CANN_IS:-absent}"')
    return tmp_path


def start(image: Path, *command: str, **environment: str) -> subprocess.CompletedProcess:
    own = {"PATH": "/usr/bin:/bin", "TMPDIR": str(image / "tmp")}
    own["NPU_PREP_CANN_ROOT"] = str(image / "Ascend")
    return ran(image / "bin" / "entrypoint.sh", *command, env=own | environment)


def test_the_doctor_looks_before_the_command_runs(image):
    done = start(image, "echo", "vllm", "serve", "a model", "--port", "8001")
    assert done.returncode == 0, done.stderr
    command = "vllm serve a model --port 8001"
    assert done.stdout.splitlines() == ["doctor doctor: CANN absent", command]
    assert (image / "tmp" / "npu_prep_command").read_text() == f"echo {command}\n"


@pytest.mark.parametrize(
    ("how", "code", "said"),
    [
        ({}, 2, "NPU_PREP_DOCTOR=show"),
        ({"NPU_PREP_DOCTOR": "show"}, 0, ""),
        ({"NPU_PREP_DOCTOR": "off"}, 0, ""),
        ({"NPU_PREP_DOCTOR": "of"}, 2, "refuse, show or off"),
    ],
    ids=str,
)
def test_a_failure_ends_it_before_a_model_loads(image, how, code, said):
    """Unless it is only shown, or nobody looks, which takes a word without a mistake."""
    write_command(image / "bin" / "vllm-npu-prep", "echo failure: no device nodes; exit 1")
    done = start(image, "touch", str(image / "loaded"), **how)
    assert (done.returncode, (image / "loaded").exists()) == (code, code == 0)
    assert said in done.stderr
    assert ("no device nodes" in done.stdout) == (how.get("NPU_PREP_DOCTOR", "show") == "show")


def test_variables_of_cann_reach_doctor_and_command(image):
    toolkit, nnal = image / "Ascend" / "ascend-toolkit", image / "Ascend" / "nnal" / "atb"
    for folder in (toolkit, nnal):
        folder.mkdir(parents=True)
    # As CANN's do, these use what isn't set and end with what isn't true.
    (toolkit / "set_env.sh").write_text(
        'export CANN_IS="here $UNSET" PATH=/nowhere:$PATH\n[ -n "$1" ]\n'
    )
    (nnal / "set_env.sh").write_text('export ABI="$1"\nfalse\n')
    done = start(image, "sh", "-c", 'echo "$CANN_IS" "$ABI" "${PATH%%:*}"')
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "doctor doctor: CANN here ",
        f"here  --cxx_abi=1 {image / 'bin'}",
    ]


def test_signals_and_exit_codes_are_those_of_the_command(image):
    command = "trap 'exit 7' TERM; echo ready; while :; do sleep 0.1; done"
    process = subprocess.Popen(
        [image / "bin" / "entrypoint.sh", "sh", "-c", command],
        env={"PATH": "/usr/bin:/bin", "TMPDIR": str(image / "tmp"), "NPU_PREP_DOCTOR": "off"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(LIMIT) == 7


@pytest.mark.parametrize(
    ("command", "url"),
    [
        ("vllm serve /models/a", "http://127.0.0.1:8000/health"),
        ("vllm serve /models/a --port 9000 --host 0.0.0.0", "http://127.0.0.1:9000/health"),
        ("vllm serve a --host=10.0.0.2 --port=9001", "http://10.0.0.2:9001/health"),
        ("vllm serve a --host :: --ssl-certfile c.pem", "https://[::1]:8000/health"),
        ("bash -c ray start --port=1 && exec vllm serve a --port=81", "http://127.0.0.1:81/health"),
        ("bash -c until ray health-check; do sleep 5; done; exec ray start --block", None),
        ("vllm-npu-prep explain steps", None),
    ],
)
def test_the_health_check_asks_the_address_that_is_served(command, url):
    assert health_url(command) == url


def test_health_is_the_servers_answer(tmp_path):
    (tmp_path / "health").touch()
    served = partial(SimpleHTTPRequestHandler, directory=tmp_path)
    server = HTTPServer(("127.0.0.1", 0), served)
    threading.Thread(target=server.serve_forever, daemon=True).start()

    def health(port: int | None) -> int:
        if port:
            (tmp_path / "npu_prep_command").write_text(f"vllm serve a --port {port}\n")
        # A proxy is for the world outside.
        environment = {**os.environ, "TMPDIR": str(tmp_path), "http_proxy": "http://127.0.0.1:9"}
        done = ran(sys.executable, "-I", SCRIPTS / "healthcheck.py", env=environment)
        assert "Traceback" not in done.stderr
        return done.returncode

    assert health(None) == 1  # the doctor still looks
    assert health(server.server_port) == 0
    (tmp_path / "health").unlink()
    assert health(server.server_port) == 1
    server.shutdown()
    server.server_close()
    assert health(server.server_port) == 1


def image_sh(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    return ran(SCRIPTS / "image.sh", *arguments, env={"PATH": "/usr/bin:/bin", **environment})


def test_a_soc_is_one_that_cann_has_images_for():
    assert [image_sh("soc", soc).returncode for soc in ("910b", "a3")] == [0, 0]
    done = image_sh("soc", "310p")
    assert done.returncode == 0 and "refuses Ascend 310P" in done.stderr
    done = image_sh("soc", "910c")
    assert done.returncode == 1 and "910b (A2), a3 or 310p" in done.stderr
    assert image_sh("sco", "a3").returncode == 1


@pytest.mark.parametrize("steps", ["plugin", "plugin,caches"])
def test_the_layers_of_the_plugin_hold_in_a_clean_folder(steps, tmp_path):
    """The libraries are this environment's; the rest comes from a copy of the image's context."""
    source, venv = tmp_path / "context", tmp_path / "venv"
    ignored = shutil.ignore_patterns("__pycache__")
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if line.startswith("!"):
            path, target = ROOT / line[1:], source / line[1:]
            target.parent.mkdir(exist_ok=True, parents=True)
            copy = (shutil.copytree, shutil.copy)[path.is_file()]
            copy(path, target, **({} if path.is_file() else {"ignore": ignored}))
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    [packages] = venv.glob("lib/python*/site-packages")
    (packages / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    environment = {
        **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        **{"PIP_NO_INDEX": "1", "PIP_NO_DEPS": "1", "NUMBA_CACHE_DIR": str(tmp_path / "numba")},
        **{"VLLM_CACHE_ROOT": str(tmp_path / "cache"), "PYTHONDONTWRITEBYTECODE": "1"},
    }
    install = [source / "scripts/install.sh", "--venv", venv, "--python", sys.executable]
    done = ran(*install, "--no-editable", "--extras", "", "--steps", steps, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr

    installed, files = packages / "vllm_npu_prep", set(files_of(source / "vllm_npu_prep"))
    assert set(files_of(installed)) == files
    shutil.rmtree(source)
    modules = [installed / file for file in files if file.suffix == ".py"]
    # An image's layer keeps whole seconds, and numba compares times to the last digit.
    assert [file for file in modules if file.stat().st_mtime_ns % 10**9] == []
    if "caches" not in steps:
        return
    assert len(list(installed.rglob("__pycache__/*.pyc"))) == len(modules)
    done = ran(venv / "bin" / "python", "-P", "-c", COMPILED, env=environment)
    assert done.returncode == 0, done.stderr
    file, misses, hits = done.stdout.split()
    assert Path(file) == installed / "prep" / "batch.py"
    assert int(misses) == 0 and int(hits) >= 4


COMPILED = """
import gc
import torch
from numba.core.dispatcher import Dispatcher
from vllm_npu_prep.attention import kernels
from vllm_npu_prep.attention.kernels import compiled_loops
from vllm_npu_prep.observe import step_snapshot
from vllm_npu_prep.prep import batch

step_snapshot.warm_up(batch.warm_up())
kernels.warm_up("compiled", torch.bfloat16)
assert compiled_loops.kept[0].cache_hits
found = [one for one in gc.get_objects() if isinstance(one, Dispatcher)]
found = [one for one in found if one.py_func.__module__.startswith("vllm_npu_prep")]
misses = sum(sum(one.stats.cache_misses.values()) for one in found)
print(batch.__file__, misses, sum(bool(one.stats.cache_hits) for one in found))
"""
