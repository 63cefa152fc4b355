"""One compilation in this process, with this interpreter: a helper of compile_time.py.

    python -m bench.compile_run TOOL MODEL OUTPUT

Prints one line of JSON: the tool's version; the seconds to import it; the seconds to read, fuse and write the model
(elapsed and processor time); the rise of the peak resident memory after the imports; and the number of fused attention
blocks. It imports nothing but the tool, so any interpreter with the tool can run it.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

Compile = Callable[[str, str], int]
"""Compiles one file into another and returns the number of fused blocks."""


def ours() -> Compile:
    """fa_compiler with its default options."""
    import fa_compiler

    optimize = fa_compiler.optimize
    return lambda model, output: optimize(model, output).report.count("fused")


def onnxruntime() -> Compile:
    """The optimiser of onnxruntime.transformers, with the options of its own converter for Llama."""
    from onnxruntime.transformers.optimizer import optimize_model

    def compile(model: str, output: str) -> int:
        optimized = optimize_model(model, model_type="gpt2", opt_level=0, use_gpu=False)
        optimized.save_model_to_file(output, use_external_data_format=True)
        return sum("Attention" in node.op_type for node in optimized.model.graph.node)

    return compile


def onnxscript() -> Compile:
    """onnxscript's rewriter with its rules for ONNX Runtime."""
    import onnxscript.ir
    from onnxscript.rewriter.ort_fusions import optimize_for_ort

    def compile(model: str, output: str) -> int:
        optimized = onnxscript.ir.load(model)
        found = optimize_for_ort(optimized)
        optimized = found[0] if isinstance(found, tuple) else optimized
        onnxscript.ir.save(optimized, output, external_data=Path(output).name + ".data")
        return sum("Attention" in node.op_type for node in optimized.graph)

    return compile


def openvino() -> Compile:
    """OpenVINO's conversion, whose common passes hold its fusion of attention."""
    import openvino

    def compile(model: str, output: str) -> int:
        converted = openvino.convert_model(model)
        openvino.save_model(converted, str(Path(output).with_suffix(".xml")), compress_to_fp16=False)
        return sum(node.get_type_name() == "ScaledDotProductAttention" for node in converted.get_ops())

    return compile


TOOLS: dict[str, tuple[str, Callable[[], Compile]]] = {
    "fa_compiler": ("fa_compiler", ours),
    "onnxruntime": ("onnxruntime", onnxruntime),
    "onnxscript": ("onnxscript", onnxscript),
    "openvino": ("openvino", openvino),
}
"""By name: the package whose version is printed, and the function that prepares the tool."""


def measure(tool: str, model: str, output: str) -> dict[str, Any]:
    """Import, compile once, and return the results."""
    package, prepare = TOOLS[tool]
    start = time.perf_counter()
    compile = prepare()
    imported = time.perf_counter()
    before = _memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    begun, begun_cpu = time.perf_counter(), time.process_time()
    fused = compile(model, output)
    seconds, cpu_seconds = time.perf_counter() - begun, time.process_time() - begun_cpu
    return {
        "version": version(package),
        "import_seconds": imported - start,
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "memory": _memory("VmHWM") - before,
        "fused": fused,
    }


def _memory(field: str) -> int:
    """One of Linux's memory counts for this process, in bytes."""
    found = re.search(rf"{field}:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found.group(1)) << 10


if __name__ == "__main__":
    print(json.dumps(measure(*sys.argv[1:4])))
