"""Sessions of ONNX Runtime with the execution provider and without it: the same outputs, or an error in both.

A case draws a graph around an attention, options of the session, and a way to run it. In some cases the provider takes
the graph as it is in place of a fused one: then any graph is written as a model, and read again.
"""

from __future__ import annotations

import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

import fa_compiler
from fa_compiler import provider
from fa_compiler.passes import Options, Report
from fa_compiler.provider.matching import Replacement
from tools.fuzz.kind import Finding, Kind, Outcome

HEADS, SIZE = 2, 4
TOLERANCE = 1e-4
"""Of float32, relative to 1: values are of that size, and a Loop adds a few of them."""
CHILD_S = 60.0
"""A child process that takes longer hangs. It takes 0.1 s, and many times as long on a busy machine."""
TERMINATE_S = 0.05
LONG = 300_000
"""Rounds of a Loop that is to be terminated: some seconds."""
FATAL = 4
"""A severity of the log: what a session says of its errors is not looked at."""

value = helper.make_tensor_value_info
sequence = helper.make_tensor_sequence_value_info
node = helper.make_node
FLOAT, INT64, BOOL, STRING = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL, TensorProto.STRING


@dataclass
class Graph:
    """A graph while it is drawn, with its inputs of a length."""

    rng: random.Random
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    inputs: list[onnx.ValueInfoProto] = field(default_factory=list)
    outputs: list[onnx.ValueInfoProto] = field(default_factory=list)
    constants: dict[str, np.ndarray] = field(default_factory=dict)
    feeds: dict[str, Callable[[int], Any]] = field(default_factory=dict)
    words: list[str] = field(default_factory=list)
    captured: bool = False
    """Whether only a graph inside a node reads an input."""

    def __post_init__(self) -> None:
        self.numbers = np.random.default_rng(self.rng.getrandbits(32))

    def random(self, *shape: int) -> np.ndarray:
        """Numbers around 0."""
        return self.numbers.standard_normal(shape).astype(np.float32)

    def input(self, info: onnx.ValueInfoProto, feed: Callable[[int], Any]) -> str:
        """An input."""
        self.inputs.append(info)
        self.feeds[info.name] = feed
        return str(info.name)

    def constant(self, name: str, array: np.ndarray) -> str:
        """A weight."""
        self.constants[name] = array
        return name

    def model(self) -> onnx.ModelProto:
        """The model."""
        weights = [numpy_helper.from_array(array, name) for name, array in self.constants.items()]
        graph = helper.make_graph(self.nodes, "sessions", self.inputs, self.outputs, weights)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


def attention_nodes(graph: Graph) -> list[onnx.NodeProto]:
    """softmax(q k^T * scale + mask) v, perhaps with a projection."""
    nodes = [node("Transpose", ["key"], ["key_t"], perm=[0, 1, 3, 2])]
    query = "query"
    if graph.rng.random() < 0.5:
        nodes.append(
            node("MatMul", ["query", graph.constant("w", graph.random(HEADS * 20, SIZE, SIZE)[:HEADS])], ["q"])
        )
        query = "q"
    scale = graph.constant("scale", np.array(0.5, np.float32))
    nodes += [node("MatMul", [query, "key_t"], ["product"]), node("Mul", ["product", scale], ["scaled"])]
    scores = "scaled"
    if graph.rng.random() < 0.3:
        bias = graph.constant("bias", graph.random(HEADS, 1, 1))
        nodes.append(node("Add", [scores, bias], ["biased"]))
        scores = "biased"
    return [
        *nodes, node("Softmax", [scores], ["probs"], axis=-1), node("MatMul", ["probs", "value"], ["out"])
    ]  # fmt: skip


