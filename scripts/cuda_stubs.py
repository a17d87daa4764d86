"""Make a CPU build of torch out of the CUDA build: of 2.10 and 2.14, the index has no other.

    python scripts/cuda_stubs.py SITE_PACKAGES

torch's CUDA libraries, and those of CUDA that it is linked against, are replaced by libraries of
the same names whose functions return zero: torch then finds no CUDA device, and says that it is
a CPU build. For `make peer`, whose torch nothing else uses, and `tests/compat/test_torch.py`; needs
g++, nm and readelf.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

CUDA_LIBRARIES = ("libtorch_cuda.so", "libc10_cuda.so", "libtorch_nvshmem.so")
UNUSED = ("libtorch_cuda_linalg.so", "libtorch_nvshmem.so", "libcaffe2_nvrtc.so")
READERS = ("libtorch_cpu.so", "libtorch_python.so", "libtorch.so", "libtorch_global_deps.so")
"""Libraries that use what CUDA's define."""
KEPT = (*READERS, "libc10.so", "libshm.so")
API = re.compile(r"(cu|cud|cupti|nv|nccl)[A-Z][A-Za-z_0-9]+|cu(da|dnn|pti|File|sparse)\w+")
"""Functions of CUDA's own libraries."""
OBJECT_BYTES = 1024
"""Room for each object that torch's libraries share; those in use are smaller."""
RETURNS_REFERENCE = "get_gil_checker"
"""A function whose result is written, so zero will not do."""
OPTIONS = "_ZN4c10d16ProcessGroupNCCL7OptionsC1Eb"
CONSTRUCTOR = f"""
#include <malloc.h>
#include <cstring>
extern void* options_of_backends asm("_ZTVN4c10d7Backend7OptionsE");
extern "C" void make_options(void* self, bool) asm("{OPTIONS}");
extern "C" void make_options(void* self, bool) {{
  std::memset(self, 0, malloc_usable_size(self));
  *static_cast<void***>(self) = &options_of_backends + 2;
}}
"""
"""`import torch` makes options of NCCL, asks for their class, and finds that of any backend's."""
REGISTER = "    registry._register_all_overrides()\n"
"""In 2.14, `import torch` replaces kernels for CUDA by others."""


def main(site: Path) -> None:
    lib = site / "torch" / "lib"
    version = site / "torch" / "version.py"
    text = version.read_text()
    if "+cpu" in text:
        return
    defined: dict[str, str] = {}
    for name in CUDA_LIBRARIES:
        defined |= symbols("--defined-only", lib / name)
    needed: dict[str, str] = {}
    for name in READERS:
        needed |= symbols("--undefined-only", lib / name)
    for name in KEPT:
        for known in symbols("--defined-only", lib / name):
            needed.pop(known, None)
    needed.pop(OPTIONS, None)
    wanted = sorted(name for name in needed if name in defined or API.fullmatch(name))
    missing = {library for name in KEPT for library in cuda_libraries(lib / name)}
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "stubs.cpp"
        source.write_text(stubs({name: defined.get(name, "T") for name in wanted}))
        compile_library(source, lib / "libtorch_cuda.so")
        empty = Path(folder) / "empty.cpp"
        empty.write_text("")
        for name in sorted({*missing, "libc10_cuda.so"}):
            versions = Path(folder) / "versions"
            versions.write_text(f"{name} {{ global: *; }};\n")
            compile_library(empty, lib / name, f"-Wl,--version-script,{versions}")
    for name in UNUSED:
        (lib / name).unlink(missing_ok=True)
    native = site / "torch" / "_native" / "__init__.py"
    if native.exists():
        native.write_text(native.read_text().replace(REGISTER, "    pass\n"))
    text = re.sub(r"\+cu\d+", "+cpu", text)
    version.write_text(re.sub(r"^cuda: .*", "cuda: Optional[str] = None", text, flags=re.M))


def symbols(which: str, library: Path) -> dict[str, str]:
    """Names of a library's symbols, without versions, and their kinds as nm has them."""
    found = {}
    for line in run(["nm", "-D", which, "--format=posix", str(library)]).splitlines():
        name, kind = line.split()[:2]
        found[name.split("@")[0]] = kind
    return found


def cuda_libraries(library: Path) -> list[str]:
    """Libraries of CUDA that this one is linked against; NVPL's, on aarch64, are the CPU's BLAS."""
    names = re.findall(r"NEEDED.*\[(.*)\]", run(["readelf", "-d", str(library)]))
    return [name for name in names if re.match(r"lib(cu|nv(?!pl)|nccl)", name)]


def stubs(wanted: dict[str, str]) -> str:
    """C++ that defines each name: functions return zero, type names are those of a class."""
    lines = [
        "#include <typeinfo>",
        'extern void* vtable_of_classes[] __asm__("_ZTVN10__cxxabiv117__class_type_infoE");',
        f"static char object[{OBJECT_BYTES}];",
        "struct Class { void* vtable; const char* name; };",
    ]
    for index, (name, kind) in enumerate(wanted.items()):
        if name.startswith("_ZTI"):
            lines.append(f'extern Class type_{index} __asm__("{name}");')
            lines.append(f'Class type_{index} = {{vtable_of_classes + 2, "stub{index}"}};')
        elif kind in "TWi":
            result = "object" if RETURNS_REFERENCE in name else "nullptr"
            lines.append(f'extern "C" void* stub_{index}() __asm__("{name}");')
            lines.append(f"void* stub_{index}() {{ return {result}; }}")
        else:
            lines.append(f'extern char object_{index}[{OBJECT_BYTES}] __asm__("{name}");')
            lines.append(f"alignas(16) char object_{index}[{OBJECT_BYTES}];")
    return "\n".join(lines) + CONSTRUCTOR


def compile_library(source: Path, library: Path, *options: str) -> None:
    library.unlink(missing_ok=True)
    soname = f"-Wl,-soname,{library.name}"
    run(["g++", "-shared", "-fPIC", soname, *options, "-o", str(library), str(source)])


def run(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    main(Path(sys.argv[1]))
