"""The functions of the package that a Python program calls, beside `optimize`."""

from __future__ import annotations

import logging
import lzma
import pickle
import re
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import networkx
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

import fa_compiler
from fa_compiler.command_line.main import main
from fa_compiler.comparison.compare import OutputComparison
from fa_compiler.errors import FaCompilerError, InputError
from fa_compiler.lowering.ascend.onnx_route.errors import UnsupportedModel
from fa_compiler.op_registry.errors import InputError as CallError
from fa_compiler.op_registry.errors import RegOpSyntaxError, UnknownOp
from fa_compiler.page.gain import gain_line
from fa_compiler.reference.call import ReferenceInputError
from tests.graphs import harness
from tests.systems import IS_WINDOWS

from .builders import EXAMPLES, HEADS, attention, feeds, plain, projected, saved

TRAINING = EXAMPLES / "gpt_training.onnx.xz"


class ONNXProgram:
    """As torch.onnx.export returns it: the model is its attribute."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.model = ir.from_proto(model)


@pytest.mark.parametrize("kind", ["path", "text", "bytes", "proto", "ir", "program"])
def test_what_a_model_is_given_as(kind: str, tmp_path: Path) -> None:
    """Every function takes the same kinds of models."""
    model = attention(batch=2, length=8)
    path = saved(model, tmp_path / "model.onnx")
    given = {
        "path": path,
        "text": str(path),
        "bytes": model.SerializeToString(),
        "proto": model,
        "ir": ir.from_proto(model),
        "program": ONNXProgram(model),
    }[kind]
    assert fa_compiler.inspect(given).count("fused") == 1
    result = fa_compiler.optimize(given).model
    assert isinstance(result, ir.Model if kind == "ir" else onnx.ModelProto)
    assert fa_compiler.verify(given, result).same
    assert fa_compiler.verify(given, given, feeds()).same


def test_what_is_no_model() -> None:
    with pytest.raises(TypeError, match=r"a model is a path, bytes, .* not dict"):
        fa_compiler.inspect({})  # type: ignore[arg-type]
    result = fa_compiler.optimize(plain())
    with pytest.raises(TypeError, match="not Result; give its `model`"):
        fa_compiler.optimize(result)  # type: ignore[arg-type]


def test_a_model_with_external_weights_is_verified(tmp_path: Path) -> None:
    path, _ = projected(tmp_path)
    result = fa_compiler.optimize(path, tmp_path / "fused.onnx")
    assert result.report.count("fused") == 1
    assert fa_compiler.verify(path, tmp_path / "fused.onnx").same
    loaded = ir.load(path)
    assert fa_compiler.verify(loaded, fa_compiler.optimize(loaded).model).same


def test_verify_tells_a_difference() -> None:
    model = attention(batch=2, length=8)
    other = attention(batch=2, length=8)
    other.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(np.array(0.5, np.float32), "scale"))
    comparison = fa_compiler.verify(model, other)
    assert isinstance(comparison, fa_compiler.Comparison)
    assert not comparison.same
    with pytest.raises(InputError, match="the dictionary of inputs lacks the input 'value'"):
        fa_compiler.verify(model, other, {name: array for name, array in feeds().items() if name != "value"})


def test_compile_for_atc(tmp_path: Path) -> None:
    """Sizes may be given as numbers or as the text of the command line: the folders are the same."""
    path = saved(attention(), tmp_path / "model.onnx")
    names = ("query", "key", "value")
    text = ";".join(f"{name}:2,4,8,16" for name in names)
    numbers = fa_compiler.compile_for_atc(
        path, tmp_path / "a", "Ascend910B2", input_shape=dict.fromkeys(names, (2, 4, 8, 16))
    )
    words = fa_compiler.compile_for_atc(path, str(tmp_path / "b"), "Ascend910B2", input_shape=text)
    assert numbers.count("fused") == words.count("fused") == 1
    files = [sorted(file.name for file in (tmp_path / name).iterdir()) for name in "ab"]
    assert files[0] == files[1]
    for name in files[0]:
        if name.endswith((".air", ".onnx", ".sh")):
            assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    with pytest.raises(InputError, match="Ascend910B2"):
        fa_compiler.compile_for_atc(path, tmp_path / "c", "Ascend910B22")
    with pytest.raises(InputError, match=r"`dynamic_dims` goes with -1 in `input_shape`, and no size there is -1"):
        fa_compiler.compile_for_atc(path, tmp_path / "c", "Ascend910B2", input_shape=text, dynamic_dims=[(1,), (2,)])
    for groups in ([1, 2], ["1", "2"]):
        with pytest.raises(InputError, match=r"a group of `dynamic_dims` is a list such as \(1, 128\), not '?1"):
            fa_compiler.compile_for_atc(path, tmp_path / "c", "Ascend910B2", dynamic_dims=groups)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="unexpected keyword argument 'sequence_axis', did you mean 'axes'"):
        fa_compiler.compile_for_atc(path, tmp_path / "c", "Ascend910B2", sequence_axis={"x": 1})  # type: ignore[call-arg]
    with pytest.raises(InputError, match="`method` and `axes` go with `sequence_parallel`"):
        fa_compiler.compile_for_atc(path, tmp_path / "c", "Ascend910B2", method="ring")
    assert not (tmp_path / "c").exists()


def test_a_report_says_how_python_writes_an_assumption() -> None:
    """Hints have the words of the command line."""
    lines = str(fa_compiler.inspect(harness.load("llama_past__tso_eager_op13"))).splitlines()
    assert any("try: --assume same-sizes if" in line for line in lines)
    assert lines[-2] == '--assume same-sizes is assume=["same-sizes"] in Python'


def test_a_report_prints_as_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The lines are those of the command, but for rich's frame."""
    model = attention()
    model.graph.output.append(onnx.helper.make_tensor_value_info("probs", onnx.TensorProto.FLOAT, [None] * 4))
    for node in model.graph.node:
        node.name = f"{node.name}\x1b[31m"
    path = saved(model, tmp_path / "model.onnx")
    main(["inspect", str(path)])
    shown = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip(" ─")]
    report = fa_compiler.inspect(path)
    printed = [line.split() for line in str(report).splitlines()]
    assert shown[:3] == printed[:3]  # the last line holds the seconds
    assert "\x1b" not in str(report)
    html = report._repr_html_()
    cells = re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", html)
    assert len(cells) == 8 and cells[4:6] == ["0", "declined"] and "\x1b" not in html
    assert "model.onnx: 0 fused, 1 declined (of 1)" in html
    assert str(fa_compiler.inspect(plain())).startswith("model: no attention found")
    assert fa_compiler.inspect(plain())._repr_html_().startswith("<p>model: no attention found")


