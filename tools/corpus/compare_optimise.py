"""Optimises models, or compares an original with its optimised form on the reference evaluators.

A helper process of coverage.py, with one JSON job and one answer on each line. A job with `inputs` is a comparison. Any
other job optimises `original` for ONNX Runtime into the file `optimised`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator

import fa_compiler
from fa_compiler.lowering.ort import library_path
from fa_compiler.reference import evaluator
from tools.corpus.compare_check import full_check
from tools.corpus.compare_outputs import compare
from tools.processes import serve


def answer(job: Mapping[str, Any]) -> dict[str, Any]:
    """Do one job. An exception is an answer, too; `refused` says that the original is not a valid model."""
    try:
        return by_reference(job) if "inputs" in job else optimise(job)
    except fa_compiler.InputError as error:
        refused = full_check(job["original"]) is not None
        return {"error": f"InputError: {error}", "refused": refused}
    except Exception as error:  # any failure is a finding
        text = (str(error).strip().splitlines() or [""])[0][:300]
        return {"error": f"{type(error).__name__}: {text}"}


def optimise(job: Mapping[str, Any]) -> dict[str, Any]:
    """Optimise one model. The answer holds the JSON report, and the result of the checker with our schemas."""
    start = time.perf_counter()
    result = fa_compiler.optimize(job["original"], job["optimised"], target="ort")
    seconds = time.perf_counter() - start
    problem = full_check(job["optimised"]) if full_check(job["original"]) is None else None
    return {
        "error": None,
        "report": result.report.to_json(),
        "seconds": seconds,
        "problem": problem,
    }


def by_reference(job: Mapping[str, Any]) -> dict[str, Any]:
    """Compare the original on onnx's reference evaluator with the optimised model on ours."""
    with np.load(job["inputs"]) as archive:
        feeds = {name: _bits_to_bfloat16(archive[name]) for name in archive.files}
    original = onnx.load(job["original"])
    names = [value.name for value in original.graph.output]
    wanted = {value.name for value in original.graph.input}
    feeds = {name: value for name, value in feeds.items() if name in wanted}
    try:
        expected: Any = ReferenceEvaluator(original).run(None, feeds)
    except Exception as error:  # any failure is a finding
        return {
            "error": None,
            "original_error": f"{type(error).__name__}: {str(error)[:200]}",
        }
    actual: Any = evaluator(onnx.load(job["optimised"])).run(None, feeds)
    found = compare(names, expected, actual, job["coarsest"])
    problems = [f"[reference] output {each.name}: {each.problem}" for each in found if each.problem]
    worst = max((each.error for each in found), default=0.0)
    return {"error": None, "original_error": None, "problems": problems, "worst": worst}


def _bits_to_bfloat16(array: np.ndarray) -> np.ndarray:
    return array.view(ml_dtypes.bfloat16) if array.dtype.kind == "V" else array


if __name__ == "__main__":
    serve(answer, {"fa_compiler": fa_compiler.__version__, "library": str(library_path())})
