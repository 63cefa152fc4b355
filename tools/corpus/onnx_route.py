"""Converts every model of a corpus for ATC's ONNX parser, and compares its results with the original's.

    python -m tools.corpus.onnx_route --corpus DIR [--filter REGEX]

The corpus is that of coverage.py. Each model is optimised for Ascend (A2), converted to an opset of the parser, checked
by the parser's rules, and run in ONNX Runtime with the custom operators and without optimisations. The exit code is 1
if a rule is broken or an output differs. A model that is refused is not a defect; the reasons are listed.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort

from fa_compiler import register_custom_ops
from fa_compiler.lowering.ascend.diagnostic import Severity
from fa_compiler.lowering.ascend.onnx_route import UnsupportedModel, lower
from fa_compiler.lowering.ascend.onnx_route.check import check_model
from fa_compiler.passes import Options, fuse

LARGEST = 1 << 30
"""Larger models, in bytes, are left out, because both copies are held in memory."""

TOLERANCE = {np.dtype(np.float16): 5e-3, np.dtype(np.float32): 1e-4}
"""The allowed difference relative to an output's largest value. Attention has another order of summation."""


def main() -> int:
    """Go through the corpus."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--filter", default="")
    args = parser.parse_args()
    entries = json.loads((args.corpus / "manifest.json").read_text())["models"]
    tally: Counter[str] = Counter()
    for entry in entries:
        if not re.search(args.filter, entry["id"]) or "inputs" not in entry:
            continue
        word, details = outcome(args.corpus / entry["file"], args.corpus / entry["inputs"])
        tally[word] += 1
        for detail in details:
            print(f"{entry['id']}: {word}: {detail}")
    print(", ".join(f"{count} {word}" for word, count in sorted(tally.items())))
    return int(bool(tally["wrong"]))


def outcome(path: Path, inputs: Path) -> tuple[str, list[str]]:
    """The outcome of a model in one word, and the reasons."""
    if path.stat().st_size > LARGEST:
        return "large", []
    original = onnx.load(path)
    model = ir.from_proto(original)
    fuse(model, Options("ascend", only="attention"))
    try:
        lower(model)
    except UnsupportedModel as error:
        return "refused", list(error.problems)
    result = ir.to_proto(model)
    findings = [finding for finding in check_model(result, None) if finding.severity is not Severity.NOTE]
    if findings:
        return "wrong", [str(finding) for finding in findings]
    with np.load(inputs) as archive:
        feeds = {name: archive[name] for name in archive.files}
    try:
        expected = run(original, feeds)
    except Exception:  # ONNX Runtime does not run the original: there is nothing to compare with
        return "not run", []
    differences = [text for pair in zip(expected, run(result, feeds), strict=True) if (text := difference(*pair))]
    return ("wrong" if differences else "equal"), differences


def run(model: onnx.ModelProto, feeds: dict[str, Any]) -> list[np.ndarray]:
    """The outputs of a run without optimisations."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    register_custom_ops(options)
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = {value.name for value in session.get_inputs()}
    return [np.asarray(value) for value in session.run(None, {name: feeds[name] for name in names & set(feeds)})]


def difference(expected: np.ndarray, found: np.ndarray) -> str:
    """The difference as a sentence, "" if there is none."""
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return f"{expected.dtype}{expected.shape} became {found.dtype}{found.shape}"
    if expected.dtype not in TOLERANCE:
        return "" if np.array_equal(expected, found) else "other values"
    left, right = expected.astype(np.float64), found.astype(np.float64)
    finite = np.isfinite(left)
    if not np.array_equal(left[~finite], right[~finite], equal_nan=True):
        return "NaN or infinity at other positions"
    worst = np.abs(left - right)[finite].max(initial=0) / max(np.abs(left[finite]).max(initial=0), 1e-9)
    return f"differs by {worst:.1e} of the largest value" if worst > TOLERANCE[expected.dtype] else ""


if __name__ == "__main__":
    sys.exit(main())
