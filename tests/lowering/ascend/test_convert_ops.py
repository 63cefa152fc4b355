"""Operators one by one: an ONNX model of one node, as a GE graph through the file and back, gives equal outputs.

The two tables are written apart, so that a wrong attribute, axis or order of inputs in one shows here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as rt
import pytest
from onnx import helper

from fa_compiler.lowering.ascend.air import parse, serialise
from fa_compiler.lowering.ascend.convert import UnmappedError, to_ge
from tools.ge_to_onnx import from_ge

F = np.float32
I64 = np.int64
RNG = np.random.default_rng(7)


def draw(*shape: int, dtype: Any = F) -> np.ndarray:
    """Numbers of both signs and of moderate size."""
    if np.dtype(dtype).kind == "f":
        return RNG.standard_normal(shape).astype(dtype)
    if np.dtype(dtype).kind == "b":
        return RNG.integers(0, 2, shape).astype(bool)
    return RNG.integers(0 if np.dtype(dtype).kind == "u" else -9, 10, shape).astype(dtype)


@dataclass(frozen=True)
class Case:
    """One node: its inputs (None: absent), those that are constants by their places, attributes and opset.

    `open` leaves the sizes of the other inputs open; `expects` are GE operators that must be among those made.
    """

    op_type: str
    inputs: Sequence[np.ndarray | None]
    constants: Sequence[int] = ()
    attrs: Mapping[str, Any] = field(default_factory=dict)
    opset: int = 20
    outputs: int = 1
    domain: str = ""
    expects: Sequence[str] = ()
    open: bool = False
    label: str = ""

    def __str__(self) -> str:
        words = [self.op_type, str(self.opset), *(f"{k}={v}" for k, v in self.attrs.items()), self.label]
        return "-".join(str(word) for word in words if word) + ("-open" if self.open else "")

    def model(self) -> onnx.ModelProto:
        """The model of one node."""
        names = ["" if array is None else f"i{place}" for place, array in enumerate(self.inputs)]
        given, weights = [], []
        for place, array in enumerate(self.inputs):
            if array is None:
                continue
            if place in self.constants:
                weights.append(onnx.numpy_helper.from_array(array, names[place]))
                continue
            sizes = [f"d{place}_{axis}" for axis in range(array.ndim)] if self.open else array.shape
            kind = helper.np_dtype_to_tensor_dtype(array.dtype)
            given.append(helper.make_tensor_value_info(names[place], kind, sizes))
        outs = [f"o{place}" for place in range(self.outputs)]
        node = helper.make_node(self.op_type, names, outs, name="node", domain=self.domain or None, **self.attrs)
        results = [onnx.ValueInfoProto(name=name) for name in outs]
        graph = helper.make_graph([node], "g", given, results, weights)
        imports = [helper.make_opsetid("", self.opset)]
        imports += [helper.make_opsetid(self.domain, 1)] if self.domain else []
        return helper.make_model(graph, opset_imports=imports, ir_version=8)


def run(model: onnx.ModelProto, feeds: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Outputs of a model in ONNX Runtime, inputs by position."""
    options = rt.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = rt.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = rt.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]
    made: list[np.ndarray] = session.run(None, dict(zip(names, feeds, strict=True)))
    return made


X = draw(2, 3, 4)
IMAGE = draw(2, 4, 7, 6)
UNIT = np.abs(draw(2, 3)) / 10
BOTH = draw(2, 3, dtype=bool), draw(2, 3, dtype=bool)


def ints(*numbers: int) -> np.ndarray:
    return np.array(numbers, I64)


def words(*texts: str) -> list[str]:
    return [word for text in texts for word in text.split()]


