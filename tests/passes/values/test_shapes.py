"""Symbolic shapes and contents: stated by hand for small models, and checked against ONNX Runtime.

`Checked` runs each model at several sizes with every intermediate value exposed, and asserts every
inferred dim, dtype, content and scalar, so a test fails on any false claim, not only on what it names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime as ort
import pytest

from fa_compiler.op_registry import DOMAIN
from fa_compiler.passes.algebra.symbolic import Dim
from fa_compiler.passes.values.shapes import ShapeInfo, analyse

B, S, H, D, P = (Dim.symbol(name) for name in "BSHDP")
SIZES = ({"B": 2, "S": 5, "P": 3, "H": 4, "D": 8}, {"B": 1, "S": 1, "P": 1, "H": 1, "D": 1})


def parse(inputs: str, body: str, opset: int = 20, more: str = "", functions: str = "") -> onnx.ModelProto:
    """A model whose graph is named g and whose output `y` has no declared shape."""
    text = f'<ir_version: 8, opset_import: ["": {opset}, "com.microsoft": 1, "com.microsoft.nchwc": 1, "f": 1]> '
    text += f"g ({inputs}) => (y) {more}"
    proto = onnx.parser.parse_model(f"{text} {{ {body} }} {functions}")
    assert proto is not None
    return proto


class Checked:
    """A model, what is inferred of it, and a check of all of it against real runs."""

    def __init__(
        self,
        proto: onnx.ModelProto,
        sizes: Sequence[Mapping[str, int]] = SIZES,
        feeds: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        self.model = ir.from_proto(proto)
        self.info: ShapeInfo = analyse(self.model)
        self.values = {value.name: value for value in self.model.graph.inputs}
        self.values |= {value.name: value for node in self.model.graph for value in node.outputs}
        self.runs = sum(self._check(proto, size, feeds or {}) for size in sizes)

    def shape(self, name: str = "y") -> tuple[Dim, ...] | None:
        return self.info.shape(self.values[name])

    def content(self, name: str = "y") -> object:
        return self.info.content(self.values[name])

    def scalar(self, name: str = "y") -> float | None:
        return self.info.scalar(self.values[name])

    def _check(self, proto: onnx.ModelProto, sizes: Mapping[str, int], given: Mapping[str, np.ndarray]) -> int:
        exposed = onnx.ModelProto()
        exposed.CopyFrom(proto)
        del exposed.graph.output[:]
        for node in exposed.graph.node:
            exposed.graph.output.extend(onnx.ValueInfoProto(name=name) for name in node.output if name)
        options = ort.SessionOptions()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.log_severity_level = 4
        session = ort.InferenceSession(exposed.SerializeToString(), options, ["CPUExecutionProvider"])
        feeds = {item.name: given.get(item.name, sample(item, sizes)) for item in session.get_inputs()}
        try:
            results = session.run(None, feeds)
        except Exception:  # nothing is claimed of a run that fails
            return 0
        bindings = dict(sizes)
        for item, result in zip(session.get_outputs(), results, strict=True):
            self._judge(item.name, np.asarray(result), bindings)
        return 1

    def _judge(self, name: str, real: np.ndarray, bindings: dict[str, int]) -> None:
        fact = self.info.fact(self.values[name])
        assert fact.dtype == ir.DataType.from_numpy(real.dtype), name
        if fact.shape is not None:
            assert len(fact.shape) == real.ndim, (name, fact.shape, real.shape)
            for dim, length in zip(fact.shape, real.shape, strict=True):
                same(dim, length, bindings, name)
        if fact.content is not None:
            assert fact.content.shape == real.shape, name
            for item, element in zip(fact.content.reshape(-1), real.reshape(-1), strict=True):
                if isinstance(item, Dim):
                    same(item, int(element), bindings, name)
                else:
                    assert np.array_equal(item, element, equal_nan=True), (name, item, element)


def same(dim: Dim, real: int, bindings: dict[str, int], name: str) -> None:
    atom = dim.single_atom
    if atom is not None and atom.op == "fresh":
        bindings.setdefault(atom.name, real)
    assert dim.evaluate(bindings) in (real, None), (name, dim, real)


def sample(item: ort.NodeArg, sizes: Mapping[str, int]) -> np.ndarray:
    shape = [sizes[dim] if isinstance(dim, str) else 2 if dim is None else dim for dim in item.shape]
    rng = np.random.default_rng(0)
    dtype = np.dtype({"float": "float32"}.get(item.type[7:-1], item.type[7:-1]))
    return rng.integers(0, 2, shape, dtype) if dtype.kind in "iu" else (rng.standard_normal(shape) * 2).astype(dtype)


# -- attention as exporters write it ---------------------------------------------------------------


def test_heads_through_minus_one_reshapes() -> None:
    """dynamo transposes k through rank 3 with shape vectors built by Shape, Slice and Concat."""
    found = Checked(
        parse(
            "float[B,S,H,16] x",
            """
            t = Transpose<perm = [0, 2, 1, 3]>(x)
            shape = Shape(t)
            minus = Constant<value_ints = [-1]>()
            two = Constant<value_ints = [2]>()
            four = Constant<value_ints = [4]>()
            zero = Constant<value_ints = [0]>()
            tail = Slice(shape, two, four)
            front = Slice(shape, zero, two)
            flat = Concat<axis = 0>(minus, tail)
            three = Reshape(t, flat)
            turned = Transpose<perm = [0, 2, 1]>(three)
            last = Slice(shape, minus, four)
            middle = Slice(shape, two, Three)
            back = Concat<axis = 0>(front, last, middle)
            y = Reshape(turned, back)
            """,
            more="<int64[1] Three = {3}>",
        )
    )
    assert found.shape("three") == (B * H, S, 16)
    assert found.shape() == (B, H, 16, S)
    assert found.runs == 2


def test_torchscript_computes_the_scale_in_the_graph() -> None:
    """Sqrt(Cast(Div(1, Sqrt(Cast(Slice(Shape(q))))))): head size 16 gives sqrt(0.25), rounded to fp32."""
    found = Checked(
        parse(
            "float[B,S,48] x",
            """
            target = Constant<value_ints = [0, 0, 4, 12]>()
            q = Reshape(x, target)
            shape = Shape(q)
            minus = Constant<value_ints = [-1]>()
            end = Constant<value_ints = [9223372036854775807]>()
            size = Slice(shape, minus, end)
            cast = Cast<to = 1>(size)
            root = Sqrt(cast)
            one = Constant<value_floats = [1.0]>()
            inverse = Div(one, root)
            again = Cast<to = 1>(inverse)
            scale = Sqrt(again)
            y = Mul(q, scale)
            """,
        )
    )
    expected = np.sqrt(np.float32(1) / np.sqrt(np.float32(12)))
    assert found.scalar("scale") == float(expected)
    assert found.shape("scale") == (1,)
    assert found.shape() == (B, S, 4, 12)


def test_scalar_is_rounded_to_the_dtype() -> None:
    found = Checked(
        parse(
            "float16[S] x",
            """
            one = Cast<to = 10>(One)
            three = Cast<to = 10>(Three)
            third = Div(one, three)
            power = Pow(third, Half)
            r = Reciprocal(power)
            y = Mul(x, r)
            """,
            more="<float[1] One = {1.0}, float[1,1] Three = {3.0}, float Half = {0.5}>",
        ),
        sizes=(),
    )
    third = np.float16(1) / np.float16(3)
    assert found.scalar("third") == float(third)
    assert found.scalar("r") == float(np.float16(1) / np.float16(np.sqrt(np.float32(third))))
    assert found.info.shape(found.values["third"]) == (1, 1)


def test_repeat_kv_with_torchscripts_expand_wrapper() -> None:
    """Where(Equal(shape, -1), ones, shape) around an Expand: the shape holds no -1, so it is the shape."""
    found = Checked(
        parse(
            "float[B,2,S,8] k",
            """
            axes = Constant<value_ints = [2]>()
            five = Unsqueeze(k, axes)
            shape = Shape(k)
            b = Gather<axis = 0>(shape, Zero)
            s = Gather<axis = 0>(shape, Two)
            bv = Unsqueeze(b, Axis0)
            sv = Unsqueeze(s, Axis0)
            target = Concat<axis = 0>(bv, Heads, Group, sv, Minus)
            filled = ConstantOfShape<value = int64[1] {1}>(Five)
            negative = Mul(filled, Minus)
            is_minus = Equal(target, negative)
            wide = Where(is_minus, filled, target)
            expanded = Expand(five, wide)
            joined = Concat<axis = 0>(bv, Four, sv, Minus)
            y = Reshape(expanded, joined)
            """,
            more="<int64 Zero = {0}, int64 Two = {2}, int64[1] Axis0 = {0}, int64[1] Heads = {2},"
            " int64[1] Group = {3}, int64[1] Minus = {-1}, int64[1] Five = {5}, int64[1] Four = {6}>",
        )
    )
    assert found.content("wide") == (B, 2, 3, S, 1)
    assert found.shape("expanded") == (B, 2, 3, S, 8)
    assert found.shape() == (B, 6, S, 8)


def test_tf2onnx_folds_heads_by_reduce_prod() -> None:
    found = Checked(
        parse(
            "float[B,S,H,16] x",
            """
            shape = Shape(x)
            outer = Gather<axis = 0>(shape, Outer)
            inner = Gather<axis = 0>(shape, Inner)
            rows = ReduceProd<axes = [0], keepdims = 1>(outer)
            columns = ReduceProd<axes = [0], keepdims = 1>(inner)
            target = Concat<axis = 0>(rows, columns)
            flat = Reshape(x, target)
            y = Reshape(flat, shape)
            """,
            more="<int64[2] Outer = {0, 1}, int64[2] Inner = {2, 3}>",
            opset=13,
        )
    )
    assert found.shape("flat") == (B * S, 16 * H)
    assert found.shape() == (B, S, H, 16)


def test_past_and_the_window_of_a_constant_triangle() -> None:
    """gptneo: triangle[:, :, T-S:T, :T] masks scores [B, 4, S, T]; that Where works only if T <= 64."""
    found = Checked(
        parse(
            "float[B,4,S,16] q, float[B,4,P,16] past, bool[1,1,64,64] triangle",
            """
            k = Concat<axis = 2>(past, q)
            t = Shape<start = 2, end = 3>(k)
            s = Shape<start = 2, end = 3>(q)
            from = Sub(t, s)
            rows = Slice(triangle, from, t, Axis2)
            window = Slice(rows, Zero, t, Axis3)
            turned = Transpose<perm = [0, 1, 3, 2]>(k)
            scores = MatMul(q, turned)
            y = Where(window, scores, Low)
            """,
            more="<int64[1] Axis2 = {2}, int64[1] Axis3 = {3}, int64[1] Zero = {0}, float Low = {-3e38}>",
        ),
        sizes=(*SIZES, {"B": 2, "S": 4, "P": 60}, {"B": 2, "S": 5, "P": 60}, {"B": 1, "S": 1, "P": 63}),
    )
    assert found.shape("k") == (B, 4, P + S, 16)
    assert found.content("from") == (P,)
    assert found.shape("scores") == (B, 4, S, P + S)
    assert found.shape() == (B, 4, S, P + S)
    window = found.shape("window")
    assert window is not None and window[3] == Dim.min(P + S, 64) and window[2] != S
    assert found.runs == 4  # S + P = 65 fails, as it should


def test_mask_built_from_ranges() -> None:
    found = Checked(
        parse(
            "float[B,4,S,D] q, int64[B,S] mask",
            """
            dims = Shape(mask)
            s = Gather<axis = 0>(dims, One)
            r = Range(Zero, s, One)
            row = Unsqueeze(r, Axis0)
            column = Unsqueeze(r, Axis1)
            causal = LessOrEqual(row, column)
            four = Unsqueeze(mask, Axes12)
            keep = Cast<to = 9>(four)
            both = And(causal, keep)
            bias = Where(both, FZero, Low)
            k = Transpose<perm = [0, 1, 3, 2]>(q)
            scores = MatMul(q, k)
            y = Add(scores, bias)
            """,
            more="<int64 Zero = {0}, int64 One = {1}, int64[1] Axis0 = {0}, int64[1] Axis1 = {1},"
            " int64[2] Axes12 = {1, 2}, float FZero = {0.0}, float Low = {-3e38}>",
        )
    )
    assert found.shape("causal") == (S, S)
    assert found.shape("bias") == (B, 1, S, S)
    assert found.shape() == (B, 4, S, S)


# -- what must not be believed ---------------------------------------------------------------------


def test_unrelated_names_are_not_equal() -> None:
    found = Checked(parse("float[S,4] a, float[P,4] b", "y = Add(a, b)"))
    shape = found.shape()
    assert shape is not None and shape[0] not in (S, P) and shape[1] == 4


def test_value_info_of_intermediate_values_is_not_believed() -> None:
    proto = parse("float[B,S] x", "t = Identity(x) u = f.unknown(x) w = Add(t, u) y = Add(w, w)")
    for name, dims in (("t", [7, 7]), ("u", [7, "S"])):
        proto.graph.value_info.append(onnx.helper.make_tensor_value_info(name, 1, dims))
    found = Checked(proto, sizes=())
    assert found.shape("t") == (B, S)
    unknown = found.shape("u")
    assert unknown is not None and len(unknown) == 2
    assert unknown[0].const is None and unknown[1] != S and not unknown[0].is_known


def test_an_unknown_operator_without_a_rank_gives_nothing() -> None:
    found = Checked(
        parse("float[B,S] x", "u = f.unknown(x) t = Reshape(u, To) y = Relu(u)", more="<int64[2] To = {-1, 8}>"), ()
    )
    assert found.shape("u") is None and found.shape() is None
    rows = found.shape("t")
    assert rows is not None and rows[1] == 8 and rows[0].const is None


def test_an_overridable_initializer_is_no_constant() -> None:
    text = "float[B,8] x, int64[2] to = {4, 2}, float scale = {3.0}"
    found = Checked(parse(text, "t = Reshape(x, to) y = Mul(t, scale)"), sizes=())
    assert found.content("to") is None and found.scalar("scale") is None
    shape = found.shape()
    assert shape is not None and shape[0].const is None
    # Before IR version 4 every initializer had to be listed as an input, and none could be replaced.
    old = parse(text, "t = Reshape(x, to) y = Mul(t, scale)")
    old.ir_version = 3
    assert Checked(old, sizes=()).scalar("scale") == 3.0


def test_a_reshape_target_that_may_be_negative_is_not_a_dim() -> None:
    """The second entry is an input: -1 in this run, so that claiming it as the dim would be false."""
    found = Checked(
        parse(
            "float[4,6] x, int64[1] n", "to = Concat<axis = 0>(Two, n) y = Reshape(x, to)", more="<int64[1] Two = {2}>"
        ),
        feeds={"n": np.array([-1])},
    )
    shape = found.shape()
    assert shape is not None and shape[0] == 2 and shape[1].const is None
    assert found.runs == 2


def test_unknown_integers_keep_their_identity() -> None:
    """Entries that are not followed get one symbol each, the same wherever the vector is read."""
    found = Checked(
        parse(
            "float[B] x, int64[1] n",
            "b = Shape(x) v = Concat<axis = 0>(b, n, n) a = ConstantOfShape(v) c = ConstantOfShape(v) y = Add(a, c)",
        ),
    )
    assert found.shape("a") == found.shape("c") == found.shape()
    shape = found.shape()
    assert shape is not None and shape[0] == B


def test_integer_arithmetic_that_wraps_around_is_not_followed() -> None:
    found = Checked(
        parse("float[S] x", "t = Add(Big, Big) u = Cast<to = 6>(Big) y = Add(t, t)", more=f"<int64 Big = {{{2**62}}}>")
    )
    assert found.content("t") is None and found.content("u") is None


@pytest.mark.parametrize(
    ("sizes", "index", "expected"),
    [
        ("int64[2] n = {2, 4}", 1, (B, 4)),
        ("int64[2] n = {2, 4}", -2, (B, 2)),
        ("int64 n = {4}", 0, (B, 4)),
        ("int64 n = {4}", 1, (B, 2)),
        ("int64[1] n = {6}", 0, (B, 6)),
    ],
)
def test_parts_of_a_sequence(sizes: str, index: int, expected: tuple[Dim | int, ...]) -> None:
    """As torch writes a split where its sizes are computed, or where nothing was folded."""
    body = "s = SplitToSequence<axis = 1>(x, n) y = SequenceAt(s, i)"
    model = parse("float[B,6] x", body, more=f"<{sizes}, int64 i = {{{index}}}>")
    shape = Checked(model, sizes=()).shape()
    assert shape == expected and shape is not None
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (result,) = session.run(None, {"x": np.zeros((3, 6), np.float32)})
    assert [size.evaluate({"B": 3}) for size in shape] == list(result.shape)


def test_parts_of_unknown_size() -> None:
    for inputs, sizes in (("float[B,S] x", "int64 n = {4}"), ("float[B,6] x, int64[2] n", "int64 m = {0}")):
        body = "s = SplitToSequence<axis = 1>(x, n) y = SequenceAt(s, i)"
        found = Checked(parse(inputs, body, more=f"<{sizes}, int64 i = {{0}}>"), sizes=())
        shape = found.shape()
        assert shape is None or shape[1].const is None


def test_an_axis_that_is_named_twice_makes_no_shape() -> None:
    for op_type in ("Unsqueeze", "Squeeze", "ReduceSum"):
        found = Checked(parse("float[1,1,1] x", f"y = {op_type}(x, a)", more="<int64[2] a = {1, 1}>"), sizes=())
        assert found.shape() is None


# -- operators -------------------------------------------------------------------------------------

COUNTED = "n = Shape<start = 1, end = 2>(x) back = Neg(n)"
ENDS = "<int64[1] f = {0}, int64[1] e = {9223372036854775807}, int64[1] a = {1}, float[1,2] t = {1, 2}>"
"""A Slice of the last S elements, of which there are no more: XLM takes what is new of a sequence so."""


REPEATS = "int64 n = {2}, int64[2] v = {1, 3}, int64[1] m = {-1}"
REPEATED = "row = OneHot(i, n, v) t = Reshape(row, m) y = Tile(x, t)"
"""One dimension is repeated: TorchScript writes repeat_interleave so, with a OneHot of the dimension."""
CHUNK_NUMBERS = "<int64[1] o = {1}, int64[1] two = {2}, int64[1] four = {4}, int64[2] pair = {2, 2}>"
CHUNK = (
    "b = Shape<end = 1>(x) s = Shape<start = 1, end = 2>(x) stop = Min(s, four) rows = Slice(x, two, stop, o) "
    "n = Sub(stop, two) to = Concat<axis = 0>(b, n, pair) y = Reshape(rows, to)"
)
"""The rows 2 and 3, as far as there are some. Their number is -1 where there is one row: the Reshape then finds 0."""


@pytest.mark.parametrize(
    ("opset", "inputs", "body", "more", "expected"),
    [
        (12, "float[B,1,S] x", "y = Squeeze<axes = [1]>(x)", "", (B, S)),
        (17, "float[2,3] x", "y = ReduceSum<noop_with_empty_axes = 2>(x)", "", (1, 1)),
        (17, "float[1,3,1] x", "y = Squeeze(x, none)", "<int64[0] none = {}>", (3,)),
        (12, "float[B,S] x", "y = Unsqueeze<axes = [1, 3]>(x)", "", (B, 1, S, 1)),
        (9, "float[B,S] x", "y = Slice<axes = [1], starts = [0], ends = [1]>(x)", "", (B, Dim.min(S, 1))),
        (15, "float[B,S] x", f"{COUNTED} y = Slice(x, back, e, a)", ENDS, (B, S)),
        (15, "float[B,S] x", f"{COUNTED} z = Slice(t, f, n, a) y = Slice(z, back, e, a)", ENDS, (1, Dim.min(S, 2))),
        (12, "float[B,6] x", "y, z = Split<axis = 1, split = [2, 4]>(x)", "", (B, 2)),
        (13, "float[B,6] x", "y, z = Split<axis = 1>(x, n)", "<int64[2] n = {1, 5}>", (B, 1)),
        (18, "float[B,7] x", "z, y = Split<axis = 1, num_outputs = 2>(x)", "", (B, 3)),
        (12, "float[B,S] x", "y = ReduceSum<axes = [1]>(x)", "", (B, 1)),
        (13, "float[B,S] x", "y = ReduceSum<keepdims = 0>(x, a)", "<int64[1] a = {-1}>", (B,)),
        (13, "float[B,S] x", "y = ReduceMax<axes = [0], keepdims = 0>(x)", "", (S,)),
        (18, "float[B,S] x", "y = ReduceMean(x, a)", "<int64[1] a = {1}>", (B, 1)),
        (18, "float[B,S] x", "y = ReduceMean<noop_with_empty_axes = 1>(x)", "", (B, S)),
        (20, "float[B,S] x", "y = ReduceMean<keepdims = 0>(x)", "", ()),
        (20, "float[B,S,H,D] x", "y = Flatten<axis = 2>(x)", "", (B * S, H * D)),
        (20, "float[B,S,8] x", "y = Reshape(x, to)", "<int64[4] to = {0, -1, 2, 4}>", (B, S, 2, 4)),
        (14, "float[B,0,4] x", "y = Reshape<allowzero = 1>(x, to)", "<int64[2] to = {0, 7}>", (0, 7)),
        (20, "float[B,S,4] x", CHUNK, CHUNK_NUMBERS, (B, Dim.min(S, 4) - Dim.min(S, 2), 2, 2)),
        (
            20,
            "float[B,1] x, float[B,S] r",
            "s = Shape<start = 1>(r) n = Sub(s, o) y = Expand(x, n)",
            "<int64[1] o = {1}>",
            (B, S - 1),
        ),
        (20, "float[B,S] x", "y = Tile(x, n)", "<int64[2] n = {3, 2}>", (3 * B, 2 * S)),
        (20, "float[B,S] x", "y = Pad(x, p)", "<int64[4] p = {0, 1, 2, 3}>", (B + 2, S + 4)),
        (20, "float[B,S] x", "y = Pad(x, p, , a)", "<int64[2] p = {1, 2}, int64[1] a = {-1}>", (B, S + 3)),
        (20, "float[B,S,5] x", "y, i = TopK(x, k)", "<int64[1] k = {3}>", (B, S, 3)),
        *(
            (
                20,
                "float[B,S] x",
                f"n = Shape<start = 1, end = 2>(x) m = Neg(n) y = Slice({bounds}, one)",
                "<int64[1] one = {1}, int64[1] all = {9223372036854775807}>",
                (B, size),
            )
            for bounds, size in (("x, m, all, one", S), ("x, m, m, one", 0))
        ),
        (20, "float[B,S] x", "y = ArgMax<axis = 1, keepdims = 0>(x)", "", (B,)),
        (20, "float[B,S,4] x, float[B,4,S] w", "y = MatMul(x, w)", "", (B, S, S)),
        (20, "float[4] x, float[B,4,S] w", "y = MatMul(x, w)", "", (B, S)),
        (20, "float[S,4] x, float[D,4] w", "y = Gemm<transB = 1>(x, w)", "", (S, D)),
        (20, "float[B,S,H,8] x, float[B,P,H,8] k", 'y = Einsum<equation = "btnd,bsnd->bnts">(x, k)', "", (B, H, S, P)),
        (20, "float[B,S,4] x, float[4,D] k", 'y = Einsum<equation = "...d,de->...e">(x, k)', "", (B, S, D)),
        (20, "float[B,S] x, float[S,P] k", 'y = Einsum<equation = "ij,jk">(x, k)', "", (B, P)),
        (20, "float[S,4] x, int64[B,P] i", "y = Gather(x, i)", "", (B, P, 4)),
        (20, "float[2,3,4] x, int64[B,2] i", "y = GatherND(x, i)", "", (B, 4)),
        (20, "float[B,S] x", "y = NonZero(c)", "<float[2,3] c = {0.0, 5.0, -1.0, 0.0, 0.0, 2.0}>", (2, 3)),
        (20, "float[B,S] x", "y = NonZero(c)", "<int64 c = {7}>", (1, 1)),
        (20, "float[B,S] x", "y = NonZero(c)", "<int64[2] c = {0, 0}>", (1, 0)),
        (20, "float[2,S] x, int64[B,1] i", "y = GatherElements(x, i)", "", (B, 1)),
        (20, "int64[B,S] x", "y = OneHot(x, n, v)", "<int64 n = {5}, float[2] v = {0.0, 1.0}>", (B, S, 5)),
        *(
            (20, "float[B,S] x", REPEATED, f"<int64[1] i = {{{i}}}, {REPEATS}>", shape)
            for i, shape in ((1, (B, S * 3)), (-2, (B * 3, S)), (2, (B, S)))
        ),
        (
            20,
            "float[B,S] x",
            "r = OneHot<axis = 1>(i, n, v) f = Reshape(r, m) y = Tile(x, f)",
            "<int64[1] i = {-1}, int64 n = {2}, int64[2] v = {1, 3}, int64[1] m = {-1}>",
            (B, 3 * S),
        ),
        (
            20,
            "float[B,S] x",
            "s = Shape<start = 1>(x) n = Neg(s) y = Slice(x, n, e, a)",
            "<int64[1] e = {9223372036854775807}, int64[1] a = {1}>",
            (B, S),
        ),
        (20, "float[B,S,4] x, float[4] g", "y = LayerNormalization(x, g)", "", (B, S, 4)),
        (20, "float[B,3,8,D] x, float[6,3,1,1] w", "y = Conv<strides = [2, 1]>(x, w)", "", (B, 6, 4, D)),
        (16, "float[B,3,8,D] x, float[B,S,4,2] g", "y = GridSample(x, g)", "", (B, 3, S, 4)),
        (20, "float[B,S] x", "n = Size(x) v = Reshape(n, m) y = ConstantOfShape(v)", "<int64[1] m = {1}>", (B * S,)),
        (20, "float[B,S] x", "y = Trilu(x)", "", (B, S)),
        (20, "float[B,S] x", "y = Range(a, b, c)", "<float a = {0.0}, float b = {7.0}, float c = {2.0}>", (4,)),
        (20, "int64[B,S] x", "y = Range(a, b, c)", "<int64 a = {5}, int64 b = {0}, int64 c = {-2}>", (3,)),
        (20, "float[B,S] x", "y = Dropout(x)", "", (B, S)),
        (20, "float[B,S] x", "t = Shape(x) y = Expand(one, t)", "<float one = {1.0}>", (B, S)),
        (20, "float[B,S] x, float[S] s", "a = com.microsoft.FusedMatMul<transA = 1>(x, x) y = Add(a, s)", "", (S, S)),
        (
            20,
            "float[B,S,8] x, int8[8,4] w, float[S] s",
            "q, c, z = DynamicQuantizeLinear(x) i = MatMulInteger(q, w, z) f = Cast<to = 1>(i) y = Mul(f, c)",
            "",
            (B, S, 4),
        ),
        (
            20,
            "float[B,S] x",
            "q = QuantizeLinear(x, c, z) y = DequantizeLinear(q, c, z)",
            "<float c = {0.5}, uint8 z = {3}>",
            (B, S),
        ),
        (
            20,
            "float[B,S,32] x, uint8[6,1,16] w, float[6] c",
            "y = com.microsoft.MatMulNBits<K = 32, N = 6, bits = 4, block_size = 32>(x, w, c)",
            "",
            (B, S, 6),
        ),
        (
            20,
            "float[B,S,8] x, float[B,S,8] r, float[8] g",
            "y, m, v, z = com.microsoft.SkipLayerNormalization(x, r, g)",
            "",
            (B, S, 8),
        ),
        (
            20,
            "float[B,S] x",
            "q = QuantizeLinear(n, c, z) m = DequantizeLinear(q, c, z) l = DequantizeLinear(w, c) y = Add(m, l)",
            "<float[5] n = {0.2, 0.25, 0.75, -9.0, 200.0}, float c = {0.5}, uint8 z = {3}, "
            "int8[5] w = {-128, 127, 0, 1, 2}>",
            (5,),
        ),
        (20, "float[B,S] x, float[S,4] w", 'y = com.microsoft.FusedGemm<activation = "Relu">(x, w)', "", (B, 4)),
        (
            20,
            "float[B,3,8,D] x, float[6,3,3,1] w, float[6] b",
            'y = com.microsoft.FusedConv<activation = "Relu", pads = [1, 0, 1, 0]>(x, w, b)',
            "",
            (B, 6, 8, D),
        ),
        (20, "uint8[B,3,8,D] x, uint8[6,3,1,1] w", "y = ConvInteger<strides = [2, 1]>(x, w)", "", (B, 6, 4, D)),
        (
            20,
            "uint8[B,3,8,D] x, uint8[6,3,1,1] w",
            "y = QLinearConv<strides = [2, 1]>(x, c, z, w, c, z, c, z)",
            "<float c = {0.5}, uint8 z = {3}>",
            (B, 6, 4, D),
        ),
        (
            20,
            "uint8[S,B] x, uint8[S,4] w",
            "y = com.microsoft.QGemm<transA = 1>(x, c, z, w, c, z)",
            "<float c = {0.5}, uint8 z = {3}>",
            (B, 4),
        ),
        (
            20,
            "uint8[B,S] x, uint8[S] w, bool[B,1] m",
            "a = com.microsoft.QLinearAdd(x, c, z, w, c, z, c, z) b = com.microsoft.QLinearMul(w, c, z, a, c, z, c, z) "
            "d = com.microsoft.QLinearSigmoid(b, c, z, c, z) "
            "y = com.microsoft.QLinearWhere(m, d, c, z, w, c, z, c, z)",
            "<float c = {0.5}, uint8 z = {3}>",
            (B, S),
        ),
        (
            20,
            "uint8[B,S] x, uint8[B,4] w",
            "y = com.microsoft.QLinearConcat<axis = 1>(c, z, x, c, z, w, c, z)",
            "<float c = {0.5}, uint8 z = {3}>",
            (B, S + 4),
        ),
        (
            20,
            "uint8[6,16] x, int32[B,S] i, float[6,2] c",
            "y = com.microsoft.GatherBlockQuantized<block_size = 16, quantize_axis = 1, bits = 4>(x, i, c)",
            "",
            (B, S, 32),
        ),
        (
            20,
            "float[B,16,8,D] x, float[16,16,1,1] w, float[16] b",
            "r = com.microsoft.nchwc.ReorderInput(x) c = com.microsoft.nchwc.Conv<strides = [2, 1]>(r, w, b) "
            "p = com.microsoft.nchwc.MaxPool<kernel_shape = [2, 1]>(c) "
            "y = com.microsoft.nchwc.ReorderOutput<channels = 16>(p)",
            "",
            (B, 16, 3, D),
        ),
        (
            23,
            "float[B,S,32] q, float[B,S,16] k, float[B,S,8] v",
            "y = Attention<q_num_heads = 4, kv_num_heads = 2>(q, k, v)",
            "",
            (B, S, 16),
        ),
    ],
)
def test_operator(opset: int, inputs: str, body: str, more: str, expected: tuple[Dim | int, ...]) -> None:
    found = Checked(parse(inputs, body, opset, more))
    assert found.shape() == expected
    assert found.runs > 0


@pytest.mark.parametrize(("dilation", "same"), [(1, True), (2, False)])
def test_a_dilated_window_that_is_to_keep_the_size_does_not(dilation: int, same: bool) -> None:
    """ONNX Runtime pads it by the size of one that is not dilated."""
    body = f'y = MaxPool<kernel_shape = [3], dilations = [{dilation}], auto_pad = "SAME_UPPER">(x)'
    found = Checked(parse("float[2,3,S] x", body), [{"S": size} for size in (2, 5, 7)])
    shape = found.shape()
    assert shape is not None and (shape[2] == S) is same
    assert found.runs == 3


@pytest.mark.parametrize(
    ("start", "end", "step", "expected"),
    [
        (0, 2**63 - 1, 1, S),
        (0, 10**9, 1, S),
        (1, 2**63 - 1, 1, Dim.max(S - 1, 0)),
        (0, -1, 1, Dim.max(S - 1, 0)),
        (-1, 2**63 - 1, 1, Dim.min(S, 1)),
        (0, 3, 1, Dim.min(S, 3)),
        (2, 4, 1, Dim.min(S, 4) - Dim.min(S, 2)),
        (0, 2**63 - 1, 2, Dim.ceildiv(S, 2)),
        (1, 2**63 - 1, 2, Dim.ceildiv(Dim.max(S - 1, 0), 2)),
        (-1, -(2**63), -1, S),
    ],
)
def test_slices_of_a_symbolic_axis(start: int, end: int, step: int, expected: Dim) -> None:
    more = f"<int64[1] a = {{{start}}}, int64[1] b = {{{end}}}, int64[1] ax = {{0}}, int64[1] c = {{{step}}}>"
    sizes = [{"S": size} for size in range(7)]
    found = Checked(parse("float[S] x", "y = Slice(x, a, b, ax, c)", more=more), sizes)
    assert found.shape() == (expected,)
    assert found.runs == len(sizes)


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [(-1, -(2**63), 3), (7, -3, 2), (1, -9, 2), (-9, -(2**63), None), (7, 2**63 - 1, None), (1, 2**31 - 1, None)],
)
def test_reversed_slices_of_a_known_axis(start: int, end: int, expected: int | None) -> None:
    """A start before the first element counts as the first; an end at the largest number is the last in ONNX, and
    before the first in ONNX Runtime."""
    more = f"<int64[1] a = {{{start}}}, int64[1] b = {{{end}}}, int64[1] ax = {{0}}, int64[1] c = {{-1}}>"
    body = "y = Slice(x, a, b, ax, c) z = Shape(y) s = Shape(w) v = Slice(s, a, b, ax, c)"
    found = Checked(parse("float[3] x, float[2,4,6] w", body, more=more), [{}])
    assert found.runs == 1
    for name in ("y", "v"):
        (size,) = found.shape(name)
        assert size.const == expected


def test_splitting_an_axis_and_joining_it_again() -> None:
    """The first of a prepended axis and the last but one, as packed-sequence masks are made."""
    found = Checked(
        parse(
            "int64[B,S] x",
            """
            first = Slice(x, Zero, One, One)
            joined = Concat<axis = 1>(first, x)
            later = Slice(joined, One, End, One)
            y = Sub(later, x)
            """,
            more="<int64[1] Zero = {0}, int64[1] One = {1}, int64[1] End = {9223372036854775807}>",
        ),
        sizes=({"B": 2, "S": 4}, {"B": 2, "S": 1}, {"B": 2, "S": 0}),
    )
    assert found.shape() == (B, S)


def test_content_through_movement_of_small_tensors() -> None:
    """TorchScript's Pad: pairs of sizes are made rank 2, reversed, transposed and flattened."""
    found = Checked(
        parse(
            "float[B,S] x",
            """
            s = Shape(x)
            pairs = Concat<axis = 0>(s, Pair)
            square = Reshape(pairs, TwoTwo)
            reversed = Slice(square, Minus, Start, Zero, Minus)
            turned = Transpose<perm = [1, 0]>(reversed)
            flat = Reshape(turned, Minus)
            y = Pad(x, flat)
            """,
            more="<int64[2] Pair = {1, 2}, int64[2] TwoTwo = {2, 2}, int64[1] Minus = {-1},"
            f" int64[1] Start = {{{-(2**63)}}}, int64[1] Zero = {{0}}>",
        )
    )
    assert found.content("flat") == (1, B, 2, S)
    assert found.shape() == (B + 3, 2 * S + B)


