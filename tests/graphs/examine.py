"""Put one kept graph through the compiler and judge the result."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx

import fa_compiler
from fa_compiler.lowering.ort import library_path
from tests.graphs import harness
from tools.corpus import compare_check, compare_optimise, compare_run


@dataclass(frozen=True)
class Examination:
    """What was seen: the blocks in words, where the outputs were compared, and every defect.

    `compared` is "ort", "reference", or "no" when neither runs the original.
    """

    blocks: dict[str, int]
    compared: str
    problems: list[str]


def prepare(name: str, folder: Path) -> dict[str, Any]:
    """Write the filled graph, its inputs and its optimised form to `folder`; return the job that judges them.

    The job is one of tools/corpus/compare_run.py, with the JSON report added as `report`.
    """
    entry = harness.read_index()[name]
    paths = {key: str(folder / f"{name}.{key}.onnx") for key in ("original", "optimised")}
    onnx.save(harness.load(name), paths["original"])
    inputs = str(folder / f"{name}.npz")
    np.savez(inputs, allow_pickle=False, **harness.inputs(entry))
    result = fa_compiler.optimize(paths["original"], paths["optimised"], target="ort", assume=entry.get("assume", ()))
    return {
        **paths,
        "inputs": inputs,
        "library": str(library_path()),
        "report": result.report.to_json(),
    }


def examine(name: str, folder: Path) -> Examination:
    """Optimise one graph; check the result with onnx, and compare its outputs with the original's."""
    job = prepare(name, folder)
    report = job.pop("report")
    check = compare_check.check(job)
    problems = []
    if check["original_problem"] is None and check["problem"] is not None:
        problems.append(f"checker: {check['problem']}")
    if not check["same_interface"]:
        problems.append("inputs, outputs or the IR version changed")
    if len(report["blocks"]) < check["softmaxes"]:
        problems.append(f"{len(report['blocks'])} blocks for {check['softmaxes']} softmaxes")
    verdict = compare_run.run({**job, "coarsest": check["coarsest"]})
    compared = "ort"
    if verdict["original_error"] is not None:
        verdict = compare_optimise.by_reference({**job, "coarsest": check["coarsest"]})
        compared = "reference" if verdict["original_error"] is None else "no"
    return Examination(harness.summary(report), compared, problems + verdict.get("problems", []))
