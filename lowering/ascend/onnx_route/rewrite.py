"""A node that is rewritten: the argument of the rules of `changes`, `expansions` and `forms`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
import onnx_ir as ir

from fa_compiler.lowering.ascend.onnx_route.errors import UnsupportedNode
from fa_compiler.passes.algebra.symbolic import Dim
from fa_compiler.passes.emit.build import Builder
from fa_compiler.passes.emit.operators import AttrValue
from fa_compiler.passes.ir.nodes import (
    float_attr,
    input_of,
    int_attr,
    ints_attr,
    is_read,
    text_attr,
)
from fa_compiler.passes.ir.surgery import replace_value

INT64 = ir.DataType.INT64


@dataclass(frozen=True)
class Rewrite:
    """A node, the builder of its graph, and the opset of its current form."""

    node: ir.Node
    builder: Builder
    source: int

    def fail(self, reason: str) -> NoReturn:
        """Raise UnsupportedNode."""
        raise UnsupportedNode(reason)

    # -- the node -----------------------------------------------------------------------------

    def given(self, index: int) -> ir.Value | None:
        """An input, or None if it is absent."""
        return input_of(self.node, index)

    def needed(self, index: int) -> ir.Value:
        """An input. Raises UnsupportedNode if it is absent."""
        value = input_of(self.node, index)
        return self.fail(f"its input {index} is absent") if value is None else value

    def text(self, name: str, default: str) -> str:
        """A string attribute, or `default`."""
        return text_attr(self.node, name, default)

    def number(self, name: str, default: float) -> float:
        """A float attribute, or `default`."""
        return float_attr(self.node, name, default)

    def dtype(self, value: ir.Value) -> ir.DataType:
        """The element type of a value. Raises UnsupportedNode if it is unknown."""
        found = self.builder.info.dtype(value)
        if found is None:
            self.fail(f"the type of '{value.name}' is not known; run ONNX's shape inference")
        return found

    def shape(self, value: ir.Value) -> tuple[Dim, ...]:
        """The symbolic shape of a value. Raises UnsupportedNode if the rank is unknown."""
        found = self.builder.info.shape(value)
        if found is None:
            self.fail(f"the rank of '{value.name}' is not known; run ONNX's shape inference")
        return found

    def axis(self, name: str, default: int, rank: int) -> int:
        """An axis attribute as a number from 0 on. Raises UnsupportedNode for an axis outside the
        rank."""
        axis = int_attr(self.node, name, default)
        if not -rank <= axis < rank:
            self.fail(f"{name} is {axis} for a tensor of rank {rank}")
        return axis % rank

    def is_read(self, index: int) -> bool:
        """Whether the output is present and read."""
        return index < len(self.node.outputs) and is_read(self.node.outputs[index])

    def numbers(self, name: str, default: Sequence[int] = ()) -> list[int]:
        """An attribute with a list of integers, or `default`."""
        return ints_attr(self.node, name, default)

    # -- the replacement ----------------------------------------------------------------------

    def op(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        like: ir.Value,
        attrs: Mapping[str, AttrValue] | None = None,
    ) -> ir.Value:
        """A new node whose result has the type of `like`."""
        return self.builder.op(op_type, inputs, attrs, dtype=self.dtype(like))

    def scalar(self, number: float, like: ir.Value) -> ir.Value:
        """A number as a constant of the type of `like`."""
        return self.builder.constant(np.array(number, dtype=self.dtype(like).numpy()), "number")

    def write(self, **values: Sequence[int]) -> None:
        """Set attributes that are lists of integers."""
        for name, numbers in values.items():
            self.node.attributes[name] = ir.AttrInt64s(name, list(numbers))

    def drop(self, *names: str) -> None:
        """Leave out attributes."""
        for name in names:
            self.node.attributes.pop(name, None)

    def replace(self, *values: ir.Value) -> None:
        """Replace the node's outputs by `values`, and remove the node."""
        for output, value in zip(self.node.outputs, values, strict=False):
            self.replace_output(output, value)
        left = list(filter(is_read, self.node.outputs[len(values) :]))
        if left:
            self.fail(f"its output '{left[0].name}' has no counterpart")
        assert self.node.graph is not None
        self.node.graph.remove(self.node, safe=True)

    def replace_output(self, output: ir.Value, value: ir.Value) -> None:
        """Replace one output by a value. The node stays."""
        is_output = output.is_graph_output()
        replace_value(output, self.builder.alias(value) if is_output else value, rename=is_output)


RewriteRule = Callable[[Rewrite], None]
"""Rewrites a node, in place or by `replace`. Raises UnsupportedNode if it cannot."""
