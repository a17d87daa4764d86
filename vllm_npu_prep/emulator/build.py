"""Build the emulated runtime and its launcher, once per version of what they depend on."""

import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from vllm_npu_prep.errors import PrepError
from vllm_npu_prep.progress import waiting

NATIVE = Path(__file__).parent / "native"
SUPPORTED_TORCH_NPU = ("2.13.0",)
SUPPORTED_MACHINES = ("x86_64", "aarch64")
RUNTIME_LIBRARY = "libascendcl.so"
LAUNCHER_LIBRARY = "libnpu_emulator_launcher.so"
# torch_npu is linked against these, too; one library serves for all.
OTHER_NAMES = ("hccl", "acl_op_compiler", "ge_runner", "graph", "acl_tdt_channel", "atb")
FLAGS = ("-std=c++20", "-O1", "-fPIC", "-Wall", "-fvisibility=hidden")
# Symbols of CANN's libraries, as opposed to those of torch, Python and the system.
CANN_SYMBOL = re.compile(r"(acl|rt[A-Z]|Msprof|Hccl|ge|GE|aclnn|_ZNK?3atb|_ZNK?2ge)")


@dataclass(frozen=True)
class Target:
    """What is built against, and with what."""

    compiler: str
    torch: Path
    torch_npu: Path
    versions: tuple[str, str]


def ensure_built() -> Path:
    """Folder with the libraries, built now if they aren't there.

    Raises
    ------
    PrepError
        When something is missing or doesn't fit: compiler, torch_npu, version, architecture.
    """
    target = _find_target()
    folder = _cache_folder() / _key(target)
    if (folder / LAUNCHER_LIBRARY).exists():
        return folder
    _say(f"building into {folder} (once) ...")
    start = time.monotonic()
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Built aside and renamed: a second process that builds at the same time does no harm.
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        num_sources = sum(path.suffix == ".cpp" for path in _sources())

        def status() -> str:
            return f"{len([*Path(scratch).glob('*.o')])} of {num_sources} files"

        with waiting("compiling", _say, status):
            _build(target, Path(scratch))
        try:
            os.rename(scratch, folder)
        except OSError:
            if not (folder / LAUNCHER_LIBRARY).exists():
                raise
        else:
            Path(scratch).mkdir()  # for the context manager to remove
    _say(f"built in {time.monotonic() - start:.0f} s")
    return folder


def _say(line: str) -> None:
    print(f"npu-emulator: {line}", file=sys.stderr, flush=True)


def _find_target() -> Target:
    machine = platform.machine()
    if sys.platform != "linux" or machine not in SUPPORTED_MACHINES:
        raise PrepError(
            f"the NPU emulator runs on Linux on {' or '.join(SUPPORTED_MACHINES)}, "
            f"this is {sys.platform} on {machine}"
        )
    versions = _version("torch"), _version("torch_npu")
    if versions[1] not in SUPPORTED_TORCH_NPU:
        raise PrepError(
            f"the NPU emulator is made for torch_npu {' or '.join(SUPPORTED_TORCH_NPU)}, "
            f"{versions[1]} is installed"
        )
    if versions[0].split("+")[0] != versions[1]:
        raise PrepError(
            f"torch_npu {versions[1]} needs torch {versions[1]}, {versions[0]} is installed"
        )
    torch = _package_folder("torch")
    if is_cuda_build(torch):
        raise PrepError(
            f"torch in {torch} is a CUDA build, beside which torch_npu does not load: install the "
            f"CPU build of torch {versions[1]} (PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS tell pip "
            "where it is)"
        )
    compiler = os.environ.get("CXX") or shutil.which("g++")
    if not compiler or not shutil.which(compiler) or not shutil.which("nm"):
        raise PrepError(
            "no C++ compiler found to build the NPU emulator: install g++ and binutils, or set CXX"
        )
    return Target(compiler, torch, _package_folder("torch_npu"), versions)


def is_cuda_build(torch: Path) -> bool:
    """Whether torch in this folder is built for CUDA: both it and torch_npu set up allocators."""
    return (torch / "lib" / "libtorch_cuda.so").exists()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        raise PrepError(
            f"the NPU emulator runs the real torch_npu, and {package} is not installed: "
            f"pip install {package}=={SUPPORTED_TORCH_NPU[-1]}"
        ) from None


