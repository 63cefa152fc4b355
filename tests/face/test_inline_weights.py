"""Weights inside the model file: left there while it is compiled, and inline again in what is written or returned."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

import fa_compiler
from fa_compiler.command_line.main import main
from fa_compiler.model_files import inline_weights, reading, wire, writing
from fa_compiler.model_files.inline_weights import LARGE, make_inline
from fa_compiler.model_files.reading import load
from fa_compiler.passes import Report
from fa_compiler.pipeline.fusing import copy_of
from fa_compiler.protos import tensors
from tests.systems import FILES_GO_AT_ONCE, LINKS, NAMES_OF_BYTES, PEAK_MEMORY

from .builders import HEADS, SIZE, attention, feeds, ops, plain, saved

WIDE = 2048


def weights(seed: int = 0) -> dict[str, np.ndarray]:
    """Two matrices of 128 KiB."""
    rng = np.random.default_rng(seed)
    shapes = {"up": (SIZE, WIDE), "down": (WIDE, SIZE)}
    return {name: (rng.standard_normal(shape) / 8).astype(np.float32) for name, shape in shapes.items()}


def wide() -> onnx.ModelProto:
    """Attention whose query goes through both; large and small initializers alternate."""
    model = attention(batch=2, length=8)
    for name, array in weights().items():
        model.graph.initializer.append(numpy_helper.from_array(array, name))
        model.graph.initializer.append(numpy_helper.from_array(np.ones(SIZE, np.float32), f"{name}_bias"))
    steps = [("MatMul", "up"), ("Relu", None), ("MatMul", "down"), ("Add", "down_bias")]
    last = "query"
    for position, (op, name) in enumerate(steps):
        node = helper.make_node(op, [last, name] if name else [last], [f"step{position}"], f"step{position}")
        model.graph.node.insert(position, node)
        last = f"step{position}"
    model.graph.node[len(steps) + 1].input[0] = last
    up = model.graph.initializer[1]
    up.doc_string = "the way up"
    up.metadata_props.add(key="origin", value="a test")
    return model


def as_parsed(path: Path) -> onnx.ModelProto:
    """What protobuf makes of the whole file."""
    return onnx.ModelProto.FromString(path.read_bytes())


def skeleton(path: Path) -> tuple[onnx.ModelProto, inline_weights.FileWeights] | None:
    found = inline_weights.read_skeleton(path)
    return None if found is None else (onnx.ModelProto.FromString(found.content), found.weights)


@pytest.fixture(params=["path", pytest.param("link", marks=LINKS)])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    path = saved(wide(), tmp_path / "in" / "model.onnx")
    if request.param == "path":
        return path
    link = tmp_path / "link.onnx"
    link.symlink_to(path)
    return link


def test_large_ones_are_left(source: Path) -> None:
    loaded = load(source)
    kinds = {tensor.name: tensor.data_location for tensor in loaded.proto.graph.initializer}
    assert kinds == {"scale": 0, "up": 1, "up_bias": 0, "down": 1, "down_bias": 0}
    assert loaded.proto.ByteSize() < LARGE
    assert loaded.files == {}
    assert make_inline(copy_of(loaded), loaded.weights) == as_parsed(source)
    initializers = loaded.to_ir().graph.initializers
    for name, array in weights().items():
        assert isinstance(initializers[name].const_value, ir.ExternalTensor)
        np.testing.assert_array_equal(initializers[name].const_value.numpy(), array)


def test_the_output_is_that_of_a_parsed_model(source: Path, tmp_path: Path) -> None:
    """To the byte, and in the form protobuf gives it; nothing lies beside it."""
    (tmp_path / "out").mkdir()
    out, other = tmp_path / "out" / "m.onnx", tmp_path / "other.onnx"
    given = source.read_bytes()
    result = fa_compiler.optimize(source, out)
    parsed = fa_compiler.optimize(as_parsed(source), other)
    assert result.report.count("fused") == 1
    assert "FlashAttention" in ops(out)
    assert out.read_bytes() == other.read_bytes() == as_parsed(out).SerializeToString()
    assert result.model == parsed.model == as_parsed(out)
    assert list(out.parent.iterdir()) == [out]
    assert source.read_bytes() == given
    onnx.checker.check_model(out, full_check=True)
    up = next(tensor for tensor in as_parsed(out).graph.initializer if tensor.name == "up")
    assert (up.doc_string, up.metadata_props[0].value) == ("the way up", "a test")


def test_nothing_to_fuse(tmp_path: Path) -> None:
    model = plain()
    model.graph.initializer.append(numpy_helper.from_array(weights()["up"], "table"))
    path = saved(model, tmp_path / "model.onnx")
    assert fa_compiler.optimize(path).model == model
    assert fa_compiler.optimize(path, tmp_path / "out.onnx").model == model
    assert (tmp_path / "out.onnx").read_bytes() == path.read_bytes()


def test_returned_model_outlives_its_files(tmp_path: Path) -> None:
    path, out = saved(wide(), tmp_path / "model.onnx"), tmp_path / "out.onnx"
    results = [fa_compiler.optimize(path), fa_compiler.optimize(path, out)]
    expected = as_parsed(out)
    # Wine frees the name of a removed file when the last one closes it, and that of a moved one at once.
    path.rename(tmp_path / "old.onnx").unlink()
    saved(plain(), path)
    out.unlink()
    for result in results:
        assert result.model == expected
        assert result.model is result.model


def test_returned_model_of_a_file_that_was_written_to(tmp_path: Path) -> None:
    """No wrong weights: they were to be read from a file whose content is gone."""
    path, out = saved(wide(), tmp_path / "model.onnx"), tmp_path / "out.onnx"
    result = fa_compiler.optimize(path, out)
    path.write_bytes(path.read_bytes()[:-1] + b"\0")
    with pytest.raises(fa_compiler.InputError, match=r"model\.onnx was changed while"):
        _ = result.model


@pytest.mark.parametrize("how", ["written", "replaced", pytest.param("removed", marks=FILES_GO_AT_ONCE)])
def test_source_that_changes_meanwhile(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, out = saved(wide(), tmp_path / "model.onnx"), tmp_path / "out.onnx"
    honest = fa_compiler.pipeline.fusing.fuse

    def disturbed(*args: object) -> object:
        report = honest(*args)  # type: ignore[arg-type]
        content = path.read_bytes()
        if how != "written":
            path.unlink()
        if how != "removed":
            path.write_bytes(content + b"\0")
        return report

    monkeypatch.setattr("fa_compiler.pipeline.fusing.fuse", disturbed)
    with pytest.raises(fa_compiler.InputError, match=r"model\.onnx was changed while"):
        fa_compiler.optimize(path, out)
    assert not out.exists()


def test_source_cut_while_it_is_copied(tmp_path: Path) -> None:
    path = saved(wide(), tmp_path / "model.onnx")
    loaded = load(path)
    os.truncate(path, 1000)
    with writing.staging() as stage, pytest.raises(fa_compiler.InputError, match="was changed while"):
        writing.write_model(copy_of(loaded), loaded, tmp_path / "out.onnx", stage, Report([]))
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("link", ["same", pytest.param("symbolic", marks=LINKS), "hard"])
def test_force_over_the_input(link: str, tmp_path: Path) -> None:
    path = saved(wide(), tmp_path / "model.onnx")
    expected = fa_compiler.optimize(as_parsed(path)).model
    other = path if link == "same" else tmp_path / "other.onnx"
    if link == "symbolic":
        other.symlink_to(path)
    elif link == "hard":
        other.hardlink_to(path)
    content = path.read_bytes()
    assert main(["optimize", str(path), "-o", str(other), "--quiet"]) == 2
    assert main(["optimize", str(path), "-o", str(other), "--quiet", "--force", "--verify"]) == 0
    assert as_parsed(other) == expected
    assert (path.read_bytes() == content) == (link == "hard")
    assert other.is_symlink() == (link == "symbolic")
    assert {file.name for file in tmp_path.iterdir()} == {path.name, other.name}


def test_failed_force_leaves_the_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(wide(), tmp_path / "model.onnx")
    content = path.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(writing.os, "fsync", full)
    assert main(["optimize", str(path), "-o", str(path), "--quiet", "--force"]) == 2
    assert path.read_bytes() == content
    assert list(tmp_path.iterdir()) == [path]


def test_over_the_limit_they_go_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, out = saved(wide(), tmp_path / "model.onnx"), tmp_path / "out.onnx"
    monkeypatch.setattr(writing, "INLINE_LIMIT", 200_000)
    result = fa_compiler.optimize(path, out)
    assert out.stat().st_size < LARGE
    assert any("out.onnx.data" in note for note in result.report.notes)
    found = {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(out).graph.initializer}
    for name, array in weights().items():
        np.testing.assert_array_equal(found[name], array)
    assert result.model == as_parsed(out)


def test_a_result_too_large_for_protobuf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, out = saved(wide(), tmp_path / "model.onnx"), tmp_path / "out.onnx"
    monkeypatch.setattr(inline_weights, "PROTO_LIMIT", 200_000)
    with pytest.raises(fa_compiler.InputError, match="out.onnx would have"):
        fa_compiler.optimize(path, out)
    assert not out.exists()


def test_beside_external_data(tmp_path: Path) -> None:
    """Some weights in the file, some beside it: each stay what they are, in another folder too."""
    model = wide()
    (tmp_path / "in").mkdir()
    (tmp_path / "out").mkdir()
    down = weights()["down"]
    (tmp_path / "in" / "w.bin").write_bytes(bytes(64) + down.tobytes())
    tensor = next(tensor for tensor in model.graph.initializer if tensor.name == "down")
    tensors.make_external(tensor, "w.bin", 64, down.nbytes)
    path = saved(model, tmp_path / "in" / "model.onnx")
    for out, place in ((tmp_path / "in" / "o.onnx", "w.bin"), (tmp_path / "out" / "o.onnx", "o.onnx.data")):
        fa_compiler.optimize(path, out)
        found = {tensor.name: tensor for tensor in as_parsed(out).graph.initializer}
        assert found["down"].external_data[0].value == place
        np.testing.assert_array_equal(numpy_helper.to_array(found["up"]), weights()["up"])
        found = {tensor.name: tensor for tensor in onnx.load(out).graph.initializer}
        np.testing.assert_array_equal(numpy_helper.to_array(found["down"]), down)
    agree(fa_compiler.InferenceSession(path), path)


def test_subgraphs_and_functions(tmp_path: Path) -> None:
    """There they are read like all else."""

    def branch(name: str) -> onnx.GraphProto:
        tensor = numpy_helper.from_array(weights()[name], f"{name}_inner")
        y = helper.make_tensor_value_info(f"y_{name}", 1, None)
        nodes = [helper.make_node("ReduceMean", [f"{name}_inner"], [f"mean_{name}"], keepdims=0)]
        nodes.append(helper.make_node("Add", ["step3", f"mean_{name}"], [f"y_{name}"]))
        return helper.make_graph(nodes, name, [], [y], [tensor])

    model = wide()
    model.opset_import.add(domain="mine", version=1)
    table = numpy_helper.from_array(weights(1)["up"], "table")
    body = [helper.make_node("Constant", [], ["c"], value=table), helper.make_node("MatMul", ["x", "c"], ["y"])]
    model.functions.append(helper.make_function("mine", "Project", ["x"], ["y"], body, model.opset_import[:1]))
    model.graph.input.append(helper.make_tensor_value_info("flag", TensorProto.BOOL, []))
    branches = {"then_branch": branch("up"), "else_branch": branch("down")}
    model.graph.node.insert(4, helper.make_node("If", ["flag"], ["chosen"], "choose", **branches))
    model.graph.node[6].input[0] = "chosen"
    model.graph.node.append(helper.make_node("Project", ["out"], ["wide_out"], "project", domain="mine"))
    model.graph.output.append(helper.make_tensor_value_info("wide_out", 1, [2, HEADS, 8, WIDE]))
    path, out = saved(model, tmp_path / "model.onnx"), tmp_path / "out.onnx"
    result = fa_compiler.optimize(path, out)
    assert result.report.count("fused") == 1
    assert result.model == fa_compiler.optimize(as_parsed(path)).model == as_parsed(out)
    options = ort.SessionOptions()
    fa_compiler.register_custom_ops(options)
    inputs = {**feeds(), "flag": np.array(True)}
    sessions = ort.InferenceSession(path), ort.InferenceSession(out, options)
    for left, right in zip(*(session.run(None, inputs) for session in sessions), strict=True):
        np.testing.assert_allclose(left, right, rtol=0, atol=1e-5 * np.max(np.abs(left)))


def test_one_that_a_pass_moved(tmp_path: Path) -> None:
    """Out of the main graph's initializers: it is written where it went."""
    loaded = load(saved(wide(), tmp_path / "model.onnx"))
    proto = copy_of(loaded)
    tensor = proto.graph.initializer.pop(1)
    proto.graph.node.insert(0, helper.make_node("Constant", [], ["up"], "up", value=tensor))
    with writing.staging() as stage:
        writing.write_model(proto, loaded, tmp_path / "out.onnx", stage, Report([]))
        stage.commit()
    written = as_parsed(tmp_path / "out.onnx")
    np.testing.assert_array_equal(numpy_helper.to_array(written.graph.node[0].attribute[0].t), weights()["up"])
    np.testing.assert_array_equal(numpy_helper.to_array(written.graph.initializer[2]), weights()["down"])


