"""The blocks that tests/around_composer.py puts together: norms, gated activations and rotary positions.

A block draws how it is spelt. What `choice` has as its second list is a near miss: it computes something else.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from math import pi, sqrt
from typing import Any

import numpy as np
import onnx

from tests.around_composer import MICROSOFT, Composer, Misfit, Shape, Size, Tensor

POSITIONS = 7
"""The rows of a table of cosines."""
WRONG = 0.12
"""So often a place of a block has a near miss."""
OFTEN = ("norm", "norm", "rotary", "clipped")
"""The blocks with the most places are drawn more often."""
EPSILONS = (1e-5, 1e-6, 1e-3, 0.0, 1.0)
NO_EPSILONS = (-1e-5, float("inf"), float("nan"))
GELU = {"Erf": sqrt(0.5), "Tanh": sqrt(2 / pi)}
CUBE = 0.044715
LIMITS = (1.0, 7.0, 0.5)
MOST = 2
"""Blocks of one model."""


def compose(seed: int) -> tuple[onnx.ModelProto, list[str]]:
    """A model of a few blocks, and words that say what it is made of."""
    rng = random.Random(seed)
    made = Composer(
        rng,
        opset=rng.choice([13, 15, 17, 18, 20, 21, 23, 24]),
        batch=rng.choice(["B", "B", 1, 2]),
        tokens=rng.choice(["S", "S", 1, 3, 4]),
        width=rng.choice([8, 4, 4, 2, 1, 3, 6]),
    )
    names = [*BLOCKS, *OFTEN]
    while len(made.pool) < MOST:
        made.wrong, made.misses = WRONG, rng.choice([0, 0, 1, 1, 1, 2])
        kind = rng.choice(names)
        with made.trial():
            made.words.append(f"{kind}:")
            made.pool.append(BLOCKS[kind](made))
    return made.model(), made.words


# -- norms ------------------------------------------------------------------------------------------


def norm(c: Composer) -> Tensor:
    """A norm that is written out, in float32, of what may be of 16 bits."""
    dtype = c.rng.choice(["float", "float", "float", "half", "bfloat"])
    x = _summed(c, dtype)
    wide = x if dtype == "half" and c.goes_wrong("squares of 16 bits") else _widened(c, x)
    centred = c.maybe()
    if centred and dtype == "half" and c.maybe(0.3):
        rows = c.cast(_difference(c, x), "float")
    else:
        rows = _difference(c, wide) if centred else wide
    if centred and rows.dtype == "float" and c.maybe(0.2):
        return _multiplied_out(c, wide, rows)
    return _ends(c, _normalised(c, rows, _again(c, x, wide, rows, centred)), dtype, centred)


def _again(c: Composer, x: Tensor, wide: Tensor, rows: Tensor, centred: bool) -> Tensor:
    """The rows, or now and then the same ones, computed once more."""
    if wide.dtype != "float" or not c.maybe(0.15):
        return rows
    if centred:
        return _difference(c, wide)
    return c.cast(x, "float") if rows is wide and x is not wide else rows


def _widened(c: Composer, x: Tensor) -> Tensor:
    """A tensor in float32."""
    return c.cast(x, "float") if x.dtype != "float" or c.maybe(0.1) else x


def _summed(c: Composer, dtype: str) -> Tensor:
    """What is normalised: a tensor, or a sum."""
    x = c.hidden(dtype)
    if dtype == "bfloat" or c.maybe():
        return x
    shapes: list[Shape] = [x.shape[-1:], (1, *x.shape[1:]), (*x.shape[:-1], 1), ()]
    other = c.hidden(dtype, c.choice([x.shape], shapes))
    total = c.any_order("Add", x, x if c.maybe(0.05) else other)
    if c.maybe(0.2):
        total = c.any_order("Add", total, c.hidden(dtype, total.shape))
    if c.maybe():
        c.pool.append(total)
    return total


def _difference(c: Composer, x: Tensor) -> Tensor:
    """A tensor without its mean."""
    of = c.hidden(x.dtype, x.shape) if c.goes_wrong("the mean of another tensor") else x
    mean = c.reduced(of, -1)
    return c.both("Sub", mean, x) if c.goes_wrong("the mean without it") else c.both("Sub", x, mean)


def _squared(c: Composer, x: Tensor) -> Tensor:
    way = c.choice(["Mul", "Pow"], ["Pow 3", "product", "Abs"])
    if way == "Mul":
        return c.both("Mul", x, x)
    if way == "product":
        return c.both("Mul", x, c.hidden(x.dtype, x.shape))
    if way == "Abs":
        return c.op("Abs", x, like=x)
    return c.both("Pow", x, c.number(2.0 if way == "Pow" else 3.0, x))


def _floor(c: Composer, x: Tensor) -> Tensor:
    """The mean of the squares, with epsilon."""
    mean = c.reduced(_squared(c, x), -1, c.choice(["ReduceMean"], ["ReduceSum", "ReduceMax", "ReduceL2"]))
    if c.maybe(0.1):
        return mean
    epsilon = c.number(c.choice(EPSILONS, NO_EPSILONS), mean)
    return c.any_order(c.choice(["Add"], ["Max", "Mul"]), mean, epsilon)


def _rate(c: Composer, floor: Tensor) -> Tensor:
    """One over the root."""
    if c.maybe(0.25):
        return c.both("Pow", floor, c.number(-0.5, floor))
    root = _root(c, floor)
    if c.maybe():
        return c.op("Reciprocal", root, like=root)
    one = c.number(1.0, root)
    return c.both("Div", root, one) if c.goes_wrong("the root over 1") else c.both("Div", one, root)


def _root(c: Composer, floor: Tensor) -> Tensor:
    if c.maybe(0.2):
        return c.both("Pow", floor, c.number(0.5, floor))
    root = c.op(c.choice(["Sqrt"], ["Abs", "Exp"]), floor, like=floor)
    return c.any_order("Add", root, c.number(1e-3, root)) if c.goes_wrong("epsilon behind the root") else root


def _normalised(c: Composer, x: Tensor, again: Tensor) -> Tensor:
    """Rows divided by the root of the mean of their squares."""
    if c.goes_wrong("another tensor is divided"):
        again = c.hidden(x.dtype, x.shape)
    floor = _floor(c, x)
    if c.maybe(0.3):
        root = _root(c, floor)
        return c.both("Div", root, again) if c.goes_wrong("the root over x") else c.both("Div", again, root)
    return c.any_order(c.choice(["Mul"], ["Add", "Div"]), again, _rate(c, floor))


def _multiplied_out(c: Composer, x: Tensor, rows: Tensor) -> Tensor:
    """x * (rate * gamma) + (beta - mean * (rate * gamma)), as TensorFlow writes a LayerNorm."""
    rank, dtype, size = len(x.shape), x.dtype, x.shape[-1]
    rate = _rate(c, _floor(c, rows))
    gamma, beta = (c.vector(size, dtype, rank) for _ in range(2))
    scale = c.any_order("Mul", rate, gamma)
    made = [node for node in c.nodes if node.op_type in ("ReduceMean", "GlobalAveragePool")]
    mean = Tensor(made[-2].output[0], dtype, (*x.shape[:-1], 1)) if len(made) > 1 else c.reduced(x, -1)
    own = c.any_order("Mul", mean, scale)
    shift = c.both("Sub", own, beta) if c.goes_wrong("the other sign") else c.both("Sub", beta, own)
    return c.any_order("Add", c.any_order("Mul", x, scale), shift)


def _ends(c: Composer, rows: Tensor, dtype: str, centred: bool) -> Tensor:
    """Normalised rows with their weights, and the cast back to 16 bits at any place."""
    steps: list[str] = ["weight"] if c.maybe(0.85) else []
    if (centred and c.maybe(0.8)) or c.goes_wrong("a bias"):
        steps.append("bias")
    if dtype == "bfloat":
        steps += ["back"] if c.maybe(0.8) else []
    elif dtype != "float" and rows.dtype == "float" and c.maybe(0.9):
        steps.insert(c.rng.randint(0, len(steps)), "back")
    elif c.maybe(0.1):
        steps.insert(0, "idle")
    if c.goes_wrong("another order"):
        c.rng.shuffle(steps)
    types = {"back": c.choice([dtype], ["half", "bfloat", "double"]), "idle": rows.dtype}
    for step in steps:
        if step in types:
            rows = c.cast(rows, types[step])
        elif rows.dtype == "bfloat":
            raise Misfit
        else:
            rows = _weighted(c, rows, step, dtype)
    return rows


def _weighted(c: Composer, rows: Tensor, step: str, dtype: str) -> Tensor:
    """Rows with a weight or a bias, which may be cast from the narrow type."""
    rank, size = len(rows.shape), rows.shape[-1]
    if dtype in ("half", "bfloat") and rows.dtype == "float" and c.maybe(0.4):
        weight = c.cast(c.vector(size, c.choice([dtype], ["half", "bfloat"]), rank), "float")
    elif c.goes_wrong("a whole tensor as a weight"):
        weight = c.hidden(rows.dtype, rows.shape)
    else:
        weight = c.vector(size, rows.dtype, rank)
    right, wrong = ("Mul", ["Add", "Div"]) if step == "weight" else ("Add", ["Sub", "Mul"])
    return c.any_order(c.choice([right], wrong), rows, weight)


def ready_norm(c: Composer) -> Tensor:
    """A norm that is one operator."""
    names = ["SimplifiedLayerNormalization"]
    names += ["LayerNormalization"] * (c.opset >= 17) + ["RMSNormalization"] * (c.opset >= 23)
    name, dtype = c.rng.choice(names), c.rng.choice(["float", "float", "half"])
    x = _summed(c, dtype)
    rank = len(x.shape)
    other = "half" if dtype == "float" else "float"
    takes_any = name == "SimplifiedLayerNormalization"
    weight = c.vector(x.shape[-1], c.choice([dtype], [other]) if takes_any else dtype, 1, wrong=False)
    given = [x, c.op("Unsqueeze", weight, c.ints(0), like=weight) if c.goes_wrong("a weight of two axes") else weight]
    if name == "LayerNormalization" and c.maybe():
        given.append(c.vector(x.shape[-1], dtype, 1, wrong=False))
    attrs: dict[str, Any] = {"epsilon": c.choice(EPSILONS, NO_EPSILONS)} if c.maybe(0.8) else {}
    if name == "SimplifiedLayerNormalization" or c.maybe():
        attrs["axis"] = c.choice([-1, rank - 1], [0, -2] if rank > 1 else [])
    if attrs.get("axis", -1) not in (-1, rank - 1):
        shape = x.shape[attrs["axis"] % rank :]
        if not all(isinstance(dim, int) for dim in shape):
            raise Misfit
        given[1:] = [c.stored(c.array([int(dim) for dim in shape]).astype(np.float32)) for _ in given[1:]]
        if dtype != "float":
            raise Misfit
    if c.maybe(0.2):
        attrs["stash_type"] = 1
    count = 2 if name != "RMSNormalization" and c.goes_wrong("the statistics") else 1
    made = c.several(name, count, given, Tensor("", weight.dtype, x.shape), **attrs)
    if count > 1 and dtype == "float":
        c.outputs.append(made[1])
    return made[0]


def skip_norm(c: Composer) -> Tensor:
    """A norm of a sum that is one operator of ONNX Runtime."""
    name = c.rng.choice(["SkipLayerNormalization", "SkipSimplifiedLayerNormalization"])
    dtype = c.rng.choice(["float", "float", "half"])
    shapes: list[Shape] = [(c.batch, c.tokens, c.width)] * 3 + [(c.tokens, c.width)]
    x = c.hidden(dtype, c.rng.choice(shapes))
    narrower: list[Shape] = [(1, *x.shape[1:]), x.shape[1:]] if len(x.shape) == 3 else []
    skip = c.hidden(dtype, c.choice([x.shape], narrower))
    given: list[Tensor | None] = [x, skip, c.vector(c.width, dtype, 1, wrong=False)]
    if name == "SkipLayerNormalization":
        given.append(c.vector(c.width, dtype, 1, wrong=False) if c.maybe(0.7) else None)
    if c.maybe(0.3):
        given.append(c.vector(c.width, dtype, 1, wrong=False))
    while given[-1] is None:
        given.pop()
    attrs = {"epsilon": c.choice(EPSILONS, NO_EPSILONS)} if c.maybe(0.8) else {}
    whole = c.maybe()
    made = c.several(name, 4 if whole else 1, given, x, MICROSOFT, (1, 2), **attrs)
    if whole:
        c.pool.append(made[3])
    return made[0]


# -- activations ------------------------------------------------------------------------------------


def swiglu(c: Composer) -> Tensor:
    """SwiGLU, or what is like it."""
    dtype = c.rng.choice(["float", "float", "half"])
    gate, up = _gate_and_up(c, dtype)
    return _times(c, _swish(c, gate), up)


def geglu(c: Composer) -> Tensor:
    """GeGLU, or what is like it."""
    dtype = c.rng.choice(["float", "float", "half"])
    gate, up = _gate_and_up(c, dtype)
    return _times(c, _gelu(c, gate), up)


def gelu(c: Composer) -> Tensor:
    """A Gelu alone."""
    return _gelu(c, c.hidden(c.rng.choice(["float", "float", "half"])))


def clipped(c: Composer) -> Tensor:
    """The clipped SwiGLU of gpt-oss, or what is like it."""
    dtype = c.rng.choice(["float", "float", "half"])
    gate, up = _gate_and_up(c, dtype, c.maybe())
    limit = c.choice(LIMITS, [-1.0, 0.0, float("inf")])
    gate = _clip(c, gate, c.choice([None], [-limit, 0.5]), limit)
    up = _clip(c, up, -limit, c.choice([limit], [None, 2 * limit]))
    inner = c.any_order("Mul", gate, c.number(c.choice([1.702, 1.0]), gate)) if c.maybe(0.8) else gate
    share = c.op(c.choice(["Sigmoid"], ["Tanh", "Relu"]), inner, like=inner)
    swish = c.any_order("Mul", c.hidden(dtype, gate.shape) if c.goes_wrong("the share of another") else gate, share)
    factor = c.any_order("Add", up, c.number(c.choice([1.0, 0.5]), up)) if c.maybe(0.8) else up
    return c.any_order("Mul", swish, factor)


def _clip(c: Composer, value: Tensor, low: float | None, high: float | None) -> Tensor:
    """A value between two bounds, by one node or by two."""
    bounds = {"Max": low, "Min": high}
    if c.maybe():
        given = [None if bound is None else _bound(c, bound, value) for bound in bounds.values()]
        return c.op("Clip", value, *given, like=value)
    ways = [way for way, bound in bounds.items() if bound is not None]
    c.rng.shuffle(ways)
    for way in ways:
        bound = bounds[way]
        assert bound is not None
        number = c.number(bound, value)
        more = [c.number(0.25, value)] if c.goes_wrong("a third tensor") else []
        shape = c.broadcast(value.shape, number.shape)
        for one in more:
            shape = c.broadcast(shape, one.shape)
        value = c.op(way, value, number, *more, like=Tensor("", value.dtype, shape))
    return value


def _bound(c: Composer, number: float, like: Tensor) -> Tensor:
    value = c.number(number, like)
    if value.shape:
        raise Misfit
    return value


def _gate_and_up(c: Composer, dtype: str, paired: bool = False) -> tuple[Tensor, Tensor]:
    """The gate of an activation, and what it multiplies."""
    way = c.rng.choice(["halves", "halves", "products", "tensors"])
    if paired or way == "halves":
        shapes: list[Shape] = [(c.batch, c.tokens, 2 * c.width), (c.tokens, 2 * c.width), (2, c.tokens, c.width)]
        shape = c.rng.choice(shapes)
        x = c.hidden(dtype, shape)
        axes = [axis for axis, size in enumerate(shape) if isinstance(size, int) and size > 1]
        axis = c.rng.choice([axis - len(shape) for axis in axes] if c.maybe(0.3) else [-1])
        parts = c.pairs(x) if paired else c.halves(x, axis)
        if c.maybe(0.3):
            parts.reverse()
        if c.goes_wrong("a half is read elsewhere"):
            c.pool.append(c.op("Abs", parts[0], like=parts[0]))
        return parts[0], parts[1]
    like = c.hidden(dtype, c.rng.choice([(c.batch, c.tokens, c.width), (c.tokens, c.width)]))
    if way == "tensors":
        return like, c.hidden(dtype, like.shape)
    width = c.rng.choice([2, 4])
    widths = (width, c.choice([width], [1]))
    gate, up = (_product(c, like, size) for size in widths)
    return gate, up


def _product(c: Composer, x: Tensor, width: int) -> Tensor:
    """A tensor times a weight, with a bias or without."""
    shape = (int(c.width), width)
    if x.dtype != "float":
        weight = c.stored(c.array(shape).astype(np.float16))
    else:
        weight = c.stored(c.array(shape).astype(np.float32))
    made = c.op("MatMul", x, weight, like=Tensor("", x.dtype, (*x.shape[:-1], width)))
    return c.any_order("Add", made, c.vector(width, x.dtype, 1, wrong=False)) if c.maybe(0.3) else made


def _times(c: Composer, one: Tensor, other: Tensor) -> Tensor:
    """The product of an activation with what it is the gate of."""
    if c.goes_wrong("the same factor"):
        other = one
    if c.goes_wrong("another factor"):
        other = c.hidden(one.dtype, c.choice([one.shape], [(1,), one.shape[-1:], ()]))
    return c.any_order(c.choice(["Mul"], ["Add", "Div"]), one, other)


def _swish(c: Composer, gate: Tensor) -> Tensor:
    if c.opset >= 24 and c.maybe(0.3):
        attrs = {"alpha": c.choice([1.0], [1.702, -1.0])} if c.maybe() else {}
        return c.op("Swish", gate, like=gate, **attrs)
    inner = c.both("Mul", gate, c.number(1.702, gate)) if c.goes_wrong("1.702") else gate
    share = c.op(c.choice(["Sigmoid"], ["Tanh", "HardSigmoid"]), inner, like=inner)
    other = c.hidden(gate.dtype, gate.shape) if c.goes_wrong("the share of another tensor") else gate
    return c.any_order("Mul", other, share)


def _gelu(c: Composer, x: Tensor) -> Tensor:
    """A Gelu in any spelling."""
    way = c.rng.choice(["ready"] if c.maybe(0.3) else ["Erf", "Tanh"])
    if way != "ready":
        return _written_out(c, x, way)
    names = ["com.microsoft.Gelu", "com.microsoft.FastGelu"] + ["Gelu"] * (c.opset >= 20)
    name = c.rng.choice(names)
    if name == "Gelu":
        attrs = {"approximate": c.rng.choice(["none", "tanh"])} if c.maybe() else {}
        return c.op("Gelu", x, like=x, **attrs)
    given = [x]
    if name.endswith("FastGelu") and c.goes_wrong("a bias inside"):
        given.append(c.vector(x.shape[-1], x.dtype, 1, wrong=False))
    return c.op(name.rpartition(".")[2], *given, like=x, domain=MICROSOFT)


def _written_out(c: Composer, x: Tensor, share: str) -> Tensor:
    curve = c.op(c.choice([share], ["Sigmoid", "Sin"]), _argument(c, x, share), like=x)
    one = c.number(1.0, curve)
    gate = c.hidden(x.dtype, x.shape) if c.goes_wrong("another gate") else x
    way = c.rng.choice(["half last", "half first", "half share", "sum"])
    if way == "sum":
        half = _scaled(c, gate, 0.5)
        return c.any_order("Add", half, c.any_order("Mul", half, curve))
    raised = c.any_order(c.choice(["Add"], ["Sub", "Mul"]), curve, one)
    if way == "half last":
        return _scaled(c, c.any_order("Mul", gate, raised), 0.5)
    if way == "half first":
        return c.any_order("Mul", _scaled(c, gate, 0.5), raised)
    return c.any_order("Mul", gate, _scaled(c, raised, 0.5))


def _argument(c: Composer, x: Tensor, share: str) -> Tensor:
    """What Erf or Tanh is taken of."""
    factor = c.choice([GELU[share]], [1.0, *GELU.values()])
    if share == "Erf":
        return _scaled(c, x, factor)
    cube = c.both("Pow", x, c.number(3.0, x)) if c.maybe() else c.any_order("Mul", c.both("Mul", x, x), x)
    if c.maybe(0.3):
        square = c.both("Mul", x, x)
        inner = c.any_order("Add", _scaled(c, square, CUBE), c.number(1.0, x))
        return c.any_order("Mul", _scaled(c, x, factor), inner)
    return _scaled(c, c.any_order("Add", x, _scaled(c, cube, CUBE)), factor)


def _scaled(c: Composer, x: Tensor, factor: float) -> Tensor:
    """A tensor times a number, by a product or by a division."""
    if c.maybe(0.7):
        return c.any_order("Mul", x, c.number(factor, x))
    return c.both("Div", x, c.number(1 / factor, x))


# -- rotary positions -------------------------------------------------------------------------------


def rotary(c: Composer) -> Tensor:
    """Rotary positions that are written out."""
    dtype = c.rng.choice(["float", "float", "half"])
    heads, size = c.rng.choice([1, 2, 3]), c.rng.choice([2, 4, 8])
    heads_first = c.maybe()
    order: Shape = (c.batch, c.tokens, heads, size)
    x = c.hidden(dtype, order if not heads_first or c.maybe() else (c.batch, heads, c.tokens, size))
    if heads_first and x.shape == order and (heads != c.tokens or c.maybe()):
        x = _turned(c, x)
    rest = None
    if size > 2 and c.maybe(0.3):
        whole, size = size, size // 2
        x, rest = c.cut(x, 0, size), c.cut(x, size, whole)
    if c.maybe(0.2):
        return _complex(c, x, heads_first, size)
    if rest is not None and c.maybe():
        ends = _rotated_parts(c, x, heads_first, size, c.rng.choice([c.halves, c.pairs]))
        return c.joined([rest, *ends] if c.maybe() else [*ends, rest])
    result = _rotated(c, x, heads_first, size)
    return result if rest is None else c.joined([result, rest] if c.maybe(0.9) else [rest, result])


def _complex(c: Composer, x: Tensor, heads_first: bool, size: int) -> Tensor:
    """Pairs as complex numbers, whose parts have an axis of their own."""
    pairs = (*x.shape[:-1], size // 2, 2)
    turned = c.op("Reshape", x, _places(c, pairs), like=Tensor("", x.dtype, pairs))
    axis = c.choice([-1], [-2])
    parts = c.halves(turned, axis)
    tables = [_table(c, x, heads_first, size // 2) for _ in range(2)]
    tables = [_last_unit(c, table) for table in tables]
    ends = _real_and_imaginary(c, parts, tables)
    whole = _behind(c, ends, turned)
    shape = c.choice([x.shape], [pairs, (*x.shape[:-1], 2, size // 2)])
    return c.op("Reshape", whole, _places(c, shape), like=Tensor("", x.dtype, shape))


def _last_unit(c: Composer, table: Tensor) -> Tensor:
    """A table with a last axis of 1."""
    return c.op("Unsqueeze", table, c.ints(-1), like=Tensor("", table.dtype, (*table.shape, 1)))


def _places(c: Composer, shape: Shape) -> Tensor:
    """What a Reshape reads: the numbers of a shape, or 0 for sizes that stay."""
    return c.ints(
        *(size if isinstance(size, int) and (place > 2 or c.maybe()) else 0 for place, size in enumerate(shape))
    )


def _turned(c: Composer, x: Tensor) -> Tensor:
    """A tensor whose heads and tokens change places."""
    perm = c.choice([[0, 2, 1, 3]], [[0, 1, 2, 3], [2, 1, 0, 3]])
    return c.op("Transpose", x, like=Tensor("", x.dtype, tuple(x.shape[axis] for axis in perm)), perm=perm)


def _rotated(c: Composer, x: Tensor, heads_first: bool, size: int) -> Tensor:
    cut = c.rng.choice([c.halves, c.pairs])
    is_paired = cut == c.pairs
    if c.maybe():
        first, second = cut(_idle(c, x))
        joined = _stacked if is_paired != c.goes_wrong("joined otherwise") else _behind
        tables = [_table(c, x, heads_first, size) for _ in range(2)]
        return _added(c, x, (first, second), tables, joined)
    joined = _behind if not is_paired or c.maybe(0.3) else _stacked
    return joined(c, _rotated_parts(c, x, heads_first, size, cut), x)


def _rotated_parts(
    c: Composer, x: Tensor, heads_first: bool, size: int, cut: Callable[[Tensor], list[Tensor]]
) -> list[Tensor]:
    """The real and the imaginary part of a rotation."""
    tables = [_table(c, x, heads_first, size // 2) for _ in range(2)]
    return _real_and_imaginary(c, cut(x), tables)


def _real_and_imaginary(c: Composer, parts: Sequence[Tensor], tables: Sequence[Tensor]) -> list[Tensor]:
    (first, second), (cos, sin) = parts, tables
    real = c.both("Sub", c.any_order("Mul", first, cos), c.any_order("Mul", second, sin))
    if c.goes_wrong("the tables change places"):
        cos, sin = sin, cos
    imaginary = c.any_order(c.choice(["Add"], ["Sub"]), c.any_order("Mul", second, cos), c.any_order("Mul", first, sin))
    ends = [real, imaginary]
    if c.goes_wrong("the parts change places"):
        ends.reverse()
    return ends


def _idle(c: Composer, x: Tensor) -> Tensor:
    """A tensor, or now and then what a Cast to its type, or to another type and back, gives."""
    if not c.maybe(0.1):
        return x
    dtype = c.choice([x.dtype], ["half", "bfloat"])
    return c.cast(x if dtype == x.dtype else c.cast(x, dtype), x.dtype)


def _added(
    c: Composer,
    x: Tensor,
    parts: tuple[Tensor, Tensor],
    tables: Sequence[Tensor],
    joined: Callable[[Composer, Sequence[Tensor], Tensor], Tensor],
) -> Tensor:
    """x * cos + joined(-x2, x1) * sin."""
    first, second = parts
    negative = c.op("Neg", c.choice([second], [first]), like=second)
    ends = [negative, first]
    if c.goes_wrong("the other sign"):
        ends = [second, c.op("Neg", first, like=first)]
    turned = c.any_order("Mul", joined(c, ends, x), tables[1])
    plain = c.hidden(x.dtype, x.shape) if c.goes_wrong("the cosine of another tensor") else _idle(c, x)
    return c.any_order(c.choice(["Add"], ["Sub", "Mul"]), c.any_order("Mul", plain, tables[0]), turned)


def _behind(c: Composer, ends: Sequence[Tensor], x: Tensor) -> Tensor:
    """Two parts as halves."""
    return c.joined(ends, c.choice([-1], [-2]))


def _stacked(c: Composer, ends: Sequence[Tensor], x: Tensor) -> Tensor:
    """Two parts as pairs."""
    axis = c.choice([-1], [-2])
    columns = []
    for end in ends:
        shape = list(end.shape)
        shape.insert(len(shape) + 1 + axis, 1)
        columns.append(c.op("Unsqueeze", end, c.ints(axis), like=Tensor("", end.dtype, tuple(shape))))
    whole = c.joined(columns, axis)
    return c.op("Reshape", whole, _places(c, x.shape), like=x)


def _table(c: Composer, x: Tensor, heads_first: bool, size: int) -> Tensor:
    """A table of cosines or sines that broadcasts to x."""
    batch: Size = c.rng.choice([1, c.batch])
    flat: Shape = (batch, c.tokens, size)
    place = 1 if heads_first else 2
    fitting: Shape = (*flat[:place], 1, *flat[place:])
    others: list[Shape] = [x.shape[:-1] + (size,), (1, 1, 1, size), flat[1:], (batch, 1, 1, size), (1, *fitting)]
    shape = c.choice([fitting], [*others, (*fitting[:-1], 1)])
    if shape != fitting or c.maybe():
        return c.input(Tensor("", x.dtype, shape), "table")
    table = c.input(Tensor("", x.dtype, flat), "table")
    return c.op("Unsqueeze", table, c.ints(c.rng.choice([place, place - 4])), like=Tensor("", x.dtype, fitting))


def ready_rotary(c: Composer) -> Tensor:
    """Rotary positions that are one operator."""
    is_standard = c.opset >= 23 and c.maybe()
    dtype = c.rng.choice(["float", "float", "half"])
    heads, size = c.rng.choice([1, 2, 3]), c.rng.choice([2, 4, 8])
    part = size // 2 if size > 2 and c.maybe(0.3) else size
    flat, batch = c.maybe(), c.rng.choice([c.batch, c.batch, 1])
    spread: Shape = (c.batch, heads, c.tokens, size)
    if flat and c.maybe(0.3):
        x = c.hidden(dtype, (c.batch, c.tokens, heads, size))
        x = c.op("Reshape", x, c.ints(0, 0, heads * size), like=Tensor("", dtype, (c.batch, c.tokens, heads * size)))
    else:
        x = c.hidden(dtype, (c.batch, c.tokens, heads * size) if flat else spread)
    attrs: dict[str, Any] = {"interleaved": c.rng.choice([0, 1])} if c.maybe() else {}
    if part != size:
        attrs |= {"rotary_embedding_dim": part}
    if (flat and (part != size or is_standard or c.maybe())) or (not is_standard and part != size):
        attrs |= {"num_heads": heads}
    if is_standard and c.maybe(0.4):
        tables = [c.input(Tensor("", dtype, (batch, c.tokens, part // 2)), "table") for _ in range(2)]
        if batch != c.batch:
            raise Misfit
        return c.op("RotaryEmbedding", x, *tables, like=x, **attrs)
    tables = [c.input(Tensor("", dtype, (POSITIONS, part // 2)), "table") for _ in range(2)]
    rows: Shape = c.choice([(c.batch, c.tokens)], [(1,), (1, c.tokens)]) if not is_standard else (c.batch, c.tokens)
    positions = c.input(Tensor("", "int", rows), "positions")
    if is_standard:
        return c.op("RotaryEmbedding", x, *tables, positions, like=x, **attrs)
    if c.goes_wrong("a scale"):
        attrs |= {"scale": 2.0}
    return c.op("RotaryEmbedding", x, positions, *tables, like=x, domain=MICROSOFT, **attrs)


BLOCKS: Mapping[str, Callable[[Composer], Tensor]] = {
    "norm": norm,
    "ready norm": ready_norm,
    "skip norm": skip_norm,
    "swiglu": swiglu,
    "geglu": geglu,
    "gelu": gelu,
    "clipped": clipped,
    "rotary": rotary,
    "ready rotary": ready_rotary,
}
