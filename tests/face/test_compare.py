"""`verify` finds every kind of difference, and accepts what rounding alone explains."""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import TensorProto, helper, numpy_helper

import fa_compiler
from fa_compiler.command_line.main import main
from fa_compiler.comparison import compare
from fa_compiler.comparison.compare import compare_arrays, compare_models, tolerance_for
from fa_compiler.comparison.feeds import LENGTH, load_inputs, random_inputs
from fa_compiler.comparison.masks import mask_kinds
from fa_compiler.comparison.nudged import nudged_weights
from fa_compiler.comparison.signals import PIXELS, SAMPLES, signal_inputs, signal_sizes
from fa_compiler.errors import InputError

from .builders import attention, feeds, plain, projected, saved

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("expected", "actual", "fault"),
    [
        ([1.0, 2.0], [1.0, 2.0], None),
        ([1.0, 2.0], [1.0, 2.00001], None),
        ([1.0, 2.0], [1.0, 2.0001], "differs by 5e-05"),
        ([1e-9, 2.0], [-1e-6, 2.0], None),
        ([1.0, NAN], [1.0, NAN], None),
        ([1.0, NAN], [1.0, 2.0], "NaN"),
        ([1.0, 2.0], [1.0, NAN], "NaN"),
        ([1.0, INF], [1.0, INF], None),
        ([1.0, INF], [1.0, -INF], "+infinity"),
        ([1.0, -INF], [1.0, -3e38], "-infinity"),
        ([0.0, 0.0], [0.0, 0.0], None),
        ([0.0, 0.0], [0.0, 1e-30], "differs by inf"),
        ([NAN, INF], [NAN, INF], None),
        ([1.0], [1.0, 2.0], "the shape is [2], not [1]"),
        ([], [], None),
    ],
)
def test_float_arrays(expected: list[float], actual: list[float], fault: str | None) -> None:
    found = compare_arrays(np.array(expected, np.float32), np.array(actual, np.float32), 1e-5)[1]
    assert (found is None) if fault is None else (found is not None and fault in found)


@pytest.mark.parametrize("dtype", [np.int64, np.bool_, np.uint8])
def test_other_arrays_have_to_be_equal(dtype: type[np.generic]) -> None:
    left = np.array([0, 1, 1], dtype)
    assert compare_arrays(left, left.copy(), 1.0) == (None, None)
    assert compare_arrays(left, np.array([0, 1, 0], dtype), 1.0)[1] == "1 of 3 elements differ"
    assert compare_arrays(left, left.astype(np.float32), 1.0)[1] is not None


def test_bfloat16_arrays() -> None:
    left = np.array([1.0, 256.0], ml_dtypes.bfloat16)
    assert compare_arrays(left, np.array([1.0, 258.0], ml_dtypes.bfloat16), 1.6e-2)[1] is None
    assert compare_arrays(left, np.array([1.0, 264.0], ml_dtypes.bfloat16), 1.6e-2)[1] is not None


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(TensorProto.FLOAT, 1e-5), (TensorProto.FLOAT16, 2e-3), (TensorProto.BFLOAT16, 1.6e-2)],
)
def test_the_coarsest_type_sets_the_tolerance(dtype: int, tolerance: float) -> None:
    assert tolerance_for(attention(dtype)) == tolerance
    model = plain()
    model.graph.node.append(helper.make_node("Cast", ["x"], ["z"], to=dtype))
    assert tolerance_for(model) == tolerance


@pytest.mark.parametrize(
    ("largest", "noise", "agrees"),
    [
        (5e-5, 3e-5, True),
        (7e-5, 3e-5, False),
        (9e-3, 0.4, True),
        (0.02, 0.4, False),
        (float("inf"), float("inf"), False),
    ],
)
def test_models_that_enlarge_rounding(largest: float, noise: float, agrees: bool) -> None:
    """An output may differ by twice as much as ONNX Runtime with and without its own optimisations, up to a limit."""
    output = compare.OutputComparison("y", "float32", (2,), largest, "differs")
    judged = compare._allow_noise(replace(output, noise=noise), 1e-5)
    assert (judged.fault is None) is agrees


def test_the_noise_is_that_of_the_original() -> None:
    output = compare.OutputComparison("y", "float32", (2,), 1e-3, "differs")
    found = compare._with_noise(output, np.array([1.0, 0.5]), np.array([1.0, 0.5 + 3e-5]))
    assert found.noise == pytest.approx(3e-5)
    assert compare._with_noise(output, np.zeros(2), np.ones(2)).noise == float("inf")


