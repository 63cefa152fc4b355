"""Products of matrices."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

from fa_compiler.lowering.ascend.convert.emit import Tensor
from fa_compiler.lowering.ascend.convert.errors import CannotMapError
from fa_compiler.lowering.ascend.convert.forward.onnx_call import (
    MICROSOFT,
    OnnxCall,
    broadcast,
    handles,
)
from fa_compiler.passes.ops.linear import einsum_terms


def matmul(
    call: OnnxCall, a: Tensor, b: Tensor, adj_a: bool = False, adj_b: bool = False
) -> Tensor:
    """The product over the last two axes; the others broadcast. It is MatMulV2 for two matrices,
    else BatchMatMulV2."""
    shape = None
    if a.shape is not None and b.shape is not None:
        batch = broadcast(a.shape[:-2], b.shape[:-2]) or ()
        shape = (*batch, _sides(a.shape, adj_a)[0], _sides(b.shape, adj_b)[1])
        if len(shape) == 2:
            return call.emitter.op(
                "MatMulV2", a, b, transpose_x1=adj_a, transpose_x2=adj_b, out=a.with_shape(shape)
            )
    return call.emitter.op(
        "BatchMatMulV2", a, b, adj_x1=adj_a, adj_x2=adj_b, out=a.with_shape(shape)
    )


def _sides(shape: tuple[int, ...], flip: bool) -> tuple[int, int]:
    """The rows and columns of a matrix, after its transposition if it is flipped."""
    return (shape[-1], shape[-2]) if flip else (shape[-2], shape[-1])


@handles("MatMul")
def _matmul(call: OnnxCall) -> Tensor:
    """A vector is a row on the left and a column on the right. The added axis is not in the
    result."""
    a, b = call.x(0), call.x(1)
    row, column = a.rank == 1, b.rank == 1
    if row:
        a = call.unsqueeze(a, [0])
    if column:
        b = call.unsqueeze(b, [1])
    product = matmul(call, a, b)
    rank = product.rank
    return call.squeeze(product, [rank - 2] * row + [rank - 1] * column)


@handles("FusedMatMul", "TransposeMatMul", domain=MICROSOFT)
def _fused_matmul(call: OnnxCall) -> Tensor:
    """alpha times the product. transBatch, which moves the first axis, has no counterpart."""
    if call.integer("transBatchA", 0) or call.integer("transBatchB", 0):
        raise CannotMapError(
            "GE has no product whose batch axis is not the first axis", "write a Transpose"
        )
    product = matmul(
        call, call.x(0), call.x(1), bool(call.integer("transA", 0)), bool(call.integer("transB", 0))
    )
    return _scaled(call, product, call.number("alpha", 1.0))


@handles("Gemm")
def _gemm(call: OnnxCall) -> Tensor:
    """alpha a b + beta c. A vector c becomes the bias of MatMulV2 if both factors are 1."""
    a, b = call.x(0), call.x(1)
    flip_a, flip_b = bool(call.integer("transA", 0)), bool(call.integer("transB", 0))
    alpha, beta = call.number("alpha", 1.0), call.number("beta", 1.0)
    out = call.out()
    columns = b.size(0 if flip_b else 1)
    c = call.optional(2)
    if c is not None and alpha == 1 and beta == 1 and columns > 0 and c.shape == (columns,):
        return call.emitter.op(
            "MatMulV2", a, b, c, transpose_x1=flip_a, transpose_x2=flip_b, out=out
        )
    product = call.emitter.op("MatMulV2", a, b, transpose_x1=flip_a, transpose_x2=flip_b, out=out)
    product = _scaled(call, product, alpha)
    return (
        product if c is None else call.emitter.op("Add", product, _scaled(call, c, beta), out=out)
    )


def _scaled(call: OnnxCall, x: Tensor, factor: float) -> Tensor:
    return x if factor == 1 else call.emitter.op("Mul", x, call.like(factor, x), out=x)


@handles("Einsum")
def _einsum(call: OnnxCall) -> Tensor:
    """The operands are contracted one after the other, each pair as one matrix product.

    GE's Einsum takes few types and, after its expansion for a device, few equations.
    """
    terms, wanted = _equation(call)
    if any(len(set(term)) != len(term) for term in [*terms, wanted]):
        raise CannotMapError(
            "an operand names an axis twice", "take the diagonal by other operators"
        )
    tensor, labels = call.x(0), terms[0]
    for place, term in enumerate(terms[1:], start=1):
        later = {*wanted, *(label for following in terms[place + 1 :] for label in following)}
        tensor, labels = _contract(call, (tensor, labels), (call.x(place), term), later)
    tensor, labels = _summed(call, tensor, labels, set(wanted))
    return call.transpose(tensor, [labels.index(label) for label in wanted])


def _equation(call: OnnxCall) -> tuple[list[list[str]], list[str]]:
    """The labels of the axes of each operand, and of the result."""
    terms, result = einsum_terms(call.text("equation", ""))
    ranks = [tensor.rank for tensor in call.present()]
    hidden = [rank - len(term.replace("...", "")) for rank, term in zip(ranks, terms, strict=True)]
    labels = [_spread(term, count) for term, count in zip(terms, hidden, strict=True)]
    return labels, _spread(result, max(hidden))


def _spread(term: str, hidden: int) -> list[str]:
    """The labels of the axes. The axes of an ellipsis are numbered from the last one."""
    before, dots, after = term.partition("...")
    return [*before, *([str(place) for place in range(hidden - 1, -1, -1)] if dots else []), *after]


_Operand = tuple[Tensor, list[str]]


def _contract(call: OnnxCall, a: _Operand, b: _Operand, later: set[str]) -> _Operand:
    """The contraction of two operands. `later` are the labels that are still needed afterwards."""
    (x, xs), (y, ys) = _summed(call, *a, later | set(b[1])), _summed(call, *b, later | set(a[1]))
    shared = [label for label in xs if label in ys]
    for label in shared:
        sizes = {x.size(xs.index(label)), y.size(ys.index(label))} - {-1}
        if len(sizes) > 1:
            raise CannotMapError(
                f"the axis {label} has different sizes", "expand the smaller one before it"
            )
    batch = [label for label in shared if label in later]
    inner = _without(shared, later)
    rows, columns = _without(xs, shared), _without(ys, shared)
    left = _folded(call, x, xs, [*batch, *rows, *inner], len(batch), len(rows))
    right = _folded(call, y, ys, [*batch, *inner, *columns], len(batch), len(inner))
    product = matmul(call, left, right)
    labels = [*batch, *rows, *columns]
    if len(rows) != 1 or len(columns) != 1:
        parts = [_size(call, (x, xs), (y, ys), label) for label in labels]
        product = call.reshape(product, _one_open(parts))
    return product, labels


def _without(labels: Iterable[str], others: Container[str]) -> list[str]:
    """The labels that are not among the others."""
    return [label for label in labels if label not in others]


def _size(call: OnnxCall, a: _Operand, b: _Operand, label: str) -> int | Tensor:
    x, labels = a if label in a[1] else b
    return call.size(x, labels.index(label))


def _one_open(parts: Sequence[int | Tensor]) -> list[int | Tensor]:
    """The sizes, with -1 in place of the only computed size, unless another size is 0."""
    computed = [place for place, part in enumerate(parts) if isinstance(part, Tensor)]
    if len(computed) != 1 or any(part == 0 for part in parts if isinstance(part, int)):
        return list(parts)
    return [-1 if place in computed else part for place, part in enumerate(parts)]


def _summed(call: OnnxCall, x: Tensor, labels: list[str], needed: set[str]) -> _Operand:
    axes = [axis for axis, label in enumerate(labels) if label not in needed]
    if not axes:
        return x, labels
    shape = (
        None
        if x.shape is None
        else tuple(size for axis, size in enumerate(x.shape) if axis not in axes)
    )
    total = call.reduced("ReduceSum", x, call.emitter.ints(axes), x.with_shape(shape))
    return total, [label for label in labels if label in needed]


def _folded(
    call: OnnxCall, x: Tensor, labels: list[str], order: list[str], batch: int, first: int
) -> Tensor:
    """`x` as [batch..., product of the next `first` axes, product of the other axes]."""
    x = call.transpose(x, [labels.index(label) for label in order])
    if first == 1 and len(order) - batch == 2:
        return x
    sizes = [call.size(x, axis) for axis in range(len(order))]
    rows = _product(call, sizes[batch : batch + first])
    columns = _product(call, sizes[batch + first :])
    return call.reshape(x, _one_open([*sizes[:batch], rows, columns]))


def _product(call: OnnxCall, sizes: Sequence[int | Tensor]) -> int | Tensor:
    number = 1
    computed: Tensor | None = None
    for size in sizes:
        if isinstance(size, int):
            number *= size
        else:
            computed = size if computed is None else call.binary("Mul", computed, size)
    if computed is None or number == 1:
        return number if computed is None else computed
    return call.binary("Mul", computed, call.emitter.ints([number]))
