"""What tensors can hold: rules one by one, and random programs against the numbers they give."""

from __future__ import annotations

import math
import warnings

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx.reference import ReferenceEvaluator

from fa_compiler.passes import Options, fuse
from fa_compiler.passes.algebra.cases import BITS
from fa_compiler.passes.algebra.intervals import Bound
from fa_compiler.passes.ir.nodes import constant, remember_versions
from fa_compiler.passes.ops.numbers import ValueSet
from fa_compiler.passes.values.bounds import Bounds, KernelBounds
from fa_compiler.passes.values.shapes import analyse
from fa_compiler.passes.values.value_sets import ValueSets
from tests.examples import examples
from tests.passes.running import parse

MIN = float(np.finfo(np.float32).min)
INPUTS = (
    "bool[2,3] b, float[2,3] f, int64[2,3] i, float16[2,3] h, int32[2,3] i32, int8[2,3] i8, uint8[2,3] u8, "
    "uint32[2,3] u32"
)
CONSTANTS = (
    "float zero = {0.0}, float one = {1.0}, float low = {-inf}, float least = {-3.4028234663852886e38}, "
    "float[3] mixed = {0.0, -1e4, 1.0}, float[2,3] many = {1.0,2.0,3.0,4.0,5.0,6.0}, float nan = {nan}, "
    "int64 n1 = {1}, int64 n0 = {0}, bool yes = {1}, int64[2] shape = {2,3}, int64[1] axis = {0}, "
    "float[0,3] nothing = {}, int64[1,1] row = {1}, float[8] seven = {0.0,1.0,2.0,3.0,4.0,5.0,6.0,7.0}, "
    "int64 most = {9223372036854775807}, int64 odd = {9007199254740993}, int64 even = {9007199254740992}, "
    "int32 top = {2147483647}, int32 bottom = {-2147483648}, int8 less = {-1}, uint8 byte = {200}, "
    "uint32 word = {4294967295}, float third = {0.333}, float two = {2.0}, float hundred = {100.0}, "
    "float large = {3e38}"
)


def model(body: str, initializers: str = CONSTANTS, inputs: str = INPUTS, ir_version: int = 8) -> ir.Model:
    """A model whose output nobody looks at."""
    proto = onnx.parser.parse_model(
        f'<ir_version: {ir_version}, opset_import: ["": 18]> g ({inputs}) => (bool[2,3] end) '
        f"<{initializers}> {{ {body} end = Identity(b) }}"
    )
    result = ir.from_proto(proto)
    remember_versions(result)
    return result


def value(graph: ir.Graph, name: str) -> ir.Value:
    """A value by its name."""
    found = [output for node in graph for output in node.outputs if output.name == name]
    return (
        found[0] if found else next(each for each in (*graph.inputs, *graph.initializers.values()) if each.name == name)
    )


def held(body: str, **options: str | int) -> ValueSet | None:
    """The set found for x."""
    built = model(body, **options)  # type: ignore[arg-type]
    return ValueSets(analyse(built)).of(value(built.graph, "x"))


