"""Packed sequences: masks that are proven to keep tokens to their own sequence become input_layout TND; all others stay
masks. Whatever they become, they give what the original gives, with lengths that fit and with lengths that do not."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from fa_compiler.passes import Block
from tests.passes.masks.test_structure import GRID, LENGTHS, NUMBERS, SELECT, SELF
from tests.passes.running import PRODUCT_PV, PRODUCT_QK, SOFTMAX, assert_same, fused, parse, run

CUMULATIVE = "int64[E] ends"
FLAGS = "bool[B,S] starts"
IDS = "int64[B,S] ids"
HALVES = ", ".join(str(k // 4) for k in range(12))
RETURN = ", ".join(str(k % 3) for k in range(12))
TWELVE = SELF.replace("S", "12")
SAME = "r = Unsqueeze(label, last) c = Unsqueeze(label, first) m = Equal(r, c) "
"""Labels of a vector, compared row with column."""
SAME_CAUSAL = (
    "r = Unsqueeze(label, last) c = Unsqueeze(label, first) e = Equal(r, c) t = LessOrEqual(j, i) m = And(e, t) "
)
BATCHED = "two_ = Constant<value=int64[1] {2}>() one_ = Constant<value=int64[1] {1}>() "
SAME_BATCHED = (
    BATCHED + "r = Unsqueeze(label, two_) c = Unsqueeze(label, one_) e = Equal(r, c) t = LessOrEqual(j, i) "
    "f3 = And(e, t) m = Unsqueeze(f3, one_) "
)
REACHED = "reached = GreaterOrEqual(i, ends) n = Cast<to=7>(reached) "
STEPS = (
    "o_ = Constant<value=int64[1] {1}>() head = Slice(ids, first, o_, o_) before = Sub(head, one) "
    "all_ = Concat<axis=-1>(before, ids) e_ = Add(rows_, o_) a_ = Slice(all_, first, rows_, o_) "
    "c_ = Slice(all_, o_, e_, o_) step = Sub(c_, a_) q_ = Equal(step, one) nq = Not(q_) nc = Cast<to=7>(nq) "
    "label = CumSum(nc, one) "
)


ORDERED = (
    BATCHED + "r = Unsqueeze(label, two_) c = Unsqueeze(label, one_) e = Equal(r, c) "
    "pr = Unsqueeze(ids, two_) pc = Unsqueeze(ids, one_) "
)
"""Positions compared as numbers, which is their order where each follows the one before."""
ORDERED_END = " f3 = And(e, t) m = Unsqueeze(f3, one_) "


def model(mask: str, more: str, inputs: str = SELF, use: str = SELECT) -> onnx.ModelProto:
    """Attention behind `mask`, which computes m (true: attended)."""
    body = PRODUCT_QK + NUMBERS + LENGTHS + GRID + mask + " " + use + SOFTMAX.format("x") + PRODUCT_PV
    outputs = "float[B,4,12,8] y" if inputs is TWELVE else "float[B,4,S,8] y"
    return parse(body, more, inputs=inputs, outputs=outputs, opset=17)


def feeds_of(proto: onnx.ModelProto, batch: int, length: int, seed: int) -> dict[str, np.ndarray]:
    """Random inputs; cumulative lengths are unsorted, repeated, negative and beyond the end, positions mostly go up by
    one, and numbers come back."""
    rng = np.random.default_rng(seed)
    sizes = {"B": batch, "S": length, "T": length + 2, "E": 1 + seed}
    feeds: dict[str, np.ndarray] = {}
    for value in proto.graph.input:
        tensor = value.type.tensor_type
        shape = [sizes.get(dim.dim_param, dim.dim_value) for dim in tensor.shape.dim]
        if value.name == "ends":
            feeds[value.name] = rng.integers(-1, length + 2, shape)
        elif tensor.elem_type == onnx.TensorProto.INT64:
            feeds[value.name] = np.cumsum(rng.choice([1, 1, 1, 1, 2, 0, -3], shape), axis=1)
        elif tensor.elem_type == onnx.TensorProto.BOOL:
            feeds[value.name] = rng.random(shape) < 0.3
        else:
            feeds[value.name] = rng.standard_normal(shape).astype(np.float32)
    return feeds


def same(proto: onnx.ModelProto) -> Block:
    """The block; the outputs agree."""
    result, report = fused(proto)
    (block,) = report.blocks
    for seed, (batch, length) in enumerate(((2, 5), (1, 1), (3, 9), (1, 70), (2, 12))):
        feeds = feeds_of(proto, batch, length, seed)
        for got, wanted in zip(run(result, feeds), run(proto, feeds), strict=True):
            assert_same(got, wanted, 1e-5)
    return block


PACKED = {
    "cumulative lengths reached": (REACHED + "label = ReduceSum<keepdims=0>(n, last) " + SAME, CUMULATIVE, SELF),
    "causal, too": (REACHED + "label = ReduceSum<keepdims=0>(n, last) " + SAME_CAUSAL, CUMULATIVE, SELF),
    "lengths on the left": (
        "l = Unsqueeze(ends, last) reached = LessOrEqual(l, j) n = Cast<to=6>(reached) "
        "label = ReduceSum<keepdims=0>(n, first) " + SAME_CAUSAL,
        CUMULATIVE,
        SELF,
    ),
    "lengths not reached": (
        "reached = Less(i, ends) n = Cast<to=7>(reached) label = ReduceSum<keepdims=0>(n, last) " + SAME,
        CUMULATIVE,
        SELF,
    ),
    "Not, the dimension kept, a number added": (
        "f = Greater(i, ends) g = Not(f) n = Cast<to=7>(g) all_ = ReduceSum<keepdims=1>(n, last) "
        "label = Sub(three, all_) turned = Transpose<perm=[1,0]>(label) m = Equal(label, turned)",
        CUMULATIVE,
        SELF,
    ),
    "counted in int64, compared in int32": (
        REACHED + "wide = ReduceSum<keepdims=0>(n, last) label = Cast<to=6>(wide) " + SAME,
        CUMULATIVE,
        SELF,
    ),
    "first tokens counted": ("n = Cast<to=7>(starts) label = CumSum(n, one) " + SAME_BATCHED, FLAGS, SELF),
    "last tokens counted from behind": (
        "n = Cast<to=7>(starts) label = CumSum<reverse=1, exclusive=1>(n, one) " + SAME_BATCHED,
        FLAGS,
        SELF,
    ),
    "steps of positions other than 1": (STEPS + SAME_BATCHED, IDS, SELF),
    "steps of positions, and positions compared": (
        STEPS + ORDERED + "t = LessOrEqual(pc, pr)" + ORDERED_END,
        IDS,
        SELF,
    ),
    "the same turned round": (STEPS + ORDERED + "t = GreaterOrEqual(pr, pc)" + ORDERED_END, IDS, SELF),
    "the same negated": (STEPS + ORDERED + "u = Greater(pc, pr) t = Not(u)" + ORDERED_END, IDS, SELF),
    "marks scattered, cut": (
        "o_ = Constant<value=int64[1] {1}>() long = Add(rows_, o_) blank = ConstantOfShape<value=int64[1] {0}>(long) "
        "low_ = Constant<value=int64 {0}>() a = Max(ends, low_) b = Min(a, rows) places = Unsqueeze(b, last) "
        "count = Shape(ends) marks = ConstantOfShape<value=int64[1] {1}>(count) n = ScatterND(blank, places, marks) "
        "whole = CumSum(n, zero) label = Slice(whole, first, rows_) " + SAME_CAUSAL,
        CUMULATIVE,
        SELF,
    ),
    "constant labels": (f"label = Constant<value=int64[12] {{{HALVES}}}>() " + SAME_CAUSAL, "", TWELVE),
    "a window within the sequence": (
        REACHED + "label = ReduceSum<keepdims=0>(n, last) r = Unsqueeze(label, last) c = Unsqueeze(label, first) "
        "e = Equal(r, c) t = LessOrEqual(j, i) d = Sub(i, j) w = Less(d, three) e2 = And(e, t) m = And(e2, w)",
        CUMULATIVE,
        SELF,
    ),
    "the same labels twice": (
        REACHED + "label = ReduceSum<keepdims=0>(n, last) r = Unsqueeze(label, last) c = Unsqueeze(label, first) "
        "e = Equal(r, c) f = Equal(r, c) m = And(e, f)",
        CUMULATIVE,
        SELF,
    ),
}


@pytest.mark.parametrize(("mask", "more", "inputs"), PACKED.values(), ids=PACKED)
def test_proven_labels_are_packed(mask: str, more: str, inputs: str) -> None:
    block = same(model(mask, more, inputs))
    assert (block.status, block.layout) == ("fused", "TND")
    assert (block.mask or "").startswith("packed") and "atten_mask" not in (block.mask or "")


COUNTED = REACHED + "label = ReduceSum<keepdims=0>(n, last) "
DENSE = {
    "labels that are given": ("label = Identity(ids) " + SAME_BATCHED, IDS, SELF),
    "sums of what is given": ("label = CumSum(ids, one) " + SAME_BATCHED, IDS, SELF),
    "counted over the batch": ("n = Cast<to=7>(starts) label = CumSum(n, zero) " + SAME_BATCHED, FLAGS, SELF),
    "counted between two bounds": (
        "u = Add(ends, three) f = GreaterOrEqual(i, ends) g = Less(i, u) h = And(f, g) n = Cast<to=7>(h) "
        "label = ReduceSum<keepdims=0>(n, last) " + SAME,
        CUMULATIVE,
        SELF,
    ),
    "positions that turn back": (
        "d = Sub(i, three) a = Abs(d) f = GreaterOrEqual(a, ends) n = Cast<to=7>(f) "
        "label = ReduceSum<keepdims=0>(n, last) " + SAME,
        CUMULATIVE,
        SELF,
    ),
    "summed over the tokens": (
        "l = Unsqueeze(ends, last) reached = LessOrEqual(l, j) n = Cast<to=7>(reached) "
        "some = ReduceSum<keepdims=1>(n, last) e0 = Gather(some, zero) label = Add(e0, j1) " + SAME,
        CUMULATIVE,
        SELF,
    ),
    "the rest of a division": (COUNTED.replace("label", "whole") + "label = Mod(whole, two) " + SAME, CUMULATIVE, SELF),
    "cut to a byte": (
        COUNTED.replace("label", "whole") + "byte = Cast<to=3>(whole) label = Cast<to=7>(byte) " + SAME,
        CUMULATIVE,
        SELF,
    ),
    "squared differences to a length": (
        COUNTED.replace("label", "whole") + "d = Sub(whole, two) label = Mul(d, d) " + SAME,
        CUMULATIVE,
        SELF,
    ),
    "positions added": (
        COUNTED.replace("label", "whole") + "d = Sub(whole, j1) label = Add(d, j1) " + SAME,
        CUMULATIVE,
        SELF,
    ),
    "other labels for the keys": (
        COUNTED
        + "o2 = Add(ends, one) f2 = GreaterOrEqual(i, o2) n2 = Cast<to=7>(f2) l2 = ReduceSum<keepdims=0>(n2, last) "
        "r = Unsqueeze(label, last) c = Unsqueeze(l2, first) m = Equal(r, c)",
        CUMULATIVE,
        SELF,
    ),
    "the labels of the keys a token further": (
        COUNTED + "o_ = Constant<value=int64[1] {1}>() tail = Slice(label, o_, rows_) e_ = Gather(label, last) "
        "l2 = Concat<axis=0>(tail, e_) r = Unsqueeze(label, last) c = Unsqueeze(l2, first) m = Equal(r, c)",
        CUMULATIVE,
        SELF,
    ),
    "other sequences only": (COUNTED + SAME.replace("m = ", "e = ") + "m = Not(e)", CUMULATIVE, SELF),
    "the row with itself": (COUNTED + "r = Unsqueeze(label, last) m = Equal(r, r)", CUMULATIVE, SELF),
    "without the token itself": (
        COUNTED + "r = Unsqueeze(label, last) c = Unsqueeze(label, first) e = Equal(r, c) t = Less(j, i) m = And(e, t)",
        CUMULATIVE,
        SELF,
    ),
    "or causal": (
        COUNTED
        + "r = Unsqueeze(label, last) c = Unsqueeze(label, first) e = Equal(r, c) t = LessOrEqual(j, i) m = Or(e, t)",
        CUMULATIVE,
        SELF,
    ),
    "padding beside": (
        COUNTED + "r = Unsqueeze(label, last) c = Unsqueeze(label, first) e = Equal(r, c) "
        "two_ = Constant<value=int64[1] {2}>() one_ = Constant<value=int64[1] {1}>() p1 = Unsqueeze(starts, one_) "
        "p2 = Unsqueeze(p1, two_) m = And(e, p2)",
        CUMULATIVE + ", " + FLAGS,
        SELF,
    ),
    "positions compared, without labels": (
        BATCHED + "pr = Unsqueeze(ids, two_) pc = Unsqueeze(ids, one_) t = LessOrEqual(pc, pr) m = Unsqueeze(t, one_)",
        IDS,
        SELF,
    ),
    "positions compared, strictly": (STEPS + ORDERED + "t = Less(pc, pr)" + ORDERED_END, IDS, SELF),
    "later positions": (STEPS + ORDERED + "t = Greater(pc, pr)" + ORDERED_END, IDS, SELF),
    "the row's position at most the key's": (STEPS + ORDERED + "t = LessOrEqual(pr, pc)" + ORDERED_END, IDS, SELF),
    "breaks by steps other than 2": (
        STEPS.replace("Equal(step, one)", "Equal(step, two)") + ORDERED + "t = LessOrEqual(pc, pr)" + ORDERED_END,
        IDS,
        SELF,
    ),
    "breaks where the step is 1": (
        STEPS.replace("Cast<to=7>(nq)", "Cast<to=7>(q_)") + ORDERED + "t = LessOrEqual(pc, pr)" + ORDERED_END,
        IDS,
        SELF,
    ),
    "breaks counted a token late": (
        STEPS.replace("CumSum(", "CumSum<exclusive=1>(") + ORDERED + "t = LessOrEqual(pc, pr)" + ORDERED_END,
        IDS,
        SELF,
    ),
    "breaks of other numbers": (
        STEPS.replace("ids", "more") + ORDERED + "t = LessOrEqual(pc, pr)" + ORDERED_END,
        IDS + ", int64[B,S] more",
        SELF,
    ),
    "labels by positions that are 0": (
        "z_ = Equal(ids, zero) n = Cast<to=7>(z_) label = CumSum(n, one) "
        + ORDERED
        + "t = LessOrEqual(pc, pr)"
        + ORDERED_END,
        IDS,
        SELF,
    ),
    "labels that come back": (f"label = Constant<value=int64[12] {{{RETURN}}}>() " + SAME_CAUSAL, "", TWELVE),
}


@pytest.mark.parametrize(("mask", "more", "inputs"), DENSE.values(), ids=DENSE)
def test_other_masks_stay_masks(mask: str, more: str, inputs: str) -> None:
    block = same(model(mask, more, inputs))
    assert (block.status, block.layout != "TND") == ("fused", True), block.reason
    assert "packed" not in (block.mask or "")


def test_labels_that_are_given_may_be_vouched_for() -> None:
    """Without that the report says why the mask stays one; with it labels in runs give what they gave."""
    proto = model("label = Identity(ids) " + SAME_BATCHED, IDS)
    _, report = fused(proto)
    assert any("not proven unbroken" in line and "unbroken-sequences" in line for line in report.missed)
    result, report = fused(proto, assume=["unbroken-sequences"])
    (block,) = report.blocks
    assert (block.layout, block.mask, block.assumed) == ("TND", "packed+causal", ("unbroken-sequences",))
    feeds = feeds_of(proto, 2, 9, 0) | {"ids": np.array([[5, 5, 5, 2, 2, 7, 7, 7, 0], [3, 1, 1, 1, 1, 1, 1, 4, 4]])}
    for got, wanted in zip(run(result, feeds), run(proto, feeds), strict=True):
        assert_same(got, wanted, 1e-5)


BESIDE = {
    "a bias": (
        SELECT.replace("x = Where(m, s, minus)", "sb = Add(s, bias) x = Where(m, sb, minus)"),
        "float[4,S,S] bias",
    ),
    "a number that scores may undercut": ("weak = Constant<value=float {-10.0}>() x = Where(m, s, weak) ", ""),
}


@pytest.mark.parametrize(("use", "more"), BESIDE.values(), ids=BESIDE)
def test_what_the_packed_layout_cannot_hold_stays_a_mask(use: str, more: str) -> None:
    block = same(model(COUNTED + SAME_CAUSAL, ", ".join(filter(None, (CUMULATIVE, more))), use=use))
    assert block.status == "fused" and block.layout != "TND"


OPERATOR = "y = Attention(q, k, v, m) "


@pytest.mark.parametrize(
    ("mask", "more", "packed"),
    [
        (COUNTED + SAME_CAUSAL, CUMULATIVE, True),
        (STEPS + ORDERED + "t = LessOrEqual(pc, pr)" + ORDERED_END, IDS, True),
        ("label = Identity(ids) " + SAME_BATCHED, IDS, False),
        (COUNTED + SAME.replace("m = ", "e = ") + "m = Not(e)", CUMULATIVE, False),
    ],
)
def test_the_mask_of_an_attention_operator(mask: str, more: str, packed: bool) -> None:
    proto = parse(NUMBERS + LENGTHS + GRID + mask + " " + OPERATOR, more, inputs=SELF, opset=23, ir_version=10)
    block = same(proto)
    assert (block.status, block.layout == "TND") == ("fused", packed)


USES = {
    "added": "f = Where(m, nothing, low) x = Add(s, f) " + SOFTMAX.format("x"),
    "added, -inf": "f = Where(m, nothing, minus) x = Add(s, f) " + SOFTMAX.format("x"),
    "excluded": "out = Not(m) x = Where(out, minus, s) " + SOFTMAX.format("x"),
    "guarded": SELECT + "p0 = Softmax<axis=-1>(x) undefined = IsNaN(p0) p = Where(undefined, nothing, p0) ",
    "beside a sink": SELECT
    + "b_ = Shape<start=0, end=1>(q) four = Constant<value=int64[1] {4}>() o1 = Constant<value=int64[1] {1}>() "
    "sizes = Concat<axis=0>(b_, four, rows_, o1) every = Expand(sink, sizes) both = Concat<axis=3>(x, every) "
    "pp = Softmax<axis=-1>(both) third = Constant<value=int64[1] {3}>() p = Slice(pp, first, columns_, third) ",
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_however_the_mask_is_applied(use: str) -> None:
    body = PRODUCT_QK + NUMBERS + LENGTHS + GRID + COUNTED + SAME_CAUSAL + " " + use + PRODUCT_PV
    more = CUMULATIVE + (", float[1,4,1,1] sink" if "sink" in use else "")
    block = same(parse(body, more, inputs=SELF, opset=17))
    assert (block.layout, block.mask) == ("TND", "packed+causal")


def test_no_tensor_of_tokens_times_tokens_is_left() -> None:
    """The labels stay, what compared rows with columns is gone: 8192 tokens in sequences of 256 took 10 ms and 10 MB,
    beside a mask 120 ms and 440 MB."""
    result, _ = fused(model(COUNTED + SAME_CAUSAL, CUMULATIVE))
    assert not {"LessOrEqual", "And", "Where", "MatMul", "Softmax"} & {node.op_type for node in result.graph.node}
    (node,) = (node for node in result.graph.node if node.op_type == "FlashAttentionScore")
    names = [name for name in node.input if name]
    assert names[-1] == names[-2], "both lengths are one tensor"


def test_ascend_keeps_the_mask() -> None:
    """There the lengths would have to be known to the host before the kernel starts."""
    _, report = fused(model(COUNTED + SAME_CAUSAL, CUMULATIVE), "ascend")
    (block,) = report.blocks
    assert block.status == "fused" and block.layout != "TND" and block.mask == "atten_mask"


def _sized(proto: onnx.ModelProto, seed: int = 1, **sizes: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    feeds: dict[str, np.ndarray] = {}
    for value in proto.graph.input:
        tensor = value.type.tensor_type
        shape = [sizes.get(dim.dim_param, dim.dim_value) for dim in tensor.shape.dim]
        numbers = rng.integers(-1, 7, shape) if tensor.elem_type == onnx.TensorProto.INT64 else rng.random(shape) < 0.4
        floats = tensor.elem_type == onnx.TensorProto.FLOAT
        feeds[value.name] = rng.standard_normal(shape).astype(np.float32) if floats else numbers
    return feeds


def test_labels_of_one_batch_or_of_all() -> None:
    """What the labels' batch is called says nothing of its size: 1 in a run serves every batch."""
    proto = model("n = Cast<to=7>(flags) label = CumSum(n, one) " + SAME_BATCHED, "bool[X,S] flags")
    result, report = fused(proto)
    assert report.blocks[0].layout == "TND"
    for batch, labels in ((3, 1), (3, 3), (1, 1)):
        feeds = _sized(proto, B=batch, X=labels, S=7)
        assert_same(run(result, feeds)[0], run(proto, feeds)[0], 1e-5)