UNARY = [
    Case(op, [X])
    for op in words(
        "Abs Ceil Cos Erf Exp Floor Neg Reciprocal Relu Round Sigmoid Sign Sin Softplus Softsign Tanh Cosh Sinh Tan",
        "Asinh Atan Identity HardSwish Mish Elu LeakyRelu HardSigmoid Selu Celu Gelu IsNaN IsInf Shape Size Flatten",
    )
]
UNARY += [Case(op, [np.abs(X) + 1]) for op in ("Sqrt", "Log", "Acosh")]
UNARY += [Case(op, [np.tanh(X)]) for op in ("Asin", "Acos", "Atanh")]
BINARY = [Case(op, [X, draw(3, 1)]) for op in words("Add Sub Mul Div Less LessOrEqual Greater GreaterOrEqual Equal")]
BINARY += [Case(op, [draw(2, 3, dtype=I64), draw(3, dtype=I64)]) for op in words("Add Sub Mul Equal Less Max Min")]
BINARY += [Case(op, BOTH) for op in ("And", "Or", "Xor", "Equal")]
BINARY += [
    Case("Max", [X, draw(4), draw(3, 1)]),
    Case("Min", [X]),
    Case("Sum", [X, X + 1, X * 2], expects=["AddN"]),
    Case("Sum", [X, draw(4), draw(3, 1)], expects=["Add"]),
    Case("Mean", [X, draw(4)]),
    Case("Div", [draw(9, dtype=I64), np.array([2, -2, 3] * 3)], label="towards zero", expects=["TruncateDiv"]),
    Case("Mod", [draw(9, dtype=I64), np.array([4, -4, 3] * 3)], expects=["FloorMod"]),
    Case("Mod", [draw(9, dtype=I64), np.array([4, -4, 3] * 3)], attrs={"fmod": 1}, expects=["Mod"]),
    Case("Mod", [draw(9), np.array([1.5, -1.5, 0.7] * 3, F)], attrs={"fmod": 1}),
    Case("Mod", [draw(9, dtype=np.int8), np.array([4, -4, 3] * 3, np.int8)]),
    Case("Pow", [X, np.array(2.0, F)], [1], expects=["Square"]),
    Case("Pow", [X, np.array(3, I64)], [1], expects=["Pow"]),
    Case("Pow", [np.abs(X), draw(4)]),
    Case("Where", [draw(2, 1, dtype=bool), draw(2, 3), draw(3)]),
    Case("PRelu", [X, draw(3, 1)]),
    Case("Clip", [X, np.array(-0.5, F), np.array(0.4, F)], [1, 2]),
    Case("Clip", [X, None, np.array(0.4, F)], [2]),
    Case("Clip", [X, np.array(0.5, F), np.array(-0.5, F)], label="crossed"),
    Case("Clip", [X], attrs={"min": -0.5, "max": 0.25}, opset=6),
    Case("IsInf", [np.array([1, np.inf, -np.inf, np.nan], F)], attrs={"detect_negative": 0}),
    Case("IsInf", [np.array([1, np.inf, -np.inf, np.nan], F)], attrs={"detect_positive": 0, "detect_negative": 0}),
    Case("LeakyRelu", [X], attrs={"alpha": 0.3}),
    Case("Elu", [X], attrs={"alpha": 0.3}),
    Case("HardSigmoid", [X], attrs={"alpha": 0.3, "beta": 0.25}),
    Case("Gelu", [X], attrs={"approximate": "tanh"}),
    Case("Gelu", [X], domain="com.microsoft"),
    Case("QuickGelu", [X], domain="com.microsoft", attrs={"alpha": 1.7}),
    Case("FastGelu", [X, draw(4)], domain="com.microsoft"),
    Case("BiasGelu", [X, draw(4)], domain="com.microsoft"),
    Case("Dropout", [X, np.array(0.5, F), np.array(False)], [1, 2]),
    Case("Dropout", [X, np.array(0, F), np.array(True)], [1, 2], label="ratio 0"),
    Case("CastLike", [X, draw(1, dtype=I64)]),
]
BINARY += [
    Case("Cast", [X * 3], attrs={"to": getattr(onnx.TensorProto, kind)})
    for kind in words("FLOAT16 INT8 INT16 INT32 INT64 DOUBLE BOOL")
]
BINARY += [Case("Cast", [BOTH[0]], attrs={"to": onnx.TensorProto.UINT8})]
BINARY += [
    Case(op, [np.array([5, 6, 12], np.int32), np.array([3, 10, 4], np.int32)])
    for op in ("BitwiseAnd", "BitwiseOr", "BitwiseXor")
]

