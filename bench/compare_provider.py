"""Runs a model through the plugin execution provider, and compares the outputs with those of the original.

A helper process of provider.py, with one JSON job (`original`, `inputs`, `coarsest`) and one verdict on each line.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnxruntime as rt
from compare_check import _coarsest
from compare_outputs import compare
from compare_run import _session_run, _value, first_line, load_inputs
from line_server import serve

import fa_compiler
from fa_compiler import provider
from fa_compiler.passes import Report


def run(job: Mapping[str, Any]) -> dict[str, Any]:
    """The verdict on one job.

    `offline` and `provider` list the operators that attentions became, by `optimize` and in the session. `declined` has
    the reasons of the session, and `failures` why it ran without us. `original_error` is set if ONNX Runtime does not
    run the original. `problems` holds one sentence for each failure, and `error` is the largest relative difference.
    """
    verdict: dict[str, Any] = {"original_error": None, "problems": [], "error": 0.0}
    feeds = load_inputs(job["inputs"])
    try:
        names, expected = _session_run(job["original"], feeds, "off", None)
    except Exception as error:  # any failure is a finding
        return verdict | {"original_error": first_line(error)}
    try:
        verdict["offline"] = _operators(fa_compiler.optimize(job["original"]).report)
    except fa_compiler.InputError as error:
        return verdict | {"original_error": first_line(error)}
    provider.activity = provider.Activity()
    try:
        actual = _run_with_provider(job["original"], feeds, names)
    except Exception as error:  # any failure is a finding
        verdict["problems"].append(f"does not run: {first_line(error)}")
        actual = None
    reports = provider.activity.reports
    last = reports[-1:]
    verdict["provider"] = [word for report in last for word in _operators(report)]
    verdict["failures"] = provider.activity.failures
    verdict["declined"] = [
        f"{block.anchor}: {block.what}" for report in last for block in report.blocks if block.status == "declined"
    ]
    if actual is not None:
        coarsest = _coarsest(onnx.load(job["original"], load_external_data=False))
        for difference in compare(names, expected, actual, coarsest):
            verdict["error"] = max(verdict["error"], difference.error)
            if difference.problem is not None:
                verdict["problems"].append(f"output {difference.name}: {difference.problem}")
    return verdict


def _operators(report: Report) -> list[str]:
    return sorted(block.op or "" for block in report.blocks if block.status == "fused")


def _run_with_provider(path: str, feeds: Mapping[str, np.ndarray], names: list[str]) -> list[np.ndarray]:
    options = rt.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 2
    options.add_provider_for_devices(fa_compiler.register_provider(), {})
    session = rt.InferenceSession(path, options)
    wanted = {value.name for value in session.get_inputs()}
    values = {name: _value(array) for name, array in feeds.items() if name in wanted}
    return [value.numpy() for value in session.run_with_ort_values(names, values)]


if __name__ == "__main__":
    serve(run, {"onnxruntime": rt.__version__})