HALF_MIN = -65504.0


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("x = Identity(zero)", {0.0}),
        ("x = Identity(mixed)", {0.0, -1e4, 1.0}),
        ("x = Identity(nan)", None),
        ("x = Identity(seven)", None),
        ("x = Identity(f)", None),
        ("x = Identity(b)", {0.0, 1.0}),
        ("x = Equal(f, zero)", {0.0, 1.0}),
        ("x = IsNaN(f)", {0.0, 1.0}),
        ("x = Not(yes)", {0.0}),
        ("x = Not(b)", {0.0, 1.0}),
        ("x = Equal(zero, low)", {0.0}),
        ("x = Equal(mixed, zero)", {0.0, 1.0}),
        ("x = Equal(nan, zero)", {0.0, 1.0}),
        ("x = Greater(one, zero)", {1.0}),
        ("x = Equal(n1, n0)", {0.0}),
        ("x = Equal(odd, even)", {0.0, 1.0}),  # a float64 cannot hold odd, so nothing is known of it
        ("w = Where(b, zero, low) x = LessOrEqual(w, zero)", {1.0}),
        (
            "c = Cast<to=10>(one) d = Cast<to=10>(zero) x = Less(c, d)",
            {0.0, 1.0},
        ),  # types of 16 bits may be rounded late
        ("x = Cast<to=1>(b)", {0.0, 1.0}),
        ("x = Cast<to=1>(i)", None),
        ("x = Cast<to=9>(f)", {0.0, 1.0}),
        ("x = Cast<to=9>(least)", {1.0}),
        ("x = Cast<to=9>(nan)", {0.0, 1.0}),
        ("x = Cast<to=10>(least)", None),  # or the number, as ONNX Runtime runs it
        ("x = Cast<to=7>(mixed)", {0.0, -1e4, 1.0}),
        ("x = Cast<to=7>(low)", None),
        ("x = Where(b, zero, low)", {0.0, -math.inf}),
        ("x = Where(b, zero, f)", None),
        ("x = Where(b, nan, zero)", None),
        # 0 * -inf is NaN; a finite number is not.
        ("c = Cast<to=1>(b) x = Mul(c, low)", None),
        ("c = Cast<to=1>(b) x = Mul(c, least)", {0.0, MIN}),
        ("c = Cast<to=1>(b) d = Sub(one, c) x = Mul(d, least)", {0.0, MIN}),
        ("c = Cast<to=1>(b) x = Sub(c, c)", {0.0, 1.0, -1.0}),
        ("w = Where(b, zero, least) x = Add(w, w)", {0.0, MIN, -math.inf}),
        ("w = Where(b, zero, low) x = Add(w, w)", {0.0, -math.inf}),
        ("w = Where(b, zero, low) x = Sub(w, w)", None),
        ("w = Where(b, zero, low) x = Neg(w)", {0.0, math.inf}),
        ("w = Where(b, zero, low) x = Max(w, least)", {0.0, MIN}),
        ("w = Where(b, zero, low) x = Max(w, least, one)", {1.0}),
        ("w = Where(b, zero, low) x = Min(w, nan)", None),
        ("c = Cast<to=1>(b) x = Div(c, zero)", None),
        ("c = Cast<to=1>(b) x = Div(one, c)", None),
        ("c = Cast<to=7>(b) x = Sub(n1, c)", {0.0, 1.0}),
        ("c = Cast<to=7>(b) x = Div(n1, c)", None),
        # Integers wrap around, and from 2^53 on a set of floats does not tell them apart.
        ("x = Add(top, top)", None),
        ("x = Neg(bottom)", None),
        ("x = Mul(most, n1)", None),
        ("x = Sub(odd, even)", None),
        ("x = Sub(even, n1)", {2.0**53 - 1}),
        ("c = Cast<to=6>(b) x = Sub(c, top)", {-2147483647.0, -2147483646.0}),
        ("c = Cast<to=12>(less) x = Cast<to=1>(c)", None),
        # transformers: what is not 0 is replaced, so only 0 passes through.
        ("c = Cast<to=1>(i) d = Sub(one, c) t = Cast<to=9>(d) x = Where(t, least, d)", {0.0, MIN}),
        ("c = Cast<to=1>(i) d = Sub(one, c) t = Cast<to=9>(d) x = Where(t, d, least)", None),
        ("c = Cast<to=1>(i) d = Sub(one, c) t = Cast<to=9>(c) x = Where(t, least, d)", None),
        ("c = Cast<to=1>(i) t = Cast<to=9>(c) u = Cast<to=9>(t) x = Where(u, least, c)", {0.0, MIN}),
        ("c = Cast<to=1>(i) t = Cast<to=9>(c) u = Not(t) x = Where(u, least, c)", None),
        # Movers and makers.
        ("w = Where(b, zero, low) x = Transpose(w)", {0.0, -math.inf}),
        ("w = Where(b, zero, low) x = Gather(w, n0)", {0.0, -math.inf}),
        ("w = Where(b, zero, low) s, x = Split<axis=0, num_outputs=2>(w)", {0.0, -math.inf}),
        ("w = Where(b, zero, low) x = Concat<axis=0>(w, many)", None),
        ("w = Where(b, zero, low) x = Concat<axis=0>(w, nothing)", {0.0, -math.inf}),
        ("w = Where(b, one, low) x = Trilu(w)", {0.0, 1.0, -math.inf}),
        ("x = ConstantOfShape(shape)", {0.0}),
        ("x = ConstantOfShape<value=float[1] {-1e30}>(shape)", {float(np.float32(-1e30))}),
        (
            "z = ConstantOfShape(shape) w = Where(b, zero, low) u = Gather<axis=0>(w, axis) x = ScatterND(z, row, u)",
            {0.0, -math.inf},
        ),
        ("x = Relu(zero)", None),
        ("x = Pad(mixed, shape)", {0.0, -1e4, 1.0}),
        ("x = Pad(mixed, shape, nan)", None),
        ('x = Pad<mode="edge">(one, shape)', {1.0}),
        ("n = Cast<to=10>(zero) x = Pad<pads=[1], value=-1e9>(n)", {0.0, -math.inf}),
        ("x = Pad<pads=[1], value=nan>(zero)", None),
    ],
)
def test_rule(body: str, expected: set[float] | None) -> None:
    assert held(body) == (None if expected is None else frozenset(expected))