LAYOUT = [
    Case("Reshape", [X, ints(0, -1)], [1]),
    Case("Reshape", [X, ints(0, -1)], [1], open=True),
    Case("Reshape", [X, ints(-1, 0, 2)], [1], open=True),
    Case("Reshape", [X, ints(0, 0, -1)], open=False, label="computed"),
    Case("Reshape", [X, ints(4, 6)], open=False, label="computed"),
    Case("Reshape", [draw(0, 3), ints(3, 0)], [1], attrs={"allowzero": 1}),
    Case("Flatten", [X], attrs={"axis": -1}),
    Case("Flatten", [X], attrs={"axis": 0}, open=True),
    Case("Flatten", [X], attrs={"axis": 2}, open=True),
    Case("Flatten", [draw(0, 2, 3)], open=True, label="empty"),
    Case("Transpose", [X]),
    Case("Transpose", [X], attrs={"perm": [1, 2, 0]}),
    Case("Squeeze", [draw(1, 2, 1, 3)], opset=11),
    Case("Squeeze", [draw(1, 2, 1, 3)], attrs={"axes": [-2]}, opset=11),
    Case("Squeeze", [draw(1, 2, 1, 3), ints(0)], [1]),
    Case("Squeeze", [draw(1, 2, 1, 3), ints(0)], expects=["SqueezeV3"]),
    Case("Unsqueeze", [X], attrs={"axes": [0, 4]}, opset=11),
    Case("Unsqueeze", [X, ints(-1, 1)], [1]),
    Case("Unsqueeze", [X, ints(-1)], expects=["UnsqueezeV3"]),
    Case("Shape", [X], attrs={"start": 1}, open=True),
    Case("Shape", [X], attrs={"start": -2, "end": -1}, open=True),
    Case("Shape", [X], attrs={"start": 2, "end": 1}, label="empty"),
    Case("Concat", [X, X + 1], attrs={"axis": -2}),
    Case("Concat", [X], attrs={"axis": 1}),
    Case("Split", [X], attrs={"axis": 1, "split": [1, 2]}, opset=11, outputs=2, expects=["SplitV"]),
    Case("Split", [X], attrs={"axis": -1}, opset=13, outputs=2, expects=["SplitD"]),
    Case("Split", [draw(7)], attrs={"num_outputs": 3}, opset=18, outputs=3, expects=["SplitV"]),
    Case("Split", [X, ints(1, 3)], [1], attrs={"axis": 2}, outputs=2),
    Case("Split", [X, ints(1, 3)], attrs={"axis": 2}, outputs=2, label="computed"),
    Case("Slice", [X, ints(1, -9), ints(99, 2), ints(2, 1)], [1, 2, 3]),
    Case("Slice", [X, ints(1), ints(-1)], [1, 2]),
    Case("Slice", [X, ints(-1), ints(np.iinfo(I64).min), ints(2), ints(-1)], [1, 2, 3, 4]),
    Case("Slice", [X, ints(-1), ints(np.iinfo(I64).min), ints(2), ints(-1)], [1, 2, 3, 4], open=True),
    Case("Slice", [X, ints(3), ints(0), ints(2), ints(-2)], [1, 2, 3, 4]),
    Case("Slice", [X, ints(1), ints(np.iinfo(I64).max), ints(-1), ints(2)], [1, 2, 3, 4], open=True),
    Case("Slice", [X, ints(0), ints(2), ints(1)], [3], label="computed"),
    Case("Slice", [X, ints(0), ints(2), ints(1)], [1, 3], label="computed end"),
    Case("Expand", [draw(3, 1), ints(2, 1, 4)], [1], expects=["BroadcastTo"]),
    Case("Expand", [draw(3, 4), ints(1, 1)], [1], label="shorter"),
    Case("Expand", [draw(2, 3, 4), ints(4)], [1], open=True, label="shorter"),
    Case("Expand", [draw(3, 1), ints(2, 1, 4)], label="computed"),
    Case("Tile", [X, ints(1, 2, 3)], [1]),
    Case("Pad", [X, ints(0, 1, 2, 0, 0, 1)], [1]),
    Case("Pad", [X, ints(0, 1, 2, 0, 0, 1), np.array(2.5, F)], [1, 2]),
    Case("Pad", [X, ints(0, -1, 2, 0, 0, -1)], [1]),
    Case("Pad", [X, ints(0, -1, 2, 0, 0, -1)], label="computed"),
    Case("Pad", [X, ints(1, 2), None, ints(-1)], [1, 3]),
    Case("Pad", [X, ints(1, 1), None, ints(1)], [3], label="computed"),
    Case("Pad", [X, ints(0, 1, 2, 0, 0, 1)], [1], attrs={"mode": "reflect"}),
    Case("Pad", [X, ints(0, 1, 2, 0, 0, 1)], [1], attrs={"mode": "edge"}),
    Case("Pad", [X], attrs={"pads": [0, 1, 2, 0, 0, 1], "value": 3.0}, opset=2),
]

