"""Whole graphs: inputs, weights, outputs, branches, open sizes, and what is said of a node without a counterpart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as rt
import pytest

from fa_compiler.lowering.ascend.air import parse, serialise
from fa_compiler.lowering.ascend.convert import UnmappedError, to_ge
from fa_compiler.lowering.ascend.convert.errors import UnreadableError
from fa_compiler.lowering.ascend.graph import Attr, Model, Op, Output
from tools.ge_to_onnx import from_ge

HEAD = '<ir_version: 8, opset_import: ["" : 18]>\n'


def model_of(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(HEAD + text)


def convert(text: str, **options: object) -> Model:
    return to_ge(ir.from_proto(model_of(text)), **options)  # type: ignore[arg-type]


def run(model: onnx.ModelProto, *feeds: np.ndarray) -> list[np.ndarray]:
    session = rt.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]
    made: list[np.ndarray] = session.run(None, dict(zip(names, feeds, strict=True)))
    return made


def back(model: Model) -> onnx.ModelProto:
    return from_ge(parse(serialise(model)[0]))


def find(model: Model, op_type: str) -> Op:
    return next(model.root.of_type(op_type))


def test_inputs_outputs_and_weights() -> None:
    model = convert("g (float[2,3] a, int64[n] ids) => (float[2,3] y, int64[n] z) { y = Relu(a)  z = Identity(ids) }")
    data = list(model.root.of_type("Data"))
    assert [(op.name, op.attrs["index"].value, op.output_descs[0].shape) for op in data] == [
        ("a", 0, (2, 3)),
        ("ids", 1, (-1,)),
    ]
    end = model.root.ops[-1]
    assert end.type == "NetOutput"
    # nothing but an operator may feed an output
    assert {source.op for source in end.inputs if source} & {"a", "ids"} == set()


def test_a_weight_nothing_reads_is_left_out_and_one_read_twice_is_there_once() -> None:
    text = """g (float[2] a) => (float[2] y) <float[2] w = {1, 2}, float[2] unused = {3, 4}>
    { t = Add(a, w)  y = Mul(t, w) }"""
    model = convert(text)
    assert len(list(model.root.of_type("Const"))) == 1
    np.testing.assert_equal(run(back(model), np.array([3, 4], np.float32))[0], [4, 12])


def test_what_no_output_needs_is_left_out_with_its_graphs() -> None:
    text = """g (float[2] a, bool c) => (float[2] y) { dead = Exp(a)
      gone = If(c) <
        then_branch = p () => (float[2] u) { u = Neg(a) },
        else_branch = q () => (float[2] v) { v = Abs(a) }
      >
      y = Relu(a) }"""
    model = convert(text)
    assert [op.type for op in model.root.ops] == ["Data", "Data", "Relu", "NetOutput"]
    assert len(model.graphs) == 1


def test_sizes_that_are_known_become_constants_and_others_are_computed() -> None:
    text = """g (float[n,6] a) => (float[k,3] y) <int64[1] zero = {0}, int64[1] two = {2}, int64[1] three = {3}> {
      s = Shape(a)  rows = Gather(s, zero)  wide = Mul(rows, two)
      t = Concat<axis = 0>(wide, three)  y = Reshape(a, t) }"""
    opened = {op.type for op in convert(text).root.ops}
    assert opened == {"Data", "Const", "Shape", "GatherV2", "Mul", "ConcatD", "Reshape", "NetOutput"}
    fixed = convert(text, input_shapes={"a": [4, 6]})
    assert {op.type for op in fixed.root.ops} == {"Data", "Const", "Reshape", "NetOutput"}
    feed = np.arange(24, dtype=np.float32).reshape(4, 6)
    for model in (convert(text), fixed):
        np.testing.assert_equal(run(back(model), feed)[0], feed.reshape(8, 3))


def test_every_attribute_of_the_prototype_is_written() -> None:
    softmax = find(convert("g (float[2,3] a) => (float[2,3] y) { y = Softmax(a) }"), "SoftmaxV2")
    assert softmax.attrs == {"axes": Attr("ListInt", (1,)), "half_to_float": Attr("Bool", False)}


def test_names_hold_no_colon_and_stay_unique() -> None:
    model = model_of("g (float[2] a) => (float[2] y) { b = Relu(a) c = Relu(b) y = Relu(c) }")
    model.graph.input[0].name = "a:0"
    model.graph.node[0].input[0] = "a:0"
    for node in model.graph.node:
        node.name = "same:0"
    graph = to_ge(ir.from_proto(model)).root
    names = [op.name for op in graph.ops]
    assert len(set(names)) == len(names)
    assert not any(":" in name or ";" in name for name in names)


def test_given_sizes_go_into_the_graph_and_bounds_beside_it() -> None:
    text = "g (float[n,m] a) => (float[x] y) { s = Shape(a) y = Cast<to=1>(s) }"
    fixed = convert(text, input_shapes={"a": [2, 5]})
    assert find(fixed, "Data").output_descs[0].shape == (2, 5)
    bounded = convert(text, input_shapes={"a": [2, (1, 64)]})
    desc = find(bounded, "Data").output_descs[0]
    assert (desc.shape, desc.ranges) == ((2, -1), ((2, 2), (1, 64)))


@pytest.mark.parametrize(
    ("shapes", "words"), [({"b": [1]}, "no input 'b'"), ({"a": [1]}, "rank 2"), ({"a": [3, 5]}, "has size 2")]
)
def test_a_shape_that_does_not_fit_is_refused(shapes: dict[str, list[int]], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        convert("g (float[2,m] a) => (float[2,m] y) { y = Relu(a) }", input_shapes=shapes)


BRANCHES = """g (bool c, float[n] a) => (float[m] y, float[n] z) {
    t = Relu(a)
    y, z = If(c) <
      then_branch = p () => (float[m] u, float[n] v) { u = Add(t, a)  v = Identity(t) },
      else_branch = q () => (float[m] w, float[n] x) {
        k = Constant<value_floats = [2.0]>()
        w = Mul(a, k)
        b = Not(c)
        x = If(b) <
          then_branch = r () => (float[n] i) { i = Neg(a) },
          else_branch = s () => (float[n] j) { j = Exp(a) }
        >
      }
    > }"""


@pytest.mark.parametrize("condition", [True, False])
def test_branches_become_graphs_that_take_what_they_read(condition: bool) -> None:
    model = convert(BRANCHES)
    assert len(model.graphs) == 5
    operator = find(model, "If")
    assert list(operator.subgraphs) == ["then_branch", "else_branch"]
    feeds = np.array(condition), np.array([1, -2], np.float32)
    for want, got in zip(run(model_of(BRANCHES), *feeds), run(back(model), *feeds), strict=True):
        np.testing.assert_equal(got, want)


@pytest.mark.parametrize("shape", ["[1]", "[1,1]", ""])
def test_a_condition_becomes_a_scalar(shape: str) -> None:
    """GE takes a tensor that is no scalar for true, whatever is in it."""
    text = f"""g (bool{shape} c, float[2] a) => (float[2] y) {{ y = If(c) <
      then_branch = p () => (float[2] u) {{ u = Neg(a) }}, else_branch = q () => (float[2] v) {{ v = Exp(a) }} > }}"""
    model = convert(text)
    operator = find(model, "If")
    assert operator.input_descs[0].shape == ()
    a = np.array([1, -2], np.float32)
    c = np.zeros([1] * shape.count("1"), bool)
    np.testing.assert_allclose(run(back(model), c, a)[0], np.exp(a), rtol=1e-6)

    operator.input_descs[0] = replace(operator.input_descs[0], shape=(1,))
    with pytest.raises(UnreadableError, match="not a scalar"):
        back(model)


def test_all_nodes_without_a_counterpart_are_named_at_once() -> None:
    text = """g (float[4] a, double[2,2] b) => (float[4] y, double[2,2] z) {
      [first] t = Det(a)  [second] u = Bernoulli(a)  [third] z = MatMul(b, b)  [fourth] v = Hardmax(u)  y = Relu(v) }"""
    with pytest.raises(UnmappedError) as caught:
        convert(text)
    assert [node.name for node in caught.value.nodes] == ["first", "second", "third", "fourth"]
    message = str(caught.value)
    assert message.startswith("4 nodes have no counterpart among GE's operators: Det 'first': ")
    assert "\n" not in message
    assert "; Bernoulli 'second': " in message
    assert "MatMul 'third': MatMulV2 of GE does not take double as x1; it takes float" in message


def test_attention_that_was_not_fused_is_refused() -> None:
    text = "g (float[1,4,8] x) => (float[1,4,8] y) { [att] y = com.microsoft.MultiHeadAttention<num_heads=2>(x, x, x) }"
    with pytest.raises(UnmappedError, match="MultiHeadAttention 'att': attention that was not fused .*; export with"):
        convert(text)


@pytest.mark.parametrize("domain", ["", "com.microsoft."])
def test_linear_attention_that_was_not_fused_is_refused(domain: str) -> None:
    text = f"""g (float[1,4,8] q, float[1,4,8] k, float[1,4,8] v) => (float[1,4,8] y) {{
      [att] y = {domain}LinearAttention<q_num_heads=2, kv_num_heads=2, update_rule="linear">(q, k, v) }}"""
    with pytest.raises(UnmappedError, match="'att': linear attention that was not fused .* says why.; do what it says"):
        convert(text)


def test_a_loop_is_refused() -> None:
    text = """g (int64 n, bool c, float[2] a) => (float[2] y) {
      [turns] y = Loop(n, c, a) <body = b (int64 i, bool d, float[2] s) => (bool e, float[2] u)
        { e = Identity(d)  u = Neg(s) }> }"""
    with pytest.raises(UnmappedError, match="Loop 'turns'"):
        convert(text)


def test_a_graph_given_to_the_conversion_is_not_changed() -> None:
    model = ir.from_proto(model_of("g (float[n] a) => (float[n] y) { y = CastLike(a, a) }"))
    before = ir.to_proto(model).SerializeToString(deterministic=True)
    to_ge(model, input_shapes={"a": [3]})
    assert ir.to_proto(model).SerializeToString(deterministic=True) == before


# -- the other direction refuses what it does not understand ------------------------------------------


def softmax() -> Model:
    return convert("g (float[2,3] a) => (float[2,3] y) { t = Transpose(a) u = Softmax(t) y = Transpose(u) }")


def unknown_attribute(model: Model) -> None:
    find(model, "SoftmaxV2").attrs["axis"] = Attr("Int", 1)


def attribute_of_another_kind(model: Model) -> None:
    find(model, "SoftmaxV2").attrs["axes"] = Attr("Int", 1)


def attribute_without_meaning(model: Model) -> None:
    find(model, "SoftmaxV2").attrs["half_to_float"] = Attr("Bool", True)


def unknown_type(model: Model) -> None:
    find(model, "SoftmaxV2").type = "HardMax"


def permutation_that_is_computed(model: Model) -> None:
    find(model, "Transpose").inputs[1] = Output("a")


def unknown_source(model: Model) -> None:
    find(model, "SoftmaxV2").inputs[0] = Output("nobody")


def cycle(model: Model) -> None:
    find(model, "Transpose").inputs[0] = Output(list(model.root.of_type("Transpose"))[1].name)


def unknown_input(model: Model) -> None:
    op = find(model, "SoftmaxV2")
    op.input_descs[0] = replace(op.input_descs[0], name="logits")


def no_output(model: Model) -> None:
    model.root.ops.pop()


BROKEN = [
    (unknown_attribute, "axis, which GE lacks"),
    (attribute_of_another_kind, "is a Int, not a ListInt"),
    (attribute_without_meaning, "half_to_float = True"),
    (unknown_type, "HardMax"),
    (permutation_that_is_computed, "perm is not a constant"),
    (unknown_source, "'nobody', which is not in the graph"),
    (cycle, "reads its own result"),
    (unknown_input, "no input x"),
    (no_output, "no NetOutput"),
]


@pytest.mark.parametrize(("damage", "words"), BROKEN, ids=lambda part: getattr(part, "__name__", ""))
def test_what_has_no_meaning_is_refused(damage: Callable[[Model], None], words: str) -> None:
    model = softmax()
    damage(model)
    with pytest.raises(UnreadableError, match=words):
        from_ge(model)
