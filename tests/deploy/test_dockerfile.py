"""The Dockerfile: what can be told of it where no container engine runs.

`make image-dry-run` executes it, too.
"""

import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.helpers.deploy import DEPLOY, ROOT, expanded, read_dockerfile, tool
from tests.helpers.waiting import LIMIT

ARGUMENTS, STAGES = read_dockerfile()
TARGETS = ("ascend", "cpu")
IN_CONTEXT = [
    line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] == "!"
]


def commands(run: str) -> list[list[str]]:
    """Commands of a RUN, without its mounts."""
    words = shlex.split(run.replace("\\\n", " "))
    words = [word for word in words if not word.startswith("--mount=")]
    found = [[]]
    for word in words:
        if word in ("&&", ";", "|", "||"):
            found.append([])
        else:
            found[-1].append(word)
    return found


def install_steps(stage) -> list[str]:
    steps = []
    for run in stage.all("RUN"):
        for command in commands(run):
            if any(word.endswith("install.sh") for word in command):
                steps += command[command.index("--steps") + 1].split(",")
    return steps


def test_hadolint_has_nothing_to_say():
    command = [tool("hadolint"), "--disable-ignore-pragma", ROOT / "Dockerfile"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")


def test_the_targets_are_there_and_differ_in_base_user_and_device_only():
    assert [name for name in STAGES if not name.endswith("-libraries")] == list(TARGETS)
    assert "SOC" in ARGUMENTS and "OS" in ARGUMENTS and "CANN_VERSION" in ARGUMENTS

    def shape(name, user):
        own = ("ARG", "USER", "WORKDIR")
        parts = [part for part in STAGES[name].instructions if part[0] not in own]
        text = json.dumps(parts[1:])  # the first makes the user
        text = text.replace(f"{name}-libraries", "libraries").replace(f"give {user} ", "give ")
        return re.sub(r"NPU_PREP_DEVICE=cpu\s+", "", text)

    ascend, cpu = (STAGES[f"{name}-libraries"].all("RUN", "COPY") for name in TARGETS)
    assert ascend == cpu
    assert shape("ascend", "HwHiAiUser") == shape("cpu", "vllm")


@pytest.mark.parametrize(
    ("given", "image"),
    [
        ({}, "ascendai/cann:9.1.0-910b-ubuntu22.04-py3.11"),
        (
            {"SOC": "a3", "OS": "openeuler24.03", "PYTHON_VERSION": "3.12"},
            "ascendai/cann:9.1.0-a3-openeuler24.03-py3.12",
        ),
        ({"CANN_IMAGE": "registry.example:5000/any/cann:1"}, "registry.example:5000/any/cann:1"),
    ],
)
def test_build_arguments_choose_the_base_image(given, image):
    text = re.findall(r"^ARG (CANN_IMAGE)=(.*)", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    defaults = {**ARGUMENTS, **given}
    values = {**defaults, "CANN_IMAGE": expanded(text[0][1], defaults), **given}
    assert {expanded(STAGES[name].base, values) for name in ("ascend", "ascend-libraries")} == {
        image
    }


@pytest.mark.parametrize("name", STAGES)
def test_every_file_that_a_stage_uses_is_in_the_context(name):
    stage = STAGES[name]
    copied = []
    for value in stage.all("COPY"):
        *words, _ = value.split()
        if not words[0].startswith("--from"):
            copied += words
    called = re.findall(r"(?:/mnt/|\s|^)(scripts/[\w.]+)", "\n".join(stage.all("RUN")))
    called += [f"scripts/{file}" for file in re.findall(r"/mnt/(\w+\.\w+)", str(stage.all("RUN")))]
    called += [
        f"scripts/{Path(word).name}"
        for value in stage.all("ENTRYPOINT", "HEALTHCHECK")
        for word in re.findall(r"/opt/npu_prep/bin/\w+\.\w+", value)
    ]
    assert called
    for file in called:
        assert os.access(ROOT / file, os.X_OK), file
    for file in copied + called:
        assert (ROOT / file).exists(), file
        assert any(file == kept or file.startswith(kept + "/") for kept in IN_CONTEXT), file


@pytest.mark.parametrize("name", TARGETS)
def test_every_step_of_the_installation_is_taken_but_the_emulator(name):
    known = re.search(r"all_steps=(\S+)", (ROOT / "scripts/install.sh").read_text())[1].split(",")
    libraries, image = (install_steps(STAGES[n]) for n in (f"{name}-libraries", name))
    assert [*libraries, *image] == [
        *("environment", "torch", "vllm", "torchvision", "plugin", "trim"),
        *("plugin", "caches"),
    ]
    assert set(known) - {"emulator"} <= {*libraries, *image}


@pytest.mark.parametrize("name", TARGETS)
def test_a_change_of_the_plugin_leaves_the_layers_of_the_libraries(name):
    libraries = STAGES[f"{name}-libraries"]
    files = [file for value in libraries.all("COPY", "ADD") for file in value.split()[:-1]]
    assert files == [
        *("scripts/install.sh", "vllm_npu_prep/torchvision_import.py", "constraints.txt"),
        *("setup.py", "pyproject.toml"),
    ]
    assert not any("type=bind" in run for run in libraries.all("RUN"))
    first = STAGES[name].instructions.index(
        ("COPY", f"--from={name}-libraries /opt/npu_prep /opt/npu_prep")
    )
    later = STAGES[name].instructions[first + 1 :]
    assert [part for part, _ in later[:2]] == ["ENV", "RUN"]


@pytest.mark.parametrize("name", TARGETS)
def test_images_have_no_build_tools_and_no_root(name):
    stage = STAGES[name]
    runs = "\n".join(stage.all("RUN"))
    assert not re.search(r"\b(apt-get|apt|dnf|yum|apk)\b", runs)
    assert not re.search(r"\b(gcc|g\+\+|build-essential|cmake|make|ninja)\b", runs)
    assert ("remove-build-tools" in runs) == (name == "ascend")
    assert "trim" in install_steps(STAGES[f"{name}-libraries"])
    user = expanded(stage.all("USER")[-1], {"NPU_UID": "1000", "NPU_GID": "1000"})
    assert user == "1000:1000"  # numbers: Kubernetes can tell that this is not root
    last_root_step = max(
        at for at, part in enumerate(stage.instructions) if part[0] in ("RUN", "COPY")
    )
    assert ("USER", stage.all("USER")[-1]) in stage.instructions[last_root_step:]


@pytest.mark.parametrize("name", TARGETS)
def test_images_serve_with_vllm_and_check_their_health(name):
    stage = STAGES[name]
    entry = json.loads(stage.all("ENTRYPOINT")[-1])
    assert entry == ["/opt/npu_prep/bin/entrypoint.sh", "vllm", "serve"]
    check = stage.all("HEALTHCHECK")[-1]
    assert json.loads(check[check.index("[") :])[-1] == "/opt/npu_prep/bin/healthcheck.py"
    copied = [value for value in stage.all("COPY") if value.endswith(" /opt/npu_prep/bin/")]
    assert copied == ["scripts/entrypoint.sh scripts/healthcheck.py /opt/npu_prep/bin/"]
    assert "PATH=/opt/npu_prep/bin:$PATH" in stage.all("ENV")[0]
    caches = re.findall(r"=(/opt/npu_prep/cache)/", stage.all("ENV")[0])
    assert len(caches) == 2 and f"{caches[0]}" in stage.all("RUN")[-1].split("give")[1]


def test_no_registry_is_named():
    names = ("huawei.com/Ascend910", "kubernetes.io/hostname")
    for path in [ROOT / "Dockerfile", *DEPLOY.rglob("*.*")]:
        if path.is_file():
            found = re.findall(r"[\w-]+\.(?:io|com|cn|org|net)/[\w./-]+", path.read_text())
            assert [name for name in found if name not in names] == [], path