GENERATE = [
    Case("ConstantOfShape", [ints(2, 3)], [0]),
    Case("ConstantOfShape", [ints(2, 3)], attrs={"value": onnx.numpy_helper.from_array(np.array([True]))}),
    Case("Range", [np.array(n, I64) for n in (1, 9, 3)], [0, 2]),
    Case("Range", [np.array(n, F) for n in (5, 1, -1.5)]),
    Case("Trilu", [X]),
    Case("Trilu", [X, np.array(-1, I64)], [1], attrs={"upper": 0}),
    Case("Trilu", [X, np.array(1, I64)], attrs={"upper": 1}, label="computed", expects=["SelectV2"]),
    Case("Trilu", [X, np.array(1, I64)], attrs={"upper": 0}, label="computed", open=True),
    Case("EyeLike", [draw(3, 4)], attrs={"k": 1}),
    Case("EyeLike", [draw(3, 4)], attrs={"k": -1, "dtype": onnx.TensorProto.INT64}, open=True),
    Case("OneHot", [np.array([0, -1, 2, 7, -4]), np.array(3, I64), draw(2)], [1]),
    Case("OneHot", [np.array([[0, -1], [2, 1]]), ints(4), draw(2)], attrs={"axis": 1}),
    Case("CumSum", [X, np.array(-1, I64)], [1], attrs={"reverse": 1}),
    Case("CumSum", [X, np.array(1, I64)], attrs={"exclusive": 1}),
    Case("ReverseSequence", [draw(4, 3, 2), np.array([1, 4, 2])], attrs={"time_axis": 0, "batch_axis": 1}),
    Case("ReverseSequence", [draw(3, 4, 2), np.array([1, 4, 2])], attrs={"time_axis": 1, "batch_axis": 0}, open=True),
]

