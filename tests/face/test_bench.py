"""`bench`: it measures what it says, and tells what it could not measure."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import fa_compiler
from fa_compiler.command_line.main import main
from fa_compiler.command_line.render import MeasuredRows
from fa_compiler.errors import InputError
from fa_compiler.measuring import benchmark
from fa_compiler.measuring.figures import Benchmark, Decoded, Measure, Timing
from fa_compiler.measuring.limits import largest_length
from fa_compiler.measuring.runs import Runs
from fa_compiler.page.gain_page import gain_page
from fa_compiler.passes.answer.report import CacheLine
from tests.graphs import harness

from .builders import attention, limited, plain, saved, with_caches_of_fixed_length


@pytest.fixture
def memory_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each model takes 3 MiB. What a model really takes is measured in a process of its own, by test_figures: such a
    process imports ONNX Runtime and takes a second."""
    monkeypatch.setattr(Runs, "_memory", lambda self, path: 3 << 20)


def outputs_probabilities() -> onnx.ModelProto:
    """Attention that is declined: its probabilities are an output."""
    model = attention()
    model.graph.output.append(helper.make_tensor_value_info("probs", TensorProto.FLOAT, ["batch", 4, "seq", "seq"]))
    return model


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
def test_a_busy_machine_is_told() -> None:
    """Where the slow runs of one model take more than twice as long as its fast ones."""
    measured = fa_compiler.bench(attention(), [4, 8], threads=1, seconds=0.01)
    steady = Timing(1.5, 1.0, 2.0, 0)
    first, second = (replace(each, original=steady, fused=steady) for each in measured.measures)
    assert not replace(measured, measures=(first, second)).warnings
    second = replace(second, fused=Timing(1.5, 1.0, 2.1, 0))
    (told,) = replace(measured, measures=(first, second)).warnings
    assert told.startswith(
        "the machine did other work while it measured 8 tokens: the runs of one model differ by more than 2"
    )
    assert told in str(replace(measured, measures=(first, second)))
    assert told.endswith("measure again")
    (told,) = replace(measured, measures=(first, second), threads=2).warnings
    assert told.endswith("measure again, or with --threads 1, in Python threads=1")


def test_the_verdict_of_the_page_is_of_a_length_that_was_measured_well() -> None:
    """The larger ratio of a length whose runs differ too much is not its first sentence, unless there is no other."""
    steady = Measure(8, original=Timing(3.0, 2.9, 3.1, 0), fused=Timing(1.5, 1.4, 1.6, 0))
    disturbed = Measure(4, original=Timing(14.0, 2.0, 18.0, 0), fused=Timing(2.0, 1.9, 2.1, 0))
    measured = Benchmark(fa_compiler.inspect(attention()), (disturbed, steady), batch=1, threads=1)
    assert '<p class="verdict">2.00 times as fast at 8 tokens</p>' in gain_page(measured)
    alone = replace(measured, measures=(disturbed,))
    assert '<p class="verdict">7.00 times as fast at 4 tokens</p>' in gain_page(alone)


def test_the_page_of_a_decoder() -> None:
    """It has the tokens a second, and says whether both models made the same."""
    timing = Timing(2.0, 1.0, 3.0, 0)
    decoded = Decoded((8.0, 4.0), 32, 31, 2e-6, 1e-5)
    measure = Measure(2048, original=timing, fused=timing, decoded=decoded)
    report = fa_compiler.inspect(attention())
    text = gain_page(Benchmark(report, (measure,), batch=1, threads=1, decode=True, caches=("past",)))
    assert ".bar, .spread { print-color-adjust: exact }" in text  # else a browser prints no bars
    assert "<th scope='col'>fused, tokens/s</th>" in text
    assert "<th scope='col'>fused, prompt ms</th>" in text
    assert "<th scope='row'>2,048</th><td>500 <small>1.00-3.00 ms</small></td>" in text
    assert "<li>Behind 2048 keys 31 of 32 tokens are the same; outputs differ by 2e-06, 1e-05 is allowed.</li>" in text
    assert replace(measure, length=1).agreement[0].startswith("behind 1 key 31 of 32 tokens are the same")