def test_an_overridable_initializer_is_unknown() -> None:
    inputs, initializers = INPUTS + ", float x", "float x = {0.0}"
    assert held("", inputs=inputs, initializers=initializers) is None
    assert held("", inputs=inputs, initializers=initializers, ir_version=3) == frozenset({0.0})


def test_empty_tensors() -> None:
    assert held("x = Identity(nothing)") == frozenset()
    for body in ("Mul(nothing, low)", "Mul(low, nothing)", "Max(low, nothing, zero)"):
        assert held(f"x = {body}") in (None, frozenset())


@pytest.mark.parametrize(
    ("attribute", "expected"),
    [
        ("value=float[2] {1.0, 2.0}", [1.0, 2.0]),
        ("value_float=1.5", 1.5),
        ("value_int=3", 3),
        ("value_floats=[1.0, 2.0]", [1.0, 2.0]),
        ("value_ints=[1, 2]", [1, 2]),
        ('value_string="a"', None),
    ],
)
def test_constants(attribute: str, expected: object) -> None:
    built = model(f"x = Constant<{attribute}>()")
    found = constant(value(built.graph, "x"))
    assert found is None if expected is None else (found is not None and found.tolist() == expected)


def test_large_constants_are_not_read() -> None:
    built = model("x = Identity(seven)")
    assert constant(value(built.graph, "seven"), limit=7) is None
    assert constant(value(built.graph, "seven"), limit=8) is not None
    assert constant(value(built.graph, "f")) is None


# -- random programs --------------------------------------------------------------------------------

FLOAT, HALF, WHOLE, BOOL = "float", "half", "whole", "bool"
SHORT, TINY, BYTE, WORD = "int32", "int8", "uint8", "uint32"
CODES = {FLOAT: 1, HALF: 10, WHOLE: 7, BOOL: 9, SHORT: 6, TINY: 3, BYTE: 2, WORD: 12}
INTEGERS = (WHOLE, SHORT, TINY, BYTE, WORD)
LEAVES = {
    FLOAT: ["zero", "one", "low", "least", "mixed", "many", "f"],
    HALF: ["h"],
    WHOLE: ["i", "n1", "n0", "most", "odd", "even"],
    BOOL: ["b", "yes"],
    SHORT: ["i32", "top", "bottom"],
    TINY: ["i8", "less"],
    BYTE: ["u8", "byte"],
    WORD: ["u32", "word"],
}
FUNCTIONS = ["Exp", "Sqrt", "Softplus", "Abs", "Relu", "Reciprocal"]
PLAIN_FEEDS = [0.0, 1.0, -1.0, -math.inf, math.inf, math.nan, 3e38, -1e30]