def test_comparisons_decide_only_what_is_proven() -> None:
    found = Checked(
        parse(
            "float[B,S] x",
            """
            s = Shape(x)
            negative = Less(s, Zeros)
            plus = Add(s, Ones)
            positive = Greater(plus, Zeros)
            maybe = Equal(s, Ones)
            chosen = Where(maybe, s, Ones)
            y = Where(positive, s, Zeros)
            """,
            more="<int64[2] Zeros = {0, 0}, int64[2] Ones = {1, 1}>",
        )
    )
    assert found.content("negative") == (0, 0)
    assert found.content("positive") == (1, 1)
    assert found.content() == (B, S)
    maybe, chosen = found.content("maybe"), found.content("chosen")
    assert isinstance(maybe, tuple) and isinstance(chosen, tuple)
    assert all(item.const is None for item in (*maybe, *chosen))


# -- subgraphs and functions -----------------------------------------------------------------------


def test_if_gives_what_both_branches_give() -> None:
    found = Checked(
        parse(
            "float[B,S,8] x, bool c",
            """
            y = If (c) <
                then_branch = yes () => (float[B,S,8] p) { p = Relu(x) },
                else_branch = no () => (float[B,n,8] q) { t = Slice(x, Zero, One, One) q = Neg(t) }
            >
            """,
            more="<int64[1] Zero = {0}, int64[1] One = {1}>",
        ),
        feeds={"c": np.array(False)},
    )
    shape = found.shape()
    assert shape is not None and (shape[0], shape[2]) == (B, 8) and shape[1] != S
    inner = {
        value.name: found.info.shape(value)
        for node in found.model.graph
        for attr in node.attributes.values()
        for inside in attr.as_graph()
        for value in inside.outputs
    }
    assert inner == {"p": (B, S, 8), "t": (B, Dim.min(S, 1), 8), "q": (B, Dim.min(S, 1), 8)}


