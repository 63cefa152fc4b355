"""`python -m bench.threads`: the simulated schedule of the kernels."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from bench import threads
from bench.speed.cases import CASES, Case
from tests.systems import TOOLS

NAMED = {case.name: case for case in CASES}


@TOOLS
def test_the_threads_of_ordinary_machines_are_busy() -> None:
    """At most 5 % is idle where each thread has at least seven units of 32 rows; more where there are too few units."""
    few = Case("few", "forward", 1, 12, 12, 32, 32, 64)
    busy = [(NAMED[name], count) for name in ("bert", "vit", "gpt2", "llama-prefill") for count in (2, 8, 16)]
    *idle, too_many = threads.simulate([*busy, (few, 128)])
    assert max(idle) <= 5.0
    # Twelve tasks, one for each head.
    assert too_many == pytest.approx(100 * (1 - 12 / 128), abs=0.1)


@TOOLS
def test_the_threads_share_the_heads_of_a_gradient() -> None:
    """Twelve heads on eight threads: one task for each head would leave a quarter of the time idle."""
    twelve = [(NAMED[name], 8) for name in ("bwd-bert", "bwd-gpt2")]
    alone, *shared = threads.simulate([(NAMED["bwd-gpt2"], 1), *twelve], "backward")
    assert alone == 0.0
    assert max(shared) <= 6.0


def test_the_tables_and_the_plot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mask that does not change who does what has no row. In the plot, a case in which little is idle has no line."""
    monkeypatch.setattr(
        threads, "simulate", lambda problems, kind: [float(count) * (case.name != "vit") for case, count in problems]
    )
    pytest.importorskip("matplotlib")
    assert threads.main(["--threads", "4,96", "--plot", str(tmp_path / "plot.svg")]) == 0
    for kind, table in zip(("forward", "backward"), capsys.readouterr().out.split("\n\n"), strict=False):
        head, _, *rows = table.splitlines()
        assert head == "| case | sizes | 4 | 96 |"
        names = [row.split()[1] for row in rows]
        assert names == [case.name for case in CASES if case.kind == kind and case.dtype == "float32"
                         and case.name not in ("bert-pad", "t5-bias")]  # fmt: skip
        assert all(row.endswith("| 0.0 | 0.0 |" if "| vit |" in row else "| 4.0 | 96.0 |") for row in rows)
    words = [each.text for each in ElementTree.parse(tmp_path / "plot.svg").iter() if each.tag.endswith("text")]
    assert {"bert", "all others", "threads", "%"} <= set(words) and "vit" not in words


def test_a_missing_compiler_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(SystemExit, match="no C\\+\\+ compiler no-such-compiler"):
        threads.simulate([(NAMED["bert"], 2)])