def _package_folder(package: str) -> Path:
    # Not importlib: torch_npu can't be imported before its libraries exist.
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise PrepError(f"{package} is installed but can't be found on the import path")
    return Path(spec.origin).parent


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "vllm_npu_prep" / "emulator"


def _sources() -> list[Path]:
    return sorted(path for path in NATIVE.rglob("*") if path.suffix in (".cpp", ".h"))


def _key(target: Target) -> str:
    digest = hashlib.sha256()
    for part in (*target.versions, target.compiler, platform.machine(), sys.version, *FLAGS):
        digest.update(f"{part}\n".encode())
    digest.update(Path(__file__).read_bytes())
    for path in _sources():
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _build(target: Target, out: Path) -> None:
    runtime = sorted((NATIVE / "runtime").glob("*.cpp"))
    launcher = sorted((NATIVE / "launcher").glob("*.cpp"))
    includes = [
        f"-I{target.torch / 'include'}",
        f"-I{target.torch / 'include/torch/csrc/api/include'}",
        f"-I{sysconfig.get_paths()['include']}",
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = [pool.submit(_compile, target, path, out, includes) for path in launcher]
        runtime_objects = list(pool.map(lambda path: _compile(target, path, out, []), runtime))
        runtime_objects.append(_traps(target, runtime_objects, out))
        _link(target, out / RUNTIME_LIBRARY, runtime_objects, ["-lpthread"])
        for name in OTHER_NAMES:
            (out / f"lib{name}.so").symlink_to(RUNTIME_LIBRARY)
        launcher_objects = [job.result() for job in jobs]
    libraries = [f"-L{target.torch / 'lib'}", "-ltorch_cpu", "-lc10", f"-L{out}", "-lascendcl"]
    # torch_npu is in the process before the launcher is loaded, and so is Python.
    libraries += [f"-L{target.torch_npu / 'lib'}", "-ltorch_npu", "-Wl,--allow-shlib-undefined"]
    _link(target, out / LAUNCHER_LIBRARY, launcher_objects, libraries)
    for path in (*runtime_objects, *launcher_objects):
        path.unlink()


def _compile(target: Target, source: Path, out: Path, includes: list[str]) -> Path:
    compiled = out / f"{source.parent.name}-{source.stem}.o"
    _run([target.compiler, *FLAGS, *includes, "-c", str(source), "-o", str(compiled)])
    return compiled


def _link(target: Target, library: Path, objects: list[Path], libraries: list[str]) -> None:
    soname = f"-Wl,-soname,{library.name}"
    _run([target.compiler, "-shared", soname, "-o", str(library), *map(str, objects), *libraries])


def _traps(target: Target, objects: list[Path], out: Path) -> Path:
    """Compile a function per CANN symbol that nothing implements: it ends the process by name."""
    npu_objects = [*target.torch_npu.glob("lib/*.so"), *target.torch_npu.glob("_C*.so")]
    needed = {name for name in _symbols("--undefined-only", npu_objects) if CANN_SYMBOL.match(name)}
    missing = sorted(
        needed - _symbols("--defined-only", npu_objects) - _symbols("--defined-only", objects, [])
    )
    lines = ['extern "C" long emulator_unimplemented(const char* name);']
    for index, name in enumerate(missing):
        visible = '__attribute__((visibility("default")))'
        lines.append(f'extern "C" {visible} long trap_{index}() __asm__("{name}");')
        lines.append(f'long trap_{index}() {{ return emulator_unimplemented("{name}"); }}')
    source = out / "traps.cpp"
    source.write_text("\n".join(lines) + "\n")
    (out / "trapped.txt").write_text("\n".join(missing) + "\n")
    return _compile(target, source, out, [])


def _symbols(which: str, objects: list[Path], table: list[str] | None = None) -> set[str]:
    table = ["-D"] if table is None else table
    text = _run(["nm", *table, which, "--format=posix", *map(str, objects)])
    names = (line.split()[0].split("@")[0] for line in text.splitlines() if " " in line)
    return set(names)


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line]
        reason = lines[0] if lines else (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise PrepError(f"building the NPU emulator failed at {command[-1]}: {reason}")
    return done.stdout