def test_other_places_of_nan_are_never_allow_noise() -> None:
    output = compare.OutputComparison("y", "float32", (1,), None, "NaN is at other positions")
    assert compare._with_noise(output, np.ones(1), np.zeros(1)) is output
    assert compare._allow_noise(output, 1e-5) is output


def cancelling(offset: float) -> onnx.ModelProto:
    """Attention behind a layer norm of numbers near `offset`, written out. ONNX Runtime makes a LayerNormalization of
    it, which loses their digits."""
    return onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> g (float[batch,seq,16] x) => (float[batch,seq,16] y) '
        f"<float far = {{{offset}}}, float two = {{2}}, float eps = {{1e-5}}, float scale = {{0.25}}, "
        f"float[16] gain = {{{', '.join(['1'] * 16)}}}, float[16] bias = {{{', '.join(['0'] * 16)}}}> {{ "
        "a = Add(x, far) mean = ReduceMean<axes=[-1]>(a) d = Sub(a, mean) square = Pow(d, two) "
        "variance = ReduceMean<axes=[-1]>(square) w = Add(variance, eps) deviation = Sqrt(w) n = Div(d, deviation) "
        "m = Mul(n, gain) h = Add(m, bias) t = Transpose<perm=[0,2,1]>(h) s = MatMul(h, t) c = Mul(s, scale) "
        f"p = Softmax(c) y = MatMul(p, h) }}"
    )


def far_values(offset: float) -> onnx.ModelProto:
    """Attention whose values lie near `offset`, which is subtracted behind it: the digits of the result are few."""
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> g (int64[batch,seq] ids) => (float[batch,seq,16] y) '
        f"<float scale = {{0.25}}, float far = {{{offset}}}> {{ h = Gather(table, ids) k = MatMul(h, key) "
        "t = Transpose<perm=[0,2,1]>(k) s = MatMul(k, t) c = Mul(s, scale) p = Softmax(c) a = MatMul(p, h) "
        "y = Sub(a, far) }"
    )
    draw = np.random.default_rng(0)
    table = draw.standard_normal((40, 16)) + offset
    weights = {"table": table, "key": 0.05 * draw.standard_normal((16, 16))}
    model.graph.initializer.extend(
        numpy_helper.from_array(array.astype(np.float32), name) for name, array in weights.items()
    )
    return model


def test_a_model_that_enlarges_the_last_bits_of_its_weights() -> None:
    """A right fusion differs by more than the tolerance and agrees, a wrong one does not. A tolerance that the user
    gave is kept."""
    model = far_values(100)
    fused = fa_compiler.optimize(model).model
    (output,) = fa_compiler.verify(model, fused).outputs
    assert output.largest is not None and 1e-5 < output.largest < 1e-4
    assert output.nudged is not None and output.largest < 2 * output.nudged < 1e-3
    assert output.verdict.startswith("same (other last bits of the weights change the first model by ")
    (output,) = fa_compiler.verify(model, fused, rtol=1e-5).outputs
    assert output.fault is not None and output.nudged is None
    (output,) = fa_compiler.verify(model, _with_scale(fused, 1.02)).outputs
    assert output.fault is not None and output.nudged is None


def test_the_weights_with_other_last_bits(tmp_path: Path) -> None:
    """Each number of a matrix moves by one step of its type. Zeros, infinities, the largest number, vectors and
    integers stay; external data are read."""
    kinds = {
        "half": np.full((2, 3), 0.5, np.float16),
        "edges": np.array([[0, np.inf], [np.finfo(np.float32).max, np.nan]], np.float32),
        "vector": np.ones((1, 8), np.float32),
        "integers": np.ones((2, 2), np.int8),
        "outside": np.full((64, 64), 3, np.float32),
    }
    model = onnx.parser.parse_model('<ir_version: 8, opset_import: ["": 17]> g (float[1] x) => (float[1] x) {}')
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in kinds.items())
    path = tmp_path / "model.onnx"
    onnx.save(model, path, save_as_external_data=True, location="weights", size_threshold=1024)
    moved = nudged_weights(onnx.load(path, load_external_data=False), tmp_path)
    assert moved.keys() == {"half", "edges", "outside"}
    for name in ("half", "outside"):
        first, step = kinds[name], np.spacing(kinds[name])
        assert moved[name].dtype == first.dtype
        assert (
            np.isin(moved[name], (first + step, first - step, first - step / 2)).all() and (moved[name] != first).all()
        )
    largest = np.finfo(np.float32).max
    assert moved["edges"][0].tolist() == [0, np.inf] and np.isnan(moved["edges"][1, 1])
    assert moved["edges"][1, 0] in (largest, np.nextafter(largest, np.float32(0)))


