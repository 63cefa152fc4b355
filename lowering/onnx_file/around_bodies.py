"""The bodies of the operators around attention: ONNX functions that compute what Ascend's operator
computes.

The library has no kernels of these operators. A file that holds such nodes therefore holds their
functions, in the domain of the nodes and under their names, so that ONNX Runtime and every other
tool runs them.

A body computes in float32 and rounds once, as the operator does; AddRmsNorm rounds the sum and the
normalised row, too, as on A2 and A3. In opset 15 and later the results have the type of the first
input (CastLike). In opset 13 and 14, which have no CastLike, the body is one of float32. It is the
body of calls as passes/around makes them: gamma and beta are given and are vectors, AddLayerNorm
has no bias, ClippedSwiglu has no groups and runs along the last axis, RotaryPositionEmbedding has
no mode 2 and no matrix, and ApplyRotaryPosEmb has the mode half.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import pi, sqrt
from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto, helper

from fa_compiler.lowering.onnx_file.bodies import OLDEST_OPSET
from fa_compiler.lowering.onnx_file.writer import CAST_LIKE, FunctionWriter, reference
from fa_compiler.op_registry import get

AXES_AS_INPUT = 18
"""The first opset in which ReduceMean has its axes as an input, and Split its number of outputs as
an attribute."""


def has_body(op_type: str) -> bool:
    """Is there a body of this operator of the registry?"""
    return op_type in _WRITERS


def bodies_of(op_types: Iterable[str], opset: int) -> list[onnx.FunctionProto]:
    """The functions of these operators in a model of this opset, in alphabetical order; none in an
    opset without."""
    if opset < OLDEST_OPSET:
        return []
    return [_body(name, opset) for name in sorted(set(op_types)) if has_body(name)]


def _body(op_type: str, opset: int) -> onnx.FunctionProto:
    spec, writer = get(op_type), _Writer(opset=opset)
    _WRITERS[op_type](writer)
    outputs = [_OUTPUTS.get((op_type, name), name) for name in spec.output_names]
    return writer.function(op_type, opset, spec.attr_names, outputs, spec.input_names)


@dataclass
class _Writer(FunctionWriter):
    """Writes the nodes of one body."""

    opset: int = field(kw_only=True)

    def like(self, name: str, first: str, out: str) -> str:
        """A tensor in the type of an input."""
        if self.opset < CAST_LIKE:
            return self.op("Identity", name, out=out)
        return self.op("CastLike", name, first, out=out)

    def halves(self, name: str, axis: str | None) -> tuple[str, str]:
        """The halves of a tensor along the axis that an attribute of the node names, or along the
        last one."""
        parts = self.new("first"), self.new("second")
        node = helper.make_node("Split", [name], parts)
        if self.opset >= AXES_AS_INPUT:
            node.attribute.append(helper.make_attribute("num_outputs", 2))
        last = helper.make_attribute("axis", -1)
        node.attribute.append(reference("axis", axis, AttributeProto.INT) if axis else last)
        self.nodes.append(node)
        return parts

    def pairs(self, name: str) -> tuple[str, str]:
        """The elements of even and of odd places of a tensor along the last axis."""
        end, last, two = self.ints(np.iinfo(np.int64).max), self.ints(-1), self.ints(2)
        even, odd = (self.op("Slice", name, self.ints(first), end, last, two) for first in (0, 1))
        return even, odd

    def flag(self, name: str) -> str:
        """Whether an integer attribute of the function is not 0, as a boolean scalar."""
        return self.op("Cast", self.attribute(name, AttributeProto.INT), to=onnx.TensorProto.BOOL)

    def reciprocal(self, x: str, out: str) -> str:
        """1 / sqrt(mean(x^2) + epsilon) along the last axis, which stays."""
        floor = self.op("Add", self.mean(self.op("Mul", x, x)), self.attribute("epsilon"))
        return self.op("Reciprocal", self.op("Sqrt", floor), out=out)

    def mean(self, x: str, out: str = "") -> str:
        """The mean along the last axis, which stays."""
        if self.opset >= AXES_AS_INPUT:
            return self.op("ReduceMean", x, self.ints(-1), out=out, keepdims=1)
        return self.op("ReduceMean", x, out=out, axes=[-1], keepdims=1)

    def gelu(self, x: str, tanh: str) -> str:
        """Gelu of a tensor of float32, by tanh where this is true."""
        cube = self.op("Mul", self.op("Mul", x, x), x)
        inner = self.op("Add", x, self.op("Mul", cube, self.number(0.044715)))
        curve = self.op("Tanh", self.op("Mul", inner, self.number(sqrt(2 / pi))))
        share = self.op(
            "Where", tanh, curve, self.op("Erf", self.op("Mul", x, self.number(sqrt(0.5))))
        )
        return self.op(
            "Mul", self.op("Mul", x, self.number(0.5)), self.op("Add", share, self.number(1.0))
        )

    def layer_norm(self, x: str, first: str) -> None:
        """LayerNorm of rows of float32 with gamma and beta, in the type of an input."""
        centred = self.op("Sub", x, self.mean(x, "mean"))
        scaled = self.op(
            "Mul", self.op("Mul", centred, self.reciprocal(centred, "rstd")), self.wide("gamma")
        )
        self.like(self.op("Add", scaled, self.wide("beta")), first, "y")


def _rms_norm(writer: _Writer) -> None:
    x = writer.wide("x")
    normalised = writer.op("Mul", x, writer.reciprocal(x, "rstd"))
    writer.like(writer.op("Mul", normalised, writer.wide("gamma")), "x", "y")


def _add_rms_norm(writer: _Writer) -> None:
    total = writer.wide(writer.op("Add", "x1", "x2", out="x"))
    normalised = writer.like(
        writer.op("Mul", total, writer.reciprocal(total, "rstd")), "x1", "normalised"
    )
    scaled = writer.op("Mul", writer.wide(normalised), writer.wide("gamma"))
    writer.like(scaled, "x1", "y")


def _layer_norm(writer: _Writer) -> None:
    writer.layer_norm(writer.wide("x"), "x")


def _add_layer_norm(writer: _Writer) -> None:
    """The sum is not rounded before it is normalised."""
    total = writer.op("Add", writer.wide("x1"), writer.wide("x2"))
    writer.like(total, "x1", "x")
    writer.layer_norm(total, "x1")


def _swi_glu(writer: _Writer) -> None:
    gate, up = writer.halves(writer.wide("x"), "dim")
    swish = writer.op("Mul", gate, writer.op("Sigmoid", gate))
    writer.like(writer.op("Mul", swish, up), "x", "y")


def _ge_glu(writer: _Writer) -> None:
    """Gelu is rounded before it is multiplied. Where chooses what the attributes say."""
    first, second = writer.halves("x", "dim")
    left, tanh = (writer.flag(name) for name in ("activate_left", "approximate"))
    gelu = writer.gelu(writer.wide(writer.op("Where", left, first, second)), tanh)
    up = writer.op("Where", left, second, first)
    writer.op("Mul", writer.like(gelu, "x", "gelu"), up, out="y")


def _gelu(writer: _Writer) -> None:
    """TfIdfVectorizer counts how often its input is the word: in opset 13 no other operator
    compares texts."""
    word = writer.op(
        "Reshape", writer.attribute("approximate", AttributeProto.STRING), writer.ints(1)
    )
    counted = {"max_gram_length": 1, "min_gram_length": 1, "max_skip_count": 0, "ngram_counts": [0]}
    attrs: dict[str, Any] = {
        **counted,
        "mode": "TF",
        "ngram_indexes": [0],
        "pool_strings": [b"tanh"],
    }
    count = writer.op("TfIdfVectorizer", word, **attrs)
    tanh = writer.op("Cast", count, to=onnx.TensorProto.BOOL)
    writer.like(writer.gelu(writer.wide("x"), tanh), "x", "y")


def _clipped_swiglu(writer: _Writer) -> None:
    """The elements of even and of odd places along the last axis, or the halves along it: an
    attribute chooses them."""
    wide, paired = writer.wide("x"), writer.flag("interleaved")
    parts = zip(writer.pairs(wide), writer.halves(wide, None), strict=True)
    gate, up = (writer.op("Where", paired, *each) for each in parts)
    limit, alpha, bias = (writer.attribute(name) for name in ("limit", "alpha", "bias"))
    gate = writer.op("Min", gate, limit)
    up = writer.op("Max", writer.op("Min", up, limit), writer.op("Neg", limit))
    swish = writer.op("Mul", gate, writer.op("Sigmoid", writer.op("Mul", gate, alpha)))
    writer.like(writer.op("Mul", swish, writer.op("Add", up, bias)), "x", "y")


def _rotary(writer: _Writer) -> None:
    """Each operation is rounded to the type of x, as on A2 and A3 in float32 and float16. The mode
    says what a pair is."""
    even, odd = writer.pairs("x")
    mode = writer.attribute("mode", AttributeProto.INT)
    is_pair, is_sorted = (writer.op("Equal", mode, writer.scalar(number)) for number in (1, 3))
    x = writer.op("Where", is_sorted, writer.op("Concat", even, odd, axis=-1), "x")
    first, second = writer.halves(x, None)
    halves = writer.op("Concat", writer.op("Neg", second), first, axis=-1)
    columns = [
        writer.op("Unsqueeze", part, writer.ints(-1)) for part in (writer.op("Neg", odd), even)
    ]
    pairs = writer.op("Reshape", writer.op("Concat", *columns, axis=-1), writer.op("Shape", "x"))
    rotated = writer.op("Where", is_pair, pairs, halves)
    writer.op("Add", writer.op("Mul", x, "cos"), writer.op("Mul", rotated, "sin"), out="y")


def _rotary_pair(writer: _Writer) -> None:
    """Each operation is rounded to the type of the operands, as on A2 and A3 in float32 and
    float16."""
    for name in ("query", "key"):
        first, second = writer.halves(name, None)
        turned = writer.op("Concat", writer.op("Neg", second), first, axis=-1)
        out = _OUTPUTS["ApplyRotaryPosEmb", name]
        writer.op("Add", writer.op("Mul", name, "cos"), writer.op("Mul", turned, "sin"), out=out)


_OUTPUTS = {("ApplyRotaryPosEmb", name): f"{name}_turned" for name in ("query", "key")}
"""The outputs of functions that have other names than those of the operator. An operator that works
in place gives an output the name of an input, which a function cannot."""
_WRITERS = {
    "RmsNorm": _rms_norm,
    "AddRmsNorm": _add_rms_norm,
    "LayerNormV4": _layer_norm,
    "AddLayerNorm": _add_layer_norm,
    "SwiGlu": _swi_glu,
    "GeGluV2": _ge_glu,
    "GeluV2": _gelu,
    "ClippedSwiglu": _clipped_swiglu,
    "RotaryPositionEmbedding": _rotary,
    "ApplyRotaryPosEmb": _rotary_pair,
}