def test_what_was_gained() -> None:
    """Nodes, and the scores of the largest attention: at the model's sizes where they are fixed."""
    model = attention(batch=2, length=256)
    probs = onnx.helper.make_tensor_value_info("probs", onnx.TensorProto.FLOAT, [2, HEADS, 256, 256])
    model.graph.value_info.append(probs)
    result = fa_compiler.optimize(model)
    line = gain_line(result.report, model, result.model)
    size = 2 * HEADS * 256 * 256 * 2 * 4 // 1024**2
    assert line == f"5 nodes before, 1 after; up to {size} MiB of scores and probabilities are not held any more"
    other = fa_compiler.optimize(model, target="contrib")
    assert gain_line(other.report, model, other.model) == f"5 nodes before, {len(other.model.graph.node)} after"
    assert gain_line(fa_compiler.inspect(plain()), plain(), plain()) is None


def _decoder(rows: int | str, keys: int | str) -> onnx.ModelProto:
    """An attention of so many rows to so many keys."""
    infos = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, HEADS, size, 16])
        for name, size in (("query", rows), ("key", keys), ("value", keys), ("out", rows))
    ]
    model = attention()
    del model.graph.input[:], model.graph.output[:]
    model.graph.input.extend(infos[:3])
    model.graph.output.append(infos[3])
    return model