def heard(kernel: int) -> onnx.ModelProto:
    """Attention over the frames that a Conv makes of sounds."""
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> g (float[batch,samples] sound) => (float[batch,frames,16] y) '
        "<int64[1] one = {1}, float scale = {0.25}> { u = Unsqueeze(sound, one) "
        f"f = Conv<strides=[{kernel}]>(u, kernel) h = Transpose<perm=[0,2,1]>(f) s = MatMul(h, f) "
        "c = Mul(s, scale) p = Softmax(c) y = MatMul(p, h) }"
    )
    weight = np.random.default_rng(0).standard_normal((16, 1, kernel)) / kernel**0.5
    model.graph.initializer.append(numpy_helper.from_array(weight.astype(np.float32), "kernel"))
    return model


@pytest.mark.parametrize("kernel", [50, 400])
def test_sounds_have_several_frames(kernel: int) -> None:
    """One frame would attend itself alone, and a wrong scale would not show."""
    model = heard(kernel)
    fused = fa_compiler.optimize(model).model
    found = fa_compiler.verify(model, fused)
    assert found.same and found.sizes == {"sound": (2, SAMPLES)}
    assert found.outputs[0].shape == (2, SAMPLES // kernel, 16)
    assert not fa_compiler.verify(model, _with_scale(fused, 1.5)).same
    told = "sound: a length counts samples or pixels here; the model makes its tokens of them"
    assert told in str(fa_compiler.bench(model, lengths=[8 * kernel], seconds=0.01))


def test_the_sizes_of_sounds_and_images() -> None:
    """They are open sizes that no other input has. Caches, masks and sequences of features have the sizes of texts."""
    declared = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> g (float[B,S] sound, int64[B,S] sound_mask, float[B,C,H,W] image, '
        "float[B,T] with_tokens, int64[B,T] ids, float[B,2,P,D] past_key, float[B,T,8] features, "
        "float[B,3,40,V] strip, float16[B,?] unnamed) => (float[B,S] sound) {}"
    )
    sizes = {"S": SAMPLES, "H": PIXELS, "W": PIXELS, "size 1 of unnamed": SAMPLES}
    assert signal_sizes(declared.graph.input) == sizes
    assert signal_inputs(declared.graph.input) == ["sound", "image", "unnamed"]


def test_channels_and_sizes_that_are_named_by_their_number() -> None:
    """optimum names the channels of an image, and transformers writes the size that it could not leave open as a
    name."""
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> g (float[batch,channels,height,width] image) => (float[a,b,c,d] y) '
        "{ y = Conv<group=2>(image, kernel) }"
    )
    model.graph.initializer.append(numpy_helper.from_array(np.ones((4, 3, 8, 8), np.float32), "kernel"))
    assert random_inputs(model, "m", signals=True)["image"].shape == (2, 6, PIXELS, PIXELS)
    assert random_inputs(model, "m")["image"].shape == (2, 6, LENGTH, LENGTH)
    for dim, name in zip(model.graph.input[0].type.tensor_type.shape.dim, ("batch", "6", "32", "0"), strict=True):
        dim.dim_param = name
    assert random_inputs(model, "m", signals=True)["image"].shape == (2, 6, 32, 0)


def _with_scale(model: onnx.ModelProto, factor: float) -> onnx.ModelProto:
    """The model with its attention's scale times a factor."""
    wrong = onnx.ModelProto()
    wrong.CopyFrom(model)
    (scale,) = (a for node in wrong.graph.node for a in node.attribute if a.name == "scale_value")
    scale.f *= factor
    return wrong


@pytest.mark.parametrize("offset", [1e4, 1e6])
def test_models_that_onnx_runtime_itself_changes(offset: float) -> None:
    """They are compared without its optimisations: a right fusion agrees, and a wrong one does not, although ONNX
    Runtime differs from itself by much more than the tolerance."""
    model = cancelling(offset)
    fused = fa_compiler.optimize(model).model
    (output,) = fa_compiler.verify(model, fused).outputs
    assert output.fault is None and output.noise is not None and output.noise > 2e-4
    assert output.unoptimised is not None and output.unoptimised < 1e-5
    assert output.verdict.startswith("same without ONNX Runtime's optimisations (")
    (output,) = fa_compiler.verify(model, _with_scale(fused, 1.02)).outputs
    assert output.fault is not None and output.largest is not None
    if output.largest < 2 * output.noise:
        assert "; ONNX Runtime's own optimisations change the first model by 0.02" in output.fault
    assert (output.largest < 2 * output.noise) == (offset == 1e6)