def add_attention(graph: Graph) -> None:
    """The attention, in the main graph or in that of an If or a Loop."""
    shape: list[str | int] = ["batch", HEADS, "length", SIZE]
    for name in ("query", "key", "value"):
        graph.input(value(name, FLOAT, shape), lambda length: graph.random(2, HEADS, length, SIZE))
    result = value("out", FLOAT, shape)
    where = graph.rng.choice(["main"] * 4 + ["if", "loop"])
    graph.words.append(f"attention in {where}")
    nodes = attention_nodes(graph)
    if where == "main":
        graph.nodes += nodes
    else:
        graph.captured = True
    if where == "if":
        flag = graph.input(value("choice", BOOL, []), lambda length: np.array(length % 2 == 0))
        inner = helper.make_graph(nodes, "then", [], [result])
        other = helper.make_graph([node("Identity", ["value"], ["other"])], "else", [], [value("other", FLOAT, shape)])
        graph.nodes.append(node("If", [flag], ["chosen"], "if", then_branch=inner, else_branch=other))
    if where == "loop":
        nodes += [node("Add", ["out", "last"], ["next"]), node("Identity", ["on"], ["still"])]
        body = helper.make_graph(
            nodes,
            "body",
            [value("i", INT64, []), value("on", BOOL, []), value("last", FLOAT, shape)],
            [value("still", BOOL, []), value("next", FLOAT, shape)],
        )
        trip = graph.constant("rounds", np.array(2))
        graph.nodes.append(node("Loop", [trip, "", "value"], ["chosen"], "loop", body=body))
    graph.outputs.append(result if where == "main" else value("chosen", FLOAT, None))


def add_loop(graph: Graph) -> None:
    """A Loop whose body reads its iteration number, a scalar or unknown, and its condition."""
    rounds = graph.rng.choice((0, 1, 3))
    table = graph.constant("table", graph.random(4, 3))
    begin = graph.input(value("begin", FLOAT, [3]), lambda length: graph.random(3))
    flat = graph.rng.random() < 0.5
    body = helper.make_graph(
        [
            node("Gather", [table, "n"], ["row"]),
            node("Add", ["sum_in", "row"], ["sum_out"]),
            node("Greater", ["n", "zero"], ["positive"]) if flat else node("Identity", ["go"], ["positive"]),
            node("Identity", ["go"], ["goes"]),
            node("Identity", ["sum_out"], ["kept"]),
        ],
        "rounds",
        [value("n", INT64, []), value("go", BOOL, []), value("sum_in", FLOAT, graph.rng.choice(([3], None)))],
        [value("goes", BOOL, []), value("sum_out", FLOAT, [3]), value("kept", FLOAT, [3])],
    )
    graph.constant("zero", np.array(0))
    trip = graph.constant("trip", np.array(rounds))
    graph.nodes += [
        node("Neg", [begin], ["begin_too"]),
        node("Loop", [trip, "", begin], ["sum", "sums"], "add_rows", body=body),
    ]
    graph.outputs += [value("sum", FLOAT, None), value("sums", FLOAT, None), value("begin_too", FLOAT, [3])]


def add_scan(graph: Graph) -> None:
    """A Scan over rows."""
    rows = graph.input(value("rows", FLOAT, ["count", 3]), lambda length: graph.random(length, 3))
    body = helper.make_graph(
        [node("Add", ["total", "row_in"], ["total_out"]), node("Mul", ["total_out", "row_in"], ["row_out"])],
        "each",
        [value("total", FLOAT, [3]), value("row_in", FLOAT, [3])],
        [value("total_out", FLOAT, [3]), value("row_out", FLOAT, [3])],
    )
    start = graph.constant("start", graph.random(3))
    graph.nodes.append(node("Scan", [start, rows], ["scan_total", "scan_rows"], "scan", body=body, num_scan_inputs=1))
    graph.outputs += [value("scan_total", FLOAT, [3]), value("scan_rows", FLOAT, ["count", 3])]