@pytest.mark.parametrize(
    ("rows", "keys", "told", "on_page"),
    [
        ("s", "s", f"at 4,096 tokens {HEADS * 128} MiB", f"<td>2,048</td><td>{HEADS * 32} MiB</td>"),
        ("s", 2048, f"at 4,096 tokens {HEADS * 64} MiB", f"<td>2,048</td><td>{HEADS * 32} MiB</td>"),
        (1, "t", f"at 4,096 tokens {HEADS * 32} KiB", f"<td>2,048</td><td>{HEADS * 16} KiB</td>"),
        (1, 2048, f"for each sequence {HEADS * 16} KiB", f"<p>{HEADS * 16} KiB is the size of the scores"),
    ],
)
def test_what_a_decoding_step_gains(rows: int | str, keys: int | str, told: str, on_page: str, tmp_path: Path) -> None:
    """One row, or a cache of a fixed size: these sizes count, and not a square of tokens."""
    model, page = _decoder(rows, keys), tmp_path / "page.html"
    result = fa_compiler.optimize(model)
    line = gain_line(result.report, model, result.model)
    assert line is not None and f"{told} of scores" in line
    assert main(["inspect", str(saved(model, tmp_path / "model.onnx")), "--html", str(page)]) == 0
    assert on_page in page.read_text(encoding="utf-8")


def test_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "fa_compiler"):
        fa_compiler.inspect(attention())
        fa_compiler.inspect(plain())
        fa_compiler.inspect(fa_compiler.optimize(attention()).model)
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0].startswith("model: 1 of 1 attentions fused in ")
    assert lines[1] == "model: block 0 at attn/Softmax: fused: FlashAttentionScore"
    assert lines[2].startswith("model: 0 of 0 attentions fused in ")
    assert lines[5].startswith("model: 0 of 0 attentions fused in ")
    assert lines[5].endswith(" s, 1 already fused")


def test_a_session_takes_our_arguments_and_no_others() -> None:
    model = attention(batch=2, length=8).SerializeToString()
    session = fa_compiler.InferenceSession(model, assume=["no-empty-rows"], disabled_optimizers=["ConstantFolding"])
    assert session.fusion_report is not None
    assert session.fusion_report.count("fused") == 1
    assert repr(session) == "<InferenceSession model: 1 fused (of 1)>"
    with pytest.raises(TypeError, match="unexpected keyword argument 'foo'"):
        fa_compiler.InferenceSession(model, foo=3)
    with pytest.raises(InputError, match="unknown assumption 'nonsense'"):
        fa_compiler.InferenceSession(model, assume=["nonsense"])


def test_errors_of_shard_name_its_keywords(tmp_path: Path) -> None:
    """And those of the registry."""
    path, out = saved(attention(batch=2, length=8), tmp_path / "model.onnx"), tmp_path / "out"
    with pytest.raises(InputError, match="no cache was found that a prompt could fill; leave out `prompt`$"):
        fa_compiler.shard(path, out, 2, prompt=True)
    with pytest.raises(InputError, match="if it is not, name the inputs with the sequence by `axes`$"):
        fa_compiler.shard(lzma.decompress(TRAINING.read_bytes()), out, 2)
    with pytest.raises(TypeError, match="unexpected keyword argument 'sequence_axis', did you mean 'axes'"):
        fa_compiler.shard(path, out, 2, sequence_axis={"query": 1})  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"`cann` is a text such as '8.5.0', not 8.0"):
        fa_compiler.op_registry.get("FlashAttentionScore", 8.0)  # type: ignore[arg-type]


