"""Runs a model through the plugin execution provider, and compares the outputs with those of the original.

A helper process of provider.py, with one JSON job (`original`, `inputs`, `plan`) and one verdict on each line. With
`plan`, a plan is written first, and the session takes it: the matcher must not be asked again.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as rt

import fa_compiler
from fa_compiler import provider
from fa_compiler.passes import Report
from tools.corpus.compare_check import coarsest_type
from tools.corpus.compare_outputs import compare
from tools.corpus.compare_run import _value, first_line, load_inputs, session_run
from tools.processes import serve


def run(job: Mapping[str, Any]) -> dict[str, Any]:
    """The verdict on one job.

    `offline` and `provider` list the operators that attentions became, by `optimize` and in the session. `declined` has
    the reasons of the session, and `failures` why it ran without us. `planned` says whether a plan answered the session
    and not the matcher. `original_error` is set if ONNX Runtime does not run the original. `problems` holds one for
    each failure, and `error` is the largest relative difference.
    """
    verdict: dict[str, Any] = {"original_error": None, "problems": [], "error": 0.0}
    feeds = load_inputs(job["inputs"])
    try:
        names, expected = session_run(job["original"], feeds, "off", None)
    except Exception as error:  # any failure is a finding
        return verdict | {"original_error": first_line(error)}
    try:
        verdict["offline"] = _operators(fa_compiler.optimize(job["original"]).report)
    except fa_compiler.InputError as error:
        return verdict | {"original_error": first_line(error)}
    with provider.overhear() as heard:
        try:
            actual, verdict["planned"] = _run(job["original"], feeds, names, job["plan"])
        except Exception as error:  # any failure is a finding
            verdict["problems"].append(f"does not run: {first_line(error)}")
            actual = None
    last = heard.reports[-1:]
    verdict["provider"] = [word for report in last for word in _operators(report)]
    verdict["failures"] = heard.failures
    verdict["declined"] = [
        f"{block.anchor}: {block.what}" for report in last for block in report.blocks if block.status == "declined"
    ]
    if actual is not None:
        coarsest = coarsest_type(onnx.load(job["original"], load_external_data=False))
        for difference in compare(names, expected, actual, coarsest):
            verdict["error"] = max(verdict["error"], difference.error)
            if difference.problem is not None:
                verdict["problems"].append(f"output {difference.name}: {difference.problem}")
    return verdict


def _operators(report: Report) -> list[str]:
    return sorted(block.op or "" for block in report.blocks if block.status == "fused")


def _run(path: str, feeds: Mapping[str, np.ndarray], names: list[str], planned: bool) -> tuple[list[np.ndarray], bool]:
    """The outputs of a session with the provider, and whether a plan answered it."""
    options = rt.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 2
    with tempfile.TemporaryDirectory() as folder:
        plan = str(Path(folder) / "model.plan") if planned else ""
        if planned:
            fa_compiler.plan(path, plan)
        options.add_provider_for_devices(fa_compiler.register_provider(), {"plan": plan})
        with provider.overhear() as heard:
            session = rt.InferenceSession(path, options)
    wanted = {value.name for value in session.get_inputs()}
    values = {name: _value(array) for name, array in feeds.items() if name in wanted}
    return [value.numpy() for value in session.run_with_ort_values(names, values)], planned and not heard.reports


if __name__ == "__main__":
    serve(run, {"onnxruntime": rt.__version__})