def test_if_whose_condition_is_known_gives_what_the_taken_branch_gives() -> None:
    """TorchScript's squeeze of an axis that it traced as 1."""
    found = Checked(
        parse(
            "float[B,S,1] x",
            """
            s = Shape(x)
            last = Gather(s, Axis)
            c = Equal(last, One)
            y = If (c) <
                then_branch = yes () => (float[B,S] p) { p = Squeeze(x, Axis) },
                else_branch = no () => (float[B,S,1] q) { q = Identity(x) }
            >
            """,
            more="<int64[1] Axis = {2}, int64[1] One = {1}>",
        )
    )
    assert found.shape() == (B, S)


def test_values_carried_by_a_loop_keep_what_no_iteration_changes() -> None:
    """The carried tensor gets longer in each iteration: its first length holds only in the first."""
    found = Checked(
        parse(
            "float[B,S] x",
            """
            y, z = Loop (N, , x) <body =
                step (int64 i, bool go, float[B,n] a) => (bool more, float[B,m] b, float[B,m] c) {
                more = Identity(go)
                b = Concat<axis = 1>(a, a)
                w = Concat<axis = 1>(x, x)
                r = ReduceMax<keepdims = 0>(w)
                c = Add(x, r)
            }>
            """,
            more="<int64 N = {3}>",
        )
    )
    grown = found.shape()
    assert grown is not None and grown[0] == B and grown[1] != S and found.shape("z") is None
    loop = found.model.graph[0]
    body = loop.attributes["body"].as_graph()
    shapes = {value.name: found.info.shape(value) for node in body for value in node.outputs}
    assert shapes["w"] == (B, 2 * S) and shapes["c"] == (B, S)
    assert shapes["more"] == ()
    carried = shapes["b"]
    assert carried is not None and carried[0] == B and carried[1] not in (S, 2 * S)
    assert found.runs == 2