@st.composite
def programs(draw: st.DrawFn) -> list[tuple[str, str, str]]:
    """Statements as (result, its type, text); operands are leaves and earlier results."""
    known = {kind: list(names) for kind, names in LEAVES.items()}
    program: list[tuple[str, str, str]] = []

    def pick(kind: str) -> str:
        return draw(st.sampled_from(known[kind][-4:] if draw(st.booleans()) else known[kind]))

    for index in range(draw(st.integers(1, 8))):
        kind = draw(st.sampled_from([FLOAT, FLOAT, FLOAT, HALF, BOOL, *INTEGERS]))
        name = f"t{index}"
        choices = ["cast", "move"]
        if kind == BOOL:
            choices += ["not", "compare", "logic"]
        else:
            choices += ["where", "where", "arithmetic", "arithmetic"] + ([] if kind in (BYTE, WORD) else ["neg"])
            choices += ["function", "clip"] if kind == FLOAT else []
        match draw(st.sampled_from(choices)):
            case "cast":
                source = draw(st.sampled_from([FLOAT, HALF, BOOL, *INTEGERS]))
                text = f"Cast<to={CODES[kind]}>({pick(source)})"
            case "move":
                text = f"Identity({pick(kind)})"
            case "not":
                text = f"Not({pick(BOOL)})"
            case "compare":
                text = f"{draw(st.sampled_from(['Equal', 'Less', 'Greater']))}({pick(FLOAT)}, {pick(FLOAT)})"
            case "logic":
                text = f"{draw(st.sampled_from(['And', 'Or', 'Xor']))}({pick(BOOL)}, {pick(BOOL)})"
            case "where":
                text = f"Where({pick(BOOL)}, {pick(kind)}, {pick(kind)})"
            case "function":
                text = f"{draw(st.sampled_from(FUNCTIONS))}({pick(FLOAT)})"
            case "clip":
                limits = [draw(st.sampled_from(["", pick(FLOAT)])), pick(FLOAT)]
                text = f"Clip({pick(FLOAT)}, {', '.join(limits)})"
            case "neg":
                text = f"Neg({pick(kind)})"
            case _:
                names = ["Add", "Sub", "Mul", "Min", "Max", *(BITS if kind in INTEGERS else ["Div"])]
                text = f"{draw(st.sampled_from(names))}({pick(kind)}, {pick(kind)})"
        known[kind].append(name)
        program.append((name, kind, text))
    return program


def numbers(program: list[tuple[str, str, str]], seed: int) -> tuple[ir.Model, dict[str, np.ndarray]]:
    """The model, and every value of one run of it."""
    body = " ".join(f"{name} = {text}" for name, _, text in program)
    built = model(body)
    proto = ir.to_proto(built)
    del proto.graph.output[:]
    proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name, _, _ in program)
    rng = np.random.default_rng(seed)
    feeds = {
        "b": rng.random((2, 3)) < 0.5,
        "f": rng.choice(PLAIN_FEEDS, (2, 3)).astype(np.float32),
        "i": rng.choice([0, 1, 2, -70000, 1 << 40], (2, 3)),
        "h": rng.choice([0.0, 1.0, -65504.0, math.inf], (2, 3)).astype(np.float16),
        "i32": rng.choice([0, 1, -1, 2**31 - 1, -(2**31)], (2, 3)).astype(np.int32),
        "i8": rng.choice([0, 1, -1, 127, -128], (2, 3)).astype(np.int8),
        "u8": rng.choice([0, 1, 255], (2, 3)).astype(np.uint8),
        "u32": rng.choice([0, 1, 2**31, 2**32 - 1], (2, 3)).astype(np.uint32),
    }
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        results = ReferenceEvaluator(proto).run(None, feeds)
    return built, dict(zip((name for name, _, _ in program), results, strict=True))


