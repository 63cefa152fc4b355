"""The local forms of operators that compute each token by itself.

Each rule says for which demands it holds:

    moves            any whose dimensions in the inputs are known by the form of the move; of Gather
                     and its kin the sequence is among the indices, or a dimension of the data that
                     is not looked up
    elementwise      any; an operand that has 1 where the result has the sequence is whole
    along axes       norms, softmaxes, sums, sorting: over other dimensions than the sequence's
    products         rows of the left or columns of the right operand of a MatMul or Gemm, a batch
                     dimension of both; the letter of an Einsum that is in its result
    Conv             windows of one token, of step 1 and without padding
    rotation         tokens that have a position each
    quantisation     one scale, or scales along other dimensions

A demand that is not in this list is refused, or taken out of the whole value (sharder.py).
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from fa_compiler.passes.algebra.symbolic import Dim
from fa_compiler.passes.ir.nodes import (
    STANDARD,
    input_of,
    int_attr,
    ints_attr,
    is_op,
    places_of,
    text_attr,
    without_none,
)
from fa_compiler.passes.ops.contrib import POINTWISE_CONTRIB
from fa_compiler.passes.ops.elementwise import POINTWISE, drops_nothing
from fa_compiler.passes.ops.movers import MOVES
from fa_compiler.passes.ops.moves import move_of
from fa_compiler.passes.ops.parts import concat_of
from fa_compiler.passes.ops.reduce import (
    ALONG_AXES,
    ARGUMENTS,
    LAYER_NORMS,
    REDUCTIONS,
    axes_combined,
)
from fa_compiler.passes.parallel.places import Place, Refusal
from fa_compiler.passes.parallel.sharder import INT64, Sharder, local_rule
from fa_compiler.passes.values.positions import Positions

MIXES = "it mixes the sequence"


def needed(node: ir.Node, index: int) -> ir.Value:
    """An input that the operator requires."""
    value = input_of(node, index)
    if value is None:
        raise Refusal(f"input {index} is absent", node)
    return value


def size_at(sharder: Sharder, node: ir.Node, output: int, place: Place) -> tuple[int, Dim]:
    """The rank of an output and the size of its dimension at the place."""
    shape = sharder.shape(node.outputs[output], node)
    return len(shape), shape[place.dim]


@local_rule(*MOVES)
def carried(sharder: Sharder, node: ir.Node, output: int, place: Place) -> ir.Value:
    """The dimensions of the inputs that become the sequence's, by the form of the move
    (ops/moves.py).

    Moves that have sizes among their inputs have rules of their own, which replace this one.
    """
    move = move_of(node, sharder.settled)
    along = None if move is None else move.operands_along(place.dim, sharder.settled)
    if not along:
        raise Refusal("it is not proven which dimension of its input is the sequence", node)
    return _with_local(sharder, node, place, along).outputs[output]


@local_rule(*POINTWISE, *POINTWISE_CONTRIB)
def elementwise(sharder: Sharder, node: ir.Node, output: int, place: Place) -> ir.Value:
    """Each element of the result is made of one element of each operand."""
    rank, size = size_at(sharder, node, output, place)
    inputs = [sharder.aligned(value, place, rank, size, node) for value in node.inputs]
    return sharder.clone(node, inputs).outputs[output]


@local_rule("Dropout")
def dropout(sharder: Sharder, node: ir.Node, output: int, place: Place) -> ir.Value:
    """A Dropout that drops nothing; any other draws other numbers on each rank."""
    if not drops_nothing(node):
        raise Refusal("a Dropout of training draws random numbers", node)
    return _with_first_local(sharder, node, place).outputs[output]


@local_rule("CastLike")
def cast_like(sharder: Sharder, node: ir.Node, output: int, place: Place) -> ir.Value:
    """A Cast to the known type of the second input."""
    dtype = sharder.info.dtype(node.outputs[0])
    if dtype is None:
        raise Refusal("the type of its result is unknown", node)
    attrs: dict[str, int] = {"to": int(dtype)}
    if int_attr(node, "saturate", 1) == 0:
        attrs["saturate"] = 0
    return sharder.op("Cast", [sharder.local(needed(node, 0), place, node)], attrs)


def _with_first_local(sharder: Sharder, node: ir.Node, place: Place) -> ir.Node:
    """The node for the rank's part of its first input and all of the others."""
    return _with_local(sharder, node, place, {0: place.dim})


def _with_local(sharder: Sharder, node: ir.Node, place: Place, dims: Mapping[int, int]) -> ir.Node:
    """The node for the rank's part of the inputs of these numbers, which have the sequence in these
    dimensions, and all of the others."""
    forms: list[ir.Value | None] = []
    for number, value in enumerate(node.inputs):
        if number in dims:
            forms.append(sharder.local(needed(node, number), place.at(dims[number]), node))
        else:
            forms.append(None if value is None else sharder.whole(value, node))
    return sharder.clone(node, forms)


