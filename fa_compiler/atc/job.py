"""What a route is given, and what it gives back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir

from fa_compiler.atc.shapes import Size
from fa_compiler.lowering.ascend.graph import Op, Weight
from fa_compiler.model_files.reading import Loaded
from fa_compiler.op_registry.soc import SocVersion
from fa_compiler.passes import Report


@dataclass(frozen=True)
class Request:
    """What the user asked for. `sizes` are the sizes of inputs by name, `gears` the groups of --dynamic_dims."""

    soc: SocVersion
    route: str = "air"
    cann: str | None = None
    precision: str = "origin"
    sizes: Mapping[str, Sequence[Size]] = field(default_factory=dict)
    gears: Sequence[Sequence[int]] = ()
    single_op: bool = False
    assume: Sequence[str] = ()


@dataclass(frozen=True)
class Job:
    """A model that is optimised for the product, to be written into `folder`, which nobody else sees.

    The external tensors of `proto` hold absolute paths as `location`; `loaded` is what it was made of, `report` what
    became of its attention.
    """

    request: Request
    loaded: Loaded
    proto: onnx.ModelProto
    report: Report
    folder: Path

    def model(self) -> ir.Model:
        """A fresh IR of the optimised model; weights stay on disk."""
        return ir.from_proto(self.proto)


@dataclass(frozen=True)
class Input:
    """An input of the written model, by the name ATC knows it by, with the sizes it may have."""

    name: str
    dtype: str
    sizes: tuple[Size, ...]


@dataclass(frozen=True)
class Built:
    """What a route wrote: the model's file (relative to the folder) and ATC's number for its format (1 .air, 5 ONNX).

    `fused` are the fused operators as GE operators, for --single-op, `constants` the values of their inputs that are
    known, by the operator's name and the input's; `details` goes into the report as it is, `notes`
    are sentences for the user.
    """

    model: str
    framework: int
    inputs: Sequence[Input]
    fused: Sequence[Op] = ()
    details: Mapping[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()
    constants: Mapping[str, Mapping[str, Weight]] = field(default_factory=dict)


Route = Callable[[Job], Built]
"""Writes a job's model. Raises InputError for a model the route cannot take; the folder is then thrown away."""