@settings(max_examples=examples(100))
@given(programs(), st.integers(0, 1 << 16))
def test_sets_hold_what_a_run_gives(program: list[tuple[str, str, str]], seed: int) -> None:
    built, results = numbers(program, seed)
    sets = ValueSets(analyse(built))
    for name, array in results.items():
        found = sets.of(value(built.graph, name))
        if found is not None:
            assert {float(x) for x in array.reshape(-1)} <= found, (name, found)


@settings(max_examples=examples(100))
@given(programs(), st.integers(0, 1 << 16))
def test_bounds_hold_what_a_run_gives(program: list[tuple[str, str, str]], seed: int) -> None:
    built, results = numbers(program, seed)
    bounds = Bounds(analyse(built))
    for name, array in results.items():
        found, wide = bounds.of(value(built.graph, name)), array.astype(np.float64)
        if found is not None:
            low, high = found.unless_nan
            assert ((wide >= low) & (wide <= high) | np.isnan(wide)).all(), (name, found)
            assert found.may_be_nan or not np.isnan(wide).any(), (name, found)


def interval(body: str, kind: type[Bounds] = Bounds) -> tuple[float, float] | None:
    """The interval found for x."""
    built = model(body)
    return kind(analyse(built)).unless_nan(value(built.graph, "x"))


def test_kernels_give_a_little_more_than_one() -> None:
    assert interval("x = Sigmoid(f)", KernelBounds) == (0.0, 1.0 + 2.0**-20)
    assert interval("x = Tanh(f)", KernelBounds) == (-1.0 - 2.0**-20, 1.0 + 2.0**-20)
    less = interval("s = Sigmoid(f) x = Sub(one, s)", KernelBounds)
    assert less is not None and -(2.0**-18) < less[0] < 0
    assert interval("s = Sigmoid(f) x = Sub(one, s)") == (0.0, 1.0)


def test_integers_are_bounded_by_their_type_alone() -> None:
    """They wrap around: -1 of int8 is 4294967295 as uint32, and the largest int32 plus 1 is the least."""
    assert interval("c = Cast<to=12>(less) x = Cast<to=1>(c)") == (0.0, 4294967296.0)
    assert interval("c = Add(top, top) x = Cast<to=11>(c)") == (-2147483648.0, 2147483647.0)
    assert interval("c = Cast<to=2>(i) x = Cast<to=1>(c)") == (0.0, 255.0)
    assert interval("c = Cast<to=5>(i) d = Mul(c, c) x = Cast<to=1>(d)") == (-32768.0, 32767.0)
    assert interval("x = Cast<to=1>(b)") == (0.0, 1.0)
    # Of a type whose rounding is not known nothing is said.
    assert interval("x = Cast<to=17>(mixed)") is None


def test_what_a_16_bit_product_may_keep_of_its_bits_is_within_its_bounds() -> None:
    """ONNX Runtime computes it in float32 and may leave it so until something else reads it."""
    found = interval("c = Cast<to=10>(b) t = Cast<to=10>(third) d = Mul(c, t) x = Mul(d, d)")
    exact = float(np.float16(0.333)) ** 2
    assert found is not None and exact != float(np.float16(exact))
    assert found[1] == max(exact, float(np.float16(exact)))


