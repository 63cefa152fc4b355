"""`--in-place-caches` on the command line, and `verify` of buffers against caches that grow."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest

import fa_compiler
from fa_compiler.command_line.main import main
from fa_compiler.errors import InputError
from fa_compiler.passes.in_place import METADATA
from tests.graphs import harness

BODY = (
    "new_k = Concat<axis=2>(past_k, k) new_v = Concat<axis=2>(past_v, v) kt = Transpose<perm=[0,1,3,2]>(new_k) "
    "s = MatMul(q, kt) m = Where(mask, s, low) p = Softmax<axis=-1>(m) y = MatMul(p, new_v)"
)


def decoder() -> onnx.ModelProto:
    """One attention, two caches that grow and a mask for all keys."""
    sizes = "float[batch,2,seq,8] q, float[batch,2,seq,8] k, float[batch,2,seq,8] v"
    model = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 17]> g ({sizes}, float[batch,2,past,8] past_k, '
        "float[batch,2,past,8] past_v, bool[batch,1,1,total] mask) => (float[batch,2,seq,8] y, "
        "float[batch,2,grown,8] new_k, float[batch,2,grown,8] new_v) <float low = {-3.4028234663852886e38}> "
        f"{{ {BODY} }}"
    )
    model.graph.input[5].type.tensor_type.shape.dim[3].dim_param = "past + seq"  # as torch writes it
    return model


@pytest.fixture
def step(tmp_path: Path) -> Path:
    """A file with the decoder."""
    onnx.save(decoder(), tmp_path / "step.onnx")
    return tmp_path / "step.onnx"


def test_command_line(step: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out, report = tmp_path / "out.onnx", tmp_path / "report.json"
    options = ["--in-place-caches", "--verify", "--report", str(report)]
    assert main(["optimize", str(step), "-o", str(out), *options]) == 0
    printed = capfd.readouterr().out
    line = "caches past_k, past_v: buffers, written in place as new_k, new_v; cache_length counts their tokens"
    assert line in printed
    assert "session.step(inputs)    # session.inputs names what a step takes" in printed  # it has no input_ids
    assert "all 3 outputs agree" in printed
    wanted = [
        {"past": f"past_{name}", "present": f"new_{name}", "axis": 2, "length": "cache_length"} for name in ("k", "v")
    ]
    assert main(["inspect", str(step), "--in-place-caches", "--explain"]) == 0
    line = "cache past_k: a buffer, written in place as new_k; cache_length counts its tokens"
    assert line in capfd.readouterr().out
    told = [{"copied": [], "reason": None, "culprit": None, **entry} for entry in wanted]
    assert json.loads(report.read_text(encoding="utf-8"))["caches"] == told
    model = onnx.load(out)
    assert json.loads(model.metadata_props[0].value) == wanted
    shapes = {value.name: [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim]
              for value in (*model.graph.input, *model.graph.output)}  # fmt: skip
    assert shapes["past_k"] == shapes["new_k"] == ["batch", 2, "cache_room", 8]
    assert shapes["cache_length"] == [1]
    assert shapes["mask"] == ["batch", 1, 1, "past + seq"]
    assert main(["verify", str(step), str(out), "--quiet"]) == 0


def test_inputs_of_the_original_are_enough(step: Path, tmp_path: Path) -> None:
    """Batch entries that are padded on the left, and one that is masked everywhere."""
    rng, out = np.random.default_rng(0), tmp_path / "out.onnx"
    fa_compiler.optimize(step, out, in_place_caches=True)
    feeds = {name: rng.standard_normal((3, 2, 4, 8), np.float32) for name in ("q", "k", "v")}
    feeds |= {name: rng.standard_normal((3, 2, 11, 8), np.float32) for name in ("past_k", "past_v")}
    mask = np.ones((3, 1, 1, 15), np.bool_)
    mask[0, ..., :6] = mask[1] = False
    np.savez(tmp_path / "inputs.npz", mask=mask, **feeds)
    assert main(["verify", str(step), str(out), "--inputs", str(tmp_path / "inputs.npz"), "--quiet"]) == 0


def test_reading_behind_the_keys_is_found(step: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.onnx"
    model = fa_compiler.optimize(step, in_place_caches=True).model
    attention = next(node for node in model.graph.node if node.domain == "fa_compiler")
    assert attention.input[9]
    attention.input[6] = attention.input[9] = ""
    onnx.save(model, out)
    assert main(["verify", str(step), str(out)]) == 1
    assert "NaN is at other positions" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("{", "does not name the model's caches"),
        ('[{"past": "k"}]', "does not name the model's caches"),
        ('[{"past": "a", "present": "b", "axis": 2, "length": "c"}]', "the original model has no cache"),
    ],
)
def test_faulty_metadata(
    entry: str, message: str, step: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = onnx.load(step)
    model.metadata_props.add(key=METADATA, value=entry)
    onnx.save(model, tmp_path / "out.onnx")
    assert main(["verify", str(step), str(tmp_path / "out.onnx")]) == 2
    assert message in capfd.readouterr().err


def test_a_fused_file_gets_its_buffers_later(step: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What the report says of the caches is what was written."""
    at_once, fused, later = (tmp_path / f"{name}.onnx" for name in ("at_once", "fused", "later"))
    fa_compiler.optimize(step, at_once, in_place_caches=True)
    fa_compiler.optimize(step, fused)
    assert main(["optimize", str(fused), "-o", str(later), "--in-place-caches"]) == 0
    said = capsys.readouterr().out
    assert "caches past_k, past_v: buffers, written in place" in said and "copy of the input" not in said
    names = [[value.name for value in onnx.load(path).graph.input] for path in (at_once, later)]
    assert names[0] == names[1] and "cache_length" in names[1]
    assert fa_compiler.verify(step, later).same


def test_the_original_comes_first(step: Path, tmp_path: Path) -> None:
    """The other way round a run of ONNX Runtime would fail, for an input that only one of them has."""
    fa_compiler.optimize(step, tmp_path / "fused.onnx", in_place_caches=True)
    with pytest.raises(InputError, match=r"fused.onnx has its caches in place, and .* has not; give the original"):
        fa_compiler.verify(tmp_path / "fused.onnx", step)


def test_a_model_without_caches_is_told(tmp_path: Path) -> None:
    model = decoder()
    for place in (4, 3):
        del model.graph.input[place]
    model.graph.node[0].CopyFrom(onnx.helper.make_node("Identity", ["k"], ["new_k"]))
    model.graph.node[1].CopyFrom(onnx.helper.make_node("Identity", ["v"], ["new_v"]))
    notes = fa_compiler.optimize(model, in_place_caches=True).report.notes
    assert any("no input is a cache" in note for note in notes)


def test_only_for_onnxruntime(step: Path) -> None:
    with pytest.raises(InputError, match='caches in place need target="ort", the default'):
        fa_compiler.optimize(step, target="ascend", in_place_caches=True)


@pytest.mark.parametrize(("size", "hint"), [(None, "[[1, 2, 3]]"), (1, "[[1]]})    # one token a step")])
def test_the_hint_fits_the_tokens_of_a_step(size: int | None, hint: str, tmp_path: Path) -> None:
    """An exporter for generation writes a decoder of one token a step."""
    model = harness.load("llama_past__tsn_eager_op14")
    tokens = next(info for info in model.graph.input if info.name == "input_ids")
    if size is not None:
        tokens.type.tensor_type.shape.dim[1].dim_value = size
    how = fa_compiler.optimize(model, tmp_path / "a.onnx", in_place_caches=True).how_to_run
    assert hint in str(how)