BATCHES = {
    "query": "float[Q,4,S,8] q, float[B,4,S,8] k, float[B,4,S,8] v",
    "key": "float[B,4,S,8] q, float[Q,4,S,8] k, float[B,4,S,8] v",
    "value": "float[B,4,S,8] q, float[B,4,S,8] k, float[Q,4,S,8] v",
    "all": "float[Q,4,S,8] q, float[R,4,S,8] k, float[B,4,S,8] v",
}


@pytest.mark.parametrize("inputs", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("more", ["bool[1,S] flags", "bool[B,S] flags", "bool[Q,S] flags"])
def test_batches_that_may_be_repeated_are_not_packed(inputs: str, more: str) -> None:
    """One of them may be 1 in a run: the masked operator repeats it, the packed one cannot."""
    mask = "n = Cast<to=7>(flags) label = CumSum(n, one) " + SAME_BATCHED
    body = PRODUCT_QK + NUMBERS + LENGTHS + GRID + mask + " " + SELECT + SOFTMAX.format("x") + PRODUCT_PV
    proto = parse(body, more, inputs=inputs, outputs="float[Y,4,S,8] y", opset=17)
    result, report = fused(proto)
    assert (report.blocks[0].status, report.blocks[0].mask) == ("fused", "atten_mask")
    for sizes in ({"B": 2, "Q": 2, "R": 2}, {"B": 3, "Q": 1, "R": 1} if "B,S] flags" not in more else {}):
        if sizes:
            feeds = _sized(proto, S=5, **sizes)
            assert_same(run(result, feeds)[0], run(proto, feeds)[0], 1e-5)
