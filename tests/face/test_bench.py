"""`bench`: it measures what it says, and tells what it could not measure."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import fa_compiler
from fa_compiler.command_line.main import main
from fa_compiler.comparison import benchmark
from fa_compiler.errors import InputError

from .builders import attention, positions, saved


@pytest.fixture
def memory_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each model takes 3 MiB. What a model really takes is measured in a process of its own, by test_figures: such a
    process imports ONNX Runtime and takes a second."""
    monkeypatch.setattr(benchmark._Pair, "_memory", lambda self, path: 3 << 20)


def test_figures() -> None:
    """Each length once, with the shapes that it was measured for; the ratio is that of the medians."""
    measured = fa_compiler.bench(attention(), [4, 8, 4], threads=1, seconds=0.05)
    assert [each.length for each in measured.measures] == [4, 8]
    for each in measured.measures:
        assert dict(each.shapes)["query"] == (1, 4, each.length, 16)
        assert each.runs >= 5
        assert each.original is not None and each.fused is not None
        for timing in (each.original, each.fused):
            assert 0 < timing.low <= timing.median <= timing.high
            assert timing.memory > 1 << 20
        assert each.ratio == each.original.median / each.fused.median
    assert measured.report.count("fused") == 1
    assert (measured.batch, measured.threads) == (1, 1)


@pytest.mark.usefixtures("memory_is_known")
def test_fixed_sizes_are_measured_once() -> None:
    (only,) = fa_compiler.bench(attention(batch=2, length=8), [4, 8], seconds=0.01).measures
    assert dict(only.shapes)["query"] == (2, 4, 8, 16)


@pytest.mark.usefixtures("memory_is_known")
def test_a_length_that_does_not_run_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The model has positions for 8 tokens."""
    path = str(saved(positions(), tmp_path / "model.onnx"))
    assert main(["bench", path, "--lengths", "8,16", "--seconds", "0.01"]) == 0
    shown = capsys.readouterr().out
    assert "16 tokens: the model does not run: " in shown
    assert "0 of 0 attentions fused" in shown
    assert main(["bench", path, "--lengths", "8,16", "--seconds", "0.01", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["measures"][0]["ratio"] > 0
    assert told["measures"][1]["fault"]
    assert told["measures"][1]["original"] is None


@pytest.mark.usefixtures("memory_is_known")
def test_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It shows the figures of the JSON form; the bars of a length have widths in proportion to them. It links the page
    of the same model beside it."""
    path, page = str(saved(attention(), tmp_path / "model.onnx")), tmp_path / "gain.html"
    words = ["bench", path, "--lengths", "4,8", "--seconds", "0.02", "--json", "--html", str(page)]
    assert main(words) == 0
    told = json.loads(capsys.readouterr().out)
    text = page.read_text()
    assert "http" not in text
    assert "href" not in text
    assert " times as fast at " in text
    bars = [float(width) for width in re.findall(r'class="bar (?:original|fused)" style="width:([\d.]+)%"', text)]
    assert len(bars) == 8
    for original, fused in zip(bars[::2], bars[1::2], strict=True):
        assert max(original, fused) == 85
    for original, fused, each in zip(bars[:4:2], bars[1:4:2], told["measures"], strict=True):
        assert original / fused == pytest.approx(each["ratio"], rel=0.01)
        assert f"{each['ratio']:.2f} x" in text
    assert f"fa_compiler {fa_compiler.__version__}" in text
    assert f"fa-compiler {' '.join(words)}" in text
    for model, links in ((path, 1), (str(saved(attention(), tmp_path / "other.onnx")), 0)):
        assert main(["inspect", model, "--html", str(tmp_path / "page.html")]) == 0
        assert main(words) == 0
        assert page.read_text().count("<a href='page.html'>") == links


@pytest.mark.usefixtures("memory_is_known")
def test_a_page_of_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where no length runs, and where nothing is fused."""
    path, page = str(saved(positions(), tmp_path / "model.onnx")), tmp_path / "gain.html"
    assert main(["bench", path, "--lengths", "16", "--seconds", "0.01", "--html", str(page)]) == 0
    assert f"wrote {page}\n" in capsys.readouterr().out
    assert "No length could be measured." in page.read_text()
    assert main(["bench", path, "--lengths", "8", "--seconds", "0.01", "--html", str(page)]) == 0
    assert "Nothing is fused" in page.read_text()
    assert main(["bench", path, "--html", path]) == 2
    assert "is the input itself" in capsys.readouterr().err


def test_wrong_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(saved(attention(), tmp_path / "model.onnx"))
    for words, message in (
        (["--lengths", "1,a"], "--lengths '1,a' is not of the form 128,512,2048"),
        (["--lengths", "0"], "lengths, batch and threads are numbers from 1 upwards"),
        (["--batch", "-1"], "lengths, batch and threads are numbers from 1 upwards"),
    ):
        assert main(["bench", path, *words]) == 2
        assert message in capsys.readouterr().err
    with pytest.raises(InputError, match="no such file"):
        fa_compiler.bench(tmp_path / "none.onnx")
