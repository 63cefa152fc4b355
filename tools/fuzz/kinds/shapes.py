"""The shapes of other kinds' models, compared with those of another inference: the package onnx-shape-inference.

Both read the model with the shapes of its inputs alone. Where both know a rank, or a size as a number, and differ, a
run of the model decides who is right. A model that does not run has no shapes. What only one of them knows is no fault,
and neither is a size with a name: each inference names what it does not know.
"""

from __future__ import annotations

import importlib
import logging
from typing import Any

import onnx
import onnx_ir as ir

from fa_compiler.passes.algebra.symbolic import Dim
from fa_compiler.passes.ir.nodes import all_nodes
from fa_compiler.passes.values.shapes import analyse
from tools.fuzz.difference import run_original, session
from tools.fuzz.kind import Finding, Kind, Outcome
from tools.fuzz.oracle import Judge
from tools.fuzz.reduction import judge_of_others

KINDS = ("compose", "spellings", "tested", "mutate", "gradients", "ready_made")
PACKAGE = "onnx_shape_inference"


class Shapes(Kind):
    """A model of another kind. Without the package every case is skipped."""

    innocent = ("_inferred", "run_original")

    def __init__(self) -> None:
        logging.getLogger(PACKAGE).setLevel(logging.CRITICAL)
        try:
            self.other: Any = importlib.import_module(PACKAGE)
        except ImportError:
            self.other = None

    def check(self, seed: int) -> Outcome:
        made = judge_of_others(KINDS, seed) if self.other is not None else None
        if made is None:
            return Outcome("skipped")
        try:
            model = ir.from_proto(made.model)
        except ir.serde.SerdeError:
            return Outcome("skipped")
        values = [value for node in all_nodes(model.graph) for value in node.outputs]
        for value in values:
            value.shape = None
        info = analyse(model)
        ours = {value: info.shape(value) for value in values}
        if not _inferred(self.other, model):
            return Outcome("no answer")
        inner = {value for value in values if _is_inner(value, model)}
        for value in values:
            shape = ours[value]
            if value in inner or shape is None or value.shape is None or not _differ(shape, value.shape):
                continue
            real = _shape_in_a_run(made, value.name or "")
            if real is None:
                return Outcome("no run")
            if _differ(shape, ir.Shape(real)):
                producer = value.producer()
                title = f"a wrong shape of {'' if producer is None else producer.op_type}"
                detail = (
                    f"{value.name}: {list(map(str, shape))}, {value.shape} by the package, {real} in a run\n{made.note}"
                )
                return Outcome("wrong", Finding(title, detail, made.model.SerializeToString()))
        return Outcome("accepted")


def _inferred(package: Any, model: ir.Model) -> bool:
    """Write the package's shapes into a model; False where the package gives up."""
    try:
        package.infer_symbolic_shapes(model, warn_on_missing=False)
    except Exception:  # of the package: its rules raise what they like
        return False
    return True


def _is_inner(value: ir.Value, model: ir.Model) -> bool:
    """Is a value in a graph inside of a node, where no run shows it?"""
    producer = value.producer()
    return producer is None or producer.graph is not model.graph


def _shape_in_a_run(made: Judge, name: str) -> tuple[int, ...] | None:
    """The shape that a value has where the model runs; None where it does not run."""
    shown = onnx.ModelProto()
    shown.CopyFrom(made.model)
    del shown.graph.output[:]
    shown.graph.output.append(onnx.ValueInfoProto(name=name))
    feed = next(iter(made.feeds() if callable(made.feeds) else made.feeds))
    try:
        return tuple(run_original(session(shown, custom=False), feed.arrays)[0].shape)
    except Exception:  # of ONNX Runtime: they share no class
        return None


def _differ(ours: tuple[Dim, ...], theirs: ir.Shape) -> bool:
    """Have two shapes another rank, or another number for a size that both know?"""
    if len(ours) != len(theirs):
        return True
    pairs = zip(ours, theirs, strict=True)
    return any(isinstance(other, int) and own.const not in (None, other) for own, other in pairs)
