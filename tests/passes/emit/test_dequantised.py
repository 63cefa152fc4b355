"""What is inserted behind a DequantizeLinear: it means the same at every level of ONNX Runtime's optimisations."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from fa_compiler.passes.answer.options import Target
from tests.pairs import pairwise
from tests.passes.rewrite.test_standard import rewritten
from tests.passes.running import LEVELS, Array, assert_same, parse, run

TARGETS: tuple[Target, ...] = ("ort", "contrib", "onnx")
SIZES = {"B": 2, "N": 4, "S": 5, "T": 6, "D": 8}
INPUTS = "float[B,4,S,8] q, float[B,4,8,T] kt, float[B,4,T,8] v, float[S,T] b"
"""Four tensors, each of which may be integers instead."""
BODY = "s = MatMul(q_, kt_) c = Constant<value=float {{0.35}}>() t = Mul(s, c) {add} p = Softmax<axis=-1>(x) "


def model(
    opset: int, integers: dict[str, str], point: bool = True, between: str = "{} = Identity({})", add: str = "b_"
) -> onnx.ModelProto:
    """Attention whose inputs in `integers`, of these types, go through a DequantizeLinear and what lies `between`."""
    inputs, made = INPUTS, "scale = Constant<value=float {0.05}>() one = Constant<value=float {1.0}>() "
    for name in ("q", "kt", "v", "b"):
        if name not in integers:
            made += f"{name}_ = Identity({name}) "
            continue
        kind = integers[name]
        declared = next(each for each in inputs.split(", ") if each.endswith(f" {name}"))
        inputs = inputs.replace(declared, declared.replace("float[", f"{kind}["))
        made += f"{name}z = Constant<value={kind} {{{0 if kind == 'int32' else 3}}}>() "
        made += f"{name}f = DequantizeLinear({name}, scale{f', {name}z' if point else ''}) "
        made += between.format(f"{name}_", f"{name}f") + " "
    biased = f"x = Add(t, {add}) " if add else "x = Identity(t) "
    return parse(made + BODY.format(add=biased) + "y = MatMul(p, v_)", inputs=inputs, opset=opset, ir_version=10)


def feeds_for(proto: onnx.ModelProto) -> dict[str, Array]:
    """Numbers over the range of each integer type, and normal ones."""
    rng = np.random.default_rng(0)
    feeds: dict[str, Array] = {}
    for value in proto.graph.input:
        tensor = value.type.tensor_type
        shape = [SIZES.get(dim.dim_param, 0) or dim.dim_value for dim in tensor.shape.dim]
        dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type)
        if dtype.kind == "f":
            feeds[value.name] = rng.standard_normal(shape).astype(dtype)
        else:
            low, high = max(np.iinfo(dtype).min, -128), min(np.iinfo(dtype).max, 255)
            feeds[value.name] = rng.integers(low, high, shape, endpoint=True).astype(dtype)
    return feeds


def check(proto: onnx.ModelProto, target: Target) -> onnx.ModelProto:
    """The fused model, which gives at every level what the original gives at each level that does not change it."""
    result, report = rewritten(proto, target)
    assert report.count("fused") == 1, report.blocks
    feeds = feeds_for(proto)
    (wanted,) = run(proto, feeds)
    for level in LEVELS:
        assert_same(run(result, feeds, level)[0], wanted, 2e-5)
    return result


@pytest.mark.parametrize(
    ("target", "opset", "kind", "point"),
    pairwise(TARGETS, (13, 17, 20, 21, 23), ("int8", "uint8", "int32"), (False, True)),
)
def test_transpositions(target: Target, opset: int, kind: str, point: bool) -> None:
    """A key [B, N, D, T], for contrib also the query and the value, whose layout is [B, T, N D]."""
    result = check(model(opset, {"q": kind, "kt": kind, "v": kind}, point, add=""), target)
    made = {name: node for node in result.graph.node for name in node.output}
    moved = [node for node in result.graph.node if node.op_type in ("Transpose", "Reshape")]
    assert any(node.op_type == "Transpose" for node in moved)
    assert not any(node.input[0] in made and made[node.input[0]].op_type == "DequantizeLinear" for node in moved)


@pytest.mark.parametrize(
    ("target", "opset", "kind", "point"), pairwise(TARGETS, (13, 17, 21), ("int8", "uint8", "int32"), (False, True))
)
def test_new_axes_of_a_bias(target: Target, opset: int, kind: str, point: bool) -> None:
    check(model(opset, {"b": kind}, point), target)


BETWEEN = {
    "an identity": "{0} = Identity({1})",
    "two": "{0}i = Identity({1}) {0} = Identity({0}i)",
    "a cast to the same type": "{0} = Cast<to=1>({1})",
    "a dropout": "{0} = Dropout({1})",
    "times 1": "{0} = Mul({1}, one)",
    "1 times": "{0} = Mul(one, {1})",
    "by 1": "{0} = Div({1}, one)",
    "0 added": "{0}n = Sub(one, one) {0} = Add({1}, {0}n)",
    "a copy": "{0}s = Shape({1}) {0} = Expand({1}, {0}s)",
}


@pytest.mark.parametrize("between", BETWEEN.values(), ids=BETWEEN)
@pytest.mark.parametrize("target", ("ort", "contrib"))
def test_what_onnx_runtime_removes(target: Target, between: str) -> None:
    """It separates the two only as long as it is there."""
    check(model(17, {"kt": "int8", "b": "int8"}, point=False, between=between), target)


def test_a_value_with_other_readers() -> None:
    """The other reader keeps the DequantizeLinear of its own."""
    proto = model(17, {"kt": "int8"}, point=False, add="")
    proto.graph.node.append(onnx.helper.make_node("ReduceMax", ["kt_"], ["z"], keepdims=0))
    proto.graph.output.append(onnx.helper.make_tensor_value_info("z", onnx.TensorProto.FLOAT, []))
    result, _ = rewritten(proto, "ort")
    feeds = feeds_for(proto)
    for level in LEVELS:
        for got, wanted in zip(run(result, feeds, level), run(proto, feeds), strict=True):
            assert_same(got, wanted, 2e-5)


BY_AXIS_TEXT = "kf = DequantizeLinear<axis=1>(kt, scales, points) "


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("opset", (13, 21))
def test_scales_by_axis_stay_where_they_are(target: Target, opset: int) -> None:
    proto = parse(
        "scales = Constant<value_floats=[0.05, 0.06, 0.07, 0.08]>() points = Constant<value=int8[4] {0, 1, 2, 3}>() "
        + BY_AXIS_TEXT
        + "s = MatMul(q, kf) p = Softmax<axis=-1>(s) y = MatMul(p, v)",
        inputs="float[B,4,S,8] q, int8[B,4,8,T] kt, float[B,4,T,8] v",
        opset=opset,
        ir_version=10,
    )
    result = check(proto, target)
    (scaled,) = (node for node in result.graph.node if node.op_type == "DequantizeLinear")
    assert scaled.input[0] == "kt"


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kind", ("int4", "uint4"))
def test_integers_of_4_bits_stay_where_they_are(target: Target, kind: str) -> None:
    """ONNX Runtime has no Unsqueeze or Reshape for them, and copies their quantisation rightly."""
    proto = model(21, {"kt": "int8"}, point=False, add="")
    (scaled,) = (node for node in proto.graph.node if node.op_type == "DequantizeLinear")
    number = onnx.TensorProto.INT4 if kind == "int4" else onnx.TensorProto.UINT4
    proto.graph.node.insert(0, onnx.helper.make_node("Cast", ["kt"], ["k4"], to=number))
    scaled.input[0] = "k4"
    check(proto, target)


@pytest.mark.parametrize("kind", ("int8", "uint8", "int16", "uint16", "int32"))
def test_the_operator_of_onnx_runtime(kind: str) -> None:
    """com.microsoft has a DequantizeLinear of its own."""
    proto = model(17, {"kt": "int8"}, point=False, add="")
    proto.graph.input[1].type.tensor_type.elem_type = onnx.TensorProto.DataType.Value(kind.upper())
    (scaled,) = (node for node in proto.graph.node if node.op_type == "DequantizeLinear")
    scaled.domain = "com.microsoft"
    check(proto, "ort")


ELSEWHERE = {
    "one": "zf = DequantizeLinear(w, scale, zp) z = Transpose<perm=[1,0]>(zf) ",
    "twice": (
        "zf = DequantizeLinear(w, scale, zp) z0 = Transpose<perm=[1,0]>(zf) z1 = Transpose<perm=[1,0]>(zf) "
        "z = Add(z0, z1) "
    ),
    "several": (
        "zf = DequantizeLinear(w, scale, zp) z0 = Reshape(zf, four) z1 = Identity(z0) z2 = Transpose<perm=[1,0]>(z1) "
        "z = Sin(z2) "
    ),
    "in a branch": (
        "zf = DequantizeLinear(w, scale, zp) yes = Constant<value=bool {1}>() z = If(yes) "
        "<then_branch = a () => (float[4,3] r) {r = Transpose<perm=[1,0]>(zf)}, "
        "else_branch = b () => (float[4,3] o) {o = Reshape(zf, three)}> "
    ),
}


@pytest.mark.parametrize("made", ELSEWHERE.values(), ids=ELSEWHERE)
def test_what_a_raised_model_does_elsewhere(made: str) -> None:
    """A model that ONNX Runtime loads at every level as opset 17 is loaded at every level as opset 23."""
    constants = (
        "scale = Constant<value=float {0.05}>() zp = Constant<value=int8 {3}>() "
        "four = Constant<value_ints=[3,4]>() three = Constant<value_ints=[4,3]>() "
    )
    body = constants + "kt = Transpose<perm=[0,1,3,2]>(k) s = MatMul(q, kt) p = Softmax<axis=-1>(s) y = MatMul(p, v) "
    proto = parse(body + made, "int8[3,4] w", outputs="float[B,4,S,8] y, float[4,3] z")
    result, report = rewritten(proto, "onnx")
    assert report.count("fused") == 1
    rng = np.random.default_rng(0)
    feeds: dict[str, Array] = {name: rng.standard_normal((2, 4, 5, 8)).astype(np.float32) for name in "qkv"}
    feeds["w"] = rng.integers(-128, 127, (3, 4), endpoint=True).astype(np.int8)
    for level in LEVELS:
        assert_same(run(result, feeds, level)[1], run(proto, feeds, level)[1], 1e-5)


def test_a_block_that_is_the_whole_tensor_stays_where_it_is() -> None:
    """Its one scale has as many dimensions as the tensor, and would not have them in front of a Reshape."""
    proto = parse(
        "f = DequantizeLinear<axis=3, block_size=1>(q, scale) s = MatMul(f, kt) p = Softmax<axis=-1>(s) "
        "y = MatMul(p, v)",
        inputs="int8[1,1,1,1] q, float[1,1,1,T] kt, float[1,1,T,1] v",
        outputs="float[1,1,1,1] y",
        opset=21,
        initializers="<float[1,1,1,1] scale = {0.05}>",
        ir_version=10,
    )
    for target in TARGETS:
        check(proto, target)


PUSHED = {
    # the integers, their scale and zero point
    "int8": ("int8", "scale"),
    "int8 by axis": ("int8", "<axis=1>scales"),
    "int8 with a zero point": ("int8", "scale, point"),
    "uint8": ("uint8", "scale"),
    "int32": ("int32", "scale"),
    "int32 with a zero point": ("int32", "scale, zero"),
    "int32 by axis": ("int32", "<axis=1>scales"),
}


@pytest.mark.parametrize("opset", (17, 21))
@pytest.mark.parametrize("name", PUSHED)
def test_a_transposition_in_front_of_a_past(name: str, opset: int) -> None:
    """ONNX Runtime pushes it through the DequantizeLinear and the Concat to the one that is inserted behind them."""
    kind, scales = PUSHED[name]
    attributes, _, inputs = scales.rpartition(">")
    proto = parse(
        "scale = Constant<value=float {0.05}>() point = Constant<value=int8 {3}>() zero = Constant<value=int32 {0}>() "
        "scales = Constant<value_floats=[0.05, 0.06, 0.07, 0.08]>() "
        f"t = Transpose<perm=[1,0,2,3]>(past) f = DequantizeLinear{attributes}{'>' * bool(attributes)}(t, {inputs}) "
        "kt = Concat<axis=3>(f, new) s = MatMul(q, kt) p = Softmax<axis=-1>(s) y = MatMul(p, v)",
        inputs=f"float[2,4,S,8] q, {kind}[4,2,8,3] past, float[2,4,8,2] new, float[2,4,5,8] v",
        outputs="float[2,4,S,8] y",
        opset=opset,
        ir_version=10,
    )
    for target in TARGETS:
        check(proto, target)


@pytest.mark.parametrize("kind", ("int8", "int32"))
@pytest.mark.parametrize("opset", (17, 21))
def test_a_transposition_that_is_pushed_up_to_new_keys(kind: str, opset: int) -> None:
    """The transposition of the past makes up for one behind the Concat, which then reaches the quantised new keys."""
    proto = parse(
        "scale = Constant<value=float {0.05}>() f = DequantizeLinear(new, scale) "
        "a = Transpose<perm=[0,2,1,3]>(past) t = Transpose<perm=[1,0,3,2]>(a) kt = Concat<axis=3>(t, f) "
        "s = MatMul(q, kt) p = Softmax<axis=-1>(s) y = MatMul(p, v)",
        inputs=f"float[2,2,S,4] q, float[2,3,2,4] past, {kind}[2,2,4,1] new, float[2,2,4,4] v",
        outputs="float[2,2,S,4] y",
        opset=opset,
        ir_version=10,
    )
    for target in TARGETS:
        check(proto, target)