def test_a_graph_whose_nodes_know_their_block() -> None:
    model = attention(batch=2, length=8)
    model.graph.node.append(helper.make_node("Softmax", ["query"], ["other"], "other", axis=-1))
    model.graph.output.append(helper.make_tensor_value_info("other", TensorProto.FLOAT, None))
    found = fa_compiler.graph(model)
    report = found.graph["report"]
    fused, left = report.blocks
    assert (fused.status, left.status) == ("fused", "not_attention")
    held = {
        block.id: {data["name"] for _, data in found.nodes(data=True) if block in data["blocks"]}
        for block in report.blocks
    }
    assert held == {
        fused.id: {"transpose", "scores", "scale_scores", "attn/Softmax", "context"},
        left.id: {"other"},
    }
    assert found.nodes["probs"]["op_type"] == "Softmax"
    assert found.edges["scaled", "probs"]["values"] == {"scaled": "[2, 4, 8, 8]"}
    assert networkx.ancestors(found, "probs") == {"key_t", "product", "scaled"}


@pytest.mark.parametrize("kind", ["path", "ir"])
def test_a_result_comes_back_from_another_process(kind: str, tmp_path: Path) -> None:
    """A process pool pickles what a task returns, and what it raises."""
    path = saved(attention(batch=2, length=8), tmp_path / "model.onnx")
    given = path if kind == "path" else ir.load(path)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        result = pool.submit(fa_compiler.optimize, given).result()
        with pytest.raises(InputError, match="no such file"):
            pool.submit(fa_compiler.optimize, tmp_path / "missing.onnx").result()
    assert result.report.count("fused") == 1
    assert isinstance(result.model, ir.Model if kind == "ir" else onnx.ModelProto)
    assert fa_compiler.verify(path, result.model).same


