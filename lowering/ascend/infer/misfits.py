"""What an operator refuses. The shape rules of ONNX describe runs that succeed; these checks say
which calls never do.

Some hold for all operators whose inputs have the same names. The others are for one operator or a
few. Each raises InferenceError. Rules of our own (`own.py`) have their checks in themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from math import prod

from fa_compiler.lowering.ascend.graph import UNKNOWN
from fa_compiler.lowering.ascend.infer.facts import (
    InferenceError,
    OpFacts,
    Shape,
    broadcast,
    common_size,
    product,
    shapes_agree,
    sizes_agree,
)
from fa_compiler.op_registry import hcom

Check = Callable[[OpFacts], None]
CHECKS: dict[str, Check] = {}

_ONE_TYPE = (
    ("x1", "x2"),
    ("then", "else"),
    ("x", "updates"),
    ("data", "updates"),
    ("input", "updates"),
)
"""Pairs of inputs that have one type in every operator but those of `_MIXED`."""

_MIXED = ("Pow", "AddN", "ConcatD", "AddLayerNorm")

_SCALARS = {
    "axis",
    "delta",
    "depth",
    "dimension",
    "k",
    "limit",
    "num_segments",
    "split_dim",
    "start",
}
"""Inputs that are one integer in every operator."""

_BROADCAST = (
    *(
        "Add",
        "Sub",
        "Mul",
        "RealDiv",
        "TruncateDiv",
        "FloorDiv",
        "FloorMod",
        "Mod",
        "Pow",
        "Minimum",
        "Maximum",
    ),
    *("BitwiseAnd", "BitwiseOr", "BitwiseXor", "LogicalAnd", "LogicalOr", "SelectV2", "AddN"),
    *("Equal", "NotEqual", "Greater", "GreaterEqual", "Less", "LessEqual"),
    *("SoftmaxGrad", "TanhGrad", "SigmoidGrad", "GeluGradV2", "GeluGrad"),
)
"""Operators whose inputs broadcast together."""

_AXES = {
    **dict.fromkeys(("Squeeze", "GatherV2", "OneHot"), "axis"),
    **dict.fromkeys(("ArgMaxV2", "ArgMin"), "dimension"),
    "ConcatD": "concat_dim",
    "SplitD": "split_dim",
    "TopK": "dim",
}
"""The attribute or input of an operator that names axes of its first tensor, if it is not called
axes. OneHot names a new axis, and so do the Unsqueezes."""

_COUNTS = {"PadV3": ("paddings", 2), "Resize": ("sizes", 1), "Tile": ("multiples", 1)}
"""The input of an operator that has one number, or a pair of them, for each axis of x."""

MOST_PARTS = 1 << 16
"""The most parts of a Split; a file may hold any number."""


def check(call: OpFacts) -> None:
    """Raise InferenceError for an operator that cannot take its inputs."""
    _check_types(call)
    for name in sorted(_SCALARS & call.inputs.keys()):
        call.integer(name)
    _check_axes(call)
    _check_counts(call)
    if call.op.type in _BROADCAST:
        broadcast(*(fact.shape for fact in call.inputs.values()))
    if call.op.type in CHECKS:
        CHECKS[call.op.type](call)


def _check_types(call: OpFacts) -> None:
    for one, other in _ONE_TYPE if call.op.type not in _MIXED else ():
        left, right = call.x(one).dtype, call.x(other).dtype
        if left and right and left != right:
            raise InferenceError(
                f"{one} is {left} and {other} {right}; GE does not convert between them"
            )


def _check_axes(call: OpFacts) -> None:
    name = _AXES.get(call.op.type, "axes")
    shape, axes = call.first.shape, call.axes(name)
    if shape is None or axes is None:
        return
    new = len(axes) if call.op.type.startswith("Unsqueeze") else int(call.op.type == "OneHot")
    for axis in axes:
        call.axis(axis, len(shape) + new, "axis" if name == "axes" else name)


def _check_counts(call: OpFacts) -> None:
    name, each = _COUNTS.get(call.op.type, ("", 1))
    shape, numbers = call.x().shape, call.ints(name)
    if shape is not None and numbers is not None and len(numbers) != each * len(shape):
        raise InferenceError(f"{len(numbers)} {name} do not match {len(shape)} axes")


def _refuses(*op_types: str) -> Callable[[Check], Check]:
    def enter(function: Check) -> Check:
        CHECKS.update(dict.fromkeys(op_types, function))
        return function

    return enter


@_refuses("SelectV2")
def _selections(call: OpFacts) -> None:
    if call.x("condition").dtype not in ("", "DT_BOOL"):
        raise InferenceError(f"its condition is {call.x('condition').dtype}, not DT_BOOL")


@_refuses("MatMulV2", "BatchMatMulV2", "MatMul", "BatchMatMul")
def _products(call: OpFacts) -> None:
    left, right, bias = call.x("x1").shape, call.x("x2").shape, call.x("bias").shape
    batched = call.op.type.startswith("Batch")
    if left is None or right is None:
        return
    if min(len(left), len(right)) < 2 or (not batched and (len(left), len(right)) != (2, 2)):
        raise InferenceError(
            f"{call.op.type} takes no tensors of ranks {len(left)} and {len(right)}"
        )
    first, second = ("adj_x1", "adj_x2") if batched else ("transpose_x1", "transpose_x2")
    inner = left[-2 if call.attr(first) else -1]
    other, columns = right[:-3:-1] if call.attr(second) else right[-2:]
    if not sizes_agree(inner, other):
        raise InferenceError(
            f"x1 {list(left)} and x2 {list(right)} share no axis: {inner} and {other}"
        )
    if bias is not None and not sizes_agree(bias[-1] if bias else 1, columns):
        raise InferenceError(f"its bias has the shape {list(bias)}, its result {columns} columns")
    broadcast(left[:-2], right[:-2])


@_refuses("Conv2D", "Conv3DV2")
def _convolutions(call: OpFacts) -> None:
    x, weight, groups = call.x().shape, call.x("filter").shape, call.attr("groups")
    strides, pads, dilations = (list(call.attr(name)) for name in ("strides", "pads", "dilations"))
    if x is None or weight is None or call.attr("data_format") not in ("NCHW", "NCDHW"):
        return
    ranks = {len(x), len(weight), len(strides), len(dilations)}
    if len(ranks) > 1 or len(x) < 3 or len(pads) != 2 * len(x) - 4:
        raise InferenceError(
            f"x has rank {len(x)}, filter {len(weight)}, strides {len(strides)}, pads {len(pads)}"
        )
    if min(strides) < 1:
        raise InferenceError(f"the strides are {strides}")
    common_size(x[1], weight[1] * groups if weight[1] >= 0 else UNKNOWN)
    _check_windows(x, weight, pads, dilations)


@_refuses("AvgPoolV2", "MaxPoolV3")
def _pools(call: OpFacts) -> None:
    x = call.x().shape
    ksize, strides, pads = (list(call.attr(name)) for name in ("ksize", "strides", "pads"))
    plain = call.attr("padding_mode") == "CALCULATED" and call.attr("data_format") == "NCHW"
    if x is None or not plain or call.attr("global_pooling") or call.attr("ceil_mode"):
        return
    if {len(x), len(ksize), len(strides), len(pads)} != {4} or min(strides) < 1:
        raise InferenceError(f"x has rank {len(x)}, ksize {ksize}, strides {strides}, pads {pads}")
    _check_windows(x, ksize, pads, [1] * 4)


def _check_windows(
    x: Sequence[int], kernel: Sequence[int], pads: Sequence[int], dilations: Sequence[int]
) -> None:
    """The axes are NCHW or NCDHW. The pads are a pair (beginning, end) for each axis."""
    for axis in range(2, len(x)):
        padded = x[axis] + sum(pads[2 * axis - 4 : 2 * axis - 2])
        if (
            UNKNOWN not in (x[axis], kernel[axis])
            and (kernel[axis] - 1) * dilations[axis] + 1 > padded
        ):
            raise InferenceError(f"a window of {kernel[axis]} does not fit an axis of {x[axis]}")


@_refuses("GatherV2")
def _places(call: OpFacts) -> None:
    rows, indices = call.x().value, call.x("indices").value
    if rows is None or indices is None or call.integer("axis") != 0:
        return
    places = [None if item is None else int(item) for item in indices.flat]
    if any(place is not None and not -len(rows) <= place < len(rows) for place in places):
        raise InferenceError(f"an index of {places} is outside an axis of {len(rows)}")


@_refuses("GatherElements")
def _index(call: OpFacts) -> None:
    x, index = call.x().shape, call.x("index").shape
    if x is not None and index is not None and len(x) != len(index):
        raise InferenceError(f"x has rank {len(x)}, index {len(index)}")


@_refuses("GatherNd")
def _depths(call: OpFacts) -> None:
    x, indices = call.x().shape, call.x("indices").shape
    if x is not None and indices and indices[-1] > len(x):
        raise InferenceError(f"{indices[-1]} indices do not match {len(x)} axes")


@_refuses("UnsortedSegmentSum")
def _segments(call: OpFacts) -> None:
    x, ids = call.x().shape, call.x("segment_ids").shape
    if x is not None and ids is not None and not shapes_agree(x[: len(ids)], ids):
        raise InferenceError(f"segment_ids have the shape {list(ids)}, x {list(x)}")


@_refuses("Reshape")
def _elements(call: OpFacts) -> None:
    """A shape with a 0 and without a -1 is not checked."""
    x, wanted = call.x().shape, call.ints("shape")
    if wanted is None or call.attr("axis") != 0 or call.attr("num_axes") != -1:
        return
    if wanted.count(-1) > 1:
        raise InferenceError(f"the shape {wanted} has -1 twice")
    total, rest = UNKNOWN if x is None else product(x), prod(size for size in wanted if size != -1)
    fits = rest <= 0 or total % rest == 0 if -1 in wanted else total == rest or 0 in wanted
    if total >= 0 and not fits:
        raise InferenceError(f"{total} elements do not fill the shape {wanted}")


@_refuses("BroadcastTo")
def _broadcast(call: OpFacts) -> None:
    x, target = call.x().shape, call.ints("shape")
    if x is None or target is None:
        return
    if len(target) < len(x) or not shapes_agree(broadcast(x, tuple(target)), tuple(target)):
        raise InferenceError(f"the shape {list(x)} cannot become {target}")


@_refuses("Transpose")
def _permutation(call: OpFacts) -> None:
    rank, perm = call.x().rank, call.ints("perm")
    if rank is None or perm is None:
        return
    if sorted(axis + rank if axis < 0 else axis for axis in perm) != list(range(rank)):
        raise InferenceError(f"perm {perm} is not a permutation of {rank} axes")


@_refuses("Squeeze", "SqueezeV3")
def _dropped(call: OpFacts) -> None:
    shape, axes = call.x().shape, call.axes(_AXES.get(call.op.type, "axes"))
    for axis in axes or ():
        if shape is not None and shape[axis] not in (1, UNKNOWN):
            raise InferenceError(
                f"axis {axis % len(shape)} of size {shape[axis]} cannot be dropped"
            )


@_refuses("ConcatD")
def _parts(call: OpFacts) -> None:
    facts = call.dynamic("x")
    if len(facts) != call.attr("N"):
        raise InferenceError(f"N is {call.attr('N')}, and there are {len(facts)} inputs")
    if len({fact.dtype for fact in facts} - {""}) > 1:
        raise InferenceError(
            f"its inputs have different types: {', '.join(fact.dtype for fact in facts)}"
        )
    shapes = [fact.shape for fact in facts if fact.shape is not None]
    ranks = list(dict.fromkeys(map(len, shapes)))
    if len(ranks) > 1:
        raise InferenceError(f"its inputs have ranks {ranks[0]} and {ranks[1]}")
    for axis, sizes in enumerate(zip(*shapes, strict=True)):
        if axis != call.attr("concat_dim") % ranks[0]:
            reduce(common_size, sizes)


@_refuses("SplitD")
def _equal_parts(call: OpFacts) -> None:
    x, count = call.x().shape, call.attr("num_split")
    if not 1 <= count <= MOST_PARTS:
        raise InferenceError(f"num_split is {count}")
    if x is not None and x[call.attr("split_dim")] > 0 and x[call.attr("split_dim")] % count:
        raise InferenceError(f"an axis of {x[call.attr('split_dim')]} has no {count} equal parts")


@_refuses("StridedSliceV2")
def _bounds(call: OpFacts) -> None:
    axes = call.ints("axes") if "axes" in call.inputs else call.ints("begin")
    lists = [
        numbers for name in ("begin", "end", "strides") if (numbers := call.ints(name)) is not None
    ]
    if axes is not None and any(len(numbers) != len(axes) for numbers in lists):
        bounds = ", ".join(str(len(numbers)) for numbers in lists)
        raise InferenceError(f"it has {len(axes)} axes, and {bounds} bounds")
    if 0 in (call.ints("strides") or ()):
        raise InferenceError("a stride is 0")


@_refuses("Range")
def _steps(call: OpFacts) -> None:
    if call.integer("delta") == 0:
        raise InferenceError("its delta is 0")


@_refuses("TopK")
def _largest(call: OpFacts) -> None:
    x, count, axis = call.x().shape, call.integer("k"), call.attr("dim")
    if x is not None and count is not None and count > x[axis] >= 0:
        raise InferenceError(f"an axis of {x[axis]} has no {count} largest elements")


@_refuses("RmsNorm", "GemmaRmsNorm", "AddRmsNorm", "LayerNormV4", "AddLayerNorm")
def _weights(call: OpFacts) -> None:
    name = "x1" if call.op.type.startswith("Add") else "x"
    x = call.x(name).shape
    if x is None:
        return
    for weight in ("gamma", "beta"):
        own = call.x(weight).shape
        if own is not None and (len(own) > len(x) or not shapes_agree(x[len(x) - len(own) :], own)):
            raise InferenceError(f"{weight} has the shape {list(own)}, {name} {list(x)}")
    if name == "x1" and not shapes_agree(x, other := call.x("x2").shape):
        raise InferenceError(f"x2 has the shape {list(other or ())}, x1 {list(x)}")


@_refuses("LayerNormV3")
def _normalised_axes(call: OpFacts) -> None:
    x = call.x().shape
    if x is not None:
        for name in ("begin_norm_axis", "begin_params_axis"):
            call.axis(call.attr(name), len(x), name)
    _weights(call)


@_refuses("ApplyRotaryPosEmb", "RotaryPositionEmbedding", "RotaryMul", "InterleaveRope")
def _tables(call: OpFacts) -> None:
    first, second = ("r1", "r2") if call.op.type == "RotaryMul" else ("cos", "sin")
    cos, sin = (call.x(name).shape for name in (first, second))
    if not shapes_agree(cos, sin):
        raise InferenceError(f"{first} has the shape {list(cos or ())}, {second} {list(sin or ())}")
    for name in ("query", "key") if call.op.type == "ApplyRotaryPosEmb" else ("x",):
        _fit_table(first, cos, name, call.x(name).shape)


def _fit_table(table: str, own: Shape, name: str, shape: Shape) -> None:
    """Raise InferenceError where a table does not broadcast to what it rotates along the last
    axis."""
    if own is None or shape is None:
        return
    fits = len(shape) == len(own) > 0 and all(
        a == 1 or sizes_agree(a, b) for a, b in zip(own, shape, strict=True)
    )
    if not fits or not sizes_agree(own[-1], shape[-1]):
        raise InferenceError(f"{table} has the shape {list(own)}, {name} {list(shape)}")


@_refuses("SwiGlu", "GeGluV2", "ClippedSwiglu")
def _halves(call: OpFacts) -> None:
    x, dim = call.x().shape, call.attr("dim")
    if x is None:
        return
    if not -len(x) <= dim < len(x):
        raise InferenceError(f"dim is {dim}, x has {len(x)} axes")
    if x[dim] % 2 and x[dim] != UNKNOWN:
        raise InferenceError(f"x has the shape {list(x)}, which has no halves along the axis {dim}")


@_refuses(hcom.ALL_GATHER)
def _ranks(call: OpFacts) -> None:
    if call.attr("rank_size") < 1:
        raise InferenceError(f"rank_size is {call.attr('rank_size')}")
    if call.x().shape == ():
        raise InferenceError("it cannot gather a scalar")
