"""Models of one norm or gated activation, fused for Ascend and compared with the original in ONNX Runtime."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx.parser
import onnxruntime as ort
from onnx import numpy_helper

import fa_compiler
from fa_compiler.op_registry import DOMAIN
from fa_compiler.passes import Report
from fa_compiler.passes.answer.report import Around

Array = npt.NDArray[Any]
NUMPY = {onnx.TensorProto.FLOAT: np.float32, onnx.TensorProto.FLOAT16: np.float16, onnx.TensorProto.DOUBLE: np.float64}
SIZES = {"B": 2, "S": 3}
CLOSE = {np.dtype(np.float32): 2e-6, np.dtype(np.float16): 4e-3}
"""How far results may be apart, relative to the largest: roots and exponentials differ in the last bits of float32; of
float16 it is a few roundings of 2^-11."""


def parse(
    body: str,
    inputs: str = "float[B,S,8] x",
    outputs: str = "float[B,S,8] y",
    opset: int = 20,
    initializers: str = "",
) -> onnx.ModelProto:
    """A model from ONNX text. w and, in float16, g are vectors of 8; e and, in float16, small are numbers."""
    weights = f"float[8] w = {{1,2,3,-1,0.5,0.25,-2,1}}, float e = {{1e-5}}{', ' if initializers else ''}{initializers}"
    text = f'<ir_version: 8, opset_import: ["": {opset}, "com.microsoft": 1]> g ({inputs}) => ({outputs}) <{weights}>'
    proto = onnx.parser.parse_model(f"{text} {{ {body} }}")
    for name, array in (("g", np.array([1, 2, 3, -1, 0.5, 0.25, -2, 1])), ("small", np.array(0.001))):
        if re.search(rf"[( ]{name}[,)]", body):
            proto.graph.initializer.append(numpy_helper.from_array(array.astype(np.float16), name))
    return proto


def fused(proto: onnx.ModelProto, **options: Any) -> tuple[onnx.ModelProto, Report]:
    """The model for Ascend, and the report."""
    result = fa_compiler.optimize(proto, target="ascend", **options)
    assert isinstance(result.model, onnx.ModelProto)
    return result.model, result.report


def operators(proto: onnx.ModelProto) -> list[str]:
    """The operators of Ascend in a model, in its order."""
    return [node.op_type for node in proto.graph.node if node.domain == DOMAIN]


def attributes(proto: onnx.ModelProto) -> dict[str, Any]:
    """The attributes of the only operator of Ascend in a model."""
    (node,) = (node for node in proto.graph.node if node.domain == DOMAIN)
    return {entry.name: onnx.helper.get_attribute_value(entry) for entry in node.attribute}


def others(proto: onnx.ModelProto) -> list[str]:
    """The other operators in a model, but constants."""
    return [node.op_type for node in proto.graph.node if node.domain != DOMAIN and node.op_type != "Constant"]


def feeds(proto: onnx.ModelProto, seed: int = 0, odd: bool = True) -> dict[str, Array]:
    """Random inputs. If `odd`, the first rows hold zeros, what overflows squared, an infinity and NaN."""
    rng = np.random.default_rng(seed)
    found = {}
    for value in proto.graph.input:
        kind = value.type.tensor_type
        shape = tuple(SIZES.get(dim.dim_param, dim.dim_value) for dim in kind.shape.dim)
        array = (2 * rng.standard_normal(shape)).astype(NUMPY[kind.elem_type])
        if odd and array.ndim > 1:
            rows = array.reshape(-1, shape[-1])
            rows[0] = 0
            if array.dtype == np.float32:
                rows[1, 0] = 1e25
            if len(rows) > 3:
                rows[2, 1 % shape[-1]], rows[3, 2 % shape[-1]] = np.inf, np.nan
        found[value.name] = array
    return found


def run(proto: onnx.ModelProto, inputs: Mapping[str, Array]) -> list[Array]:
    """The outputs in ONNX Runtime without its optimisations. It needs no library: the nodes have functions."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return list(session.run(None, dict(inputs)))


def assert_equal(proto: onnx.ModelProto, other: onnx.ModelProto, odd: bool = True) -> None:
    """Both models give the same: NaN and infinities at the same places, and numbers that are close."""
    onnx.checker.check_model(other, full_check=True)
    inputs = feeds(proto, odd=odd)
    for one, two in zip(run(proto, inputs), run(other, inputs), strict=True):
        assert one.dtype == two.dtype
        numbers = np.where(np.isfinite(one), one, 0).astype(np.float64)
        limit = CLOSE.get(one.dtype, 0.0) * max(1.0, float(np.abs(numbers).max()))
        np.testing.assert_allclose(two.astype(np.float64), one.astype(np.float64), rtol=0, atol=limit)


def only_line(report: Report) -> Around:
    """The only line of a report."""
    (line,) = report.around
    return line