@pytest.mark.parametrize(("sum_of", "low", "high"), [("ReduceSum", -6.0, 6.0), ("ReduceMean", -1.0, 1.0)])
@pytest.mark.parametrize("kind", [1, 10])
def test_a_sum_of_a_known_number_of_elements_is_bounded(sum_of: str, low: float, high: float, kind: int) -> None:
    """Each of its additions may round upwards."""
    found = interval(f"w = Tanh(f) t = Cast<to={kind}>(w) s = {sum_of}<keepdims=0>(t) x = Cast<to=1>(s)")
    assert found is not None
    assert low * 1.02 < found[0] < low and high < found[1] < high * 1.02
    assert interval(f"t = Exp(f) s = {sum_of}<keepdims=0>(t) x = Identity(s)") is None


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("e = Exp(f) x = Clip(e, , third)", (0.0, float(np.float32(0.333)))),
        ("e = Clip(f, , zero) x = Exp(e)", (0.0, 1.0 + 2.0**-20)),
        ("x = Clip(f, one)", (1.0, -MIN)),
        ("e = Exp(f) n = Neg(e) x = Clip(n, , third)", (MIN, 0.0)),
        ("x = Clip(f, one, f)", None),
        ("c = Clip(f, one) x = Reciprocal(c)", (float(np.float32(1 / -MIN)), 1.0)),
        ("c = Clip(f, one) x = Div(one, c)", (float(np.float32(1 / -MIN)), 1.0)),
        ("c = Relu(f) x = Div(one, c)", None),
        ("x = Mul(f, f)", (0.0, math.inf)),
        ("n = Neg(one) c = Clip(f, n, zero) x = Abs(c)", (0.0, 1.0)),
        ("n = Neg(one) c = Clip(f, n, zero) x = Relu(c)", (0.0, 0.0)),
    ],
)
def test_bounds_of_what_is_clamped(body: str, expected: tuple[float, float] | None) -> None:
    assert interval(body) == expected


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ("x = Sigmoid(f)", False),
        ("x = Clip(f, zero, one)", False),
        ("d = Clip(f, zero, one) x = Exp(d)", False),
        ("n = IsNaN(f) w = Where(n, zero, f) x = Tanh(w)", False),  # which operand is NaN where is not followed
        ("c = Cast<to=1>(i) x = Sigmoid(c)", True),
        ("c = Cast<to=1>(b) x = Exp(c)", True),
        ("c = Cast<to=1>(i) x = Sqrt(c)", False),  # of a negative number
        ("c = Cast<to=1>(b) x = Sqrt(c)", True),
        ("c = Cast<to=1>(i) x = Sin(c)", True),
        ("c = Cast<to=1>(b) e = Reciprocal(zero) x = Sin(e)", False),
        ("c = Cast<to=1>(i) x = Softmax(c)", True),
        ("x = Softmax(low)", False),  # of -inf
        ("c = Cast<to=1>(i) e = Exp(c) n = Neg(e) x = Add(e, n)", False),  # inf - inf
        ("c = Cast<to=1>(i) e = Exp(c) x = Add(e, one)", True),
        ("c = Cast<to=1>(i) e = Exp(c) d = Add(e, one) n = Neg(one) b1 = Clip(c, n, one) x = Mul(d, b1)", False),
        ("c = Cast<to=1>(b) x = Pow(third, c)", True),
        ("c = Cast<to=1>(i) n = Neg(one) d = Clip(c, n, one) x = Pow(d, third)", False),  # of a negative number
        ("c = Cast<to=1>(i) n = Neg(one) d = Clip(c, n, one) x = Pow(d, two)", True),
    ],
)
def test_what_is_proven_not_to_be_nan(body: str, wanted: bool) -> None:
    built = model(body)
    bounds = Bounds(analyse(built))
    assert (bounds.always(value(built.graph, "x")) is not None) is wanted, bounds.of(value(built.graph, "x"))


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("c = Cast<to=1>(b) x = Pow(third, c)", (0.333, 1.0)),
        ("c = Cast<to=1>(b) d = Add(c, one) x = Pow(d, two)", (1.0, 4.0)),
        ("n = Neg(one) c = Clip(f, n, one) x = Pow(c, two)", (-1.0, 1.0)),
        ("n = Neg(one) c = Clip(f, n, one) x = Pow(c, third)", (-1.0, 1.0)),
        ("c = Clip(f, zero, one) n = Neg(one) x = Pow(c, n)", None),  # 0 to the power of -1
        ("c = Clip(f, one, two) n = Neg(one) x = Pow(c, n)", (0.5, 1.0)),
        ("c = Neg(two) n = Neg(one) x = Pow(c, n)", (-0.5, 0.5)),
        ("s = Constant<value=int64 {1}>() e = Constant<value=int64 {9}>() r = Range(s, e, s) x = Pow(third, r)",
         (0.333**8, 0.333)),
        ("e = Constant<value=float {3.5}>() r = Range(one, e, one) x = Identity(r)", (1.0, 4.5)),
        ("e = Constant<value=float {16777220.0}>() r = Range(zero, e, third) x = Identity(r)", None),
        ("e = Constant<value=int64 {-7}>() s = Constant<value=int64 {-2}>() r = Range(n1, e, s) x = Cast<to=1>(r)",
         (-5.0, 1.0)),
    ],
)  # fmt: skip
def test_bounds_of_powers(body: str, expected: tuple[float, float] | None) -> None:
    """A kernel may be a little off."""
    found = interval(body)
    assert (found is None) == (expected is None)
    if found is not None and expected is not None:
        assert found == pytest.approx(expected, rel=2e-6)
        assert found[0] <= expected[0] and found[1] >= expected[1]