@pytest.mark.parametrize(
    "error",
    [
        InputError("model.onnx is empty"),
        UnknownOp("FlashAttentionScor", ["FlashAttentionScore"]),
        CallError("FlashAttentionScore", "query", "is no array"),
        RegOpSyntaxError("header.h", 3, "expected a macro"),
        ReferenceInputError("FlashAttentionScore", "query", "has rank 1"),
        UnsupportedModel(["node 'a' (Add): no"]),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_are_pickled_as_they_are(error: FaCompilerError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert (str(again), vars(again)) == (str(error), vars(error))


def test_every_error_has_one_base() -> None:
    query = np.zeros((1, 4, 8, 16), np.float32)
    call = {"query": query, "key": query, "value": query}
    attributes = {"head_num": 3, "input_layout": "BNSD"}
    for run in (fa_compiler.ops.run, fa_compiler.reference.run):
        with pytest.raises(FaCompilerError, match="head_num"):
            run("FlashAttentionScore", call, attributes)
        with pytest.raises(FaCompilerError, match="unknown operator 'FlashAttentionScor', did you mean"):
            run("FlashAttentionScor", call, attributes)
        with pytest.raises(FaCompilerError, match="keys"):
            run("FlashAttentionScore", call | {"keys": query}, attributes)


def test_what_functions_return_shows_itself(tmp_path: Path) -> None:
    """In `print`, in a notebook, and after it was pickled, as the results of a process pool are."""
    name = "fused 'b'.onnx" if IS_WINDOWS else 'fused "<b>".onnx'
    path, fused = saved(attention(batch=2, length=8), tmp_path / "model.onnx"), tmp_path / name
    result = fa_compiler.optimize(path, fused)
    assert str(result).startswith(str(result.report))
    assert f"wrote {fused}\n" in str(result)
    assert "fa_compiler.register_custom_ops(options)" in str(result)
    compared = fa_compiler.verify(path, fused)
    assert "the output agrees" in str(compared)
    assert "query [2, 4, 8, 16]" in str(compared)
    measured = fa_compiler.bench(path, [8], seconds=0.01)
    assert "1 of 1 attentions fused" in str(measured)
    sharded = fa_compiler.shard(path, tmp_path / "ranks", 2)
    assert re.search(r"^\S+ +gather +0.00$", str(sharded), re.MULTILINE)
    assert str(sharded).endswith("model.onnx --inputs X.npz --outputs Y.npz")
    assert repr(sharded).endswith("model.onnx: 2 ranks, contiguous order; print() shows all of it>")
    for shown in (result, compared, measured, sharded):
        html = shown._repr_html_()
        assert html.startswith("<table>")
        assert "<b>" not in html
        again = pickle.loads(pickle.dumps(shown))
        assert str(again) == str(shown)
    assert pickle.loads(pickle.dumps(result)).model == result.model
    assert "wrote" not in str(fa_compiler.optimize(path))
    assert fa_compiler.optimize(saved(plain(), path), fused).how_to_run is None


def test_outputs_that_differ_show_why() -> None:
    outputs = (
        OutputComparison("a\x1b", "float32", (2,), 0.5, "it differs"),
        OutputComparison("b", "float32", (2,), 0.1, None, noise=0.1),
        OutputComparison("c", "float32", (2,), 0.1, None, unrounded=0.01),
    )
    shown = str(fa_compiler.Comparison(outputs, 1e-5, "random inputs", {"x": (2, 3)}, 2))
    assert "\x1b" not in shown
    for words in ("it differs", "differs from itself by 0.1", "the roundings to integers, which differ (0.01)"):
        assert words in shown
    assert "1 of 3 outputs differs (tolerance 1e-05" in shown
    assert shown.endswith("inputs: x [2, 3]; with random inputs")


def test_what_is_fused_already_is_no_gain(tmp_path: Path) -> None:
    fused = fa_compiler.optimize(attention(batch=2, length=8)).model
    again = fa_compiler.optimize(fused, tmp_path / "again.onnx")
    assert "the model is already fused: the output is a copy of the input" in str(again)
    assert "register_custom_ops" in str(again)
    with pytest.raises(fa_compiler.InputError, match="is already fused; give the model from which it was made"):
        fa_compiler.bench(fused, [8], seconds=0.01)


@pytest.mark.parametrize(("graph", "name"), [("main_graph", "model"), ("", "model"), ("encoder", "encoder")])
def test_a_pass_calls_a_model_by_its_own_name(graph: str, name: str) -> None:
    """Not by the name that an exporter gives to every graph."""
    model = ir.from_proto(attention())
    model.graph.name = graph
    fuse = fa_compiler.FuseAttention()
    fuse(model)
    assert fuse.report is not None
    assert fuse.report.model == name


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"target": None}, "`target` is a text, not None"),
        ({"target": "onnx", "opset": "23"}, "`opset` is a whole number, not '23'"),
        ({"target": "onnx", "runtime": 5}, "`runtime` is a text or None, not 5"),
        ({"assume": 5}, "`assume` is a list, not 5"),
        ({"assume": [1]}, "`assume` is a list of texts, and 1 is none"),
        ({"assume": [["decode"]]}, "`assume` is a list of texts, and ['decode'] is none"),
        ({"in_place_caches": "yes"}, "`in_place_caches` is True or False, not 'yes'"),
    ],
)
def test_a_value_of_another_type(given: dict[str, Any], said: str) -> None:
    with pytest.raises(TypeError, match=re.escape(said)):
        fa_compiler.inspect(attention(), **given)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda model: fa_compiler.bench(model, threads="2"), "`threads` is a whole number or None, not '2'"),
        (lambda model: fa_compiler.bench(model, seconds=True), "`seconds` is a number, not True"),
        (
            lambda model: fa_compiler.shard(model, "out", 2, axes="query:2"),
            "`axes` is a dictionary or None, not 'query:2'",
        ),
        (
            lambda model: fa_compiler.compile_for_atc(model, "out", "Ascend910B2", input_shape=5),
            "`input_shape` is a text or a dictionary, not 5",
        ),
        (lambda model: fa_compiler.InferenceSession(model.SerializeToString(), assume=5), "`assume` is a list, not 5"),
        (
            lambda model: fa_compiler.verify(model, model, assume=[None]),
            "`assume` is a list of texts, and None is none",
        ),
        (lambda model: fa_compiler.shard(model, "out", 2, assume=5), "`assume` is a list, not 5"),
        (lambda model: fa_compiler.shard(model, "out", 2, assume=[5]), "`assume` is a list of texts, and 5 is none"),
        (
            lambda model: fa_compiler.compile_for_atc(model, "out", "Ascend910B2", assume=[5]),
            "`assume` is a list of texts, and 5 is none",
        ),
        (lambda model: fa_compiler.optimize(model, 3), "`output` is a path, not 3"),
        (lambda model: fa_compiler.optimize(model, True), "`output` is a path, not True"),
        (lambda model: fa_compiler.shard(model, 3, 2), "`output` is a path, not 3"),
        (lambda model: fa_compiler.plan("model.onnx", 3), "`output` is a path, not 3"),
        (lambda model: fa_compiler.compile_for_atc(model, 3, "Ascend910B2"), "`output` is a path, not 3"),
    ],
)
def test_a_value_of_another_type_in_other_functions(call: Callable[[onnx.ModelProto], object], said: str) -> None:
    with pytest.raises(TypeError, match=re.escape(said)):
        call(attention())