def add_if(graph: Graph) -> None:
    """An If that gives a tensor, a scalar, or a list."""
    flag = graph.input(value("flag", BOOL, []), lambda length: np.array(length > 4))
    kind = graph.rng.choice(("tensor", "scalar", "list"))
    op, shape = {"tensor": ("Neg", None), "scalar": ("Size", []), "list": ("SequenceConstruct", None)}[kind]
    out = INT64 if kind == "scalar" else FLOAT
    info = sequence if kind == "list" else value
    branches = {}
    for name, first in (("then", "Identity"), ("else", "Exp")):
        nodes = [node(first, ["query"], [f"in_{name}"]), node(op, [f"in_{name}"], [f"o_{name}"])]
        branches[f"{name}_branch"] = helper.make_graph(nodes, name, [], [info(f"o_{name}", out, shape)])
    graph.nodes += [node("Abs", ["query"], ["query_abs"]), node("If", [flag], ["branch"], "choose", **branches)]
    graph.outputs += [info("branch", out, shape), value("query_abs", FLOAT, None)]


def add_sequence(graph: Graph) -> None:
    """Lists: as an input, as the state of a Loop, as an output, or as all."""
    source = graph.rng.choice(("input", "loop", "construct"))
    graph.words.append(source)
    if source == "input":
        tensors = [graph.random(2), graph.random(3)]
        graph.input(sequence("list", FLOAT, None), lambda length: tensors[: 1 + length % 2])
    elif source == "construct":
        graph.nodes.append(node("SequenceConstruct", ["query", "value"], ["list"]))
    else:
        body = helper.make_graph(
            [node("Identity", ["lo"], ["los"]), node("SequenceInsert", ["state_in", "query"], ["state_out"])],
            "grow",
            [value("k", INT64, []), value("lo", BOOL, []), sequence("state_in", FLOAT, None)],
            [value("los", BOOL, []), sequence("state_out", FLOAT, None)],
        )
        graph.nodes += [
            node("Sign", ["query"], ["query_sign"]),
            node("SequenceEmpty", [], ["none"], dtype=FLOAT),
            node("Loop", [graph.constant("times", np.array(2)), "", "none"], ["list"], "grow", body=body),
        ]
        graph.outputs.append(value("query_sign", FLOAT, None))
    if graph.rng.random() < 0.7:
        graph.nodes.append(node("ConcatFromSequence", ["list"], ["joined"], axis=0))
        graph.outputs.append(value("joined", FLOAT, None))
    if source != "input" and graph.rng.random() < 0.6:
        graph.outputs.append(sequence("list", FLOAT, None))


def add_optional(graph: Graph) -> None:
    """An optional value, an input or made of one, perhaps an output; and whether it is there."""
    optional = helper.make_optional_type_proto(helper.make_tensor_type_proto(FLOAT, None))
    if graph.rng.random() < 0.5:
        content = graph.random(2) if graph.rng.random() < 0.5 else None
        graph.input(helper.make_value_info("maybe", optional), lambda length: content)
    else:
        graph.nodes.append(node("Optional", ["value"], ["maybe"]))
    graph.nodes.append(node("OptionalHasElement", ["maybe"], ["is_there"]))
    graph.outputs.append(value("is_there", BOOL, []))
    if graph.nodes[-2].op_type == "Optional" and graph.rng.random() < 0.5:
        graph.outputs.append(helper.make_value_info("maybe", optional))


def add_strings(graph: Graph) -> None:
    """Words that are passed on."""
    words = graph.input(value("words", STRING, ["count"]), lambda length: np.array(["a", "bc"] * length))
    graph.nodes.append(node("Identity", [words], ["same_words"]))
    graph.outputs.append(value("same_words", STRING, ["count"]))


def add_sizes(graph: Graph) -> None:
    """Outputs whose sizes nobody knows before the run, and a scalar."""
    graph.nodes += [node("NonZero", ["key"], ["places"]), node("Size", ["key"], ["key_size"])]
    graph.outputs += [value("places", INT64, None), value("key_size", INT64, [])]