@local_rule(*ALONG_AXES)
def along_one_axis(sharder: Sharder, node: ir.Node, output: int, place: Place) -> ir.Value:
    """Operators along one axis, or along this axis and those behind it."""
    rank = len(sharder.shape(needed(node, 0), node))
    axes = axes_combined(node, rank, sharder.opset, sharder.info)
    if axes is None:
        raise Refusal("its axis is unknown", node)
    if place.dim in axes:
        raise Refusal(f"{MIXES}, along axis {axes.start}", node)
    if node.op_type in LAYER_NORMS:
        weights = without_none(node.inputs[1:])
        if any(len(sharder.shape(value, node)) > len(axes) for value in weights):
            raise Refusal("its weights may differ along the sequence", node)
    return _with_first_local(sharder, node, place).outputs[output]


@local_rule("GlobalAveragePool", "GlobalMaxPool")
def pooled_features(sharder: Sharder, node: ir.Node, output: int, place: Place) -> ir.Value:
    """A mean or maximum over the dimensions behind the second one."""
    if place.dim > 1:
        raise Refusal(f"{MIXES}, along axis {place.dim}", node)
    return _with_first_local(sharder, node, place).outputs[output]


@local_rule("SkipLayerNormalization", "SkipSimplifiedLayerNormalization")
def skip_norm(sharder: Sharder, node: ir.Node, output: int, place: Place) -> ir.Value:
    """A norm over the last axis of the sum of two tensors, the second of which may be broadcast."""
    rank, size = size_at(sharder, node, 0, place)
    if place.dim == rank - 1:
        raise Refusal(f"{MIXES}, along its last axis", node)
    both = [sharder.aligned(needed(node, index), place, rank, size, node) for index in (0, 1)]
    return sharder.clone(node, [*both, *sharder.wholes(node, 2)]).outputs[output]


@local_rule(*REDUCTIONS, *ARGUMENTS)
def reduction(sharder: Sharder, node: ir.Node, output: int, place: Place) -> ir.Value:
    """A reduction over other dimensions."""
    source = needed(node, 0)
    rank = len(sharder.shape(source, node))
    axes = reduced_axes(sharder, node, rank)
    kept = [dim for dim in range(rank) if int_attr(node, "keepdims", 1) or dim not in axes]
    dim = kept[place.dim]
    if dim in axes:
        raise Refusal(f"{MIXES}, along axis {dim}", node)
    return _with_first_local(sharder, node, place.at(dim)).outputs[output]


def reduced_axes(sharder: Sharder, node: ir.Node, rank: int) -> list[int]:
    """The axes that a reduction reduces. Raises Refusal where they are unknown."""
    if is_op(node, *ARGUMENTS):
        return [int_attr(node, "axis", 0) % rank]
    axes = places_of(node, rank)
    if axes is None and input_of(node, 1) is not None:
        raise Refusal("its axes are unknown", node)
    if axes:
        return axes
    if int_attr(node, "noop_with_empty_axes", 0) == 1:
        return []
    return list(range(rank))


@local_rule("MatMul", "MatMulInteger", "FusedMatMul")
def matrix_product(sharder: Sharder, node: ir.Node, output: int, place: Place) -> ir.Value:
    """Rows of the left operand, columns of the right one, or a batch dimension."""
    left, right = needed(node, 0), needed(node, 1)
    ranks = [len(sharder.shape(operand, node)) for operand in (left, right)]
    rank, size = size_at(sharder, node, output, place)
    if min(ranks) < 2 and (ranks[1] != 1 or ranks[0] < 2):
        raise Refusal("one of its operands is a vector", node)
    flags = ("transA", "transB", "transBatchA", "transBatchB")
    if node.op_type == "FusedMatMul" and any(int_attr(node, flag, 0) for flag in flags):
        raise Refusal("it transposes its operands", node)
    if ranks[1] == 1:
        forms = (sharder.local(left, place, node), sharder.whole(right, node))
    elif place.dim == rank - 1:
        forms = (sharder.whole(left, node), sharder.local(right, place.at(ranks[1] - 1), node))
    elif place.dim == rank - 2:
        forms = (sharder.local(left, place.at(ranks[0] - 2), node), sharder.whole(right, node))
    else:
        both = [sharder.aligned(operand, place, rank, size, node) for operand in (left, right)]
        return sharder.clone(node, [*both, *sharder.wholes(node, 2)]).outputs[output]
    zeros = sharder.wholes(node, 2)
    for value in node.inputs[2:4]:
        if value is not None and sharder.shape(value, node):
            raise Refusal("its zero points have a dimension", node)
    return sharder.clone(node, [*forms, *zeros]).outputs[output]


