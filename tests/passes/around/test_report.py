"""What a report says of norms, gated activations and rotary positions."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from fa_compiler.passes import Options
from fa_compiler.passes.answer.report import Around, Code, Report
from tests.passes.around.running import fused
from tests.passes.around.test_rms_norm import NORM, TWO, model

FUSED = Around("n", "fused", "RmsNorm", "node", replaced=7, added=1)
DECLINED = Around("m", "declined", code=Code.SHAPE, reason="the weight 'w' is long", culprit="m", hint="shorten it")


def test_lines_of_one_kind_are_one() -> None:
    other = Around("o", "declined", code=Code.SHAPE, reason="the weight 'v' is long", culprit="o", hint="shorten it")
    gate = Around("g", "fused", "SwiGlu", "node", replaced=3, added=2, rounded=True)
    assert Report([], around=[FUSED, DECLINED, gate, FUSED, other]).around_lines == [
        "around attention: 2 RmsNorm, 1 SwiGlu; 17 nodes became 4; "
        "1 of them compute in float32 what the model rounds to 16 bits",
        "around attention: m: declined: shape: the weight 'w' is long, and 1 more like it; try: shorten it",
    ]
    assert Report([], around=[DECLINED]).around_lines == [f"around attention: {DECLINED}; try: shorten it"]
    assert Report([]).around_lines == []
    assert str(replace(DECLINED, culprit="w")).endswith("the weight 'w' is long [w]")
    assert str(FUSED) == "n: RmsNorm, in the place of 7 nodes"


def test_json() -> None:
    _, report = fused(model("x = Add(a, b) " + NORM + "y = Mul(n, w)", TWO))
    (line,) = json.loads(json.dumps(report.to_json()))["around"]
    assert (line["status"], line["op"], line["replaced"], line["added"]) == ("fused", "AddRmsNorm", 8, 1)
    assert line["code"] is None
    assert Report([], around=[DECLINED]).to_json()["around"][0]["code"] == "shape"


def test_a_model_in_which_only_these_are_fused_has_changed() -> None:
    assert Report([], around=[FUSED]).is_changed
    assert not Report([], around=[DECLINED]).is_changed


def test_the_option() -> None:
    assert Options("ascend").fuses_around
    assert not Options("ascend", only="attention").fuses_around
    assert not Options("ascend", divided=True).fuses_around
    assert not Options().fuses_around
    with pytest.raises(ValueError, match="--only needs --target ascend"):
        Options(only="attention")
