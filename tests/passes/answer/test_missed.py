"""What a fused attention could have been: each kind of loss has a line that says why, and its hint helps."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper

from fa_compiler.op_registry.runtimes import Runtime
from fa_compiler.passes import Options, fuse
from fa_compiler.passes.answer.options import Target
from fa_compiler.passes.answer.report import Missed, MissedCode
from tests.passes.masks.test_packing import IDS, SAME_BATCHED
from tests.passes.masks.test_packing import model as packed
from tests.passes.masks.test_structure import CROSS, EXPANDED_FLOATS, FLOAT, SELECT
from tests.passes.masks.test_structure import model as masked
from tests.passes.rewrite.test_paging import Paged, quantised_behind
from tests.passes.running import PRODUCT_PV, PRODUCT_QK, SOFTMAX, assert_same, feeds_of, fused, parse, random_feeds, run
from tests.passes.sparse.test_gathered import Spelling
from tests.passes.sparse.test_gathered import model as gathered
from tests.passes.tape import FLOAT32_MIN, Training, compose

CAUSAL = "m = LessOrEqual(j, i)"
OTHER_SIZE = "n = Shape(ids) r = Squeeze(n) j2 = Range(zero, r, one) j3 = Unsqueeze(j2, first) m = LessOrEqual(j3, i)"
OTHER_PADDING = "bool[C,1,1,U] pad"
WIDE_PADDING = (
    "n = Shape<start=0, end=1>(pad) u = Shape<start=3, end=4>(pad) h = Constant<value=int64[1] {4}>() "
    "full = Concat<axis=0>(n, h, u, u) m = Expand(pad, full)"
)
"""As XLM makes it: the mask alone says how many batch entries and rows there are."""
SMALL = "tenth = Constant<value=float {-1e4}>() f = Where(m, nothing, tenth) x = Add(s, f) "
SUBTRACTED = "tenth = Constant<value=float {1e4}>() f = Where(m, nothing, tenth) x = Sub(s, f) "
SCALED = "w = Mul(s, t) f = Where(m, nothing, low) x = Add(w, f) "
BIASED = "w = Add(s, b) f = Where(m, nothing, low) x = Add(w, f) "
FIXED = "float[2,4,5,8] q, float[2,4,6,8] k, float[2,4,6,8] v"
TURNED = "y0 = MatMul(p, v) y = Transpose<perm=[0,2,1,3]>(y0) "
TILED = "turns = Constant<value=int64[4] {1,2,1,1}>() k = Tile(k0, turns) "
WIDENED = "s1 = Cast<to=1>(s) "
SIXTEEN = "float16[B,4,S,8] q, float16[B,4,T,8] k, float[B,4,T,8] v"
TWICE = "f = Where(m, nothing, low) g = Where(kept, nothing, low) t = Add(f, g) x = Add(s, t) "
PADDED = "c = LessOrEqual(j, i) m = And(c, kept)"
KEPT = "bool[B,1,1,S] kept"


@dataclass(frozen=True)
class Lost:
    """A model that is fused and misses something, words of the reason, and of the hint if there is one."""

    code: MissedCode
    reason: str
    hint: str
    model: Callable[[], onnx.ModelProto]
    options: Options = field(default_factory=Options)

    def missed(self, *assume: str) -> list[Missed]:
        """What the fused block misses if the user vouches for these words, too."""
        options = Options(self.options.target, self.options.soc_version, assume=self.options.assume.union(assume))
        blocks = fuse(ir.from_proto(self.model()), options).blocks
        assert blocks[0].status == "fused", blocks[0].reason
        assert all(not block.missed for block in blocks[1:])
        return [each for each in blocks[0].missed if each.code == self.code]


def for_ascend(*assume: str, product: str | None = None) -> Options:
    return Options("ascend", product, assume=frozenset(assume))


def training_without_keys() -> onnx.ModelProto:
    """Causal from the last key on, and there are fewer keys than rows. The gradient is computed with all rows alike."""
    sizes = {"B": 2, "N": 4, "K": 4, "S": 6, "T": 5, "D": 8, "E": 8}
    case = Training(sizes, symbolic=False, mask="select_const", fill=FLOAT32_MIN, masked_gradient=False)
    model = compose(case).model
    (mask,) = (each for each in model.graph.initializer if each.data_type == onnx.TensorProto.BOOL)
    mask.CopyFrom(numpy_helper.from_array(np.tri(6, 5, -1, np.bool_), mask.name))
    return model


def wider(model: onnx.ModelProto) -> onnx.ModelProto:
    """The same with heads of 16 numbers instead of 8."""
    return onnx.parser.parse_model(onnx.printer.to_text(model).replace(",8]", ",16]"))


DENSE = MissedCode.DENSE_MASK
LOST = {
    "sizes": Lost(
        DENSE,
        "the U columns of 'm' are not proven to be the S keys",
        "--assume same-sizes",
        lambda: masked(OTHER_SIZE, SELECT, more="int64[U] ids"),
    ),
    "a mask that is expanded to its own sizes": Lost(
        DENSE,
        "the U columns of 'm' are not proven to be the S keys",
        "--assume same-sizes",
        lambda: masked(WIDE_PADDING, SELECT, more=OTHER_PADDING),
    ),
    "a mask that is expanded to the scores, and a triangle": Lost(
        DENSE,
        "columns of 'm' are not proven to be the S keys",
        "--assume same-sizes",
        lambda: masked(
            "n = Shape(s) e = Expand(pad, n) c = LessOrEqual(j, i) m = And(e, c)", SELECT, more=OTHER_PADDING
        ),
    ),
    "an input": Lost(
        DENSE,
        "the input 'given' may mask any keys",
        "make it a constant",
        lambda: masked("m = Identity(given)", SELECT, more="bool[S,S] given"),
    ),
    "what is behind the sizes": Lost(
        DENSE,
        "the input 'given' may mask any keys",
        "make it a constant",
        lambda: masked("m = Identity(given)", SELECT, more="bool[S,U] given"),
    ),
    "sizes and a number": Lost(
        DENSE,
        "the U columns of 'f' are not proven to be the S keys of the scores, and it is not proven that a mask constant",
        "--assume same-sizes --assume masks-dominate",
        lambda: masked(OTHER_SIZE, SMALL, more="int64[U] ids"),
    ),
    "an inverted mask": Lost(
        DENSE,
        "it is not proven that every attention mask that is given to the model holds only 0 and 1",
        "--assume binary-masks",
        lambda: masked(
            "second = Constant<value=int64[2] {1,2}>() unit = Constant<value=float {1.0}>() "
            "b1 = Tanh(b) b2 = Add(s, b1) i4 = Unsqueeze(given, second) i5 = Cast<to=1>(i4) i6 = Sub(unit, i5)",
            "f = Mul(i6, low) x = Add(b2, f) ",
            more="int64[B,S] given, float[4,S,S] b",
        ),
    ),
    "a number": Lost(DENSE, "a mask constant such as", "--assume masks-dominate", lambda: masked(CAUSAL, SMALL)),
    "a number that is subtracted": Lost(
        DENSE, "a mask constant such as", "--assume masks-dominate", lambda: masked(CAUSAL, SUBTRACTED)
    ),
    "empty rows": Lost(
        DENSE,
        "no query row is masked everywhere",
        "--assume no-empty-rows",
        lambda: masked(PADDED, FLOAT, more=KEPT),
        for_ascend(),
    ),
    "both": Lost(
        DENSE,
        "outweighs every score, and it is not proven that no query row",
        "--assume masks-dominate --assume no-empty-rows",
        lambda: masked(PADDED, SMALL, more=KEPT),
        for_ascend(),
    ),
    "a factor": Lost(
        DENSE, "a factor of unknown size may outweigh", "mask with -inf", lambda: masked(CAUSAL, SCALED, more="float t")
    ),
    "operands of other sizes": Lost(
        MissedCode.EXPANDED,
        "query, key, value and masks are not proven to have equal batch sizes in every run, so they are copied",
        "--assume same-sizes",
        lambda: parse(
            PRODUCT_QK + SOFTMAX.format("s") + PRODUCT_PV,
            inputs="float[B,4,S,8] q, float[C,4,T,8] k, float[C,4,T,8] v",
            outputs="float[D,4,S,8] y",
        ),
        Options("contrib"),
    ),
    "a bias": Lost(
        DENSE,
        "not proven to be lost beside the mask",
        "",
        lambda: masked(CAUSAL, BIASED, more="float[1,4,1,S] b"),
        for_ascend("no-empty-rows"),
    ),
    "two masks": Lost(
        DENSE,
        "no query row is masked everywhere",
        "--assume no-empty-rows",
        lambda: masked(CAUSAL, TWICE, more=KEPT),
        for_ascend(),
    ),
    "a product": Lost(
        DENSE,
        "310P has no sparse_mode for it: its masks are tensors of all rows and keys",
        "",
        lambda: wider(masked(CAUSAL, SELECT)),
        for_ascend("half-attention", product="310P"),
    ),
    "a gradient": Lost(
        DENSE,
        "a row that is masked everywhere gets a gradient",
        "--assume no-empty-rows",
        training_without_keys,
    ),
    "an operator": Lost(
        DENSE,
        "which keys a row sees depends on numbers of the run",
        "",
        lambda: parse("y = Attention(q, k, v, m)", "float[S,T] m", opset=23),
    ),
    "a window": Lost(
        DENSE,
        "its window stands beside a mask",
        "",
        lambda: parse("y = Attention<is_causal=1>(q, k, v, m)", "bool[S,T] m", opset=23),
    ),
    "an operator with a bias": Lost(
        DENSE,
        "a bias may be as low as the causal mask",
        "--assume no-empty-rows",
        lambda: parse(
            "y = com.microsoft.MultiHeadAttention<num_heads=4, unidirectional=1>(q, k, v, , , b)",
            "float[B,4,S,S] b",
            inputs="float[B,S,32] q, float[B,S,32] k, float[B,S,32] v",
            outputs="float[B,S,32] y",
        ),
        Options(assume=frozenset(["masks-dominate"])),
    ),
    "expanded": Lost(
        MissedCode.EXPANDED_MASK,
        "48 bytes are added",
        "",
        lambda: parse(
            PRODUCT_QK + "f = Constant<value=float {-inf}>() x = Where(m, s, f) " + SOFTMAX.format("x") + PRODUCT_PV,
            "bool[2,1,1,6] m",
            inputs=FIXED,
            outputs="float[2,4,5,8] y",
        ),
        for_ascend("no-empty-rows"),
    ),
    "heads among the rows": Lost(
        MissedCode.EXPANDED_MASK,
        "the mask has only some of them",
        "",
        lambda: parse(
            "kt = Transpose<perm=[0,2,1]>(k) s3 = MatMul(q, kt) four = Constant<value=int64[4] {2,5,4,6}>() "
            "s = Reshape(s3, four) f = Constant<value=float {-inf}>() x = Where(m, s, f) "
            + SOFTMAX.format("x")
            + "three = Constant<value=int64[3] {2,20,6}>() p3 = Reshape(p, three) y = MatMul(p3, v)",
            "bool[2,5,1,6] m",
            inputs="float[2,20,8] q, float[2,6,8] k, float[2,6,8] v",
            outputs="float[2,20,8] y",
        ),
    ),
    "labels": Lost(
        MissedCode.NOT_PACKED,
        "not proven unbroken",
        "--assume unbroken-sequences",
        lambda: packed("label = Identity(ids) " + SAME_BATCHED, IDS),
    ),
    "labels on a product": Lost(
        MissedCode.NOT_PACKED,
        "the product needs the ends",
        "",
        lambda: packed("label = Identity(ids) " + SAME_BATCHED, IDS),
        for_ascend(),
    ),
    "transposed": Lost(
        MissedCode.COPIES,
        "the model holds result in another order than the layout BNSD: 32*B*S elements are copied",
        "alike",
        lambda: parse(
            PRODUCT_QK + SOFTMAX.format("s") + TURNED, inputs=CROSS.replace("T", "S"), outputs="float[B,S,4,8] y"
        ),
    ),
    "new rows beside a cache": Lost(
        MissedCode.COPIES,
        "32*B*S elements are copied; keys and values, which may be more, are read where they are",
        "",
        lambda: parse(PRODUCT_QK + SOFTMAX.format("s") + TURNED, outputs="float[B,S,4,8] y"),
    ),
    "repeated": Lost(
        MissedCode.REPEATED_HEADS,
        "key has fewer heads than value",
        "",
        lambda: parse(
            TILED + PRODUCT_QK + SOFTMAX.format("s") + PRODUCT_PV,
            inputs="float[B,4,S,8] q, float[B,2,T,8] k0, float[B,4,T,8] v",
        ),
    ),
    "widened": Lost(
        MissedCode.WIDE,
        "query and key are of 16 bits, value of 32",
        "one 16-bit type",
        lambda: parse(PRODUCT_QK + WIDENED + SOFTMAX.format("s1") + PRODUCT_PV, inputs=SIXTEEN),
    ),
    "pages": Lost(MissedCode.GATHERED_PAGES, "an entry of length 0", "--assume no-empty-rows", Paged().model),
    "float32": Lost(
        MissedCode.NOT_INCRE,
        "expected DT_FLOAT16 or DT_BF16",
        "convert the model to float16",
        lambda: parse(
            PRODUCT_QK + SOFTMAX.format("s") + PRODUCT_PV, inputs=CROSS.replace("S", "1"), outputs="float[B,4,1,8] y"
        ),
        for_ascend(),
    ),
    "quantised": Lost(
        MissedCode.QUANTIZED_OUTPUT,
        "1 / 0.1 is not exact",
        "",
        lambda: quantised_behind("0.1"),
        Options(assume=frozenset(["no-empty-rows"])),
    ),
    "selected": Lost(
        MissedCode.NOT_SELECTED,
        "whose slots are all masked",
        "--assume no-empty-rows",
        lambda: gathered(Spelling(mask="future").body.replace("low, s)", "least, s)")),
    ),
}


def test_every_code_is_provoked() -> None:
    assert {lost.code for lost in LOST.values()} == set(MissedCode)


@pytest.mark.parametrize("name", LOST)
def test_a_loss_is_named_and_its_hint_helps(name: str) -> None:
    lost = LOST[name]
    (missed,) = lost.missed()
    assert lost.reason in missed.reason
    assert missed.culprit
    assert lost.hint in (missed.hint or "") and bool(lost.hint) == bool(missed.hint)
    if words := re.findall(r"--assume (\S+)", missed.hint or ""):
        assert not lost.missed(*words)


@pytest.mark.parametrize(
    ("runtime", "hint"),
    [
        (None, "--target onnx, whose Attention also takes the order [batch, heads, rows, size]"),
        ("ort-cpu", "--target onnx, whose Attention also takes the order [batch, heads, rows, size]"),
        ("ort-webgpu", "hold query, key, value and result as [batch, rows, heads, size]"),
    ],
)
def test_what_to_do_where_contrib_copies(runtime: str | None, hint: str) -> None:
    """ONNX's Attention reads heads before rows, as the caches of exporters have them; GroupQueryAttention does not."""
    named = None if runtime is None else Runtime.of(runtime)

    def missed(target: Target) -> list[tuple[MissedCode, str | None]]:
        inputs = CROSS.replace("T", "S")
        model = parse(PRODUCT_QK + SOFTMAX.format("s") + PRODUCT_PV, inputs=inputs, outputs="float[B,4,S,8] y")
        (block,) = fuse(ir.from_proto(model), Options(target, runtime=named)).blocks
        return [(each.code, each.hint) for each in block.missed if each.code == MissedCode.COPIES]

    assert missed("contrib") == [(MissedCode.COPIES, hint)]
    if "--target onnx" in hint:
        assert not missed("onnx")


