"""How a result is run: the lines are right, as they are printed."""

from __future__ import annotations

import json
import lzma
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper

import fa_compiler
from fa_compiler import shell
from fa_compiler.atc.request import Request
from fa_compiler.command_line.main import main, parser
from fa_compiler.op_registry.runtimes import RUNTIMES
from fa_compiler.passes import Options
from fa_compiler.passes.answer.option import options_of
from fa_compiler.passes.answer.options import Target
from fa_compiler.pipeline.how_to_run import OF_ATC, how_to_run
from fa_compiler.pipeline.options import make_options
from tests.graphs import harness
from tests.passes.attention_ops.test_delta_rule import model_of as linear
from tests.passes.attention_ops.test_delta_rule import problem
from tests.systems import IS_WINDOWS

from . import genai
from .builders import EXAMPLES, attention, feeds, saved


def executed(lines: tuple[str, ...]) -> onnxruntime.InferenceSession:
    """The session that the lines of Python make."""
    names: dict[str, object] = {}
    exec("\n".join(lines), names)
    session = names["session"]
    assert isinstance(session, onnxruntime.InferenceSession)
    return session


@pytest.mark.parametrize(("target", "way"), [("ort", 0), ("ascend", 1), ("onnx", 0), ("contrib", 0)])
def test_the_lines_of_python_run_the_file(target: Target, way: int, tmp_path: Path) -> None:
    original = saved(attention(batch=2, length=8), tmp_path / "model.onnx")
    mark = "'" if IS_WINDOWS else '"'  # which no name may have there
    path = tmp_path / f"a {mark}fused{mark} model.onnx"
    result = fa_compiler.optimize(original, path, target=target)
    assert result.report.count("fused") == 1
    session = executed(how_to_run(path, make_options(target)).ways[way].lines)
    inputs = feeds()
    (expected,) = onnxruntime.InferenceSession(original).run(None, inputs)
    (computed,) = session.run(None, inputs)
    np.testing.assert_allclose(computed, expected, rtol=1e-4, atol=1e-5)


ASSUMED = ["half-attention", "unit-inputs", "slow-decay"]
CLOSE = 2**-6
"""Relative to the largest number: tensors, results and states are rounded to bfloat16."""


@pytest.mark.parametrize("past", [False, True])
def test_an_operator_that_is_also_a_function(past: bool, tmp_path: Path) -> None:
    """The library has its kernel. Without the library the function in the file computes it."""
    inputs, attrs = problem(3, past=past)
    original, path = saved(linear(inputs, attrs, is_open=True), tmp_path / "model.onnx"), tmp_path / "fused.onnx"
    result = fa_compiler.optimize(original, path, target="ascend", assume=ASSUMED)
    wanted = onnxruntime.InferenceSession(original).run(None, inputs)
    for session in (executed(result.how_to_run.ways[1].lines), onnxruntime.InferenceSession(path)):
        for computed, expected in zip(session.run(None, inputs), wanted, strict=True):
            np.testing.assert_allclose(computed, expected, rtol=0, atol=CLOSE * np.abs(expected).max())
    assert main(["verify", str(original), str(path), "--rtol", "5e-2"]) == 0  # keys that are longer than 1


def test_another_target_for_linear_attention(tmp_path: Path) -> None:
    """It may fuse none of it, so the line does not promise that."""
    inputs, attrs = problem(3)
    original = saved(linear(inputs, attrs, is_open=True), tmp_path / "model.onnx")
    shown = str(fa_compiler.optimize(original, tmp_path / "fused.onnx").how_to_run)
    assert "run the original model, or what is made of it with" in shown
    assert "target='contrib', runtime='ort-cpu', which fuses some kinds of linear attention only" in shown


def test_an_operator_that_is_no_function(tmp_path: Path) -> None:
    """Nodes of other inputs share no function, so only the library computes them."""
    inputs, attrs = problem(3)
    model = linear(inputs, attrs)
    other = model.graph.node.add()
    other.CopyFrom(model.graph.node[0])
    other.input[4], other.output[:] = "", ["y2", "state2"]
    other.attribute.remove(next(attribute for attribute in other.attribute if attribute.name == "update_rule"))
    other.attribute.append(helper.make_attribute("update_rule", "delta"))
    added = model.graph.output.add()
    added.CopyFrom(model.graph.output[0])
    added.name = "y2"
    original, path = saved(model, tmp_path / "model.onnx"), tmp_path / "fused.onnx"
    result = fa_compiler.optimize(original, path, target="ascend", assume=ASSUMED)
    assert not onnx.load(path).functions
    wanted = onnxruntime.InferenceSession(original).run(None, inputs)
    for computed, expected in zip(executed(result.how_to_run.ways[1].lines).run(None, inputs), wanted, strict=True):
        np.testing.assert_allclose(computed, expected, rtol=0, atol=CLOSE * np.abs(expected).max())


