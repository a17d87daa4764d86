"""The Dockerfile: what can be told of it where no container engine runs.

`make image-dry-run` executes it, too.
"""

import json
import os
import re

import pytest

from tests.helpers.deploy import DEPLOY, ROOT, expanded, ran, read_dockerfile, tool

STAGES = read_dockerfile()
TARGETS = ("ascend", "cpu")
IN_CONTEXT = [
    line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] == "!"
]


def test_hadolint_has_nothing_to_say():
    done = ran(tool("hadolint"), "--disable-ignore-pragma", ROOT / "Dockerfile")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_both_targets_have_the_same_libraries():
    assert [name for name in STAGES if not name.endswith("-libraries")] == list(TARGETS)
    ascend, cpu = (STAGES[f"{name}-libraries"].all("RUN", "COPY") for name in TARGETS)
    assert ascend == cpu


@pytest.mark.parametrize("name", STAGES)
def test_every_file_that_a_stage_uses_is_in_the_context(name):
    used = [value.split()[:-1] for value in STAGES[name].all("COPY") if "--from" not in value]
    files = {file for each in used for file in each}
    runs = "\n".join(STAGES[name].all("RUN"))
    called = {f"scripts/{file}" for file in re.findall(r"\b(?:scripts|mnt)/(\w+\.sh)", runs)}
    assert called
    assert [file for file in called if not os.access(ROOT / file, os.X_OK)] == []
    for file in files | called:
        assert (ROOT / file).exists(), file
        assert any(file == kept or file.startswith(kept + "/") for kept in IN_CONTEXT), file


@pytest.mark.parametrize("name", TARGETS)
def test_images_serve_without_root_and_check_their_health(name):
    stage = STAGES[name]
    entry = json.loads(stage.all("ENTRYPOINT")[-1])
    assert entry == ["/opt/npu_prep/bin/entrypoint.sh", "vllm", "serve"]
    check = stage.all("HEALTHCHECK")[-1]
    assert json.loads(check[check.index("[") :])[-1] == "/opt/npu_prep/bin/healthcheck.py"
    assert "scripts/entrypoint.sh scripts/healthcheck.py /opt/npu_prep/bin/" in stage.all("COPY")
    user = expanded(stage.all("USER")[-1], {"NPU_UID": "1000", "NPU_GID": "1000"})
    assert user == "1000:1000"  # numbers: Kubernetes can tell that this is not root
    names = [part for part, _ in stage.instructions]
    assert {"RUN", "COPY"}.isdisjoint(names[names.index("USER") :])
    assert ("remove-build-tools" in " ".join(stage.all("RUN"))) == (name == "ascend")


def test_the_npu_image_has_code_for_any_processor():
    """Where attention is compiled, too, code for any processor would be slow."""
    generic = {
        name: "NUMBA_CPU_NAME=generic" in " ".join(STAGES[name].all("ENV")) for name in TARGETS
    }
    assert generic == {"ascend": True, "cpu": False}


def test_no_registry_is_named():
    names = ("huawei.com/Ascend910", "kubernetes.io/hostname")
    for path in [ROOT / "Dockerfile", *DEPLOY.rglob("*.*")]:
        if path.is_file():
            found = re.findall(r"[\w-]+\.(?:io|com|cn|org|net)/[\w./-]+", path.read_text())
            assert [name for name in found if name not in names] == [], path
