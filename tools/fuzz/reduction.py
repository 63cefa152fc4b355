"""A smaller model with the same fault: nodes are bypassed, values become constants, while the fault is still seen."""

from __future__ import annotations

import base64
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import onnx
from onnx import numpy_helper

from tools.fuzz.difference import Array, Feed, run_original, session
from tools.fuzz.kind import Finding, Kind, Outcome, load
from tools.fuzz.oracle import Judge

SECONDS = 45.0
FROZEN = 4096
"""A value of up to this many elements may become a constant."""
Fails = Callable[[onnx.ModelProto, Feed], bool]


class GraphKind(Kind):
    """Kinds whose case is one model that is judged by tools/fuzz/oracle.py."""

    innocent: tuple[str, ...] = ("run_original", "refused", "values_of")
    """The last one infers the types of models that are being broken: onnx ends the process for some of them."""

    @abstractmethod
    def judge(self, seed: int) -> Judge | None:
        """The judge of a seed's model; None where there is none."""

    def check(self, seed: int) -> Outcome:
        judge = self.judge(seed)
        return Outcome("skipped") if judge is None else judge.outcome()

    def reduce(self, seed: int, finding: Finding) -> Finding | None:
        judge = self.judge(seed)
        if judge is None or judge.outcome().finding is None or judge.shown is None:
            return None
        wanted = finding.title.partition(" [")[0]

        def fails(model: onnx.ModelProto, feed: Feed) -> bool:
            found = judge.on(model, feed).outcome().finding
            return found is not None and found.title.partition(" [")[0] == wanted

        model, feed = reduced(judge.model, judge.shown, fails)
        text = onnx.printer.to_text(model)
        return Finding(finding.title, text, script(model, feed, judge.assume).encode(), ".py")


def judge_of_others(names: Sequence[str], seed: int) -> Judge | None:
    """The judge of a seed's model of one of these kinds, which take turns; None where that kind has none."""
    kind = load(names[seed % len(names)])
    assert isinstance(kind, GraphKind)
    return kind.judge(seed)


def reduced(model: onnx.ModelProto, feed: Feed, fails: Fails) -> tuple[onnx.ModelProto, Feed]:
    """The smallest model and feed that were found in SECONDS."""
    end = time.monotonic() + SECONDS
    again = True
    while again and time.monotonic() < end:
        again = False
        for smaller, fed in _smaller(model, feed):
            if time.monotonic() > end:
                break
            if _is_model(smaller, fed) and fails(smaller, fed):
                model, feed, again = smaller, fed, True
                break
    return model, feed


def _is_model(model: onnx.ModelProto, feed: Feed) -> bool:
    try:
        run_original(session(model, custom=False), feed.arrays)
    except Exception:  # of ONNX Runtime
        return False
    return True


def _smaller(model: onnx.ModelProto, feed: Feed) -> Iterator[tuple[onnx.ModelProto, Feed]]:
    """Models with one node less, largest steps first: a value is frozen, an operator is bypassed."""
    values = _values(model, feed)
    outputs = {output.name for output in model.graph.output}
    for index in reversed(range(len(model.graph.node))):
        node = model.graph.node[index]
        name = node.output[0]
        array = values.get(name)
        if name not in outputs and array is not None and array.size <= FROZEN and node.op_type != "Constant":
            yield _pruned(_replaced(model, index, numpy_helper.from_array(array, f"{name}_kept")), feed)
        if name not in outputs and node.op_type != "Constant":
            for source in node.input:
                if source and source in values and array is not None and values[source].dtype == array.dtype:
                    yield _pruned(_replaced(model, index, source), feed)


def _values(model: onnx.ModelProto, feed: Feed) -> dict[str, Array]:
    """Every value of a run of the original."""
    whole = onnx.ModelProto()
    whole.CopyFrom(model)
    inner = [name for node in model.graph.node for name in node.output if name]
    del whole.graph.output[:]
    whole.graph.output.extend(onnx.ValueInfoProto(name=name) for name in inner)
    try:
        results = run_original(session(whole, custom=False), feed.arrays)
    except Exception:  # of ONNX Runtime: some values have no type of NumPy's
        return {}
    held = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    return {**dict(feed.arrays), **held, **dict(zip(inner, results, strict=True))}


def _replaced(model: onnx.ModelProto, index: int, by: str | onnx.TensorProto) -> onnx.ModelProto:
    """The model without a node, whose output is another value or a constant."""
    made = onnx.ModelProto()
    made.CopyFrom(model)
    old = made.graph.node[index].output[0]
    new = by if isinstance(by, str) else by.name
    if not isinstance(by, str):
        made.graph.initializer.append(by)
    del made.graph.node[index]
    for node in made.graph.node:
        for place, name in enumerate(node.input):
            if name == old:
                node.input[place] = new
    return made


def _pruned(model: onnx.ModelProto, feed: Feed) -> tuple[onnx.ModelProto, Feed]:
    """Without what nothing reads."""
    needed = {output.name for output in model.graph.output}
    kept: list[onnx.NodeProto] = []
    for node in reversed(model.graph.node):
        if needed & set(node.output):
            kept.append(node)
            needed |= set(node.input)
    del model.graph.node[:]
    model.graph.node.extend(reversed(kept))
    for field in (model.graph.input, model.graph.initializer):
        held = [each for each in field if each.name in needed]
        del field[:]
        field.extend(held)
    del model.graph.value_info[:]
    arrays = {name: array for name, array in feed.arrays.items() if name in needed}
    spoiled = tuple(name for name in feed.spoiled if name in arrays)
    return model, Feed(feed.name, arrays, feed.lenient, spoiled)


def script(model: onnx.ModelProto, feed: Feed, assume: tuple[str, ...] | list[str]) -> str:
    """A script that runs the original and the fused model, and prints both results."""
    text = "\n".join(f"# {line}" for line in onnx.printer.to_text(model).splitlines())
    with np.printoptions(threshold=1 << 20, floatmode="unique"):
        arrays = "\n".join(
            f"    {name!r}: np.array({array.tolist()!r}, np.{array.dtype}).reshape({array.shape}),"
            for name, array in feed.arrays.items()
        )
    data = base64.b64encode(model.SerializeToString()).decode()
    return f"""{text}

import base64

import numpy as np
import onnx
import onnxruntime as ort

import fa_compiler

nan, inf = np.nan, np.inf
MODEL = base64.b64decode({data!r})
FEEDS = {{
{arrays}
}}

fused = fa_compiler.optimize(onnx.ModelProto.FromString(MODEL), assume={list(assume)!r})
print(*fused.report.blocks, sep="\\n")
options = ort.SessionOptions()
options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
fa_compiler.register_custom_ops(options)
for model in (MODEL, fused.model.SerializeToString()):
    print(ort.InferenceSession(model, options, providers=["CPUExecutionProvider"]).run(None, FEEDS))
"""
