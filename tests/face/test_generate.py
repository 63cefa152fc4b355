"""examples/generate.py: the same tokens, and caches that stay where they are."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import onnx
import pytest

import fa_compiler
from fa_compiler.command_line.main import main

ROOM = 24


@pytest.fixture(scope="module")
def example() -> ModuleType:
    path = Path(__file__).parents[2] / "examples" / "generate.py"
    spec = importlib.util.spec_from_file_location("generate", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for their module
    spec.loader.exec_module(module)
    return module


def test_generates_in_place(example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one exported file: the tokens are the same, and a step in place writes one row of each buffer and nothing
    else, where a Concat copies the whole cache."""
    for name, size in {"LAYERS": 2, "HEADS": 4, "SIZE": 8, "WIDTH": 32, "INNER": 32, "WORDS": 50}.items():
        monkeypatch.setattr(example, name, size)
    original, fused, in_place = (tmp_path / f"{name}.onnx" for name in ("step", "fused", "in_place"))
    onnx.save(example.build(ROOM), original)
    fa_compiler.optimize(original, fused)
    report = fa_compiler.optimize(original, in_place, in_place_caches=True).report
    assert [block.status for block in report.blocks] == ["fused"] * 2
    assert [cache.copied for cache in report.caches] == [()] * 4
    plain, other, bound = (
        example.Growing(original),
        example.Growing(fused),
        example.InPlace(in_place, report.caches, ROOM),
    )
    addresses = {name: cache.data_ptr() for name, cache in bound.caches.items()}
    names = [*bound.caches, "logits"]  # as they were bound
    before = {name: cache.numpy().copy() for name, cache in bound.caches.items()}
    moved = {"in place": 0, "Concat": 0}
    for position in range(ROOM):
        assert plain.step(position % 50) == other.step(position % 50) == bound.step(position % 50)
        outputs = dict(zip(names, bound.binding.get_outputs(), strict=True))
        for name, address in addresses.items():
            assert outputs[name].data_ptr() == address
            after, grown = bound.caches[name].numpy(), plain.caches[name.removeprefix("present_")]
            # What was written is the new token's row of each key head; what lies behind is NaN still.
            written = (after != before[name]) & ~(np.isnan(after) & np.isnan(before[name]))
            assert np.unique(np.nonzero(written)[2]).tolist() == [position]
            assert np.isnan(after[:, :, position + 1 :]).all()
            moved["in place"] += int(written.sum()) * after.itemsize
            moved["Concat"] += grown.nbytes
            before[name] = after.copy()
            np.testing.assert_allclose(after[:, :, : position + 1], grown, rtol=0, atol=1e-5)
    assert moved["Concat"] == moved["in place"] * (ROOM + 1) // 2
    with pytest.raises(Exception, match="ScatterND"):
        bound.step(0)  # no room is left


def test_the_tokens_are_the_same(example: ModuleType, tmp_path: Path) -> None:
    onnx.save(example.build(ROOM), tmp_path / "step.onnx")
    report = fa_compiler.optimize(tmp_path / "step.onnx", tmp_path / "in_place.onnx", in_place_caches=True).report
    runs = example.Growing(tmp_path / "step.onnx"), example.InPlace(tmp_path / "in_place.onnx", report.caches, ROOM)
    tokens = [example.generate(run.step, [3, 1, 4], 10)[0] for run in runs]
    assert tokens[0] == tokens[1]
    assert len(set(tokens[0])) > 1


def test_random_inputs_leave_room_in_the_buffers(
    example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The number of cached tokens is also an index into a table of 2,000 positions, far more than the buffers hold."""
    for name, size in {"LAYERS": 1, "HEADS": 4, "SIZE": 8, "WIDTH": 32, "INNER": 32, "WORDS": 50}.items():
        monkeypatch.setattr(example, name, size)
    original, in_place = tmp_path / "step.onnx", tmp_path / "in_place.onnx"
    onnx.save(example.build(2000), original)
    fa_compiler.optimize(original, in_place, in_place_caches=True)
    assert main(["run", str(in_place)]) == 0
    assert "cache_length int64 [1]" in capsys.readouterr().out


WRONG = {
    "no tokens": (["--tokens", "0"], "--tokens and --prompt have to be at least 1"),
    "too little room": (["--tokens", "10", "--prompt", "2", "--room", "10"], "--room at least their sum minus 1"),
    "a file in place of the folder": (["--folder", "FOLDER/file"], "file cannot be made"),
    "a plot in no folder": (["--plot", "FOLDER/none/plot.svg"], "plot.svg: there is no folder"),
    "a plot of another kind": (["--plot", "FOLDER/plot.txt"], "plot.txt: the name has to end with .svg"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_options_are_told_before_the_work(
    name: str, example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words, told = WRONG[name]
    (tmp_path / "file").touch()
    folder = [] if "--folder" in words else ["--folder", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", ["generate.py", *folder, *(w.replace("FOLDER", str(tmp_path)) for w in words)])
    with pytest.raises(SystemExit) as ended:
        example.main()
    assert ended.value.code == 2
    assert told in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("long_context --tokens 0", "error: --tokens has to be at least 1"),
        ("long_context --tokens 64 --ranks 1,x", "invalid numbers value: '1,x'"),
        ("long_context --tokens 64 --method foo", "error: unknown method 'foo'"),
        ("decode_ranks --past 0", "error: --past and --tokens have to be at least 1"),
        ("decode_ranks --past 10 --ranks 0", "error: 0 ranks: give a number from 1 to 65536"),
    ],
)
def test_wrong_numbers_of_the_examples_with_ranks(words: str, told: str, tmp_path: Path) -> None:
    """One line, and no traceback."""
    name, *given = words.split()
    script = str(Path(__file__).parents[2] / "examples" / f"{name}.py")
    command = [sys.executable, script, *given, "--folder", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode and told in done.stderr and "Traceback" not in done.stderr
