"""Two distributions in one repository: what is in the sdist and the wheel of each, as `make dist`
builds them, and what is not."""

import shutil
import subprocess
import sys
from email import message_from_bytes
from pathlib import Path
from zipfile import ZipFile

import pytest

import vllm_npu_prep
from ascend_emulator.build import SUPPORTED_TORCH_NPU
from tests.helpers.archives import unpack
from tests.helpers.deploy import ROOT, files_of
from tests.helpers.waiting import LIMIT

BUILD = "import sys; from setuptools import build_meta; build_meta.build_{}(sys.argv[1])"
FILES = ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE")
FOLDERS = ("vllm_npu_prep", "emulator")
NOT_COPIED = shutil.ignore_patterns("__pycache__", "build", "*.egg-info")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of what both are built from: building leaves folders behind."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in FILES:
        shutil.copy(ROOT / name, folder)
    for name in FOLDERS:
        shutil.copytree(ROOT / name, folder / name, ignore=NOT_COPIED)
    (folder / "tests").mkdir()
    (folder / "tests" / "test_one.py").touch()  # setuptools would add it to the sdist
    return folder


def built(kind: str, source: Path, folder: Path) -> Path:
    """The wheel or sdist of a folder."""
    command = [sys.executable, "-P", "-W", "ignore", "-c", BUILD.format(kind), folder]
    subprocess.run(command, cwd=source, check=True, capture_output=True, timeout=LIMIT)
    (path,) = folder.glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return path


@pytest.mark.parametrize(
    ("package", "folder", "command"),
    [
        ("vllm_npu_prep", ".", "vllm-npu-prep = vllm_npu_prep.cli:main"),
        ("ascend_emulator", "emulator", "ascend-emulator = ascend_emulator.run:main"),
    ],
)
def test_sdist_and_wheel_have_their_package_and_no_more(
    package, folder, command, checkout, tmp_path
):
    """The wheel is built from the sdist, whose files beside the package are few."""
    source = checkout / folder
    unpack(built("sdist", source, tmp_path), tmp_path)
    (unpacked,) = (path for path in tmp_path.iterdir() if path.is_dir())
    assert {path.name for path in unpacked.iterdir()} - {"setup.py", "MANIFEST.in"} == {
        *("LICENSE", "PKG-INFO", "README.md", "pyproject.toml", "setup.cfg"),
        *(package, f"{package}.egg-info"),
    }
    wheel = built("wheel", unpacked, tmp_path)
    with ZipFile(wheel) as archive:
        info = {Path(name).name: name for name in archive.namelist() if ".dist-info/" in name}
        files = {Path(name) for name in archive.namelist()} - set(map(Path, info.values()))
        commands = archive.read(info["entry_points.txt"]).decode().splitlines()
        about = message_from_bytes(archive.read(info["METADATA"]))
    assert files == {Path(package) / file for file in files_of(source / package)}
    assert command in commands and "LICENSE" in info
    assert about["Version"] == vllm_npu_prep.__version__
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