INDEXING = [
    Case("Gather", [X, np.array([[0, -1], [1, 2]])], attrs={"axis": 1}, expects=["GatherV2"]),
    Case("Gather", [X, np.array(1, I64)], [1], attrs={"axis": -1}),
    Case("GatherElements", [X, np.array([[[0, -1, 1, 2]]])], attrs={"axis": 1}),
    Case("GatherElements", [X, np.array([[[0, -1, 1, 2]]])], attrs={"axis": 1}, open=True),
    Case("GatherND", [X, np.array([[0, 1], [-1, -2]])]),
    Case("GatherND", [X, np.array([[[0], [-1]], [[1], [0]]])], attrs={"batch_dims": 1}),
    Case("GatherND", [X, np.array([[[0], [-1]], [[1], [0]]])], attrs={"batch_dims": 1}, open=True),
    Case("ScatterElements", [X, np.array([[[0, -1, 1, 2]]]), draw(1, 1, 4)], attrs={"axis": 1}),
    Case("ScatterElements", [X, np.zeros((1, 2, 4), I64), draw(1, 2, 4)], attrs={"axis": 1, "reduction": "add"}),
    Case("ScatterElements", [X, np.zeros((1, 2, 4), I64), draw(1, 2, 4)], attrs={"axis": 1, "reduction": "max"}),
    Case("ScatterElements", [X, np.zeros((1, 2, 4), I64), draw(1, 2, 4)], attrs={"axis": 1, "reduction": "mul"}),
    Case("ScatterElements", [X, np.array([[[-1]]]), draw(1, 1, 1)], attrs={"reduction": "min"}, open=True),
    Case("ScatterElements", [BOTH[0], np.array([[0, 2]]), BOTH[1][:1, :2]], attrs={"axis": 1}),
    Case("ScatterND", [X, np.array([[0, 1], [-1, -1]]), draw(2, 4)]),
    Case("ScatterND", [X, np.array([[0], [0]]), draw(2, 3, 4)], attrs={"reduction": "add"}),
    Case("ScatterND", [X, np.array([[0], [0]]), draw(2, 3, 4)], attrs={"reduction": "max"}),
    Case("TopK", [X, ints(2)], [1], outputs=2),
    Case("TopK", [X, ints(2)], attrs={"axis": 1, "largest": 0}, outputs=2),
    Case("ArgMax", [X], attrs={"axis": 1}),
    Case("ArgMax", [np.array([[1, 2, 2]], F)], attrs={"axis": -1, "keepdims": 0}),
    Case("ArgMin", [X], attrs={"axis": 0, "keepdims": 0}),
    Case("NonZero", [draw(3, 4, dtype=bool)]),
]

LINEAR = [
    Case("MatMul", [draw(3, 4), draw(4, 2)], expects=["MatMulV2"]),
    Case("MatMul", [draw(5, 1, 3, 4), draw(2, 4, 2)], expects=["BatchMatMulV2"]),
    Case("MatMul", [draw(4), draw(2, 4, 3)]),
    Case("MatMul", [draw(2, 3, 4), draw(4)]),
    Case("MatMul", [draw(4), draw(4)]),
    Case("Gemm", [draw(3, 4), draw(4, 2), draw(2)]),
    Case("Gemm", [draw(4, 3), draw(2, 4), draw(1, 2)], attrs={"transA": 1, "transB": 1, "alpha": 0.5, "beta": 2.0}),
    Case("Gemm", [draw(3, 4), draw(4, 2)]),
    Case("FusedMatMul", [draw(2, 3, 4), draw(2, 5, 4)], attrs={"transB": 1, "alpha": 0.3}, domain="com.microsoft"),
    Case("FusedMatMul", [draw(2, 4, 3), draw(2, 4, 5)], attrs={"transA": 1}, domain="com.microsoft"),
]
LINEAR += [
    Case("Einsum", [draw(*sizes) for sizes in shapes], attrs={"equation": equation}, open=sizes_open)
    for equation, shapes in [
        ("bhid,bhjd->bhij", [(2, 3, 4, 5), (2, 3, 6, 5)]),
        ("bid,bhjd->hbij", [(2, 4, 5), (2, 3, 6, 5)]),
        ("ij,jk", [(3, 4), (4, 5)]),
        ("ij->ji", [(3, 4)]),
        ("ijk->j", [(3, 4, 2)]),
        ("i,j->ij", [(3,), (4,)]),
        ("abc,cde->abde", [(2, 3, 4), (4, 5, 2)]),
        ("...ij,...jk->...ik", [(2, 3, 4), (2, 4, 5)]),
        ("ij,jk,kl->il", [(2, 3), (3, 4), (4, 2)]),
        ("bij,bij->b", [(2, 3, 4), (2, 3, 4)]),
    ]
    for sizes_open in (False, True)
]
LINEAR += [
    Case("Softmax", [X]),
    Case("Softmax", [X], attrs={"axis": 1}),
    Case("Softmax", [X], attrs={"axis": 1}, opset=11),
    Case("Softmax", [X], opset=11, open=True),
    Case("Softmax", [X], attrs={"axis": -1}, opset=11),
    Case("LogSoftmax", [X], attrs={"axis": 0}),
    Case("LayerNormalization", [X, draw(4), draw(4)]),
    Case("LayerNormalization", [X, draw(4)], attrs={"epsilon": 0.1}),
    Case("LayerNormalization", [X, draw(3, 4), draw(3, 4)], attrs={"axis": 1}),
    Case("LayerNormalization", [X, draw(4), draw(1)], attrs={"axis": 1}, label="broadcast"),
    Case("LayerNormalization", [X, draw(4), draw(4)], outputs=3, expects=["LayerNormV3"]),
    Case("RMSNormalization", [X, draw(4)], opset=23, attrs={"epsilon": 0.1}),
    Case("RMSNormalization", [X, draw(3, 4)], opset=23, attrs={"axis": 1}),
    Case("BatchNormalization", [IMAGE, draw(4), draw(4), draw(4), np.abs(draw(4))], range(1, 5)),
    Case("InstanceNormalization", [IMAGE, draw(4), draw(4)], attrs={"epsilon": 0.01}),
    Case("GroupNormalization", [IMAGE, draw(4), draw(4)], attrs={"num_groups": 2}, opset=21),
    Case("SkipLayerNormalization", [X, X + 1, draw(4), draw(4), draw(4)], domain="com.microsoft"),
]

