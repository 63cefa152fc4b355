"""Compile and run the programs of docs/recipes.md and docs/provider.md, in C++ and in Node.

Their results are compared with Python's.

    PYTHONPATH=. python -m tools.compat.check_hosts MODULES

MODULES is the folder node_modules of npm with onnxruntime-node, and with com.github.asus4.onnxruntime, whose files hold
ONNX Runtime's headers. Needs g++, node and the library of kernels.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import onnxruntime as ort

import fa_compiler
from tools.compat.page_programs import MODEL, block, differs, headers_of


def wanted() -> float:
    """The first element of the result for the programs' inputs, by the original in Python."""
    ids = np.full((1, 128), 7, np.int64)
    session = ort.InferenceSession(MODEL, providers=["CPUExecutionProvider"])
    (result, *_) = session.run(["last_hidden_state"], {"input_ids": ids, "attention_mask": np.ones_like(ids)})
    return float(result.flat[0])


def in_cpp(modules: Path, folder: Path) -> float:
    """What the program in C++ prints for the fused model."""
    compile_cpp(block("recipes.md", "cpp"), modules, folder)
    fa_compiler.optimize(MODEL, folder / "fused.onnx")
    return printed(["./host", "fused.onnx", fa_compiler.custom_ops_library()], folder)


def in_cpp_with_plan(modules: Path, folder: Path) -> float:
    """What the program in C++ prints for the original model, with the execution provider and a plan."""
    compile_cpp(block("provider.md", "cpp"), modules, folder)
    fa_compiler.plan(MODEL, folder / "model.plan")
    return printed(["./host", str(MODEL), fa_compiler.custom_ops_library(), "model.plan"], folder)


def compile_cpp(source: str, modules: Path, folder: Path) -> None:
    """Make the program `host`. It is linked to the runtime of Python's wheel."""
    (runtime,) = (Path(ort.__file__).parent / "capi").glob("libonnxruntime.so.*")
    for name in ("libonnxruntime.so", "libonnxruntime.so.1"):
        (folder / name).symlink_to(runtime)
    (folder / "host.cpp").write_text(source)
    options = [f"-I{headers_of(modules)}", f"-L{folder}", "-lonnxruntime", f"-Wl,-rpath,{folder}"]
    subprocess.run(["g++", "-std=c++17", "host.cpp", *options, "-o", "host"], cwd=folder, check=True)


def in_node(modules: Path, folder: Path) -> float:
    """What the program in Node prints for the model with ONNX Runtime's own operators."""
    (folder / "host.cjs").write_text(block("recipes.md", "js"))
    (folder / "node_modules").symlink_to(modules)
    fa_compiler.optimize(MODEL, folder / "contrib.onnx", target="contrib", runtime="ort-cpu=1.30")
    return printed(["node", "host.cjs", "contrib.onnx"], folder)


def printed(command: list[str], folder: Path) -> float:
    """The number that a program prints."""
    return float(subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout)


def main() -> int:
    """Print a line for each language; the exit code is 1 if one differs."""
    modules, want, differ = Path(sys.argv[1]).resolve(), wanted(), False
    for name, program in (("C++", in_cpp), ("C++ with a plan", in_cpp_with_plan), ("Node", in_node)):
        with tempfile.TemporaryDirectory() as folder:
            got = program(modules, Path(folder))
        differ |= differs(name, got, want)
    return int(differ)


if __name__ == "__main__":
    sys.exit(main())
