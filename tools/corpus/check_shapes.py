"""Compares inferred shapes with real ones, for every value of every model of a corpus in ONNX Runtime.

    python -m tools.corpus.check_shapes --corpus DIR [--match TEXT] [--dynamic] [--sizes recorded|grown|one|no-past]

DIR holds manifest.json and the models that it lists, each with recorded inputs (.npz). All intermediate values become
outputs, and optimisations are off. Each inferred Dim, content and scalar must evaluate to the value in the run. A fresh
symbol is bound where it first occurs alone, and must have this value everywhere.

`--dynamic` first replaces the static dims of the graph inputs by names, one for each size. This tests the symbolic
rules with models that were exported with static shapes. `--sizes` runs models with named dims at other sizes than the
recorded ones: each name is increased by a different amount, all names are 1, or past lengths are 0. A model that does
not run at these sizes is skipped. The exit code is 1 if there is any difference.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort

from fa_compiler.passes.algebra.symbolic import Dim
from fa_compiler.passes.values.shapes import ShapeInfo, analyse


def main() -> int:
    """Run the check; returns 0 if nothing differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--match", default="")
    parser.add_argument("--dynamic", action="store_true")
    parser.add_argument("--sizes", choices=("recorded", "grown", "one", "no-past"), default="recorded")
    options = parser.parse_args()
    totals: Counter[str] = Counter()
    unknown: Counter[str] = Counter()
    for entry in json.loads((options.corpus / "manifest.json").read_text())["models"]:
        if not entry["ort_ok"] or "inputs" not in entry or options.match not in entry["id"]:
            continue
        try:
            check(options, entry, totals, unknown)
        except SkippedError as reason:
            totals["models skipped"] += 1
            print(f"{entry['id']}: skipped: {reason}", file=sys.stderr)
    for name, count in sorted(totals.items()):
        print(f"{name:34s} {count}")
    print("unknown shapes by operator:", dict(unknown.most_common(20)))
    return 1 if totals["WRONG"] else 0


class SkippedError(Exception):
    """The model cannot be checked."""


def check(options: argparse.Namespace, entry: dict[str, Any], totals: Counter[str], unknown: Counter[str]) -> None:
    """Check one model and count the results."""
    path = options.corpus / entry["file"]
    proto = onnx.load(path)
    with np.load(options.corpus / entry["inputs"]) as archive:
        feeds = {name: archive[name] for name in archive.files}
    if options.dynamic:
        loosen(proto)
    if options.sizes != "recorded":
        feeds = resized(proto, feeds, options.sizes)
    info_model = ir.from_proto(proto)
    info = analyse(info_model)
    real = run_all(proto, feeds)
    bindings: dict[str, int] = {}
    for value in info_model.graph.inputs:
        shape = info.shape(value)
        if value.name in feeds and shape is not None:
            bind(shape, feeds[value.name].shape, bindings)
    totals["models"] += 1
    for node in info_model.graph:
        for value in node.outputs:
            if value.name in real:
                verdict = judge(info, value, real[value.name], bindings)
                totals["values"] += 1
                totals[verdict.partition(":")[0]] += 1
                if verdict.startswith("unknown"):
                    unknown[node.op_type] += 1
                if verdict.startswith("WRONG"):
                    print(f"{path.stem}: {node.op_type} -> {value.name}: {verdict}")
                if info.fact(value).content is not None:
                    totals["contents checked"] += 1


def loosen(proto: onnx.ModelProto) -> None:
    """Replace every static dim of the inputs, except 1, by a name; equal sizes get the same name."""
    initialized = {tensor.name for tensor in proto.graph.initializer}
    for value in proto.graph.input:
        if value.name not in initialized:
            for dim in value.type.tensor_type.shape.dim:
                if dim.HasField("dim_value") and dim.dim_value > 1:
                    dim.dim_param = f"n{dim.dim_value}"
    del proto.graph.value_info[:]
    for value in proto.graph.output:
        value.type.tensor_type.ClearField("shape")


