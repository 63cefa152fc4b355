"""The plugin execution provider: sessions of ONNX Runtime that fuse their attention themselves."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

import fa_compiler
from fa_compiler import provider
from fa_compiler.passes import Options
from fa_compiler.provider.__main__ import USAGE, main
from fa_compiler.provider.matching import Replacement, replacement
from tests.built_library import choose_library
from tests.passes import running
from tests.passes.attention_ops import test_dynamic_sparse, test_paged
from tests.systems import FORK, said

from .builders import EXAMPLES, HEADS, SIZE, attention, feeds, in_a_function, plain, saved

RELEASE = tuple(int(part) for part in ort.__version__.split(".")[:2])
pytestmark = pytest.mark.skipif(
    RELEASE < provider.FIRST_RELEASE, reason="ONNX Runtime has no plugin interface that we use"
)
choose_library()
WARNINGS = 2
"""The severity of what sessions log here. Other tests of the process may silence the default."""
TOLERANCE = 1e-5  # float32, relative to the largest value: the order of the additions differs


@pytest.fixture(autouse=True)
def seen() -> Iterator[provider.Overheard]:
    """What the provider does in the test."""
    with provider.overhear() as heard:
        yield heard


def with_provider(**settings: object) -> ort.SessionOptions:
    options = ort.SessionOptions()
    options.log_severity_level = WARNINGS
    options.add_provider_for_devices(fa_compiler.register_provider(), {})
    for name, value in settings.items():
        setattr(options, name, value)
    return options


def logged(capfd: pytest.CaptureFixture[str]) -> str:
    """What ONNX Runtime wrote to standard error. On Windows it writes characters of two bytes."""
    return capfd.readouterr().err.replace("\0", "")


def session_of(model: onnx.ModelProto | Path, **settings: object) -> ort.InferenceSession:
    source = model if isinstance(model, Path) else model.SerializeToString()
    return ort.InferenceSession(source, with_provider(**settings))


def agree(
    session: ort.InferenceSession, model: onnx.ModelProto | Path, inputs: dict[str, np.ndarray] | None = None
) -> None:
    """Both give the same outputs, of the same types and shapes."""
    inputs = feeds() if inputs is None else inputs
    source = model if isinstance(model, Path) else model.SerializeToString()
    expected = ort.InferenceSession(source, providers=["CPUExecutionProvider"]).run(None, inputs)
    for left, right in zip(expected, session.run(None, inputs), strict=True):
        assert (left.dtype, left.shape) == (right.dtype, right.shape)
        assert np.max(np.abs(left - right), initial=0) <= TOLERANCE * np.max(np.abs(left), initial=0)


def fused(heard: provider.Overheard) -> list[int]:
    """The numbers of fused attentions of the graphs that the provider saw."""
    return [report.count("fused") for report in heard.reports]


def added(model: onnx.ModelProto, node: onnx.NodeProto, kind: int, inputs: dict[str, list[str | int]]) -> None:
    """Add a node with inputs of its own, whose outputs are outputs of the model with unknown sizes."""
    model.graph.node.append(node)
    model.graph.input.extend(helper.make_tensor_value_info(name, kind, dims) for name, dims in inputs.items())
    model.graph.output.extend(helper.make_tensor_value_info(name, kind, None) for name in node.output)


@pytest.mark.parametrize("level", ["ORT_DISABLE_ALL", "ORT_ENABLE_ALL"])
def test_a_session_fuses(seen: provider.Overheard, level: str) -> None:
    session = session_of(attention(), graph_optimization_level=getattr(ort.GraphOptimizationLevel, level))
    assert session.get_providers() == [provider.PROVIDER, "CPUExecutionProvider"]
    assert fused(seen) == [1]  # the session inside is not matched again
    for length in (8, 5, 0):
        agree(session, attention(), feeds(length))


@pytest.mark.skipif(RELEASE < (1, 25), reason="this ONNX Runtime does not take plugins in a list of providers")
def test_a_list_of_providers(seen: provider.Overheard) -> None:
    fa_compiler.register_provider()
    session = ort.InferenceSession(
        attention().SerializeToString(), providers=[provider.PROVIDER, "CPUExecutionProvider"]
    )
    assert fused(seen) == [1]
    agree(session, attention())


@pytest.mark.skipif(RELEASE < (1, 25), reason="this ONNX Runtime does not take plugins in a list of providers")
def test_another_provider_comes_first(seen: provider.Overheard, capfd: pytest.CaptureFixture[str]) -> None:
    fa_compiler.register_provider()
    ort.set_default_logger_severity(WARNINGS)
    session = ort.InferenceSession(
        attention().SerializeToString(), providers=["CPUExecutionProvider", provider.PROVIDER]
    )
    assert seen.reports == []
    assert "CPUExecutionProvider comes first" in logged(capfd)
    agree(session, attention())


def test_nothing_to_fuse(seen: provider.Overheard) -> None:
    session = session_of(plain())
    assert fused(seen) == [0]
    agree(session, plain(), {"x": np.ones((3, 4), np.float32)})


@pytest.mark.parametrize("external", [False, True])
def test_weights(seen: provider.Overheard, external: bool, tmp_path: Path) -> None:
    """A large weight is not copied into the model that the matcher sees; two nodes share it."""
    model = attention()
    weight = np.random.default_rng(0).standard_normal((32 * SIZE, SIZE)).astype(np.float32)[:SIZE]
    wide = numpy_helper.from_array(np.tile(weight, (HEADS, 1, 1)), "w")
    model.graph.initializer.append(wide)
    for name in ("query", "key"):
        model.graph.node.insert(0, helper.make_node("MatMul", [name, "w"], [f"{name}_projected"], f"{name}_w"))
    model.graph.node[2].input[0] = "key_projected"
    model.graph.node[3].input[0] = "query_projected"
    path = tmp_path / "model.onnx"
    onnx.save(model, path, save_as_external_data=external, size_threshold=64)
    session = session_of(path)
    assert fused(seen) == [1]
    agree(session, path)


def test_outputs_whose_sizes_are_not_known(seen: provider.Overheard) -> None:
    model = attention()
    added(model, helper.make_node("NonZero", ["flags"], ["places"]), TensorProto.INT64, {"flags": ["n"]})
    session = session_of(model)
    assert fused(seen) == [1]
    for flags in ([1, 0, 1], [0, 0], [1] * 9):
        agree(session, model, {**feeds(), "flags": np.array(flags)})


def test_one_name_for_two_sizes(seen: provider.Overheard) -> None:
    """ONNX Runtime does not mind; the sizes of the outputs then cannot be told by the names."""
    model = attention()
    for name in ("left", "right"):
        added(model, helper.make_node("Neg", [name], [f"{name}_out"]), TensorProto.FLOAT, {name: ["n"]})
    session = session_of(model)
    assert fused(seen) == [1]
    ones = {"left": np.ones(2, np.float32), "right": np.ones(3, np.float32)}
    agree(session, model, {**feeds(), **ones})
    agree(session, model, {**feeds(), **ones, "left": np.ones(3, np.float32)})


def test_an_unused_input_and_one_that_can_be_left_out(seen: provider.Overheard) -> None:
    model = attention()
    added(model, helper.make_node("Neg", ["factor"], ["negative"]), TensorProto.FLOAT, {"factor": [2]})
    model.graph.initializer.append(numpy_helper.from_array(np.array([1, 2], np.float32), "factor"))
    model.graph.input.append(helper.make_tensor_value_info("unused", TensorProto.FLOAT, ["n"]))
    session = session_of(model)
    assert fused(seen) == [1]
    inputs = {**feeds(), "unused": np.ones(1, np.float32)}
    agree(session, model, inputs)
    agree(session, model, {**inputs, "factor": np.array([5, 6], np.float32)})


@pytest.mark.parametrize("read_here", [False, True])
def test_branches(seen: provider.Overheard, read_here: bool) -> None:
    """Branches read an input of the graph. Older releases forget it if no node of the main graph reads it, too."""
    model = attention()
    value = helper.make_tensor_value_info("chosen", TensorProto.FLOAT, ["n"])
    branches = {
        f"{name}_branch": helper.make_graph([helper.make_node(op, ["extra"], ["chosen"])], name, [], [value])
        for name, op in (("then", "Neg"), ("else", "Exp"))
    }
    model.graph.input.append(helper.make_tensor_value_info("flag", TensorProto.BOOL, []))
    added(model, helper.make_node("If", ["flag"], ["result"], **branches), TensorProto.FLOAT, {"extra": ["n"]})
    if read_here:
        added(model, helper.make_node("Abs", ["extra"], ["absolute"]), TensorProto.FLOAT, {})
    session = session_of(model)
    if read_here or RELEASE >= provider.FIRST_WITH_CAPTURES:
        assert fused(seen) == [1]
    else:
        assert seen.failures == ["only a subgraph reads the input 'extra', which needs a newer ONNX Runtime"]
    for flag in (True, False):
        agree(session, model, {**feeds(), "flag": np.array(flag), "extra": np.ones(3, np.float32)})


@pytest.mark.skipif(RELEASE < provider.FIRST_WITH_CAPTURES, reason="only the branches read the inputs")
def test_attention_in_a_branch(seen: provider.Overheard) -> None:
    inner, other = attention().graph, helper.make_node("Identity", ["value"], ["out"])
    outputs = list(inner.output)
    then = helper.make_graph(list(inner.node), "then", [], outputs, list(inner.initializer))
    branches = {"then_branch": then, "else_branch": helper.make_graph([other], "else", [], outputs)}
    flag = helper.make_tensor_value_info("flag", TensorProto.BOOL, [])
    chosen = helper.make_node("If", ["flag"], ["chosen"], "if", **branches)
    result = helper.make_tensor_value_info("chosen", TensorProto.FLOAT, None)
    graph = helper.make_graph([chosen], "branches", [flag, *inner.input], [result])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    session = session_of(model)
    assert fused(seen) == [1]
    for flag_value in (True, False):
        agree(session, model, {**feeds(), "flag": np.array(flag_value)})


def test_functions_of_the_model(seen: provider.Overheard) -> None:
    """ONNX Runtime writes them out, and asks again."""
    model = in_a_function()
    session = session_of(model)
    assert fused(seen)[-1:] == [1]
    agree(session, model)


def test_a_fused_file(seen: provider.Overheard) -> None:
    model = fa_compiler.optimize(attention(), bodies=False).model
    if RELEASE < (1, 24):
        with pytest.raises(Exception, match="FlashAttention.* is not a registered function/op"):
            session_of(model)
        return
    session = session_of(model)
    assert fused(seen) == [0]
    expected = ort.InferenceSession(attention().SerializeToString()).run(None, feeds())[0]
    assert np.max(np.abs(session.run(None, feeds())[0] - expected)) <= TOLERANCE * np.max(np.abs(expected))


@pytest.mark.parametrize("order", [(0, 1), (1, 0), (0, 1, 1)])
def test_the_device_and_the_operators(order: tuple[int, ...]) -> None:
    """Options may have both: the operators come once."""
    options = ort.SessionOptions()
    options.log_severity_level = WARNINGS
    steps: list[Callable[[], None]] = [
        lambda: options.add_provider_for_devices(fa_compiler.register_provider(), {}),
        lambda: options.register_custom_ops_library(fa_compiler.custom_ops_library()),
    ]
    if RELEASE < (1, 24) and order.count(1) > 1:
        pytest.skip("the device brings no operators")
    for step in order:
        steps[step]()
    model = fa_compiler.optimize(attention(), bodies=False).model
    assert isinstance(model, onnx.ModelProto)
    agree(ort.InferenceSession(model.SerializeToString(), options), attention())


def with_output(node: onnx.NodeProto, output: onnx.ValueInfoProto) -> onnx.ModelProto:
    """The attention, and a node with an output of any type."""
    model = attention()
    model.graph.node.append(node)
    model.graph.output.append(output)
    return model


def the_same(left: object, right: object) -> bool:
    """Whether outputs of any type agree."""
    if isinstance(left, list) or isinstance(right, list):
        assert isinstance(left, list) and isinstance(right, list)
        return len(left) == len(right) and all(map(the_same, left, right))
    if left is None or right is None:
        return left is right
    assert isinstance(left, np.ndarray) and isinstance(right, np.ndarray)
    if left.dtype.kind in "OU":
        return left.tolist() == right.tolist()
    return left.shape == right.shape and np.allclose(left, right, atol=TOLERANCE)


def strings() -> onnx.ModelProto:
    model = attention()
    added(model, helper.make_node("Identity", ["words"], ["same"]), TensorProto.STRING, {"words": ["n"]})
    return model


def sequence_state() -> onnx.ModelProto:
    """The state of a Loop is a sequence, of which a tensor is made at the end."""
    sequence = helper.make_tensor_sequence_value_info
    flag = [helper.make_tensor_value_info(name, TensorProto.BOOL, []) for name in ("on", "still_on")]
    body = helper.make_graph(
        [
            helper.make_node("SequenceInsert", ["state", "x"], ["grown"]),
            helper.make_node("Identity", ["on"], ["still_on"]),
        ],
        "body",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            flag[0],
            sequence("state", TensorProto.FLOAT, None),
        ],
        [flag[1], sequence("grown", TensorProto.FLOAT, None)],
    )
    joined = helper.make_tensor_value_info("joined", TensorProto.FLOAT, ["m"])
    model = with_output(helper.make_node("SequenceEmpty", [], ["none"], dtype=TensorProto.FLOAT), joined)
    model.graph.node.append(helper.make_node("Loop", ["trip", "", "none"], ["all"], "loop", body=body))
    model.graph.node.append(helper.make_node("ConcatFromSequence", ["all"], ["joined"], axis=0))
    model.graph.initializer.append(numpy_helper.from_array(np.array(3, np.int64), "trip"))
    # A node of the main graph reads the input, too: older releases forget it otherwise.
    added(model, helper.make_node("Neg", ["x"], ["negative"]), TensorProto.FLOAT, {"x": ["n"]})
    return model


def sequence_input() -> onnx.ModelProto:
    joined = helper.make_tensor_value_info("joined", TensorProto.FLOAT, ["n"])
    model = with_output(helper.make_node("ConcatFromSequence", ["list"], ["joined"], axis=0), joined)
    model.graph.input.append(helper.make_tensor_sequence_value_info("list", TensorProto.FLOAT, None))
    return model


def sequence_output() -> onnx.ModelProto:
    list_of = helper.make_tensor_sequence_value_info("list", TensorProto.FLOAT, None)
    return with_output(helper.make_node("SequenceConstruct", ["out"], ["list"]), list_of)


def sequence_passed_on() -> onnx.ModelProto:
    """An output that is a sequence, and one that is made of it."""
    model = sequence_output()
    model.graph.node.append(helper.make_node("SequenceLength", ["list"], ["length"]))
    model.graph.output.append(helper.make_tensor_value_info("length", TensorProto.INT64, []))
    return model


def optional_output() -> onnx.ModelProto:
    tensor = helper.make_tensor_type_proto(TensorProto.FLOAT, None)
    output = helper.make_value_info("maybe", helper.make_optional_type_proto(tensor))
    return with_output(helper.make_node("Optional", ["out"], ["maybe"]), output)


def optional_input() -> onnx.ModelProto:
    """An input that may be given without content, which only nodes of the runtime can be given."""
    model = with_output(
        helper.make_node("OptionalHasElement", ["given"], ["is_there"]),
        helper.make_tensor_value_info("is_there", TensorProto.BOOL, []),
    )
    tensor = helper.make_tensor_type_proto(TensorProto.FLOAT, None)
    model.graph.input.append(helper.make_value_info("given", helper.make_optional_type_proto(tensor)))
    model.opset_import[0].version = 18
    return model


def read_in_a_branch() -> onnx.ModelProto:
    """The node that makes a list reads the attention in a graph of its own."""
    list_of = helper.make_tensor_sequence_value_info("list", TensorProto.FLOAT, None)
    branches = {
        f"{name}_branch": helper.make_graph(
            [helper.make_node("SequenceConstruct", ["out"] * count, [f"list_{name}"])],
            name,
            [],
            [helper.make_tensor_sequence_value_info(f"list_{name}", TensorProto.FLOAT, None)],
        )
        for name, count in (("then", 1), ("else", 2))
    }
    model = with_output(helper.make_node("If", ["flag"], ["list"], **branches), list_of)
    model.graph.input.append(helper.make_tensor_value_info("flag", TensorProto.BOOL, []))
    return model


@pytest.mark.parametrize(
    ("make", "more"),
    [
        (strings, {"words": np.array(["a", "b"])}),
        (sequence_state, {"x": np.ones(2, np.float32)}),
        (sequence_input, {"list": [np.ones(3, np.float32), np.zeros(2, np.float32)]}),
        (sequence_output, {}),
        (sequence_passed_on, {}),
        (optional_output, {}),
        (optional_input, {"given": None}),
        (optional_input, {"given": np.ones(2, np.float32)}),
        (read_in_a_branch, {"flag": np.array(False)}),
    ],
)
def test_values_that_are_not_tensors_of_numbers(
    seen: provider.Overheard, make: Callable[[], onnx.ModelProto], more: dict[str, Any]
) -> None:
    """A claimed node cannot give them, so what makes them, and what reads of it, is left to the runtime."""
    model = make()
    session = session_of(model)
    assert fused(seen) == [1]
    inputs = {**feeds(), **more}
    expected = ort.InferenceSession(model.SerializeToString()).run(None, inputs)
    assert all(map(the_same, expected, session.run(None, inputs)))


def test_an_attribute_that_is_a_type(seen: provider.Overheard) -> None:
    """A provider cannot read it."""
    model = optional_output()
    model.graph.node[-1].ClearField("input")
    model.graph.node[-1].attribute.append(
        helper.make_attribute("type", helper.make_tensor_type_proto(TensorProto.FLOAT, None))
    )
    model.graph.node.append(helper.make_node("OptionalHasElement", ["maybe"], ["is_there"]))
    model.graph.output[-1].CopyFrom(helper.make_tensor_value_info("is_there", TensorProto.BOOL, []))
    session = session_of(model)
    assert seen.failures == ["an attribute of a node Optional is of a type that a provider cannot read"]
    assert not session.run(["is_there"], feeds())[0]


def test_attention_behind_a_list(seen: provider.Overheard) -> None:
    """The graph is taken up to the nodes that make a list. An attention behind them is the runtime's."""
    model = sequence_output()
    model.graph.node[-1].input[0] = "value"
    model.graph.node.append(helper.make_node("ConcatFromSequence", ["list"], ["again"], axis=0))
    model.graph.node.append(model.graph.node.pop(4))
    model.graph.node[-1].input[1] = "again"
    session = session_of(model)
    assert fused(seen) == [0]
    expected = ort.InferenceSession(model.SerializeToString()).run(None, feeds())
    assert all(map(the_same, expected, session.run(None, feeds())))


