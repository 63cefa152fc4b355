"""The same by processes of MPI, where mpi4py and mpirun are installed."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from fa_compiler.comparison.feeds import save_arrays
from fa_compiler.parallel import mpi

from .decoding import by_one as steps_by_one
from .decoding import inputs_of
from .running import EXAMPLES, by_one, check, content, sharded, text

MPIRUN = shutil.which("mpirun", path=os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", ""))))
needs_mpi = pytest.mark.skipif(
    MPIRUN is None or importlib.util.find_spec("mpi4py") is None, reason="mpi4py or mpirun is not installed"
)
RUN = ("-m", "fa_compiler", "run")


def start(ranks: int, *words: object) -> subprocess.Popen[str]:
    command = [str(MPIRUN), "-n", str(ranks), sys.executable, *RUN, *map(str, words)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@needs_mpi
@pytest.mark.parametrize("ranks, method", [(2, "all-to-all"), (3, "ring"), (4, "gather")])
def test_processes(ranks: int, method: str, tmp_path: Path) -> None:
    feeds = text("llama", 21)
    save_arrays(tmp_path / "x.npz", feeds)
    path = sharded("llama", ranks, method).path
    process = start(ranks, path, "--inputs", tmp_path / "x.npz", "--outputs", tmp_path / "y.npz")
    assert process.communicate(timeout=120)[1] == ""
    assert process.returncode == 0
    with np.load(tmp_path / "y.npz") as archive:
        check(by_one("llama", feeds), dict(archive))


@needs_mpi
def test_decoding(tmp_path: Path) -> None:
    """From file to file: whole caches, caches in parts, whole outputs."""
    name, ranks = "llama_past__tsn_sdpa_op17", 3
    result = sharded(name, ranks)
    feeds = inputs_of(name, 4, (1, 1, 1), result.report.caches)
    for number, step in enumerate(feeds):
        save_arrays(tmp_path / f"x{number}.npz", step)
        words = ["--inputs", tmp_path / f"x{number}.npz", "--outputs", tmp_path / f"y{number}.npz"]
        words += ["--caches", tmp_path / f"y{number - 1}.npz"] if number else []
        process = start(ranks, result.path, *words, *(["--parts"] if number < 2 else []))
        assert process.communicate(timeout=120)[1] == ""
        assert process.returncode == 0
    with np.load(tmp_path / "y2.npz") as archive:
        check(steps_by_one(content(name), feeds, result.report.caches)[2], dict(archive))


@needs_mpi
@pytest.mark.parametrize("wrong", ["number of ranks", "inputs", "model"])
def test_one_error_on_all_ranks(wrong: str, tmp_path: Path) -> None:
    save_arrays(tmp_path / "x.npz", text("llama", 21))
    path, x, ranks = sharded("llama", 3, "ring").path, tmp_path / "x.npz", 3
    if wrong == "number of ranks":
        ranks, said = 2, "is made for 3 ranks, and runs on 2"
    elif wrong == "inputs":
        x, said = tmp_path / "z.npz", "z.npz: no such file"
    else:
        path, said = EXAMPLES / "llama.onnx", "is not made for 3 ranks"
    process = start(ranks, path, "--inputs", x, "--outputs", tmp_path / "y.npz")
    error = process.communicate(timeout=120)[1]
    assert error.count(said) == ranks
    assert process.returncode != 0
    assert [each.name for each in tmp_path.iterdir()] == ["x.npz"]


@needs_mpi
def test_a_rank_that_fails_while_it_computes(tmp_path: Path) -> None:
    """The last token is none that the model knows: the rank that has it says so, and ends the others."""
    feeds = text("bert", 21)
    feeds["input_ids"][0, -1] = 999
    save_arrays(tmp_path / "x.npz", feeds)
    path = sharded("bert", 3, "gather").path
    process = start(3, path, "--inputs", tmp_path / "x.npz", "--outputs", tmp_path / "y.npz")
    error = process.communicate(timeout=60)[1]
    assert re.search(r"fa-compiler: error: rank 2: .*model.onnx fails in ONNX Runtime: .*out of .*bounds", error)
    assert process.returncode != 0
    assert [each.name for each in tmp_path.iterdir()] == ["x.npz"]


@needs_mpi
@pytest.mark.parametrize("name", ["SIGKILL", "SIGSTOP"])
def test_a_rank_that_dies_or_hangs(name: str, tmp_path: Path) -> None:
    """The others end, in time, and nothing is written."""
    save_arrays(tmp_path / "x.npz", text("llama", 60_000, batch=1))
    words = ("--inputs", tmp_path / "x.npz", "--outputs", tmp_path / "y.npz", "--timeout", 3)
    process = start(3, sharded("llama", 3, "ring").path, *words)
    victims: list[int] = []
    end = time.monotonic() + 60
    while len(victims) < 3 and time.monotonic() < end:
        time.sleep(0.2)
        victims = ranks_below(process.pid)
    time.sleep(3)
    os.kill(victims[1], signal.Signals[name])
    error = process.communicate(timeout=120)[1]
    if name == "SIGSTOP":
        assert "waited 3 s for another rank" in error
    assert process.returncode != 0
    assert [each.name for each in tmp_path.iterdir()] == ["x.npz"]


def ranks_below(parent: int) -> list[int]:
    """The processes below another one that run a model."""
    found, waiting = [], [parent]
    while waiting:
        pid = waiting.pop()
        children = Path(f"/proc/{pid}/task/{pid}/children")
        waiting += [int(each) for each in children.read_text(encoding="utf-8").split()] if children.exists() else []
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:4] if Path(f"/proc/{pid}").exists() else []
        found += [pid] if words[1:] == [word.encode() for word in RUN] else []
    return found


def test_without_mpi4py(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(Exception, match=r"needs MPI, and mpi4py cannot be used .* pip install 'fa_compiler\[mpi\]'"):
        mpi.communicator()


def test_launched_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in mpi.LAUNCHED:
        monkeypatch.delenv(name, raising=False)
    assert mpi.launched_ranks() == 1
    monkeypatch.setenv("PMI_SIZE", "4")
    assert mpi.launched_ranks() == 4
