"""Caches that grow by a Concat, as buffers with room: the outputs of the model before, and rows of NaN never read."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx
import pytest

from fa_compiler import reference
from fa_compiler.comparison.buffers import SPARE, buffer_feeds, buffers_of, grown_outputs
from fa_compiler.comparison.feeds import random_inputs
from fa_compiler.passes import Report
from tests.graphs import harness
from tests.passes.running import SIZES, Array, assert_same, bound_run, fused, random_feeds, run

PAST = 7
"""Tokens in the caches of a run."""
EXPORTED_TOLERANCE = 1e-5
"""Two layers in float32, relative to the largest result."""

INPUTS = "float[B,4,S,8] q, float[B,2,S,8] k, float[B,2,S,8] v, float[B,2,P,8] past_k, float[B,2,P,8] past_v"
OUTPUTS = "float[B,4,S,8] y, float[B,2,T,8] new_k, float[B,2,T,8] new_v"
NUMBERS = (
    "<int64[1] axis = {2}, int64[5] groups = {1,1,2,1,1}, int64[1] zero = {0}, int64[1] one = {1}, int64 first = {0}, "
    "int64 step = {1}, int64 second = {2}, float low = {-3.4028234663852886e38}, float scale = {0.35355338}, "
    "int64[4] heads = {0,4,-1,8}>"
)
GROW = "new_k = Concat<axis=2>(past_k, k) new_v = Concat<axis=2>(past_v, v) "
REPEAT = (
    "ku = Unsqueeze(new_k, axis) ke = Expand(ku, groups) kh = Reshape(ke, heads) kt = Transpose<perm=[0,1,3,2]>(kh) "
    "vu = Unsqueeze(new_v, axis) ve = Expand(vu, groups) vh = Reshape(ve, heads) "
)
SCORES = "qk = MatMul(q, kt) s = Mul(qk, scale) "
RESULT = "p = Softmax<axis=-1>({}) y = MatMul(p, vh) "
PLAIN = GROW + REPEAT + SCORES + RESULT.format("s")
MASKED = "m = Where(mask, s, low) " + RESULT.format("m")
CAUSAL = (
    "ps = Shape(past_k) pl = Gather(ps, second) qs = Shape(q) ql = Gather(qs, second) all = Add(pl, ql) "
    "cols = Range(first, all, step) rows0 = Range(first, ql, step) rows = Add(rows0, pl) rows1 = Unsqueeze(rows, one) "
    "mask = LessOrEqual(cols, rows1) "
)


@dataclass(frozen=True)
class Case:
    """A model in text, and how many rows are new in a run of it. `copied` are the nodes that read a copy."""

    body: str
    more: str = ""
    rows: int = 3
    inputs: str = INPUTS
    outputs: str = OUTPUTS
    copied: tuple[str, ...] = ()
    buffers: int = 2
    lengths: tuple[str, ...] = ("cache_length",)
    op: str = "FlashAttentionScore"
    tolerance: float = 1e-5

    def model(self) -> onnx.ModelProto:
        inputs = f"{self.inputs}, {self.more}" if self.more else self.inputs
        return onnx.parser.parse_model(
            f'<ir_version: 8, opset_import: ["": 17]> g ({inputs}) => ({self.outputs}) {NUMBERS} {{ {self.body} }}'
        )

    def feeds(self, model: onnx.ModelProto, monkeypatch: pytest.MonkeyPatch) -> dict[str, Array]:
        sizes = {"S": self.rows, "P": PAST, "P2": PAST - 2, "P4": PAST - self.rows, "T": PAST + self.rows}
        for name, size in sizes.items():
            monkeypatch.setitem(SIZES, name, size)
        feeds = random_feeds(model)
        if "mask" in feeds:
            feeds["mask"][:] = np.random.default_rng(1).random(feeds["mask"].shape) < 0.6
        if (ints := feeds.get("past_k")) is not None and ints.dtype == np.int8:
            feeds |= {name: np.random.default_rng(2).integers(-99, 99, feeds[name].shape, np.int8) for name in CACHES}
        return feeds


CACHES = ("past_k", "past_v", "k", "v")
BSND_IN = "float[B,S,4,8] q0, float[B,S,2,8] k, float[B,S,2,8] v, float[B,P,2,8] past_k, float[B,P,2,8] past_v"
BSND_OUT = "float[B,S,4,8] y, float[B,T,2,8] new_k, float[B,T,2,8] new_v"
BSND = (
    "new_k = Concat<axis=1>(past_k, k) new_v = Concat<axis=-3>(past_v, v) q = Transpose<perm=[0,2,1,3]>(q0) "
    "bk = Transpose<perm=[0,2,1,3]>(new_k) bv = Transpose<perm=[0,2,1,3]>(new_v) "
    + REPEAT.replace("new_", "b")
    + SCORES
    + "p = Softmax<axis=-1>(s) y0 = MatMul(p, vh) y = Transpose<perm=[0,2,1,3]>(y0)"
)
SECOND = (
    "new_a = Concat<axis=2>(past_a, a) new_b = Concat<axis=2>(past_b, b) at = Transpose<perm=[0,1,3,2]>(new_a) "
    "s2 = MatMul(k, at) p2 = Softmax<axis=-1>(s2) z = MatMul(p2, new_b) "
)
SECOND_IN = "float[B,2,S,8] a, float[B,2,S,8] b, float[B,2,{0},8] past_a, float[B,2,{0},8] past_b"
SECOND_OUT = OUTPUTS + ", float[B,2,S,8] z, float[B,2,U,8] new_a, float[B,2,U,8] new_b"
ROPE_IN = INPUTS.replace("B,4", "B,2") + ", float[B,2,S,6] qr, float[B,2,S,6] r, float[B,2,P,6] past_r"
ROPE = (
    GROW
    + "new_r = Concat<axis=2>(past_r, r) rt = Transpose<perm=[0,1,3,2]>(new_r) kt = Transpose<perm=[0,1,3,2]>(new_k) "
    + "qk = MatMul(q, kt) qrk = MatMul(qr, rt) sum = Add(qk, qrk) s = Mul(sum, scale) "
    + RESULT.format("s").replace("vh", "new_v")
)
QUANTISED_IN = "float[B,4,1,8] q, int8[B,2,1,8] k, int8[B,2,1,8] v, int8[B,2,P,8] past_k, int8[B,2,P,8] past_v"
QUANTISED = (
    GROW
    + "fk = DequantizeLinear(new_k, scale) fv = DequantizeLinear(new_v, scale) "
    + (REPEAT.replace("new_", "f") + SCORES + RESULT.format("s"))
)

ACCEPTED = {
    "several rows": Case(PLAIN),
    "one row": Case(PLAIN, rows=1),
    "capped scores, then a mask": Case(
        GROW + REPEAT + SCORES + "t = Tanh(s) c = Mul(t, scale) " + CAUSAL + MASKED.replace("mask, s", "mask, c")
    ),
    "no new rows": Case(PLAIN, rows=0),
    "other outputs are gathered from it": Case(
        PLAIN + "u = Gather<axis=2>(past_k, zero) w = Gather<axis=2>(new_v, zero)",
        outputs=OUTPUTS + ", float[B,2,one,8] u, float[B,2,one,8] w",
        copied=("u", "w"),
    ),
    "mask over all keys, some rows masked everywhere": Case(
        GROW + REPEAT + SCORES + MASKED, "bool[B,1,S,T] mask", rows=5
    ),
    "padding on the left": Case(GROW + REPEAT + SCORES + MASKED, "bool[B,1,1,T] mask"),
    "causal behind the past": Case(GROW + REPEAT + SCORES + CAUSAL + MASKED),
    "bias": Case(GROW + REPEAT + SCORES + "m = Add(s, bias) " + RESULT.format("m"), "float[1,4,S,T] bias"),
    "[B,S,N,D]": Case(BSND, inputs=BSND_IN, outputs=BSND_OUT),
    "past as it is": Case(
        "first_k = Concat<axis=-2>(past_k) past = Identity(first_k) also = Cast<to=1>(past) "
        + PLAIN.replace("past_k", "also")
    ),
    "present as it is": Case(
        "grown = Concat<axis=2>(past_k, k) same = Cast<to=1>(grown) new_k = Identity(same) "
        + PLAIN.replace("new_k = Concat<axis=2>(past_k, k)", "")
        .replace("new_k", "grown")
        .replace("grown = Id", "new_k = Id")
    ),
    "an empty part": Case(
        "no = Slice(k, zero, zero, axis) first_k = Concat<axis=2>(no, past_k) " + PLAIN.replace("(past_k", "(first_k")
    ),
    "sizes": Case(
        PLAIN + "sizes = Shape(past_k) some = Shape<start=1,end=-1>(new_v) last = Shape<start=-2>(new_k)",
        outputs=OUTPUTS + ", int64[4] sizes, int64[2] some, int64[2] last",
    ),
    "present read by another node": Case(
        PLAIN + "top = ReduceMax(new_k)", outputs=OUTPUTS + ", float[a,b,c,d] top", copied=("top",)
    ),
    "past read by another node": Case(
        PLAIN + "top = ReduceMax(past_v)", outputs=OUTPUTS + ", float[a,b,c,d] top", copied=("top",)
    ),
    "two layers of one length": Case(PLAIN + SECOND, SECOND_IN.format("P"), outputs=SECOND_OUT, buffers=4),
    "two layers of two lengths": Case(
        PLAIN + SECOND,
        SECOND_IN.format("P2"),
        outputs=SECOND_OUT,
        buffers=4,
        lengths=("cache_length", "cache_length_2"),
    ),
    "names of sizes that one attention joins": Case(
        PLAIN, inputs=INPUTS.replace("P,8] past_v", "other,8] past_v").replace("other", "P3")
    ),
    "two lengths, as one cache gets more new rows": Case(
        "twice = Constant<value=int64[4] {1,1,2,1}>() two_k = Tile(k, twice) "
        + PLAIN.replace("(past_k, k)", "(past_k, two_k)"),
        inputs=INPUTS.replace("P,8] past_k", "P4,8] past_k"),
        lengths=("cache_length", "cache_length_2"),
    ),
    "a part of the scores for positions": Case(
        ROPE, inputs=ROPE_IN, outputs=OUTPUTS.replace("B,4", "B,2") + ", float[B,2,T,6] new_r", buffers=3
    ),
    "float16": Case(
        "half = Cast<to=10>(scale) " + PLAIN.replace("qk, scale", "qk, half"),
        inputs=INPUTS.replace("float", "float16"),
        outputs=OUTPUTS.replace("float", "float16"),
        tolerance=4e-3,
    ),
    "int8": Case(
        QUANTISED,
        inputs=QUANTISED_IN,
        outputs="float[B,4,1,8] y, int8[B,2,T,8] new_k, int8[B,2,T,8] new_v",
        rows=1,
        op="IncreFlashAttention",
    ),
}


def in_place(model: onnx.ModelProto) -> tuple[onnx.ModelProto, Report]:
    return fused(model, in_place_caches=True)


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one piece of memory and in two: what the fused model with a Concat gives, and nothing of what lay behind."""
    case = ACCEPTED[name]
    model = case.model()
    monkeypatch.setitem(SIZES, "P3", PAST)
    feeds = case.feeds(model, monkeypatch)
    changed, report = in_place(model)
    operators = [node.op_type for node in changed.graph.node]
    assert case.op in operators
    assert operators.count("ScatterND") == case.buffers
    assert operators.count("Slice") == len(case.copied)
    assert not {"Concat"} & {node.op_type for node in changed.graph.node if set(node.input) & set(feeds)}
    buffers = buffers_of(changed)
    assert len(buffers) == case.buffers
    assert {cache.length for cache in report.caches} == set(case.lengths)
    assert tuple(node for cache in report.caches for node in cache.copied) == case.copied
    given = {value.name for value in changed.graph.input} - set(feeds)
    assert given == set(case.lengths)

    names = [value.name for value in model.graph.output]
    wanted = dict(zip(names, run(model, feeds), strict=True))
    plain = dict(zip(names, run(fused(model)[0], feeds), strict=True))
    own = buffer_feeds(buffers, feeds, wanted)
    pairs = {buffer.present: buffer.past for buffer in buffers}
    for results in (bound_run(changed, own, pairs), run(changed, own)):
        found = dict(zip(names, results, strict=True))
        for buffer in buffers:
            rest = np.moveaxis(found[buffer.present], buffer.axis, 0)[-SPARE:]
            assert (np.isnan(rest) if rest.dtype.kind == "f" else rest == 77).all(), "rows behind the last were written"
        for key, value in grown_outputs(buffers, found, wanted).items():
            np.testing.assert_array_equal(value, plain[key], key)
            assert_same(value, wanted[key], case.tolerance)


