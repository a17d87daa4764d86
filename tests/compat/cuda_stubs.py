"""The torch that vLLM 0.33.0 pins, for a host without CUDA.

The package index has a CUDA build of it alone. Its libraries for CUDA are replaced by stubs: each
function returns 0, and each object is zeros. The stubs are in a folder of their own, for
LD_LIBRARY_PATH, so that nobody takes the build for one that uses a GPU.
"""

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from tests.resume.tree import ROOT
from vllm_npu_prep.compat.releases import OTHER_TORCH

VERSION = OTHER_TORCH["0.33.0"]
FOLDER = ROOT / ".cache" / f"torch-{VERSION}"
TORCH, TORCH_NPU, STUBS = (FOLDER / name for name in ("torch", "torch_npu", "stubs"))
"""Folders for PYTHONPATH, for ``ascend-emulator --site`` and for LD_LIBRARY_PATH."""
OF_CUDA = ("libtorch_cuda.so", "libc10_cuda.so", "libtorch_nvshmem.so")
LEFT_OUT = (*OF_CUDA, "libtorch_cuda_linalg.so", "libcaffe2_nvrtc.so")
READERS = ("libtorch_python.so", "libtorch_cpu.so", "libtorch.so", "libtorch_global_deps.so")
NVIDIA = re.compile(r"(cu|cud|cupti|nv|nccl)[A-Z]\w*|cu(da|dnn|pti|File|sparse)\w+")
OPTIONS = "_ZN4c10d16ProcessGroupNCCL7OptionsC1Eb"
CONSTRUCTOR = f"""
#include <malloc.h>
#include <cstring>
extern void* table asm("_ZTVN4c10d7Backend7OptionsE");
extern "C" void make(void* self, bool) asm("{OPTIONS}");
extern "C" void make(void* self, bool) {{
  std::memset(self, 0, malloc_usable_size(self));
  *static_cast<void***>(self) = &table + 2;
}}
"""
"""`import torch` makes options of NCCL, asks for their class, and finds that of any backend's."""


def ensure_made() -> None:
    """Download and unpack torch and torch_npu, and make the stubs, unless that was done."""
    if (STUBS / OF_CUDA[0]).exists():
        return
    shutil.rmtree(FOLDER, ignore_errors=True)
    for package, folder in (("torch", TORCH), ("torch_npu", TORCH_NPU)):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        subprocess.run([*command, "--dest", FOLDER, f"{package}=={VERSION}"], check=True)
        (wheel,) = FOLDER.glob("*.whl")
        zipfile.ZipFile(wheel).extractall(folder)
        wheel.unlink()
    _leave_out_kernels_of_cuda(TORCH / "torch/_native/__init__.py")
    STUBS.mkdir()
    _write_stubs(TORCH / "torch/lib")


def _leave_out_kernels_of_cuda(module: Path) -> None:
    """Keep `import torch` from replacing kernels for CUDA by others: there are none."""
    text, call = module.read_text(), "    registry._register_all_overrides()"
    assert text.count(call) == 1
    module.write_text(text.replace(call, "    pass"))


def _symbols(which: str, library: Path) -> dict[str, str]:
    """The kind of each symbol, as `nm` tells it, by its name without a version."""
    command = ["nm", "-D", which, library]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return {line.split()[-1].partition("@")[0]: line.split()[-2] for line in lines}


def _write_stubs(libraries: Path) -> None:
    needed: dict[str, str] = {}
    defined: dict[str, str] = {}
    elsewhere: dict[str, str] = {}
    for name in READERS:
        needed |= _symbols("--undefined-only", libraries / name)
    for name in OF_CUDA:
        defined |= _symbols("--defined-only", libraries / name)
    for name in (*READERS, "libc10.so", "libshm.so"):
        elsewhere |= _symbols("--defined-only", libraries / name)
    missing = needed.keys() - elsewhere.keys() - {OPTIONS}
    stubs = sorted(name for name in missing if name in defined or NVIDIA.fullmatch(name))
    code = [".local object", ".comm object,4096,16"]
    for number, name in enumerate(stubs):
        kind = defined.get(name, "T")
        code += [".text" if kind in "TW" else ".data", f".globl {name}"]
        if kind in "TW":
            result = "leaq object(%rip), %rax" if "get_gil_checker" in name else "xorl %eax, %eax"
            code += [f".type {name}, @function", f"{name}: {result}", "xorl %edx, %edx", "ret"]
            continue
        code += [f".type {name}, @object", ".align 16"]
        if name.startswith("_ZTI"):  # a class without bases, of any name
            code += [
                f"{name}: .quad _ZTVN10__cxxabiv117__class_type_infoE + 16, name{number}, 0, 0",
                f'name{number}: .asciz "stub{number}"',
            ]
        else:
            code += [f"{name}: .zero 1024", f".size {name}, 1024"]
    code += ['.section .note.GNU-stack, "", @progbits', ""]
    (STUBS / "stubs.s").write_text("\n".join(code))
    (STUBS / "options.cpp").write_text(CONSTRUCTOR)
    (STUBS / "empty.c").write_text("int nothing;\n")
    wanted = set()
    for name in READERS:
        command = ["readelf", "-d", libraries / name]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        wanted |= set(re.findall(r"NEEDED.*\[(lib(?:cu|nccl|nv|c10_cuda)[^\]]*)\]", told))
    for name in sorted(wanted):  # which symbols ask for by their versions
        (STUBS / "versions").write_text(f"{name} {{ global: *; }};\n")
        _link(name, f"-Wl,--version-script,{STUBS / 'versions'}", "empty.c")
    for name in LEFT_OUT:
        (libraries / name).unlink()
    _link(OF_CUDA[0], "stubs.s", "options.cpp")


def _link(name: str, *arguments: str) -> None:
    command = ["g++", "-shared", "-fPIC", f"-Wl,-soname,{name}", "-o", name, *arguments]
    subprocess.run(command, cwd=STUBS, check=True)