def add_default(graph: Graph) -> None:
    """An input with a default, and one that nobody reads."""
    graph.constant("factor", np.array([1, 2], np.float32))
    graph.inputs.append(value("factor", FLOAT, [2]))
    if graph.rng.random() < 0.5:
        graph.feeds["factor"] = lambda length: graph.random(2)
    graph.nodes.append(node("Neg", ["factor"], ["factor_out"]))
    graph.outputs.append(value("factor_out", FLOAT, [2]))
    graph.input(value("unread", FLOAT, ["any"]), lambda length: graph.random(1))


EXTRAS = (add_loop, add_scan, add_if, add_sequence, add_optional, add_strings, add_sizes, add_default)


@dataclass
class Setting:
    """Options of a session: how they are set, and whether such a session may be left alone."""

    words: str
    apply: Callable[[ort.SessionOptions], None]
    may_be_left: bool = False
    kept: tuple[Any, ...] = ()
    """What has to live as long as the session."""


def entry(key: str, text: str, may_be_left: bool = False) -> Setting:
    """An entry of the configuration."""
    return Setting(f"{key}={text}", lambda options: options.add_session_config_entry(key, text), may_be_left)


def attribute(name: str, content: Any) -> Setting:
    """An attribute of the options."""
    return Setting(name, lambda options: setattr(options, name, content))


ENTRIES = {
    "session.disable_prepacking": "1",
    "session.use_env_allocators": "1",
    "session.set_denormal_as_zero": "1",
    "session.use_device_allocator_for_initializers": "1",
    "session.intra_op.allow_spinning": "0",
    "session.force_spinning_stop": "1",
    "session.disable_aot_function_inlining": "1",
    "session.use_ort_model_bytes_for_initializers": "1",
    "optimization.disable_specified_optimizers": "ConstantFolding",
    "ep.context_enable": "0",
}
ATTRIBUTES = {
    "enable_mem_pattern": False,
    "enable_cpu_mem_arena": False,
    "enable_mem_reuse": False,
    "execution_mode": ort.ExecutionMode.ORT_PARALLEL,
    "use_deterministic_compute": True,
}


def settings(graph: Graph, folder: Path) -> list[Setting]:
    """Options for the session, drawn."""
    rng = graph.rng
    found = [entry(*each) for each in rng.sample(sorted(ENTRIES.items()), rng.choice((0, 0, 1, 2)))]
    found += [attribute(*each) for each in rng.sample(sorted(ATTRIBUTES.items()), rng.choice((0, 0, 1, 2)))]
    level = rng.choice(("ORT_DISABLE_ALL", "ORT_ENABLE_BASIC", "ORT_ENABLE_EXTENDED", "ORT_ENABLE_ALL"))
    found.append(attribute("graph_optimization_level", getattr(ort.GraphOptimizationLevel, level)))
    word = rng.choice((*[""] * 6, "external", "external", "shared", "written", "context", "free", "operators"))
    names = sorted({"w", "scale", "bias"} & set(graph.constants))
    if word in ("external", "shared"):
        chosen = rng.sample(names, rng.randint(1, len(names)))
        factor = np.float32(rng.choice((1, 2)) if word == "shared" else 1)
        arrays = [np.array(graph.constants[name] * factor) for name in chosen]
        values = [ort.OrtValue.ortvalue_from_numpy(array) for array in arrays]

        def give(options: ort.SessionOptions) -> None:
            if word == "external":
                options.add_external_initializers(chosen, values)
            else:
                for name, each in zip(chosen, values, strict=True):
                    options.add_initializer(name, each)

        found.append(Setting(f"{word} {' '.join(chosen)}", give, word == "shared", (arrays, values)))
    if word == "written":
        ending = rng.choice(("onnx", "ort"))
        path = str(folder / f"written.{ending}")
        found.append(Setting(path[-12:], lambda options: setattr(options, "optimized_model_filepath", path), True))
    if word == "context":
        found.append(entry("ep.context_enable", "1", may_be_left=True))
    if word == "free":
        size = rng.choice((2, 3))  # of which 2 is right
        found.append(
            Setting(f"batch {size}", lambda options: options.add_free_dimension_override_by_name("batch", size))
        )
    if word == "operators":
        library = fa_compiler.custom_ops_library()
        found.append(Setting("operators", lambda options: options.register_custom_ops_library(library)))
    return found