_SUMS = "ReduceLogSumExp ReduceSumSquare"
REDUCE = [
    Case(op, [np.abs(X) + 0.5], attrs=attrs, opset=opset)
    for op in words("ReduceSum ReduceMean ReduceMax ReduceMin ReduceProd ReduceL1 ReduceL2 ReduceLogSum", _SUMS)
    for attrs, opset in [({"axes": [-1], "keepdims": 0}, 11), ({}, 11), ({"keepdims": 0}, 20)]
]
REDUCE += [
    Case("ReduceSum", [X, ints(0, -1)], [1], attrs={"keepdims": 0}, opset=13),
    Case("ReduceMean", [X, ints(1)], [1], opset=18),
    Case("ReduceSum", [X, ints(1)], opset=18, label="computed"),
    Case("ReduceSum", [X], attrs={"noop_with_empty_axes": 1}, opset=18),
    Case("ReduceMax", [draw(3, 4, dtype=bool), ints(1)], [1], opset=20),
    Case("ReduceMin", [draw(3, 4, dtype=bool), ints(1)], [1], attrs={"keepdims": 0}, opset=20),
    Case("ReduceSum", [np.array(3, F)], opset=11, label="scalar"),
    Case("ReduceSumSquare", [X, np.zeros(0, I64)], [1], attrs={"noop_with_empty_axes": 1}, opset=18),
]

WINDOWS = [
    Case("Conv", [IMAGE, draw(6, 4, 3, 2), draw(6)], attrs={"pads": [1, 0, 2, 1], "strides": [2, 1]}),
    Case("Conv", [IMAGE, draw(4, 1, 3, 3)], attrs={"group": 4, "dilations": [1, 2]}),
    Case("Conv", [IMAGE, draw(6, 4, 3, 2)], attrs={"auto_pad": "SAME_UPPER", "strides": [2, 2]}),
    Case("Conv", [IMAGE, draw(6, 4, 2, 2)], attrs={"auto_pad": "SAME_LOWER"}),
    Case("Conv", [IMAGE, draw(6, 4, 3, 2)], attrs={"auto_pad": "VALID"}),
    Case("Conv", [draw(2, 4, 9), draw(6, 4, 3), draw(6)], attrs={"pads": [1, 2], "strides": [2]}),
    Case("Conv", [draw(1, 2, 4, 5, 6), draw(3, 2, 2, 3, 2)], attrs={"pads": [1, 0, 2, 0, 1, 2]}),
    Case("MaxPool", [IMAGE], attrs={"kernel_shape": [3, 2], "strides": [2, 1], "pads": [1, 0, 0, 1]}),
    Case("AveragePool", [IMAGE], attrs={"kernel_shape": [3, 2], "pads": [1, 0, 0, 1]}),
    Case("AveragePool", [IMAGE], attrs={"kernel_shape": [3, 2], "pads": [1, 0, 0, 1], "count_include_pad": 1}),
    Case("MaxPool", [draw(2, 3, 8)], attrs={"kernel_shape": [2], "strides": [2]}),
    Case("GlobalAveragePool", [IMAGE]),
    Case("GlobalMaxPool", [IMAGE]),
    Case("Resize", [IMAGE, None, np.array([1, 1, 2, 2], F)], [2], attrs={"mode": "nearest"}),
    Case("Resize", [IMAGE, None, None, ints(2, 4, 5, 9)], [3], attrs={"mode": "linear"}),
    Case("Resize", [IMAGE, None, None, ints(2, 4, 5, 9)], [3], attrs={"mode": "cubic", "cubic_coeff_a": -0.5}),
    Case("Resize", [IMAGE, np.array([1, 1, 2, 1.5], F)], [1], opset=10),
    Case("Resize", [IMAGE, np.array([1, 1, 0.5, 1.5], F)], attrs={"mode": "linear"}, opset=10),
    Case("Upsample", [IMAGE, np.array([1, 1, 2, 1.5], F)], [1], opset=9),
    Case("Upsample", [IMAGE], attrs={"scales": [1.0, 1.0, 2.0, 3.0], "mode": "linear"}, opset=7),
]

