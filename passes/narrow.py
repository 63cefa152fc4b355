"""A tensor that is the same along a dimension, computed once along it instead of everywhere.

Older exporters expand a padding mask over the query rows before they cast, invert and combine it, so that every step
works on S x S elements. Grammar of what is proven constant along dimension d, from a value upwards:

    constant := Expand(x)                       x has 1 in d, and the result's sizes elsewhere: narrowed, it is x
              | op(operands)                    element by element, every operand constant along d or 1 there

Narrowed, the same operators run on the narrowed operands: the elements are the same by construction.
"""

from __future__ import annotations

import onnx_ir as ir

from fa_compiler.passes.build import Builder
from fa_compiler.passes.nodes import is_op
from fa_compiler.passes.shapes import ShapeInfo

ELEMENTWISE = (
    "Abs",
    "Add",
    "And",
    "Cast",
    "Div",
    "Equal",
    "Greater",
    "GreaterOrEqual",
    "Identity",
    "Less",
    "LessOrEqual",
    "Max",
    "Min",
    "Mul",
    "Neg",
    "Not",
    "Or",
    "Sub",
    "Where",
    "Xor",
)
MAX_DEPTH = 24


def is_constant_along(value: ir.Value, axis: int, info: ShapeInfo, depth: int = 0) -> bool:
    """Is the value, whose dimension `axis` is not 1, proven to be the same all along it?"""
    node, shape = value.producer(), info.shape(value)
    if node is None or shape is None or depth > MAX_DEPTH:
        return False
    if is_op(node, "Expand"):
        source = node.inputs[0]
        own = None if source is None else info.shape(source)
        if own is None or len(own) != len(shape) or own[axis].const != 1:
            return False
        return all(k == axis or a == b for k, (a, b) in enumerate(zip(own, shape, strict=True)))
    if not is_op(node, *ELEMENTWISE):
        return False
    for operand in node.inputs:
        own = None if operand is None else info.shape(operand)
        if operand is None or own is None:
            return False
        place = axis - (len(shape) - len(own))
        if place >= 0 and own[place].const != 1 and not is_constant_along(operand, place, info, depth + 1):
            return False
    return True


def narrowed(value: ir.Value, axis: int, builder: Builder) -> ir.Value:
    """The value with a dimension of 1 in place of `axis`, along which it is proven constant."""
    info, node = builder.info, value.producer()
    shape = info.shape(value)
    assert node is not None and shape is not None
    if is_op(node, "Expand"):
        assert node.inputs[0] is not None
        return node.inputs[0]
    operands: list[ir.Value | None] = []
    for operand in node.inputs:
        assert operand is not None
        own = info.shape(operand)
        assert own is not None
        place = axis - (len(shape) - len(own))
        operands.append(narrowed(operand, place, builder) if place >= 0 and own[place].const != 1 else operand)
    attrs = {name: attr.value for name, attr in node.attributes.items()}
    return builder.op(node.op_type, operands, info.dtype(value), attrs)