NEW = "kn = Neg(k) vn = Neg(v) "

ROLLING = "it is a rolling window: its oldest rows are dropped, and a buffer only takes new ones"
BEAMS = "its rows are gathered, as beams are: that copies it, whether it is a buffer or not"
ENDS = "last = Constant<value=int64[1] {999}>() axes = Constant<value=int64[1] {2}>() "
DROPPED = ENDS + "kept_k = Slice(past_k, one, last, axes) kept_v = Slice(past_v, one, last, axes) "
TRIMMED = (
    ENDS + PLAIN.replace("new", "all") + "new_k = Slice(all_k, one, last, axes) new_v = Slice(all_v, one, last, axes) "
)
REJECTED = {
    "a fixed number of tokens": (
        Case(PLAIN, inputs=INPUTS.replace("P", "7")),
        "the model fixes the number of cached tokens to 7",
    ),
    "rows in front": (
        Case(NEW + PLAIN.replace("(past_k, k)", "(kn, past_k)").replace("(past_v, v)", "(vn, past_v)")),
        "what is joined with it is not one tensor of new rows behind it",
    ),
    "rows before and behind": (
        Case(NEW + PLAIN.replace("(past_k, k)", "(past_k, k, k)").replace("(past_v, v)", "(vn, past_v, v)")),
        "what is joined with it is not one tensor of new rows behind it",
    ),
    "joined twice": (
        Case(
            PLAIN + "u = Concat<axis=2>(past_k, v) w = Concat<axis=2>(past_v, k)",
            outputs=OUTPUTS + ", float[a,b,c,d] u, float[e,f,g,h] w",
        ),
        "several Concats take it",
    ),
    "not given back": (Case(PLAIN, outputs="float[B,4,S,8] y"), "what it grows to is no output of the model"),
    "given back twice": (
        Case(
            PLAIN + "u = Identity(new_k) w = Identity(new_v)", outputs=OUTPUTS + ", float[a,b,c,d] u, float[e,f,g,h] w"
        ),
        "what it grows to is several outputs",
    ),
    "given back as it came": (
        Case(
            PLAIN + "u = Identity(past_k) w = Identity(past_v)",
            outputs=OUTPUTS + ", float[a,b,c,d] u, float[e,f,g,h] w",
        ),
        "the model also gives it back as it came, without new rows",
    ),
    "nothing appended": (
        Case(
            "new_k = Identity(k) new_v = Identity(v) " + REPEAT.replace("new_", "past_") + SCORES + RESULT.format("s"),
        ),
        "nothing is appended to it",
    ),
    "written between two Transposes": (
        Case(
            "".join(
                f"t_{x} = Transpose<perm=[2,0,1,3]>(past_{x}) s_{x} = Transpose<perm=[2,0,1,3]>({x}) "
                f"w_{x} = ScatterND(t_{x}, places, s_{x}) new_{x} = Transpose<perm=[1,2,0,3]>(w_{x}) "
                for x in "kv"
            )
            + REPEAT
            + SCORES
            + RESULT.format("s"),
            "int64[T,1] places",
        ),
        "it is a buffer already, in which its rows are written, but between two Transposes, which copy all of it",
    ),
    "in a branch": (
        Case(
            PLAIN
            + "u = If (yes) <then_branch = a () => (float[a,b,c,d] c) { c = Identity(past_k) }, "
            + "else_branch = b () => (float[a,b,c,d] e) { e = Identity(past_v) }>",
            "bool yes",
            outputs=OUTPUTS + ", float[a,b,c,d] u",
        ),
        "it is read within a subgraph",
    ),
    **{
        f"a rolling window, {where}": (Case(body, outputs=OUTPUTS, inputs=INPUTS.replace("past", own)), ROLLING)
        for own in ("past", "state")
        for where, body in {
            f"in front, {own}": DROPPED.replace("past", own) + PLAIN.replace("past", "kept"),
            f"behind, {own}": TRIMMED.replace("past", own),
        }.items()
    },
    **{
        f"beams, {where}": (Case(body, "int64[B] beam", inputs=INPUTS.replace("past", "state")), BEAMS)
        for where, body in {
            "in front": "kept_k = Gather(state_k, beam) kept_v = Gather(state_v, beam) "
            + PLAIN.replace("past", "kept"),
            "behind": PLAIN.replace("new", "all").replace("past", "state")
            + "new_k = Gather(all_k, beam) new_v = Gather(all_v, beam)",
        }.items()
    },
    "rectified scores": (
        Case(GROW + REPEAT + SCORES + "c = Relu(s) " + RESULT.format("c")),
        "no fused attention reads it as it is, so that its rows would be copied all the same",
    ),
}


