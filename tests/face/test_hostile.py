"""Files whose content asks for more than their size: each ends within seconds, in a result or in one clear line."""

from __future__ import annotations

import os
import signal
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from fa_compiler.command_line.main import main
from fa_compiler.model_files.expansion import DEPTH, NODES, excess
from fa_compiler.passes.in_place import METADATA
from tests.systems import IS_WINDOWS, NAMED_PIPES

from .builders import attention, external, plain, saved

SECONDS = 20
"""Far more than any of these takes on a busy machine, and far less than forever."""


@pytest.fixture(autouse=True)
def limit() -> Iterator[None]:
    if IS_WINDOWS:  # has no alarm: what hangs would end with the suite
        yield
        return

    def late(number: int, frame: object) -> None:
        raise TimeoutError(f"not done after {SECONDS} seconds")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def _number(value: float | np.ndarray, name: str) -> TensorProto:
    return numpy_helper.from_array(np.asarray(value), name)


def functions(levels: int, calls: int, last: str = "Softmax", opset: int = 17) -> onnx.ModelProto:
    """Functions of which each calls the next one so many times, one after the other."""
    model = attention()
    for level in range(levels):
        own = level < levels - 1
        values = ["x", *(f"t{index}" for index in range(1, calls)), "y"]
        nodes = [
            helper.make_node(f"F{level + 1}" if own else last, [values[index]], [values[index + 1]], f"n{index}")
            for index in range(calls)
        ]
        for node in nodes:
            node.domain = "own" if own else ""
        imports = [helper.make_opsetid("", opset), helper.make_opsetid("own", 1)]
        model.functions.append(helper.make_function("own", f"F{level}", ["x"], ["y"], nodes, imports))
    model.opset_import.add(domain="own", version=1)
    model.graph.node.append(helper.make_node("F0", ["query"], ["more"], "call", domain="own"))
    model.graph.output.append(helper.make_tensor_value_info("more", TensorProto.FLOAT, None))
    return model


