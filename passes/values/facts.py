"""What is known of a model before anything in it is matched."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import onnx_ir as ir

from fa_compiler.passes.answer.options import Options
from fa_compiler.passes.ops.context import Shape
from fa_compiler.passes.values.bounds import Bounds
from fa_compiler.passes.values.positions import Positions
from fa_compiler.passes.values.shapes import ShapeInfo
from fa_compiler.passes.values.value_sets import ValueSets


@dataclass(frozen=True)
class Facts:
    """Shapes and types, the numbers that tensors can hold, and what the user asked for: made once
    for each model.

    Every analysis answers for one value at a time and remembers its answers. `sets` holds without
    any assumption. A plan that rests on `binary_sets`, those of runs whose masks hold only 0 and 1,
    has to say so.
    """

    info: ShapeInfo
    sets: ValueSets
    bounds: Bounds
    options: Options
    binary_sets: ValueSets
    _positions: dict[Shape, Positions] = field(default_factory=dict, repr=False)

    @staticmethod
    def of(info: ShapeInfo, options: Options) -> Facts:
        """The facts of the model that has these shapes."""
        return Facts(
            info, ValueSets(info), Bounds(info), options, ValueSets(info, binary_masks=True)
        )

    def largest(self, value: ir.Value) -> float:
        """An upper bound of the absolute values of all elements that are not NaN; infinity where
        none is known."""
        numbers = self.sets.of(value)
        if numbers is not None:
            return max(map(abs, numbers), default=0.0)
        interval = self.bounds.unless_nan(value)
        if interval is None:
            return math.inf
        return max(map(abs, interval))

    def positions(self, shape: Shape) -> Positions:
        """The reader of masks of this shape. It remembers what it reads, for all layers of the
        model."""
        return self._positions.setdefault(shape, Positions(self.info, shape))