def test_a_power_that_underflows_may_be_0() -> None:
    assert interval("c = Cast<to=1>(i) d = Clip(c, one, hundred) t = Mul(third, third) x = Pow(t, d)")[0] == 0.0


def test_a_mean_whose_sum_overflows_has_no_bounds() -> None:
    assert interval("c = Cast<to=1>(b) d = Mul(c, large) x = ReduceMean(d)") is None


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("j = Cast<to=3>(i) x = DequantizeLinear(j, half, three)", (-65.5, 62.0)),
        ("j = Cast<to=3>(i) x = DequantizeLinear(j, half)", (-64.0, 63.5)),
        ("j = Cast<to=2>(i) x = DequantizeLinear(j, minus)", (-127.5, 0.0)),
        ("j = Cast<to=6>(i) x = DequantizeLinear(j, half)", (-(2.0**30), 2.0**30)),
        ("j = Cast<to=3>(i) x = DequantizeLinear(j, endless)", None),
        ("j = Cast<to=3>(i) x = DequantizeLinear(j, none)", None),
        ("j = Cast<to=3>(i) s = ReduceMax<keepdims=0>(f) x = DequantizeLinear(j, s)", None),
        ("j = Cast<to=17>(mixed) x = DequantizeLinear(j, half)", None),
    ],
)
def test_bounds_of_what_a_dequantize_linear_gives(body: str, expected: tuple[float, float] | None) -> None:
    constants = (
        "half = Constant<value=float {0.5}>() minus = Constant<value=float {-0.5}>() "
        "three = Constant<value=int8 {3}>() "
        "endless = Constant<value=float {inf}>() none = Constant<value=float {nan}>() "
    )
    assert interval(constants + body) == expected


def test_limits_of_a_clip_that_are_attributes() -> None:
    built = ir.from_proto(parse("y = Clip<min=-1.0, max=2.5>(q)", opset=10))
    assert Bounds(analyse(built)).of(value(built.graph, "y")) == Bound((-1.0, 2.5), True)


def test_complex_numbers_have_no_bounds() -> None:
    built = model("")
    array = np.array([1 + 2j], np.complex64)
    built.graph.register_initializer(ir.Value(name="turn", const_value=ir.tensor(array, name="turn")))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Bounds(analyse(built)).of(built.graph.initializers["turn"]) is None


