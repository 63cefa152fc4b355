"""Shifted windows, as in Swin: the batch counts the windows of all images, and the mask those of one image.

The operator reads such a mask again for each image (cpu_mask_batch); the model repeats it, or takes the scores apart.
"""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper

from fa_compiler.passes.answer.options import Target
from fa_compiler.passes.answer.report import MissedCode
from tests.passes.running import Array, assert_same, fused, parse, run

OPERANDS = """
    one = Constant<value=int64[1] {1}>() any = Constant<value=int64[1] {-1}>() two = Constant<value=int64[1] {2}>()
    nine = Constant<value=int64[1] {9}>() front = Constant<value=int64[1] {0}>()
    images = Shape<start=0, end=1>(x) windows = Shape<start=1, end=2>(x) of_mask = Shape<start=0, end=1>(shifted)
    heads = Constant<value=int64[4] {-1, 9, 2, 8}>() x0 = Reshape(x, heads)
    q = Transpose<perm=[0, 2, 1, 3]>(x0) k = Transpose<perm=[0, 2, 3, 1]>(x0)
    far = Constant<value=float {-100.0}>() nothing = Constant<value=float {0.0}>() m = Where(shifted, far, nothing)
    r = Sigmoid(table) s = MatMul(q, k) fronts = Constant<value=int64[2] {0, 2}>() m5 = Unsqueeze(m, fronts)
"""
RESULT = "p = Softmax<axis=-1>(t) y0 = MatMul(p, q) y = Transpose<perm=[0, 2, 1, 3]>(y0)"
APART = "apart = Concat<axis=0>(any, {}, two, nine, nine) together = Constant<value=int64[4] {{-1, 2, 9, 9}}>() "
SPELLINGS = {
    "scores apart": APART + "s1 = Add(s, r) s2 = Reshape(s1, apart) s3 = Add(s2, m5) t = Reshape(s3, together)",
    "added twice": APART
    + "s1 = Add(s, r) s2 = Reshape(s1, apart) s3 = Add(s2, m5) s4 = Add(s3, m5) t = Reshape(s4, together)",
    "selected": APART + "low = Constant<value=float {{-inf}}>() b5 = Unsqueeze(shifted, fronts) "
    "s1 = Add(s, r) s2 = Reshape(s1, apart) s3 = Where(b5, low, s2) t = Reshape(s3, together)",
    "mask repeated": "repeats = Concat<axis=0>(images, one, one, one, one) m1 = Expand(m5, repeats) "
    "flat = Constant<value=int64[4] {{-1, 1, 9, 9}}>() m2 = Reshape(m1, flat) b = Add(r, m2) t = Add(s, b)",
    "mask repeated for heads": "repeats = Concat<axis=0>(images, one, two, one, one) m1 = Expand(m5, repeats) "
    "flat = Constant<value=int64[4] {{-1, 2, 9, 9}}>() m2 = Reshape(m1, flat) b = Add(r, m2) t = Add(s, b)",
}


def model(spelling: str, windows: str = "4", of_mask: str = "4", count: str = "windows") -> onnx.ModelProto:
    """Windows of 9 tokens with 2 heads of 8; `count` is the value that the scores are taken apart by."""
    inputs = f"float[B,{windows},9,16] x, float[1,2,9,9] table, bool[{of_mask},9,9] shifted"
    body = OPERANDS + SPELLINGS[spelling].format(count) + RESULT
    return parse(body, inputs=inputs, outputs="float[N,9,2,8] y")


def feeds(images: int, windows: int, masks: int) -> dict[str, Array]:
    rng = np.random.default_rng(0)
    x, r = (rng.standard_normal(shape).astype(np.float32) for shape in ((images, windows, 9, 16), (1, 2, 9, 9)))
    return {"x": x, "table": r, "shifted": rng.random((masks, 9, 9)) < 0.3}


