"""Optimises models for Ascend, writes them as `.air` files, checks these, and converts them back to ONNX.

A helper process of ascend.py, with one JSON job and one answer on each line. A job has `original`; `optimised`, the
path for the resulting ONNX model, whose inputs have the original's names; and `shapes`, the sizes to fix by input, or
null.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

import onnx
import onnx_ir as ir

import fa_compiler
from fa_compiler.lowering.ascend.air import parse, serialise
from fa_compiler.lowering.ascend.air.check import check_message
from fa_compiler.lowering.ascend.air.files import parse_message
from fa_compiler.lowering.ascend.convert import UnmappedError, to_ge
from fa_compiler.lowering.ascend.diagnostic import Severity
from fa_compiler.lowering.ort import library_path
from fa_compiler.op_registry import schemas
from tools.corpus.compare_check import check as check_models
from tools.ge_to_onnx import from_ge
from tools.processes import serve


def answer(job: Mapping[str, Any]) -> dict[str, Any]:
    """Do one job. An exception is an answer, too; `refused` says that the original is not a valid model."""
    try:
        return round_trip(job["original"], job["optimised"], job.get("shapes"))
    except fa_compiler.InputError as error:
        return {"error": f"InputError: {error}", "refused": True}
    except Exception as error:  # any failure is a finding
        text = (str(error).strip().splitlines() or [""])[0][:300]
        return {"error": f"{type(error).__name__}: {text}"}


def round_trip(original: str, target: str, shapes: Mapping[str, list[int]] | None = None) -> dict[str, Any]:
    """Convert one model to `.air` and back.

    The answer holds `unmapped` (operator and reason of each node without a counterpart), the `findings` of the file's
    check, `types` (the contradiction of ONNX's strict type inference to the declared types, or null), `fused`, the
    numbers of GE `operators`, and the `bytes` of the file.
    """
    start = time.perf_counter()
    result = fa_compiler.optimize(original, target="ascend")
    assert isinstance(result.model, onnx.ModelProto)
    seen: dict[str, Any] = {"error": None, "fused": result.report.count("fused"), "unmapped": [], "findings": []}
    try:
        graph = to_ge(ir.from_proto(result.model), input_shapes=shapes)
    except UnmappedError as error:
        return {**seen, "unmapped": [(node.op_type, node.reason) for node in error.nodes]}
    data, _ = serialise(graph)
    found = [finding for finding in check_message(parse_message(data)) if finding.severity is not Severity.NOTE]
    back = from_ge(parse(data))
    _name_inputs(back, [value.name for value in _inputs(onnx.load(original, load_external_data=False))])
    onnx.save(back, target)
    return {
        **seen,
        "findings": [f"{finding.rule}: {finding}" for finding in found],
        "types": _type_problem(back),
        "operators": dict(Counter(op.type for each in graph.graphs for op in each.ops)),
        "bytes": len(data),
        "seconds": time.perf_counter() - start,
        "coarsest": check_models({"original": original, "optimised": original})["coarsest"],
    }


def _inputs(model: onnx.ModelProto) -> list[onnx.ValueInfoProto]:
    weights = {tensor.name for tensor in model.graph.initializer}
    return [value for value in model.graph.input if value.name not in weights]


def _name_inputs(model: onnx.ModelProto, names: list[str]) -> None:
    """Rename the inputs of a model; names in GE may not hold a colon."""
    new = {value.name: name for value, name in zip(model.graph.input, names, strict=True)}
    _rename(model.graph, {old: name for old, name in new.items() if old != name})


def _rename(graph: onnx.GraphProto, names: Mapping[str, str]) -> None:
    for value in graph.input:
        value.name = names.get(value.name, value.name)
    for node in graph.node:
        for index, name in enumerate(node.input):
            node.input[index] = names.get(name, name)
        for attribute in node.attribute:
            if attribute.HasField("g"):
                _rename(attribute.g, names)


def _type_problem(model: onnx.ModelProto) -> str | None:
    schemas.register()
    try:
        onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True)
    except Exception as error:  # any failure is a finding
        return (str(error).strip().splitlines() or [""])[0][:300]
    return None


if __name__ == "__main__":
    serve(answer, {"fa_compiler": fa_compiler.__version__, "library": str(library_path())})
