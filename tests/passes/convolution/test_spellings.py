"""Causal convolutions as exporters write them: ShortConvolution gives the same numbers at every length, and near misses
stay."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import parser

import fa_compiler
from fa_compiler.passes import Report
from tests.passes.running import Array, assert_same, fused, run

pytestmark = pytest.mark.usefixtures("declines_change_nothing")

NUMBERS = "".join(
    f"{name} = Constant<value_ints=[{number}]>() "
    for name, number in {
        **{f"i{number}": number for number in range(6)},
        **{f"m{number}": -number for number in range(1, 5)},
        "end": 2**63 - 1,
    }.items()
)
CHANNELS, WIDTH = 6, 4
LENGTHS = (1, 2, 3, 4, 21)
"""Below, at and above the number of weights, and more tokens than a vector holds."""
TOLERANCE = 1e-5
"""float32 sums of few numbers, in another order."""
HALF = 2e-3
"""The model rounds to float16 three times, the operator once."""

FIRST, LAST = "float[B,6,T] x, float[6,1,4] w, float[6] b", "float[B,T,6] x, float[6,1,4] w, float[6] b"
CONV = "c = Conv<group=6, pads=[3,3]>({}, w, b) "
TOKENS = "n = Shape<start={0}, end={1}>(x) "
CUT = "k = Slice(c, i0, n, i2, i1) "
SILU = "g = Sigmoid({0}) {1} = Mul({0}, g) "
PROMPT = TOKENS.format(2, 3) + CONV.format("x") + CUT
"""The convolution of x, cut to its tokens."""
TURN = "xt = Transpose<perm=[0,2,1]>(x) " + TOKENS.format(1, 2) + CONV.format("xt") + CUT
STEP = "win = Concat<axis=2>(s, x) c = Conv<group=6>(win, w, b) "
"""That of a state and x."""
OF_STATE = "float[B,6,{}] s, float[B,6,{}] x, float[6,1,4] w, float[6] b"
YT, YC, Y1 = "float[B,T,6] y", "float[B,6,T] y", "float[B,6,1] y"


@dataclass(frozen=True)
class Row:
    """A model, and the operators of the fused one, Constants and Shapes left out. Without these the convolution
    stays, for a reason with these words; empty words stand for a convolution that is not named."""

    inputs: str
    body: str
    outputs: str = YC
    operators: str = ""
    words: str = ""
    opset: int = 18
    state: int = 3
    """The columns of a state whose number is open."""
    lengths: tuple[int, ...] = LENGTHS

    @property
    def model(self) -> onnx.ModelProto:
        header = f'<ir_version: 9, opset_import: ["": {self.opset}, "com.microsoft": 1]>'
        numbers = NUMBERS if self.opset > 12 else ""
        return parser.parse_model(f"{header} conv ({self.inputs}) => ({self.outputs}) {{ {numbers}{self.body} }}")


FUSED = {
    "a prompt of transformers": Row(
        LAST,
        TURN + SILU.format("k", "a") + "y = Transpose<perm=[0,2,1]>(a) t = Slice(xt, m4, end, i2, i1)",
        f"{YT}, float[B,6,S] t",
        "ShortConvolution Slice Transpose",
    ),
    "its activation behind the Transpose": Row(
        LAST,
        TURN + "kt = Transpose<perm=[0,2,1]>(k) " + SILU.format("kt", "y"),
        YT,
        "ShortConvolution",
    ),
    "without the first Transpose": Row(
        FIRST, PROMPT + "kt = Transpose<perm=[0,2,1]>(k) " + SILU.format("kt", "y"), YT, "ShortConvolution Transpose"
    ),
    "two readers of the result": Row(
        LAST,
        TURN + "y = Transpose<perm=[0,2,1]>(k) z = Transpose<perm=[0,2,1]>(k)",
        f"{YT}, float[B,T,6] z",
        "Identity ShortConvolution",
    ),
    "x is read otherwise, too": Row(
        LAST,
        TURN + "y = Transpose<perm=[0,2,1]>(k) t = Slice(xt, m4, end, i2, i1) z = Neg(xt)",
        f"{YT}, float[B,6,S] t, float[B,6,T] z",
        "Neg ShortConvolution Slice Transpose",
    ),
    "channels first": Row(FIRST, PROMPT + SILU.format("k", "y"), operators="ShortConvolution"),
    "no activation": Row(FIRST, PROMPT + "y = Neg(k)", operators="Neg ShortConvolution"),
    "no bias": Row(
        FIRST,
        TOKENS.format(2, 3) + "c = Conv<group=6, pads=[3,3]>(x, w) y = Slice(c, i0, n, i2)",
        YC,
        "ShortConvolution",
    ),
    "pads in front only": Row(
        FIRST, "y = Conv<group=6, pads=[3,0], kernel_shape=[4]>(x, w, b)", YC, "ShortConvolution"
    ),
    "a Pad": Row(
        FIRST,
        "p = Constant<value_ints=[0,0,3,0,0,0]>() q = Pad(x, p) y = Conv<group=6>(q, w, b)",
        operators="ShortConvolution",
    ),
    "a Pad of an axis": Row(
        FIRST,
        "p = Constant<value_ints=[3,0]>() v = Constant<value_float=0.0>() q = Pad(x, p, v, m1) "
        'y = Conv<group=6, auto_pad="VALID">(q, w, b)',
        operators="ShortConvolution",
    ),
    "Swish of ONNX Runtime": Row(
        FIRST, PROMPT + "y = com.microsoft.QuickGelu<alpha=1.0>(k)", operators="ShortConvolution"
    ),
    "Swish": Row(FIRST, PROMPT + "y = Swish(k)", operators="ShortConvolution", opset=24),
    "another function of Swish": Row(
        FIRST, PROMPT + "y = com.microsoft.QuickGelu(k)", operators="QuickGelu ShortConvolution"
    ),
    "the sigmoid of another one": Row(
        FIRST, PROMPT + "g = Sigmoid(x) y = Mul(k, g)", operators="Mul ShortConvolution Sigmoid"
    ),
    "the sum is an output, too": Row(
        FIRST,
        PROMPT + SILU.format("k", "y"),
        f"{YC}, float[B,6,T] k",
        "Mul ShortConvolution Sigmoid",
    ),
    "a mask in front": Row(
        f"{FIRST}, float[B,1,T] m",
        PROMPT.replace("(x, w, b)", "(xm, w, b)").replace("c = Conv", "xm = Mul(x, m) c = Conv") + "y = Neg(k)",
        operators="Mul Neg ShortConvolution",
    ),
    "a gate around": Row(
        f"{FIRST}, float[B,6,T] h",
        PROMPT.replace("(x, w, b)", "(xm, w, b)").replace("c = Conv", "xm = Mul(x, h) c = Conv") + "y = Mul(k, h)",
        operators="Mul Mul ShortConvolution",
    ),
    "more weights": Row(
        "float[B,T,6] x, float[6,1,12] w, float[6] b",
        TURN.replace("[3,3]", "[11,11]") + "y = Transpose<perm=[0,2,1]>(k)",
        YT,
        "ShortConvolution Transpose Transpose",
    ),
    "an older Slice": Row(
        "float[B,6,5] x, float[6,1,4] w, float[6] b",
        CONV.format("x") + "y = Slice<starts=[0], ends=[5], axes=[2]>(c)",
        "float[B,6,5] y",
        "ShortConvolution",
        opset=9,
        lengths=(5,),
    ),
    "a state of K - 1 columns": Row(
        OF_STATE.format(3, "T"),
        STEP + SILU.format("c", "y") + "z = Slice(win, m3, end, i2, i1)",
        f"{YC}, float[B,6,3] z",
        "ShortConvolution",
    ),
    "and a Slice of all": Row(
        OF_STATE.format(3, "T"),
        STEP + TOKENS.format(2, 3) + "mn = Neg(n) k = Slice(c, mn, end, i2, i1) " + SILU.format("k", "y"),
        operators="ShortConvolution",
    ),
    "a state of K columns": Row(
        OF_STATE.format(4, 1),
        STEP + "k = Slice(c, m1, end, i2, i1) " + SILU.format("k", "y") + "z = Slice(win, m4, end, i2, i1)",
        f"{Y1}, float[B,6,4] z",
        "Concat ShortConvolution Slice",
        lengths=(1,),
    ),
    "a state of K columns, and two tokens": Row(
        OF_STATE.format(4, 2),
        STEP + "y = Slice(c, i1, i3, i2) z = Slice(win, m3, end, i2) v = Slice(win, i1, i5, m1)",
        "float[B,6,2] y, float[B,6,3] z, float[B,6,4] v",
        "Concat ShortConvolution Slice Slice",
        lengths=(2,),
    ),
    "a state of an open number of columns": Row(
        OF_STATE.format("S", 1),
        "l = Shape<start=2, end=3>(s) ml = Neg(l) "
        + STEP
        + "k = Slice(c, m1, end, i2, i1) "
        + SILU.format("k", "y")
        + "z = Slice(win, ml, end, i2, i1)",
        f"{Y1}, float[B,6,S] z",
        "Concat Neg ShortConvolution Slice Slice",
        lengths=(1,),
    ),
    "the first columns of the window": Row(
        OF_STATE.format(3, "T"),
        STEP + "y = Neg(c) z = Slice(win, i0, i3, i2, i1)",
        f"{YC}, float[B,6,3] z",
        "Concat Neg ShortConvolution Slice",
    ),
    "weights that depend on the new state": Row(
        OF_STATE.format(3, "T"),
        STEP.replace("c = ", "z = Slice(win, m3, end, i2, i1) u = ReduceSum(z) v = Mul(w, u) c = ").replace(
            "n, w", "n, v"
        )
        + "y = Neg(c)",
        f"{YC}, float[B,6,3] z",
        "Concat Mul Neg ReduceSum ShortConvolution Slice",
    ),
}
OTHER_COLUMNS = "not proven to be one column for each token"
LEFT = {
    "a dilation": Row(
        FIRST,
        TOKENS.format(2, 3) + "c = Conv<group=6, pads=[6,6], dilations=[2]>(x, w) y = Slice(c, i0, n, i2)",
        words="a dilation of 2",
    ),
    "a stride": Row(
        FIRST, "y = Conv<group=6, pads=[3,0], strides=[2]>(x, w, b)", "float[B,6,L] y", words="a stride of 2"
    ),
    "float64": Row(
        FIRST.replace("float", "double"),
        PROMPT + "y = Neg(k)",
        YC.replace("float", "double"),
        words="type of this causal convolution is DOUBLE",
        lengths=(),  # ONNX Runtime has no kernel for it
    ),
    "a token later": Row(
        FIRST, PROMPT.replace("i0, n", "i1, end").replace("[3,3]", "[3,1]") + "y = Neg(k)", words=OTHER_COLUMNS
    ),
    "a token less": Row(
        FIRST,
        PROMPT.replace("k = S", "n1 = Sub(n, i1) k = S").replace("i0, n", "i0, n1") + "y = Neg(k)",
        "float[B,6,L] y",
        words=OTHER_COLUMNS,
    ),
    "fewer channels": Row(
        FIRST,
        PROMPT + "y = Slice(c, i0, i3, i1)",
        "float[B,3,L] y",
        words="beside those of its tokens are read",
    ),
    "all columns are read": Row(
        FIRST, PROMPT + "y = Neg(k) z = Neg(c)", f"{YC}, float[B,6,L] z", words="beside those of its tokens are read"
    ),
    "the zeros behind are an output": Row(
        FIRST, PROMPT + "y = Neg(k)", f"{YC}, float[B,6,L] c", words="beside those of its tokens are read"
    ),
    "a state that may be too short": Row(
        OF_STATE.format("S", "T"),
        STEP + TOKENS.format(2, 3) + "mn = Neg(n) y = Slice(c, mn, end, i2)",
        words="fewer than 3 columns",
    ),
    "a state that is too short": Row(
        OF_STATE.format(2, "T"), STEP + "y = Neg(c)", "float[B,6,L] y", words="fewer than 3 columns", lengths=(2, 3, 21)
    ),
    "the state behind x": Row(
        OF_STATE.format(3, "T"), STEP.replace("(s, x)", "(x, s)") + "y = Neg(c)", words="fewer than 3 columns"
    ),
    "all columns of a longer state": Row(
        OF_STATE.format(4, "T"), STEP + "y = Neg(c)", "float[B,6,L] y", words=OTHER_COLUMNS
    ),
    "an opset without Slices by inputs": Row(
        "float[B,6,4] s, float[B,6,1] x, float[6,1,4] w, float[6] b",
        STEP + "y = Slice<starts=[-1], ends=[2], axes=[2]>(c)",
        Y1,
        words="cannot be cut in this opset",
        opset=9,
        lengths=(1,),
    ),
    "8 bits": Row(
        "uint8[B,6,T] q, uint8[6,1,4] v",
        "f = Constant<value_float=0.1>() x = DequantizeLinear(q, f) w = DequantizeLinear(v, f) "
        "y = Conv<group=6, pads=[3,0]>(x, w)",
        words="in integers",
    ),
    "channels with others": Row(
        "float[B,6,T] x, float[6,2,4] w",
        "y = Conv<group=3, pads=[3,0]>(x, w)",
    ),
    "as many pads on both sides": Row("float[B,6,T] x, float[6,1,3] w", "y = Conv<group=6, pads=[1,1]>(x, w)"),
    "pads of the operator": Row("float[B,6,T] x, float[6,1,2] w", 'y = Conv<group=6, auto_pad="SAME_LOWER">(x, w)'),
    "all sums of a full convolution": Row(FIRST, "c = Conv<group=6, pads=[3,3]>(x, w, b) y = Neg(c)", "float[B,6,L] y"),
    "a Pad of ones": Row(
        FIRST,
        "p = Constant<value_ints=[0,0,3,0,0,0]>() v = Constant<value_float=1.0>() q = Pad(x, p, v) "
        "y = Conv<group=6>(q, w, b)",
    ),
    "a Pad of copies": Row(
        FIRST,
        'p = Constant<value_ints=[0,0,3,0,0,0]>() q = Pad<mode="edge">(x, p) y = Conv<group=6>(q, w, b)',
    ),
    "a Pad of channels, too": Row(
        "float[B,5,T] x, float[6,1,4] w",
        "p = Constant<value_ints=[0,1,3,0,0,0]>() q = Pad(x, p) y = Conv<group=6>(q, w)",
    ),
    "what nothing reads": Row(FIRST, "c = Conv<group=6, pads=[3,0]>(x, w, b) y = Neg(x)"),
    "two axes": Row(
        "float[B,6,T,4] x, float[6,1,4,1] w", "y = Conv<group=6, pads=[3,0,0,0]>(x, w)", "float[B,6,T,4] y"
    ),
}
STEPS = {
    "a sum of products": Row(
        "float[B,6,4] s, float[6,4] w",
        "p = Mul(s, w) r = ReduceSum<keepdims=0>(p, m1) " + SILU.format("r", "y"),
        "float[B,6] y",
        lengths=(1,),
    )
}


def feeds(row: Row, tokens: int) -> dict[str, Array]:
    """Inputs of a length, with a NaN and infinities among the tokens of the second entry."""
    rng, made = np.random.default_rng(tokens), dict[str, Array]()
    for value in row.model.graph.input:
        tensor = value.type.tensor_type
        sizes = {"B": 2, "T": tokens, "S": row.state}
        shape = [sizes[dim.dim_param] if dim.dim_param else dim.dim_value for dim in tensor.shape.dim]
        dtype: Any = onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type)
        made[value.name] = (
            rng.integers(0, 9, shape).astype(dtype) if dtype == np.uint8 else rng.standard_normal(shape).astype(dtype)
        )
        if value.name in ("x", "s") and tokens > 2:
            rows = made[value.name][1].reshape(-1)
            rows[3 % rows.size], rows[5 % rows.size], rows[8 % rows.size] = np.nan, np.inf, -np.inf
    return made


def compared(row: Row, tolerance: float = TOLERANCE) -> tuple[onnx.ModelProto, Report]:
    """The fused model, which gives what the original gives at each length, and its report."""
    result, report = fused(row.model)
    for tokens in row.lengths:
        given = feeds(row, tokens)
        for got, wanted in zip(run(result, given), run(row.model, given), strict=True):
            assert_same(got, wanted, tolerance)
    return result, report


def operators(model: onnx.ModelProto) -> str:
    return " ".join(sorted(node.op_type for node in model.graph.node if node.op_type not in ("Constant", "Shape")))


@pytest.mark.parametrize("name", FUSED)
def test_fused(name: str) -> None:
    row = FUSED[name]
    result, report = compared(row)
    (block,) = report.blocks
    assert (block.kind, block.status, block.op) == ("convolution", "fused", "ShortConvolution"), block.what
    assert operators(result) == row.operators


@pytest.mark.parametrize("name", LEFT | STEPS)
def test_left(name: str) -> None:
    row = (LEFT | STEPS)[name]
    result, report = compared(row)
    assert "ShortConvolution" not in operators(result)
    assert [block.status for block in report.blocks] == ["declined"] * bool(row.words)
    for block in report.blocks:
        assert block.kind == "convolution"
        assert row.words in (block.reason or "")
        assert block.culprit


@pytest.mark.parametrize("columns", [2, 3, 4, 7])
def test_an_open_number_of_columns(columns: int) -> None:
    row = FUSED["a state of an open number of columns"]
    result, _ = fused(row.model)
    given = feeds(row, 1) | {"s": np.random.default_rng(0).standard_normal((2, 6, columns)).astype(np.float32)}
    if columns < WIDTH - 1:
        for model in (row.model, result):
            with pytest.raises(Exception, match=r"Conv|past_state"):
                run(model, given)
        return
    for got, wanted in zip(run(result, given), run(row.model, given), strict=True):
        assert_same(got, wanted, TOLERANCE)


@pytest.mark.parametrize("name", ["a prompt of transformers", "a state of K columns"])
def test_float16(name: str) -> None:
    row = FUSED[name]
    compared(
        Row(
            row.inputs.replace("float", "float16"),
            row.body,
            row.outputs.replace("float", "float16"),
            lengths=row.lengths[:2],
        ),
        HALF,
    )


@pytest.mark.parametrize("target", ["onnx", "contrib", "ascend"])
def test_other_targets(target: Any) -> None:
    row = FUSED["channels first"]
    result, report = fused(row.model, target)
    assert not report.blocks
    assert "Conv" in operators(result)


def test_the_function_in_the_file() -> None:
    """onnx infers the shapes of the written model through the function of the operator."""
    row = FUSED["a state of K columns"]
    model = fa_compiler.optimize(replace(row, inputs=row.inputs.replace("B", "2")).model).model
    assert isinstance(model, onnx.ModelProto)
    assert [function.name for function in model.functions] == ["ShortConvolution"]
    onnx.checker.check_model(model, full_check=True)


OUTSIDE, INSIDE = "xt = Transpose<perm=[0,2,1]>(x) ", "c = Conv<group=6, pads=[3,0]>(xt, w, b) k = Identity(c) "


@pytest.mark.parametrize(
    ("outside", "inside", "code"),
    [
        ("", OUTSIDE + INSIDE, None),
        (OUTSIDE, INSIDE, None),
        (OUTSIDE + TOKENS.format(1, 2), CONV.format("xt") + CUT, "scope"),
    ],
)
def test_a_branch(outside: str, inside: str, code: str | None) -> None:
    """A convolution in a branch is fused, if no node around the branch computes something for it alone."""
    row = Row(
        f"{LAST}, bool p",
        f"{outside} y = If(p) <then_branch = one () => (float[B,T,6] v) {{ {inside} v = Transpose<perm=[0,2,1]>(k) }}, "
        "else_branch = two () => (float[B,T,6] u) { u = Neg(x) }>",
        YT,
    )
    result, report = fused(row.model)
    (block,) = report.blocks
    assert block.code == code
    for flag in (True, False):
        given = feeds(row, 5) | {"p": np.array(flag)}
        for got, wanted in zip(run(result, given), run(row.model, given), strict=True):
            assert_same(got, wanted, TOLERANCE)
