"""What is measured: every public entry that reads a model, as a function of the model and an empty folder."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import onnx

import fa_compiler
from fa_compiler.comparison.feeds import random_inputs
from fa_compiler.model_files.reading import load
from fa_compiler.page.drawn import Drawn
from fa_compiler.page.page import page
from tests.growth.graphs import ROWS

Entry = Callable[[onnx.ModelProto, Path], object]


def _inspect(target: str, model: onnx.ModelProto, _: Path) -> object:
    return fa_compiler.inspect(model, target)  # type: ignore[arg-type]


def _optimize(target: str, model: onnx.ModelProto, folder: Path) -> object:
    return fa_compiler.optimize(model, folder / "fused.onnx", target)  # type: ignore[arg-type]


def _in_place(model: onnx.ModelProto, _: Path) -> object:
    return fa_compiler.optimize(model, in_place_caches=True)


def _graph(model: onnx.ModelProto, _: Path) -> object:
    return fa_compiler.graph(model)


def _page(model: onnx.ModelProto, _: Path) -> object:
    result = fa_compiler.optimize(model)
    assert isinstance(result.model, onnx.ModelProto)
    return page(Drawn.of(result.report, load(model), result.model))


def _inputs(model: onnx.ModelProto, _: Path) -> object:
    return random_inputs(model, "the model")


def _shard(model: onnx.ModelProto, folder: Path) -> object:
    return fa_compiler.shard(model, folder / "ranks", 2)


def _plan(model: onnx.ModelProto, folder: Path) -> object:
    onnx.save(model, folder / "model.onnx")
    return fa_compiler.plan(folder / "model.onnx", folder / "model.plan")


def _atc(model: onnx.ModelProto, folder: Path) -> object:
    fixed = onnx.ModelProto()
    fixed.CopyFrom(model)
    for info in fixed.graph.input:
        for dim in info.type.tensor_type.shape.dim:
            if dim.dim_param:
                dim.dim_value = ROWS
    return fa_compiler.compile_for_atc(fixed, folder / "atc", "Ascend910B2")


TARGETS = ("ort", "ascend", "onnx", "contrib")
ENTRIES: dict[str, Entry] = {
    **{f"inspect {target}": partial(_inspect, target) for target in TARGETS},
    **{f"optimize {target}": partial(_optimize, target) for target in TARGETS},
    "in-place caches": _in_place,
    "graph": _graph,
    "page": _page,
    "inputs": _inputs,
    "shard": _shard,
    "plan": _plan,
    "atc": _atc,
}
