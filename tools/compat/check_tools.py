"""Run other ONNX tools on fused graphs, and their results in ONNX Runtime with the library.

    PYTHONPATH=. python -m tools.compat.check_tools

Needs onnxsim, onnxslim and onnxconverter-common. A tool fails a graph if it raises an exception, if ONNX Runtime cannot
load what it wrote, or if the outputs differ from those of the original by more than its arithmetic explains. The last
column says how many fused nodes are left, and whether the result also runs without the library.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnxruntime.quantization import CalibrationDataReader, quantize_dynamic, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process
from onnxruntime.tools.convert_onnx_models_to_ort import OptimizationStyle, convert_onnx_models_to_ort
from onnxruntime.tools.symbolic_shape_infer import SymbolicShapeInference
from onnxruntime.transformers import optimizer
from onnxruntime.transformers.float16 import convert_float_to_float16

import fa_compiler
from fa_compiler.op_registry import DOMAINS
from tests.graphs import harness
from tools.compat.results import difference

NAMES = (
    "bert__dynamon_sdpa_op20",
    "bert__tsn_eager_op14",
    "bart__tsn_sdpa_op17",
    "t5__tsn_eager_op14",
    "dinov2__dynamon_sdpa_op20",
    "gpt2__tsn_sdpa_op17",
    "vit__tsn_sdpa_op17",
    "whisper__tsn_sdpa_op17",
    "llama__tsn_sdpa_op17",
)
MODEL_TYPES = {"bart": "bart", "t5": "t5", "dinov2": "vit", "gpt2": "gpt2", "vit": "vit", "whisper": "bart"}
"""The model_type of onnxruntime.transformers.optimizer, by the graph's name; the others are "bert"."""
EXACT, HALF, EIGHT_BITS = 1e-5, 3e-2, 1.0

Feeds = dict[str, np.ndarray]


class Calibration(CalibrationDataReader):  # type: ignore[misc]  # onnxruntime is not typed
    """Gives one set of inputs."""

    def __init__(self, feeds: Feeds) -> None:
        self._left = iter([feeds])

    def get_next(self) -> Feeds | None:
        """The inputs, once."""
        return next(self._left, None)


def simplified(source: str, target: str) -> None:
    """onnxsim, without the library."""
    import onnxsim  # type: ignore[import-not-found,unused-ignore]

    model, is_checked = onnxsim.simplify(source)
    assert is_checked
    onnx.save(model, target)


def slimmed(source: str, target: str) -> None:
    """onnxslim."""
    import onnxslim  # type: ignore[import-not-found,unused-ignore]

    onnx.save(onnxslim.slim(source), target)


def common_half(source: str, target: str) -> None:
    """The float16 conversion of onnxconverter-common."""
    from onnxconverter_common import float16  # type: ignore[import-not-found,unused-ignore]

    onnx.save(float16.convert_float_to_float16(onnx.load(source), keep_io_types=True), target)


def session(model: str, library: bool, optimised: str = "") -> ort.InferenceSession:
    """A session. It writes its optimised model to the path `optimised`, if there is one."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    if optimised:
        options.optimized_model_filepath = optimised
    if library:
        fa_compiler.register_custom_ops(options)
    return ort.InferenceSession(Path(model).read_bytes(), options, providers=["CPUExecutionProvider"])


def to_ort(source: str, target: str, style: OptimizationStyle, library: bool) -> None:
    """convert_onnx_models_to_ort."""
    found = Path(fa_compiler.custom_ops_library()) if library else None
    with tempfile.TemporaryDirectory() as folder:
        convert_onnx_models_to_ort(
            Path(source), Path(folder), optimization_styles=[style], custom_op_library_path=found
        )
        (written,) = Path(folder).rglob("*.ort")
        shutil.copy(written, target)


def transformers(source: str, target: str) -> None:
    """onnxruntime.transformers.optimizer, without ONNX Runtime's own optimisations, for which it needs torch."""
    name = Path(source).stem.split("__")[0]
    kind = MODEL_TYPES.get(name, "bert")
    optimizer.optimize_model(source, model_type=kind, opt_level=0).save_model_to_file(target)