@local_rule("MatMulNBits")
def packed_product(sharder: Sharder, node: ir.Node, output: int, place: Place) -> ir.Value:
    """A product with weights of a few bits: rows of the left operand."""
    rank, _ = size_at(sharder, node, output, place)
    if place.dim == rank - 1:
        raise Refusal("the sequence is among its columns", node)
    return _with_first_local(sharder, node, place).outputs[output]


@local_rule("Gemm")
def gemm(sharder: Sharder, node: ir.Node, output: int, place: Place) -> ir.Value:
    """Rows of the left operand or columns of the right one, with the addend broadcast."""
    _, size = size_at(sharder, node, output, place)
    left, right = needed(node, 0), needed(node, 1)
    if place.dim == 0:
        forms = [
            sharder.local(left, place.at(int_attr(node, "transA", 0)), node),
            sharder.whole(right, node),
        ]
    else:
        forms = [
            sharder.whole(left, node),
            sharder.local(right, place.at(1 - int_attr(node, "transB", 0)), node),
        ]
    addend = sharder.aligned(input_of(node, 2), place, 2, size, node)
    if addend is not None:
        forms.append(addend)
    return sharder.clone(node, forms).outputs[output]


@local_rule("Einsum")
def einsum(sharder: Sharder, node: ir.Node, output: int, place: Place) -> ir.Value:
    """The sequence's letter is in the result, so nothing is summed over it. An operand may have 1
    in its place."""
    equation = text_attr(node, "equation", "").replace(" ", "")
    terms, arrow, result = equation.partition("->")
    operands = terms.split(",")
    if not arrow or "." in equation or len(operands) != len(node.inputs):
        raise Refusal("its equation has no result or an ellipsis", node)
    letter = result[place.dim]
    _, size = size_at(sharder, node, output, place)
    forms = []
    for index, term in enumerate(operands):
        if term.count(letter) > 1:
            raise Refusal("it takes a diagonal", node)
        value = needed(node, index)
        here = term.find(letter)
        aligned = here >= 0 and sharder.aligned(value, place.at(here), len(term), size, node)
        forms.append(aligned or sharder.whole(value, node))
    return sharder.clone(node, forms).outputs[output]


@local_rule("ScatterElements")
def scatter_elements(sharder: Sharder, node: ir.Node, output: int, place: Place) -> ir.Value:
    """Along other dimensions than the axis, data, indices and updates walk together."""
    shapes = [sharder.shape(needed(node, index), node) for index in range(3)]
    axis = int_attr(node, "axis", 0) % len(shapes[0])
    if place.dim == axis or any(shape[place.dim] != shapes[0][place.dim] for shape in shapes):
        raise Refusal(f"{MIXES}, or its updates are shorter than its data", node)
    return _with_local(sharder, node, place, dict.fromkeys(range(3), place.dim)).outputs[output]


@local_rule("OneHot")
def one_hot(sharder: Sharder, node: ir.Node, output: int, place: Place) -> ir.Value:
    """A new dimension, at the axis, for the number that an index stands for."""
    indices = needed(node, 0)
    rank = len(sharder.shape(indices, node)) + 1
    axis = int_attr(node, "axis", -1) % rank
    if place.dim == axis:
        raise Refusal("the sequence is the range of its numbers", node)
    dim = place.dim - (place.dim > axis)
    return _with_first_local(sharder, node, place.at(dim)).outputs[output]


@local_rule("RotaryEmbedding")
def rotary(sharder: Sharder, node: ir.Node, output: int, place: Place) -> ir.Value:
    """Each token of [B, S, ..] or [B, N, S, D] is turned by the row of the tables that its position
    names, or by its own row of tables [B, S, ..]."""
    tokens = len(sharder.shape(needed(node, 0), node)) - 2
    tables, positions = ((1, 2), 3) if node.domain in STANDARD else ((2, 3), 1)
    given = input_of(node, positions)
    if place.dim != tokens:
        raise Refusal("the sequence is not among its tokens", node)
    if int_attr(node, "is_packed_batching", 0) or (
        given is not None and len(sharder.shape(given, node)) != 2
    ):
        raise Refusal("it counts the positions of its tokens by itself", node)
    rows = tables if given is None else (positions,)
    return _with_local(sharder, node, place, {0: tokens, **dict.fromkeys(rows, 1)}).outputs[output]


