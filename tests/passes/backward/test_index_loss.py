"""An indexer's loss and its gradients beside an attention to the keys it ranks: SparseLightningIndexerGradKLLoss where
they are that operator's, and a decline, with nothing changed, where they are not."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from fa_compiler.passes import Code
from tests.passes.gradients import assert_close, evaluate, fused_pair, named
from tests.passes.running import Array, parse, run

BODY = {
    "ahead": "square = Constant<value_ints=[8, 8]>() ones = ConstantOfShape<value=float[1] {1.0}>(square) "
    "tri = Trilu<upper=0>(ones) seen = Cast<to=9>(tri) ahead = Not(seen)",
    "i": 'pr = Einsum<equation="bshd,btd->bsht">(qi, ki) prs = Mul(pr, c0) r = Relu(prs) wu = Unsqueeze(w, last) '
    "rw = Mul(r, wu) i = ReduceSum<keepdims=0>(rw, second)",
    "im": "im = Where(ahead, low, i)",
    "idx": "ranked, idx = TopK<axis=-1>(im, count)",
    "sel": "shape = Shape(im) none = ConstantOfShape<value=bool[1] {0}>(shape) listed = Shape(idx) "
    "some = ConstantOfShape<value=bool[1] {1}>(listed) sel = ScatterElements<axis=-1>(none, idx, some)",
    "keep": "keep = And(sel, seen)",
    "m": "u = Unsqueeze(keep, first) kt = Transpose<perm=[0,1,3,2]>(k) s = MatMul(q, kt) x = Mul(s, c) "
    "m = Where(u, x, low)",
    "y": "p = Softmax<axis=-1>(m) y = MatMul(p, v)",
    "t": "t0 = ReduceSum<keepdims=0>(p, first) ts = ReduceSum<keepdims=1>(t0, last) t = Div(t0, ts)",
    "z": "nsel = Not(sel) z = Where(nsel, low, im)",
    "lg": "lg = LogSoftmax<axis=-1>(z)",
    "te": "lt = Log(t) tl = Mul(t, lt) is0 = Equal(t, zero) te = Where(is0, zero, tl)",
    "e": "cross = Mul(t, lg) e = Sub(te, cross)",
    "loss": "loss = ReduceSum<keepdims=0>(e)",
    "d0": "nt = Neg(t) yy = Exp(lg) rs = ReduceSum<keepdims=1>(nt, last) yr = Mul(yy, rs) d0 = Sub(nt, yr)",
    "d1": "d1 = Where(nsel, zero, d0)",
    "d2": "d2 = Where(ahead, zero, d1)",
    "du": "du = Unsqueeze(d2, second)",
    "dw": "dwr = Mul(du, r) dw = ReduceSum<keepdims=0>(dwr, last)",
    "dr": "dr = Mul(du, wu)",
    "off": "off = LessOrEqual(r, zero)",
    "dg": "dg = Where(off, zero, dr)",
    "ds": "ds = Mul(dg, c0)",
    "dqi": 'dqi = Einsum<equation="bsht,btd->bshd">(ds, ki)',
    "dki": 'dki = Einsum<equation="bsht,bshd->btd">(ds, qi)',
}
NUMBERS = (
    "<float c = {0.4}, float c0 = {0.7}, int64[1] last = {-1}, int64[1] first = {1}, int64[1] second = {2}, "
    "int64[1] count = {3}, float zero = {0.0}, float half = {0.5}, float two = {2.0}, "
    "float low = {-3.4028234663852886e38}, float floor = {-inf}, float tiny = {1e-8}>"
)
INPUTS = (
    "float[2,4,8,8] q, float[2,1,8,8] k, float[2,1,8,8] v, float[2,8,3,4] qi, float[2,8,4] ki, float[2,8,3] w, "
    "float[2,8,8] other, int64[2,8,3] given, bool[8,8] hidden"
)
OUTPUTS = {
    "y": "float[2,4,8,8] y",
    "loss": "float loss",
    "dw": "float[2,8,3] dw",
    "dqi": "float[2,8,3,4] dqi",
    "dki": "float[2,8,4] dki",
}
TOLERANCE = 1e-5
"""Of the largest number, or of 1; the original is float32 throughout, with sums over at most 200 numbers."""


def model(changes: Mapping[str, str], more: tuple[str, ...] = (), without: tuple[str, ...] = ()) -> onnx.ModelProto:
    """The graph with some lines written otherwise; rows and keys are as many, so that shapes tell nothing."""
    body = " ".join({**BODY, **changes}.values())
    outputs = [text for name, text in OUTPUTS.items() if name not in without]
    return parse(body, inputs=INPUTS, outputs=", ".join([*outputs, *more]), initializers=NUMBERS, opset=18)


def feeds(seed: int = 0) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    shapes = {"q": (2, 4, 8, 8), "k": (2, 1, 8, 8), "v": (2, 1, 8, 8), "qi": (2, 8, 3, 4), "ki": (2, 8, 4)}
    shapes |= {"w": (2, 8, 3), "other": (2, 8, 8)}
    given: dict[str, Array] = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    return given | {"given": rng.integers(0, 8, (2, 8, 3)), "hidden": rng.random((8, 8)) < 0.3}


def checked(original: onnx.ModelProto) -> onnx.ModelProto:
    """The fused model, after comparing its results with the original's in ONNX Runtime and in the float64 reference."""
    changed, report = fused_pair(original)
    assert [block.op for block in report.blocks[:2]] == ["SparseFlashAttention", "SparseLightningIndexerGradKLLoss"], (
        report.blocks[0]
    )
    assert not report.blocks[1].assumed
    assert {block.status for block in report.blocks[2:]} <= {"not_attention"}
    for seed in range(2):
        inputs = feeds(seed)
        wanted = named(original, run(original, inputs))
        for got in (named(changed, run(changed, inputs)), evaluate(changed, inputs)):
            for name, value in wanted.items():
                assert np.isfinite(value).all()
                assert_close(got[name], value, TOLERANCE)
    return changed