def test_a_blunt_comparison_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A fault below what ONNX Runtime itself changes does not show."""
    model = cancelling(1e4)
    wrong = saved(_with_scale(fa_compiler.optimize(model).model, 1.0002), tmp_path / "wrong.onnx")
    assert main(["verify", str(saved(model, tmp_path / "model.onnx")), str(wrong)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    found = re.search(r"this comparison is blunt: .* that a fault smaller than ([\d.e-]+) would not show", shown)
    assert found is not None and 1e-4 < float(found[1]) <= compare.MOST_NOISE
    assert "blunt" not in str(fa_compiler.verify(plain(), plain()))


def _scaled(factor: float) -> onnx.ModelProto:
    model = attention()
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.float32(0.25 * factor), "scale"))
    return model


def test_verify_command(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = saved(attention(), tmp_path / "a.onnx")
    assert main(["optimize", str(path), "-o", str(tmp_path / "b.onnx"), "--quiet", "--verify"]) == 0
    assert capfd.readouterr().out == ""
    assert main(["verify", str(path), str(tmp_path / "b.onnx")]) == 0
    assert "the output agrees" in capfd.readouterr().out
    saved(_scaled(1.001), tmp_path / "c.onnx")
    assert main(["verify", str(path), str(tmp_path / "c.onnx")]) == 1
    assert "the output differs (tolerance" in capfd.readouterr().out
    assert main(["verify", str(path), str(tmp_path / "c.onnx"), "--rtol", "0.1", "--quiet"]) == 0
    assert capfd.readouterr() == ("", "")
    assert main(["verify", str(path), str(tmp_path / "c.onnx"), "--quiet"]) == 1
    out, error = capfd.readouterr()
    assert out == ""
    assert error.startswith(f"fa-compiler: error: {tmp_path / 'c.onnx'}: output 'out': differs by 0.00")
    assert main(["verify", str(path), str(saved(plain(), tmp_path / "d.onnx"))]) == 1
    assert "d.onnx" in capfd.readouterr().err


def test_a_wrong_fusion_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """With --verify a fusion that changed the result (here made on purpose) ends with code 1 and without
    OUT."""
    path = saved(attention(), tmp_path / "a.onnx")
    honest = fa_compiler.pipeline.fusing.run

    def wrong(*args: object) -> object:
        proto, report = honest(*args)  # type: ignore[arg-type]
        scale = next(a for node in proto.graph.node for a in node.attribute if a.name == "scale_value")
        scale.f *= 1.01
        return proto, report

    monkeypatch.setattr("fa_compiler.command_line.models.run", wrong)
    out = tmp_path / "out.onnx"
    assert main(["optimize", str(path), "-o", str(out), "--verify", "--report", str(tmp_path / "r.json")]) == 1
    captured = capfd.readouterr()
    assert "the output differs (tolerance" in captured.out
    assert "was not written" in captured.err
    assert [file.name for file in tmp_path.iterdir()] == ["a.onnx"]


@pytest.mark.parametrize("dtype", [TensorProto.FLOAT, TensorProto.FLOAT16])
def test_inputs_from_a_file(dtype: int, tmp_path: Path) -> None:
    path = saved(attention(dtype), tmp_path / "a.onnx")
    fa_compiler.optimize(path, tmp_path / "b.onnx")
    np.savez(tmp_path / "x.npz", **feeds(5, helper.tensor_dtype_to_np_dtype(dtype)))
    comparison = compare_models(path, tmp_path / "b.onnx", tmp_path / "x.npz")
    assert comparison.same
    assert comparison.outputs[0].shape == (2, 4, 5, 16)


def test_bfloat16_goes_through(tmp_path: Path) -> None:
    """ONNX Runtime has no bfloat16 arrays for NumPy; an Add's kernel it has not either, so Cast and
    Identity."""
    info = [helper.make_tensor_value_info(name, TensorProto.BFLOAT16, ["n", 4]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "g", info[:1], info[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    path = saved(model, tmp_path / "a.onnx")
    comparison = compare_models(path, path)
    assert comparison.same
    assert (comparison.outputs[0].dtype, comparison.outputs[0].shape) == ("bfloat16", (2, 4))
    values = np.arange(8, dtype=np.float32).reshape(2, 4)
    for stored in (values, values.astype(ml_dtypes.bfloat16), values.astype(ml_dtypes.bfloat16).view(np.uint16)):
        np.savez(tmp_path / "x.npz", x=stored)
        loaded = load_inputs(tmp_path / "x.npz", model)["x"]
        assert loaded.dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(loaded.astype(np.float32), values)


Write = Callable[[Path], object]


def _zipped(path: Path, entries: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> None:
    others = {f"{name}.npy": b"" for name in feeds()}
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, content in {**others, **entries}.items():
            archive.writestr(name, content)


def _archived(method: int) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", method) as archive:
        for name in feeds():
            archive.writestr(f"{name}.npy", bytes(100))
    return stream.getvalue()


def _method(number: int) -> bytes:
    """An archive whose entry says that it is compressed in a way nobody knows."""
    content = bytearray(_archived(zipfile.ZIP_STORED))
    content[8] = content[content.index(b"PK\1\2") + 10] = number
    return bytes(content)


def _spoiled() -> bytes:
    """An archive whose compressed entry is no stream of its compression."""
    content = bytearray(_archived(zipfile.ZIP_DEFLATED))
    content[39:43] = b"\xff" * 4
    return bytes(content)


BAD_NPZ: dict[str, tuple[Write, str]] = {
    "missing": (lambda path: None, "no such file"),
    "text": (lambda path: path.write_text("query = 1"), "not an .npz file"),
    "empty": (lambda path: path.write_bytes(b""), "not an .npz file"),
    "zip": (lambda path: path.write_bytes(b"PK\x03\x04" + bytes(40)), "not an .npz file"),
    "folder": (lambda path: path.mkdir(), "is a folder"),
    "pickle": (lambda path: np.savez(path, **feeds() | {"query": np.array([{}], object)}), "not an .npz file"),
    "no array": (lambda path: _zipped(path, {"query.npy": b"text"}), "holds 'query', which is not an array"),
    "header": (lambda path: _zipped(path, {"query.npy": b"\x93NUMPY\1\0\x02\0{\n"}), "not an .npz file"),
    "compressed otherwise": (lambda path: path.write_bytes(_method(99)), "not an .npz file"),
    "damaged stream": (lambda path: path.write_bytes(_spoiled()), "not an .npz file"),
    "too few": (lambda path: np.savez(path, query=np.ones(1)), "lacks the input 'key'"),
    "misspelt": (
        lambda path: np.savez(path, **_misspelt()),
        "holds 'qeury', which the model does not take; did you mean 'query'?",
    ),
    "too many": (lambda path: np.savez(path, more=np.ones(1), **feeds()), "holds 'more'"),
    "other type": (lambda path: np.savez(path, **feeds(dtype=np.float64)), "is float64"),
}


def _misspelt() -> dict[str, np.ndarray]:
    return {{"query": "qeury"}.get(name, name): array for name, array in feeds().items()}


@pytest.mark.parametrize("case", BAD_NPZ)
def test_bad_inputs(case: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write, expected = BAD_NPZ[case]
    path = saved(attention(), tmp_path / "a.onnx")
    npz = tmp_path / "x.npz"
    write(npz)
    assert main(["verify", str(path), str(path), "--inputs", str(npz)]) == 2
    error = capfd.readouterr().err
    assert error.count("\n") == 1
    assert expected in error
    assert "x.npz" in error


def test_npy_is_no_npz(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.ones(3))
    with pytest.raises(InputError, match="single array"):
        load_inputs(tmp_path / "x.npy", attention())


@pytest.mark.parametrize("size", [-3, 1 << 40])
def test_sizes_that_no_random_input_has(size: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = saved(attention(batch=size), tmp_path / "a.onnx")
    assert main(["verify", str(path), str(path)]) == 2
    assert f"no random values can be made for input 'query' of the sizes {size} x" in capfd.readouterr().err


def test_an_input_without_a_rank(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Such as one that is transposed: what to do is said by each command that makes inputs."""
    model = attention()
    for value in model.graph.input:
        value.type.tensor_type.ClearField("shape")
    path = str(saved(model, tmp_path / "model.onnx"))
    for words in (["run", path], ["optimize", path, "-o", str(tmp_path / "out.onnx"), "--verify"]):
        assert main(words) == 2
        said = "declares no sizes; declare them, or give inputs with --inputs, an option of verify and run"
        assert said in capfd.readouterr().err
    assert not (tmp_path / "out.onnx").exists()