def test_a_large_mask_is_read(tmp_path: Path) -> None:
    """A causal buffer of 1 MiB is recognised by its content, as in a parsed model."""
    length = 512
    model = attention(batch=2, length=length)
    mask = np.triu(np.full((length, length), -np.inf, np.float32), 1)
    model.graph.initializer.append(numpy_helper.from_array(mask, "causal"))
    model.graph.node.insert(3, helper.make_node("Add", ["scaled", "causal"], ["masked"], "mask"))
    model.graph.node[4].input[0] = "masked"
    path, out = saved(model, tmp_path / "model.onnx"), tmp_path / "out.onnx"
    assert load(path).proto.ByteSize() < LARGE
    result = fa_compiler.optimize(path, out)
    assert result.report.count("fused") == 1
    assert "causal" not in {tensor.name for tensor in result.model.graph.initializer}
    assert result.model == fa_compiler.optimize(model).model == as_parsed(out)


def agree(session: ort.InferenceSession, path: Path) -> None:
    expected = ort.InferenceSession(path).run(None, feeds())[0]
    assert session.fusion_report.count("fused") == 1
    actual = session.run(None, feeds())[0]
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5 * np.max(np.abs(expected)))


def test_session(source: Path) -> None:
    session = fa_compiler.InferenceSession(source)
    agree(session, source)
    session.set_providers(["CPUExecutionProvider"])
    agree(session, source)
    agree(fa_compiler.InferenceSession(source.read_bytes()), source)