def test_the_time_of_a_short_prompt_is_not_rounded_to_zero() -> None:
    timing = Timing(2.0, 1.0, 3.0, 0)
    short, long = (
        Measure(length, original=timing, fused=timing, decoded=Decoded(times, 32, 32, 0.0, 1e-5))
        for length, times in ((8, (0.514, 0.272)), (8192, (1234.6, 99.5)))
    )
    shown = str(Benchmark(fa_compiler.inspect(attention()), (short, long), batch=1, threads=1, decode=True))
    assert re.search(r" x +0\.51 +0\.27 ", shown)
    assert re.search(r" x +1,235 +99\.50 ", shown)


@pytest.mark.usefixtures("memory_is_known")
@pytest.mark.parametrize("name", ["llama_past__tsn_eager_op14", None])
def test_a_decoder_that_is_measured_in_whole_runs(name: str | None) -> None:
    """The table names the option that measures it as it is used. A model without caches has no such line."""
    model = attention() if name is None else harness.load(name)
    shown = str(fa_compiler.bench(model, [4], threads=1, seconds=0.01))
    assert ("as a decoder is used, give --decode, in Python decode=True" in shown) == (name is not None)
    assert ("caches: past_key_0 and 3 more" in shown) == (name is not None)
    if name is not None:
        shown = str(fa_compiler.bench(with_caches_of_fixed_length(model), [4], threads=1, seconds=0.01))
        assert "caches: past_key_0 and 3 more" in shown and "--decode" not in shown


def test_lengths_of_a_sound_are_no_tokens() -> None:
    """Neither the table nor a sentence nor the page calls them so."""
    measure = Measure(4000, original=Timing(3.0, 1.0, 3.1, 0), fused=Timing(1.5, 1.4, 1.6, 0))
    measured = Benchmark(fa_compiler.inspect(attention()), (measure,), batch=1, threads=1, signals=("input_values",))
    shown, html = str(measured), gain_page(measured)
    assert shown.lstrip().startswith("length ") and "while it measured 4000 samples or pixels:" in shown
    assert "2.00 times as fast at 4,000 samples or pixels" in html
    assert "tokens" not in shown.replace("makes its tokens of them", "")
    assert replace(measured, measures=(Measure(1, fault="it fails"),)).faults == ("1 sample or pixel: it fails",)


def test_caches_that_stay_for_one_reason_are_one_line() -> None:
    """As in the report of `optimize`: a decoder with an encoder has two of them in each layer."""
    caches = [CacheLine("a", "b", 2, "cache_length"), *(CacheLine(name, reason="why") for name in ("key", "value"))]
    report = replace(fa_compiler.inspect(attention()), caches=caches)
    shown = str(Benchmark(report, (), batch=1, threads=1, decode=True))
    assert "\ncaches key, value: each stays as it is: why\n" in shown
    assert shown.count("stays as it is") == 1 and "buffer" not in shown


@pytest.mark.usefixtures("memory_is_known")
def test_fixed_sizes_are_measured_once() -> None:
    """They are told as they are: neither the length nor the batch that was asked for has an effect."""
    measured = fa_compiler.bench(attention(batch=2, length=8), [4, 16], batch=3, seconds=0.01)
    (only,) = measured.measures
    assert dict(only.shapes)["query"] == (2, 4, 8, 16)
    assert measured.fixed == ("length", "batch")
    shown, html = str(measured), gain_page(measured)
    assert "\nfixed " in shown and ", the batch of the model, " in shown
    told = "he model fixes its length, and was measured at its own sizes: query [2, 4, 8, 16]"
    assert f"\nt{told}" in shown and f"<p>T{told}" in html
    assert "times as fast at the sizes of the model" in html and "<th scope='row'>fixed</th>" in html
    assert "4 tokens" not in shown + html and "batch 3" not in shown + html
    batch = fa_compiler.bench(attention(batch=1), [4], batch=3, seconds=0.01)
    assert batch.fixed == ("batch",) and "\n4 " in str(batch)
    disturbed = replace(only, original=Timing(1.0, 1.0, 9.0, 0))
    assert "other work while it measured the model" in replace(measured, measures=(disturbed,)).warnings[0]
    assert replace(measured, measures=(Measure(4, fault="it fails"),)).faults == ("it fails",)


