"""Compiles and links the library for macOS on arm64, and examines it (`macos.py [ONNXRUNTIME.dylib]`).

Nothing runs it: no machine of this kind is there. What can be known without one is that the sources compile, and that
the library exports its entry points and needs nothing but parts of the system. It needs no newer system than
ONNX Runtime's own library, which may be named; npm's onnxruntime-node has one. Zig has what it needs of Apple's headers
and libraries. `make wheels` runs this.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from check import EXPORTED
from macholib import mach_o
from macholib.MachO import MachO, MachOHeader
from macholib.SymbolTable import SymbolTable

from build import FLAGS, ROOT, WORK

OLDEST = (13, 0)
"""The oldest macOS that the wheels of ONNX Runtime 1.20, the oldest release that is supported, run on."""

OF_THE_LINKER = re.compile("_Z(n[aw]|d[al])|__dso_handle$|_mh_dylib_header$")
"""What Zig's linker exports whatever it is told: new and delete of its C++ library, and two names of its own."""

SYSTEM_LIBRARIES = {"/usr/lib/libSystem.B.dylib"}
"""What the library may need: Zig links its C++ library statically. Apple's compiler takes that of the system."""


def main() -> None:
    """Compile and check; the exit code is 1 if the library is not what it should be."""
    folder, rules = WORK / "macos", WORK / "macos.cmake"
    WORK.mkdir(parents=True, exist_ok=True)
    # CMake asks for a bundle, which Zig's linker takes for a program; ONNX Runtime loads either.
    rules.write_text('set(CMAKE_SHARED_MODULE_CREATE_CXX_FLAGS "-dynamiclib")\n', encoding="utf-8")
    tools = Path(sys.executable).parent
    flags, compiler = " ".join(FLAGS), f"{sys.executable} -m ziglang c++ -target aarch64-macos.{_dotted(OLDEST)}"
    environment = os.environ | {"CXX": compiler, "CXXFLAGS": flags, "LDFLAGS": flags}
    settings = {
        "CMAKE_MAKE_PROGRAM": tools / "ninja",
        "CMAKE_SYSTEM_NAME": "Darwin",
        "CMAKE_SYSTEM_PROCESSOR": "arm64",
        "CMAKE_INSTALL_NAME_TOOL": "/bin/true",  # Apple's, which is asked for, and nothing calls it here
        "CMAKE_USER_MAKE_RULES_OVERRIDE_CXX": rules,
    }
    words = [tools / "cmake", "-G", "Ninja", "-S", ROOT / "lowering" / "ort" / "csrc", "-B", folder]
    subprocess.run([*words, *(f"-D{key}={value}" for key, value in settings.items())], env=environment, check=True)
    subprocess.run([tools / "cmake", "--build", folder], env=environment, check=True)
    library = folder / "libfa_compiler_ort.so"
    faults = [*_faults(library, *map(Path, sys.argv[1:]))]
    if faults:
        sys.exit("\n".join(faults))
    print(f"{library.relative_to(ROOT)}: compiled, linked and examined for macOS on arm64; never run")


def _faults(library: Path, *runtimes: Path) -> Iterator[str]:
    (header,) = MachO(str(library)).headers
    if header.header.cputype != 0x0100000C:  # CPU_TYPE_ARM64
        yield f"the library is for the processor {header.header.cputype:#x}"
    if strangers := {*_needed(header)} - SYSTEM_LIBRARIES:
        yield f"the library needs {', '.join(sorted(strangers))}"
    if (exported := _exported(library)) != EXPORTED:
        yield f"the library exports {', '.join(sorted(exported)) or 'nothing'}"
    oldest = _oldest(library)
    for other in (OLDEST, *map(_oldest, runtimes)):
        if oldest > other:
            yield f"the library needs macOS {_dotted(oldest)}, and ONNX Runtime {_dotted(other)}"


def _needed(header: MachOHeader) -> Iterator[str]:
    for kind, _, data in header.commands:
        if kind.cmd in (mach_o.LC_LOAD_DYLIB, mach_o.LC_LOAD_WEAK_DYLIB, mach_o.LC_REEXPORT_DYLIB):
            yield data.rstrip(b"\0").decode()


def _exported(library: Path) -> set[str]:
    names = SymbolTable(MachO(str(library))).extdefsyms
    found = {name.decode().removeprefix("_") for _, name in names}
    return {name for name in found if not OF_THE_LINKER.match(name)}


def _oldest(library: Path) -> tuple[int, int]:
    """The oldest system that a library runs on."""
    (header,) = MachO(str(library)).headers
    (oldest,) = (command.minos for kind, command, _ in header.commands if kind.cmd == mach_o.LC_BUILD_VERSION)
    return oldest >> 16, oldest >> 8 & 0xFF


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


if __name__ == "__main__":
    main()
