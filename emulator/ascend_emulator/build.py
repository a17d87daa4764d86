"""Builds the emulated runtime and its launcher, once per version of their dependencies."""

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
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from ascend_emulator import functions
from ascend_emulator.errors import EmulatorError
from ascend_emulator.extensions import PACKAGES
from ascend_emulator.profiles import PROFILES

NATIVE = Path(__file__).parent / "native"
SITE = Path(sys.prefix) / "npu-emulator"
"""Folders in which torch_npu is looked for, besides the import path."""
SUPPORTED_TORCH_NPU = ("2.13.0", "2.14.0", "2.10.0.post4")
"""The first one is what a message tells to install."""
SUPPORTED_MACHINES = ("x86_64", "aarch64")
RUNTIME_LIBRARY = "libascendcl.so"
OPERATORS_LIBRARY = "libopapi.so"
HCCL_LIBRARY = "libhccl.so"
HCCL_OTHER_NAME = "libhcomm.so"  # from which torch_npu takes the calls that begin and end a group
LAUNCHER_LIBRARY = "libnpu_emulator_launcher.so"
# torch_npu is linked against these, too; one library stands for all of them but libopapi, which
# exports what its release has.
OTHER_NAMES = ("acl_op_compiler", "ge_runner", "graph", "acl_tdt_channel", "atb")
EXTENSIONS_LIBRARY = "libnpu_emulator_extensions.so"
LARGEST_PAUSE = 30.0
"""Longest time between two lines about a build, in seconds; it doubles from line to line."""
FLAGS = ("-std=c++20", "-O1", "-fPIC", "-Wall", "-fvisibility=hidden")
# Symbols of CANN's libraries, as opposed to those of torch, Python and the system.
CANN_SYMBOL = re.compile(
    r"(acl|rt[A-Z]|Msprof|Hccl|ge|GE|aclnn|_ZNK?3atb|_ZNK?2ge|_ZNK?2fe|Nnopbase"
    r"|CheckLogLevel|Dlog|mm[A-Z]|(mem|str)\w+_s$)"
)


@dataclass(frozen=True)
class Target:
    """The libraries to build against, and the compiler."""

    compiler: str
    torch: Path
    torch_npu: Path
    versions: tuple[str, str]


def ensure_built() -> Path:
    """Folder with the libraries, which are built now if they don't exist.

    Raises
    ------
    EmulatorError
        When something is missing or doesn't fit: compiler, torch_npu, version, architecture.
    """
    target = _find_target()
    folder = _cache_folder() / _key(target)
    if (folder / LAUNCHER_LIBRARY).exists():
        return folder
    _log(f"building into {folder} (once) ...")
    start = time.monotonic()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch_folder = tempfile.TemporaryDirectory(dir=folder.parent)
    except OSError as error:
        raise EmulatorError(
            f"the libraries of the NPU emulator can't be built into {folder.parent}: "
            f"{error.strerror}; set XDG_CACHE_HOME to another folder"
        ) from None
    # Built in another folder and renamed, so that two processes can build at the same time.
    with scratch_folder as scratch:
        _build(target, Path(scratch))
        try:
            os.rename(scratch, folder)
        except OSError:
            if not (folder / LAUNCHER_LIBRARY).exists():
                raise
        else:
            Path(scratch).mkdir()  # for the context manager to remove
    _log(f"built in {time.monotonic() - start:.0f} s")
    return folder


def _log(line: str) -> None:
    print(f"npu-emulator: {line}", file=sys.stderr, flush=True)


def _find_target() -> Target:
    machine = platform.machine()
    if sys.platform != "linux" or machine not in SUPPORTED_MACHINES:
        raise EmulatorError(
            f"the NPU emulator runs on Linux on {' or '.join(SUPPORTED_MACHINES)}, "
            f"this is {sys.platform} on {machine}"
        )
    versions = _version("torch"), _version("torch_npu")
    if versions[1] not in SUPPORTED_TORCH_NPU:
        raise EmulatorError(
            f"the NPU emulator is made for torch_npu {' or '.join(SUPPORTED_TORCH_NPU)}, "
            f"but {versions[1]} is installed"
        )
    wanted = versions[1].split(".post")[0]
    if versions[0].split("+")[0] != wanted:
        raise EmulatorError(
            f"torch_npu {versions[1]} needs torch {wanted}, but {versions[0]} is installed"
        )
    torch = _package_folder("torch")
    if is_cuda_build(torch):
        raise EmulatorError(
            f"torch in {torch} is a CUDA build, with which torch_npu does not load: install the "
            f"CPU build of torch {wanted} (PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS tell pip "
            "where it is)"
        )
    compiler = os.environ.get("CXX") or shutil.which("g++")
    if not compiler or not shutil.which(compiler) or not shutil.which("nm"):
        raise EmulatorError(
            "no C++ compiler found to build the NPU emulator: install g++ and binutils, or set CXX"
        )
    return Target(compiler, torch, _package_folder("torch_npu"), versions)


