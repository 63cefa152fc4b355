"""`python -m bench`: its truth against the project's reference, its tables and plots on made-up numbers, a tiny run.

No time is asserted: a test that fails on a busy machine says nothing.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.__main__ import main, parser
from bench.speed import bars, chart, curves, limits, rounds, tables, truth
from bench.speed.cases import CASES, LONG, QUICK, Case
from bench.speed.limits import Machine, NoCompiler, needed, parts
from fa_compiler import reference
from tests.systems import TOOLS

ROOT = Path(__file__).parents[2]
SMALL = Case("small", "both", 2, 4, 2, 9, 9, 8)
DRAWN = pytest.mark.skipif(find_spec("matplotlib") is None, reason="matplotlib draws the plots")


@pytest.mark.parametrize(
    "case",
    [
        SMALL,
        replace(SMALL, mask="causal"),
        replace(SMALL, mask="window", window=3),
        replace(SMALL, mask="pad"),
        replace(SMALL, mask="bias", heads=2),
        replace(SMALL, dtype="bfloat16"),
        replace(SMALL, kind="decode", rows=1),
    ],
    ids=lambda case: f"{case.kind}-{case.mask}-{case.dtype}",
)
def test_the_truth_is_that_of_the_reference(case: Case) -> None:
    data = truth.draw(case)
    query, key, value = (
        truth.heads_first(truth.from_bits(data[name], case.dtype), case, heads)
        for name, heads in (("q", case.heads), ("k", case.kv_heads), ("v", case.kv_heads))
    )
    inputs: dict[str, Any] = {"query": query, "key": key, "value": value}
    attrs: dict[str, Any] = {"head_num": case.heads, "input_layout": "BNSD", "scale_value": case.size**-0.5}
    hidden = truth.visible(case, np.arange(case.rows))
    if hidden is not None:
        inputs["atten_mask"] = ~hidden
    if case.mask == "pad":
        inputs["atten_mask"] = np.broadcast_to(~data["valid"][:, None, None], (2, 1, case.rows, case.keys))
    if case.mask == "bias":
        inputs["real_shift"], attrs["pse_type"] = data["bias"], 0
    forward = reference.run("FlashAttentionScore", inputs, attrs)
    wanted = [forward["attention_out"]]
    if case.gradient:
        dy = truth.heads_first(truth.from_bits(data["dy"], case.dtype), case, case.heads)
        given = {"softmax_max": forward["softmax_max"], "softmax_sum": forward["softmax_sum"],
                 "attention_in": forward["attention_out"], "dy": dy}  # fmt: skip
        if "real_shift" in inputs:
            given["pse_shift"] = inputs.pop("real_shift")
        gradient = reference.run("FlashAttentionScoreGrad", inputs | given, attrs)
        wanted += [gradient[name] for name in ("dq", "dk", "dv")]
    rows, right = truth.truth(case, data)
    assert len(rows) == case.rows
    for got, want in zip(right, wanted, strict=True):
        want = want.transpose(0, 2, 1, 3).reshape(got.shape)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)  # the reference rounds to float32


def test_bfloat16_rounds_to_nearest_even() -> None:
    numbers = np.array([1.0, 1 + 2**-8, 1 + 3 * 2**-8, -3.1415927], np.float32)
    assert truth.from_bits(truth.to_bits(numbers, "bfloat16"), "bfloat16").tolist() == [1, 1, 1 + 2**-6, -3.140625]


def test_an_error_of_one_row_is_seen(tmp_path: Path) -> None:
    case = replace(SMALL, kind="forward", rows=600, keys=7)
    truth.write(case, tmp_path)
    rows = np.load(tmp_path / "rows.npy")
    assert len(rows) == truth.CHECKED_ROWS and rows[0] == 0 and rows[-1] == case.rows - 1
    out = np.zeros((case.batch, case.rows, case.heads * case.size))
    out[:, rows] = np.load(tmp_path / "right_out.npy")
    assert truth.error(case, tmp_path, [out]) == 0
    out[1, rows[5], 3] += 1
    assert truth.error(case, tmp_path, [out]) > 0.1
    out[1, rows[5], 3] = np.nan
    assert not truth.error(case, tmp_path, [out]) <= 1


def test_work_is_counted() -> None:
    case = replace(SMALL, kind="forward")
    assert case.flops == 2 * 4 * 9 * 9 * 4 * 8 and case.exponentials == 2 * 4 * 81
    assert replace(case, mask="causal").pairs == 2 * 4 * 45
    assert replace(case, mask="window", window=3).pairs == 2 * 4 * (1 + 2 + 7 * 3)
    assert replace(case, kind="backward").flops == 2.5 * case.flops
    assert replace(case, kind="both").exponentials == 2 * case.exponentials
    assert replace(case, dtype="float16").cache_bytes * 2 == case.cache_bytes
    assert case.moved_bytes == 4 * 2 * 9 * 8 * (4 + 4 + 2 + 2)  # query and result, key and value
    rates = {"fma_flops": 2.0, "bf16_flops": 4.0, "exp_rate": 8.0}
    assert parts(case, rates) == {"products": case.flops / 2, "exponentials": case.exponentials / 8}
    assert parts(replace(case, dtype="bfloat16"), rates)["products"] == case.flops / 4
    assert parts(replace(case, dtype="float16"), rates)["products"] == case.flops / 2


def test_the_limit_of_tiles_is_the_longer_part() -> None:
    """The processor computes exponentials while its tiles are multiplied. float32 does not use them."""
    case = replace(SMALL, kind="forward", dtype="bfloat16")
    rates = {"fma_flops": 2.0, "bf16_flops": 4.0, "tile_flops": 16.0, "exp_rate": 8.0}
    assert case.flops / 16 > case.exponentials / 8
    assert parts(case, rates) == {"products": case.flops / 16}
    assert parts(case, rates | {"exp_rate": 0.25}) == {"exponentials": case.exponentials * 4}
    assert parts(case, rates | {"tile_flops": 0.0})["products"] == case.flops / 4
    assert parts(replace(case, dtype="float32"), rates)["products"] == case.flops / 2
    assert "tile_flops" in needed(case) and "tile_flops" not in needed(replace(case, dtype="float16"))


@TOOLS
def test_an_assembler_that_does_not_know_tiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limits are compiled without them, on machines that have tile registers, too."""
    old = tmp_path / "old-compiler"
    knows = 'case "$*" in *-U__AMX_BF16__*) exec c++ "$@" -O0;; esac'
    old.write_text(f"#!/bin/sh\n{knows}\necho no such instruction >&2\nexit 1\n")
    old.chmod(0o755)
    monkeypatch.setenv("CXX", str(old))
    machine = Machine.compile(tmp_path)
    assert machine.rate("tile_flops", 1) == 0.0 < machine.rate("fma_flops", 1)
    monkeypatch.setattr(limits, "WITHOUT_TILES", "-DNOTHING")
    with pytest.raises(NoCompiler, match="old-compiler could not compile limits.cc: no such instruction"):
        Machine.compile(tmp_path)


