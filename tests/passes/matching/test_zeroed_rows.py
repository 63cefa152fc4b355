"""The Where behind the product with the values that makes rows without a key 0, as torch's exporter writes it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
import pytest

from tests.passes.running import LEVELS, PRODUCT_QK, SOFTMAX, Array, assert_same, fused, parse, random_feeds, run

pytestmark = pytest.mark.usefixtures("declines_change_nothing")

LOWEST = float(np.finfo(np.float32).min)
NUMBERS = (
    f"<float zero = {{0.0}}, float one = {{1.0}}, float half = {{0.5}}, float two = {{2.0}}, float minus = {{-inf}}, "
    f"float lowest = {{{LOWEST!r}}}, float low = {{-10000.0}}, int64[1] last = {{-1}}, int64[1] rows = {{2}}, "
    "int64[2] second = {0, 1}, bool none = {0}>"
)
MASKS = {
    "product": "d = Not(kept) n = Cast<to=1>(d) b = Mul(n, lowest) x = Add(s, b) ",
    "addend of the lowest": "b = Where(kept, zero, lowest) x = Add(s, b) ",
    "addend of -inf": "b = Where(kept, zero, minus) x = Add(s, b) ",
    "selection": "x = Where(kept, s, lowest) ",
    "selection of -inf": "x = Where(kept, s, minus) ",
}
COUNT = "i = Cast<to=1>(kept) c = ReduceSum<keepdims=1>(i, last) "
GUARDS = {
    "fewer than one": COUNT + "e = Less(c, one) y = Where(e, zero, o) ",
    "fewer than a half": COUNT + "e = Less(c, half) y = Where(e, zero, o) ",
    "none": COUNT + "e = LessOrEqual(c, zero) y = Where(e, zero, o) ",
    "equal to none": COUNT + "e = Equal(c, zero) y = Where(e, zero, o) ",
    "some": COUNT + "e = Greater(c, zero) y = Where(e, o, zero) ",
    "at least one": COUNT + "e = GreaterOrEqual(c, one) y = Where(e, o, zero) ",
    "not some": COUNT + "a = Greater(c, zero) e = Not(a) y = Where(e, zero, o) ",
    "any": "i = Cast<to=1>(kept) c = ReduceMax<axes=[-1], keepdims=1>(i) e = Less(c, one) y = Where(e, zero, o) ",
}
PRODUCT = "o = MatMul(p, v) "


def model_of(mask: str, guard: str, kept: str = "bool[B,1,S,T] kept", outputs: str = "") -> onnx.ModelProto:
    body = PRODUCT_QK + mask + SOFTMAX.format("x") + PRODUCT + guard
    return parse(body, kept, initializers=NUMBERS, **({"outputs": outputs} if outputs else {}))


def feeds_of(model: onnx.ModelProto) -> dict[str, Array]:
    """Two rows see no key, a third one has a NaN in the query, and so has a key that it sees."""
    feeds = random_feeds(model)
    kept = feeds["kept"]
    kept[0, 0, 1:3] = False
    kept[1, 0, 2] = True
    feeds["q"][1, 0, 2] = np.nan
    return feeds


def wheres(model: onnx.ModelProto) -> list[str]:
    return [node.output[0] for node in model.graph.node if node.op_type == "Where"]


@pytest.mark.parametrize("guard", GUARDS)
@pytest.mark.parametrize("mask", MASKS)
def test_the_operator_makes_the_rows_zero(mask: str, guard: str) -> None:
    model = model_of(MASKS[mask], GUARDS[guard])
    changed, report = fused(model)
    (block,) = report.blocks
    assert (block.status, block.mask, block.assumed) == ("fused", "atten_mask", ())
    assert "y" not in wheres(changed)
    feeds = feeds_of(model)
    wanted = run(model, feeds)[0]
    assert not wanted[0, :, 1:3].any()
    for level in LEVELS:
        assert_same(run(changed, feeds, level)[0], wanted, 1e-5)


def test_rows_of_a_causal_mask_and_padding() -> None:
    """The condition is shared by the layers of a model, and stays for the others."""
    kept = (
        "size = Shape<start=2, end=3>(q) m = Squeeze(size) r = Range(start, m, step) own = Unsqueeze(r, last) "
        "causal = LessOrEqual(r, own) band = Unsqueeze(causal, second) kept = And(band, padding) "
    )
    numbers = NUMBERS.replace("<", "<int64 start = {0}, int64 step = {1}, ")
    model = parse(
        kept + PRODUCT_QK + MASKS["product"] + SOFTMAX.format("x") + PRODUCT + GUARDS["fewer than one"],
        "bool[B,1,1,S] padding",
        inputs="float[B,4,S,8] q, float[B,4,S,8] k, float[B,4,S,8] v",
        outputs="float[B,4,S,8] y, float[B,1,S,1] c",
        initializers=numbers,
    )
    changed, report = fused(model)
    (block,) = report.blocks
    assert (block.status, block.mask) == ("fused", "causal+atten_mask")
    assert not wheres(changed)
    feeds = random_feeds(model)
    feeds["padding"][0, ..., :2] = False
    wanted = run(model, feeds)
    assert not wanted[0][0, :, :2].any() and wanted[0][0, :, 3].any()
    for got, want in zip(run(changed, feeds), wanted, strict=True):
        assert_same(got, want, 1e-5)


FEWER = GUARDS["fewer than one"]
LOOK_ALIKES: Mapping[str, tuple[str, str]] = {
    "fewer than two": (MASKS["product"], FEWER.replace("Less(c, one)", "Less(c, two)")),
    "rows with a key": (MASKS["product"], FEWER.replace("Where(e, zero, o)", "Where(e, o, zero)")),
    "ones": (MASKS["product"], FEWER.replace("Where(e, zero, o)", "Where(e, one, o)")),
    "the other keys": (MASKS["product"], FEWER.replace("Cast<to=1>(kept)", "Cast<to=1>(d)")),
    "another mask": (MASKS["product"], FEWER.replace("Cast<to=1>(kept)", "Cast<to=1>(other)")),
    "along the rows": (MASKS["product"], FEWER.replace("last", "rows")),
    "a moderate number": (MASKS["addend of the lowest"].replace("lowest", "low"), FEWER),
    "the product is read, too": (MASKS["product"], FEWER + "z = Identity(o) "),
}


@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_a_look_alike_stays(name: str) -> None:
    """The attention is fused, and what follows it is left as it was."""
    mask, guard = LOOK_ALIKES[name]
    square = "float[B,4,8,8] q, float[B,4,8,8] k, float[B,4,8,8] v, bool[B,1,8,8] kept, bool[B,1,8,8] other"
    body = PRODUCT_QK + mask + SOFTMAX.format("x") + PRODUCT + guard
    outputs = "float[B,4,8,8] y" + (", float[B,4,8,8] z" if "z =" in guard else "")
    model = parse(body, inputs=square, outputs=outputs, initializers=NUMBERS)
    changed, report = fused(model)
    assert report.blocks[0].status == "fused"
    assert "y" in wheres(changed)
    feeds = random_feeds(model)
    feeds["kept"][0, 0, 1:3] = False
    for got, want in zip(run(changed, feeds), run(model, feeds), strict=True):
        assert_same(got, want, 1e-5)


def test_a_mask_of_some_heads_counts_for_these() -> None:
    model = model_of(MASKS["product"], FEWER, kept="bool[B,4,S,T] kept")
    changed, _ = fused(model)
    assert "y" not in wheres(changed)
    feeds = random_feeds(model)
    feeds["kept"][0, 1, 2] = False
    assert_same(run(changed, feeds)[0], run(model, feeds)[0], 1e-5)