def test_values_that_a_loop_carries_with_growing_rank_are_unknown() -> None:
    """Neither a nor b, which takes its rank from a, has one rank in all iterations; c keeps its own."""
    found = Checked(
        parse(
            "float[B,S] x",
            """
            y, z, w = Loop (N, , x, x, x) <body =
                step (int64 i, bool go, float a, float b, float[p,q] c) => (bool more, float d, float e, float[r,s] f) {
                more = Identity(go)
                axes = Constant<value = int64[1] {0}>()
                d = Unsqueeze(a, axes)
                e = Identity(a)
                f = Neg(c)
            }>
            """,
            more="<int64 N = {3}>",
        )
    )
    body = found.model.graph[0].attributes["body"].as_graph()
    shapes = {value.name: found.info.shape(value) for node in body for value in node.outputs}
    assert shapes["d"] is None and shapes["e"] is None
    kept = shapes["f"]
    assert kept is not None and len(kept) == 2


def test_what_a_loop_hands_through_keeps_its_shape() -> None:
    """As jax writes the sequences of a scan. What two states exchange is neither's own size."""
    found = Checked(
        parse(
            "float[B,S] x, float[S,B] u, float[3,S] w",
            """
            y, z, a = Loop (N, , w, x, u) <body =
                step (int64 i, bool go, float[p,q] w0, float[r,s] x0, float[t,o] u0)
                => (bool more, float[p,q] w1, float[r,s] x1, float[t,o] u1) {
                more = Identity(go)
                w1 = Identity(w0)
                one = Gather(w0, i)
                x1 = Transpose(u0)
                u1 = Transpose(x0)
            }>
            """,
            more="<int64 N = {3}>",
        )
    )
    assert found.shape() == (3, S)
    body = found.model.graph[0].attributes["body"].as_graph()
    shapes = {value.name: found.info.shape(value) for node in body for value in node.outputs}
    assert shapes["one"] == (S,) and found.shape("z") == (B, S) and found.shape("a") == (S, B)