@NAMES_OF_BYTES
def test_names_that_are_no_text(tmp_path: Path) -> None:
    """ONNX cannot hold the place of such a file: it is read whole."""
    path = saved(wide(), tmp_path / os.fsdecode(b"m\xff.onnx"))
    out = tmp_path / "out.onnx"
    assert inline_weights.read_skeleton(path) is None
    assert fa_compiler.optimize(path, out).model == as_parsed(out)


def test_a_user_cannot_name_the_place(tmp_path: Path) -> None:
    """An external tensor that claims to have been left in the file is one outside the folder, as it always was."""
    path = tmp_path / "model.onnx"
    model = wide()
    path.touch()
    tensor = model.graph.initializer.add(name="evil", data_type=TensorProto.FLOAT, dims=[4])
    tensors.make_external(tensor, inline_weights.FileWeights(path).location, 0, 16)
    with pytest.raises(fa_compiler.InputError, match="tensor 'evil' lies in .* outside the model's folder"):
        load(saved(model, path))


def _float_data(tensor: TensorProto) -> None:
    values = numpy_helper.to_array(tensor).reshape(-1)
    tensor.ClearField("raw_data")
    tensor.float_data.extend(values)


def _field(number: int, content: bytes) -> bytes:
    return wire.head(number, len(content)) + content