def test_names_are_unique_and_the_quick_ones_exist() -> None:
    names = [case.name for case in (*CASES, *LONG)]
    assert len(set(names)) == len(names) and set(QUICK) <= set(names)


def result(name: str, limit: float, threads: int = 1, **peers: float) -> dict[str, Any]:
    """One made-up row of the JSON: milliseconds of each peer, negative if it was wrong."""
    case = next(case for case in (*CASES, *LONG) if case.name == name)
    made = {
        peer.replace("_", "-").replace("STAR", "*"): {"median_ms": abs(ms), "min_ms": abs(ms), "p90_ms": abs(ms),
                                                      "calls": 3, "error": 0.5, "right": ms > 0}
        for peer, ms in peers.items()
    }  # fmt: skip
    return {"case": vars(case), "threads": threads, "limit_ms": limit, "limit_parts_ms": {"products": limit},
            "rates": {"fma_flops": 1e11, "exp_rate": 1e10}, "aim": case.aim, "others_cores": 0.5, "rounds": 3,
            "peers": made, "absent": {"ov-sdpa": "failed: no room", "ort-gqa": "no gradient"}}  # fmt: skip


RESULTS = [
    result("bert", 8.5, ours=10, ort_unfused=17, ort_mha=-9, ov_sdpaSTAR=5),
    result("gpt2", 7.9, ours=10, ort_unfused=5),
    result("bert", 4.0, threads=2, ort_unfused=8),
]


def cells(text: str, first: str) -> list[str]:
    """A row of a table."""
    (row,) = [line for line in text.splitlines() if line.startswith(f"| {first} ")]
    return [cell.strip() for cell in row.split("|")[1:-1]]


def test_the_main_table() -> None:
    text = tables.main_table(RESULTS[:2])
    assert cells(text, "bert") == ["bert", "8.5", "10", "85", "85 met", "ort-unfused 17", "50", "1.70"]
    assert cells(text, "gpt2") == ["gpt2", "7.9", "10", "79", "80 missed", "ort-unfused 5", "158", "0.50"]
    assert len({len(line) for line in text.splitlines()}) == 1
    assert cells(tables.main_table(RESULTS[2:]), "bert")[2:5] == ["-", "-", "85"]


def test_wrong_results_are_marked_and_never_the_best() -> None:
    assert tables.best_peer(RESULTS[0]) == "ort-unfused"
    assert "(9)" in cells(tables.peer_table(RESULTS[:1]), "bert")
    wrong = result("bert", 8.5, ours=-1)
    assert "1 WRONG" in tables.main_table([wrong]) and tables.reached(wrong) is False
    assert any("ours is wrong" in line for line in tables.remarks([wrong]))


