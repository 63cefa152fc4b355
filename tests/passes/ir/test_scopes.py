"""Attention that meets If, Loop, functions, overridable initializers and old models."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from fa_compiler.passes import Options, Report, fuse
from fa_compiler.reference import evaluator
from tests.passes.running import (
    PRODUCT_PV,
    PRODUCT_QK,
    SOFTMAX,
    Array,
    assert_same,
    fused,
    parse,
    random_feeds,
    run,
)

ATTENTION = PRODUCT_QK + SOFTMAX.format("s") + PRODUCT_PV
YES = np.array(True)


def same(model: onnx.ModelProto, **given: Array) -> tuple[onnx.ModelProto, Report]:
    """Fuse, and compare all outputs before and after in ONNX Runtime; float32 rounds sums differently by 1e-5."""
    feeds = random_feeds(model, **given)
    result, report = fused(model)
    for got, wanted in zip(run(result, feeds), run(model, feeds), strict=True):
        assert_same(got, wanted, 1e-5)
    return result, report


def ops(model: onnx.ModelProto) -> list[str]:
    """Operator types of all graphs and functions, subgraphs after the node that owns them."""
    found = [node.op_type for graph in ir.from_proto(model).graphs() for node in graph]
    return found + [node.op_type for function in model.functions for node in function.node]


def branches(then: str, otherwise: str, out: str = "float[B,4,S,8]") -> str:
    then_branch, else_branch = f"g1 () => ({out} a) {{ {then} }}", f"g2 () => ({out} b) {{ {otherwise} }}"
    return f"y = If (c) <then_branch = {then_branch}, else_branch = {else_branch}>"


def renamed(body: str, output: str) -> str:
    """Attention whose values do not clash with those of another branch."""
    for name in ("kt", "s", "p"):
        body = body.replace(f"{name} =", f"{output}{name} =").replace(f"({name})", f"({output}{name})")
        body = body.replace(f"({name},", f"({output}{name},").replace(f", {name})", f", {output}{name})")
    return body.replace("y =", f"{output} =")


# -- If and Loop ------------------------------------------------------------------------------------


@pytest.mark.parametrize("taken", [True, False])
def test_attention_in_both_branches(taken: bool) -> None:
    body = branches(renamed(ATTENTION, "a"), renamed(ATTENTION.replace("MatMul(q, kt)", "MatMul(k, kt)"), "b"))
    body = body.replace("(k, bkt)", "(q, bkt)")
    result, report = same(parse(body, "bool c"), c=np.array(taken))
    assert [block.status for block in report.blocks] == ["fused", "fused"]
    assert ops(result) == ["If", "FlashAttentionScore", "FlashAttentionScore"]


def test_softmax_in_a_branch_knows_its_opset() -> None:
    """Without an axis attribute opset 13 means the last axis, opset 12 everything from axis 1 on."""
    body = branches(renamed(ATTENTION.replace("<axis=-1>", ""), "a"), "b = Neg(q)")
    assert same(parse(body, "bool c"), c=YES)[1].count("fused") == 1
    report = same(parse(body, "bool c", opset=12), c=YES)[1]
    assert [block.code for block in report.blocks] == ["softmax_axis"]


def test_operands_and_mask_from_around_the_branch() -> None:
    outside = "kt = Transpose<perm=[0,1,3,2]>(k) z = Constant<value=float {0.0}>() "
    outside += "f = Constant<value=float {-3.4028234663852886e38}>() n = Where(m, z, f) "
    inside = "s = MatMul(q, kt) x = Add(s, n) p = Softmax<axis=-1>(x) a = MatMul(p, v)"
    model = parse(outside + branches(inside, "b = Neg(q)"), "bool c, bool[B,1,1,T] m")
    mask = np.random.default_rng(1).random((2, 1, 1, 6)) < 0.5
    mask[0] = False
    _, report = same(model, c=YES, m=mask)
    assert [block.mask for block in report.blocks] == ["atten_mask"]


def test_scores_outside_of_the_branch_with_the_softmax() -> None:
    body = PRODUCT_QK + branches("p = Softmax<axis=-1>(s) a = MatMul(p, v)", "b = Neg(q)")
    report = same(parse(body, "bool c"), c=YES)[1]
    assert [(block.code, block.culprit) for block in report.blocks] == [("scope", "s")]


def test_values_in_a_branch() -> None:
    body = PRODUCT_QK + SOFTMAX.format("s") + branches("a = MatMul(p, v)", "b = Neg(q)")
    report = same(parse(body, "bool c"), c=YES)[1]
    assert [block.code for block in report.blocks] == ["scope"]


def test_probabilities_read_in_a_branch() -> None:
    body = ATTENTION.replace("y =", "o =") + branches("t = ReduceSum(p) a = Mul(o, t)", "b = Neg(q)")
    report = same(parse(body, "bool c"), c=YES)[1]
    assert [block.code for block in report.blocks] == ["probabilities_are_output"]


@pytest.mark.parametrize("inside", ["a = Transpose<perm=[0,2,1,3]>(o)", "t = Transpose<perm=[0,2,1,3]>(o) a = Neg(t)"])
def test_result_rearranged_in_a_branch(inside: str) -> None:
    """The result stays where it was: a Transpose in a branch is no place for it."""
    body = ATTENTION.replace("y =", "o =") + branches(inside, "b = Transpose<perm=[0,2,1,3]>(q)", "float[B,S,4,8]")
    result, report = same(parse(body, "bool c", outputs="float[B,S,4,8] y"), c=YES)
    assert report.count("fused") == 1
    assert "Softmax" not in ops(result)


def test_shape_of_the_scores_read_in_a_branch() -> None:
    """Either answer is right, as long as the scores are not computed twice."""
    body = ATTENTION + "z = If (c) <then_branch = g1 () => (int64[4] a) { a = Shape(s) }, "
    body += "else_branch = g2 () => (int64[4] b) { b = Constant<value=int64[4] {1,1,4,8}>() }>"
    result, report = same(parse(body, "bool c", outputs="float[B,4,S,8] y, int64[4] z"), c=YES)
    assert report.count("fused") == 1 - ops(result).count("Softmax")


def test_shape_of_the_scores_is_an_output() -> None:
    result, report = same(parse(ATTENTION + "z = Shape(s)", outputs="float[B,4,S,8] y, int64[4] z"))
    assert report.count("fused") == 1
    assert "MatMul" not in ops(result)


def test_shape_of_probabilities_that_meet_more_values() -> None:
    """A batch of 1 is repeated for the values, and not for the probabilities."""
    more = "twice = Constant<value=int64[4] {2,1,1,1}>() w = Expand(v, twice) z = Shape(p)"
    body = ATTENTION.replace("MatMul(p, v)", "MatMul(p, w)").replace("y =", f"{more} y =")
    model = parse(body, outputs="float[2,4,S,8] y, int64[4] z")
    feeds = {name: array[:1] for name, array in random_feeds(model).items()}
    result, report = fused(model)
    assert report.count("fused") == 1
    assert_same(run(result, feeds)[1], run(model, feeds)[1], 0)


# -- functions --------------------------------------------------------------------------------------


def function(body: str, inputs: str = "q, k, v", attributes: str = "", opset: int = 17, name: str = "attend") -> str:
    return f'<domain: "f", opset_import: ["": {opset}]> {name} {attributes} ({inputs}) => (y) {{ {body} }}'


def test_a_function_with_a_graph_of_its_own_is_kept() -> None:
    model = parse("y = f.attend(q, k, v)", functions=function(ATTENTION))
    body = onnx.helper.make_graph([], "body", [], [])
    model.functions[0].attribute_proto.append(onnx.helper.make_attribute("body", body))
    result, report = same(model)
    assert [block.status for block in report.blocks] == ["declined"]
    assert "attend" in str(report.blocks[0].reason)
    assert len(result.functions) == 1


def test_each_call_of_a_function_is_a_block() -> None:
    model = parse("a = f.attend(q, k, v) y = f.attend(a, k, v)", functions=function(ATTENTION))
    result, report = same(model)
    assert [block.status for block in report.blocks] == ["fused", "fused"]
    assert len({block.anchor for block in report.blocks}) == 2
    assert ops(result) == ["FlashAttentionScore"] * 2


def test_attributes_of_a_function() -> None:
    body = PRODUCT_QK.replace("[0,1,3,2]", "ints = @perm").replace("perm=ints", "perm: ints")
    body += "c = Constant<value_float: float = @alpha>() x = Mul(s, c) " + SOFTMAX.format("x") + PRODUCT_PV
    call = "a = f.attend<perm=[0,1,3,2]>(q, k, v) y = f.attend<perm=[0,1,3,2], alpha=2.0>(a, k, v)"
    result, report = same(parse(call, functions=function(body, attributes="<perm, alpha: float = 0.5>")))
    assert report.count("fused") == 2
    scales = [
        attribute.f for node in result.graph.node for attribute in node.attribute if attribute.name == "scale_value"
    ]
    assert scales == [0.5, 2.0]


SHADOWED = {
    # the call of p, the function and its domain, the opset
    "com.microsoft": ("p1 = com.microsoft.Gelu(p0)", "com.microsoft", "Gelu", 17),
    "ai.onnx": ("p1 = Gelu(p0)", "", "Gelu", 20),
    "an operator of every opset": ("p1 = Relu(p0)", "", "Relu", 17),
}


@pytest.mark.parametrize("name", SHADOWED)
def test_a_function_named_like_an_operator_of_the_runtime(name: str) -> None:
    """ONNX Runtime runs its operator, and not the function of this name, which would give the negative numbers."""
    call, domain, word, opset = SHADOWED[name]
    body = PRODUCT_QK + SOFTMAX.format("s") + "p0 = MatMul(p, v) " + call + " y = Identity(p1)"
    model = parse(body, opset=opset)
    negative = onnx.helper.make_node("Neg", ["a"], ["b"])
    imports = [onnx.helper.make_opsetid("", opset)]
    model.functions.append(onnx.helper.make_function(domain, word, ["a"], ["b"], [negative], imports))
    result, report = fused(model)
    assert report.blocks[0].status == "fused"
    assert any("is left out: ONNX Runtime has an operator of this name" in note for note in report.notes)
    assert not any(function.name == word for function in result.functions)
    feeds = random_feeds(model)
    assert_same(run(result, feeds)[0], run(model, feeds)[0], 1e-5)
    if not domain:
        assert_same(np.asarray(evaluator(model).run(None, feeds)[0]), run(model, feeds)[0], 1e-5)


def test_a_function_with_a_softmax_named_like_an_operator_of_the_runtime() -> None:
    """It holds no attention, because it is never called."""
    model = parse(PRODUCT_QK + "p = LogSoftmax(s) y = MatMul(p, v)")
    softmax = onnx.helper.make_node("Softmax", ["a"], ["b"])
    imports = [onnx.helper.make_opsetid("", 17)]
    model.functions.append(onnx.helper.make_function("", "LogSoftmax", ["a"], ["b"], [softmax], imports))
    _, report = fused(model)
    assert not any(block.status == "fused" for block in report.blocks)


def test_a_function_of_its_own_domain_is_called() -> None:
    model = parse("y0 = f.Gelu(q) " + PRODUCT_QK.replace("(q", "(y0") + SOFTMAX.format("s") + PRODUCT_PV)
    negative = onnx.helper.make_node("Neg", ["a"], ["b"])
    model.functions.append(
        onnx.helper.make_function("f", "Gelu", ["a"], ["b"], [negative], [onnx.helper.make_opsetid("", 17)])
    )
    result, report = fused(model)
    assert report.blocks[0].status == "fused" and not report.notes
    feeds = random_feeds(model)
    assert_same(run(result, feeds)[0], run(model, feeds)[0], 1e-5)


def test_softmax_alone_in_a_function() -> None:
    """torch's exporters make functions of softmax and of scaled_dot_product_attention's parts."""
    tail = function("y = Softmax<axis=-1>(x)", "x", name="soft")
    result, report = same(parse(PRODUCT_QK + "p = f.soft(s) " + PRODUCT_PV, functions=tail))
    assert report.count("fused") == 1
    assert ops(result) == ["FlashAttentionScore"]


def test_the_cast_that_castlike_is() -> None:
    """A CastLike that takes the type of the scores does not count as a reader of them."""
    body = PRODUCT_QK + "o = Constant<value=int64[1] {2}>() z = CastLike(o, s) "
    result, report = same(parse(body + SOFTMAX.format("s") + PRODUCT_PV, outputs="float[B,4,S,8] y, float[1] z"))
    assert report.count("fused") == 1
    assert sorted(ops(result)) == ["Cast", "Constant", "FlashAttentionScore"]


def test_castlike_of_a_model_without_attention_stays() -> None:
    model = parse("y = CastLike(q, k)", inputs="float[B] q, float[B] k", outputs="float[B] y")
    assert ops(fused(model)[0]) == ["CastLike"]


def calling(*functions: str) -> onnx.ModelProto:
    """A model that calls `attend`, and its functions, which onnx's checker does not see."""
    model = parse("y = f.attend(q, k, v)")
    model.functions.extend(map(onnx.parser.parse_function, functions))
    return model


