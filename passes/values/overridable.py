"""Initializers that a caller may replace, because they are inputs of the model, too: they may be
the cause of a decline."""

from __future__ import annotations

import onnx_ir as ir

from fa_compiler.passes.answer.decline import Decline
from fa_compiler.passes.answer.report import Code
from fa_compiler.passes.ir.nodes import inputs_of, is_overridable
from fa_compiler.passes.values.shapes import ShapeInfo

ABOUT_SHAPES = (Code.RANK, Code.SHAPE, Code.AXIS)
ABOUT_NUMBERS = (Code.SCALE, Code.SCORE_TERM, Code.PROBABILITY_TERM, Code.MASK_VALUE)
MAX_STEPS = 200


def replaceable_cause(decline: Decline, info: ShapeInfo) -> ir.Value | None:
    """The overridable initializer that is the cause of a decline; None where there is none.

    It is an input of the culprit. If the decline is about an unknown rank or size, it may also be a
    tensor of integers that a node above the culprit reads, where every value between the two has an
    unknown size.
    """
    culprit = decline.culprit
    if culprit is None or decline.code not in (*ABOUT_SHAPES, *ABOUT_NUMBERS):
        return None
    own = next((value for value in culprit.inputs if is_overridable(value)), None)
    if own is not None or decline.code not in ABOUT_SHAPES:
        return own
    return _unknown_sizes_from(culprit, info)


def _unknown_sizes_from(culprit: ir.Node, info: ShapeInfo) -> ir.Value | None:
    """An overridable tensor of integers above a node, behind values of unknown sizes alone; None
    without one."""
    pending, seen = [culprit], {culprit}
    while pending and len(seen) < MAX_STEPS:
        for value in inputs_of(pending.pop()):
            if is_overridable(value) and value.dtype in (ir.DataType.INT64, ir.DataType.INT32):
                return value
            maker = value.producer()
            if maker is not None and maker not in seen and _has_unknown_sizes(value, info):
                seen.add(maker)
                pending.append(maker)
    return None


def _has_unknown_sizes(value: ir.Value, info: ShapeInfo) -> bool:
    shape = info.shape(value)
    return shape is None or not all(size.is_known for size in shape)