def test_a_hopeless_peer_is_not_measured_again() -> None:
    slow = result("long", 100, threads=2, ours=4000, ort_mha=150, ort_unfused=700, ort_gqa=760)
    assert rounds.hopeless(slow) == {"ort-gqa": "too slow with 2 threads"}
    assert rounds.hopeless(result("bert", 1, ours=1, ort_unfused=200)) == {}


@DRAWN
def test_the_document_holds_every_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"case": "long", "peer": "ours", "threads": 2, "mib": 12.3}, {"case": "long", "peer": "x", "not": "no"}]
    about = {"processor": "2 x Made Up", "date": "2026-01-01", "versions": ["onnxruntime 9"], "isa": "avx2"}
    file = tmp_path / "bench.json"
    file.write_text(json.dumps({"about": about, "cases": RESULTS, "memory": rows}))
    assert main(["show", str(file)]) == 0
    text = (tmp_path / "bench.md").read_text(encoding="utf-8")
    assert capsys.readouterr().out == text + "\n"
    for words in ("2 x Made Up", "Held to avx2: our kernels, torch, OpenVINO", "## 1 thread\n", "## 2 threads\n",
                  "1 of 2 aims met", "| long | 12.3 | - |",
                  "bert, 1 threads: ov-sdpa: failed: no room", "other processes used 0.5 cores"):  # fmt: skip
        assert words in text
    assert "no gradient" not in text
    for threads in (1, 2):
        ElementTree.parse(tmp_path / f"bars{threads}.svg")


@DRAWN
def test_several_runs_are_shown_as_one(tmp_path: Path) -> None:
    """Of a case in two runs the last one counts. Long cases have a plot of their own."""
    about = {"processor": "2 x Made Up", "date": "2026-01-01", "versions": []}
    files = [tmp_path / "first.json", tmp_path / "second.json"]
    long = [result("chunk-32k", 8.0, ours=10.0), result("chunk-1m", 8.0, ours=10.0)]
    grown = [{"case": "chunk-32k", "peer": "ours", "threads": 1, "mib": 0.6}]
    files[0].write_text(json.dumps({"about": about, "cases": RESULTS[:2], "memory": grown}))
    files[1].write_text(json.dumps({"about": about, "cases": [result("bert", 8.5, ours=9.0), *long], "memory": []}))
    plots = tmp_path / "plots"
    plots.mkdir()
    assert main(["show", *map(str, files), "--plots", str(plots)]) == 0
    assert {file.name for file in plots.iterdir()} == {"roofline.svg", "lengths.svg"}
    assert "chunk-1m" not in (plots / "roofline.svg").read_text(encoding="utf-8")
    assert main(["show", *map(str, reversed(files))]) == 0
    shown = json.loads((tmp_path / "bench.json").read_text(encoding="utf-8"))["cases"]
    medians = {row["case"]["name"]: row["peers"]["ours"]["median_ms"] for row in shown}
    assert medians == {"bert": 10.0, "gpt2": 10.0, "chunk-32k": 10.0, "chunk-1m": 10.0}


SVG = "{http://www.w3.org/2000/svg}"


def words_of(picture: str) -> dict[str, ElementTree.Element]:
    """The words of an SVG."""
    return {"".join(each.itertext()): each for each in ElementTree.fromstring(picture).iter(f"{SVG}text")}


def noted(picture: str, tag: str) -> dict[str, ElementTree.Element]:
    """The elements of an SVG by the note that a browser shows."""
    groups = [each for each in ElementTree.fromstring(picture).iter(f"{SVG}g") if each.find(f"{SVG}title") is not None]
    return {each.findtext(f"{SVG}title", ""): next(each.iter(SVG + tag)) for each in groups}


def numbers(path: ElementTree.Element) -> list[float]:
    """The coordinates of a path."""
    return [float(word) for word in re.findall(r"-?[\d.]+", path.attrib["d"])]


def test_without_matplotlib_nothing_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(chart, "find_spec", lambda name: None)
    assert main(["all", "--out", str(tmp_path / "out")]) == 1
    message = "error: the plots need matplotlib; install it, or fa_compiler with its extra: fa_compiler[bench]\n"
    assert capsys.readouterr().err == message
    assert not (tmp_path / "out").exists()