def test_function_of_another_opset_is_left_alone() -> None:
    """The Softmax of opset 12 flattens the axes behind its own."""
    model = ir.from_proto(calling(function(ATTENTION, opset=12)))
    assert [block.code for block in fuse(model, Options()).blocks] == ["function"]
    assert [node.op_type for node in model.graph] == ["attend"]


def test_a_function_of_another_opset_that_has_the_same_operators() -> None:
    result, report = same(calling(function(ATTENTION, opset=18)))
    assert [block.status for block in report.blocks] == ["fused"]
    assert not result.functions


@pytest.mark.parametrize("versions", [(1, 17, 18), (17, 1, 1)], ids=str)
def test_the_version_of_a_domain_of_functions_means_nothing(versions: tuple[int, ...]) -> None:
    """jax2onnx imports the domains of functions with 1 in the model, and with the standard opset in functions."""
    inner = function(ATTENTION, name="inner").replace('"f"', '"g"')
    model = calling(function("x = g.inner(q, k, v) y = Identity(x)"), inner)
    owners = (model, *model.functions)
    for owner, version in zip(owners, versions, strict=True):
        del owner.opset_import[1:]
        owner.opset_import.extend(onnx.helper.make_opsetid(domain, version) for domain in "fg")
    result, report = same(model)
    assert [block.status for block in report.blocks] == ["fused"]
    assert not result.functions


