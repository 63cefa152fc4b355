"""What the proof of linear attention makes of numbers, against ONNX Runtime: of those that are known in every run, and
of those that are known modulo a prime.

A run that ONNX Runtime refuses says nothing. Where it succeeds, every result that the proof takes for known must be its
result; the proof may also give up.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import pytest
from onnx import TensorProto

from fa_compiler.passes.linear.evaluation import Evaluation
from fa_compiler.passes.linear.field import of_numbers
from fa_compiler.passes.linear.operators import evaluated
from fa_compiler.passes.linear.tensors import FailedError, Tensor, TooLongError, exact, of_field
from fa_compiler.passes.values.shapes import analyse
from tests.examples import examples
from tests.passes.ops.test_shape_search import (
    KINDS,
    NAMES,
    NUMPY,
    RUNS,
    Draft,
    chunk,
    concat,
    einsum,
    elementwise,
    expand,
    flatten,
    gather,
    gather_points,
    matmul,
    pad,
    reduction,
    reshape,
    session,
    sliced,
    split,
    squeeze,
    tile,
)

ROUNDED = 1e-6
"""float32 functions of ONNX Runtime and of NumPy, a few units in the last place apart."""
INTEGERS = (
    "Add",
    "Sub",
    "Mul",
    "Div",
    "Mod",
    "Max",
    "Min",
    "Less",
    "LessOrEqual",
    "Greater",
    "GreaterOrEqual",
    "Equal",
)
FLOATS = (*INTEGERS, "Pow")
UNARY = ("Abs", "Neg", "Sign", "Floor", "Ceil", "Exp", "Log", "Sqrt", "Sin", "Cos", "Reciprocal")
LOGIC = ("And", "Or", "Xor")
TYPES = ("INT64", "INT32", "FLOAT", "BOOL", "UINT8", "INT8")


def numbers(d: Draft, sizes: list[int], dtype: type, least: int = -4) -> str:
    """A constant of small numbers, none of them 0 where 0 is below the least one."""
    count = int(np.prod(sizes))
    return d.constant(np.array([d.rng.randint(least, 5) for _ in range(count)]).reshape(sizes), dtype)


def arithmetic(d: Draft) -> None:
    dtype = d.rng.choice([np.int64, np.float32])
    op = d.rng.choice(INTEGERS if dtype is np.int64 else FLOATS)
    attributes = {"fmod": 1} if op == "Mod" and dtype is np.float32 else {}
    least = 1 if op in ("Div", "Mod") else -4
    sizes = d.rng.choice([[3, 4], [4], [1]])
    d.node(op, [numbers(d, [3, 4], dtype), numbers(d, sizes, dtype, least)], **attributes)


def powers(d: Draft) -> None:
    """The base and the exponent may be of other types; the result is of the base's."""
    base, exponent = d.rng.choice([(np.float32, np.int64), (np.int64, np.int64), (np.float32, np.float32)])
    least = 0 if base is np.int64 else -3
    d.node("Pow", [numbers(d, [3, 4], base, 1), numbers(d, [4], exponent, least)])


def functions(d: Draft) -> None:
    op = d.rng.choice(UNARY)
    d.node(op, [numbers(d, [3, 4], np.float32, 1 if op in ("Log", "Sqrt", "Reciprocal") else -4)])


def truths(d: Draft) -> None:
    one, other = (d.constant(np.array([d.rng.random() < 0.5 for _ in range(6)]), np.bool_) for _ in range(2))
    made = d.node(d.rng.choice(LOGIC), [one, other])
    d.node("Where", [d.node("Not", [made]), numbers(d, [6], np.float32), numbers(d, [2, 6], np.float32)])


def casts(d: Draft) -> None:
    wide = d.node("Div", [numbers(d, [12], np.float32), d.constant([2.0], np.float32)])
    narrow = d.node("Cast", [wide], to=getattr(TensorProto, d.rng.choice(TYPES[:4])))
    d.node("Cast", [narrow], to=getattr(TensorProto, d.rng.choice(TYPES)))


def triangles(d: Draft) -> None:
    x, k = d.input(["a", "b", d.rng.choice(["c", 4])]), d.constant(d.rng.randint(-4, 5))
    d.node("Trilu", [x, *d.rng.choice([[], [k]])], upper=d.rng.choice([None, 0, 1]))


def diagonals(d: Draft) -> None:
    k, dtype = d.rng.choice([None, *range(-3, 5)]), d.rng.choice([TensorProto.INT64, TensorProto.FLOAT])
    d.node("EyeLike", [d.input(["a", d.rng.choice(["b", 4])])], k=k, dtype=dtype)


def columns(d: Draft) -> None:
    """Indices beyond the ends stand for no column."""
    x = d.node("OneHot", [numbers(d, [5], np.int64), d.constant(3), numbers(d, [2], np.float32)], axis=-1)
    d.node("ReduceSum", [x, d.constant([1])])


def sums(d: Draft) -> None:
    x, axis = d.input(["a", "b"]), d.constant(d.rng.randint(-2, 1))
    d.node("CumSum", [x, axis], exclusive=d.rng.choice([None, 0, 1]), reverse=d.rng.choice([None, 0, 1]))


def scattered(d: Draft) -> None:
    data = d.input([5, 4])
    if d.rng.random() < 0.5:
        rows = np.array([d.rng.sample(range(-2, 3), 4) for _ in range(2)])
        updates, axis = numbers(d, [2, 4], np.float32), d.rng.choice([0, -2])
        d.node("ScatterElements", [data, d.constant((rows + np.arange(2)[:, None] * 0) % 5), updates], axis=axis)
    else:
        rows = np.array(d.rng.sample(range(5), 3))[:, None] - d.rng.choice([0, 5])
        d.node("ScatterND", [data, d.constant(rows), numbers(d, [3, 4], np.float32)])