def changed(feeds: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Inputs that are wrong."""
    name = rng.choice(("query", "key", "value"))
    array = feeds[name]
    # Never of no rows: beside such a tensor ONNX Runtime's ConcatFromSequence leaves a part of its result unwritten.
    rows = array[:, :, :-1] if array.shape[2] > 1 else np.concatenate([array, array], 2)
    kinds = [array[..., :-1], array[0], array.astype(np.float64), rows]
    chosen = rng.randrange(len(kinds) + 1)
    if chosen == len(kinds):
        return {key: each for key, each in feeds.items() if key != name}
    return {**feeds, name: np.ascontiguousarray(kinds[chosen])}


def bound(session: ort.InferenceSession, feeds: Mapping[str, Any]) -> list[Any]:
    """A run with bindings: some outputs go to given memory."""
    binding = session.io_binding()
    for name, each in feeds.items():
        binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(each))
    for output in session.get_outputs():
        binding.bind_output(output.name)
    given = None
    if session.get_outputs()[0].name == "out":
        given = ort.OrtValue.ortvalue_from_numpy(np.zeros(feeds["query"].shape, np.float32))
        binding.bind_ortvalue_output("out", given)
    session.run_with_iobinding(binding)
    outputs = [each.numpy() for each in binding.get_outputs()]
    return [*outputs, given.numpy().copy()] if given is not None else outputs


def later(session: ort.InferenceSession, feeds: Mapping[str, Any]) -> list[Any]:
    """A run that calls back."""
    done, told = threading.Event(), []

    def take(results: list[Any], data: object, error: str) -> None:
        told.append((results, error))
        done.set()

    session.run_async(None, dict(feeds), take, None)
    done.wait()
    if told[0][1]:
        raise RuntimeError(told[0][1])
    return list(told[0][0])


def with_run_options(session: ort.InferenceSession, feeds: Mapping[str, Any], rng: random.Random) -> list[Any]:
    """A run with options."""
    options = ort.RunOptions()
    options.log_severity_level = FATAL
    word = rng.choice(("shrink", "path", "terminated", "tag"))
    if word == "shrink":
        options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
    options.only_execute_path_to_fetches = word == "path"
    options.terminate = word == "terminated"
    return list(session.run(None, dict(feeds), options))


def in_threads(session: ort.InferenceSession, runs: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Runs at once."""
    results: list[Any] = [None] * len(runs)

    def run(place: int) -> None:
        try:
            results[place] = session.run(None, dict(runs[place]))
        except Exception as error:  # of the runtime
            results[place] = error

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(runs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for each in results:
        if isinstance(each, Exception):
            raise each
    return [output for each in results for output in each]


RUNS = ("once", "twice", "some", "binding", "async", "options", "threads", "wrong")


def results_of(how: str, seed: int, session: ort.InferenceSession, graph: Graph) -> list[Any]:
    """The outputs of one or several runs. All that is drawn here is drawn anew from the seed."""
    rng = random.Random(seed)
    graph.numbers = np.random.default_rng(seed)
    lengths = [rng.choice((1, 3, 4, 7)) for _ in range(2)]
    runs = [{name: make(length) for name, make in graph.feeds.items()} for length in lengths]
    feeds = runs[0]
    arrays = all(isinstance(each, np.ndarray) and each.dtype.kind != "U" for each in feeds.values())
    plain = all(each.type.startswith("tensor(") and "string" not in each.type for each in session.get_outputs())
    if how == "binding" and arrays and plain:
        return bound(session, feeds)
    if how == "async" and arrays:
        return later(session, feeds)
    if how == "options":
        return with_run_options(session, feeds, rng)
    if how == "threads":
        return in_threads(session, [*runs, *runs])
    if how == "wrong":
        return list(session.run(None, changed(feeds, rng)))
    if how == "some":
        names = [each.name for each in session.get_outputs()]
        return list(session.run(rng.sample(names, rng.randint(1, len(names))), feeds))
    outputs = list(session.run(None, feeds))
    return outputs if how != "twice" else [*outputs, *session.run(None, runs[1])]


def difference(left: Any, right: Any) -> str:
    """What is not the same; empty if all is."""
    if isinstance(left, list) and isinstance(right, list):
        if len(left) != len(right):
            return f"{len(left)} and {len(right)} values"
        return next(filter(None, map(difference, left, right)), "")
    if left is None or right is None:
        return "" if left is right else "one is absent"
    one, other = np.asarray(left), np.asarray(right)
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return f"{one.dtype} {one.shape} and {other.dtype} {other.shape}"
    if one.dtype.kind != "f":
        return "" if np.array_equal(one, other) else "other values"
    close = np.allclose(one, other, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)
    return "" if close else "other numbers"


def as_it_is(content: bytes, addresses: Sequence[int], captures: bool, options: Options) -> Replacement:
    """The graph in place of itself. An input that nobody reads is none of the claimed node."""
    del addresses, captures, options
    model = onnx.ModelProto.FromString(content)
    read = set(_read(model.graph))
    for each in [each for each in model.graph.input if each.name not in read]:
        model.graph.input.remove(each)
    return Replacement(Report(()), model.SerializeToString(), (0, *[-1] * len(model.graph.output)))


def _read(graph: onnx.GraphProto) -> Iterator[str]:
    yield from (each.name for each in graph.output)
    for each in graph.node:
        yield from each.input
        for part in each.attribute:
            if part.type == onnx.AttributeProto.GRAPH:
                yield from _read(part.g)


def options_with(provided: bool, chosen: Sequence[Setting] = (), threads: int = 1) -> ort.SessionOptions:
    """Options of a session."""
    options = ort.SessionOptions()
    options.log_severity_level = FATAL
    options.intra_op_num_threads = threads
    if provided:
        options.add_provider_for_devices(fa_compiler.register_provider(), {})
    for setting in chosen:
        setting.apply(options)
    return options


class Sessions(Kind):
    """A session with the provider, and one without it."""

    limit_s = 1.5 * CHILD_S

    def check(self, seed: int) -> Outcome:
        rng = random.Random(seed)
        special = rng.random()
        if special < 0.02:
            return self.forked(rng)
        if special < 0.03:
            return self.terminated(rng)
        graph = Graph(rng)
        add_attention(graph)
        for add in rng.sample(EXTRAS, rng.choice((0, 1, 1, 2, 3))):
            graph.words.append(add.__name__)
            add(graph)
        how = rng.choice(RUNS)
        taken = rng.random() < 0.3
        with tempfile.TemporaryDirectory(prefix="fa_compiler-sessions-") as folder:
            return self.compared(seed, graph, how, taken, Path(folder))

    def compared(self, seed: int, graph: Graph, how: str, taken: bool, folder: Path) -> Outcome:
        """The session with the provider against the one without."""
        model, chosen = graph.model(), settings(graph, folder)
        path = folder / "model.onnx"
        outside = any(each.words.startswith("external") for each in chosen)
        onnx.save(model, path, save_as_external_data=outside, size_threshold=0, location="model.bin")
        told: list[tuple[list[Any] | None, str]] = []
        stand_in = as_it_is if taken else provider.replacement
        with provider.overhear() as heard, mock.patch.object(provider, "replacement", stand_in):
            for provided in (False, True):
                try:
                    session = ort.InferenceSession(
                        path, options_with(provided, chosen, threads=1 + (seed % 2 or how == "async"))
                    )
                    told.append((results_of(how, seed, session, graph), ""))
                except Exception as error:  # of the runtime: both have to raise one
                    told.append((None, str(error)))
        (expected, refused), (found, error) = told
        detail = f"{how}, {'as it is, ' if taken else ''}{', '.join(graph.words)}; {', '.join(s.words for s in chosen)}"
        detail = f"{detail}\nfailures: {heard.failures}\nwithout: {refused}\nwith: {error}"

        def fault(title: str) -> Outcome:
            return Outcome("wrong", Finding(title, detail, model.SerializeToString()))

        if (expected is None) != (found is None):
            return fault(f"an error only {'without' if expected is None else 'with'} the provider [{how}]")
        if expected is not None and (wrong := difference(expected, found)):
            return fault(f"{wrong} [{how}]")
        left = any(setting.may_be_left for setting in chosen)
        captured = graph.captured and provider.release() < provider.FIRST_WITH_CAPTURES
        fused = bool(heard.reports) and (taken or any(each.count("fused") for each in heard.reports))
        if fused and heard.failures:
            return fault("counted as fused, and left alone")
        if not fused and not left and not captured and not (expected is None and not heard.failures):
            reason = heard.failures[0] if heard.failures else "nothing was said"
            return fault(f"not fused: {' '.join(reason.split()[:6])}")
        return Outcome("refused" if expected is None else "fused" if fused else "left alone")

    def forked(self, rng: random.Random) -> Outcome:
        """A child that makes a session while a thread of its parent is in the matcher. Elsewhere in a session, the
        thread may hold a lock of ONNX Runtime, and the child hangs without the provider, too."""
        graph = Graph(rng)
        add_attention(graph)
        model = graph.model().SerializeToString()
        inside, apart, own = threading.Event(), threading.Event(), provider.replacement

        def slow(content: bytes, addresses: Sequence[int], captures: bool) -> Replacement:
            inside.set()
            apart.wait(CHILD_S)
            return own(content, addresses, captures)

        with mock.patch.object(provider, "replacement", slow):
            thread = threading.Thread(target=lambda: ort.InferenceSession(model, options_with(True)))
            thread.start()
            inside.wait(CHILD_S)
            child = os.fork()
            if child == 0:
                try:
                    provider.replacement = own
                    ort.InferenceSession(model, options_with(True))
                finally:
                    os._exit(0)
            apart.set()
            thread.join()
        end = time.monotonic() + CHILD_S
        while time.monotonic() < end:
            if os.waitpid(child, os.WNOHANG)[0]:
                return Outcome("fused")
            time.sleep(0.01)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return Outcome("hang", Finding("a child process hangs", suffix=".txt"))

    def terminated(self, rng: random.Random) -> Outcome:
        """A long run that the program ends."""
        graph = Graph(rng)
        add_attention(graph)
        add_loop(graph)
        graph.constants["trip"] = np.array(LONG)
        graph.constants["table"] = np.zeros((LONG, 3), np.float32)
        mode = rng.choice((ort.ExecutionMode.ORT_SEQUENTIAL, ort.ExecutionMode.ORT_PARALLEL))
        session = ort.InferenceSession(
            graph.model().SerializeToString(), options_with(True, [attribute("execution_mode", mode)])
        )
        options = ort.RunOptions()
        options.log_severity_level = FATAL
        timer = threading.Timer(TERMINATE_S, lambda: setattr(options, "terminate", True))
        timer.start()
        try:
            session.run(None, {name: make(4) for name, make in graph.feeds.items()}, options)
        except Exception as error:  # of the runtime
            if "terminate flag" in str(error):
                return Outcome("fused")
            return Outcome("wrong", Finding("another error than that of the end", str(error), suffix=".txt"))
        finally:
            timer.join()
        return Outcome("wrong", Finding("a run does not end when it is told to", suffix=".txt"))