def test_a_loop_whose_body_takes_fewer_values_makes_no_shape() -> None:
    step = "step (int64 i, bool go) => (bool more, float[S] a, float[S] b)"
    loop = f"y, b1 = Loop (N, , x) <body = {step} {{ more = Identity(go) a = Neg(z) b = Neg(z) }}>"
    model = ir.from_proto(parse("float[S] x, float[S] z", loop, more="<int64 N = {3}>"))
    assert [analyse(model).shape(value) for node in model.graph for value in node.outputs] == [None, None]


def test_a_scan_slices_its_tensors() -> None:
    found = Checked(
        parse(
            "float[B,S,8] x, float[B,8] h",
            """
            y, z = Scan <num_scan_inputs = 1, scan_input_axes = [1], body =
                step (float[p,q] a, float[p,q] b) => (float[p,q] c, float[p,q] d) {
                c = Add(a, b)
                d = Neg(b)
            }> (h, x)
            """,
        )
    )
    body = found.model.graph[0].attributes["body"].as_graph()
    shapes = {value.name: found.info.shape(value) for node in body for value in node.outputs}
    assert found.shape() == shapes["c"] == shapes["d"] == (B, 8) and found.shape("z") is None


def test_each_call_of_a_function_has_its_own_shapes() -> None:
    found = Checked(
        parse(
            "float[B,S,H,8] x",
            "a = f.flat<axis = 1>(x) b = f.flat(x) c = f.flat<axis = 3>(x) y = MatMul(b, c)",
            functions='<domain: "f", opset_import: ["": 13]> flat <axis: int = 2> (u) => (v)'
            " { t = Relu(u) v = Flatten<axis: int = @axis>(t) }",
        ),
        sizes=(),
    )
    assert found.shape("a") == (B, S * H * 8)
    assert found.shape("b") == (B * S, 8 * H)
    assert found.shape("c") == (B * S * H, 8)
    (function,) = found.model.functions.values()
    assert next(found.info.shape(value) for node in function for value in node.outputs) is None


