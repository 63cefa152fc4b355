"""ATC's ONNX front end: what the route writes is what ATC computes, and `air check` says of a file what ATC does to it.

A case is one operator in a variant (`variants.py`). `front_end.py` says what ATC makes of the file. Then

- `air check` finds a fault in a file at which ATC stops, or of which it computes something else, and none in a file
  that ATC takes as it is;
- the route refuses the node by its name, or writes a file of which ATC reads everything. Both ONNX Runtime and what ATC
  makes of the file give the results of the original.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort

from fa_compiler.lowering.ascend.diagnostic import FileDiagnostic, Severity
from fa_compiler.lowering.ascend.onnx_route import UnsupportedModel, lower
from fa_compiler.lowering.ascend.onnx_route.check import check_model
from tools.fuzz.front_end import Perceived, perceived
from tools.fuzz.kind import Finding, Kind, Outcome
from tools.fuzz.variants import Array, Variant, drawn

RANDOM = ("Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike")
"""Operators whose results are compared by type and shape only."""
STOPPING = (Severity.REJECTED, Severity.LATER)
TOLERANCE = {np.dtype(np.float16): 4e-3}
"""Of the largest number: half of float16's digits are lost in a sum of a few numbers. Others have 2e-5."""


class AtcFrontEnd(Kind):
    """One model of one operator."""

    innocent = ("run",)

    def check(self, seed: int) -> Outcome:
        variant = drawn(seed)
        if variant is None or not _is_valid(variant.model):
            return Outcome("skipped")
        wanted = run(variant.model, variant.feeds)
        if wanted is not None and not _is_declared(variant.model, wanted):
            return Outcome("skipped")
        atc = perceived(variant.model)
        if (fault := _misjudged(variant, atc, wanted)) is not None:
            return Outcome("misjudged", _finding(fault, variant, variant.model))
        held = ir.from_proto(variant.model)
        try:
            lower(held)
        except UnsupportedModel as error:
            names = [f"node ({variant.op_type}): ", "the output 'y", "the output 'second_y"]
            if wanted is None:  # what does not run may be refused at a node that reads it
                names += [f"{node.name} ({node.op_type}): " for node in variant.model.graph.node]
            named = all(any(name in problem for name in names) for problem in error.problems)
            title = f"a refusal of {variant.op_type} does not name the node"
            return Outcome("refused", None if named else _finding(title, variant, variant.model, str(error)))
        written = ir.to_proto(held)
        if not _is_valid(written):
            if wanted is None:
                return Outcome("skipped")
            fault: str | None = f"what is written is not valid: {variant.op_type}"
        else:
            written = onnx.shape_inference.infer_shapes(written)
            fault = _miswritten(variant, written, wanted)
        return Outcome("accepted") if fault is None else Outcome("miswritten", _finding(fault, variant, written))


def _is_valid(model: onnx.ModelProto) -> bool:
    try:
        onnx.checker.check_model(model, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError):
        return False
    return True


def _is_declared(model: onnx.ModelProto, results: Sequence[Array]) -> bool:
    """Whether the results have the ranks that ONNX's inference gives them, which is wrong about a few variants."""
    kinds = [value.type.tensor_type for value in model.graph.output]
    ranks = [len(kind.shape.dim) if kind.HasField("shape") else None for kind in kinds]
    return all(rank in (None, result.ndim) for rank, result in zip(ranks, results, strict=True))


def run(model: onnx.ModelProto, feeds: Mapping[str, Array]) -> list[Array] | None:
    """The results in ONNX Runtime without optimisations; None if it does not run the model."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    try:
        session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        return list(session.run(None, {value.name: feeds[value.name] for value in session.get_inputs()}))
    except Exception:  # of ONNX Runtime: they share no class
        return None


def _lacks_kernel(model: onnx.ModelProto) -> bool:
    """Whether ONNX Runtime has no kernel for a type in the opset of the written file. GE's kernels are others."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    try:
        ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # of ONNX Runtime: they share no class
        return "NOT_IMPLEMENTED" in str(error)
    return False


def _misjudged(variant: Variant, atc: Perceived, wanted: list[Array] | None) -> str | None:
    """What `air check` says wrongly of the original."""
    every = check_model(variant.model, None)
    found = [each for each in every if each.severity is not Severity.NOTE]
    stops = any(each.severity in STOPPING for each in found)
    if atc.stops:
        return None if stops else f"air check misses a stop: {_kind(atc.stops)}"
    if atc.differs:
        return None if found else f"air check misses a difference: {_kind(atc.differs)}"
    if atc.is_unjudged:
        return None
    if stops:
        return f"air check invents a stop: {variant.op_type}, {_rules(found)}"
    if atc.is_open:
        return None if every else f"air check says nothing of what is open: {variant.op_type}"
    if atc.is_same:
        return f"air check invents a difference: {variant.op_type}, {_rules(found)}" if found else None
    if found or wanted is None or _are_equal(variant, wanted, run(atc.model, variant.feeds)):
        return None
    return f"air check misses another result: {variant.op_type}"


def _miswritten(variant: Variant, written: onnx.ModelProto, wanted: list[Array] | None) -> str | None:
    """What is wrong with the file that the route wrote."""
    found = [each for each in check_model(written, None) if each.severity is not Severity.NOTE]
    if found:
        return f"air check refuses what is written: {variant.op_type}, {_rules(found)}"
    atc = perceived(written)
    if atc.stops or atc.differs:
        return f"what is written is not taken as it is: {_kind(atc.stops or atc.differs)}"
    if wanted is None or _lacks_kernel(written):
        return None
    if not _are_equal(variant, wanted, run(written, variant.feeds)):
        return f"what is written computes something else: {variant.op_type}"
    if not _are_equal(variant, wanted, run(atc.model, variant.feeds)):
        return f"ATC computes something else of what is written: {variant.op_type}"
    return None


def _are_equal(variant: Variant, wanted: Sequence[Array], got: Sequence[Array] | None) -> bool:
    if got is None or len(got) != len(wanted):
        return False
    return all(_is_equal(left, right, variant.op_type in RANDOM) for left, right in zip(wanted, got, strict=True))


def _is_equal(left: Array, right: Array, is_random: bool) -> bool:
    if (left.dtype, left.shape) != (right.dtype, right.shape):
        return False
    if is_random:
        return True
    if left.dtype.kind != "f":
        return np.array_equal(left, right)
    finite = np.isfinite(left)
    largest = float(np.abs(left[finite].astype(np.float64)).max(initial=1e-3))
    bound = TOLERANCE.get(left.dtype, 2e-5) * largest
    return bool(np.allclose(left, right, rtol=0, atol=bound, equal_nan=True))


def _kind(sentence: str) -> str:
    return "".join("#" if char.isdigit() else char for char in sentence)


def _rules(found: Sequence[FileDiagnostic]) -> str:
    return _kind(f"{found[0].rule}: {found[0].message}")[:90]


def _finding(title: str, variant: Variant, model: onnx.ModelProto, detail: str = "") -> Finding:
    return Finding(title, f"{variant.text}\n{detail}\n{onnx.printer.to_text(model)}", model.SerializeToString())
