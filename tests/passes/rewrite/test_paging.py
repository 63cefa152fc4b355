"""Keys and values out of pools of blocks by a block table become the pages of IncreFlashAttention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np
import onnx
import pytest

from fa_compiler import reference
from tests.pairs import pairwise
from tests.passes.running import Array, Feeds, assert_same, fused, parse, run

BATCH, PAGES, BLOCK, BLOCKS, SIZE = 2, 3, 32, 7, 8
NONE_EMPTY = ("no-empty-rows",)
TOLERANCE = 2e-6
"""float32 sums of 96 products in another order, relative to the largest result."""

POOLS = {
    "folded": (f"P,{BLOCK},{{h}}", "@r = Reshape(@g, to) @n = Transpose<perm=[0,2,1,3]>(@r) "),
    "tokens first": (f"P,{BLOCK},{{n}},{SIZE}", "@r = Reshape(@g, to) @n = Transpose<perm=[0,2,1,3]>(@r) "),
    "heads first": (f"P,{{n}},{BLOCK},{SIZE}", "@r = Transpose<perm=[0,2,1,3,4]>(@g) @n = Reshape(@r, too) "),
}
"""The shape of a pool, and how gathered blocks become keys. `@` is k or v."""

INDICES = {
    "table": "@x = Gather(@pool, table) ",
    "flattened": "@1 = Reshape(table, flat) @2 = Gather(@pool, @1) @3 = Shape(table) @4 = Shape<start=1>(@pool) "
    "@5 = Concat<axis=0>(@3, @4) @x = Reshape(@2, @5) ",
    "cast": "@1 = Cast<to=7>(table) @x = Gather(@pool, @1) ",
    "slots": "@1 = Cast<to=7>(table) @2 = Unsqueeze(@1, ax2) @3 = Mul(@2, bs) @4 = Range(zero, bs, one) "
    "@5 = Add(@3, @4) @6 = Reshape(@5, rows) @7 = Reshape(@pool, each) @x = Gather(@7, @6) ",
    "given a dimension": "@1 = Unsqueeze(table, ax2) @2 = Gather(@pool, @1) @x = Squeeze(@2, ax2) ",
}

COLUMNS = "ts = Shape<start=1>(table) tm = Squeeze(ts) total = Mul(tm, bs) j = Range(zero, total, one) "
LENGTH = "lu = Unsqueeze(len, ax1) "
MASKS = {
    "less": "keep = Less(j, lu) kb = Unsqueeze(keep, ax12) m = Where(kb, t, low) ",
    "at most": "last = Sub(lu, one) keep = LessOrEqual(j, last) kb = Unsqueeze(keep, ax12) m = Where(kb, t, low) ",
    "shifted": "l2 = Add(lu, two) j2 = Add(j, two) keep = Greater(l2, j2) kb = Unsqueeze(keep, ax12) "
    "m = Where(kb, t, low) ",
    "excluded": "out = GreaterOrEqual(j, lu) kb = Unsqueeze(out, ax12) m = Where(kb, low, t) ",
    "negated": "keep = Less(j, lu) out = Not(keep) kb = Unsqueeze(out, ax12) m = Where(kb, low, t) ",
    "added": "keep = Less(j, lu) kb = Unsqueeze(keep, ax12) fl = Where(kb, nought, low) m = Add(t, fl) ",
    "arithmetic": "keep = Less(j, lu) kb = Unsqueeze(keep, ax12) kf = Cast<to=1>(kb) inv = Sub(unit, kf) "
    "fl = Mul(inv, low) m = Add(t, fl) ",
}
CONSTANTS = (
    "int64 zero={0}, int64 one={1}, int64 two={2}, int64[1] ax1={1}, int64[1] ax2={2}, int64[2] ax12={1,2}, "
    "int64[1] flat={-1}, int64[1] none={0}"
)


@dataclass(frozen=True)
class Paged:
    """One spelling of attention of one token on gathered blocks."""

    pool: str = "folded"
    index: str = "table"
    mask: str = "less"
    infinite: bool = False
    groups: int = 1
    quantised: str = ""
    table: str = "int64"
    real: str = "float"
    axis: int = 0
    """Of the keys' DequantizeLinear, where its scales run along heads and size."""

    def model(
        self, body: str = "", more: str = "", rows: str = "1", block: int = BLOCK, blocks: str = "P", opset: int = 19
    ) -> onnx.ModelProto:
        heads = 2 * self.groups
        shape = POOLS[self.pool][0].format(h=2 * SIZE, n=2)
        kind = "int8" if self.quantised else self.real
        shape = shape.replace(f",{BLOCK},", f",{block},")
        inputs = f"{self.real}[B,{heads},{rows},{SIZE}] q, {kind}[{shape}] kp, {self.table}[B,M] table"
        inputs += f", {kind}[{shape.replace('P', blocks)}] vp"
        inputs += ", int64[B] len" if self.mask else ""
        low = "-inf" if self.infinite else "-3.4e38"
        numbers = {"low": low, "c": "0.3", "nought": "0", "unit": "1"}
        half = self.real == "float16"
        own = ", ".join(f"float {name}{'f' * half}={{{number}}}" for name, number in numbers.items())
        own += f", float[1,2,1,1] bias={{1,-1}}, int64 bs={{{block}}}, int64[4] to={{0,-1,2,{SIZE}}}"
        own += f", int64[4] too={{0,2,-1,{SIZE}}}, int64[5] rep={{1,1,{self.groups},1,1}}"
        each = f"{{-1,{2 * SIZE}}}" if self.pool == "folded" else f"{{-1,2,{SIZE}}}"
        own += f", int64[2] rows={{0,-1}}, int64[{2 + (self.pool != 'folded')}] each={each}"
        own += f", int64[4] rs={{0,{heads},-1,{SIZE}}}"
        if self.axis:
            numbers = ",".join(str(0.01 + 0.001 * n) for n in range(2 * SIZE))
            own += f", float[{2 * SIZE}] ks={{{numbers}}}, int8[{2 * SIZE}] kz={{{'3,-1,' * (SIZE - 1)}0,1}}"
        else:
            own += ", float ks={0.02}, int8 kz={3}"
        own += ", float vs={0.03}, int8 vz={-5}"
        body = body or self.body
        return parse(
            "".join(f"{name} = Cast<to=10>({name}f) " for name in numbers) + body if half else body,
            more,
            inputs=inputs,
            outputs=f"{self.real}[B,{heads},{rows},{SIZE}] y",
            initializers=f"<{CONSTANTS}, {own}>",
            opset=opset,
        )

    @property
    def body(self) -> str:
        text = self._cache("k") + self._cache("v")
        text += "kt = Transpose<perm=[0,1,3,2]>(k) s = MatMul(q, kt) t = Mul(s, c) "
        text += COLUMNS + LENGTH + MASKS[self.mask] if self.mask else "m = Identity(t) "
        return text + "p = Softmax<axis=-1>(m) y = MatMul(p, v)"

    def _cache(self, name: str) -> str:
        dequantise = "DequantizeLinear({}, @s, @z) "
        text = f"@pool = {dequantise.format('@p')}" if self.quantised == "before" else "@pool = Identity(@p) "
        text += INDICES[self.index]
        text += f"@g = {dequantise.format('@x')}" if self.quantised == "behind" else "@g = Identity(@x) "
        text += POOLS[self.pool][1]
        text += (
            "@u = Unsqueeze(@n, ax2) @e = Expand(@u, rep) @ = Reshape(@e, rs) "
            if self.groups > 1
            else "@ = Identity(@n) "
        )
        if self.axis and name == "k":
            text = text.replace("DequantizeLinear", f"DequantizeLinear<axis={self.axis}>")
        return text.replace("@", name)

    def feeds(self, seed: int = 0, lengths: tuple[int, ...] = (40, 96)) -> dict[str, Array]:
        """Blocks in any order, unused entries negative, and used ones, too: those count from the end."""
        rng = np.random.default_rng(seed)
        shape = {"folded": (BLOCK, 2 * SIZE), "tokens first": (BLOCK, 2, SIZE), "heads first": (2, BLOCK, SIZE)}
        pools = [rng.normal(size=(BLOCKS, *shape[self.pool])).astype(np.float32) for _ in "kv"]
        if self.quantised:
            pools = [rng.integers(-128, 128, pool.shape).astype(np.int8) for pool in pools]
        table = rng.integers(-BLOCKS, BLOCKS, (BATCH, PAGES)).astype(self.table)
        feeds: dict[str, Array] = {"kp": pools[0], "vp": pools[1], "table": table}
        feeds["q"] = rng.normal(size=(BATCH, 2 * self.groups, 1, SIZE)).astype(np.float32)
        return feeds | ({"len": np.array(lengths, np.int64)} if self.mask else {})