def is_repeated(result: onnx.ModelProto) -> bool:
    """Does the operator repeat the mask? Then nothing else does."""
    (node,) = (each for each in result.graph.node if each.op_type == "FlashAttentionScore")
    attrs = {each.name: helper.get_attribute_value(each) for each in node.attribute}
    found = attrs.get("cpu_mask_batch") == b"repeated"
    assert not found or all(each.op_type != "Expand" for each in result.graph.node)
    return found


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("windows", ["4", "W"])
def test_the_mask_of_one_image_serves_all(spelling: str, windows: str) -> None:
    proto = model(spelling, windows, windows)
    result, report = fused(proto)
    (block,) = report.blocks
    assert block.status == "fused" and is_repeated(result)
    assert all(each.code == MissedCode.DENSE_MASK for each in block.missed)
    for images, count in ((1, 4), (3, 4), *(((2, 1), (2, 3)) if windows == "W" else ())):
        given = feeds(images, count, count)
        assert_same(run(result, given)[0], run(proto, given)[0], 1e-5)


@pytest.mark.parametrize("target", ["ort", "ascend", "onnx", "contrib"])
def test_a_mask_of_one_row_serves_all_rows(target: Target) -> None:
    """The number of its rows is open. Nine windows of one row have as many numbers as one window of nine rows."""
    proto = model("scores apart", "W", "W")
    proto.graph.input[2].type.tensor_type.shape.dim[1].dim_param = "R"
    result, report = fused(proto, target)
    assert report.blocks[0].status == "fused"
    for images, windows, rows in ((1, 9, 1), (2, 4, 1), (1, 1, 1), (2, 4, 9)):
        given = feeds(images, windows, windows)
        given["shifted"] = given["shifted"][:, :rows]
        assert_same(run(result, given)[0], run(proto, given)[0], 1e-5)


def test_a_run_whose_windows_do_not_fit_is_refused() -> None:
    """As in the model: the operator would take every divisor of the batch, so the sizes have to be proven."""
    for spelling in ("scores apart", "selected", "mask repeated"):
        proto = model(spelling, "W", "M")
        result, report = fused(proto)
        (block,) = report.blocks
        assert block.status == "fused" and not is_repeated(result)
        lost = [each for each in block.missed if each.code == MissedCode.EXPANDED_MASK]
        assert [(each.reason.partition(":")[0], bool(each.hint)) for each in lost] == [
            ("its sizes are not proven to be those of the batch", True)
        ] * (spelling != "mask repeated")  # there the model repeats it
        assert_same(run(result, feeds(2, 4, 4))[0], run(proto, feeds(2, 4, 4))[0], 1e-5)
        for each in (proto, result):
            with pytest.raises(Exception, match=r"Non-zero status code"):
                run(each, feeds(2, 4, 2))
    result, _ = fused(model("scores apart"))
    with pytest.raises(Exception, match=r"Got invalid dimensions for input"):
        run(result, feeds(2, 4, 2))


@pytest.mark.parametrize("target", ["ascend", "onnx", "contrib"])
def test_other_targets_get_a_mask_of_the_whole_batch(target: Target) -> None:
    result, report = fused(model("scores apart"), target, assume=["no-empty-rows"])
    (block,) = report.blocks
    assert block.status == "fused"
    (lost,) = (each for each in block.missed if each.code == MissedCode.EXPANDED_MASK)
    assert lost.reason.startswith("the operator takes it in full only: ")
    assert any(node.op_type == "Expand" for node in result.graph.node)


def test_a_sum_of_16_bits_is_read_as_it_is() -> None:
    """Whether ONNX Runtime rounds it depends on what makes and reads it."""
    proto = model("mask repeated")
    body = (
        onnx.printer.to_text(proto)
        .replace("float[", "float16[")
        .replace("<float value", "<value")
        .replace("value: tensor = float ", "value: tensor = float16 ")
    )
    result, report = fused(onnx.parser.parse_model(body))
    assert [block.status for block in report.blocks] == ["fused"] and not is_repeated(result)
