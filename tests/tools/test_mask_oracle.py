"""The oracle confirms the planner's plans, and refutes plans that are changed so that some row is another."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import onnx.parser
import pytest

import fa_compiler
from fa_compiler.passes.masks.mask import MaskPlan
from fa_compiler.passes.masks.score_ops import Add, Select
from tools.fuzz.mask_oracle import Planned, Verdict, judged, verdict

INPUTS = "float[2,4,S,8] q, float[2,4,T,8] k, float[2,4,T,8] v"
LOWEST = "-3.4028234663852886e38"

MODELS: dict[str, tuple[str, str, str]] = {
    "no mask": ("", "", "none"),
    "a selection of -inf": ("bool[2,1,1,T] m", "f = Constant<value_float=-inf>() x = Where(m, s, f)", "atten_mask"),
    "a selection of the lowest number": (
        "bool[2,1,1,T] m",
        f"f = Constant<value_float={LOWEST}>() x = Where(m, s, f)",
        "atten_mask",
    ),
    "a selection of -1e4, which the scores may be near": (
        "bool[2,1,1,T] m",
        "f = Constant<value_float=-1e4>() x = Where(m, s, f)",
        "atten_mask",
    ),
    "an added mask": (
        "bool[2,1,1,T] m",
        f"z = Constant<value_float=0.0>() f = Constant<value_float={LOWEST}>() a = Where(m, z, f) x = Add(s, a)",
        "atten_mask",
    ),
    "a bias, then a negated multiple of the lowest number": (
        "int32[T] m, float[2,4,1,T] b",
        "t1 = Tanh(b) w = Constant<value_float=100.0>() c = Mul(t1, w) d = Add(s, c) "
        "o = Constant<value_float=1.0>() n = Cast<to=1>(m) i = Sub(o, n) "
        f"f = Constant<value_float={LOWEST}>() a = Mul(i, f) g = Neg(a) x = Sub(d, g)",
        "real_shift",
    ),
    "a given bias": ("float[2,1,S,T] m", "x = Add(s, m)", "real_shift"),
    "a bias, then a selection": (
        "float[1,4,S,T] b, bool[2,1,1,T] m",
        "c = Tanh(b) d = Add(s, c) f = Constant<value_float=-inf>() x = Where(m, d, f)",
        "atten_mask+real_shift",
    ),
    "a selection, then a bias": (
        "float[1,4,S,T] b, bool[2,1,1,T] m",
        f"f = Constant<value_float={LOWEST}>() d = Where(m, s, f) x = Add(d, b)",
        "atten_mask+real_shift",
    ),
    "a mask behind a number that swallows": (
        "bool[2,1,S,T] m, bool[1,1,S,T] n",
        f"c = Constant<value_float=-1e9>() b = Add(s, c) f = Constant<value_float={LOWEST}>() "
        "z = Constant<value_float=0.0>() a = Where(m, z, f) d = Add(b, a) l = Neg(f) e = Where(n, z, l) x = Add(d, e)",
        "atten_mask+real_shift",
    ),
}
"""Further inputs, the terms from s to x, and the label of the plan."""


def planned(name: str) -> tuple[Planned, Verdict]:
    """The plan of a model, with its verdict."""
    inputs, terms, _ = MODELS[name]
    body = terms or "x = Identity(s)"
    given = f"{INPUTS}, {inputs}" if inputs else INPUTS
    model = onnx.parser.parse_model(
        f"""<ir_version: 9, opset_import: ["": 17]> g ({given}) => (float[2,4,S,8] y)
        {{ t = Transpose<perm=[0,1,3,2]>(k) s = MatMul(q, t) {body} p = Softmax<axis=-1>(x) y = MatMul(p, v) }}"""
    )
    verdicts: list[tuple[Planned, Verdict]] = []
    with judged(verdicts):
        report = fa_compiler.inspect(model)
    assert report.count("fused") == 1
    # The planner also makes plans that would need more assumptions, for the report.
    return [each for each in verdicts if not each[0].planner.options.assume][-1]


def test_a_step_that_reads_a_mask_as_a_whole_is_unread() -> None:
    """Every score is swallowed, and the plan adds the mask as a tensor. The oracle sees it in two terms."""
    made, answer = planned("a mask behind a number that swallows")
    assert isinstance(made.plan.bias[1], Add)
    assert answer.word == "unread", answer


@pytest.mark.parametrize("name", [name for name in MODELS if name != "a mask behind a number that swallows"])
def test_plans_are_confirmed(name: str) -> None:
    made, answer = planned(name)
    assert made.plan.mask_label == MODELS[name][2]
    assert answer == Verdict("confirmed")


def changed(plan: MaskPlan) -> Iterator[tuple[str, MaskPlan]]:
    """The plan after one change, each of which is wrong for some row."""
    if plan.masked:
        yield "the mask is lost", replace(plan, masked=())
    if plan.masked and plan.masked_score is None:
        for rule in {"nan", "mean", "unmasked", "zero"} - {plan.empty_rows}:
            yield f"an empty row is {rule}", replace(plan, empty_rows=rule)
    if plan.masked_score is not None:
        yield "masked keys have no score", replace(plan, masked_score=None, adds_bias_to_masked=False)
        yield "masked keys have another score", replace(plan, masked_score=1.0)
        yield "masked keys have no value", replace(plan, drops_masked_values=True)
    for place, step in enumerate(plan.bias):
        before, after = plan.bias[:place], plan.bias[place + 1 :]
        yield "a step of the bias is lost", replace(plan, bias=(*before, *after))
        if isinstance(step, Add):
            yield "a step has another sign", replace(plan, bias=(*before, replace(step, sign=-step.sign), *after))
        if isinstance(step, Select):
            yield "a step fills the others", replace(plan, bias=(*before, replace(step, keep=not step.keep), *after))


@pytest.mark.parametrize("name", MODELS)
def test_changed_plans_are_refuted(name: str) -> None:
    made, _ = planned(name)
    for what, plan in changed(made.plan):
        assert verdict(replace(made, plan=plan)).word in ("refuted", "unread"), what


def test_the_detail_shows_a_row() -> None:
    made, _ = planned("a selection of -inf")
    answer = verdict(replace(made, plan=replace(made.plan, empty_rows="mean")))
    assert answer.word == "refuted"
    assert "by the terms and" in answer.detail and "nan" in answer.detail
