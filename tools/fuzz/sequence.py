"""Draws random models over a sequence, for ranks that each have a part of its tokens.

A model reads x [B, S, W] and ids [B, S]. Each step draws an operator and some of the values made so far. The sizes of
the case decide what the operator may do. Sizes that are equal by chance, such as the numbers of heads and of tokens,
are drawn on purpose. No step makes a jump of numbers (a comparison of floats), so that rounding cannot change a result
by more than itself.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tools.fuzz.difference import Array

OPSET = 17
FLOAT, INT = TensorProto.FLOAT, TensorProto.INT64
UNARY = ("Neg", "Abs", "Tanh", "Sigmoid", "Relu", "Erf", "Softplus", "Identity", "Dropout")
BINARY = ("Add", "Sub", "Mul", "Max", "Min")
REDUCTIONS = ("ReduceMean", "ReduceMax", "ReduceMin", "ReduceL2", "ReduceSum", "ReduceLogSumExp")


@dataclass(frozen=True)
class Value:
    """A value with its sizes in this case."""

    name: str
    shape: tuple[int, ...]
    dtype: int = FLOAT


@dataclass
class Sequences:
    """A model while it is drawn."""

    rng: random.Random
    batch: int
    length: int
    width: int
    heads: int
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    weights: list[onnx.TensorProto] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    words: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.numbers = np.random.default_rng(self.rng.getrandbits(32))
        self.x = Value("x", (self.batch, self.length, self.width))
        self.ids = Value("ids", (self.batch, self.length), INT)
        self.values = [self.x, self.ids]

    def constant(self, array: Array) -> str:
        """A weight."""
        name = f"w{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(array, name))
        return name

    def ints(self, *numbers: int) -> str:
        """A vector of integers."""
        return self.constant(np.array(numbers, np.int64))

    def node(self, op: str, inputs: list[str], shape: tuple[int, ...], dtype: int = FLOAT, **attrs: Any) -> Value:
        """A node with one result."""
        name = f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, inputs, [name], f"{op}_{name}", **attrs))
        return Value(name, shape, dtype)

    def shapes_of(self, value: Value, *axes: int) -> list[str]:
        """The sizes of a value at these dimensions, as vectors that the graph computes."""
        shape = self.node("Shape", [value.name], (len(value.shape),), INT)
        return [self.node("Gather", [shape.name, self.ints(axis)], (1,), INT).name for axis in axes]

    def pick(self, accepts: Callable[[Value], bool] = lambda value: value.dtype == FLOAT) -> Value | None:
        """One of the values, mostly a late one."""
        found = [value for value in self.values if accepts(value)]
        return None if not found else found[min(int(self.rng.expovariate(0.4)), len(found) - 1) * -1 - 1]

    def step(self) -> None:
        """Draw one operator; nothing is added where the values do not fit it."""
        draw = self.rng.choice(STEPS)
        made = draw(self)
        if made is not None and all(made.shape) and np.prod(made.shape) < 20_000:
            self.values.append(made)
            self.words.append(draw.__name__.strip("_"))

    def model(self, named: bool) -> onnx.ModelProto:
        """The model, whose outputs are the last value and up to two others. `named` leaves batch and sequence open."""
        made = self.values[2:] or self.values
        outputs = list(dict.fromkeys([made[-1], *self.rng.choices(made, k=self.rng.randint(0, 2))]))
        sizes = ("batch", "seq") if named else (self.batch, self.length)
        inputs = [
            helper.make_tensor_value_info("x", FLOAT, [*sizes, self.width]),
            helper.make_tensor_value_info("ids", INT, sizes),
        ]
        results = [helper.make_tensor_value_info(each.name, each.dtype, [None] * len(each.shape)) for each in outputs]
        graph = helper.make_graph(self.nodes, "sequence", inputs, results, self.weights)
        opsets = [helper.make_opsetid("", OPSET)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def sequences(rng: random.Random) -> Sequences:
    """A model of a few steps."""
    heads = rng.choice((1, 2, 3, 4))
    width = heads * rng.choice((2, 4, 6))
    length = rng.choice((width, heads, width // heads, rng.randint(8, 17), rng.randint(8, 17), rng.randint(8, 17)))
    made = Sequences(rng, rng.choice((1, 2, 2, 3, max(length, 2))), max(length, 8), width, heads)
    for _ in range(rng.randint(2, 14)):
        made.step()
    return made


# -- the steps: each draws its operands, and gives its result or None -----------------------------------------------


def _unary(g: Sequences) -> Value | None:
    value = g.pick()
    return value and g.node(g.rng.choice(UNARY), [value.name], value.shape)


def _binary(g: Sequences) -> Value | None:
    one = g.pick()
    if one is None:
        return None
    other = g.pick(lambda each: each.dtype == FLOAT and _broadcasts(one.shape, each.shape))
    assert other is not None
    pair = [one.name, other.name]
    g.rng.shuffle(pair)
    return g.node(g.rng.choice(BINARY), pair, tuple(np.broadcast_shapes(one.shape, other.shape)))


def _with_constant(g: Sequences) -> Value | None:
    value = g.pick()
    if value is None:
        return None
    kept = g.rng.randint(0, len(value.shape))
    shape = tuple(size if g.rng.random() < 0.5 else 1 for size in value.shape[kept:])
    other = g.constant(g.numbers.standard_normal(shape).astype(np.float32))
    return g.node(g.rng.choice(("Add", "Mul")), [value.name, other], value.shape)


def _projection(g: Sequences) -> Value | None:
    value = g.pick(lambda each: each.dtype == FLOAT and len(each.shape) > 1)
    if value is None:
        return None
    width = g.rng.choice((g.width, g.heads, value.shape[-1]))
    weight = g.numbers.standard_normal((value.shape[-1], width)).astype(np.float32) / value.shape[-1] ** 0.5
    if len(value.shape) == 2 and g.rng.random() < 0.5:
        made = [value.name, g.constant(np.ascontiguousarray(weight.T)), g.constant(weight[0])]
        return g.node("Gemm", made, (value.shape[0], width), transB=1)
    return g.node("MatMul", [value.name, g.constant(weight)], (*value.shape[:-1], width))


def _product(g: Sequences) -> Value | None:
    """A product of two values, such as one of pairs of tokens, or a sum over the sequence."""
    one = g.pick(lambda each: each.dtype == FLOAT and len(each.shape) >= 2)
    if one is None:
        return None
    other = g.pick(
        lambda each: (
            each.dtype == FLOAT
            and len(each.shape) == len(one.shape)
            and each.shape[-2] == one.shape[-1]
            and _broadcasts(one.shape[:-2], each.shape[:-2])
        )
    )
    if other is None:
        turned = g.node("Transpose", [one.name], _permuted(one.shape, _last_two(one)), perm=_last_two(one))
        other = turned
    outer = np.broadcast_shapes(one.shape[:-2], other.shape[:-2])
    made = g.node("MatMul", [one.name, other.name], (*outer, one.shape[-2], other.shape[-1]))
    return g.node("Tanh", [made.name], made.shape)


def _transpose(g: Sequences) -> Value | None:
    value = g.pick(lambda each: len(each.shape) > 1)
    if value is None:
        return None
    perm = list(range(len(value.shape)))
    g.rng.shuffle(perm)
    return g.node("Transpose", [value.name], _permuted(value.shape, perm), value.dtype, perm=perm)


def _heads(g: Sequences) -> Value | None:
    """Split a dimension in two, by 0, by -1 or by computed sizes."""
    value = g.pick(lambda each: each.dtype == FLOAT and any(size % g.heads == 0 for size in each.shape))
    if value is None:
        return None
    axis = g.rng.choice([axis for axis, size in enumerate(value.shape) if size % g.heads == 0])
    rest = value.shape[axis] // g.heads
    pair = (g.heads, rest) if g.rng.random() < 0.7 else (rest, g.heads)
    shape = (*value.shape[:axis], *pair, *value.shape[axis + 1 :])
    return _reshaped(g, value, shape, dict(enumerate(range(axis))), free=axis + g.rng.randint(0, 1))


def _merge(g: Sequences) -> Value | None:
    value = g.pick(lambda each: len(each.shape) > 1)
    if value is None:
        return None
    axis = g.rng.randrange(len(value.shape) - 1)
    shape = (*value.shape[:axis], value.shape[axis] * value.shape[axis + 1], *value.shape[axis + 2 :])
    return _reshaped(g, value, shape, dict(enumerate(range(axis))), free=axis)


def _back(g: Sequences) -> Value | None:
    """Bring a value whose first dimension is batch and sequence to [B, S, ...], by the sizes of x."""
    rows = g.batch * g.length
    value = g.pick(lambda each: each.shape[:1] == (rows,) and each.dtype == FLOAT)
    if value is None:
        return None
    batch, length = g.shapes_of(g.x, 0, 1)
    sizes = [batch, length] if g.rng.random() < 0.5 else [batch, g.ints(-1)]
    target = g.node("Concat", [*sizes, g.ints(*value.shape[1:])], (1 + len(value.shape),), INT, axis=0)
    return g.node("Reshape", [value.name, target.name], (g.batch, g.length, *value.shape[1:]))


def _reshaped(g: Sequences, value: Value, shape: tuple[int, ...], same: dict[int, int], free: int) -> Value:
    """A Reshape whose target has 0 or computed sizes where a dimension stays, and -1 at `free`."""
    sizes = []
    for axis, size in enumerate(shape):
        if axis == free:
            sizes.append(g.ints(-1))
        elif axis in same:
            sizes.append(g.ints(0) if g.rng.random() < 0.5 else g.shapes_of(value, same[axis])[0])
        else:
            later = axis - len(shape) + len(value.shape)
            sizes.append(g.shapes_of(value, later)[0] if value.shape[later] == size and later >= 0 else g.ints(size))
    target = g.node("Concat", sizes, (len(shape),), INT, axis=0)
    return g.node("Reshape", [value.name, target.name], shape, value.dtype)


def _reduction(g: Sequences) -> Value | None:
    value = g.pick(lambda each: each.dtype == FLOAT and bool(each.shape))
    if value is None:
        return None
    axis, keeps = g.rng.randrange(len(value.shape)), g.rng.random() < 0.6
    shape = (*value.shape[:axis], *([1] if keeps else []), *value.shape[axis + 1 :])
    op, words = g.rng.choice(REDUCTIONS), {"keepdims": int(keeps)}
    if op == "ReduceSum":
        return g.node(op, [value.name, g.ints(axis)], shape, **words)
    return g.node(op, [value.name], shape, axes=[axis], **words)


def _softmax(g: Sequences) -> Value | None:
    value = g.pick(lambda each: each.dtype == FLOAT and bool(each.shape))
    return value and g.node("Softmax", [value.name], value.shape, axis=g.rng.randrange(len(value.shape)))


def _norm(g: Sequences) -> Value | None:
    value = g.pick(lambda each: each.dtype == FLOAT and bool(each.shape) and each.shape[-1] > 1)
    if value is None:
        return None
    weight = g.constant(np.ones(value.shape[-1], np.float32))
    return g.node("LayerNormalization", [value.name, weight], value.shape, axis=-1)


def _slice(g: Sequences) -> Value | None:
    value = g.pick(lambda each: bool(each.shape))
    if value is None:
        return None
    axis = g.rng.randrange(len(value.shape))
    size = value.shape[axis]
    start, stop = g.rng.choice(((0, 1), (-1, 99), (1, 99), (0, -1), (0, 99), (0, size), (-2, 99), (2, 5)))
    step = g.rng.choice((1, 1, 1, 2))
    kept = len(range(size)[start:stop:step])
    shape = (*value.shape[:axis], kept, *value.shape[axis + 1 :])
    words = [value.name, g.ints(start), g.ints(stop), g.ints(axis), g.ints(step)]
    return g.node("Slice", words, shape, value.dtype)


def _gather(g: Sequences) -> Value | None:
    value = g.pick(lambda each: bool(each.shape))
    if value is None:
        return None
    axis = g.rng.randrange(len(value.shape))
    size = value.shape[axis]
    indices = np.array(g.rng.choice((0, -1, [0], [0, -1], [size - 1, 0, 0], [[0, 1], [1, 0]])), np.int64)
    if size == 1:
        indices = np.zeros_like(indices)
    shape = (*value.shape[:axis], *indices.shape, *value.shape[axis + 1 :])
    return g.node("Gather", [value.name, g.constant(indices)], shape, value.dtype, axis=axis)


def _embedding(g: Sequences) -> Value | None:
    ids = g.pick(lambda each: each.dtype == INT)
    if ids is None:
        return None
    table = g.constant(g.numbers.standard_normal((7, g.width)).astype(np.float32))
    low, high = g.constant(np.array(0)), g.constant(np.array(6))
    clipped = g.node("Clip", [ids.name, low, high], ids.shape, INT)
    return g.node("Gather", [table, clipped.name], (*ids.shape, g.width))


def _concat(g: Sequences) -> Value | None:
    one = g.pick(lambda each: bool(each.shape))
    if one is None:
        return None
    axis = g.rng.randrange(len(one.shape))

    def fits(each: Value) -> bool:
        same = len(each.shape) == len(one.shape) and each.dtype == one.dtype
        return same and all(a == b for n, (a, b) in enumerate(zip(each.shape, one.shape, strict=True)) if n != axis)

    other = g.pick(fits)
    assert other is not None
    shape = (*one.shape[:axis], one.shape[axis] + other.shape[axis], *one.shape[axis + 1 :])
    return g.node("Concat", [one.name, other.name], shape, one.dtype, axis=axis)


def _cumsum(g: Sequences) -> Value | None:
    value = g.pick(lambda each: bool(each.shape))
    if value is None:
        return None
    axis = g.constant(np.array(g.rng.randrange(len(value.shape))))
    words = {"exclusive": g.rng.randint(0, 1), "reverse": g.rng.randint(0, 1)}
    return g.node("CumSum", [value.name, axis], value.shape, value.dtype, **words)


def _unsqueeze(g: Sequences) -> Value | None:
    value = g.pick(lambda each: len(each.shape) < 4)
    if value is None:
        return None
    axis = g.rng.randint(0, len(value.shape))
    return g.node("Unsqueeze", [value.name, g.ints(axis)], (*value.shape[:axis], 1, *value.shape[axis:]), value.dtype)


def _squeeze(g: Sequences) -> Value | None:
    value = g.pick(lambda each: 1 in each.shape)
    if value is None:
        return None
    axis = value.shape.index(1)
    return g.node("Squeeze", [value.name, g.ints(axis)], (*value.shape[:axis], *value.shape[axis + 1 :]), value.dtype)


def _expand(g: Sequences) -> Value | None:
    """Repeat a dimension of 1 to the batch, the sequence, or a number."""
    value = g.pick(lambda each: 1 in each.shape)
    if value is None:
        return None
    axis = value.shape.index(1)
    source = g.rng.choice((0, 1, None))
    size = 3 if source is None else g.x.shape[source]
    wanted = g.ints(3) if source is None else g.shapes_of(g.x, source)[0]
    ones = [g.ints(1)] * len(value.shape)
    target = g.node("Concat", [*ones[:axis], wanted, *ones[axis + 1 :]], (len(value.shape),), INT, axis=0)
    shape = (*value.shape[:axis], size, *value.shape[axis + 1 :])
    return g.node("Expand", [value.name, target.name], shape, value.dtype)


def _tile(g: Sequences) -> Value | None:
    value = g.pick(lambda each: bool(each.shape))
    if value is None:
        return None
    times = [1] * len(value.shape)
    times[g.rng.randrange(len(times))] = 2
    shape = tuple(size * each for size, each in zip(value.shape, times, strict=True))
    return g.node("Tile", [value.name, g.ints(*times)], shape, value.dtype)


def _pad(g: Sequences) -> Value | None:
    value = g.pick(lambda each: each.dtype == FLOAT and bool(each.shape))
    if value is None:
        return None
    axis, before, after = g.rng.randrange(len(value.shape)), g.rng.randint(0, 1), g.rng.randint(-1, 1)
    pads = [[0] * len(value.shape) for _ in range(2)]
    pads[0][axis], pads[1][axis] = before, after
    shape = (*value.shape[:axis], value.shape[axis] + before + after, *value.shape[axis + 1 :])
    return g.node("Pad", [value.name, g.ints(*pads[0], *pads[1])], shape)


def _split(g: Sequences) -> Value | None:
    value = g.pick(lambda each: any(size % 2 == 0 for size in each.shape))
    if value is None:
        return None
    axis = g.rng.choice([axis for axis, size in enumerate(value.shape) if size % 2 == 0])
    names = [f"v{len(g.nodes)}_{half}" for half in range(2)]
    g.nodes.append(helper.make_node("Split", [value.name], names, f"Split_{len(g.nodes)}", axis=axis))
    shape = (*value.shape[:axis], value.shape[axis] // 2, *value.shape[axis + 1 :])
    return Value(g.rng.choice(names), shape, value.dtype)


def _positions(g: Sequences) -> Value | None:
    """0, 1, 2 ... of the sequence, as integers or as floats."""
    length = g.shapes_of(g.x if g.rng.random() < 0.5 else g.ids, 1)[0]
    scalar = g.node("Squeeze", [length, g.ints(0)], (), INT)
    start, step = g.constant(np.array(0)), g.constant(np.array(1))
    every = g.node("Range", [start, scalar.name, step], (g.length,), INT)
    if g.rng.random() < 0.5:
        return every
    made = g.node("Cast", [every.name], every.shape, to=FLOAT)
    return g.node("Mul", [made.name, g.constant(np.array(0.1, np.float32))], every.shape)


def _size(g: Sequences) -> Value | None:
    """A size of a value as a number."""
    value = g.pick(lambda each: bool(each.shape))
    assert value is not None
    axis = g.rng.randrange(len(value.shape))
    size = g.node("Cast", [g.shapes_of(value, axis)[0]], (1,), to=FLOAT)
    return g.node("Div", [size.name, g.constant(np.array(10, np.float32))], (1,))


def _compare(g: Sequences) -> Value | None:
    """A mask from two integers, as a float."""
    one = g.pick(lambda each: each.dtype == INT)
    if one is None:
        return None
    other = g.pick(lambda each: each.dtype == INT and _broadcasts(one.shape, each.shape))
    assert other is not None
    op = g.rng.choice(("Equal", "Greater", "LessOrEqual"))
    shape = tuple(np.broadcast_shapes(one.shape, other.shape))
    made = g.node(op, [one.name, other.name], shape, TensorProto.BOOL)
    return g.node("Cast", [made.name], shape, to=FLOAT)


def _where(g: Sequences) -> Value | None:
    ids, one = g.pick(lambda each: each.dtype == INT), g.pick()
    if ids is None or one is None or not _broadcasts(ids.shape, one.shape):
        return None
    mask = g.node("Greater", [ids.name, g.constant(np.array(3))], ids.shape, TensorProto.BOOL)
    shape = tuple(np.broadcast_shapes(ids.shape, one.shape))
    return g.node("Where", [mask.name, one.name, g.constant(np.array(0.5, np.float32))], shape)


def _einsum(g: Sequences) -> Value | None:
    value = g.pick(lambda each: each.dtype == FLOAT and len(each.shape) == 3)
    if value is None:
        return None
    a, b, c = value.shape
    equation, shape = g.rng.choice(
        (("abc->cab", (c, a, b)), ("abc,abd->acd", (a, c, c)), ("abc,adc->abd", (a, b, b)), ("abc->ac", (a, c)))
    )
    operands = [value.name] * (1 + equation.count(","))
    made = g.node("Einsum", operands, shape, equation=equation)
    return g.node("Tanh", [made.name], shape)


def _attention(g: Sequences) -> Value | None:
    """Attention as exporters spell it, with masks of some kind."""
    source = g.pick(lambda each: each.dtype == FLOAT and each.shape == (g.batch, g.length, g.width))
    assert source is not None
    size = g.width // g.heads
    parts = []
    for perm in ((0, 2, 1, 3), (0, 2, 3, 1), (0, 2, 1, 3)):
        weight = g.constant(g.numbers.standard_normal((g.width, g.width)).astype(np.float32) / g.width**0.5)
        made = g.node("MatMul", [source.name, weight], source.shape)
        split = g.node("Reshape", [made.name, g.ints(0, 0, g.heads, size)], (g.batch, g.length, g.heads, size))
        parts.append(g.node("Transpose", [split.name], _permuted(split.shape, perm), perm=list(perm)))
    scores = g.node("MatMul", [parts[0].name, parts[1].name], (g.batch, g.heads, g.length, g.length))
    scores = g.node("Mul", [scores.name, g.constant(np.array(size**-0.5, np.float32))], scores.shape)
    for kind in g.rng.sample(("causal", "padding", "bias", "distance"), g.rng.choice((0, 1, 1, 2))):
        scores = _masked(g, scores, kind)
    made = g.node("Softmax", [scores.name], scores.shape, axis=-1)
    out = g.node("MatMul", [made.name, parts[2].name], (g.batch, g.heads, g.length, size))
    back = g.node("Transpose", [out.name], (g.batch, g.length, g.heads, size), perm=[0, 2, 1, 3])
    return g.node("Reshape", [back.name, g.ints(0, 0, g.width)], source.shape)


def _masked(g: Sequences, scores: Value, kind: str) -> Value:
    lowest = g.constant(np.array(np.finfo(np.float32).min, np.float32))
    if kind == "bias":
        bias = g.constant(g.numbers.standard_normal((1, g.heads, 1, 1)).astype(np.float32))
        return g.node("Add", [scores.name, bias], scores.shape)
    if kind == "padding":
        wide = g.node("Unsqueeze", [g.ids.name, g.ints(1, 2)], (g.batch, 1, 1, g.length), INT)
        hidden = g.node("Equal", [wide.name, g.constant(np.array(5))], wide.shape, TensorProto.BOOL)
        return g.node("Where", [hidden.name, lowest, scores.name], scores.shape)
    every = g.node("Squeeze", [g.shapes_of(g.x, 1)[0], g.ints(0)], (), INT)
    line = g.node("Range", [g.constant(np.array(0)), every.name, g.constant(np.array(1))], (g.length,), INT)
    rows = g.node("Unsqueeze", [line.name, g.ints(1)], (g.length, 1), INT)
    if kind == "causal":
        hidden = g.node("Greater", [line.name, rows.name], (g.length, g.length), TensorProto.BOOL)
        return g.node("Where", [hidden.name, lowest, scores.name], scores.shape)
    apart = g.node("Cast", [g.node("Sub", [line.name, rows.name], (g.length, g.length), INT).name], (), to=FLOAT)
    bias = g.node("Mul", [apart.name, g.constant(np.array(-0.1, np.float32))], (g.length, g.length))
    return g.node("Add", [scores.name, bias.name], scores.shape)


def _broadcasts(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return all(a == b or 1 in (a, b) for a, b in zip(reversed(one), reversed(other), strict=False))


def _permuted(shape: tuple[int, ...], perm: list[int] | tuple[int, ...]) -> tuple[int, ...]:
    return tuple(shape[axis] for axis in perm)


def _last_two(value: Value) -> list[int]:
    count = len(value.shape)
    return [*range(count - 2), count - 1, count - 2]


STEPS: tuple[Callable[[Sequences], Value | None], ...] = (
    *(_unary, _binary, _binary, _with_constant, _projection, _projection, _product, _transpose, _heads, _heads),
    *(_merge, _merge, _back, _reduction, _softmax, _norm, _slice, _gather, _embedding, _concat, _cumsum, _unsqueeze),
    *(_squeeze, _expand, _expand, _tile, _pad, _split, _positions, _size, _compare, _where, _einsum),
    *(_attention, _attention),
)