def operators(model: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node]


def check(before: onnx.ModelProto, after: onnx.ModelProto, feeds: Feeds) -> None:
    """The kernel and the reference give what the original gave."""
    wanted = run(before, feeds)
    for results in (run(after, feeds), reference.evaluator(after).run(None, dict(feeds))):
        for got, want in zip(results, wanted, strict=True):
            assert_same(cast(Array, got), want, TOLERANCE)


LENGTHS = ((1, 120), (96, 33), (32, 97), (64, 31), (5, 2))
"""Around the edges of blocks, and beyond the last one."""
CASES = [
    (
        Paged(
            # Slots of a pool that has heads before tokens are no rows, and an infinity times 0 is NaN.
            "folded" if (pool, index) == ("heads first", "slots") else pool,
            index,
            mask,
            infinite and mask != "arithmetic",
            groups,
            table=table,
        ),
        lengths,
    )
    for pool, index, mask, infinite, groups, table, lengths in pairwise(
        list(POOLS), list(INDICES), ["", *MASKS], [False, True], [1, 3], ["int32", "int64"], LENGTHS
    )
]


@pytest.mark.parametrize("number", range(len(CASES)))
def test_every_spelling_reads_pages(number: int) -> None:
    case, lengths = CASES[number]
    model = case.model()
    after, report = fused(model, "ort", NONE_EMPTY)
    (block,) = report.blocks
    assert (block.op, block.mask) == ("IncreFlashAttention", "pages+lengths" if case.mask else "pages"), report.missed
    assert not {"MatMul", "Expand", "Transpose"} & set(operators(after))
    check(model, after, case.feeds(number, lengths))