@pytest.mark.parametrize("name", REJECTED)
def test_rejected(name: str) -> None:
    """The model is as it would be without the option, and every cache is told why."""
    case, reason = REJECTED[name]
    changed, report = in_place(case.model())
    assert changed == fused(case.model())[0]
    pasts = [value.name for value in case.model().graph.input if value.name[:-1] in ("past_", "state_")]
    assert len(pasts) == 2
    assert [(cache.past, cache.present, cache.reason) for cache in report.caches] == [
        (past, None, reason) for past in pasts
    ]


def test_a_cache_is_no_new_rows_of_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its buffer has more rows than the cache, so the other one stays and reads a copy."""
    case = Case(
        PLAIN
        + "new_a = Concat<axis=2>(past_a, new_k) at = Transpose<perm=[0,1,3,2]>(new_a) s2 = MatMul(k, at) "
        + "p2 = Softmax<axis=-1>(s2) z = MatMul(p2, new_a)",
        "float[B,2,P2,8] past_a",
        outputs=OUTPUTS + ", float[B,2,S,8] z, float[B,2,U,8] new_a",
    )
    model = case.model()
    feeds = case.feeds(model, monkeypatch)
    changed, report = in_place(model)
    assert {cache.past: cache.reason for cache in report.caches} == {
        "past_k": None,
        "past_v": None,
        "past_a": "what is joined with it is another cache",
    }
    buffers, names = buffers_of(changed), [value.name for value in model.graph.output]
    wanted = dict(zip(names, run(model, feeds), strict=True))
    found = dict(zip(names, run(changed, buffer_feeds(buffers, feeds, wanted)), strict=True))
    for key, value in grown_outputs(buffers, found, wanted).items():
        assert_same(value, wanted[key], case.tolerance)


def test_a_cache_with_a_default_value_stays() -> None:
    model = Case(PLAIN).model()
    defaults = [onnx.numpy_helper.from_array(np.zeros((2, 2, 5, 8), np.float32), f"past_{each}") for each in "kv"]
    model.graph.initializer.extend(defaults)
    _, report = in_place(model)
    assert [cache.reason for cache in report.caches] == ["the model has a default value for it"] * 2


def test_old_opsets_have_no_scatter() -> None:
    model = Case(
        GROW + "kt = Transpose<perm=[0,1,3,2]>(new_k) s = MatMul(k, kt) p = Softmax<axis=3>(s) y = MatMul(p, new_v)",
        outputs=OUTPUTS.replace("4", "2"),
    ).model()
    model.opset_import[0].version = 10
    assert [cache.reason for cache in in_place(model)[1].caches] == [
        "ScatterND and Range are there from opset 11 on"
    ] * 2


def test_the_reference_evaluates_it(monkeypatch: pytest.MonkeyPatch) -> None:
    case = ACCEPTED["causal behind the past"]
    model = case.model()
    feeds = case.feeds(model, monkeypatch)
    names = [value.name for value in model.graph.output]
    wanted = dict(zip(names, run(model, feeds), strict=True))
    changed = in_place(model)[0]
    buffers = buffers_of(changed)
    results = reference.evaluator(changed).run(None, buffer_feeds(buffers, feeds, wanted))
    for key, value in grown_outputs(buffers, dict(zip(names, results, strict=True)), wanted).items():
        assert_same(value, wanted[key], case.tolerance)


def test_off_unless_asked_for() -> None:
    changed, report = fused(Case(PLAIN).model())
    assert not report.caches
    assert not buffers_of(changed)
    assert "ScatterND" not in [node.op_type for node in changed.graph.node]


EXPORTED = {
    "bart_decpast__dynamon_sdpa_op20": 4,
    "bloom_past__dynamon_eager_op19": 4,
    "chunk_gqa__tsn": 4,
    "chunk_window__dynamo": 4,
    "falcon_past__dynamon_sdpa_op20": 4,
    "gptj_past__dynamon_eager_op19": 4,
    "gptneo_past__tso_eager_op13": 4,
    "llama_past__tsn_eager_op14": 4,
    "llama_past__tsn_sdpa_op17": 4,
    "llama_past__tso_eager_op13": 4,
    "opt_past__tsn_eager_op14": 4,
    "phi3_past__tsn_eager_op14": 4,
    "qwen3_past__dynamon_sdpa_op20": 4,
    "t5_decpast__tsn_eager_op14": 4,
    "gemma2_past__dynamon_eager_op19": 4,
    "chunk_static__dynamo": 0,
}
"""Kept graphs of two layers, and how many of their caches become buffers: those that a Concat appends to. Scores of
Gemma 2 are capped, the static caches have room as they are."""

ONE_TOKEN = "llama_past__tsn_sdpa_op17"
"""An export that runs for one token only, though it declares any number."""


@pytest.mark.parametrize("name", EXPORTED)
def test_exported(name: str) -> None:
    """Padded batches, masks and positions as they came, several rows where the export takes them."""
    model = harness.load(name)
    changed, report = in_place(model)
    buffers = buffers_of(changed)
    assert len(buffers) == EXPORTED[name]
    assert len([cache for cache in report.caches if cache.present]) == EXPORTED[name]
    if not buffers:
        assert changed == fused(model)[0]
        return
    copied = {node.split("/")[-1] for cache in report.caches for node in cache.copied}
    # TorchScript's older export takes the size of a repeated key from a repeated copy.
    assert all(node.startswith("Unsqueeze") for node in copied)
    assert not copied or "tso" in name
    names = [value.name for value in model.graph.output]
    runs = [harness.inputs(harness.read_index()[name])]
    if name != ONE_TOKEN:
        runs.append(random_inputs(model, name))
    for feeds in runs:
        wanted = dict(zip(names, run(model, feeds), strict=True))
        own = buffer_feeds(buffers, feeds, wanted)
        results = bound_run(changed, own, {buffer.present: buffer.past for buffer in buffers})
        found = grown_outputs(buffers, dict(zip(names, results, strict=True)), wanted)
        for key, value in wanted.items():
            assert_same(found[key], value, EXPORTED_TOLERANCE)