def test_a_size_too_deep_to_be_computed_has_a_size_of_its_own() -> None:
    model = attention(length="+".join(["a"] * 4000))
    assert {array.shape[2] for array in random_inputs(model, "model").values()} == {LENGTH}


def test_an_original_that_cannot_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = plain()
    model.graph.node[0].op_type, model.graph.node[0].domain = "Strange", "my.domain"
    model.opset_import.add(domain="my.domain", version=1)
    path = saved(model, tmp_path / "a.onnx")
    assert main(["verify", str(path), str(path)]) == 2
    shown = capfd.readouterr().err
    assert "ONNX Runtime cannot load" in shown
    assert "--inputs" not in shown
    assert main(["optimize", str(path), "-o", str(tmp_path / "b.onnx"), "--verify"]) == 2
    assert not (tmp_path / "b.onnx").exists()


def _inputs(
    *infos: tuple[str, int, list[int | str | None]], nodes: list[onnx.NodeProto] | None = None
) -> onnx.ModelProto:
    values = [helper.make_tensor_value_info(name, dtype, shape) for name, dtype, shape in infos]
    return helper.make_model(helper.make_graph(nodes or [], "g", values, []))


def drawing(**seed: float) -> onnx.ModelProto:
    """The attention, with random numbers added to its result."""
    model = attention()
    last = model.graph.node[-1]
    last.output[0] = "context_out"
    noise = helper.make_node("RandomNormalLike", ["context_out"], ["noise"], "draw", **seed)
    model.graph.node.extend([noise, helper.make_node("Add", ["context_out", "noise"], ["out"], "add")])
    return model


