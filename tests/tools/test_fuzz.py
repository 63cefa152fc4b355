"""The search for faults: the engine, and a few cases of each kind."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from itertools import count, islice
from pathlib import Path

import pytest

from fa_compiler.lowering.ascend.onnx_route import plugin_reads
from fa_compiler.passes.ops.contrib import POINTWISE_CONTRIB
from tests.systems import LIMITS
from tools.fuzz import checks, rules
from tools.fuzz.__main__ import main
from tools.fuzz.corpus import corpus
from tools.fuzz.engine import _runtime_asks_too_much
from tools.fuzz.kind import GROUPS, chosen, load, names
from tools.fuzz.variants import operator_of
from tools.fuzz.worker import checked

pytestmark = LIMITS

FAULTY = "tools.fuzz.faulty.ends"


@pytest.mark.parametrize("name", names())
def test_cases_of_each_kind(name: str) -> None:
    kind = load(name)
    outcomes = [checked(kind, seed) for seed in range(2)]
    assert all(outcome.word for outcome in outcomes)
    assert checked(kind, 1) == outcomes[1]


@pytest.mark.parametrize("op_type", ["GlobalMaxPool", "ScatterND", "Softmax", "TopK"])
def test_a_rule_of_the_front_end_that_is_missing(op_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the rules of an operator, a few of its variants are findings; with them, none is."""
    kind, seeds = load("atc_front_end"), islice((seed for seed in count() if operator_of(seed) == op_type), 30)
    drawn = list(seeds)
    assert not [seed for seed in drawn if checked(kind, seed).finding is not None]
    cases = {name: case for name, case in plugin_reads.CASES.items() if name != op_type}
    monkeypatch.setattr(plugin_reads, "CASES", cases)
    titles = {outcome.finding.title for seed in drawn if (outcome := checked(kind, seed)).finding is not None}
    assert any(op_type in title for title in titles)


def test_operators_of_onnx_runtime_are_drawn_in_its_domain() -> None:
    """Without it ONNX Runtime refuses the model, and the draw is left out."""
    cases = [case for seed in range(80) if (case := rules.drawn(random.Random(seed))) is not None]
    nodes = [node for case in cases for node in case.model.graph.node if node.op_type in POINTWISE_CONTRIB]
    assert "com.microsoft" in {node.domain for node in nodes}
    assert {node.domain for node in nodes if node.op_type != "Gelu"} == {"com.microsoft"}  # Gelu is in ai.onnx, too


def test_what_is_left_out_of_the_measure_is_there() -> None:
    """Every row of excluded.tsv is about a check that passes/ has, and says why."""
    checks.instrument_all()
    places = {(check.file, check.function, check.text) for check in checks.CHECKS}
    files = {(file, "*", "*") for file, _, _ in places}
    rows = checks.excluded()
    assert set(rows) <= places | files
    assert all(rows.values())


def test_kept_tests_are_there() -> None:
    """The judge of a kept model reads the name of its test. After a test is renamed, tools/fuzz/corpus.py writes the
    models anew."""
    kept = {each.test for each in corpus()}
    files = {checks.ROOT / test.partition("::")[0] for test in kept}
    sources = {path: path.read_text(encoding="utf-8") if path.exists() else "" for path in files}
    missing = [
        test
        for test in kept
        if f"def {test.rpartition('::')[2]}(" not in sources[checks.ROOT / test.partition("::")[0]]
    ]
    assert kept and not missing


def test_checks_are_taken_away() -> None:
    """The modules of passes/ are imported behind the switches, in a process of their own."""
    few = ["--cases", "12", "--checks", "1", "--workers", "1"]
    command = [sys.executable, "-m", "tools.fuzz.checks", "compose", *few]
    done = subprocess.run(command, cwd=checks.ROOT, capture_output=True, text=True, check=True)
    found = re.search(r"\d+ checks, \d+ left out; (\d+) reached", done.stdout)
    assert found is not None and int(found[1]) > 0, done.stdout


def test_words_for_kinds() -> None:
    assert chosen(["all"]) == names()
    assert set(chosen([*GROUPS])) == set(names())
    with pytest.raises(ValueError, match="unknown kind 'grafs'"):
        chosen(["grafs"])


def test_what_a_run_finds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A crash, what a sanitizer reports, a hang and an exception are findings; the worker is replaced and the next run
    goes on."""
    arguments = [FAULTY, "--cases", "30", "--workers", "1", "--seed", "2", "--state", str(tmp_path), "--reduce"]
    assert main(arguments) == 1
    told = capsys.readouterr()
    assert f"{FAULTY}:{2 << 32 | 8} two cases of one fault" in told.err
    assert "6 of 5 kinds" in told.out
    kept = [json.loads(path.read_text(encoding="utf-8")) for path in (tmp_path / "findings" / FAULTY).glob("*.json")]
    found = {each["title"]: [seed & 0xFFFFFFFF for seed in each["seeds"]] for each in kept}
    crash, hang = (next(title for title in found if word in title) for word in ("SIGABRT in check", "hang in check"))
    reported = "AddressSanitizer: heap-buffer-overflow at tile.hpp:12 in check (ends.py)"
    expected = {
        crash: [3],
        reported: [12],
        hang: [5],
        "ZeroDivisionError in check (ends.py)": [7],
        "two cases of one fault": [8, 9],
    }
    assert found == expected
    (reduced,) = (each for each in kept if "reduced" in each)
    assert reduced["reduced"] == "smaller"
    assert [path.read_bytes() for path in (tmp_path / "findings" / FAULTY).glob("*.reduced.bin")] == [b"d"]
    assert json.loads((tmp_path / f"{FAULTY}-2.json").read_text(encoding="utf-8"))["done"] == 30
    assert main([*arguments[:2], "4", *arguments[3:]]) == 0
    assert json.loads((tmp_path / f"{FAULTY}-2.json").read_text(encoding="utf-8"))["done"] == 34
    assert json.loads((tmp_path / f"{FAULTY}-2.json").read_text(encoding="utf-8"))["words"]["fused"] == 28


@pytest.mark.parametrize(
    ("caller", "is_the_runtime"),
    [
        ("site-packages/onnxruntime/capi/onnxruntime_pybind11_state.so", True),
        ("build/sanitize/libfa_compiler_ort.so", False),
    ],
)
def test_who_asks_for_more_memory_than_a_sanitizer_has(caller: str, is_the_runtime: bool) -> None:
    words = (
        "==1==ERROR: AddressSanitizer: requested allocation size 0x40000000000 exceeds maximum supported size\n"
        f"    #0 0x7f in operator new(unsigned long) asan_new_delete.cpp:107\n    #1 0x7e  ({caller}+0x16)\n"
        "SUMMARY: AddressSanitizer: allocation-size-too-big asan_new_delete.cpp:107 in operator new(unsigned long)\n"
    )
    assert _runtime_asks_too_much(words) == is_the_runtime
