"""ONNX models with nodes of the domain `ascend` in onnx.reference."""

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnx.parser
import pytest
from onnx.reference import ReferenceEvaluator

from fa_compiler import reference
from fa_compiler.errors import InputError

from .naive import causal_constant, random

ATTRIBUTES = '<head_num=2, input_layout="BNSD", scale_value=0.5, pse_type={pse}, sparse_mode={mode}>'


def fused(inputs, outputs, mode=0, pse=1):
    """A node as text; absent tensors are two quotes."""
    return f"{outputs} = ascend.FlashAttentionScore {ATTRIBUTES.format(mode=mode, pse=pse)} ({inputs})"


def parse(text):
    return onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 17, "ascend" : 1, "local" : 1]>\n{text}')


def feeds():
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal((1, 2, 3, 4)).astype(np.float32) for name in ("q", "k", "v")}


def expected(feeds, mask=None, mode=0, **more):
    inputs = {"query": feeds["q"], "key": feeds["k"], "value": feeds["v"], "atten_mask": mask}
    attrs = {"head_num": 2, "input_layout": "BNSD", "scale_value": 0.5, "sparse_mode": mode, **more}
    return reference.run("FlashAttentionScore", inputs, attrs)


SIGNATURE = "g (float[1,2,3,4] q, float[1,2,3,4] k, float[1,2,3,4] v{more}) => (float[1,2,3,4] y)"


def test_unused_outputs_and_absent_inputs():
    """Leading "" outputs; a mask in REG_OP position 6 with "" between."""
    node = fused('q, k, v, "", "", "", m', '"", "", "", y')
    model = parse(SIGNATURE.format(more=", bool[3,3] m") + "{" + node + "}")
    mask = np.triu(np.ones((3, 3), bool), 1)
    (got,) = reference.evaluator(model).run(None, {**feeds(), "m": mask})
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, expected(feeds(), mask)["attention_out"])


def test_unused_outputs_do_not_become_later_absent_inputs():
    """The evaluator keeps a value named "": a second node, and ONNX's Clip, must still see nothing there."""
    text = SIGNATURE.format(more=", bool[3,3] m") + "{"
    text += fused('q, k, v, "", "", "", m', '"", "", "", a') + "\n"
    text += fused('a, k, v, "", "", "", m', '"", "", "", b') + "\n"
    text += 'high = Constant<value_float=0.25>()\ny = Clip(b, "", high)\n}'
    mask = np.triu(np.ones((3, 3), bool), 1)
    (got,) = reference.evaluator(parse(text)).run(None, {**feeds(), "m": mask})
    first = expected(feeds(), mask)["attention_out"]
    second = expected({**feeds(), "q": first}, mask)["attention_out"]
    np.testing.assert_array_equal(got, np.minimum(second, np.float32(0.25)))


def test_all_outputs():
    text = "g (float[1,2,3,4] q, float[1,2,3,4] k, float[1,2,3,4] v) => (float[1,2,3,8] m, float[1,2,3,8] s, "
    text += "float[0,0,0,0] o, float[1,2,3,4] y) {" + fused("q, k, v", "m, s, o, y") + "}"
    got = reference.evaluator(parse(text)).run(None, feeds())
    for value, name in zip(got, ("softmax_max", "softmax_sum", "softmax_out", "attention_out"), strict=True):
        np.testing.assert_array_equal(value, expected(feeds())[name])


def test_sparse_mode_with_the_constant_mask():
    node = fused('q, k, v, "", "", "", m', '"", "", "", y', mode=3)
    model = parse(SIGNATURE.format(more="") + "{" + node + "}")
    model.graph.initializer.append(onnx.numpy_helper.from_array(causal_constant(), "m"))
    (got,) = reference.evaluator(model).run(None, feeds())
    np.testing.assert_array_equal(got, expected(feeds(), causal_constant(), 3)["attention_out"])


def test_in_a_local_function_and_a_subgraph():
    """A fused node inside a model-local function, called from a branch of If."""
    text = (
        SIGNATURE.format(more="")
        + """{
        yes = Constant<value=bool {1}>()
        y = If (yes) <
            then_branch = t () => (float[1,2,3,4] a) { a = local.Attention(q, k, v) },
            else_branch = e () => (float[1,2,3,4] b) { b = Identity(v) }
        >
    }
    <opset_import: ["" : 17, "ascend" : 1], domain: "local">
    Attention (q, k, v) => (y) {"""
        + fused("q, k, v", '"", "", "", y')
        + "}"
    )
    (got,) = reference.evaluator(parse(text)).run(None, feeds())
    np.testing.assert_array_equal(got, expected(feeds())["attention_out"])


