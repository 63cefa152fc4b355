"""Products of matrices."""

from __future__ import annotations

from fa_compiler.lowering.ascend.convert.backward.ge_call import GeCall, handles
from fa_compiler.lowering.ascend.convert.errors import UnreadableError


def _operand(call: GeCall, name: str, adjoint: bool) -> str:
    if not adjoint:
        return call.x(name)
    rank = call.rank(name)
    return call.node("Transpose", call.x(name), perm=[*range(rank - 2), rank - 1, rank - 2])


@handles("MatMulV2")
def _matmul(call: GeCall) -> str:
    """The product of two matrices, plus a bias with one element for each column."""
    if (call.rank("x1"), call.rank("x2")) != (2, 2):
        raise UnreadableError(f"MatMulV2 '{call.op.name}' multiplies two matrices")
    product = call.node(
        "MatMul",
        _operand(call, "x1", call.attr("transpose_x1")),
        _operand(call, "x2", call.attr("transpose_x2")),
    )
    if not call.has("bias"):
        return product
    if call.rank("bias") != 1:
        raise UnreadableError(f"the bias of MatMulV2 '{call.op.name}' is a vector")
    return call.node("Add", product, call.x("bias"))


@handles("BatchMatMulV2")
def _batch_matmul(call: GeCall) -> str:
    product = call.node(
        "MatMul",
        _operand(call, "x1", call.attr("adj_x1")),
        _operand(call, "x2", call.attr("adj_x2")),
    )
    return call.node("Add", product, call.x("bias")) if call.has("bias") else product