OTHER = [
    Case("QuantizeLinear", [X * 40, np.array(0.1, F), np.array(3, np.uint8)], [1, 2]),
    Case("QuantizeLinear", [X * 40, np.array([0.1, 0.2, 0.3], F), np.zeros(3, np.int8)], [1, 2], attrs={"axis": 1}),
    Case("DequantizeLinear", [draw(2, 3, dtype=np.int8), UNIT[0], np.array([1, 2, 3], np.int8)], attrs={"axis": 1}),
    Case("DequantizeLinear", [draw(2, 3, dtype=np.int8), np.array(0.25, F)]),
    Case("DequantizeLinear", [draw(2, 3, dtype=np.int32), np.array(0.25, F)]),
    Case("MatMulInteger", [draw(2, 3, dtype=np.uint8), draw(3, 4, dtype=np.int8), np.array(3, np.uint8)], [2]),
    Case("MatMulInteger", [draw(2, 3, dtype=np.uint8), draw(3, 4, dtype=np.uint8), None, draw(4, dtype=np.uint8)]),
    Case("DynamicQuantizeLinear", [X], outputs=3),
    Case("DynamicQuantizeLinear", [np.zeros((2, 3), F)], outputs=3, label="zeros"),
    Case("MeanVarianceNormalization", [IMAGE]),
    Case("RotaryEmbedding", [draw(1, 2, 3, 4), draw(5, 2), draw(5, 2), np.array([[0, 1, 4]])], opset=23),
    Case("Attention", [draw(1, 2, 3, 4), draw(1, 2, 5, 4), draw(1, 2, 5, 4)], opset=23, attrs={"is_causal": 1}),
    Case("HardSwish", [X], opset=14),
    Case("Range", [np.array(n, np.int32) for n in (0, 4, 1)], opset=11),
]

CASES = [*UNARY, *BINARY, *LAYOUT, *GENERATE, *INDEXING, *LINEAR, *REDUCE, *WINDOWS, *OTHER]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_an_operator_goes_to_ge_and_back(case: Case) -> None:
    model = case.model()
    feeds = [array for place, array in enumerate(case.inputs) if array is not None and place not in case.constants]
    expected = run(model, feeds)

    graph = to_ge(ir.from_proto(model))
    made = {op.type for op in graph.root.ops}
    assert made >= set(case.expects)
    back = from_ge(parse(serialise(graph)[0]))
    onnx.shape_inference.infer_shapes(back, check_type=True, strict_mode=True)
    actual = run(back, feeds)

    assert len(actual) == len(expected)
    for want, got in zip(expected, actual, strict=True):
        assert (want.dtype, want.shape) == (got.dtype, got.shape)
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


