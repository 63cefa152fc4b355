"""Runs an original and an optimised model in the onnxruntime of this interpreter, and compares them.

It needs only numpy and onnxruntime, so an interpreter with another onnxruntime can run it, too:

    OTHER/bin/python -m tools.corpus.compare_run < jobs

reads one JSON job and prints one JSON verdict on each line. A job has `original`, `optimised`, `inputs` (an npz),
`library` (the custom-op library or null) and `coarsest` (a dtype name or null). With `lenient`, a difference is allowed
up to twice the tolerance, or up to twice the difference that onnxruntime's own optimisations make. `step`, if it is
there, is the relative size of a rounding step inside the model: a difference up to it is allowed with `lenient`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as rt

from tools.corpus.compare_outputs import TOLERANCES, Difference, compare, tolerance_of
from tools.processes import serve

LEVELS = {
    "off": rt.GraphOptimizationLevel.ORT_DISABLE_ALL,
    "all": rt.GraphOptimizationLevel.ORT_ENABLE_ALL,
}

NOISE = 1e-2
"""A larger difference than this is not caused by rounding."""


def run(job: Mapping[str, Any]) -> dict[str, Any]:
    """The verdict on one job.

    `original_error` is set if this onnxruntime does not run the original; the verdict then has nothing else. `problems`
    holds one sentence for each failure, and `error` is the largest relative difference.
    """
    feeds = load_inputs(job["inputs"])
    try:
        names, expected = session_run(job["original"], feeds, "off", None)
    except Exception as error:  # any failure is a finding
        return {"original_error": first_line(error)}
    problems: list[str] = []
    worst = 0.0
    noise: float | None = None
    for level in LEVELS:
        try:
            _, actual = session_run(job["optimised"], feeds, level, job["library"])
        except Exception as error:  # any failure is a finding
            problems.append(f"[{level}] does not run: {first_line(error)}")
            continue
        for difference in compare(names, expected, actual, job["coarsest"]):
            worst = max(worst, difference.error)
            if difference.problem is not None and job.get("lenient") and noise is None:
                noise = _own_noise(job, feeds, names, expected)
            if difference.problem is not None and not _forgiven(difference, noise, job):
                problems.append(f"[{level}] output {difference.name}: {difference.problem}")
    return {"original_error": None, "problems": problems, "error": worst}


def _forgiven(difference: Difference, noise: float | None, job: Mapping[str, Any]) -> bool:
    if noise is None or difference.dtype not in TOLERANCES:
        return False
    allowed = 2 * max(noise, tolerance_of(difference.dtype, job["coarsest"]))
    return difference.error <= max(allowed, job.get("step", 0.0))


def _own_noise(
    job: Mapping[str, Any], feeds: Mapping[str, np.ndarray], names: list[str], expected: list[np.ndarray]
) -> float:
    """The difference that ONNX Runtime's own optimisations make to the original; 0 if it is more than rounding."""
    _, actual = session_run(job["original"], feeds, "all", None)
    errors = [difference.error for difference in compare(names, expected, actual, job["coarsest"])]
    return max((error for error in errors if error < NOISE), default=0.0)


def load_inputs(path: str | Path) -> dict[str, np.ndarray]:
    """The inputs of an npz. Void arrays of two bytes are bfloat16 bits."""
    with np.load(path, allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}


def session_run(
    path: str, feeds: Mapping[str, np.ndarray], level: str, library: str | None
) -> tuple[list[str], list[np.ndarray]]:
    """The names and the values of a model's outputs, at a level of `LEVELS`. Raises what ONNX Runtime raises."""
    options = rt.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 2 if level == "all" else 1
    options.graph_optimization_level = LEVELS[level]
    if library is not None:
        options.register_custom_ops_library(library)
    session = rt.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    wanted = {value.name for value in session.get_inputs()}
    names = [value.name for value in session.get_outputs()]
    values = {name: _value(array) for name, array in feeds.items() if name in wanted}
    return names, [value.numpy() for value in session.run_with_ort_values(names, values)]


def _value(array: np.ndarray) -> Any:
    if array.dtype.kind == "V":
        bfloat16 = 16
        return rt.OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(np.uint16), bfloat16)
    return rt.OrtValue.ortvalue_from_numpy(array)


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or the name of its class if it has no text."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


if __name__ == "__main__":
    serve(run, {"onnxruntime": rt.__version__})