def test_an_original_that_draws_random_numbers(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source, out = saved(drawing(), tmp_path / "model.onnx"), tmp_path / "out.onnx"
    assert main(["optimize", str(source), "-o", str(out), "--verify"]) == 2
    message = capfd.readouterr().err
    assert "cannot be compared: its output 'out' differs from one run to the next" in message
    assert "RandomNormalLike draw draws random numbers; give it a seed" in message
    assert not out.exists()


def test_seeded_random_numbers_are_compared(tmp_path: Path) -> None:
    """They are the same in the first run of each model: another seed differs, and the fused model does not."""
    source = saved(drawing(seed=3.0), tmp_path / "model.onnx")
    assert fa_compiler.verify(source, fa_compiler.optimize(source).model).same
    assert not fa_compiler.verify(source, drawing(seed=4.0)).same


def test_random_inputs_suit_the_model() -> None:
    table = helper.make_tensor("table", TensorProto.FLOAT, [7, 2], np.zeros(14))
    nodes = [
        helper.make_node("Cast", ["input_ids"], ["ids"], to=TensorProto.INT32),
        helper.make_node("Gather", ["table", "ids"], ["embedded"], axis=0),
    ]
    model = _inputs(
        ("input_ids", TensorProto.INT64, ["batch_size", "sequence"]),
        ("attention_mask", TensorProto.INT64, ["batch_size", "past + sequence"]),
        ("token_type_ids", TensorProto.INT64, ["batch_size", "sequence"]),
        ("position_ids", TensorProto.INT64, [None, "sequence"]),
        ("past_key", TensorProto.FLOAT, ["batch_size", 4, "past", 8]),
        ("bias", TensorProto.FLOAT16, ["größe 1", 3, "2*sequence"]),
        ("use_cache", TensorProto.BOOL, []),
        nodes=nodes,
    )
    model.graph.initializer.append(table)
    found = random_inputs(model, "m")
    assert {name: array.shape for name, array in found.items()} == {
        "input_ids": (2, 16),
        "attention_mask": (2, 32),
        "token_type_ids": (2, 16),
        "position_ids": (2, 16),
        "past_key": (2, 4, 16, 8),
        "bias": (2, 3, 32),
        "use_cache": (),
    }
    assert found["input_ids"].dtype == np.int64
    assert 0 <= found["input_ids"].min() < found["input_ids"].max() < 7
    assert set(np.unique(found["attention_mask"])) == {0, 1}
    assert set(np.unique(found["token_type_ids"])) <= {0, 1}
    np.testing.assert_array_equal(found["position_ids"][0], np.arange(16))
    again = random_inputs(model, "m")
    assert all(np.array_equal(found[name], again[name]) for name in found)


@pytest.mark.parametrize("length", ["total_sequence_length", "s53"])
@pytest.mark.parametrize(("present", "expected"), [("sequence", 32), (1, 17)])
def test_a_mask_covers_cache_and_present(length: str, present: int | str, expected: int) -> None:
    """Exporters give the mask's length a name of its own, which has to be the sum of two others."""
    model = _inputs(
        ("input_ids", TensorProto.INT64, ["s2", present]),
        ("attention_mask", TensorProto.INT64, ["s43", length]),
        ("past_key_0", TensorProto.FLOAT, ["s2", 4, "s15", 8]),
    )
    found = random_inputs(model, "m")
    assert found["attention_mask"].shape == (2, expected)
    assert found["past_key_0"].shape == (2, 4, 16, 8)


def test_without_a_cache_a_mask_is_as_long_as_the_rest() -> None:
    model = _inputs(
        ("input_ids", TensorProto.INT64, ["unk__1", "unk__2"]),
        ("attention_mask", TensorProto.INT64, ["unk__3", "unk__4"]),
    )
    assert {array.shape for array in random_inputs(model, "m").values()} == {(2, 16)}


@pytest.mark.parametrize("dtype", [TensorProto.STRING, TensorProto.FLOAT8E4M3FN])
def test_inputs_nobody_can_guess(dtype: int) -> None:
    with pytest.raises(InputError, match="input 'text'"):
        random_inputs(_inputs(("text", dtype, [1])), "m")


def _masked(body: str, dtype: str = "int64") -> onnx.ModelProto:
    """A model of x [B, S] and attention_mask [B, S]."""
    model = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 17]> g (float[B,S] x, {dtype}[B,S] attention_mask) => (float[B,S] y) '
        "<float one = {1}, float zero = {0}, float large = {-1e4}, int64 whole = {1}, int64[1] last = {1}, "
        "float[2] table = {1, 2}> "
        f"{{ {body} }}"
    )
    onnx.checker.check_model(model, full_check=True)
    return model


