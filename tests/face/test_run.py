"""`run` in one process: the outputs of any model, and one clear error for each fault."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import fa_compiler
from fa_compiler.command_line.main import main

from .builders import attention, limited, plain, positions, saved


def inputs(folder: Path, **arrays: np.ndarray) -> str:
    path = folder / "x.npz"
    np.savez(path, **arrays)
    return str(path)


def drawn() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal((2, 4, 5, 16), np.float32) for name in ("query", "key", "value")}


def test_a_model_and_its_fused_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = saved(attention(), tmp_path / "model.onnx")
    fused = tmp_path / "fused.onnx"
    fa_compiler.optimize(model, fused)
    given, results = inputs(tmp_path, **drawn()), []
    for path in (model, fused):
        assert main(["run", str(path), "--inputs", given, "--outputs", str(tmp_path / "y.npz")]) == 0
        assert "out: float32 [2, 4, 5, 16]" in capsys.readouterr().out
        with np.load(tmp_path / "y.npz") as archive:
            results.append(archive["out"])
    np.testing.assert_allclose(results[0], results[1], rtol=1e-5, atol=1e-6)


def test_inputs_are_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without files a first run shows what goes in and what comes out, and writes nothing."""
    model = str(saved(attention(), tmp_path / "model.onnx"))
    assert main(["run", model]) == 0
    shown = capsys.readouterr().out
    assert "random inputs: query float32 [2, 4, 16, 16], key" in shown
    assert "out: float32 [2, 4, 16, 16]" in shown and "wrote" not in shown
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]
    assert main(["run", model, "--outputs", str(tmp_path / "y.npz")]) == 0
    with np.load(tmp_path / "y.npz") as archive:
        assert archive["out"].shape == (2, 4, 16, 16)


def test_made_inputs_have_sizes_that_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A table of 8 positions is added, which the usual 16 tokens do not fit: one token is broadcast."""
    assert main(["run", str(saved(positions(), tmp_path / "model.onnx"))]) == 0
    assert "random inputs: x float32 [1, 1, 4]" in capsys.readouterr().out
    model = limited(12)
    model.graph.initializer[-2].CopyFrom(numpy_helper.from_array(np.ones((12, 7), np.float32), "table"))
    assert main(["run", str(saved(model, tmp_path / "model.onnx"))]) == 2
    error = capsys.readouterr().err
    assert "fails in ONNX Runtime" in error and error.endswith("; give inputs that fit the model with --inputs\n")


def test_more_tokens_than_the_model_has_positions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The message tells smaller sizes that run."""
    model = str(saved(limited(64), tmp_path / "model.onnx"))
    for tokens, code in ((65, 2), (64, 0)):
        arrays = {name: np.zeros((2, 4, tokens, 16), np.float32) for name in ("query", "key", "value")}
        assert main(["run", model, "--inputs", inputs(tmp_path, **arrays)]) == code
        told = capsys.readouterr().err
        assert "element_wise_ops" not in told and ("Status Message: Attempting to broadcast" in told) == bool(code)
        assert ("; it runs with query [2, 4, 16, 16], key [2, 4, 16, 16], value [" in told) == bool(code)
        assert told.endswith("than these (fa-compiler bench tells how many it takes)\n" if code else "")


@pytest.mark.parametrize(
    "arrays, said",
    [
        ({}, "lacks the input 'x'"),
        ({"x": np.zeros((2, 4))}, "input 'x' is float64, but the model takes float32"),
        ({"x": np.zeros((2, 3), np.float32)}, "model.onnx fails in ONNX Runtime: "),
    ],
)
def test_bad_inputs(
    arrays: dict[str, np.ndarray], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, y = saved(plain(), tmp_path / "model.onnx"), tmp_path / "y.npz"
    assert main(["run", str(model), "--inputs", inputs(tmp_path, **arrays), "--outputs", str(y)]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.onnx", "x.npz"]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"key": np.zeros((4, 8, 16), np.float32)}, "'key' has the shape [4, 8, 16], and the model takes [batch, 4, "),
        ({"key": np.zeros((2, 3, 8, 16), np.float32)}, "'key' has the shape [2, 3, 8, 16], and the model takes "),
        ({"value": np.zeros((2, 4, 9, 16), np.float32)}, "the size 'seq' is 8 in 'query' and 9 in 'value'; "),
    ],
)
def test_sizes_that_contradict_each_other(
    changed: dict[str, np.ndarray], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The fault is named in front of what ONNX Runtime says of an inner node, by `run` and by `verify`."""
    model = str(saved(attention(), tmp_path / "model.onnx"))
    right = {name: np.zeros((2, 4, 8, 16), np.float32) for name in ("query", "key", "value")}
    given = inputs(tmp_path, **right | changed)
    for words in (["run", model], ["verify", model, model]):
        assert main([*words, "--inputs", given]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"fa-compiler: error: {said}")
        assert "ONNX Runtime" in error


def test_a_token_that_no_table_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ids = helper.make_tensor_value_info("ids", TensorProto.INT64, ["n"])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 4])
    table = numpy_helper.from_array(np.zeros((8, 4), np.float32), "table")
    graph = helper.make_graph([helper.make_node("Gather", ["table", "ids"], ["y"])], "g", [ids], [y], [table])
    model = saved(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "m")
    assert main(["run", str(model), "--inputs", inputs(tmp_path, ids=np.array([0, 9]))]) == 2
    assert "'ids' holds numbers from 0 to 9, and the model's table has 8 rows; " in capsys.readouterr().err


def test_a_model_without_a_kernel(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Nobody", ["x"], ["y"], domain="nowhere")], "g", [x], [y])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("nowhere", 1)]
    model = saved(helper.make_model(graph, opset_imports=opsets, ir_version=8), tmp_path / "model.onnx")
    given = inputs(tmp_path, x=np.zeros(1, np.float32))
    assert main(["run", str(model), "--inputs", given, "--outputs", str(tmp_path / "y.npz")]) == 2
    assert "cannot be loaded by ONNX Runtime: " in capsys.readouterr().err


def test_nothing_of_the_user_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = saved(plain(), tmp_path / "model.onnx")
    given = inputs(tmp_path, x=np.zeros((2, 4), np.float32))
    for place in (given, str(model)):
        before = Path(place).read_bytes()
        assert main(["run", str(model), "--inputs", given, "--outputs", place]) == 2
        assert Path(place).read_bytes() == before
        assert "choose another name" in capsys.readouterr().err


def test_sequences_are_no_arrays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])
    out = onnx.ValueInfoProto(name="y", type=helper.make_sequence_type_proto(x.type))
    graph = helper.make_graph([helper.make_node("SequenceConstruct", ["x"], ["y"])], "g", [x], [out])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    given = inputs(tmp_path, x=np.zeros(1, np.float32))
    path = str(saved(model, tmp_path / "model.onnx"))
    assert main(["run", path, "--inputs", given, "--outputs", str(tmp_path / "y.npz")]) == 2
    assert "output 'y' is seq(tensor(float)), which is no array of numbers" in capsys.readouterr().err