def test_an_operator_with_neither_kernel_nor_function(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The reference runs the file, and a comparison says why there is none. Such nodes come from other programs."""
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17, "ascend" : 1]>
        norm (float[4, 8] x, float[8] gamma) => (float[4, 8] y) { y = ascend.RmsNorm (x, gamma) }
    """)
    plain = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17]>
        norm (float[4, 8] x, float[8] gamma) => (float[4, 8] y) {
            squares = Mul (x, x)
            mean = ReduceMean <axes = [-1]> (squares)
            epsilon = Constant <value_float = 1e-6> ()
            above = Add (mean, epsilon)
            root = Sqrt (above)
            normed = Div (x, root)
            y = Mul (normed, gamma)
        }
    """)
    original, path = saved(plain, tmp_path / "model.onnx"), saved(model, tmp_path / "fused.onnx")
    way = how_to_run(path, make_options("ascend"), proto=model).ways[1]
    assert "no CPU kernel of RmsNorm" in way.name
    names: dict[str, Any] = {}
    exec("\n".join(way.lines), names)
    inputs = {"x": np.linspace(-1, 2, 32, dtype=np.float32).reshape(4, 8), "gamma": np.ones(8, np.float32)}
    (wanted,) = onnxruntime.InferenceSession(original).run(None, inputs)
    (found,) = names["session"].run(None, inputs)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
    assert main(["verify", str(original), str(path)]) != 0
    assert "there is no CPU kernel of RmsNorm" in capsys.readouterr().err


def test_every_target_and_runtime() -> None:
    """A file needs the library, ATC or nothing; what it does not need is not named."""
    assert "RegisterCustomOpsLibrary" in str(how_to_run("out.onnx"))
    for line in shell.with_variable("FA_COMPILER_PROVIDER", "1", "python script.py"):
        assert line in str(how_to_run("out.onnx"))
    for runtime in (None, *RUNTIMES):
        shown = str(how_to_run("out.onnx", make_options("contrib", runtime=runtime)))
        assert "fa_compiler" not in shown
        assert "needs no library" in shown
        assert '"out.onnx"' in shown or "any other ONNX file" in shown
    assert "CUDAExecutionProvider" in str(how_to_run("out.onnx", make_options("onnx", runtime="ort-cuda")))
    assert "openvino.Core()" in str(how_to_run("out.onnx", make_options("onnx", runtime="openvino")))
    assert "onnxruntime-web" in str(how_to_run("out.onnx", make_options("contrib", runtime="ort-webgpu")))


@pytest.mark.parametrize(
    ("soc", "named"),
    [(None, "Ascend910B2"), ("Ascend310P3", "Ascend310P3"), ("A3", "Ascend910_9362"), ("310P", "Ascend310P1")],
)
def test_the_command_for_atc_has_what_the_file_was_written_for(soc: str | None, named: str) -> None:
    """The product, the version, the assumptions, and the inputs with open sizes."""
    options = make_options("ascend", soc_version=soc, cann="8.5.0", assume=["no-empty-rows", "binary-masks"])
    model = attention(batch="n", length=8)
    (line,) = how_to_run("my model.onnx", options, model).ways[0].lines
    args = parser().parse_args(shlex.split(line)[1:])
    assert (args.model, args.soc_version, args.cann) == (Path("my model.onnx"), named, "8.5.0")
    assert args.assume == ["binary-masks,no-empty-rows"]
    assert args.input_shape == ";".join(f"{value.name}:n,4,8,16" for value in model.graph.input)
    fixed = attention(batch=2, length=8)
    assert "--input-shape" not in str(how_to_run("model.onnx", options, fixed))


GIVEN: dict[str, Any] = {"cann": "8.5.0", "assume": ["no-empty-rows"], "only": "attention", "join_weights": "none"}
"""A value that is not the default for each option that the command for `atc` repeats."""


def test_the_command_for_atc_leaves_what_optimize_left() -> None:
    """`atc` fuses once more."""
    assert GIVEN.keys() == {*OF_ATC}
    for given in (GIVEN, *({name: value} for name, value in GIVEN.items())):
        (line,) = how_to_run("model.onnx", make_options("ascend", **given)).ways[0].lines
        words = shlex.split(line)[1:]
        args = parser().parse_args(words)
        assert {name: getattr(args, name) for name in given} == given
        assert {options_of(Options)[name].flag for name in OF_ATC if name not in given}.isdisjoint(words)
    assert {*OF_ATC, "soc_version"} == (options_of(Options).keys() & options_of(Request).keys()) | {"assume"}


@pytest.mark.parametrize(("bodies", "told"), [(True, "the file runs about as fast"), (False, "does not load the file")])
def test_what_a_file_is_without_the_library(bodies: bool, told: str, tmp_path: Path) -> None:
    original = saved(attention(), tmp_path / "model.onnx")
    shown = str(fa_compiler.optimize(original, tmp_path / "fused.onnx", bodies=bodies).how_to_run)
    assert told in shown


def test_a_kernel_of_the_runtime_is_faster_than_a_function(tmp_path: Path) -> None:
    """Where the model had one, the line says so."""
    shown = str(fa_compiler.optimize(harness.load("bert_ort_multi_head"), tmp_path / "fused.onnx").how_to_run)
    assert "may run slower than the model did, because ONNX Runtime has a kernel for its MultiHeadAttention" in shown
    plain = harness.load("bert__tso_eager_op13")
    assert "run slower" not in str(fa_compiler.optimize(plain, tmp_path / "plain.onnx").how_to_run)


def test_no_other_target_for_a_gradient(tmp_path: Path) -> None:
    """Neither ONNX nor ONNX Runtime has an operator for it, so none of their targets is advised."""
    model = onnx.load_model_from_string(lzma.decompress((EXAMPLES / "gpt_training.onnx.xz").read_bytes()))
    shown = str(fa_compiler.optimize(model, tmp_path / "fused.onnx").how_to_run)
    assert "ONNX Runtime does not load the file" in shown
    assert "No other target has an operator for the gradient" in shown and "--target" not in shown


@pytest.mark.parametrize("target", ["onnx", "contrib"])
def test_a_fused_file_stays_one_of_the_library(target: Target, tmp_path: Path) -> None:
    """Another target does not change what an earlier run made, so the file needs the library as before."""
    fused = saved(fa_compiler.optimize(attention(length=8, batch=2)).model, tmp_path / "fused.onnx")
    result = fa_compiler.optimize(fused, tmp_path / "again.onnx", target=target)
    assert "register_custom_ops" in str(result.how_to_run)
    assert f"fuse the original model with target='{target}'" in str(result.how_to_run)
    assert any(f"--target {target} does not change them" in note for note in result.report.notes)
    assert not any("does not change them" in note for note in fa_compiler.inspect(fused).notes)


def test_a_file_names_the_weights_that_it_needs(tmp_path: Path) -> None:
    """In the folder of the model it needs the same file; in another one a copy."""
    model = attention(length=8, batch=2)
    weight = numpy_helper.from_array(np.ones((2, 4, 8, 16), np.float32), "weight")
    model.graph.initializer.append(weight)
    model.graph.node.insert(0, helper.make_node("Add", ["query", "weight"], ["moved"]))
    model.graph.node[2].input[0] = "moved"
    path = tmp_path / "model.onnx"
    onnx.save(model, path, save_as_external_data=True, location="w.bin", size_threshold=16)
    (tmp_path / "other").mkdir()
    for place, needed in (("fused.onnx", "w.bin"), ("other/fused.onnx", "fused.onnx.data")):
        result = fa_compiler.optimize(path, tmp_path / place)
        assert f"fused.onnx needs its weights, {needed}, at the same place beside it" in result.report.notes
        assert (tmp_path / place).with_name(needed).is_file()


def test_a_file_with_shared_caches_is_run_by_a_decoding_session(tmp_path: Path) -> None:
    """A session with caches of their own has no room for what the file writes."""
    path = tmp_path / "model.onnx"
    how = fa_compiler.optimize(genai.Decoder().model, path, assume=["shared-caches"]).how_to_run
    assert how is not None
    assert "binds each of them as past and as present" in how.needs
    found: dict[str, Any] = {}
    exec("\n".join(how.ways[0].lines), found)
    assert found["outputs"]["logits"].shape == (1, 3, genai.WORDS)
    apart = fa_compiler.optimize(genai.Decoder().model, path, assume=["separate-caches"]).how_to_run
    assert apart is not None and "as past and as present" not in apart.needs
    exec("\n".join(apart.ways[0].lines), found)
    assert found["outputs"]["logits"].shape == (1, 3, genai.WORDS) and found["session"].room is None


def test_a_file_with_caches_in_place_is_run_by_a_decoding_session(tmp_path: Path) -> None:
    """One without caches is run as any other, whatever was asked for."""
    path, decoder = tmp_path / "step.onnx", harness.load("llama_past__tsn_eager_op14")
    how = fa_compiler.optimize(decoder, path, in_place_caches=True).how_to_run
    assert how is not None
    assert "binds each of them as past and as present" in how.needs
    assert f"fa_compiler.DecodingSession({json.dumps(str(path))}, room=4096)" in how.ways[0].lines[1]
    without = str(fa_compiler.optimize(attention(), path, in_place_caches=True).how_to_run)
    assert "DecodingSession" not in without and "Without the library the file runs" in without


def test_a_decoder_whose_caches_could_be_in_place(tmp_path: Path) -> None:
    """The option is named, and the lines step. One whose number of cached tokens is fixed has no such option."""
    path, decoder = tmp_path / "step.onnx", harness.load("llama_past__tsn_eager_op14")
    result = fa_compiler.optimize(decoder, path)
    assert result.report.possible_buffers == [f"past_{what}_{layer}" for layer in (0, 1) for what in ("key", "value")]
    assert result.how_to_run is not None and "--in-place-caches" in result.how_to_run.needs
    names: dict[str, Any] = {}
    exec("\n".join(result.how_to_run.ways[0].lines), names)
    assert names["session"].length == 3
    asked = fa_compiler.inspect(decoder, in_place_caches=True)
    assert {cache.past for cache in asked.caches} == {*result.report.possible_buffers} and not asked.possible_buffers
    assert not fa_compiler.inspect(decoder, "ascend").possible_buffers
    for dim in (dim for value in decoder.graph.input for dim in value.type.tensor_type.shape.dim):
        if dim.dim_param == "past":
            dim.dim_value = 8
    fixed = fa_compiler.optimize(decoder, path)
    of_encoder = fa_compiler.optimize(harness.load("t5_decpast__tsn_eager_op14"), path).how_to_run
    assert of_encoder is not None
    assert of_encoder.ways[0].lines[2].startswith("outputs = session.step(inputs)    # session.inputs names")
    assert fixed.report.fused_attentions == 2 and "DecodingSession" not in str(fixed.how_to_run)


@pytest.mark.parametrize("in_place", [False, True])
def test_a_decoder_that_was_traced_with_one_token(in_place: bool, tmp_path: Path) -> None:
    """It declares an open number of tokens, and a Reshape inside takes one in each step."""
    decoder = harness.load("llama_past__tsn_sdpa_op17")
    how = fa_compiler.optimize(decoder, tmp_path / "step.onnx", in_place_caches=in_place).how_to_run
    assert how is not None
    names: dict[str, Any] = {}
    exec("\n".join(how.ways[0].lines), names)
    assert names["session"].length == 1 and bool(names["session"].room) is in_place


def test_a_decoder_of_a_fixed_batch_steps_with_so_many_sequences(tmp_path: Path) -> None:
    """The lines are for a file that another batch does not fit."""
    decoder = harness.load("llama_past__tsn_eager_op14")
    for dim in (dim for value in decoder.graph.input for dim in value.type.tensor_type.shape.dim):
        if dim.dim_param == "batch":
            dim.dim_value = 2
    how = fa_compiler.optimize(decoder, tmp_path / "step.onnx").how_to_run
    assert how is not None
    names: dict[str, Any] = {}
    exec("\n".join(how.ways[0].lines), names)
    assert names["outputs"]["logits"].shape[:2] == (2, 3)


@pytest.mark.parametrize("in_place", [False, True])
def test_a_step_with_inputs_that_no_session_makes(in_place: bool, tmp_path: Path) -> None:
    """A mask of another name does not follow from the tokens, so that the lines do not leave it out."""
    decoder = harness.load("llama_past__tsn_eager_op14")
    for value in decoder.graph.input:
        value.name = value.name.replace("attention_mask", "attention_mask.full_attention")
    for node in decoder.graph.node:
        node.input[:] = [name.replace("attention_mask", "attention_mask.full_attention") for name in node.input]
    how = fa_compiler.optimize(decoder, tmp_path / "step.onnx", in_place_caches=in_place).how_to_run
    assert how is not None
    assert how.ways[0].lines[-1].startswith("outputs = session.step(inputs)    # session.inputs names")


def test_a_decoder_with_a_state_of_open_size_begins_with_the_caches_of_a_prompt(tmp_path: Path) -> None:
    """Nothing but the outputs of another model tells how many columns the state of a convolution has."""
    decoder = harness.load("llama_past__tsn_eager_op14")
    shapes = {value.name: value.type.tensor_type.shape for value in decoder.graph.input}
    heads, size = (shapes["past_key_0"].dim[axis].dim_value for axis in (1, 3))
    values = [
        helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["batch", 4, "columns"])
        for name in ("past_conv", "present_conv")
    ]
    decoder.graph.input.append(values[0])
    decoder.graph.output.append(values[1])
    decoder.graph.node.append(helper.make_node("Neg", ["past_conv"], ["present_conv"]))
    result = fa_compiler.optimize(decoder, tmp_path / "step.onnx")
    assert result.how_to_run is not None
    names = [f"present_{what}_{layer}" for layer in (0, 1) for what in ("key", "value")]
    outputs = {name: np.zeros((1, heads, 2, size), np.float32) for name in names}
    given: dict[str, Any] = {"outputs": outputs | {"present_conv": np.ones((1, 4, 3), np.float32)}}
    exec("\n".join(result.how_to_run.ways[0].lines), given)
    assert given["session"].length == 5 and given["session"].caches["past_conv"].shape == (1, 4, 3)


def test_a_decoder_whose_caches_are_states_is_run_by_a_decoding_session(tmp_path: Path) -> None:
    """They can be no buffers, whatever was asked for. A state of another size behind the step can have no next one."""
    for size, in_place in (("columns", False), ("columns", True), (3, False)):
        model = attention()
        for name, columns in (("past_conv", 2 if size == 3 else size), ("present_conv", size)):
            value = helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["batch", 4, columns])
            (model.graph.input if name == "past_conv" else model.graph.output).append(value)
        widened = helper.make_node("Concat", ["past_conv", "past_conv"], ["present_conv"], axis=2)
        model.graph.node.append(widened if size == 3 else helper.make_node("Neg", ["past_conv"], ["present_conv"]))
        how = fa_compiler.optimize(model, tmp_path / "step.onnx", in_place_caches=in_place).how_to_run
        assert how is not None and "--in-place-caches" not in how.needs
        assert ("DecodingSession" in str(how)) == (size == "columns")
        assert ("session.take_caches(outputs)" in how.ways[0].lines) == (size == "columns")


def test_a_sharded_model_is_run_by_mpi(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command of `shard` and that of `optimize`, which copies such a model, are the same. Damaged metadata say no
    number of ranks."""
    original, folder = saved(attention(), tmp_path / "model.onnx"), tmp_path / "out"
    words = ["shard", str(original), "-o", str(folder), "--sequence-parallel", "3"]
    assert main(words) == 0
    (told,) = [line for line in capsys.readouterr().out.splitlines() if "run it with" in line]
    path = folder / "model.onnx"
    (way,) = how_to_run(path, None, onnx.load(path, load_external_data=False)).ways
    assert told.endswith(f"run it with: {way.lines[0]}")
    assert main(["optimize", str(path), "-o", str(path), "--force"]) == 0
    shown = capsys.readouterr().out
    assert way.lines[0] in shown
    assert "the model is already fused" in shown
    again = ["-o", str(tmp_path / "again")]
    for refused in (
        ["shard", str(path), *again, "--sequence-parallel", "3"],
        ["atc", str(path), *again, "--soc-version", "Ascend910B2"],
        ["plan", str(path), *again],
    ):
        assert main(refused) == 2
        assert capsys.readouterr().err.endswith(f"{path} is sharded already; give the model from which it was made\n")
    for session in (fa_compiler.InferenceSession, fa_compiler.DecodingSession):
        with pytest.raises(fa_compiler.InputError, match="is sharded already; fa_compiler.ShardedSession runs it"):
            session(path)
    assert main(["verify", str(original), str(path)]) == 2
    assert f"{path} is sharded already; compare what `fa-compiler run` writes" in capsys.readouterr().err
    proto = onnx.load(path, load_external_data=False)
    proto.metadata_props[0].value = "{}"
    assert how_to_run(path, None, proto).ways[0].lines[0].startswith("mpirun -n N fa-compiler run ")