@local_rule("Conv")
def convolution(sharder: Sharder, node: ir.Node, output: int, place: Place) -> ir.Value:
    """A window of one token, of step 1 and without padding, is a projection."""
    weight = sharder.shape(needed(node, 1), node)
    spatial = place.dim - 2
    if place.dim == 1:
        raise Refusal("the sequence is among its channels", node)
    if spatial >= 0:
        width = len(weight) - 2
        steps, padding = (
            ints_attr(node, "strides", [1] * width),
            ints_attr(node, "pads", [0] * (2 * width)),
        )
        padded = padding[spatial] or padding[spatial + len(steps)]
        padded = padded or text_attr(node, "auto_pad", "NOTSET") not in ("NOTSET", "VALID")
        if weight[place.dim].const != 1 or steps[spatial] != 1 or padded:
            raise Refusal(f"{MIXES}: its window is longer than one token", node)
    return _with_first_local(sharder, node, place).outputs[output]


@local_rule("QuantizeLinear", "DequantizeLinear")
def quantisation(sharder: Sharder, node: ir.Node, output: int, place: Place) -> ir.Value:
    """One scale for the tensor, or one for each index of another dimension."""
    source, scale = needed(node, 0), needed(node, 1)
    rank, scales = len(sharder.shape(source, node)), sharder.shape(scale, node)
    single = all(size.const == 1 for size in scales)
    if not single and (len(scales) != 1 or int_attr(node, "axis", 1) % rank == place.dim):
        raise Refusal("its scales may differ along the sequence", node)
    return _with_first_local(sharder, node, place).outputs[output]


@local_rule("Range")
def number_range(sharder: Sharder, node: ir.Node, output: int, place: Place) -> ir.Value:
    """Range(start, limit, step) at the rank's positions is start + positions * step."""
    start, _, step = (sharder.whole(needed(node, index), node) for index in range(3))
    (size,) = sharder.shape(node.outputs[0], node)
    dtype = sharder.info.dtype(node.outputs[0])
    if size != sharder.length or dtype not in (INT64, ir.DataType.INT32):
        raise Refusal(
            "its length is not proven to be that of the sequence, or it counts in floats", node
        )
    positions, _, _ = sharder.part
    return sharder.add(start, sharder.mul(sharder.cast(positions, dtype), step))


@local_rule("ConstantOfShape")
def filled(sharder: Sharder, node: ir.Node, output: int, place: Place) -> ir.Value:
    """One number everywhere: only the size changes."""
    rank, _ = size_at(sharder, node, output, place)
    return sharder.clone(
        node, [sharder.part_of_target(needed(node, 0), place.dim, rank, node)]
    ).outputs[output]


@local_rule("ScatterND")
def scatter_nd(sharder: Sharder, node: ir.Node, output: int, place: Place) -> ir.Value:
    """Updates of whole slices, where the sequence is a dimension behind those that the indices
    name; or updates of each token by itself, where the indices along the sequence count its
    tokens."""
    data, indices, updates = (needed(node, index) for index in range(3))
    width = sharder.shape(indices, node)[-1].const
    rank, _ = size_at(sharder, node, output, place)
    if width is None:
        raise Refusal("the length of its indices is unknown", node)
    if place.dim < width:
        own, dim = _own_indices(sharder, node, indices, place.dim, width)
    else:
        own, dim = (
            sharder.whole(indices, node),
            len(sharder.shape(updates, node)) - rank + place.dim,
        )
    forms = [sharder.local(data, place, node), own, sharder.local(updates, place.at(dim), node)]
    return sharder.clone(node, forms).outputs[output]


def _own_indices(
    sharder: Sharder, node: ir.Node, indices: ir.Value, part: int, width: int
) -> tuple[ir.Value, int]:
    """The indices [.., width] of the rank's part, where entry `part` counts the tokens along one of
    their dimensions, and this dimension. The indices are a Concat of one entry [.., 1] for each
    dimension that they name."""
    joined, rank = concat_of(indices.producer(), sharder.info), len(sharder.shape(indices, node))
    if joined is None or not joined.is_last or len(joined.parts) != width:
        raise Refusal(f"{MIXES}: it writes to places along the sequence", node)
    if (dim := _counts_along(sharder, joined.parts[part])) is None:
        raise Refusal(f"{MIXES}: it writes to places along the sequence", node)
    forms = [sharder.local(entry, Place(dim), node) for entry in joined.parts]
    _, _, count = sharder.part
    line = sharder.reshape(sharder.range(count), [-1] + [1] * (rank - 1 - dim))
    forms[part] = sharder.add(sharder.mul(forms[part], sharder.number(0)), line)
    return sharder.clone(joined.node, forms).outputs[0], dim


def _counts_along(sharder: Sharder, entry: ir.Value) -> int | None:
    """The dimension along which an entry of indices counts the tokens of the sequence from 0; None
    if it does not."""
    shape = sharder.settled.shape(entry)
    if shape is None or sharder.info.dtype(entry) != INT64:
        return None
    positions = Positions(sharder.info, shape)
    number, index = positions.number(entry, positions.identity_index), positions.identity_index
    return next(
        (dim for dim, size in enumerate(shape) if size == sharder.length and index[dim] == number),
        None,
    )