def acl_configuration(cann: str) -> Path:
    """File that torch_npu gives to aclInit: from CANN 8.3.RC1 on, one that names a default device.

    It looks for the file beside torch, where torch_npu is installed on a host with devices.
    """
    match = re.match(r"(\d+)\.(\d+)", cann)
    has_default = match is None or (int(match[1]), int(match[2])) >= (8, 3)
    return _package_folder("torch_npu") / ("acl_default.json" if has_default else "acl.json")


def is_cuda_build(torch: Path) -> bool:
    """Whether torch in this folder is built for CUDA: both it and torch_npu set up allocators."""
    return re.search(r"^cuda\b.*= *'", (torch / "version.py").read_text(), re.MULTILINE) is not None


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        # In torch's environment, torch_npu would keep every other program from importing torch.
        where = f"--no-deps --target {SITE} " if package == "torch_npu" else ""
        raise EmulatorError(
            f"the NPU emulator runs the real torch_npu, and {package} is not installed: "
            f"pip install {where}{package}=={SUPPORTED_TORCH_NPU[0]}"
        ) from None


def _package_folder(package: str) -> Path:
    # Not importlib: torch_npu can't be imported before its libraries exist.
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise EmulatorError(f"{package} is installed but can't be found on the import path")
    return Path(spec.origin).parent


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "ascend_emulator"


def _sources() -> list[Path]:
    return sorted(path for path in NATIVE.rglob("*") if path.suffix in (".cpp", ".h"))


