"""Attention to keys and values that were gathered by a list: it becomes SparseFlashAttention on what they were gathered
from in every spelling in which the list is read, and stays an attention to gathered keys where it is not."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from fa_compiler.passes import Options, fuse
from tests.pairs import pairwise
from tests.passes.running import assert_same, fused, parse, run

B, S, T, H, D, E, K = 2, 5, 7, 4, 8, 6, 3
INPUTS = "float[B,S,4,8] q, float[B,T,8] k, float[B,T,6] v, float[B,S,T] i"
MORE = "bool[B,S,3] m, int64[B,S,3] given, bool[4,3] h"
START = (
    "first = Constant<value=int64 {0}>() one = Constant<value=int64 {1}>() k3 = Constant<value=int64[1] {3}>() "
    "a0 = Constant<value=int64[1] {0}>() a1 = Constant<value=int64[1] {1}>() a2 = Constant<value=int64[1] {2}>() "
    "a3 = Constant<value=int64[1] {3}>() last = Constant<value=int64[1] {-1}>() six = Constant<value=int64 {6}>() "
    "low = Constant<value=float {-inf}>() least = Constant<value=float {-3.4028234663852886e38}>() "
    "zero = Constant<value=float {0.0}>() ones3 = Constant<value=int64[3] {1, 1, 1}>() "
    "sb = Shape<start=0, end=1>(i) ss = Shape<start=1, end=2>(i) sk = Shape<start=2, end=3>(i) "
    "nb = Squeeze(sb, a0) ns = Squeeze(ss, a0) nt = Squeeze(sk, a0) "
    "width = Constant<value=int64[1] {8}>() vwidth = Constant<value=int64[1] {6}>() "
)
TOP = "vals, idx = TopK<axis=-1>(i, k3) "
ROWS = "rs = Range(first, ns, one) r1 = Unsqueeze(rs, last) "
BATCHES = "bs = Range(first, nb, one) apart = Constant<value=int64[3] {-1, 1, 1}>() b3 = Reshape(bs, apart) "

# Each takes the list {idx} [B,S,3] and gives kg [B,S,3,8] and vg [B,S,3,6].
GATHERS = {
    "elements": "k4 = Unsqueeze(k, a1) v4 = Unsqueeze(v, a1) ke = Concat<axis=0>(sb, ss, sk, width) "
    "ve = Concat<axis=0>(sb, ss, sk, vwidth) kx = Expand(k4, ke) vx = Expand(v4, ve) i4 = Unsqueeze({idx}, last) "
    "kl = Concat<axis=0>(sb, ss, a3, width) vl = Concat<axis=0>(sb, ss, a3, vwidth) "
    "ki = Expand(i4, kl) vi = Expand(i4, vl) kg = GatherElements<axis=2>(kx, ki) vg = GatherElements<axis=2>(vx, vi) ",
    "elements_of_rows": "flat = Constant<value=int64[3] {{0, -1, 1}}>() i3 = Reshape({idx}, flat) "
    "kw = Constant<value=int64[3] {{1, 1, 8}}>() vw = Constant<value=int64[3] {{1, 1, 6}}>() "
    "ki = Expand(i3, kw) vi = Expand(i3, vw) kf = GatherElements<axis=1>(k, ki) vf = GatherElements<axis=1>(v, vi) "
    "kl = Concat<axis=0>(sb, ss, a3, width) vl = Concat<axis=0>(sb, ss, a3, vwidth) "
    "kg = Reshape(kf, kl) vg = Reshape(vf, vl) ",
    "places": BATCHES + "shape = Shape({idx}) be = Expand(b3, shape) bu = Unsqueeze(be, last) "
    "iu = Unsqueeze({idx}, last) at = Concat<axis=-1>(bu, iu) kg = GatherND(k, at) vg = GatherND(v, at) ",
    "places_of_a_batch": "iu = Unsqueeze({idx}, last) kg = GatherND<batch_dims=1>(k, iu) "
    "vg = GatherND<batch_dims=1>(v, iu) ",
    "flat": BATCHES + "off = Mul(b3, nt) at = Add({idx}, off) long = Reshape(at, last) "
    "k2 = Constant<value=int64[2] {{-1, 8}}>() v2 = Constant<value=int64[2] {{-1, 6}}>() "
    "kt = Reshape(k, k2) vt = Reshape(v, v2) kf = Gather<axis=0>(kt, long) vf = Gather<axis=0>(vt, long) "
    "kl = Concat<axis=0>(sb, ss, a3, width) vl = Concat<axis=0>(sb, ss, a3, vwidth) "
    "kg = Reshape(kf, kl) vg = Reshape(vf, vl) ",
    "flat_at_once": BATCHES + "off = Mul(nt, b3) at = Add(off, {idx}) "
    "k2 = Constant<value=int64[2] {{-1, 8}}>() v2 = Constant<value=int64[2] {{-1, 6}}>() "
    "kt = Reshape(k, k2) vt = Reshape(v, v2) kg = Gather(kt, at) vg = Gather(vt, at) ",
}
LISTS = {
    "plain": "{top}",
    "narrow": "{top} n = Cast<to=6>(idx) n64 = Cast<to=7>(n) ",
    "modulo": "{top} n64 = Mod(idx, nt) ",
    "wrapped": "{top} neg = Less(idx, first) up = Add(idx, nt) n64 = Where(neg, up, idx) ",
    "clipped": "{top} n64 = Max(idx, first) ",
}
MASKS = {
    "none": "x = Identity(s) ",
    "future": ROWS + "f = Greater(idx, r1) u = Unsqueeze(f, a2) x = Where(u, low, s) ",
    "given": "u = Unsqueeze(m, a2) x = Where(u, low, s) ",
    "given_and_zeroed": "u = Unsqueeze(m, a2) c = Where(u, low, s) x = Identity(c) ",
    "added": ROWS + "f = Greater(idx, r1) e = Or(f, m) b = Where(e, low, zero) u = Unsqueeze(b, a2) x = Add(s, u) ",
}
SCORES = {
    "products": "kt4 = Transpose<perm=[0,1,3,2]>(kg) s0 = MatMul(q, kt4) s = Mul(s0, scale) {mask} "
    "p = Softmax<axis=-1>(x) {guard} y = MatMul(pg, vg) ",
    "sums": 's0 = Einsum<equation="bshd,bskd->bshk">(q, kg) s = Mul(s0, scale) {mask} '
    'p = Softmax<axis=-1>(x) {guard} y = Einsum<equation="bshk,bske->bshe">(pg, vg) ',
    "query_scaled": 'qs = Mul(q, scale) s = Einsum<equation="bshd,bskd->bshk">(qs, kg) {mask} '
    'p = Softmax<axis=-1>(x) {guard} y = Einsum<equation="bshk,bske->bshe">(pg, vg) ',
}
GUARDS = {
    "none": "pg = Identity(p) ",
    "nan": "isn = IsNaN(p) pg = Where(isn, zero, p) ",
}


@dataclass(frozen=True)
class Spelling:
    gather: str = "elements"
    list: str = "plain"
    mask: str = "none"
    scores: str = "products"
    guard: str = "none"

    @property
    def body(self) -> str:
        listed = LISTS[self.list].replace("{top}", TOP)
        idx = "idx" if self.list == "plain" else "n64"
        gathers = GATHERS[self.gather].replace("{idx}", idx).replace("{{", "{").replace("}}", "}")
        scores = SCORES[self.scores].replace("{mask}", MASKS[self.mask]).replace("{guard}", GUARDS[self.guard])
        return START + "scale = Constant<value=float {0.25}>() " + listed + gathers + scores


def model(body: str, sizes: tuple[str, str, str] = ("B", "S", "T")) -> onnx.ModelProto:
    texts = [INPUTS, MORE, "float[B,S,4,6] y"]
    for name, size in zip("BST", sizes, strict=True):
        texts = [
            text.replace(f"[{name},", f"[{size},").replace(f",{name},", f",{size},").replace(f",{name}]", f",{size}]")
            for text in texts
        ]
    return parse(body, texts[1], inputs=texts[0], outputs=texts[2], opset=18)


def feeds(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    mask = rng.random((B, S, K)) < 0.4
    mask[0, 0] = True
    normal = {
        name: rng.standard_normal(shape).astype(np.float32)
        for name, shape in {"q": (B, S, H, D), "k": (B, T, D), "v": (B, T, E)}.items()
    }
    normal["q"][1, 1, 0, 0], normal["q"][1, 2, 1, 0] = np.nan, np.inf
    ranks = rng.integers(0, 3, (B, S, T)).astype(np.float32)
    ranks[:, np.arange(S), np.arange(S)] += 9  # each row lists its own key
    return normal | {"i": ranks, "m": mask, "given": rng.integers(-T, T, (B, S, K)), "h": rng.random((H, K)) < 0.3}


def check(
    body: str, seed: int = 0, assume: list[str] | None = None, sizes: tuple[str, str, str] = ("B", "S", "T")
) -> str:
    """The operator it became, after comparing the results, rows whose slots are all masked included."""
    proto = model(body, sizes)
    result, report = fused(proto, assume=assume or [])
    values = {name: array for name, array in feeds(seed).items() if name in {each.name for each in proto.graph.input}}
    assert_same(run(result, values)[0], run(proto, values)[0], 1e-5)
    (block,) = report.blocks
    return str(block.op)


@pytest.mark.parametrize("gather", GATHERS)
@pytest.mark.parametrize("mask", MASKS)
def test_gathered_keys_become_a_list(gather: str, mask: str) -> None:
    assert check(Spelling(gather, mask=mask).body, seed=1) == "SparseFlashAttention"


COMBINATIONS = pairwise(
    *map(list, (GATHERS, LISTS, MASKS, SCORES, GUARDS)),
    [("B", "S", "T"), ("2", "5", "7"), ("B", "5", "7"), ("2", "S", "T")],
)


@pytest.mark.parametrize("number", range(len(COMBINATIONS)))
def test_in_any_combination(number: int) -> None:
    *spelling, sizes = COMBINATIONS[number]
    assert check(Spelling(*spelling).body, number, sizes=sizes) == "SparseFlashAttention"


def test_a_guard_in_a_run_without_rows() -> None:
    proto = model(Spelling("places", guard="nan", mask="future").body)
    result, report = fused(proto)
    assert report.blocks[0].op == "SparseFlashAttention"
    values = {name: each[:, :0] if name in ("q", "i") else each for name, each in feeds(0).items()}
    values = {each.name: values[each.name] for each in proto.graph.input}
    assert_same(run(result, values)[0], run(proto, values)[0], 0)


def test_nothing_gathered_is_left() -> None:
    for gather in GATHERS:
        result, _ = fused(model(Spelling(gather, mask="future").body))
        left = {node.op_type for node in result.graph.node}
        assert not left & {"GatherElements", "GatherND", "MatMul", "Softmax", "FlashAttentionScore"}


GIVEN = Spelling().body.replace(TOP, "idx = Identity(given) ")

AT = (
    BATCHES
    + "shape = Shape(idx) be = Expand(b3, shape) bu = Unsqueeze(be, last) iu = Unsqueeze(idx, last) "
    + ("at = Concat<axis=-1>(bu, iu) ")
)
MASKED = "x0 = Mul(s, half) " + ROWS + "f = Greater(idx, r1) u = Unsqueeze(f, a2) x = Where(u, low, x0) "
ATTEND = 'p = Softmax<axis=-1>(x) y = Einsum<equation="bshk,bske->bshe">(p, vg) '
LATENTS = {
    "two_products": "kg = GatherND(k, at) eg = GatherND(e, at) vg = Identity(kg) "
    's1 = Einsum<equation="bshd,bskd->bshk">(q, kg) s2 = Einsum<equation="bshd,bskd->bshk">(qe, eg) s = Add(s1, s2) ',
    "one_of_both": "both = Concat<axis=-1>(k, e) bg = GatherND(both, at) vg = Slice(bg, a0, width, last) "
    'qb = Concat<axis=-1>(q, qe) s = Einsum<equation="bshd,bskd->bshk">(qb, bg) ',
    "both_split": "both = Concat<axis=-1>(k, e) bg = GatherND(both, at) vg, eg = Split<axis=-1>(bg, parts) "
    's1 = Einsum<equation="bshd,bskd->bshk">(q, vg) s2 = Einsum<equation="bshd,bskd->bshk">(qe, eg) s = Add(s2, s1) ',
}


@pytest.mark.parametrize("name", LATENTS)
def test_keys_and_values_of_one_latent(name: str) -> None:
    numbers = "half = Constant<value=float {0.5}>() parts = Constant<value=int64[2] {8, 4}>() "
    body = START + numbers + TOP + AT + LATENTS[name] + MASKED + ATTEND
    proto = parse(
        body,
        "float[B,S,4,4] qe, float[B,T,4] e",
        inputs=INPUTS.replace("float[B,T,6] v, ", ""),
        outputs="float[B,S,4,8] y",
        opset=18,
    )
    result, report = fused(proto)
    rng = np.random.default_rng(5)
    values = {name: array for name, array in feeds(5).items() if name in "qki"}
    values |= {"qe": rng.standard_normal((B, S, H, 4)).astype(np.float32)}
    values |= {"e": rng.standard_normal((B, T, 4)).astype(np.float32)}
    assert_same(run(result, values)[0], run(proto, values)[0], 1e-5)
    assert [block.op for block in report.blocks] == ["SparseFlashAttention"]
    assert "GatherND" not in {node.op_type for node in result.graph.node}


def test_entries_that_are_merely_given() -> None:
    """Negative ones count from the end, and more of them than there are keys would be cut: the sizes have to tell."""
    assert check(GIVEN, sizes=("B", "S", "7")) == "SparseFlashAttention"
    assert check(GIVEN) == "FlashAttentionScore"


LEFT = {
    "a_mean_of_slots": Spelling(mask="given").body.replace("low, s)", "least, s)"),
    "a_mask_for_each_head": Spelling().body.replace("x = Identity(s) ", "x = Where(h, low, s) "),
    "a_bias_on_the_slots": Spelling().body.replace("x = Identity(s) ", "b = Unsqueeze(vals, a2) x = Add(s, b) "),
    "other_lists_for_values": Spelling().body.replace(
        "vi = Expand(i4, vl)", "other = Neg(idx) o4 = Unsqueeze(other, last) vi = Expand(o4, vl)"
    ),
    "a_place_too_far": Spelling("places").body.replace(
        "bu = Unsqueeze(be, last)", "bc = Sub(nb, one) bd = Sub(bc, be) bu = Unsqueeze(bd, last)"
    ),
    "steps_of_another_length": Spelling("flat").body.replace("off = Mul(b3, nt)", "off = Mul(b3, ns)"),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_no_list_is_gathered(name: str) -> None:
    assert check(LEFT[name], seed=2) == "FlashAttentionScore"


def test_a_list_along_an_axis_that_the_ranks_lack() -> None:
    """No run of the model ends. The ONNX checker accepts it beside an operator that it does not know."""
    damaged = model(Spelling().body)
    next(node for node in damaged.graph.node if node.op_type == "TopK").attribute[0].i = 3
    report = fuse(ir.from_proto(damaged), Options("ort"))
    assert [block.op for block in report.blocks] == ["FlashAttentionScore"]


def test_a_mean_of_slots_may_be_assumed_away() -> None:
    body = Spelling(mask="future").body.replace("low, s)", "least, s)")
    (line,) = fused(model(body))[1].missed
    assert "not selected" in line and "--assume no-empty-rows" in line
    assert check(body, assume=["no-empty-rows"]) == "SparseFlashAttention"


SHIFT = "past = Sub(nt, ns) late = Add(r1, past) "
INDEX = (
    'dots = Einsum<equation="bshd,btd->bsht">(iq, ik) r0 = Relu(dots) w4 = Unsqueeze(w, last) parts = Mul(r0, w4) '
    "i = ReduceSum<keepdims=0>(parts, a2) "
)
FUTURE = "ks = Range(first, nt, one) k0 = Unsqueeze(ks, a0) future = Greater(k0, late) ranked = Where(future, low, i) "
SLOTS = {
    "greater": "f = Greater(idx, late) ",
    "less": "f = Less(late, idx) ",
    "not_seen": "seen = LessOrEqual(idx, late) f = Not(seen) ",
    "at_least": "more = Add(late, one) f = GreaterOrEqual(idx, more) ",
    "cast": "n = Cast<to=6>(idx) l = Cast<to=6>(late) f = Greater(n, l) ",
}
NO_SLOTS = {
    "one_more": "f = GreaterOrEqual(idx, late) ",
    "one_less": "less = Add(late, one) f = Greater(idx, less) ",
    "the_other_half": "f = LessOrEqual(idx, late) ",
    "another_row": "f = Greater(idx, past) ",
    "given": "f = Identity(m) ",
}


def indexed(slots: str, ranked: bool = True, gather: str = "places") -> tuple[list[str], list[str]]:
    """The operators it became with the assumption, after comparing the results."""
    sizes = START.replace("(i)", "(m3)")
    top = TOP.replace("(i,", "(ranked,")
    masks = FUTURE if ranked else "ranked = Identity(i) "
    body = sizes + ROWS + SHIFT + INDEX + masks + top + GATHERS[gather].replace("{idx}", "idx").replace("{{", "{")
    scores = SCORES["sums"].replace("{guard}", GUARDS["none"])
    body = (
        body.replace("}}", "}")
        + "scale = Constant<value=float {0.25}>() "
        + scores.replace(
            "{mask}", slots + ("u = Unsqueeze(f, a2) x = Where(u, low, s) " if slots else "x = Identity(s) ")
        )
    )
    more = "float[B,S,3,4] iq, float[B,T,4] ik, float[B,S,3] w, bool[B,S,3] m, float[B,S,T] m3"
    proto = parse(body, more, inputs=INPUTS.replace(", float[B,S,T] i", ""), outputs="float[B,S,4,6] y", opset=18)
    rng = np.random.default_rng(1)
    values = {name: array for name, array in feeds(1).items() if name in "qkvm"}
    values["q"] = np.nan_to_num(values["q"], posinf=0.0)
    shapes = {"iq": (B, S, 3, 4), "ik": (B, T, 4), "w": (B, S, 3), "m3": (B, S, T)}
    values |= {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    given = {each.name for each in proto.graph.input}
    result, report = fused(proto, assume=["close-ranks"])
    values = {name: array for name, array in values.items() if name in given}
    assert_same(run(result, values)[0], run(proto, values)[0], 1e-5)
    return [node.op_type for node in result.graph.node if node.domain == "ascend"], list(report.blocks[0].assumed)


@pytest.mark.parametrize("gather", GATHERS)
@pytest.mark.parametrize("slots", SLOTS)
def test_ranks_become_an_indexer(slots: str, gather: str) -> None:
    assert indexed(SLOTS[slots], gather=gather) == (["LightningIndexer", "SparseFlashAttention"], ["close-ranks"])


def test_ranks_without_masks_become_an_indexer() -> None:
    assert indexed("", ranked=False) == (["LightningIndexer", "SparseFlashAttention"], ["close-ranks"])


@pytest.mark.parametrize("slots", NO_SLOTS)
def test_slots_that_say_something_else_keep_their_list(slots: str) -> None:
    assert indexed(NO_SLOTS[slots]) == (["SparseFlashAttention"], [])


def test_ranks_and_slots_have_to_agree() -> None:
    assert indexed("") == (["SparseFlashAttention"], [])
    assert indexed(SLOTS["greater"], ranked=False) == (["SparseFlashAttention"], [])
