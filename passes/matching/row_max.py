"""The maximum that is subtracted from a row before exponentials; TensorFlow replaces it by 0 where
it is infinite.

    row_max = x.amax(-1, keepdim=True)
    row_max = torch.where(row_max.isfinite(), row_max, 0)

    row_max :=
      1     x
      2   | Where(finite, x, 0)                     0 one number, or as large as x
      3   | Add(Mul(x, b), t)                        b the boolean `finite` as 0 and 1, t = 0 * (not
            finite)
    finite :=
      4     Not(IsInf(x)) | Not(Or(IsInf(x), IsNaN(x)))

Where x is infinite or NaN, the softmax's row is NaN whatever is subtracted, or the row of the
product with the values is.
"""

from __future__ import annotations

import onnx_ir as ir

from fa_compiler.passes.ir.nodes import constant
from fa_compiler.passes.values.patterns import Bind, Number, OneOf, Op, match
from fa_compiler.passes.values.shapes import ShapeInfo

X = Bind("x")
IS_INF, IS_NAN = Op("IsInf", X, plain=True), Op("IsNaN", X, plain=True)
FINITE = Op("Not", OneOf((IS_INF, Op("Or", IS_INF, IS_NAN))), name="finite")  # 4
OPPOSITE = Op("Not", Bind("finite"))
ROW_MAX = OneOf(
    (
        Op("Where", FINITE, X, Bind("zero")),  # 2
        # 3
        Op("Add", Op("Mul", X, Op("Cast", FINITE)), Op("Mul", Number(0.0), Op("Cast", OPPOSITE))),
    )
)


def finite_row_max(value: ir.Value, info: ShapeInfo) -> tuple[ir.Value, tuple[ir.Node, ...]]:
    """The x of a row_max, and the nodes that keep it finite, in order; the value itself where
    nothing does (1)."""
    held = match(ROW_MAX, value, info)
    if held is None or not _is_zero(held.get("zero"), value, held["x"], info):
        return value, ()
    return held["x"], held.nodes


def _is_zero(zero: ir.Value | None, value: ir.Value, x: ir.Value, info: ShapeInfo) -> bool:
    """Cases 2 and 3: is what takes the place of an infinite maximum 0, and does it not enlarge the
    row? None stands for the 0 of case 3."""
    if zero is None:
        return True
    content = constant(zero)
    if content is None or content.any():
        return False
    return content.size == 1 or info.shape(value) == info.shape(x) is not None