def _with_tensor(change: Callable[[TensorProto], object]) -> bytes:
    model = wide()
    change(model.graph.initializer[1])
    return model.SerializeToString()


def _two_graphs() -> bytes:
    """Two parts of one graph, which protobuf joins; the second begins in the middle of the initializers."""
    model = wide()
    rest = onnx.ModelProto()
    rest.graph.initializer.extend(model.graph.initializer[3:])
    del model.graph.initializer[3:]
    return model.SerializeToString() + rest.SerializeToString()


def _raw_twice() -> bytes:
    model = wide()
    tensor = model.graph.initializer.pop(1)
    other = TensorProto(raw_data=weights(1)["up"].tobytes())
    content = tensor.SerializeToString() + other.SerializeToString()
    return model.SerializeToString() + _field(7, _field(5, content))


def _of(dtype: int, size: int, bits: int) -> bytes:
    def change(tensor: TensorProto) -> None:
        tensor.data_type, tensor.raw_data = dtype, bytes(range(256)) * (size * bits // 8 // 256)
        del tensor.dims[:]
        tensor.dims.extend([256, size // 256])

    return _with_tensor(change)


FORMS: dict[str, tuple[Callable[[], bytes], int]] = {
    "usual": (lambda: wide().SerializeToString(), 2),
    "said not to be external": (lambda: _with_tensor(lambda t: setattr(t, "data_location", 0)), 2),
    "said to be external": (lambda: _with_tensor(lambda t: setattr(t, "data_location", 1)), 1),
    "numbers instead of bytes": (lambda: _with_tensor(_float_data), 1),
    "too short": (lambda: _with_tensor(lambda t: setattr(t, "raw_data", t.raw_data[:-4])), 1),
    "too long": (lambda: _with_tensor(lambda t: setattr(t, "raw_data", t.raw_data + b"\0")), 1),
    "two negative sizes": (lambda: _with_tensor(lambda t: t.dims.__setitem__(slice(None), [-SIZE, -WIDE])), 1),
    "a segment": (lambda: _with_tensor(lambda t: setattr(t.segment, "end", 5)), 1),
    "no name": (lambda: _with_tensor(lambda t: t.ClearField("name")), 2),
    "no type": (lambda: _with_tensor(lambda t: t.ClearField("data_type")), 1),
    "an unknown type": (lambda: _with_tensor(lambda t: setattr(t, "data_type", 999)), 1),
    "strings": (lambda: _with_tensor(lambda t: setattr(t, "data_type", TensorProto.STRING)), 1),
    "float16": (lambda: _of(TensorProto.FLOAT16, 1 << 16, 16), 2),
    "bfloat16": (lambda: _of(TensorProto.BFLOAT16, 1 << 16, 16), 2),
    "int8": (lambda: _of(TensorProto.INT8, 1 << 17, 8), 2),
    "int4": (lambda: _of(TensorProto.INT4, 1 << 18, 4), 2),
    "bool": (lambda: _of(TensorProto.BOOL, 1 << 17, 8), 2),
    "at the limit": (lambda: _of(TensorProto.UINT8, LARGE, 8), 1),
    "raw_data twice": (_raw_twice, 1),
    "two graphs": (_two_graphs, 2),
    "unknown fields": (
        lambda: wide().SerializeToString() + _field(4000, bytes(100)) + _field(7, _field(5000, b"x")),
        2,
    ),
    "none large": (lambda: attention().SerializeToString() + _field(4000, bytes(LARGE)), 0),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms(form: str, tmp_path: Path) -> None:
    """What is left in the file, and that with it the model is what protobuf reads."""
    make, left = FORMS[form]
    path = tmp_path / "model.onnx"
    path.write_bytes(make())
    found = inline_weights.read_skeleton(path)
    assert (0 if found is None else len(found.kept_in_file)) == left
    if found is None:
        return
    proto = onnx.ModelProto.FromString(found.content)
    assert {i for i, tensor in enumerate(proto.graph.initializer) if found.weights.owns(tensor)} == found.kept_in_file
    written = b"".join(inline_weights.serialised(proto, found.weights, "model"))
    expected = as_parsed(path)
    for tensor in expected.graph.initializer:
        if not tensor.data_location:
            tensor.ClearField("data_location")  # the default, said or not
    assert written == expected.SerializeToString()
    assert make_inline(proto, found.weights) == expected


def _outcome(path: Path) -> str | bytes:
    """What reading a file ends in: the error, or the whole model."""
    try:
        loaded = load(path)
    except fa_compiler.InputError as error:
        return str(error)
    return make_inline(copy_of(loaded), loaded.weights).SerializeToString(deterministic=True)


def test_damaged_files_are_as_without_this(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut anywhere, or with a wrong byte anywhere outside the numbers: the same error, or the same model."""
    content = wide().SerializeToString()
    path = tmp_path / "model.onnx"
    matrices = [content.index(array.tobytes()) for array in weights().values()]
    size = 4 * SIZE * WIDE
    plain_places = [i for i in range(len(content)) if not any(start + 4 <= i < start + size - 4 for start in matrices)]
    rng = random.Random(0)
    cases = [content[:cut] for cut in (*rng.sample(plain_places, 60), *(start + size // 2 for start in matrices))]
    for place in rng.sample(plain_places, 300):
        damaged = bytearray(content)
        damaged[place] = rng.randrange(256)
        cases.append(bytes(damaged))
    read_skeleton = inline_weights.read_skeleton
    errors = 0
    for case in cases:
        path.write_bytes(case)
        monkeypatch.setattr(reading.inline_weights, "read_skeleton", read_skeleton)
        ours = _outcome(path)
        monkeypatch.setattr(reading.inline_weights, "read_skeleton", lambda path: None)
        assert ours == _outcome(path)
        errors += isinstance(ours, str)
    assert 100 < errors < len(cases)


@pytest.mark.parametrize("command", ["optimize", "inspect"])
def test_truncated_file(command: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = saved(wide(), tmp_path / "model.onnx")
    os.truncate(path, path.stat().st_size // 2)
    arguments = [command, str(path)] + (["-o", str(tmp_path / "out.onnx")] if command == "optimize" else [])
    assert main(arguments) == 2
    error = capfd.readouterr().err
    assert error.count("\n") == 1
    assert f"{path} is not an ONNX model, or is truncated" in error
    assert list(tmp_path.iterdir()) == [path]


_MEASURED = """
import resource, sys
from fa_compiler.command_line.main import main
import fa_compiler
fa_compiler.optimize(sys.argv[1])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
result = fa_compiler.optimize(sys.argv[2], sys.argv[3])
assert result.report.count("fused") == 1
assert main(["optimize", sys.argv[2], "-o", sys.argv[2], "--force", "--quiet"]) == 0
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@PEAK_MEMORY
def test_memory_does_not_grow_with_them(tmp_path: Path) -> None:
    """Compiling a file with 64 MiB of weights, to another file and over itself, takes less than half of that."""
    model = wide()
    model.graph.initializer.append(numpy_helper.from_array(np.zeros((1 << 20, SIZE), np.float32), "table"))
    model.graph.node.append(helper.make_node("Gather", ["table", "ids"], ["rows"], "look_up"))
    model.graph.input.append(helper.make_tensor_value_info("ids", TensorProto.INT64, ["n"]))
    model.graph.output.append(helper.make_tensor_value_info("rows", TensorProto.FLOAT, ["n", SIZE]))
    path, out = saved(model, tmp_path / "model.onnx"), tmp_path / "out.onnx"
    grown = subprocess.run(
        [sys.executable, "-c", _MEASURED, str(saved(wide(), tmp_path / "small.onnx")), str(path), str(out)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        check=True,
    )
    assert int(grown.stdout) < 32 << 10  # KiB
    assert out.read_bytes() == path.read_bytes()
    table = next(tensor for tensor in as_parsed(out).graph.initializer if tensor.name == "table")
    assert (table.dims, table.raw_data) == ([1 << 20, SIZE], bytes(64 << 20))


def test_a_large_constant_node_is_copied_twice(tmp_path: Path) -> None:
    """protobuf parses it, beside weights that stay in the file. Two copies in Python's memory are alive at a time: what
    is read and what is joined. Its size is told without a serialisation of it."""
    model, size = wide(), 1 << 22
    table = numpy_helper.from_array(np.zeros((size // SIZE, SIZE), np.float32), "table")
    model.graph.node.append(helper.make_node("Constant", [], ["table"], "table", value=table))
    model.graph.output.append(helper.make_tensor_value_info("table", TensorProto.FLOAT, table.dims))
    path = saved(model, tmp_path / "model.onnx")
    tracemalloc.start()
    try:
        assert load(path).weights is not None
        assert tracemalloc.get_traced_memory()[1] < 2.5 * 4 * size
    finally:
        tracemalloc.stop()
    assert tensors.message_size(table) == 4 * size
    table.data_type = TensorProto.STRING
    assert tensors.message_size(table) == table.ByteSize()
