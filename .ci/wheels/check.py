"""Examines wheels: the library of each may need no more than its tag promises (`check.py WHEEL...`)."""

from __future__ import annotations

import io
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pefile
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection
from elftools.elf.sections import SymbolTableSection

EXPORTED = {
    "RegisterCustomOps",
    "CreateEpFactories",
    "ReleaseEpFactory",
    "FaCompilerSetMatcher",
    "FaCompilerHaveOperators",
}
"""The entry points of the library."""

LIBRARY = "fa_compiler/lowering/ort/libfa_compiler_ort.so"
DLL = "fa_compiler/lowering/ort/fa_compiler_ort.dll"
GLIBC = (2, 28)
"""The oldest glibc that a wheel runs with."""

SYSTEM_LIBRARIES = {"libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2", "librt.so.1"}
"""What the library may need besides the loader: all of it is glibc. The C++ library is linked statically."""

SYSTEM_DLLS = re.compile(r"(?i)(kernel32|ntdll|api-ms-win-crt-[a-z0-9-]+)\.dll")
"""What it may need on Windows: parts of the system since Windows 10."""

NODELETE = 0x8
"""DF_1_NODELETE: the library is never unloaded, see lowering/ort/csrc/CMakeLists.txt."""


@dataclass(frozen=True)
class Machine:
    """A processor and a system that wheels are built for."""

    system: str
    """As CMake names it."""

    processor: str
    """As CMake and Zig name it."""

    machine: str
    """The processor's name in ELF files, or in those of Windows."""

    platform: str
    """The platform in the wheel's tag."""

    loader: str = ""
    """The file of the dynamic loader of Linux."""

    @property
    def target(self) -> str:
        """What the compiler is told."""
        kind = f"linux-gnu.{GLIBC[0]}.{GLIBC[1]}" if self.system == "Linux" else "windows-gnu"
        return f"{self.processor}-{kind}"


_MANYLINUX = f"manylinux_{GLIBC[0]}_{GLIBC[1]}"
MACHINES = {
    "x86_64": Machine("Linux", "x86_64", "EM_X86_64", f"{_MANYLINUX}_x86_64", "ld-linux-x86-64.so.2"),
    "aarch64": Machine("Linux", "aarch64", "EM_AARCH64", f"{_MANYLINUX}_aarch64", "ld-linux-aarch64.so.1"),
    "win_amd64": Machine("Windows", "x86_64", "IMAGE_FILE_MACHINE_AMD64", "win_amd64"),
    "win_arm64": Machine("Windows", "aarch64", "IMAGE_FILE_MACHINE_ARM64", "win_arm64"),
}


def check(wheel: Path) -> list[str]:
    """The faults of a wheel, each in a sentence."""
    (machine,) = (machine for machine in MACHINES.values() if wheel.stem.endswith(f"-{machine.platform}"))
    with zipfile.ZipFile(wheel) as archive:
        if machine.system == "Windows":
            faults = [*_faults_of_dll(pefile.PE(data=archive.read(DLL)), machine)]
        else:
            faults = [*_faults(ELFFile(io.BytesIO(archive.read(LIBRARY))), machine), *_second_opinion(wheel, machine)]
    return [f"{wheel.name}: {fault}" for fault in faults]


def _faults_of_dll(library: pefile.PE, machine: Machine) -> Iterator[str]:
    if (found := pefile.MACHINE_TYPE[library.FILE_HEADER.Machine]) != machine.machine:
        yield f"the library is for {found}"
    needed = {entry.dll.decode() for entry in library.DIRECTORY_ENTRY_IMPORT}
    if strangers := [name for name in sorted(needed) if not SYSTEM_DLLS.fullmatch(name)]:
        yield f"the library needs {', '.join(strangers)}"
    exported = {symbol.name.decode() for symbol in library.DIRECTORY_ENTRY_EXPORT.symbols}
    if exported != EXPORTED:
        yield f"the library exports {', '.join(sorted(exported)) or 'nothing'}"


def _faults(library: ELFFile, processor: Machine) -> Iterator[str]:
    if library["e_machine"] != processor.machine:
        yield f"the library is for {library['e_machine']}"
    dynamic = library.get_section_by_name(".dynamic")
    assert isinstance(dynamic, DynamicSection)
    needed = {tag.needed for tag in dynamic.iter_tags("DT_NEEDED")}
    if strangers := needed - SYSTEM_LIBRARIES - {processor.loader}:
        yield f"the library needs {', '.join(sorted(strangers))}"
    if not any(tag.entry.d_val & NODELETE for tag in dynamic.iter_tags("DT_FLAGS_1")):
        yield "the library may be unloaded"
    for version in sorted(_versions(library)):
        number = re.fullmatch(r"GLIBC_(\d+)\.(\d+)(\.\d+)?", version)
        if number is None or (int(number[1]), int(number[2])) > GLIBC:
            yield f"the library needs symbols of {version}"
    if (exported := _exported(library)) != EXPORTED:
        yield f"the library exports {', '.join(sorted(exported)) or 'nothing'}"


def _versions(library: ELFFile) -> set[str]:
    """The symbol versions that the library needs, such as GLIBC_2.28."""
    section = library.get_section_by_name(".gnu.version_r")
    assert isinstance(section, GNUVerNeedSection)
    return {version.name for _, versions in section.iter_versions() for version in versions}


def _exported(library: ELFFile) -> set[str]:
    symbols = library.get_section_by_name(".dynsym")
    assert isinstance(symbols, SymbolTableSection)
    return {symbol.name for symbol in symbols.iter_symbols() if symbol.name and symbol["st_shndx"] != "SHN_UNDEF"}


def _second_opinion(wheel: Path, processor: Machine) -> Iterator[str]:
    shown = subprocess.run(
        [sys.executable, "-m", "auditwheel", "show", str(wheel)], capture_output=True, text=True, check=False
    )
    said = re.search(r'consistent with\s+the following platform tag:\s*"([^"]+)"', " ".join(shown.stdout.split()))
    if said is None:
        yield f"auditwheel says: {(shown.stdout + shown.stderr).strip()[-500:]}"
    elif _glibc(said[1]) > GLIBC:
        yield f"auditwheel says {said[1]}, not {processor.platform}"


def _glibc(platform: str) -> tuple[int, int]:
    number = re.fullmatch(r"manylinux_(\d+)_(\d+)_\w+", platform)
    return (int(number[1]), int(number[2])) if number else (sys.maxsize, 0)


if __name__ == "__main__":
    sys.exit("\n".join(fault for wheel in sys.argv[1:] for fault in check(Path(wheel))) or 0)
