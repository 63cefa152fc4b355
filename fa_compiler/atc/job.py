"""The argument and the result of a route."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir

from fa_compiler.atc.request import Request
from fa_compiler.atc.sizes import Size, Sizes
from fa_compiler.errors import InputError
from fa_compiler.lowering.ascend.air import AirError
from fa_compiler.lowering.ascend.convert import UnmappedError, to_ge
from fa_compiler.lowering.ascend.graph import Op, Weight
from fa_compiler.lowering.ascend.infer.graph import infer_model
from fa_compiler.lowering.onnx_file import restore_graph_operators
from fa_compiler.model_files.reading import LoadedModel
from fa_compiler.passes import Report


@dataclass(frozen=True)
class Job:
    """An optimised model, and the new folder that its route fills.

    `proto` is the optimised model; the `location` of its external tensors is an absolute path.
    `loaded` is the model before the optimisation, and `report` tells what became of its attention.
    """

    request: Request
    loaded: LoadedModel
    proto: onnx.ModelProto
    report: Report
    folder: Path

    def model(self) -> ir.Model:
        """A fresh IR of the optimised model, without functions of fused nodes; weights stay on
        disk."""
        model = ir.from_proto(self.proto)
        restore_graph_operators(model)
        return model

    def complete_model(self) -> ir.Model:
        """The same, in which joined weights have their content, too. The ONNX writers take it from
        the parts."""
        model = self.model()
        if self.loaded.weights is not None:
            self.loaded.weights.give_joined(model)
        return model

    def size_error(self, node: str, sentence: str) -> InputError:
        """The error for a node that cannot take the sizes of its inputs; `sentence` tells the
        reason."""
        reason = f"{node}: {sentence}; give sizes that it takes with --input-shape"
        return InputError(f"{self.loaded.name} cannot run with these sizes: {reason}")


@dataclass(frozen=True)
class Input:
    """An input of the written model: its name for ATC, its type, and the sizes that it may have."""

    name: str
    dtype: str
    sizes: tuple[Size, ...]


@dataclass(frozen=True)
class RouteResult:
    """The result of a route.

    `model` is the model's file, relative to the folder. `framework` is ATC's number of its format:
    1 for .air, 5 for ONNX. `fused` are the fused operators as GE operators, for --single-op.
    `constants` are the known values of their inputs, by the name of the operator and of the input.
    `details` is copied into the report, and `notes` are sentences for the user. `cluster` are ATC's
    options in the place of --model, if there is a model for each rank; `model` then gives only the
    name of the result. `before` are the steps that the user takes in the folder before ATC runs,
    each as a sentence with a small first letter and without a full stop.
    """

    model: str
    framework: int
    inputs: Sequence[Input]
    fused: Sequence[Op] = ()
    details: Mapping[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()
    constants: Mapping[str, Mapping[str, Weight]] = field(default_factory=dict)
    cluster: Sequence[str] = ()
    before: Sequence[str] = ()


def check_inference(job: Job, sizes: Sizes) -> None:
    """Raise InputError for sizes of the inputs with which the model cannot run, by GE's shape
    inference where the model can be converted to a GE graph at all."""
    try:
        errors = infer_model(to_ge(job.complete_model(), input_shapes=dict(sizes))).errors
    except (UnmappedError, AirError, ValueError):
        return
    if errors:
        raise job.size_error(*errors[0])


Route = Callable[[Job], RouteResult]
"""Writes the model of a job. Raises InputError for a model that the route cannot take; the folder
is then deleted."""