def test_one_size_in_the_place_of_several() -> None:
    with pytest.raises(InputError, match=r"the sizes of an input are a list such as \(1, 128\), not 8"):
        fa_compiler.compile_for_atc(attention(), "out", "Ascend910B2", input_shape={"query": 8})  # type: ignore[dict-item]
    with pytest.raises(InputError, match="'2' ranks: give a number"):
        fa_compiler.shard(attention(), "out", "2")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"opset": 23}, 'an opset needs target="onnx"'),
        ({"runtime": "ort-cpu"}, 'a runtime needs target="onnx" or target="contrib"'),
        ({"target": "cuda"}, 'so use target="onnx", runtime="ort-cuda"'),
        ({"only": "attention"}, '`only` needs target="ascend", target="onnx" or target="contrib"'),
        ({"soc_version": "A2"}, 'a SoC version and a CANN version need target="ascend"'),
    ],
)
def test_errors_name_keywords_and_not_options(given: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=re.escape(said)):
        fa_compiler.optimize(attention(), **given)


def test_a_comparison_of_other_inputs_than_arrays() -> None:
    with pytest.raises(TypeError, match="`inputs` is a dictionary of arrays or the path of an .npz file, not int"):
        fa_compiler.verify(plain(), plain(), inputs=5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="`rtol` is a number or None, not 'x'"):
        fa_compiler.verify(plain(), plain(), rtol="x")  # type: ignore[arg-type]
    for rtol in (-1, float("nan")):
        with pytest.raises(InputError, match="rtol is a number from 0 upwards, not"):
            fa_compiler.verify(plain(), plain(), rtol=rtol)


def test_a_target_in_the_place_of_the_output() -> None:
    """`inspect` has its target there."""
    with pytest.raises(InputError, match="is the file to write; the target is given as target='onnx'"):
        fa_compiler.optimize(plain(), "onnx")


def test_what_an_interactive_python_shows(tmp_path: Path) -> None:
    """One line, and not all fields of all blocks."""
    path = saved(attention(batch=2, length=8), tmp_path / "model.onnx")
    result = fa_compiler.optimize(path, tmp_path / "fused.onnx")
    assert repr(result.report) == f"<Report {path}: 1 fused (of 1); print() shows all of it>"
    assert f"1 fused (of 1), wrote {tmp_path / 'fused.onnx'}" in repr(result)
    assert repr(fa_compiler.verify(path, path)).startswith("<Comparison the output agrees (tolerance")
    assert str(result).splitlines()[4] == "How to run it:"
    assert "fuse the original model with target='contrib', runtime='ort-cpu'." in str(result)
