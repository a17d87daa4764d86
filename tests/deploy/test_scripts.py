"""The scripts that layers and containers run, in folders of their own."""

import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from tests.helpers.deploy import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
from healthcheck import health_url

BIN = Path(sys.executable).parent
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
    return subprocess.run(
        [image / "bin" / "entrypoint.sh", *command],
        env={
            **{"PATH": "/usr/bin:/bin", "TMPDIR": str(image / "tmp")},
            **{"NPU_PREP_CANN_ROOT": str(image / "Ascend"), **environment},
        },
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_the_doctor_looks_before_the_command_runs(image):
    ran = start(image, "echo", "vllm", "serve", "a model", "--port", "8001")
    assert ran.returncode == 0, ran.stderr
    command = "vllm serve a model --port 8001"
    assert ran.stdout.splitlines() == ["doctor doctor: CANN absent", command]
    assert (image / "tmp" / "npu_prep_command").read_text() == f"echo {command}\n"


def test_a_failure_ends_it_before_a_model_loads(image):
    write_command(image / "bin" / "vllm-npu-prep", "echo failure: no device nodes; exit 1")
    ran = start(image, "touch", str(image / "loaded"))
    assert ran.returncode == 2
    assert "no device nodes" in ran.stdout and "NPU_PREP_DOCTOR=show" in ran.stderr
    assert not (image / "loaded").exists()

    ran = start(image, "touch", str(image / "loaded"), NPU_PREP_DOCTOR="show")
    assert ran.returncode == 0 and "no device nodes" in ran.stdout
    assert (image / "loaded").exists()


def test_the_doctor_can_be_left_out_but_not_by_a_mistyped_word(image):
    assert start(image, "echo", "served", NPU_PREP_DOCTOR="off").stdout == "served\n"
    ran = start(image, "echo", "served", NPU_PREP_DOCTOR="of")
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "refuse, show or off" in ran.stderr


def test_the_real_doctor_refuses_a_host_without_npus(image):
    (image / "bin" / "vllm-npu-prep").unlink()
    ran = start(
        image,
        *("echo", "served"),
        PATH=f"{BIN}:/usr/bin:/bin",
        PYTHONPATH=str(ROOT),
        NPU_PREP_DEVICE="npu",
    )
    assert ran.returncode == 2, ran.stdout + ran.stderr
    assert "failure" in ran.stdout and "served" not in ran.stdout


def test_variables_of_cann_reach_doctor_and_command(image):
    toolkit, nnal = image / "Ascend" / "ascend-toolkit", image / "Ascend" / "nnal" / "atb"
    for folder in (toolkit, nnal):
        folder.mkdir(parents=True)
    # As CANN's do, these use what isn't set and end with what isn't true.
    (toolkit / "set_env.sh").write_text(
        'export CANN_IS="here $UNSET" PATH=/nowhere:$PATH\n[ -n "$1" ]\n'
    )
    (nnal / "set_env.sh").write_text('export ABI="$1"\nfalse\n')
    ran = start(image, "sh", "-c", 'echo "$CANN_IS" "$ABI" "${PATH%%:*}"')
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == [
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
    assert process.wait(20) == 7


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
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(answers[self.path])
            self.end_headers()

        def log_message(self, *_):
            pass

    answers = {"/health": 200}
    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()

    def health(port: int) -> int:
        (tmp_path / "npu_prep_command").write_text(f"vllm serve a --port {port}\n")
        command = [sys.executable, "-I", SCRIPTS / "healthcheck.py"]
        # A proxy is for the world outside.
        environment = {**os.environ, "TMPDIR": str(tmp_path), "http_proxy": "http://127.0.0.1:9"}
        return subprocess.run(command, env=environment, capture_output=True, timeout=30).returncode

    assert health(server.server_port) == 0
    answers["/health"] = 503
    assert health(server.server_port) == 1
    server.shutdown()
    server.server_close()
    assert health(server.server_port) == 1


def image_sh(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [SCRIPTS / "image.sh", *arguments],
        env={"PATH": "/usr/bin:/bin", **environment},
        capture_output=True,
        text=True,
        timeout=30,
    )


def test_a_soc_is_one_that_cann_has_images_for():
    assert [image_sh("soc", soc).returncode for soc in ("910b", "a3")] == [0, 0]
    ran = image_sh("soc", "310p")
    assert ran.returncode == 0 and "refuses Ascend 310P" in ran.stderr
    ran = image_sh("soc", "910c")
    assert ran.returncode == 1 and "910b (A2), a3 or 310p" in ran.stderr
    assert image_sh("sco", "a3").returncode == 1


def test_the_packages_of_build_tools_are_removed_and_nothing_else(tmp_path):
    tools = {"gcc": "gcc-11", "cc": "gcc-11", "make": "make", "ld": "binutils"}
    for name in tools:
        write_command(tmp_path / name, "")
    cases = "".join(f'*/{name}) echo "{package}: $2" ;; ' for name, package in tools.items())
    write_command(tmp_path / "dpkg", f"case $2 in {cases} *) exit 1 ;; esac")
    write_command(tmp_path / "apt-get", f'echo "$@" >{tmp_path}/log')
    for name in ("readlink", "sort", "cut", "dirname", "env", "bash"):
        (tmp_path / name).symlink_to(shutil.which(name))
    assert image_sh("remove-build-tools", PATH=str(tmp_path)).returncode == 0
    assert (tmp_path / "log").read_text().split() == [
        *("purge", "--yes", "--quiet", "binutils", "gcc-11", "make"),
    ]


def test_the_layers_of_the_plugin_hold_in_a_clean_folder(tmp_path):
    # The libraries are those of this environment; plugin and caches are installed as the image
    # does, from a copy of what its context has.
    source, venv = tmp_path / "context", tmp_path / "venv"
    source.mkdir()
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if line.startswith("!"):
            (source / line[1:]).parent.mkdir(exist_ok=True)
            copy = shutil.copytree if (ROOT / line[1:]).is_dir() else shutil.copy
            copy(ROOT / line[1:], source / line[1:])
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    [packages] = venv.glob("lib/python*/site-packages")
    (packages / "libraries.pth").write_text(
        next(path for path in sys.path if path.endswith("site-packages")) + "\n"
    )
    environment = {
        **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        **{"PIP_NO_INDEX": "1", "PIP_NO_DEPS": "1", "NUMBA_CACHE_DIR": str(tmp_path / "numba")},
        **{"VLLM_CACHE_ROOT": str(tmp_path / "cache"), "PYTHONDONTWRITEBYTECODE": "1"},
    }
    ran = subprocess.run(
        [
            *(source / "scripts" / "install.sh", "--venv", venv, "--python", sys.executable),
            *("--no-editable", "--extras", "", "--steps", "plugin,caches"),
        ],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "2/2 byte code and caches" in ran.stdout
    shutil.rmtree(source)

    kernels = packages / "vllm_npu_prep" / "prep" / "kernels.py"
    assert kernels.exists() and list(kernels.parent.glob("__pycache__/kernels.*.pyc"))
    # An image's layer keeps whole seconds.
    for path in (packages / "vllm_npu_prep").rglob("*.py"):
        seconds = int(path.stat().st_mtime)
        os.utime(path, (seconds, seconds))
    script = (
        "from vllm_npu_prep.prep import batch, kernels; batch.warm_up();"
        "stats = kernels.fill_step.stats;"
        "print(kernels.__file__, sum(stats.cache_hits.values()), sum(stats.cache_misses.values()))"
    )
    ran = subprocess.run(
        [venv / "bin" / "python", "-P", "-c", script],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.stdout.split() == [str(kernels), "1", "0"], ran.stdout + ran.stderr


def test_an_unknown_step_is_refused(tmp_path):
    ran = subprocess.run(
        [SCRIPTS / "install.sh", "--venv", tmp_path / "venv", "--steps", "torch,caches,vlm"],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert ran.returncode == 1 and "unknown step vlm; there are environment," in ran.stderr
    assert not (tmp_path / "venv").exists()