def test_a_function_uses_its_own_opset() -> None:
    """Squeeze takes axes as an attribute in opset 11 and as an input in 13."""
    found = Checked(
        parse(
            "float[B,1,S] x",
            "t = f.squeeze(x) y = Squeeze(x, One)",
            more="<int64[1] One = {1}>",
            functions='<domain: "f", opset_import: ["": 11]> squeeze (u) => (v) { v = Squeeze<axes = [1]>(u) }',
        ),
        sizes=(),
    )
    assert found.shape("t") == found.shape() == (B, S)


# -- the interface for passes ----------------------------------------------------------------------


def test_news_of_values_a_pass_makes() -> None:
    found = Checked(parse("float[B,S] x", "y = Relu(x)"), sizes=())
    x = found.values["x"]
    turned = ir.node("Transpose", [x], {"perm": [1, 0]})
    product = ir.node("MatMul", [x, turned.outputs[0]])
    found.model.graph.extend([turned, product])
    # Asked for without being told: inferred from the producers.
    assert found.info.shape(product.outputs[0]) == (B, B)
    fused = ir.node("Custom", [x], domain="ascend")
    found.model.graph.append(fused)
    assert found.info.shape(fused.outputs[0]) is None
    found.info.set(fused.outputs[0], (B, 4, S), ir.DataType.FLOAT)
    last = ir.node("Relu", fused.outputs)
    found.model.graph.append(last)
    assert found.info.shape(last.outputs[0]) == (B, 4, S)
    found.info.set(fused.outputs[0], (B, S), ir.DataType.FLOAT16)
    found.info.infer_node(last)
    assert found.info.shape(last.outputs[0]) == (B, S)
    assert found.info.dtype(last.outputs[0]) == ir.DataType.FLOAT16
    made = ir.Value(name="made")
    found.info.set(made, (2,), ir.DataType.INT64, (B, 3))
    assert found.info.content(made) == (B, 3)