def loop(in_a_branch: bool, trips: int = 5) -> onnx.ModelProto:
    """Beside the attention, a Loop adds the rows of a table to its state. The iteration number is a scalar."""
    scalar = helper.make_tensor_value_info
    body = helper.make_graph(
        [
            helper.make_node("Gather", ["table", "i"], ["row"]),
            helper.make_node("Add", ["state", "row"], ["sum"]),
            helper.make_node("Identity", ["on"], ["still_on"]),
        ],
        "body",
        [
            scalar("i", TensorProto.INT64, []),
            scalar("on", TensorProto.BOOL, []),
            scalar("state", TensorProto.FLOAT, [4]),
        ],
        [scalar("still_on", TensorProto.BOOL, []), scalar("sum", TensorProto.FLOAT, [4])],
    )
    model = attention()
    table = np.arange(4 * trips, dtype=np.float32).reshape(trips, 4)
    for name, array in (("table", table), ("trip", np.array(trips, np.int64))):
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    node = helper.make_node("Loop", ["trip", "", "start"], ["end"], "loop", body=body)
    if in_a_branch:
        node.output[0] = "end_then"
        ends = [scalar(name, TensorProto.FLOAT, [4]) for name in ("end_then", "end_else")]
        other = helper.make_graph([helper.make_node("Neg", ["start"], ["end_else"])], "else", [], ends[1:])
        then = helper.make_graph([node], "then", [], ends[:1])
        node = helper.make_node("If", ["flag"], ["end"], "if", then_branch=then, else_branch=other)
        model.graph.input.append(scalar("flag", TensorProto.BOOL, []))
    # A node of the main graph reads the input, too: older releases forget it otherwise.
    model.graph.node.append(helper.make_node("Neg", ["start"], ["negative"]))
    added(model, node, TensorProto.FLOAT, {"start": [4]})
    return model


