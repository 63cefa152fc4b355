"""Which integer inputs are numbers that a quantised model computes with, and which numbers they may
hold.

An input may hold numbers if all of its readers compute with numbers, or pass the input on to such
readers: all numbers of an integer type of 8 or 16 bits, and numbers up to 1000 of a type of 32
bits.

    number  := DequantizeLinear(x) | Cast(x) to floats, of 8 and 16 bits | an operand of
               MatMulInteger, ConvInteger, of QLinearMatMul and the like | a cache of
               GroupQueryAttention
    passed  := the operators that move elements, Cast to other integers, Add, Sub, Mul

Other integers may be flags, indices, lengths or masks, for which this module knows no numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import onnx

from fa_compiler.passes.ops.movers import MOVES
from fa_compiler.protos.subgraphs import all_nodes

CONTRIB = "com.microsoft"
NUMBERS: Mapping[tuple[str, str], tuple[int, ...]] = {
    ("", "DequantizeLinear"): (0,),
    ("", "MatMulInteger"): (0, 1),
    ("", "ConvInteger"): (0, 1),
    ("", "QLinearMatMul"): (0, 3),
    ("", "QLinearConv"): (0, 3),
    (CONTRIB, "DequantizeLinear"): (0,),
    (CONTRIB, "MatMulIntegerToFloat"): (0, 1),
    (CONTRIB, "DynamicQuantizeMatMul"): (1,),
    (CONTRIB, "QGemm"): (0, 3),
    (CONTRIB, "QAttention"): (0, 1),
    (CONTRIB, "QLinearAdd"): (0, 3),
    (CONTRIB, "QLinearMul"): (0, 3),
    (CONTRIB, "QLinearWhere"): (1, 4),
    (CONTRIB, "QLinearSigmoid"): (0,),
    (CONTRIB, "QLinearSoftmax"): (0,),
    (CONTRIB, "QLinearLeakyRelu"): (0,),
    (CONTRIB, "GroupQueryAttention"): (3, 4),
}
"""The inputs of operators that are numbers to compute with."""
PASSING: Mapping[str, int | None] = {**dict.fromkeys((*MOVES, "Split", "Pad"), 0)} | dict.fromkeys(
    ("Concat", "Add", "Sub", "Mul")
)
"""The operators that pass their first input on, or all of them."""
SHORT = tuple(map(np.dtype, ("int8", "uint8", "int16", "uint16")))
LARGEST = 1000
"""Of integers of 32 bits, whose scales are small."""
_INTEGERS = frozenset(
    (
        *(
            onnx.TensorProto.INT8,
            onnx.TensorProto.UINT8,
            onnx.TensorProto.INT16,
            onnx.TensorProto.UINT16,
        ),
        *(
            onnx.TensorProto.INT32,
            onnx.TensorProto.INT64,
            onnx.TensorProto.INT4,
            onnx.TensorProto.UINT4,
        ),
    )
)


def number_range(dtype: np.dtype) -> tuple[int, int]:
    """The least and the largest number for an input of integers that a model computes with."""
    return (
        (int(np.iinfo(dtype).min), int(np.iinfo(dtype).max))
        if dtype in SHORT
        else (-LARGEST, LARGEST)
    )


class Readers:
    """What reads each value of a model, in its branches and loop bodies as well."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        self._of: dict[str, list[tuple[onnx.NodeProto, int]]] = {}
        for node in all_nodes(graph.node):
            for place, name in enumerate(node.input):
                self._of.setdefault(name, []).append((node, place))

    def computes_with(self, name: str, dtype: np.dtype) -> bool:
        """Is an input of this type, which something reads, nothing but numbers to compute with?"""
        if dtype not in SHORT and dtype != np.int32:
            return False
        found, known, pending = False, {name}, [name]
        while pending:
            for node, place in self._of.get(pending.pop(), ()):
                domain = "" if node.domain == "ai.onnx" else node.domain
                if place in NUMBERS.get((domain, node.op_type), ()) or (
                    _to_floats(node) and dtype in SHORT
                ):
                    found = True
                elif not domain and (
                    _to_integers(node) or PASSING.get(node.op_type, -1) in (place, None)
                ):
                    new = set(node.output) - known
                    known |= new
                    pending.extend(new)
                else:
                    return False
        return found


def _cast_to(node: onnx.NodeProto) -> Iterable[int]:
    return (attr.i for attr in node.attribute if attr.name == "to" and node.op_type == "Cast")


def _to_floats(node: onnx.NodeProto) -> bool:
    floats = (
        onnx.TensorProto.FLOAT,
        onnx.TensorProto.FLOAT16,
        onnx.TensorProto.BFLOAT16,
        onnx.TensorProto.DOUBLE,
    )
    return any(dtype in floats for dtype in _cast_to(node))


def _to_integers(node: onnx.NodeProto) -> bool:
    return any(dtype in _INTEGERS for dtype in _cast_to(node))
