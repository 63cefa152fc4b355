"""States that become 0 in front of some tokens, such as the first ones of the documents of a packed sequence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from fa_compiler.passes import Options
from fa_compiler.passes.answer.options import FINITE_SCORES, Target
from tests.linear_composer import LOW_RANK, Model, Recipe
from tests.linear_composer import feeds as composed_feeds
from tests.passes import running
from tests.passes.running import assert_same, fused, parse, run

TOLERANCE = 2e-5
"""float32 sums over up to 130 tokens, in another order."""
NUMBERS = (
    "ax1 = Constant<value_ints=[1]>() ax2 = Constant<value_ints=[2]>() "
    "ax3 = Constant<value_ints=[3]>() ax12 = Constant<value_ints=[1,2]>() ax23 = Constant<value_ints=[2,3]>() "
    "ax123 = Constant<value_ints=[1,2,3]>() "
    "zero = Constant<value_float=0.0>() one = Constant<value_float=1.0>() half = Constant<value_float=0.5>() "
    "none = Constant<value_int=0>() lowest = Constant<value_float=-inf>() "
)
GATE = "g4 = Unsqueeze(gt, ax23) e = Exp(g4) "
KEY_GATE = "g4 = Unsqueeze(gt, ax3) e = Exp(g4) "
AT_TOKEN = "r4 = Unsqueeze(rt, ax123) "
AT_HEAD = "r4 = Unsqueeze(rt, ax23) "
FACTOR = "kept = Not(r4) n = Cast<to=1>(kept) sd = Mul(s, n) "


@dataclass(frozen=True)
class Spelling:
    """How the states are reset: `nodes` make `sd`, what is left of the state `s`, of the truth value or number `rt` of
    a token, and of the log decay `gt`. `before` makes `r` of the input `r0`."""

    nodes: str
    flag: str = "bool"
    before: str = "r = Identity(r0) "
    made: str = "bool"
    """The type of `r`."""
    gate: str = ""
    """The shape of the decay of a token, behind the batch."""
    flag_shape: str = ""
    """The same of a truth value."""
    rule: str = "linear"
    state: bool = True
    write: str = "sn = Add(sd, u) read = Identity(sn) "

    @property
    def chooses(self) -> bool:
        """Does a Where choose what may be NaN or infinite?"""
        return any(f"Where(r4, zero, {each})" in self.nodes for each in ("s", "sg", "e")) or "Where(kept" in self.nodes


EACH: Mapping[str, Spelling] = {
    "0 is chosen": Spelling(AT_TOKEN + "sd = Where(r4, zero, s) "),
    "the state is chosen": Spelling(AT_TOKEN + "kept = Not(r4) sd = Where(kept, s, zero) "),
    "zeros are chosen": Spelling(
        AT_TOKEN + "sh = Shape(s) zeros = ConstantOfShape(sh) kept = Not(r4) sd = Where(kept, s, zeros) "
    ),
    "0 is chosen, then a decay": Spelling(AT_TOKEN + GATE + "sr = Where(r4, zero, s) sd = Mul(sr, e) ", gate="2"),
    "a decay, then 0 is chosen": Spelling(AT_TOKEN + GATE + "sg = Mul(s, e) sd = Where(r4, zero, sg) ", gate="2"),
    "a decay of 0 is chosen": Spelling(AT_TOKEN + GATE + "n = Where(r4, zero, e) sd = Mul(s, n) ", gate="2"),
    "what is not reset": Spelling(AT_TOKEN + FACTOR),
    "1 without what is reset": Spelling(AT_TOKEN + "x = Cast<to=1>(r4) n = Sub(one, x) sd = Mul(s, n) "),
    "0 or 1": Spelling(AT_TOKEN + "n = Where(r4, zero, one) sd = Mul(s, n) "),
    "beside a decay": Spelling(
        AT_TOKEN + GATE + "kept = Not(r4) n = Cast<to=1>(kept) sg = Mul(s, e) sd = Mul(sg, n) ", gate="2"
    ),
    "beside a decay for each key dimension": Spelling(
        AT_TOKEN + KEY_GATE + "kept = Not(r4) n = Cast<to=1>(kept) sg = Mul(s, e) sd = Mul(sg, n) ", gate="2,4"
    ),
    "some heads": Spelling(AT_HEAD + FACTOR, flag_shape="2"),
    "some heads, beside a decay": Spelling(
        AT_HEAD + GATE + "kept = Not(r4) n = Cast<to=1>(kept) en = Mul(e, n) sd = Mul(s, en) ",
        gate="2",
        flag_shape="2",
    ),
    "some heads, beside a decay for each key dimension": Spelling(
        AT_HEAD + KEY_GATE + "kept = Not(r4) n = Cast<to=1>(kept) en = Mul(e, n) sd = Mul(s, en) ",
        gate="2,4",
        flag_shape="2",
    ),
    "the first position": Spelling(
        "b = Equal(rt, none) r4 = Unsqueeze(b, ax123) " + FACTOR, flag="int64", made="int64"
    ),
    "in front of the loop": Spelling(
        "n = Unsqueeze(rt, ax123) sd = Mul(s, n) ", before="k0 = Not(r0) r = Cast<to=1>(k0) ", made="float"
    ),
    "without a first state": Spelling(AT_TOKEN + FACTOR, state=False),
    "the delta rule": Spelling(AT_TOKEN + FACTOR, rule="delta"),
    "the gated delta rule": Spelling(
        AT_TOKEN + GATE + "kept = Not(r4) n = Cast<to=1>(kept) sg = Mul(s, e) sd = Mul(sg, n) ",
        gate="2",
        rule="gated_delta",
    ),
    "the gated delta rule, where 0 is chosen": Spelling(
        AT_TOKEN + GATE + "sg = Mul(s, e) sd = Where(r4, zero, sg) ", gate="2", rule="gated_delta"
    ),
}
"""Spellings that are right."""
NEAR: Mapping[str, Spelling] = {
    "a part of the state stays": Spelling(AT_TOKEN + "sh = Mul(s, half) sd = Where(r4, sh, s) "),
    "a number other than 0": Spelling(AT_TOKEN + "sd = Where(r4, half, s) "),
    "a factor other than 0": Spelling(AT_TOKEN + "n = Where(r4, half, one) sd = Mul(s, n) "),
    "0 or -1": Spelling(AT_TOKEN + "x = Cast<to=1>(r4) n = Sub(x, one) sd = Mul(s, n) "),
    "twice what is not reset": Spelling(
        AT_TOKEN + "x = Cast<to=1>(r4) n = Sub(one, x) n2 = Add(n, n) sd = Mul(s, n2) "
    ),
    "the square of the state": Spelling(AT_TOKEN + "s2 = Mul(s, s) sd = Where(r4, zero, s2) "),
    "the truth value of one token": Spelling("rx = Gather<axis=1>(r, none) r4 = Unsqueeze(rx, ax123) " + FACTOR),
    "a number of the model": Spelling("r4 = Unsqueeze(rt, ax123) sd = Mul(s, r4) ", flag="float", made="float"),
    "some columns": Spelling("r4 = Unsqueeze(rt, ax12) " + FACTOR, flag_shape="6"),
    "the reset after the write": Spelling(
        AT_TOKEN + "sd = Identity(s) ", write="sw = Add(sd, u) sn = Where(r4, zero, sw) read = Identity(sn) "
    ),
    "the reset after the read": Spelling(
        AT_TOKEN + "sd = Identity(s) ", write="read = Add(sd, u) sn = Where(r4, zero, read) "
    ),
    "the reset of the write": Spelling(
        AT_TOKEN + "sd = Identity(s) ", write="uw = Where(r4, zero, u) sn = Add(sd, uw) read = Identity(sn) "
    ),
    "the write beside a reset and without one": Spelling(
        AT_TOKEN + FACTOR, write="sn = Add(sd, u) bare = Add(s, u) read = Where(r4, bare, sn) "
    ),
}
"""What differs in one place."""
TURNED: Mapping[str, Spelling] = {
    "branches that change places": Spelling(AT_TOKEN + "sd = Where(r4, s, zero) "),
    "what is reset": Spelling(AT_TOKEN + "n = Cast<to=1>(r4) sd = Mul(s, n) "),
    "the token before": Spelling(
        AT_TOKEN + FACTOR,
        before="zero64 = Constant<value_ints=[0]>() end = Constant<value_ints=[-1]>() "
        "along = Constant<value_ints=[AXIS]>() first = Constant<value_ints=[1]>() a = Slice(r0, zero64, first, along) "
        "b = Slice(r0, zero64, end, along) r = Concat<axis=AXIS>(a, b) ",
    ),
    "the next sequence": Spelling(
        AT_TOKEN + FACTOR,
        before="turned = Constant<value_ints=[1,2,0]>() r = Gather<axis=BATCH>(r0, turned) ",
    ),
    "two truth values": Spelling(
        AT_TOKEN + FACTOR,
        before="turned = Constant<value_ints=[1,2,0]>() r1 = Gather<axis=BATCH>(r0, turned) r = Or(r0, r1) ",
    ),
}
"""Resets of other tokens, which are resets."""
FORMS = ("scan", "loop", "unrolled")
UNROLLED = 5


def model(spelling: Spelling, form: str) -> onnx.ModelProto:
    """A model of three sequences. In a Scan the tokens come first, in a Loop and unrolled the batch does."""
    length = str(UNROLLED) if form == "unrolled" else "T"
    first = f"{length},3" if form == "scan" else f"3,{length}"
    flag_shape = f",{spelling.flag_shape}" if spelling.flag_shape else ""
    kinds = {"q": "float 2,4", "k": "float 2,4", "v": "float 2,6", "r": f"{spelling.made} {spelling.flag_shape}"}
    kinds |= {"g": f"float {spelling.gate}"} if spelling.gate else {}
    kinds |= {"b": "float 2"} if "delta" in spelling.rule else {}
    given = {name: kind.split(" ") for name, kind in kinds.items() if name != "r"}
    inputs = [f"{kind}[{first},{shape}] {name}" for name, (kind, shape) in given.items()]
    inputs += [f"{spelling.flag}[{first}{flag_shape}] r0"] + (["float[3,2,4,6] s0"] if spelling.state else [])
    before = spelling.before.replace("AXIS", "0" if form == "scan" else "1")
    before = before.replace("BATCH", "1" if form == "scan" else "0")
    if not spelling.state:
        before += "sizes = Constant<value_ints=[3,2,4,6]>() s0 = ConstantOfShape<value=float[1]{0}>(sizes) "
    token = f"{spelling.nodes}{_update(spelling.rule)}{spelling.write}"
    token += "qc = Unsqueeze(qt, ax3) qs = Mul(read, qc) yt = ReduceSum<keepdims=0>(qs, ax2) "
    body = {"scan": _scan, "loop": _loop, "unrolled": _unrolled}[form](kinds, token)
    outputs = f"float[{first},2,6] y, float[3,2,4,6] s1"
    return parse(before + body, inputs=", ".join(inputs), outputs=outputs, opset=18)


def _update(rule: str) -> str:
    """The update `u` of a token."""
    if "delta" not in rule:
        return "kc = Unsqueeze(kt, ax3) vr = Unsqueeze(vt, ax2) u = Mul(kc, vr) "
    return (
        "kc = Unsqueeze(kt, ax3) held = Mul(sd, kc) m = ReduceSum<keepdims=0>(held, ax2) d = Sub(vt, m) "
        "b3 = Unsqueeze(bt, ax2) bd = Mul(d, b3) vr = Unsqueeze(bd, ax2) u = Mul(kc, vr) "
    )


def _scan(kinds: Mapping[str, str], token: str) -> str:
    parts = [kind.split(" ") for kind in kinds.values()]
    rows = [f"{kind}[3{',' if shape else ''}{shape}]" for kind, shape in parts]
    given = ", ".join(f"{row} {name}t" for name, row in zip(kinds, rows, strict=True))
    return (
        f"s1, y = Scan<num_scan_inputs={len(kinds)}, body = body (float[3,2,4,6] s, {given}) => "
        f"(float[3,2,4,6] sn, float[3,2,6] yt) {{ {NUMBERS}{token} }}>(s0, {', '.join(kinds)})"
    )


def _loop(kinds: Mapping[str, str], token: str) -> str:
    reads = "".join(f"{name}t = Gather<axis=1>({name}, i) " for name in kinds)
    return (
        "count = Shape<start=1,end=2>(q) axis = Constant<value_ints=[0]>() trips = Squeeze(count, axis) "
        "s1, ys = Loop(trips, , s0) <body = body (int64 i, bool go, float[3,2,4,6] s) => "
        f"(bool on, float[3,2,4,6] sn, float[3,2,6] yt) {{ on = Identity(go) {NUMBERS}{reads}{token} }}> "
        "y = Transpose<perm=[1,0,2,3]>(ys)"
    )


def _unrolled(kinds: Mapping[str, str], token: str) -> str:
    """The nodes of each token, whose values get the number of the token behind their names."""
    constants = {part.split(" = ")[0].split(" ")[-1] for part in NUMBERS.split("() ") if part}
    text = NUMBERS + "".join(f"at{place} = Constant<value_int={place}>() " for place in range(UNROLLED))
    for place in range(UNROLLED):
        text += "".join(f"{name}t{place} = Gather<axis=1>({name}, at{place}) " for name in kinds)
        words = token.replace("(", "( ").replace(")", " )").replace(",", " ,").split(" ")
        named = [
            word if not word.isidentifier() or word in constants or word[0].isupper() else f"{word}{place}"
            for word in words
        ]
        text += " ".join(named).replace(" ,", ",") + " "
        text = text.replace(f" s{place},", f" sn{place - 1},").replace(f" s{place} ", f" sn{place - 1} ")
    text = text.replace("sn-1", "s0")
    rows = "".join(f"y{place} = Unsqueeze(yt{place}, ax1) " for place in range(UNROLLED))
    every = ", ".join(f"y{place}" for place in range(UNROLLED))
    return f"{text}{rows}y = Concat<axis=1>({every}) s1 = Identity(sn{UNROLLED - 1})"


def feeds(proto: onnx.ModelProto, tokens: int, form: str, resets: str = "some") -> dict[str, np.ndarray]:
    """Inputs for so many tokens, with these `RESETS`; the numbers of a model are those of truth values."""
    rng, made = np.random.default_rng(tokens), dict[str, np.ndarray]()
    for value in proto.graph.input:
        shape = [dim.dim_value or tokens for dim in value.type.tensor_type.shape.dim]
        if value.name != "r0":
            made[value.name] = (rng.standard_normal(shape) / 2).astype(np.float32)
            continue
        truth = RESETS[resets](rng.random(shape), *(np.indices(shape)[[0, 1] if form == "scan" else [1, 0]]), tokens)
        kind = value.type.tensor_type.elem_type
        made["r0"] = (
            truth if kind == onnx.TensorProto.BOOL else (~truth).astype(onnx.helper.tensor_dtype_to_np_dtype(kind))
        )
    if "g" in made:
        made["g"] = -np.abs(made["g"])
    if "b" in made:
        made["b"] = np.abs(made["b"])
    return made


RESETS = {
    "none": lambda random, place, entry, tokens: random < 0,
    "all": lambda random, place, entry, tokens: random < 2,
    "the first": lambda random, place, entry, tokens: place == 0,
    "the last": lambda random, place, entry, tokens: place == tokens - 1,
    "some": lambda random, place, entry, tokens: random < 0.3,
    "each other ones": lambda random, place, entry, tokens: place % (entry + 5) == entry,
}
"""Which tokens are reset: by a random number, the place in its sequence, and the number of the sequence."""


def reference(given: Mapping[str, np.ndarray], form: str) -> list[np.ndarray]:
    """The output and the last state, in float64. A state is 0 in front of a token that is reset, whatever it was."""
    turned = {
        name: array if form == "scan" or name == "s0" else np.swapaxes(array, 0, 1) for name, array in given.items()
    }
    wide = {name: array.astype(np.float64) for name, array in turned.items()}
    reset = turned["r0"] if turned["r0"].dtype == bool else turned["r0"] == 0
    state, outputs = wide.get("s0", np.zeros((3, 2, 4, 6))), []
    for place in range(len(wide["q"])):
        flag = reset[place].reshape(3, -1, 1, 1)
        if "g" in wide:
            state = state * np.exp(wide["g"][place].reshape(3, 2, -1, 1))
        state = np.where(flag, 0, state)
        key, value = wide["k"][place], wide["v"][place]
        if "b" in wide:
            value = (value - np.einsum("bhkv,bhk->bhv", state, key)) * wide["b"][place][..., None]
        state = state + key[..., None] * value[..., None, :]
        outputs.append(np.einsum("bhkv,bhk->bhv", state, wide["q"][place]))
    stacked = np.stack(outputs)
    return [stacked if form == "scan" else np.swapaxes(stacked, 0, 1), state]


def assert_computes(proto: onnx.ModelProto, inputs: Mapping[str, np.ndarray], wanted: list[np.ndarray]) -> None:
    for got, each in zip(run(proto, inputs), wanted, strict=True):
        assert_same(got, each, TOLERANCE)


ROWS = {
    **{f"{name}, {FORMS[place % 3]}": (name, FORMS[place % 3]) for place, name in enumerate(EACH)},
    **{f"{name}, {form}": (name, form) for name in ("0 is chosen", "beside a decay") for form in FORMS},
}


@pytest.mark.parametrize("row", ROWS)
def test_a_spelling(row: str) -> None:
    """The model is fused, gives what it gave, and what float64 gives."""
    name, form = ROWS[row]
    spelling, proto = EACH[name], model(EACH[name], form)
    result, report = fused(proto, assume=[FINITE_SCORES])
    (block,) = report.blocks
    assert (block.status, block.kind) == ("fused", "no_softmax")
    assert block.assumed == ((FINITE_SCORES,) if spelling.chooses else ())
    assert (
        block.rule
        == f"rule: {GATED[spelling.rule]}, a decay for each {'key dimension' if ',' in spelling.gate else 'head'}"
    )
    inputs = feeds(proto, UNROLLED, form)
    wanted = reference(inputs, form)
    assert_computes(result, inputs, wanted)
    assert_computes(proto, inputs, wanted)


GATED = {"linear": "gated", "delta": "gated_delta", "gated_delta": "gated_delta"}


@cache
def made(
    name: str, form: str, target: Target = "ort", opset: int | None = None
) -> tuple[onnx.ModelProto, onnx.ModelProto]:
    """A model of `EACH`, and the fused one."""
    proto = model(EACH[name], form)
    graph = ir.from_proto(proto)
    options = Options(target, assume=frozenset([FINITE_SCORES]), **({} if opset is None else {"opset": opset}))
    assert running.fuse(graph, options).count("fused") == 1
    return proto, ir.to_proto(graph)


@pytest.mark.parametrize(
    "name", ["0 is chosen", "the gated delta rule", "some heads, beside a decay for each key dimension"]
)
@pytest.mark.parametrize("resets", RESETS)
def test_which_tokens(name: str, resets: str) -> None:
    """Around the ends of the kernels' chunks, with other tokens in each sequence."""
    proto, result = made(name, "loop")
    for tokens in (1, 2, 9, 10, 24, 25, 48, 49, 130):
        inputs = feeds(proto, tokens, "loop", resets)
        assert_computes(result, inputs, reference(inputs, "loop"))