RIGHT = {
    "plain": {},
    "the mean over heads": {"t": "t = ReduceMean<keepdims=0>(p, first)"},
    "the mean over heads, divided": {
        "t": "four = Constant<value_float=4.0>() t0 = ReduceSum<keepdims=0>(p, first) t = Div(t0, four)"
    },
    "the sum kept": {
        "t": "t0 = ReduceSum<keepdims=1>(p, first) ts = ReduceSum<keepdims=1>(t0, last) t1 = Div(t0, ts) "
        "t = Squeeze(t1, first)"
    },
    "a mean over rows": {"loss": "rows = ReduceSum<keepdims=0>(e, last) loss = ReduceMean<keepdims=0>(rows)"},
    "a factor on loss and gradients": {
        "loss": "l0 = ReduceSum<keepdims=0>(e) loss = Mul(l0, half)",
        "du": "d3 = Mul(d2, half) du = Unsqueeze(d3, second)",
    },
    "a factor on one gradient": {"dqi": 'ds2 = Mul(ds, two) dqi = Einsum<equation="bsht,btd->bshd">(ds2, ki)'},
    "the difference as it is": {"d0": "yy = Exp(lg) d0 = Sub(yy, t)"},
    "no zeros where the masks exclude": {"d1": "d1 = Identity(d0)", "d2": "d2 = Identity(d1)"},
    "the masks negated": {"z": "nsel = Not(sel) z = Where(sel, im, low)", "im": "im = Where(seen, i, low)"},
    "one mask of both": {
        "z": "nsel = Not(keep) z = Where(nsel, low, i)",
        "d1": "d1 = Where(nsel, zero, d0)",
        "d2": "d2 = Identity(d1)",
    },
    "the list of other scores": {"idx": "om = Where(ahead, low, other) ranked, idx = TopK<axis=-1>(om, count)"},
    "no factor on the scores": {"i": BODY["i"].replace("Mul(pr, c0)", "Identity(pr)"), "ds": "ds = Identity(dg)"},
    "the weights scaled": {
        "i": BODY["i"].replace("Unsqueeze(w, last)", "Unsqueeze(ws, last)").replace("pr =", "ws = Mul(w, half) pr ="),
    },
}


@pytest.mark.parametrize("changes", RIGHT.values(), ids=RIGHT)
def test_a_loss_becomes_the_operator(changes: Mapping[str, str]) -> None:
    changed = checked(model(changes))
    left = {node.op_type for node in changed.graph.node} & {"LogSoftmax", "Softmax", "Exp", "Log", "ReduceMean"}
    assert not left


