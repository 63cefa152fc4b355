"""Dropout whose mask is known beside the probabilities: it becomes the operators' drop_mask and keep_prob."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from fa_compiler.passes import Code
from tests.passes.backward.test_rejects import BODY
from tests.passes.backward.test_rejects import INPUTS as SQUARE
from tests.passes.gradients import assert_close, evaluate, fused_pair, named
from tests.passes.running import parse, random_feeds, run

KEEP = "<float c = {0.4}, float keep = {0.8}, float inverse = {1.25}, int64[1] last = {-1}, float zero = {0.0}, "
KEEP += "float ratio = {0.2}, float other = {0.6}, bool on = {1}, bool off = {0}>"
INPUTS = "float[B,4,5,8] q, float[B,4,7,8] k, float[B,4,7,8] v, float[B,4,5,8] g"
DROPPED = {
    "kt": f"b = Less(noise, keep) f = Cast<to=1>(b) d = Div(f, keep) {BODY['kt']}",
    "y": "pd = Mul(p, d) y = MatMul(pd, v)",
    "pt": "pt = Transpose<perm=[0,1,3,2]>(pd)",
    "dp": "dp0 = MatMul(g, vt) dp = Mul(dp0, d)",
}


def model(changes: Mapping[str, str], noise: str = "float[B,4,5,7] noise") -> onnx.ModelProto:
    outputs = "float[B,4,5,8] y, float[B,4,5,8] dq, float[B,4,7,8] dk, float[B,4,7,8] dv"
    body = " ".join({**BODY, **DROPPED, **changes}.values())
    return parse(body, noise, inputs=INPUTS, outputs=outputs, initializers=KEEP)


def feeds_of(original: onnx.ModelProto, seed: int) -> dict[str, np.ndarray]:
    feeds = random_feeds(original, seed)
    shape = feeds["noise"].shape
    return {**feeds, "noise": np.random.default_rng(seed).random(shape, np.float32)}


SPELLINGS = {
    "mask over keep": {},
    "the mask, then the number": {"y": "p1 = Mul(p, f) pd = Mul(p1, inverse) y = MatMul(pd, v)"},
    "the number, then the mask": {"y": "p1 = Div(p, keep) pd = Mul(f, p1) y = MatMul(pd, v)"},
    "a selection in the gradient": {"dp": "dp0 = MatMul(g, vt) dp1 = Where(b, dp0, zero) dp = Div(dp1, keep)"},
    "the row sums from the result": {"r": "o = Mul(y, g) r = ReduceSum<keepdims=1>(o, last)"},
    "the gradient a multiple": {"dp": "dp0 = MatMul(g, vt) dp = Mul(dp0, f)"},
}


@pytest.mark.parametrize("changes", SPELLINGS.values(), ids=SPELLINGS)
@pytest.mark.parametrize("noise", ["float[B,4,5,7] noise", "float[B,1,5,7] noise", "float[5,7] noise"])
def test_dropout_with_a_known_mask(changes: Mapping[str, str], noise: str) -> None:
    original = model(changes, noise)
    changed, report = fused_pair(original)
    assert [block.status for block in report.blocks] == ["fused", "fused"], report.blocks[0]
    for seed in range(2):
        feeds = feeds_of(original, seed)
        wanted, got = named(original, run(original, feeds)), evaluate(changed, feeds)
        for name, value in wanted.items():
            assert_close(got[name], value, 1e-5)


GRADIENT = "dp0 = MatMul(g, vt) dp = com.microsoft.DropoutGrad"
OPERATORS = {
    "DropoutGrad": {"dp": f"{GRADIENT}(dp0, b, ratio, on)"},
    "a multiple by DropoutGrad": {"dp": f"{GRADIENT}(dp0, b, other, on)"},
    "DropoutGrad of a Dropout that is off": {
        "p": "p0 = Softmax<axis=-1>(m) p, kept = Dropout(p0, ratio, off)",
        "y": "y = MatMul(p, v)",
        "pt": "pt = Transpose<perm=[0,1,3,2]>(p)",
        "dp": "dp0 = MatMul(g, vt) dp = Identity(dp0)",
        "ds": "ds0 = Sub(t, u) ds = com.microsoft.DropoutGrad(ds0, kept, ratio, off)",
    },
    "DropoutGrad where nothing is dropped": {
        "y": "y = MatMul(p, v)",
        "pt": "pt = Transpose<perm=[0,1,3,2]>(p)",
        "dp": f"{GRADIENT}(dp0, b, zero, on)",
    },
    "DropoutGrad without a mode": {
        "y": "y = MatMul(p, v)",
        "pt": "pt = Transpose<perm=[0,1,3,2]>(p)",
        "dp": f"{GRADIENT}(dp0, b, ratio)",
    },
}


@pytest.mark.parametrize("changes", OPERATORS.values(), ids=OPERATORS)
def test_the_operator_of_onnxruntime_training(changes: Mapping[str, str]) -> None:
    original = model(changes)
    changed, report = fused_pair(original)
    assert [block.status for block in report.blocks] == ["fused", "fused"], report.blocks[0]
    feeds = feeds_of(original, 0)
    wanted, got = evaluate(original, feeds), evaluate(changed, feeds)
    for name, value in wanted.items():
        assert_close(got[name], value, 1e-5)


def test_a_dropout_that_draws_its_mask_is_declined() -> None:
    """By its own reason, not by that of those who read the probabilities, too."""
    for seed in ("", "<seed=7>"):
        original = model(
            {
                "p": f"p = Softmax<axis=-1>(m) pd, mask = Dropout{seed}(p, ratio, on)",
                "y": "y = MatMul(pd, v)",
                "dp": f"{GRADIENT}(dp0, mask, ratio, on)",
            }
        )
        changed, report = fused_pair(original)
        (block,) = report.blocks
        assert (block.status, block.code, block.culprit) == ("declined", Code.PROBABILITY_TERM, "pd")
        assert "draws its mask" in (block.reason or "") and "random numbers" in (block.hint or "")
        assert changed == ir.to_proto(ir.from_proto(original)), "a declined model was changed"


DECLINED = {
    "DropoutGrad of another mask": {"dp": f"b2 = Less(keep, noise) {GRADIENT}(dp0, b2, ratio, on)"},
    "DropoutGrad by a mode that is not known": {
        "dp": f"yes = ReduceMax<keepdims=0>(noise) mode = Cast<to=9>(yes) {GRADIENT}(dp0, b, ratio, mode)"
    },
    "DropoutGrad switched off": {"dp": f"{GRADIENT}(dp0, b, ratio, off)"},
    "not in the gradient": {"dp": "dp = MatMul(g, vt)"},
    "not in the gradient of the values": {"pt": "pt = Transpose<perm=[0,1,3,2]>(p)"},
    "another mask in the gradient": {
        "dp": "b2 = Less(keep, noise) f2 = Cast<to=1>(b2) dp0 = MatMul(g, vt) dp = Mul(dp0, f2)",
    },
    "twice in the gradient": {"dp": "dp0 = MatMul(g, vt) dp1 = Mul(dp0, d) dp = Mul(dp1, d)"},
    "what is kept is not scaled": {"y": "pd = Mul(p, f) y = MatMul(pd, v)"},
    "numbers of several sizes": {"y": "pd = Mul(p, noise) y = MatMul(pd, v)"},
}


@pytest.mark.parametrize("changes", DECLINED.values(), ids=DECLINED)
def test_dropout_that_is_declined(changes: Mapping[str, str]) -> None:
    original = model(changes)
    changed, report = fused_pair(original)
    assert not any(block.status == "fused" for block in report.blocks)
    assert changed == ir.to_proto(ir.from_proto(original)), "a declined model was changed"


def test_dropout_of_packed_sequences_keeps_the_mask() -> None:
    """The drop mask goes by rows and keys, of which packed sequences have none in common."""
    own = (
        "places = Constant<value=int64[6] {0,1,2,3,4,5}>() front = Constant<value=int64[1] {0}>() "
        "pi = Unsqueeze(places, last) reached = GreaterOrEqual(pi, ends) n = Cast<to=7>(reached) "
        "label = ReduceSum<keepdims=0>(n, last) r1 = Unsqueeze(label, last) c1 = Unsqueeze(label, front) "
        "own = Equal(r1, c1) low = Constant<value=float {-inf}>() m = Where(own, x, low)"
    )
    lines = {**BODY, **DROPPED, "m": own, "dm": "dm = Where(own, ds, zero)"}
    more = "int64[E] ends, float[B,4,6,6] noise"
    results = ", ".join(f"float[B,4,6,8] {name}" for name in ("y", "dq", "dk", "dv"))
    original = parse(" ".join(lines.values()), more, inputs=SQUARE, outputs=results, initializers=KEEP)
    changed, report = fused_pair(original)
    assert [(block.status, block.mask) for block in report.blocks] == [("fused", "atten_mask")] * 2
    feeds = feeds_of(original, 0) | {"ends": np.array([4, 2])}
    wanted = named(original, run(original, feeds))
    for got in (evaluate(changed, feeds), named(changed, run(changed, feeds))):
        for name, value in wanted.items():
            assert_close(got[name], value, 1e-5)
