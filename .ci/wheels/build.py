"""Builds what is published into build/wheels: a source distribution, and from it a wheel for each processor.

Zig's compiler builds for Linux against glibc 2.28, and for Windows 10 and newer, on two processors each. It links its
C++ library statically, so that a wheel runs on Linux distributions from 2018 on. `check.py` then examines each wheel.
`make wheels` runs this.

Zig compiles its C++ library for a processor when it first links for it, and keeps it in its cache: that of the user,
or the folder that ZIG_GLOBAL_CACHE_DIR names. It uses one core and says nothing meanwhile. So this is done before
CMake starts, for all processors at once.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from check import MACHINES, check

ROOT = Path(__file__).resolve().parents[2]
WHEELS = ROOT / "build" / "wheels"
WORK = ROOT / "build" / "wheels-work"
"""The sources as they are unpacked from the source distribution, and the objects of each processor."""

FLAGS = ("-O3", "-g0", "-s")
"""Of all that is compiled and linked, CMake's tries included: Zig compiles a library for each set of flags."""


def main() -> None:
    """Build and check everything; the exit code is 1 if a wheel is not what its name says."""
    names = sys.argv[1:] or list(MACHINES)
    for old in WHEELS.glob("fa_compiler-*"):
        old.unlink()
    _build(ROOT, "--sdist")
    (archive,) = WHEELS.glob("*.tar.gz")
    source = unpack(archive, WORK)
    _make_libraries(names)
    for name in names:
        _build_wheel(source, name)
    faults = [fault for wheel in sorted(WHEELS.glob("*.whl")) for fault in check(wheel)]
    for path in sorted(WHEELS.glob("fa_compiler-*")):
        print(path.relative_to(ROOT))
    sys.exit("\n".join(faults) or 0)


def unpack(archive: Path, folder: Path) -> Path:
    """Unpack a source distribution into a folder, and return the path of the sources.

    A file that is there with the same content is left as it is, so that the objects made from it stay valid. What the
    archive does not hold is removed.
    """
    with tarfile.open(archive) as content:
        members = content.getmembers()
        (top,) = {PurePosixPath(member.name).parts[0] for member in members}
        source = folder / top
        wanted = {folder / member.name for member in members}
        for path in [*source.rglob("*")] if source.is_dir() else []:
            if path not in wanted and (path.is_symlink() or not path.is_dir()):
                path.unlink()
        for member in members:
            path = folder / member.name
            stream = content.extractfile(member) if member.isfile() else None
            if stream is not None and path.is_file() and path.read_bytes() == stream.read():
                continue
            content.extract(member, folder, filter="data")
            if member.isfile():
                os.utime(path)
    return source


def _make_libraries(names: Sequence[str]) -> None:
    """Have Zig compile its C++ library for each processor, if it has not yet."""
    print(f"Zig's C++ library for {' and '.join(names)}: the first time it takes 1 to 4 minutes", flush=True)
    start = time.monotonic()
    WORK.mkdir(parents=True, exist_ok=True)
    program = WORK / "empty.cc"
    program.write_text("int main() {}\n")
    processes = [
        subprocess.Popen([*_compiler(name), *FLAGS, str(program), "-o", str(WORK / f"empty-{name}")]) for name in names
    ]
    codes = [process.wait() for process in processes]
    if any(codes):
        sys.exit("error: Zig cannot compile an empty program, see above")
    print(f"Zig's C++ library is there, after {time.monotonic() - start:.0f} s", flush=True)


def _compiler(name: str) -> list[str]:
    return [sys.executable, "-m", "ziglang", "c++", "-target", MACHINES[name].target]


def _build_wheel(source: Path, name: str) -> None:
    machine = MACHINES[name]
    settings = {
        "wheel.tags": f"py3-none-{machine.platform}",
        "build-dir": str(WORK / name),
        "install.strip": "false",  # the linker does it; the strip of this machine may not know the processor
        "cmake.define.CMAKE_SYSTEM_NAME": machine.system,
        "cmake.define.CMAKE_SYSTEM_PROCESSOR": machine.processor,
    }
    flags = " ".join(FLAGS)
    _build(
        source,
        "--wheel",
        *(f"-C{key}={value}" for key, value in settings.items()),
        environment={"CXX": " ".join(_compiler(name)), "CXXFLAGS": flags, "LDFLAGS": flags},
    )


def _build(source: Path, *options: str, environment: dict[str, str] | None = None) -> None:
    tools = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(WHEELS), *options, str(source)],
        env=os.environ | {"PATH": tools} | (environment or {}),
        check=True,
    )


if __name__ == "__main__":
    main()