@pytest.mark.parametrize("without", [("dw",), ("dqi",), ("dki",), ("dw", "dki"), ("dw", "dqi", "dki")])
def test_gradients_may_be_missing(without: tuple[str, ...]) -> None:
    lines = [name for name in ("dw", "dqi", "dki") if name in without]
    if "dqi" in without and "dki" in without:
        lines += ["dr", "off", "dg", "ds"]
    if len(without) == 3:
        lines += ["du", "d2", "d1", "d0"]
    checked(model(dict.fromkeys(lines, ""), without=without))


def test_the_operators_floor_is_not_taken_unasked() -> None:
    """Ascend's loss takes probabilities below 1e-8 for 1e-8; the gradients are those of the loss without a floor."""
    _, report = fused_pair(model({}), "ascend")
    assert "1e-8" in (report.blocks[1].reason or "") and "loss-floor" in (report.blocks[1].hint or "")
    for original, assume in (
        (model({}), ["loss-floor"]),
        (model(dict.fromkeys(("loss", "e", "te"), ""), without=("loss",)), []),
    ):
        _, report = fused_pair(original, "ascend", assume)
        assert "sizes and types" in (report.blocks[1].reason or "") or "list" in (report.blocks[1].reason or "")


def test_probabilities_too_small_for_the_floor() -> None:
    """The indexer's and attention's underflow: a loss that sixteen rows under a floor of 1e-8 cannot have."""
    original = model({"i": BODY["i"].replace("Mul(pr, c0)", "Mul(pr, many)"), "ds": "ds = Mul(dg, many)"} | LARGE)
    changed = checked(original)
    inputs = feeds()
    got, wanted = (named(each, run(each, inputs))["loss"] for each in (changed, original))
    assert wanted > -16 * np.log(1e-8) and abs(got - wanted) <= TOLERANCE * wanted


LARGE = {
    "ahead": BODY["ahead"] + " many = Constant<value_float=40.0>()",
    "m": BODY["m"].replace("Mul(s, c)", "Mul(s, many)"),
}


def declined(original: onnx.ModelProto) -> None:
    changed, report = fused_pair(original)
    assert not any(block.status == "fused" for block in report.blocks), report.blocks
    found = [block for block in report.blocks if block.status == "declined"]
    assert found and all(block.culprit and block.reason for block in found)
    assert {block.code for block in found} <= {Code.TRAINING, Code.PROBABILITIES_ARE_OUTPUT}
    assert changed == ir.to_proto(ir.from_proto(original)), "a declined model was changed"