LOOP_FEEDS = {**feeds(), "start": np.ones(4, np.float32)}
LEVELS = [ort.GraphOptimizationLevel.ORT_DISABLE_ALL, ort.GraphOptimizationLevel.ORT_ENABLE_BASIC]


@pytest.mark.parametrize("in_a_branch", [False, True])
@pytest.mark.parametrize("level", [*LEVELS, ort.GraphOptimizationLevel.ORT_ENABLE_ALL])
def test_a_scalar_in_a_loop(seen: provider.Overheard, in_a_branch: bool, level: ort.GraphOptimizationLevel) -> None:
    model = loop(in_a_branch)
    session = session_of(model, graph_optimization_level=level)
    assert fused(seen) == [1]
    agree(session, model, {**LOOP_FEEDS, **({"flag": np.array(True)} if in_a_branch else {})})


@pytest.mark.parametrize("lost", ["shape", "type"])
def test_a_body_that_lost_something(seen: provider.Overheard, monkeypatch: pytest.MonkeyPatch, lost: str) -> None:
    """ONNX Runtime would make the session, and every run of it would fail: it is compared with the graph before the
    claim."""
    if lost == "shape" and RELEASE < (1, 24):
        pytest.skip("the runtime does not tell a scalar from a tensor of unknown rank")

    def losing(content: bytes, addresses: Sequence[int], captures: bool, options: Options) -> Replacement:
        found = replacement(content, addresses, captures, options)
        assert found.model is not None
        model = onnx.ModelProto.FromString(found.model)
        (node,) = (each for each in model.graph.node if each.op_type == "Loop")
        state = node.attribute[0].g.input[2 if lost == "type" else 0].type.tensor_type
        if lost == "shape":
            state.ClearField("shape")
        else:
            node.attribute[0].g.node[1].op_type = "Max"
            for value in (*node.attribute[0].g.input[2:], node.attribute[0].g.output[1]):
                value.type.tensor_type.shape.dim.add().dim_value = 1
        return Replacement(found.report, model.SerializeToString(), found.sizes)

    monkeypatch.setattr(provider, "replacement", losing)
    session = session_of(loop(in_a_branch=False))
    assert fused(seen) == []
    assert len(seen.failures) == 1
    agree(session, loop(in_a_branch=False), LOOP_FEEDS)