FLOAT_MASK = "m = Cast<to = 1>(attention_mask) "
EMPTY = FLOAT_MASK + "n = ReduceSum<keepdims = 1>(m, last) e = Equal(n, zero) w = Where(e, {}, one) y = Mul(x, w)"
PAIRS: dict[str, tuple[str, str, str, str, str]] = {
    # type of the mask, both models, what shows the difference, and the word that keeps it out
    "2": (
        "int64",
        FLOAT_MASK + "w = Sub(one, m) y = Mul(x, w)",
        "e = Equal(attention_mask, whole) w = Where(e, zero, one) y = Mul(x, w)",
        "masks with the ids of packed sequences",
        "",
    ),
    "negative": (
        "int64",
        FLOAT_MASK + "y = Mul(x, m)",
        FLOAT_MASK + "a = Abs(m) y = Mul(x, a)",
        "masks with numbers from -1 to 2",
        "unbroken-sequences",
    ),
    "an empty row": (
        "int64",
        EMPTY.format("zero"),
        EMPTY.format("one"),
        "masks with zeros in a whole row",
        "no-empty-rows",
    ),
    "an empty row of booleans": (
        "bool",
        EMPTY.format("zero"),
        EMPTY.format("one"),
        "masks with zeros in a whole row",
        "masks-dominate",
    ),
    "-inf": (
        "float",
        "p = Exp(attention_mask) y = Mul(x, p)",
        "l = Floor(attention_mask) f = IsInf(l) w = Where(f, one, one) p = Exp(attention_mask) o = Where(f, w, p) "
        "y = Mul(x, o)",
        "masks of 0 and -inf",
        "",
    ),
    "the lowest number": (
        "float",
        "a = Add(x, attention_mask) y = Exp(a)",
        "a = Add(x, attention_mask) t = Add(attention_mask, attention_mask) f = IsInf(t) g = IsInf(attention_mask) "
        "h = Xor(f, g) e = Exp(a) y = Where(h, one, e)",
        "masks of 0 and the lowest number",
        "",
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_masks_that_users_feed(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Models that agree on ones and zeros are compared on other masks; the report names the one that shows a
    difference, and what the user vouches for is kept."""
    dtype, first, second, feed, word = PAIRS[name]
    one, other = (saved(_masked(body, dtype), tmp_path / f"{index}.onnx") for index, body in enumerate((first, second)))
    found = compare_models(one, other)
    assert (found.same, found.feed) == (False, feed)
    assert main(["verify", str(one), str(other)]) == 1
    assert f"; with {feed}" in " ".join(capfd.readouterr().out.split())
    if word:
        assert compare_models(one, other, assume=[word]).same
        assert main(["verify", str(one), str(other), "--assume", word]) == 0
        assert " rounds" in capfd.readouterr().out
    assert main(["verify", str(one), str(other), "--assume", "nothing"]) == 2


def test_a_mask_number_beside_all_scores_that_count_rounds_them(tmp_path: Path) -> None:
    """Where a mask of 2 adds 1e4 to every score that counts, a score keeps ten bits behind the binary point. This is no
    difference. A fault is larger."""
    bias = FLOAT_MASK + "r = Sub(one, m) n = Mul(r, large) e = Equal(m, zero) "
    rounded = bias + "s = Add(x, n) t = Sub(s, n) y = Where(e, zero, t)"
    exact = bias + "t = Identity(x) y = Where(e, zero, t)"
    wrong = bias + "t = Mul(x, m) y = Where(e, zero, t)"
    first, second, third = (
        saved(_masked(body), tmp_path / f"{index}.onnx") for index, body in enumerate((rounded, exact, wrong))
    )
    found = compare_models(first, second)
    assert found.same and found.rounds == 5
    found = compare_models(first, third)
    assert (found.same, found.feed) == (False, "masks with the ids of packed sequences")


def test_a_comparison_counts_as_true_if_the_outputs_agree(tmp_path: Path) -> None:
    first, second = (saved(_masked(f"y = {op}(x, x)"), tmp_path / f"{op}.onnx") for op in ("Add", "Mul"))
    assert fa_compiler.verify(first, first)
    assert not fa_compiler.verify(first, second)


def test_masks_that_the_original_does_not_run_with(tmp_path: Path) -> None:
    """Ids of packed sequences and negative numbers index no table of two."""
    one, other = (
        saved(_masked(f"t = Gather(table, attention_mask) {more} y = Mul(x, u)"), tmp_path / f"{index}.onnx")
        for index, more in enumerate(("u = Identity(t)", "a = Abs(t) u = Identity(a)"))
    )
    found = compare_models(one, other)
    assert (found.same, found.rounds) == (True, 3)


def _pyramid(dims: list[int | str], back: float = 128.0) -> onnx.ModelProto:
    """Seven halvings, enlarged again and joined with the input: height and width have to be multiples of 128."""
    nodes = [
        helper.make_node("MaxPool", [f"x{level}"], [f"x{level + 1}"], kernel_shape=[2, 2], strides=[2, 2])
        for level in range(7)
    ]
    nodes.append(helper.make_node("Resize", ["x7", "", "scales"], ["back"], mode="nearest"))
    nodes.append(helper.make_node("Concat", ["x0", "back"], ["y"], axis=1))
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, dims) for name in ("x0", "y")]
    infos[1].type.tensor_type.ClearField("shape")
    scales = numpy_helper.from_array(np.array([1, 1, back, back], np.float32), "scales")
    graph = helper.make_graph(nodes, "g", infos[:1], infos[1:], [scales])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.parametrize("dims", [[-1, 3, -1, -1], ["batch", 3, "height", "width"]], ids=["-1", "named"])
def test_sizes_are_tried_until_the_original_runs(
    dims: list[int | str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = saved(_pyramid(dims), tmp_path / "a.onnx")
    assert compare_models(path, path).sizes == {"x0": (1, 3, 128, 128)}
    assert main(["optimize", str(path), "-o", str(tmp_path / "b.onnx"), "--verify"]) == 0
    assert "inputs: x0 [1, 3, 128, 128]" in capfd.readouterr().out


def test_no_size_with_which_the_original_runs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = saved(_pyramid([-1, 3, -1, -1], back=31.0), tmp_path / "a.onnx")
    assert main(["verify", str(path), str(path)]) == 2
    assert "--inputs" in capfd.readouterr().err


def test_masks_that_are_said_to_be_binary_hold_nothing_else() -> None:
    given = [helper.make_tensor_value_info("attention_mask", TensorProto.INT64, [2, 6])]
    every = [kind.name for kind in mask_kinds(given, ())]
    binary = [kind.name for kind in mask_kinds(given, ("binary-masks",))]
    assert "masks with numbers from -1 to 2" in every
    assert binary == ["masks of ones", "masks with zeros in a whole row"]


def test_missing_weights(tmp_path: Path) -> None:
    """A model without the file of its weights is bad input, and the message names the file."""
    whole, _ = projected(tmp_path / "whole")
    path, _ = projected(tmp_path / "alone")
    data = path.with_name("weights.bin")
    data.unlink()
    for first, second in ((whole, path), (path, whole)):
        with pytest.raises(InputError) as caught:
            fa_compiler.verify(first, second)
        assert str(caught.value).startswith(f"{path}: tensor 'w' needs ") and str(data) in str(caught.value)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ("lacking", "it takes the input 'other', which the other model does not have"),
        ("unknown", "it has no input 'key'"),
    ],
)
def test_models_with_other_inputs(changed: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = attention()
    first = str(saved(model, tmp_path / "first.onnx"))
    for node in model.graph.node:
        node.input[:] = ["other" if name == "key" and changed == "lacking" else name for name in node.input]
    (key,) = (info for info in model.graph.input if info.name == "key")
    if changed == "lacking":
        key.name = "other"
    else:
        model.graph.input.remove(key)
        for node in model.graph.node:
            node.input[:] = ["value" if name == "key" else name for name in node.input]
    second = str(saved(model, tmp_path / "second.onnx"))
    assert main(["verify", first, second]) == 1
    assert said in capsys.readouterr().err