DECLINED = {
    "another mask on the index scores": {"z": "nsel = Not(sel) z = Where(hidden, low, im)"},
    "no selection on the index scores": {"z": "nsel = Not(sel) z = Identity(im)"},
    "a mask more on the index scores": {"z": "nsel = Not(sel) z0 = Where(hidden, low, im) z = Where(nsel, low, z0)"},
    "no causal mask on the index scores": {"z": "nsel = Not(sel) z = Where(nsel, low, i)"},
    "another selection on the index scores": {
        "z": "r2, idx2 = TopK<axis=-1>(other, count) s2 = ScatterElements<axis=-1>(none, idx2, some) nsel = Not(s2) "
        "z = Where(nsel, low, im)"
    },
    "infinite masks, whose loss is NaN": {"z": "nsel = Not(sel) z = Where(nsel, floor, im)"},
    "0 ln 0 without a guard, which is NaN": {"te": "lt = Log(t) te = Mul(t, lt)"},
    "a guard at another number": {"te": BODY["te"].replace("Equal(t, zero)", "Equal(t, half)")},
    "the logarithm of a larger probability": {
        "te": BODY["te"].replace("Log(t)", "Log(t2)").replace("lt", "t2 = Add(t, tiny) lt", 1)
    },
    "cross entropy": {"e": "cross = Mul(t, lg) e = Neg(cross)"},
    "the reverse divergence": {"e": "cross = Mul(t, lg) rev = Exp(lg) e0 = Sub(lg, lt) e = Mul(rev, e0)"},
    "the largest row instead of the sum": {
        "loss": "rows = ReduceSum<keepdims=0>(e, last) loss = ReduceMax<keepdims=0>(rows)"
    },
    "rows weighed": {
        "loss": "rows = ReduceSum<keepdims=0>(e, last) rw0 = ReduceSum<keepdims=0>(w, last) rww = Mul(rows, rw0) "
        "loss = ReduceSum<keepdims=0>(rww)"
    },
    "the target squared": {"t": "pp = Mul(p, p) t0 = ReduceSum<keepdims=0>(pp, first) t = Identity(t0)"},
    "the target not normalised": {"t": "t = ReduceSum<keepdims=0>(p, first)"},
    "the target normalised over rows": {
        "t": "t0 = ReduceSum<keepdims=0>(p, first) ts = ReduceSum<keepdims=1>(t0, first) t = Div(t0, ts)"
    },
    "the sum over rows, not heads": {
        "t": "t0 = ReduceSum<keepdims=0>(p, second) t1 = MatMul(other, other) t2 = ReduceMax<keepdims=0>(t0) "
        "t = Mul(t1, t2)"
    },
    "the target turned round": {"t": "t1 = ReduceMean<keepdims=0>(p, first) t = Transpose<perm=[0,2,1]>(t1)"},
    "a temperature": {"lg": "zz = Mul(z, half) lg = LogSoftmax<axis=-1>(zz)"},
    "a softmax over the rows": {"lg": "lg = LogSoftmax<axis=1>(z)"},
    "the difference turned round once": {"d0": "yy = Exp(lg) y2 = Mul(yy, two) d0 = Sub(y2, t)"},
    "the target alone": {"d0": "d0 = Neg(t)"},
    "zeros at the selected keys": {"d1": "d1 = Where(sel, zero, d0)"},
    "zeros at other keys": {"d1": "d1 = Where(hidden, zero, d0)"},
    "a factor that overflows": {"ds": "ds = Mul(dg, low)"},
    "ones where the mask excludes": {"d1": "d1 = Where(nsel, half, d0)"},
    "a gate at another number": {"off": "off = LessOrEqual(r, half)"},
    "a gate turned round": {"dg": "dg = Where(off, dr, zero)"},
    "a gate of the products times weights": {"off": "off = LessOrEqual(rw, zero)"},
    "no gate": {"dg": "dg = Identity(dr)"},
    "the weights left out": {"dr": "dr = Identity(du)", "off": BODY["off"], "dg": "dg = Where(off, zero, dr)"},
    "the weights squared": {"dr": "dr0 = Mul(du, wu) dr = Mul(dr0, wu)"},
    "the weights' gradient with the weights": {"dw": "dwr = Mul(du, rw) dw = ReduceSum<keepdims=0>(dwr, last)"},
    "query and target confused": {"dqi": 'kr = Relu(ki) dqi = Einsum<equation="bsht,btd->bshd">(ds, kr)'},
    "the key's gradient over the keys": {"dki": 'dki = Einsum<equation="bsht,bthd->bsd">(ds, qi)'},
    "unsorted ranks": {"idx": "ranked, idx = TopK<axis=-1, sorted=0>(im, count)"},
    "ranks without the mask": {"idx": "ranked, idx = TopK<axis=-1>(i, count)"},
    "the lowest ranks": {"idx": "ranked, idx = TopK<axis=-1, largest=0>(im, count)"},
    "any list": {"idx": "idx = Identity(given)"},
    "attention to keys behind the row": {"keep": "keep = Identity(sel)"},
    "attention under a mask more": {"keep": "keep0 = And(sel, seen) vis = Not(hidden) keep = And(keep0, vis)"},
    "attention without a selection": {
        "keep": "un = Unsqueeze(seen, z0) keep = Expand(un, shape)",
        "ahead": BODY["ahead"] + " z0 = Constant<value_ints=[0]>()",
    },
    "a sum of heads with weights": {
        "t": "pw = Mul(p, half2) t0 = ReduceSum<keepdims=0>(pw, first) t = Identity(t0)",
        "ahead": BODY["ahead"] + " half2 = Constant<value_floats=[0.1,0.2,0.1,0.2,0.1,0.2,0.1,0.3]>()",
    },
}


@pytest.mark.parametrize("changes", DECLINED.values(), ids=DECLINED)
def test_a_look_alike_is_declined(changes: Mapping[str, str]) -> None:
    declined(model(changes))