def test_a_branch_is_of_the_opset_of_its_model_beside_a_function_of_another() -> None:
    """What is made in the branch is not of the function's opset, where Unsqueeze has no axes as an input."""
    then = "kt = Transpose<perm=[1,0]>(k) s = MatMul(q, kt) p = Softmax<axis=-1>(s) a = MatMul(p, v)"
    body = branches(then, "b = Neg(q)", "float[S,8]")
    inputs, outputs = "float[S,8] q, float[T,8] k, float[T,8] v, bool c", "float[S,8] y, float[S,8] w"
    shapes = []
    for call in ("Sin", "f.other"):
        functions = function("y = Sin(x)", "x", opset=11, name="other") if call != "Sin" else ""
        model = parse(f"{body} w = {call}(q)", inputs=inputs, outputs=outputs, functions=functions)
        result, report = same(model, c=YES)
        assert [block.status for block in report.blocks] == ["fused"]
        made = next(node for node in result.graph.node if node.op_type == "If").attribute[0].g.value_info
        shapes.append({each.name: len(each.type.tensor_type.shape.dim) for each in made})
    assert shapes[0] == shapes[1]
    assert shapes[0]["fa_Unsqueeze_output"] == 4


def test_branch_in_a_function() -> None:
    body = branches(renamed(ATTENTION, "a"), "b = Neg(q)")
    _, report = same(parse("y = f.attend(q, k, v, c)", "bool c", functions=function(body, "q, k, v, c")), c=YES)
    assert len(report.blocks) == 1