def resized(proto: onnx.ModelProto, feeds: dict[str, np.ndarray], sizes: str) -> dict[str, np.ndarray]:
    """The inputs, repeated or cut to other sizes of the named dims."""
    names: dict[str, int] = {}
    result = dict(feeds)
    for value in proto.graph.input:
        feed = feeds.get(value.name)
        if feed is None:
            continue
        shape = []
        for dim, length in zip(value.type.tensor_type.shape.dim, feed.shape, strict=True):
            if dim.dim_param:
                grown = length + 1 + len(names)
                past = 0 if "past" in dim.dim_param.lower() else length
                length = names.setdefault(dim.dim_param, {"grown": grown, "one": 1, "no-past": past}[sizes])
            shape.append(length)
        result[value.name] = np.resize(feed, shape)
    if not names:
        raise SkippedError("no named dims")
    return result


def run_all(proto: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Every tensor of the main graph in one run without optimisations."""
    exposed = onnx.ModelProto()
    exposed.CopyFrom(proto)
    present = {value.name for value in exposed.graph.output}
    for node in exposed.graph.node:
        for name in node.output:
            if name and name not in present:
                present.add(name)
                exposed.graph.output.add().name = name
    settings = ort.SessionOptions()
    settings.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    settings.log_severity_level = 4
    try:
        session = ort.InferenceSession(exposed.SerializeToString(), settings, providers=["CPUExecutionProvider"])
        names = [output.name for output in session.get_outputs()]
        wanted = {item.name for item in session.get_inputs()}
        values = session.run(names, {name: feed for name, feed in feeds.items() if name in wanted})
    except Exception as error:  # onnxruntime raises many types; all mean "cannot run"
        raise SkippedError(str(error).splitlines()[0][:160]) from error
    return {name: value for name, value in zip(names, values, strict=True) if isinstance(value, np.ndarray)}


def bind(shape: tuple[Dim, ...], real: tuple[int, ...], bindings: dict[str, int]) -> None:
    """Bind the symbols that are a whole dim of a shape."""
    for dim, length in zip(shape, real, strict=False):
        atom = dim.single_atom
        if atom is not None and atom.op in ("symbol", "fresh"):
            bindings.setdefault(atom.name, length)


def judge(info: ShapeInfo, value: ir.Value, real: np.ndarray, bindings: dict[str, int]) -> str:
    """ "known", "partly known", "unknown", or "WRONG: why"."""
    fact = info.fact(value)
    if fact.dtype is not None and fact.dtype != ir.DataType.from_numpy(real.dtype):
        return f"WRONG: dtype {fact.dtype}, really {real.dtype}"
    if fact.shape is None:
        return "unknown rank"
    if len(fact.shape) != real.ndim:
        return f"WRONG: rank {len(fact.shape)}, really {real.ndim}"
    bind(fact.shape, real.shape, bindings)
    for dim, length in zip(fact.shape, real.shape, strict=True):
        if dim.evaluate(bindings) not in (length, None):
            return f"WRONG: {fact.shape}, really {real.shape}"
    if fact.content is not None:
        if fact.content.shape != real.shape:
            return f"WRONG: content of shape {fact.content.shape}, really {real.shape}"
        for item, element in zip(fact.content.reshape(-1), real.reshape(-1), strict=True):
            if isinstance(item, Dim):
                bind((item,), (int(element),), bindings)
                if item.evaluate(bindings) not in (int(element), None):
                    return f"WRONG: content {item}, really {element}"
            elif not np.array_equal(np.float64(item), np.float64(element), equal_nan=True):
                return f"WRONG: content {item!r}, really {element!r}"
    if all(dim.is_known for dim in fact.shape):
        return "known"
    return "partly known" if any(dim.is_known for dim in fact.shape) else "unknown: rank only"


if __name__ == "__main__":
    sys.exit(main())