def gathered(d: Draft) -> None:
    rows = np.array([[d.rng.randint(-3, 2) for _ in range(2)] for _ in range(d.rng.randint(1, 3))])
    d.node("GatherElements", [d.input([3, d.rng.choice([3, 4])]), d.constant(rows)], axis=d.rng.choice([0, 1, -1, -2]))


OWN = (arithmetic, powers, functions, truths, casts, triangles, diagonals, columns, sums, scattered, gathered)
FOLLOWED = (
    *(triangles, sums, scattered, gathered, sliced, split, reshape, chunk, tile, expand, pad, gather, gather_points),
    *(einsum, reduction, squeeze, flatten, concat, matmul, elementwise),
)
EVERY: list[Callable[[Draft], None]] = [*OWN, *(kind for kind in dict.fromkeys(KINDS) if kind is not elementwise)]


def check(tensor: Tensor, real: np.ndarray, is_exact: bool) -> None:
    """Compare a result: modulo the prime where no number is known in every run, and itself otherwise."""
    assert tensor.shape == real.shape
    if tensor.exact is not None:
        assert tensor.exact.dtype == real.dtype
        np.testing.assert_allclose(tensor.exact, real, ROUNDED if real.dtype.kind == "f" else 0, ROUNDED)
    elif not is_exact and tensor.field is not None:
        assert np.array_equal(tensor.field, of_numbers(real))


def compared(d: Draft, opset: int, feeds_of: random.Random, is_exact: bool) -> int:
    """How many results were those of ONNX Runtime."""
    proto, done = d.proto(opset), 0
    runner = session(proto)
    for lengths in RUNS if runner is not None else []:
        bindings = dict(zip(NAMES, lengths, strict=True))
        shapes = {name: [bindings.get(size, size) for size in sizes] for name, (_, sizes) in d.inputs.items()}
        feeds = {
            name: np.array([feeds_of.randint(-2, 2) for _ in range(int(np.prod(shape)))]).reshape(shape)
            for name, shape in shapes.items()
        }
        feeds = {name: array.astype(NUMPY[d.inputs[name][0]]) for name, array in feeds.items()}
        assert runner is not None
        try:
            results = runner.run(None, feeds)
        except Exception:  # nothing is claimed of a run that fails
            continue
        model = ir.from_proto(proto)
        point = Evaluation(analyse(model), bindings, 7, set())
        for value in model.graph.inputs:
            array = feeds[value.name]
            is_field = not is_exact and array.dtype.kind == "f"
            point.known[value] = of_field(of_numbers(array)) if is_field else exact(array)
        made = {value.name: value for node in model.graph for value in node.outputs}
        try:
            point.run([*model.graph], made.values())
        except FailedError:
            continue
        for item, real in zip(runner.get_outputs(), results, strict=True):
            got = point.known.get(made[item.name])
            if isinstance(got, Tensor) and not (isinstance(real, list) or point.leaves):
                try:
                    check(got, real, is_exact)
                except AssertionError as error:
                    raise AssertionError(f"{item.name} of {d.nodes} {d.constants} {feeds}") from error
                done += 1
    return done


@pytest.mark.parametrize("kind", EVERY, ids=lambda kind: kind.__name__)
def test_numbers_that_are_known_are_those_of_the_run(kind: Callable[[Draft], None]) -> None:
    rng = random.Random(kind.__name__)
    done = 0
    for _ in range(examples(25)):
        draft = Draft(rng)
        kind(draft)
        done += compared(draft, rng.choice((18, 20, 23)), rng, True)
    assert done > 10 or kind not in OWN


@pytest.mark.parametrize("kind", FOLLOWED, ids=lambda kind: kind.__name__)
def test_numbers_modulo_a_prime_are_those_of_the_run(kind: Callable[[Draft], None]) -> None:
    rng = random.Random(kind.__name__ + "modulo")
    done = 0
    for _ in range(examples(25)):
        draft = Draft(rng)
        kind(draft)
        done += compared(draft, rng.choice((18, 20, 23)), rng, False)
    assert done > 10


FAR = 1 << 40
"""Farther away than any axis: NumPy's own integers do not hold it."""


@pytest.mark.parametrize(
    ("op_type", "attributes"),
    [
        ("Unsqueeze", {"axes": [FAR]}),
        ("Squeeze", {"axes": [FAR]}),
        ("Gather", {"axis": FAR}),
        ("Concat", {"axis": FAR}),
    ],
)
def test_an_axis_beyond_all_numbers_fails(op_type: str, attributes: dict[str, list[int] | int]) -> None:
    x, indices = exact(np.zeros((2, 3), np.float32)), exact(np.zeros(1, np.int64))
    operands = [x, indices] if op_type == "Gather" else [x, x] if op_type == "Concat" else [x]
    node = ir.node(op_type, [ir.Value() for _ in operands], attributes)
    with pytest.raises(FailedError):
        evaluated(node, operands, ir.DataType.FLOAT, False)


def test_what_enters_is_no_larger_than_what_is_made() -> None:
    """At the longer lengths all sizes that are open grow together: probabilities that are read would have 256^3
    elements, and take seconds."""
    x = ir.Value(name="x", shape=ir.Shape(["B", "S", "S"]), type=ir.TensorType(ir.DataType.FLOAT))
    info = analyse(ir.Model(ir.Graph([x], [], nodes=[], opset_imports={"": 18}), ir_version=10))
    sizes = {"B": 256, "S": 256}
    with pytest.raises(TooLongError):
        Evaluation(info, sizes, 7, set(), most=1 << 22).tensor(x)
    assert Evaluation(info, dict.fromkeys(sizes, 100), 7, set(), most=1 << 22).tensor(x).shape == (100, 100, 100)