@pytest.mark.parametrize("name", ["p", "t0", "t", "te", "e", "cross", "nt", "d0", "d2", "du", "dr", "dg", "ds", "is0"])
def test_inner_values_that_are_needed_elsewhere(name: str) -> None:
    """All that is made of attention's probabilities has to be gone with them."""
    dtype = "bool" if name == "is0" else "float"
    rank = {"p": 4, "du": 4, "dr": 4, "dg": 4, "ds": 4}.get(name, 3)
    sizes = {"p": "2,4,8,8", "du": "2,8,1,8"}.get(name, "2,8,3,8" if rank == 4 else "2,8,8")
    declined(model({}, more=(f"{dtype}[{sizes}] {name}",)))


@pytest.mark.parametrize("name", ["i", "im", "r", "rw", "z", "yy"])
def test_values_of_the_indexer_may_be_read_elsewhere(name: str) -> None:
    """They are computed for whoever wants them: nothing of attention's is in them."""
    sizes = "2,8,3,8" if name in ("r", "rw") else "2,8,8"
    checked(model({}, more=(f"float[{sizes}] {name}",)))


TURNED = {
    "the key's gradient from turned queries": (4, 4, {"dki": 'dki = Einsum<equation="bsht,bsdh->btd">(ds, qi)'}),
    "the weights turned in the gradient": (
        8,
        5,
        {"dr": "wt = Transpose<perm=[0,2,1]>(w) wv = Unsqueeze(wt, last) dr = Mul(du, wv)"},
    ),
}


@pytest.mark.parametrize(("heads", "width", "changes"), TURNED.values(), ids=TURNED)
def test_axes_of_one_size_are_not_confused(heads: int, width: int, changes: Mapping[str, str]) -> None:
    """As many index heads as numbers in a head, or as rows."""
    inputs = INPUTS.replace("[2,8,3,4] qi", f"[2,8,{heads},{width}] qi").replace("[2,8,4] ki", f"[2,8,{width}] ki")
    inputs = inputs.replace("[2,8,3] w", f"[2,8,{heads}] w")
    shapes = {
        "dw": f"float[2,8,{heads}] dw",
        "dqi": f"float[2,8,{heads},{width}] dqi",
        "dki": f"float[2,8,{width}] dki",
    }
    outputs = ", ".join({**OUTPUTS, **shapes}.values())
    for body, fuses in ((BODY, True), ({**BODY, **changes}, False)):
        original = parse(" ".join(body.values()), inputs=inputs, outputs=outputs, initializers=NUMBERS, opset=18)
        if fuses:
            assert fused_pair(original)[1].blocks[0].status == "fused"
        else:
            declined(original)


def test_several_heads_of_keys_are_declined() -> None:
    inputs = INPUTS.replace("float[2,1,8,8] k, float[2,1,8,8] v", "float[2,4,8,8] k, float[2,4,8,8] v")
    declined(
        parse(
            " ".join(BODY.values()), inputs=inputs, outputs=", ".join(OUTPUTS.values()), initializers=NUMBERS, opset=18
        )
    )


def test_a_lightning_indexer_lists_the_keys_of_both() -> None:
    """Where the user allows its ranks, attention and loss take the same list."""
    original = model({})
    changed, report = fused_pair(original, assume=["close-ranks"])
    assert report.blocks[0].assumed == ("close-ranks",)
    (indexer,) = (node for node in changed.graph.node if node.op_type == "LightningIndexer")
    readers = {node.op_type for node in changed.graph.node if indexer.output[0] in node.input}
    assert readers == {"SparseFlashAttention", "SparseLightningIndexerGradKLLoss"}
    assert not any(node.op_type in ("TopK", "Relu") for node in changed.graph.node)
    inputs = feeds()
    wanted, got = named(original, run(original, inputs)), named(changed, run(changed, inputs))
    for name, value in wanted.items():
        assert_close(got[name], value, TOLERANCE)


def test_scores_times_0_are_no_error() -> None:
    """Their gradient tells nothing of its factor."""
    changed = {"i": BODY["i"].replace("rw = Mul(r, wu)", "nought = Mul(r, zero) rw = Mul(nought, wu)")}
    _, report = fused_pair(model(changed))
    assert not any(block.op == "SparseLightningIndexerGradKLLoss" for block in report.blocks)