_E4M3 = onnx.TensorProto.FLOAT8E4M3FN
_STATISTICS = [draw(4), draw(4), draw(4), np.abs(draw(4))]
DECLINED = [
    (Case("Cast", [X], attrs={"to": _E4M3, "saturate": 0}), "numbers that float8 cannot hold"),
    (Case("Add", [IMAGE, draw(4)], attrs={"broadcast": 1, "axis": 1}, opset=6), "for an axis of the first"),
    (Case("Dropout", [X], opset=6), "drops values"),
    (Case("Dropout", [X, np.array(0.5, F), np.array(True)], [1, 2], label="training"), "drops values"),
    (Case("BatchNormalization", [IMAGE, *_STATISTICS], opset=6), "statistics of the batch"),
    (Case("BatchNormalization", [IMAGE, *_STATISTICS], attrs={"spatial": 0}, opset=7), "for each position"),
    (Case("Squeeze", [draw(1, 3), ints()], [1]), "an empty list of axes"),
    (Case("Slice", [X, ints(0), ints(2), ints(0), ints(0)], [1, 2, 3, 4]), "a step is 0"),
    (Case("Split", [draw(5)], attrs={"num_outputs": 4}, opset=18, outputs=4), "size 5 has no 4 equal parts"),
    (Case("Resize", [IMAGE, np.array([1, 1, 0.5, 1], F)], [1], opset=10), "for an axis that shrinks"),
    (Case("Resize", [IMAGE, np.array([1, 1, 2, 1], F)], opset=10, label="computed"), "for an axis that shrinks"),
    (Case("Pad", [X, ints(1, 1)], [1]), "do not match"),
    (Case("Einsum", [draw(2, 3)], attrs={"equation": "ij->k"}), "do not match"),
    (Case("GatherND", [X, np.array([[0]])], attrs={"batch_dims": 3}), "do not match"),
]


@pytest.mark.parametrize(("case", "words"), DECLINED, ids=str)
def test_what_an_old_or_odd_node_means_besides_is_declined(case: Case, words: str) -> None:
    with pytest.raises(UnmappedError, match=words) as caught:
        to_ge(ir.from_proto(case.model()))
    assert [node.name for node in caught.value.nodes] == ["node"]


@pytest.mark.parametrize("slope", [draw(4), draw(1)], ids=["channels", "one"])
def test_slopes_were_for_channels_before_they_broadcast(slope: np.ndarray) -> None:
    """ONNX Runtime has no PRelu of opset 6, so that its result is computed here."""
    graph = to_ge(ir.from_proto(Case("PRelu", [IMAGE, slope], opset=6).model()))
    (actual,) = run(from_ge(parse(serialise(graph)[0])), [IMAGE, slope])
    np.testing.assert_allclose(actual, np.where(IMAGE < 0, slope.reshape(-1, 1, 1) * IMAGE, IMAGE), rtol=1e-6)


def test_old_inputs_align_at_the_end_without_an_axis() -> None:
    graph = to_ge(ir.from_proto(Case("Add", [X, draw(4)], attrs={"broadcast": 1}, opset=6).model()))
    assert [op.type for op in graph.root.ops if op.type not in ("Data", "NetOutput")] == ["Add"]


def test_a_matrix_of_a_tensor_of_unknown_rank() -> None:
    model = Case("Flatten", [X], attrs={"axis": 2}).model()
    model.graph.input[0].type.tensor_type.ClearField("shape")
    (expected,) = run(model, [X])
    (actual,) = run(from_ge(parse(serialise(to_ge(ir.from_proto(model)))[0])), [X])
    np.testing.assert_array_equal(actual, expected)


def test_of_no_truth_values_none_is_true_and_all_are() -> None:
    empty = np.zeros((2, 0), bool)
    for op_type, value in (("ReduceMax", False), ("ReduceMin", True)):
        model = Case(op_type, [empty, ints(1)], [1], attrs={"keepdims": 0}).model()
        (actual,) = run(from_ge(parse(serialise(to_ge(ir.from_proto(model)))[0])), [empty])
        assert actual.tolist() == [value] * 2