def test_functions_without_softmax_stay() -> None:
    model = parse("y = f.twice(q)", functions=function("y = Add(q, q)", "q", name="twice"))
    result, report = same(model)
    assert result == ir.to_proto(ir.from_proto(model))
    assert not report.blocks


# -- initializers that a caller may replace ---------------------------------------------------------

SCALED = PRODUCT_QK + "x = Mul(s, c) " + SOFTMAX.format("x") + PRODUCT_PV
MASKED = PRODUCT_QK + "x = Add(s, n) " + SOFTMAX.format("x") + PRODUCT_PV
LOW = "<float[1,1,1,3] n = {0.0, -inf, -inf}>"
STATIC = "float[B,4,S,8] q, float[B,4,3,8] k, float[B,4,3,8] v"


def test_scale_in_a_model_of_ir_version_3() -> None:
    """There every initializer is an input as well, and none can be replaced."""
    model = parse(SCALED, "float c", initializers="<float c = {0.25}>", ir_version=3, opset=8)
    result, report = same(model)
    assert report.count("fused") == 1
    assert [value.name for value in result.graph.input] == ["q", "k", "v", "c"]


@pytest.mark.parametrize("version", [3, 4])
def test_numbers_in_a_branch_of_a_model_of_ir_version_3(version: int) -> None:
    """A branch has no inputs, so that it may hold no initializers there: they are nodes."""
    five = "{0}kt = Transpose<perm=[0,1,2,4,3]>(k) {0}s = MatMul(q, {0}kt) {0}p = Softmax<axis=4>({0}s) "
    five += "{0} = MatMul({0}p, v)"
    tensor = "float[2,3,4,5,8]"
    model = parse(
        branches(five.format("a"), "b = Neg(q)", tensor),
        "bool c",
        inputs=", ".join(f"{tensor} {name}" for name in "qkv"),
        outputs=f"{tensor} y",
        ir_version=version,
        opset=8,
    )
    result, report = same(model, c=np.array(True))
    assert report.count("fused") == 1
    (branch,) = (attr.g for attr in result.graph.node[0].attribute if attr.name == "then_branch")
    made = [node.op_type for node in branch.node]
    assert ("Constant" in made) == (version == 3) and bool(branch.initializer) == (version == 4)