@DRAWN
def test_the_roofline_shows_ours_and_the_best_peer() -> None:
    decode = result("decode-mha-16k", 20.0, ours=25.0)
    decode["limit_parts_ms"] = {"read": 20.0}
    picture = curves.roofline([*RESULTS[:2], decode], 1)
    points, words = noted(picture, "use"), words_of(picture)
    assert "fill: #ffffff" not in points["bert: ours 81 GFLOP/s"].attrib["style"]
    assert "fill: #ffffff" in points["bert: ort-unfused 47 GFLOP/s"].attrib["style"]
    assert not any("ov-sdpa*" in note or "ort-mha" in note for note in points)  # fewer bits, and wrong
    assert {"limit, float32", "slope: memory, 27 GB/s", "GFLOP/s", "forward, float32", "decode, float32"} <= set(words)
    assert not {"limit, bfloat16", "limit, bfloat16 in tiles"} & set(words)
    case = Case(**RESULTS[0]["case"])
    assert case.flops / case.moved_bytes == pytest.approx(128)  # 4 operands and results, 512 keys
    left, right = float(points["bert: ours 81 GFLOP/s"].attrib["x"]), chart.WIDTH - chart.RIGHT
    assert left == pytest.approx(chart.LEFT + (np.log10(128) + 1) / 5 * (right - chart.LEFT), abs=0.1)


@DRAWN
def test_the_roofline_has_room_for_tiles() -> None:
    tiles = result("bert-bf16", 1.0, ours=2.0)
    tiles["rates"] |= {"bf16_flops": 2e11, "tile_flops": 3.2e12}
    words = words_of(curves.roofline([tiles], 1))
    assert {"limit, float32", "limit, bfloat16", "limit, bfloat16 in tiles"} <= set(words)
    heights = [float(words[f"limit, {name}"].attrib["y"]) for name in curves.ROOFS.values()]
    assert heights == sorted(heights, reverse=True) and heights[-1] > chart.TOP
    assert cells(tables.rate_table([tiles]), "bf16 tile product, GFLOP/s")[1] == "3200"


@DRAWN
def test_time_and_memory_by_length() -> None:
    """The limit and a tensor of the scores are dashed; memory that was not measured has no line."""
    results = [result("rows-32k", 300.0, ours=330.0), result("rows-1m", 9600.0, ours=10000.0)]
    picture = curves.lengths(results, [{"case": "rows-32k", "peer": "ours", "mib": 0.0}], 1)
    groups = [each for each in ElementTree.fromstring(picture).iter() if each.attrib.get("id", "").startswith("curve")]
    lines = [next(group.iter(f"{SVG}path")) for group in groups]
    assert [("stroke-dasharray" in line.attrib["style"], line.attrib["d"].count("L")) for line in lines] == [
        (False, 1), (True, 1), (False, 0), (True, 1)]  # fmt: skip
    assert {"keys", "ms", "MiB", "32K", "1M", "8,192 rows, 1 head"} <= set(words_of(picture))


@DRAWN
def test_bars_are_as_long_as_the_share_of_the_limit() -> None:
    picture = bars.picture(RESULTS[:2], "a < b")
    assert "a < b" in words_of(picture)
    shown = {note: numbers(bar)[::2] for note, bar in noted(picture, "path").items()}
    shares = {note: (max(places) - min(places)) / bars.SCALE for note, places in shown.items()}
    assert shares["bert: ours 10 ms, 85 %"] == pytest.approx(85, abs=0.1)
    assert shares["gpt2: ort-unfused 5 ms, 158 %"] == pytest.approx(bars.LAST)
    assert "bert: ort-mha 9 ms, 94 %, wrong" in shares


@TOOLS
@DRAWN
def test_a_tiny_run(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench", "all", "--cases", "^small$", "--peers", "ort", "--rounds", "1",
               "--threads", "1", "--out", str(tmp_path)]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads((tmp_path / "bench.json").read_text(encoding="utf-8"))["cases"]
    assert row["case"]["name"] == "small" and row["limit_ms"] > 0 and row["aim"] is None
    assert {"ours", "ort-unfused", "ort-mha", "ort-gqa"} <= set(row["peers"])
    assert all(peer["right"] and peer["calls"] >= 1 for peer in row["peers"].values())
    assert "| small |" in (tmp_path / "bench.md").read_text(encoding="utf-8") and (tmp_path / "bars1.svg").is_file()
    assert "small" in done.stdout


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--help"], ["kernel", "--help"]):
        with pytest.raises(SystemExit) as stop:
            parser().parse_args(words)
        assert stop.value.code == 0
    text = capsys.readouterr().out
    for words in ("kernel", "gradient", "memory", "models", "all", "show", "--quick", "--peer-python", "REGEX"):
        assert words in text


@pytest.mark.parametrize("words", [["kernel", "--cases", "("], ["kernel", "--threads", "two"], ["nothing"], []])
def test_bad_words_are_refused_in_a_sentence(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 2
    assert "python -m bench" in capsys.readouterr().err


def test_a_file_that_is_missing_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "nowhere.json"]) == 1
    assert "error: " in capsys.readouterr().err
