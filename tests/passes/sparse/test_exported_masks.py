"""Selected keys as transformers' exporter writes them: a list scattered into a tensor of truths, which is joined with
causal and padding masks in any order. They become a list; what only looks so stays a mask."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from fa_compiler.passes.answer.options import Target
from fa_compiler.passes.answer.report import Missed, MissedCode
from tests.passes.running import PRODUCT_PV, PRODUCT_QK, SOFTMAX, assert_same, fused, parse, random_feeds, refused, run

MORE = "float[B,S,T] i, bool[B,T] attended, bool[B,S,2] written, int64[B,S,2] given"
NUMBERS = (
    "zero = Constant<value=float {0.0}>() one = Constant<value=float {1.0}>() half = Constant<value=float {0.5}>() "
    "lowest = Constant<value=float {-3.4028234663852886e38}>() low = Constant<value=float {-inf}>() "
    "two = Constant<value=int64[1] {2}>() heads = Constant<value=int64[1] {1}>() "
    "third = Constant<value=int64[1] {3}>() keys_axis = Constant<value=int64[2] {1, 2}>() "
    "first = Constant<value=int64 {0}>() unit = Constant<value=int64 {1}>() "
)
SHAPES = (
    "shape = Shape(i) values, idx = TopK<axis=-1>(i, two) of_list = Shape(idx) "
    "all = ConstantOfShape<value=bool[1] {1}>(shape) none = ConstantOfShape<value=bool[1] {0}>(of_list) "
    "nowhere = ConstantOfShape<value=bool[1] {0}>(shape) there = ConstantOfShape<value=bool[1] {1}>(of_list) "
)
SEEN = (
    "rows = Shape<start=1, end=2>(i) keys = Shape<start=2, end=3>(i) r0 = Squeeze(rows) k0 = Squeeze(keys) "
    "past = Sub(k0, r0) counted = Range(first, r0, unit) at = Add(counted, past) row = Unsqueeze(at, heads) "
    "column = Range(first, k0, unit) seen = LessOrEqual(column, row) "
    "padding = Unsqueeze(attended, keys_axis) visible = And(seen, padding) "
)
START = NUMBERS + SHAPES + SEEN

PLACES = (
    "batches = Shape<start=0, end=1>(i) b0 = Squeeze(batches) entries = Range(first, b0, unit) "
    "lines = Range(first, r0, unit) "
    "far = Constant<value=int64[3] {1, 2, 3}>() near = Constant<value=int64[2] {1, 2}>() "
    "b4 = Unsqueeze(entries, far) l4 = Unsqueeze(lines, near) i4 = Unsqueeze(idx, third) of_four = Shape(i4) "
    "b_all = Expand(b4, of_four) l_all = Expand(l4, of_four) "
)
LISTED = {
    "false_into_ones": "hidden = ScatterElements<axis=-1>(all, idx, none) u = Unsqueeze(hidden, heads) "
    "listed = Not(u) ",
    "not_before": "hidden = ScatterElements<axis=-1>(all, idx, none) h = Not(hidden) listed = Unsqueeze(h, heads) ",
    "true_into_zeros": "there3 = ScatterElements<axis=2>(nowhere, idx, there) listed = Unsqueeze(there3, heads) ",
    "narrow_indices": "n = Cast<to=6>(idx) w = Cast<to=7>(n) hidden = ScatterElements<axis=-1>(all, w, none) "
    "u = Unsqueeze(hidden, heads) listed = Not(u) ",
    "as_numbers": "ones = Cast<to=1>(all) nones = Cast<to=1>(none) n = ScatterElements<axis=-1>(ones, idx, nones) "
    "g = Unsqueeze(n, heads) listed = Less(g, half) ",
    "places": PLACES + "at_list = Concat<axis=-1>(b_all, l_all, i4) hidden = ScatterND(all, at_list, none) "
    "u = Unsqueeze(hidden, heads) listed = Not(u) ",
    "true_at_places": PLACES + "at_list = Concat<axis=3>(b_all, l_all, i4) held = ScatterND(nowhere, at_list, there) "
    "listed = Unsqueeze(held, heads) ",
    "with_the_heads_axis": "i5 = Unsqueeze(i, heads) v5, idx5 = TopK<axis=-1>(i5, two) all5 = Unsqueeze(all, heads) "
    "none5 = Unsqueeze(none, heads) hidden = ScatterElements<axis=3>(all5, idx5, none5) listed = Not(hidden) ",
    "reshaped": "hidden = ScatterElements<axis=-1>(all, idx, none) h = Not(hidden) batches = Shape<start=0, end=1>(i) "
    "whole = Concat<axis=0>(batches, heads, rows, keys) listed = Reshape(h, whole) ",
}
ADDED = "x = Add(s, mask) "
MASKS = {
    "exported": "kept = And(visible, listed) left = Not(kept) f = Cast<to=1>(left) mask = Mul(f, lowest) " + ADDED,
    "list_first": "some = And(listed, padding) kept = And(some, seen) left = Not(kept) f = Cast<to=1>(left) "
    "mask = Mul(lowest, f) " + ADDED,
    "inverted_numbers": "kept = And(listed, visible) f = Cast<to=1>(kept) left = Sub(one, f) mask = Mul(left, lowest) "
    + ADDED,
    "product_of_numbers": "a = Cast<to=1>(listed) b = Cast<to=1>(visible) kept = Mul(a, b) left = Sub(one, kept) "
    "mask = Mul(left, lowest) " + ADDED,
    "least_of_numbers": "a = Cast<to=1>(listed) b = Cast<to=1>(visible) kept = Min(a, b) test = Less(kept, half) "
    "mask = Where(test, lowest, zero) " + ADDED,
    "chosen_numbers": "kept = And(visible, listed) mask = Where(kept, zero, lowest) " + ADDED,
    "infinite": "kept = And(visible, listed) mask = Where(kept, zero, low) " + ADDED,
    "selected": "kept = And(visible, listed) x = Where(kept, s, lowest) ",
    "excluded": "gone = Not(visible) other = Not(listed) e = Or(gone, other) x = Where(e, low, s) ",
    "one_after_the_other": "a = Where(visible, s, low) x = Where(listed, a, low) ",
    "list_after": "a = Where(listed, s, low) b = Where(padding, a, low) x = Where(seen, b, low) ",
    "sum_of_masks": "a = Where(visible, zero, low) b = Where(listed, zero, low) mask = Add(a, b) " + ADDED,
    "least_of_masks": "a = Where(visible, zero, lowest) b = Where(listed, zero, lowest) mask = Min(a, b) " + ADDED,
    "two_sums": "a = Where(visible, zero, low) b = Where(listed, zero, low) c = Add(s, a) x = Add(c, b) ",
    "expanded": "kept0 = And(visible, listed) of_scores = Shape(s) kept = Expand(kept0, of_scores) left = Not(kept) "
    "f = Cast<to=1>(left) mask = Mul(f, lowest) " + ADDED,
    "expanded_parts": "of_scores = Shape(s) a = Expand(visible, of_scores) b = Expand(listed, of_scores) "
    "kept = And(a, b) mask = Where(kept, zero, lowest) " + ADDED,
    "no_padding": "kept = And(seen, listed) left = Not(kept) f = Cast<to=1>(left) mask = Mul(f, lowest) " + ADDED,
    "alone": "left = Not(listed) f = Cast<to=1>(left) mask = Mul(f, lowest) " + ADDED,
    "gathered": "kept = And(visible, listed) kept3 = Gather<axis=1>(kept, first) kept4 = Unsqueeze(kept3, heads) "
    "left = Not(kept4) f = Cast<to=1>(left) mask = Mul(f, lowest) " + ADDED,
}

EXPORTED = MASKS["exported"]
FALSE_INTO_ONES = LISTED["false_into_ones"]
SCATTER = "hidden = ScatterElements<axis=-1>({}, {}, {}) u = Unsqueeze(hidden, heads) listed = Not(u) "
NEAR = {
    "swapped": FALSE_INTO_ONES.replace("listed = Not(u)", "listed = Identity(u)") + EXPORTED,
    "true_into_ones": SCATTER.format("all", "idx", "there") + EXPORTED,
    "any_truths": SCATTER.format("all", "idx", "written") + EXPORTED,
    "into_another_mask": "above0 = Not(seen) above1 = Expand(above0, shape) "
    + SCATTER.format("above1", "idx", "none")
    + EXPORTED,
    "shifted": "next = Add(idx, unit) wrapped = Mod(next, k0) " + SCATTER.format("all", "wrapped", "none") + EXPORTED,
    "any_list": SCATTER.format("all", "given", "none") + EXPORTED,
    "of_another_batch_entry": "behind = Constant<value=int64[1] {-1}>() "
    "end0 = Constant<value=int64[1] {-9223372036854775807}>() turned = Slice(idx, behind, end0, start0, behind) "
    + SCATTER.format("all", "turned", "none")
    + EXPORTED,
    "along_the_rows": "early = Clip(idx, first, unit) "
    "hidden = ScatterElements<axis=1>(all, early, none) u = Unsqueeze(hidden, heads) listed = Not(u) " + EXPORTED,
    "two_lists_or": FALSE_INTO_ONES
    + "v2, idx2 = TopK<axis=-1, largest=0>(i, two) h2 = ScatterElements<axis=-1>(all, idx2, none) "
    "u2 = Unsqueeze(h2, heads) l2 = Not(u2) both = Or(listed, l2) " + EXPORTED.replace("listed)", "both)"),
    "two_lists_and": FALSE_INTO_ONES
    + "v2, idx2 = TopK<axis=-1, largest=0>(i, two) h2 = ScatterElements<axis=-1>(all, idx2, none) "
    "u2 = Unsqueeze(h2, heads) l2 = Not(u2) both = And(listed, l2) " + EXPORTED.replace("listed)", "both)"),
    "listed_or_seen": FALSE_INTO_ONES + EXPORTED.replace("And(", "Or("),
    "listed_xor_seen": FALSE_INTO_ONES + EXPORTED.replace("And(", "Xor("),
    "absolute_difference": FALSE_INTO_ONES
    + "a = Cast<to=1>(listed) b = Cast<to=1>(visible) d = Sub(a, b) kept = Abs(d) left = Sub(one, kept) "
    "mask = Mul(left, lowest) " + ADDED,
    "sum_of_numbers": FALSE_INTO_ONES
    + "a = Cast<to=1>(listed) b = Cast<to=1>(visible) kept = Add(a, b) test = Less(kept, half) "
    "mask = Where(test, lowest, zero) " + ADDED,
    "most_of_masks": FALSE_INTO_ONES
    + "a = Where(visible, zero, lowest) b = Where(listed, zero, lowest) mask = Max(a, b) "
    + ADDED,
    "batch_places_reversed": PLACES
    + "last = Sub(b0, unit) b_turned = Sub(last, b_all) at_list = Concat<axis=-1>(b_turned, l_all, i4) "
    "hidden = ScatterND(all, at_list, none) u = Unsqueeze(hidden, heads) listed = Not(u) " + EXPORTED,
    "row_places_of_the_batch": PLACES + "at_list = Concat<axis=-1>(b_all, b_all, i4) "
    "hidden = ScatterND(all, at_list, none) u = Unsqueeze(hidden, heads) listed = Not(u) " + EXPORTED,
    "keys_doubled": PLACES + "at_list = Concat<axis=-1>(b_all, l_all, l_all) "
    "hidden = ScatterND(all, at_list, none) u = Unsqueeze(hidden, heads) listed = Not(u) " + EXPORTED,
    "a_list_for_each_head": "i5 = Unsqueeze(i, heads) scaled = Mul(i5, signs) "
    "v5, idx5 = TopK<axis=-1>(scaled, two) of5 = Shape(scaled) of_list5 = Shape(idx5) "
    "all5 = ConstantOfShape<value=bool[1] {1}>(of5) none5 = ConstantOfShape<value=bool[1] {0}>(of_list5) "
    "hidden = ScatterElements<axis=3>(all5, idx5, none5) listed = Not(hidden) " + EXPORTED,
    "list_of_the_second_head": "i5 = Unsqueeze(i, heads) scaled = Mul(i5, signs) "
    "v5, idx5 = TopK<axis=-1>(scaled, two) idx6 = Gather<axis=1>(idx5, unit) "
    + SCATTER.format("all", "idx6", "none")
    + EXPORTED,
    "fewer_rows": "shorter = Slice(idx, start0, stop0, axis0) of6 = Shape(shorter) "
    "none6 = ConstantOfShape<value=bool[1] {0}>(of6) " + SCATTER.format("all", "shorter", "none6") + EXPORTED,
    "added_numbers": "ones = Cast<to=1>(all) nones = Cast<to=1>(there) minus = Neg(nones) "
    'n = ScatterElements<axis=-1, reduction="add">(ones, idx, minus) g = Unsqueeze(n, heads) '
    "listed = Less(g, half) " + EXPORTED,
}
TRUTHS, PLACED, RANKED = "one truth value", "each row at those of its own", "not what a TopK over the keys gives"
REASONS = {
    "swapped": TRUTHS,
    "true_into_ones": TRUTHS,
    "any_truths": TRUTHS,
    "into_another_mask": TRUTHS,
    "shifted": RANKED,
    "any_list": RANKED,
    "of_another_batch_entry": RANKED,
    "along_the_rows": PLACED,
    "two_lists_or": "Or is not proven to exclude each key",
    "two_lists_and": "2 lists of keys, 'hidden' and 'h2'",
    "listed_or_seen": "Or is not proven",
    "listed_xor_seen": "Xor is not proven",
    "absolute_difference": "stays a bias",
    "sum_of_numbers": "Add is not proven",
    "most_of_masks": "Max is not proven",
    "batch_places_reversed": PLACED,
    "row_places_of_the_batch": PLACED,
    "keys_doubled": PLACED,
    "a_list_for_each_head": "which all heads share",
    "list_of_the_second_head": RANKED,
    "fewer_rows": RANKED,
    "added_numbers": "Less is not proven",
}
"""What the report says of each near miss."""
NEAR_NUMBERS = (
    "signs = Constant<value=float[1,4,1,1] {1.0, -1.0, 0.5, -0.5}>() "
    "start0 = Constant<value=int64[1] {0}>() stop0 = Constant<value=int64[1] {-1}>() "
    "axis0 = Constant<value=int64[1] {1}>() "
)


def model(body: str, keys: str = "T") -> onnx.ModelProto:
    inputs = f"float[B,4,S,8] q, float[B,4,{keys},8] k, float[B,4,{keys},8] v"
    full = PRODUCT_QK + START + body + SOFTMAX.format("x") + PRODUCT_PV
    return parse(full, MORE.replace("T]", f"{keys}]"), inputs=inputs, opset=18)


def feeds_of(proto: onnx.ModelProto, seed: int) -> dict[str, np.ndarray]:
    """Ranks with many ties, and padding: of all keys of the first batch entry, of none or some of the second."""
    rng = np.random.default_rng(seed)
    attended = rng.random((2, 6)) < (1.1, 0.6, 0.3)[seed]
    attended[0] = seed == 2
    ranks = rng.integers(0, 3, (2, 5, 6)).astype(np.float32)
    return random_feeds(proto, seed, attended=attended, i=ranks, given=rng.integers(0, 6, (2, 5, 2)))


def check(proto: onnx.ModelProto) -> str:
    """The operator that the attention became, after comparing the results for several feeds."""
    result, report = fused(proto)
    for seed in range(3):
        feeds = feeds_of(proto, seed)
        assert_same(run(result, feeds)[0], run(proto, feeds)[0], 1e-5)
    (block,) = report.blocks
    return str(block.op)


@pytest.mark.parametrize("listed", LISTED)
@pytest.mark.parametrize("mask", MASKS)
def test_a_list_in_any_spelling(listed: str, mask: str) -> None:
    proto = model(LISTED[listed] + MASKS[mask])
    assert check(proto) == "SparseFlashAttention"


@pytest.mark.parametrize("listed", LISTED)
def test_sizes_that_are_known(listed: str) -> None:
    proto = model(LISTED[listed] + EXPORTED, keys="6")
    assert check(proto) == "SparseFlashAttention"


@pytest.mark.parametrize("name", NEAR)
def test_near_misses_stay_masks_and_the_report_says_why(name: str) -> None:
    proto = model(NEAR_NUMBERS + NEAR[name], keys="6")
    assert check(proto) == "FlashAttentionScore"
    (line,) = why_not_selected(proto)
    assert REASONS[name] in line.reason
    assert line.culprit in ("hidden", "n")
    assert MissedCode.DENSE_MASK not in [other.code for other in fused(proto)[1].blocks[0].missed]


def why_not_selected(proto: onnx.ModelProto, target: Target = "ort", assume: tuple[str, ...] = ()) -> list[Missed]:
    (block,) = fused(proto, target, assume)[1].blocks
    return [line for line in block.missed if line.code == MissedCode.NOT_SELECTED]


@pytest.mark.parametrize(
    ("number", "mask", "assumed"),
    [
        ("-1e4", "mask = Where(kept, zero, number) x = Add(s, mask) ", ("masks-dominate", "no-empty-rows")),
        ("-1e4", "x = Where(kept, s, number) ", ("masks-dominate",)),
    ],
)
def test_what_the_user_vouches_for_helps(number: str, mask: str, assumed: tuple[str, ...]) -> None:
    """The line names all that is needed."""
    low = f"number = Constant<value=float {{{number}}}>() "
    proto = model(low + FALSE_INTO_ONES + "kept = And(visible, listed) " + mask, keys="6")
    (line,) = why_not_selected(proto)
    assert f"--assume {','.join(assumed)} if" in (line.hint or "")
    result, report = fused(proto, assume=assumed)
    assert report.blocks[0].op == "SparseFlashAttention"
    feeds = feeds_of(proto, 1) | {"attended": np.ones((2, 6), np.bool_)}
    assert_same(run(result, feeds)[0], run(proto, feeds)[0], 1e-5)


def test_what_else_stops_a_list() -> None:
    bias = "i4 = Unsqueeze(i, heads) b = Add(s, i4) "
    biased = model(FALSE_INTO_ONES + bias + EXPORTED.replace("Add(s, mask)", "Add(b, mask)"))
    (line,) = why_not_selected(biased)
    assert "a bias" in line.reason
    exported = model(FALSE_INTO_ONES + EXPORTED, keys="6")
    (line,) = why_not_selected(exported, "ascend", ("no-empty-rows",))
    assert "float16" in (line.hint or "")
    assert not why_not_selected(exported, "contrib", ("no-empty-rows",))
    four = "four = Constant<value=int64[1] {4}>() "
    most = parse(
        PRODUCT_QK
        + four
        + START.replace("(i, two)", "(i, four)")
        + FALSE_INTO_ONES
        + EXPORTED
        + SOFTMAX.format("x")
        + PRODUCT_PV,
        MORE.replace("T]", "6]"),
        inputs="float[B,4,S,8] q, float[B,4,6,8] k, float[B,4,6,8] v",
        opset=18,
    )
    (line,) = why_not_selected(most)
    assert "4 of 6 keys" in line.reason


@pytest.mark.parametrize("mask", MASKS)
def test_only_what_is_listed_is_looked_up(mask: str) -> None:
    """No tensor of rows and keys is left, nor are the scores."""
    result, _ = fused(model(FALSE_INTO_ONES + MASKS[mask]))
    left = {node.op_type for node in result.graph.node}
    assert not left & {"MatMul", "Softmax", "ScatterElements", "Mul", "LessOrEqual", "And"}


@pytest.mark.parametrize("listed", ["false_into_ones", "places"])
def test_rows_without_a_key_that_are_zeroed_behind_the_product(listed: str) -> None:
    guard = (
        "number = Cast<to=1>(kept) last = Constant<value=int64[1] {-1}>() count = ReduceSum(number, last) "
        "empty = Less(count, one) o = MatMul(p, v) y = Where(empty, zero, o) "
    )
    proto = parse(PRODUCT_QK + START + LISTED[listed] + EXPORTED + SOFTMAX.format("x") + guard, MORE, opset=18)
    assert check(proto) == "SparseFlashAttention"


def test_lists_that_are_longer_than_there_are_keys() -> None:
    """TopK fails in both models; where it takes all keys there are, both give the same."""
    proto = model(FALSE_INTO_ONES + EXPORTED)
    feeds = feeds_of(proto, 1)
    feeds |= {name: feeds[name][:, :, :1] for name in "kvi"} | {"attended": feeds["attended"][:, :1]}
    result, _ = fused(proto)
    for each in (proto, result):
        with refused("k argument"):
            run(each, feeds)
    least = "all_keys = Shape<start=2, end=3>(i) few = Min(two, all_keys) "
    full = START.replace("(i, two)", "(i, few)").replace("shape = ", least + "shape = ", 1)
    open_lists = parse(
        PRODUCT_QK + full + FALSE_INTO_ONES + EXPORTED + SOFTMAX.format("x") + PRODUCT_PV, MORE, opset=18
    )
    result, report = fused(open_lists)
    assert report.blocks[0].op == "SparseFlashAttention"
    for keys in (1, 2, 6):
        cut = feeds_of(proto, 1)
        cut |= {name: cut[name][:, :, :keys] for name in "kvi"} | {"attended": cut["attended"][:, :keys]}
        assert_same(run(result, cut)[0], run(open_lists, cut)[0], 1e-5)