def tools(feeds: Feeds) -> dict[str, tuple[Callable[[str, str], Any], float]]:
    """Each tool as a function of two paths, and the difference that it may make."""
    infer = SymbolicShapeInference.infer_shapes
    return {
        "infer_shapes": (lambda a, b: onnx.shape_inference.infer_shapes_path(a, b, strict_mode=True), EXACT),
        "symbolic_shape_infer": (lambda a, b: onnx.save(infer(onnx.load(a), auto_merge=True), b), EXACT),
        "quant_pre_process": (lambda a, b: quant_pre_process(a, b, auto_merge=True), EXACT),
        "quantize_dynamic": (lambda a, b: quantize_dynamic(a, b), EIGHT_BITS),
        "quantize_static": (lambda a, b: quantize_static(a, b, Calibration(feeds)), EIGHT_BITS),
        "float16": (lambda a, b: onnx.save(convert_float_to_float16(onnx.load(a), keep_io_types=True), b), HALF),
        "float16 of onnxconverter-common": (common_half, HALF),
        "onnxsim": (simplified, EXACT),
        "onnxslim": (slimmed, EXACT),
        "optimized_model_filepath": (lambda a, b: session(a, True, b), EXACT),
        "the same without the library": (lambda a, b: session(a, False, b), EXACT),
        "to_ort, fixed": (lambda a, b: to_ort(a, b, OptimizationStyle.Fixed, True), EXACT),
        "to_ort, runtime": (lambda a, b: to_ort(a, b, OptimizationStyle.Runtime, True), EXACT),
        "to_ort without the library": (lambda a, b: to_ort(a, b, OptimizationStyle.Fixed, False), EXACT),
        "transformers.optimizer": (transformers, EXACT),
    }


def run(model: str, feeds: Feeds, library: bool = True) -> list[np.ndarray]:
    """All outputs of a model in ONNX Runtime."""
    return [np.asarray(result) for result in session(model, library).run(None, feeds)]


def main() -> int:
    """Print a line for each graph and tool; 1 if one fails that does not fail on the original, too."""
    failures = 0
    for name in NAMES:
        feeds = harness.inputs(harness.read_index()[name])
        with tempfile.TemporaryDirectory() as folder:
            original, fused, target = (f"{folder}/{name}__{stem}.onnx" for stem in ("original", "fused", "result"))
            onnx.save(harness.load(name), original)
            fa_compiler.optimize(original, fused)
            wanted = run(original, feeds)
            for tool, (convert, allowed) in tools(feeds).items():
                found = attempt(convert, fused, target, feeds, wanted, allowed)
                result = "" if found else after(target, feeds, wanted, allowed)
                if found and attempt(convert, original, target, feeds, wanted, allowed):
                    found, result = "", "the tool does not take the original either"
                failures += bool(found)
                print(f"{name:28} {tool:32} {found or 'ok':8} {result}", flush=True)
    return min(failures, 1)


def after(target: str, feeds: Feeds, wanted: list[np.ndarray], allowed: float) -> str:
    """What a tool's result still has of the fused nodes."""
    try:
        nodes = onnx.load(target).graph.node
        kept = f"{sum(node.domain in DOMAINS for node in nodes)} nodes"
    except Exception:  # an .ort file
        kept = "an .ort file"
    try:
        alone = not difference(run(target, feeds, library=False), wanted, lambda _: allowed)
    except Exception:
        alone = False
    return f"{kept}, {'runs' if alone else 'does not run'} without the library"


def attempt(
    convert: Callable[[str, str], Any], source: str, target: str, feeds: Feeds, wanted: list[np.ndarray], allowed: float
) -> str:
    """What is wrong with a tool's result; empty if nothing is."""
    try:
        convert(source, target)
        return difference(run(target, feeds), wanted, lambda _: allowed)
    except Exception as error:  # of any tool
        return f"{type(error).__name__}: {error}"[:200]


if __name__ == "__main__":
    sys.exit(main())