# -- options of sessions and runs -----------------------------------------------------------------


def projected_by(weight: np.ndarray) -> onnx.ModelProto:
    """The query goes through a matrix, so the model has a large constant beside the scale."""
    model = attention()
    model.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    model.graph.node.insert(0, helper.make_node("MatMul", ["query", "w"], ["projected"], "project"))
    model.graph.node[2].input[0] = "projected"
    return model


def matrix() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((HEADS, SIZE, SIZE)).astype(np.float32)


def test_external_initializers(seen: provider.Overheard, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The program gives the values of constants that are in no file, also of one that the fusion takes away."""
    path = tmp_path / "model.onnx"
    onnx.save(projected_by(matrix()), path, save_as_external_data=True, size_threshold=0, location="weights.bin")
    (tmp_path / "weights.bin").unlink()
    results = []
    for options in (ort.SessionOptions(), with_provider()):
        values = [ort.OrtValue.ortvalue_from_numpy(each) for each in (matrix(), np.array(0.25, np.float32))]
        options.add_external_initializers(["w", "scale"], values)
        results.append(ort.InferenceSession(path, options).run(None, feeds())[0])
    assert fused(seen) == [1]
    assert the_same(*results)
    assert "Error" not in logged(capfd)


def test_external_weights_beside_small_constants(seen: provider.Overheard, tmp_path: Path) -> None:
    """ONNX Runtime refuses external axes of an Unsqueeze. Only large constants are outside if that suffices."""
    model = onnx.load(EXAMPLES / "bert.onnx")
    arrays = {each.name: numpy_helper.to_array(each) for each in model.graph.initializer}
    large = {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in arrays.items() if array.nbytes > 1024}
    assert "Unsqueeze" in {node.op_type for node in model.graph.node} and len(large) < len(arrays)
    path = tmp_path / "model.onnx"
    onnx.save(model, path, save_as_external_data=True, size_threshold=1024, location="weights.bin")
    ids = np.arange(64, dtype=np.int64).reshape(2, 32)
    results = []
    for options in (ort.SessionOptions(), with_provider()):
        options.add_external_initializers(list(large), list(large.values()))
        session = ort.InferenceSession(path, options)
        results.append(session.run(None, {"input_ids": ids, "attention_mask": (ids < 60).astype(np.int64)}))
    assert fused(seen) == [2]
    assert not seen.failures
    assert the_same(*results)


def test_an_external_initializer_that_is_gone(
    seen: provider.Overheard, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """ONNX Runtime has computed another constant of it before it shows the graph: one line, and its own kernels."""
    model = projected_by(matrix())
    model.graph.node.insert(0, helper.make_node("Neg", ["w"], ["negative"]))
    model.graph.node[1].input[1] = "negative"
    path = tmp_path / "model.onnx"
    onnx.save(model, path, save_as_external_data=True, size_threshold=0, location="weights.bin")
    options, value = with_provider(), matrix()
    options.add_external_initializers(["w"], [ort.OrtValue.ortvalue_from_numpy(value)])
    session = ort.InferenceSession(path, options)
    assert fused(seen) == []
    assert len(seen.failures) == 1
    assert logged(capfd).count("[W:") == 1
    agree(session, path)


@pytest.mark.parametrize("name", ["w", "scale"])
@pytest.mark.parametrize("level", LEVELS)
def test_shared_initializers(seen: provider.Overheard, name: str, level: ort.GraphOptimizationLevel) -> None:
    """The program gives another value than the file. Of what the matcher has read, the session is left alone."""
    value = ort.OrtValue.ortvalue_from_numpy(2 * matrix() if name == "w" else np.array(0.5, np.float32))
    results = []
    for options in (ort.SessionOptions(), with_provider()):
        options.graph_optimization_level = level
        options.add_initializer(name, value)
        results.append(ort.InferenceSession(projected_by(matrix()).SerializeToString(), options).run(None, feeds())[0])
    assert the_same(*results)
    assert fused(seen) == ([1] if name == "w" else [])


def layer_of_fixed_sizes() -> onnx.ModelProto:
    """A layer of a BERT: products with biases in front of attention, and norms behind the residual sums."""
    sides = " ".join(
        f"{name}0 = MatMul(h, w_{name}) {name}1 = Add({name}0, b_{name}) {name}2 = Reshape({name}1, split) "
        f"{name} = Transpose<perm=[{order}]>({name}2)"
        for name, order in (("q", "0,2,1,3"), ("k", "0,2,3,1"), ("v", "0,2,1,3"))
    )
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> g (float[2,8,16] x) => (float[2,8,16] y) '
        "<int64[4] split = {2,8,4,4}, int64[3] join = {2,8,16}, float scale = {0.5}> { "
        "a0 = MatMul(x, w_up) a1 = Add(a0, b_up) a2 = Relu(a1) a3 = MatMul(a2, w_down) a4 = Add(a3, b_down) "
        f"h = LayerNormalization(a4, b_up, b_down) {sides} s = MatMul(q, k) c = Mul(s, scale) p = Softmax(c) "
        "o = MatMul(p, v) t = Transpose<perm=[0,2,1,3]>(o) u = Reshape(t, join) z = MatMul(u, w_out) "
        "linear = Add(z, b_out) sum = Add(h, linear) y = LayerNormalization(sum, b_up, b_down) }"
    )
    draw = np.random.default_rng(0)
    for name in ("up", "down", "q", "k", "v", "out"):
        weights = {f"w_{name}": 0.25 * draw.standard_normal((16, 16)), f"b_{name}": draw.standard_normal(16)}
        for key, array in weights.items():
            model.graph.initializer.append(numpy_helper.from_array(array.astype(np.float32), key))
    return model


@pytest.mark.parametrize("level", [*LEVELS, ort.GraphOptimizationLevel.ORT_ENABLE_ALL])
def test_names_that_onnx_runtime_makes_twice(seen: provider.Overheard, level: ort.GraphOptimizationLevel) -> None:
    """It makes Gemm of products with biases, and leaves those of an attention that it knows. In the session inside the
    attention is gone, and the rest become Gemm, too."""
    model = layer_of_fixed_sizes()
    session = session_of(model, graph_optimization_level=level)
    assert fused(seen) == [1] and seen.failures == []
    agree(session, model, {"x": np.random.default_rng(1).standard_normal((2, 8, 16)).astype(np.float32)})


def test_a_failure_of_the_library_is_one_line(seen: provider.Overheard) -> None:
    provider._library_failed(b"Exception during initialization: graph.cc:4164\n Attempt to replace the tensor\n")
    assert seen.failures == ["Exception during initialization: graph.cc:4164 Attempt to replace the tensor"]


@pytest.mark.parametrize("form", ["onnx", "ort"])
@pytest.mark.parametrize("named", ["by the device", "in a list"])
def test_a_session_that_writes_its_model(seen: provider.Overheard, tmp_path: Path, form: str, named: str) -> None:
    """ONNX Runtime writes no claimed graphs, so the session is left alone."""
    fa_compiler.register_provider()
    if named == "in a list" and RELEASE < (1, 25):
        pytest.skip("this ONNX Runtime does not take plugins in a list of providers")
    options = with_provider() if named == "by the device" else ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(tmp_path / f"written.{form}")
    names = [provider.PROVIDER, "CPUExecutionProvider"] if named == "in a list" else None
    session = ort.InferenceSession(attention().SerializeToString(), options, providers=names)
    assert fused(seen) == []
    assert "contains compiled nodes" in seen.failures[0]
    agree(session, attention())
    agree(ort.InferenceSession(options.optimized_model_filepath), attention())


@pytest.mark.parametrize(
    ("key", "value", "fuses"),
    [
        ("ep.context_enable", "0", True),
        ("ep.context_enable", "1", False),
        ("session.use_env_allocators", "1", True),
        ("session.use_ort_model_bytes_for_initializers", "1", True),
        ("session.disable_prepacking", "1", True),
        ("session.disable_cpu_ep_fallback", "1", True),
        ("optimization.disable_specified_optimizers", "ConstantFolding", True),
    ],
)
def test_entries_of_the_options(seen: provider.Overheard, tmp_path: Path, key: str, value: str, fuses: bool) -> None:
    options = with_provider()
    options.add_session_config_entry(key, value)
    session = ort.InferenceSession(saved(attention(), tmp_path / "model.onnx"), options)
    assert fused(seen) == ([1] if fuses else [])
    agree(session, attention())


@pytest.mark.parametrize("mode", [ort.ExecutionMode.ORT_SEQUENTIAL, ort.ExecutionMode.ORT_PARALLEL])
def test_a_run_that_is_terminated(seen: provider.Overheard, mode: ort.ExecutionMode) -> None:
    """The session inside ends, too. The whole run would take seconds, and end without an error."""
    session = session_of(loop(in_a_branch=False, trips=300_000), execution_mode=mode)
    assert fused(seen) == [1]
    options = ort.RunOptions()
    timer = threading.Timer(0.05, lambda: setattr(options, "terminate", True))
    timer.start()
    with pytest.raises(Exception, match="terminate flag"):
        session.run(None, LOOP_FEEDS, options)
    timer.join()


@FORK
def test_a_child_of_a_process_that_makes_a_session(tmp_path: Path) -> None:
    """Another thread holds the matcher at that time."""
    path = saved(attention(), tmp_path / "model.onnx")
    program = f"""
import os, threading, time, onnxruntime as ort, fa_compiler
from fa_compiler import provider
from tests.built_library import choose_library
choose_library()
def make():
    options = ort.SessionOptions()
    options.add_provider_for_devices(fa_compiler.register_provider(), {{}})
    ort.InferenceSession({str(path)!r}, options)
make()
inside, own = threading.Event(), provider.replacement
def slow(*arguments, **captures):
    inside.set()
    time.sleep(1)
    return own(*arguments, **captures)
provider.replacement = slow
thread = threading.Thread(target=make)
thread.start()
inside.wait()
child = os.fork()
if child == 0:
    provider.replacement = own
    make()
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
thread.join()
"""
    command = [sys.executable, "-W", "ignore", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (0, "7\n"), done.stderr


def test_an_option_that_the_provider_does_not_have(seen: provider.Overheard, capfd: pytest.CaptureFixture[str]) -> None:
    """A misspelt option would be heeded by nobody. The log says so, and the session runs."""
    model = attention()
    for given in ({"pln": "model.plan"}, {"plan": ""}, {}):
        options = ort.SessionOptions()
        options.log_severity_level = WARNINGS
        options.add_provider_for_devices(fa_compiler.register_provider(), given)
        session = ort.InferenceSession(model.SerializeToString(), options)
        assert ("the provider has no option 'pln'; its option is 'plan'" in logged(capfd)) == ("pln" in given)
        agree(session, model)


@pytest.mark.parametrize("kind", ["raises", "gives another model", "gives too few sizes"])
def test_a_failure_leaves_the_session_as_it_is(
    kind: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def failing(content: bytes, addresses: Sequence[int], captures: bool, options: Options) -> Replacement:
        if kind == "raises":
            raise ValueError("no\nidea")
        found = replacement(content, addresses, captures, options)
        assert found.model is not None
        if kind == "gives another model":
            return Replacement(found.report, b"no model", found.sizes)
        return Replacement(found.report, found.model, found.sizes[:-1])

    monkeypatch.setattr(provider, "replacement", failing)
    session = session_of(attention())
    told = logged(capfd)
    assert "without fused attention" in told
    assert {"raises": "ValueError: no idea", "gives another model": "protobuf parsing"}.get(
        kind, "end too early"
    ) in told
    agree(session, attention())


def test_an_error_of_a_run_leaves_the_session_usable() -> None:
    session = session_of(attention())
    with pytest.raises(Exception, match=r"input value has shape \[2,4,8,16\]"):
        session.run(None, {**feeds(), "key": feeds(5)["key"]})
    agree(session, attention())


def test_sessions_in_threads(seen: provider.Overheard, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several sessions are made while each of them waits in the matcher, and another one runs."""

    def slow(content: bytes, addresses: Sequence[int], captures: bool, options: Options) -> Replacement:
        time.sleep(0.1)
        return replacement(content, addresses, captures, options)

    running = session_of(attention())
    monkeypatch.setattr(provider, "replacement", slow)
    made: list[ort.InferenceSession] = []

    def make() -> None:
        with provider.overhear() as heard:
            made.append(session_of(attention()))
        assert fused(heard) == [1]
        told.append(threading.get_ident())

    told: list[int] = []
    threads = [threading.Thread(target=make) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        running.run(None, feeds())
    assert (fused(seen), len({*told})) == ([1], 4)
    for session in made:
        agree(session, attention())


def test_the_end_of_the_process(tmp_path: Path) -> None:
    """Sessions outlive the registration, and the interpreter ends while a session and its options are alive."""
    path = saved(attention(), tmp_path / "model.onnx")
    program = f"""
import onnxruntime as ort, numpy as np, fa_compiler
from fa_compiler import provider
from tests.built_library import choose_library
choose_library()
x = np.ones((1, {HEADS}, 3, {SIZE}), np.float32)
for _ in range(2):
    options = ort.SessionOptions()
    options.add_provider_for_devices(fa_compiler.register_provider(), {{}})
    first, second = (ort.InferenceSession({str(path)!r}, options) for _ in range(2))
    ort.unregister_execution_provider_library(provider.PROVIDER)
    first.run(None, dict(query=x, key=x, value=x))
    del first
    print(second.run(None, dict(query=x, key=x, value=x))[0].sum())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"{float(HEADS * 3 * SIZE)}\n" * 2), done.stderr


@pytest.mark.parametrize("kind", ["script", "module"])
def test_a_script_with_the_provider(kind: str, tmp_path: Path) -> None:
    """The script knows nothing of us. A provider that this build of ONNX Runtime does not have does not count."""
    saved(attention(), tmp_path / "attention.onnx")
    saved(plain(), tmp_path / "plain.onnx")
    (tmp_path / "serve.py").write_text("""
import sys
import onnxruntime
from onnxruntime import InferenceSession
import helper
options = onnxruntime.SessionOptions()
for _ in range(2):
    session = InferenceSession("attention.onnx", options, providers=onnxruntime.get_available_providers())
writing = onnxruntime.SessionOptions()
writing.optimized_model_filepath = "written.onnx"
InferenceSession("attention.onnx", writing)
InferenceSession("attention.onnx", disabled_optimizers={"ConstantFolding"})
InferenceSession("plain.onnx", providers=[("CPUExecutionProvider", {"arena_extend_strategy": "kSameAsRequested"})])
InferenceSession("plain.onnx", providers=["DmlExecutionProvider"])
print(*sys.argv[1:], helper.NAME, __name__)
sys.exit(3)
""")
    (tmp_path / "helper.py").write_text("NAME = 'helper'")
    words = ["serve.py"] if kind == "script" else ["-m", "serve"]
    command = [sys.executable, "-m", "fa_compiler.provider", *words, "one", "-m"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (3, "one -m helper __main__\n"), done.stderr
    line = (
        "fa_compiler: 4 sessions, 2 of 2 attentions fused; without the provider: it disables optimizers, "
        "it writes its optimised model"
    )
    assert (tmp_path / "written.onnx").exists()
    assert done.stderr.splitlines()[-1] == line


def test_a_session_that_names_another_provider(tmp_path: Path) -> None:
    """One that this build has; the names here are those of a build for CUDA."""
    path = saved(attention(), tmp_path / "attention.onnx")
    program = f"""
import onnxruntime as ort
ort.get_available_providers = lambda: ["CUDAExecutionProvider", "CPUExecutionProvider"]
from fa_compiler.provider.sessions import watch_all
sessions = watch_all()
session = ort.InferenceSession({str(path)!r}, providers=["CUDAExecutionProvider", "CPUExecutionProvider"])
print(sessions.with_provider, *(made.without for made in sessions.made))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "0 it names CUDAExecutionProvider\n"


def test_a_fused_file_in_a_script(tmp_path: Path) -> None:
    """The device brings the operators or, in ONNX Runtime 1.23, the program registers them."""
    fa_compiler.optimize(attention(), tmp_path / "fused.onnx", bodies=False)
    (tmp_path / "serve.py").write_text("from onnxruntime import InferenceSession\nInferenceSession('fused.onnx')")
    command = [sys.executable, "-m", "fa_compiler.provider", "serve.py"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1].startswith("fa_compiler: 1 session, ")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["none.py"], "error: none.py: no such file\n"),
        (["."], "error: .: this folder has no __main__.py to run\n"),
        (["bert.onnx"], "error: bert.onnx is a model; give the script or module that runs it\n"),
        (["-m"], USAGE),
        (["--hlp"], "error: unknown option '--hlp'; options of the script stand behind its name (--help tells more)\n"),
        (["-m", "nix"], "error: nix: no such module\n"),
        (["-m", "nix.nax"], "error: nix.nax: no such module\n"),
        (["-m", "json.nix"], "error: json.nix: no such module\n"),
        (["-m", "json.decoder.nix"], "error: json.decoder.nix: no such module\n"),
        (["-m", "json"], "error: json: this package has no __main__ to run\n"),
        (["-m", ".json"], "error: '.json' is no name of a module\n"),
        (["-m", ""], "error: '' is no name of a module\n"),
    ],
)
def test_no_script(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert capsys.readouterr().err == told


def test_a_folder_as_a_script(tmp_path: Path) -> None:
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "__main__.py").write_text("import helper, sys; print(helper.NAME, *sys.argv)")
    (tmp_path / "app" / "helper.py").write_text("NAME = 'helper'")
    command = [sys.executable, "-m", "fa_compiler.provider", "app", "one"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert (done.stdout, said(done.stderr)) == (
        "helper app one\n",
        "fa_compiler: no session of ONNX Runtime was made\n",
    )


def test_an_older_runtime_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told = "needs ONNX Runtime 1.23 or newer; this is 1.22.1"
    monkeypatch.setattr(ort, "__version__", "1.22.1")
    with pytest.raises(fa_compiler.InputError, match=told):
        fa_compiler.register_provider()
    texts: list[bytes] = []
    create_status = ctypes.CFUNCTYPE(ctypes.c_size_t, ctypes.c_int, ctypes.c_char_p)(
        lambda code, text: texts.append(text) or 7
    )
    table = (ctypes.c_void_p * 1)(ctypes.cast(create_status, ctypes.c_void_p))
    get_api = ctypes.CFUNCTYPE(ctypes.c_size_t, ctypes.c_uint32)(lambda version: ctypes.addressof(table))
    get_version = ctypes.CFUNCTYPE(ctypes.c_size_t)(lambda: ctypes.addressof(version))
    version = ctypes.create_string_buffer(b"1.22.1")
    base = (ctypes.c_void_p * 2)(*(ctypes.cast(each, ctypes.c_void_p) for each in (get_api, get_version)))
    library = ctypes.CDLL(fa_compiler.custom_ops_library())
    assert library.CreateEpFactories(None, base, None, None, 0, None) == 7
    assert told.encode() in texts[0]


def test_the_report_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "fa_compiler")
    session_of(attention())
    assert "attention: 1 of 1 attentions fused in" in caplog.text  # the words of every other way