@pytest.mark.usefixtures("memory_is_known")
def test_the_largest_length_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The model has positions for 12 tokens: those are measured, and no text of ONNX Runtime's is shown."""
    path = str(saved(limited(12), tmp_path / "model.onnx"))
    assert main(["bench", path, "--lengths", "8,100,16", "--seconds", "0.01"]) == 0
    shown = capsys.readouterr().out
    assert "100 and 16 tokens: the model takes at most 12 tokens" in shown
    assert "1 of 1 attentions fused" in shown
    assert "ONNXRuntimeError" not in shown and "Status" not in shown
    assert main(["bench", path, "--lengths", "100", "--seconds", "0.01", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["most_tokens"] == 12
    assert [each["length"] for each in told["measures"]] == [12, 100]
    assert told["measures"][0]["ratio"] > 0
    assert told["measures"][1]["original"] is None


@pytest.mark.usefixtures("memory_is_known")
def test_default_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "LENGTHS", (4, 12, 48))
    measured = fa_compiler.bench(limited(12), seconds=0.01)
    assert [each.length for each in measured.measured] == [4, 12]
    assert measured.faults == ("48 tokens: the model takes at most 12 tokens",)


def test_the_search_for_the_largest_length() -> None:
    """It tells a limit from a model that takes multiples only, and knows the length that was measured."""
    tried: list[int] = []

    def below(limit: int, period: int = 1) -> Callable[[int], bool]:
        def runs(length: int) -> bool:
            tried.append(length)
            return length <= limit and length % period == 0

        return runs

    for limit in (1, 20, 77, 512, 2047):
        assert largest_length(below(limit), [], 2048) == limit
    tried.clear()
    assert largest_length(below(512), [128, 512], 2048) == 512
    assert tried[0] == 513 and len(tried) <= 6
    assert largest_length(below(0), [], 2048) is None
    assert largest_length(below(4096, 14), [], 2048) is None
    assert largest_length(below(4096, 32), [128], 500) is None


@pytest.mark.parametrize(
    "model, why",
    [
        (plain, "has no attention"),
        (lambda: fa_compiler.optimize(attention()).model, "is already fused; give the model from which it was made"),
        (outputs_probabilities, "has no attention that is fused; fa-compiler inspect --explain says why"),
    ],
)
def test_nothing_to_compare(
    model: Callable[[], onnx.ModelProto], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(saved(model(), tmp_path / "model.onnx"))
    assert main(["bench", path, "--lengths", "8"]) == 2
    seen = capsys.readouterr()
    assert seen.out == ""
    assert seen.err == f"fa-compiler: error: there is nothing to compare: {path} {why}\n"


@pytest.mark.usefixtures("memory_is_known")
def test_an_interrupt_keeps_what_is_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, page = str(saved(attention(), tmp_path / "model.onnx")), tmp_path / "gain.html"
    measure, count = Runs.measure, 0

    def interrupted(self: Runs, length: int, *rest: Any) -> Measure | None:
        nonlocal count
        count += 1
        if count == 2:
            raise KeyboardInterrupt
        return measure(self, length, *rest)

    monkeypatch.setattr(Runs, "measure", interrupted)
    words = ["bench", path, "--lengths", "4,8", "--seconds", "0.01", "--html", str(page)]
    assert main(words) == 130
    seen = capsys.readouterr()
    assert re.search(r"^ 4 +\d", seen.out, re.MULTILINE)
    assert seen.err == "fa-compiler: error: interrupted; the length that was finished is above\n"
    assert " times as fast at 4 tokens" in page.read_text(encoding="utf-8")
    page.unlink()
    count = 1  # nothing was measured before
    assert main(words) == 130
    assert capsys.readouterr().err == "fa-compiler: error: interrupted; nothing was written\n"
    assert not page.exists()


@pytest.mark.usefixtures("memory_is_known")
@pytest.mark.parametrize("columns", ["", "68"])
def test_rows_are_printed_when_they_are_measured(
    columns: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that is killed has shown what it measured, and has left no file beside the page's place."""
    monkeypatch.setenv("COLUMNS", columns)
    path, page = str(saved(attention(), tmp_path / "model.onnx")), tmp_path / "gain.html"
    measure, seen = Runs.measure, []

    def watched(self: Runs, length: int, *rest: Any) -> Measure | None:
        seen.append(capsys.readouterr().out)
        assert [file.name for file in tmp_path.iterdir()] == ["model.onnx"]
        return measure(self, length, *rest)

    monkeypatch.setattr(Runs, "measure", watched)
    assert main(["bench", path, "--lengths", "4,8,16", "--seconds", "0.01", "--html", str(page)]) == 0
    seen.append(capsys.readouterr().out)
    begun, four, eight, sixteen = seen
    assert begun == ""
    assert re.match(r"\n( .*\n)+ ─+\n 4 +\d", four)
    assert re.match(r" 8 +\d", eight) and "original" not in eight
    assert re.match(r" 16 +\d", sixteen) and f"wrote {page}" in sixteen
    assert not re.search(r"\n\n.*\n\n", "".join(seen).lstrip())
    if columns:
        assert max(map(len, (four + eight).splitlines())) <= int(columns)
    else:
        places = [re.search(r"\d x", text) for text in (four.splitlines()[-1], eight, sixteen)]
        assert len({place.start() for place in places if place}) == 1


def test_no_word_of_a_heading_is_broken_on_a_usual_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A decoder's table has eight columns."""
    monkeypatch.setenv("COLUMNS", "80")
    side = Timing(4.0, 3.0, 11.25, 140 << 20)
    measure = Measure(2048, runs=3, original=side, fused=side, decoded=Decoded((12.0, 11.0), 32, 32, 0.0, 1e-5))
    report = fa_compiler.inspect(attention())
    MeasuredRows().add(Benchmark(report, (measure,), 1, 2, decode=True))
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    headings = ["cached", "keys", *["original,", "fused,"] * 3, *["tokens/s", "prompt", "ms", "MiB"] * 2, "faster"]
    assert sorted(shown.partition("─")[0].split()) == sorted(headings)


@pytest.mark.parametrize("columns", [30, 60, 79, 80])
@pytest.mark.parametrize("decode", [False, True])
def test_no_word_is_broken_on_a_narrow_terminal(
    columns: int, decode: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where a table has no room, each cell is a line with its heading. A later row may have longer numbers."""
    monkeypatch.setenv("COLUMNS", str(columns))
    decoded = Decoded((12.0, 11.0), 32, 32, 0.0, 1e-5) if decode else None
    sides = [Timing(4.0, 3.0, 11.25, 140 << 20), Timing(203.4, 199.1, 209.8, 140 << 20)]
    measures = [Measure(2048, runs=3, original=side, fused=side, decoded=decoded) for side in sides]
    report, rows = fa_compiler.inspect(attention()), MeasuredRows()
    for count in (1, 2):
        rows.add(Benchmark(report, tuple(measures[:count]), 1, 2, decode=decode))
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= max(columns, 45)
    assert ("─" in shown) is (columns > 60 and (not decode or columns == 80))
    if "─" not in shown:
        assert shown.count("original, MiB: 140\n") == 2
    ranges = ["(3.00-11.25", "(199.10-209.80"] if decode else ["(3.00-11.25)", "(199.10-209.80)"]
    assert all(shown.split().count(each) == 2 for each in ranges)


def test_a_page_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is an error before anything is measured."""
    path = str(saved(attention(), tmp_path / "model.onnx"))
    assert main(["bench", path, "--html", str(tmp_path / "none" / "gain.html")]) == 2
    assert "gain.html cannot be written: there is no folder" in capsys.readouterr().err


@pytest.mark.usefixtures("memory_is_known")
def test_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It shows the figures of the JSON form; the bars of a length have widths in proportion to them. It links the page
    of the same model beside it."""
    path, page = str(saved(attention(), tmp_path / "model.onnx")), tmp_path / "gain.html"
    words = ["bench", path, "--lengths", "4,8", "--seconds", "0.02", "--json", "--html", str(page)]
    assert main(words) == 0
    told = json.loads(capsys.readouterr().out)
    text = page.read_text(encoding="utf-8")
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
    assert f"fa-compiler {' '.join(words)}" in re.sub("<[^>]+>", "", text)
    for model, links in ((path, 1), (str(saved(attention(), tmp_path / "other.onnx")), 0)):
        assert main(["inspect", model, "--html", str(tmp_path / "page.html")]) == 0
        assert main(words) == 0
        assert page.read_text(encoding="utf-8").count("<a href='page.html'>") == links


def test_nothing_measured_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It names the node, and leaves no page."""
    model = limited(12)
    model.graph.initializer[-2].CopyFrom(numpy_helper.from_array(np.ones((12, 7), np.float32), "table"))
    path, page = str(saved(model, tmp_path / "model.onnx")), tmp_path / "gain.html"
    assert main(["bench", path, "--lengths", "8,16", "--html", str(page)]) == 2
    seen = capsys.readouterr()
    assert seen.out == "" and seen.err.count("\n") == 1
    assert "no length could be measured: 8 and 16 tokens: the model does not run: its node 'embed' (Add)" in seen.err
    assert "Status" not in seen.err
    assert not page.exists()
    assert main(["bench", path, "--html", path]) == 2
    assert "is the input itself" in capsys.readouterr().err


@pytest.mark.usefixtures("memory_is_known")
def test_a_fault_of_the_fused_model_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not taken for a limit of the model."""
    optimize = benchmark.optimize
    monkeypatch.setattr(benchmark, "optimize", lambda model, *rest, **options: optimize(limited(8), *rest, **options))
    measured = fa_compiler.bench(limited(12), [4, 10], seconds=0.01)
    assert [each.length for each in measured.measured] == [4]
    (fault,) = measured.faults
    assert fault == "10 tokens: only the fused model does not run: its node 'embed' (Add) refuses these sizes"
    assert measured.most is None


def test_wrong_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(saved(attention(), tmp_path / "model.onnx"))
    for words, message in (
        (["--lengths", "1,a"], "--lengths '1,a' is not of the form 128,512,2048"),
        (["--lengths", "8,0"], "a length is a whole number from 1 upwards, not 0"),
        (["--batch", "-1"], "a batch is a whole number from 1 upwards, not -1"),
        (["--threads", "0"], "a number of threads is a whole number from 1 upwards, not 0"),
        (["--threads", "100000"], "100000 threads are more than this machine's "),
        (["--seconds", "0"], "0 is not a number above 0"),
        (["--in-place-caches"], "give --decode\n"),
        (["--decode"], "has no caches"),
    ):
        assert main(["bench", path, *words]) == 2
        assert message in capsys.readouterr().err
    with pytest.raises(InputError, match="no such file"):
        fa_compiler.bench(tmp_path / "none.onnx")
    for lengths, message in (
        ("128", r"a list of numbers, such as \[128, 512\], not '128'"),
        ([1.5], "a length is a whole number from 1 upwards, not 1.5"),
        ([], "and not an empty one"),
    ):
        with pytest.raises(InputError, match=message):
            fa_compiler.bench(path, lengths)  # type: ignore[arg-type]


def test_the_message_names_the_model_that_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, optimize = saved(attention(), tmp_path / "model.onnx"), benchmark.optimize

    def damaging(model: Path, output: Path, **options: Any) -> fa_compiler.Result:
        result = optimize(model, output, **options)
        damaged = onnx.load(output)
        damaged.graph.node[0].op_type = "Unknown"
        onnx.save(damaged, output)
        return result

    monkeypatch.setattr(benchmark, "optimize", damaging)
    with pytest.raises(InputError, match=f"ONNX Runtime cannot load the fused form of {path}: "):
        fa_compiler.bench(path, [4], seconds=0.01)
