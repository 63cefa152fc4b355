"""A correction of rank one, as RWKV-7 and GDN-2 have it, in every form of tokens. The numbers are those of the
recurrence in float64."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

import fa_compiler
from fa_compiler.passes.linear import proof, search
from fa_compiler.passes.linear.search import Found
from tests.linear_composer import LAYOUTS, LOW_RANK, TOKEN_FORMS, Change, Model, Recipe, feeds
from tests.pairs import pairwise
from tests.passes.running import Array, assert_same, fused, parse, random_feeds, run

pytestmark = pytest.mark.usefixtures("declines_change_nothing")

TOLERANCE = 1e-5
"""float32 sums over up to 40 tokens, in another order. No row is longer than about 1, so that no state grows."""
LENGTHS = (1, 9, 40)
SMALL: dict[str, Any] = {"sizes": (1, 2, 3, 5)}
GATES = {"exp": np.exp, "sigmoid": lambda x: 1 / (1 + np.exp(-x)), "softplus": lambda x: 1 / (1 + np.exp(x))}


def recurrence(recipe: Recipe, inputs: Mapping[str, Array]) -> list[Array]:
    """The output and the last state in float64."""
    order = LAYOUTS[recipe.layout]

    def tokens(name: str) -> Array:
        array = inputs[name].astype(np.float64)
        return np.transpose(array, order[: array.ndim])

    q, k, v, p, r = map(tokens, "qkvpr")
    q, k = (np.repeat(each, v.shape[1] // each.shape[1], axis=1) for each in (q, k))
    w = GATES[recipe.gate](tokens("g")).reshape(*k.shape[:3], -1)
    p = p * r if recipe.is_gated else p
    p = -p if recipe.is_subtracted else p
    state = inputs["s0"].astype(np.float64)
    state = np.swapaxes(state, 2, 3) if recipe.by_value else state
    outputs = np.zeros_like(v)
    for t in range(k.shape[2]):
        decayed = state * w[:, :, t, :, None]
        held = np.einsum("bhk,bhkv->bhv", r[:, :, t], state if recipe.rule == "dplr" else decayed)
        state = decayed + np.einsum("bhk,bhv->bhkv", k[:, :, t], v[:, :, t])
        state += np.einsum("bhk,bhv->bhkv", p[:, :, t], held)
        outputs[:, :, t] = np.einsum("bhk,bhkv->bhv", q[:, :, t], state) * (recipe.scale or 1.0)
    last = np.swapaxes(state, 2, 3) if recipe.by_value else state
    return [np.transpose(outputs, np.argsort(order)), last]


def compared(recipe: Recipe, lowest: float = -0.5) -> str | None:
    """The rule of the only attention of a recipe's model, after its numbers were compared. The gates go down to the
    lowest one."""
    model = Model(recipe).proto()
    result, report = fused(model)
    for length in LENGTHS if recipe.length is None else (recipe.length,):
        inputs = feeds(model, {"T": length, "B": 2})
        inputs["g"] = inputs["g"] * np.float32(lowest / -0.5)
        for got, wanted, original in zip(
            run(result, inputs), recurrence(recipe, inputs), run(model, inputs), strict=True
        ):
            assert_same(got, wanted, TOLERANCE)
            assert_same(got, original, TOLERANCE)
    (block,) = report.blocks
    return block.rule


ROWS = pairwise(
    LOW_RANK,
    TOKEN_FORMS,
    ("mul", "matmul", "einsum"),
    (False, True),
    (False, True),
    tuple(LAYOUTS),
    ("exp", "sigmoid", "softplus"),
)

GATED = pairwise(TOKEN_FORMS, LOW_RANK, ("mul", "matmul", "einsum"), (False, True))


@pytest.mark.parametrize("rule, form, products, by_value, by_key, layout, gate", ROWS)
def test_a_correction(
    rule: str, form: str, products: str, by_value: bool, by_key: bool, layout: str, gate: str
) -> None:
    recipe = Recipe(form, rule, by_key, gate, products, layout, by_value=by_value, scale=0.5)
    gate = "key dimension" if by_key else "head"
    assert compared(recipe) == f"rule: {rule}, a decay for each {gate}"


@pytest.mark.parametrize("form", TOKEN_FORMS)
@pytest.mark.parametrize("rule", LOW_RANK)
def test_a_subtracted_correction(rule: str, form: str) -> None:
    recipe = Recipe(form, rule, by_key=True, is_subtracted=True, scale=None, key_heads=1)
    assert compared(recipe) == f"rule: {rule}, a decay for each key dimension"


@pytest.mark.parametrize("form, rule, products, is_subtracted", GATED)
def test_what_is_written_is_made_for_each_token(form: str, rule: str, products: str, is_subtracted: bool) -> None:
    """RWKV-7 writes what it reads times a gate. Where that is multiplied token by token, no tensor holds all of it."""
    recipe = Recipe(form, rule, True, products=products, is_subtracted=is_subtracted, is_gated=True)
    assert compared(recipe) == f"rule: {rule}, a decay for each key dimension"


@pytest.mark.parametrize("form", TOKEN_FORMS)
@pytest.mark.parametrize("rule", LOW_RANK)
def test_decays_of_0(rule: str, form: str) -> None:
    """e^-200 is 0 in float32: what reads the state before such a decay still reads it."""
    assert compared(Recipe(form, rule, by_key=True), lowest=-200.0) == f"rule: {rule}, a decay for each key dimension"


@pytest.mark.parametrize("rule", LOW_RANK)
def test_without_a_first_state(rule: str) -> None:
    """The first token shows no correction, and the second one does."""
    model = Model(Recipe("unrolled", rule, by_key=True, has_state=False)).proto()
    result, report = fused(model)
    assert [block.rule for block in report.blocks] == [f"rule: {rule}, a decay for each key dimension"]
    for got, wanted in zip(run(result, feeds(model, {})), run(model, feeds(model, {})), strict=True):
        assert_same(got, wanted, TOLERANCE)


@pytest.mark.parametrize("rule", LOW_RANK)
def test_without_a_decay_both_are_one(rule: str) -> None:
    model = Model(Recipe("scan", rule, change=Change(decay="none"))).proto()
    result, report = fused(model)
    assert [block.rule for block in report.blocks] == ["rule: general"]
    for got, wanted in zip(run(result, feeds(model, {"T": 9})), run(model, feeds(model, {"T": 9})), strict=True):
        assert_same(got, wanted, TOLERANCE)


GDN_2 = (
    "e = Exp(g) ax2 = Constant<value_ints=[2]>() ax3 = Constant<value_ints=[3]>() eu = Unsqueeze(e, ax3) "
    "d = Mul(s0, eu) bk = Mul(b, k) wv = Mul(w, v) bu = Unsqueeze(bk, ax2) m0 = MatMul(bu, d) m = Squeeze(m0, ax2) "
    "c = Sub(wv, m) cu = Unsqueeze(c, ax2) ku = Unsqueeze(k, ax3) u = MatMul(ku, cu) s = Add(d, u) "
    "qu = Unsqueeze(q, ax2) y0 = MatMul(qu, s) y = Squeeze(y0, ax2)"
)


def test_a_step_of_gdn_2() -> None:
    """Value and memory have gates for each of their dimensions: what is corrected is written with the key."""
    inputs = ", ".join(f"float[3,2,4] {name}" for name in "qkgb")
    inputs += ", float[3,2,5] v, float[3,2,5] w, float[3,2,4,5] s0"
    model = parse(GDN_2, inputs=inputs, outputs="float[3,2,5] y, float[3,2,4,5] s")
    result, report = fused(model)
    assert [block.rule for block in report.blocks] == ["rule: general, a decay for each key dimension"]
    given = random_feeds(model)
    for got, wanted in zip(run(result, given), run(model, given), strict=True):
        assert_same(got, wanted, TOLERANCE)


OTHER: dict[str, tuple[Change, tuple[str, str] | None]] = {
    "write and read change places": (Change(correction="turned"), LOW_RANK),
    "write and key change places": (Change(correction="key"), LOW_RANK),
    "the state at the other side of the decay": (Change(correction="state"), ("dplr", "general")),
    "the state after the write": (Change(correction="written"), None),
    "write and read are the key": (Change(correction="key on both"), None),
    "the correction decays": (Change(correction="decayed"), None),
    "the decay after the write": (Change(decay="after"), None),
    "the decay twice": (Change(decay="twice"), None),
    "read before the write": (Change(read_state="decayed"), None),
    "read before the decay": (Change(read_state="old"), None),
    "a bonus for the token": (Change(bonus=True), None),
    "the key is read": (Change(read_key="k"), None),
    "a bent state": (Change(bent="Tanh"), None),
    "a state that is turned": (Change(turned=True), None),
    "a decay for each value": (Change(per_value=True), None),
    "a gate of another head": (Change(rolled="d"), LOW_RANK),
    "the key of the token before": (Change(shifted="k"), LOW_RANK),
    "what is written of the token before": (Change(shifted="p"), LOW_RANK),
}
"""What is changed, and the rules that the changed rules are then; None where it is left."""


@pytest.mark.parametrize("rule", LOW_RANK)
@pytest.mark.parametrize("name", OTHER)
def test_a_change(name: str, rule: str) -> None:
    """It is left, or computed as it is."""
    change, rules = OTHER[name]
    square = (1, 2, 3, 3) if change.turned or change.per_value else (1, 2, 3, 5)
    model = Model(Recipe("scan", rule, by_key=True, tokens=7, change=change, sizes=square)).proto()
    result, report = fused(model)
    found = [block.rule for block in report.blocks if block.status == "fused"]
    wanted = [] if rules is None else [f"rule: {rules[LOW_RANK.index(rule)]}, a decay for each key dimension"]
    assert found == wanted
    inputs = feeds(model, {})
    for got, original in zip(run(result, inputs), run(model, inputs), strict=True):
        assert_same(got, original, TOLERANCE)


@pytest.mark.parametrize("rule", LOW_RANK)
def test_a_decay_that_may_be_negative_has_no_logarithm(rule: str) -> None:
    _, report = fused(Model(Recipe("scan", rule, by_key=True, gate="raw", **SMALL)).proto())
    assert not report.count("fused")


def test_the_last_token_of_an_unrolled_loop_without_its_decay() -> None:
    _, report = fused(Model(Recipe("unrolled", "dplr", change=Change(late="decay"), **SMALL)).proto())
    assert not report.count("fused")


@pytest.mark.parametrize("place", [0, 2])
def test_sizes_that_no_machine_has_are_left(place: int) -> None:
    """A damaged file may declare any: no such tensor is made."""
    model = Model(Recipe("scan", "gated", tokens=7)).proto()
    for value in model.graph.input:
        dims = value.type.tensor_type.shape.dim
        if len(dims) > place:
            dims[place].dim_value = 1 << 40
    assert not fa_compiler.inspect(model).count("fused")


ALL_SCORES_EQUAL = """
rows = Constant<value_ints=[1,4,2,4]>()
keys = Constant<value_ints=[1,2,2,4]>()
q0 = Reshape(q, rows)
k0 = Reshape(k, keys)
v0 = Reshape(v, keys)
qh = Transpose<perm=[0,2,1,3]>(q0)
kt = Transpose<perm=[0,2,3,1]>(k0)
vh = Transpose<perm=[0,2,1,3]>(v0)
zero = Constant<value = float {0.0}>()
z = Mul(qh, zero)
s = MatMul(z, kt)
top = ReduceMax<axes=[1], keepdims=1>(s)
d = Sub(s, top)
c = Constant<value = float {32.0}>()
f = Mul(d, c)
e = Exp(f)
axes = Constant<value_ints=[-1]>()
total = ReduceSum<keepdims=1>(e, axes)
p = Div(e, total)
y = MatMul(p, vh)
"""


def test_candidates_that_are_refused_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all scores are equal, thousands of candidates compute them, and none of them explains the quotient."""
    refused: list[Found] = []
    match = proof.Prover._match

    def counted(prover: proof.Prover, found: Found, *others: Any) -> proof.LinearMatch | None:
        refused.append(found)
        return match(prover, found, *others)

    monkeypatch.setattr(proof.Prover, "_match", counted)
    fused(parse(ALL_SCORES_EQUAL, inputs="float[1,4,8] q, float[1,2,8] k, float[1,2,8] v", outputs="float[1,2,4,4] y"))
    assert 100 < len(refused) < (search.MOST_WORK + search.MOST_CORRECTED) // proof.REFUSED