def test_numbers_of_a_branch_that_nothing_needs_in_the_end() -> None:
    """Nodes that hold them go together with those that were made for nothing: an operand of six batch dimensions is
    declined when its shape was made already."""
    tensor = "float[2,2,8,4,2,2,4,8]"
    model = parse(
        branches("s = MatMul(q, k) p = Softmax<axis=-1>(s) a = MatMul(p, v)", "b = Neg(v)", tensor),
        "bool c",
        inputs=f"float[2,2,4,8] q, float[2,2,8,4] k, {tensor} v",
        outputs=f"{tensor} y",
        ir_version=3,
        opset=17,
    )
    result, report = fused(model, "ascend")
    assert report.count("fused") == 0
    assert result == ir.to_proto(ir.from_proto(model))


@pytest.mark.parametrize("given", [None, 0.75])
def test_scale_that_can_be_replaced(given: float | None) -> None:
    """It is a value of the run, whatever it holds by default."""
    model = parse(SCALED, "float c", initializers="<float c = {0.25}>")
    more = {} if given is None else {"c": np.array(given, np.float32)}
    report = same(model, **more)[1]
    assert report.count("fused") == 1
    assert [(block.code, block.culprit) for block in fused(model, "ascend")[1].blocks] == [("scale", "x")]


def test_mask_that_can_be_replaced() -> None:
    """It is a bias, whatever it holds by default."""
    model = parse(MASKED, "float[1,1,1,3] n", inputs=STATIC, initializers=LOW)
    _, report = same(model, n=np.array([[[[0.5, -1e4, 2.0]]]], np.float32))
    assert [block.mask for block in report.blocks] == ["real_shift"]


def test_mask_that_cannot_be_replaced() -> None:
    _, report = same(parse(MASKED, inputs=STATIC, initializers=LOW))
    assert [block.mask for block in report.blocks] == ["atten_mask"]


def test_initializer_that_is_an_output_stays() -> None:
    model = parse(SCALED, initializers="<float c = {0.25}>", outputs="float[B,4,S,8] y, float c")
    assert same(model)[1].count("fused") == 1


def test_initializer_read_by_others_stays() -> None:
    body = SCALED + "z = Neg(c)"
    result, _ = same(parse(body, initializers="<float c = {0.25}>", outputs="float[B,4,S,8] y, float z"))
    assert [each.name for each in result.graph.initializer] == ["c"]


# -- what is already fused --------------------------------------------------------------------------


def test_attention_operators_that_cannot_be_expressed_stay() -> None:
    body = "y = Attention<softmax_precision=10>(q, k, v) " + ATTENTION.replace("y =", "z =")
    result, report = same(parse(body, opset=23, ir_version=10, outputs="float[B,4,S,8] y, float[B,4,S,8] z"))
    assert [(block.status, block.code) for block in report.blocks] == [("declined", "cast"), ("fused", None)]
    assert ops(result)[0] == "Attention"
