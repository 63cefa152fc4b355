"""The training example: the original and the fused graph learn alike."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

import fa_compiler

EXAMPLE = runpy.run_path(str(Path(__file__).parents[1] / "examples" / "train.py"), run_name="example")
PATH = "{http://www.w3.org/2000/svg}path"


def _first_steps(count: int) -> tuple[Any, Any]:
    return EXAMPLE["train"](count)


def test_the_kept_graph_is_fused_both_ways() -> None:
    """Both layers with their gradients; the softmax of the loss is no attention."""
    report = fa_compiler.optimize(EXAMPLE["load_graph"]()).report
    assert [block.status for block in report.blocks] == ["fused"] * 4 + ["not_attention"]
    assert [block.mask for block in report.blocks[:4]] == ["causal"] * 4
    assert "a loss" in (report.blocks[4].reason or "")


def test_a_step_reads_tokens_and_targets() -> None:
    """The later of two tokens has no part in what comes before it."""
    model = EXAMPLE["load_graph"]()
    session, rng = EXAMPLE["session_of"](model), np.random.default_rng(0)
    feeds = EXAMPLE["start_parameters"](model) | EXAMPLE["draw_batch"](model, rng)
    (loss,) = session.run(["loss"], feeds)
    for name in ("tokens", "targets"):
        other = feeds | {name: np.where(np.arange(feeds[name].shape[1]) == 7, 0, feeds[name])}
        assert session.run(["loss"], other)[0] != loss


def test_the_curves_agree() -> None:
    """Four steps: the losses by float32 rounding, and they fall."""
    original, fused = _first_steps(4)
    assert EXAMPLE["difference"](original.losses, fused.losses) < 2e-5
    assert original.losses[-1] < original.losses[0] - 0.1
    assert not np.array_equal(original.losses[0], original.losses[1])


def test_the_gradients_of_a_step_agree() -> None:
    model = EXAMPLE["load_graph"]()
    fused = fa_compiler.optimize(model).model
    feeds = EXAMPLE["start_parameters"](model) | EXAMPLE["draw_batch"](model, np.random.default_rng(0))
    wanted, found = (EXAMPLE["session_of"](each).run(None, feeds) for each in (model, fused))
    for output, one, other in zip(model.graph.output, wanted, found, strict=True):
        scale = float(np.abs(one).max())
        assert np.abs(one - other).max() <= 1e-5 * scale, output.name


@pytest.mark.parametrize("drawn", [False, True])
def test_the_script(drawn: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It prints both curves and times, and draws them if it is asked to."""
    picture = tmp_path / "curves.svg"
    if drawn:
        pytest.importorskip("matplotlib")
    assert EXAMPLE["main"](["--steps", "2", *(["--plot", str(picture)] if drawn else [])]) == 0
    assert "ms original" in capsys.readouterr().out
    assert picture.exists() == drawn
    if drawn:
        lines = [each for each in ElementTree.parse(picture).iter() if each.attrib.get("id") in ("original", "fused")]
        assert [next(line.iter(PATH)).attrib["d"].count("L") for line in lines] == [1, 1]


def test_a_plot_without_matplotlib_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(EXAMPLE["main"].__globals__, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as stop:
        EXAMPLE["main"](["--plot", str(tmp_path / "curves.svg")])
    assert stop.value.code == 2
    assert "curves.svg: this needs matplotlib" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--steps", "0"], ["--plot", "/nowhere/curves.svg"]])
def test_arguments_are_checked_before_the_work(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        EXAMPLE["main"](arguments)
    assert stop.value.code == 2
    assert f"error: {arguments[0]}" in capsys.readouterr().err