ODD_CONSTANTS = (
    "float nan = {nan}, float inf = {inf}, float one = {1.0}, float half = {0.5}, float16 small = {32256}, "
    "int64 n0 = {0}, int64 largest = {9223372036854775807}, int64 odd = {9007199254740993}, float[0] none = {}, "
    "int64[1] far = {4611686018427387904}, int64[2] minus = {-1, -1}, int64[2] below = {-2147483648, 6}, "
    "int64[3] empty = {0, 4611686018427387904, 2}, int64[2] three = {3, 5}, float[2] pair = {1.0, 2.0}, "
    "int64[1] four = {4}, int64[0] nothing = {}, float[1,2] flat = {1, 2}, float[2,3] square = {1, 2, 3, 4, 5, 6}"
)
ODD = {
    "Range to NaN": "m = Range(nan, inf, one)",
    "Range of NaN in 16 bits": "m = Range(small, small, small)",
    "Pow of NaN": "m = Pow(nan, half)",
    "Range to a Pow that is NaN": "a = Neg(one) b = Pow(a, half) m = Range(one, b, one)",
    "whole NaN": "a = Cast<to = 7>(nan) m = Cast<to = 1>(a)",
    "negative sizes": "m = ConstantOfShape(minus)",
    "a size that nothing has": "m = ConstantOfShape(below)",
    "sizes that nothing has beside 0": "m = ConstantOfShape(empty)",
    "a rank that nothing has": "a = ConstantOfShape(far) m = ConstantOfShape(a)",
    "a rank that nothing has, reshaped": "a = ConstantOfShape(far) m = Reshape(one, a)",
    "elements in negative sizes": "m = Reshape(one, minus)",
    "no elements in sizes that nothing has": "m = Reshape(none, empty)",
    "joined sizes that differ": "m = Concat<axis = 0>(flat, square)",
    "no elements repeated": "m = Expand(none, three)",
    "two elements for five": "m = Expand(pair, three)",
    "a cut of a negative size": "a = ConstantOfShape(minus) m = Slice(a, four, far, n0)",
    "a cut of nothing": "a = Cast<to = 1>(n0) b = Slice(n0, nothing, nothing) m = Cast<to = 1>(b)",
    "0 divided by 0": "a = Div(n0, n0) m = Cast<to = 1>(a)",
    "condition of a float": "m = Where(nan, one, half)",
    "no divisor": "m = Reciprocal(none)",
    "integers that floats round": "a = Add(largest, odd) b = Cast<to = 1>(a) m = Mul(b, half)",
}


@pytest.mark.parametrize("use", ["z = Add(s, m)", "z = Div(s, m)"])
@pytest.mark.parametrize("name", ODD)
def test_numbers_that_no_size_has(name: str, use: str) -> None:
    """NaN, infinities, huge and negative numbers among the constants end in an answer, whatever is made of them, and in
    no warning."""
    proto = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 18]> g (float[B,4,S,8] q, float[B,4,T,8] k, float[B,4,T,8] v) => '
        f"(float[B,4,S,8] y) <{ODD_CONSTANTS}> {{ {ODD[name]} kt = Transpose<perm = [0, 1, 3, 2]>(k) "
        f"s = MatMul(q, kt) {use} p = Softmax<axis = -1>(z) y = MatMul(p, v) }}"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = fuse(ir.from_proto(proto), Options("ort"))
    assert len(report.blocks) == 1


def test_integers_that_floats_round_are_not_followed() -> None:
    odd = "int64 odd = {9007199254740993}, int64 even = {9007199254740992}, int64 n1 = {1}"
    assert held("x = Identity(odd)", initializers=odd) is None
    assert held("x = Identity(even)", initializers=odd) == {2.0**53}
    assert held("x = Add(even, n1)", initializers=odd) is None