@pytest.mark.parametrize("quantised", ["before", "behind"])
@pytest.mark.parametrize("pool", POOLS)
def test_int8_pools_are_read_as_they_are(pool: str, quantised: str) -> None:
    case = Paged(pool, "flattened", quantised=quantised, groups=3)
    model = case.model()
    after, _ = fused(model, "ort", NONE_EMPTY)
    assert "IncreFlashAttention" in operators(after)
    assert "DequantizeLinear" not in operators(after)
    check(model, after, case.feeds())


@pytest.mark.parametrize(("quantised", "axis"), [("before", 2), ("behind", 3)])
def test_pools_of_scales_by_channel(quantised: str, axis: int) -> None:
    case = Paged(quantised=quantised, axis=axis, groups=3)
    model = case.model()
    after, report = fused(model, "ort", NONE_EMPTY)
    assert "DequantizeLinear" not in operators(after), report.missed
    check(model, after, case.feeds())


def test_lengths_beyond_the_pages_or_below_zero_count_as_all_or_none() -> None:
    """A mask is merely true everywhere then, or false; a selection behind the softmax says that such rows are 0."""
    case = Paged()
    zeroed = "p1 = Softmax<axis=-1>(m) p = Where(kb, p1, nought) y = MatMul(p, v)"
    model = case.model(case.body.replace("p = Softmax<axis=-1>(m) y = MatMul(p, v)", zeroed))
    after, report = fused(model)
    assert report.blocks[0].mask == "pages+lengths", report.missed
    for lengths in ((-3, 97), (0, 2**62), (-(2**62), 1)):
        check(model, after, case.feeds(lengths=lengths))


def test_an_entry_without_keys_stays_nan() -> None:
    case = Paged(infinite=True, groups=3)
    model = case.model()
    after, report = fused(model)
    assert report.blocks[0].mask == "pages+lengths", report.missed
    for lengths in ((0, 96), (-1, 0), (33, 40)):
        check(model, after, case.feeds(lengths=lengths))


WINDOW = "keep0 = Less(j, lu) su = Sub(lu, two) after = GreaterOrEqual(j, su) keep = And(keep0, after) "


def test_what_else_a_mask_says_stays_a_mask() -> None:
    case = Paged()
    model = case.model(case.body.replace("keep = Less(j, lu) ", WINDOW))
    after, report = fused(model, "ort", ("masks-dominate", *NONE_EMPTY))
    assert report.blocks[0].mask == "pages+lengths+atten_mask", report.missed
    check(model, after, case.feeds())