@pytest.mark.skipif(RELEASE < (1, 32), reason="this ONNX Runtime does not have all of the operators")
@pytest.mark.parametrize("name", ["PagedAttention", "SparsePagedAttention", "DynamicSparseAttention"])
def test_attention_without_a_cpu_kernel(seen: provider.Overheard, name: str) -> None:
    """ONNX Runtime alone does not load the model."""
    case: test_paged.Case | test_dynamic_sparse.Case = test_paged.Case(selected=6 * (name == "SparsePagedAttention"))
    if name == "DynamicSparseAttention":
        case = test_dynamic_sparse.Case()
    given = case.feeds()
    model = case.model(given)
    with pytest.raises(Exception, match="NOT_IMPLEMENTED"):
        ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    got = session_of(model).run(None, given)
    assert fused(seen) == [1]
    wanted = running.run(running.fused(model)[0], given)
    for left, right in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(left, right)


@pytest.mark.skipif(RELEASE < (1, 32), reason="this ONNX Runtime does not have the operator")
def test_a_gate_without_a_cpu_kernel(seen: provider.Overheard) -> None:
    """A model without attention is claimed, too, where it would not load."""
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 4]) for name in ("gate", "up", "y")]
    node = helper.make_node("SwiGLU", ["gate", "up"], ["y"], domain="com.microsoft")
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(helper.make_graph([node], "gate", values[:2], values[2:]), opset_imports=opsets)
    model.ir_version = 10
    inputs = {name: np.linspace(-9, 9, 12, dtype=np.float32).reshape(3, 4) for name in ("gate", "up")}
    gate = inputs["gate"].astype(np.float64)
    np.testing.assert_allclose(session_of(model).run(None, inputs)[0], gate**2 / (1 + np.exp(-gate)), rtol=1e-6)
    assert [bool(report.written_out) for report in seen.reports] == [True]