@pytest.mark.parametrize(
    "mask",
    [
        CAUSAL,
        PADDED,
        "b_ = Shape<start=0, end=1>(q) n_ = Shape<start=1, end=2>(kept) "
        "all = Concat<axis=0>(b_, n_, rows_, columns_) m = Expand(kept, all)",
    ],
    ids=["causal", "padded", "expanded"],
)
@pytest.mark.parametrize("use", [FLOAT, SELECT], ids=["added", "selected"])
def test_nothing_is_missed(mask: str, use: str) -> None:
    """A band, padding beside it, and padding that runs along the rows: only one of them is read."""
    (block,) = fuse(ir.from_proto(masked(mask, use, more=KEPT))).blocks
    assert block.status == "fused" and not block.missed


@pytest.mark.parametrize(
    ("sizes", "moved", "minor"),
    [
        ("S S", "result", True),
        ("S S", "key", True),
        ("S T", "result", True),
        ("S T", "key", False),  # S may be one row behind a cache
        ("64 64", "key", True),
        ("8 512", "result", True),
        ("8 512", "key", False),
        ("512 8", "result", False),
        ("512 8", "key", False),
    ],
)
def test_copies_are_small_where_each_row_meets_many(sizes: str, moved: str, minor: bool) -> None:
    rows, keys = sizes.split()
    key, turned = f"float[B,4,{keys},8] k", PRODUCT_PV
    given = PRODUCT_QK
    if moved == "key":
        key = f"float[B,{keys},4,8] k0"
        given = f"k = Transpose<perm=[0,2,1,3]>(k0) {PRODUCT_QK}"
    else:
        turned = TURNED
    result = f"float[B,{rows},4,8] y" if moved == "result" else f"float[B,4,{rows},8] y"
    model = parse(
        given + SOFTMAX.format("s") + turned,
        inputs=f"float[B,4,{rows},8] q, {key}, float[B,4,{keys},8] v",
        outputs=result,
    )
    report = fuse(ir.from_proto(model))
    (block,) = report.blocks
    (missed,) = block.missed
    assert (missed.code, missed.minor) == (MissedCode.COPIES, minor)
    assert ("few beside the products" in missed.reason) == minor
    assert ("missed: copies" in block.what) == (not minor)
    line = "block 0, small losses by copies: --explain says more"
    assert (report.missed == [line]) == minor


