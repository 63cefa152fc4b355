"""Gelu, and GeGLU: Gelu of one tensor times another one, in the spellings of exporters.

    y = torch.nn.functional.gelu(gate, approximate="none" or "tanh") * up

Grammar; the code cites the numbers of the cases, and gates.py says where gate and up come from:

    gelu :=
      1     Gelu(gate)                     of ONNX, exact or by tanh; or of com.microsoft, which has
                                           the exact one
      2   | FastGelu(gate)                 of com.microsoft, without a bias: by tanh
      3   | 0.5 gate + 0.5 gate share      as a polynomial of the two: by any order of sums and
                                           products
    share :=
      4     Erf(gate / sqrt 2)             the argument is this polynomial
      5   | Tanh(sqrt(2 / pi) (gate + 0.044715 gate^3))      the argument is this polynomial
    result :=
      6     Mul(gelu, up)                  of one shape and one type: nothing is broadcast; GeGluV2
      7   | gelu                           as in 3: GeluV2. As in 1 and 2 it is one operator
                                           already, and stays

The factors of the polynomials are those numbers, but for the roundings of the model's type. So x *
sigmoid(1.702 x) is another function, and so is an Erf of another argument.

GeGluV2 rounds Gelu to the type of x, and then the product. So does a model of 16 bits that has Gelu
as one operator. One that has it written out rounds inside of Gelu as well, and the report says so.
There gate * (1 + share) may overflow in float16, where the operator does not. That all numbers are
finite is assumed for Ascend; without this assumption 16 bits are declined. A Gelu of 0 may have
another sign than in the model, which a quotient by it shows as another infinity: a written out Gelu
that something is divided by stays without this assumption.

Two tensors are joined with the gate behind, which is the operator's default. A Gelu that anything
but the product reads is no part of GeGluV2.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import pi, sqrt

import onnx_ir as ir

from fa_compiler.passes.answer.decline import Decline
from fa_compiler.passes.answer.options import NON_FINITE_SCORES, Options
from fa_compiler.passes.answer.report import Code
from fa_compiler.passes.around.gates import multiplied, source
from fa_compiler.passes.around.polynomials import Polynomials, Terms, are_close
from fa_compiler.passes.around.records import Activation, expect_finite, is_float
from fa_compiler.passes.ir.nodes import (
    SIXTEEN_BITS,
    data_readers,
    is_op,
    only_reader,
    operand_at,
    operands,
    text_attr,
)
from fa_compiler.passes.values.patterns import is_closed
from fa_compiler.passes.values.shapes import ShapeInfo

CONTRIB = (("com.microsoft", "Gelu"), ("com.microsoft", "FastGelu"))
_ROOT = sqrt(2 / pi)
# 4 and 5
_ARGUMENTS: dict[str, Terms] = {
    "Erf": {(1,): sqrt(0.5)},
    "Tanh": {(1,): _ROOT, (3,): 0.044715 * _ROOT},
}
_GELU: Terms = {(1, 0): 0.5, (1, 1): 0.5}  # 3
_SPACING = {
    ir.DataType.FLOAT: 2.0**-23,
    ir.DataType.FLOAT16: 2.0**-10,
    ir.DataType.BFLOAT16: 2.0**-7,
}
"""How far numbers of a type are apart, relative to them: the product of two rounded factors is no
farther off."""
LONGEST = 4
"""The products and sums from the share to Gelu."""


@dataclass(frozen=True)
class Gelu:
    """Gelu of a tensor, exact or by tanh, and the nodes that compute it, the last one the maker of
    the result."""

    gate: ir.Value
    result: ir.Value
    nodes: tuple[ir.Node, ...]
    is_exact: bool
    is_written_out: bool = False


def is_anchor(node: ir.Node) -> bool:
    """May this be a Gelu, or the share in one?"""
    return is_op(node, "Gelu", *_ARGUMENTS) or (node.domain, node.op_type) in CONTRIB


def activations(node: ir.Node, info: ShapeInfo, options: Options) -> list[Activation]:
    """The activations around a Gelu, the gated one first; none where there are none. Raises
    Decline."""
    gelu = gelu_at(node, info)
    if gelu is None:
        return []
    gated = _gated(node, gelu, info)
    if gated is None and not gelu.is_written_out:
        return []
    dtype = is_float(gelu.gate, info, node)
    if not is_closed(gelu.nodes):
        raise Decline(
            Code.READ_INSIDE, "a number inside of the Gelu is read elsewhere, or is an output", node
        )
    expect_finite(dtype, options, node)
    found = [] if gated is None else [gated]
    if gelu.is_written_out:  # 7
        attrs = {"approximate": "none" if gelu.is_exact else "tanh"}
        narrow = dtype in SIXTEEN_BITS
        found.append(
            Activation(node, "GeluV2", attrs, (gelu.gate,), gelu.result, gelu.nodes, narrow)
        )
    return [
        one for one in found if not gelu.is_written_out or not _may_show_sign(one.result, options)
    ]


def _may_show_sign(value: ir.Value, options: Options) -> bool:
    """Is something divided by a value, and need the quotient not be finite? Its sign is that of a
    0."""
    if options.target == "ascend" and NON_FINITE_SCORES not in options.assume:
        return False
    return any(
        is_op(reader, "Reciprocal", "Pow")
        or (is_op(reader, "Div") and operand_at(reader, 1) is value)
        for reader in data_readers(value)
    )


def _gated(node: ir.Node, gelu: Gelu, info: ShapeInfo) -> Activation | None:
    """The gated activation with a Gelu; None where there is none."""
    gate, product = gelu.gate, multiplied(gelu.result, gelu.gate, info)  # 6
    if product is None:
        return None
    last, up = product
    nodes = (*gelu.nodes, last)
    found, dtype = source(gate, up, nodes, info), info.dtype(gate)
    if found is None or info.dtype(up) != dtype:
        return None
    attrs = {"dim": found.dim, "approximate": int(not gelu.is_exact)}
    attrs["activate_left"] = found.whole is not None and found.gate_first
    given = (up, gate) if found.whole is None else (found.whole,)
    rounded = gelu.is_written_out and dtype in SIXTEEN_BITS
    return Activation(
        node, "GeGluV2", attrs, given, last.outputs[0], (*found.nodes, *nodes), rounded
    )


def gelu_at(node: ir.Node, info: ShapeInfo) -> Gelu | None:
    """The Gelu at an anchor; None where this is another function."""
    gate, result = operand_at(node, 0), node.outputs[0]
    if is_op(node, "Gelu"):  # 1
        form = text_attr(node, "approximate", "none")
        return Gelu(gate, result, (node,), form == "none") if form in ("none", "tanh") else None
    if (node.domain, node.op_type) in CONTRIB:  # 1 and 2
        with_bias = len(node.inputs) > 1 and bool(operand_at(node, 1).name)
        return None if with_bias else Gelu(gate, result, (node,), node.op_type == "Gelu")
    return _written_out(node, info)


def _written_out(share: ir.Node, info: ShapeInfo) -> Gelu | None:
    """The Gelu around a share; None where the argument or what follows is another polynomial."""
    dtype = info.dtype(share.outputs[0])
    if dtype not in _SPACING:
        return None
    tolerance = _SPACING[dtype]
    argument, wanted = operand_at(share, 0), _ARGUMENTS[share.op_type]
    for gate in _candidates(argument):
        inside = Polynomials((gate,), info)
        terms = inside.of(argument)
        if terms is not None and are_close(terms, wanted, tolerance):
            return _around(share, gate, inside.nodes, info, tolerance)
    return None


def _candidates(argument: ir.Value) -> list[ir.Value]:
    """What the argument of a share may be a polynomial of: the operands of the nodes that compute
    it, the nearest first."""
    found, level = [], [argument]
    for _ in range(LONGEST):
        level = [operand for value in level for operand in operands(value.producer())]
        found += [value for value in level if value not in found]
    return found


def _around(
    share: ir.Node, gate: ir.Value, inside: list[ir.Node], info: ShapeInfo, tolerance: float
) -> Gelu | None:
    """The Gelu with this share of this gate; None where what follows is something else."""
    value = share.outputs[0]
    for _ in range(LONGEST):
        reader = only_reader(value)
        if reader is None:
            return None
        value, outside = reader.outputs[0], Polynomials((gate, share.outputs[0]), info)
        terms = outside.of(value)
        if terms is None:
            return None
        if are_close(terms, _GELU, tolerance) and info.shape(value) == info.shape(gate):
            nodes = dict.fromkeys((*inside, share, *outside.nodes[::-1]))
            return Gelu(gate, value, tuple(nodes), share.op_type == "Erf", is_written_out=True)
    return None