def test_plain_reference_evaluator_and_files(tmp_path):
    model = parse(SIGNATURE.format(more="") + "{" + fused("q, k, v", '"", "", "", y') + "}")
    want = expected(feeds())["attention_out"]
    (got,) = ReferenceEvaluator(model, new_ops=reference.onnx_ops()).run(None, feeds())
    np.testing.assert_array_equal(got, want)
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    for source in (path, str(path), path.read_bytes()):
        np.testing.assert_array_equal(reference.evaluator(source).run(None, feeds())[0], want)


def test_extension_attribute():
    node = fused('q, k, v, "", "", "", m', '"", "", "", y').replace("head_num", 'cpu_empty_rows="mean", head_num')
    model = parse(SIGNATURE.format(more=", bool[1,1,1,3] m") + "{" + node + "}")
    mask = np.ones((1, 1, 1, 3), bool)
    (got,) = reference.evaluator(model).run(None, {**feeds(), "m": mask})
    np.testing.assert_allclose(got, np.broadcast_to(feeds()["v"].mean(2, keepdims=True), got.shape), rtol=1e-6)


def test_forward_and_backward_in_one_model():
    """FlashAttentionScoreGrad on the outputs of FlashAttentionScore, statistics read by name."""
    text = "g (float[1,2,3,4] q, float[1,2,3,4] k, float[1,2,3,4] v, float[1,2,3,4] dy) => (float[1,2,3,4] dk) {"
    text += fused("q, k, v", 'm, s, "", y') + "\n"
    text += '"", dk = ascend.FlashAttentionScoreGrad <head_num=2, input_layout="BNSD", scale_value=0.5> '
    text += '(q, k, v, dy, "", "", "", "", m, s, "", y)\n}'
    given = {**feeds(), "dy": random(5, 1, 2, 3, 4).astype(np.float32)}
    (got,) = reference.evaluator(parse(text)).run(None, given)
    result = expected(feeds())
    want = reference.run(
        "FlashAttentionScoreGrad",
        {"query": given["q"], "key": given["k"], "value": given["v"], "dy": given["dy"],
         "softmax_max": result["softmax_max"], "softmax_sum": result["softmax_sum"],
         "attention_in": result["attention_out"]},
        {"head_num": 2, "input_layout": "BNSD", "scale_value": 0.5},
    )  # fmt: skip
    np.testing.assert_array_equal(got, want["dk"])


def test_bfloat16_model():
    text = "g (bfloat16[1,2,3,4] q, bfloat16[1,2,3,4] k, bfloat16[1,2,3,4] v) => (bfloat16[1,2,3,4] y) {"
    model = parse(text + fused("q, k, v", '"", "", "", y') + "}")
    given = {name: value.astype(ml_dtypes.bfloat16) for name, value in feeds().items()}
    (got,) = reference.evaluator(model).run(None, given)
    assert got.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(got, expected(given)["attention_out"])


def test_errors_name_the_node():
    model = parse(SIGNATURE.format(more="") + "{" + fused("q, k, v", '"", "", "", y') + "}")
    model.graph.node[0].name = "layer.7"
    wrong = {**feeds(), "k": np.zeros((1, 2, 3, 5), np.float32)}
    expected = r"node 'layer\.7': FlashAttentionScore: key: has the head size 5, expected 4"
    with pytest.raises(reference.ReferenceInputError, match=expected):
        reference.evaluator(model).run(None, wrong)


def test_elements_are_gathered_from_data_of_another_size() -> None:
    """As exporters of BERT write it; onnx's own reference ends in an error."""
    rows = np.arange(24, dtype=np.float32).reshape(2, 12)
    indices = np.array([[3, -1, 0], [2, 2, 11]])
    text = """<ir_version: 8, opset_import: ["": 17]>
    g (float[2,12] d, int64[n,3] i) => (float[n,3] y) { y = GatherElements<axis=1>(d, i) }"""
    (got,) = reference.evaluator(onnx.parser.parse_model(text)).run(None, {"d": rows, "i": indices})
    np.testing.assert_array_equal(got, [[3, 11, 0], [14, 14, 23]])
    (one,) = reference.evaluator(onnx.parser.parse_model(text)).run(None, {"d": rows, "i": indices[:1]})
    np.testing.assert_array_equal(one, [[3, 11, 0]])


def test_what_is_no_model(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text("<html></html>")
    with pytest.raises(InputError, match="page.html is no ONNX model"):
        reference.evaluator(page)
    with pytest.raises(InputError, match="the model is no ONNX model"):
        reference.evaluator(b"<html></html>")