WEIGHTS = f"<float[2,8] wide = {{{', '.join('1' * 16)}}}, float[8,2] narrow = {{{', '.join('1' * 16)}}}>"
LAYERS = {
    "plain": ("p0 = MatMul({}, wide) ", "z = MatMul(r, narrow) "),
    "with a bias, and a gate": (
        "m = MatMul({}, wide) p0 = Add(m, m) ",
        "g = Sigmoid(r) h = Mul(r, g) z = MatMul(h, narrow) ",
    ),
    "cast": ("w = Cast<to=1>(wide) p0 = MatMul({}, w) ", "n = Cast<to=1>(narrow) z = MatMul(r, n) "),
}
"""Products with weights: the one that makes query or key, and the one behind the result."""
SPLIT = "heads = Constant<value=int64[4] {0,-1,2,4}>() p1 = Reshape(p0, heads) p2 = Transpose<perm=[0,2,1,3]>(p1) "
BETWEEN = (
    PRODUCT_QK + SOFTMAX.format("s") + TURNED + "whole = Constant<value=int64[3] {0,-1,8}>() r = Reshape(y, whole) "
)


def missed_between_layers(body: str, rows: str, keys: str, last: str = "float[B,{},2] z") -> list[MissedCode]:
    """What an attention of two heads misses; x has the rows of the query, c those of the keys."""
    given = f"float[B,{rows},2] x, float[B,{keys},2] c, float[B,2,{rows},4] q0, float[B,2,{keys},4] k0"
    more = f"float[B,2,{keys},4] v"
    proto = parse(body, more, inputs=given, outputs=last.format(rows), initializers=WEIGHTS)
    (block,) = fuse(ir.from_proto(proto)).blocks
    assert block.status == "fused"
    return [missed.code for missed in block.missed]