def test_an_entry_without_keys_may_have_the_mean_of_all_values() -> None:
    """The lengths are no such then, but a mask, which gives that."""
    case = Paged(groups=3)
    model = case.model()
    after, report = fused(model, "ort", ("masks-dominate",))
    assert report.blocks[0].mask == "pages+atten_mask", report.missed
    check(model, after, case.feeds(lengths=(0, 33)))


def test_ascend_takes_pages_and_lengths() -> None:
    case = Paged("heads first", groups=3, infinite=True, real="float16")
    model = case.model()
    after, report = fused(model, "ascend")
    assert report.blocks[0].mask == "pages+lengths", report.missed
    for lengths in ((40, 96), (0, 33)):
        given = case.feeds(lengths=lengths)
        feeds = {name: each.astype(np.float16) if each.dtype == np.float32 else each for name, each in given.items()}
        assert_same(run(after, feeds)[0], run(model, feeds)[0], 2e-3)  # float16 probabilities in the original


NEAR_MISSES: dict[str, tuple[tuple[str, ...], tuple[str, str], str]] = {
    "an entry may be without keys": ((), ("", ""), "an entry of length 0 would give 0"),
    "two tables": (NONE_EMPTY, ("vx = Gather(vpool, table)", "vx = Gather(vpool, other)"), "two block tables"),
    "values are not gathered": (NONE_EMPTY, ("v = Identity(vn)", "v = Tanh(vn)"), "values are not"),
    "lengths on an Or": (
        NONE_EMPTY,
        ("keep = Less(j, lu) ", "keep0 = Less(j, lu) first = Less(j, one) keep = Or(keep0, first) "),
        "the operator gives masked keys the score",
    ),
    "every second key": (
        NONE_EMPTY,
        ("keep = Less(j, lu) ", "jj = Mul(j, two) keep = Less(jj, lu) "),
        "the operator gives masked keys the score",
    ),
    "lengths of a larger batch": (
        NONE_EMPTY,
        (
            "keep = Less(j, lu) ",
            "more = Concat<axis=0>(len, len) mu = Unsqueeze(more, ax1) all = Less(j, mu) bn = Shape<end=1>(len) "
            "keep = Slice(all, none, bn, none) ",
        ),
        "the operator gives masked keys the score",
    ),
    "the length of the first entry": (
        NONE_EMPTY,
        ("keep = Less(j, lu) ", "all = Less(j, lu) keep = Slice(all, none, ax1, none) "),
        "the operator gives masked keys the score",
    ),
    "a bias beside a mask": (
        (*NONE_EMPTY, "masks-dominate"),
        ("keep = Less(j, lu) ", WINDOW),
        "a bias beside its mask",
    ),
    "an unknown number of queries": (NONE_EMPTY, ("", ""), "--assume decode"),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_other_caches_are_gathered_and_the_report_says_why(name: str) -> None:
    assume, (old, new), reason = NEAR_MISSES[name]
    case = Paged()
    body = case.body.replace(old, new) if old else case.body
    if "bias" in name:
        body = body.replace("t = Mul(s, c)", "t0 = Mul(s, c) t = Add(t0, bias)")
    model = case.model(body, "int64[B,M] other", rows="S" if "queries" in name else "1")
    after, report = fused(model, "ort", assume)
    assert report.blocks[0].op == "FlashAttentionScore", report.blocks[0].reason
    assert any(reason in line for line in report.missed), report.missed
    other = np.random.default_rng(1).integers(0, BLOCKS, (BATCH, PAGES))
    check(model, after, case.feeds() | {"other": other})


def test_blocks_that_the_operator_does_not_take() -> None:
    case = Paged()
    model = case.model(block=8)
    after, report = fused(model, "ort", NONE_EMPTY)
    assert report.blocks[0].op == "FlashAttentionScore"
    assert any("block_size is 8" in line for line in report.missed), report.missed
    feeds = case.feeds(lengths=(5, 24))
    check(model, after, feeds | {name: feeds[name][:, :8] for name in ("kp", "vp")})


def test_pools_that_may_differ_in_size_are_gathered() -> None:
    """Indices from the end mean other blocks then."""
    case = Paged()
    model = case.model(blocks="R")
    after, report = fused(model, "ort", NONE_EMPTY)
    assert any("different numbers of blocks" in line for line in report.missed), report.missed
    feeds = case.feeds()
    feeds["vp"] = np.concatenate([feeds["vp"], feeds["vp"][:1]])
    check(model, after, feeds)


def quantised_behind(
    scale: str, point: str = "int8 yz={0}", kind: str = "int8", args: str = "y0, ys, yz"
) -> onnx.ModelProto:
    """Pages, and a QuantizeLinear of the result."""
    case = Paged()
    text = onnx.printer.to_text(case.model(case.body.replace("y = MatMul(p, v)", "y0 = MatMul(p, v) y = Identity(y0)")))
    text = text.replace("y = Identity (y0)", f"y = QuantizeLinear({args})")
    text = text.replace("=> (float[", f"=> ({kind}[").replace(
        "<int64 zero", f"<float ys={{{scale}}}, {point}, int64 zero"
    )
    return onnx.parser.parse_model(text)


@pytest.mark.parametrize("scale", ["0.0625", "1", "0.00390625"])
def test_results_are_quantised_by_powers_of_two(scale: str) -> None:
    """With one key in each entry the result is a value itself: ties go to even, and what is too large saturates."""
    model = quantised_behind(scale)
    after, report = fused(model, "ort", NONE_EMPTY)
    assert "QuantizeLinear" not in operators(after), report.missed
    case = Paged()
    feeds = case.feeds(lengths=(1, 1))
    ties = np.arange(-140, 140, 0.5, dtype=np.float32) * np.float32(scale)
    for start in range(0, len(ties), 2 * SIZE):
        part = ties[start : start + 2 * SIZE]
        feeds["vp"] = np.broadcast_to(part, feeds["vp"].shape).copy()
        (got,), (wanted,) = run(after, feeds), run(model, feeds)
        assert got.dtype == np.int8
        np.testing.assert_array_equal(got, wanted)
    many = case.feeds(lengths=(40, 96))
    many["q"][0, 1, 0, 2] = np.nan
    np.testing.assert_array_equal(run(after, many)[0], run(model, many)[0])
    np.testing.assert_array_equal(reference.evaluator(after).run(None, dict(many))[0], run(model, many)[0])


ROUNDINGS = {
    "a scale that has no exact reciprocal": (("0.1",), "1 / 0.1 is not exact"),
    "a zero point": (("0.5", "int8 yz={3}"), "the operator adds the zero point before it rounds"),
    "uint8": (("0.5", "uint8 yz={0}", "uint8"), "not quantised to int8"),
}


@pytest.mark.parametrize("name", ROUNDINGS)
def test_other_roundings_stay_behind_the_attention(name: str) -> None:
    given, reason = ROUNDINGS[name]
    model = quantised_behind(*given)
    after, report = fused(model, "ort", NONE_EMPTY)
    assert report.blocks[0].op == "IncreFlashAttention"
    assert operators(after)[-1] == "QuantizeLinear"
    assert any(reason in line for line in report.missed), report.missed
    feeds = Paged().feeds()
    np.testing.assert_array_equal(run(after, feeds)[0], run(model, feeds)[0])


@pytest.mark.parametrize("pool", POOLS)
def test_an_attention_op_reads_pages(pool: str) -> None:
    """ai.onnx Attention with nonpad_kv_seqlen: an entry without keys gives 0 there, too."""
    case = Paged(pool, "flattened")
    caches = case.body.split("kt = ")[0]
    model = case.model(caches + "y = Attention<scale=0.3>(q, k, v, , , , len)", opset=24)
    after, report = fused(model)
    assert [(block.op, block.mask) for block in report.blocks] == [("IncreFlashAttention", "pages+lengths")], (
        report.missed
    )
    for lengths in ((40, 96), (0, 33)):
        check(model, after, case.feeds(lengths=lengths))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Mul(k2, bs)", "Mul(k2, two)"),
        ("k4 = Range(zero, bs, one)", "k8 = Range(zero, bs, one) k4 = Neg(k8)"),
        ("k4 = Range(zero, bs, one)", "k8 = Range(zero, bs, one) k4 = Sub(k8, one)"),
        ("Add(k3, k4)", "Sub(k3, k4)"),
    ],
)
def test_other_slots_are_no_pages(old: str, new: str) -> None:
    """Blocks that overlap, keys in another order or from a token earlier on."""
    case = Paged(index="slots")
    body = case.body.replace(old, new)
    model = case.model(body)
    after, report = fused(model, "ort", NONE_EMPTY)
    assert report.blocks[0].op == "FlashAttentionScore"
    feeds = case.feeds()
    feeds["table"] = np.abs(feeds["table"]) % (BLOCKS - 1) + 1
    check(model, after, feeds)
