"""``vllm-npu-prep doctor``: what it says of made-up hosts, of hostile ones, and of this one."""

import io
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from tests.helpers import hosts
from vllm_npu_prep.inspect.doctor import LONGEST_TEXT, examine
from vllm_npu_prep.inspect.doctor.finding import Finding, Status
from vllm_npu_prep.inspect.doctor.host import Host, Ran, run_command
from vllm_npu_prep.inspect.doctor.report import report_text

TABLES = Path(__file__).with_name("doctor")


def table(findings: list[Finding], width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width)
    report_text(findings, console)
    lines = console.file.getvalue().splitlines()
    return "\n".join(line.rstrip() for line in lines).strip() + "\n"


def by_name(host: Host) -> dict[str, Finding]:
    return {finding.name: finding for finding in examine(host)}


@pytest.mark.parametrize("name", hosts.HOSTS)
def test_table_of_a_made_up_host(name, tmp_path):
    findings = examine(hosts.HOSTS[name](tmp_path))
    assert table(findings) == (TABLES / f"{name}.txt").read_text()
    for finding in findings:
        assert finding.found and bool(finding.do) == (finding.status is not Status.OK), finding


@pytest.mark.parametrize(
    ("version", "status", "words"),
    [
        ("24.1.RC3", "failure", "full graphs are off"),
        ("25.0.RC1", "warning", "Alloc sq cq fail"),
        ("25.5.0", "warning", "Alloc sq cq fail"),
        ("25.5.1", "ok", "25.5.1"),
        ("26.0.rc1", "ok", "26.0.rc1"),
    ],
)
def test_what_an_old_driver_lacks_is_told(version, status, words, tmp_path):
    host = hosts.ascend_910b(tmp_path)
    hosts.with_driver(tmp_path, version)
    driver = by_name(host)["driver"]
    assert driver.status.value == status and words in driver.found


def changed(tmp_path: Path, **changes) -> dict[str, Finding]:
    return by_name(replace(hosts.ascend_910b(tmp_path), **changes))


VARIABLES = [
    ("NPU_PREP_DEVICE", "gpu", "failure", "auto, npu or cpu"),
    ("NPU_PREP_DEVICE", "NPU", "ok", ""),
    ("VLLM_PLUGINS", "lora_filesystem_resolver", "failure", "add npu_prep"),
    ("VLLM_PLUGINS", "a,npu_prep", "ok", ""),
    ("VLLM_USE_V2_MODEL_RUNNER", "0", "warning", "V2 is the plugin's default"),
    ("VLLM_USE_V2_MODEL_RUNNER", "1", "ok", ""),
    ("VLLM_USE_V2_MODEL_RUNNER", "v2", "failure", "set it to 1 for V2 or to 0 for V1"),
    ("VLLM_TARGET_DEVICE", "cuda", "warning", "empty"),
    ("VLLM_WORKER_MULTIPROC_METHOD", "fork", "warning", "spawn"),
    ("PYTHONDONTWRITEBYTECODE", "1", "warning", "unset"),
    ("NUMBA_DISABLE_JIT", "1", "warning", "unset"),
    ("ASCEND_RT_VISIBLE_DEVICES", "", "failure", "unset"),
    ("ASCEND_RT_VISIBLE_DEVICES", "all", "failure", "0,1"),
    ("ASCEND_RT_VISIBLE_DEVICES", "1,2", "failure", "remove 2"),
    ("ASCEND_HOME_PATH", "/opt/gone", "failure", "set_env.sh"),
    ("LD_LIBRARY_PATH", "/usr/lib", "warning", "set_env.sh"),
    ("NUMBA_CACHE_DIR", "/var/cache/numba", "ok", ""),
    ("TASK_QUEUE_ENABLE", "1", "ok", ""),
    ("TASK_QUEUE_ENABLE", "2", "warning", "workers take for 1"),
    ("TASK_QUEUE_ENABLE", "3", "failure", "set it to 1"),
    ("ASCEND_LAUNCH_BLOCKING", "0", "ok", ""),
    ("ASCEND_LAUNCH_BLOCKING", "1", "warning", "full graphs are off"),
    ("PYTORCH_NPU_ALLOC_CONF", "expandable_segments:False", "ok", ""),
    ("PYTORCH_NPU_ALLOC_CONF", "pin_memory_expandable_segments:True", "failure", "no graph can"),
]


