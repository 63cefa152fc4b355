"""Products of matrices, softmax and normalisations."""

from __future__ import annotations

from collections.abc import Sequence

from fa_compiler.lowering.ascend.convert.backward.reading import Reading, means
from fa_compiler.lowering.ascend.convert.errors import UnreadableError


def _operand(r: Reading, name: str, adjoint: bool) -> str:
    if not adjoint:
        return r.x(name)
    rank = r.rank(name)
    return r.n("Transpose", r.x(name), perm=[*range(rank - 2), rank - 1, rank - 2])


@means("MatMulV2")
def _matmul(r: Reading) -> str:
    """Two matrices, and a bias that is one vector of the columns."""
    if (r.rank("x1"), r.rank("x2")) != (2, 2):
        raise UnreadableError(f"MatMulV2 '{r.op.name}' multiplies two matrices")
    product = r.n("MatMul", _operand(r, "x1", r.attr("transpose_x1")), _operand(r, "x2", r.attr("transpose_x2")))
    if not r.has("bias"):
        return product
    if r.rank("bias") != 1:
        raise UnreadableError(f"the bias of MatMulV2 '{r.op.name}' is a vector")
    return r.n("Add", product, r.x("bias"))


@means("BatchMatMulV2")
def _batch_matmul(r: Reading) -> str:
    product = r.n("MatMul", _operand(r, "x1", r.attr("adj_x1")), _operand(r, "x2", r.attr("adj_x2")))
    return r.n("Add", product, r.x("bias")) if r.has("bias") else product


@means("SoftmaxV2", "LogSoftmaxV2")
def _softmax(r: Reading) -> str:
    axes = r.attr("axes")
    if len(axes) != 1:
        raise UnreadableError(f"{r.op.type} '{r.op.name}' runs over {len(axes)} axes at once")
    if r.op.type == "SoftmaxV2":
        return r.n("Softmax", r.x("x"), axis=axes[0])
    return r.n("LogSoftmax", r.x("logits"), axis=axes[0])


@means("LayerNorm", "LayerNormV3")
def _layer_norm(r: Reading) -> Sequence[str]:
    """(x - mean) / sqrt(variance + epsilon) over the axes from begin_norm_axis on, times gamma plus beta, which have
    the axes from begin_params_axis on. LayerNorm gives the variance, LayerNormV3 the reciprocal of the root."""
    x = r.x("x")
    begin, params = r.attr("begin_norm_axis"), r.attr("begin_params_axis")
    rank = r.rank("x")
    if r.rank("gamma") != rank - params % rank or r.rank("beta") != rank - params % rank:
        raise UnreadableError(f"{r.op.type} '{r.op.name}': gamma and beta do not have the axes from {params} on")
    axes = r.ints(list(range(begin % rank, rank)))
    mean = r.n("ReduceMean", x, axes)
    centred = r.n("Sub", x, mean)
    variance = r.n("ReduceMean", r.n("Mul", centred, centred), axes)
    epsilon = r.array(r.attr("epsilon"), r.desc("x").dtype)
    rate = r.n("Reciprocal", r.n("Sqrt", r.n("Add", variance, epsilon)))
    y = r.n("Add", r.n("Mul", r.n("Mul", centred, rate), r.x("gamma")), r.x("beta"))
    last = variance if r.op.type == "LayerNorm" else rate
    return y, r.cast(mean, r.out(1).dtype), r.cast(last, r.out(2).dtype)


@means("RmsNorm")
def _rms_norm(r: Reading) -> Sequence[str]:
    """x / sqrt(mean(x^2) + epsilon) times gamma, over gamma's axes, which are the last."""
    x, rank = r.x("x"), r.rank("x")
    axes = r.ints(list(range(rank - r.rank("gamma"), rank)))
    wide = r.cast(x, "DT_FLOAT")
    mean = r.n("ReduceMean", r.n("Mul", wide, wide), axes)
    rate = r.n("Reciprocal", r.n("Sqrt", r.n("Add", mean, r.array(r.attr("epsilon"), "DT_FLOAT"))))
    scaled = r.n("Mul", r.n("Mul", wide, rate), r.cast(r.x("gamma"), "DT_FLOAT"))
    return r.cast(scaled, r.desc("x").dtype), rate
