"""Two distributions in one repository: what is in the wheel of each, and what is not."""

import shutil
import subprocess
import sys
from email import message_from_bytes
from pathlib import Path
from zipfile import ZipFile

import pytest

from ascend_emulator.build import SUPPORTED_TORCH_NPU
from tests.helpers.deploy import ROOT, files_of
from tests.helpers.waiting import LIMIT

BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
FILES = ("setup.py", "pyproject.toml", "README.md", "LICENSE", "vllm_npu_prep", "emulator")
NOT_COPIED = shutil.ignore_patterns("__pycache__", "build", "*.egg-info")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of what both are built from: building leaves folders behind."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in FILES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=NOT_COPIED)
        else:
            shutil.copy(ROOT / name, folder)
    return folder


@pytest.mark.parametrize(
    ("package", "folder", "command"),
    [
        ("vllm_npu_prep", ".", "vllm-npu-prep = vllm_npu_prep.cli:main"),
        ("ascend_emulator", "emulator", "ascend-emulator = ascend_emulator.run:main"),
    ],
)
def test_a_wheel_has_all_of_its_package_and_nothing_of_the_other(
    package, folder, command, checkout, tmp_path
):
    source = checkout / folder
    subprocess.run(
        [sys.executable, "-P", "-W", "ignore", "-c", BUILD, tmp_path],
        cwd=source,
        check=True,
        capture_output=True,
        timeout=LIMIT,
    )
    [wheel] = tmp_path.glob("*.whl")
    with ZipFile(wheel) as archive:
        info = {Path(name).name: name for name in archive.namelist() if ".dist-info/" in name}
        files = {Path(name) for name in archive.namelist()} - set(map(Path, info.values()))
        commands = archive.read(info["entry_points.txt"]).decode().splitlines()
        about = message_from_bytes(archive.read(info["METADATA"]))
    assert files == {Path(package) / file for file in files_of(source / package)}
    assert command in commands and "LICENSE" in info
    requirements = about.get_all("Requires-Dist")
    always = {each for each in requirements if "extra ==" not in each}
    if package == "ascend_emulator":
        assert requirements == ["torch<2.15,>=2.10"]
        return
    # Beside another vLLM nothing is pinned, and what serves is all in one extra
    assert always == {"jinja2", "numba", "numpy", "pillow", "pydantic>=2", "rich"}
    serve = {each.partition(";")[0] for each in requirements if 'extra == "serve"' in each}
    assert f"torch=={SUPPORTED_TORCH_NPU[0]}" in serve and any("vllm" in each for each in serve)
    npu = {each.partition(";")[0] for each in requirements if 'extra == "npu"' in each}
    assert serve < npu