@pytest.mark.parametrize("row", VARIABLES, ids=lambda row: "-".join(row[:2]))
def test_environment_variables(row, tmp_path):
    variable, value, status, said = row
    environment = hosts.SOURCED | {variable: value}
    finding = changed(tmp_path, environment=environment)[variable]
    assert finding.status == status
    assert said in finding.do


WELL = hosts.loads(hosts.SEEN, hosts.FIA)
IN_USE = hosts.smi(("910B3", "OK", 3360, 65536), ("910B3", "OK", 60000, 65536))
LACKS = {"npu_chunk_gated_delta_rule": "aclnnChunkGatedDeltaRule", "npu_swiglu": "aclnnSwiGlu"}
DEAD = replace(hosts.probe(torch={"version": "2.13.0"}), code=-11, err="x\nFatal")


@pytest.mark.parametrize(
    ("run", "name", "status", "words"),
    [
        (hosts.run(Ran(0, IN_USE), WELL), "device memory", "warning", ["chip 1:"]),
        (hosts.run(Ran(None, ""), WELL), "npu-smi", "failure", ["20 seconds"]),
        (hosts.run(Ran(0, "nothing"), DEAD), "npu-smi", "failure", ["lists no NPU: nothing"]),
        (hosts.run(Ran(0, "nothing"), DEAD), "import torch", "ok", []),
        (
            *(hosts.run(Ran(0, "nothing"), DEAD), "torch_npu sees", "failure"),
            ["the process that imports them ended with exit code -11: Fatal"],
        ),
        (
            hosts.run(None, hosts.loads(hosts.SEEN | {"missing": LACKS}, hosts.FIA)),
            *("CANN's functions", "warning"),
            [
                "aclnnChunkGatedDeltaRule (npu_chunk_gated_delta_rule), which CANN 9.1 has",
                "aclnnSwiGlu (npu_swiglu), which CANN 8.5 has",
                "install CANN 9.1 or newer",
            ],
        ),
        (
            hosts.run(None, hosts.loads(hosts.SEEN | {"missing": {}}, hosts.FIA)),
            *("CANN's functions", "ok", []),
        ),
    ],
    ids=["in use", "hangs", "no NPU", "torch", "dies", "lacks functions", "has functions"],
)
def test_what_commands_and_probes_say_is_told(run, name, status, words, tmp_path):
    finding = changed(tmp_path, run=run)[name]
    assert finding.status == status
    assert all(each in f"{finding.found} {finding.do}" for each in words)


def test_npus_without_torch_npu(tmp_path):
    host = replace(hosts.ascend_910b(tmp_path), versions=hosts.bare(tmp_path / "b").versions)
    finding = by_name(host)["torch_npu"]
    assert finding.status == "warning"
    assert "pip install torch_npu==2.13.0" in finding.do
    asked = replace(host, environment=hosts.SOURCED | {"NPU_PREP_DEVICE": "npu"})
    assert by_name(asked)["torch_npu"].status == "failure"


def test_nothing_of_ascend_is_missed_where_the_cpu_is_asked_for(tmp_path):
    host = hosts.container_without_devices(tmp_path)
    devices = {"visible": False, "reason": "torch_npu is installed, but sees no NPU"}
    probed = hosts.loads(devices, hosts.COMPILED)
    host = replace(host, environment={"NPU_PREP_DEVICE": "cpu"}, run=hosts.run(None, probed))
    assert {finding.status for finding in examine(host)} == {Status.OK}