def _key(target: Target) -> str:
    digest = hashlib.sha256()
    for part in (*target.versions, target.compiler, platform.machine(), sys.version, *FLAGS):
        digest.update(f"{part}\n".encode())
    digest.update(Path(__file__).read_bytes())
    digest.update(Path(functions.__file__).read_bytes())
    for path in _sources():
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _build(target: Target, out: Path) -> None:
    runtime = sorted((NATIVE / "runtime").glob("*.cpp"))
    launcher = sorted((NATIVE / "launcher").glob("*.cpp"))
    hccl = sorted((NATIVE / "hccl").glob("*.cpp"))
    includes = [
        f"-I{target.torch / 'include'}",
        f"-I{target.torch / 'include/torch/csrc/api/include'}",
        f"-I{sysconfig.get_paths()['include']}",
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        launcher_jobs = [pool.submit(_compile, target, path, out, includes) for path in launcher]
        runtime_jobs = [pool.submit(_compile, target, path, out, []) for path in runtime]
        hccl_jobs = [pool.submit(_compile, target, path, out, []) for path in hccl]
        jobs, start = [*launcher_jobs, *runtime_jobs, *hccl_jobs], time.monotonic()
        runtime_objects = _results(runtime_jobs, jobs, start)
        npu_objects = [*target.torch_npu.glob("lib/*.so"), *target.torch_npu.glob("_C*.so")]
        runtime_objects.append(_traps(target, npu_objects, runtime_objects, out))
        _link(target, out / RUNTIME_LIBRARY, runtime_objects, ["-lpthread"])
        for name in OTHER_NAMES:
            (out / f"lib{name}.so").symlink_to(RUNTIME_LIBRARY)
        for release in {profile.release for profile in PROFILES.values()}:
            _operators_of(target, release, out)
        hccl_objects = _results(hccl_jobs, jobs, start)
        _link(target, out / HCCL_LIBRARY, hccl_objects, [f"-L{out}", "-lascendcl", "-lpthread"])
        (out / HCCL_OTHER_NAME).symlink_to(HCCL_LIBRARY)
        launcher_objects = _results(launcher_jobs, jobs, start)
    libraries = [f"-L{target.torch / 'lib'}", "-ltorch_cpu", "-lc10", f"-L{out}", "-lascendcl"]
    # torch_npu is in the process before the launcher is loaded, and so is Python.
    libraries += [f"-L{target.torch_npu / 'lib'}", "-ltorch_npu", "-Wl,--allow-shlib-undefined"]
    _link(target, out / LAUNCHER_LIBRARY, launcher_objects, libraries)
    for path in (*runtime_objects, *hccl_objects, *launcher_objects):
        path.unlink()


def _results(
    jobs: Sequence[Future[Path]], all_jobs: Sequence[Future[Path]], start: float
) -> list[Path]:
    """Wait for `jobs`; after 2, 4, 8, ... seconds a line says how far all of them are.

    Parameters
    ----------
    jobs
        Compilations to wait for.
    all_jobs
        All compilations, which the lines count.
    start
        Start of all compilations, by the monotonic clock.

    Raises
    ------
    EmulatorError
        With the compiler's message for the first compilation that failed.
    """
    pause = 2.0
    while True:
        done, running = wait(jobs, timeout=pause, return_when=FIRST_EXCEPTION)
        if failed := [job for job in done if job.exception()]:
            for job in all_jobs:
                job.cancel()  # those that have not begun
            failed[0].result()
        if not running:
            return [job.result() for job in jobs]
        seconds = time.monotonic() - start
        num_done = sum(job.done() for job in all_jobs)
        _log(f"compiling: {seconds:.0f} s, {num_done} of {len(all_jobs)} files ...")
        pause = min(seconds, LARGEST_PAUSE)


def _compile(target: Target, source: Path, out: Path, includes: list[str]) -> Path:
    compiled = out / f"{source.parent.name}-{source.stem}.o"
    _run([target.compiler, *FLAGS, *includes, "-c", str(source), "-o", str(compiled)])
    return compiled


def _link(target: Target, library: Path, objects: list[Path], libraries: list[str]) -> None:
    soname = f"-Wl,-soname,{library.name}"
    _run([target.compiler, "-shared", soname, "-o", str(library), *map(str, objects), *libraries])


def _traps(target: Target, users: list[Path], definers: list[Path], out: Path) -> Path:
    """Compile one function per CANN symbol that `users` lack, which names itself and ends all."""
    needed = {name for name in _symbols("--undefined-only", users) if CANN_SYMBOL.match(name)}
    shared, objects = (
        [path for path in definers if (path.suffix == ".so") == is_shared]
        for is_shared in (True, False)
    )
    missing = needed - _symbols("--defined-only", [*users, *shared])
    missing -= _symbols("--defined-only", objects, [])
    (out / "trapped.txt").write_text("\n".join(sorted(missing)) + "\n")
    return _compile(target, _trap(sorted(missing), out / "traps.cpp"), out, [])


def _trap(names: Sequence[str], source: Path) -> Path:
    """Write functions of these names, which name themselves and end the process."""
    lines = ['extern "C" long emulator_unimplemented(const char* name);']
    for index, name in enumerate(names):
        visible = '__attribute__((visibility("default")))'
        lines.append(f'extern "C" {visible} long trap_{index}() __asm__("{name}");')
        lines.append(f'long trap_{index}() {{ return emulator_unimplemented("{name}"); }}')
    source.write_text("\n".join(lines) + "\n")
    return source


def ensure_extensions_built(libraries: Path) -> list[Path]:
    """Folder with what extensions are linked against besides, if one of `PACKAGES` is installed.

    The libraries of CANN that nothing else here needs are one library under their names. Each
    function in it, which only an extension calls, names itself and ends the process.
    """
    extensions = [path for package in extension_packages() for path in sorted(package.glob("*.so"))]
    if not extensions:
        return []
    digest = hashlib.sha256()
    for path in extensions:
        digest.update(path.read_bytes())
    folder = libraries / f"extensions-{digest.hexdigest()[:16]}"
    if folder.exists():
        return [folder]
    target = _find_target()
    ours = {path.name for path in extensions}
    found = {path.name for path in (*libraries.glob("*.so"), *target.torch_npu.glob("lib/*.so"))}
    found |= {OPERATORS_LIBRARY, *(path.name for path in (target.torch / "lib").glob("*.so"))}
    wanted = {name for path in extensions for name in _linked_against(path)}
    names = sorted(name for name in wanted - found - ours if name.endswith(".so"))
    with tempfile.TemporaryDirectory(dir=libraries) as scratch:
        out = Path(scratch)
        own = [libraries / RUNTIME_LIBRARY, libraries / HCCL_LIBRARY]
        traps = _traps(target, extensions, [*own, *target.torch_npu.glob("lib/*.so")], out)
        _link(target, out / EXTENSIONS_LIBRARY, [traps], [f"-L{libraries}", "-lascendcl"])
        for name in names:
            (out / name).symlink_to(EXTENSIONS_LIBRARY)
        traps.unlink()
        try:
            os.rename(scratch, folder)
        except OSError:
            if not folder.exists():
                raise
        else:
            out.mkdir()
    return [folder]


def extension_packages() -> list[Path]:
    """Folders of the packages in `PACKAGES` that are installed."""
    specs = map(importlib.util.find_spec, PACKAGES)
    return [Path(spec.origin).parent for spec in specs if spec is not None and spec.origin]


def _linked_against(library: Path) -> list[str]:
    return re.findall(r"NEEDED.*\[(.*)\]", _run(["readelf", "-d", str(library)]))


def operators_folder(libraries: Path, release: str) -> Path:
    """Folder with libopapi of a release."""
    return libraries / f"opapi-{release}"


def _operators_of(target: Target, release: str, out: Path) -> None:
    """Make libopapi of a release: what operators call is replaced, but programs look for it."""
    folder = operators_folder(out, release)
    folder.mkdir()
    names = [name + end for name in functions.exported(release) for end in ("", "GetWorkspaceSize")]
    compiled = _compile(target, _trap(names, folder / "opapi.cpp"), folder, [])
    _link(target, folder / OPERATORS_LIBRARY, [compiled], [f"-L{out}", "-lascendcl"])
    compiled.unlink()


def _symbols(which: str, objects: list[Path], table: list[str] | None = None) -> set[str]:
    if not objects:
        return set()
    table = ["-D"] if table is None else table
    text = _run(["nm", *table, which, "--format=posix", *map(str, objects)])
    names = (line.split()[0].split("@")[0] for line in text.splitlines() if " " in line)
    return set(names)


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line]
        reason = lines[0] if lines else (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise EmulatorError(f"building the NPU emulator failed at {command[-1]}: {reason}")
    return done.stdout