def test_nodes_in_any_order() -> None:
    proto = parse("float[B,S] x", "t = Relu(x) u = Transpose(t) y = Neg(u)")
    nodes = list(proto.graph.node)
    del proto.graph.node[:]
    proto.graph.node.extend(reversed(nodes))
    assert Checked(proto, sizes=()).shape() == (S, B)


def test_a_cycle_ends() -> None:
    found = Checked(parse("float[B,S] x", "t = Relu(x) u = Neg(t) y = Neg(u)"), sizes=())
    relu, neg, _ = found.model.graph
    relu.replace_input_with(0, neg.outputs[0])
    assert analyse(found.model).shape(found.model.graph.outputs[0]) is None


def test_a_bare_graph_can_be_analysed() -> None:
    graph = ir.from_proto(parse("float[B,S] x", "y = Transpose(x)")).graph
    assert analyse(graph).shape(graph.outputs[0]) == (S, B)


def test_large_and_missing_external_data_is_not_read(tmp_path: Path) -> None:
    """Only tensors of at most 64 elements are read, and one that cannot be is simply unknown."""
    model = ir.from_proto(parse("float[B,S] x", "y = Relu(x)"))
    facts = {}
    for name, shape, location in (("big", (1000, 1000), "big.bin"), ("small", (2,), "none.bin")):
        tensor = ir.ExternalTensor(
            location, 0, None, ir.DataType.INT64, shape=ir.Shape(shape), name=name, base_dir=tmp_path
        )
        value = ir.Value(name=name, const_value=tensor)
        model.graph.register_initializer(value)
        facts[name] = analyse(model).fact(value)
    assert facts["big"].shape == (1000, 1000) and facts["big"].content is None
    assert facts["small"].shape == (2,) and facts["small"].content is None
    (tmp_path / "none.bin").write_bytes(np.array([3, 4], np.int64).tobytes())
    assert analyse(model).content(model.graph.initializers["small"]) == (3, 4)


def test_a_long_chain_of_dependent_sizes_stays_small() -> None:
    """48 layers whose sequence length is each time solved from a -1 against another input's size."""
    body = "l0 = Add(x, m) "
    for layer in range(48):
        body += (
            f"s{layer} = Shape(l{layer}) h{layer} = Shape<start = 0, end = 1>(x)"
            f" t{layer} = Concat<axis = 0>(h{layer}, Minus, Eight) r{layer} = Reshape(l{layer}, t{layer})"
            f" l{layer + 1} = Add(r{layer}, m) "
        )
    found = Checked(
        parse(
            "float[B,S,8] x, float[H,P,8] m",
            body + "y = Neg(l48)",
            more="<int64[1] Minus = {-1}, int64[1] Eight = {8}>",
        ),
        sizes=({"B": 1, "S": 1, "H": 1, "P": 1},),
    )
    shape = found.shape()
    assert shape is not None and len(shape) == 3 and shape[2] == 8
    assert len(str(shape)) < 2000


@pytest.mark.parametrize(
    ("inputs", "call", "expected"),
    [
        (
            "float[B,S,16] q, float[1,P,16] k, float[1,P,24] v",
            'm, n, x, y = $.FlashAttentionScore<head_num = 2, input_layout = "BSH">(q, k, v)',
            {"m": (B, 2, S, 8), "y": (B, S, 24)},
        ),
        (
            "float[B,4,S,D] q, float[H,2,P,D] k, float[H,2,P,D] v",
            'm, n, x, y = $.FlashAttentionScore<head_num = 4, input_layout = "BNSD">(q, k, v)',
            {"m": (None, 4, S, 8), "y": (None, 4, S, D)},  # either batch may be 1
        ),
        (
            "float[B,1,16] q, float[B,P,8] k, float[B,P,8] v",
            "y = $.IncreFlashAttention<num_heads = 4, num_key_value_heads = 2>(q, k, v)",
            {"y": (B, 1, 16)},
        ),
        ("float[B,S] q", "y = $.FlashAttentionScore<head_num = 2>(q)", {"y": None}),
    ],
)
def test_operators_of_the_registry(inputs: str, call: str, expected: Mapping[str, Sequence[object] | None]) -> None:
    text = f'<ir_version: 8, opset_import: ["": 20, "{DOMAIN}": 1]> g ({inputs}) => (y) {{ {call} }}'
    model = ir.from_proto(onnx.parser.parse_model(text.replace("$", DOMAIN)))
    info, values = analyse(model), {value.name: value for node in model.graph for value in node.outputs}
    for name, shape in expected.items():
        found = info.shape(values[name])
        if shape is None:
            assert found is None
            continue
        assert found is not None
        assert len(found) == len(shape)
        for size, wanted in zip(found, shape, strict=True):
            assert size == wanted if wanted is not None else str(size).startswith("?")