@pytest.mark.parametrize("name", ["what is not reset", "beside a decay", "the gated delta rule"])
@pytest.mark.parametrize("spoiled", ["v", "s0", "g", "k"])
@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_undefined_numbers(name: str, spoiled: str, number: float) -> None:
    """A product with 0 keeps NaN, and makes NaN of infinity, in the model and in the operator."""
    proto, result = made(name, "loop")
    inputs = {each: np.abs(array) if each in "qkv" else array for each, array in feeds(proto, 30, "loop").items()}
    if spoiled not in inputs:
        spoiled = "v"
    inputs[spoiled].reshape(-1)[inputs[spoiled].size // 3] = number
    with np.errstate(all="ignore"):
        assert_computes(result, inputs, [each.astype(np.float64) for each in run(proto, inputs)])


CHOSEN = [name for name, spelling in EACH.items() if spelling.chooses]


@pytest.mark.parametrize("name", CHOSEN)
def test_what_is_chosen_is_left(name: str) -> None:
    """The report names the Where, and what to do."""
    proto = model(EACH[name], "scan")
    result, report = fused(proto)
    (block,) = report.blocks
    assert (block.status, block.code) == ("declined", "linear_attention")
    assert "a Where sets" in (block.reason or "")
    assert f"--assume {FINITE_SCORES}" in (block.hint or "")
    assert not any(node.domain for node in result.graph.node)


def test_why_it_is_left() -> None:
    """A Where ends NaN, and a product with 0 does not."""
    proto, result = made("0 is chosen", "loop")
    inputs = feeds(proto, 12, "loop", "each other ones")
    inputs["v"][:, 2] = np.nan
    output, last = run(proto, inputs)
    assert np.isfinite(last[1:]).all()
    assert np.isfinite(output[1:, -3:]).all()
    assert np.isnan(run(result, inputs)[1]).all()


@pytest.mark.parametrize("name", NEAR)
def test_near_misses(name: str) -> None:
    """What differs from a reset in one place is left."""
    form = "loop" if "Gather" in NEAR[name].nodes else "scan"
    _, report = fused(model(NEAR[name], form), assume=[FINITE_SCORES])
    assert not report.count("fused")


@pytest.mark.parametrize("name", TURNED)
@pytest.mark.parametrize("form", ["scan", "loop"])
def test_resets_of_other_tokens(name: str, form: str) -> None:
    """They are resets, and are fused as what they are."""
    proto = model(TURNED[name], form)
    result, report = fused(proto, assume=[FINITE_SCORES])
    assert report.count("fused") == 1
    inputs = feeds(proto, 11, form)
    assert_computes(result, inputs, [each.astype(np.float64) for each in run(proto, inputs)])


@pytest.mark.parametrize("target, opset", [("contrib", None), ("onnx", 27)])
@pytest.mark.parametrize("name", ["0 is chosen", "the gated delta rule"])
def test_standard_targets(name: str, target: Target, opset: int | None) -> None:
    proto, result = made(name, "loop", target, opset)
    for resets in RESETS:
        inputs = feeds(proto, 25, "loop", resets)
        assert_computes(result, inputs, reference(inputs, "loop"))


def test_ascend() -> None:
    graph = ir.from_proto(model(EACH["the gated delta rule"], "loop"))
    assumed = frozenset(["half-attention", "unit-inputs", "slow-decay"])
    (block,) = running.fuse(graph, Options("ascend", assume=assumed)).blocks
    assert (block.status, block.code) == ("declined", "illegal_for_target")
    assert "minus infinity" in (block.reason or "")


def test_equal_layers() -> None:
    """Layers that are equal but for what resets them are proven once."""
    proto = onnx.compose.merge_models(
        *(onnx.compose.add_prefix(model(EACH["the first position"], "scan"), prefix) for prefix in "ab"),
        io_map=[],
    )
    result, report = fused(proto)
    assert report.count("fused") == 2
    inputs = feeds(model(EACH["the first position"], "scan"), 9, "scan")
    other = {**inputs, "r0": 1 - inputs["r0"]}
    given = {f"{prefix}{name}": array for prefix, each in (("a", inputs), ("b", other)) for name, array in each.items()}
    assert_computes(result, given, [*reference(inputs, "scan"), *reference(other, "scan")])


@pytest.mark.parametrize("form", ["scan", "loop", "unrolled"])
@pytest.mark.parametrize("rule", LOW_RANK)
def test_corrections_of_rank_one(form: str, rule: str) -> None:
    """One that reads the state after the decay reads the one that is reset. One that reads the state before the decay
    does so in the operator before the reset, too, and is left."""
    proto = Model(Recipe(form, rule, reset="factor", sizes=(2, 2, 4, 6))).proto()
    result, report = fused(proto)
    assert report.count("fused") == (rule == "general")
    for tokens in (5,) if form == "unrolled" else (1, 26):
        inputs = composed_feeds(proto, {"T": tokens})
        assert_computes(result, inputs, [each.astype(np.float64) for each in run(proto, inputs)])