@pytest.mark.parametrize("opset", [16, 17], ids=["kept", "inlined"])
@pytest.mark.parametrize("last", ["Softmax", "Relu"])
def test_functions_that_double(last: str, opset: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Thirty functions stand for 2^30 nodes."""
    path = saved(functions(30, 2, last, opset), tmp_path / "model.onnx")
    for command in (["inspect", str(path)], ["optimize", str(path), "-o", str(tmp_path / "out.onnx")]):
        assert main(command) == 2
        error = capfd.readouterr().err
        assert error.count("\n") == 1
        assert (
            f"{path} cannot be processed: its functions stand for more than {NODES} nodes: 'F16' is called 65536"
            in error
        )
    assert list(tmp_path.iterdir()) == [path]


def test_limits_of_functions(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert excess(functions(8, 2)) is None
    assert excess(functions(DEPTH, 1)) is None
    assert "over more than 100 levels, down to 'F100'" in str(excess(functions(DEPTH + 1, 1)))
    assert "called too often to be inlined: 'F14' 16384 times" in str(excess(functions(15, 2)))
    model = functions(3, 1)
    model.functions[2].node[0].op_type, model.functions[2].node[0].domain = "F0", "own"
    assert excess(model) == "function 'F0' calls itself"
    path = saved(functions(5000, 1), tmp_path / "model.onnx")
    assert main(["inspect", str(path)]) == 2
    assert "over more than 100 levels" in capfd.readouterr().err


def test_graphs_that_functions_put_into_graphs() -> None:
    """Each function holds an If with a call of the next one: inlined, they lie inside each other."""

    def nested(levels: int) -> onnx.ModelProto:
        model = functions(levels, 1, "Relu")
        for function in model.functions:
            node = function.node[0]
            value = onnx.ValueInfoProto(name=node.output[0])
            branch = helper.make_graph([node], "branch", [], [value])
            other = helper.make_graph([helper.make_node("Identity", ["x"], node.output)], "other", [], [value])
            call = helper.make_node("If", ["x"], ["y"], then_branch=branch, else_branch=other)
            del function.node[:]
            function.node.append(call)
        return model

    assert excess(nested(30)) is None
    assert "put graphs into graphs over more than 30 levels, down to 'F30'" in str(excess(nested(40)))


def loops(depth: int) -> onnx.ModelProto:
    """Loops inside loops, each with a state that grows: its sizes are found by walking the body again."""
    model = attention()
    inner = [helper.make_node("Relu", ["query"], ["o0"], "relu")]
    for level in range(depth):
        state = [f"{name}{level}" for name in ("i", "c", "s", "co", "so")]
        nodes = [
            *inner,
            helper.make_node("Concat", [state[2], state[2]], [state[4]], axis=0),
            helper.make_node("Identity", [state[1]], [state[3]]),
        ]
        kinds = (TensorProto.INT64, TensorProto.BOOL, TensorProto.FLOAT)
        values = [helper.make_tensor_value_info(name, kind, None) for name, kind in zip(state, kinds, strict=False)]
        results = [
            helper.make_tensor_value_info(state[3], TensorProto.BOOL, None),
            helper.make_tensor_value_info(state[4], TensorProto.FLOAT, None),
        ]
        body = helper.make_graph(nodes, f"body{level}", values, results)
        inner = [helper.make_node("Loop", ["trips", "yes", "query"], [f"o{level + 1}"], f"loop{level}", body=body)]
    model.graph.node.extend(inner)
    model.graph.initializer.extend([_number(np.int64(1 << 60), "trips"), _number(np.bool_(True), "yes")])
    model.graph.output.append(helper.make_tensor_value_info(f"o{depth}", TensorProto.FLOAT, None))
    return model


def sums(count: int) -> onnx.ModelProto:
    """A product of sums of two sizes each: a polynomial of 2^count terms."""
    model = attention()
    graph = model.graph
    graph.initializer.extend([_number(np.int64(0), "first"), _number(np.int64(1), "second")])
    last = ""
    for index in range(count):
        graph.input.append(helper.make_tensor_value_info(f"x{index}", TensorProto.FLOAT, [f"a{index}", f"b{index}"]))
        graph.node.extend(
            [
                helper.make_node("Shape", [f"x{index}"], [f"shape{index}"]),
                helper.make_node("Gather", [f"shape{index}", "first"], [f"p{index}"]),
                helper.make_node("Gather", [f"shape{index}", "second"], [f"q{index}"]),
                helper.make_node("Add", [f"p{index}", f"q{index}"], [f"sum{index}"]),
            ]
        )
        if last:
            graph.node.append(helper.make_node("Mul", [last, f"sum{index}"], [f"product{index}"]))
        last = f"product{index}" if last else f"sum{index}"
    graph.output.append(helper.make_tensor_value_info(last, TensorProto.INT64, None))
    return model


def lengths(count: int, step: Callable[[int], list[onnx.NodeProto]]) -> onnx.ModelProto:
    """A chain of operators on two sizes, m0 and m1; each step makes the next one."""
    model = attention()
    graph = model.graph
    graph.initializer.extend([_number(np.int64(0), "first"), _number(np.int64(2), "second")])
    graph.node.append(helper.make_node("Shape", ["query"], ["shape"]))
    graph.node.append(helper.make_node("Gather", ["shape", "first"], ["m0"]))
    graph.node.append(helper.make_node("Gather", ["shape", "second"], ["m1"]))
    for index in range(count):
        graph.node.extend(step(index))
    graph.output.append(helper.make_tensor_value_info(f"m{count + 1}", TensorProto.INT64, None))
    return model


def _square(index: int) -> list[onnx.NodeProto]:
    return [
        helper.make_node("Add", [f"m{index}", f"m{index + 1}"], [f"a{index}"]),
        helper.make_node("Mul", [f"a{index}", f"a{index}"], [f"m{index + 2}"]),
    ]


def _least(index: int) -> list[onnx.NodeProto]:
    return [
        helper.make_node("Mul", [f"m{index}", f"m{index + 1}"], [f"a{index}"]),
        helper.make_node("Min", [f"a{index}", f"m{index}"], [f"b{index}"]),
        helper.make_node("Add", [f"b{index}", f"m{index + 1}"], [f"m{index + 2}"]),
    ]


def two_imports() -> onnx.ModelProto:
    """Two functions that import one domain in two versions."""
    model = attention()
    for version in (1, 2):
        nodes = [helper.make_node("Softmax", ["x"], ["y"], "inner")]
        imports = [helper.make_opsetid("", 17), helper.make_opsetid("more", version)]
        model.functions.append(helper.make_function("own", f"F{version}", ["x"], ["y"], nodes, imports))
        model.graph.node.append(helper.make_node(f"F{version}", ["query"], [f"z{version}"], domain="own"))
    model.opset_import.add(domain="own", version=1)
    return model


def slices_of_nothing() -> onnx.ModelProto:
    """A Scan that says it has more tensors to slice than inputs."""
    model = attention()
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in "ab"]
    body = helper.make_graph([helper.make_node("Relu", ["a"], ["b"])], "body", values[:1], values[1:])
    model.graph.node.append(helper.make_node("Scan", ["query"], ["more"], body=body, num_scan_inputs=1 << 40))
    return model


def empty_modifier() -> onnx.ModelProto:
    """A FlexAttention whose graph on the scores has no inputs and no outputs."""
    model = attention(ir_version=13)
    model.opset_import[0].version = 26
    model.opset_import.add(domain="ai.onnx.preview", version=1)
    body = helper.make_graph([], "body", [], [])
    names = ["query", "key", "value"]
    node = helper.make_node("FlexAttention", names, ["more"], domain="ai.onnx.preview", score_mod=body)
    model.graph.node.append(node)
    return model


TAKEN: dict[str, Callable[[], onnx.ModelProto]] = {
    "loops in loops": lambda: loops(25),
    "product of sums": lambda: sums(30),
    "name that is a product of sums": lambda: attention(batch="*".join(f"(a{i} + b{i})" for i in range(30))),
    "name that is a long sum": lambda: attention(batch=" + ".join(f"a{i}" for i in range(20000))),
    "squares of squares": lambda: lengths(40, _square),
    "two imports": two_imports,
    "slices of nothing": slices_of_nothing,
    "empty modifier": empty_modifier,
    "minima of products": lambda: lengths(25, _least),
}


@pytest.mark.parametrize("case", TAKEN)
def test_what_is_not_known_is_left_open(case: str, tmp_path: Path) -> None:
    """The attention beside it is fused."""
    path = saved(TAKEN[case](), tmp_path / "model.onnx")
    out = tmp_path / "out.onnx"
    assert main(["optimize", str(path), "-o", str(out), "--quiet"]) == 0
    assert "FlashAttention" in {node.op_type for node in onnx.load(out).graph.node}


def _nul(folder: Path) -> str:
    return "a\0b"


def _pipe(folder: Path) -> str:
    os.mkfifo(folder / "pipe")
    return "pipe"


@pytest.mark.parametrize(
    ("make", "told"),
    [(_nul, "which cannot be the name of a file"), pytest.param(_pipe, "is not a regular file", marks=NAMED_PIPES)],
)
def test_external_data(
    make: Callable[[Path], str], told: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = plain()
    model.graph.initializer.append(external("w", (16,), make(tmp_path), 0))
    assert main(["inspect", str(saved(model, tmp_path / "model.onnx"))]) == 2
    error = capfd.readouterr().err
    assert error.count("\n") == 1
    assert "tensor 'w' lies in" in error
    assert told in error


def _verify(folder: Path, other: onnx.ModelProto, *more: str) -> int:
    paths = [saved(attention(), folder / "model.onnx"), saved(other, folder / "other.onnx")]
    return main(["verify", *map(str, paths), *more])


@pytest.mark.parametrize(
    "entries",
    [
        "[" * 100000,
        '[{"past": "query", "present": "out", "axis": "2", "length": "n"}]',
        '[{"past": ["query"], "present": "out", "axis": 2, "length": "n"}]',
        '[{"past": "query", "present": "out", "axis": 99, "length": "n"}]',
    ],
    ids=["deep", "axis is text", "name is a list", "no such axis"],
)
def test_metadata_of_caches(entries: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = attention()
    model.metadata_props.add(key=METADATA, value=entries)
    assert _verify(tmp_path, model) == 2
    error = capfd.readouterr().err
    assert error.count("\n") == 1
    assert "cache" in error


def test_verify_of_damaged_models(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """ONNX Runtime judges a model before anything is read from it."""
    model = plain()
    model.graph.node[0].op_type = "Cast"
    del model.graph.node[0].input[:]
    path = saved(model, tmp_path / "model.onnx")
    assert main(["verify", str(path), str(path)]) == 2
    assert f"ONNX Runtime cannot load {path}" in capfd.readouterr().err
    assert _verify(tmp_path, functions(30, 2)) == 2
    assert f"{tmp_path / 'other.onnx'} cannot be processed: its functions stand for" in capfd.readouterr().err


def test_inputs_are_unpacked_when_they_are_wanted(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """An archive of a megabyte may unpack to a terabyte."""
    header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (1099511627776,), }".ljust(0x75) + b"\n"
    with zipfile.ZipFile(tmp_path / "inputs.npz", "w") as archive:
        archive.writestr("unwanted.npy", b"\x93NUMPY\x01\x00\x76\x00" + header)
    assert _verify(tmp_path, attention(), "--inputs", str(tmp_path / "inputs.npz")) == 2
    assert "lacks the input 'key'" in capfd.readouterr().err