@pytest.mark.parametrize(("before", "behind"), LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize(("rows", "keys"), [("S", "S"), ("8", "8"), ("512", "8"), ("S", "T")])
def test_a_result_that_is_copied_for_a_layer_costs_nothing(before: str, behind: str, rows: str, keys: str) -> None:
    """The product multiplies each of the copied elements with many weights."""
    body = before.format("x") + SPLIT + "q = Relu(p2) k = Identity(k0) " + BETWEEN
    assert missed_between_layers(body + behind, rows, keys) == []
    assert missed_between_layers(body, rows, keys, "float[B,{},8] r") == [MissedCode.COPIES]


@pytest.mark.parametrize(
    ("rows", "keys", "free"), [("S", "S", True), ("8", "8", True), ("S", "T", False), ("8", "512", False)]
)
def test_keys_that_are_copied_for_more_than_new_rows_are_counted(rows: str, keys: str, free: bool) -> None:
    """Behind a cache each step would copy the keys of all tokens."""
    before, behind = LAYERS["plain"]
    body = "q = Identity(q0) " + before.format("c") + SPLIT + "k = Identity(p2) " + BETWEEN + behind
    assert missed_between_layers(body, rows, keys) == ([] if free else [MissedCode.COPIES])


def test_a_single_row_is_the_same_in_every_layout() -> None:
    inputs = CROSS.replace("S", "1")
    model = parse(PRODUCT_QK + SOFTMAX.format("s") + TURNED, inputs=inputs, outputs="float[B,1,4,8] y")
    (block,) = fuse(ir.from_proto(model)).blocks
    assert block.status == "fused" and not block.missed


def test_a_small_number_of_a_mask_that_is_the_same_for_all_rows_costs_nothing() -> None:
    """It stays a bias, but of its S x S elements one row is made and read."""
    body = EXPANDED_FLOATS.replace("c = ", "ten = Constant<value=float {-1e4}>() c = ").replace("low", "ten")
    (block,) = fuse(ir.from_proto(masked(body, "x = Add(s, f) ", more="int64[B,S] pad"))).blocks
    assert (block.mask, block.missed) == ("real_shift", ())


@pytest.mark.parametrize("keys", [5, 1], ids=["as many", "one"])
def test_a_mask_of_another_size(keys: int) -> None:
    """A causal mask of one key lets every row see all keys. Who vouches for same-sizes rules it out and has a band."""
    proto = masked(OTHER_SIZE, SELECT, more="int64[U] ids")
    feeds = random_feeds(proto, ids=np.arange(keys))
    assumptions: list[tuple[str, ...]] = [(), ("same-sizes",)] if keys > 1 else [()]
    for assume in assumptions:
        result, report = fused(proto, assume=assume)
        assert (report.blocks[0].mask, report.blocks[0].assumed) == ("causal" if assume else "atten_mask", assume)
        assert_same(run(result, feeds)[0], run(proto, feeds)[0], 1e-5)


@pytest.mark.parametrize(
    ("mask", "label"),
    [
        (WIDE_PADDING, "atten_mask"),
        ("n = Shape(s) e = Expand(pad, n) c = LessOrEqual(j, i) m = And(e, c)", "causal+atten_mask"),
    ],
    ids=["its own sizes", "the sizes of the scores"],
)
def test_an_expanded_mask_that_is_said_to_be_as_large_as_the_scores(mask: str, label: str) -> None:
    proto = masked(mask, SELECT, more=OTHER_PADDING)
    result, report = fused(proto, assume=["same-sizes"])
    assert [(block.mask, block.assumed) for block in report.blocks] == [(label, ("same-sizes",))]
    feeds = feeds_of(proto, {"B": 2, "S": 5, "C": 2, "U": 5})
    assert_same(run(result, feeds)[0], run(proto, feeds)[0], 1e-5)