@pytest.mark.parametrize(("op", "gates", "outputs"), [("LSTM", 4, 3), ("GRU", 3, 2), ("RNN", 1, 2)])
@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
def test_recurrent_layers(op: str, gates: int, outputs: int, direction: str) -> None:
    """W is [directions, gates * hidden, input], R the same of the hidden states."""
    count = 2 if direction == "bidirectional" else 1
    names = ", ".join(("y", "h", "c")[:outputs])
    weights = "".join(f"{name} = ConstantOfShape<value=float[1] {{0.1}}>({name}s) " for name in ("w", "r"))
    more = f"<int64[3] ws = {{{count}, {gates * 6}, 4}}, int64[3] rs = {{{count}, {gates * 6}, 6}}>"
    attrs = f'hidden_size=6, direction="{direction}"'
    checked = Checked(parse("float[S,B,4] x", f"{weights} {names} = {op}<{attrs}>(x, w, r)", more=more))
    assert checked.shape() == (S, Dim(count), B, Dim(6))
    assert checked.shape("h") == (Dim(count), B, Dim(6))


@pytest.mark.parametrize("number", ["nan", "inf", "3e38"])
def test_a_float_range_of_what_is_no_small_whole_number_has_an_open_length(number: str) -> None:
    for bounds in ("n, one, one", "one, n, one", "one, one, n"):
        body = f"n = Constant<value_float={number}>() one = Constant<value_float=1.0>() y = Range({bounds})"
        model = ir.from_proto(parse("float x", body))
        (size,) = analyse(model).shape(model.graph.outputs[0]) or ()
        assert not size.is_known


def test_a_number_that_no_type_has_is_an_unknown_type() -> None:
    for body in ("y = Cast<to=99>(x)", "y = EyeLike<dtype=99>(x)", "y = RandomNormal<shape=[2], dtype=99>()"):
        model = ir.from_proto(parse("float[2,2] x", body))
        assert analyse(model).dtype(model.graph.outputs[0]) is None


def test_an_element_of_a_sequence_of_single_indices_may_have_lost_its_axis() -> None:
    """ONNX Runtime follows `keepdims` although sizes are given, where ONNX ignores it."""
    body = "n = Constant<value_int=1>() i = Constant<value_int=0>() s = SplitToSequence<axis=0, keepdims=0>(x, n) "
    model = ir.from_proto(parse("float[3,B] x", body + "y = SequenceAt(s, i)"))
    assert analyse(model).shape(model.graph.outputs[0]) is None


@pytest.mark.parametrize("op", ["MaxPool", "AveragePool"])
def test_a_pool_whose_window_is_longer_than_its_axis(op: str) -> None:
    checked = Checked(
        parse("float[1,2,S] x", f"y = {op}<kernel_shape=[3], strides=[2]>(x)"), [{"S": n} for n in range(8)]
    )
    assert checked.runs >= 7
    shape = checked.shape()
    assert shape is not None and [shape[2].evaluate({"S": n}) for n in range(1, 6)] == [0, 1, 1, 1, 2]


@pytest.mark.parametrize(("kernel", "known"), [(1, False), (2, False), (3, True)])
def test_a_pool_that_rounds_up_has_a_known_length_if_no_window_begins_behind_the_axis(kernel: int, known: bool) -> None:
    body = f"y = AveragePool<kernel_shape=[{kernel}], strides=[2], pads=[0, {kernel // 2}], ceil_mode=1>(x)"
    checked = Checked(parse("float[1,2,S] x", body), [{"S": n} for n in range(9)])
    shape = checked.shape()
    assert checked.runs >= 7 and shape is not None
    assert (shape[2] == Dim.ceildiv(S, 2)) == known == shape[2].is_known


def declared(*names: str) -> tuple[Dim, ...]:
    """The sizes of an input whose axes have these names."""
    model = ir.from_proto(parse(f"float[{','.join('ABCD'[: len(names)])}] x", "y = Identity(x)"))
    model.graph.inputs[0].shape = ir.Shape(names)
    return tuple(analyse(model).shape(model.graph.inputs[0]) or ())


@pytest.mark.parametrize("name", ["-1", "?", "*", "1", "0", "+5", "5.0", "-"])
def test_a_name_without_a_letter_is_none(name: str) -> None:
    one, other = declared(name, name)
    assert one != other and not one.is_known and not other.is_known


def test_a_name_that_is_a_number_is_this_size() -> None:
    """torch writes it where an axis was asked to be dynamic, and the model works with one size only."""
    sizes = declared("S", "4", "2", "8")
    assert sizes[1:] == (Dim(4), sizes[2], Dim(8))
    assert not sizes[2].is_known, "the number of the axis itself says nothing"


def test_a_name_that_looks_like_an_expression_is_another_size() -> None:
    """The registry's own inference is given sizes as text, which must not take one for the other."""
    half = Dim.floordiv(S, 2)
    proto = parse(
        "float[B,S,8] q", f'm, n, o, y = {DOMAIN}.FlashAttentionScore<head_num=2, input_layout="BSH">(q, q, q)'
    )
    model = ir.from_proto(proto)
    info, (query,) = ShapeInfo({}, model.graph, overridable=True), model.graph.inputs
    info.set(query, (Dim.symbol(str(half)), half, 16), ir.DataType.FLOAT)
    info.walk(model.graph)
    found = info.shape(model.graph.outputs[0])
    assert found == (Dim.symbol(str(half)), half, Dim(16)) and found[0] != found[1]


def test_elements_divided_by_the_last_one_keep_their_number() -> None:
    """DETR norms its positions so. The number behind its convolutions is not proven to be at least 0 by its name."""
    body = """
        pooled = MaxPool<kernel_shape = [3], strides = [2], pads = [1, 1]>(x)
        c = Conv<strides = [2], pads = [1, 1]>(pooled, w) last = Slice(c, minus, end, axis) y = Div(c, last)
    """
    more = "<int64[1] minus = {-1}, int64[1] end = {9223372036854775807}, int64[1] axis = {2}>"
    found = Checked(parse("float[B,2,S] x, float[2,2,3] w", body, more=more))
    before, after = found.shape("c"), found.shape("y")
    assert before is not None and before == after and not before[2].is_at_least(0)
    assert found.runs > 0