@pytest.mark.parametrize(
    ("environment", "plugins", "said"),
    [
        ({"VLLM_PLUGINS": "other"}, ("npu_prep", "other"), "add npu_prep"),
        ({}, ("other",), "pip install"),
        ({}, ("npu_prep", "other"), "VLLM_PLUGINS=npu_prep"),
    ],
)
def test_a_plugin_that_is_inactive_says_why(environment, plugins, said, tmp_path):
    ran = hosts.run(None, hosts.loads({"visible": False, "reason": "none"}, hosts.COMPILED, "o.P"))
    changes = {"environment": environment, "platform_plugins": plugins, "run": ran}
    finding = by_name(replace(hosts.bare(tmp_path), **changes))["platform"]
    assert finding.status == "failure" and said in finding.do


FILES = (
    "/usr/local/Ascend/driver/version.info",
    "/usr/local/Ascend/firmware/version.info",
    f"{hosts.CANN}/aarch64-linux/ascend_toolkit_install.info",
    "/proc/meminfo",
    "/sys/fs/cgroup/memory.max",
)


@pytest.mark.parametrize("make", [Path.mkdir, lambda p: p.symlink_to(p), os.mkfifo, Path.touch])
def test_paths_that_are_no_files_are_findings(make, tmp_path):
    host = hosts.ascend_910b(tmp_path)
    for path in FILES:
        host.path(path).unlink(missing_ok=True)
        host.path(path).parent.mkdir(parents=True, exist_ok=True)
        make(host.path(path))
    findings = by_name(host)
    assert findings["driver"].status == "warning"
    assert findings["memory"].status == "warning"
    assert findings["CANN"].status in ("warning", "failure")


TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=()), max_size=300)


@settings(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(content=st.binary(max_size=200), text=TEXT, code=st.integers(-9, 9))
def test_any_bytes_in_any_file_and_any_output_are_findings(content, text, code, tmp_path_factory):
    host = hosts.ascend_910b(tmp_path_factory.mktemp("host"))
    for path in FILES:
        host.path(path).parent.mkdir(parents=True, exist_ok=True)
        host.path(path).write_bytes(b"Version=" + content + b"\nversion=" + content)
    ran = hosts.run(Ran(code, hosts.smi(("910B3", "OK", 1, 2)) + text, text), Ran(code, text))
    findings = examine(replace(host, run=ran, environment={"ASCEND_HOME_PATH": text}))
    shown = table(findings)
    assert all(c.isprintable() or c == "\n" for c in shown)
    assert all(len(finding.found) <= LONGEST_TEXT + 4 for finding in findings)


def test_commands_are_run_with_a_limit():
    assert run_command([sys.executable, "-c", "print('a' * 9)"], 60) == Ran(0, "a" * 9 + "\n")
    ran = run_command(["sh", "-c", "echo said; exec sleep 300"], 2)
    assert (ran.code, ran.out) == (None, "said\n")
    with pytest.raises(OSError, match="npu-smi-that-is-not"):
        run_command(["npu-smi-that-is-not"], 1)


def test_this_host_is_examined_without_importing_torch_or_vllm(tmp_path):
    """The command as it is run, in a container without devices: the probe is a real one."""
    code = (
        "import sys; from vllm_npu_prep.cli import main\n"
        "code = main(['doctor', '--json'])\n"
        "sys.exit(3 if 'vllm' in sys.modules or 'torch' in sys.modules else code)"
    )
    environment = {**os.environ, "NPU_PREP_DEVICE": "cpu"}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment)
    assert ran.returncode == 0, ran
    report = {line["name"]: line for line in json.loads(ran.stdout)["findings"]}
    assert report["platform"]["found"] == f"{hosts.PLATFORM}: the plugin is active"
    assert report["kernels and masks"]["found"] == "compiled, compressed masks"
    assert report["vllm"] == {"name": "vllm", "status": "ok", "found": "0.32.0", "do": ""}
